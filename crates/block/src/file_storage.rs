//! A file as the storage of an image that no queue uses: to create, check, repair and change qcow2
//! images.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use qcow2::Storage;
use vshunt_sandbox as sandbox;

use super::raw::Raw;

/// A file, read and written through the page cache.
pub(super) struct FileStorage {
    file: File,
    /// Syncs do nothing.
    no_sync: bool,
}

impl FileStorage {
    /// A file without other users.
    pub(super) fn new(file: File) -> Self {
        Self { file, no_sync: false }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Opens the file of a raw image again, without O_DIRECT and so without its alignment.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn of(raw: &Raw, readonly: bool, no_sync: bool) -> io::Result<Self> {
        Ok(Self { file: sandbox::reopen(raw.image(), !readonly)?, no_sync })
    }
}

impl Storage for FileStorage {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            match self.file.read_at(&mut buf[at..], offset + at as u64) {
                Ok(0) => break,
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        buf[at..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        let meta = self.file.metadata()?;
        if meta.file_type().is_block_device() {
            return rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0)).map_err(Into::into);
        }
        Ok(meta.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::empty(), offset, len)
            .map_err(Into::into)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, len).map_err(Into::into)
    }

    fn sync(&self) -> io::Result<()> {
        if self.no_sync { Ok(()) } else { self.file.sync_data() }
    }
}

/// Returns the path of the backing image of an overlay in `file`; none if it is no qcow2 image.
///
/// # Errors
/// The system's.
pub(super) fn backing_of(path: &Path, file: File) -> io::Result<Option<PathBuf>> {
    match qcow2::Image::open(&FileStorage::new(file)) {
        Ok(image) => Ok(image.header().backing.as_ref().map(|name| in_folder_of(path, name))),
        Err(qcow2::Error::Io { source, .. }) => Err(source),
        Err(_) => Ok(None),
    }
}

/// Resolves a name in an image, which is relative to the folder of the image.
pub(super) fn in_folder_of(image: &Path, name: &str) -> PathBuf {
    let name = name.strip_prefix("file:").unwrap_or(name);
    image.parent().unwrap_or(Path::new("")).join(name)
}
