//! The state of an export of any kind while it is served.

use vshunt_fuse::Fuse;
use vshunt_fuse::abi;
use vshunt_nbd_server::NbdServer;
use vshunt_net::switch::Uplink;
use vshunt_types::spec::{MountInfo, NetQueueCounters, PortInfo};

use super::queues::ExportQueues;
use vshunt_vhost_user::VhostUser;

/// The state of an export while it is served.
pub(crate) struct Served {
    pub(crate) frontend: Frontend,
    pub(crate) queues: ExportQueues,
    /// Why the kernel does not serve it, with engine=auto.
    pub(crate) engine_reason: Option<String>,
}

/// The front end of an export.
pub(crate) enum Frontend {
    VhostUser(VhostUser),
    Fuse(Fuse),
    Uplink(Uplink),
    Nbd(NbdServer),
}

impl Frontend {
    pub(crate) fn connected(&self) -> bool {
        match self {
            Self::VhostUser(socket) => socket.connected(),
            Self::Nbd(server) => server.connected(),
            Self::Fuse(_) | Self::Uplink(_) => true,
        }
    }

    /// Returns whether the front end has gone, and its requests have not ended.
    pub(crate) fn leaving(&self) -> bool {
        match self {
            Self::VhostUser(socket) => socket.leaving(),
            Self::Nbd(server) => server.leaving(),
            Self::Fuse(_) | Self::Uplink(_) => false,
        }
    }

    pub(crate) fn config_changed(&self) {
        match self {
            Self::VhostUser(socket) => socket.config_changed(),
            // A client learns the size when it connects.
            Self::Fuse(_) | Self::Uplink(_) | Self::Nbd(_) => {}
        }
    }

    pub(crate) fn packed(&self) -> bool {
        matches!(self, Self::VhostUser(socket) if socket.packed())
    }

    pub(crate) fn features(&self) -> Vec<String> {
        match self {
            Self::VhostUser(socket) => socket.feature_names(),
            Self::Fuse(mount) => feature_names(mount.features(), &INIT_NAMES),
            Self::Uplink(_) => Vec::new(),
            Self::Nbd(server) => server.features(),
        }
    }

    pub(crate) fn net_counters(&self, queue: u16) -> Option<NetQueueCounters> {
        match self {
            Self::VhostUser(socket) => socket.net_counters(queue),
            Self::Fuse(_) | Self::Nbd(_) => None,
            Self::Uplink(uplink) => uplink.net_counters(queue),
        }
    }

    pub(crate) fn port(&self) -> Option<PortInfo> {
        match self {
            Self::VhostUser(socket) => socket.port(),
            Self::Fuse(_) | Self::Nbd(_) => None,
            Self::Uplink(uplink) => Some(uplink.port()),
        }
    }

    pub(crate) fn mount(&self) -> Option<MountInfo> {
        let Self::Fuse(mount) = self else { return None };
        let plan = mount.plan().clone();
        Some(MountInfo {
            transport: plan.transport,
            transport_reason: plan.transport_reason,
            passthrough: plan.passthrough,
            passthrough_reason: plan.passthrough_reason,
            allow_other: mount.allow_other(),
            open_files: mount.open_files(),
            forwarded_entries: mount.forwarded_entries(),
        })
    }

    pub(crate) fn stop(&self) {
        match self {
            Self::VhostUser(socket) => socket.stop(),
            Self::Fuse(mount) => mount.stop(),
            Self::Uplink(uplink) => uplink.stop(),
            Self::Nbd(server) => server.stop(),
        }
    }
}

/// Flags of the INIT message of FUSE that a mount may have.
const INIT_NAMES: [(u64, &str); 5] = [
    (abi::init::ASYNC_DIO, "ASYNC_DIO"),
    (abi::init::MAX_PAGES, "MAX_PAGES"),
    (abi::init::DIRECT_IO_ALLOW_MMAP, "DIRECT_IO_ALLOW_MMAP"),
    (abi::init::PASSTHROUGH, "PASSTHROUGH"),
    (abi::init::OVER_IO_URING, "OVER_IO_URING"),
];

fn feature_names(bits: u64, names: &[(u64, &str)]) -> Vec<String> {
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).to_owned()).collect()
}
