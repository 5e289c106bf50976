//! Measures a tap alone: how many frames its queues give to threads that only read, and take from
//! threads that only write. Servers of taps are compared with this. It is also the measurement with
//! which several queues were added to tuntap.
//!
//! It runs in its own network namespace ([`vshunt_guest::link::own_namespace`]), on its own
//! threads.

mod table;

use std::fs::File;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

pub use self::table::{Figure, Row, Table};
use crate::report::Machine;
use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;
use vshunt_guest::link::{
    Outbox, PacketSocket, VNET_HEADER, bring_up, disable_ipv6, open_tap, steer_to_first,
};
use vshunt_guest::load::pin;
use vshunt_guest::net::frame::{Direction, Mark, MarkedFrame};
use vshunt_guest::stats::thread_cpu;

/// The tap's name. The namespace has no other taps.
const NAME: &str = "vsbench0";
/// Names of the rows: frames out of the queues, frames into them, and the same with a steering
/// program. Without a program, the kernel computes a hash for each written frame as soon as the tap
/// has several queues.
const READ: &str = "read";
const WRITE: &str = "write";
const STEERED: &str = "write, steered";
/// Most queues of one tap.
pub const QUEUES_MAX: u16 = 256;
/// Frames of one system call of a sender.
const BATCH: usize = 64;
/// Number of frames between checks of the clock or the phase.
const LOOK_EVERY: u32 = 64;
/// Load that is not counted, because memory is touched for the first time and flows are assigned to
/// queues.
const WARM_UP: Duration = Duration::from_millis(300);
/// Longest sleep of a reader without a frame.
const SLEEP_NS: i64 = 20_000_000;

/// The parameters of the measurement.
#[derive(Clone, Debug)]
pub struct Request {
    /// Numbers of queues, with one thread for each queue.
    pub queues: Vec<u16>,
    /// Whether to measure frames out of the tap's queues.
    pub read: bool,
    /// Whether to measure frames into the tap's queues: as it is, and with a steering program.
    pub write: bool,
    /// Bytes of a frame.
    pub size: usize,
    /// Number of flows of all senders.
    pub flows: u16,
    /// Threads that send to the tap. `None`: the CPUs that the most queues leave free, and at least
    /// one.
    pub senders: Option<u16>,
    /// Length of each measurement.
    pub runtime: Duration,
    /// CPUs for the threads of the queues, round robin, then for the senders.
    pub pin: Vec<usize>,
}

/// Runs all requested measurements, and shows the progress on stderr.
///
/// # Errors
/// The process is not root, or the kernel has no taps.
pub fn measure(request: &Request) -> Result<Table> {
    if let Some(bad) = request.queues.iter().find(|&&n| n == 0 || n > QUEUES_MAX) {
        return Err(fail!(Usage, "--queues {bad}: a tap has 1 to {QUEUES_MAX}"));
    }
    let machine = Machine::here();
    let most = request.queues.iter().copied().max().unwrap_or(1);
    let left = machine.cpus.saturating_sub(usize::from(most)).clamp(1, 64) as u16;
    let senders = request.senders.unwrap_or(left).clamp(1, request.flows);
    let mut rows = Vec::new();
    for (name, wanted, one) in [
        (READ, request.read, read as fn(&Request, u16, u16) -> _),
        (WRITE, request.write, |request, queues, _| write(request, queues, false)),
        (STEERED, request.write, |request, queues, _| write(request, queues, true)),
    ] {
        if !wanted {
            continue;
        }
        let mut figures: Vec<Figure> = Vec::new();
        for &queues in &request.queues {
            eprint!("{name}, {queues} queues: ");
            let figure: Figure = match one(request, queues, senders) {
                // Loading programs needs more capabilities than taps do.
                Err(e) if name == STEERED => {
                    eprintln!("left out: {e}");
                    break;
                }
                other => other.inspect_err(|_| eprintln!("failed"))?,
            };
            eprintln!("{:.0} thousand frames/s", figure.kpps);
            figures.push(figure);
        }
        if !figures.is_empty() {
            rows.push(Row { what: name, figures });
        }
    }
    let seconds = request.runtime.as_secs_f64();
    let (size, flows) = (request.size, request.flows);
    Ok(Table { machine, size, flows, senders, seconds, rows })
}

/// The current phase of all threads.
struct Phase(AtomicU8);

const WARMING: u8 = 0;
const MEASURING: u8 = 1;
const OVER: u8 = 2;

impl Phase {
    fn now(&self) -> u8 {
        self.0.load(Ordering::Acquire)
    }
}

/// Counts a thread's frames and CPU time while it is measured.
#[derive(Default)]
struct Meter {
    frames: u64,
    began: Option<(u64, Duration)>,
}

impl Meter {
    /// Reads the phase. Returns true if it is over.
    fn look(&mut self, phase: &Phase) -> bool {
        let now = phase.now();
        if now == MEASURING && self.began.is_none() {
            self.began = Some((self.frames, thread_cpu()));
        }
        now == OVER
    }

    /// Returns the frames and the CPU time since the start of the measurement.
    fn counted(&self) -> (u64, Duration) {
        let (frames, cpu) = self.began.unwrap_or((self.frames, thread_cpu()));
        (self.frames - frames, thread_cpu().saturating_sub(cpu))
    }
}

type Counted = (u64, Duration);

fn cpu(request: &Request, at: usize) -> Option<usize> {
    (!request.pin.is_empty()).then(|| request.pin[at % request.pin.len()])
}

fn tap(queues: u16) -> Result<Vec<File>> {
    let files = open_tap(NAME, queues)?;
    disable_ipv6(NAME);
    bring_up(NAME)?;
    Ok(files)
}

/// Lets the threads of a measurement run for their time. Returns the measured seconds.
fn time(phase: &Phase, runtime: Duration) -> f64 {
    std::thread::sleep(WARM_UP);
    phase.0.store(MEASURING, Ordering::Release);
    let began = Instant::now();
    std::thread::sleep(runtime);
    phase.0.store(OVER, Ordering::Release);
    began.elapsed().as_secs_f64()
}

fn join(threads: Vec<ScopedJoinHandle<'_, Result<Counted>>>) -> Result<Counted> {
    let mut sum = (0, Duration::ZERO);
    for thread in threads {
        let (frames, cpu) = thread.join().expect("a measuring thread panicked")?;
        sum = (sum.0 + frames, sum.1 + cpu);
    }
    Ok(sum)
}

/// Senders send frames into the tap as fast as possible, and one thread for each queue reads.
fn read(request: &Request, queues: u16, senders: u16) -> Result<Figure> {
    let files = tap(queues)?;
    let sockets: Vec<_> = (0..senders)
        .map(|_| {
            let socket = PacketSocket::open(NAME, 0)?;
            socket.bypass_qdisc()?;
            Ok(socket)
        })
        .collect::<Result<_>>()?;
    let phase = Phase(AtomicU8::new(WARMING));
    let (seconds, received, sent) = std::thread::scope(|scope| {
        let phase = &phase;
        let readers = files.iter().enumerate().map(|(at, file)| {
            scope.spawn(move || {
                pin(cpu(request, at))?;
                read_queue(file, request.size, phase)
            })
        });
        let readers: Vec<_> = readers.collect();
        let senders = sockets.iter().enumerate().map(|(t, socket)| {
            scope.spawn(move || {
                pin(cpu(request, usize::from(queues) + t))?;
                send(socket, request, t, usize::from(senders), phase)
            })
        });
        let senders: Vec<_> = senders.collect();
        let seconds = time(phase, request.runtime);
        (seconds, join(readers), join(senders))
    });
    let ((frames, cpu), sent) = (received?, sent?);
    Ok(Figure::new(queues, frames, seconds, cpu, Some(sent.0)))
}

/// Reads frames in a simple loop, one for each call.
fn read_queue(file: &File, size: usize, phase: &Phase) -> Result<Counted> {
    let mut meter = Meter::default();
    let mut bytes = vec![0; VNET_HEADER + size.max(2048)];
    while !meter.look(phase) {
        for _ in 0..LOOK_EVERY {
            match rustix::io::read(file, &mut bytes[..]) {
                Ok(n) => meter.frames += u64::from(n == VNET_HEADER + size),
                Err(Errno::AGAIN) => {
                    let limit = Timespec { tv_sec: 0, tv_nsec: SLEEP_NS };
                    let _ = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&limit));
                    break;
                }
                Err(e) => return Err(Error::with(Kind::System, "reading from the tap failed", e)),
            }
        }
    }
    Ok(meter.counted())
}

/// Sends its part of the flows. Returns the frames that the tap took.
fn send(
    socket: &PacketSocket,
    request: &Request,
    t: usize,
    senders: usize,
    phase: &Phase,
) -> Result<Counted> {
    let mut meter = Meter::default();
    let mine: Vec<u16> = (0..request.flows).filter(|flow| usize::from(*flow) % senders == t).collect();
    // Made once, so that the measurement does not include the making of frames.
    let mut outboxes: Vec<_> =
        (0..mine.len().div_ceil(BATCH)).map(|_| Outbox::new(BATCH, request.size)).collect();
    for at in 0..outboxes.len() * BATCH {
        let mark = Mark { run: 0, flow: mine[at % mine.len()], number: 0 };
        let bytes = outboxes[at / BATCH].frame(at % BATCH, request.size);
        MarkedFrame::new(Direction::In, mark, request.size, false).write(bytes);
    }
    while !meter.look(phase) {
        for outbox in &mut outboxes {
            meter.frames += outbox.send(socket, BATCH)?.0;
        }
    }
    Ok(meter.counted())
}

/// One thread for each queue writes frames into the tap. `steered`: the tap has a steering program.
fn write(request: &Request, queues: u16, steered: bool) -> Result<Figure> {
    let files = tap(queues)?;
    if steered {
        files.first().map_or(Ok(()), steer_to_first)?;
    }
    let phase = Phase(AtomicU8::new(WARMING));
    let (seconds, written) = std::thread::scope(|scope| {
        let phase = &phase;
        let writers = files.iter().enumerate().map(|(at, file)| {
            scope.spawn(move || {
                pin(cpu(request, at))?;
                write_queue(file, request.size, at as u16, phase)
            })
        });
        let writers: Vec<_> = writers.collect();
        (time(phase, request.runtime), join(writers))
    });
    let (frames, cpu) = written?;
    Ok(Figure::new(queues, frames, seconds, cpu, None))
}

/// Writes frames in a simple loop, one for each call.
fn write_queue(file: &File, size: usize, flow: u16, phase: &Phase) -> Result<Counted> {
    let mut meter = Meter::default();
    let mut bytes = vec![0; VNET_HEADER + size];
    let mark = Mark { run: 0, flow, number: 0 };
    MarkedFrame::new(Direction::Out, mark, size, false).write(&mut bytes[VNET_HEADER..]);
    while !meter.look(phase) {
        for _ in 0..LOOK_EVERY {
            rustix::io::write(file, &bytes)
                .map_err(|e| Error::with(Kind::System, "writing into the tap failed", e))?;
            meter.frames += 1;
        }
    }
    Ok(meter.counted())
}

/// A figure of the original table.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Seed {
    /// Number of queues and threads.
    pub(crate) queues: u16,
    /// Thousand frames per second.
    pub(crate) kpps: u32,
    /// Percent more than with one queue.
    pub(crate) gain_percent: u32,
}

/// The original measurement of several queues in the kernel's tuntap: pktgen into the tap, and a
/// program that reads.
pub(crate) const SEED: [Seed; 4] = [
    Seed { queues: 1, kpps: 818, gain_percent: 0 },
    Seed { queues: 2, kpps: 1926, gain_percent: 135 },
    Seed { queues: 3, kpps: 2642, gain_percent: 223 },
    Seed { queues: 4, kpps: 3536, gain_percent: 332 },
];
