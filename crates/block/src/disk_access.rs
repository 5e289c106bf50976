//! A disk for one thread that does one request after the other. For commands without a daemon.
//!
//! The thread must not use an io_uring of its own while it has one of these, or several of these
//! that end at different times: see `disk_io`.

use std::io;
use std::sync::Arc;

use qcow2::{Extent, Found, Look};
use vshunt_engine::Uring;

use super::bounce::AlignedBuf;
use super::disk::Disk;
use super::handle::DiskHandle;
use super::{Io, Op};

/// Bytes of the buffer beyond [`DiskAccess::BYTES_MAX`], for a start and an end that are not
/// aligned.
const SLACK: usize = 2 << 16;

/// A disk, with an io_uring and a buffer. Calls block.
pub struct DiskAccess {
    disk: Arc<Disk>,
    handle: Option<DiskHandle>,
    uring: Uring,
    io: Box<Io>,
    buf: AlignedBuf,
}

impl DiskAccess {
    /// Most bytes of one read or write.
    pub const BYTES_MAX: usize = 2 << 20;

    /// # Errors
    /// There is no memory, or no io_uring.
    pub fn new(disk: Arc<Disk>) -> io::Result<Self> {
        let mut uring = Uring::new()?;
        let buf = AlignedBuf::new(Self::BYTES_MAX + SLACK).ok_or(io::ErrorKind::OutOfMemory)?;
        let handle = Some(disk.attach(&mut uring));
        Ok(Self { disk, handle, uring, io: Box::default(), buf })
    }

    /// Returns the disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Returns the part of a request that is within the disk and has at most
    /// [`BYTES_MAX`](Self::BYTES_MAX) bytes, with its start and end moved to the disk's alignment.
    fn aligned(&self, offset: u64, len: usize) -> (u64, usize) {
        let alignment = self.disk.alignment().min(SLACK as u64 / 2);
        let end = (offset + len.min(Self::BYTES_MAX) as u64).next_multiple_of(alignment);
        let first = offset / alignment * alignment;
        (first, (end.min(self.disk.size_bytes().next_multiple_of(alignment)) - first) as usize)
    }

    /// Reads `len` bytes at `offset`, within the disk and at most [`BYTES_MAX`](Self::BYTES_MAX).
    ///
    /// # Errors
    /// The request's.
    pub fn read(&mut self, offset: u64, len: usize) -> io::Result<&[u8]> {
        let (first, whole) = self.aligned(offset, len);
        self.io.reset(Op::Read, first, false);
        // SAFETY: `aligned` returns at most as many bytes as the buffer has. The buffer and `io`
        // are owned by self, which is borrowed until `run` returns, and `run` waits for the
        // request.
        unsafe { self.io.push(self.buf.ptr(), whole) };
        self.run()?;
        Ok(&self.buf.bytes()[(offset - first) as usize..][..len])
    }

    /// Writes bytes at `offset`. Start and length are multiples of the disk's alignment, and there
    /// are at most [`BYTES_MAX`](Self::BYTES_MAX).
    ///
    /// # Errors
    /// The request's.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.buf.bytes()[..bytes.len()].copy_from_slice(bytes);
        self.io.reset(Op::Write, offset, false);
        // SAFETY: the buffer has these bytes, which were copied to it. It and `io` are owned by
        // self, which is borrowed until `run` returns, and `run` waits for the request.
        unsafe { self.io.push(self.buf.ptr(), bytes.len()) };
        self.run()
    }

    /// Makes a range read as zeroes, without giving its space back. The same limits as for
    /// [`write`](Self::write) hold, without one for the length.
    ///
    /// # Errors
    /// The request's.
    pub fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.io.reset(Op::WriteZeroes { unmap: false }, offset, false);
        self.io.request.len = len;
        self.run()
    }

    /// Asks what is at `offset`, for at most `len` bytes; see [`Op::Seek`].
    ///
    /// # Errors
    /// The request's.
    pub fn seek(&mut self, offset: u64, len: u64, own: bool) -> io::Result<Found> {
        let look = if own { Look::Image } else { Look::Disk };
        self.io.reset(Op::Seek { look }, offset, false);
        self.io.request.len = len;
        self.run()?;
        let all = Found { extent: Extent::Data, len };
        Ok(self.io.request.found.filter(|found| found.len > 0).unwrap_or(all))
    }

    fn run(&mut self) -> io::Result<()> {
        let handle = self.handle.as_ref().expect("it is there until the end");
        handle.run(&mut self.uring, &mut self.io)
    }
}

impl Drop for DiskAccess {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.detach(&mut self.uring);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vshunt_types::spec::{DiskSpec, Format};

    #[test]
    fn reads_and_writes_of_a_disk_in_memory() {
        let size = Some(4 << 20);
        let spec = DiskSpec { name: "d".into(), format: Some(Format::Ram), size, ..DiskSpec::default() };
        let mut disk = DiskAccess::new(Disk::open(&spec).unwrap()).unwrap();
        disk.write(4096, &[7; 512]).unwrap();
        assert_eq!(disk.read(4095, 514).unwrap()[..2], [0, 7]);
        assert_eq!(disk.read((4 << 20) - 1, 1).unwrap(), [0]);
        assert_eq!(disk.read(0, DiskAccess::BYTES_MAX).unwrap().len(), DiskAccess::BYTES_MAX);
        disk.zero(0, 4 << 20).unwrap();
        assert_eq!(disk.read(4096, 1).unwrap(), [0]);
        // A disk in memory knows no holes.
        assert_eq!(disk.seek(0, 4 << 20, false).unwrap(), Found { extent: Extent::Data, len: 4 << 20 });
    }
}
