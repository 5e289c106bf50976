//! Allocation of the new part of a disk, and zeroes that hide the backing file there.

use super::Around;
use crate::bytes::to_usize;
use crate::change::Change;
use crate::create::Preallocation;
use crate::entry::{COPIED, OFFSET, ZERO};
use crate::header::{Header, autoclear, incompatible};
use crate::{Error, Progress, Result, Storage, image};

/// The new part of the disk: clusters from `from` on.
pub(super) struct Grown<'h> {
    pub(super) from: u64,
    /// The new header.
    pub(super) header: &'h Header,
}

impl Grown<'_> {
    /// Checks that the backing file [can be hidden](Self::hide_below).
    pub(super) fn check(&self, around: &Around<'_>) -> Result<()> {
        match self.from < self.hidden_end(around) && self.header.version < 3 {
            true => Err(Error::unsupported("a version 2 image cannot grow over a larger image below")),
            false => Ok(()),
        }
    }

    /// Returns the first cluster behind the backing file's end.
    fn hidden_end(&self, around: &Around<'_>) -> u64 {
        around.below.unwrap_or(0).min(self.header.size).div_ceil(self.header.cluster_size())
    }

    /// Hides the backing file in the new part of the disk.
    pub(super) fn hide_below(
        &self,
        change: &mut Change<'_, '_>,
        l1: &mut [u64],
        around: &Around<'_>,
    ) -> Result<()> {
        let h = self.header;
        let below = self.hidden_end(around);
        if self.from >= below {
            return Ok(());
        }
        let zeroes: &[u64] = if h.has(incompatible::EXTENDED_L2) { &[0, 0xffff_ffff << 32] } else { &[ZERO] };
        self.each_table(change, l1, below, |_, entries, _| {
            for entry in entries.chunks_mut(zeroes.len()) {
                entry.copy_from_slice(zeroes);
            }
            Ok(())
        })
    }

    #[expect(clippy::indexing_slicing, reason = "a piece is not longer than the zeroes")]
    pub(super) fn preallocate(
        &self,
        change: &mut Change<'_, '_>,
        l1: &mut [u64],
        around: &Around<'_>,
        progress: Progress<'_>,
    ) -> Result<()> {
        let h = self.header;
        let raw = h.autoclear & autoclear::RAW_DATA != 0;
        if around.preallocation == Preallocation::Off && !raw {
            return Ok(());
        }
        let external = h.has(incompatible::DATA_FILE);
        let extended = h.has(incompatible::EXTENDED_L2);
        // Only new clusters are allocated, and the backing file is hidden there in any case.
        if !external {
            // Behind the end of the file, everything is zero.
            change.search_from(change.image.len.div_ceil(h.cluster_size()));
        }
        let words = if extended { 2 } else { 1 };
        let mut placed = Vec::new();
        self.each_table(change, l1, h.clusters(), |change, entries, first| {
            let n = (entries.len() / words) as u64;
            let mut at = if external { first << h.cluster_bits } else { change.take(n)? };
            placed.push((at, n << h.cluster_bits));
            for entry in entries.chunks_mut(words) {
                entry[0] = at | COPIED;
                if extended && external {
                    entry[1] = 0xffff_ffff;
                }
                at += h.cluster_size();
            }
            Ok(())
        })?;
        let file = if external { around.data } else { Some(change.image.file) };
        let Some(file) = file else { return Err(Error::invalid("the image's data file is needed")) };
        let total: u64 = placed.iter().map(|(_, bytes)| bytes).sum();
        let mut done = 0;
        for (at, bytes) in placed {
            reserve(file, at, bytes, around.preallocation)?;
            done += bytes;
            progress(done, total);
        }
        file.sync().map_err(Error::io("cannot preallocate"))
    }
    /// Calls `how` with the entries of each L2 table from the first new cluster to the one before
    /// `until`, and the number of their first cluster. Each such table is written to a new offset.
    #[expect(
        clippy::indexing_slicing,
        reason = "the L1 table is as long as the new size needs, and the range is within one L2 table"
    )]
    fn each_table(
        &self,
        change: &mut Change<'_, '_>,
        l1: &mut [u64],
        until: u64,
        mut how: impl FnMut(&mut Change<'_, '_>, &mut [u64], u64) -> Result<()>,
    ) -> Result<()> {
        let (per, words) = (self.header.l2_entries(), change.words());
        let mut cluster = self.from;
        while cluster < until {
            let n = cluster / per;
            let end = until.min((n + 1) * per);
            let at = l1[to_usize(n)] & OFFSET;
            let mut table = match at {
                0 => vec![0; to_usize(per) * words],
                at => change.l2(at)?,
            };
            let range = to_usize(cluster - n * per) * words..to_usize(end - n * per) * words;
            how(change, &mut table[range], cluster)?;
            if at != 0 {
                change.release(at, 1)?;
            }
            l1[to_usize(n)] = change.put(image::to_bytes(&table))?;
            cluster = end;
        }
        Ok(())
    }
}

/// Reserves the space of a new range.
#[expect(clippy::indexing_slicing, reason = "a chunk has the words of an entry")]
fn reserve(file: &dyn Storage, at: u64, bytes: u64, how: Preallocation) -> Result<()> {
    const PIECE: u64 = 8 << 20;
    let cannot = Error::io("cannot preallocate");
    match how {
        Preallocation::Off | Preallocation::Metadata => {
            if file.len().map_err(&cannot)? < at + bytes {
                file.set_len(at + bytes).map_err(&cannot)?;
            }
        }
        Preallocation::Falloc => file.allocate(at, bytes).map_err(&cannot)?,
        Preallocation::Full => {
            let zeroes = vec![0; to_usize(PIECE.min(bytes))];
            let mut done = 0;
            while done < bytes {
                let n = PIECE.min(bytes - done);
                file.write_at(at + done, &zeroes[..to_usize(n)]).map_err(&cannot)?;
                done += n;
            }
        }
    }
    Ok(())
}
