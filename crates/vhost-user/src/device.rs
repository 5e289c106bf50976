//! What a kind of device behind a socket does: [`Device`] for all of them, [`NetworkDevice`] for those on a network.

use std::os::fd::BorrowedFd;

use vhost::vhost_user::VhostUserProtocolFeatures;
use virtio::net::MAC_BYTES;
use vshunt_engine::Queue;
use vshunt_sandbox::ThreadKind;
use vshunt_types::spec::{NetQueueCounters, PortInfo};
use vshunt_virtqueue::RingParts;

use super::memory::Notes;

/// Where a ring is among the queues that users see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// The queue.
    pub queue: u16,
    /// The number of the ring in its queue.
    pub nth: u16,
}

/// What a change of the configuration space needs to be whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigChange {
    /// Nothing more.
    Done,
    /// A drain of all queues, then [`Device::settle`].
    Settle,
}

/// A device behind a socket. The session thread calls it; [`config`](Self::config) and [`network`](Self::network) are for any
/// thread. Errors are in words, for the log.
pub trait Device: Send + Sync {
    /// Virtio features offered.
    fn features(&self) -> u64;
    /// Protocol features of this kind of device, besides those of all devices.
    fn protocol(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::empty()
    }
    /// The guest agreed on these features; 0: on none yet. Called while no ring runs.
    ///
    /// # Errors
    /// The device cannot serve them.
    fn negotiated(&self, features: u64) -> Result<(), String>;
    /// A new front end is connected. The device forgets what a former front end set and the guest did not choose.
    fn connected(&self) {}
    /// Resets the device (RESET_DEVICE).
    fn reset(&self);
    /// Names of the features that not every device has, by number.
    fn feature_names(&self) -> &'static [(u32, &'static str)];
    /// The configuration space.
    fn config(&self) -> Vec<u8>;
    /// The guest writes to the configuration space.
    ///
    /// # Errors
    /// The guest may not write there.
    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<ConfigChange, String>;
    /// Completes a [`ConfigChange::Settle`] while no request is in flight.
    ///
    /// # Errors
    /// The change does not hold.
    fn settle(&self) -> Result<(), String>;
    /// The front end brought an in-flight region that was used before: its guest continues where another daemon, or a former
    /// connection, left it.
    ///
    /// # Errors
    /// The guest cannot continue.
    fn resumed(&self) -> Result<(), String>;
    /// Whether a guest can continue with another daemon after this one was killed.
    fn outlives_daemon(&self) -> bool {
        true
    }
    /// What the thread that serves the front end needs.
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Session
    }
    /// How many rings there can be, where workers of this process serve them.
    fn rings(&self) -> u16;
    /// Where a ring is. `None`: there is no such ring with the features that the guest agreed on.
    fn place(&self, ring: u16) -> Option<RingPlace>;
    /// Returns the queue of a ring that starts. `others`: that queue, if other rings of it run.
    fn queue(&self, place: RingPlace, parts: RingParts, others: Option<Box<dyn Queue>>) -> Box<dyn Queue>;
    /// The device as one on a network.
    fn network(&self) -> Option<&dyn NetworkDevice> {
        None
    }
}

/// A device on a network. The session thread calls it, except for [`counters`](Self::counters) and [`port`](Self::port), which
/// are for any thread.
pub trait NetworkDevice: Device {
    /// Sets the MTU (NET_SET_MTU).
    ///
    /// # Errors
    /// The network cannot have that MTU.
    fn set_mtu(&self, mtu: u64) -> Result<(), String>;
    /// Tells the network that the guest is here now (SEND_RARP).
    ///
    /// # Errors
    /// The guest cannot be announced.
    fn announce(&self, mac: [u8; MAC_BYTES]) -> Result<(), String>;
    /// A ring that workers serve is about to start. `fresh`: its guest has not used it yet.
    ///
    /// # Errors
    /// It cannot start.
    fn ring_starts(&self, place: RingPlace, fresh: bool) -> Result<(), String>;
    /// A ring that workers serve does not run (any more), until the front end starts it again.
    fn ring_closed(&self, place: RingPlace);
    /// Becomes readable when the guest has sent a command by the control queue; then
    /// [`run_command`](Self::run_command) is called.
    fn command_eventfd(&self) -> Option<BorrowedFd<'_>>;
    /// Runs the command of the guest.
    fn run_command(&self);
    /// Whether the guest can set something that another daemon has to know, so that the in-flight region needs room for it.
    fn takes_notes(&self) -> bool;
    /// The front end gave a region with room for these notes, or took it away (`None`).
    fn set_notes(&self, notes: Option<Notes>);
    /// What went through a queue.
    fn counters(&self, queue: u16) -> Option<NetQueueCounters>;
    /// The port of a switch that the device is on.
    fn port(&self) -> Option<PortInfo>;
}
