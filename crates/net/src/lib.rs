//! Networks: a switch, and the queue pairs that join guests to it or to a tap of the host.
//!
//! | module | what it holds | thread |
//! | --- | --- | --- |
//! | [`tap_pair`] | a guest's queue pair on a queue of a [`Tap`](vshunt_tap::Tap) | worker |
//! | [`switch`] | ports, addresses, flows; a guest's queue pair on a port; uplinks | worker, control |
//! | [`control`] | the control virtqueue of a network device | worker, session |
//! | [`negotiated`] | what the guest's features mean for a tap | session |
//!
//! A queue pair is two virtqueues in one [`Queue`](vshunt_engine::Queue), so that both directions
//! of a flow are on one worker. A front end starts and stops the rings through
//! [`vshunt_virtqueue::VirtqueueOwner`] while the queue is on no worker.
//!
//! ```
//! use vshunt_net::Switch;
//! use vshunt_net::switch::{MACS_GUEST, PortOptions, VlanConfig};
//!
//! let switch = Switch::new("lan");
//! let options = PortOptions {
//!     name: "vm1".into(),
//!     mac: None,
//!     mac_filter: false,
//!     mac_limit: MACS_GUEST,
//!     vlans: VlanConfig::Plain,
//!     isolated: false,
//!     reserved: false,
//!     mtu: 1500,
//!     tap: None,
//! };
//! let port = switch.join(2, options)?;
//! assert_eq!((port.queues.len(), switch.addresses()), (2, 0));
//! switch.leave(port.index);
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

#![deny(
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        reason = "a failed test may panic"
    )
)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

pub mod control;
mod counters;
mod frames;
pub mod negotiated;
mod net_virtqueue;
mod pair_limits;
mod pair_rings;
mod rx_buffers;
mod rx_poll;
mod slots;
pub mod switch;
mod tap_file;
pub mod tap_pair;

pub use counters::NetStats;
pub use frames::{FRAME_MAX, PAIR_RINGS};
pub use pair_limits::PairLimits;
pub use switch::Switch;
