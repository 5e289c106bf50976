//! Service times of the requests of a queue, as log-linear histograms.
//!
//! A queue of a disk or of a mount owns a [`Meter`], which moves with it from worker to worker. The
//! histograms are in the queue's [`QueueStats`](super::QueueStats), so they outlive the queue. Only
//! the owning worker writes them; any thread reads them. Nothing here allocates after the start of
//! the queue.
//!
//! The clock is read once for a batch of requests that is taken, and once for a batch that is
//! published: a read costs as much as a tenth of a request. A request is in the histograms before
//! its user can see that it is complete.

use std::array::from_fn;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use vshunt_types::spec::{LatencyFigures, LatencyInfo, LatencyMode};
use vshunt_types::sync::Locked;

/// The smallest difference that the histograms tell apart, in nanoseconds. Eight of them are 1 µs,
/// so the limits of bins are whole microseconds where Prometheus needs them.
const UNIT_NS: u64 = 125;
/// The number of bins of each power of two, as a power of two.
const SUB_BITS: u32 = 3;
const SUBS: usize = 1 << SUB_BITS;
/// The power of two of units from which on all requests are in the last bin: 67.1 s.
const LAST_POWER: u32 = 29;
/// The number of bins, with the one of all longer requests.
const BINS: usize = SUBS * (LAST_POWER - SUB_BITS + 1) as usize + 1;
/// With [`LatencyMode::Sampled`] one batch of so many is measured, as a power of two.
const SAMPLED_BITS: u32 = 3;
/// Completed requests of different batches that wait for their publication. With more, the clock is
/// read early.
const STAGED_MAX: usize = 256;

/// Kinds of requests whose service times are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestKind {
    /// Reads.
    Read = 0,
    /// Writes.
    Write = 1,
    /// Flushes, fsync.
    Flush = 2,
    /// All others.
    Other = 3,
}

/// The number of kinds.
const KINDS: usize = 4;

/// Adds to a counter that only the calling thread writes.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Returns the bin of a service time.
#[inline]
fn bin_of(ns: u64) -> usize {
    let units = ns / UNIT_NS;
    let power = units.checked_ilog2().unwrap_or(0);
    match power {
        0..SUB_BITS => units as usize,
        SUB_BITS..LAST_POWER => {
            let sub = (units >> (power - SUB_BITS)) as usize & (SUBS - 1);
            (power - SUB_BITS + 1) as usize * SUBS + sub
        }
        _ => BINS - 1,
    }
}

/// Returns the limit of a bin in nanoseconds: its requests took less.
fn limit_of(bin: usize) -> u64 {
    let (group, sub) = (bin / SUBS, (bin % SUBS) as u64);
    match group {
        _ if bin >= BINS - 1 => u64::MAX,
        0 => (sub + 1) * UNIT_NS,
        _ => ((SUBS as u64 + sub + 1) << (group - 1)) * UNIT_NS,
    }
}

/// The service times of requests of one kind.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Histogram {
    bins: [AtomicU64; BINS],
    total_ns: AtomicU64,
    max_ns: AtomicU64,
}

impl Histogram {
    fn new() -> Self {
        Self { bins: from_fn(|_| AtomicU64::new(0)), total_ns: AtomicU64::new(0), max_ns: AtomicU64::new(0) }
    }

    /// Adds `count` requests of the same service time.
    #[inline]
    fn add(&self, ns: u64, count: u64) {
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
        add(&self.total_ns, ns.wrapping_mul(count));
        if let Some(bin) = self.bins.get(bin_of(ns)) {
            add(bin, count);
        }
    }

    fn figures(&self) -> Option<LatencyFigures> {
        let counts = self.bins.iter().map(|bin| bin.load(Relaxed)).enumerate();
        let bins = counts.filter(|(_, n)| *n > 0).map(|(bin, n)| (limit_of(bin), n)).collect();
        LatencyFigures::new(bins, self.total_ns.load(Relaxed), self.max_ns.load(Relaxed))
    }
}

pub(super) type Histograms = [Histogram; KINDS];

/// The service times of a queue, for as long as its export exists.
#[derive(Debug, Default)]
pub struct Latency {
    /// A [`LatencyMode`].
    mode: AtomicU8,
    /// Made with the first meter.
    histograms: OnceLock<Arc<Histograms>>,
    /// What was measured until the last reset. Workers count on, so a reset costs them nothing. The
    /// lock is held while control reads or resets the histograms.
    before_reset: Mutex<Option<Box<LatencyInfo>>>,
}

impl Latency {
    /// Sets what the meters that are made from now on measure. Before this is called they measure
    /// nothing.
    pub fn set_mode(&self, mode: LatencyMode) {
        self.mode.store(mode as u8, Relaxed);
    }

    fn mode(&self) -> LatencyMode {
        match self.mode.load(Relaxed) {
            0 => LatencyMode::Off,
            1 => LatencyMode::Sampled,
            _ => LatencyMode::On,
        }
    }

    /// Returns what was measured since the last reset, and until then. None if nothing is measured.
    pub fn info(&self) -> Option<LatencyInfo> {
        let before = self.before_reset.locked();
        let all = self.measured()?;
        Some(match &*before {
            Some(before) => LatencyInfo { before_reset: Some(before.clone()), ..all.since(before) },
            None => all,
        })
    }

    /// Resets the figures.
    pub fn reset(&self) {
        let mut before = self.before_reset.locked();
        let (Some(mut all), Some(histograms)) = (self.measured(), self.histograms.get()) else { return };
        if let Some(older) = &*before {
            all.keep_longest(older);
        }
        // A longer request that the worker adds at this moment is seen by its bin only.
        histograms.iter().for_each(|histogram| histogram.max_ns.store(0, Relaxed));
        *before = Some(Box::new(all));
    }

    /// Returns all that was measured. The longest requests are those since the last reset.
    fn measured(&self) -> Option<LatencyInfo> {
        let [read, write, flush, other] = &**self.histograms.get()?;
        Some(LatencyInfo {
            mode: self.mode(),
            read: read.figures(),
            write: write.figures(),
            flush: flush.figures(),
            other: other.figures(),
            before_reset: None,
        })
    }

    /// Returns what workers write.
    #[cfg(test)]
    pub(super) fn written(&self) -> Option<&Histograms> {
        self.histograms.get().map(|all| &**all)
    }

    /// Makes the meter of a queue.
    pub fn meter(&self) -> Meter {
        let mode = self.mode();
        let make = || Arc::new(from_fn(|_| Histogram::new()));
        let histograms = (mode != LatencyMode::Off).then(|| self.histograms.get_or_init(make).clone());
        let staged = Vec::with_capacity(if histograms.is_some() { STAGED_MAX } else { 0 });
        Meter {
            histograms,
            samples: mode == LatencyMode::Sampled,
            random: 1,
            now: 0,
            runs: [Run::default(); KINDS],
            staged,
            pending: false,
        }
    }
}

/// Completed requests that were taken at the same time.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    taken: u64,
    count: u32,
}

/// Measures the service times of a queue. The queue owns it, and calls it on its worker:
/// [`batch`](Self::batch), [`stamp`](Self::stamp) for each request that is taken,
/// [`done`](Self::done) when the request completes, [`publish`](Self::publish) before its user can
/// see that.
pub struct Meter {
    /// None: off.
    histograms: Option<Arc<Histograms>>,
    samples: bool,
    /// State of the generator that chooses the batches.
    random: u32,
    /// The time of the present batch. 0: it is not measured.
    now: u64,
    /// Requests that are completed and not published: of each kind those that were taken together
    /// last.
    runs: [Run; KINDS],
    /// The other ones.
    staged: Vec<(RequestKind, Run)>,
    /// Whether there are any.
    pending: bool,
}

impl Meter {
    /// Begins a batch of requests that are taken now.
    #[inline]
    pub fn batch(&mut self) {
        if self.histograms.is_some() {
            self.now = if self.samples && !self.chooses() { 0 } else { now_ns() };
        }
    }

    /// Returns the time of the batch, for [`done`](Self::done). 0: it is not measured.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.now
    }

    /// A request completed that was taken at `stamp`.
    #[inline]
    pub fn done(&mut self, stamp: u64, kind: RequestKind) {
        if stamp == 0 {
            return;
        }
        let run = &mut self.runs[kind as usize];
        if run.taken == stamp {
            run.count += 1;
            self.pending = true;
            return;
        }
        if self.staged.len() == STAGED_MAX {
            self.record();
        }
        let before = std::mem::replace(&mut self.runs[kind as usize], Run { taken: stamp, count: 1 });
        if before.count > 0 {
            self.staged.push((kind, before));
        }
        self.pending = true;
    }

    /// The completed requests become visible now. Requests that are taken from now on in the same
    /// batch have this time.
    #[inline]
    pub fn publish(&mut self) {
        if self.pending {
            self.record();
        }
    }

    fn record(&mut self) {
        let Some(histograms) = &self.histograms else { return };
        let now = now_ns();
        let note = |kind: RequestKind, run: Run| {
            histograms[kind as usize].add(now.saturating_sub(run.taken), run.count.into());
        };
        for (kind, run) in self.staged.drain(..) {
            note(kind, run);
        }
        for kind in [RequestKind::Read, RequestKind::Write, RequestKind::Flush, RequestKind::Other] {
            let run = std::mem::take(&mut self.runs[kind as usize]);
            if run.count > 0 {
                note(kind, run);
            }
        }
        self.pending = false;
        if self.now != 0 {
            self.now = now;
        }
    }

    /// Chooses a batch at random, so that no pattern of the load is always left out.
    #[inline]
    fn chooses(&mut self) -> bool {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.random >> (u32::BITS - SAMPLED_BITS) == 0
    }
}

/// Returns the monotonic time in nanoseconds, above 0.
#[inline]
fn now_ns() -> u64 {
    #[cfg(test)]
    tests::CLOCK_READS.with(|reads| reads.set(reads.get() + 1));
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local that the call fills in. It does not fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()).max(1)
}

#[cfg(test)]
mod tests;
