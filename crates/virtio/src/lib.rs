//! Virtqueues over untrusted memory: guest memory translation, split and packed rings for both
//! sides, in-flight tracking, the dirty page log, and the formats of virtio-blk and virtio-net
//! (Virtio 1.3 specification).
//!
//! The queues of `vshunt` call it on the worker that owns the queue, and `vshunt-bench` calls it as
//! a driver. The crate has no file descriptors, threads, mappings or I/O, and nothing allocates
//! memory for each request.
//!
//! Three things must never happen: an access outside of the regions of a [`mem::GuestMemory`]
//! because a guest asked for it; a panic, an overflow or an endless loop because of a guest's
//! value; a field of a guest's structure that is read twice and trusted the second time.
//!
//! The formats are little-endian (Virtio 1.3, 1.4); legacy devices and big-endian hosts are not
//! supported.
//!
//! A driver and a device on one ring. In a real device, the memory is that of the guest:
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
#![cfg_attr(test, allow(clippy::multiple_unsafe_ops_per_block, reason = "a test has one purpose"))]
// Without the standard library the compiler refuses files, sockets, threads and clocks.
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
