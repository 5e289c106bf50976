//! Two workers write to no line of the cache that both use.
//!
//! A line has 64 bytes, and CPUs fetch pairs of them: so what one worker writes is at least 128
//! bytes away from what another one writes, wherever the allocator has put it.

use std::collections::BTreeMap;

use super::*;

const PAIR_OF_LINES: usize = 128;

/// Adds the pairs of lines of a value that this worker writes.
fn add<T>(lines: &mut BTreeMap<usize, (usize, &'static str)>, worker: usize, what: &'static str, value: &T) {
    let start = std::ptr::from_ref(value).addr();
    let all = start / PAIR_OF_LINES..=(start + size_of::<T>() - 1) / PAIR_OF_LINES;
    for line in all {
        if let Some((other, of)) = lines.insert(line, (worker, what)) {
            assert_eq!(
                other, worker,
                "a line of {of} of worker {other} is one of {what} of worker {worker}, too"
            );
        }
    }
}

#[test]
fn two_workers_write_to_no_common_line() {
    let workers = Workers::new(0).unwrap();
    let ids: Vec<WorkerId> = (0..8).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
    let set = QueueSet::new("e", &workers, &ids).unwrap();
    let shared: Vec<_> = ids.iter().map(|id| workers.reserve(*id).unwrap()).collect();
    let mut lines = BTreeMap::new();
    for (worker, index) in (0..8).enumerate() {
        set.stats(index).latency.set_mode(vshunt_types::spec::LatencyMode::On);
        let _ = set.stats(index).latency.meter();
        add(&mut lines, worker, "the counters of a queue", &**set.stats(index));
        add(&mut lines, worker, "the state of a worker", &*shared[worker]);
        let histograms = set.stats(index).latency.written();
        histograms
            .iter()
            .flat_map(|all| all.iter())
            .for_each(|one| add(&mut lines, worker, "a histogram", one));
    }
    // Neighbours in an array do not touch, either.
    let many: Vec<QueueStats> = (0..4).map(|_| QueueStats::default()).collect();
    let mut lines = BTreeMap::new();
    many.iter().enumerate().for_each(|(at, stats)| add(&mut lines, at, "counters", stats));
    ids.iter().for_each(|id| workers.release(*id));
}
