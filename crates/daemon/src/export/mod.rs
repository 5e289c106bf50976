//! Exports and what they need: disks, networks, workers. [`Daemon`] is all that control may call.

mod begin;
mod bitmaps;
mod check;
mod convert;
mod daemon;
mod drained;
mod event;
mod job;
mod life;
mod maps;
mod nets;
mod opened;
mod resize;
mod served;
mod snapshot;
#[cfg(test)]
mod tests;

pub use check::{Check, check_disk_size, check_one_place};
pub use convert::ToConvert;
pub use daemon::{ATTACH_TIMEOUT, Daemon, Options};
pub use event::Event;
pub use opened::{MAX_PAIRS, MAX_QUEUES};
pub use snapshot::OverlayMode;
pub use vshunt_engine::DEFAULT_POLL_US;
