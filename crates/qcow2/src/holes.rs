//! Clusters to be punched in an external data file, which their part of the disk no longer needs.
//!
//! The cluster's offset in a data file is fixed, so nothing is counted and no other cluster can get
//! it. But the next write to this part of the disk uses the same offset, and a punch must not hit
//! it. A request that removes a cluster from the map, or adds it, records that here while it holds
//! the cluster. So a cluster is listed here only while the map does not refer to it. A write to a
//! cluster that is being punched waits for the end of the punch.
//!
//! Like a cluster of an image ([`crate::alloc`]), a cluster waits until the map without it is on
//! stable storage, and until no request that knew it is in flight. Otherwise such a request could
//! write to it after the punch, which would use space for nothing.
//!
//! Lock order: last. The lock is never held during I/O.

use std::collections::BTreeMap;

use crate::Waker;
use crate::epoch::{Epoch, Epochs};

/// Consecutive clusters, keyed by the number of the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hole {
    count: u64,
    epoch: Epoch,
    /// The flush that made the map without them stable; `u64::MAX` before that.
    flush: u64,
}

/// The holes of one data file. One lock guards them.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    /// Ranges, which do not overlap.
    waiting: BTreeMap<u64, Hole>,
    /// A flush has examined the clusters before this one.
    looked: u64,
    /// The range that is being punched: start and end.
    punching: (u64, u64),
    /// Requests that wait for the end of the punch.
    parked: Vec<Waker>,
}

impl Holes {
    /// Adds clusters that were removed from the map, or were not added to it. The caller holds
    /// them, and the map is up to date.
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

    /// Removes clusters that the caller holds and is going to write, so that they are not punched.
    /// Returns false if they are being punched at this moment; the caller is then woken at the end.
    pub(crate) fn keep(&mut self, start: u64, count: u64, waker: Waker) -> bool {
        let end = start + count;
        if start < self.punching.1 && self.punching.0 < end {
            self.parked.push(waker);
            return false;
        }
        self.cut(start, end);
        true
    }

    /// Removes the clusters of a range.
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

    /// Starts flush `flush`, before it copies the map. Clusters that were removed before are stable
    /// with it.
    pub(crate) fn start_flush(&mut self, flush: u64) {
        self.looked = 0;
        self.mark(u64::MAX, flush);
    }

    /// Records that the flush failed. Clusters that were removed before it wait for the next one.
    pub(crate) fn failed_flush(&mut self, flush: u64) {
        self.mark(flush, u64::MAX);
    }

    fn mark(&mut self, from: u64, to: u64) {
        self.waiting.values_mut().filter(|hole| hole.flush == from).for_each(|hole| hole.flush = to);
    }

    /// Returns some clusters, at most `most`, that were removed with flushes up to `flush`, which
    /// are stable, and that have no users. The caller punches them, and then calls
    /// [`punched`](Self::punched). One caller at a time.
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

    /// Records that the punch has ended or failed. Returns the requests that waited for it.
    pub(crate) fn punched(&mut self) -> Vec<Waker> {
        self.punching = (0, 0);
        std::mem::take(&mut self.parked)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const WAKER: Waker = Waker { who: 1, token: 2 };

    /// Returns all ranges that a flush finds to punch.
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
        assert!(holes.keep(12, 2, WAKER) && holes.keep(24, 100, WAKER) && holes.keep(0, 10, WAKER));
        assert_eq!(all(&mut holes, 7, &epochs), [], "no flush covers them");
        holes.start_flush(7);
        holes.add(13, 1, 0);
        assert_eq!(all(&mut holes, 6, &epochs), []);
        holes.looked = 0;
        assert_eq!(all(&mut holes, 7, &epochs), [(10, 2), (14, 10)]);
        holes.failed_flush(7);
        holes.start_flush(8);
        assert_eq!(all(&mut holes, 8, &epochs), [(13, 1)]);
    }

    #[test]
    fn a_failed_flush_covers_nothing() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(1, 1, 0);
        holes.start_flush(1);
        holes.failed_flush(1);
        assert_eq!(all(&mut holes, 1, &epochs), []);
        holes.start_flush(2);
        assert_eq!(all(&mut holes, 2, &epochs), [(1, 1)]);
    }

    #[test]
    fn a_write_waits_for_the_punch() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(4, 4, 0);
        holes.start_flush(1);
        assert_eq!(holes.next(1, 100, &epochs), Some((4, 4)));
        assert!(holes.keep(8, 4, WAKER) && holes.keep(0, 4, WAKER));
        assert!(!holes.keep(7, 1, WAKER) && !holes.keep(0, 100, WAKER));
        assert_eq!(holes.punched(), [WAKER, WAKER]);
        assert!(holes.keep(7, 1, WAKER));
        assert_eq!(holes.next(1, 100, &epochs), None);
    }

    #[test]
    fn a_long_one_is_punched_in_pieces() {
        let (mut holes, epochs) = (Holes::default(), advanced());
        holes.add(4, 10, 0);
        holes.start_flush(1);
        assert_eq!(holes.next(1, 6, &epochs), Some((4, 6)));
        assert!(holes.keep(10, 1, WAKER), "the rest is not being punched");
        assert_eq!(holes.punched(), []);
        assert_eq!(holes.next(1, 6, &epochs), Some((11, 3)));
    }

    #[test]
    fn who_knew_a_place_is_waited_for() {
        let (mut holes, epochs) = (Holes::default(), Epochs::default());
        let member = epochs.join();
        let user = epochs.enter(&member);
        holes.add(4, 4, epochs.now());
        holes.start_flush(1);
        advance(&epochs);
        assert_eq!(all(&mut holes, 1, &epochs), []);
        epochs.exit(&member, user);
        advance(&epochs);
        holes.start_flush(2);
        assert_eq!(all(&mut holes, 2, &epochs), [(4, 4)]);
    }
}
