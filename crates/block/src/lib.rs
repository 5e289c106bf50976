//! Disks: raw files and block devices, qcow2 images, NBD servers, memory, and none.
//!
//! Control threads open, change and close a [`Disk`]. A queue uses it through a [`DiskHandle`], on
//! its worker's thread. A request is an [`Io`] in a slot of the queue. [`DiskHandle::start`] starts
//! it, and [`DiskHandle::resume`] continues it after each completion, until the step is
//! [`Step::Done`].
//!
//! Requests do not block on a device, take no lock and allocate nothing. The exceptions are
//! bounded: files in memory are read and written at once (`raw/inline`); guests with unaligned
//! buffers cause a bounce buffer (`bounce`); many requests with many segments at a time cause
//! allocations (`iovec_cache`); writes under a backup take a lock and a buffer
//! (`copy_before_write`); writes under a mirror may wait for their copy (`copy_after_write`).
//!
//! ```
//! use vshunt_block::{Disk, Io, Op};
//! use vshunt_engine::Uring;
//! use vshunt_types::spec::{DiskSpec, Format};
//!
//! let size = Some(1 << 20);
//! let spec = DiskSpec { name: "d".into(), format: Some(Format::Ram), size, ..DiskSpec::default() };
//! let disk = Disk::open(&spec)?;
//! let mut uring = Uring::new()?;
//! let handle = disk.attach(&mut uring);
//!
//! let mut bytes = [1; 512];
//! let mut io = Io::default();
//! io.reset(Op::Read, 4096, false);
//! // SAFETY: `bytes` and `io` stay where they are until `run` returns, which waits for the request.
//! unsafe { io.push(bytes.as_mut_ptr(), bytes.len()) };
//! handle.run(&mut uring, &mut io)?;
//! assert_eq!(bytes, [0; 512]);
//! handle.detach(&mut uring);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod backend;
mod bits;
mod bounce;
mod commit;
pub mod copy;
mod copy_after_write;
mod copy_before_write;
mod cost;
mod create;
mod dirty_bitmap;
mod disk;
mod disk_access;
mod disk_io;
mod failures;
mod file_storage;
mod file_times;
mod fleece;
mod frozen;
mod handle;
mod image_file;
mod io;
mod iovec_cache;
mod iovecs;
mod limits;
mod lock;
mod memory;
mod nbd;
mod offline;
mod op;
mod overlay;
mod overlay_xattr;
pub mod own_mounts;
mod passthrough;
mod path_fd;
mod persistent_bitmaps;
mod qcow2;
mod raw;
mod replace;
mod shared_client;
mod stream;
mod wake_now;
mod write_observers;

pub use ::qcow2::{Extent, Found, Look};
pub use bits::Bits;
pub use bounce::AlignedBuf;
pub use commit::CommitTarget;
pub use copy_after_write::CopyAfterWrite;
pub use copy_before_write::{CopyBeforeWrite, OldData};
pub use cost::{Zeroing, cost};
pub use create::NewImage;
pub use dirty_bitmap::{Bitmap, BitmapState};
pub use disk::{Disk, FileAttributes, FreeBytes};
pub use disk_access::DiskAccess;
pub use file_times::{FileTimes, NewTime, Time};
pub use handle::DiskHandle;
pub use io::{Io, Request};
pub use iovecs::IoVecs;
pub use limits::{Limits, SECTOR_BYTES};
pub use lock::{lock as lock_image, lock_telling as lock_image_telling, release as unlock_image};
pub use nbd::certificates_of;
pub use offline::SnapshotInfo;
pub use op::{Op, Step};
pub use overlay::Overlay;
pub use overlay_xattr::{check as check_overlay_marks, check_chain as check_chain_marks};
pub use path_fd::{PathFd, has_name_of_qcow2, open_image};
pub use qcow2::{
    CHAIN_MAX, JournalView, Recovered, UncleanImage, path_of as journal_path, read_only as read_journal,
    recover as recover_journal, remove as remove_journal, sweep as sweep_journals,
};
pub use replace::{OldImage, mark_incomplete};
pub use write_observers::WriteObservers;

#[cfg(test)]
mod tests;
