//! Keeps writes off a range that is read and written back.
//!
//! A file can be written byte by byte, an image with O_DIRECT block by block only. What is less than a block is read,
//! changed and written back (by the [clerk](super::clerk)), and no other write may go to that block meanwhile, or it
//! would be undone. That is rare, so it may cost: the gate is closed, all writes of the export that are under way end,
//! and others wait until it is open again. What is not rare, a write of whole blocks, pays a store and a fence.
//!
//! Enter and leave are called by queues on their workers, close by the clerk alone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vshunt_types::sync::Locked;

use vshunt_engine::EventFd;

/// How often the one who closes looks whether writes are over.
const LOOK: Duration = Duration::from_micros(50);

#[repr(align(128))]
struct Lane {
    /// Writes under way; written by the queue's worker alone.
    writing: AtomicU32,
    /// The queue has writes that wait.
    waiting: AtomicBool,
    eventfd: Arc<EventFd>,
}

/// See the module.
pub(super) struct Gate {
    closed: AtomicBool,
    lanes: Box<[Lane]>,
    /// One closes at a time.
    closing: Mutex<()>,
}

impl Gate {
    /// A gate for queues with these eventfds.
    pub(super) fn new(eventfds: &[Arc<EventFd>]) -> Self {
        let lane = |eventfd: &Arc<EventFd>| Lane {
            writing: AtomicU32::new(0),
            waiting: AtomicBool::new(false),
            eventfd: eventfd.clone(),
        };
        Self {
            closed: AtomicBool::new(false),
            lanes: eventfds.iter().map(lane).collect(),
            closing: Mutex::new(()),
        }
    }

    /// Queue `me` begins a write. False: it has to wait, and to try again when its eventfd rings.
    #[inline]
    pub(super) fn enter(&self, me: u16) -> bool {
        if self.try_enter(me) {
            return true;
        }
        self.lanes[usize::from(me)].waiting.store(true, SeqCst);
        // It may have been opened before it could see that we wait.
        self.try_enter(me)
    }

    #[inline]
    fn try_enter(&self, me: u16) -> bool {
        let writing = &self.lanes[usize::from(me)].writing;
        let n = writing.load(Relaxed);
        writing.store(n + 1, Relaxed);
        // Either we see that it is closed, or the one who closes sees us.
        fence(SeqCst);
        if self.closed.load(Relaxed) {
            writing.store(n, Release);
            return false;
        }
        true
    }

    /// A write that entered is over.
    #[inline]
    pub(super) fn leave(&self, me: u16) {
        let writing = &self.lanes[usize::from(me)].writing;
        writing.store(writing.load(Relaxed) - 1, Release);
    }

    /// Calls `f` while no write is under way. Waits for those that are, as long as it takes.
    pub(super) fn closed<R>(&self, f: impl FnOnce() -> R) -> R {
        let _one = self.closing.locked();
        self.closed.store(true, Relaxed);
        fence(SeqCst);
        while self.lanes.iter().any(|l| l.writing.load(Acquire) > 0) {
            std::thread::sleep(LOOK);
        }
        let result = f();
        self.closed.store(false, SeqCst);
        for lane in &self.lanes {
            if lane.waiting.swap(false, SeqCst) {
                lane.eventfd.signal();
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_wait_and_are_told() {
        let eventfds: Vec<_> = (0..2).map(|_| Arc::new(EventFd::make().unwrap())).collect();
        let gate = Gate::new(&eventfds);
        assert!(gate.enter(0));
        gate.leave(0);
        gate.closed(|| {
            assert!(!gate.enter(1));
            assert!(!eventfds[1].take());
        });
        assert!(eventfds[1].take());
        assert!(!eventfds[0].take(), "that one did not wait");
        assert!(gate.enter(1));
    }

    #[test]
    fn none_is_under_way_while_it_is_closed() {
        let eventfds: Vec<_> = (0..2).map(|_| Arc::new(EventFd::make().unwrap())).collect();
        let gate = Gate::new(&eventfds);
        let inside = AtomicU32::new(0);
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            for me in 0..2 {
                let (gate, inside, over) = (&gate, &inside, &over);
                s.spawn(move || {
                    while !over.load(Relaxed) {
                        if gate.enter(me) {
                            inside.fetch_add(1, SeqCst);
                            inside.fetch_sub(1, SeqCst);
                            gate.leave(me);
                        }
                    }
                });
            }
            for _ in 0..200 {
                gate.closed(|| assert_eq!(inside.load(SeqCst), 0));
            }
            over.store(true, Relaxed);
        });
    }
}
