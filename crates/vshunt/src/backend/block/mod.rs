//! Block backends: what a disk's requests are turned into.
//!
//! Called by a block queue, on the worker's thread. A request is an [`Io`] in the queue's slot; [`start`](DiskHandle::start)
//! begins it and [`resume`](DiskHandle::resume) goes on with it at each completion, until the step is [`Step::Done`].
//! Nothing here blocks on a device, takes a lock or allocates on that way.

mod lock;
mod memory;
mod raw;

use std::io;
use std::sync::Arc;

use crate::worker::{Ring, Token};

/// What a request asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Disk to guest.
    Read,
    /// Guest to disk.
    Write,
    /// All writes completed before are on stable storage when it is done, whichever queue they came by.
    Flush,
    /// The range's contents are no longer needed.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// Space may be given back.
        unmap: bool,
    },
}

/// How far a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Over: 0, or a negative errno.
    Done(i32),
    /// An operation with the request's token is on the ring; call `resume` with its result.
    Wait,
}
