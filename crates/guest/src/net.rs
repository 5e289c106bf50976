//! A guest's driver of a network device over vhost-user: it sends, receives, or sends back frames.
//! It can also act as the host's end of the tap behind the server, so that one command measures the
//! whole path.
//!
//! [`run`] is called on the thread that owns the [`NetDevice`]. It watches, as [`crate::load`]
//! does, while load threads own the queue pairs and peer threads own the packet sockets.

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
use crate::load::watch::Watcher;
use crate::load::{self, Progress};
use crate::stats::ServerCpu;

/// The role of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sends frames.
    Source,
    /// Receives frames.
    Sink,
    /// Sends back the frames that it receives.
    Echo,
}

impl Mode {
    /// Returns the name as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Sink => "sink",
            Self::Echo => "echo",
        }
    }
}

/// The parameters of [`run`].
#[derive(Clone, Debug)]
pub struct NetPlan {
    /// The role of the guest.
    pub mode: Mode,
    /// Number of queue pairs.
    pub pairs: u16,
    /// Descriptors of each ring.
    pub queue_size: u16,
    /// Lengths of frames, of a source and of the peer end.
    pub sizes: Sizes,
    /// Flows of a source, assigned to the pairs round robin, and flows of the peer end.
    pub flows: u16,
    /// Frames per second of a source over all pairs, or of a peer end that sends. `None`: as many
    /// as possible.
    pub rate: Option<f64>,
    /// Frames that are published together, and receive buffers that are returned together.
    pub batch: u16,
    /// Whether a frame may fill several receive buffers.
    pub merge: bool,
    /// Whether the device computes checksums and cuts frames longer than the MTU.
    pub offloads: bool,
    /// Whether to use packed rings.
    pub packed: bool,
    /// Takes indirect descriptors if they are offered.
    pub indirect: bool,
    /// Takes EVENT_IDX if it is offered.
    pub event_idx: bool,
    /// Checks every byte of received frames.
    pub verify: bool,
    /// A sink first sends one frame on each pair, so that switches learn its address.
    pub announce: bool,
    /// Number of threads. Pairs are assigned to them round robin.
    pub threads: usize,
    /// Length of the run.
    pub runtime: Option<Duration>,
    /// Number of frames that a source sends.
    pub frames: Option<u64>,
    /// Any thread may set it to end the run.
    pub stop: Option<Arc<AtomicBool>>,
    /// Time to poll for completions before sleeping.
    pub spin: Duration,
    /// CPUs for the threads, round robin. Those of the peer end come last.
    pub pin: Vec<usize>,
    /// Interval between live figures.
    pub interval: Duration,
    /// The server's process, if the socket does not report it.
    pub server_pid: Option<u32>,
    /// Time limit for the return of a server that died.
    pub reconnect: Option<Duration>,
    /// A sent frame that is not completed within this, while the server is there, counts as lost.
    pub stall: Duration,
    /// Time limit of the server's answers.
    pub timeout: Duration,
    /// The tap behind the server, if this process acts as its host's end.
    pub peer: Option<Peer>,
    /// A number of this run, which its frames contain.
    pub run: u16,
}

impl Default for NetPlan {
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

/// The results of [`run`].
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Time from the first frame to the last.
    pub elapsed: Duration,
    /// Frames that the guest sent and the server completed.
    pub sent: u64,
    /// Bytes of the sent frames.
    pub sent_bytes: u64,
    /// Frames of an echo that the transmit ring had no room for.
    pub no_room: u64,
    /// Frames that the guest received.
    pub received: Tally,
    /// Notifications by the guest.
    pub kicks: u64,
    /// Notifications by the server.
    pub calls: u64,
    /// CPU time of the load threads.
    pub client_cpu: Duration,
    /// CPU time of the server, if it is known.
    pub server_cpu: Option<Duration>,
    /// Counts of the peer end.
    pub peer: Option<PeerCounted>,
    /// Number of times that the server died and came back.
    pub reconnects: u32,
    /// The longest time without a server.
    pub outage: Duration,
}

impl Outcome {
    /// Returns the frames of the guest that the server moved, in both directions.
    pub fn frames(&self) -> u64 {
        self.sent + self.received.frames
    }

    /// Returns the error of a run with --verify, or none.
    pub fn wrong(&self) -> Option<String> {
        let peer = self.peer.as_ref().and_then(|peer| peer.received.as_ref());
        for (end, tally) in [("the guest", Some(&self.received)), ("the peer end", peer)] {
            let Some(tally) = tally else { continue };
            // After the death of its server, a sent frame may be sent again.
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

/// Distributes the pairs over threads, in turn. Each gets its part of the frames.
fn deal<'a>(
    plan: &'a NetPlan,
    threads: usize,
    pairs: &'a mut [device::Pair],
    shared: &'a Shared,
    flows: &'a Flows,
    negotiated: Negotiated,
) -> Vec<Vec<Lane<'a>>> {
    let mut dealt: Vec<_> = (0..threads).map(|_| Vec::new()).collect();
    let sources = u64::from(plan.pairs.min(plan.flows));
    for (k, pair) in (0..plan.pairs).zip(pairs) {
        let quota =
            plan.frames.map_or(u64::MAX, |all| all / sources + u64::from(u64::from(k) < all % sources));
        let gauges = &shared.gauges[2 * usize::from(k)..2 * usize::from(k) + 2];
        let lane = Lane::new(plan, k, pair, gauges, flows, negotiated, quota);
        dealt[usize::from(k) % threads].push(lane);
    }
    dealt
}

impl Outcome {
    /// Adds what one pair has sent and received.
    fn add(&mut self, lane: Lane<'_>) {
        let counted = lane.counted();
        self.sent += counted.sent;
        self.sent_bytes += counted.sent_bytes;
        self.no_room += counted.no_room;
        self.kicks += counted.kicks;
        self.calls += counted.calls;
        self.received.add(&counted.received);
    }
}

/// Runs `plan` on `device`, which was connected with the same plan.
///
/// # Errors
/// The server died and did not come back, made an invalid completion, or completes nothing. The
/// peer end cannot be set up.
pub fn run(device: &mut NetDevice, plan: &NetPlan, progress: &mut dyn Progress) -> Result<Outcome> {
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
    let watching = load::LoadPlan {
        stop: plan.stop.clone(),
        interval: plan.interval,
        server_pid: plan.server_pid,
        reconnect: plan.reconnect,
        stall: plan.stall,
        unit: "frames",
        ..load::LoadPlan::default()
    };
    progress.phase(plan.mode.name(), plan.runtime, plan.frames);
    let (transport, memory) = (&mut device.transport, &device.memory);
    let rings: Vec<RingParts> = device
        .pairs
        .iter()
        .flat_map(|pair| [pair.rx.queue.parts().clone(), pair.tx.queue.parts().clone()])
        .collect();
    let dealt = deal(plan, threads, &mut device.pairs, &shared, &flows, negotiated);
    let mut server_cpu = ServerCpu::default();
    server_cpu.watch(plan.server_pid.or_else(|| transport.peer_pid()));
    let start = Instant::now();
    let mut watch = Watcher {
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
        // The peer end waits for the last frames, and this wait is not measured.
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
    lanes.into_iter().for_each(|lane| outcome.add(lane));
    result?;
    if let Some(error) = shared.take_error() {
        return Err(error);
    }
    outcome.peer = peer.transpose()?;
    Ok(outcome)
}
