//! Which worker each queue of an export is attached to, and how it moves.
//!
//! A [`QueueSet`] belongs to an export. Each queue has a home worker from the start; while its user runs it,
//! the boxed queue lies with that worker. Called by frontends (start, stop, visit) and control (move), from any
//! thread. What must never happen: a queue lost between two workers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::WorkerId;
use super::homes::Homes;
use super::pool::Workers;
use super::queue::{Queue, QueueStats, State};
use super::thread::{Mail, Shared};
use crate::error::{Error, Result};

/// Names a queue to workers, over all exports.
pub(super) type QueueId = u64;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// How often a stop that does not end says so.
const STOP_WARN: Duration = Duration::from_secs(10);

/// One queue's place in the world. Its lock is held over a whole start, stop or move, so that these exclude
/// one another; workers never take it.
struct Slot {
    id: QueueId,
    worker: WorkerId,
    mail: Arc<Shared>,
    running: bool,
    /// Times it was attached.
    generation: u32,
}

/// What brings queues to rest that do not come to rest by themselves. Called with queues' slots held.
pub trait Coax: Send + Sync {
    /// Before any queue is asked for: gets ready, which may need queues that work.
    fn begin(&self) -> std::io::Result<Box<dyn Coaxing>>;
}

/// One time of it; ends when it is dropped, with the queues back at work (or gone).
pub trait Coaxing {
    /// Does what queue `index`, which was told to come to rest and has not done so yet, needs for that. Called again and
    /// again; never waits for the queue.
    fn ask(&mut self, index: u16) -> std::io::Result<()>;
}

/// How often it is asked, and how long one queue of several may take.
const COAX_EVERY: Duration = Duration::from_millis(1);
const COAX_TIMEOUT: Duration = Duration::from_secs(10);

/// The queues of one export. Lock order: a slot, then the workers' list.
pub struct QueueSet {
    name: String,
    workers: Arc<Workers>,
    slots: Vec<Mutex<Slot>>,
    // Any thread's.
    stats: Vec<Arc<QueueStats>>,
    homes: Homes,
    coax: OnceLock<Box<dyn Coax>>,
}

impl QueueSet {
    /// Queues of the export `name`, the first at home on the first of `homes` and so on.
    pub fn new(name: &str, workers: &Arc<Workers>, homes: &[WorkerId]) -> Result<Self> {
        let mut set = Self {
            name: name.to_owned(),
            workers: workers.clone(),
            slots: vec![],
            stats: vec![],
            homes: Homes::default(),
            coax: OnceLock::new(),
        };
        for &worker in homes {
            // On an error, dropping the set unsettles those before.
            let mail = workers.settle(worker)?;
            let id = NEXT_ID.fetch_add(1, Relaxed);
            set.slots.push(Mutex::new(Slot { id, worker, mail, running: false, generation: 0 }));
            set.stats.push(Arc::default());
            set.homes.push(worker);
        }
        Ok(set)
    }

    /// Sets what brings these queues to rest; once, where they need it.
    pub fn set_coax(&self, coax: Box<dyn Coax>) {
        let _ = self.coax.set(coax);
    }

    fn coax(&self) -> Option<std::io::Result<Box<dyn Coaxing>>> {
        self.coax.get().map(|c| c.begin())
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
    pub fn home(&self, index: u16) -> (WorkerId, u32) {
        self.homes.get(index)
    }

    fn note_home(&self, index: u16, slot: &Slot) {
        self.homes.note(index, slot.worker, slot.generation);
    }

    fn slot(&self, index: u16) -> MutexGuard<'_, Slot> {
        self.slots[index as usize].lock().expect("no holder panics")
    }

    /// Gives a queue that its user started to its worker, and returns when it is served.
    pub fn start(&self, index: u16, queue: Box<dyn Queue>) {
        let mut slot = self.slot(index);
        debug_assert!(!slot.running);
        self.stats(index).set_state(State::Running);
        hand_over(&slot, queue, self.stats(index));
        slot.running = true;
        slot.generation += 1;
        self.note_home(index, &slot);
    }

    /// Takes a queue back, drained. None if it does not run. Waits for as long as requests are in flight:
    /// their memory is the guest's.
    pub fn stop(&self, index: u16) -> Option<Box<dyn Queue>> {
        let mut slot = self.slot(index);
        if !slot.running {
            return None;
        }
        let queue = self.drain(&slot, index);
        slot.running = false;
        self.stats(index).set_state(State::Stopped);
        Some(queue)
    }

    fn drain(&self, slot: &Slot, index: u16) -> Box<dyn Queue> {
        let (to, back) = sync_channel(1);
        slot.mail.send(Mail::Release { id: slot.id, to });
        loop {
            match back.recv_timeout(STOP_WARN) {
                Ok(queue) => return queue,
                Err(RecvTimeoutError::Timeout) => {
                    let n = self.stats(index).in_flight.load(Relaxed);
                    tracing::warn!("queue {}:{index} waits for {n} requests in flight", self.name);
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("a worker gives back what it has"),
            }
        }
    }

    /// Calls a function with a running queue while nothing of it is in flight. False if it does not run.
    pub fn with_drained(&self, index: u16, f: impl FnOnce(&mut dyn Queue)) -> bool {
        let slot = self.slot(index);
        if !slot.running {
            return false;
        }
        let mut queue = self.drain(&slot, index);
        f(queue.as_mut());
        hand_over(&slot, queue, self.stats(index));
        true
    }

    /// Calls a function while nothing is in flight on any queue. An error, with nothing changed, where the queues cannot be
    /// brought to rest.
    pub fn with_all_drained<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        let slots: Vec<_> = (0..self.len()).map(|i| self.slot(i)).collect();
        let indexed = || slots.iter().zip(0u16..).filter(|(slot, _)| slot.running);
        let no_rest =
            |e| Error::io(format_args!("the queues of export {} cannot be brought to rest", self.name), e);
        let mut coaxing = self.coax().transpose().map_err(no_rest)?;
        let mut queues = Vec::with_capacity(slots.len());
        let mut failed = None;
        for (slot, i) in indexed() {
            let drained = match &mut coaxing {
                Some(coaxing) => self.release(slot, i, COAX_TIMEOUT, Some(coaxing.as_mut())),
                None => Ok(self.drain(slot, i)),
            };
            match drained {
                Ok(queue) => queues.push(queue),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        if let Some(e) = failed {
            for ((slot, i), queue) in indexed().zip(queues) {
                hand_over(slot, queue, self.stats(i));
            }
            return Err(e);
        }
        let result = f();
        for ((slot, i), queue) in indexed().zip(queues) {
            hand_over(slot, queue, self.stats(i));
        }
        Ok(result)
    }

    /// Calls a function with a running queue, on its worker. False if it does not run.
    pub fn visit(&self, index: u16, f: impl FnOnce(&mut dyn Queue) + Send + 'static) -> bool {
        let slot = self.slot(index);
        if !slot.running {
            return false;
        }
        let (done, is_done) = sync_channel(1);
        slot.mail.send(Mail::Visit { id: slot.id, f: Box::new(f), done });
        is_done.recv().is_ok()
    }

    /// Attaches a queue to a worker, whole or not at all: if its requests in flight do not end within
    /// `timeout`, it goes on where it was and the error is [`Busy`](crate::error::Kind::Busy).
    pub fn attach(&self, index: u16, worker: WorkerId, timeout: Duration) -> Result<()> {
        self.homes.check(&self.name, index)?;
        let mut slot = self.slot(index);
        if slot.worker == worker {
            return self.workers.check(worker);
        }
        let mail = self.workers.settle(worker)?;
        if slot.running {
            let mut coaxing = match self.coax() {
                Some(Err(e)) => {
                    self.workers.unsettle(worker);
                    return Err(Error::io(format_args!("queue {}:{index} cannot be moved", self.name), e));
                }
                Some(Ok(coaxing)) => Some(coaxing),
                None => None,
            };
            let released = match &mut coaxing {
                Some(coaxing) => self.release(&slot, index, timeout, Some(coaxing.as_mut())),
                None => self.release(&slot, index, timeout, None),
            };
            match released {
                Ok(queue) => {
                    let old = std::mem::replace(&mut slot.mail, mail);
                    hand_over(&slot, queue, self.stats(index));
                    drop(old);
                    slot.generation += 1;
                }
                Err(e) => {
                    self.workers.unsettle(worker);
                    return Err(e);
                }
            }
        } else {
            slot.mail = mail;
        }
        self.workers.unsettle(slot.worker);
        slot.worker = worker;
        self.note_home(index, &slot);
        Ok(())
    }

    /// Attach, steps 1 and 2.
    fn release(
        &self,
        slot: &Slot,
        index: u16,
        timeout: Duration,
        coaxing: Option<&mut dyn Coaxing>,
    ) -> Result<Box<dyn Queue>> {
        let (to, back): (_, Receiver<Box<dyn Queue>>) = sync_channel(1);
        slot.mail.send(Mail::Release { id: slot.id, to });
        let mut why = String::new();
        match coaxing {
            None => {
                if let Ok(queue) = back.recv_timeout(timeout) {
                    return Ok(queue);
                }
            }
            Some(coaxing) => {
                let until = Instant::now() + timeout;
                while Instant::now() < until {
                    if let Ok(queue) = back.recv_timeout(COAX_EVERY) {
                        return Ok(queue);
                    }
                    why = coaxing.ask(index).map_or_else(|e| format!(" ({e})"), |()| String::new());
                }
            }
        }
        let (done, kept) = sync_channel(1);
        slot.mail.send(Mail::Keep { id: slot.id, done });
        if kept.recv().unwrap_or(false) {
            return Err(Error::busy(format!(
                "queue {}:{index} still had requests in flight after {} ms and stays on worker {}{why}; \
                 try again, or give it more time",
                self.name,
                timeout.as_millis(),
                slot.worker
            )));
        }
        // It was given back between the two letters.
        back.recv().map_err(|_| Error::busy(format!("queue {}:{index} is not with its worker", self.name)))
    }
}

/// Attach, step 3: the queue goes to where the slot's mail goes.
fn hand_over(slot: &Slot, queue: Box<dyn Queue>, stats: &Arc<QueueStats>) {
    let (done, is_done) = sync_channel(1);
    slot.mail.send(Mail::Attach { id: slot.id, queue, stats: stats.clone(), done });
    is_done.recv().expect("a worker with a queue settled on it is not freed");
}

impl Drop for QueueSet {
    fn drop(&mut self) {
        for i in 0..self.len() {
            debug_assert!(!self.slot(i).running, "stopped before it is dropped");
            let worker = self.slot(i).worker;
            self.workers.unsettle(worker);
        }
    }
}
