//! The output: live figures on stderr, the result as a table or as JSON on stdout.
//!
//! The keys of the JSON are an interface: keys may be added, and are never renamed (see
//! [`Summary`]).

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::units::{show_nanos, show_rate, show_size};
use vshunt_guest::load::{LoadPlan, Outcome, Progress, Tick};
use vshunt_guest::stats::{Ops, SlowRequest};

/// The machine that a figure was measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// CPUs that this process may run on.
    pub cpus: usize,
    /// Model of the CPUs. Null if /proc/cpuinfo does not name it.
    pub cpu: Option<String>,
    /// `uname -r`.
    pub kernel: String,
}

impl Machine {
    /// Returns the machine that this process runs on.
    pub fn here() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self { cpus, cpu: model.map(|(_, name)| name.trim().into()), kernel }
    }

    /// Returns the machine in words: model and number of the CPUs, kernel.
    pub fn describe(&self) -> String {
        let model = self.cpu.as_deref().map(|name| format!("{name}, ")).unwrap_or_default();
        format!("{model}{} CPUs, Linux {}", self.cpus, self.kernel)
    }
}

/// Latencies in nanoseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 99 of 100 requests were faster.
    pub p99: u64,
    /// 999 of 1000 requests were faster.
    pub p999: u64,
    /// The longest latency.
    pub max: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Direction {
    /// Requests completed.
    pub ios: u64,
    /// Bytes of data.
    pub bytes: u64,
    /// Requests per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_per_s: f64,
    /// Latencies in nanoseconds.
    pub latency_ns: Latency,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cpu {
    /// Seconds.
    pub seconds: f64,
    /// Microseconds per request. Null if there was none.
    pub us_per_io: Option<f64>,
}

/// The results of a run: the keys of `vshunt-bench blk --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `read`, `write`, `rw`, `randread`, `randwrite`, `randrw`.
    pub rw: String,
    /// Bytes of each request.
    pub block_bytes: u32,
    /// Requests in flight on each queue.
    pub iodepth: u16,
    /// Number of queues.
    pub queues: u16,
    /// Number of load threads.
    pub threads: usize,
    /// `split` or `packed`.
    pub ring: &'static str,
    /// Whether indirect descriptors were used.
    pub indirect: bool,
    /// Whether EVENT_IDX was used.
    pub event_idx: bool,
    /// Length of the run in seconds.
    pub seconds: f64,
    /// Requests of all kinds per second.
    pub iops: f64,
    /// MiB of data per second.
    pub mib_per_s: f64,
    /// Reads.
    pub read: Direction,
    /// Writes.
    pub write: Direction,
    /// Flushes.
    pub flush: Direction,
    /// Requests that took half a second or longer.
    pub slow_ios: u64,
    /// The first of them, as many as are listed.
    pub slow: Vec<SlowRequest>,
    /// CPU time of the load threads.
    pub client_cpu: Cpu,
    /// CPU time of the server. Null if it is not known.
    pub server_cpu: Option<Cpu>,
    /// Blocks that were read back and correct. Null without `--verify`.
    pub verified_blocks: Option<u64>,
    /// Number of times that the server died and came back.
    pub reconnects: u32,
    /// The longest time without a server in milliseconds.
    pub outage_ms_max: f64,
    /// The machine.
    pub machine: Machine,
}

/// The negotiated features of the rings.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    /// Number of queues.
    pub queues: u16,
    /// Whether rings are packed.
    pub packed: bool,
    /// Whether there are indirect descriptors.
    pub indirect: bool,
    /// Whether there is EVENT_IDX.
    pub event_idx: bool,
}

impl Summary {
    /// Computes the figures of a run.
    pub fn new(plan: &LoadPlan, rings: Rings, outcome: &Outcome) -> Self {
        let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20) / seconds;
        let direction = |ops: &Ops| Direction {
            ios: ops.ios,
            bytes: ops.bytes,
            iops: ops.ios as f64 / seconds,
            mib_per_s: mib(ops.bytes),
            latency_ns: Latency {
                mean: ops.mean_ns(),
                p50: ops.quantile_ns(0.5),
                p99: ops.quantile_ns(0.99),
                p999: ops.quantile_ns(0.999),
                max: ops.max_ns(),
            },
        };
        let cpu = |time: Duration| Cpu {
            seconds: time.as_secs_f64(),
            us_per_io: (outcome.ios() > 0).then(|| time.as_secs_f64() * 1e6 / outcome.ios() as f64),
        };
        Self {
            rw: plan.rw.name().into(),
            block_bytes: plan.block,
            iodepth: plan.iodepth,
            queues: rings.queues,
            threads: plan.threads.clamp(1, usize::from(rings.queues)),
            ring: if rings.packed { "packed" } else { "split" },
            indirect: rings.indirect,
            event_idx: rings.event_idx,
            seconds,
            iops: outcome.iops(),
            mib_per_s: mib(outcome.reads.bytes + outcome.writes.bytes),
            read: direction(&outcome.reads),
            write: direction(&outcome.writes),
            flush: direction(&outcome.flushes),
            slow_ios: outcome.slow.count,
            slow: outcome.slow.listed.clone(),
            client_cpu: cpu(outcome.client_cpu),
            server_cpu: outcome.server_cpu.map(cpu),
            verified_blocks: outcome.verified_blocks,
            reconnects: outcome.reconnects,
            outage_ms_max: outcome.outage.as_secs_f64() * 1e3,
            machine: Machine::here(),
        }
    }

    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let size = show_size(u64::from(self.block_bytes));
        let on = |yes: bool, what: &str| if yes { format!(", {what}") } else { String::new() };
        let _ = writeln!(
            out,
            "{} {size}, depth {} on {} queues by {} threads, {} ring{}{}, {:.2} s",
            self.rw,
            self.iodepth,
            self.queues,
            self.threads,
            self.ring,
            on(self.indirect, "indirect"),
            on(self.event_idx, "event index"),
            self.seconds
        );
        let _ = writeln!(
            out,
            "{:<7}{:>10}{:>11}{:>12}{:>12}{:>12}{:>12}",
            "", "IOPS", "MiB/s", "p50", "p99", "p99.9", "max"
        );
        for (name, d) in [("read", &self.read), ("write", &self.write), ("flush", &self.flush)] {
            if d.ios == 0 {
                continue;
            }
            let l = &d.latency_ns;
            let [p50, p99, p999, max] = [l.p50, l.p99, l.p999, l.max].map(show_nanos);
            let (iops, mib) = (show_rate(d.iops), format!("{:.1}", d.mib_per_s));
            let _ = writeln!(out, "{name:<7}{iops:>10}{mib:>11}{p50:>12}{p99:>12}{p999:>12}{max:>12}");
        }
        let cpu = |cpu: Cpu| match cpu.us_per_io {
            Some(each) => format!("{:.2} s, {each:.3} µs a request", cpu.seconds),
            None => format!("{:.2} s", cpu.seconds),
        };
        let server = self.server_cpu.map_or("unknown (give --server-pid)".into(), cpu);
        let _ = writeln!(out, "CPU: client {}; server {server}", cpu(self.client_cpu));
        if let Some(blocks) = self.verified_blocks {
            let _ = writeln!(out, "verified: {blocks} blocks read back, all as written");
        }
        if self.reconnects > 0 {
            let _ =
                writeln!(out, "reconnects: {}, at most {:.0} ms away", self.reconnects, self.outage_ms_max);
        }
        let _ = writeln!(out, "machine: {} CPUs, Linux {}", self.machine.cpus, self.machine.kernel);
        out
    }
}

/// Live figures: a bar on a terminal, otherwise one line for each interval.
pub struct Live {
    words: Words,
    bar: Option<ProgressBar>,
    by_time: bool,
    cpu: Option<Duration>,
    ios: u64,
}

/// The words of the live figures.
#[derive(Clone, Copy)]
struct Words {
    rate: &'static str,
    one: &'static str,
    /// CPU time in units per second, and the name of the unit.
    cpu: (f64, &'static str),
}

const REQUESTS: Words = Words { rate: "IOPS", one: "request", cpu: (1e6, "µs") };
const FRAMES: Words = Words { rate: "frames/s", one: "frame", cpu: (1e9, "ns") };

impl Default for Live {
    fn default() -> Self {
        Self::new()
    }
}

impl Live {
    /// Makes live figures on stderr.
    pub fn new() -> Self {
        Self::of(REQUESTS)
    }

    /// Makes live figures of a network's frames.
    pub fn of_frames() -> Self {
        Self::of(FRAMES)
    }

    fn of(words: Words) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{prefix} {bar:20} {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { words, bar, by_time: false, cpu: None, ios: 0 }
    }

    /// Returns the figures since the last tick.
    fn line(&mut self, tick: &Tick) -> String {
        let Words { rate, one, cpu: (scale, unit) } = self.words;
        let mut line = format!("{:>8} {rate} {:>8.1} MiB/s", show_rate(tick.iops), tick.mib_per_s);
        let ios = tick.ios.saturating_sub(self.ios);
        if ios == 0 {
            let _ = write!(line, "  no {one} completed");
        } else if let (Some(before), Some(now)) = (self.cpu, tick.server_cpu) {
            let spent = now.saturating_sub(before).as_secs_f64();
            let each = spent * scale / ios as f64;
            let _ = write!(line, "  server {each:.2} {unit} a {one}");
        }
        (self.cpu, self.ios) = (tick.server_cpu, tick.ios);
        line
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Live {
    fn phase(&mut self, name: &str, runtime: Option<Duration>, ios: Option<u64>) {
        (self.by_time, self.cpu, self.ios) = (runtime.is_some(), None, 0);
        if let Some(bar) = &self.bar {
            bar.set_prefix(name.to_owned());
            bar.set_length(runtime.map(|t| t.as_millis() as u64).or(ios).unwrap_or(0));
            bar.set_position(0);
        }
    }

    fn tick(&mut self, tick: &Tick) {
        let line = self.line(tick);
        match &self.bar {
            Some(bar) => {
                bar.set_position(if self.by_time { tick.elapsed.as_millis() as u64 } else { tick.ios });
                bar.set_message(line);
            }
            None => eprintln!("{:>6.1} s {line}", tick.elapsed.as_secs_f64()),
        }
    }

    fn note(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_adds_up() {
        let mut outcome = Outcome { elapsed: Duration::from_secs(2), ..Outcome::default() };
        let mut reads = Ops::default();
        (0..1000).for_each(|_| reads.record(4096, 20_000));
        outcome.reads.add(&mut reads);
        outcome.client_cpu = Duration::from_millis(1);
        let rings = Rings { queues: 2, packed: false, indirect: true, event_idx: true };
        let summary = Summary::new(&LoadPlan::default(), rings, &outcome);
        assert_eq!((summary.iops, summary.threads, summary.client_cpu.us_per_io), (500.0, 2, Some(1.0)));
        let table = summary.table();
        assert!(table.contains("20.0 µs") && table.contains("unknown"), "{table}");
        assert!(!table.contains("write"), "{table}");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["read"]["ios"], 1000);
        assert!(json["server_cpu"].is_null());
        let nothing = Summary::new(&LoadPlan::default(), rings, &Outcome::default());
        assert!(nothing.client_cpu.us_per_io.is_none() && !nothing.table().contains("a request"));
    }

    #[test]
    fn a_stall_has_no_cost_a_request() {
        let mut live = Live { words: REQUESTS, bar: None, by_time: true, cpu: None, ios: 0 };
        let mut line = |ios, cpu_ms| {
            let (iops, mib_per_s, elapsed) = (0.0, 0.0, Duration::from_secs(1));
            let server_cpu = Some(Duration::from_millis(cpu_ms));
            live.line(&Tick { elapsed, ios, iops, mib_per_s, server_cpu })
        };
        assert!(!line(1000, 10).contains("server"), "nothing to compare with");
        assert!(line(2000, 20).contains("server 10.00 µs a request"));
        let stalled = line(2000, 30);
        assert!(stalled.contains("no request completed") && !stalled.contains("server"), "{stalled}");
    }
}
