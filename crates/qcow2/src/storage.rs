//! The file that an image lies in, as offline work sees it.

use std::io;

/// A file of the caller's. Calls block.
pub trait Storage {
    /// Reads bytes at `offset`; what lies beyond the end reads as zeroes.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all bytes at `offset`; the file grows where it has to.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// The file's length, bytes.
    ///
    /// # Errors
    /// The system's.
    fn len(&self) -> io::Result<u64>;

    /// Whether it has no bytes.
    ///
    /// # Errors
    /// The system's.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes it `len` bytes long; what it grows by reads as zeroes.
    ///
    /// # Errors
    /// The system's.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Has its space on the disk, zeroed: `posix_fallocate`'s meaning, or zeroes written where the file system cannot.
    ///
    /// # Errors
    /// The system's.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;

    /// The range reads as zeroes afterwards and gives its space back where the file system can.
    ///
    /// # Errors
    /// The system's.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    /// All that was written is on stable storage.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()>;

    /// Whether nothing was ever written to the range, so that it reads as zeroes without being read. `false` is always
    /// right; tables of hostile sparse images are passed over with it.
    ///
    /// # Errors
    /// The system's.
    fn is_hole(&self, _offset: u64, _len: u64) -> io::Result<bool> {
        Ok(false)
    }
}
