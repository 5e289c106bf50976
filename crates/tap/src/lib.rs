//! A tap with several queues: an Ethernet interface of the host whose other end is this process.
//!
//! [`Tap::open`] makes the interface, or adopts an existing one by its name, in any network
//! namespace. It adopts a macvtap in the same way. [`Tap::from_fds`] adopts files that another
//! program opened. Each [`TapQueue`] is an open file for the code that moves frames. One `read` or
//! `write` moves one frame behind a virtio-net header, without waiting. The kernel's vhost-net can
//! use the file, too. A queue starts detached, so that the kernel sends no frames to a queue
//! without a reader. [`TapQueue::attach`] and [`TapQueue::detach`] change that at any time
//! (TUNSETQUEUE).
//!
//! The kernel chooses the queue of a frame among the attached ones. It uses its flow table, which
//! has the queue to which the flow was last written ("transmit follows receive"), or a program
//! ([`Steering`]). A flow stays on its queue while no queue is attached or detached. The kernel
//! counts attached queues by an index that changes then: see [`Tap::order`].
//!
//! ```no_run
//! use std::io::Read;
//! use vshunt_tap::{HEADER_LONG, Options, Steering, Tap};
//!
//! # fn main() -> Result<(), vshunt_tap::Error> {
//! let options = Options { netns: Some("red".into()), steering: Steering::Rss, ..Options::default() };
//! let tap = Tap::open_with("vs0", 4, &options)?;
//! tap.set_header(HEADER_LONG)?;
//! let queues = tap.queues(4)?;
//! for queue in &queues {
//!     queue.attach()?;
//! }
//! let mut frame = [0; 65536 + 64];
//! // Poll it before: it is non-blocking.
//! match queues[0].as_ref().read(&mut frame) {
//!     Ok(bytes) => println!("a header, and a frame of {} bytes", bytes - HEADER_LONG as usize),
//!     Err(e) => println!("none now: {e}"),
//! }
//! queues[3].detach()?;
//! assert_eq!(tap.order(), [0, 1, 2]);
//! # Ok(())
//! # }
//! ```
//!
//! Control threads and the session thread make the calls here, and no frame is moved by them. What
//! must never happen: an adopted interface is removed, or an interface that another program uses is
//! adopted.

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

mod given;
mod ifreq;
mod links;
mod netns;
mod offloads;
mod open;
mod queue;
mod steering;
mod tap;

pub use given::parse_fds;
pub use netns::check as check_netns;
pub use offloads::Offloads;
pub use open::{Options, check_name, probe};
pub use queue::TapQueue;
pub use steering::Steering;
pub use tap::Tap;
pub use vshunt_types::error::Error;
use vshunt_types::error::Result;
pub use vshunt_types::spec::NetCounters as Counters;

/// Most bytes of an interface's name (IFNAMSIZ without the zero byte).
pub const NAME_MAX: usize = 15;
/// Most queues of one tap (the kernel's MAX_TAP_QUEUES).
pub const QUEUES_MAX: u16 = 256;
/// The smallest MTU: IPv4's, and the kernel's limit for Ethernet.
pub const MTU_MIN: u32 = 68;
/// The MTU of an Ethernet interface if none was set.
pub const MTU_DEFAULT: u32 = 1500;
/// The largest MTU of a tap: 64 KiB less one byte and the Ethernet header.
pub const MTU_MAX: u32 = 65521;

/// Bytes of a virtio-net header without and with its number of buffers (Virtio 1.3, 5.1.6). Legacy
/// guests that do not merge buffers use the short one.
pub const HEADER_SHORT: u32 = 10;
/// See [`HEADER_SHORT`].
pub const HEADER_LONG: u32 = 12;

/// Checks whether a tap can have that MTU.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with the range.
pub fn check_mtu(mtu: u32) -> Result<()> {
    match (MTU_MIN..=MTU_MAX).contains(&mtu) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("mtu={mtu} is out of range; {MTU_MIN} to {MTU_MAX} is possible")))
        }
    }
}
