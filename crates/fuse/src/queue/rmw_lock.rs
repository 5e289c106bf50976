//! Keeps other writes away from a block that is read, changed and written back (read-modify-write).
//!
//! A file can be written byte by byte, an image with O_DIRECT only block by block. The [blocking
//! thread](super::blocking) reads a block, changes part of it and writes it back. Another write to
//! that block would be lost if it happened in between. Such requests are rare, so they may be slow:
//! the thread takes the lock exclusively, waits until all writes of the export that are in flight
//! have ended, and other writes wait until it releases the lock. A write of whole blocks is
//! frequent. It takes the lock shared, which costs one store and one fence.
//!
//! Queues take the lock shared, on their workers. Only the blocking thread takes it exclusively.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vshunt_types::sync::Locked;

use vshunt_engine::EventFd;

/// How often the exclusive side looks whether the writes in flight have ended.
const LOOK: Duration = Duration::from_micros(50);

/// The share that one queue has in the lock.
#[repr(align(128))]
pub(super) struct WriteShare {
    /// Writes in flight. Only the worker of the queue writes it.
    writing: AtomicU32,
    /// Writes of the queue wait for the lock.
    waiting: AtomicBool,
    /// Signalled when they can be tried again.
    eventfd: Arc<EventFd>,
}

/// See the module.
pub(super) struct RmwLock {
    exclusive: AtomicBool,
    shares: Box<[Arc<WriteShare>]>,
    /// One thread at a time holds it exclusively.
    holder: Mutex<()>,
}

impl RmwLock {
    /// A lock for queues with these eventfds, by queue index.
    pub(super) fn new(eventfds: &[Arc<EventFd>]) -> Self {
        let share = |eventfd: &Arc<EventFd>| {
            Arc::new(WriteShare {
                writing: AtomicU32::new(0),
                waiting: AtomicBool::new(false),
                eventfd: eventfd.clone(),
            })
        };
        Self {
            exclusive: AtomicBool::new(false),
            shares: eventfds.iter().map(share).collect(),
            holder: Mutex::new(()),
        }
    }

    /// The share of the queue with that index.
    pub(super) fn share(&self, queue: u16) -> Option<Arc<WriteShare>> {
        self.shares.get(usize::from(queue)).cloned()
    }

    /// Takes the lock shared for one write. False: the write has to wait, and to try again when the
    /// eventfd is signalled.
    #[inline]
    pub(super) fn lock_shared(&self, share: &WriteShare) -> bool {
        if self.try_lock_shared(share) {
            return true;
        }
        share.waiting.store(true, SeqCst);
        // The holder may have released the lock before it could see that a write waits.
        self.try_lock_shared(share)
    }

    #[inline]
    fn try_lock_shared(&self, share: &WriteShare) -> bool {
        let n = share.writing.load(Relaxed);
        share.writing.store(n + 1, Relaxed);
        // Either this thread sees that the lock is held exclusively, or the holder sees the write.
        fence(SeqCst);
        if self.exclusive.load(Relaxed) {
            share.writing.store(n, Release);
            return false;
        }
        true
    }

    /// A write that holds the lock has ended.
    #[inline]
    pub(super) fn unlock_shared(&self, share: &WriteShare) {
        share.writing.store(share.writing.load(Relaxed) - 1, Release);
    }

    /// Calls `f` while no write is in flight. Waits for those that are, without a limit.
    pub(super) fn exclusively<R>(&self, f: impl FnOnce() -> R) -> R {
        let _holder = self.holder.locked();
        self.exclusive.store(true, Relaxed);
        fence(SeqCst);
        while self.shares.iter().any(|share| share.writing.load(Acquire) > 0) {
            std::thread::sleep(LOOK);
        }
        let result = f();
        self.exclusive.store(false, SeqCst);
        for share in &self.shares {
            if share.waiting.swap(false, SeqCst) {
                share.eventfd.signal();
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_wait_and_are_tried_again() {
        let eventfds: Vec<_> = (0..2).map(|_| Arc::new(EventFd::make().unwrap())).collect();
        let lock = RmwLock::new(&eventfds);
        let shares = [lock.share(0).unwrap(), lock.share(1).unwrap()];
        assert!(lock.share(2).is_none());
        assert!(lock.lock_shared(&shares[0]));
        lock.unlock_shared(&shares[0]);
        lock.exclusively(|| {
            assert!(!lock.lock_shared(&shares[1]));
            assert!(!eventfds[1].take());
        });
        assert!(eventfds[1].take());
        assert!(!eventfds[0].take(), "no write of that queue waited");
        assert!(lock.lock_shared(&shares[1]));
    }

    #[test]
    fn no_write_is_in_flight_while_it_is_held_exclusively() {
        let eventfds: Vec<_> = (0..2).map(|_| Arc::new(EventFd::make().unwrap())).collect();
        let lock = RmwLock::new(&eventfds);
        let inside = AtomicU32::new(0);
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            for queue in 0..2 {
                let (lock, inside, over) = (&lock, &inside, &over);
                s.spawn(move || {
                    let share = lock.share(queue).unwrap();
                    while !over.load(Relaxed) {
                        if lock.lock_shared(&share) {
                            inside.fetch_add(1, SeqCst);
                            inside.fetch_sub(1, SeqCst);
                            lock.unlock_shared(&share);
                        }
                    }
                });
            }
            for _ in 0..200 {
                lock.exclusively(|| assert_eq!(inside.load(SeqCst), 0));
            }
            over.store(true, Relaxed);
        });
    }
}
