//! The location of data, for copies of a disk. It is looked up in the map like for reads.

use super::{Context, Next, Request};
use crate::served::Source;

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

    pub(super) fn step_seek(&mut self, own: bool, cx: &mut Context<'_>) -> Next {
        let (pos, left) = (self.pos, self.end - self.pos);
        let run = if own {
            cx.chain.top().run(pos, left).map_err(|miss| (0, miss))
        } else {
            cx.chain.find(pos, left).map(|(_, what, n)| (what, n))
        };
        let (what, n) = match run {
            Ok(run) => run,
            Err((layer, miss)) => return self.load(layer, miss, cx),
        };
        let extent = match what {
            Source::Data(_) | Source::Compressed(_) => Extent::Data,
            Source::Below if own => Extent::Absent,
            Source::Zero | Source::Below => Extent::Zero,
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
