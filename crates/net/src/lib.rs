//! Networks: what the queue pairs of a guest's card are joined to.

mod ifreq;
mod links;
mod netns;
pub mod switch;
pub mod tap;

pub use switch::Switch;
pub use tap::{Counters, Offloads, Tap, TapQueue};
