//! Exports and what they need: disks, networks, workers. [`Daemon`] is all that control may call.

mod bitmaps;
mod check;
mod convert;
mod daemon;
mod drained;
mod event;
mod job;
mod lifecycle;
mod nets;
mod prepared;
mod queues;
mod registry;
mod resize;
mod served;
mod snapshot;
mod start;
#[cfg(test)]
mod tests;

pub use check::{Check, check_disk_size, check_one_place};
pub use convert::ToConvert;
pub use daemon::{ATTACH_TIMEOUT, Daemon, Options};
pub use event::Event;
pub use prepared::{MAX_PAIRS, MAX_QUEUES};
pub use snapshot::OverlayMode;
pub use vshunt_engine::DEFAULT_POLL_US;
