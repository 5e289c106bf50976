//! A disk gets another image, or the same one after work that needs it closed, while its exports stay.
//!
//! Called by control threads, with the disk's turn held and all its queues drained, so that no handle has the image. (A
//! mount's clerk works for requests in flight only, and is idle then.) The old image is closed before the new one is
//! opened, for both may be the same file. What must never happen: two open images that write to one file; an image in use
//! without its lock; a disk that goes on with an image that is not what its guest wrote.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, DiskSpec, Format};

use super::Loaded;
use super::qcow2::{Plain, enter_bitmaps};
use super::raw::Raw;
use super::{Disk, Kind, Limits, lock};

/// A disk's image that is closed for a while: nobody uses its files, and nobody else can get their locks.
pub(super) struct Closed {
    kind: Arc<Kind>,
    /// Size of the image below it, if there is one.
    pub(super) below: Option<u64>,
    path: String,
}

impl Closed {
    /// One of its files, as offline work sees it: 0 is the image itself, 1 its data file.
    pub(super) fn file(&self, number: usize) -> Result<Plain> {
        let file = self.kind.files().get(number).map(|raw| Plain::of(raw, false, false));
        match file {
            Some(file) => file.map_err(|e| Error::io(format_args!("cannot open {}", self.path), e)),
            None => Err(Error::invalid(format!("{} has no data file", self.path))),
        }
    }

    /// The image itself.
    pub(super) fn image(&self) -> Option<&Arc<File>> {
        self.kind.files().first().map(|raw| raw.image())
    }
}

impl Kind {
    /// Its files: the image, then what belongs to it or lies below.
    pub(super) fn files(&self) -> &[Raw] {
        match self {
            Self::Raw(raw) => std::slice::from_ref(raw),
            Self::Qcow2(image) => image.files(),
            Self::Null | Self::Ram(_) | Self::Gone => &[],
        }
    }

    /// Whether it could not be opened again for writing, since it is to be repaired first.
    fn is_wrong(&self) -> bool {
        matches!(self, Self::Qcow2(image) if image.is_wrong())
    }

    /// Makes all that was written stable, and lets the file be another's.
    fn finish(&self, cache: Cache, readonly: bool) -> std::io::Result<()> {
        match self {
            Self::Raw(raw) if !readonly && cache != Cache::Unsafe => raw.sync_now(),
            Self::Qcow2(image) => {
                image.flush_now()?;
                match image.close() {
                    true => Ok(()),
                    false => Err(std::io::Error::other("it cannot be closed (see the log)")),
                }
            }
            _ => Ok(()),
        }
    }
}

/// Who holds the locks of a file, by which descriptor.
struct Held {
    file: Arc<File>,
    readonly: bool,
}

impl Disk {
    /// Closes the image of `now`, has `work` done, and opens that of `next`; no request may be in flight, and none begin
    /// before it is over. `locked` are files of `next` that are locked for writing already. If anything fails, the disk
    /// goes on with the image of `now`, whatever `work` did to it: what cannot be undone is for `work` to do last.
    ///
    /// # Errors
    /// Those of `work` and of opening. The image of `now` cannot be flushed: nothing was done then. If not even the old
    /// image can be opened again, every request of the disk fails from then on (EIO), and the log says so.
    pub(super) fn replace(
        &self,
        now: &DiskSpec,
        next: &DiskSpec,
        locked: &[Arc<File>],
        work: impl FnOnce(&Closed) -> Result<()>,
    ) -> Result<()> {
        let mut kind = self.kind.write().expect("no holder panics");
        let path = shown(now);
        if kind.is_wrong() {
            return Err(Error::invalid(format!(
                "{path} was found to be corrupt and stays as it is: end the daemon, and 'vshunt image check -r all' it"
            )));
        }
        let along = match &**kind {
            Kind::Qcow2(image) if now.file != next.file => image.leave_bitmaps(),
            _ => Vec::new(),
        };
        kind.finish(self.cache, self.readonly)
            .map_err(|e| Error::io(format_args!("cannot bring {path} to stable storage"), e))?;
        let old = std::mem::replace(&mut *kind, Arc::new(Kind::Gone));
        let mut held: Vec<Held> = Vec::new();
        held.extend(locked.iter().map(|file| Held { file: file.clone(), readonly: false }));
        held.extend(
            old.files().iter().map(|raw| Held { file: raw.image().clone(), readonly: raw.readonly() }),
        );
        let below = match &*old {
            Kind::Qcow2(image) => image.below(),
            _ => None,
        };
        let closed = Closed { kind: old, below, path: path.clone() };
        let opened = work(&closed).and_then(|()| {
            enter(next, along)?;
            self.open_again(next, &held)
        });
        // Descriptors in the system's own lists keep a file open for a moment; its locks are let go of by name.
        let (result, new) = match opened {
            Ok(new) => (Ok(()), Ok(new)),
            Err(e) => (Err(e), self.open_again(now, &held)),
        };
        match new {
            Ok((new, size_bytes)) => {
                self.granule.store(new.granule(), Ordering::Release);
                self.zero_granule.store(new.zero_granule(self.limits.block_size), Ordering::Release);
                self.size_bytes.store(size_bytes, Ordering::Release);
                *kind = Arc::new(new);
                held.iter().filter(|_| self.locked).for_each(|h| lock::release(&h.file));
            }
            Err(e) => tracing::error!(
                "disk {}: its image cannot be opened again, and all its requests fail from now on: {e}; remove its exports \
                 and the disk, put that right, and add them again",
                now.name
            ),
        }
        result
    }

    /// Closes the image and opens it again, which puts the bitmaps that are [left with it](Self::keep_bitmaps) into it. As
    /// [`replace`](Self::replace) has it.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace).
    pub fn reopen(&self, now: &DiskSpec) -> Result<()> {
        self.replace(now, now, &[], |_| Ok(()))
    }

    /// Opens an image whose files' locks are held, by other descriptors, in part.
    fn open_again(&self, spec: &DiskSpec, held: &[Held]) -> Result<(Kind, u64)> {
        let (kind, size_bytes, limits) =
            super::open_kind(&DiskSpec { locking: false, size: None, ..spec.clone() }, self.grows())?;
        let result = self.check_limits(spec, &limits).and_then(|()| match self.locked {
            true => kind.files().iter().try_for_each(|raw| inherit(raw, held)),
            false => Ok(()),
        });
        match result {
            Ok(()) => Ok((kind, size_bytes)),
            Err(e) => {
                if let Kind::Qcow2(image) = &kind {
                    image.close();
                }
                kind.files().iter().for_each(|raw| lock::release(raw.image()));
                Err(e)
            }
        }
    }

    /// What guests were told is not taken back.
    fn check_limits(&self, spec: &DiskSpec, limits: &Limits) -> Result<()> {
        match limits.block_size > self.limits.block_size {
            true => Err(Error::unsupported(format!(
                "{} needs blocks of {} bytes, and the guests of disk {} were told {}",
                shown(spec),
                limits.block_size,
                spec.name,
                self.limits.block_size
            ))),
            false => Ok(()),
        }
    }
}

/// Puts bitmaps that a disk takes along into its next image, so that they count as inconsistent if nobody comes to write them
/// back.
fn enter(next: &DiskSpec, along: Vec<Loaded>) -> Result<()> {
    let Some(path) = next.file.as_ref().filter(|_| next.format() == Format::Qcow2 && !along.is_empty())
    else {
        return Ok(());
    };
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|e| Error::io(format_args!("cannot open {}", path.display()), e))?;
    match enter_bitmaps(&Plain::new(file), along) {
        Ok(()) => Ok(()),
        Err(qcow2::Error::Unsupported(why)) => {
            tracing::warn!("{} cannot keep the disk's bitmaps: {why}", path.display());
            Ok(())
        }
        Err(e) => Err(Error::invalid(format!("cannot keep bitmaps in {}: {e}", path.display()))),
    }
}

/// Locks a file as it is used now. Where the same process holds it already for as much, nobody can be in the way.
fn inherit(raw: &Raw, held: &[Held]) -> Result<()> {
    let same = |h: &&Held| match (h.file.metadata(), raw.image().metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    };
    let mine: Vec<&Held> = held.iter().filter(same).collect();
    if mine.iter().any(|h| raw.readonly() || !h.readonly) {
        return lock::take_over(raw.image(), raw.path(), raw.readonly());
    }
    // More than what is held: others are to be asked, and ours must not be in the way.
    mine.iter().for_each(|h| lock::release(&h.file));
    lock::lock(raw.image(), raw.path(), raw.readonly())
}

pub(super) fn shown(spec: &DiskSpec) -> String {
    spec.file.as_deref().unwrap_or(Path::new("")).display().to_string()
}
