//! A disk that shows another one as it was: see `frozen`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, RwLock};

use vshunt_types::spec::Cache;
use vshunt_types::sync::LockedShared;

use super::Disk;
use super::times::Times;
use crate::backend::Backend;
use crate::copy_before_write::CopyBeforeWrite;
use crate::failures::Failures;
use crate::frozen::{Seen, see};
use crate::limits::Limits;

/// What a frozen disk reads.
pub(crate) struct Frozen {
    /// The disk that is shown as it was.
    pub(crate) source: Arc<Disk>,
    /// The fleecing file. A block has the same offset there.
    pub(crate) fleece: Arc<Disk>,
    /// Says which blocks are in the file.
    pub(crate) work: Arc<CopyBeforeWrite>,
}

impl Disk {
    /// Makes a read-only disk that shows `source` as it is when the observers of its writes get
    /// `work` ([`set_write_observers`](Self::set_write_observers)). All blocks are set in
    /// `work`, which stores what writes replace in `fleece`
    /// ([`CopyBeforeWrite::fleeced`]); nothing is read ahead from it. The disk is not read before
    /// that moment. When `work` has ended, every read fails with `EIO`. The source keeps its size.
    pub fn frozen(source: &Arc<Self>, fleece: Arc<Self>, work: Arc<CopyBeforeWrite>) -> Arc<Self> {
        let limits = Limits { max_discard_bytes: 0, can_discard: false, can_zero: false, ..source.limits };
        let (size_bytes, alignment) = (source.size_bytes(), source.alignment());
        let frozen = Frozen { source: source.clone(), fleece, work };
        Arc::new(Self {
            backend: RwLock::new(Backend::Frozen),
            observers: RwLock::default(),
            fleece: RwLock::default(),
            frozen: RwLock::new(Some(Arc::new(frozen))),
            readonly: true,
            locked: AtomicBool::new(false),
            cache: Cache::default(),
            limits,
            growable: AtomicBool::new(false),
            lost_writes: false,
            closed: AtomicBool::new(false),
            failures: Failures::default(),
            times: Times::new(None),
            size_bytes: AtomicU64::new(size_bytes),
            alignment: AtomicU64::new(alignment),
            zero_alignment: AtomicU64::new(alignment),
        })
    }

    /// Returns the file whose holes are those of the disk, if its file system is to be asked for
    /// them: the image of a raw disk, or for a frozen disk that of its source. The answer for a
    /// frozen disk counts for blocks without [`kept`](Self::kept) after it.
    pub fn map_image(&self) -> Option<Arc<File>> {
        match &self.backend() {
            Backend::Raw(raw) if !raw.inline() => Some(raw.image().clone()),
            Backend::Frozen => self.frozen_parts().and_then(|frozen| frozen.source.map_image()),
            _ => None,
        }
    }

    /// Returns the first run of blocks of a frozen disk, in a range of bytes, that were written in
    /// its source since it was frozen. None if there is none, and for other disks.
    ///
    /// # Errors
    /// `EIO` if nothing is known of the frozen disk any more.
    pub fn kept(&self, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let gone = || io::Error::from_raw_os_error(libc::EIO);
        let Some(frozen) = self.frozen_parts() else {
            return if matches!(self.backend(), Backend::Gone) { Err(gone()) } else { Ok(None) };
        };
        match see(&frozen.work) {
            Seen::Frozen => Ok(frozen.work.kept_run(range)),
            Seen::Lost => Err(gone()),
        }
    }

    /// Makes every request fail with `EIO`, on handles that are made from now on. The disk holds no
    /// files any more.
    pub fn give_up(&self) {
        *self.backend.write_locked() = Backend::Gone;
        *self.frozen.write_locked() = None;
    }

    /// Returns what a frozen disk reads.
    pub(crate) fn frozen_parts(&self) -> Option<Arc<Frozen>> {
        self.frozen.read_locked().clone()
    }
}
