//! The comparison that started the project: one worker, one worker for each queue, and workers that
//! are attached under load.
//!
//! It starts a `vshunt serve` for each measurement and ends it again. The load is that of
//! [`vshunt_guest::load`].

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::report::Machine;
use crate::units::show_rate;
use vshunt_guest::driver::{Disk, Options};
use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;
use vshunt_guest::load::{self, LoadPlan, Progress, Rw, Tick};

/// Queues of the server, and most jobs.
const QUEUES: u16 = 16;
/// Requests in flight on each queue, and in total, as in the original measurement.
const DEPTH: u16 = 128;
const DEPTH_ALL: u16 = 1024;
/// Time limit for a server to listen.
const START: Duration = Duration::from_secs(10);
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
    /// The vshunt program. `None`: in the folder of this program, or in PATH.
    pub vshunt: Option<PathBuf>,
    /// Backends: `null`, `ram`.
    pub formats: Vec<String>,
    /// Access pattern.
    pub rw: Rw,
    /// Length of each measurement.
    pub runtime: Duration,
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
    /// Measured rows.
    pub rows: Vec<Row>,
}

/// Runs all requested measurements, and shows the progress on stderr.
pub fn compare(request: &Request) -> Result<Table> {
    if let Some(bad) = request.jobs.iter().find(|&&j| j == 0 || j > QUEUES) {
        return Err(fail!(Usage, "--jobs {bad}: use 1 to {QUEUES}"));
    }
    let vshunt = program(request.vshunt.as_deref())?;
    let mut rows = Vec::new();
    let total = request.formats.len() * Mode::ALL.len() * request.jobs.len();
    let mut at = 0;
    for format in &request.formats {
        for mode in Mode::ALL {
            let mut figures = Vec::new();
            for &jobs in &request.jobs {
                at += 1;
                eprint!("{at}/{total} {format}, {}, {jobs} jobs: ", mode.name());
                let figure =
                    measure(&vshunt, request, format, mode, jobs).inspect_err(|_| eprintln!("failed"))?;
                eprintln!("{} IOPS", show_rate(figure.iops));
                figures.push(figure);
            }
            rows.push(Row { format: format.clone(), workers: mode.name().into(), figures });
        }
    }
    let seconds = request.runtime.as_secs_f64();
    Ok(Table { machine: Machine::here(), rw: request.rw.name().into(), seconds, rows })
}

/// Returns the path of the vshunt program.
fn program(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return match path.is_file() {
            true => Ok(path.to_owned()),
            false => Err(fail!(Usage, "--vshunt {}: no such file", path.display())),
        };
    }
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("vshunt"));
    let in_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let candidates = beside.into_iter().chain(in_path.map(|dir| dir.join("vshunt")));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| fail!(Usage, "no vshunt program beside this one or in PATH: give --vshunt PATH"))
}

/// A server that this program started. It ends when this is dropped.
struct Server {
    child: Child,
    vshunt: PathBuf,
    dir: PathBuf,
}

impl Server {
    fn start(vshunt: &Path, format: &str, mode: Mode) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("vshunt-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)
            .map_err(|e| Error::with(Kind::System, format!("cannot make {}", dir.display()), e))?;
        let workers = if mode == Mode::PerQueue { ",workers=per-queue" } else { "" };
        let socket = dir.join("vm0.sock");
        let _ = std::fs::remove_file(&socket);
        let export = format!(
            "type=vhost-user-blk,name=vm0,disk=d0,socket={},queues={QUEUES}{workers}",
            socket.display()
        );
        let child = Command::new(vshunt)
            .args([
                "serve",
                "--quiet",
                "--disk",
                &format!("name=d0,format={format},size=4G"),
                "--export",
                &export,
                "--control",
            ])
            .arg(dir.join("control.sock"))
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| Error::with(Kind::System, format!("cannot start {}", vshunt.display()), e))?;
        let mut server = Self { child, vshunt: vshunt.to_owned(), dir };
        server.wait_for(&socket)?;
        Ok(server)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("vm0.sock")
    }

    fn wait_for(&mut self, socket: &Path) -> Result<()> {
        let deadline = Instant::now() + START;
        while !socket.exists() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(fail!(
                    Connect,
                    "vshunt serve ended at once ({status}); its message stands above"
                ));
            }
            if Instant::now() > deadline {
                return Err(fail!(Connect, "vshunt serve did not make its socket within {START:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Runs the command line on the server's control socket. Returns its output.
    fn control(&self, args: &[&str]) -> Result<String> {
        let output =
            Command::new(&self.vshunt).arg("-c").arg(self.dir.join("control.sock")).args(args).output();
        let output = output.map_err(|e| Error::with(Kind::System, "cannot run vshunt", e))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(fail!(System, "vshunt {} failed: {}", args.join(" "), why.trim()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Gives each queue its own worker, except the first queue, which stays on its worker.
    fn attach_workers(&self, jobs: u16) -> Result<()> {
        for queue in 1..jobs {
            let printed = self.control(&["worker", "new"])?;
            let id = printed.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty());
            let id = id.ok_or_else(|| fail!(System, "vshunt worker new printed no id but {printed:?}"))?;
            self.control(&["attach", &format!("vm0:{queue}"), id])?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
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
    let server = Server::start(vshunt, format, mode)?;
    let plan = LoadPlan { server_pid: Some(server.child.id()), ..plan(request.rw, jobs) };
    let mut disk = Disk::connect(server.socket(), options(&plan, jobs))?;
    let attach = || if mode == Mode::Attached { server.attach_workers(jobs) } else { Ok(()) };
    figure(&mut disk, &plan, jobs, request.runtime, attach)
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
    let (Some(first), Some(last)) = (since.first, since.last) else {
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
    /// Returns the table as JSON: `machine`, `rw`, `seconds`, `rows` of `format`, `workers` and
    /// `figures`, and the original rows in `seed`.
    pub fn json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["seed"] = SEED.iter().map(|(name, kiops)| seed_row(name, kiops)).collect();
        value
    }

    /// Returns the table as text: measured rows, then the original rows, for the same jobs.
    pub fn text(&self) -> String {
        let jobs: Vec<u16> =
            self.rows.first().map(|r| r.figures.iter().map(|f| f.jobs).collect()).unwrap_or_default();
        let mut out = String::new();
        let _ = writeln!(
            out,
            "4k {}, depth {DEPTH} a queue, at most {DEPTH_ALL} in all, {:.0} s a figure; {} CPUs, Linux {}; IOPS:",
            self.rw, self.seconds, self.machine.cpus, self.machine.kernel
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
        let table = Table { machine: Machine::here(), rw: "randrw".into(), seconds: 3.0, rows: vec![row] };
        let text = table.text();
        assert!(text.contains("1.50M") && text.contains("492k"), "{text}");
        assert_eq!(table.json()["seed"][0]["figures"][1]["iops"], 492_000);
    }
}
