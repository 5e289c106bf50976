//! Snapshots and bitmaps that cannot be read. Their data is lost, and no program opens the image
//! for writing as long as it refers to them.

use crate::bytes::low_u32;
use crate::change::Change;
use crate::header::{Header, autoclear};
use crate::snapshot::Snapshot;
use crate::{Image, Result, Storage};

/// The findings of a check about snapshots and bitmaps.
#[derive(Default)]
pub(super) struct Defects {
    /// The snapshots that stay, if some have to be removed.
    pub(super) snapshots: Option<Vec<Snapshot>>,
    /// Whether the bitmaps are damaged. All of them are removed then, because one of them may lack
    /// writes that another one has.
    pub(super) bitmaps: bool,
}

impl Defects {
    pub(super) fn any(&self) -> bool {
        self.bitmaps || self.snapshots.is_some()
    }

    /// Removes them from the image, whose counts have been repaired. Their clusters are freed
    /// later.
    pub(super) fn drop(self, file: &dyn Storage) -> Result<()> {
        let mut image = Image::open(file)?;
        let mut header = image.header.clone();
        if self.bitmaps {
            header = Header { bitmaps: None, autoclear: header.autoclear & !autoclear::BITMAPS, ..header };
        }
        let Some(snapshots) = self.snapshots else { return image.replace_header(header) };
        let mut table = Vec::new();
        for s in &snapshots {
            s.encode(&mut table);
        }
        let mut change = Change::start_repair(&mut image)?;
        header.snapshots = low_u32(snapshots.len() as u64);
        header.snapshots_offset = change.put(table)?;
        change.commit(header)
    }
}
