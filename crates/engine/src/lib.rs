//! Workers: OS threads with one io_uring each, and the queues attached to them.
//!
//! Knows no virtio, no FUSE, no image format: a [`Queue`] is all it sees. [`Workers`] makes and frees them
//! (called by control, under its own lock), [`QueueSet`] moves queues between them, `thread` is what runs
//! on a worker. What must never happen: a queue on two workers, or an operation in flight for a queue that
//! left its worker.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod attach;
mod eventfd;
mod kernel;
mod mailbox;
mod observer;
mod placement;
mod policy;
mod poll_state;
mod pool;
mod queue;
#[cfg(test)]
mod tests;
mod thread;
mod ticket;
mod uring;
mod wait;

pub use attach::{DRAIN_LIMIT, QueueSet};
pub use eventfd::EventFd;
pub use kernel::KernelWorker;
pub use observer::Observer;
pub use placement::Placement;
pub use poll_state::{PollEvent, PollState};
pub use pool::{FIRST_WORKER, MAX_WORKERS, Settings, WorkerState, Workers, allowed_cpus};
pub use queue::{Forwarder, Queue, QueueStats, State};
pub use thread::{BUDGET, DEFAULT_POLL_US, POLL_US_MAX};
pub use uring::{Token, Uring, UringFile};
pub use wait::lock_until;

/// Names a worker; never reused while the daemon lives.
pub type WorkerId = u32;
