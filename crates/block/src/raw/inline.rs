//! The driver of a raw image's requests for files in memory: each operation is a system call, made at once. Long ranges are
//! zeroed, discarded or allocated by a thread of io_uring's instead, as on a disk: they take as long as a file is large.
//!
//! Such a file is as stable as it will ever be once it is written: syncing does nothing, so it is left out.

use libc::{c_int, off_t};

use super::{Next, PUNCH, Raw, SEGMENTS_MAX, ZERO};
use crate::bounce::Pool;
use crate::io::Stage;
use crate::{Io, Op, Step, last_errno};

/// Bytes that are zeroed, discarded or allocated at once, at most: other queues of the worker wait meanwhile.
const AT_ONCE_MAX: u64 = 4 << 20;

impl Raw {
    /// Whether a request is done by [`run_inline`](Self::run_inline), before it returns.
    #[inline]
    pub(crate) fn at_once(&self, io: &Io) -> bool {
        let long =
            || io.len > AT_ONCE_MAX && matches!(io.op, Op::Discard | Op::WriteZeroes { .. } | Op::Allocate);
        self.inline && !long()
    }

    /// Does a whole request: 0, or a negative errno.
    #[inline]
    pub(crate) fn run_inline(&self, io: &mut Io, pool: &Pool) -> i32 {
        let mut next = self.begin(io, pool);
        loop {
            match next {
                Next::Done(res) => {
                    let Step::Done(res) = self.end(io, pool, res) else { return -libc::EIO };
                    return res;
                }
                Next::Issue => {
                    let res = self.call(io);
                    next = self.after(io, pool, res);
                }
            }
        }
    }

    /// Makes the system call that the request's stage names: its result, or a negative errno.
    #[inline]
    fn call(&self, io: &Io) -> i32 {
        let (fd, at) = (self.fd(), (io.offset + io.done) as off_t);
        let n = match io.stage {
            Stage::Transfer => {
                let segments = io.iov.left();
                let count = segments.len().min(SEGMENTS_MAX) as c_int;
                // The segments' addresses may be of memory that is gone, which the kernel answers with EFAULT.
                match (io.op, segments) {
                    // SAFETY: the segments are valid by `IoVecs::push`, their array has `count` entries.
                    (Op::Read, [one]) => unsafe { libc::pread(fd, one.iov_base, one.iov_len, at) },
                    // SAFETY: as for pread.
                    (_, [one]) => unsafe { libc::pwrite(fd, one.iov_base, one.iov_len, at) },
                    // SAFETY: as for pread.
                    (Op::Read, many) => unsafe { libc::preadv2(fd, many.as_ptr(), count, at, 0) },
                    // SAFETY: as for pread.
                    (_, many) => unsafe { libc::pwritev2(fd, many.as_ptr(), count, at, 0) },
                }
            }
            // SAFETY: the zeroes are mapped, `asked` is at most their length.
            Stage::ZeroWrite => unsafe { libc::pwrite(fd, self.zeroes.ptr().cast(), io.asked as usize, at) },
            // SAFETY: a call without memory.
            Stage::DiscardPunch | Stage::ZeroPunch => unsafe { allocate(fd, PUNCH, io) },
            // SAFETY: a call without memory.
            Stage::ZeroRange => unsafe { allocate(fd, ZERO, io) },
            // SAFETY: a call without memory.
            Stage::Allocate => unsafe { allocate(fd, libc::FALLOC_FL_KEEP_SIZE, io) },
            // Nothing to sync; and no bounce buffers or block devices here.
            Stage::Sync => 0,
            Stage::Idle | Stage::Bounce | Stage::DiscardCommand => return -libc::EOPNOTSUPP,
        };
        // What is read or written at once is less than 2^31 (MAX_RW_COUNT).
        if n < 0 { last_errno() } else { n as i32 }
    }
}

unsafe fn allocate(fd: c_int, mode: c_int, io: &Io) -> isize {
    // SAFETY: fallocate takes no pointers; that the descriptor is an image's is the caller's.
    unsafe { libc::fallocate(fd, mode, io.offset as off_t, io.len as off_t) as isize }
}
