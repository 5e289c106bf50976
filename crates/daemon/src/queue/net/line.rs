//! One virtqueue of a card: what receiving and sending have in common.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::GuestMemory;
use virtio::ring::{Chain, DeviceRing, Head, Seg, UsedLog};
use vshunt_engine::EventFd;
use vshunt_engine::{PollEvent, PollState};
use vshunt_engine::{QueueStats, State, Token, Uring};
use vshunt_types::spec::DropReason;
use vshunt_virtqueue::RingParts;

use super::counters::NetStats;

/// See the module. Belongs to the worker that has the queue.
pub(super) struct Line {
    pub(super) vring: DeviceRing,
    mem: Arc<GuestMemory>,
    /// The request popped last.
    pub(super) chain: Chain,
    /// Nothing more is taken from it.
    pub(super) broken: bool,
    /// What a former daemon left in flight, oldest last.
    pub(super) replays: Vec<Replay>,
    staged: bool,
    /// Since the worker asked last.
    notified: bool,
    listen: PollState,
    kick: Arc<OwnedFd>,
    call: Option<Arc<EventFd>>,
    log: Option<Arc<DirtyLog>>,
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
    on_broken: Box<dyn Fn(&str) + Send>,
}

impl Line {
    pub(super) fn new(parts: RingParts, net: Arc<NetStats>) -> Self {
        let mut replays = parts.replays;
        replays.reverse();
        Self {
            vring: parts.vring,
            mem: parts.mem,
            chain: Chain::new(),
            broken: false,
            replays,
            staged: false,
            notified: false,
            listen: PollState::Off,
            kick: parts.kick,
            call: parts.call,
            log: parts.log,
            stats: parts.stats,
            net,
            on_broken: parts.on_broken,
        }
    }

    /// Begins to listen for kicks, with `token`.
    pub(super) fn arm(&mut self, uring: &mut Uring, token: Token) {
        self.listen.begin(uring, self.kick.as_raw_fd(), token);
    }

    pub(super) fn disarm(&mut self, uring: &mut Uring, token: Token) {
        self.listen.end(uring, token);
    }

    /// Whether nothing of it is on a ring.
    pub(super) fn at_rest(&self) -> bool {
        self.listen == PollState::Off
    }

    /// News of the kicks' poll.
    pub(super) fn kicked(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) {
        QueueStats::add(&self.stats.kicks, 1);
        match self.listen.on_event(result, more) {
            PollEvent::Nothing => {}
            PollEvent::BeginAgain => self.arm(uring, token),
            PollEvent::Useless => self.break_off("its kick descriptor cannot be waited for"),
        }
    }

    /// The guest broke the ring, or its network is gone: nothing more is taken, the front-end is told, other rings go on.
    #[cold]
    pub(super) fn break_off(&mut self, reason: &str) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(reason);
    }

    /// Whether a request can be taken.
    #[inline]
    pub(super) fn has_avail(&self) -> bool {
        !self.broken && (self.vring.has_avail() || !self.replays.is_empty())
    }

    /// Takes the next request into [`chain`](Self::chain), one that a former daemon had taken first.
    #[inline]
    pub(super) fn pop(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let got = match self.replays.pop() {
            Some(replay) => self.vring.replay(&self.mem, &replay, &mut self.chain).map(|()| true),
            None => self.vring.pop(&self.mem, &mut self.chain),
        };
        got.unwrap_or_else(|broken| {
            self.break_off(&broken.to_string());
            false
        })
    }

    /// A request is done; `written` bytes of its buffers were written.
    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        self.vring.push(head, written);
        self.staged = true;
    }

    /// Counts frames that the guest got together.
    pub(super) fn received(&self, frames: u64, bytes: u64) {
        self.net.received(frames, bytes);
        QueueStats::add(&self.stats.requests, frames);
        QueueStats::add(&self.stats.read_bytes, bytes);
    }

    /// Counts frames of the guest that the network took together.
    pub(super) fn sent(&self, frames: u64, bytes: u64) {
        self.net.sent(frames, bytes);
        QueueStats::add(&self.stats.requests, frames);
        QueueStats::add(&self.stats.write_bytes, bytes);
    }

    /// Counts frames that did not get through.
    #[cold]
    pub(super) fn dropped(&self, why: DropReason, frames: u64) {
        self.lost(why, frames);
        self.ended(frames);
    }

    /// Counts those of a request that is not over by that.
    #[cold]
    pub(super) fn lost(&self, why: DropReason, frames: u64) {
        self.net.dropped(why, frames);
        QueueStats::add(&self.stats.errors, frames);
    }

    /// Counts requests that are over, and what became of them elsewhere.
    pub(super) fn ended(&self, requests: u64) {
        QueueStats::add(&self.stats.requests, requests);
    }

    /// Ends all that is there without sending it: what a former daemon had taken, or what is left of a ring that is switched
    /// off. Only while its queue is on no worker.
    pub(super) fn discard(&mut self, why: DropReason, replays_only: bool) {
        // No more than a ring holds: a guest that lies may offer without an end.
        for _ in 0..self.vring.size() {
            if (replays_only && self.replays.is_empty()) || !self.pop() {
                break;
            }
            self.dropped(why, 1);
            self.push(self.chain.head, 0);
        }
        self.publish();
    }

    /// Whether writes to the guest's memory are to be [`mark`](Self::mark)ed.
    #[inline]
    pub(super) fn logs(&self) -> bool {
        self.log.is_some()
    }

    /// Marks the first `len` bytes of `segs` as written.
    #[cold]
    pub(super) fn mark(&self, segs: &[Seg], mut len: usize) {
        let Some(log) = &self.log else { return };
        for seg in segs {
            let n = len.min(seg.len as usize);
            if let Some(addr) = self.mem.host_to_guest(seg.ptr)
                && n > 0
            {
                log.mark(addr, n as u64);
            }
            len -= n;
        }
    }

    /// Makes what is staged visible, and notifies the guest if it asked. Whether it was notified since the last call.
    pub(super) fn publish(&mut self) -> bool {
        if std::mem::take(&mut self.staged) && self.vring.publish() {
            self.notify();
            self.notified = true;
        }
        std::mem::take(&mut self.notified)
    }

    fn notify(&self) {
        if let Some(call) = &self.call {
            call.signal();
            QueueStats::add(&self.stats.notifications, 1);
        }
    }

    pub(super) fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        self.call = call;
        // Whoever waits on the new descriptor may have missed a notification sent to the old one.
        self.notify();
    }

    pub(super) fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>) {
        self.vring.set_used_log(used);
        self.log = log;
    }
}
