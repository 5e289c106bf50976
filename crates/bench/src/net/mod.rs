//! A guest's driver of a network card over vhost-user: sends frames, takes them, or sends them back; and the host's end of
//! the tap behind the server, so that one command measures the whole way.
//!
//! [`run`] is called on the thread that owns the [`Card`]; it watches, as [`crate::load`] does, while load threads own the
//! queue pairs and far threads the packet sockets.

mod card;
mod far;
mod flows;
pub mod frame;
mod lane;
mod pace;
mod receive;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use self::card::Card;
pub use self::far::{Far, FarCounted};
pub use self::flows::{Flows, Tally};
use self::frame::{LEN_PLAIN, Sizes};
use self::lane::{Lane, Negotiated};
pub use self::report::Summary;
use crate::driver::{RingParts, feature};
use crate::error::{Result, fail};
use crate::load::thread::{self, Shared};
use crate::load::watch::Watch;
use crate::load::{self, Progress};
use crate::stats::ServerCpu;

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sends.
    Source,
    /// Takes.
    Sink,
    /// Sends back what it takes.
    Echo,
}

impl Mode {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Sink => "sink",
            Self::Echo => "echo",
        }
    }
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the guest does.
    pub mode: Mode,
    /// Queue pairs.
    pub pairs: u16,
    /// Descriptors a ring.
    pub queue_size: u16,
    /// Lengths of frames, of a source and of the far end.
    pub sizes: Sizes,
    /// Flows of a source, dealt to the pairs in turn; and of the far end.
    pub flows: u16,
    /// Frames a second of a source, over all pairs; `None`: as many as can be. Of the far end, if there is one that sends.
    pub rate: Option<f64>,
    /// Frames made visible at once; receive buffers given back at once.
    pub batch: u16,
    /// A frame may fill several receive buffers.
    pub merge: bool,
    /// Checksums, and frames longer than the MTU, are left to the device.
    pub offloads: bool,
    /// Packed rings.
    pub packed: bool,
    /// Take indirect descriptors if offered.
    pub indirect: bool,
    /// Take EVENT_IDX if offered.
    pub event_idx: bool,
    /// Check every byte of what is received.
    pub verify: bool,
    /// A sink sends one frame a pair at first, for switches to learn where it is.
    pub announce: bool,
    /// Threads; pairs are dealt to them in turn.
    pub threads: usize,
    /// How long.
    pub runtime: Option<Duration>,
    /// Frames that a source sends in all.
    pub frames: Option<u64>,
    /// Set by anybody: the end.
    pub stop: Option<Arc<AtomicBool>>,
    /// How long to look for completions before sleeping.
    pub spin: Duration,
    /// CPUs for the threads, in turn; those of the far end come last.
    pub pin: Vec<usize>,
    /// Between live figures.
    pub interval: Duration,
    /// The server's process, if the socket does not tell.
    pub server_pid: Option<u32>,
    /// How long to wait for a server that died.
    pub reconnect: Option<Duration>,
    /// A frame sent that is not done within this, while the server is there, is lost.
    pub stall: Duration,
    /// How long an answer of the server may take.
    pub timeout: Duration,
    /// The tap behind the server: its host's end is played, too.
    pub far: Option<Far>,
    /// A number that this run's frames bear.
    pub run: u16,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            mode: Mode::Source,
            pairs: 1,
            queue_size: 256,
            sizes: Sizes::Fixed(64),
            flows: 16,
            rate: None,
            batch: 32,
            merge: true,
            offloads: false,
            packed: false,
            indirect: true,
            event_idx: true,
            verify: false,
            announce: false,
            threads: usize::MAX,
            runtime: None,
            frames: None,
            stop: None,
            spin: Duration::ZERO,
            pin: Vec::new(),
            interval: Duration::from_secs(1),
            server_pid: None,
            reconnect: None,
            stall: Duration::from_secs(30),
            timeout: Duration::from_secs(10),
            far: None,
            run: std::process::id() as u16,
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// From the first frame to the last.
    pub elapsed: Duration,
    /// Frames that the guest sent and that the server gave back.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames of an echo that the transmit ring had no room for.
    pub no_room: u64,
    /// What the guest received.
    pub received: Tally,
    /// Times that the guest notified the server.
    pub kicks: u64,
    /// Times that the server notified the guest.
    pub calls: u64,
    /// CPU time of the load threads.
    pub client_cpu: Duration,
    /// CPU time of the server, if it can be known.
    pub server_cpu: Option<Duration>,
    /// What the far end did.
    pub far: Option<FarCounted>,
    /// How often the server died and came back.
    pub reconnects: u32,
    /// The longest time that it was away.
    pub outage: Duration,
}

impl Outcome {
    /// Frames that the server moved: those of the guest, both ways.
    pub fn frames(&self) -> u64 {
        self.sent + self.received.frames
    }

    /// What a run with --verify must not end with, in words; none if all is well.
    pub fn wrong(&self) -> Option<String> {
        let far = self.far.as_ref().and_then(|far| far.received.as_ref());
        for (end, tally) in [("the guest", Some(&self.received)), ("the far end", far)] {
            let Some(tally) = tally else { continue };
            // After its server's death a frame that was sent may be sent once more.
            let again = if self.reconnects == 0 { tally.twice + tally.late } else { 0 };
            let bad = tally.damaged + tally.wrong_checksums;
            if bad + again > 0 {
                let first =
                    tally.first_wrong.as_deref().unwrap_or("their order is not that of their numbers");
                return Some(format!(
                    "{end} received {} damaged frames, {} with wrong checksums, {} late and {} twice: {first}",
                    tally.damaged, tally.wrong_checksums, tally.late, tally.twice
                ));
            }
        }
        None
    }
}

/// Runs `plan` on `card`, which was connected by the same plan.
///
/// # Errors
/// The server went away for good, lies, or gives nothing back; the far end cannot be played.
pub fn run(card: &mut Card, plan: &Plan, progress: &mut dyn Progress) -> Result<Outcome> {
    frame::check_flows(plan.flows)?;
    if plan.sizes.max() > LEN_PLAIN && plan.offloads && !card.has(feature::NET_HOST_USO) {
        return Err(fail!(
            Usage,
            "the server does not offer VIRTIO_NET_F_HOST_USO: with --offloads, frames of up to {LEN_PLAIN} bytes"
        ));
    }
    let negotiated = Negotiated {
        merge: card.has(feature::NET_MRG_RXBUF),
        csum: card.has(feature::NET_CSUM),
        uso: card.has(feature::NET_HOST_USO),
    };
    let far = plan.far.as_ref().map(|far| far::Threads::open(far, plan)).transpose()?;
    let pairs = usize::from(plan.pairs);
    let threads = plan.threads.clamp(1, pairs);
    let shared = Shared::new(2 * pairs, threads)?;
    let flows = Flows::default();
    let watching = load::Plan {
        stop: plan.stop.clone(),
        interval: plan.interval,
        server_pid: plan.server_pid,
        reconnect: plan.reconnect,
        stall: plan.stall,
        unit: "frames",
        ..load::Plan::default()
    };
    progress.phase(plan.mode.name(), plan.runtime, plan.frames);
    let (transport, memory) = (&mut card.transport, &card.memory);
    let rings: Vec<RingParts> = card
        .pairs
        .iter()
        .flat_map(|pair| [pair.rx.queue.parts().clone(), pair.tx.queue.parts().clone()])
        .collect();
    let mut dealt: Vec<_> = (0..threads).map(|_| Vec::new()).collect();
    let sources = plan.pairs.min(plan.flows);
    for (k, pair) in (0..plan.pairs).zip(&mut card.pairs) {
        let quota = plan.frames.map_or(u64::MAX, |all| {
            all / u64::from(sources) + u64::from(u64::from(k) < all % u64::from(sources))
        });
        let gauges = &shared.gauges[2 * usize::from(k)..2 * usize::from(k) + 2];
        let lane = Lane::new(plan, k, pair, gauges, &flows, negotiated, quota);
        dealt[usize::from(k) % threads].push(lane);
    }
    let mut server_cpu = ServerCpu::default();
    server_cpu.watch(plan.server_pid.or_else(|| transport.peer_pid()));
    let start = Instant::now();
    let mut watch = Watch {
        transport,
        memory,
        rings,
        shared: &shared,
        plan: &watching,
        server_cpu: &mut server_cpu,
        progress,
        until: plan.runtime.map(|runtime| start + runtime),
        over: None,
        reconnects: 0,
        outage: Duration::ZERO,
    };
    let (result, lanes, measured, far) = std::thread::scope(|scope| {
        let running = far.as_ref().map(|far| far.start(scope));
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
        // The far end waits for what is still on its way; that is no part of what is measured.
        let measured = (start.elapsed(), watch.server_cpu.sample());
        (result, lanes, measured, running.map(far::Running::end))
    });
    let (elapsed, spent) = measured;
    let mut outcome = Outcome {
        elapsed,
        reconnects: watch.reconnects,
        outage: watch.outage,
        server_cpu: spent,
        client_cpu: Duration::from_nanos(shared.cpu_ns.load(Ordering::Relaxed)),
        ..Outcome::default()
    };
    for lane in lanes {
        let counted = lane.counted();
        outcome.sent += counted.sent;
        outcome.sent_bytes += counted.sent_bytes;
        outcome.no_room += counted.no_room;
        outcome.kicks += counted.kicks;
        outcome.calls += counted.calls;
        outcome.received.add(&counted.received);
    }
    result?;
    if let Some(error) = shared.take_error() {
        return Err(error);
    }
    outcome.far = far.transpose()?;
    Ok(outcome)
}
