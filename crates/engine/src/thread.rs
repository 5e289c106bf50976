//! What runs on a worker: the loop that takes requests, enters the ring, completes, publishes, and sleeps.
//!
//! One iteration: mailbox → take from each awake queue → one enter for all that was pushed → completions →
//! publish. A queue is *awake* while its other side is asked not to kick; the worker then looks at it each
//! iteration. With nothing to do the worker polls for a bounded, adapted time, then asks all queues to kick and
//! sleeps in the ring.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use super::mailbox::{Message, QueueFn, QueueId, Recall, Shared};
use super::policy::{PollPolicy, Rest};
use super::probes;
use super::queue::{Forwarder, Queue, QueueStats};
use super::uring::{Completion, Token, Uring};

/// Requests taken from one queue before its neighbours have their turn.
pub const BUDGET: u32 = 64;
/// Bound of adaptive polling where nobody sets one, µs: a little more than a guest's wake-up takes.
pub const DEFAULT_POLL_US: u32 = 50;
/// Largest bound of polling, µs: more would be a busy loop.
pub const POLL_US_MAX: u32 = 10_000;
/// Turns without work after which one queue among busy ones is asked to kick again.
const QUIET_ITERATIONS: u32 = 256;
/// Turns without work between two thorough looks at a queue among busy ones.
const LOOK_ITERATIONS: u32 = 4;
/// Polls between two looks at the clock, and thorough ones at the queues.
const POLLS_A_LOOK: u32 = 16;
/// The mailbox's place; queues have the ones below.
const MAIL_INDEX: u16 = u16::MAX;
/// Queues a worker can have: places are 16 bits, one is the mailbox.
pub(super) const PLACES_MAX: usize = MAIL_INDEX as usize;

enum Phase {
    Active,
    Draining(Arc<Recall>),
}

struct Attached {
    id: QueueId,
    queue: Box<dyn Queue>,
    token: Token,
    phase: Phase,
    stats: Arc<QueueStats>,
    awake: bool,
    /// Turns since it had work.
    quiet: u32,
    /// Has something to publish or was completed into this turn.
    touched: bool,
}

/// What a queue that moved away left on the ring. The completions have the token that the queue had here.
struct Left {
    token: Token,
    forwarder: Box<dyn Forwarder>,
}

/// A worker's state; lives on its thread.
pub(super) struct Worker {
    uring: Uring,
    shared: Arc<Shared>,
    places: Vec<Option<Attached>>,
    /// Use counts of the places, so that a completion finds only the queue it belongs to.
    generations: Vec<u32>,
    awake: Vec<u16>,
    /// Those that went to sleep together last.
    asleep: Vec<u16>,
    draining: Vec<u16>,
    touched: Vec<u16>,
    /// Empty but for former queues with operations on this ring.
    left: Vec<Left>,
    completions: Vec<Completion>,
    policy: PollPolicy,
    stopping: bool,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let mut uring = Uring::new()?;
        uring.poll(shared.eventfd.as_raw_fd(), Self::mail_token());
        Ok(Self {
            uring,
            shared,
            places: Vec::new(),
            generations: Vec::new(),
            awake: Vec::new(),
            asleep: Vec::new(),
            draining: Vec::new(),
            touched: Vec::new(),
            left: Vec::new(),
            completions: Vec::with_capacity(256),
            policy: PollPolicy::new(),
            stopping: false,
        })
    }

    fn mail_token() -> Token {
        Token { index: MAIL_INDEX, generation: 0, slot: 0, op: 0 }
    }

    /// Runs until told to stop, and then until nothing of a former queue is left on the ring: the end of this thread would
    /// cancel those operations, and a request that comes with one at that moment would be lost. An error is one of
    /// `io_uring_enter` itself, after which nothing can be served.
    pub(super) fn run(&mut self) -> io::Result<()> {
        while !self.is_over() {
            let busy = self.iterate()?;
            if !busy && !self.is_over() {
                self.rest()?;
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.stopping && self.left.is_empty()
    }

    /// One iteration. Whether there was anything to do.
    fn iterate(&mut self) -> io::Result<bool> {
        let mut busy = false;
        self.uring.begin_iteration();
        if self.shared.has_mail.load(Ordering::Acquire) {
            self.read_mail();
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
            self.hand_back();
        }
        if requests > 0 {
            self.policy.found(requests);
        }
        Ok(busy || requests > 0 || self.uring.has_deferred())
    }

    /// Takes from each awake queue, a budget each. Returns requests taken.
    fn take(&mut self) -> u64 {
        let (mut taken, mut done) = (0, 0);
        // With neighbours there may be no rest, in which it would be looked at.
        let others = self.awake.len() > 1;
        let mut i = 0;
        while let Some(&index) = self.awake.get(i) {
            let Some(place) = &mut self.places[index as usize] else {
                self.awake.swap_remove(i);
                continue;
            };
            if place.queue.has_work() || (others && place.quiet % LOOK_ITERATIONS == 0 && place.queue.look())
            {
                place.quiet = 0;
                let before = place.stats.in_flight.load(Ordering::Relaxed);
                let n = place.queue.take(&mut self.uring, place.token, BUDGET);
                probes::take(self.shared.worker, place.id, n);
                let after = place.stats.in_flight.load(Ordering::Relaxed);
                taken += u64::from(n);
                // What is not in flight now was completed at once.
                done += u64::from((before + n).saturating_sub(after));
                if !place.touched {
                    place.touched = true;
                    self.touched.push(index);
                }
            } else {
                place.quiet += 1;
                if place.quiet > QUIET_ITERATIONS && self.awake.len() > 1 {
                    place.quiet = 0;
                    if !place.queue.sleep(&mut self.uring, place.token, 1) {
                        place.awake = false;
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

    /// Gives completions to their queues. Returns requests completed.
    fn complete(&mut self) -> u64 {
        let mut done = 0;
        let mut completions = std::mem::take(&mut self.completions);
        self.uring.reap(&mut completions);
        for &Completion { token, result, more } in &completions {
            if token.index == MAIL_INDEX {
                // The flag tells what came; the eventfd is never read, each ring of it is an edge.
                if !more {
                    self.uring.poll(self.shared.eventfd.as_raw_fd(), Self::mail_token());
                }
                continue;
            }
            let place = self.places.get_mut(token.index as usize).and_then(Option::as_mut);
            let Some(place) = place.filter(|p| p.token.generation == token.generation) else {
                self.forward(token, result);
                continue;
            };
            let n = place.queue.complete(&mut self.uring, token, result, more);
            probes::complete(self.shared.worker, place.id, n, result);
            done += u64::from(n);
            if !place.touched {
                place.touched = true;
                self.touched.push(token.index);
            }
            Self::wake_queue(place, token.index, &mut self.awake);
        }
        completions.clear();
        self.completions = completions;
        if done > 0 {
            QueueStats::add(&self.shared.requests, done);
        }
        done
    }

    /// A completion for a queue that has left.
    #[cold]
    fn forward(&mut self, token: Token, result: i32) {
        let is_its = |l: &Left| (l.token.index, l.token.generation) == (token.index, token.generation);
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

    fn wake_queue(place: &mut Attached, index: u16, awake: &mut Vec<u16>) {
        place.quiet = 0;
        if !place.awake && matches!(place.phase, Phase::Active) {
            place.awake = true;
            place.queue.wake();
            awake.push(index);
        }
    }

    fn publish(&mut self) {
        for index in self.touched.drain(..) {
            if let Some(place) = &mut self.places[index as usize] {
                place.touched = false;
                let notified = place.queue.publish();
                probes::publish(self.shared.worker, place.id, notified);
                if notified {
                    self.policy.notified();
                }
            }
        }
    }

    /// Polls for a while, then sleeps, unless work turns up.
    fn rest(&mut self) -> io::Result<()> {
        let bound = Duration::from_micros(u64::from(self.shared.poll_us.load(Ordering::Relaxed)));
        let steady = self.awake.iter().all(|&i| {
            self.places[i as usize].as_ref().is_none_or(|p| p.stats.in_flight.load(Ordering::Relaxed) == 0)
        });
        let start = Instant::now();
        let plan = self.policy.plan(start, bound, steady);
        if let Rest::Poll(window) = plan
            && !self.uring.must_sleep()
        {
            let found = self.spin(window);
            self.policy.polled(found, Instant::now(), window, bound);
            if found {
                return Ok(());
            }
        }
        let (after, limit) = match plan {
            Rest::Coalesce { requests, limit } => (requests, Some(limit)),
            Rest::Sleep | Rest::Poll(_) => (1, None),
        };
        if self.ask_for_kicks(after) {
            return Ok(());
        }
        let mut slept = Ok(());
        if !self.shared.has_mail.load(Ordering::Acquire) {
            QueueStats::add(&self.shared.sleeps, 1);
            probes::sleep(self.shared.worker, self.asleep.len());
            slept = self.uring.wait(limit).map(|woken| {
                probes::wake(self.shared.worker, woken);
                self.policy.slept(start, Instant::now(), woken, bound);
            });
        }
        if after > 1 {
            self.look_at_all();
        }
        slept
    }

    /// Asks the other side of each awake queue to kick, once `after` requests are there. True: so many are
    /// there on one of them, so the worker stays up.
    fn ask_for_kicks(&mut self, after: u32) -> bool {
        let share = (after / self.awake.len().max(1) as u32).max(1);
        let mut work = false;
        for &index in &self.awake {
            if let Some(place) = &mut self.places[index as usize] {
                work |= place.queue.sleep(&mut self.uring, place.token, share);
            }
        }
        for &index in &self.awake {
            if let Some(place) = &mut self.places[index as usize] {
                if work {
                    place.queue.wake();
                } else {
                    place.awake = false;
                }
            }
        }
        if !work {
            self.asleep.clear();
            self.asleep.append(&mut self.awake);
        }
        work
    }

    /// After a sleep for which more than one request was asked for: on each queue fewer may be there, without a kick.
    fn look_at_all(&mut self) {
        for index in std::mem::take(&mut self.asleep) {
            if let Some(place) = &mut self.places[index as usize] {
                Self::wake_queue(place, index, &mut self.awake);
            }
        }
    }

    /// Looks for work without sleeping, `window` long. Whether there is some.
    fn spin(&mut self, window: Duration) -> bool {
        let start = Instant::now();
        loop {
            if self.any_awake(|q| q.look()) {
                return true;
            }
            for _ in 0..POLLS_A_LOOK {
                if self.any_awake(|q| q.has_work())
                    || self.uring.has_completions()
                    || self.uring.wants_enter()
                    || self.shared.has_mail.load(Ordering::Relaxed)
                {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= window {
                return false;
            }
        }
    }

    fn any_awake(&self, is: impl Fn(&dyn Queue) -> bool) -> bool {
        self.awake.iter().any(|&i| self.places[i as usize].as_ref().is_some_and(|p| is(p.queue.as_ref())))
    }

    fn read_mail(&mut self) {
        self.shared.has_mail.store(false, Ordering::Relaxed);
        // The lock's acquire orders the store above before whatever is sent after this take.
        let messages = std::mem::take(&mut *self.shared.messages.locked());
        for mail in messages {
            match mail {
                Message::Attach { id, delivery, stats } => {
                    if let Some(queue) = delivery.begin() {
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
                    if let Some(f) = call.begin() {
                        let _ = call.answer(self.run_on(id, f));
                    }
                }
                Message::Stop { ending } => {
                    if ending.begin().is_some() {
                        self.stopping = true;
                        let _ = ending.answer(());
                    }
                }
            }
        }
        QueueStats::add(&self.shared.mails, 1);
    }

    /// Whether the queue is here.
    fn run_on(&mut self, id: QueueId, f: QueueFn) -> bool {
        let Some(index) = self.find(id) else { return false };
        let place = self.places[index].as_mut().expect("found");
        f(place.queue.as_mut());
        Self::wake_queue(place, index as u16, &mut self.awake);
        true
    }

    fn find(&self, id: QueueId) -> Option<usize> {
        self.places.iter().position(|p| p.as_ref().is_some_and(|p| p.id == id))
    }

    /// Attach, step 4.
    fn attach(&mut self, id: QueueId, queue: Box<dyn Queue>, stats: Arc<QueueStats>) {
        let index = self.places.iter().position(Option::is_none).unwrap_or_else(|| {
            self.places.push(None);
            self.generations.push(0);
            self.places.len() - 1
        });
        let generation = &mut self.generations[index];
        let next = |g: u32| if g == Token::GENERATION_MAX { 0 } else { g + 1 };
        *generation = next(*generation);
        // The numbers are used again after the last one; not while operations with that number are left.
        while self.left.iter().any(|l| (l.token.index, l.token.generation) == (index as u16, *generation)) {
            *generation = next(*generation);
        }
        let token = Token { index: index as u16, generation: *generation, slot: 0, op: 0 };
        let mut place = Attached {
            id,
            queue,
            token,
            phase: Phase::Active,
            stats,
            awake: false,
            quiet: 0,
            touched: false,
        };
        place.queue.arm(&mut self.uring, token);
        probes::attach_arm(self.shared.worker, id);
        Self::wake_queue(&mut place, index as u16, &mut self.awake);
        self.places[index] = Some(place);
        self.count();
    }

    /// Attach, step 2.
    fn release(&mut self, id: QueueId, recall: Arc<Recall>) {
        if recall.is_withdrawn() {
            return;
        }
        let Some(index) = self.find(id) else { return };
        let place = self.places[index].as_mut().expect("found");
        place.queue.disarm(&mut self.uring, place.token);
        probes::attach_drain(self.shared.worker, id, place.stats.in_flight.load(Ordering::Relaxed));
        place.phase = Phase::Draining(recall);
        place.awake = false;
        self.awake.retain(|&i| usize::from(i) != index);
        self.draining.push(index as u16);
    }

    /// The release of a queue was withdrawn: it goes on here.
    fn resume(&mut self, index: usize) {
        let place = self.places[index].as_mut().expect("the caller found it");
        if !matches!(&place.phase, Phase::Draining(recall) if recall.is_withdrawn()) {
            return;
        }
        place.phase = Phase::Active;
        self.draining.retain(|&i| usize::from(i) != index);
        place.queue.arm(&mut self.uring, place.token);
        Self::wake_queue(place, index as u16, &mut self.awake);
    }

    /// Gives back the queues whose drain is over.
    fn hand_back(&mut self) {
        let mut i = 0;
        while let Some(&index) = self.draining.get(i) {
            let slot = &mut self.places[index as usize];
            if !slot.as_ref().is_some_and(|p| p.queue.at_rest()) {
                i += 1;
                continue;
            }
            self.draining.swap_remove(i);
            let Some(Attached { id, mut queue, token, phase, stats, .. }) = slot.take() else { continue };
            queue.publish();
            queue.leave(&mut self.uring);
            probes::attach_leave(self.shared.worker, id);
            if let Some(forwarder) = queue.forwarder() {
                self.left.push(Left { token, forwarder });
                self.count_left();
            }
            debug_assert_eq!(stats.in_flight.load(Ordering::Relaxed), 0);
            self.count();
            let Phase::Draining(recall) = phase else { unreachable!("it is among the draining") };
            if let Err(queue) = recall.answer(queue) {
                // The release was withdrawn meanwhile.
                self.attach(id, queue, stats);
            }
        }
    }

    /// Takes note of which queues are here, after one has come or gone.
    fn count(&mut self) {
        let queues = || self.places.iter().flatten();
        self.shared.queues.store(queues().count() as u32, Ordering::Relaxed);
        let waits = queues().map(|p| p.queue.waits_max()).fold(0, u32::saturating_add);
        self.uring.allow_waits(waits);
    }
}
