//! One network: a tap or a switch.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use vshunt_net::Switch;
use vshunt_tap::{self as tap, Options, Tap};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{NetInfo, NetKind, NetSpec};
use vshunt_vhost_user::accounts;

/// A network of the daemon.
pub(super) struct NetEntry {
    pub(super) spec: NetSpec,
    pub(super) net: Net,
}

/// The device of a network.
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
    /// Opens the network that `spec` describes. `spec` was checked.
    pub(super) fn open(spec: NetSpec) -> Result<Self> {
        let net = match spec.kind {
            NetKind::Tap => Net::Tap(Arc::new(open(&spec)?)),
            NetKind::Switch => Net::Switch(Arc::new(Switch::new(&spec.name))),
        };
        Ok(Self { spec, net })
    }

    /// Returns the queue pairs that an export can have at most. None: the limit of the kernel.
    pub(super) fn queues_max(&self) -> Option<u16> {
        let given = || match &self.net {
            Net::Tap(tap) if self.spec.fd.is_some() => Some(tap.queues_max()),
            _ => None,
        };
        self.spec.queues.or_else(given)
    }

    /// Describes the network, which `exports` use.
    pub(super) fn info(&self, exports: Vec<String>) -> NetInfo {
        match &self.net {
            Net::Tap(tap) => NetInfo {
                spec: NetSpec {
                    ifname: Some(tap.name().to_owned()),
                    steering: Some(tap.steering()),
                    ..self.spec.clone()
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
                spec: self.spec.clone(),
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
}

/// Opens the tap that `spec` describes, or takes a passed descriptor. `spec` was checked.
fn open(spec: &NetSpec) -> Result<Tap> {
    let options = Options {
        netns: spec.netns.clone(),
        steering: spec.steering.unwrap_or_default(),
        address: spec.address.map(|mac| mac.0),
        owner: spec.owner.as_deref().map(accounts::user).transpose()?,
        group: spec.group.as_deref().map(accounts::group).transpose()?,
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

/// Takes a descriptor that was passed to this process.
fn take(fd: i32) -> Result<OwnedFd> {
    // SAFETY: the descriptor is borrowed only for this check. If the number is not open, fcntl
    // fails with EBADF.
    let open = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    open.map_err(|e| Error::io(format!("descriptor {fd} is not open; pass one of a tap"), e.into()))?;
    // SAFETY: the descriptor is open, and the user passed it to this process for this network only.
    // The command line accepts only numbers that were open before the process opened anything, each
    // once, and never that of its own socket.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
