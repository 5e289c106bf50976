//! The traits of devices behind a socket: [`Device`] for all devices, [`NetworkDevice`] for network
//! devices.

use std::os::fd::BorrowedFd;

use vhost::vhost_user::VhostUserProtocolFeatures;
use virtio::net::MAC_BYTES;
use vshunt_engine::Queue;
use vshunt_sandbox::ThreadKind;
use vshunt_types::spec::{NetQueueCounters, PortInfo};
use vshunt_virtqueue::RingParts;

use super::memory::Notes;

/// The queue of a ring, as users count queues. A queue pair of a network device is one queue with
/// two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// The queue.
    pub queue: u16,
    /// The number of the ring in its queue.
    pub nth: u16,
}

/// What remains to be done after a change of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigChange {
    /// Nothing more.
    Done,
    /// A drain of all queues, then [`Device::settle`].
    Settle,
}

/// A device behind a socket. The session thread calls it; any thread may call
/// [`config`](Self::config) and [`network`](Self::network). Errors are texts for the log.
pub trait Device: Send + Sync {
    /// Returns the virtio features that are offered.
    fn features(&self) -> u64;
    /// Returns the protocol features of this kind of device, in addition to those of all devices.
    fn protocol(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::empty()
    }
    /// Sets the negotiated features; 0: none yet. Called while no ring runs.
    ///
    /// # Errors
    /// The device cannot serve them.
    fn negotiated(&self, features: u64) -> Result<(), String>;
    /// Called when a front end connects. The device forgets what a former front end has set, but
    /// not what the guest has set.
    fn connected(&self) {}
    /// Resets the device (RESET_DEVICE).
    fn reset(&self);
    /// Returns the names of the features of this kind of device, by number.
    fn feature_names(&self) -> &'static [(u32, &'static str)];
    /// Returns the configuration space.
    fn config(&self) -> Vec<u8>;
    /// Writes to the configuration space for the guest.
    ///
    /// # Errors
    /// The guest may not write there.
    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<ConfigChange, String>;
    /// Completes a [`ConfigChange::Settle`] while no request is in flight.
    ///
    /// # Errors
    /// The change was undone.
    fn settle(&self) -> Result<(), String>;
    /// Called when the front end sends an in-flight region that was in use: the guest continues
    /// where another daemon, or an earlier connection, has ended.
    ///
    /// # Errors
    /// The guest cannot continue.
    fn resumed(&self) -> Result<(), String>;
    /// Returns whether a guest can continue with another daemon after this one was killed.
    fn outlives_daemon(&self) -> bool {
        true
    }
    /// Returns the kind of thread that serves the front end, which selects its sandbox.
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Session
    }
    /// Returns the number of rings, if workers of this process serve them.
    fn rings(&self) -> u16;
    /// Returns the place of a ring. None if there is no such ring with the negotiated features.
    fn place(&self, ring: u16) -> Option<RingPlace>;
    /// Returns the queue of a ring that starts. `others`: that queue, if other rings of it run.
    fn queue(&self, place: RingPlace, parts: RingParts, others: Option<Box<dyn Queue>>) -> Box<dyn Queue>;
    /// Returns the device as a network device. None if it is not one.
    fn network(&self) -> Option<&dyn NetworkDevice> {
        None
    }
}

/// A network device. The session thread calls it; any thread may call [`counters`](Self::counters)
/// and [`port`](Self::port).
pub trait NetworkDevice: Device {
    /// Sets the MTU (NET_SET_MTU).
    ///
    /// # Errors
    /// The network cannot have that MTU.
    fn set_mtu(&self, mtu: u64) -> Result<(), String>;
    /// Announces to the network that the guest is here now (SEND_RARP).
    ///
    /// # Errors
    /// The guest cannot be announced.
    fn announce(&self, mac: [u8; MAC_BYTES]) -> Result<(), String>;
    /// Called before a ring starts that workers serve. `fresh`: the guest has not used it yet.
    ///
    /// # Errors
    /// It cannot start.
    fn ring_starts(&self, place: RingPlace, fresh: bool) -> Result<(), String>;
    /// Returns whether a ring transmits frames of the guest.
    fn transmits(&self, place: RingPlace) -> bool;
    /// Called when a ring that workers serve is stopped until the front end starts it again.
    fn ring_closed(&self, place: RingPlace);
    /// Returns a descriptor that becomes readable when the guest has sent a command by the control
    /// queue. Then [`run_command`](Self::run_command) must be called.
    fn command_eventfd(&self) -> Option<BorrowedFd<'_>>;
    /// Runs the command of the guest.
    fn run_command(&self);
    /// Returns whether the guest can set something that another daemon must know, so that the
    /// in-flight region needs room for notes.
    fn takes_notes(&self) -> bool;
    /// Sets the notes in the current in-flight region; None if there is no region.
    fn set_notes(&self, notes: Option<Notes>);
    /// Returns the counters of a queue.
    fn counters(&self, queue: u16) -> Option<NetQueueCounters>;
    /// Returns the port of the device on a switch.
    fn port(&self) -> Option<PortInfo>;
}
