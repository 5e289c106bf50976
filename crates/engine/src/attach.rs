//! The worker that each queue of an export is attached to, and how a queue moves to another one.
//!
//! A [`QueueSet`] belongs to an export. Each queue has a worker from the start. While the queue is
//! in use, that worker owns the boxed queue. Front ends call start, stop and run_on, and control
//! calls attach, from any thread. A queue must never get lost between two workers.

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

/// Time between two warnings about a stop that does not end.
const STOP_WARN: Duration = Duration::from_secs(10);

/// Time that the requests in flight of all queues of a disk have to complete, together, before a
/// change of that disk.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// Time that a worker has to start on a message. A worker that runs needs less than a millisecond.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// One queue of the set, and the worker that it is attached to.
///
/// The lock is held for a whole start, stop or move, so that these exclude one another. Workers
/// never take it. A stop holds it for as long as requests are in flight, so control threads wait
/// for it with a limit.
struct QueueSlot {
    id: QueueId,
    worker: WorkerId,
    shared: Arc<Shared>,
    running: bool,
    /// How often the queue was attached.
    generation: u32,
    /// The message that carries the queue, if the worker has not confirmed that it took the queue.
    undelivered: Option<Arc<Delivery>>,
}

impl QueueSlot {
    fn new(id: QueueId, worker: WorkerId, shared: Arc<Shared>) -> Self {
        Self { id, worker, shared, running: false, generation: 0, undelivered: None }
    }

    /// Takes the queue out of the mailbox, unless its worker has taken it.
    fn withdraw_delivery(&mut self) -> Option<Box<dyn Queue>> {
        match self.undelivered.take()?.withdraw() {
            Withdrawn::Back(queue) => Some(queue),
            Withdrawn::Started | Withdrawn::Answered(()) => None,
        }
    }

    /// Says whether the worker is stalled, in words that follow the worker's id.
    fn stalled(&self) -> &'static str {
        self.shared.ask();
        if self.shared.is_stalled() { ", which has not run for a second (stalled)" } else { "" }
    }
}

/// The queues of one export.
///
/// Lock order: a slot, then the workers' list.
pub struct QueueSet {
    name: String,
    workers: Arc<Workers>,
    slots: Vec<Mutex<QueueSlot>>,
    // Used by any thread.
    stats: Vec<Arc<QueueStats>>,
    placement: Placement,
}

impl QueueSet {
    /// Makes a stopped queue of the export `name` for each element of `workers_of`, which is its
    /// first worker.
    ///
    /// # Errors
    /// There is no such worker, or it is being freed.
    pub fn new(name: &str, workers: &Arc<Workers>, workers_of: &[WorkerId]) -> Result<Self> {
        let mut set = Self {
            name: name.to_owned(),
            workers: workers.clone(),
            slots: vec![],
            stats: vec![],
            placement: Placement::default(),
        };
        for &worker in workers_of {
            // On an error, the drop of the set releases the queues made so far.
            let shared = workers.reserve(worker)?;
            let id = NEXT_ID.fetch_add(1, Relaxed);
            set.slots.push(Mutex::new(QueueSlot::new(id, worker, shared)));
            set.stats.push(Arc::default());
            set.placement.push(worker);
        }
        Ok(set)
    }

    /// Returns the number of queues.
    pub fn len(&self) -> u16 {
        self.slots.len() as u16
    }

    /// Returns whether there are no queues.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the counters of a queue.
    pub fn stats(&self, index: u16) -> &Arc<QueueStats> {
        &self.stats[index as usize]
    }

    /// Returns the worker that a queue is attached to, and how often it was attached.
    pub fn placement(&self, index: u16) -> (WorkerId, u32) {
        self.placement.get(index)
    }

    fn note_placement(&self, index: u16, slot: &QueueSlot) {
        self.placement.note(index, slot.worker, slot.generation);
    }

    fn slot(&self, index: u16) -> MutexGuard<'_, QueueSlot> {
        self.slots[index as usize].locked()
    }

    /// Locks a slot for a thread that must not wait for a queue's stop. It gives up at `until`.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the slot is still locked at `until`.
    fn slot_until(&self, index: u16, until: Instant) -> Result<MutexGuard<'_, QueueSlot>> {
        lock_until(&self.slots[index as usize], until).ok_or_else(|| {
            Error::busy(format!(
                "queue {}:{index} is being started, stopped or moved, and has {} requests in flight; try again",
                self.name,
                self.stats(index).in_flight.load(Relaxed)
            ))
        })
    }

    /// Passes a queue to its worker, and returns when the worker serves it.
    ///
    /// If the worker is stalled, this returns earlier. The queue is then served when the worker
    /// runs again, or when the queue is attached to another worker.
    pub fn start(&self, index: u16, queue: Box<dyn Queue>) {
        self.start_as(index, queue, State::Running);
    }

    /// Does what [`start`](Self::start) does, with this state for users to see.
    pub fn start_as(&self, index: u16, queue: Box<dyn Queue>, state: State) {
        let mut slot = self.slot(index);
        debug_assert!(!slot.running);
        self.stats(index).set_state(state);
        self.hand_over(&mut slot, index, queue);
        slot.running = true;
        slot.generation += 1;
        self.note_placement(index, &slot);
    }

    /// Drains a queue and returns it. `None` if it does not run.
    ///
    /// Waits for as long as requests are in flight, because they use the guest's memory.
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

    /// Stops all queues that run, like [`stop`](Self::stop), and returns each with its index.
    ///
    /// All workers are asked before one is waited for, so this takes as long as the slowest stop.
    pub fn stop_all(&self) -> Vec<(u16, Box<dyn Queue>)> {
        let asked: Vec<_> = (0..self.len())
            .filter_map(|index| {
                let mut slot = self.slot(index);
                let leaving = slot.running.then(|| request_release(&mut slot))?;
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

    /// Takes a queue from its worker. Waits like [`await_stop`](Self::await_stop).
    fn drain(&self, slot: &mut QueueSlot, index: u16) -> Box<dyn Queue> {
        let leaving = request_release(slot);
        self.await_stop(slot, index, leaving)
    }

    /// Waits without a limit, and logs a warning every [`STOP_WARN`].
    fn await_stop(&self, slot: &QueueSlot, index: u16, leaving: Leaving) -> Box<dyn Queue> {
        let recall = match leaving {
            Leaving::Undelivered(queue) => return queue,
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

    /// Calls a function with a running queue that has nothing in flight. Returns false if the queue
    /// does not run. Waits like [`stop`](Self::stop).
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

    /// Calls a function while no queue has anything in flight. Requests that arrive in the meantime
    /// wait, and are taken when the function has returned.
    ///
    /// # Errors
    /// A queue cannot be drained, or not all queues are drained at `until`
    /// ([`Busy`](vshunt_types::error::Kind::Busy)). The function was not called then, and all
    /// queues are served again.
    pub fn with_all_drained<R>(&self, until: Instant, f: impl FnOnce() -> R) -> Result<R> {
        let slots: Result<Vec<_>> = (0..self.len()).map(|i| self.slot_until(i, until)).collect();
        let mut slots = slots?;
        let running = slots.iter_mut().zip(0u16..).filter(|(slot, _)| slot.running);
        let leaving: Vec<_> = running.map(|(slot, i)| (i, request_release(slot))).collect();
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

    /// Calls a function with a running queue: on its worker, or on this thread while no worker has
    /// taken the queue. Returns false if the queue does not run.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the worker does not answer. The function is
    /// called when the worker runs again.
    pub fn run_on(&self, index: u16, f: impl FnOnce(&mut dyn Queue) + Send + 'static) -> Result<bool> {
        let mut slot = self.slot(index);
        if !slot.running {
            return Ok(false);
        }
        if let Some(mut queue) = slot.withdraw_delivery() {
            f(queue.as_mut());
            self.hand_over(&mut slot, index, queue);
            return Ok(true);
        }
        let call = Call::new(Box::new(f));
        slot.shared.send(Message::RunOn { id: slot.id, call: call.clone() });
        call.wait(ANSWER_LIMIT).ok_or_else(|| {
            Error::busy(format!(
                "worker {} has not answered for {} s; queue {}:{index} is changed when it runs again",
                slot.worker,
                ANSWER_LIMIT.as_secs(),
                self.name
            ))
        })
    }

    /// Attaches a queue to a worker, or leaves everything as it is.
    ///
    /// Takes at most some seconds more than `timeout`.
    ///
    /// # Errors
    /// [`Busy`](vshunt_types::error::Kind::Busy): the requests in flight do not complete within
    /// `timeout`, or one of the two workers does not run. The queue stays on its former worker.
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        self.placement.check(&self.name, index)?;
        let until = Instant::now() + timeout;
        let mut slot = self.slot_until(index, until)?;
        if slot.worker == worker {
            return self.workers.check(worker);
        }
        let shared = self.workers.reserve(worker)?;
        if slot.running {
            if let Err(e) = self.transfer(&mut slot, index, worker, &shared, (until, timeout)) {
                self.workers.release(worker);
                return Err(e);
            }
            slot.generation += 1;
        }
        slot.shared = shared;
        self.workers.release(slot.worker);
        slot.worker = worker;
        self.note_placement(index, &slot);
        Ok(())
    }

    /// Attach, steps 1 to 4. On an error the queue stays on its former worker.
    fn transfer(
        &self,
        slot: &mut QueueSlot,
        index: u16,
        worker: WorkerId,
        shared: &Arc<Shared>,
        limit: (Instant, Duration),
    ) -> Result<()> {
        let not_taken = |slot: &QueueSlot| {
            Error::busy(format!(
                "worker {worker} has not run for a second (stalled), so queue {}:{index} stays on worker {}; name another \
                 worker",
                self.name, slot.worker
            ))
        };
        shared.ask();
        if shared.is_stalled() {
            return Err(not_taken(slot));
        }
        let leaving = request_release(slot);
        let queue = self.await_release(slot, index, leaving, limit)?;
        let delivery = self.post(shared, slot.id, index, queue);
        if delivery.wait(ANSWER_LIMIT).is_some() {
            return Ok(());
        }
        match delivery.withdraw() {
            Withdrawn::Back(queue) => {
                self.hand_over(slot, index, queue);
                Err(not_taken(slot))
            }
            Withdrawn::Started | Withdrawn::Answered(()) => Ok(()),
        }
    }

    /// Attach, step 2. The limit is the end of the wait, and the time that the command had for it.
    fn await_release(
        &self,
        slot: &QueueSlot,
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
                 try again when they have ended"
            ),
            stalled => format!(
                "queue {name}:{index} cannot leave worker {worker}{stalled}; it has {in_flight} requests in flight and is \
                 served when the worker runs again"
            ),
        }))
    }

    /// Attach, step 3, to the worker of the slot. If this worker does not run, the queue stays in
    /// its mailbox, where the next start, stop or move finds it.
    fn hand_over(&self, slot: &mut QueueSlot, index: u16, queue: Box<dyn Queue>) {
        let delivery = self.post(&slot.shared, slot.id, index, queue);
        self.await_delivery(slot, index, delivery, Instant::now() + ANSWER_LIMIT);
    }

    /// [`hand_over`](Self::hand_over) for several queues. All are posted before one worker is
    /// waited for, and the waits have one deadline.
    fn hand_over_all(&self, slots: &mut [MutexGuard<'_, QueueSlot>], queues: Vec<(u16, Box<dyn Queue>)>) {
        let post_to = |(i, queue)| {
            let slot = &slots[usize::from(i)];
            (i, self.post(&slot.shared, slot.id, i, queue))
        };
        let posted: Vec<_> = queues.into_iter().map(post_to).collect();
        let until = Instant::now() + ANSWER_LIMIT;
        for (i, delivery) in posted {
            self.await_delivery(&mut slots[usize::from(i)], i, delivery, until);
        }
    }

    /// Puts a queue into a worker's mailbox.
    fn post(&self, shared: &Shared, id: QueueId, index: u16, queue: Box<dyn Queue>) -> Arc<Delivery> {
        let delivery = Delivery::new(queue);
        probes::attach_post(shared.worker, id, index, &self.name);
        shared.send(Message::Attach { id, delivery: delivery.clone(), stats: self.stats(index).clone() });
        delivery
    }

    /// Waits until the worker of the slot has taken a queue that was posted.
    fn await_delivery(&self, slot: &mut QueueSlot, index: u16, delivery: Arc<Delivery>, until: Instant) {
        if delivery.wait(until.saturating_duration_since(Instant::now())).is_none() {
            slot.undelivered = Some(delivery);
            tracing::warn!(
                "queue {}:{index} waits for worker {}{}; `vshunt attach` gives it to another worker",
                self.name,
                slot.worker,
                slot.stalled()
            );
        }
    }
}

/// A queue that is to leave its worker.
enum Leaving {
    /// The worker had not taken it from the mailbox.
    Undelivered(Box<dyn Queue>),
    /// The worker was asked to release it.
    Asked(Arc<Recall>),
}

/// Attach, step 1.
fn request_release(slot: &mut QueueSlot) -> Leaving {
    if let Some(queue) = slot.withdraw_delivery() {
        return Leaving::Undelivered(queue);
    }
    let recall = Recall::new(());
    probes::attach_ask(slot.shared.worker, slot.id);
    slot.shared.send(Message::Release { id: slot.id, recall: recall.clone() });
    Leaving::Asked(recall)
}

/// Withdraws step 1, so that the queue stays on its worker. Returns the queue if it has already
/// left.
fn cancel_release(slot: &QueueSlot, leaving: Leaving) -> Option<Box<dyn Queue>> {
    let recall = match leaving {
        Leaving::Undelivered(queue) => return Some(queue),
        Leaving::Asked(recall) => recall,
    };
    if let Withdrawn::Answered(queue) = recall.withdraw() {
        return Some(queue);
    }
    probes::attach_cancel(slot.shared.worker, slot.id);
    slot.shared.send(Message::CancelRelease { id: slot.id });
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
