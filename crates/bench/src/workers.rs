//! The comparison that started the project: one worker, one worker for each queue, and workers that
//! are attached under load.
//!
//! Each measurement has a server of its own (see [`crate::server`]). The load is that of
//! [`vshunt_guest::load`].

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use crate::plot::{self, Axis, Line, Panel, Plot};
use crate::report::Machine;
use crate::server::{QUEUES, Server, program};
use crate::units::show_rate;
use vshunt_guest::driver::{Disk, Options};
use vshunt_guest::error::Result;
use vshunt_guest::fail;
use vshunt_guest::load::{self, LoadPlan, Progress, Rw, Tick};

/// Requests in flight on each queue, and in total, as in the original measurement.
const DEPTH: u16 = 128;
const DEPTH_ALL: u16 = 1024;
/// Load that is not counted, because memory is touched for the first time and workers are not
/// attached yet.
const WARM_UP: Duration = Duration::from_millis(500);

/// Jobs of the original table.
const SEED_JOBS: [u16; 6] = [1, 2, 4, 8, 12, 16];
/// Thousand IOPS of the original table (vhost-scsi, VM with 16 vCPUs, 4k randrw, depth 128). 0: the
/// table has no value.
const SEED: [(&str, [u32; 6]); 4] = [
    ("one worker", [84, 492, 510, 0, 0, 0]),
    ("a worker a queue", [184, 380, 744, 1422, 2256, 2434]),
    ("one worker, batching", [494, 520, 0, 0, 0, 0]),
    ("a worker a queue, batching", [496, 878, 1542, 2436, 2304, 2590]),
];

/// The parameters of the comparison.
#[derive(Clone, Debug)]
pub struct Request {
    /// Numbers of queues.
    pub jobs: Vec<u16>,
    /// How each figure is measured.
    pub conditions: Conditions,
}

/// How the figures of a comparison are measured.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The vshunt program. `None`: in the folder of this program, or in PATH.
    pub vshunt: Option<PathBuf>,
    /// Backends: `null`, `ram`.
    pub formats: Vec<String>,
    /// Access pattern.
    pub rw: Rw,
    /// Length of each measurement.
    pub runtime: Duration,
    /// Number of measurements for each figure, which is the median of them.
    pub reps: u16,
}

/// The assignment of queues to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    One,
    PerQueue,
    Attached,
}

impl Mode {
    pub(crate) const ALL: [Self; 3] = [Self::One, Self::PerQueue, Self::Attached];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "one worker",
            Self::PerQueue => "a worker a queue",
            Self::Attached => "attached while running",
        }
    }
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Number of queues.
    pub jobs: u16,
    /// Requests per second.
    pub iops: f64,
    /// Microseconds of the server's CPU time per request. Null if it is not known.
    pub server_us_per_io: Option<f64>,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
}

/// One row: a backend and an assignment of queues to workers.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Backend.
    pub format: String,
    /// Name of the assignment.
    pub workers: String,
    /// One figure for each number of jobs.
    pub figures: Vec<Figure>,
}

/// The comparison's result.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// The machine of the measurement.
    pub machine: Machine,
    /// Access pattern.
    pub rw: String,
    /// Length of each measurement in seconds.
    pub seconds: f64,
    /// Measurements for each figure.
    pub reps: u16,
    /// Measured rows.
    pub rows: Vec<Row>,
}

/// Runs all requested measurements, and shows the progress on stderr.
pub fn compare(request: &Request) -> Result<Table> {
    if let Some(bad) = request.jobs.iter().find(|&&j| j == 0 || j > QUEUES) {
        return Err(fail!(Usage, "--jobs {bad}: use 1 to {QUEUES}"));
    }
    let vshunt = program(request.conditions.vshunt.as_deref())?;
    let mut rows = Vec::new();
    let total = request.conditions.formats.len() * Mode::ALL.len() * request.jobs.len();
    let mut at = 0;
    for format in &request.conditions.formats {
        for mode in Mode::ALL {
            let mut figures = Vec::new();
            for &jobs in &request.jobs {
                at += 1;
                eprint!("{at}/{total} {format}, {}, {jobs} jobs: ", mode.name());
                let figure =
                    median(request.conditions.reps, || measure(&vshunt, request, format, mode, jobs))
                        .inspect_err(|_| eprintln!("failed"))?;
                eprintln!("{} IOPS", show_rate(figure.iops));
                figures.push(figure);
            }
            rows.push(Row { format: format.clone(), workers: mode.name().into(), figures });
        }
    }
    let seconds = request.conditions.runtime.as_secs_f64();
    Ok(Table {
        machine: Machine::here(),
        rw: request.conditions.rw.name().into(),
        seconds,
        reps: request.conditions.reps,
        rows,
    })
}

/// Counts only requests after the warm-up, with all workers attached.
struct AfterWarmUp<'a> {
    ready: &'a AtomicBool,
    first: Option<Tick>,
    last: Option<Tick>,
}

impl Progress for AfterWarmUp<'_> {
    fn phase(&mut self, _: &str, _: Option<Duration>, _: Option<u64>) {}
    fn tick(&mut self, tick: &Tick) {
        if self.ready.load(Ordering::Acquire) {
            self.first.get_or_insert(*tick);
            self.last = Some(*tick);
        }
    }
    fn note(&mut self, text: &str) {
        eprintln!("{text}");
    }
}

fn measure(vshunt: &Path, request: &Request, format: &str, mode: Mode, jobs: u16) -> Result<Figure> {
    let server = Server::start(vshunt, format, mode == Mode::PerQueue)?;
    let plan = LoadPlan { server_pid: Some(server.pid()), ..plan(request.conditions.rw, jobs) };
    let mut disk = Disk::connect(server.socket(), options(&plan, jobs))?;
    let attach = || if mode == Mode::Attached { server.attach_workers(jobs) } else { Ok(()) };
    figure(&mut disk, &plan, jobs, request.conditions.runtime, attach)
}

/// Measures `reps` times. Returns the measurement with the median of the IOPS, of an even number
/// the lower one.
pub(crate) fn median(reps: u16, mut measure: impl FnMut() -> Result<Figure>) -> Result<Figure> {
    let mut figures = (0..reps.max(1)).map(|_| measure()).collect::<Result<Vec<_>>>()?;
    figures.sort_by(|a, b| a.iops.total_cmp(&b.iops));
    Ok(figures.swap_remove((figures.len() - 1) / 2))
}

/// Returns the length of measurements in words.
pub(crate) fn length(seconds: f64, reps: u16) -> String {
    match reps {
        0 | 1 => format!("{seconds} s a figure"),
        reps => format!("median of {reps} times {seconds} s"),
    }
}

/// Returns the load of a measurement, without its length.
pub(crate) fn plan(rw: Rw, jobs: u16) -> LoadPlan {
    LoadPlan {
        rw,
        iodepth: DEPTH.min(DEPTH_ALL / jobs),
        interval: Duration::from_millis(100),
        ..LoadPlan::default()
    }
}

/// Returns the options of a device for the load.
pub(crate) fn options(plan: &LoadPlan, jobs: u16) -> Options {
    let buffer_bytes = u64::from(jobs) * (plan.buffer_bytes() + 8192);
    Options { queues: jobs, indirect_cap: 3, buffer_bytes, ..Options::default() }
}

/// Measures `runtime` of `plan`. Before that is a warm-up, at the end of which `attach` assigns
/// queues to workers.
pub(crate) fn figure(
    disk: &mut Disk,
    plan: &LoadPlan,
    jobs: u16,
    runtime: Duration,
    attach: impl FnOnce() -> Result<()> + Send,
) -> Result<Figure> {
    // Attaching takes a part of the load's time. The measurement is the part after it.
    let attaching = Duration::from_millis(100) * u32::from(jobs);
    let plan = LoadPlan { runtime: Some(WARM_UP + attaching + runtime), ..plan.clone() };
    let ready = AtomicBool::new(false);
    let mut since = AfterWarmUp { ready: &ready, first: None, last: None };
    let (outcome, attached) = std::thread::scope(|scope| {
        let attach = scope.spawn(|| {
            std::thread::sleep(WARM_UP);
            let attached = attach();
            ready.store(true, Ordering::Release);
            attached
        });
        let outcome = load::run(disk, &plan, &mut since);
        (outcome, attach.join().expect("the attaching thread panicked"))
    });
    attached?;
    let outcome = outcome?;
    let measured = since.first.zip(since.last).filter(|(first, last)| last.elapsed > first.elapsed);
    let Some((first, last)) = measured else {
        return Err(fail!(
            System,
            "nothing was left to measure after the warm-up and attaching: use a longer --runtime"
        ));
    };
    let seconds = (last.elapsed - first.elapsed).as_secs_f64();
    let ios = last.ios - first.ios;
    if ios == 0 {
        return Err(fail!(Io, "no request completed in {seconds:.1} s of measuring: the server hangs"));
    }
    let cpu = last.server_cpu.zip(first.server_cpu).map(|(b, a)| (b - a).as_secs_f64() * 1e6 / ios as f64);
    let p50_ns = outcome.reads.quantile_ns(0.5).max(outcome.writes.quantile_ns(0.5));
    Ok(Figure { jobs, iops: ios as f64 / seconds.max(1e-3), server_us_per_io: cpu, p50_ns })
}

impl Table {
    /// Returns the numbers of jobs of the rows.
    fn jobs(&self) -> Vec<u16> {
        self.rows.first().map(|r| r.figures.iter().map(|f| f.jobs).collect()).unwrap_or_default()
    }

    /// Returns the picture of the table: a panel for each backend, and one of the original rows,
    /// for the same jobs. `command` is the command line that measured.
    pub fn plot(&self, command: &str) -> Plot {
        let mut panels: Vec<Panel> = Vec::new();
        for row in &self.rows {
            let points = row.figures.iter().map(|f| (f64::from(f.jobs), f.iops)).collect();
            let line = Line { name: row.workers.clone(), points };
            let title = format!("format={}", row.format);
            plot::panel(&mut panels, title).lines.push(line);
        }
        let jobs = self.jobs();
        let lines: Vec<Line> = SEED.iter().map(|(name, kiops)| seed_line(name, kiops, &jobs)).collect();
        if lines.iter().any(|line| !line.points.is_empty()) {
            panels.push(Panel { title: "the seed, on a VM with 16 vCPUs".into(), lines });
        }
        Plot {
            title: "vshunt, IOPS by jobs".into(),
            notes: vec![
                format!(
                    "4k {}, depth {DEPTH} a queue, at most {DEPTH_ALL} in all, {}. Machine: {}.",
                    self.rw,
                    length(self.seconds, self.reps),
                    self.machine.describe()
                ),
                format!("$ {command}"),
            ],
            x: Axis::Linear("jobs, each with a queue and a thread"),
            y: "IOPS",
            panels,
        }
    }

    /// Returns the table as JSON: `machine`, `rw`, `seconds`, `rows` of `format`, `workers` and
    /// `figures`, and the original rows in `seed`.
    pub fn json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["seed"] = SEED.iter().map(|(name, kiops)| seed_row(name, kiops)).collect();
        value
    }

    /// Returns the table as text: measured rows, then the original rows, for the same jobs.
    pub fn text(&self) -> String {
        let jobs = self.jobs();
        let mut out = String::new();
        let _ = writeln!(
            out,
            "4k {}, depth {DEPTH} a queue, at most {DEPTH_ALL} in all, {}; {} CPUs, Linux {}; IOPS:",
            self.rw,
            length(self.seconds, self.reps),
            self.machine.cpus,
            self.machine.kernel
        );
        let _ = write!(out, "{:<34}", "jobs");
        for job in &jobs {
            let _ = write!(out, "{job:>9}");
        }
        out.push('\n');
        for row in &self.rows {
            let _ = write!(out, "{:<34}", format!("{}, {}", row.format, row.workers));
            for figure in &row.figures {
                let _ = write!(out, "{:>9}", show_rate(figure.iops));
            }
            out.push('\n');
        }
        for (name, kiops) in SEED {
            let _ = write!(out, "{:<34}", format!("seed, {name}"));
            for job in &jobs {
                let at = SEED_JOBS.iter().position(|j| j == job).map_or(0, |i| kiops[i]);
                let cell = if at == 0 { "–".into() } else { format!("{at}k") };
                let _ = write!(out, "{cell:>9}");
            }
            out.push('\n');
        }
        out.push_str(
            "The seed was measured on a VM with 16 vCPUs: compare shapes and ratios, not numbers.\n",
        );
        out
    }
}

fn seed_line(name: &str, kiops: &[u32; 6], jobs: &[u16]) -> Line {
    let measured = SEED_JOBS.iter().zip(kiops).filter(|(job, k)| **k > 0 && jobs.contains(job));
    let points = measured.map(|(&job, &k)| (f64::from(job), f64::from(k) * 1e3)).collect();
    Line { name: name.into(), points }
}

fn seed_row(name: &str, kiops: &[u32; 6]) -> serde_json::Value {
    let figures = SEED_JOBS.iter().zip(kiops).filter(|(_, k)| **k > 0);
    let figures: Vec<_> =
        figures.map(|(jobs, k)| serde_json::json!({ "jobs": jobs, "iops": k * 1000 })).collect();
    serde_json::json!({ "workers": name, "figures": figures })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stands_beside_the_seed() {
        let figure = Figure { jobs: 2, iops: 1.5e6, server_us_per_io: None, p50_ns: 0 };
        let row = Row { format: "null".into(), workers: "one worker".into(), figures: vec![figure] };
        let table =
            Table { machine: Machine::here(), rw: "randrw".into(), seconds: 3.0, reps: 1, rows: vec![row] };
        let text = table.text();
        assert!(text.contains("1.50M") && text.contains("492k"), "{text}");
        assert_eq!(table.json()["seed"][0]["figures"][1]["iops"], 492_000);
        let plot = table.plot("vshunt-bench workers");
        let [null, seed] = &plot.panels[..] else { panic!("{plot:?}") };
        assert_eq!((&null.title[..], &null.lines[0].points[..]), ("format=null", &[(2.0, 1.5e6)][..]));
        assert_eq!(seed.lines[0].points, [(2.0, 492_000.0)]);
        assert!(plot.notes.iter().any(|note| note == "$ vshunt-bench workers"), "{plot:?}");
    }

    #[test]
    fn the_median_is_one_of_the_measurements() {
        let median_of = |all: &[f64]| {
            let mut rest = all.iter();
            let next =
                || Ok(Figure { jobs: 1, iops: *rest.next().unwrap(), server_us_per_io: None, p50_ns: 0 });
            median(all.len() as u16, next).unwrap().iops
        };
        assert_eq!((median_of(&[3.0, 1.0, 2.0]), median_of(&[2.0, 1.0]), median_of(&[4.0])), (2.0, 1.0, 4.0));
        assert!(median(3, || Err(fail!(Io, "no"))).is_err());
        assert_eq!(length(0.5, 1) + ", " + &length(2.0, 3), "0.5 s a figure, median of 3 times 2 s");
    }
}
