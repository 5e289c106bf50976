//! Networks: what the queue pairs of a guest's card are joined to.
//!
//! [`tap`] is of use by itself:
//!
//! ```no_run
//! use std::io::Read;
//! use vshunt_net::tap::Tap;
//!
//! // As root: makes or adopts the tap vs0 with two queues, and attaches both.
//! let tap = Tap::open("vs0", 2)?;
//! let queues = tap.queues(2)?;
//! let mut frame = [0; 65_600];
//! let length = (&*queues[0]).read(&mut frame)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(clippy::multiple_unsafe_ops_per_block)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod ifreq;
mod links;
pub mod negotiated;
mod netns;
pub mod switch;
pub mod tap;

pub use switch::Switch;
pub use tap::{Counters, Offloads, Tap, TapQueue};
