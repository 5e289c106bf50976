//! Requests of control threads, carried out by the same operations as those of the disk's queues.
//!
//! Each call uses a handle and an io_uring of its own, on a short-lived thread: when an io_uring is
//! closed, it interrupts the next wait of its thread, and callers are not prepared for that.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use qcow2::{Extent, Look};
use vshunt_engine::Uring;

use super::bits::Bits;
use super::bounce::AlignedBuf;
use super::disk::Disk;
use super::handle::DiskHandle;
use super::limits::SECTOR_BYTES;
use super::{Io, Op};

/// Longest range of the map that is asked for at once, bytes.
const SEEK_BYTES_MAX: u64 = 1 << 30;

impl Disk {
    /// Writes bytes at any offset; see [`merge`](Self::merge). Blocks.
    pub(super) fn merge_as_queue(self: &Arc<Self>, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let alignment = self.alignment();
        let first = offset / alignment * alignment;
        let len = ((offset + bytes.len() as u64).next_multiple_of(alignment) - first) as usize;
        self.read_and_write(first, len, fua, |buf| {
            buf[(offset - first) as usize..][..bytes.len()].copy_from_slice(bytes);
        })
    }

    /// Makes a range of bytes read as zeroes, and releases its space. Blocks.
    pub(super) fn clear(self: &Arc<Self>, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let whole = range.start.next_multiple_of(SECTOR_BYTES);
        if whole > range.start {
            self.merge_as_queue(range.start, &vec![0; (whole.min(range.end) - range.start) as usize], false)?;
        }
        if whole >= range.end {
            return Ok(());
        }
        self.as_queue(|handle, uring, io| {
            io.reset(Op::WriteZeroes { unmap: true }, whole, false);
            io.request.len = range.end - whole;
            handle.run(uring, io)
        })
    }

    /// Reads a range of whole sectors and writes the same bytes back. Blocks.
    pub(super) fn rewrite(self: &Arc<Self>, offset: u64, len: u64) -> io::Result<()> {
        self.read_and_write(offset, len as usize, false, |_| {})
    }

    fn read_and_write(
        self: &Arc<Self>,
        first: u64,
        len: usize,
        fua: bool,
        change: impl FnOnce(&mut [u8]) + Send,
    ) -> io::Result<()> {
        let mut buf = AlignedBuf::new(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut change = Some(change);
        self.as_queue(|handle, uring, io| {
            let mut merged = Ok(());
            for op in [Op::Read, Op::Write] {
                if op == Op::Write
                    && let Some(change) = change.take()
                {
                    change(&mut buf.bytes()[..len]);
                }
                io.reset(op, first, fua && op == Op::Write);
                // SAFETY: the buffer has `len` bytes. It and `io` live here until `run` returns,
                // which waits for the request.
                unsafe { io.push(buf.ptr(), len) };
                merged = merged.and_then(|()| handle.run(uring, io));
            }
            merged
        })
    }

    /// Finds data or a hole; see [`seek`](Self::seek). Blocks.
    pub(super) fn seek_as_queue(self: &Arc<Self>, offset: u64, hole: bool) -> io::Result<u64> {
        let size = self.size_bytes();
        let mut at = offset / self.alignment() * self.alignment();
        self.as_queue(|handle, uring, io| {
            while at < size {
                io.reset(Op::Seek { look: Look::Disk }, at, false);
                io.request.len = size - at;
                handle.run(uring, io)?;
                let Some(found) = io.request.found.filter(|found| found.len > 0) else { break };
                if (found.extent == Extent::Zero) == hole {
                    return Ok(at.max(offset));
                }
                at += found.len;
            }
            Ok(size)
        })
    }

    /// Sets the bits of the blocks that the image itself has, data or zeroes, without its backing
    /// images. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn own_blocks(self: &Arc<Self>, bits: &Bits) -> io::Result<()> {
        self.backend().lives()?;
        let (mut uring, mut io) = (Uring::new()?, Io::default());
        let handle = self.attach(&mut uring);
        let (mut at, size) = (0, bits.size());
        let mut result = Ok(());
        while at < size && result.is_ok() {
            io.reset(Op::Seek { look: Look::Image }, at, false);
            io.request.len = (size - at).min(SEEK_BYTES_MAX);
            result = handle.run(&mut uring, &mut io);
            // A range without an answer counts as data.
            let found = io.request.found.map(|f| (f.extent, f.len.max(SECTOR_BYTES)));
            let (extent, len) = found.unwrap_or((Extent::Data, io.request.len));
            if extent != Extent::Absent {
                bits.set(bits.blocks(at..at + len));
            }
            at += len;
        }
        handle.detach(&mut uring);
        result
    }

    /// Calls `work` with a handle and an io_uring, on a thread of its own.
    fn as_queue<T: Send>(
        self: &Arc<Self>,
        work: impl FnOnce(&DiskHandle, &mut Uring, &mut Io) -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let work = || {
            let (mut uring, mut io) = (Uring::new()?, Io::default());
            let handle = self.attach(&mut uring);
            let done = work(&handle, &mut uring, &mut io);
            handle.detach(&mut uring);
            done
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("vshunt-aside".to_owned());
            thread.spawn_scoped(scope, work)?.join().expect("it does not panic")
        })
    }
}
