//! A tap's queue as a worker knows it: frames are read and written by operations that never wait.
//!
//! Operations on the worker's ring, a batch with one system call. Before Linux 6.4 a tap refuses those that are not to wait
//! (FMODE_NOWAIT); there each frame is a system call, done at once, which completes like an operation.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::opcode;
use vshunt_engine::on_file;
use vshunt_engine::{Token, Uring, UringFile};
use vshunt_net::TapQueue;

/// See the module.
#[derive(Clone, Copy)]
pub(super) struct TapFile {
    file: UringFile,
    /// The descriptor, which does not wait, where the ring cannot be used.
    by_call: Option<RawFd>,
}

impl TapFile {
    /// Makes it known to a ring; to be undone by [`forget`](Self::forget).
    pub(super) fn know(uring: &mut Uring, tap: &Arc<TapQueue>) -> Self {
        let by_call = (!tap.has_nowait()).then(|| tap.as_raw_fd());
        let tap: Arc<dyn AsRawFd + Send + Sync> = tap.clone();
        Self { file: uring.know(&tap), by_call }
    }

    /// Undoes one [`know`](Self::know).
    pub(super) fn forget(uring: &mut Uring, tap: &TapQueue) {
        uring.forget(tap.as_raw_fd());
    }

    /// Begins to read or write a frame. Its completion tells the bytes, or the negative errno: `EAGAIN` where it would have
    /// to wait.
    ///
    /// # Safety
    /// That of [`Ring::push`]: what `op` names, iovecs and memory, is valid until the completion was taken.
    #[inline]
    pub(super) unsafe fn begin(self, uring: &mut Uring, op: Op<'_>, token: Token) {
        if let Some(fd) = self.by_call {
            // SAFETY: the caller's promise is passed on.
            let result = unsafe { op.call(fd) };
            return uring.done(token, result);
        }
        let entry = on_file!(self.file, |fd| match op {
            Op::Read(to, len) => opcode::Read::new(fd, to, len).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Readv(to) =>
                opcode::Readv::new(fd, to.as_ptr(), to.len() as u32).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Write(from, len) => opcode::Write::new(fd, from, len).rw_flags(libc::RWF_NOWAIT).build(),
            Op::Writev(from) =>
                opcode::Writev::new(fd, from.as_ptr(), from.len() as u32).rw_flags(libc::RWF_NOWAIT).build(),
        });
        // SAFETY: the caller's promise is passed on.
        unsafe { uring.push(entry, token) }
    }
}

/// One frame, behind its header.
pub(super) enum Op<'a> {
    /// Into one piece of memory, of so many bytes.
    Read(*mut u8, u32),
    /// Into several.
    Readv(&'a [libc::iovec]),
    /// Out of one.
    Write(*const u8, u32),
    /// Out of several.
    Writev(&'a [libc::iovec]),
}

impl Op<'_> {
    /// Does it at once, on a descriptor that does not wait.
    ///
    /// # Safety
    /// The memory is valid.
    #[cold]
    unsafe fn call(self, fd: RawFd) -> i32 {
        // SAFETY: the caller's promise is passed on.
        let done = unsafe {
            match self {
                Self::Read(to, len) => libc::read(fd, to.cast(), len as usize),
                Self::Readv(to) => libc::readv(fd, to.as_ptr(), to.len() as i32),
                Self::Write(from, len) => libc::write(fd, from.cast(), len as usize),
                Self::Writev(from) => libc::writev(fd, from.as_ptr(), from.len() as i32),
            }
        };
        match i32::try_from(done) {
            Ok(n @ 0..) => n,
            _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    }
}
