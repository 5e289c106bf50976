//! A queue of a tap as a file of a worker: frames are read and written by operations that never
//! wait.
//!
//! These are operations on the worker's io_uring, a batch for each system call. Before Linux 6.4 a
//! tap refuses operations with RWF_NOWAIT. There each frame is a system call, made at once, and its
//! result is queued like a completion.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::opcode;
use vshunt_engine::{Token, Uring, UringFile, on_file};
use vshunt_types::spec::DropReason;

use vshunt_tap::TapQueue;

/// See the module.
#[derive(Clone, Copy)]
pub(crate) struct TapFile {
    file: UringFile,
    /// The non-blocking descriptor, if the io_uring cannot be used.
    by_call: Option<RawFd>,
}

impl TapFile {
    /// Registers it with an io_uring. [`unregister`](Self::unregister) undoes this.
    pub(crate) fn register(uring: &mut Uring, tap: &Arc<TapQueue>) -> Self {
        let by_call = (!tap.has_nowait()).then(|| tap.as_raw_fd());
        let tap: Arc<dyn AsRawFd + Send + Sync> = tap.clone();
        Self { file: uring.register_file(&tap), by_call }
    }

    /// Undoes one [`register`](Self::register).
    pub(crate) fn unregister(uring: &mut Uring, tap: &TapQueue) {
        uring.unregister_file(tap.as_raw_fd());
    }

    /// Starts to read or write a frame. Its completion has the number of bytes, or a negative
    /// errno: `EAGAIN` if it would have to wait.
    ///
    /// # Safety
    /// The requirements of [`Uring::push`]: the iovecs and the memory that `op` names are valid
    /// until the completion was taken.
    #[inline]
    pub(crate) unsafe fn start(self, uring: &mut Uring, op: Op<'_>, token: Token) {
        if let Some(fd) = self.by_call {
            // SAFETY: the memory that `op` names is valid for the time of the call: the caller
            // keeps it valid until the completion.
            let result = unsafe { op.call(fd) };
            return uring.done(token, result);
        }
        let entry = on_file!(self.file, |fd| match op {
            Op::Read(to, len) => opcode::Read::new(fd, to, len).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Readv(to) =>
                opcode::Readv::new(fd, to.as_ptr(), count(to)).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Write(from, len) => opcode::Write::new(fd, from, len).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Writev(from) =>
                opcode::Writev::new(fd, from.as_ptr(), count(from)).rw_flags(libc::RWF_NOWAIT).build(),
        });
        // SAFETY: the caller keeps the iovecs and the memory that `op` names valid until the
        // completion was taken.
        unsafe { uring.push(entry, token) }
    }
}

/// Returns the number of iovecs. The kernel takes UIO_MAXIOV (1024) at most and fails a call with
/// more.
fn count(iovecs: &[libc::iovec]) -> u32 {
    u32::from(crate::slots::number(iovecs.len()))
}

/// One frame, behind its header.
pub(crate) enum Op<'a> {
    /// Read into one piece of memory of this many bytes.
    Read(*mut u8, u32),
    /// Read into several pieces.
    Readv(&'a [libc::iovec]),
    /// Write from one piece of memory.
    Write(*const u8, u32),
    /// Write from several pieces.
    Writev(&'a [libc::iovec]),
}

impl Op<'_> {
    /// Makes the system call at once, on a non-blocking descriptor.
    ///
    /// # Safety
    /// The iovecs and the memory are valid during the call.
    #[cold]
    unsafe fn call(self, fd: RawFd) -> i32 {
        let done = match self {
            // SAFETY: the caller promises `len` bytes of writable memory.
            Self::Read(to, len) => unsafe { libc::read(fd, to.cast(), len as usize) },
            // SAFETY: the caller promises valid iovecs of writable memory.
            Self::Readv(to) => unsafe { libc::readv(fd, to.as_ptr(), count(to).cast_signed()) },
            // SAFETY: the caller promises `len` bytes of readable memory.
            Self::Write(from, len) => unsafe { libc::write(fd, from.cast(), len as usize) },
            // SAFETY: the caller promises valid iovecs of readable memory.
            Self::Writev(from) => unsafe { libc::writev(fd, from.as_ptr(), count(from).cast_signed()) },
        };
        match i32::try_from(done) {
            Ok(n @ 0..) => n,
            _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// Returns the reason why a tap did not take a frame.
pub(crate) fn drop_reason(errno: i32) -> DropReason {
    match errno {
        libc::EINVAL => DropReason::BadHeader,
        libc::EMSGSIZE => DropReason::TooLong,
        libc::EIO | libc::EBADFD | libc::ENETDOWN => DropReason::Down,
        libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => DropReason::NoRoom,
        _ => DropReason::Other,
    }
}
