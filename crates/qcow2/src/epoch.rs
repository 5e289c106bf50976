//! Epoch-based reclamation: when a cluster that was removed from the map has no user any more.
//!
//! A request looks up a cluster and then reads or writes it, without a lock. Meanwhile another
//! request may remove that cluster from the map. It must not be allocated again before the first
//! request has ended. Therefore each request enters an epoch, and leaves it at its end. A cluster
//! that was removed in epoch `e` has no users once the epoch is `e + 2`.
//!
//! Every request calls it at its start and end, on its worker. Allocation and flushes call
//! [`Epochs::advance`].

use crate::bytes::to_usize;
use crate::lock::Locked;
use std::sync::Arc;

use crate::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, AtomicU64, Mutex, fence};

/// A number that only grows.
pub(crate) type Epoch = u64;

/// Counts of a member. Requests can be in two epochs at a time: the present one and the one before.
/// The place of the next one has to be empty when it starts. So three would do; with a power of
/// two, a place costs no division.
const LIVE: usize = 4;

/// Requests in flight of one user (a queue on its worker), by epoch. Only the user's thread changes
/// it, and any thread reads it. It has a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Member {
    active: [AtomicU32; LIVE],
}

/// The epochs of one image.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    now: AtomicU64,
    /// Guards the list, not its elements.
    members: Mutex<Vec<Arc<Member>>>,
}

fn place(epoch: Epoch) -> usize {
    to_usize(epoch % LIVE as u64)
}

impl Epochs {
    /// Adds a user.
    pub(crate) fn join(&self) -> Arc<Member> {
        let member = Arc::new(Member::default());
        self.members.locked().push(member.clone());
        member
    }

    /// Removes a user, which has no request in flight.
    pub(crate) fn leave(&self, member: &Arc<Member>) {
        self.members.locked().retain(|m| !Arc::ptr_eq(m, member));
    }

    /// Returns the present epoch. To be called after a cluster was removed from the map.
    pub(crate) fn now(&self) -> Epoch {
        // Pairs with the fence in `enter`: a request that enters after this one sees the present
        // map.
        fence(SeqCst);
        self.now.load(Relaxed)
    }

    /// Starts a request. Returns its epoch.
    ///
    /// The fence costs more than a look-up in the map. It is left out if the user already has a
    /// request in the present epoch: the count is not 0 from the start of that request on, which
    /// had the fence, to the end of this one. So this request is protected as well as that one, and
    /// it sees a map that is at least as new. A user does not stay in an epoch for longer by that:
    /// after [`advance`](Self::advance), its next request is the first one in the new epoch.
    #[expect(clippy::indexing_slicing, reason = "`place` reduces an epoch modulo the length of the array")]
    #[inline]
    pub(crate) fn enter(&self, member: &Member) -> Epoch {
        loop {
            let epoch = self.now.load(Relaxed);
            let active = &member.active[place(epoch)];
            // Only its user changes it.
            let others = active.load(Relaxed);
            active.store(others + 1, Relaxed);
            if others > 0 {
                return epoch;
            }
            // Pairs with the fences in `now` and `advance`. Either they come later and see the
            // count, or this one does, and the request sees what was done before them: another
            // epoch, and a map without the removed clusters.
            fence(SeqCst);
            if self.now.load(Relaxed) == epoch {
                return epoch;
            }
            active.store(0, Release);
        }
    }

    /// Ends the request of that epoch.
    #[expect(clippy::indexing_slicing, reason = "`place` reduces an epoch modulo the length of the array")]
    #[inline]
    pub(crate) fn exit(&self, member: &Member, epoch: Epoch) {
        let active = &member.active[place(epoch)];
        active.store(active.load(Relaxed) - 1, Release);
    }

    /// Moves on to the next epoch if no request is in the one before. Returns the present epoch.
    #[expect(clippy::indexing_slicing, reason = "`place` reduces an epoch modulo the length of the array")]
    pub(crate) fn advance(&self) -> Epoch {
        let members = self.members.locked();
        let now = self.now.load(Relaxed);
        let last = place(now + LIVE as u64 - 1);
        // Pairs with the fence in `enter`.
        fence(SeqCst);
        if members.iter().all(|m| m.active[last].load(Acquire) == 0) {
            // Only this function stores it, under the lock.
            self.now.store(now + 1, Release);
            return now + 1;
        }
        now
    }

    /// Returns whether clusters that were removed in `epoch` have no users.
    pub(crate) fn is_over(&self, epoch: Epoch) -> bool {
        self.now() >= epoch + 2
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;

    /// Removes a cluster from the map while `user` runs on a thread of its own with the epochs, its
    /// member, and a look into the map. The look fails if it finds a cluster that was given away.
    fn removed_beside(user: fn(&Epochs, &Member, &dyn Fn())) {
        loom::model(move || {
            let epochs = Arc::new(Epochs::default());
            // The value that a request finds in the map, and whether it was given to another user.
            let (map, given) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let member = epochs.join();
            let user = {
                let (epochs, map, given, member) =
                    (epochs.clone(), map.clone(), given.clone(), member.clone());
                let look = move || {
                    if map.load(Acquire) == 0 {
                        assert_eq!(given.load(Acquire), 0, "a cluster that is in use was given away");
                    }
                };
                loom::thread::spawn(move || user(&epochs, &member, &look))
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

    #[test]
    fn what_is_in_use_is_not_over() {
        removed_beside(|epochs, member, look| {
            let epoch = epochs.enter(member);
            look();
            epochs.exit(member, epoch);
        });
    }

    /// Tests requests of one user that overlap: each but the first enters without a fence, and the
    /// first one ends before the last one looks into the map.
    #[test]
    fn what_a_later_request_uses_is_not_over() {
        removed_beside(|epochs, member, look| {
            let first = epochs.enter(member);
            let second = epochs.enter(member);
            epochs.exit(member, first);
            look();
            epochs.exit(member, second);
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
    fn a_user_that_always_has_requests_does_not_stay_in_an_epoch() {
        let epochs = Epochs::default();
        let user = epochs.join();
        let gone = epochs.now();
        let mut last = epochs.enter(&user);
        for _ in 0..LIVE {
            // The next request begins before the last one ends.
            let next = epochs.enter(&user);
            epochs.exit(&user, last);
            epochs.advance();
            last = next;
        }
        assert!(epochs.is_over(gone), "{}", epochs.now());
        epochs.exit(&user, last);
    }

    #[test]
    fn threads() {
        // A value is "freed" by adding 1 to it once its epoch is over. A request that is in between
        // never sees it change.
        let epochs = Epochs::default();
        let shelf: Vec<AtomicU64> = (0..2).map(|_| AtomicU64::new(0)).collect();
        let current = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    let me = epochs.join();
                    let mut before = None;
                    for request in 0..20_000 {
                        let epoch = epochs.enter(&me);
                        let at = &shelf[current.load(SeqCst) as usize];
                        let seen = at.load(Relaxed);
                        std::hint::spin_loop();
                        assert_eq!(at.load(Relaxed), seen);
                        // Some requests end after the next one has begun.
                        let ends = if request % 8 < 4 { before.replace(epoch) } else { Some(epoch) };
                        ends.into_iter().for_each(|epoch| epochs.exit(&me, epoch));
                    }
                    before.into_iter().for_each(|epoch| epochs.exit(&me, epoch));
                    epochs.leave(&me);
                });
            }
            for iteration in 0..2_000u64 {
                let old = current.swap(1 - iteration % 2, SeqCst);
                let gone = epochs.now();
                if old == 1 - iteration % 2 {
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
