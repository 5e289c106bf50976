//! The other end of the tap behind the server: it sends frames to the guest, and counts those from
//! the guest.
//!
//! It has its own threads, which are joined before the run ends. The interface's counters count
//! received frames, at no cost for the server. With --verify a packet socket receives them, and the
//! server's writes then copy each frame into it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::flows::{Flows, Tally};
use super::frame::{self, CSUM_OFFSET, CSUM_START, Direction, LEN_PLAIN, Mark, MarkedFrame, SEGMENT};
use super::{Mode, NetPlan};
use crate::error::Result;
use crate::link::{self, Inbox, LinkCounters, Outbox, PacketSocket};
use crate::load::thread::pin;
use crate::stats::{now_ns, thread_cpu};

/// IPv4.
const ETHERTYPE: u16 = 0x0800;
/// Frames of one system call.
const BATCH: usize = 64;
/// Bytes of the optional header before each frame of a packet socket: virtio's, without the number
/// of buffers.
const HEADER: usize = 10;
/// Longest sleep of a counting thread between checks for the end.
const LOOK: Duration = Duration::from_millis(50);
/// Time to wait for the last frames at the end.
const LINGER: Duration = Duration::from_millis(200);

/// The parameters of the peer end.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The tap's name, in the network namespace of this process.
    pub ifname: String,
    /// Number of sending threads, each with its part of the flows.
    pub senders: u16,
}

/// Counts of the peer end.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PeerCounted {
    /// Frames that the tap took.
    pub sent: u64,
    /// Frames for which the tap's queue had no room.
    pub refused: u64,
    /// Frames that left the tap, from the interface's counters.
    pub arrived: u64,
    /// Bytes of these frames.
    pub arrived_bytes: u64,
    /// Frames that the tap dropped before its queues, from the interface's counters.
    pub tap_dropped: u64,
    /// Counts of the packet socket. `None` without --verify.
    pub received: Option<Tally>,
    /// Frames for which the packet socket had no room. They count as lost, but are not.
    pub socket_dropped: u64,
    /// CPU time of the threads in seconds.
    pub cpu_s: f64,
}

/// What the threads work with.
pub(super) struct Threads<'a> {
    peer: &'a Peer,
    plan: &'a NetPlan,
    senders: Vec<PacketSocket>,
    listener: Option<PacketSocket>,
    before: LinkCounters,
    stop: AtomicBool,
    cpu_ns: AtomicU64,
}

/// The running threads.
pub(super) struct Running<'scope, 'a> {
    threads: &'scope Threads<'a>,
    senders: Vec<ScopedJoinHandle<'scope, Result<(u64, u64)>>>,
    listener: Option<ScopedJoinHandle<'scope, Result<(Tally, u64)>>>,
}

impl<'a> Threads<'a> {
    /// Opens the sockets and sets the interface up.
    pub(super) fn open(peer: &'a Peer, plan: &'a NetPlan) -> Result<Self> {
        let sends = plan.mode != Mode::Source;
        let count = if sends { peer.senders.clamp(1, plan.flows) } else { 0 };
        let sender = |_| {
            let socket = PacketSocket::open(&peer.ifname, 0)?;
            socket.bypass_qdisc()?;
            if plan.offloads {
                socket.with_header()?;
            }
            Ok(socket)
        };
        let hears = plan.verify && plan.mode != Mode::Sink;
        let listener = hears.then(|| {
            let socket = PacketSocket::open(&peer.ifname, ETHERTYPE)?;
            socket.with_header()?;
            Ok(socket)
        });
        link::bring_up(&peer.ifname)?;
        Ok(Self {
            peer,
            plan,
            senders: (0..count).map(sender).collect::<Result<_>>()?,
            listener: listener.transpose()?,
            before: link::counters(&peer.ifname)?,
            stop: AtomicBool::new(false),
            cpu_ns: AtomicU64::new(0),
        })
    }

    pub(super) fn start<'scope, 'env>(
        &'scope self,
        scope: &'scope Scope<'scope, 'env>,
    ) -> Running<'scope, 'a> {
        let pin = &self.plan.pin;
        let first = self.plan.threads.clamp(1, usize::from(self.plan.pairs));
        let cpu = move |t: usize| (!pin.is_empty()).then(|| pin[(first + t) % pin.len()]);
        let listener = self
            .listener
            .as_ref()
            .map(|socket| scope.spawn(move || self.timed(cpu(self.senders.len()), || self.listen(socket))));
        let sender = |(t, socket): (usize, &'scope PacketSocket)| {
            scope.spawn(move || self.timed(cpu(t), || self.send(t, socket)))
        };
        let senders = self.senders.iter().enumerate().map(sender).collect();
        Running { threads: self, senders, listener }
    }

    fn timed<T>(&self, cpu: Option<usize>, work: impl FnOnce() -> Result<T>) -> Result<T> {
        pin(cpu)?;
        let before = thread_cpu();
        let result = work();
        let spent = thread_cpu().saturating_sub(before).as_nanos() as u64;
        self.cpu_ns.fetch_add(spent, Ordering::Relaxed);
        result
    }

    /// Sends the flows of sender `t` round robin until the end. Returns how many frames were taken,
    /// and how many not.
    fn send(&self, t: usize, socket: &PacketSocket) -> Result<(u64, u64)> {
        let plan = self.plan;
        let mine = (0..plan.flows).filter(|flow| usize::from(*flow) % self.senders.len() == t);
        let mut flows: Vec<(u16, u64)> = mine.map(|flow| (flow, 0)).collect();
        let header = if plan.offloads { HEADER } else { 0 };
        let mut outbox = Outbox::new(BATCH, header + plan.sizes.max());
        let (mut taken, mut refused, mut next_flow) = (0, 0, 0);
        let rate = plan.rate.map(|rate| rate * flows.len() as f64 / f64::from(plan.flows));
        let began = now_ns();
        while !self.stop.load(Ordering::Relaxed) {
            let mut count = BATCH;
            if let Some(rate) = rate {
                let due = (now_ns() - began) as f64 * rate / 1e9 - (taken + refused) as f64;
                count = (due as usize).min(BATCH);
                if count == 0 {
                    std::thread::sleep(Duration::from_micros(200).max(Duration::from_secs_f64(1.0 / rate)));
                    continue;
                }
            }
            for at in 0..count {
                let (flow, number) = &mut flows[next_flow];
                let len = plan.sizes.len(*number);
                let mark = Mark { run: plan.run, flow: *flow, number: *number };
                let bytes = outbox.frame(at, header + len);
                if plan.offloads {
                    bytes[..HEADER].copy_from_slice(&sent_header(len));
                }
                MarkedFrame::new(Direction::In, mark, len, plan.offloads).write(&mut bytes[header..]);
                *number += 1;
                next_flow = (next_flow + 1) % flows.len();
            }
            let (yes, no) = outbox.send(socket, count)?;
            (taken, refused) = (taken + yes, refused + no);
        }
        Ok((taken, refused))
    }

    /// Checks received frames until the end, and a short time longer. Returns the counts, and the
    /// frames that the socket dropped.
    fn listen(&self, socket: &PacketSocket) -> Result<(Tally, u64)> {
        let (flows, mut tally) = (Flows::default(), Tally::default());
        let mut inbox = Inbox::new(BATCH, HEADER + frame::LEN_MAX);
        let mut quiet_since = Instant::now();
        loop {
            if inbox.recv(socket)? == 0 {
                if self.stop.load(Ordering::Relaxed) && quiet_since.elapsed() > LINGER {
                    return Ok((tally, socket.dropped()?));
                }
                socket.wait(LOOK);
                continue;
            }
            quiet_since = Instant::now();
            for bytes in inbox.frames().filter(|bytes| bytes.len() > HEADER) {
                let (header, frame) = bytes.split_at(HEADER);
                let Some(mark) = frame::read_mark(frame) else {
                    tally.other += 1;
                    continue;
                };
                tally.frames += 1;
                tally.bytes += frame.len() as u64;
                flows.note(mark, 0, &mut tally);
                if let Err(wrong) = frame::check(frame, mark, header[0] & 1 != 0) {
                    tally.note_wrong(mark, frame.len(), 0, wrong);
                }
            }
        }
    }
}

impl Running<'_, '_> {
    /// Ends the threads. Returns their counts.
    pub(super) fn end(self) -> Result<PeerCounted> {
        let threads = self.threads;
        threads.stop.store(true, Ordering::Relaxed);
        let mut counted = PeerCounted::default();
        for sender in self.senders {
            let (taken, refused) = sender.join().expect("a sending thread panicked")?;
            counted.sent += taken;
            counted.refused += refused;
        }
        if let Some(listener) = self.listener {
            let (tally, dropped) = listener.join().expect("the listening thread panicked")?;
            (counted.received, counted.socket_dropped) = (Some(tally), dropped);
        }
        let (before, after) = (threads.before, link::counters(&threads.peer.ifname)?);
        counted.arrived = after.received - before.received;
        counted.arrived_bytes = after.received_bytes - before.received_bytes;
        counted.tap_dropped = after.sent_dropped - before.sent_dropped;
        counted.cpu_s = threads.cpu_ns.load(Ordering::Relaxed) as f64 / 1e9;
        Ok(counted)
    }
}

/// Returns the header of a frame. The receiver completes the checksum, and the segments if the
/// frame is long.
fn sent_header(len: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = 1;
    if len > LEN_PLAIN {
        header[1] = 5;
        header[2..4].copy_from_slice(&42u16.to_le_bytes());
        header[4..6].copy_from_slice(&SEGMENT.to_le_bytes());
    }
    header[6..8].copy_from_slice(&CSUM_START.to_le_bytes());
    header[8..10].copy_from_slice(&CSUM_OFFSET.to_le_bytes());
    header
}
