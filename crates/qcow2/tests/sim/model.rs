//! What the disk's sectors may read as, whoever of those that wrote at the same time came last.

use std::collections::VecDeque;

/// The time of something; each has its own.
pub(crate) type Time = u64;

#[derive(Clone, Copy, Debug)]
struct Write {
    value: u32,
    begin: Time,
    /// `Time::MAX` while it is under way.
    end: Time,
    /// It may leave what was there.
    weak: bool,
}

/// All that was done to each sector, as far as it can still be read.
#[derive(Clone)]
pub(crate) struct Model {
    sectors: Vec<VecDeque<Write>>,
    /// Flushes that ended: when they began and ended.
    flushes: Vec<(Time, Time)>,
}

impl Model {
    pub(crate) fn new(sectors: usize) -> Self {
        let first = Write { value: 0, begin: 0, end: 0, weak: false };
        Self { sectors: vec![VecDeque::from([first]); sectors], flushes: vec![(0, 0)] }
    }

    /// A write of `value` begins. 0: zeroes.
    pub(crate) fn begin(&mut self, sector: usize, value: u32, now: Time, weak: bool) {
        self.sectors[sector].push_back(Write { value, begin: now, end: Time::MAX, weak });
    }

    /// It is over; a failed one may have come to anything.
    pub(crate) fn end(&mut self, sector: usize, begin: Time, now: Time, done: bool) {
        let list = &mut self.sectors[sector];
        let write = list.iter_mut().find(|w| w.begin == begin).expect("it began");
        write.end = now;
        write.weak |= !done;
    }

    pub(crate) fn flushed(&mut self, begin: Time, end: Time) {
        self.flushes.push((begin, end));
    }

    /// Whether a read from `begin` to `end` may see `value`.
    pub(crate) fn may_read(&self, sector: usize, value: u32, begin: Time, end: Time) -> bool {
        self.may(sector, value, end, |over| over.end < begin)
    }

    /// Whether `value` may be there after a crash at `at`.
    pub(crate) fn may_survive(&self, sector: usize, value: u32, at: Time) -> bool {
        self.may(sector, value, at, |over| self.flushes.iter().any(|f| over.end < f.0 && f.1 < at))
    }

    /// `value` was written before `end`, and not overwritten by one that counts.
    fn may(&self, sector: usize, value: u32, end: Time, counts: impl Fn(&Write) -> bool) -> bool {
        let list = &self.sectors[sector];
        let gone = |w: &Write| list.iter().any(|over| !over.weak && over.begin > w.end && counts(over));
        list.iter().any(|w| w.value == value && w.begin < end && !gone(w))
    }

    /// What was found after a crash, or with nothing under way, is what is there.
    pub(crate) fn settle(&mut self, sector: usize, value: u32, now: Time) {
        self.sectors[sector] = VecDeque::from([Write { value, begin: now, end: now, weak: false }]);
    }

    /// Forgets what nobody can see any more: that a write which is stable has overwritten before `before`.
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
