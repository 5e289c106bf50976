//! Queues: take a request, drive a backend, complete it. One folder a device.

pub mod blk;
