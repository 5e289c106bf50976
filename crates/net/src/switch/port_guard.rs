//! A port of a switch that is removed when its last user is gone.

use std::sync::Arc;

use vshunt_types::spec::PortInfo;

use super::Switch;
use super::port::Port;

/// See the module.
pub struct PortGuard {
    /// The switch.
    pub switch: Arc<Switch>,
    /// The port.
    pub port: Arc<Port>,
}

impl PortGuard {
    /// Describes the port as it is now.
    pub fn info(&self) -> PortInfo {
        let Self { switch, port } = self;
        PortInfo {
            number: port.index,
            state: port.state(switch.now_s()),
            mac_filter: port.mac_filter(),
            addresses: switch.addresses_of(port),
            mac_limit: port.mac_limit(),
            mtu: port.mtu(),
            loops: port.loops(),
        }
    }
}

impl Drop for PortGuard {
    fn drop(&mut self) {
        self.switch.leave(self.port.index);
    }
}
