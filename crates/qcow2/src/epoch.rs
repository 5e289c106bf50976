//! Epoch-based reclamation: when a cluster that was removed from the map has no user any more.
//!
//! A request looks up a cluster and then reads or writes it, without a lock. Meanwhile another request may remove that
//! cluster from the map. It must not be allocated again before the first request has ended. Therefore each request enters
//! an epoch, and leaves it at its end. A cluster that was removed in epoch `e` has no users once the epoch is `e + 2`.
//!
//! Called by every request, at its start and end, on its worker. [`Epochs::advance`] is called by allocation and by flushes.

#![allow(clippy::indexing_slicing, reason = "an epoch modulo the number of those that are counted")]

use crate::bytes::to_usize;
use crate::lock::Locked;
use std::sync::Arc;

use crate::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, AtomicU64, Mutex, fence};

/// A number that only grows.
pub(crate) type Epoch = u64;

/// How many epochs requests can be in at a time: the one that is and the one before, and the next one's place has to be
/// empty when it begins.
const LIVE: usize = 3;

/// Requests under way of one user (a queue on its worker), by epoch; changed by its thread alone, read by any. In a cache
/// line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Member {
    active: [AtomicU32; LIVE],
}

/// The epochs of one image.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    now: AtomicU64,
    /// Guards the list, not what is in it.
    members: Mutex<Vec<Arc<Member>>>,
}

fn place(epoch: Epoch) -> usize {
    to_usize(epoch % LIVE as u64)
}

impl Epochs {
    /// One user more.
    pub(crate) fn join(&self) -> Arc<Member> {
        let member = Arc::new(Member::default());
        self.members.locked().push(member.clone());
        member
    }

    /// A user goes, with no request under way.
    pub(crate) fn leave(&self, member: &Arc<Member>) {
        self.members.locked().retain(|m| !Arc::ptr_eq(m, member));
    }

    /// The epoch that is. Whoever takes a cluster out of the map asks afterwards.
    pub(crate) fn now(&self) -> Epoch {
        // Against the one in `enter`: who enters after it sees the map as it is now.
        fence(SeqCst);
        self.now.load(Relaxed)
    }

    /// A request begins.
    #[inline]
    pub(crate) fn enter(&self, member: &Member) -> Epoch {
        loop {
            let epoch = self.now.load(Relaxed);
            let active = &member.active[place(epoch)];
            // Its user alone changes it.
            active.store(active.load(Relaxed) + 1, Relaxed);
            // Against those in `now` and `advance`: either they come later and the count is seen, or this one does, and
            // what was done before them is: another epoch, and a map without what went.
            fence(SeqCst);
            if self.now.load(Relaxed) == epoch {
                return epoch;
            }
            active.store(active.load(Relaxed) - 1, Release);
        }
    }

    /// The request of that epoch is over.
    #[inline]
    pub(crate) fn exit(&self, member: &Member, epoch: Epoch) {
        let active = &member.active[place(epoch)];
        active.store(active.load(Relaxed) - 1, Release);
    }

    /// Goes on to the next epoch if nobody is in the last one. The epoch that is then.
    pub(crate) fn advance(&self) -> Epoch {
        let members = self.members.locked();
        let now = self.now.load(Relaxed);
        let last = place(now + LIVE as u64 - 1);
        // Against the one in `enter`.
        fence(SeqCst);
        if members.iter().all(|m| m.active[last].load(Acquire) == 0) {
            // Only here, under the lock.
            self.now.store(now + 1, Release);
            return now + 1;
        }
        now
    }

    /// Whether what went in `epoch` is free of users.
    pub(crate) fn is_over(&self, epoch: Epoch) -> bool {
        self.now() >= epoch + 2
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;

    #[test]
    fn what_is_in_use_is_not_over() {
        loom::model(|| {
            let epochs = Arc::new(Epochs::default());
            // What a request finds in the map, and whether that was given to somebody else.
            let (map, given) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let member = epochs.join();
            let user = {
                let (epochs, map, given, member) =
                    (epochs.clone(), map.clone(), given.clone(), member.clone());
                loom::thread::spawn(move || {
                    let epoch = epochs.enter(&member);
                    if map.load(Acquire) == 0 {
                        assert_eq!(given.load(Acquire), 0, "a cluster that is in use was given away");
                    }
                    epochs.exit(&member, epoch);
                })
            };
            map.store(1, Release);
            let gone = epochs.now();
            epochs.advance();
            epochs.advance();
            if epochs.is_over(gone) {
                given.store(1, Release);
            }
            user.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_over_while_somebody_is_in_it() {
        let epochs = Epochs::default();
        let (a, b) = (epochs.join(), epochs.join());
        let long = epochs.enter(&a);
        let gone = epochs.now();
        for _ in 0..10 {
            let short = epochs.enter(&b);
            epochs.advance();
            epochs.exit(&b, short);
            assert!(!epochs.is_over(gone));
        }
        epochs.exit(&a, long);
        epochs.advance();
        epochs.advance();
        assert!(epochs.is_over(gone));
        epochs.leave(&a);
        let stays = epochs.enter(&b);
        epochs.leave(&b);
        for _ in 0..3 {
            epochs.advance();
        }
        assert!(epochs.is_over(stays), "who left is not asked");
    }

    #[test]
    fn threads() {
        // A value is "freed" by adding 1 to it once its epoch is over; who is in between never sees it change.
        let epochs = Epochs::default();
        let shelf: Vec<AtomicU64> = (0..2).map(|_| AtomicU64::new(0)).collect();
        let current = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    let me = epochs.join();
                    for _ in 0..20_000 {
                        let epoch = epochs.enter(&me);
                        let at = &shelf[current.load(SeqCst) as usize];
                        let seen = at.load(Relaxed);
                        std::hint::spin_loop();
                        assert_eq!(at.load(Relaxed), seen);
                        epochs.exit(&me, epoch);
                    }
                    epochs.leave(&me);
                });
            }
            for turn in 0..2_000u64 {
                let old = current.swap(1 - turn % 2, SeqCst);
                let gone = epochs.now();
                if old == 1 - turn % 2 {
                    continue;
                }
                while !epochs.is_over(gone) {
                    epochs.advance();
                    std::thread::yield_now();
                }
                shelf[old as usize].fetch_add(1, Relaxed);
            }
        });
    }
}
