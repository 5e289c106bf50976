//! The size of a disk, and its changes while the disk is served.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vshunt_types::error::{Error, Result};

use super::Disk;
use crate::backend::Backend;
use crate::limits::{SECTOR_BYTES, whole_sectors};
use crate::memory::Ram;

impl Disk {
    /// Returns the current size, bytes; a multiple of 512. It is 0 only for an empty image file,
    /// which only a growable mount serves.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Announces that an image file will shrink. Requests beyond `size_bytes` are refused from now
    /// on, so that after a drain [`resize`](Self::resize) can cut the file while other requests
    /// continue. Returns false, and changes nothing, if a resize of this disk is quick.
    ///
    /// # Errors
    /// Those of [`resize`](Self::resize) that are known in advance; nothing is changed then.
    pub fn announce_shrink(&self, size_bytes: u64) -> Result<bool> {
        Self::check_size(size_bytes)?;
        match &self.backend() {
            Backend::Raw(raw) if raw.is_file() && !self.readonly => {
                self.size_bytes.store(size_bytes, Ordering::Release);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Changes the size to `size_bytes`, a positive multiple of 512. New bytes read as zeroes.
    ///
    /// Before a disk shrinks its queues have to be drained: a write in flight beyond the new end
    /// would make an image file longer again. (Memory stays valid in any case.) One resize runs at
    /// a time.
    ///
    /// # Errors
    /// `Invalid` for a size that is no multiple of 512 and for a read-only image,
    /// `Unsupported` for a block device of another size, `Limit` if memory cannot grow that far,
    /// `Io` for errors of the system.
    pub fn resize(&self, size_bytes: u64) -> Result<()> {
        Self::check_size(size_bytes)?;
        let old = self.size_bytes();
        if size_bytes < old {
            // Before the change: a reader of the size stays within what exists.
            self.size_bytes.store(size_bytes, Ordering::Release);
        }
        let resized = match &self.backend() {
            Backend::Null => Ok(()),
            Backend::Ram(ram) => ram.resize(old, size_bytes),
            Backend::Gone => Err(Error::invalid("its image is gone: remove the disk, and add it again")),
            Backend::Raw(raw) => raw.resize(size_bytes, self.readonly),
            Backend::Nbd(_) => Err(Error::unsupported(
                "its server decides on its size: change it there, then remove the disk and add it again",
            )),
            Backend::Frozen => {
                Err(Error::unsupported("it shows another disk as it was, and keeps the size of that time"))
            }
            Backend::Qcow2(_) => Err(Error::unsupported(
                "a qcow2 disk gets another size while its image is closed, or by the users of a growable mount",
            )),
        };
        self.size_bytes.store(if resized.is_ok() { size_bytes } else { old }, Ordering::Release);
        self.times.changed();
        resized
    }

    /// Reads the size of the image file again, after another process has made the file longer.
    pub fn refresh_size(&self) {
        if let Some(Ok(meta)) = self.image().map(|image| image.metadata()) {
            let size_bytes = MetadataExt::size(&meta).next_multiple_of(SECTOR_BYTES);
            self.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
        }
    }

    /// Ends the disk after `end` bytes. The size becomes that in whole sectors, which may be 0.
    /// Bytes beyond read as zeroes if the disk grows again. Blocks. No write and no other change of
    /// the size may be in flight.
    ///
    /// # Errors
    /// `EPERM` for a block device, `ENOSPC` for memory, `EFBIG` if no file can have the
    /// size, else the system's.
    pub fn truncate(self: &Arc<Self>, end: u64) -> io::Result<()> {
        let (old, size_bytes) = (self.size_bytes(), whole_sectors(end)?);
        self.size_bytes.store(size_bytes.min(old), Ordering::Release);
        let cut = match &self.backend() {
            Backend::Null => Ok(()),
            Backend::Ram(ram) => resize_ram(ram, old, size_bytes).map(|()| ram.clear(end, size_bytes - end)),
            Backend::Raw(raw) => raw.truncate(end, size_bytes),
            Backend::Gone => Err(io::Error::from_raw_os_error(libc::EIO)),
            Backend::Qcow2(image) if self.growable() => {
                self.clear(end..old).and_then(|()| image.set_size(size_bytes))
            }
            Backend::Qcow2(_) | Backend::Nbd(_) | Backend::Frozen => {
                Err(io::Error::from_raw_os_error(libc::EPERM))
            }
        };
        self.size_bytes.store(if cut.is_ok() { size_bytes } else { old }, Ordering::Release);
        // Also a change that failed may have cleared bytes.
        self.times.changed();
        cut
    }

    /// Returns whether users of a mount may change the size; see
    /// [`make_growable`](Self::make_growable).
    pub fn growable(&self) -> bool {
        self.growable.load(Ordering::Relaxed)
    }

    /// Makes the disk `end` bytes long, in whole sectors, if it is shorter. New bytes read as
    /// zeroes. Returns whether it was shorter. Blocks. One call runs at a time, and none during a
    /// [`resize`](Self::resize). No write to a qcow2 disk may be in flight.
    ///
    /// # Errors
    /// `EPERM` for a block device, `ENOSPC` for memory, `EFBIG` if the L1 table of a qcow2
    /// disk is too small, else the system's.
    pub fn lengthen(&self, end: u64) -> io::Result<bool> {
        let (old, size_bytes) = (self.size_bytes(), whole_sectors(end)?);
        if size_bytes <= old {
            return Ok(false);
        }
        match &self.backend() {
            Backend::Null => {}
            Backend::Ram(ram) => resize_ram(ram, old, size_bytes)?,
            Backend::Raw(raw) => raw.lengthen(size_bytes)?,
            Backend::Gone => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Backend::Qcow2(image) if self.growable() => image.set_size(size_bytes)?,
            Backend::Qcow2(_) | Backend::Nbd(_) | Backend::Frozen => {
                return Err(io::Error::from_raw_os_error(libc::EPERM));
            }
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        self.times.changed();
        Ok(true)
    }
}

fn resize_ram(ram: &Ram, old: u64, new: u64) -> io::Result<()> {
    ram.resize(old, new).map_err(|_| io::Error::from_raw_os_error(libc::ENOSPC))
}
