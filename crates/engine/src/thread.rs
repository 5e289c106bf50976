//! The loop of a worker: it takes requests, enters the io_uring, completes requests, publishes
//! them, and sleeps.
//!
//! One iteration: mailbox → take from each awake queue → one enter for all operations that were
//! pushed → completions → publish. A queue is *awake* while its peer is asked not to kick, and the
//! worker then looks at it in each iteration. Without work the worker polls for a limited time that
//! adapts to the load, then asks all peers to kick and sleeps in the io_uring.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vshunt_types::sync::Locked;

use super::mailbox::{Message, QueueFn, QueueId, Recall, Shared};
use super::phases::Phase;
use super::policy::{Rest, RestPolicy, Usage};
use super::probes;
use super::queue::{Forwarder, Queue, QueueStats};
use super::uring::{CLIENT_INDEX, Completion, Token, Uring};

/// Most requests taken from one queue before the other queues are served.
pub const BUDGET: u32 = 64;
/// Default limit of adaptive polling in µs: a little more than the wake-up of a guest takes.
pub const DEFAULT_POLL_US: u32 = 50;
/// Largest limit of polling in µs. With more, the worker would be a busy loop.
pub const POLL_US_MAX: u32 = 10_000;
/// Iterations without work after which the peer of one queue among busy ones is asked to kick
/// again.
const QUIET_ITERATIONS: u32 = 256;
/// Iterations without work between two thorough looks at a queue among busy ones.
const LOOK_ITERATIONS: u32 = 4;
/// Polls between two reads of the clock, and between two thorough looks at the queues.
const POLLS_A_LOOK: u32 = 16;
/// Requests in an iteration below which a worker that polls with pauses pauses.
const FEW: u64 = 16;
/// Token index of the mailbox. Queues have the lower ones.
const MAILBOX_INDEX: u16 = u16::MAX;
/// Most queues of a worker: token indices have 16 bits. The mailbox and the clients of the io_uring
/// have one each.
pub(super) const QUEUES_MAX: usize = CLIENT_INDEX as usize;

/// What an iteration found.
struct Iteration {
    /// There was something to do.
    busy: bool,
    /// Requests taken or completed.
    requests: u64,
}

/// Returns what the calling thread has used. The CPU time of getrusage(2) would stand still until
/// the next tick.
fn usage() -> Usage {
    let mut cpu = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `cpu` only, which is on this stack. (rustix would look for the
    // kernel's shared object first, by calls that the sandbox does not allow to workers.)
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut cpu) };
    let mut used = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call writes to `used` only, which is on this stack.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, used.as_mut_ptr()) };
    // SAFETY: it consists of integers, and is zeroed.
    let used = unsafe { used.assume_init() };
    Usage { cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64, preempted: used.ru_nivcsw as u64 }
}

enum AttachPhase {
    Active,
    Draining(Arc<Recall>),
}

struct Attached {
    id: QueueId,
    queue: Box<dyn Queue>,
    token: Token,
    phase: AttachPhase,
    stats: Arc<QueueStats>,
    awake: bool,
    /// Iterations since it had work.
    quiet: u32,
    /// Whether it has something to publish, or an operation of it completed in this iteration.
    touched: bool,
}

/// The operations that a former queue left on the io_uring. Their completions have the token that
/// the queue had here.
struct LeftBehind {
    token: Token,
    forwarder: Box<dyn Forwarder>,
}

/// The state of a worker. It stays on the worker's thread.
pub(super) struct Worker {
    uring: Uring,
    shared: Arc<Shared>,
    queues: Vec<Option<Attached>>,
    /// How often each index was used, so that a completion finds only the queue that it belongs to.
    generations: Vec<u32>,
    awake: Vec<u16>,
    /// The queues that went to sleep together last.
    asleep: Vec<u16>,
    draining: Vec<u16>,
    touched: Vec<u16>,
    /// Former queues that have operations on this io_uring.
    left: Vec<LeftBehind>,
    completions: Vec<Completion>,
    policy: RestPolicy,
    stopping: bool,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let mut uring = Uring::new()?;
        uring.poll(shared.eventfd.fd(), Self::mailbox_token());
        Ok(Self {
            uring,
            shared,
            queues: Vec::new(),
            generations: Vec::new(),
            awake: Vec::new(),
            asleep: Vec::new(),
            draining: Vec::new(),
            touched: Vec::new(),
            left: Vec::new(),
            completions: Vec::with_capacity(256),
            policy: RestPolicy::new(0),
            stopping: false,
        })
    }

    fn mailbox_token() -> Token {
        Token { index: MAILBOX_INDEX, generation: 0, slot: 0, op: 0 }
    }

    /// Runs until it is told to stop, and then until no operation of a former queue is left on the
    /// io_uring. The end of this thread would cancel those operations, and a request that arrives
    /// with one at that moment would be lost.
    ///
    /// # Errors
    /// Those of `io_uring_enter` itself, after which nothing can be served.
    pub(super) fn run(&mut self) -> io::Result<()> {
        while !self.is_over() {
            let Iteration { busy, requests } = self.iterate()?;
            if self.is_over() {
                break;
            }
            if !busy {
                self.rest()?;
            } else if requests < FEW
                && let Some(pause_ns) = self.policy.pause_ns()
            {
                self.pause(pause_ns);
            }
        }
        Ok(())
    }

    /// Returns the policy's time in ns: that since the worker was made.
    fn now(&self) -> u64 {
        self.shared.phases.now()
    }

    /// Returns the limit of polling in ns.
    fn bound_ns(&self) -> u64 {
        u64::from(self.shared.poll_us.load(Ordering::Relaxed)) * 1_000
    }

    fn is_over(&self) -> bool {
        self.stopping && self.left.is_empty()
    }

    /// Runs one iteration.
    fn iterate(&mut self) -> io::Result<Iteration> {
        let mut busy = false;
        self.uring.start_iteration();
        if self.shared.has_messages.load(Ordering::Acquire) {
            self.read_messages();
            busy = true;
        }
        let mut requests = 0;
        if self.uring.has_completions() {
            requests += self.complete();
            busy = true;
        }
        requests += self.take();
        if self.uring.wants_enter() {
            let submitted = self.uring.enter(false)?;
            probes::submit(self.shared.worker, submitted);
            requests += self.complete();
            busy |= !self.uring.must_sleep();
        } else if self.uring.has_completions() {
            requests += self.complete();
        }
        self.publish();
        if !self.draining.is_empty() {
            self.return_drained();
        }
        if requests > 0 {
            self.policy.found(requests);
        }
        let busy = busy || requests > 0 || self.uring.has_deferred();
        Ok(Iteration { busy, requests })
    }

    /// Takes up to [`BUDGET`] requests from each awake queue. Returns the number of requests taken.
    fn take(&mut self) -> u64 {
        let (mut taken, mut done) = (0, 0);
        // With other busy queues there may be no rest, during which the worker would look at this
        // queue.
        let others = self.awake.len() > 1;
        let mut i = 0;
        while let Some(&index) = self.awake.get(i) {
            let Some(attached) = &mut self.queues[index as usize] else {
                self.awake.swap_remove(i);
                continue;
            };
            if attached.queue.has_work()
                || (others && attached.quiet % LOOK_ITERATIONS == 0 && attached.queue.look())
            {
                attached.quiet = 0;
                let before = attached.stats.in_flight.load(Ordering::Relaxed);
                let n = attached.queue.take(&mut self.uring, attached.token, BUDGET);
                probes::take(self.shared.worker, attached.id, n);
                let after = attached.stats.in_flight.load(Ordering::Relaxed);
                taken += u64::from(n);
                // Requests that are not in flight now completed at once.
                done += u64::from((before + n).saturating_sub(after));
                if !attached.touched {
                    attached.touched = true;
                    self.touched.push(index);
                }
            } else {
                attached.quiet += 1;
                if attached.quiet > QUIET_ITERATIONS && self.awake.len() > 1 {
                    attached.quiet = 0;
                    if !attached.queue.sleep(&mut self.uring, attached.token, 1) {
                        attached.awake = false;
                        self.awake.swap_remove(i);
                        continue;
                    }
                }
            }
            i += 1;
        }
        if done > 0 {
            QueueStats::add(&self.shared.requests, done);
        }
        taken
    }

    /// Passes completions to their queues. Returns the number of requests completed.
    fn complete(&mut self) -> u64 {
        let mut done = 0;
        let mut completions = std::mem::take(&mut self.completions);
        self.uring.reap(&mut completions);
        for &Completion { token, result, more } in &completions {
            if token.index == MAILBOX_INDEX {
                // The flag says whether there are messages. The eventfd is never read: each signal
                // of it is an edge.
                if !more {
                    self.uring.poll(self.shared.eventfd.fd(), Self::mailbox_token());
                }
                continue;
            }
            let attached = self.queues.get_mut(token.index as usize).and_then(Option::as_mut);
            let Some(attached) = attached.filter(|p| p.token.generation == token.generation) else {
                self.forward(token, result);
                continue;
            };
            let n = attached.queue.complete(&mut self.uring, token, result, more);
            probes::complete(self.shared.worker, attached.id, n, result);
            done += u64::from(n);
            if !attached.touched {
                attached.touched = true;
                self.touched.push(token.index);
            }
            Self::wake_queue(attached, token.index, &mut self.awake);
        }
        completions.clear();
        self.completions = completions;
        if done > 0 {
            QueueStats::add(&self.shared.requests, done);
        }
        done
    }

    /// Handles a completion for a queue that has left.
    #[cold]
    fn forward(&mut self, token: Token, result: i32) {
        let is_its = |l: &LeftBehind| (l.token.index, l.token.generation) == (token.index, token.generation);
        let Some(at) = self.left.iter().position(is_its) else { return };
        self.left[at].forwarder.forward(token, result);
        if self.left[at].forwarder.left() == 0 {
            self.left.swap_remove(at);
        }
        self.count_left();
    }

    fn count_left(&self) {
        let n = self.left.iter().map(|l| l.forwarder.left()).sum();
        self.shared.left.store(n, Ordering::Release);
    }

    fn wake_queue(attached: &mut Attached, index: u16, awake: &mut Vec<u16>) {
        attached.quiet = 0;
        if !attached.awake && matches!(attached.phase, AttachPhase::Active) {
            attached.awake = true;
            attached.queue.wake();
            awake.push(index);
        }
    }

    fn publish(&mut self) {
        for index in self.touched.drain(..) {
            if let Some(attached) = &mut self.queues[index as usize] {
                attached.touched = false;
                let notified = attached.queue.publish();
                probes::publish(self.shared.worker, attached.id, notified);
            }
        }
    }

    /// Lets requests gather for a while, if the worker keeps up with its peers with ease.
    fn pause(&mut self, pause_ns: u64) {
        let start = self.now();
        let bound = self.bound_ns();
        self.policy.observe(start, bound > 0, usage);
        self.shared.phases.begin(Phase::Polling, start);
        let end = start + pause_ns.min(bound);
        let mut now = start;
        while now < end {
            for _ in 0..POLLS_A_LOOK {
                std::hint::spin_loop();
            }
            now = self.now();
        }
        self.shared.phases.end(Phase::Polling, now);
    }

    /// Polls for a while, then sleeps, unless work turns up.
    fn rest(&mut self) -> io::Result<()> {
        let bound = self.bound_ns();
        let start = self.now();
        let rest = self.policy.plan(start, bound > 0, usage);
        let mut ended = start;
        if let Rest::Poll { pause_ns } = rest
            && !self.uring.must_sleep()
        {
            self.shared.phases.begin(Phase::Polling, start);
            let found = self.spin(start, start + bound, pause_ns);
            ended = self.now();
            self.shared.phases.end(Phase::Polling, ended);
            if found {
                return Ok(());
            }
        }
        let (after, limit) = match rest {
            // With requests in flight on the ring, their completions come without a kick.
            Rest::Coalesce { requests, limit_ns } if !self.has_in_flight() => {
                (requests, Some(Duration::from_nanos(limit_ns)))
            }
            _ => (1, None),
        };
        if self.ask_for_kicks(after) {
            return Ok(());
        }
        let mut slept = Ok(());
        if !self.shared.has_messages.load(Ordering::Acquire) {
            QueueStats::add(&self.shared.sleeps, 1);
            probes::sleep(self.shared.worker, self.asleep.len());
            self.shared.phases.begin(Phase::Sleeping, ended);
            slept = self.uring.wait(limit).map(|woken| {
                probes::wake(self.shared.worker, woken);
                let now = self.shared.phases.now();
                self.shared.phases.end(Phase::Sleeping, now);
                self.policy.slept(start, now, limit.is_some(), woken);
            });
        }
        if after > 1 {
            self.look_at_all();
        }
        slept
    }

    fn has_in_flight(&self) -> bool {
        self.awake.iter().any(|&i| {
            self.queues[i as usize].as_ref().is_some_and(|p| p.stats.in_flight.load(Ordering::Relaxed) > 0)
        })
    }

    /// Asks the peer of each awake queue to kick once `after` requests are there. Returns true if
    /// one queue has so many already, so the worker stays awake.
    fn ask_for_kicks(&mut self, after: u32) -> bool {
        let share = (after / self.awake.len().max(1) as u32).max(1);
        let mut work = false;
        for &index in &self.awake {
            if let Some(attached) = &mut self.queues[index as usize] {
                work |= attached.queue.sleep(&mut self.uring, attached.token, share);
            }
        }
        for &index in &self.awake {
            if let Some(attached) = &mut self.queues[index as usize] {
                if work {
                    attached.queue.wake();
                } else {
                    attached.awake = false;
                }
            }
        }
        if !work {
            self.asleep.clear();
            self.asleep.append(&mut self.awake);
        }
        work
    }

    /// Wakes all queues after a sleep for which more than one request was asked for. Each queue may
    /// have fewer requests, without a kick.
    fn look_at_all(&mut self) {
        for index in std::mem::take(&mut self.asleep) {
            if let Some(attached) = &mut self.queues[index as usize] {
                Self::wake_queue(attached, index, &mut self.awake);
            }
        }
    }

    /// Looks for work without sleeping from the policy's time `now` to `end`, each time after
    /// `pause_ns`. Returns whether there is some.
    fn spin(&mut self, mut now: u64, end: u64, pause_ns: u64) -> bool {
        let mut look = 0;
        loop {
            if now >= look {
                look = now + pause_ns;
                if self.any_awake(|q| q.look()) {
                    return true;
                }
            }
            for _ in 0..POLLS_A_LOOK {
                if (pause_ns == 0 && self.any_awake(|q| q.has_work()))
                    || self.uring.has_completions()
                    || self.uring.wants_enter()
                    || self.shared.has_messages.load(Ordering::Relaxed)
                {
                    return true;
                }
                std::hint::spin_loop();
            }
            if now >= end {
                return false;
            }
            now = self.now();
        }
    }

    fn any_awake(&self, is: impl Fn(&dyn Queue) -> bool) -> bool {
        self.awake.iter().any(|&i| self.queues[i as usize].as_ref().is_some_and(|p| is(p.queue.as_ref())))
    }

    fn read_messages(&mut self) {
        self.shared.has_messages.store(false, Ordering::Relaxed);
        // The lock's acquire orders the store above before messages that are sent after this take.
        let messages = std::mem::take(&mut *self.shared.messages.locked());
        for message in messages {
            match message {
                Message::Attach { id, delivery, stats } => {
                    if let Some(queue) = delivery.start() {
                        self.attach(id, queue, stats);
                        let _ = delivery.answer(());
                    }
                }
                Message::Release { id, recall } => self.release(id, recall),
                Message::CancelRelease { id } => {
                    if let Some(index) = self.find(id) {
                        self.resume(index);
                    }
                }
                Message::RunOn { id, call } => {
                    if let Some(f) = call.start() {
                        let _ = call.answer(self.run_on(id, f));
                    }
                }
                Message::Stop { ending } => {
                    if ending.start().is_some() {
                        self.stopping = true;
                        let _ = ending.answer(());
                    }
                }
            }
        }
        QueueStats::add(&self.shared.reads, 1);
    }

    /// Calls a function with a queue. Returns whether the queue is here.
    fn run_on(&mut self, id: QueueId, f: QueueFn) -> bool {
        let Some(index) = self.find(id) else { return false };
        let attached = self.queues[index].as_mut().expect("found");
        f(attached.queue.as_mut());
        Self::wake_queue(attached, index as u16, &mut self.awake);
        true
    }

    fn find(&self, id: QueueId) -> Option<usize> {
        self.queues.iter().position(|p| p.as_ref().is_some_and(|p| p.id == id))
    }

    /// Attach, step 4.
    fn attach(&mut self, id: QueueId, queue: Box<dyn Queue>, stats: Arc<QueueStats>) {
        let index = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.generations.push(0);
            self.queues.len() - 1
        });
        let generation = &mut self.generations[index];
        let next = |g: u32| if g == Token::GENERATION_MAX { 0 } else { g + 1 };
        *generation = next(*generation);
        // The generations start again after the last one. One whose operations are left is skipped.
        while self.left.iter().any(|l| (l.token.index, l.token.generation) == (index as u16, *generation)) {
            *generation = next(*generation);
        }
        let token = Token { index: index as u16, generation: *generation, slot: 0, op: 0 };
        let mut attached = Attached {
            id,
            queue,
            token,
            phase: AttachPhase::Active,
            stats,
            awake: false,
            quiet: 0,
            touched: false,
        };
        attached.queue.arm(&mut self.uring, token);
        probes::attach_arm(self.shared.worker, id);
        Self::wake_queue(&mut attached, index as u16, &mut self.awake);
        self.queues[index] = Some(attached);
        self.count();
    }

    /// Attach, step 2.
    fn release(&mut self, id: QueueId, recall: Arc<Recall>) {
        if recall.is_withdrawn() {
            return;
        }
        let Some(index) = self.find(id) else { return };
        let attached = self.queues[index].as_mut().expect("found");
        attached.queue.disarm(&mut self.uring, attached.token);
        probes::attach_drain(self.shared.worker, id, attached.stats.in_flight.load(Ordering::Relaxed));
        attached.phase = AttachPhase::Draining(recall);
        attached.awake = false;
        self.awake.retain(|&i| usize::from(i) != index);
        self.draining.push(index as u16);
    }

    /// Serves a queue again whose release was withdrawn.
    fn resume(&mut self, index: usize) {
        let attached = self.queues[index].as_mut().expect("the caller found it");
        if !matches!(&attached.phase, AttachPhase::Draining(recall) if recall.is_withdrawn()) {
            return;
        }
        attached.phase = AttachPhase::Active;
        self.draining.retain(|&i| usize::from(i) != index);
        attached.queue.arm(&mut self.uring, attached.token);
        Self::wake_queue(attached, index as u16, &mut self.awake);
    }

    /// Returns the queues whose drain has ended.
    fn return_drained(&mut self) {
        let mut i = 0;
        while let Some(&index) = self.draining.get(i) {
            let attached = &mut self.queues[index as usize];
            if !attached.as_ref().is_some_and(|p| p.queue.at_rest()) {
                i += 1;
                continue;
            }
            self.draining.swap_remove(i);
            let Some(Attached { id, mut queue, token, phase, stats, .. }) = attached.take() else { continue };
            queue.publish();
            queue.leave(&mut self.uring);
            probes::attach_leave(self.shared.worker, id);
            if let Some(forwarder) = queue.forwarder() {
                self.left.push(LeftBehind { token, forwarder });
                self.count_left();
            }
            debug_assert_eq!(stats.in_flight.load(Ordering::Relaxed), 0);
            self.count();
            let AttachPhase::Draining(recall) = phase else { unreachable!("it is among the draining") };
            if let Err(queue) = recall.answer(queue) {
                // The release was withdrawn in the meantime.
                self.attach(id, queue, stats);
            }
        }
    }

    /// Updates the number of queues and of possible waits, after a queue has come or gone.
    fn count(&mut self) {
        let present = || self.queues.iter().flatten();
        self.shared.queues.store(present().count() as u32, Ordering::Relaxed);
        let waits = present().map(|p| p.queue.waits_max()).fold(0, u32::saturating_add);
        self.uring.allow_waits(waits);
    }
}
