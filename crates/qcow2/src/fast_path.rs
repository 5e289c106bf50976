//! The fast path: a read or write of allocated clusters. It needs one lookup in the map and one transfer.
//!
//! Called first for each read and write, on its worker. It takes no lock and allocates nothing. A [`Request`](crate::Request)
//! does all other work: everything that waits for metadata or space, or changes an entry.
//!
//! What must never happen: a cluster is given to another use before the transfer has ended. Therefore a transfer is in an
//! epoch, as a request is (see [`crate::epoch`]).

use crate::epoch::Epoch;
use crate::served::{Chain, User, What};
use crate::{FileId, Op};

/// A transfer that may be done, straight between a file and the guest's bytes. It is under way until [`FastPath::end`].
#[derive(Debug)]
#[must_use = "it is under way until it ends"]
pub struct FastPath {
    /// Which file.
    pub file: FileId,
    /// Where in it the first byte lies; the others follow.
    pub offset: u64,
    epoch: Epoch,
}

impl FastPath {
    /// Looks whether `len` bytes at `pos`, which lie within the disk, can be read or written (as `op` says) by one transfer.
    /// None: they have to be asked for by a request, for anything else too. The caller may write if `op` does.
    #[inline]
    pub fn find(chain: &Chain, user: &mut User, op: Op, pos: u64, len: u64) -> Option<Self> {
        let epochs = &chain.top().epochs;
        let epoch = epochs.enter(&user.member);
        let place = match op {
            Op::Read => chain.one_read(pos, len),
            Op::Write => chain.one_write(pos, len),
            _ => None,
        };
        if place.is_none() {
            epochs.exit(&user.member, epoch);
        }
        place.map(|(file, offset)| Self { file, offset, epoch })
    }

    /// The transfer is over.
    #[inline]
    pub fn end(self, chain: &Chain, user: &mut User) {
        chain.top().epochs.exit(&user.member, self.epoch);
    }
}

impl Chain {
    /// File and offset of bytes that lie in one piece.
    #[inline]
    fn one_read(&self, pos: u64, len: u64) -> Option<(FileId, u64)> {
        match self.find(pos, len) {
            Ok((layer, What::Data(offset), n)) if n == len => Some((self.data_of(layer), offset)),
            _ => None,
        }
    }

    /// Likewise of bytes that may be written where they are.
    #[inline]
    fn one_write(&self, pos: u64, len: u64) -> Option<(FileId, u64)> {
        let (image, end) = (self.top(), pos + len);
        let cluster = image.cluster(pos);
        if !matches!(image.table_of(cluster), Some((_, true))) {
            return None;
        }
        let (offset, n) = image.in_place_run(image.map.get(cluster)?, pos, end)?;
        // Otherwise the entry is wrong, and the request reports it.
        let within = image.cluster_size() - 1;
        (n == len && offset & within == pos & within).then_some((image.data, offset))
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
