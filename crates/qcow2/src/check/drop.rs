//! Snapshots and bitmaps that cannot be read: nothing is to be had from them, and nobody opens the image for writing as
//! long as it names them.

use crate::bytes::low_u32;
use crate::change::Change;
use crate::header::{Header, autoclear};
use crate::snapshot::Snapshot;
use crate::{Image, Result, Storage};

/// What a check found of them.
#[derive(Default)]
pub(super) struct Trouble {
    /// The snapshots that stay, where not all can.
    pub(super) snapshots: Option<Vec<Snapshot>>,
    /// The bitmaps are not what they are said to be: all of them go, since what one does not say of another's writes is
    /// not known.
    pub(super) bitmaps: bool,
}

impl Trouble {
    pub(super) fn any(&self) -> bool {
        self.bitmaps || self.snapshots.is_some()
    }

    /// Takes them out of the image, whose counts have been repaired; what they took is left to be freed.
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
        let mut change = Change::begin_repair(&mut image)?;
        header.snapshots = low_u32(snapshots.len() as u64);
        header.snapshots_offset = change.put(table)?;
        change.commit(header)
    }
}
