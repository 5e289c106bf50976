//! A load thread: it drives its lanes until it is stopped, and parks while the server is away.
//!
//! The watching thread controls it by [`Shared::control`], and wakes it by the queues' own call
//! eventfds. A lane implements [`Drive`]: a queue of a disk ([`super::lane`]), or a queue pair of a
//! network device.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::gauge::LoadGauge;
use crate::driver::Queue;
use crate::error::{Error, Kind, Result};
use crate::stats::{now_ns, thread_cpu};

/// Continue.
pub(super) const RUN: u8 = 0;
/// Submit nothing more. Finish when no request is in flight.
pub(super) const STOP: u8 = 1;
/// Take the completions, record the positions of the rings, and wait.
pub(super) const PARK: u8 = 2;
/// Stop at once.
pub(super) const FAIL: u8 = 3;

/// What a load thread drives: one queue, or a queue pair. The thread owns it for the length of a
/// phase.
pub(crate) trait Drive {
    /// Takes completions. Returns their number.
    fn reap(&mut self) -> Result<u32>;
    /// Submits as many requests as possible.
    fn fill(&mut self);
    /// Stops submitting.
    fn stop(&mut self);
    /// Returns whether a request is in flight.
    fn is_waiting(&self) -> bool;
    /// Returns whether no request is in flight and none will follow.
    fn is_finished(&self) -> bool;
    /// Returns the nanoseconds until something can be submitted without a completion. `None`:
    /// never.
    fn due_ns(&self) -> Option<u64> {
        None
    }
    /// Records the positions of the rings, for the thread that passes them to a new server. All
    /// completions must have been taken.
    fn note_base(&mut self);
    /// Ends the lane's records, so that no thread waits for it.
    fn end_notes(&mut self) {}
    /// Returns whether there is a completion.
    fn has_used(&self) -> bool;
    /// Asks for notifications. Returns true if there is a completion already.
    fn arm(&mut self) -> bool;
    /// Asks for no notifications.
    fn disarm(&mut self);
    /// Returns the queues whose notifications it waits for.
    fn queues(&mut self) -> [Option<&mut Queue>; 2];
}

/// State that all threads of a phase share.
pub(crate) struct Shared {
    /// The command of the watching thread: RUN, STOP, PARK or FAIL.
    pub(super) control: AtomicU8,
    /// CPU time of threads that have ended, in nanoseconds.
    pub(crate) cpu_ns: AtomicU64,
    /// Signalled when a thread ends or parks.
    pub(super) event: OwnedFd,
    pub(crate) gauges: Vec<LoadGauge>,
    roll: Mutex<Roll>,
    resume: Condvar,
}

/// The state of all threads.
#[derive(Default)]
struct Roll {
    running: usize,
    /// Threads that are parked in the current `epoch`.
    parked: usize,
    /// Increases with each PARK. A thread that slept through the whole life of a server between two
    /// of them must check its rings again.
    epoch: u64,
    error: Option<Error>,
}

impl Shared {
    pub(crate) fn new(lanes: usize, threads: usize) -> Result<Self> {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|e| Error::with(Kind::System, "cannot make an eventfd: raise ulimit -n", e))?;
        Ok(Self {
            control: AtomicU8::new(RUN),
            cpu_ns: AtomicU64::new(0),
            event,
            gauges: (0..lanes).map(|_| LoadGauge::default()).collect(),
            roll: Mutex::new(Roll { running: threads, ..Roll::default() }),
            resume: Condvar::new(),
        })
    }

    fn roll(&self) -> MutexGuard<'_, Roll> {
        self.roll.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns the number of threads that have not ended.
    pub(super) fn running(&self) -> usize {
        self.roll().running
    }

    /// Returns whether all threads that have not ended are parked.
    pub(super) fn all_parked(&self) -> bool {
        let roll = self.roll();
        roll.parked == roll.running
    }

    /// Returns the first error of any thread.
    pub(crate) fn take_error(&self) -> Option<Error> {
        self.roll().error.take()
    }

    /// Sets the command for all threads. The caller must wake those that may sleep on their queues.
    pub(super) fn order(&self, control: u8) {
        let mut roll = self.roll();
        self.control.store(control, Ordering::Release);
        if control == PARK {
            roll.epoch += 1;
            roll.parked = 0;
        }
        self.resume.notify_all();
    }

    fn park(&self) {
        let mut roll = self.roll();
        let epoch = roll.epoch;
        roll.parked += 1;
        self.tell();
        while self.control.load(Ordering::Acquire) == PARK && roll.epoch == epoch {
            roll = self.resume.wait(roll).unwrap_or_else(|e| e.into_inner());
        }
        if roll.epoch == epoch {
            roll.parked -= 1;
        }
    }

    fn end(&self, error: Option<Error>) {
        let mut roll = self.roll();
        roll.running -= 1;
        roll.error = roll.error.take().or(error);
        self.tell();
    }

    fn tell(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// Runs `lanes` on the calling thread until they are finished. It stores an error in `shared`.
pub(crate) fn run<L: Drive>(lanes: &mut [L], shared: &Shared, spin: Duration, cpu: Option<usize>) {
    let before = thread_cpu();
    let result = pin(cpu).and_then(|()| drive(lanes, shared, spin.as_nanos() as u64));
    lanes.iter_mut().for_each(L::note_base);
    lanes.iter_mut().for_each(L::end_notes);
    let spent = thread_cpu().saturating_sub(before);
    shared.cpu_ns.fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
    shared.end(result.err());
}

/// Pins the calling thread to a CPU.
///
/// # Errors
/// The process may not run on that CPU.
pub fn pin(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|e| Error::with(Kind::Usage, format!("cannot run on CPU {cpu}: check --pin"), e))
}

fn drive<L: Drive>(lanes: &mut [L], shared: &Shared, spin_ns: u64) -> Result<()> {
    loop {
        let mut done = 0;
        for lane in lanes.iter_mut() {
            done += lane.reap()?;
        }
        match shared.control.load(Ordering::Acquire) {
            RUN => {}
            STOP => lanes.iter_mut().for_each(L::stop),
            PARK => {
                park(lanes, shared)?;
                continue;
            }
            _ => return Ok(()),
        }
        let mut waiting = false;
        for lane in lanes.iter_mut() {
            lane.fill();
            waiting |= lane.is_waiting();
        }
        if !waiting && lanes.iter().all(L::is_finished) {
            return Ok(());
        }
        if done == 0 && !spin_for(lanes, spin_ns) {
            sleep(lanes);
        }
    }
}

/// Takes the last completions and waits for the next server. The previous server writes no more.
fn park<L: Drive>(lanes: &mut [L], shared: &Shared) -> Result<()> {
    for lane in lanes.iter_mut() {
        while lane.reap()? > 0 {}
        lane.note_base();
    }
    shared.park();
    Ok(())
}

/// Polls for completions for a limited time. Returns whether there are some.
fn spin_for<L: Drive>(lanes: &[L], spin_ns: u64) -> bool {
    if spin_ns == 0 {
        return false;
    }
    let end = now_ns() + spin_ns;
    loop {
        // Reading the clock costs more than polling the rings.
        for _ in 0..16 {
            if lanes.iter().any(L::has_used) {
                return true;
            }
            std::hint::spin_loop();
        }
        if now_ns() >= end {
            return false;
        }
    }
}

/// Sleeps until a completion arrives, a submission is due, or the watching thread signals.
fn sleep<L: Drive>(lanes: &mut [L]) {
    let mut ready = false;
    for lane in lanes.iter_mut() {
        ready |= lane.arm();
    }
    // A change of `control` after this check is followed by a signal, which the eventfd stores.
    if !ready {
        let due = lanes.iter().filter_map(L::due_ns).min();
        let mut queues: Vec<_> = lanes.iter_mut().flat_map(|lane| lane.queues()).flatten().collect();
        match (&mut queues[..], due) {
            ([queue], None) => queue.sleep(),
            (queues, due) => sleep_on_many(queues, due),
        }
    }
    lanes.iter_mut().for_each(L::disarm);
}

fn sleep_on_many(queues: &mut [&mut Queue], due_ns: Option<u64>) {
    let limit = due_ns
        .map(|ns| Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 });
    let ready: Vec<bool> = {
        let mut fds: Vec<_> =
            queues.iter().map(|queue| PollFd::new(&*queue.parts().call, PollFlags::IN)).collect();
        let _ = poll(&mut fds, limit.as_ref());
        fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect()
    };
    for (queue, _) in queues.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
        queue.drain_call();
    }
}
