//! The driver of a raw image that uses the worker's io_uring.

use io_uring::{opcode, squeue, types};
use libc::iovec;
use vshunt_engine::{Token, Uring, UringFile, on_file};

use super::{Next, PUNCH, Raw, SEGMENTS_MAX, TRANSFER_BYTES_MAX, ZERO};
use crate::bounce::Pool;
use crate::io::Stage;
use crate::{Io, Op, Step};

/// `_IO(0x12, 0)` of linux/blkdev.h (since Linux 6.12): discards `sqe.addr3` bytes at `sqe.addr`.
/// Their contents are undefined then, as with BLKDISCARD.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// The descriptors of a raw image in one io_uring.
#[derive(Clone, Copy)]
pub(crate) struct UringFiles {
    file: UringFile,
    /// The descriptor without O_DIRECT; the same as `file` if there is none.
    buffered: UringFile,
}

impl UringFiles {
    /// The image itself.
    #[inline]
    pub(crate) fn file(self) -> UringFile {
        self.file
    }
}

impl Raw {
    /// Registers the files with an io_uring.
    pub(crate) fn register(&self, uring: &mut Uring) -> UringFiles {
        if self.inline {
            // Few requests use the io_uring, so they take none of its places for registered files.
            let file = UringFile::Plain(self.known.as_raw_fd());
            return UringFiles { file, buffered: file };
        }
        let file = uring.register_file(&self.known);
        UringFiles { file, buffered: self.buffered.as_ref().map_or(file, |f| uring.register_file(f)) }
    }

    /// Undoes [`register`](Self::register).
    pub(crate) fn unregister(&self, uring: &mut Uring) {
        if self.inline {
            return;
        }
        uring.unregister_file(self.known.as_raw_fd());
        if let Some(buffered) = &self.buffered {
            uring.unregister_file(buffered.as_raw_fd());
        }
    }

    /// See [`DiskHandle::start`](crate::DiskHandle::start).
    #[inline]
    pub(crate) fn start(
        &self,
        files: UringFiles,
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
        files: UringFiles,
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

    /// Puts the operation of the request's stage on the io_uring.
    #[inline]
    fn issue(&self, files: UringFiles, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let entry = match io.state.stage {
            Stage::Transfer => {
                let file = if io.state.buffered { files.buffered } else { files.file };
                match *io.request.iov.left() {
                    [one] => self.one(file, io, one),
                    ref many => self.many(file, io, many),
                }
            }
            _ => self.other(files, io),
        };
        let entry = if self.offload { entry.flags(squeue::Flags::ASYNC) } else { entry };
        // SAFETY: the entry refers to memory that stays valid until the operation completes:
        // - segments, by the contract of `IoVecs::push`;
        // - their array or the bounce buffer: they belong to `io`, which by the same contract
        //   neither moves nor is dropped;
        // - the zeroes: they belong to `self`, and the handle has a reference to it until the queue
        //   has drained.
        unsafe { uring.push(entry, token) };
        if self.direct && !io.state.buffered {
            uring.pushed_for_device();
        }
        Step::Wait
    }

    /// Makes a read or write of one segment.
    #[inline]
    fn one(&self, file: UringFile, io: &Io, segment: iovec) -> squeue::Entry {
        let (ptr, at) = (segment.iov_base.cast::<u8>(), io.request.offset + io.state.done);
        let len = (segment.iov_len as u64).min(TRANSFER_BYTES_MAX) as u32;
        if io.request.op == Op::Read {
            on_file!(file, |fd| opcode::Read::new(fd, ptr, len).offset(at).build())
        } else {
            let flags = self.write_flags(io);
            on_file!(file, |fd| opcode::Write::new(fd, ptr, len).offset(at).rw_flags(flags).build())
        }
    }

    /// Makes a read or write of several segments.
    #[inline]
    fn many(&self, file: UringFile, io: &Io, segments: &[iovec]) -> squeue::Entry {
        let (ptr, at) = (segments.as_ptr(), io.request.offset + io.state.done);
        let count = segments.len().min(SEGMENTS_MAX) as u32;
        if io.request.op == Op::Read {
            on_file!(file, |fd| opcode::Readv::new(fd, ptr, count).offset(at).build())
        } else {
            let flags = self.write_flags(io);
            on_file!(file, |fd| opcode::Writev::new(fd, ptr, count).offset(at).rw_flags(flags).build())
        }
    }

    /// Makes any operation other than a transfer.
    #[cold]
    fn other(&self, files: UringFiles, io: &Io) -> squeue::Entry {
        let file = if io.state.buffered { files.buffered } else { files.file };
        let at = io.request.offset + io.state.done;
        let allocate = |mode| {
            on_file!(files.file, |fd| opcode::Fallocate::new(fd, io.request.len)
                .offset(io.request.offset)
                .mode(mode)
                .build())
        };
        match io.state.stage {
            Stage::Bounce => {
                let base = io.state.bounce.as_ref().map_or(std::ptr::null_mut(), |b| b.ptr());
                self.one(files.file, io, iovec { iov_base: base.cast(), iov_len: io.state.asked as usize })
            }
            Stage::Sync => on_file!(files.file, |fd| {
                opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
            }),
            Stage::DiscardCommand => {
                // The field addr3 is at the start of the 16 command bytes.
                let mut command = [0; 16];
                command[..8].copy_from_slice(&io.request.len.to_ne_bytes());
                on_file!(files.file, |fd| {
                    opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD)
                        .cmd(command)
                        .addr(Some(io.request.offset))
                        .build()
                })
            }
            Stage::DiscardPunch | Stage::ZeroPunch => allocate(PUNCH),
            Stage::ZeroRange => allocate(ZERO),
            Stage::ZeroWrite => on_file!(file, |fd| {
                opcode::Write::new(fd, self.zeroes.ptr(), io.state.asked).offset(at).build()
            }),
            Stage::Allocate => allocate(libc::FALLOC_FL_KEEP_SIZE),
            Stage::Idle | Stage::Transfer => {
                debug_assert!(false, "nothing to issue");
                opcode::Nop::new().build()
            }
        }
    }
}
