//! Networks: what the queue pairs of a guest's card are joined to.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod ifreq;
mod links;
mod netns;
pub mod switch;
pub mod tap;

pub use switch::Switch;
pub use tap::{Counters, Offloads, Tap, TapQueue};
