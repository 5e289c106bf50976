//! The driver of a raw image that is a file in memory.
//!
//! Each operation is a system call, made at once. Long discards, WriteZeroes and allocations go to
//! io-wq instead: their time grows with the range. A sync of such a file does nothing, so it is
//! left out.

use libc::{c_int, off_t};

use super::{Next, PUNCH, Raw, SEGMENTS_MAX, ZERO};
use crate::bounce::Pool;
use crate::io::Stage;
use crate::{Io, Op, Step};

/// Longest range that is zeroed, discarded or allocated at once, bytes. Other queues of the worker
/// wait for that time.
const AT_ONCE_MAX: u64 = 4 << 20;

impl Raw {
    /// Returns whether [`run_inline`](Self::run_inline) carries out this request.
    #[inline]
    pub(crate) fn at_once(&self, io: &Io) -> bool {
        let long = || {
            io.request.len > AT_ONCE_MAX
                && matches!(io.request.op, Op::Discard | Op::WriteZeroes { .. } | Op::Allocate)
        };
        self.inline && !long()
    }

    /// Carries out a whole request. Returns 0 or a negative errno.
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

    /// Makes the system call of the request's stage. Returns its result or a negative errno.
    #[inline]
    fn call(&self, io: &Io) -> i32 {
        let (fd, at) = (self.fd(), (io.request.offset + io.state.done) as off_t);
        let n = match io.state.stage {
            Stage::Transfer => {
                let segments = io.request.iov.left();
                let count = segments.len().min(SEGMENTS_MAX) as c_int;
                // If the memory of a segment has been cut (by a guest that shrinks its file), the
                // kernel answers EFAULT.
                match (io.request.op, segments) {
                    // SAFETY: the segment is valid by the contract of `IoVecs::push`.
                    (Op::Read, [one]) => unsafe { libc::pread(fd, one.iov_base, one.iov_len, at) },
                    // SAFETY: the segment is valid by the contract of `IoVecs::push`.
                    (_, [one]) => unsafe { libc::pwrite(fd, one.iov_base, one.iov_len, at) },
                    // SAFETY: the array has at least `count` segments, all valid by the contract of
                    // `IoVecs::push`.
                    (Op::Read, many) => unsafe { libc::preadv2(fd, many.as_ptr(), count, at, 0) },
                    // SAFETY: the array has at least `count` segments, all valid by the contract of
                    // `IoVecs::push`.
                    (_, many) => unsafe { libc::pwritev2(fd, many.as_ptr(), count, at, 0) },
                }
            }
            // SAFETY: `zeroes` is a readable mapping, and `asked` is at most its length (see
            // `zero_write`).
            Stage::ZeroWrite => unsafe {
                libc::pwrite(fd, self.zeroes.ptr().cast(), io.state.asked as usize, at)
            },
            Stage::DiscardPunch | Stage::ZeroPunch => allocate(fd, PUNCH, io),
            Stage::ZeroRange => allocate(fd, ZERO, io),
            Stage::Allocate => allocate(fd, libc::FALLOC_FL_KEEP_SIZE, io),
            // A file in memory needs no sync and no bounce buffer, and is no block device.
            Stage::Sync => 0,
            Stage::Idle | Stage::Bounce | Stage::DiscardCommand => return -libc::EOPNOTSUPP,
        };
        if n < 0 {
            return -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        // One call transfers less than 2^31 bytes (MAX_RW_COUNT).
        n as i32
    }
}

/// Calls fallocate for the request's range.
fn allocate(fd: c_int, mode: c_int, io: &Io) -> isize {
    // SAFETY: fallocate takes no pointers.
    unsafe { libc::fallocate(fd, mode, io.request.offset as off_t, io.request.len as off_t) as isize }
}
