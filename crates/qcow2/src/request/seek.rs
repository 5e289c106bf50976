//! Where data is, for who copies a disk: looked up in the map as reads do it.

use super::{Context, Next, Request};
use crate::served::What;

/// What a run of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// It has to be read; it may be zeroes all the same.
    Data,
    /// It reads as zeroes.
    Zero,
    /// The image says nothing of it: the one below does. Only where the image was asked alone.
    Absent,
}

/// An answer: what, and for how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub extent: Extent,
    /// How long it is; at least 1, at most as long as was asked for.
    pub len: u64,
}

impl Request {
    /// After [`Op::Seek`](super::Op::Seek) that went well.
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
            What::Data(_) | What::Compressed(_) => Extent::Data,
            What::Below if own => Extent::Absent,
            What::Zero | What::Below => Extent::Zero,
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
