//! Networks: added, listed and removed. Exports use one each.

use std::sync::Arc;

use super::check::Check;
use super::daemon::Daemon;
use super::maps::{ExportEntry, Maps};
use super::spec::{ExportSpec, NetInfo, NetSpec};
use crate::backend::net::Tap;
use crate::error::{Error, Result};

/// A network that exports can use.
pub(super) struct NetEntry {
    pub(super) spec: NetSpec,
    pub(super) tap: Arc<Tap>,
}

impl Daemon {
    /// Opens a network.
    pub fn net_add(&self, spec: NetSpec) -> Result<()> {
        spec.check()?;
        self.state().check_vacant_net(&spec)?;
        // Without the lock: these are calls of the system.
        let tap = Arc::new(Tap::open(&spec.ifname, spec.queues.unwrap_or(1))?);
        let mut state = self.state();
        state.check_vacant_net(&spec)?;
        state.nets.insert(spec.name.clone(), Arc::new(NetEntry { spec, tap }));
        Ok(())
    }

    /// Closes a network that no export uses.
    pub fn net_remove(&self, name: &str) -> Result<()> {
        let removed = {
            let mut state = self.state();
            if let Some(user) = state.net_user(name) {
                return Err(Error::busy(format!(
                    "network {name} is in use by export {user}; remove that first"
                )));
            }
            state.nets.remove(name).ok_or_else(|| no_net(name))?
        };
        drop(removed);
        Ok(())
    }

    /// All networks, by name.
    pub fn nets(&self) -> Vec<NetInfo> {
        let nets: Vec<_> = {
            let state = self.state();
            state.nets.values().map(|net| (net.clone(), state.net_user(&net.spec.name))).collect()
        };
        nets.into_iter().map(|(net, export)| info(&net, export)).collect()
    }
}

impl Maps {
    /// Enters an export of a network that is to be made, if it may be.
    pub(super) fn reserve_net(&mut self, spec: &ExportSpec, net: &str) -> Result<Arc<NetEntry>> {
        self.check_up()?;
        let entry = self.nets.get(net).cloned().ok_or_else(|| no_net(net))?;
        self.check_vacant(spec)?;
        if let Some(user) = self.net_user(net) {
            return Err(Error::busy(format!(
                "network {net} is in use by export {user}; give each export a network of its own, or remove that one"
            )));
        }
        self.exports.insert(spec.name.clone(), ExportEntry::of_net(net));
        Ok(entry)
    }

    /// The export of a network.
    fn net_user(&self, net: &str) -> Option<String> {
        let mut users = self.exports.iter().filter(|(_, e)| e.net.as_deref() == Some(net));
        users.next().map(|(name, _)| name.clone())
    }

    /// Whether a network may be added.
    fn check_vacant_net(&self, spec: &NetSpec) -> Result<()> {
        self.check_up()?;
        let NetSpec { name, ifname, .. } = spec;
        if self.nets.contains_key(name) {
            return Err(Error::exists(format!("there is a network {name} already")));
        }
        // The kernel would give our own taps to us again.
        match self.nets.values().find(|net| net.spec.ifname == *ifname) {
            Some(net) => {
                let other = &net.spec.name;
                Err(Error::busy(format!("interface {ifname} is network {other}'s already; use that")))
            }
            None => Ok(()),
        }
    }
}

fn info(net: &NetEntry, export: Option<String>) -> NetInfo {
    let tap = &net.tap;
    NetInfo {
        spec: net.spec.clone(),
        made: tap.made(),
        multi_queue: tap.multi_queue(),
        open_queues: tap.open_queues(),
        mtu: tap.mtu().ok(),
        export,
        counters: tap.counters(),
    }
}

fn no_net(name: &str) -> Error {
    Error::not_found(format!("there is no network {name}; 'net list' shows those that are there"))
}
