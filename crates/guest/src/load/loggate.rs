//! The check of the dirty log under load. Lanes record what the device wrote, and another thread
//! switches the log.
//!
//! A round has these steps. Lanes start to record completions ([`LogGate::arm`]). The log is
//! switched on. From then on, the device must log everything that it completes, also requests that
//! it took before. The position of each used ring after the switch separates the completions that
//! count from the others ([`LogGate::count`]). Then lanes submit only as many requests as there are
//! buffers that were not used since, and stop. So a page that is not in the log was not logged at
//! all. No later request can have marked it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::driver::RingParts;
use crate::error::{Result, fail};

/// The steps of a round, in the low bits of its number. 0 before the first round.
const ARM: u64 = 1;
const COUNT: u64 = 2;
const REST: u64 = 3;
/// [`LaneGate::done`] of a lane that records nothing more.
const ENDED: u64 = u64::MAX;

/// A write of the device.
#[derive(Clone, Copy, Debug)]
pub struct Note {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The kind of data.
    pub what: &'static str,
    /// Position of the request in the used ring.
    position: u16,
}

#[derive(Debug, Default)]
struct LaneGate {
    /// Position of the used ring after the switch.
    from: AtomicU32,
    /// The step that the lane is in, and the last step that it completed.
    seen: AtomicU64,
    done: AtomicU64,
    notes: Mutex<Vec<Note>>,
}

/// The synchronization of lanes with the thread that switches the log.
#[derive(Debug)]
pub struct LogGate {
    /// Round times four, plus its step. Written by the thread that switches.
    part: AtomicU64,
    lanes: Vec<LaneGate>,
}

impl LogGate {
    /// Makes a gate for this number of queues.
    pub fn new(lanes: usize) -> Self {
        Self { part: AtomicU64::new(0), lanes: (0..lanes).map(|_| LaneGate::default()).collect() }
    }

    fn go_to(&self, part: u64, rings: &[RingParts]) {
        let now = self.part.load(Ordering::Acquire);
        let next = if part == ARM { (now / 4 + 1) * 4 + ARM } else { now / 4 * 4 + part };
        self.part.store(next, Ordering::Release);
        rings.iter().for_each(RingParts::wake);
    }

    /// Makes all lanes record their completions. Returns when all do. Returns false if all have
    /// ended.
    ///
    /// # Errors
    /// It takes longer than `patience`.
    pub fn arm(&self, rings: &[RingParts], patience: Duration) -> Result<bool> {
        self.go_to(ARM, rings);
        self.wait_for(patience, |lane| lane.seen.load(Ordering::Acquire))
    }

    /// Starts to count after the log is on, from the current position of each ring.
    pub fn count(&self, rings: &[RingParts]) {
        for (lane, ring) in self.lanes.iter().zip(rings) {
            lane.from.store(u32::from(ring.device.load_u16(2)), Ordering::Relaxed);
        }
        self.go_to(COUNT, rings);
    }

    /// Waits until every lane is idle or has ended. Returns false if all have ended.
    ///
    /// # Errors
    /// It takes longer than `patience`.
    pub fn wait(&self, patience: Duration) -> Result<bool> {
        self.wait_for(patience, |lane| lane.done.load(Ordering::Acquire))
    }

    fn wait_for(&self, patience: Duration, at: impl Fn(&LaneGate) -> u64) -> Result<bool> {
        let part = self.part.load(Ordering::Acquire);
        let deadline = Instant::now() + patience;
        while !self.lanes.iter().all(|lane| at(lane) >= part) {
            if Instant::now() > deadline {
                return Err(fail!(
                    Io,
                    "load threads did not come to rest within {patience:?} of the log's switch"
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(!self.ended())
    }

    /// Returns whether all lanes have ended.
    pub fn ended(&self) -> bool {
        self.lanes.iter().all(|lane| lane.done.load(Ordering::Acquire) == ENDED)
    }

    /// Returns the writes that must have been logged.
    pub fn take(&self) -> Vec<Note> {
        self.lanes.iter().flat_map(|lane| std::mem::take(&mut *lane.notes())).collect()
    }

    /// Ends the round. The lanes continue.
    pub fn rest(&self, rings: &[RingParts]) {
        self.go_to(REST, rings);
    }
}

impl LaneGate {
    fn notes(&self) -> MutexGuard<'_, Vec<Note>> {
        self.notes.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A lane's part of the gate. It belongs to the lane's thread.
pub(super) struct Notes<'a> {
    gate: &'a LogGate,
    lane: &'a LaneGate,
    part: u64,
    /// Requests that may be submitted in the counting part of a round, and how many are left.
    room: usize,
    left: usize,
    notes: Vec<Note>,
    used_ring: u64,
    size: u16,
}

impl<'a> Notes<'a> {
    /// Makes the part for the queue of `ring`, whose requests use `buffers` in turn.
    pub(super) fn new(gate: &'a LogGate, ring: &RingParts, buffers: usize) -> Self {
        Self {
            gate,
            lane: &gate.lanes[usize::from(ring.index)],
            part: 0,
            // The other half is for requests that are in flight at the switch, or complete before
            // the count starts.
            room: (buffers / 2).max(1),
            left: 0,
            notes: Vec::new(),
            used_ring: ring.device.guest(),
            size: ring.size,
        }
    }

    /// Reads the current step of the round. `at_rest`: no request is in flight.
    pub(super) fn look(&mut self, at_rest: bool) {
        let part = self.gate.part.load(Ordering::Acquire);
        if part != self.part {
            self.part = part;
            self.lane.seen.store(part, Ordering::Release);
            match part % 4 {
                COUNT => self.left = self.room,
                _ => self.notes.clear(),
            }
        }
        if part % 4 == COUNT && self.left == 0 && at_rest && self.lane.done.load(Ordering::Relaxed) != part {
            self.hand_over();
            self.lane.done.store(part, Ordering::Release);
        }
    }

    fn hand_over(&mut self) {
        let from = self.lane.from.load(Ordering::Relaxed) as u16;
        let counts = |note: &Note| note.position.wrapping_sub(from) as i16 >= 0;
        self.lane.notes().extend(self.notes.drain(..).filter(counts));
    }

    /// Returns whether one more request may be submitted, and counts it as submitted.
    pub(super) fn may_submit(&mut self) -> bool {
        if self.part % 4 != COUNT {
            return true;
        }
        let may = self.left > 0;
        self.left -= usize::from(may);
        may
    }

    /// Records a completion. `next_used` is the position after it.
    #[inline]
    pub(super) fn completed(&mut self, next_used: u16, status_addr: u64, data: (u64, u32)) {
        if !matches!(self.part % 4, ARM | COUNT) {
            return;
        }
        let position = next_used.wrapping_sub(1);
        let element = self.used_ring + 4 + 8 * u64::from(position % self.size);
        let wrote = [
            (data.0, data.1, "data"),
            (status_addr, 1, "status"),
            (element, 8, "used element"),
            (self.used_ring + 2, 2, "used index"),
        ];
        self.notes.extend(wrote.map(|(addr, len, what)| Note { addr, len, what, position }));
    }

    /// Ends the recording. Records that were not collected are dropped.
    pub(super) fn end(&mut self) {
        self.lane.seen.store(ENDED, Ordering::Release);
        self.lane.done.store(ENDED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{DEFAULT_BASE, Memory, Queue, QueueShape, RegionSpec};
    use virtio::ring::RingFeatures;

    #[test]
    fn what_was_used_before_the_switch_does_not_count() {
        let memory = Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size: 1 << 20 }]).unwrap();
        let shape = QueueShape { size: 8, features: RingFeatures::default(), indirect_cap: 3 };
        let queue = Queue::new(&memory, 0, shape).unwrap();
        let ring = queue.parts().clone();
        let (gate, rings) = (LogGate::new(1), [ring.clone()]);
        let mut notes = Notes::new(&gate, &ring, 4);
        assert!(gate.arm(&rings, Duration::ZERO).is_err(), "the lane has not seen it");
        notes.look(false);
        assert!(gate.wait_for(Duration::ZERO, |lane| lane.seen.load(Ordering::Acquire)).unwrap());
        notes.completed(1, 0x10, (0x1000, 512));
        ring.device.store_u16(2, 1);
        gate.count(&rings);
        assert!(notes.may_submit(), "it has not seen that it counts");
        notes.look(false);
        assert!(notes.may_submit() && notes.may_submit() && !notes.may_submit());
        notes.completed(2, 0x10, (0x2000, 512));
        notes.look(false);
        assert!(gate.wait(Duration::ZERO).is_err(), "a request is outstanding");
        notes.look(true);
        assert!(gate.wait(Duration::ZERO).unwrap());
        let taken = gate.take();
        gate.rest(&rings);
        assert_eq!(taken.iter().filter(|n| n.what == "data").map(|n| n.addr).collect::<Vec<_>>(), [0x2000]);
        assert_eq!(taken.len(), 4);
        notes.look(true);
        assert!(notes.may_submit() && !gate.ended());
        notes.end();
        assert!(gate.ended());
    }
}
