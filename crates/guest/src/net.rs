//! A guest's driver of a network device over vhost-user: sends frames, takes them, or sends them back; and the host's end of
//! the tap behind the server, so that one command measures the whole way.
//!
//! [`run`] is called on the thread that owns the [`NetDevice`]; it watches, as [`crate::load`] does, while load threads own the
//! queue pairs and peer threads the packet sockets.

mod device;
mod flows;
pub mod frame;
mod lane;
mod peer;
mod rate;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use self::device::NetDevice;
pub use self::flows::{Flows, Tally};
use self::frame::{LEN_PLAIN, Sizes};
use self::lane::{Lane, Negotiated};
pub use self::peer::{Peer, PeerCounted};
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
    /// Lengths of frames, of a source and of the peer end.
    pub sizes: Sizes,
    /// Flows of a source, dealt to the pairs in turn; and of the peer end.
    pub flows: u16,
    /// Frames a second of a source, over all pairs; `None`: as many as can be. Of the peer end, if there is one that sends.
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
    /// CPUs for the threads, in turn; those of the peer end come last.
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
    pub peer: Option<Peer>,
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
            peer: None,
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
    /// What the peer end did.
    pub peer: Option<PeerCounted>,
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
        let peer = self.peer.as_ref().and_then(|peer| peer.received.as_ref());
        for (end, tally) in [("the guest", Some(&self.received)), ("the peer end", peer)] {
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

/// Runs `plan` on `device`, which was connected by the same plan.
///
/// # Errors
/// The server went away for good, lies, or gives nothing back; the peer end cannot be played.
pub fn run(device: &mut NetDevice, plan: &Plan, progress: &mut dyn Progress) -> Result<Outcome> {
    frame::check_flows(plan.flows)?;
    if plan.sizes.max() > LEN_PLAIN && plan.offloads && !device.has(feature::NET_HOST_USO) {
        return Err(fail!(
            Usage,
            "the server does not offer VIRTIO_NET_F_HOST_USO: with --offloads, frames of up to {LEN_PLAIN} bytes"
        ));
    }
    let negotiated = Negotiated {
        merge: device.has(feature::NET_MRG_RXBUF),
        csum: device.has(feature::NET_CSUM),
        uso: device.has(feature::NET_HOST_USO),
    };
    let peer = plan.peer.as_ref().map(|peer| peer::Threads::open(peer, plan)).transpose()?;
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
    let (transport, memory) = (&mut device.transport, &device.memory);
    let rings: Vec<RingParts> = device
        .pairs
        .iter()
        .flat_map(|pair| [pair.rx.queue.parts().clone(), pair.tx.queue.parts().clone()])
        .collect();
    let mut dealt: Vec<_> = (0..threads).map(|_| Vec::new()).collect();
    let sources = plan.pairs.min(plan.flows);
    for (k, pair) in (0..plan.pairs).zip(&mut device.pairs) {
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
    let (result, lanes, measured, peer) = std::thread::scope(|scope| {
        let running = peer.as_ref().map(|peer| peer.start(scope));
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
        // The peer end waits for what is still on its way; that is no part of what is measured.
        let measured = (start.elapsed(), watch.server_cpu.sample());
        (result, lanes, measured, running.map(peer::Running::end))
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
    outcome.peer = peer.transpose()?;
    Ok(outcome)
}
