//! The fast path: a read or write of allocated clusters. It needs one lookup in the map and one
//! transfer.
//!
//! It is called first for each read and write, on the worker. It takes no lock and allocates
//! nothing. A [`Request`](crate::Request) does all other work: everything that waits for metadata
//! or space, or changes an entry.
//!
//! A cluster must not be given to another use before the transfer has ended. Therefore a transfer
//! is in an epoch, like a request (see [`crate::epoch`]).

use crate::epoch::Epoch;
use crate::served::{Chain, Source, User};
use crate::{FileId, Op};

/// A transfer directly between a file and the guest's bytes. It is in flight until
/// [`FastPath::end`].
#[derive(Debug)]
#[must_use = "it is under way until it ends"]
pub struct FastPath {
    /// The file.
    pub file: FileId,
    /// The offset of the first byte in the file. The others follow.
    pub offset: u64,
    epoch: Epoch,
}

impl FastPath {
    /// Checks whether one transfer can read or write (as `op` says) `len` bytes at `pos`, which are
    /// within the disk. `None`: a request is needed, as for all other operations. The caller may
    /// write if `op` does.
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

    /// Ends the transfer.
    #[inline]
    pub fn end(self, chain: &Chain, user: &mut User) {
        chain.top().epochs.exit(&user.member, self.epoch);
    }
}

/// The stay of a queue in an epoch while it takes several requests. Entering an epoch costs more
/// than a look-up. A [`FastPath`] that is found during the stay need not enter it again.
///
/// It is for one call on the worker, and never for a wait: no cluster that leaves the map meanwhile
/// is given to another use. It ends before the queue starts a [`Request`](crate::Request), which
/// may be a flush that frees such clusters.
#[derive(Debug)]
#[must_use = "the queue stays in the epoch until it ends"]
pub struct Batch {
    epoch: Epoch,
}

impl Batch {
    /// Enters the present epoch.
    #[inline]
    pub fn begin(chain: &Chain, user: &mut User) -> Self {
        Self { epoch: chain.top().epochs.enter(&user.member) }
    }

    /// Leaves the epoch.
    #[inline]
    pub fn end(self, chain: &Chain, user: &mut User) {
        chain.top().epochs.exit(&user.member, self.epoch);
    }
}

impl Chain {
    /// Returns file and offset of bytes that are contiguous.
    #[inline]
    fn one_read(&self, pos: u64, len: u64) -> Option<(FileId, u64)> {
        let image = self.top();
        // The end of the disk may have changed.
        if pos + len <= image.size()
            && let Ok((Source::Data(offset), n)) = image.run(pos, len)
            && n == len
        {
            return Some((image.data, offset));
        }
        self.one_read_below(pos, len)
    }

    /// Returns file and offset of contiguous bytes of any layer.
    fn one_read_below(&self, pos: u64, len: u64) -> Option<(FileId, u64)> {
        match self.find(pos, len) {
            Ok((layer, Source::Data(offset), n)) if n == len => Some((self.data_of(layer), offset)),
            _ => None,
        }
    }

    /// Returns file and offset of contiguous bytes that may be overwritten in place.
    #[inline]
    fn one_write(&self, pos: u64, len: u64) -> Option<(FileId, u64)> {
        let image = self.top();
        let cluster = image.cluster(pos);
        if !matches!(image.table_of(cluster), Some((_, true))) {
            return None;
        }
        let (offset, n) = image.in_place_run(image.map.get(cluster)?, pos, len)?;
        // Otherwise the entry is wrong, and the request reports that.
        (n == len && image.fits(offset, pos)).then_some((image.data, offset))
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
