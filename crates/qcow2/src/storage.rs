//! The file of an image, for offline work.

use std::io;

/// A file of the caller. Calls may block.
pub trait Storage {
    /// Reads bytes at `offset`. Bytes beyond the end read as zeroes.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all bytes at `offset`. The file grows if necessary.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// The system's.
    fn len(&self) -> io::Result<u64>;

    /// Returns whether it has no bytes.
    ///
    /// # Errors
    /// The system's.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes it `len` bytes long. A new part reads as zeroes.
    ///
    /// # Errors
    /// The system's.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Allocates zeroed space like `posix_fallocate`, or writes zeroes if the file system cannot do
    /// that.
    ///
    /// # Errors
    /// The system's.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes the range read as zeroes, and gives its space back if the file system can do that.
    ///
    /// # Errors
    /// The system's.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes everything that was written stable.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()>;

    /// Returns whether nothing was ever written to the range, so that it reads as zeroes without
    /// being read. `false` is always correct. Tables of hostile sparse images are skipped with it.
    ///
    /// # Errors
    /// The system's.
    fn is_hole(&self, _offset: u64, _len: u64) -> io::Result<bool> {
        Ok(false)
    }
}
