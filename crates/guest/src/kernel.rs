//! `vshunt-bench kernel`: load, checks and hostile requests for the kernel's `/dev/vhost-blk`.
//!
//! Load and verification are those of sockets ([`crate::load`]). This module has the parts that
//! only the kernel needs: rings that move between workers, the dirty log, counters, and malformed
//! chains.

pub mod check;
pub mod counters;
pub mod hostile;
pub mod logcheck;
pub mod movers;
pub mod net;
pub mod restarts;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use self::check::Checked;
use self::counters::Counters;
use self::logcheck::LogCheck;
use self::movers::Moves;
use self::restarts::Restarts;
use crate::driver::{Disk, Kernel, KernelOptions, Options, feature};
use crate::error::{Result, fail};
use crate::load::{self, LoadPlan, LogGate, Outcome, Progress};

/// The parameters of [`run`].
#[derive(Clone, Debug)]
pub struct Request {
    /// The device.
    pub kernel: KernelOptions,
    /// Queues and their parameters.
    pub options: Options,
    /// The load. `None`: only request types are checked.
    pub load: Option<LoadPlan>,
    /// Rounds of every request type before the load.
    pub check: u32,
    /// Most descriptors of a request, split at random. 0: the usual three.
    pub shuffle: u16,
    /// Seed of the check, and of the thread that moves rings.
    pub seed: u32,
    /// Interval between moves of rings to other workers.
    pub attach_every: Option<Duration>,
    /// Interval between stops of rings, which start again at once.
    pub restart_every: Option<Duration>,
    /// Interval between switches of the log.
    pub log_every: Option<Duration>,
}

/// The results, in addition to the counts of the load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Results of the request types.
    pub checked: Option<Checked>,
    /// Moves of rings.
    pub moves: Option<Moves>,
    /// Stops and starts of rings.
    pub restarts: Option<Restarts>,
    /// Rounds with the log on.
    pub log: Option<LogCheck>,
    /// The device's counters, which agree with those of the driver.
    pub counters: Counters,
}

fn kernel(disk: &mut Disk) -> Result<&Kernel> {
    disk.transport().kernel().ok_or_else(|| fail!(Usage, "this is for the kernel's device alone"))
}

/// Opens the device and executes the request, in the order of the fields of [`Request`].
///
/// # Errors
/// Those of [`load::run`]. The device's counters differ from those of the driver, it does not log
/// its writes, or it refuses a move.
pub fn run(request: &Request, progress: &mut dyn Progress) -> Result<(Disk, Option<Outcome>, Report)> {
    let mut disk = Disk::open_kernel(&request.kernel, request.options.clone())?;
    let queues = disk.queue_count();
    let vhost = kernel(&mut disk)?.vhost().clone();
    let before = Counters::read(&vhost, queues)?;
    let mut report = Report::default();
    let mut expected = Counters::default();
    if request.check > 0 {
        let checked =
            check::run(&mut disk, &request.kernel.serial, request.check, request.shuffle, request.seed)?;
        expected.requests += checked.requests;
        expected.errors += checked.errors;
        expected.unsupported += checked.unsupported;
        expected.read_bytes += checked.read_bytes;
        expected.written_bytes += checked.written_bytes;
        report.checked = Some(checked);
    }
    let outcome = match &request.load {
        Some(plan) => Some(load_with_threads(&mut disk, request, plan, progress, &mut report)?),
        None => None,
    };
    if let Some(outcome) = &outcome {
        let block = request.load.as_ref().map_or(0, |plan| u64::from(plan.block));
        let read_back = outcome.verified_blocks.unwrap_or(0);
        expected.requests += outcome.ios() + read_back;
        expected.read_bytes += outcome.reads.bytes + read_back * block;
        expected.written_bytes += outcome.writes.bytes;
    }
    report.counters = Counters::expect(&vhost, queues, &before, &expected)?;
    Ok((disk, outcome, report))
}

/// Runs the load, while other threads move rings and switch the log.
fn load_with_threads(
    disk: &mut Disk,
    request: &Request,
    plan: &LoadPlan,
    progress: &mut dyn Progress,
    report: &mut Report,
) -> Result<Outcome> {
    let queues = disk.queue_count();
    let rings: Vec<_> = (0..queues).map(|q| disk.queue(q).parts().clone()).collect();
    let memory = disk.memory().clone();
    let kernel = kernel(disk)?;
    let (handle, switch) = (kernel.handle().clone(), kernel.logger().clone());
    let vhost = kernel.vhost().clone();
    if request.log_every.is_some() && kernel.offered() & feature::LOG_ALL == 0 {
        return Err(fail!(Usage, "the device does not offer VHOST_F_LOG_ALL: leave --log-every out"));
    }
    let gate = Arc::new(LogGate::new(usize::from(queues)));
    let plan = LoadPlan { log: request.log_every.map(|_| Arc::clone(&gate)), ..plan.clone() };
    let stop = AtomicBool::new(false);
    let (outcome, moves, restarts, log) = std::thread::scope(|scope| {
        let (vhost, stop, gate, seed) = (&vhost, &stop, &gate, request.seed);
        let (memory, switch, rings, handle) = (&memory, &switch, &rings, &handle);
        let mover = request
            .attach_every
            .map(|pause| scope.spawn(move || movers::run(vhost, queues, seed, pause, stop)));
        let restarter = request
            .restart_every
            .map(|pause| scope.spawn(move || restarts::run(handle, rings, seed, pause, stop)));
        let logger = request
            .log_every
            .map(|pause| scope.spawn(move || logcheck::run(memory, switch, rings, gate, pause, stop)));
        let outcome = load::run(disk, &plan, progress);
        stop.store(true, Ordering::Release);
        let join = "a thread beside the load panicked";
        let moves = mover.map(|thread| thread.join().expect(join));
        let restarts = restarter.map(|thread| thread.join().expect(join));
        (outcome, moves, restarts, logger.map(|thread| thread.join().expect(join)))
    });
    // An error of another thread is the cause of the error that it made in the load.
    report.restarts = restarts.transpose()?;
    let outcome = outcome?;
    report.moves = moves.transpose()?;
    report.log = log.transpose()?;
    if report.log.is_some_and(|log| log.rounds == 0) {
        return Err(fail!(
            Usage,
            "the load ended before the log could be switched on once: use a longer --runtime"
        ));
    }
    Ok(outcome)
}

impl Report {
    /// Returns the lines for people, which follow the load's table.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if let Some(c) = &self.checked {
            let _ = writeln!(
                out,
                "request types: {} requests, {} rightly failed, {} rightly not supported",
                c.requests, c.errors, c.unsupported
            );
        }
        if let Some(m) = &self.moves {
            let _ = writeln!(
                out,
                "workers: {} rings attached, {} workers made, {} freed, {} rightly kept",
                m.attached, m.made, m.freed, m.busy
            );
        }
        if let Some(r) = &self.restarts {
            let _ = writeln!(
                out,
                "rings: {} stopped and started again; {} times the backend was taken away and set again",
                r.rings, r.backends
            );
        }
        if let Some(l) = &self.log {
            let _ = writeln!(
                out,
                "dirty log: switched on {} times, {} writes looked up, all marked ({} pages in all)",
                l.rounds, l.writes, l.marked_pages
            );
        }
        let c = &self.counters;
        let _ = writeln!(
            out,
            "device: {} requests, {} errors, {} unsupported, {} bytes read, {} written, as the driver counted; \
             {} kicks, {} notifications",
            c.requests, c.errors, c.unsupported, c.read_bytes, c.written_bytes, c.kicks, c.signals
        );
        out
    }
}

/// Opens the device for malformed chains, and sends them.
///
/// # Errors
/// Those of [`hostile::run`].
pub fn run_hostile(
    kernel: &KernelOptions,
    options: Options,
    plan: &hostile::HostilePlan,
) -> Result<hostile::Counts> {
    let mut disk = Disk::open_kernel(kernel, hostile::options(options))?;
    hostile::run(&mut disk, plan)
}
