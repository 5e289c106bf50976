//! Virtqueues as a front end uses them: [`RingServer`] serves the rings that it starts, and
//! [`VirtqueueOwner`] is a worker's queue that owns some of them.
//!
//! A worker holds `Box<dyn Queue>` and knows no virtqueue. A front end gets such a queue back when
//! it takes the queue off its worker, or accesses it on its worker during
//! [`QueueSet::run_on`](vshunt_engine::QueueSet::run_on). [`owner()`] then finds the queue's
//! [`VirtqueueOwner`]. This costs nothing on the data path: each queue names its cast once, in
//! [`Queue::extension`](vshunt_engine::Queue::extension).
//!
//! What must never happen: a thread changes a ring while its queue is on the worker of another
//! thread.
//!
//! ```
//! use std::any::Any;
//! use vshunt_engine::{Queue, Token, Uring};
//! use vshunt_virtqueue::{VirtqueueOwner, Vring, owner};
//!
//! /// A queue whose only virtqueue the guest has not started.
//! struct Idle;
//!
//! impl Queue for Idle {
//!     fn arm(&mut self, _: &mut Uring, _: Token) {}
//!     fn take(&mut self, _: &mut Uring, _: Token, _: u32) -> u32 { 0 }
//!     fn complete(&mut self, _: &mut Uring, _: Token, _: i32, _: bool) -> u32 { 0 }
//!     fn publish(&mut self) -> bool { false }
//!     fn has_work(&self) -> bool { false }
//!     fn wake(&mut self) {}
//!     fn sleep(&mut self, _: &mut Uring, _: Token, _: u32) -> bool { false }
//!     fn disarm(&mut self, _: &mut Uring, _: Token) {}
//!     fn at_rest(&self) -> bool { true }
//!     fn leave(&mut self, _: &mut Uring) {}
//!     fn extension(&self) -> &'static dyn Any { vshunt_virtqueue::extension::<Self>() }
//! }
//!
//! impl VirtqueueOwner for Idle {
//!     fn ring(&mut self, _nth: u16) -> Option<&mut dyn Vring> { None }
//!     fn remove(&mut self, _nth: u16, _discard: bool) -> (u32, bool) { (0, false) }
//!     fn is_broken(&self) -> bool { false }
//! }
//!
//! let mut queue: Box<dyn Queue> = Box::new(Idle);
//! let owner = owner(queue.as_mut()).expect("its extension is the cast");
//! assert!(owner.ring(0).is_none() && owner.pair().is_none());
//! ```

mod owner;
mod server;

pub use owner::{
    FrameFormat, QueuePair, RingParts, VirtqueueOwner, Vring, extension, owner, state_of, take_ring,
};
pub use server::{RingAreas, RingServer, RingStart, Tracking};
