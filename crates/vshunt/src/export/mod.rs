//! Exports and what they need: disks, workers. [`Daemon`] is all that control may call.

mod daemon;
mod export;
pub mod spec;
#[cfg(test)]
mod tests;

pub use daemon::{ATTACH_TIMEOUT, Daemon, Event, Options};
pub use export::MAX_QUEUES;

pub use crate::worker::DEFAULT_POLL_US;
