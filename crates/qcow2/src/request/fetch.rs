//! Reads a piece of the disk into the request's own buffer: the bytes that a write does not cover,
//! and compressed clusters.

use super::{Buf, Context, EIO, Next, Pending, Request, Step};
use crate::bytes::to_usize;
use crate::compress::inflate;
use crate::entry::Compressed;
use crate::header::UNIT;
use crate::served::{Chain, Source};

/// A fetch, and its progress.
#[derive(Debug)]
pub(super) struct Fetch {
    pos: u64,
    end: u64,
    /// The offset in the data buffer for the next byte.
    at: usize,
    /// Whether it is for the guest, who gets it when it is complete.
    guest: bool,
    /// A compressed cluster that is being read: layer, entry, offset of its data in the meta
    /// buffer.
    packed: Option<(usize, u64, usize)>,
    /// Bytes of the step in flight.
    now: u64,
}

impl Fetch {
    /// Makes a fetch of one compressed cluster, for a reader.
    pub(super) fn for_guest(pos: u64, len: u64) -> Self {
        Self { pos, end: pos + len, at: 0, guest: true, packed: None, now: 0 }
    }

    /// Makes a fetch to `at` in the data buffer, which has the room.
    pub(super) fn new(pos: u64, end: u64, at: usize) -> Self {
        Self { pos, end, at, guest: false, packed: None, now: 0 }
    }
}

impl Request {
    #[expect(clippy::indexing_slicing, reason = "the buffer was made for the whole fetch")]
    pub(super) fn step_fetch(&mut self, cx: &mut Context<'_>) -> Next {
        let fetch = self.fetch.as_mut().expect("a fetch is under way");
        if fetch.pos == fetch.end {
            let (guest, n) = (fetch.guest, fetch.now);
            self.fetch = None;
            if !guest {
                return Next::Again;
            }
            let data = self.guest(self.pos, n);
            return self.step(Pending::Data(n), Step::Copy { data, at: 0 });
        }
        let (pos, at) = (fetch.pos, fetch.at);
        let (layer, what, n) = match cx.chain.find(pos, fetch.end - pos) {
            Ok(found) => found,
            Err((layer, miss)) => return self.load(layer, miss, cx),
        };
        fetch.now = n;
        if fetch.guest {
            self.data.reset(to_usize(n));
        }
        match what {
            Source::Zero | Source::Below => {
                self.data[at..][..to_usize(n)].fill(0);
                (fetch.pos, fetch.at) = (pos + n, at + to_usize(n));
                Next::Again
            }
            Source::Data(offset) => {
                let range = at..at + to_usize(n);
                self.step(
                    Pending::Fetch,
                    Step::Read { file: cx.chain.data_of(layer), offset, buf: Buf::Data, range },
                )
            }
            Source::Compressed(entry) => {
                let image = cx.chain.image(layer);
                let c = Compressed::of(entry, image.cluster_bits);
                // Whole units, for files that can only be read in such.
                let first = c.offset / UNIT * UNIT;
                let len = to_usize((c.offset + c.bytes).next_multiple_of(UNIT) - first);
                fetch.packed = Some((layer, entry, to_usize(c.offset - first)));
                self.meta.reset(len);
                let step = Step::Read { file: image.file, offset: first, buf: Buf::Meta, range: 0..len };
                self.step(Pending::Fetch, step)
            }
        }
    }

    /// Handles the end of the step that read a piece.
    #[expect(clippy::indexing_slicing, reason = "the step of this fetch made both buffers for its ranges")]
    pub(super) fn fetched(&mut self, failed: i32, cx: &mut Context<'_>) -> Result<(), i32> {
        if failed < 0 {
            return Err(failed);
        }
        let fetch = self.fetch.as_mut().expect("a fetch is under way");
        let n = to_usize(fetch.now);
        if let Some((layer, entry, at)) = fetch.packed.take() {
            let to = &mut self.data[fetch.at..][..n];
            unpack(cx.chain, layer, entry, &self.meta[at..], fetch.pos, to)?;
        }
        fetch.pos += fetch.now;
        fetch.at += n;
        Ok(())
    }
}

/// Decompresses the cluster that contains `pos`, and copies as much of it as `to` has room for.
#[expect(clippy::indexing_slicing, reason = "the caller's range is within a cluster")]
fn unpack(
    chain: &Chain,
    layer: usize,
    entry: u64,
    packed: &[u8],
    pos: u64,
    to: &mut [u8],
) -> Result<(), i32> {
    let image = chain.image(layer);
    let cluster = to_usize(image.cluster_size());
    let bytes = to_usize(Compressed::of(entry, image.cluster_bits).bytes);
    let from = to_usize(pos) & (cluster - 1);
    let packed = packed.get(..bytes).ok_or(EIO)?;
    if to.len() == cluster {
        return inflate(image.header.compression, packed, to).map_err(|_| EIO);
    }
    let mut whole = vec![0; cluster];
    inflate(image.header.compression, packed, &mut whole).map_err(|_| EIO)?;
    to.copy_from_slice(&whole[from..][..to.len()]);
    Ok(())
}
