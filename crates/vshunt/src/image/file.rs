//! A file or block device as the [`Storage`] of `qcow2`.

use std::cell::Cell;
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use qcow2::Storage;
use qcow2::header::{Header, Open};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use vshunt_block::{
    JournalView, PathFd, Recovered, check_overlay_marks, journal_path, lock_image_telling, read_journal,
    recover_journal, remove_journal,
};
use vshunt_types::error::Kind;

use super::journal::MapJournal;
use super::{ImageFormat, holder};
use crate::foreign;
use crate::outcome::{Failure, Outcome, note, warn};

/// The purpose for which an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum For {
    Reading,
    /// Reading, even if another process writes.
    Sharing,
    Writing,
    /// Writing. A missing file is made.
    Making,
}

fn check_kind(path: &Path, kind: FileType) -> Outcome {
    match kind.is_file() || kind.is_block_device() {
        true => Ok(()),
        false => Err(Failure::Failed(format!("{} is neither a file nor a block device", path.display()))),
    }
}

/// Returns whether a name is one that the key `uri` of a disk takes.
fn is_uri(path: &Path) -> bool {
    let text = path.to_string_lossy();
    ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"].iter().any(|scheme| text.starts_with(scheme))
}

/// Returns what tells a file or a device from all others; none if there is none with this name.
pub(super) fn id(path: &Path) -> Option<(u64, u64)> {
    match std::fs::metadata(path).ok()? {
        // A device can have several nodes.
        m if m.file_type().is_block_device() => Some((0, m.rdev())),
        m => Some((m.dev(), m.ino())),
    }
}

/// An open image, which is locked.
pub(super) struct ImageFile {
    file: File,
    device: bool,
    /// Whether it is not locked.
    shared: bool,
    /// The end of a device that was truncated, in bytes. A device keeps its length.
    end: Cell<Option<u64>>,
}

impl ImageFile {
    pub(super) fn open(path: &Path, purpose: For) -> Outcome<Self> {
        let shown = path.display();
        if is_uri(path) && !path.exists() {
            return Err(Failure::Failed(format!(
                "{shown} is on a server, and 'vshunt image' works on files of this host: use 'qemu-img' for it (with \
                 TLS by --image-opts), or copy a disk with uri={shown} by 'vshunt backup start'"
            )));
        }
        let writable = matches!(purpose, For::Writing | For::Making);
        if writable {
            check_overlay_marks(path, false)?;
        }
        let cannot = |e| Failure::Failed(format!("cannot open {shown}: {e}"));
        // The names of files in an image come from its writer.
        let file = match PathFd::open(path) {
            Ok(seen) => {
                seen.check(path).map_err(|e| Failure::Failed(e.to_string()))?;
                seen.reopen(writable, 0)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound && purpose == For::Making => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(false);
                options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
            }
            Err(e) => Err(e),
        };
        let file = file.map_err(cannot)?;
        let kind = file.metadata().map_err(|e| Failure::Failed(format!("{shown}: {e}")))?.file_type();
        check_kind(path, kind)?;
        if purpose != For::Sharing {
            let mut waits = |patience: Duration| {
                let by = holder::of(&file);
                note(&format!("{shown} is in use by {by}; waiting up to {} s for it", patience.as_secs()));
            };
            lock_image_telling(&file, path, !writable, &mut waits).map_err(|e| match e.kind() {
                Kind::Busy => in_use(path, &holder::of(&file), purpose),
                _ => Failure::Failed(e.to_string()),
            })?;
        }
        let shared = purpose == For::Sharing;
        Ok(Self { file, device: kind.is_block_device(), shared, end: Cell::new(None) })
    }

    /// Returns its format, detected from its first bytes. `path` is for the message.
    ///
    /// # Errors
    /// It cannot be read, or it begins like a qcow2 image of an unknown version, or like an image
    /// of another format.
    pub(super) fn probe(&self, path: &Path) -> Outcome<ImageFormat> {
        let (shown, mut start) = (path.display(), [0; foreign::START_BYTES]);
        self.read_at(0, &mut start).map_err(|e| Failure::Failed(format!("cannot read {shown}: {e}")))?;
        let found = self.format_of(path, &start)?;
        if let Some(why) = foreign::misnamed(path, found == ImageFormat::Qcow2) {
            let other = if found == ImageFormat::Qcow2 { "raw" } else { "qcow2" };
            warn(&format!("{why}; rename it, or give -f {other} if its name is right"));
        }
        Ok(found)
    }

    /// Returns the format for the first bytes.
    fn format_of(&self, path: &Path, start: &[u8]) -> Outcome<ImageFormat> {
        let shown = path.display();
        match Header::probe(start) {
            None => match foreign::format(start) {
                None => Ok(ImageFormat::Raw),
                Some(what) => Err(Failure::Failed(format!(
                    "{shown} begins as {what}, which vshunt does not read; convert it with qemu-img, or give -f raw if its \
                     bytes are the disk"
                ))),
            },
            Some(version) if Header::knows(version) => Ok(ImageFormat::Qcow2),
            Some(version) => Err(Failure::Failed(format!(
                "{shown} begins as a qcow2 image of version {version}, and versions 2 and 3 are known; convert it with \
                 qemu-img, or give -f raw if its bytes are the disk"
            ))),
        }
    }

    /// Applies the journal of a killed daemon to a qcow2 image that is open for writing. Its
    /// reference counts have to be repaired afterwards.
    pub(super) fn recover(&self, path: &Path) -> Outcome {
        match recover_journal(&self.file, self, path).map_err(|e| super::failed(path, &e))? {
            Recovered::Clean | Recovered::CountsOnly => {}
            Recovered::Changes(0) => {}
            Recovered::Changes(n) => note(&format!(
                "{} was not closed: {n} changes of its map are applied from its journal",
                path.display()
            )),
            Recovered::Lost(why) => note(&format!(
                "{} was not closed and {why}: writes that were not flushed may be lost",
                path.display()
            )),
        }
        Ok(())
    }

    /// Returns the map journal of a qcow2 image with this header. None: the image was closed, or
    /// its last writer kept no journal and each write was stable. Changes nothing.
    pub(super) fn journal(&self, header: &Header) -> Option<MapJournal> {
        let open = qcow2::journal::journal_of(header)?;
        let state = match read_journal(&self.file, header, self.shared) {
            JournalView::Complete => return None,
            state => state,
        };
        let has_file = !matches!(open, Open::Without { .. });
        Some(MapJournal { path: journal_path(&self.file).ok().filter(|_| has_file), state })
    }

    /// Returns the map journal of a qcow2 image that lacks completed writes, and warns the user.
    /// None: the image was closed, or a live process has it open.
    pub(super) fn lacking(&self, path: &Path) -> Outcome<Option<MapJournal>> {
        let fail = |e: qcow2::Error| super::failed(path, &e);
        let header = qcow2::Image::open(self).map_err(fail)?.header().clone();
        let shown = path.display();
        let journal = self.journal(&header);
        match journal.as_ref().map(|journal| &journal.state) {
            // An image that a live process writes is complete once that process has closed it.
            None | Some(JournalView::Complete | JournalView::InUse) => return Ok(None),
            Some(JournalView::Changes(changes)) if changes.count() == 0 => note(&format!(
                "{shown} was not closed, and no change is missing in it; 'vshunt image check -r all {shown}' \
                 brings its reference counts up to date"
            )),
            Some(JournalView::Changes(changes)) => note(&format!(
                "{shown} was not closed: {} changes of its map are in its journal and not in the image yet; \
                 'vshunt image check -r all {shown}' applies them",
                changes.count()
            )),
            Some(JournalView::Lost(why)) => note(&format!(
                "{shown} was not closed and {why}: writes that were not flushed may be lost; \
                 'vshunt image check -r all {shown}' repairs what is there"
            )),
        }
        Ok(journal)
    }

    /// Removes the journal after a repair. The changes that [`recover`](Self::recover) applied are
    /// in the image.
    pub(super) fn recovered(&self) {
        remove_journal(&self.file);
    }

    /// Returns whether it is a block device.
    pub(super) fn is_device(&self) -> bool {
        self.device
    }

    /// Returns the bytes that it occupies on its file system.
    pub(super) fn space(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Returns whether the file has a hole at `offset`, and for how many bytes (at most `len`) the
    /// answer holds. A device has none; all behind the end of a file is one.
    pub(super) fn run(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        use rustix::fs::{SeekFrom, seek};
        if self.device {
            return Ok((false, len));
        }
        let from = |at: u64| at.saturating_sub(offset).clamp(1, len);
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => Ok((true, from(data))),
            Ok(_) => match seek(&self.file, SeekFrom::Hole(offset)) {
                Ok(hole) => Ok((false, from(hole))),
                Err(Errno::NXIO) => Ok((true, len)),
                Err(_) => Ok((false, len)),
            },
            Err(Errno::NXIO) => Ok((true, len)),
            // The file system knows no holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((false, len)),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns whether it has a byte that is not 0. Holes of a file are not read.
    pub(super) fn has_data(&self) -> io::Result<bool> {
        const PIECE: u64 = 1 << 20;
        let (mut at, len) = (0, Storage::len(self)?);
        let mut piece = vec![0; PIECE.min(len) as usize];
        while at < len {
            let (hole, mut run) = self.run(at, len - at)?;
            if !hole {
                run = run.min(PIECE);
                let bytes = &mut piece[..run as usize];
                self.read_at(at, bytes)?;
                if bytes.iter().any(|b| *b != 0) {
                    return Ok(true);
                }
            }
            at += run;
        }
        Ok(false)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        const PIECE: u64 = 1 << 20;
        let zeroes = vec![0; PIECE.min(len) as usize];
        let mut done = 0;
        while done < len {
            let n = PIECE.min(len - done);
            self.file.write_all_at(&zeroes[..n as usize], offset + done)?;
            done += n;
        }
        Ok(())
    }
}

fn in_use(path: &Path, by: &str, purpose: For) -> Failure {
    let remedy = match purpose {
        For::Reading => "stop it, or give -U to look all the same",
        _ => "stop it first: two that write to one image destroy it",
    };
    Failure::Failed(format!("{} is in use by {by}; {remedy}", path.display()))
}

impl Storage for ImageFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        buf[done..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        match self.end.get() {
            Some(end) => Ok(end),
            None => (&self.file).seek(SeekFrom::End(0)),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if !self.device {
            return self.file.set_len(len);
        }
        let before = self.len()?;
        if len > before {
            self.punch(before, len - before)?;
        }
        self.end.set(Some(len));
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NODEV) => self.zero(offset, len),
            Err(e) => Err(e.into()),
        }
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        match fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NODEV) => self.zero(offset, len),
            Err(e) => Err(e.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn is_hole(&self, offset: u64, len: u64) -> io::Result<bool> {
        if self.device {
            return Ok(false);
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(data) => Ok(data >= offset + len),
            // Only holes follow.
            Err(Errno::NXIO) => Ok(true),
            Err(_) => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_holes_and_reads_as_zeroes_beyond_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let f = ImageFile::open(&dir.path().join("f"), For::Making).unwrap();
        f.set_len(1 << 20).unwrap();
        f.write_at(512 << 10, &[7; 10]).unwrap();
        let mut buf = [1; 20];
        f.read_at((1 << 20) - 10, &mut buf).unwrap();
        assert_eq!(buf, [0; 20]);
        assert!(f.is_hole(0, 4096).unwrap() && !f.is_hole(512 << 10, 4096).unwrap());
        f.punch(512 << 10, 4096).unwrap();
        f.read_at(512 << 10, &mut buf).unwrap();
        assert_eq!((buf, f.len().unwrap()), ([0; 20], 1 << 20));
    }

    #[test]
    fn an_image_in_use_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let _first = ImageFile::open(&path, For::Making).unwrap();
        let Err(Failure::Failed(why)) = ImageFile::open(&path, For::Reading) else { panic!("opened") };
        assert!(why.contains("is in use") && why.contains("-U") && why.contains("/f"), "{why}");
        ImageFile::open(&path, For::Sharing).unwrap();
        assert!(ImageFile::open(dir.path(), For::Reading).is_err());
    }

    #[test]
    fn a_fifo_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        for purpose in [For::Reading, For::Sharing, For::Writing] {
            let Err(Failure::Failed(why)) = ImageFile::open(&path, purpose) else { panic!("opened") };
            assert!(why.contains("is a FIFO"), "{why}");
        }
    }
}
