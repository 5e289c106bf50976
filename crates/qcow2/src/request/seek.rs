//! The location of data, for copies of a disk. It is looked up in the map like for reads.

use super::{Context, Next, Request};
use crate::served::Source;

/// What a seek looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Where the disk has data, and where it reads as zeroes.
    Disk,
    /// The same in the image alone, without its backing images: also where it has no information.
    Image,
    /// Which layer of the chain decides on the contents: [`Extent::Layer`].
    Layers,
}

/// The contents of a run of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// It has to be read. It may contain zeroes.
    Data,
    /// It reads as zeroes.
    Zero,
    /// The image has no information, and the backing file decides. Only if the image was asked
    /// alone.
    Absent,
    /// The layer that decides: 1 for the image, 2 for its backing image, and so on; 0 for none. A
    /// backing image that is shorter than the disk decides on what is behind its end. Only for
    /// [`Look::Layers`].
    Layer(u32),
}

/// The answer to a seek: the contents, and for how many bytes they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The contents.
    pub extent: Extent,
    /// The length, at least 1 and at most the requested one.
    pub len: u64,
}

impl Request {
    /// Returns the answer, after an [`Op::Seek`](super::Op::Seek) that succeeded.
    pub fn found(&self) -> Option<Found> {
        self.found
    }

    pub(super) fn step_seek(&mut self, look: Look, cx: &mut Context<'_>) -> Next {
        let (pos, left) = (self.pos, self.end - self.pos);
        let run = match look {
            Look::Image => {
                cx.chain.top().run(pos, left).map(|(what, n)| (0, what, n)).map_err(|miss| (0, miss))
            }
            Look::Disk | Look::Layers => cx.chain.find(pos, left),
        };
        let (layer, what, n) = match run {
            Ok(run) => run,
            Err((layer, miss)) => return self.load(layer, miss, cx),
        };
        let extent = match (look, what) {
            (Look::Layers, Source::Below) => Extent::Layer(0),
            (Look::Layers, _) => Extent::Layer(u32::try_from(layer + 1).unwrap_or(u32::MAX)),
            (_, Source::Data(_) | Source::Compressed(_)) => Extent::Data,
            (Look::Image, Source::Below) => Extent::Absent,
            (_, Source::Zero | Source::Below) => Extent::Zero,
        };
        let found = self.found.get_or_insert(Found { extent, len: 0 });
        if found.extent == extent {
            found.len += n;
            self.pos += n;
        } else {
            self.end = self.pos;
        }
        Next::Again
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
