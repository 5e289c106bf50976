//! Runs operations on a disk while nothing is in flight on it, for all its exports.

use std::sync::Arc;
use std::time::Instant;

use vshunt_engine::DRAIN_LIMIT;
use vshunt_types::error::{Error, Result};

use crate::disk_entry::DiskEntry;
use crate::export::Export;

/// Calls `f`, which may close the image of the disk and open it or another one, while all queues of
/// all its exports are drained. The caller holds `op_lock` of the disk. The drains nest: the first
/// exports wait for the later ones. Guests wait until `f` returns.
///
/// # Errors
/// The requests of an export cannot be held back, or queues do not come to rest. Nothing was
/// changed.
pub(super) fn with_disk_drained<R>(
    entry: &DiskEntry,
    exports: &[Arc<Export>],
    f: impl FnOnce() -> Result<R>,
) -> Result<R> {
    with_exports_drained(&entry.name, exports, || entry.with_bitmaps_kept(f))
}

/// Calls `f` while all queues of these exports are drained: those of one disk, or of several, whose
/// contents then belong to one point in time. The caller holds `op_lock` of each disk. `disks`:
/// their names, for the log.
///
/// # Errors
/// As for [`with_disk_drained`].
pub(super) fn with_exports_drained<R>(
    disks: &str,
    exports: &[Arc<Export>],
    f: impl FnOnce() -> Result<R>,
) -> Result<R> {
    for export in exports {
        export.check_held()?;
    }
    let (mut f, mut result) = (Some(f), None);
    let begin = Instant::now();
    drained_until(exports, begin + DRAIN_LIMIT, &mut || {
        let drained = begin.elapsed();
        result = f.take().map(|f| f());
        tracing::info!("disk {disks}: drained in {drained:?}, and held for {:?}", begin.elapsed() - drained);
    })?;
    result.unwrap_or_else(|| Err(Error::busy(format!("disk {disks} could not be drained"))))
}

/// Calls `f` while the queues of these exports are drained, one export after the other. They share
/// one deadline, because the guests of the first export wait for the last one.
pub(super) fn drained_until(exports: &[Arc<Export>], until: Instant, f: &mut dyn FnMut()) -> Result<()> {
    match exports.split_first() {
        None => {
            f();
            Ok(())
        }
        Some((first, rest)) => first.with_all_drained_until(until, || drained_until(rest, until, f))?,
    }
}
