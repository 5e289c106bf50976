//! Networks: added, listed and removed. Exports use one each; a switch may have several exports.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use vshunt_net::tap::{self, Options};
use vshunt_net::{Switch, Tap};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, NetAddress, NetInfo, NetKind, NetSpec, Steering};

use super::check::Check;
use super::daemon::Daemon;
use super::prepared::Backend;
use super::registry::{ExportEntry, NETS_MAX, Registry};

/// Where names of users and groups are.
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// A network that exports can use.
pub(super) struct NetEntry {
    pub(super) spec: NetSpec,
    pub(super) net: Net,
}

/// What a network is.
#[derive(Clone)]
pub(super) enum Net {
    Tap(Arc<Tap>),
    Switch(Arc<Switch>),
}

impl Net {
    pub(super) fn tap(&self) -> Option<&Arc<Tap>> {
        match self {
            Self::Tap(tap) => Some(tap),
            Self::Switch(_) => None,
        }
    }
}

impl NetEntry {
    /// Queue pairs that an export can have at most; none: as many as the kernel lets.
    pub(super) fn queues_max(&self) -> Option<u16> {
        let given = || match &self.net {
            Net::Tap(tap) if self.spec.fd.is_some() => Some(tap.queues_max()),
            _ => None,
        };
        self.spec.queues.or_else(given)
    }
}

impl Daemon {
    /// Opens a network.
    pub fn net_add(&self, spec: NetSpec) -> Result<()> {
        spec.check()?;
        self.state().check_vacant_net(&spec)?;
        // Without the lock: these are calls of the system.
        let net = match spec.kind {
            NetKind::Tap => Net::Tap(Arc::new(open(&spec)?)),
            NetKind::Switch => Net::Switch(Arc::new(Switch::new(&spec.name))),
        };
        let mut state = self.state();
        state.check_vacant_net(&spec)?;
        state.nets.insert(spec.name.clone(), Arc::new(NetEntry { spec, net }));
        Ok(())
    }

    /// Closes a network that no export uses.
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

    /// Changes which queue a frame comes to, of a network that may be in use.
    pub fn net_set(&self, name: &str, steering: Steering) -> Result<()> {
        let entry = self.state().nets.get(name).cloned().ok_or_else(|| no_net(name))?;
        match &entry.net {
            Net::Tap(tap) => tap.set_steering(steering),
            Net::Switch(_) => Err(Error::unsupported(format!(
                "network {name} is a switch, which sends a flow where it came from; steering is of type=tap"
            ))),
        }
    }

    /// The addresses that a switch knows the ports of, some 8,192 at most.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` for a tap, behind which the kernel keeps no such list.
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

    /// All networks, by name.
    pub fn nets(&self) -> Vec<NetInfo> {
        let nets: Vec<_> = {
            let state = self.state();
            state.nets.values().map(|net| (net.clone(), state.net_users(&net.spec.name))).collect()
        };
        nets.into_iter().map(|(net, exports)| info(&net, exports)).collect()
    }
}

impl Registry {
    /// Enters an export of networks that is to be made, if it may be. Returns what it is to serve.
    pub(super) fn reserve_nets(&mut self, spec: &ExportSpec) -> Result<Backend> {
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

    /// A network that one more export can use.
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

    /// The exports of a network.
    fn net_users(&self, net: &str) -> Vec<String> {
        let users = self.exports.iter().filter(|(_, e)| e.nets.iter().any(|name| name == net));
        users.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a network may be added.
    fn check_vacant_net(&self, spec: &NetSpec) -> Result<()> {
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
        // The kernel would give our own taps to us again.
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

/// Opens or adopts what `spec`, which was checked, asks for.
fn open(spec: &NetSpec) -> Result<Tap> {
    let options = Options {
        netns: spec.netns.clone(),
        steering: spec.steering.unwrap_or_default(),
        address: spec.address.map(|mac| mac.0),
        owner: spec.owner.as_deref().map(|name| id("user", USERS, name)).transpose()?,
        group: spec.group.as_deref().map(|name| id("group", GROUPS, name)).transpose()?,
        persist: spec.persist.unwrap_or(false),
    };
    match (&spec.ifname, &spec.fd) {
        (Some(ifname), _) => Tap::open_with(ifname, spec.queues.unwrap_or(1), &options),
        (None, fds) => {
            let fds = tap::parse_fds(fds.as_deref().unwrap_or_default())?;
            let fds = fds.into_iter().map(take).collect::<Result<_>>()?;
            Tap::from_fds(fds, &options)
        }
    }
}

/// A descriptor that was passed to this process.
fn take(fd: i32) -> Result<OwnedFd> {
    // SAFETY: borrowed for this check only; fcntl of a number that is not open fails with EBADF.
    let open = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    open.map_err(|e| Error::io(format!("descriptor {fd} is not open; pass one of a tap"), e.into()))?;
    // SAFETY: it is open, and the user passed it to this process to be this network's own: control lets through numbers that
    // were open before we opened anything, each once, and none over its socket.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number of a user or group, which may be one already.
fn id(what: &str, path: &str, name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::io(format!("cannot look for {what} {name} in {path}"), e))?;
    // name:password:number:…
    let mut lines = text.lines().map(|line| line.split(':'));
    let number =
        lines.find_map(|mut line| if line.next()? == name { line.nth(1)?.parse().ok() } else { None });
    number.ok_or_else(|| {
        Error::not_found(format!("there is no {what} {name} in {path}; give one that is, or a number"))
    })
}

fn info(net: &NetEntry, exports: Vec<String>) -> NetInfo {
    match &net.net {
        Net::Tap(tap) => NetInfo {
            spec: NetSpec {
                ifname: Some(tap.name().to_owned()),
                steering: Some(tap.steering()),
                ..net.spec.clone()
            },
            made: tap.made(),
            multi_queue: tap.multi_queue(),
            open_queues: tap.open_queues(),
            mtu: tap.mtu().ok(),
            exports,
            addresses: None,
            counters: tap.counters(),
        },
        Net::Switch(switch) => NetInfo {
            spec: net.spec.clone(),
            made: true,
            multi_queue: true,
            open_queues: switch.queues(),
            mtu: None,
            exports,
            addresses: Some(switch.addresses()),
            counters: None,
        },
    }
}

fn no_net(name: &str) -> Error {
    Error::not_found(format!("there is no network {name}; 'net list' shows those that are there"))
}
