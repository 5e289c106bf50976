//! What the drivers of a disk keep about a request while it is in flight.
//!
//! A driver uses its own part only. The parts of drivers that few requests need are boxed, and are
//! allocated when a slot needs one for the first time.

use std::ops::Range;

use qcow2::{FastPath, FileId, Request as ImageRequest};

use super::Io;
use crate::bounce::AlignedBuf;
use crate::copy_before_write::OldData;
use crate::iovecs::Hidden;

/// What the drivers keep about a request.
#[derive(Default)]
pub(crate) struct DriverState {
    /// Raw files: bytes that are complete.
    pub(crate) done: u64,
    /// Raw files: the operation in flight.
    pub(crate) stage: Stage,
    /// Raw files: the operation uses the descriptor without O_DIRECT.
    pub(crate) buffered: bool,
    /// Raw files: the methods that failed for this request, as bits of `raw::method`.
    pub(crate) tried: u8,
    /// Raw files: how often the operation was repeated without progress.
    pub(crate) retries: u8,
    /// Raw files: bytes of the operation in flight if the segments do not tell.
    pub(crate) asked: u32,
    /// Raw files: the aligned copy of the guest's bytes.
    pub(crate) bounce: Option<AlignedBuf>,
    /// qcow2: a request that takes several steps.
    pub(crate) qcow2: Option<Box<Qcow2State>>,
    /// qcow2: the fast path is in flight. The number is the offset on the disk; `Request::offset`
    /// is the one in the file until the request is complete.
    pub(crate) fast_path: Option<(FastPath, u64)>,
    /// A write under a backup.
    pub(crate) copy_before_write: Option<Box<CopyBeforeWriteState>>,
    /// A write under a mirror: only its copy is left to be done, and the next completion with its
    /// token says that the target has it.
    pub(crate) awaits_copy: bool,
    /// A request of a frozen disk.
    pub(crate) frozen: Option<Box<FrozenState>>,
    /// A long request that is done in parts.
    pub(crate) split: Option<Box<SplitState>>,
}

/// The operation in flight on a raw file. It decides how the result is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No operation is in flight.
    #[default]
    Idle,
    /// A read or write between the file and the segments.
    Transfer,
    /// A read or write between the file and the aligned buffer.
    Bounce,
    /// A sync of the data, always the last operation of a request.
    Sync,
    /// A discard by the command of the block layer.
    DiscardCommand,
    /// A discard that punches a hole.
    DiscardPunch,
    /// WriteZeroes that punches a hole.
    ZeroPunch,
    /// WriteZeroes by FALLOC_FL_ZERO_RANGE.
    ZeroRange,
    /// WriteZeroes that writes zeroes.
    ZeroWrite,
    /// An allocation of space by fallocate.
    Allocate,
}

/// A request of a qcow2 image that takes several steps.
#[derive(Default)]
pub(crate) struct Qcow2State {
    pub(crate) request: ImageRequest,
    /// The current step, as a request of a raw file.
    pub(crate) inner: Io,
    /// The file of that step.
    pub(crate) file: FileId,
    /// The next result belongs to the request and not to `inner`: it waits for another request, or
    /// for space at the file's end.
    pub(crate) direct: bool,
    /// It waits for space at the file's end.
    pub(crate) extends: bool,
}

/// A write that first reads the data that it replaces.
#[derive(Default)]
pub(crate) struct CopyBeforeWriteState {
    /// The read, or the write to the fleecing file.
    pub(crate) inner: Io,
    /// The buffer of `inner`. None while the write waits for another write.
    pub(crate) old: Option<OldData>,
    /// `inner` is the write to the fleecing file.
    pub(crate) stores: bool,
    /// `inner` or the wait is in flight: a completion with the request's token belongs to it, not
    /// to the write.
    pub(crate) active: bool,
}

/// A request of a frozen disk, which is done in parts.
#[derive(Default)]
pub(crate) struct FrozenState {
    /// The current part, as a request of the source or of the fleecing file.
    pub(crate) inner: Io,
    /// The range of that part on the disk, bytes.
    pub(crate) part: Range<u64>,
    /// The part is of the fleecing file.
    pub(crate) in_fleece: bool,
    /// Start of the bytes that are not complete, on the disk.
    pub(crate) at: u64,
    /// End of the bytes that were read from the source. Between `at` and this, only blocks in the
    /// fleecing file are missing.
    pub(crate) from_source: u64,
    /// The next part begins after the worker has looked at its other queues.
    pub(crate) deferred: bool,
}

/// A long request that is done in parts.
#[derive(Default)]
pub(crate) struct SplitState {
    /// Set from the start of the request until it is complete.
    pub(crate) active: bool,
    /// Whether the backend has the current part.
    pub(crate) started: bool,
    /// Start of the request on the disk, bytes.
    pub(crate) offset: u64,
    /// Start of the next part on the disk, bytes.
    pub(crate) next: u64,
    /// End of the request on the disk, bytes.
    pub(crate) end: u64,
    /// Longest part, bytes. Parts end at multiples of it.
    pub(crate) part_bytes: u64,
    /// The segments after the current part.
    pub(crate) hidden: Option<Hidden>,
}
