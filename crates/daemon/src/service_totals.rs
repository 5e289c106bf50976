//! The service time of all operations of an export, from the operations that were measured.

use std::sync::Mutex;

use vshunt_types::spec::{ExportInfo, LatencyFigures, LatencyInfo, QueueInfo};
use vshunt_types::sync::Locked;

/// Sums of service times in nanoseconds. If a sample is measured, they are estimates. They do not
/// go back while the export exists, also when its service times are reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceTotals {
    /// Of reads.
    pub read_ns: u64,
    /// Of writes.
    pub write_ns: u64,
    /// Of flushes.
    pub flush_ns: u64,
}

/// The estimates of an export.
#[derive(Debug, Default)]
pub(super) struct ServiceEstimates {
    /// Of reads, writes and flushes. Locked for a look at the figures that the caller has.
    kinds: Mutex<[Estimate; 3]>,
}

impl ServiceEstimates {
    /// Continues the estimates with the state of the export.
    pub(super) fn update(&self, info: &ExportInfo) -> ServiceTotals {
        let sum = |of: fn(&QueueInfo) -> u64| info.queue_list.iter().map(of).fold(0, u64::saturating_add);
        let all = info.service_times.clone().map(LatencyInfo::without_reset).unwrap_or_default();
        let [read, write, flush] = &mut *self.kinds.locked();
        ServiceTotals {
            read_ns: read.update(all.read.as_ref(), sum(|q| q.reads)),
            write_ns: write.update(all.write.as_ref(), sum(|q| q.writes)),
            flush_ns: flush.update(all.flush.as_ref(), sum(|q| q.flushes)),
        }
    }
}

/// The estimate for operations of one kind, and the counters that it was made of.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    total_ns: u64,
    measured: u64,
    measured_ns: u64,
    operations: u64,
}

impl Estimate {
    /// Adds the operations since the last update. Each counts with the mean of those among them
    /// that were measured. If none was, they count with the next ones. So the sum does not go back,
    /// and its growth follows the service times of the moment.
    fn update(&mut self, figures: Option<&LatencyFigures>, operations: u64) -> u64 {
        if let Some(figures) = figures.filter(|figures| figures.count > self.measured) {
            let measured = u128::from(figures.count - self.measured);
            let measured_ns = u128::from(figures.total_ns.saturating_sub(self.measured_ns));
            let all_ns = measured_ns * u128::from(operations.saturating_sub(self.operations)) / measured;
            self.total_ns = self.total_ns.saturating_add(u64::try_from(all_ns).unwrap_or(u64::MAX));
            self.measured = figures.count;
            self.measured_ns = self.measured_ns.max(figures.total_ns);
            self.operations = self.operations.max(operations);
        }
        self.total_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(count: u64, total_ns: u64) -> Option<LatencyFigures> {
        LatencyFigures::new(vec![(1 << 20, count)], total_ns, total_ns)
    }

    #[test]
    fn a_sample_gives_an_estimate_of_the_whole_time() {
        let mut reads = Estimate::default();
        assert_eq!(reads.update(None, 7), 0);
        assert_eq!(reads.update(figures(2, 5000).as_ref(), 20), 50_000);
        assert_eq!(reads.update(figures(2, 5000).as_ref(), 27), 50_000, "none of the 7 was measured");
        assert_eq!(reads.update(figures(3, 6000).as_ref(), 28), 58_000);
    }

    #[test]
    fn an_estimate_does_not_go_back() {
        // The mean of the whole sample sinks faster than the number of operations grows.
        let mut reads = Estimate::default();
        assert_eq!(reads.update(figures(1, 1_000_000).as_ref(), 8), 8_000_000);
        assert_eq!(reads.update(figures(2, 1_000_100).as_ref(), 9), 8_000_100);
        // Counters that are read while a worker writes them may be older than those before.
        assert_eq!(reads.update(figures(3, 1_000_000).as_ref(), 8), 8_000_100);
        assert_eq!(reads.update(figures(2, 900).as_ref(), 80), 8_000_100);
        let mut random = fastrand::Rng::with_seed(7);
        let (mut operations, mut count, mut total_ns, mut last) = (9, 3, 1_000_100, 8_000_100);
        for _ in 0..1000 {
            let measured = random.u64(0..3);
            operations += measured + random.u64(0..20);
            count += measured;
            total_ns += measured * random.u64(100..1_000_000);
            let now = reads.update(figures(count, total_ns).as_ref(), operations);
            assert!(now >= last, "{last} {now}");
            last = now;
        }
        assert!(reads.update(figures(u64::MAX, u64::MAX).as_ref(), u64::MAX) >= last);
    }
}
