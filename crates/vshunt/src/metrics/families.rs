//! The table of all metrics: their names, units and descriptions, and the fields of the lists that
//! they show.
//!
//! It follows the conventions of Prometheus: base units, and `_total` for counters. The labels of a
//! queue or worker do not change during its life. Properties that may change (the name of a worker,
//! the engine of an export) are labels of an `_info` metric.

use std::borrow::Cow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;
use vshunt_daemon::Daemon;
use vshunt_types::spec::{
    DiskInfo, Engine, ExportInfo, ExportKind, JobInfo, JobStatus, LatencyInfo, NetCounters, NetInfo,
    NetQueueCounters, PortInfo, PortState, QueueInfo, WorkerInfo,
};

/// The prefix of all names.
const PREFIX: &str = "vshunt";

/// The states of a queue; see [`QueueInfo::state`].
const QUEUE_STATES: [&str; 3] = ["stopped", "running", "broken"];

/// The states of a job.
const JOB_STATUSES: [JobStatus; 6] = [
    JobStatus::Running,
    JobStatus::Paused,
    JobStatus::Ready,
    JobStatus::Aborting,
    JobStatus::Pending,
    JobStatus::Concluded,
];

/// The lists that `status` shows.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    disks: Vec<DiskInfo>,
    nets: Vec<NetInfo>,
    exports: Vec<ExportInfo>,
    jobs: Vec<JobInfo>,
    queues: Vec<QueueInfo>,
    workers: Vec<WorkerInfo>,
    /// The number of system calls that the sandbox refused.
    refused: u64,
}

impl Snapshot {
    pub(super) fn of(daemon: &Daemon) -> Self {
        let mut queues = daemon.queues();
        QueueInfo::keep_started(&mut queues);
        Self {
            disks: daemon.disks(),
            nets: daemon.nets(),
            exports: daemon.exports(),
            jobs: daemon.jobs(),
            queues,
            workers: daemon.workers(),
            refused: vshunt_sandbox::refused(),
        }
    }

    /// Returns the queues whose requests are counted. The kernel does not count those of vhost-net.
    fn counted(&self) -> impl Iterator<Item = &QueueInfo> {
        let told = |e: &&ExportInfo| e.spec.kind == ExportKind::VhostUserNet && e.engine == Engine::Kernel;
        self.queues.iter().filter(move |q| !self.exports.iter().filter(told).any(|e| e.spec.name == q.export))
    }
}

/// Returns all metrics as OpenMetrics text.
pub(super) fn text(snapshot: Snapshot) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(snapshot));
    let mut text = String::new();
    // A write to a string does not fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in FAMILIES {
            let samples = family.of.samples(self);
            if samples.is_empty() {
                continue;
            }
            let mut encoder =
                encoder.encode_descriptor(family.name, family.help, family.unit.as_ref(), family.kind)?;
            for sample in &samples {
                sample.encode(&mut encoder, family.kind)?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Number {
    Whole(u64),
    Real(f64),
    /// A sum in seconds, and bins with their limits in seconds.
    Histogram(f64, Vec<(f64, u64)>),
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

type Labels<'a> = Vec<(&'static str, Cow<'a, str>)>;

/// One value.
struct Sample<'a> {
    labels: Labels<'a>,
    value: Number,
}

impl Sample<'_> {
    fn encode(&self, encoder: &mut MetricEncoder<'_>, kind: MetricType) -> fmt::Result {
        match self.labels.is_empty() {
            true => self.encode_value(encoder, kind),
            false => self.encode_value(&mut encoder.encode_family(&self.labels)?, kind),
        }
    }

    fn encode_value(&self, encoder: &mut MetricEncoder<'_>, kind: MetricType) -> fmt::Result {
        match (kind, &self.value) {
            (MetricType::Counter, Number::Whole(n)) => encoder.encode_counter::<NoLabelSet, _, u64>(n, None),
            (MetricType::Counter, Number::Real(n)) => encoder.encode_counter::<NoLabelSet, _, u64>(n, None),
            (_, Number::Whole(n)) => encoder.encode_gauge(n),
            (_, Number::Real(n)) => encoder.encode_gauge(n),
            (_, Number::Histogram(sum, bins)) => {
                let count = bins.iter().map(|(_, n)| n).sum();
                encoder.encode_histogram::<NoLabelSet>(*sum, count, bins, None)
            }
        }
    }
}

/// One metric, with a value for each object that has it.
struct Family {
    /// The name without prefix, unit and suffix.
    name: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    help: &'static str,
    of: Of,
}

/// The objects that have the metric, and the field with its value.
enum Of {
    Program,
    Refused,
    DiskInfo,
    Disk(fn(&DiskInfo) -> u64),
    Bitmaps,
    NetInfo,
    Net(fn(&NetInfo) -> Option<u64>),
    /// A counter of the kernel for a tap.
    NetCounter(fn(&NetCounters) -> u64),
    ExportInfo,
    Export(fn(&ExportInfo) -> Option<u64>),
    /// The service times of each export, for each kind of requests.
    Latency,
    /// A value of each port of a switch.
    Port(fn(&PortInfo) -> u64),
    QueueState,
    Queue(fn(&QueueInfo) -> u64),
    /// A counter of each queue whose requests are counted.
    QueueCounter(fn(&QueueInfo) -> u64),
    /// A time of each queue whose requests are counted, in microseconds.
    QueueTime(fn(&QueueInfo) -> u64),
    /// A counter of each queue pair of a network.
    PairCounter(fn(&NetQueueCounters) -> u64),
    PairDrops,
    WorkerInfo,
    Worker(fn(&WorkerInfo) -> Number),
    WorkerTimes,
    JobInfo,
    JobState,
    Job(fn(&JobInfo) -> u64),
}

/// Makes a metric whose labels have the information. Its value is 1. It is a gauge, because older
/// scrapers do not know the type `info`.
const fn info(name: &'static str, help: &'static str, of: Of) -> Family {
    Family { name, unit: None, kind: MetricType::Gauge, help, of }
}

const fn gauge(name: &'static str, unit: Option<Unit>, help: &'static str, of: Of) -> Family {
    Family { name, unit, kind: MetricType::Gauge, help, of }
}

const fn counter(name: &'static str, unit: Option<Unit>, help: &'static str, of: Of) -> Family {
    Family { name, unit, kind: MetricType::Counter, help, of }
}

const BYTES: Option<Unit> = Some(Unit::Bytes);
const SECONDS: Option<Unit> = Some(Unit::Seconds);

/// All metrics, in the order of the output.
static FAMILIES: &[Family] = &[
    info("build_info", "The program's version", Of::Program),
    counter("sandbox_refused_calls", None, "System calls that the sandbox refused", Of::Refused),
    info("disk_info", "A disk, how it is served and by which path requests reach it", Of::DiskInfo),
    gauge("disk_size", BYTES, "Size of a disk", Of::Disk(|d| d.size_bytes)),
    gauge("bitmap_dirty", BYTES, "What a dirty bitmap says was written", Of::Bitmaps),
    info("net_info", "A network; interface and steering of a tap", Of::NetInfo),
    gauge(
        "net_open_queues",
        None,
        "Queues of the interface that are open",
        Of::Net(|n| Some(n.open_queues.into())),
    ),
    gauge("net_mtu", BYTES, "The longest IP packet", Of::Net(|n| n.mtu.map(u64::from))),
    gauge(
        "net_addresses",
        None,
        "Ethernet addresses that a switch knows the ports of",
        Of::Net(|n| n.addresses.map(|count| count as u64)),
    ),
    counter(
        "net_from_guest_packets",
        None,
        "Frames that the guest sent through a tap, as the kernel counts them",
        Of::NetCounter(|c| c.from_guest_packets),
    ),
    counter(
        "net_from_guest",
        BYTES,
        "Bytes of the frames that the guest sent through a tap",
        Of::NetCounter(|c| c.from_guest_bytes),
    ),
    counter(
        "net_from_guest_dropped_packets",
        None,
        "Frames that the guest sent and the host did not take",
        Of::NetCounter(|c| c.from_guest_dropped),
    ),
    counter(
        "net_to_guest_packets",
        None,
        "Frames for the guest through a tap, as the kernel counts them",
        Of::NetCounter(|c| c.to_guest_packets),
    ),
    counter(
        "net_to_guest",
        BYTES,
        "Bytes of the frames for the guest through a tap",
        Of::NetCounter(|c| c.to_guest_bytes),
    ),
    counter(
        "net_to_guest_dropped_packets",
        None,
        "Frames for the guest that found no queue attached, or a full one",
        Of::NetCounter(|c| c.to_guest_dropped),
    ),
    info("export_info", "An export, its disk or network, and its engine", Of::ExportInfo),
    gauge(
        "export_connected",
        None,
        "1: a front end is connected, or it is mounted",
        Of::Export(|e| Some(e.connected.into())),
    ),
    gauge(
        "export_open_files",
        None,
        "Times that a mounted file is open",
        Of::Export(|e| e.mount.as_ref().map(|m| m.open_files.into())),
    ),
    counter(
        "export_balance_moves",
        None,
        "Queues that were moved by `balance`; absent while it is off and was off",
        Of::Export(|e| e.balancing.as_ref().map(|b| b.moves)),
    ),
    counter(
        "export_balance_decisions",
        None,
        "Decisions of `balance` about queues, with those of dry runs and those that failed",
        Of::Export(|e| e.balancing.as_ref().map(|b| b.decisions)),
    ),
    Family {
        name: "export_latency",
        unit: SECONDS,
        kind: MetricType::Histogram,
        help: "Service times of the requests of a disk, from take to completion",
        of: Of::Latency,
    },
    gauge(
        "export_addresses",
        None,
        "Ethernet addresses that were learnt behind a port of a switch",
        Of::Port(|p| p.addresses.into()),
    ),
    gauge(
        "export_blocked",
        None,
        "1: an uplink that is blocked, since it makes a loop with another one",
        Of::Port(|p| (p.state == PortState::Blocked).into()),
    ),
    counter("export_loops", None, "Times that an uplink was blocked for a loop", Of::Port(|p| p.loops)),
    gauge("queue_state", None, "1 for the state that a queue is in", Of::QueueState),
    gauge("queue_worker", None, "The worker that a queue is attached to", Of::Queue(|q| q.worker.into())),
    gauge(
        "queue_descriptors",
        None,
        "Size of the ring; 0 before its first start",
        Of::Queue(|q| q.size.into()),
    ),
    counter(
        "queue_starts",
        None,
        "Times that a queue was started, or moved to another worker while it ran",
        Of::Queue(|q| q.generation.into()),
    ),
    gauge(
        "queue_in_flight_requests",
        None,
        "Requests taken and not completed",
        Of::QueueCounter(|q| q.in_flight.into()),
    ),
    counter(
        "queue_requests",
        None,
        "Requests completed; of a network, frames",
        Of::QueueCounter(|q| q.requests),
    ),
    counter("queue_errors", None, "Requests completed with an error", Of::QueueCounter(|q| q.errors)),
    counter("queue_read", BYTES, "Bytes read by the guest", Of::QueueCounter(|q| q.read_bytes)),
    counter("queue_write", BYTES, "Bytes written by the guest", Of::QueueCounter(|q| q.write_bytes)),
    counter("queue_kicks", None, "Kicks of the guest that were seen", Of::QueueCounter(|q| q.kicks)),
    counter(
        "queue_notifications",
        None,
        "Notifications sent to the guest",
        Of::QueueCounter(|q| q.notifications),
    ),
    counter(
        "queue_limited",
        SECONDS,
        "Time for which the queue waited for its limits",
        Of::QueueTime(|q| q.limited_us),
    ),
    counter(
        "queue_to_guest_packets",
        None,
        "Frames that the guest got",
        Of::PairCounter(|n| n.to_guest_packets),
    ),
    counter(
        "queue_to_guest",
        BYTES,
        "Bytes of frames that the guest got, without virtio-net headers",
        Of::PairCounter(|n| n.to_guest_bytes),
    ),
    counter(
        "queue_to_guest_batches",
        None,
        "Times that the guest was given frames, some together",
        Of::PairCounter(|n| n.to_guest_batches),
    ),
    counter(
        "queue_from_guest_packets",
        None,
        "Frames that the guest sent and the network took",
        Of::PairCounter(|n| n.from_guest_packets),
    ),
    counter(
        "queue_from_guest",
        BYTES,
        "Bytes of frames that the guest sent, without virtio-net headers",
        Of::PairCounter(|n| n.from_guest_bytes),
    ),
    counter(
        "queue_from_guest_batches",
        None,
        "Times that frames of the guest were taken, some together",
        Of::PairCounter(|n| n.from_guest_batches),
    ),
    counter("queue_dropped_packets", None, "Frames that did not get through, by the reason", Of::PairDrops),
    info("worker_info", "A worker, and its kind", Of::WorkerInfo),
    counter("worker_cpu", SECONDS, "CPU time used", Of::Worker(|w| seconds(w.cpu_time_us))),
    counter("worker_time", SECONDS, "Time since it was made, by what it did", Of::WorkerTimes),
    counter("worker_sleeps", None, "Times that it slept", Of::Worker(|w| w.sleeps.into())),
    counter(
        "worker_requests",
        None,
        "Requests completed while attached there",
        Of::Worker(|w| w.requests.into()),
    ),
    gauge("worker_queues", None, "Queues attached to it", Of::Worker(|w| (w.queues.len() as u64).into())),
    gauge(
        "worker_poll_limit",
        SECONDS,
        "For how long it may poll before it sleeps",
        Of::Worker(|w| seconds(w.poll_us.into())),
    ),
    gauge(
        "worker_stalled",
        None,
        "1: it has something to do and has not run for a second",
        Of::Worker(|w| u64::from(w.stalled).into()),
    ),
    info("job_info", "A job, and the disk that it is of", Of::JobInfo),
    gauge("job_state", None, "1 for the state that a job is in", Of::JobState),
    gauge("job_failed", None, "1: it failed", Of::Job(|j| j.error.is_some().into())),
    gauge("job_done", BYTES, "Bytes dealt with", Of::Job(|j| j.done_bytes)),
    gauge("job_size", BYTES, "Bytes to be dealt with in all", Of::Job(|j| j.total_bytes)),
];

fn seconds(us: u64) -> Number {
    Number::Real(us as f64 / 1e6)
}

impl Of {
    fn samples<'a>(&self, s: &'a Snapshot) -> Vec<Sample<'a>> {
        match self {
            Self::Program => vec![sample([("version", env!("CARGO_PKG_VERSION").into())], 1)],
            Self::Refused => vec![sample([], s.refused)],
            Self::DiskInfo => s.disks.iter().map(|d| sample(disk_labels(d), 1)).collect(),
            Self::Disk(f) => s.disks.iter().map(|d| sample([disk(d)], f(d))).collect(),
            Self::Bitmaps => s.disks.iter().flat_map(bitmaps).collect(),
            Self::NetInfo => s.nets.iter().map(|n| sample(net_labels(n), 1)).collect(),
            Self::Net(f) => s.nets.iter().filter_map(|n| Some(sample([net(n)], f(n)?))).collect(),
            Self::NetCounter(f) => {
                s.nets.iter().filter_map(|n| Some(sample([net(n)], f(n.counters.as_ref()?)))).collect()
            }
            Self::ExportInfo => s.exports.iter().map(|e| sample(export_labels(e), 1)).collect(),
            Self::Export(f) => s.exports.iter().filter_map(|e| Some(sample([export(e)], f(e)?))).collect(),
            Self::Latency => s.exports.iter().flat_map(latencies).collect(),
            Self::Port(f) => {
                s.exports.iter().filter_map(|e| Some(sample([export(e)], f(e.port.as_ref()?)))).collect()
            }
            Self::QueueState => s.queues.iter().flat_map(queue_states).collect(),
            Self::Queue(f) => s.queues.iter().map(|q| sample(queue(q), f(q))).collect(),
            Self::QueueCounter(f) => s.counted().map(|q| sample(queue(q), f(q))).collect(),
            Self::QueueTime(f) => s.counted().map(|q| sample(queue(q), seconds(f(q)))).collect(),
            Self::PairCounter(f) => {
                s.queues.iter().filter_map(|q| Some(sample(queue(q), f(q.net.as_ref()?)))).collect()
            }
            Self::PairDrops => s.queues.iter().flat_map(drops).collect(),
            Self::WorkerInfo => s.workers.iter().map(|w| sample(worker_labels(w), 1)).collect(),
            Self::Worker(f) => s.workers.iter().map(|w| sample([worker(w)], f(w))).collect(),
            Self::WorkerTimes => s.workers.iter().flat_map(worker_times).collect(),
            Self::JobInfo => s.jobs.iter().map(|j| sample(job_labels(j), 1)).collect(),
            Self::JobState => s.jobs.iter().flat_map(job_states).collect(),
            Self::Job(f) => s.jobs.iter().map(|j| sample([job(j)], f(j))).collect(),
        }
    }
}

fn sample<'a>(labels: impl Into<Labels<'a>>, value: impl Into<Number>) -> Sample<'a> {
    Sample { labels: labels.into(), value: value.into() }
}

/// Returns the name that QMP uses for a value.
fn word(thing: impl Serialize) -> Cow<'static, str> {
    match serde_json::to_value(thing) {
        Ok(serde_json::Value::String(word)) => word.into(),
        _ => "".into(),
    }
}

type Label<'a> = (&'static str, Cow<'a, str>);

fn disk(disk: &DiskInfo) -> Label<'_> {
    ("disk", disk.spec.name.as_str().into())
}

fn disk_labels(d: &DiskInfo) -> [Label<'_>; 6] {
    [
        disk(d),
        ("format", word(d.spec.format())),
        ("path", d.path.as_str().into()),
        ("cache", word(d.spec.cache)),
        ("direct", truth(d.direct_in_use)),
        ("readonly", truth(d.spec.readonly)),
    ]
}

fn bitmaps(d: &DiskInfo) -> impl Iterator<Item = Sample<'_>> {
    d.bitmaps.iter().map(move |b| sample([disk(d), ("bitmap", b.name.as_str().into())], b.count))
}

fn net(net: &NetInfo) -> Label<'_> {
    ("net", net.spec.name.as_str().into())
}

fn net_labels(n: &NetInfo) -> [Label<'_>; 4] {
    [
        net(n),
        ("type", word(n.spec.kind)),
        ("interface", n.spec.ifname.as_deref().unwrap_or_default().into()),
        ("steering", n.spec.steering.map(word).unwrap_or_default()),
    ]
}

fn export(export: &ExportInfo) -> Label<'_> {
    ("export", export.spec.name.as_str().into())
}

/// An export of a disk has a histogram for each kind from the start, so that the first request is
/// seen as growth.
fn latencies(e: &ExportInfo) -> impl Iterator<Item = Sample<'_>> {
    // A reset is for users who look at figures; the counters of a scraper go on.
    let all = e.service_times.clone().map(LatencyInfo::without_reset).into_iter();
    let each =
        all.flat_map(|latency| latency.each().map(|(operation, figures)| (operation, figures.cloned())));
    each.map(move |(operation, figures)| {
        let figures = figures.unwrap_or_default();
        let seconds = |ns| if ns == u64::MAX { f64::INFINITY } else { ns as f64 / 1e9 };
        let bins = figures.by_power().into_iter().map(|(limit, n)| (seconds(limit), n)).collect();
        let value = Number::Histogram(figures.total_ns as f64 / 1e9, bins);
        Sample { labels: vec![export(e), ("operation", operation.into())], value }
    })
}

fn export_labels(e: &ExportInfo) -> [Label<'_>; 6] {
    [
        export(e),
        ("type", word(e.spec.kind)),
        ("disk", e.spec.disk.as_str().into()),
        ("net", e.spec.net.as_deref().unwrap_or_default().into()),
        ("tap", e.spec.tap.as_deref().unwrap_or_default().into()),
        ("engine", word(e.engine)),
    ]
}

fn queue(q: &QueueInfo) -> [Label<'_>; 2] {
    [("export", q.export.as_str().into()), ("queue", q.index.to_string().into())]
}

fn queue_states(q: &QueueInfo) -> impl Iterator<Item = Sample<'_>> {
    QUEUE_STATES.into_iter().map(move |state| {
        let [export, index] = queue(q);
        sample([export, index, ("state", state.into())], u64::from(q.state == state))
    })
}

fn drops(q: &QueueInfo) -> impl Iterator<Item = Sample<'_>> {
    q.net.iter().flat_map(|n| n.drops.each()).map(move |(reason, count)| {
        let [export, index] = queue(q);
        sample([export, index, ("reason", reason.into())], count)
    })
}

fn worker(worker: &WorkerInfo) -> Label<'_> {
    ("worker", worker.id.to_string().into())
}

fn worker_labels(w: &WorkerInfo) -> [Label<'_>; 4] {
    [
        worker(w),
        ("name", w.name.as_str().into()),
        ("kind", word(w.kind)),
        ("export", w.export.as_deref().unwrap_or_default().into()),
    ]
}

fn worker_times(w: &WorkerInfo) -> [Sample<'_>; 3] {
    [("busy", w.busy_us), ("polling", w.polling_us), ("sleeping", w.sleeping_us)]
        .map(|(phase, us)| sample([worker(w), ("phase", phase.into())], seconds(us)))
}

fn job(job: &JobInfo) -> Label<'_> {
    ("job", job.id.as_str().into())
}

fn job_labels(j: &JobInfo) -> [Label<'_>; 3] {
    [job(j), ("type", word(j.kind)), ("disk", j.disk.as_str().into())]
}

fn job_states(j: &JobInfo) -> impl Iterator<Item = Sample<'_>> {
    JOB_STATUSES
        .into_iter()
        .map(move |status| sample([job(j), ("state", word(status))], u64::from(j.status == status)))
}

fn truth(yes: bool) -> Cow<'static, str> {
    if yes { "true".into() } else { "false".into() }
}

#[cfg(test)]
pub(crate) mod tests;
