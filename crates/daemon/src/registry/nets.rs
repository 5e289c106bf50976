//! The networks of the registry, and exports of networks.

use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, NetSpec};

use super::{ExportEntry, NETS_MAX, Registry, no_net};
use crate::export::Backend;
use crate::net::{Net, NetEntry};

impl Registry {
    /// Reserves the name of a new export of networks, if it may be made. Returns its backend.
    pub(crate) fn reserve_nets(&mut self, spec: &ExportSpec) -> Result<Backend> {
        self.check_up()?;
        let names: Vec<String> = spec.net.iter().chain(&spec.tap).cloned().collect();
        let entries: Vec<_> = names.iter().map(|name| self.vacant_net(name)).collect::<Result<_>>()?;
        self.check_vacant(spec)?;
        let wrong = |name: &str, why: &str| {
            Err(Error::invalid(format!("export {}: network {name} is a {why}", spec.name)))
        };
        let backend = match &entries[..] {
            [net] => Backend::Net(net.net.clone(), net.queues_max()),
            [net, tap] => match (&net.net, &tap.net) {
                (Net::Switch(switch), Net::Tap(taps)) => {
                    Backend::Uplink(taps.clone(), switch.clone(), tap.queues_max())
                }
                (Net::Tap(_), _) => return wrong(&names[0], "tap; give net=NAME of a switch"),
                (_, Net::Switch(_)) => return wrong(&names[1], "switch; give tap=NAME of a tap"),
            },
            _ => unreachable!("checked by Check"),
        };
        self.exports.insert(spec.name.clone(), ExportEntry::of_nets(names));
        Ok(backend)
    }

    /// Returns a network that can have one more export.
    fn vacant_net(&self, net: &str) -> Result<Arc<NetEntry>> {
        let entry = self.nets.get(net).cloned().ok_or_else(|| no_net(net))?;
        match (&entry.net, self.net_users(net).first()) {
            (Net::Tap(_), Some(user)) => Err(Error::busy(format!(
                "network {net} is in use by export {user}; give each export a network of its own, remove that one, or join \
                 them by a network of type=switch"
            ))),
            _ => Ok(entry),
        }
    }

    /// Returns the exports of a network.
    pub(crate) fn net_users(&self, net: &str) -> Vec<String> {
        let users = self.exports.iter().filter(|(_, e)| e.nets.iter().any(|name| name == net));
        users.map(|(name, _)| name.clone()).collect()
    }

    /// Checks that a network may be added.
    pub(crate) fn check_vacant_net(&self, spec: &NetSpec) -> Result<()> {
        self.check_up()?;
        let NetSpec { name, ifname, netns, .. } = spec;
        if self.nets.contains_key(name) {
            return Err(Error::exists(format!("there is a network {name} already")));
        }
        if self.nets.len() >= NETS_MAX {
            return Err(Error::limit(format!(
                "there are {NETS_MAX} networks already, which is the most; remove one with 'net remove NAME'"
            )));
        }
        // The kernel would open the daemon's own taps again.
        let same = |net: &&Arc<NetEntry>| net.spec.ifname == *ifname && net.spec.netns == *netns;
        match (ifname, self.nets.values().find(same)) {
            (Some(ifname), Some(net)) => {
                let other = &net.spec.name;
                Err(Error::busy(format!("interface {ifname} is network {other}'s already; use that")))
            }
            _ => Ok(()),
        }
    }
}
