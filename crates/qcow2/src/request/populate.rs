//! Copies what the backing images have to the image, by the same steps as a write that covers
//! nothing. So it waits for other requests for the same clusters, and they wait for it.
//!
//! What is below is read while the clusters are held. Units that are zeroes there, such as the
//! holes of a raw file, get entries that say so, and no space.

use super::change::Stage;
use super::fetch::Fetch;
use super::{Context, Next, Request};
use crate::bytes::to_usize;
use crate::served::{Served, Source};

impl Request {
    /// Continues at `pos`. What the image has, and what reads as zeroes, is left out: without
    /// backing images it reads the same.
    pub(super) fn step_populate(&mut self, cx: &mut Context<'_>) -> Next {
        let (chain, pos) = (cx.chain, self.pos);
        let image = chain.top();
        let own = match image.run(pos, self.end - pos) {
            Ok((Source::Below, n)) => n,
            Ok((_, n)) => {
                self.pos += n;
                return Next::Again;
            }
            Err(miss) => return self.load(0, miss, cx),
        };
        let len = match chain.find(pos, own) {
            Ok((_, Source::Zero | Source::Below, n)) => {
                self.pos += n;
                return Next::Again;
            }
            Ok((_, Source::Data(_) | Source::Compressed(_), n)) => n,
            Err((layer, miss)) => return self.load(layer, miss, cx),
        };
        match self.writable(image.cluster(pos), cx) {
            Ok(_) => self.begin_change(pos + len, cx),
            Err(next) => next,
        }
    }

    /// Lets all be fetched that the held clusters do not have.
    pub(super) fn fetch_below(&mut self, image: &Served) -> Next {
        let change = self.change.as_mut().expect("a change is under way");
        change.span(image);
        change.stage = Stage::Cut;
        let fetch = Fetch::new(change.from, change.to, 0);
        self.data.reset(to_usize(change.to - change.from));
        self.fetch = Some(fetch);
        Next::Again
    }

    /// Shortens the change to the first units that are all zeroes, or all not.
    pub(super) fn cut(&mut self, image: &Served, cx: &mut Context<'_>) -> Next {
        let change = self.change.as_mut().expect("a change is under way");
        // Version 2 has no entry for zeroes. A cluster whose old version stays is written
        // completely.
        if image.version >= 3 && !change.olds.iter().any(|old| image.is_kept(*old)) {
            let unit = 1 << image.sub_bits();
            let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
            let mut zeroes = self.data.chunks(unit).map(is_zero);
            change.zero = zeroes.next().unwrap_or(false);
            let run = 1 + zeroes.take_while(|zero| *zero == change.zero).count();
            change.to = change.to.min(change.from + (run * unit) as u64);
            change.guest.1 = change.guest.1.min(change.to);
            let keep = image.cluster(change.to - 1) - change.first + 1;
            if keep < change.held {
                // While it holds them.
                change.add_holes(image, keep);
                image.map.shorten(change.first, change.held, keep, cx.wake);
                change.held = keep;
                change.olds.truncate(to_usize(keep));
            }
        }
        change.stage = if change.zero { Stage::Enter } else { Stage::Take };
        Next::Again
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
