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
//!
//! A driver and a device on one ring. A device of a guest has the guest's memory in its place:
//!
//! ```
//! use std::sync::Arc;
//! use virtio::driver::{DriverRing, DriverSeg};
//! use virtio::mem::{GuestMemory, Region};
//! use virtio::ring::{Chain, DeviceRing, RingAddrs, RingFeatures};
//!
//! #[repr(align(4096))]
//! struct Memory([u8; 4 * 4096]);
//! let mut memory = Box::new(Memory([0; 4 * 4096]));
//! let host = memory.0.as_mut_ptr();
//! let region = Region { guest_addr: 0, user_addr: 0, size: 4 * 4096, host, keep: Arc::new(()) };
//! // SAFETY: the memory lives as long as the table.
//! let mem = unsafe { GuestMemory::new(vec![region])? };
//! let addrs = RingAddrs { desc: host, driver: host.wrapping_add(4096), device: host.wrapping_add(8192) };
//! let features = RingFeatures::default();
//! // SAFETY: the areas are zeroed, and longer than those of a ring of 8.
//! let mut driver = unsafe { DriverRing::new(8, features, addrs) };
//! // SAFETY: the areas outlive the ring, and no other device side uses them.
//! let mut device = unsafe { DeviceRing::new(8, features, addrs, 0)? };
//!
//! driver.add(&[DriverSeg { addr: 3 * 4096, len: 512, writable: false }], None, 7)?;
//! driver.publish();
//! let mut chain = Chain::new();
//! assert!(device.pop(&mem, &mut chain)?);
//! assert_eq!(chain.segs[0].len, 512);
//! device.push(chain.head, 0);
//! device.publish();
//! assert_eq!(driver.poll().unwrap().cookie, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
