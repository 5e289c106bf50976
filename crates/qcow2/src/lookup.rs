//! The look-up of a request: where the bytes of the disk are, as far as one image says.
//!
//! Called by each request, on its worker. It takes no lock and allocates nothing. The map has one
//! entry for each cluster. Without extended entries, the contents of a cluster are the same for all
//! of it. With extended entries they may change at each of its 32 subclusters; for each kind of
//! contents, a mask says which subclusters have it. A run of equal bits in such a mask is found by
//! counting, so a look-up costs the same for each length within a cluster.

use crate::entry::{COMPRESSED, COPIED, Entry, OFFSET, SUBCLUSTERS, ZERO};
use crate::served::{Miss, Served, Source};

impl Served {
    /// Returns log2 of the unit of allocation in bytes.
    #[inline]
    pub(crate) fn sub_bits(&self) -> u32 {
        if self.extended { self.cluster_bits - SUBCLUSTERS.trailing_zeros() } else { self.cluster_bits }
    }

    /// Returns the cluster of the data file that an entry refers to, if it refers to one.
    #[inline]
    pub(crate) fn host(&self, entry: Entry) -> Option<u64> {
        let there = entry.word & OFFSET != 0 || (self.external && entry.word & COPIED != 0);
        (entry.word & COMPRESSED == 0 && there).then_some(entry.word & OFFSET)
    }

    /// Returns the contents of a cluster with this entry from its byte `within` on, and the byte up
    /// to which they hold.
    #[inline(always)]
    pub(crate) fn part(&self, entry: Entry, within: u64) -> (Source, u64) {
        if entry.word & COMPRESSED != 0 {
            return (Source::Compressed(entry.word), self.cluster_size());
        }
        let host = self.host(entry);
        if self.extended {
            return self.subclusters(entry, host, within);
        }
        let what = match host {
            _ if self.version >= 3 && entry.word & ZERO != 0 => Source::Zero,
            Some(host) => Source::Data(host + within),
            None => Source::Below,
        };
        (what, self.cluster_size())
    }

    /// [`part`](Self::part) of an extended entry, whose cluster in the data file is `host`.
    fn subclusters(&self, entry: Entry, host: Option<u64>, within: u64) -> (Source, u64) {
        let (allocated, zero) = entry.masks();
        let data = if host.is_some() { allocated & !zero } else { 0 };
        let sub = within >> self.sub_bits();
        let (what, mask) = match host {
            _ if zero >> sub & 1 != 0 => (Source::Zero, zero),
            Some(host) if data >> sub & 1 != 0 => (Source::Data(host + within), data),
            _ => (Source::Below, !(zero | data)),
        };
        let same = (mask >> sub).trailing_ones();
        (what, (sub + u64::from(same)) << self.sub_bits())
    }

    /// Returns the contents of the disk from `pos` on, and for how many bytes they hold, at most
    /// `len`. All `len` bytes are within the disk.
    #[inline(always)]
    pub(crate) fn run(&self, pos: u64, len: u64) -> Result<(Source, u64), Miss> {
        let cluster = self.cluster(pos);
        if self.table_of(cluster).is_none() {
            let end = self.table_end(cluster) << self.cluster_bits;
            return Ok((Source::Below, len.min(end - pos)));
        }
        let entry = self.map.get(cluster).ok_or(Miss::Slice(self.map.slice_of(cluster)))?;
        let (what, n) = self.run_from(entry, pos, len, |_| true);
        match what {
            Source::Data(at) if !self.fits(at, pos) => Err(Miss::Corrupt),
            what => Ok((what, n)),
        }
    }

    /// Returns the offset of the bytes from `pos` on if they can be overwritten there, and for how
    /// many bytes that holds, at most `len`. `entry` is that of the first cluster. The caller
    /// checks that the offset [fits](Self::fits).
    #[inline(always)]
    pub(crate) fn in_place_run(&self, entry: Entry, pos: u64, len: u64) -> Option<(u64, u64)> {
        let own = |entry: Entry| entry.word & COPIED != 0;
        match self.run_from(entry, pos, len, own) {
            (Source::Data(at), n) if own(entry) => Some((at, n)),
            _ => None,
        }
    }

    /// Returns whether the byte at `pos` of the disk may be at `offset` of the data file: at the
    /// same place of a cluster. Otherwise the entry is wrong.
    #[inline]
    pub(crate) fn fits(&self, offset: u64, pos: u64) -> bool {
        (offset ^ pos) & (self.cluster_size() - 1) == 0
    }

    /// Returns the contents from `pos` on, in a cluster with this entry, and for how many bytes
    /// they hold, at most `len`. The run continues in the next clusters of the slice as long as
    /// their entries are in memory and `usable`.
    #[inline(always)]
    fn run_from(&self, entry: Entry, pos: u64, len: u64, usable: impl Fn(Entry) -> bool) -> (Source, u64) {
        let size = self.cluster_size();
        let within = pos & (size - 1);
        let (what, to) = self.part(entry, within);
        // Most requests end in their first cluster.
        if to - within >= len {
            return (what, len);
        }
        if to < size || matches!(what, Source::Compressed(_)) {
            return (what, to - within);
        }
        (what, self.continue_run(what, pos, to - within, len, usable).min(len))
    }

    /// Returns the length of a run that begins at `pos` with these contents and reaches the end of
    /// its cluster after `n` bytes.
    fn continue_run(
        &self,
        what: Source,
        pos: u64,
        mut n: u64,
        len: u64,
        usable: impl Fn(Entry) -> bool,
    ) -> u64 {
        let slice = self.map.slice_of(self.cluster(pos));
        while n < len {
            let cluster = self.cluster(pos + n);
            if self.map.slice_of(cluster) != slice {
                break;
            }
            let Some(entry) = self.map.get(cluster).filter(|entry| usable(*entry)) else { break };
            let (next, to) = self.part(entry, 0);
            let continues = match what {
                Source::Data(at) => next == Source::Data(at + n),
                _ => next == what,
            };
            if !continues {
                break;
            }
            n += to;
            if to < self.cluster_size() {
                break;
            }
        }
        n
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
