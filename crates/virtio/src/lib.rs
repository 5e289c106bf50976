//! Virtqueues over hostile memory: guest memory translation, split and packed rings for both sides, in-flight
//! tracking, the dirty page log, and the formats of virtio-blk and virtio-net of the Virtio 1.3 specification.
//!
//! Called by `vshunt`'s queues on the worker that owns the queue, and by the bench as a driver.
//! There are no file descriptors, no threads, no mappings and no I/O in here, and nothing allocates a request.
//!
//! What must never happen: a byte outside of the regions of a [`mem::GuestMemory`] is touched because a guest
//! asked for it; a guest's value panics, overflows or loops; a field of a guest's structure is read twice and
//! trusted the second time.
//!
//! The formats are little-endian (Virtio 1.3, 1.4); legacy devices and big-endian hosts are not supported.

#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
// Without the standard library: the compiler refuses files, sockets, threads and clocks.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

#[cfg(not(target_endian = "little"))]
compile_error!("virtio 1.x structures are little-endian and this crate reads them as they lie");

mod bits;
pub mod blk;
mod desc;
pub mod driver;
pub mod features;
pub mod inflight;
pub mod log;
pub mod mem;
pub mod net;
mod raw;
pub mod ring;
pub mod vhost;

#[cfg(test)]
mod testing;
