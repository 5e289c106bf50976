//! The load loop: it keeps a number of requests in flight on every queue, as fio does, with one
//! thread for each queue or fewer.
//!
//! [`run`] is called on the thread that owns the [`Disk`]. This thread watches while load threads
//! own the queues. A load thread never uses the connection, and the watching thread never uses a
//! ring while load threads run.

pub(crate) mod gauge;
pub(crate) mod lane;
mod loggate;
mod pattern;
pub(crate) mod thread;
pub(crate) mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::lane::{Counted, Lane, Share, Source};
pub use self::loggate::LogGate;
pub use self::pattern::{Pattern, Rw};
use self::thread::Shared;
pub use self::thread::pin;
use self::watch::Watcher;
use crate::driver::{Area, Disk, PAGE, Shuffle, feature};
use crate::error::{Result, fail};
use crate::rng::Rng;
use crate::stats::{Ops, ServerCpu, Slow};
use crate::verify::{Partition, StateFile};

pub use crate::driver::SECTOR;

/// The parameters of a load.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Access pattern.
    pub rw: Rw,
    /// Percent of reads in the mixed patterns.
    pub read_percent: u8,
    /// Bytes of each request.
    pub block: u32,
    /// Requests in flight on each queue.
    pub iodepth: u16,
    /// Number of load threads. Queues are assigned to them round robin.
    pub threads: usize,
    /// Time in which requests are submitted.
    pub runtime: Option<Duration>,
    /// Any thread may set it. Then nothing more is submitted, as at the end of `runtime`.
    pub stop: Option<Arc<AtomicBool>>,
    /// Number of requests, over all queues.
    pub ios: Option<u64>,
    /// First byte of the disk to use.
    pub offset: u64,
    /// Bytes of the disk to use. `None`: up to its end.
    pub range: Option<u64>,
    /// Stamps written data, checks data that is read, and reads everything back at the end.
    pub verify: bool,
    /// File for the state of what was written, for a later `verify`.
    pub state: Option<PathBuf>,
    /// Seed of offsets and stamps.
    pub seed: u32,
    /// Writes of a queue between two flushes. 0: no flushes.
    pub flush_every: u32,
    /// Time to poll for completions before sleeping.
    pub spin: Duration,
    /// CPUs for the threads, round robin.
    pub pin: Vec<usize>,
    /// Interval between live figures.
    pub interval: Duration,
    /// The server's process, if the socket does not report it.
    pub server_pid: Option<u32>,
    /// Time limit for the return of a server that died.
    pub reconnect: Option<Duration>,
    /// A request that takes longer than this, while the server is there, counts as lost.
    pub stall: Duration,
    /// The same limit for requests in flight at the end of `runtime`, if it is shorter.
    pub linger: Duration,
    /// See [`crate::Options::stale_packed_base`].
    pub stale_packed_base: bool,
    /// Most descriptors of a request, split at random. 0: header, data, status.
    pub shuffle: u16,
    /// Buffers that a queue's requests use in turn, if there are more than `iodepth`.
    pub buffers: u16,
    /// The check of the dirty log under load.
    pub log: Option<Arc<LogGate>>,
    /// The noun for requests in messages.
    pub unit: &'static str,
}

impl Default for LoadPlan {
    fn default() -> Self {
        Self {
            rw: Rw::Randread,
            read_percent: 50,
            block: 4096,
            iodepth: 32,
            threads: usize::MAX,
            runtime: None,
            stop: None,
            ios: None,
            offset: 0,
            range: None,
            verify: false,
            state: None,
            seed: 1,
            flush_every: 0,
            spin: Duration::ZERO,
            pin: Vec::new(),
            interval: Duration::from_secs(1),
            server_pid: None,
            reconnect: None,
            stall: Duration::from_secs(30),
            // A flush of much data takes seconds.
            linger: Duration::from_secs(10),
            stale_packed_base: false,
            shuffle: 0,
            buffers: 0,
            log: None,
            unit: "requests",
        }
    }
}

impl LoadPlan {
    /// Returns the number of buffers of a queue.
    fn buffer_count(&self) -> usize {
        usize::from(self.buffers.max(self.iodepth))
    }

    /// Returns the distance between buffers: the data, and in shuffled requests the bytes around
    /// it.
    fn stride(&self) -> usize {
        let block = self.block as usize;
        if self.shuffle > 0 { block + lane::FRAME_ROOM } else { block }
    }

    /// Returns the bytes of guest memory for a queue's buffers.
    pub fn buffer_bytes(&self) -> u64 {
        (self.buffer_count() * self.stride()) as u64
    }
}

/// Live figures.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// Time since the start of the phase.
    pub elapsed: Duration,
    /// Requests completed since the start of the phase.
    pub ios: u64,
    /// Requests per second since the last tick.
    pub iops: f64,
    /// MiB per second since the last tick.
    pub mib_per_s: f64,
    /// CPU time of the server since the start of the run, if it is known.
    pub server_cpu: Option<Duration>,
}

/// Shows the progress. All methods are called on the thread that called [`run`].
pub trait Progress {
    /// A phase starts: its name, and its length if that is known.
    fn phase(&mut self, name: &str, runtime: Option<Duration>, ios: Option<u64>);
    /// Live figures.
    fn tick(&mut self, tick: &Tick);
    /// Reports an event.
    fn note(&mut self, text: &str);
}

/// A [`Progress`] that shows nothing.
pub struct Silent;

impl Progress for Silent {
    fn phase(&mut self, _: &str, _: Option<Duration>, _: Option<u64>) {}
    fn tick(&mut self, _: &Tick) {}
    fn note(&mut self, _: &str) {}
}

/// The results of a load.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Time from the first submission to the last completion.
    pub elapsed: Duration,
    /// Reads of the load.
    pub reads: Ops,
    /// Writes of the load.
    pub writes: Ops,
    /// Flushes of the load.
    pub flushes: Ops,
    /// Requests of the load that were slow.
    pub slow: Slow,
    /// CPU time of the load threads.
    pub client_cpu: Duration,
    /// CPU time of the server, if it is known.
    pub server_cpu: Option<Duration>,
    /// Blocks that were read back and correct at the end of a verified run.
    pub verified_blocks: Option<u64>,
    /// Number of times that the server died and came back.
    pub reconnects: u32,
    /// The longest time without a server.
    pub outage: Duration,
}

impl Outcome {
    /// Returns the requests of all kinds.
    pub fn ios(&self) -> u64 {
        self.reads.ios + self.writes.ios + self.flushes.ios
    }

    /// Returns the requests per second.
    pub fn iops(&self) -> f64 {
        self.ios() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Runs `plan` on `disk`.
///
/// # Errors
/// The plan does not fit the disk. A request failed, was completed twice or was not completed. The
/// server died and did not come back. Data that was read is not what was written.
pub fn run(disk: &mut Disk, plan: &LoadPlan, progress: &mut dyn Progress) -> Result<Outcome> {
    let (first, count) = blocks(disk, plan)?;
    check_ring(disk, plan)?;
    watch::check_can_reconnect(disk.transport(), plan)?;
    let lanes = disk.split().2.len() as u64;
    let mut partitions = Vec::new();
    let mut sources = Vec::new();
    for lane in 0..lanes {
        let (from, to) = (count * lane / lanes, count * (lane + 1) / lanes);
        let whole = plan.rw.is_random() && !plan.verify;
        let (from, to) = if whole { (0, count) } else { (from, to) };
        let rng = Rng::new(u64::from(plan.seed), lane);
        sources.push(Source::Load(Pattern::new(plan.rw, plan.read_percent, first + from, to - from, rng)));
        partitions.push(Partition::new(first + from, if plan.verify { (to - from) as usize } else { 0 }));
    }
    let mut outcome = Outcome::default();
    let buffers = buffers(disk, plan)?;
    if plan.shuffle > 0 {
        for (stream, queue) in disk.split().2.iter_mut().enumerate() {
            let rng = Rng::new(u64::from(plan.seed), 1000 + stream as u64);
            queue.set_shuffle(Shuffle::new(rng, usize::from(plan.shuffle)));
        }
    }
    progress.phase(plan.rw.name(), plan.runtime, plan.ios);
    let result = phase(disk, plan, &buffers, sources, &mut partitions, progress, &mut outcome);
    let result = result.and_then(|()| match plan.verify {
        true => read_back(disk, plan, &buffers, &mut partitions, progress, &mut outcome),
        false => Ok(()),
    });
    let kept = match (&plan.state, plan.verify) {
        (Some(path), true) => StateFile { seed: plan.seed, block: plan.block, partitions }.save(path),
        _ => Ok(()),
    };
    result.and(kept).map(|()| outcome)
}

/// Reads back and checks the data that a previous run with `--state` wrote. `plan` gives depth,
/// threads and time limits.
///
/// # Errors
/// Those of [`run`].
pub fn verify(
    disk: &mut Disk,
    plan: &LoadPlan,
    state: StateFile,
    progress: &mut dyn Progress,
) -> Result<Outcome> {
    let plan = LoadPlan { block: state.block, seed: state.seed, verify: true, ..plan.clone() };
    check_ring(disk, &plan)?;
    let buffers = buffers(disk, &plan)?;
    let lanes = disk.split().2.len();
    let mut partitions = state.deal(lanes);
    partitions.resize_with(lanes, Partition::default);
    let end = partitions.iter().map(|p| p.first() + p.len() as u64).max().unwrap_or(0);
    if end * u64::from(plan.block) > disk.capacity() * SECTOR {
        return Err(fail!(
            Usage,
            "the state file speaks of blocks past the end of this disk: it is of another one"
        ));
    }
    let mut outcome = Outcome::default();
    read_back(disk, &plan, &buffers, &mut partitions, progress, &mut outcome)?;
    Ok(outcome)
}

/// Returns the range of the disk in blocks: first and count.
fn blocks(disk: &Disk, plan: &LoadPlan) -> Result<(u64, u64)> {
    let block = u64::from(plan.block);
    if block == 0 || !block.is_multiple_of(SECTOR) {
        return Err(fail!(Usage, "--bs {block} is not a multiple of 512"));
    }
    if !plan.offset.is_multiple_of(block) {
        return Err(fail!(Usage, "--offset {} is not a multiple of --bs {block}", plan.offset));
    }
    let capacity = disk.capacity() * SECTOR;
    let range = plan.range.unwrap_or_else(|| capacity.saturating_sub(plan.offset));
    if plan.offset.checked_add(range).is_none_or(|end| end > capacity) {
        return Err(fail!(
            Usage,
            "--offset and --range reach past the end of the disk, which has {capacity} bytes"
        ));
    }
    let count = range / block;
    let lanes = u64::from(disk.queue_count());
    if count < lanes {
        return Err(fail!(
            Usage,
            "a range of {range} bytes has {count} blocks for {lanes} queues: make it larger"
        ));
    }
    Ok((plan.offset / block, count))
}

/// Checks that a ring has room for the depth, and that the device accepts the requests.
fn check_ring(disk: &mut Disk, plan: &LoadPlan) -> Result<()> {
    let features = disk.transport().features();
    let config = *disk.config();
    if plan.rw.writes() && features & feature::BLK_RO != 0 {
        return Err(fail!(Usage, "the disk is read-only: use --rw read or randread"));
    }
    if plan.flush_every > 0 && features & feature::BLK_FLUSH == 0 {
        return Err(fail!(Usage, "the server does not offer VIRTIO_BLK_F_FLUSH: leave --flush-every out"));
    }
    // QEMU's storage daemon (7.2) offers the feature with a limit of 0.
    if features & feature::BLK_SIZE_MAX != 0 && config.size_max != 0 && plan.block > config.size_max {
        return Err(fail!(
            Usage,
            "--bs {} is above the device's segment limit of {} bytes",
            plan.block,
            config.size_max
        ));
    }
    let queue = disk.queue(0);
    let (size, each) = (queue.parts().size, if queue.indirect() { 1 } else { 3 });
    if plan.iodepth == 0 || u32::from(plan.iodepth) * each > u32::from(size) {
        return Err(fail!(
            Usage,
            "--iodepth {} takes {} of {size} descriptors: use --queue-size {}, or --iodepth 1 to {}",
            plan.iodepth,
            u32::from(plan.iodepth) * each,
            (u32::from(plan.iodepth) * each).next_power_of_two(),
            u32::from(size) / each
        ));
    }
    Ok(())
}

/// Allocates buffers for every queue, and faults them in.
fn buffers(disk: &mut Disk, plan: &LoadPlan) -> Result<Vec<Area>> {
    let len = plan.buffer_bytes() as usize;
    (0..disk.queue_count())
        .map(|_| {
            let area = disk.memory().alloc(len, PAGE)?;
            area.fill(0xa5);
            Ok(area)
        })
        .collect()
}

fn read_back(
    disk: &mut Disk,
    plan: &LoadPlan,
    buffers: &[Area],
    partitions: &mut [Partition],
    progress: &mut dyn Progress,
    total: &mut Outcome,
) -> Result<()> {
    let written = partitions.iter().map(Partition::written).sum();
    let sources = partitions.iter().map(|_| Source::Readback(0)).collect();
    let plan = LoadPlan { runtime: None, stop: None, ios: None, log: None, ..plan.clone() };
    progress.phase("read back", None, Some(written));
    let mut outcome = Outcome::default();
    phase(disk, &plan, buffers, sources, partitions, progress, &mut outcome)?;
    total.verified_blocks = Some(written);
    total.reconnects += outcome.reconnects;
    total.outage = total.outage.max(outcome.outage);
    Ok(())
}

/// Runs one phase: threads are started, run, and joined.
fn phase(
    disk: &mut Disk,
    plan: &LoadPlan,
    buffers: &[Area],
    sources: Vec<Source>,
    partitions: &mut [Partition],
    progress: &mut dyn Progress,
    outcome: &mut Outcome,
) -> Result<()> {
    let (transport, memory, queues) = disk.split();
    let threads = plan.threads.clamp(1, queues.len());
    let shared = Shared::new(queues.len(), threads)?;
    let rings = queues.iter().map(|q| q.parts().clone()).collect();
    let (count, mut dealt) = (queues.len() as u64, (0..threads).map(|_| Vec::new()).collect::<Vec<_>>());
    for (i, (((queue, partition), source), data)) in
        queues.iter_mut().zip(partitions).zip(sources).zip(buffers).enumerate()
    {
        let i = i as u64;
        let quota = plan.ios.map_or(u64::MAX, |all| all / count + u64::from(i < all % count));
        let partition = plan.verify.then_some(partition);
        let share = Share { source, partition, quota };
        let lane = Lane::new(queue, &shared.gauges[i as usize], data.clone(), plan, share);
        dealt[i as usize % threads].push(lane);
    }
    let mut server_cpu = ServerCpu::default();
    match transport.kernel() {
        Some(_) => server_cpu.watch_vhost(),
        None => server_cpu.watch(plan.server_pid.or_else(|| transport.peer_pid())),
    }
    let start = Instant::now();
    let until = plan.runtime.map(|runtime| start + runtime);
    let mut watch = Watcher {
        transport,
        memory,
        rings,
        shared: &shared,
        plan,
        server_cpu: &mut server_cpu,
        progress,
        until,
        over: None,
        reconnects: 0,
        outage: Duration::ZERO,
    };
    let (result, lanes) = std::thread::scope(|scope| {
        let handles: Vec<_> = dealt
            .into_iter()
            .enumerate()
            .map(|(t, mut lanes)| {
                let shared = &shared;
                let cpu = (!plan.pin.is_empty()).then(|| plan.pin[t % plan.pin.len()]);
                scope.spawn(move || {
                    thread::run(&mut lanes, shared, plan.spin, cpu);
                    lanes
                })
            })
            .collect();
        let result = watch.run();
        let lanes: Vec<Lane<'_>> =
            handles.into_iter().flat_map(|h| h.join().expect("a load thread panicked")).collect();
        (result, lanes)
    });
    outcome.elapsed = start.elapsed();
    (outcome.reconnects, outcome.outage) = (watch.reconnects, watch.outage);
    outcome.server_cpu = server_cpu.sample();
    outcome.client_cpu = Duration::from_nanos(shared.cpu_ns.load(Ordering::Relaxed));
    for lane in lanes {
        let Counted { mut reads, mut writes, mut flushes, slow } = lane.counted();
        outcome.reads.add(&mut reads);
        outcome.writes.add(&mut writes);
        outcome.flushes.add(&mut flushes);
        outcome.slow.add(&slow);
    }
    result.and(shared.take_error().map_or(Ok(()), Err))
}
