//! Which worker each queue of an export is attached to, and how it moves.
//!
//! A [`QueueSet`] belongs to an export. Each queue has a home worker from the start; while its user runs it,
//! the boxed queue lies with that worker. Called by frontends (start, stop, visit) and control (move), from any
//! thread. What must never happen: a queue lost between two workers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

use vshunt_types::error::{Error, Result};

use super::WorkerId;
use super::mailbox::{Call, Delivery, Message, QueueId, Recall, Shared};
use super::placement::Placement;
use super::pool::Workers;
use super::probes;
use super::queue::{Queue, QueueStats, State};
use super::ticket::Withdrawn;
use super::wait::lock_until;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// How often a stop that does not end says so.
const STOP_WARN: Duration = Duration::from_secs(10);

/// How long the requests in flight of all queues of a disk may take to end, together, before a change of that disk.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// How long a worker may take to begin with what it is asked for. One that runs takes less than a millisecond.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// One queue's place in the world. Its lock is held over a whole start, stop or move, so that these exclude
/// one another; workers never take it. A stop holds it for as long as requests are in flight, so control threads wait for it
/// with a limit.
struct Slot {
    id: QueueId,
    worker: WorkerId,
    mail: Arc<Shared>,
    running: bool,
    /// Times it was attached.
    generation: u32,
    /// The queue is still in the mailbox of its worker, as far as is known.
    undelivered: Option<Arc<Delivery>>,
}

impl Slot {
    fn new(id: QueueId, worker: WorkerId, mail: Arc<Shared>) -> Self {
        Self { id, worker, mail, running: false, generation: 0, undelivered: None }
    }

    /// Takes the queue out of the mailbox, if its worker did not take it yet.
    fn take_back(&mut self) -> Option<Box<dyn Queue>> {
        match self.undelivered.take()?.withdraw() {
            Withdrawn::Back(queue) => Some(queue),
            Withdrawn::Begun | Withdrawn::Answered(()) => None,
        }
    }

    /// Whether its worker does not run, in words that follow the worker's id.
    fn stalled(&self) -> &'static str {
        self.mail.ask();
        if self.mail.is_stalled() { ", which has not run for a second (stalled)" } else { "" }
    }
}

/// The queues of one export. Lock order: a slot, then the workers' list.
pub struct QueueSet {
    name: String,
    workers: Arc<Workers>,
    slots: Vec<Mutex<Slot>>,
    // Any thread's.
    stats: Vec<Arc<QueueStats>>,
    placement: Placement,
}

impl QueueSet {
    /// Queues of the export `name`, the first at home on the first of `homes` and so on.
    pub fn new(name: &str, workers: &Arc<Workers>, homes: &[WorkerId]) -> Result<Self> {
        let mut set = Self {
            name: name.to_owned(),
            workers: workers.clone(),
            slots: vec![],
            stats: vec![],
            placement: Placement::default(),
        };
        for &worker in homes {
            // On an error, dropping the set releases those before.
            let mail = workers.reserve(worker)?;
            let id = NEXT_ID.fetch_add(1, Relaxed);
            set.slots.push(Mutex::new(Slot::new(id, worker, mail)));
            set.stats.push(Arc::default());
            set.placement.push(worker);
        }
        Ok(set)
    }

    /// How many queues.
    pub fn len(&self) -> u16 {
        self.slots.len() as u16
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Counters of a queue.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        &self.stats[index as usize]
    }

    /// The worker a queue is attached to, and how often it was attached.
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        self.placement.get(index)
    }

    fn note_placement(&self, index: u16, slot: &Slot) {
        self.placement.note(index, slot.worker, slot.generation);
    }

    fn slot(&self, index: u16) -> MutexGuard<'_, Slot> {
        self.slots[index as usize].locked()
    }

    /// Takes a slot for a thread that must not wait for a queue's stop, and gives up at `until`.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): it is not free in time.
    fn slot_until(&self, index: u16, until: Instant) -> Result<MutexGuard<'_, Slot>> {
        lock_until(&self.slots[index as usize], until).ok_or_else(|| {
            Error::busy(format!(
                "queue {}:{index} is being started, stopped or moved, and has {} requests in flight; try again",
                self.name,
                self.stats(index).in_flight.load(Relaxed)
            ))
        })
    }

    /// Gives a queue that its user started to its worker, and returns when it is served. If the worker is stalled, that is
    /// later than the return: when it runs again, or when the queue is attached to another worker.
    pub fn start(&self, index: u16, queue: Box<dyn Queue>) {
        let mut slot = self.slot(index);
        debug_assert!(!slot.running);
        self.stats(index).set_state(State::Running);
        self.hand_over(&mut slot, index, queue);
        slot.running = true;
        slot.generation += 1;
        self.note_placement(index, &slot);
    }

    /// Takes a queue back, drained. None if it does not run. Waits for as long as requests are in flight:
    /// their memory is the guest's.
    pub fn stop(&self, index: u16) -> Option<Box<dyn Queue>> {
        let mut slot = self.slot(index);
        if !slot.running {
            return None;
        }
        let queue = self.drain(&mut slot, index);
        slot.running = false;
        self.stats(index).set_state(State::Stopped);
        Some(queue)
    }

    /// [`stop`](Self::stop) for all queues that run; with each queue its index. All are asked back before one is waited for, so
    /// that this takes as long as the slowest of them.
    pub fn stop_all(&self) -> Vec<(u16, Box<dyn Queue>)> {
        let asked: Vec<_> = (0..self.len())
            .filter_map(|index| {
                let mut slot = self.slot(index);
                let leaving = slot.running.then(|| ask_back(&mut slot))?;
                Some((index, slot, leaving))
            })
            .collect();
        let stopped = asked.into_iter().map(|(index, mut slot, leaving)| {
            let queue = self.await_stop(&slot, index, leaving);
            slot.running = false;
            self.stats(index).set_state(State::Stopped);
            (index, queue)
        });
        stopped.collect()
    }

    /// Takes a queue back from its worker; waits like [`await_stop`](Self::await_stop).
    fn drain(&self, slot: &mut Slot, index: u16) -> Box<dyn Queue> {
        let leaving = ask_back(slot);
        self.await_stop(slot, index, leaving)
    }

    /// Waits without a limit, and logs a warning each [`STOP_WARN`].
    fn await_stop(&self, slot: &Slot, index: u16, leaving: Leaving) -> Box<dyn Queue> {
        let recall = match leaving {
            Leaving::Here(queue) => return queue,
            Leaving::Asked(recall) => recall,
        };
        loop {
            if let Some(queue) = recall.wait(STOP_WARN) {
                return queue;
            }
            tracing::warn!(
                "queue {}:{index} waits for {} requests in flight on worker {}{}",
                self.name,
                self.stats(index).in_flight.load(Relaxed),
                slot.worker,
                slot.stalled()
            );
        }
    }

    /// Calls a function with a running queue while nothing of it is in flight. False if it does not run. Waits like
    /// [`stop`](Self::stop).
    pub fn with_drained(&self, index: u16, f: impl FnOnce(&mut dyn Queue)) -> bool {
        let mut slot = self.slot(index);
        if !slot.running {
            return false;
        }
        let mut queue = self.drain(&mut slot, index);
        f(queue.as_mut());
        self.hand_over(&mut slot, index, queue);
        true
    }

    /// Calls a function while nothing is in flight on any queue. Requests that arrive meanwhile are set aside, and taken
    /// when it returns.
    ///
    /// # Errors
    /// A queue cannot be brought to rest, or not all of them are at rest at `until`
    /// ([`Busy`](vshunt_types::error::Kind::Busy)). The function was not called then, and all queues go on.
    pub fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        let slots: Result<Vec<_>> = (0..self.len()).map(|i| self.slot_until(i, until)).collect();
        let mut slots = slots?;
        let running = slots.iter_mut().zip(0u16..).filter(|(slot, _)| slot.running);
        let leaving: Vec<_> = running.map(|(slot, i)| (i, ask_back(slot))).collect();
        let mut queues = Vec::with_capacity(leaving.len());
        let mut failed = None;
        for (i, leaving) in leaving {
            let slot = &slots[usize::from(i)];
            if failed.is_some() {
                queues.extend(cancel_release(slot, leaving).map(|queue| (i, queue)));
                continue;
            }
            match self.await_release(slot, i, leaving, (until, DRAIN_LIMIT)) {
                Ok(queue) => queues.push((i, queue)),
                Err(e) => failed = Some(e),
            }
        }
        let result = failed.map_or_else(|| Ok(f()), Err);
        self.hand_over_all(&mut slots, queues);
        result
    }

    /// Calls a function with a running queue, on its worker, or here while no worker has the queue. False if it does not run.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the worker does not answer. The function is called when it runs again.
    pub fn run_on(&self, index: u16, f: impl FnOnce(&mut dyn Queue) + Send + 'static) -> Result<bool> {
        let mut slot = self.slot(index);
        if !slot.running {
            return Ok(false);
        }
        if let Some(mut queue) = slot.take_back() {
            f(queue.as_mut());
            self.hand_over(&mut slot, index, queue);
            return Ok(true);
        }
        let call = Call::new(Box::new(f));
        slot.mail.send(Message::RunOn { id: slot.id, call: call.clone() });
        call.wait(ANSWER_LIMIT).ok_or_else(|| {
            Error::busy(format!(
                "worker {} has not answered for {} s; queue {}:{index} is changed when it runs again",
                slot.worker,
                ANSWER_LIMIT.as_secs(),
                self.name
            ))
        })
    }

    /// Attaches a queue to a worker, whole or not at all: if its requests in flight do not end within
    /// `timeout`, or one of the two workers does not run, it goes on where it was and the error is
    /// [`Busy`](vshunt_types::error::Kind::Busy). Takes at most some seconds more than `timeout`.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        self.placement.check(&self.name, index)?;
        let until = Instant::now() + timeout;
        let mut slot = self.slot_until(index, until)?;
        if slot.worker == worker {
            return self.workers.check(worker);
        }
        let mail = self.workers.reserve(worker)?;
        if slot.running {
            if let Err(e) = self.transfer(&mut slot, index, worker, &mail, (until, timeout)) {
                self.workers.release(worker);
                return Err(e);
            }
            slot.generation += 1;
        }
        slot.mail = mail;
        self.workers.release(slot.worker);
        slot.worker = worker;
        self.note_placement(index, &slot);
        Ok(())
    }

    /// Attach, steps 1 to 4. On an error the queue is with its old worker.
    fn transfer(
        &self,
        slot: &mut Slot,
        index: u16,
        worker: WorkerId,
        mail: &Arc<Shared>,
        limit: (Instant, Duration),
    ) -> Result<()> {
        let not_taken = |slot: &Slot| {
            Error::busy(format!(
                "worker {worker} has not run for a second (stalled), so queue {}:{index} stays on worker {}; name another \
                 worker",
                self.name, slot.worker
            ))
        };
        mail.ask();
        if mail.is_stalled() {
            return Err(not_taken(slot));
        }
        let leaving = ask_back(slot);
        let queue = self.await_release(slot, index, leaving, limit)?;
        let delivery = self.post(mail, slot.id, index, queue);
        if delivery.wait(ANSWER_LIMIT).is_some() {
            return Ok(());
        }
        match delivery.withdraw() {
            Withdrawn::Back(queue) => {
                self.hand_over(slot, index, queue);
                Err(not_taken(slot))
            }
            Withdrawn::Begun | Withdrawn::Answered(()) => Ok(()),
        }
    }

    /// Attach, step 2. The limit: when the wait is over, and how long a time the command had for it.
    fn await_release(
        &self,
        slot: &Slot,
        index: u16,
        leaving: Leaving,
        (until, timeout): (Instant, Duration),
    ) -> Result<Box<dyn Queue>> {
        if let Leaving::Asked(recall) = &leaving
            && let Some(queue) = recall.wait(until.saturating_duration_since(Instant::now()))
        {
            return Ok(queue);
        }
        if let Some(queue) = cancel_release(slot, leaving) {
            return Ok(queue);
        }
        let in_flight = self.stats(index).in_flight.load(Relaxed);
        let (name, worker, ms) = (&self.name, slot.worker, timeout.as_millis());
        Err(Error::busy(match slot.stalled() {
            "" => format!(
                "queue {name}:{index} still had requests in flight after {ms} ms and stays on worker {worker}; \
                 try again, or give it more time"
            ),
            stalled => format!(
                "queue {name}:{index} cannot leave worker {worker}{stalled}; it has {in_flight} requests in flight and is \
                 served when the worker runs again"
            ),
        }))
    }

    /// Attach, step 3, to the worker of the slot. A worker that does not run has the queue in its mailbox then, where the
    /// next start, stop or move finds it.
    fn hand_over(&self, slot: &mut Slot, index: u16, queue: Box<dyn Queue>) {
        let delivery = self.post(&slot.mail, slot.id, index, queue);
        self.await_delivery(slot, index, delivery, Instant::now() + ANSWER_LIMIT);
    }

    /// The same for several queues, which are all posted before any worker is waited for. They have one deadline.
    fn hand_over_all(&self, slots: &mut [MutexGuard<'_, Slot>], queues: Vec<(u16, Box<dyn Queue>)>) {
        let post_to = |(i, queue)| {
            let slot = &slots[usize::from(i)];
            (i, self.post(&slot.mail, slot.id, i, queue))
        };
        let posted: Vec<_> = queues.into_iter().map(post_to).collect();
        let until = Instant::now() + ANSWER_LIMIT;
        for (i, delivery) in posted {
            self.await_delivery(&mut slots[usize::from(i)], i, delivery, until);
        }
    }

    /// Puts a queue into a worker's mailbox.
    fn post(&self, mail: &Shared, id: QueueId, index: u16, queue: Box<dyn Queue>) -> Arc<Delivery> {
        let delivery = Delivery::new(queue);
        probes::attach_post(mail.worker, id, index, &self.name);
        mail.send(Message::Attach { id, delivery: delivery.clone(), stats: self.stats(index).clone() });
        delivery
    }

    /// Waits until the worker of the slot has a queue that was posted.
    fn await_delivery(&self, slot: &mut Slot, index: u16, delivery: Arc<Delivery>, until: Instant) {
        if delivery.wait(until.saturating_duration_since(Instant::now())).is_none() {
            slot.undelivered = Some(delivery);
            tracing::warn!(
                "queue {}:{index} waits for worker {}{}; 'queue attach' gives it to another worker",
                self.name,
                slot.worker,
                slot.stalled()
            );
        }
    }
}

/// A queue that is to leave its worker.
enum Leaving {
    /// It did not get there, and is back.
    Here(Box<dyn Queue>),
    /// Its worker was asked for it.
    Asked(Arc<Recall>),
}

/// Attach, step 1.
fn ask_back(slot: &mut Slot) -> Leaving {
    if let Some(queue) = slot.take_back() {
        return Leaving::Here(queue);
    }
    let recall = Recall::new(());
    probes::attach_ask(slot.mail.worker, slot.id);
    slot.mail.send(Message::Release { id: slot.id, recall: recall.clone() });
    Leaving::Asked(recall)
}

/// Withdraws step 1: the queue stays on its worker. Returns it if it has left its worker already.
fn cancel_release(slot: &Slot, leaving: Leaving) -> Option<Box<dyn Queue>> {
    let recall = match leaving {
        Leaving::Here(queue) => return Some(queue),
        Leaving::Asked(recall) => recall,
    };
    if let Withdrawn::Answered(queue) = recall.withdraw() {
        return Some(queue);
    }
    probes::attach_cancel(slot.mail.worker, slot.id);
    slot.mail.send(Message::CancelRelease { id: slot.id });
    None
}

impl Drop for QueueSet {
    fn drop(&mut self) {
        for i in 0..self.len() {
            let slot = self.slot(i);
            debug_assert!(!slot.running, "stopped before it is dropped");
            self.workers.release(slot.worker);
        }
    }
}
