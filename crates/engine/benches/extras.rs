//! What a request costs more because service times are measured, and because limits could be set.
//!
//! `cargo bench -p vshunt-engine --bench extras` prints nanoseconds for each request, by the number
//! of requests that a worker takes at once. A request without storage costs about 200 ns in large
//! batches, and some microseconds alone (`scripts/bench --only depth`).
//!
//! Times are medians of rounds in which all take turns. The loop without any is subtracted.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use vshunt_engine::{LimitCell, LimitGate, QueueStats, RequestKind};
use vshunt_types::spec::LatencyMode;

const BATCHES: [u64; 4] = [1, 8, 32, 128];
/// Requests of a round.
const ROUND: u64 = 1 << 17;
const ROUNDS: usize = 21;

/// Something that is done for each batch, and for each request of it.
trait Extra {
    fn begin(&mut self) {}

    /// A request is taken: returns what its slot keeps.
    fn take(&mut self) -> u64 {
        0
    }

    fn complete(&mut self, _kept: u64) {}

    fn publish(&mut self) {}
}

struct Nothing;

impl Extra for Nothing {}

struct ServiceTimes(vshunt_engine::Meter);

impl ServiceTimes {
    fn new(stats: &QueueStats, mode: LatencyMode) -> Self {
        stats.latency.set_mode(mode);
        Self(stats.latency.meter())
    }
}

impl Extra for ServiceTimes {
    fn begin(&mut self) {
        self.0.batch();
    }

    fn take(&mut self) -> u64 {
        self.0.stamp()
    }

    fn complete(&mut self, kept: u64) {
        self.0.done(kept, RequestKind::Read);
    }

    fn publish(&mut self) {
        self.0.publish();
    }
}

/// Limits that are not set.
struct NoLimits {
    gate: LimitGate,
    are_set: bool,
}

impl Extra for NoLimits {
    fn begin(&mut self) {
        self.are_set = self.gate.begin();
    }

    fn take(&mut self) -> u64 {
        self.are_set.into()
    }
}

/// Serves the requests of a round. Returns the nanoseconds for each.
fn round(extra: &mut dyn Extra, batch: u64, slots: &mut [u64]) -> f64 {
    let started = Instant::now();
    for _ in 0..ROUND / batch {
        extra.begin();
        for slot in &mut slots[..batch as usize] {
            *slot = black_box(extra.take());
        }
        for slot in &slots[..batch as usize] {
            extra.complete(black_box(*slot));
        }
        extra.publish();
    }
    started.elapsed().as_nanos() as f64 / ROUND as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let stats: [QueueStats; 3] = std::array::from_fn(|_| QueueStats::default());
    let gate = LimitGate::new(Arc::<LimitCell>::default(), 0);
    let mut subjects: [(&str, Box<dyn Extra>); 5] = [
        ("", Box::new(Nothing)),
        ("latency=off", Box::new(ServiceTimes::new(&stats[0], LatencyMode::Off))),
        ("latency=sampled", Box::new(ServiceTimes::new(&stats[1], LatencyMode::Sampled))),
        ("latency=on", Box::new(ServiceTimes::new(&stats[2], LatencyMode::On))),
        ("no limits", Box::new(NoLimits { gate, are_set: false })),
    ];
    let mut slots = vec![0; 128];
    println!("ns for each request, medians of {ROUNDS} rounds");
    print!("{:>16}", "requests at once");
    subjects.iter().skip(1).for_each(|(name, _)| print!("{name:>17}"));
    println!();
    for batch in BATCHES {
        let mut times = vec![Vec::new(); subjects.len()];
        for _ in 0..ROUNDS {
            for ((_, extra), times) in subjects.iter_mut().zip(&mut times) {
                times.push(round(&mut **extra, batch, &mut slots));
            }
        }
        let all: Vec<f64> = times.into_iter().map(median).collect();
        print!("{batch:>16}");
        all.iter().skip(1).for_each(|time| print!("{:>17.1}", (time - all[0]).max(0.0)));
        println!();
    }
}
