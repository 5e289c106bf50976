//! qcow2 images (QEMU's docs/interop/qcow2, versions 2 and 3) without I/O: no file descriptors, no threads.
//!
//! [`header`] and [`entry`] are the format itself. Offline work (make, check, resize an image that nobody uses) goes by way
//! of [`Storage`], a file that the caller has.
//!
//! What must never happen: bytes of an image, which may be hostile, panic, overflow, loop or make us allocate without
//! bound; an image written by us that `qemu-img check` calls corrupt, at whatever point the writing ended.
//!
//! Numbers in images are big-endian.

pub mod bitmap;
mod change;
pub mod check;
pub mod create;
pub mod entry;
mod error;
pub mod header;
mod image;
pub mod info;
pub mod memory;
pub mod refcount;
pub mod resize;
pub mod snapshot;
mod storage;
#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use image::Image;
pub use storage::Storage;

/// Told how far long work came: units done, of how many.
pub type Progress<'p> = &'p mut dyn FnMut(u64, u64);
