//! Networks: what the queue pairs of a guest's card are joined to.

mod ifreq;
pub mod tap;

pub use tap::{Counters, Offloads, Tap, TapQueue};
