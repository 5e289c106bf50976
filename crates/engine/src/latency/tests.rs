use std::cell::Cell;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

thread_local! {
    /// How often this thread read the clock.
    pub(super) static CLOCK_READS: Cell<u64> = const { Cell::new(0) };
}

fn reads() -> u64 {
    CLOCK_READS.with(Cell::get)
}

fn meter(mode: LatencyMode) -> (Latency, Meter) {
    let latency = Latency::default();
    latency.set_mode(mode);
    let meter = latency.meter();
    (latency, meter)
}

fn count(latency: &Latency) -> u64 {
    latency.info().and_then(|info| info.all_kinds()).map_or(0, |figures| figures.count)
}

/// Returns a service time; small and large ones are equally likely.
fn times() -> impl Strategy<Value = u64> {
    (0..64_u32, any::<u64>()).prop_map(|(shift, ns)| ns >> shift)
}

proptest! {
    #[test]
    fn the_limits_of_a_bin_contain_its_times(ns in times()) {
        let bin = bin_of(ns);
        let below = if bin == 0 { 0 } else { limit_of(bin - 1) };
        prop_assert!(below <= ns, "{below} {ns}");
        prop_assert!(ns < limit_of(bin) || bin == BINS - 1, "{ns} {}", limit_of(bin));
    }

    #[test]
    fn a_limit_is_at_most_an_eighth_too_large(ns in 1000..67_000_000_000_u64) {
        let error = (limit_of(bin_of(ns)) - ns) as f64 / ns as f64;
        prop_assert!(error <= 0.125, "{ns} {error}");
    }

    #[test]
    fn a_percentile_is_in_the_bin_of_the_exact_one(
        mut all in prop::collection::vec(0..100_000_000_000_u64, 1..300),
    ) {
        let histogram = Histogram::new();
        all.iter().for_each(|ns| histogram.add(*ns, 1));
        all.sort_unstable();
        let figures = histogram.figures().unwrap();
        prop_assert_eq!(figures.count, all.len() as u64);
        prop_assert_eq!(figures.max_ns, *all.last().unwrap());
        prop_assert_eq!(figures.total_ns, all.iter().sum::<u64>());
        for (share, shown) in [(50, figures.p50_ns), (99, figures.p99_ns)] {
            let exact = all[(all.len() * share).div_ceil(100) - 1];
            prop_assert_eq!(shown, limit_of(bin_of(exact)).min(figures.max_ns), "p{} of {:?}", share, all);
        }
    }
}

#[test]
fn bins_ascend_and_end_at_whole_microseconds() {
    assert!((1..BINS).all(|bin| limit_of(bin - 1) < limit_of(bin)));
    for power in 0..=26 {
        let ns = 1000 << power;
        assert_eq!(limit_of(bin_of(ns - 1)), ns);
    }
    assert_eq!([bin_of(0), bin_of(124), bin_of(125), bin_of(u64::MAX)], [0, 0, 1, BINS - 1]);
    assert_eq!(limit_of(BINS - 2), 67_108_864_000);
}

#[test]
fn off_has_no_figures_and_reads_no_clock() {
    let (latency, mut meter) = meter(LatencyMode::Off);
    let before = reads();
    for _ in 0..100 {
        meter.batch();
        meter.done(meter.stamp(), RequestKind::Read);
        meter.publish();
    }
    assert_eq!((reads(), latency.info()), (before, None));
    assert_eq!(Latency::default().meter().staged.capacity(), 0);
}

#[test]
fn a_batch_reads_the_clock_twice() {
    let (latency, mut meter) = meter(LatencyMode::On);
    let before = reads();
    meter.batch();
    for _ in 0..64 {
        meter.done(meter.stamp(), RequestKind::Write);
    }
    meter.publish();
    meter.publish();
    assert_eq!((reads() - before, count(&latency)), (2, 64));
    assert_eq!(latency.info().unwrap().write.unwrap().count, 64);
}

#[test]
fn each_request_counts_once_whenever_it_completes() {
    let (latency, mut meter) = meter(LatencyMode::On);
    let mut taken = Vec::new();
    let (mut random, mut done) = (fastrand::Rng::with_seed(7), 0);
    for _ in 0..2000 {
        meter.batch();
        taken.extend((0..random.u32(0..8)).map(|_| meter.stamp()));
        random.shuffle(&mut taken);
        for stamp in taken.drain(random.usize(0..=taken.len())..) {
            let kinds = [RequestKind::Read, RequestKind::Write, RequestKind::Flush, RequestKind::Other];
            meter.done(stamp, kinds[random.usize(0..4)]);
            done += 1;
        }
        if random.u32(0..40) == 0 {
            meter.publish();
            assert_eq!(count(&latency), done);
        }
    }
    meter.publish();
    assert_eq!(count(&latency), done);
    assert_eq!(meter.staged.capacity(), STAGED_MAX, "nothing was allocated");
}

#[test]
fn a_service_time_ends_with_its_publication() {
    let (latency, mut meter) = meter(LatencyMode::On);
    meter.batch();
    let slow = meter.stamp();
    std::thread::sleep(Duration::from_millis(20));
    meter.batch();
    let stamp = meter.stamp();
    meter.done(slow, RequestKind::Read);
    meter.done(stamp, RequestKind::Flush);
    std::thread::sleep(Duration::from_millis(2));
    meter.publish();
    let info = latency.info().unwrap();
    let (read, flush) = (info.read.unwrap(), info.flush.unwrap());
    assert!(read.max_ns >= 22_000_000, "{read:?}");
    assert!(flush.max_ns >= 2_000_000 && flush.max_ns + 20_000_000 <= read.max_ns, "{flush:?} {read:?}");
}

#[test]
fn some_batches_are_sampled() {
    let (latency, mut meter) = meter(LatencyMode::Sampled);
    let before = reads();
    for _ in 0..8000 {
        meter.batch();
        meter.done(meter.stamp(), RequestKind::Read);
        meter.publish();
    }
    let sampled = count(&latency);
    assert!((800..1200).contains(&sampled), "{sampled}");
    assert_eq!(reads() - before, 2 * sampled);
}

#[test]
fn another_meter_continues_the_histograms() {
    let (latency, mut first) = meter(LatencyMode::On);
    first.batch();
    first.done(first.stamp(), RequestKind::Read);
    first.publish();
    let mut second = latency.meter();
    second.batch();
    second.done(second.stamp(), RequestKind::Read);
    second.publish();
    assert_eq!(count(&latency), 2);
}

#[test]
fn a_reset_starts_at_zero_and_keeps_what_was_before() {
    let (latency, mut meter) = meter(LatencyMode::On);
    let mut requests = |n: u64| {
        for _ in 0..n {
            meter.batch();
            meter.done(meter.stamp(), RequestKind::Read);
            meter.publish();
        }
    };
    requests(5);
    let before = latency.info().unwrap();
    latency.reset();
    assert_eq!(count(&latency), 0);
    requests(3);
    latency.reset();
    requests(2);
    let after = latency.info().unwrap();
    let read = after.read.clone().unwrap();
    assert_eq!(read.count, 2);
    assert!(read.p50_ns <= read.p99_ns && read.p99_ns <= read.max_ns && read.total_ns > 0, "{read:?}");
    let all = after.without_reset().read.unwrap();
    assert_eq!(all.count, 10);
    assert!(all.max_ns >= before.read.unwrap().max_ns && all.max_ns >= read.max_ns, "{all:?}");
    Latency::default().reset();
}
