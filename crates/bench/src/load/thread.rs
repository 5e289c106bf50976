//! A load thread: drives its lanes until told to stop, parks while the server is away.
//!
//! The watching thread talks to it by [`Shared::control`] and wakes it by the queues' own call eventfds.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::lane::{Lane, LaneGauge};
use crate::error::{Error, Kind, Result};
use crate::stats::{now_ns, thread_cpu};

/// Go on.
pub(super) const RUN: u8 = 0;
/// Submit nothing more; finish when nothing is outstanding.
pub(super) const STOP: u8 = 1;
/// Take what is completed, note where the rings stand, and wait.
pub(super) const PARK: u8 = 2;
/// Give up at once.
pub(super) const FAIL: u8 = 3;

/// What all threads of a phase share.
pub(super) struct Shared {
    /// What the watching thread wants: RUN, STOP, PARK or FAIL.
    pub(super) control: AtomicU8,
    /// CPU time of threads that ended, nanoseconds.
    pub(super) cpu_ns: AtomicU64,
    /// Signalled when a thread ends or parks.
    pub(super) event: OwnedFd,
    pub(super) gauges: Vec<LaneGauge>,
    roll: Mutex<Roll>,
    resume: Condvar,
}

/// Who is where.
#[derive(Default)]
struct Roll {
    running: usize,
    /// Threads parked for the present `epoch`.
    parked: usize,
    /// Grows with each PARK: a thread that slept through a whole life of a server between two of them must look at its
    /// rings again.
    epoch: u64,
    error: Option<Error>,
}

impl Shared {
    pub(super) fn new(lanes: usize, threads: usize) -> Result<Self> {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|e| Error::with(Kind::System, "cannot make an eventfd: raise ulimit -n", e))?;
        Ok(Self {
            control: AtomicU8::new(RUN),
            cpu_ns: AtomicU64::new(0),
            event,
            gauges: (0..lanes).map(|_| LaneGauge::default()).collect(),
            roll: Mutex::new(Roll { running: threads, ..Roll::default() }),
            resume: Condvar::new(),
        })
    }

    fn roll(&self) -> MutexGuard<'_, Roll> {
        self.roll.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Threads that have not ended.
    pub(super) fn running(&self) -> usize {
        self.roll().running
    }

    /// Whether all threads that have not ended are parked.
    pub(super) fn all_parked(&self) -> bool {
        let roll = self.roll();
        roll.parked == roll.running
    }

    /// The first error of any thread.
    pub(super) fn take_error(&self) -> Option<Error> {
        self.roll().error.take()
    }

    /// Says what all threads are to do from now on. They must be woken if they may sleep on their queues.
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

/// Runs `lanes` on the calling thread until they are finished. Errors go to `shared`.
pub(super) fn run(lanes: &mut [Lane<'_>], shared: &Shared, spin: Duration, cpu: Option<usize>) {
    let before = thread_cpu();
    let result = pin(cpu).and_then(|()| drive(lanes, shared, spin.as_nanos() as u64));
    lanes.iter().for_each(Lane::note_base);
    lanes.iter_mut().for_each(Lane::end_notes);
    let spent = thread_cpu().saturating_sub(before);
    shared.cpu_ns.fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
    shared.end(result.err());
}

fn pin(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|e| Error::with(Kind::Usage, format!("cannot run on CPU {cpu}: check --pin"), e))
}

fn drive(lanes: &mut [Lane<'_>], shared: &Shared, spin_ns: u64) -> Result<()> {
    loop {
        let mut done = 0;
        for lane in lanes.iter_mut() {
            done += lane.reap()?;
        }
        match shared.control.load(Ordering::Acquire) {
            RUN => {}
            STOP => lanes.iter_mut().for_each(Lane::stop),
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
        if !waiting && lanes.iter().all(Lane::is_finished) {
            return Ok(());
        }
        if done == 0 && !spin_for(lanes, spin_ns) {
            sleep(lanes);
        }
    }
}

/// The server is away and writes no more: takes the last completions and waits for the next server.
fn park(lanes: &mut [Lane<'_>], shared: &Shared) -> Result<()> {
    for lane in lanes.iter_mut() {
        while lane.reap()? > 0 {}
        lane.note_base();
    }
    shared.park();
    Ok(())
}

/// Looks for completions for a bounded time; true if there are some.
fn spin_for(lanes: &[Lane<'_>], spin_ns: u64) -> bool {
    if spin_ns == 0 {
        return false;
    }
    let end = now_ns() + spin_ns;
    loop {
        // The clock costs more than a look at the rings.
        for _ in 0..16 {
            if lanes.iter().any(|lane| lane.queue.has_used()) {
                return true;
            }
            std::hint::spin_loop();
        }
        if now_ns() >= end {
            return false;
        }
    }
}

/// Sleeps until a completion comes or the watching thread calls.
fn sleep(lanes: &mut [Lane<'_>]) {
    let mut ready = false;
    for lane in lanes.iter_mut() {
        ready |= lane.queue.enable_notify();
    }
    // A change of `control` that was not seen yet is followed by a wake-up, which the eventfd keeps.
    if !ready {
        match lanes {
            [lane] => lane.queue.sleep(),
            _ => sleep_on_many(lanes),
        }
    }
    for lane in lanes.iter_mut() {
        lane.queue.disable_notify();
    }
}

fn sleep_on_many(lanes: &mut [Lane<'_>]) {
    let ready: Vec<bool> = {
        let mut fds: Vec<_> =
            lanes.iter().map(|lane| PollFd::new(&*lane.queue.parts().call, PollFlags::IN)).collect();
        let _ = poll(&mut fds, None);
        fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect()
    };
    for (lane, _) in lanes.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
        lane.queue.drain_call();
    }
}
