//! Queues: take a request, drive a backend, complete it. One folder a device.

mod bell;
pub mod blk;
pub mod copy;
pub mod fuse;
mod listen;
pub mod net;
mod vring;

pub use bell::Bell;
pub use vring::{Parts, Rest, Vring, pair, ring, take_ring};
