//! One virtqueue of a network device: the parts that receiving, sending and control have in common.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use virtio::inflight::Replay;
use virtio::log::DirtyLog;
use virtio::mem::GuestMemory;
use virtio::ring::{Chain, DeviceRing, Head, Seg, UsedLog};
use vshunt_engine::{EventFd, PollEvent, PollState, QueueStats, State, Token, Uring};
use vshunt_types::spec::DropReason;
use vshunt_virtqueue::{RingParts, Vring};

use crate::counters::NetStats;

/// See the module. Belongs to the worker that has the queue.
pub(crate) struct NetVirtqueue {
    pub(crate) vring: DeviceRing,
    mem: Arc<GuestMemory>,
    /// The request popped last.
    pub(crate) chain: Chain,
    /// Whether no more requests are taken from it.
    pub(crate) broken: bool,
    /// Whether it is switched off, and what the guest sends is discarded.
    pub(crate) discards: bool,
    /// Requests that a former daemon left in flight, oldest last.
    pub(crate) replays: Vec<Replay>,
    staged: bool,
    /// Whether the guest was notified since the last `publish`.
    notified: bool,
    poll_state: PollState,
    kick: Arc<OwnedFd>,
    call: Option<Arc<EventFd>>,
    log: Option<Arc<DirtyLog>>,
    stats: Arc<QueueStats>,
    net: Arc<NetStats>,
    on_broken: Box<dyn Fn(&str) + Send>,
}

impl NetVirtqueue {
    pub(crate) fn new(parts: RingParts, net: Arc<NetStats>) -> Self {
        let mut replays = parts.replays;
        replays.reverse();
        Self {
            vring: parts.vring,
            mem: parts.mem,
            chain: Chain::new(),
            broken: false,
            discards: parts.discards,
            replays,
            staged: false,
            notified: false,
            poll_state: PollState::Off,
            kick: parts.kick,
            call: parts.call,
            log: parts.log,
            stats: parts.stats,
            net,
            on_broken: parts.on_broken,
        }
    }

    /// Starts to poll the kick descriptor, with `token`.
    pub(crate) fn arm(&mut self, uring: &mut Uring, token: Token) {
        self.poll_state.start(uring, self.kick.as_raw_fd(), token);
    }

    pub(crate) fn disarm(&mut self, uring: &mut Uring, token: Token) {
        self.poll_state.end(uring, token);
    }

    /// Returns whether it has no operation on an io_uring.
    pub(crate) fn at_rest(&self) -> bool {
        self.poll_state == PollState::Off
    }

    /// Handles a completion of the poll of the kick descriptor.
    pub(crate) fn kicked(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) {
        QueueStats::add(&self.stats.kicks, 1);
        match self.poll_state.on_event(result, more) {
            PollEvent::Nothing => {}
            PollEvent::Restart => self.arm(uring, token),
            PollEvent::Useless => self.mark_broken("its kick descriptor cannot be waited for"),
        }
    }

    /// Marks the ring as broken, because of the guest or because its network is gone. No more
    /// requests are taken, and the front end is informed. Other rings continue.
    #[cold]
    pub(crate) fn mark_broken(&mut self, reason: &str) {
        self.broken = true;
        self.stats.set_state(State::Broken);
        (self.on_broken)(reason);
    }

    /// Returns whether a request can be taken.
    #[inline]
    pub(crate) fn has_avail(&self) -> bool {
        !self.broken && (self.vring.has_avail() || !self.replays.is_empty())
    }

    /// Pops the next request into [`chain`](Self::chain). Requests that a former daemon left in
    /// flight come first.
    #[inline]
    pub(crate) fn pop(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let got = match self.replays.pop() {
            Some(replay) => self.vring.replay(&self.mem, &replay, &mut self.chain).map(|()| true),
            None => self.vring.pop(&self.mem, &mut self.chain),
        };
        got.unwrap_or_else(|broken| {
            self.mark_broken(&broken.to_string());
            false
        })
    }

    /// Stages a used element: `written` bytes of the request's buffers were written.
    #[inline]
    pub(crate) fn push(&mut self, head: Head, written: u32) {
        self.vring.push(head, written);
        self.staged = true;
    }

    pub(crate) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Counts a batch of frames that the guest received.
    pub(crate) fn received(&self, frames: u64, bytes: u64) {
        self.net.received(frames, bytes);
        QueueStats::add(&self.stats.requests, frames);
        QueueStats::add(&self.stats.read_bytes, bytes);
    }

    /// Counts a batch of frames that the network took from the guest.
    pub(crate) fn sent(&self, frames: u64, bytes: u64) {
        self.net.sent(frames, bytes);
        QueueStats::add(&self.stats.requests, frames);
        QueueStats::add(&self.stats.write_bytes, bytes);
    }

    /// Counts frames that were dropped, and their requests as completed.
    #[cold]
    pub(crate) fn dropped(&self, why: DropReason, frames: u64) {
        self.lost(why, frames);
        self.ended(frames);
    }

    /// Counts frames that were dropped, whose requests complete later or have none.
    #[cold]
    pub(crate) fn lost(&self, why: DropReason, frames: u64) {
        self.net.dropped(why, frames);
        QueueStats::add(&self.stats.errors, frames);
    }

    /// Counts completed requests. Their outcome is counted elsewhere.
    pub(crate) fn ended(&self, requests: u64) {
        QueueStats::add(&self.stats.requests, requests);
    }

    /// Completes all requests without sending them: those that a former daemon left in flight, or
    /// those that are left on a ring that is switched off. Called only while its queue is on no
    /// worker.
    pub(crate) fn discard(&mut self, why: DropReason, replays_only: bool) {
        // A ring holds no more. A hostile guest could add requests without end.
        for _ in 0..self.vring.size() {
            if (replays_only && self.replays.is_empty()) || !self.pop() {
                break;
            }
            self.dropped(why, 1);
            self.push(self.chain.head, 0);
        }
        self.publish();
    }

    /// Returns whether writes to the guest's memory have to be [`mark`](Self::mark)ed.
    #[inline]
    pub(crate) fn logs(&self) -> bool {
        self.log.is_some()
    }

    /// Marks the first `len` bytes of `segs` as written, in the dirty log.
    #[cold]
    pub(crate) fn mark(&self, segs: &[Seg], mut len: usize) {
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

    /// Publishes staged used elements, and notifies the guest if it asked for that. Returns whether
    /// it was notified since the last call.
    pub(crate) fn publish(&mut self) -> bool {
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
}

impl Vring for NetVirtqueue {
    fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        self.call = call;
        // The guest may have missed a notification that was sent to the old descriptor.
        self.notify();
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<UsedLog>) {
        self.vring.set_used_log(used);
        self.log = log;
    }

    fn allow_kicks(&mut self) {
        self.vring.allow_kicks();
    }
}
