//! Work on a disk while nothing is in flight on it, whichever exports it has.

use std::sync::Arc;
use std::time::Instant;

use vshunt_engine::DRAIN_LIMIT;
use vshunt_types::error::{Error, Result};

use crate::disk_entry::DiskEntry;
use crate::export::Export;

/// Calls `f`, which may close the disk's image and open it or another, while all queues of all
/// exports of a disk, whose turn is held, are drained. The drains nest: the later exports' wait
/// while the first ones rest, and `f` itself is what guests wait for.
///
/// # Errors
/// An export whose requests we cannot hold back; queues that do not come to rest. Nothing was
/// changed then.
pub(super) fn with_disk_drained<R>(
    entry: &DiskEntry,
    exports: &[Arc<Export>],
    f: impl FnOnce() -> Result<R>,
) -> Result<R> {
    for export in exports {
        export.check_held()?;
    }
    let disk = &entry.name;
    let (mut f, mut result) = (Some(f), None);
    let begin = Instant::now();
    nest(exports, begin + DRAIN_LIMIT, &mut || {
        let drained = begin.elapsed();
        result = f.take().map(|f| entry.with_bitmaps_kept(f));
        tracing::info!("disk {disk}: drained in {drained:?}, and held for {:?}", begin.elapsed() - drained);
    })?;
    result.unwrap_or_else(|| Err(Error::busy(format!("disk {disk} could not be drained"))))
}

/// Drains the exports one after the other, with one deadline for all: the guests of the first ones
/// wait for the last one.
fn nest(exports: &[Arc<Export>], until: Instant, f: &mut dyn FnMut()) -> Result<()> {
    match exports.split_first() {
        None => {
            f();
            Ok(())
        }
        Some((first, rest)) => first.with_all_drained_until(until, || nest(rest, until, f))?,
    }
}
