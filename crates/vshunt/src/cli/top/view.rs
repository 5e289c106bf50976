//! Rates: the difference of two samples.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::Hash;

use serde::Serialize;
use vshunt_types::spec::{
    BalanceInfo, ExportInfo, ExportKind, LatencyInfo, QueueInfo, WorkerInfo, WorkerKind,
};

use super::sample::Sample;

/// Share of its time, in percent, from which on a busy worker is marked as hot.
const HOT_PERCENT: f64 = 90.0;

/// Share of its time, in percent, from which on a queue is marked as held back by its limits.
const LIMITED_PERCENT: f64 = 1.0;

/// What is shown: rates over `seconds`. All rates are per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct View {
    /// The time between the two samples; 0 if there is only one, and all rates are 0.
    pub(super) seconds: f64,
    pub(super) exports: Vec<ExportRow>,
    /// Queues that a guest has started.
    pub(super) queues: Vec<QueueRow>,
    pub(super) workers: Vec<WorkerRow>,
}

/// Requests (of networks: frames) and bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Rates {
    #[serde(rename = "requests-per-s")]
    pub(super) requests: f64,
    #[serde(rename = "read-bytes-per-s")]
    pub(super) read: f64,
    #[serde(rename = "write-bytes-per-s")]
    pub(super) written: f64,
    #[serde(rename = "errors-per-s")]
    pub(super) errors: f64,
}

/// Service times of the requests that completed in the interval, of all kinds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Latency {
    pub(super) p50_ns: u64,
    pub(super) p99_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ExportRow {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: ExportKind,
    pub(super) backend: String,
    pub(super) connected: bool,
    pub(super) leaving: bool,
    pub(super) in_flight: u32,
    #[serde(flatten)]
    pub(super) rates: Rates,
    /// None if no request was measured.
    pub(super) service_times: Option<Latency>,
    pub(super) limited: bool,
    /// That of the queue that waited longest.
    pub(super) limited_percent: f64,
    /// How its queues follow load. None: they do not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) balancing: Option<BalanceInfo>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct QueueRow {
    pub(super) export: String,
    pub(super) index: u16,
    pub(super) worker: u32,
    pub(super) state: String,
    pub(super) in_flight: u32,
    #[serde(flatten)]
    pub(super) rates: Rates,
    /// None if no request was measured.
    pub(super) service_times: Option<Latency>,
    /// Whether it waits for its limits now, or did so in a part of the interval that is worth
    /// showing.
    pub(super) limited: bool,
    /// Share of the time in which it waited for its limits.
    pub(super) limited_percent: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct WorkerRow {
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) kind: WorkerKind,
    pub(super) cpu: Vec<usize>,
    /// Share of one CPU that the worker used.
    pub(super) cpu_percent: f64,
    /// Shares of the time in which it handled requests, polled and slept.
    pub(super) busy_percent: f64,
    pub(super) polling_percent: f64,
    pub(super) sleeping_percent: f64,
    pub(super) hot: bool,
    pub(super) stalled: bool,
    pub(super) requests_per_s: f64,
    pub(super) sleeps_per_s: f64,
    pub(super) queues: Vec<String>,
}

/// By what tables are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// By name, queues by export and index, workers by id.
    #[default]
    Name,
    /// By requests per second, the most first.
    Requests,
    /// By bytes per second; workers by the share of their time in which they are busy.
    Bytes,
}

impl Order {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Name => Self::Requests,
            Self::Requests => Self::Bytes,
            Self::Bytes => Self::Name,
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::Bytes => "bytes, busy",
        }
    }
}

impl View {
    /// Returns the rates from `before` to `now`. What was not there before has rates of 0.
    pub(super) fn between(before: &Sample, now: &Sample) -> Self {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
        let old = by(&before.queues, |q| (q.export.as_str(), q.index));
        let rates = |q: &QueueInfo| match old.get(&(q.export.as_str(), q.index)) {
            Some(old) => Rates::between(old, q, seconds),
            None => Rates::default(),
        };
        let taken = |q: &QueueInfo| {
            let old = old.get(&(q.export.as_str(), q.index)).and_then(|old| old.service_times.as_ref());
            q.service_times.as_ref().zip(old).map(|(now, before)| now.since(before))
        };
        let limited =
            |q: &QueueInfo| Limited::between(old.get(&(q.export.as_str(), q.index)).copied(), q, seconds);
        let row = |e| ExportRow::new(e, &now.queues, rates, taken, limited);
        let exports = now.exports.iter().map(row).collect();
        let queues = now.queues.iter().filter(|q| q.has_started()).map(|q| QueueRow {
            export: q.export.clone(),
            index: q.index,
            worker: q.worker,
            state: q.state.clone(),
            in_flight: q.in_flight,
            rates: rates(q),
            service_times: taken(q).as_ref().and_then(Latency::of),
            limited: limited(q).waits,
            limited_percent: limited(q).percent,
        });
        let old = by(&before.workers, |w| w.id);
        let workers = now.workers.iter().map(|w| WorkerRow::between(old.get(&w.id).copied(), w, seconds));
        Self { seconds, exports, queues: queues.collect(), workers: workers.collect() }
    }

    /// Keeps the rows whose names contain `text`. Workers stay, as far as queues of them do.
    pub(super) fn filter(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.exports.retain(|e| e.name.contains(text) || e.backend.contains(text));
        self.queues.retain(|q| q.name().contains(text));
        let used: Vec<u32> = self.queues.iter().map(|q| q.worker).collect();
        self.workers.retain(|w| w.name.contains(text) || used.contains(&w.id));
    }

    /// Sorts all tables. They are sorted by name already; equal rows stay so.
    pub(super) fn sort(&mut self, order: Order, reverse: bool) {
        let most = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
        let of = |r: &Rates| match order {
            Order::Bytes => r.read + r.written,
            _ => r.requests,
        };
        if order != Order::Name {
            self.exports.sort_by(|a, b| most(of(&a.rates), of(&b.rates)));
            self.queues.sort_by(|a, b| most(of(&a.rates), of(&b.rates)));
            self.workers.sort_by(|a, b| match order {
                Order::Bytes => most(a.busy_percent, b.busy_percent),
                _ => most(a.requests_per_s, b.requests_per_s),
            });
        }
        if reverse {
            self.exports.reverse();
            self.queues.reverse();
            self.workers.reverse();
        }
    }
}

/// Describes the queues that are on another worker than before, at most one line for each worker
/// that received queues.
pub(super) fn moves(before: &Sample, now: &Sample) -> Vec<String> {
    let old = by(&before.queues, |q| (q.export.as_str(), q.index));
    let mut to: Vec<(u32, Vec<String>)> = Vec::new();
    for q in &now.queues {
        if old.get(&(q.export.as_str(), q.index)).is_none_or(|old| old.worker == q.worker) {
            continue;
        }
        let name = format!("{}:{}", q.export, q.index);
        match to.iter_mut().find(|(worker, _)| *worker == q.worker) {
            Some((_, names)) => names.push(name),
            None => to.push((q.worker, vec![name])),
        }
    }
    to.iter()
        .map(|(worker, names)| format!("moved to worker {worker}: {}", super::super::show::ranges(names)))
        .collect()
}

/// Describes what `balance` decided since the earlier sample, and why: the last decision of each
/// export.
pub(super) fn decisions(before: &Sample, now: &Sample) -> Vec<String> {
    let old = by(&before.exports, |e| e.spec.name.as_str());
    let mut told = Vec::new();
    for export in &now.exports {
        let (name, Some(new)) = (&export.spec.name, &export.balancing) else { continue };
        let old = old.get(name.as_str()).and_then(|old| old.balancing.as_ref());
        if let Some(last) = new.last.as_ref().filter(|_| old.is_none_or(|old| old.decisions != new.decisions))
        {
            let (outcome, reason) = (last.outcome.name(), &last.reason);
            told.push(format!("{outcome}: {name}:{} to worker {}: {reason}", last.index, last.worker));
        }
        let without_age = |info: &BalanceInfo| {
            info.resized.clone().map(|resized| vshunt_types::spec::ResizeDecision { age_s: 0, ..resized })
        };
        if let Some(resized) = without_age(new).filter(|new| old.and_then(without_age).as_ref() != Some(new))
        {
            let (outcome, reason) = (resized.outcome.name(), &resized.reason);
            let s = if resized.workers == 1 { "" } else { "s" };
            told.push(format!("{outcome}: {name} has {} worker{s}: {reason}", resized.workers));
        }
    }
    told
}

fn by<'a, T, K: Hash + Eq>(list: &'a [T], key: impl Fn(&'a T) -> K) -> HashMap<K, &'a T> {
    list.iter().map(|item| (key(item), item)).collect()
}

/// Returns the growth of a counter per second. A counter that became smaller began again at 0: its
/// export was removed and added.
fn rate(before: u64, now: u64, seconds: f64) -> f64 {
    match seconds > 0.0 {
        true => now.checked_sub(before).unwrap_or(now) as f64 / seconds,
        false => 0.0,
    }
}

impl Rates {
    fn between(before: &QueueInfo, now: &QueueInfo, seconds: f64) -> Self {
        let of = |f: fn(&QueueInfo) -> u64| rate(f(before), f(now), seconds);
        Self {
            requests: of(|q| q.requests),
            read: of(|q| q.read_bytes),
            written: of(|q| q.write_bytes),
            errors: of(|q| q.errors),
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.read += other.read;
        self.written += other.written;
        self.errors += other.errors;
    }
}

/// How far limits held a queue back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Limited {
    waits: bool,
    percent: f64,
}

impl Limited {
    fn between(before: Option<&QueueInfo>, now: &QueueInfo, seconds: f64) -> Self {
        let share = |before: &QueueInfo| rate(before.limited_us, now.limited_us, seconds) / 1e4;
        // Both directions of a queue pair may wait at the same time.
        let percent = before.map_or(0.0, share).min(100.0);
        // Most waits take about a millisecond, and a sample may fall between two of them.
        Self { waits: now.limited || percent >= LIMITED_PERCENT, percent }
    }

    fn or(self, other: Self) -> Self {
        Self { waits: self.waits || other.waits, percent: self.percent.max(other.percent) }
    }
}

impl ExportRow {
    fn new(
        export: &ExportInfo,
        queues: &[QueueInfo],
        rates: impl Fn(&QueueInfo) -> Rates,
        taken: impl Fn(&QueueInfo) -> Option<LatencyInfo>,
        limited: impl Fn(&QueueInfo) -> Limited,
    ) -> Self {
        let mut row = Self {
            name: export.spec.name.clone(),
            kind: export.spec.kind,
            backend: export.spec.of().to_owned(),
            connected: export.connected,
            leaving: export.leaving,
            in_flight: 0,
            rates: Rates::default(),
            service_times: None,
            limited: false,
            limited_percent: 0.0,
            balancing: export.balancing.clone(),
        };
        let own: Vec<_> = queues.iter().filter(|q| q.export == row.name).collect();
        for queue in &own {
            row.in_flight += queue.in_flight;
            row.rates.add(rates(queue));
        }
        let all = own.iter().map(|queue| limited(queue)).fold(Limited::default(), Limited::or);
        (row.limited, row.limited_percent) = (all.waits, all.percent);
        let all: Vec<_> = own.into_iter().filter_map(taken).collect();
        row.service_times = LatencyInfo::sum(&all).as_ref().and_then(Latency::of);
        row
    }
}

impl Latency {
    fn of(info: &LatencyInfo) -> Option<Self> {
        let figures = info.all_kinds()?;
        Some(Self { p50_ns: figures.p50_ns, p99_ns: figures.p99_ns })
    }
}

impl QueueRow {
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.export, self.index)
    }
}

/// Returns how old a worker is, in microseconds by the daemon's clock. Its times add up to that.
fn age_us(worker: &WorkerInfo) -> u64 {
    worker.busy_us + worker.polling_us + worker.sleeping_us
}

impl WorkerRow {
    /// `seconds`: the interval by the clock of this process. The worker's own time is used instead
    /// if the daemon reports it: the answer may be late, and shares would not add up.
    fn between(before: Option<&WorkerInfo>, now: &WorkerInfo, seconds: f64) -> Self {
        // A daemon that was started again counts from the beginning.
        let before = before.filter(|before| before.tid == now.tid);
        let seconds = match before.map(|before| rate(age_us(before), age_us(now), 1e6)) {
            Some(lived) if lived > 0.0 => lived,
            _ => seconds,
        };
        let of = |f: fn(&WorkerInfo) -> u64| before.map_or(0.0, |before| rate(f(before), f(now), seconds));
        let percent = |f| of(f) / 1e4;
        let busy_percent = percent(|w| w.busy_us);
        Self {
            id: now.id,
            name: now.name.clone(),
            kind: now.kind,
            cpu: now.cpu.clone(),
            cpu_percent: percent(|w| w.cpu_time_us),
            busy_percent,
            polling_percent: percent(|w| w.polling_us),
            sleeping_percent: percent(|w| w.sleeping_us),
            hot: busy_percent >= HOT_PERCENT,
            stalled: now.stalled,
            requests_per_s: of(|w| w.requests),
            sleeps_per_s: of(|w| w.sleeps),
            queues: now.queues.clone(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
