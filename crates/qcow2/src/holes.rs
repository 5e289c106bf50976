//! What is to be punched in an external data file: places that clusters had there and do not need any more.
//!
//! A cluster's place in a data file is its own for good, so nothing is counted, and nobody else can be given it. But its
//! disk's next write takes it again, which a punch must not hit. Who takes a cluster out of the map, or puts it in, says so
//! here while it holds the cluster; so a place is here only as long as the map does not name it, and a write to a place that
//! is being punched waits for the end of that.
//!
//! As with the clusters of an image ([`crate::alloc`]), a place waits until the map without it is on stable storage and until
//! no request that knew it is under way: else it could be written after it was punched, for nobody.
//!
//! Lock order: last. It is never held over I/O.

use std::collections::BTreeMap;

use crate::Waker;
use crate::epoch::{Epoch, Epochs};

/// Places behind one another: by the first one's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hole {
    count: u64,
    epoch: Epoch,
    /// The flush that made the map without them stable; `u64::MAX` before.
    flush: u64,
}

/// Those of one data file. Behind one lock.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    /// No two have a place in common.
    waiting: BTreeMap<u64, Hole>,
    /// A flush has looked at those before it already.
    looked: u64,
    /// What is being punched: from, and up to.
    punching: (u64, u64),
    /// Who waits for the end of that.
    parked: Vec<Waker>,
}

impl Holes {
    /// Clusters went out of the map, or did not come into it: the caller holds them, and the map says so already.
    pub(crate) fn add(&mut self, start: u64, count: u64, epoch: Epoch) {
        self.cut(start, start + count);
        let mut hole = Hole { count, epoch, flush: u64::MAX };
        let mut first = start;
        if let Some((&before, old)) = self.waiting.range_mut(..start).next_back()
            && (before + old.count, old.epoch, old.flush) == (start, epoch, u64::MAX)
        {
            (first, hole.count) = (before, old.count + count);
        }
        self.waiting.insert(first, hole);
    }

    /// Clusters that the caller holds are going to be written: they are not punched any more. False: that is happening just
    /// now, and the caller is woken after it.
    pub(crate) fn keep(&mut self, start: u64, count: u64, waker: Waker) -> bool {
        let end = start + count;
        if start < self.punching.1 && self.punching.0 < end {
            self.parked.push(waker);
            return false;
        }
        self.cut(start, end);
        true
    }

    /// Forgets the places of a range.
    fn cut(&mut self, start: u64, end: u64) {
        while let Some((&first, &hole)) = self.waiting.range(..end).next_back() {
            let last = first + hole.count;
            if last <= start {
                return;
            }
            self.waiting.remove(&first);
            if last > end {
                self.waiting.insert(end, Hole { count: last - end, ..hole });
            }
            if first < start {
                self.waiting.insert(first, Hole { count: start - first, ..hole });
            }
        }
    }

    /// Before flush `flush` copies the map: what went before is stable with it.
    pub(crate) fn begin_flush(&mut self, flush: u64) {
        self.looked = 0;
        self.mark(u64::MAX, flush);
    }

    /// The flush did not come to its end: what went with it waits for the next.
    pub(crate) fn failed_flush(&mut self, flush: u64) {
        self.mark(flush, u64::MAX);
    }

    fn mark(&mut self, from: u64, to: u64) {
        self.waiting.values_mut().filter(|hole| hole.flush == from).for_each(|hole| hole.flush = to);
    }

    /// Some places, `most` at most, that went with flushes up to `flush`, which are stable, and that nobody uses: the caller
    /// punches them, and says when it has ([`punched`](Self::punched)). One caller at a time.
    pub(crate) fn next(&mut self, flush: u64, most: u64, epochs: &Epochs) -> Option<(u64, u64)> {
        let due = |(_, hole): &(&u64, &Hole)| hole.flush <= flush && epochs.is_over(hole.epoch);
        let Some((&start, &hole)) = self.waiting.range(self.looked..).find(due) else {
            self.looked = u64::MAX;
            return None;
        };
        self.waiting.remove(&start);
        let count = hole.count.min(most);
        if count < hole.count {
            self.waiting.insert(start + count, Hole { count: hole.count - count, ..hole });
        }
        self.looked = start + count;
        self.punching = (start, start + count);
        Some((start, count))
    }

    /// What was being punched is, or cannot be. Those who waited for that.
    pub(crate) fn punched(&mut self) -> Vec<Waker> {
        self.punching = (0, 0);
        std::mem::take(&mut self.parked)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ME: Waker = Waker { who: 1, token: 2 };

    /// All that a flush finds to punch.
    fn all(holes: &mut Holes, flush: u64, epochs: &Epochs) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| {
            let next = holes.next(flush, 100, epochs);
            holes.punched();
            next
        })
        .collect()
    }

    fn advance(epochs: &Epochs) {
        for _ in 0..4 {
            epochs.advance();
        }
    }

    fn advanced() -> Epochs {
        let epochs = Epochs::default();
        advance(&epochs);
        epochs
    }

    #[test]
    fn what_is_written_again_is_not_punched() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(10, 10, 0);
        holes.add(20, 5, 0);
        assert_eq!(holes.waiting.len(), 1, "neighbours are one");
        assert!(holes.keep(12, 2, ME) && holes.keep(24, 100, ME) && holes.keep(0, 10, ME));
        assert_eq!(all(&mut holes, 7, &epochs), [], "no flush covers them");
        holes.begin_flush(7);
        holes.add(13, 1, 0);
        assert_eq!(all(&mut holes, 6, &epochs), []);
        holes.looked = 0;
        assert_eq!(all(&mut holes, 7, &epochs), [(10, 2), (14, 10)]);
        holes.failed_flush(7);
        holes.begin_flush(8);
        assert_eq!(all(&mut holes, 8, &epochs), [(13, 1)]);
    }

    #[test]
    fn a_failed_flush_covers_nothing() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(1, 1, 0);
        holes.begin_flush(1);
        holes.failed_flush(1);
        assert_eq!(all(&mut holes, 1, &epochs), []);
        holes.begin_flush(2);
        assert_eq!(all(&mut holes, 2, &epochs), [(1, 1)]);
    }

    #[test]
    fn a_write_waits_for_the_punch() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(4, 4, 0);
        holes.begin_flush(1);
        assert_eq!(holes.next(1, 100, &epochs), Some((4, 4)));
        assert!(holes.keep(8, 4, ME) && holes.keep(0, 4, ME));
        assert!(!holes.keep(7, 1, ME) && !holes.keep(0, 100, ME));
        assert_eq!(holes.punched(), [ME, ME]);
        assert!(holes.keep(7, 1, ME));
        assert_eq!(holes.next(1, 100, &epochs), None);
    }

    #[test]
    fn a_long_one_is_punched_in_pieces() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(4, 10, 0);
        holes.begin_flush(1);
        assert_eq!(holes.next(1, 6, &epochs), Some((4, 6)));
        assert!(holes.keep(10, 1, ME), "the rest is not being punched");
        assert_eq!(holes.punched(), []);
        assert_eq!(holes.next(1, 6, &epochs), Some((11, 3)));
    }

    #[test]
    fn who_knew_a_place_is_waited_for() {
        let (mut holes, epochs) = (Holes::default(), Epochs::default());
        let member = epochs.join();
        let user = epochs.enter(&member);
        holes.add(4, 4, epochs.now());
        holes.begin_flush(1);
        advance(&epochs);
        assert_eq!(all(&mut holes, 1, &epochs), []);
        epochs.exit(&member, user);
        advance(&epochs);
        holes.begin_flush(2);
        assert_eq!(all(&mut holes, 2, &epochs), [(4, 4)]);
    }
}
