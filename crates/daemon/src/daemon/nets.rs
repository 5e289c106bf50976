//! Commands for networks. A tap may have one export, and a switch several.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{NetAddress, NetInfo, NetSpec, Steering};

use super::Daemon;
use crate::check::Check;
use crate::net::{Net, NetEntry};
use crate::registry::no_net;

impl Daemon {
    /// Opens a network.
    ///
    /// # Errors
    /// The name is in use, the description is wrong, or the device cannot be opened.
    pub fn net_add(&self, spec: NetSpec) -> Result<()> {
        spec.check()?;
        self.state().check_vacant_net(&spec)?;
        // Without the lock, because these are system calls.
        let entry = NetEntry::open(spec)?;
        let mut state = self.state();
        state.check_vacant_net(&entry.spec)?;
        state.nets.insert(entry.spec.name.clone(), Arc::new(entry));
        Ok(())
    }

    /// Closes a network that no export uses.
    ///
    /// # Errors
    /// There is no such network, or it is in use.
    pub fn net_remove(&self, name: &str) -> Result<()> {
        let removed = {
            let mut state = self.state();
            if let Some(user) = state.net_users(name).into_iter().next() {
                return Err(Error::busy(format!(
                    "network {name} is in use by export {user}; remove that first"
                )));
            }
            state.nets.remove(name).ok_or_else(|| no_net(name))?
        };
        drop(removed);
        Ok(())
    }

    /// Changes how frames are distributed over queues, for a network that may be in use.
    ///
    /// # Errors
    /// There is no such network, or it does not support that.
    pub fn net_set(&self, name: &str, steering: Steering) -> Result<()> {
        let entry = self.state().nets.get(name).cloned().ok_or_else(|| no_net(name))?;
        match &entry.net {
            Net::Tap(tap) => tap.set_steering(steering),
            Net::Switch(_) => Err(Error::unsupported(format!(
                "network {name} is a switch, which sends a flow where it came from; steering is of type=tap"
            ))),
        }
    }

    /// Returns the MAC addresses in the table of a switch, about 8,192 at most.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` for a tap, for which the kernel keeps no such table.
    pub fn net_addresses(&self, name: &str) -> Result<Vec<NetAddress>> {
        let entry = self.state().nets.get(name).cloned().ok_or_else(|| no_net(name))?;
        match &entry.net {
            Net::Switch(switch) => Ok(switch.stations()),
            Net::Tap(_) => Err(Error::unsupported(format!(
                "network {name} is a tap, and only a network of type=switch knows addresses; 'bridge fdb show' has those of a \
                 bridge that the tap is a port of"
            ))),
        }
    }

    /// Returns all networks, sorted by name.
    pub fn nets(&self) -> Vec<NetInfo> {
        let nets: Vec<_> = {
            let state = self.state();
            state.nets.values().map(|net| (net.clone(), state.net_users(&net.spec.name))).collect()
        };
        nets.into_iter().map(|(net, exports)| net.info(exports)).collect()
    }
}
