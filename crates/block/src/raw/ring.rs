//! The driver of a raw image's requests by way of the worker's io_uring.

use io_uring::{opcode, squeue, types};
use libc::iovec;
use vshunt_engine::on_file;
use vshunt_engine::{Token, Uring};

use super::{Next, PUNCH, Raw, SEGMENTS_MAX, TRANSFER_BYTES_MAX, ZERO};
use crate::bounce::Pool;
use crate::io::Stage;
use crate::{Io, Op, RingFiles, Step};

/// `_IO(0x12, 0)` of linux/blkdev.h (since Linux 6.12): discards `sqe.addr3` bytes at `sqe.addr`. What the device
/// keeps of them is undefined, as for BLKDISCARD.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

impl Raw {
    /// See [`DiskHandle::start`](crate::DiskHandle::start).
    #[inline]
    pub(crate) fn start(
        &self,
        files: RingFiles,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Step {
        match self.begin(io, pool) {
            Next::Issue => self.issue(files, uring, io, token),
            Next::Done(res) => self.end(io, pool, res),
        }
    }

    /// See [`DiskHandle::resume`](crate::DiskHandle::resume).
    #[inline]
    pub(crate) fn resume(
        &self,
        files: RingFiles,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        match self.after(io, pool, res) {
            Next::Issue => self.issue(files, uring, io, token),
            Next::Done(res) => self.end(io, pool, res),
        }
    }

    /// Puts the operation that the request's stage names on the ring.
    #[inline]
    fn issue(&self, files: RingFiles, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let entry = match io.stage {
            Stage::Transfer => {
                let file = if io.aside { files.aside } else { files.file };
                match *io.iov.left() {
                    [one] => self.one(file, io, one),
                    ref many => self.many(file, io, many),
                }
            }
            _ => self.other(files, io),
        };
        let entry = if self.offload { entry.flags(squeue::Flags::ASYNC) } else { entry };
        // SAFETY: the entry names segments (valid until the request is done, by `IoVecs::push`), their array or the
        // bounce buffer (in `io`, which does not move and is not dropped until then, by the same promise), or the
        // page of zeroes (of the disk, to which the handle holds a reference until the queue has drained).
        unsafe { uring.push(entry, token) };
        Step::Wait
    }

    #[inline]
    fn one(&self, file: vshunt_engine::UringFile, io: &Io, segment: iovec) -> squeue::Entry {
        let (ptr, at) = (segment.iov_base.cast::<u8>(), io.offset + io.done);
        let len = (segment.iov_len as u64).min(TRANSFER_BYTES_MAX) as u32;
        if io.op == Op::Read {
            on_file!(file, |fd| opcode::Read::new(fd, ptr, len).offset(at).build())
        } else {
            let flags = self.write_flags(io);
            on_file!(file, |fd| opcode::Write::new(fd, ptr, len).offset(at).rw_flags(flags).build())
        }
    }

    #[inline]
    fn many(&self, file: vshunt_engine::UringFile, io: &Io, segments: &[iovec]) -> squeue::Entry {
        let (ptr, at) = (segments.as_ptr(), io.offset + io.done);
        let count = segments.len().min(SEGMENTS_MAX) as u32;
        if io.op == Op::Read {
            on_file!(file, |fd| opcode::Readv::new(fd, ptr, count).offset(at).build())
        } else {
            let flags = self.write_flags(io);
            on_file!(file, |fd| opcode::Writev::new(fd, ptr, count).offset(at).rw_flags(flags).build())
        }
    }

    #[cold]
    fn other(&self, files: RingFiles, io: &Io) -> squeue::Entry {
        let file = if io.aside { files.aside } else { files.file };
        let at = io.offset + io.done;
        let allocate = |mode| {
            on_file!(files.file, |fd| opcode::Fallocate::new(fd, io.len).offset(io.offset).mode(mode).build())
        };
        match io.stage {
            Stage::Bounce => {
                let base = io.bounce.as_ref().map_or(std::ptr::null_mut(), |b| b.ptr());
                self.one(files.file, io, iovec { iov_base: base.cast(), iov_len: io.asked as usize })
            }
            Stage::Sync => on_file!(files.file, |fd| {
                opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
            }),
            Stage::DiscardCommand => {
                // addr3 lies where the 16 command bytes begin.
                let mut command = [0; 16];
                command[..8].copy_from_slice(&io.len.to_ne_bytes());
                on_file!(files.file, |fd| {
                    opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD)
                        .cmd(command)
                        .addr(Some(io.offset))
                        .build()
                })
            }
            Stage::DiscardPunch | Stage::ZeroPunch => allocate(PUNCH),
            Stage::ZeroRange => allocate(ZERO),
            Stage::ZeroWrite => on_file!(file, |fd| {
                opcode::Write::new(fd, self.zeroes.ptr(), io.asked).offset(at).build()
            }),
            Stage::Allocate => allocate(libc::FALLOC_FL_KEEP_SIZE),
            Stage::Idle | Stage::Transfer => {
                debug_assert!(false, "nothing to issue");
                opcode::Nop::new().build()
            }
        }
    }
}
