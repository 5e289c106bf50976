//! The values that the disk's sectors may have, for any order of concurrent writes.

use std::collections::VecDeque;

/// The time of an event. Each event has its own.
pub(crate) type Time = u64;

#[derive(Clone, Copy, Debug)]
struct Write {
    value: u32,
    begin: Time,
    /// `Time::MAX` while it is in flight.
    end: Time,
    /// Whether it may leave the former value.
    weak: bool,
}

/// All writes to each sector whose values can still be read.
#[derive(Clone)]
pub(crate) struct Model {
    sectors: Vec<VecDeque<Write>>,
    /// Flushes that ended, as start and end.
    flushes: Vec<(Time, Time)>,
}

impl Model {
    pub(crate) fn new(sectors: usize) -> Self {
        let first = Write { value: 0, begin: 0, end: 0, weak: false };
        Self { sectors: vec![VecDeque::from([first]); sectors], flushes: vec![(0, 0)] }
    }

    /// Records the start of a write of `value`. 0: zeroes.
    pub(crate) fn start(&mut self, sector: usize, value: u32, now: Time, weak: bool) {
        self.sectors[sector].push_back(Write { value, begin: now, end: Time::MAX, weak });
    }

    /// Records the end of a write. A failed one may have had any effect.
    pub(crate) fn end(&mut self, sector: usize, begin: Time, now: Time, done: bool) {
        let list = &mut self.sectors[sector];
        let write = list.iter_mut().find(|w| w.begin == begin).expect("it began");
        write.end = now;
        write.weak |= !done;
    }

    pub(crate) fn flushed(&mut self, begin: Time, end: Time) {
        self.flushes.push((begin, end));
    }

    /// Returns whether a read from `begin` to `end` may see `value`.
    pub(crate) fn may_read(&self, sector: usize, value: u32, begin: Time, end: Time) -> bool {
        self.may(sector, value, end, |over| over.end < begin)
    }

    /// Returns whether `value` may be there after a crash at `at`.
    pub(crate) fn may_survive(&self, sector: usize, value: u32, at: Time) -> bool {
        self.may(sector, value, at, |over| self.flushes.iter().any(|f| over.end < f.0 && f.1 < at))
    }

    /// Returns whether `value` was written before `end`, and not overwritten by a write that
    /// counts.
    fn may(&self, sector: usize, value: u32, end: Time, counts: impl Fn(&Write) -> bool) -> bool {
        let list = &self.sectors[sector];
        let gone = |w: &Write| list.iter().any(|over| !over.weak && over.begin > w.end && counts(over));
        list.iter().any(|w| w.value == value && w.begin < end && !gone(w))
    }

    /// Records the value that was found after a crash, or with nothing in flight.
    pub(crate) fn set_known(&mut self, sector: usize, value: u32, now: Time) {
        self.sectors[sector] = VecDeque::from([Write { value, begin: now, end: now, weak: false }]);
    }

    /// Removes writes that can no longer be seen, because a stable write has overwritten them
    /// before `before`.
    pub(crate) fn prune(&mut self, before: Time) {
        let flushed = self.flushes.iter().filter(|f| f.1 < before).map(|f| f.0).max().unwrap_or(0);
        self.flushes.retain(|f| f.1 >= before || f.0 == flushed);
        for list in &mut self.sectors {
            let over: Vec<Time> =
                list.iter().filter(|w| !w.weak && w.end < flushed).map(|w| w.begin).collect();
            list.retain(|w| w.end >= before || !over.iter().any(|begin| *begin > w.end));
        }
    }
}
