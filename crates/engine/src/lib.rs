//! Workers: OS threads with one io_uring each, and the queues attached to them.
//!
//! The crate knows no virtio, no FUSE and no image format. It sees [`Queue`]s only. [`Workers`]
//! makes and frees workers (called by control, under its own lock), [`QueueSet`] moves queues
//! between them, and `thread` is the loop that runs on a worker. A queue must never be on two
//! workers, and a queue that has left its worker must have no operation in flight there.
//!
//! Attaches a queue that never has work to one worker and then to another:
//!
//! ```
//! use std::any::Any;
//! use std::time::Duration;
//! use vshunt_engine::{DEFAULT_POLL_US, Queue, QueueSet, Settings, Token, Uring, Workers};
//!
//! struct Idle;
//!
//! impl Queue for Idle {
//!     fn arm(&mut self, _: &mut Uring, _: Token) {}
//!     fn take(&mut self, _: &mut Uring, _: Token, _budget: u32) -> u32 { 0 }
//!     fn complete(&mut self, _: &mut Uring, _: Token, _result: i32, _more: bool) -> u32 { 0 }
//!     fn publish(&mut self) -> bool { false }
//!     fn has_work(&self) -> bool { false }
//!     fn wake(&mut self) {}
//!     fn sleep(&mut self, _: &mut Uring, _: Token, _after: u32) -> bool { false }
//!     fn disarm(&mut self, _: &mut Uring, _: Token) {}
//!     fn at_rest(&self) -> bool { true }
//!     fn leave(&mut self, _: &mut Uring) {}
//!     fn extension(&self) -> &'static dyn Any { &() }
//! }
//!
//! let workers = Workers::new(DEFAULT_POLL_US)?;
//! let first = workers.create(None, &Settings::default())?;
//! let second = workers.create(None, &Settings::default())?;
//! let queues = QueueSet::new("example", &workers, &[first])?;
//! queues.start(0, Box::new(Idle));
//! queues.attach(0, second, Duration::from_secs(10))?;
//! assert_eq!(queues.placement(0).0, second);
//! queues.stop(0);
//! # drop(queues);
//! # workers.end_all();
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod attach;
pub mod balance;
mod eventfd;
mod kernel;
mod latency;
mod limits;
mod mailbox;
mod no_uring;
mod observer;
mod own_threads;
mod phases;
mod placement;
mod policy;
mod poll_state;
mod pool;
mod probes;
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
pub use latency::{Latency, Meter, RequestKind};
pub use limits::{
    Direction, LimitCell, LimitGate, LimitGroup, LimitMember, Rate as LimitRate, RateSet as LimitRateSet,
    Rates as LimitRates,
};
pub use no_uring::{UringSetting, why_no_uring};
pub use observer::Observer;
pub use own_threads::own_threads;
pub use phases::WorkerTimes;
pub use placement::Placement;
pub use poll_state::{PollEvent, PollState};
pub use pool::{FIRST_WORKER, MAX_WORKERS, Settings, WorkerState, Workers, allowed_cpus};
pub use queue::{Forwarder, Queue, QueueStats, State};
pub use thread::{BUDGET, DEFAULT_POLL_US, POLL_US_MAX};
pub use uring::{ClientId, RingClient, Token, Uring, UringFile};
pub use wait::lock_until;

/// Names a worker. An id is never used again while the daemon runs.
pub type WorkerId = u32;
