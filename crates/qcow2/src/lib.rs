//! qcow2 images (QEMU's docs/interop/qcow2, versions 2 and 3) without I/O: no file descriptors, no
//! threads.
//!
//! [`header`] and [`entry`] are the format itself. All workers of a disk share its [`Served`]
//! image. Each request is a [`Request`], which tells its caller step by step what to read, write or
//! wait for. Offline work (creating, checking or resizing an image that is not in use) accesses the
//! caller's file through [`Storage`].
//!
//! The bytes of an image, which may be hostile, must never cause a panic, an overflow, an endless
//! loop or an unbounded allocation. `qemu-img check` must never find an image corrupt that this
//! crate wrote, wherever the writing stopped.
//!
//! Numbers in images are big-endian.
//!
//! ```
//! use qcow2::create::{Options, create};
//! use qcow2::memory::Memory;
//!
//! let file = Memory::new(Vec::new(), 1 << 20);
//! create(&file, None, &Options::new(1 << 30), &mut |_, _| ())?;
//! let info = qcow2::info::info(&file)?;
//! assert_eq!(info.header.size, 1 << 30);
//! # Ok::<(), qcow2::Error>(())
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

mod alloc;
pub mod amend;
pub mod bitmap;
mod bytes;
mod change;
pub mod check;
pub mod compress;
pub mod create;
pub mod entry;
mod epoch;
mod error;
mod fast_path;
pub mod header;
mod header_copy;
mod holes;
mod image;
pub mod info;
pub mod journal;
mod lock;
mod lookup;
mod map;
pub mod measure;
pub mod memory;
mod overlap;
pub mod refcount;
mod request;
pub mod resize;
mod served;
pub mod snapshot;
pub mod status;
mod storage;
mod sync;
#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use fast_path::{Batch, FastPath};
pub use image::Image;
pub use request::{Buf, Context, Extent, Found, Look, Op, Request, Step};
pub use served::{
    Chain, Layer, Served, Settings, User, make_ready, make_ready_for, make_ready_in_fixed_file,
};
pub use storage::Storage;

/// Receives the progress of long work: units done, and units in all.
pub type Progress<'p> = &'p mut dyn FnMut(u64, u64);

/// One of the files that a disk consists of. The caller chooses the number.
pub type FileId = u16;

/// Names a waiting request to its caller, who wakes it. The caller chooses both numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waker {
    /// The caller's queue that serves the request.
    pub who: u64,
    /// The request in that queue.
    pub token: u64,
}
