//! Service times of requests: what is measured, and the figures that are shown.

use serde::{Deserialize, Serialize};

/// Whether the service times of an export are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LatencyMode {
    /// No. The clock is never read for it.
    Off,
    /// For the requests of one batch in eight, chosen at random.
    #[default]
    Sampled,
    /// For all requests.
    On,
}

/// Service times of a queue or of an export: from the moment a worker takes a request until its
/// user can see that it is complete.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyInfo {
    /// `sampled` or `on`.
    pub mode: LatencyMode,
    /// Of reads. Absent, as those of the other kinds, if none was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<LatencyFigures>,
    /// Of writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<LatencyFigures>,
    /// Of flushes; of a mount, fsync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush: Option<LatencyFigures>,
    /// Of all other requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<LatencyFigures>,
    /// What was measured until the last reset, for counters that must not go back. Not sent.
    #[serde(skip)]
    pub before_reset: Option<Box<Self>>,
}

/// Service times of requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyFigures {
    /// The number of requests that were measured.
    pub count: u64,
    /// The sum of their service times in nanoseconds.
    pub total_ns: u64,
    /// Half of them took at most so many nanoseconds. From the bins: at most 12.5 % too large, or
    /// 125 ns.
    pub p50_ns: u64,
    /// 99 % of them took at most so many nanoseconds.
    pub p99_ns: u64,
    /// The longest took so many nanoseconds.
    pub max_ns: u64,
    /// With `histograms`: pairs of a limit in nanoseconds and the number of requests that took less
    /// than it and no less than the limit below. Bins without requests are left out. Each power of
    /// two from 1 µs to 67 s has eight bins; below 1 µs a bin has 125 ns. The limit of longer
    /// requests is 18446744073709551615.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bins: Vec<(u64, u64)>,
}

/// The largest limit of [`LatencyFigures::by_power`], as a power of two of microseconds.
const POWER_MAX: u32 = 26;

impl LatencyFigures {
    /// Computes the figures of a histogram. `bins`: limits, which ascend, and counts above 0. None
    /// if it is empty.
    pub fn new(bins: Vec<(u64, u64)>, total_ns: u64, max_ns: u64) -> Option<Self> {
        let count = bins.iter().fold(0_u64, |sum, (_, n)| sum.saturating_add(*n));
        if count == 0 {
            return None;
        }
        let at = |share| percentile(&bins, count, share).min(max_ns);
        Some(Self { count, total_ns, p50_ns: at(0.5), p99_ns: at(0.99), max_ns, bins })
    }

    /// Returns the number of requests in coarse bins, for formats that have no room for all: one
    /// for each power of two from 1 µs to 67 s, each with its limit in nanoseconds, and one for
    /// longer requests.
    pub fn by_power(&self) -> Vec<(u64, u64)> {
        let limits = (0..=POWER_MAX).map(|power| 1000_u64 << power).chain([u64::MAX]);
        let mut bins = self.bins.iter().peekable();
        let mut of = |limit: u64| {
            let mut sum = 0_u64;
            while let Some((_, n)) = bins.next_if(|(of_bin, _)| *of_bin <= limit) {
                sum = sum.saturating_add(*n);
            }
            (limit, sum)
        };
        limits.map(&mut of).collect()
    }

    /// Returns the figures of two histograms together.
    fn with(&self, other: &Self) -> Option<Self> {
        let bins = joined(&self.bins, &other.bins, |a, b| a.saturating_add(b));
        Self::new(bins, self.total_ns.saturating_add(other.total_ns), self.max_ns.max(other.max_ns))
    }

    /// Returns the figures of the requests that were measured after `before`. The longest is known
    /// by its bin only.
    fn since(&self, before: &Self) -> Option<Self> {
        if self.count < before.count {
            // The export was removed and added.
            return Some(self.clone());
        }
        let bins = joined(&self.bins, &before.bins, u64::saturating_sub);
        let max_ns = bins.last().map_or(0, |(limit, _)| *limit).min(self.max_ns);
        Self::new(bins, self.total_ns.saturating_sub(before.total_ns), max_ns)
    }
}

impl LatencyInfo {
    /// Returns the kinds of requests, by the names of the members, and their figures.
    pub fn each(&self) -> [(&'static str, Option<&LatencyFigures>); 4] {
        [
            ("read", self.read.as_ref()),
            ("write", self.write.as_ref()),
            ("flush", self.flush.as_ref()),
            ("other", self.other.as_ref()),
        ]
    }

    /// Returns the figures of the queues of an export together. None if there are none.
    pub fn sum<'a>(of: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        of.into_iter().fold(None, |sum: Option<Self>, one| match sum {
            None => Some(one.clone()),
            Some(sum) => Some(sum.with(one)),
        })
    }

    fn with(self, one: &Self) -> Self {
        let before_reset = match (self.before_reset, &one.before_reset) {
            (Some(sum), Some(one)) => Some(Box::new(sum.with(one))),
            (sum, one) => sum.or_else(|| one.clone()),
        };
        Self {
            mode: one.mode,
            read: together(self.read, one.read.as_ref()),
            write: together(self.write, one.write.as_ref()),
            flush: together(self.flush, one.flush.as_ref()),
            other: together(self.other, one.other.as_ref()),
            before_reset,
        }
    }

    /// Returns the figures as if there had been no reset.
    pub fn without_reset(mut self) -> Self {
        match self.before_reset.take() {
            Some(before) => self.with(&before),
            None => self,
        }
    }

    /// Takes the longest request of each kind from `other` if it took longer.
    pub fn keep_longest(&mut self, other: &Self) {
        let kinds = [
            (&mut self.read, &other.read),
            (&mut self.write, &other.write),
            (&mut self.flush, &other.flush),
            (&mut self.other, &other.other),
        ];
        for (own, other) in kinds {
            if let (Some(own), Some(other)) = (own, other) {
                own.max_ns = own.max_ns.max(other.max_ns);
            }
        }
    }

    /// Returns the figures of requests of all kinds together. None if none was measured.
    pub fn all_kinds(&self) -> Option<LatencyFigures> {
        self.each().into_iter().fold(None, |sum, (_, one)| together(sum, one))
    }

    /// Returns the figures of the requests that were measured after `before`, from the bins of
    /// both.
    pub fn since(&self, before: &Self) -> Self {
        let of = |now: &Option<LatencyFigures>, before: &Option<LatencyFigures>| match (now, before) {
            (Some(now), Some(before)) => now.since(before),
            (now, _) => now.clone(),
        };
        Self {
            mode: self.mode,
            read: of(&self.read, &before.read),
            write: of(&self.write, &before.write),
            flush: of(&self.flush, &before.flush),
            other: of(&self.other, &before.other),
            before_reset: None,
        }
    }

    /// Removes the bins. They would be most of a list.
    pub fn without_bins(&mut self) {
        let all = [&mut self.read, &mut self.write, &mut self.flush, &mut self.other];
        for figures in all.into_iter().flatten() {
            figures.bins = Vec::new();
        }
    }
}

fn together(sum: Option<LatencyFigures>, one: Option<&LatencyFigures>) -> Option<LatencyFigures> {
    match (sum, one) {
        (Some(sum), Some(one)) => sum.with(one),
        (sum, one) => sum.or_else(|| one.cloned()),
    }
}

/// Returns the limit of the bin that has the request below which there are `share` of all.
fn percentile(bins: &[(u64, u64)], count: u64, share: f64) -> u64 {
    let wanted = ((count as f64 * share).ceil() as u64).clamp(1, count);
    let mut below = 0_u64;
    let found = bins.iter().find(|(_, n)| {
        below = below.saturating_add(*n);
        below >= wanted
    });
    found.or(bins.last()).map_or(0, |(limit, _)| *limit)
}

/// Joins two lists of bins by their limits. Bins of 0 are left out.
fn joined(a: &[(u64, u64)], b: &[(u64, u64)], f: impl Fn(u64, u64) -> u64) -> Vec<(u64, u64)> {
    let (mut a, mut b) = (a.iter().copied().peekable(), b.iter().copied().peekable());
    let mut out = Vec::new();
    while let Some(limit) = a.peek().into_iter().chain(b.peek()).map(|(limit, _)| *limit).min() {
        let x = a.next_if(|(l, _)| *l == limit).map_or(0, |(_, n)| n);
        let y = b.next_if(|(l, _)| *l == limit).map_or(0, |(_, n)| n);
        out.extend(Some((limit, f(x, y))).filter(|(_, n)| *n > 0));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bins: &[(u64, u64)], max_ns: u64) -> LatencyInfo {
        LatencyInfo { read: LatencyFigures::new(bins.to_vec(), 7, max_ns), ..LatencyInfo::default() }
    }

    #[test]
    fn percentiles_are_limits_of_bins_and_at_most_the_longest() {
        let figures = LatencyFigures::new(vec![(1000, 50), (2000, 49), (u64::MAX, 1)], 9, 99_000).unwrap();
        assert_eq!(
            [figures.count, figures.p50_ns, figures.p99_ns, figures.max_ns],
            [100, 1000, 2000, 99_000]
        );
        let slow = LatencyFigures::new(vec![(1000, 9), (u64::MAX, 1)], 9, 99_000).unwrap();
        assert_eq!(slow.p99_ns, 99_000);
        assert_eq!(LatencyFigures::new(vec![], 0, 0), None);
    }

    #[test]
    fn queues_are_added_and_samples_are_subtracted() {
        let a = read(&[(1000, 1), (4000, 2)], 3500);
        let b = read(&[(2000, 3), (4000, 5)], 3900);
        let sum = LatencyInfo::sum([&a, &b]).unwrap();
        let figures = sum.read.as_ref().unwrap();
        assert_eq!(figures.bins, [(1000, 1), (2000, 3), (4000, 7)]);
        assert_eq!((figures.count, figures.total_ns, figures.max_ns), (11, 14, 3900));
        let later = sum.since(&b).read.unwrap();
        assert_eq!((later.bins, later.count), (vec![(1000, 1), (4000, 2)], 3));
        assert_eq!(sum.since(&sum).read, None);
        assert_eq!(a.since(&sum), a, "a counter that became smaller began again");
        assert_eq!(LatencyInfo::sum([]), None);
    }

    #[test]
    fn a_reset_hides_what_was_before_and_loses_nothing() {
        let after_reset = |now: LatencyInfo, before: LatencyInfo| LatencyInfo {
            before_reset: Some(Box::new(before)),
            ..now
        };
        let a = after_reset(read(&[(1000, 1)], 900), read(&[(1000, 4), (8000, 1)], 7900));
        let b = after_reset(LatencyInfo::default(), read(&[(2000, 2)], 1500));
        let sum = LatencyInfo::sum([&a, &b, &read(&[(4000, 1)], 3000)]).unwrap();
        assert_eq!(sum.read.as_ref().map(|f| (f.count, f.max_ns)), Some((2, 3000)));
        let all = sum.without_reset();
        assert_eq!(all.read.as_ref().map(|f| (f.count, f.max_ns)), Some((9, 7900)));
        assert_eq!(all.clone().without_reset(), all);
    }

    #[test]
    fn coarse_bins_have_all_requests() {
        let bins = vec![(125, 1), (1000, 2), (1125, 4), (2000, 8), (67_108_864_000, 16), (u64::MAX, 32)];
        let coarse = LatencyFigures::new(bins, 0, u64::MAX).unwrap().by_power();
        assert_eq!(coarse.len(), 28);
        assert_eq!(coarse[..3], [(1000, 3), (2000, 12), (4000, 0)]);
        assert_eq!(coarse[26..], [(67_108_864_000, 16), (u64::MAX, 32)]);
    }

    #[test]
    fn kinds_together_are_one_histogram() {
        let mut info = read(&[(1000, 1)], 900);
        info.flush = LatencyFigures::new(vec![(8000, 1)], 1, 7000);
        let all = info.all_kinds().unwrap();
        assert_eq!((all.count, all.p50_ns, all.p99_ns), (2, 1000, 7000));
        info.without_bins();
        assert!(info.read.unwrap().bins.is_empty());
    }
}
