//! Writes one cluster compressed, if it is unallocated. This is for jobs that fill an image, not
//! for guests: the caller's thread compresses, in memory that is allocated for it.
//!
//! Pieces of several clusters share clusters of the file, one after the other. Each starts at a
//! sector, so no two writes touch the same sector, whichever requests make them
//! ([`Alloc::pack`](crate::alloc::Alloc::pack)). Clusters that cannot be compressed are written
//! like any other.

use super::{Buf, Context, EIO, Next, Op, Pending, Request, Step};
use crate::alloc::Reserve;
use crate::bytes::to_usize;
use crate::compress::deflate;
use crate::entry::{COMPRESSED, COMPRESSED_SECTOR, Compressed, Entry};
use crate::journal::Put;
use crate::lock::Locked;
use crate::served::{Served, Source};

/// A cluster that is being written compressed.
#[derive(Debug)]
pub(super) struct Pack {
    cluster: u64,
    packed: Vec<u8>,
    stage: Stage,
    /// A cluster that was taken for it, and is not used yet.
    fresh: Reserve,
    /// The offset of the piece.
    at: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// The guest's bytes are being copied into the data buffer.
    Gather,
    /// Its entry has to be held.
    Hold,
    /// The entry is held. Room has to be found.
    Place,
    /// The piece is being written.
    Written,
    /// The piece was written. The entry waits for room in the journal.
    Enter,
}

impl Pack {
    /// Returns the bytes of the piece, which are whole sectors.
    fn bytes(&self) -> u64 {
        (self.packed.len() as u64).next_multiple_of(COMPRESSED_SECTOR)
    }
}

impl Served {
    /// Returns whether a range is one cluster. The last one of the disk may be shorter.
    pub(super) fn is_one_cluster(&self, pos: u64, end: u64) -> bool {
        let next = (self.cluster(pos) + 1) << self.cluster_bits;
        pos & (self.cluster_size() - 1) == 0 && pos < end && end == next.min(self.size())
    }

    /// Returns whether a cluster is allocated neither here nor in the data file.
    fn has_no_place(&self, entry: Entry) -> bool {
        entry.word & COMPRESSED == 0
            && self.host(entry).is_none()
            && !matches!(self.part(entry, 0).0, Source::Data(_))
    }
}

impl Request {
    /// Starts with the cluster at `pos`.
    pub(super) fn step_pack_start(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        if image.external {
            // All data is in the data file, which has no compressed clusters (Incompatible
            // features, bit 2).
            self.op = Op::Write;
            return Next::Again;
        }
        let cluster = image.cluster(self.pos);
        let (packed, stage, fresh) = (Vec::new(), Stage::Gather, Reserve::default());
        self.pack = Some(Pack { cluster, packed, stage, fresh, at: 0 });
        // The last cluster is filled up with zeroes.
        self.data.reset(to_usize(image.cluster_size()));
        let data = self.guest(self.pos, self.end - self.pos);
        self.step(Pending::Pack, Step::Gather { data, at: 0 })
    }

    pub(super) fn step_pack(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let pack = self.pack.as_ref().expect("one is being packed");
        let cluster = pack.cluster;
        match pack.stage {
            Stage::Hold => {
                let entry = match self.writable(cluster, cx) {
                    Ok(entry) => entry,
                    Err(next) => return next,
                };
                if !image.has_no_place(entry) {
                    return self.plain();
                }
                match image.map.hold(cluster, 1, cx.waker) {
                    None => return Next::Again,
                    Some(0) => return self.park(),
                    Some(_) => {}
                }
                if !image.has_no_place(image.map.get(cluster).expect("held slices stay")) {
                    // Another request was faster.
                    image.map.release(cluster, 1, None, None, cx.wake);
                    return self.plain();
                }
                self.pack.as_mut().expect("one is being packed").stage = Stage::Place;
                Next::Again
            }
            Stage::Place => self.place_packed(cx),
            Stage::Enter => {
                self.packed(cx);
                Next::Again
            }
            // The results of their steps continue these.
            Stage::Gather | Stage::Written => Next::Fail(EIO),
        }
    }

    /// Writes it like any other cluster.
    fn plain(&mut self) -> Next {
        self.pack = None;
        self.op = Op::Write;
        Next::Again
    }

    #[expect(clippy::indexing_slicing, reason = "the buffer was made for the packed bytes above")]
    fn place_packed(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let pack = self.pack.as_mut().expect("one is being packed");
        let fresh = (pack.fresh.count > 0).then_some(pack.fresh.start);
        let placed = image.alloc.locked().pack(pack.bytes(), fresh, cx.waker);
        match placed {
            Err(take) => self.load_counts(take, image),
            Ok(None) => match self.take(1, cx) {
                Ok(fresh) => {
                    self.pack.as_mut().expect("one is being packed").fresh = fresh;
                    Next::Again
                }
                Err(next) => next,
            },
            Ok(Some((at, used))) => {
                let rest = std::mem::take(&mut pack.fresh);
                if !used {
                    image.alloc.locked().give_back(rest);
                }
                pack.at = at;
                pack.stage = Stage::Written;
                let len = to_usize(pack.bytes());
                self.data.reset(len);
                self.data[..pack.packed.len()].copy_from_slice(&pack.packed);
                let step = Step::Write { file: image.file, offset: at, buf: Buf::Data, range: 0..len };
                self.step(Pending::Pack, step)
            }
        }
    }

    /// Handles the end of a step: the guest's bytes are here, or the piece was written.
    pub(super) fn packed(&mut self, cx: &mut Context<'_>) {
        let image = cx.chain.top();
        let Some(pack) = &mut self.pack else { return };
        if pack.stage == Stage::Gather {
            match deflate(image.header.compression, &self.data) {
                Some(packed)
                    if (packed.len() as u64).next_multiple_of(COMPRESSED_SECTOR) < image.cluster_size() =>
                {
                    (pack.packed, pack.stage) = (packed, Stage::Hold);
                }
                _ => drop(self.plain()),
            }
            return;
        }
        let word = Compressed::entry(pack.at, pack.packed.len() as u64, image.cluster_bits);
        let entry = [Entry { word, bits: 0 }];
        let put = image.map.release(pack.cluster, 1, Some(&entry), image.journal.as_ref(), cx.wake);
        if put == Put::Full {
            pack.stage = Stage::Enter;
        } else {
            self.pack = None;
            self.pos = self.end;
        }
        self.entered(put, image);
    }

    pub(super) fn abandon_pack(&mut self, cx: &mut Context<'_>) {
        let Some(pack) = self.pack.take() else { return };
        let image = cx.chain.top();
        if matches!(pack.stage, Stage::Place | Stage::Written | Stage::Enter) {
            image.map.release(pack.cluster, 1, None, None, cx.wake);
        }
        let mut alloc = image.alloc.locked();
        alloc.give_back(Reserve { zero: false, ..pack.fresh });
        if matches!(pack.stage, Stage::Written | Stage::Enter) {
            let last = image.cluster(pack.at + pack.bytes() - 1);
            (image.cluster(pack.at)..=last)
                .for_each(|start| alloc.give_back(Reserve { start, count: 1, zero: false }));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
