//! Locks whose holder may wait for a disk or a worker, for threads that may not wait as long.
//!
//! A command has one deadline for all its waits. So these functions take the time at which to give
//! up, not a duration.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Time between two attempts to lock. The holder waits for a disk or a worker, so this adds little.
const EVERY: Duration = Duration::from_millis(1);

/// Takes a lock, and gives up at `until`. `None`: another thread still holds it. If `until` has
/// passed, the lock is tried once.
pub fn lock_until<T>(lock: &Mutex<T>, until: Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= until => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_held_is_given_up() {
        let lock = Mutex::new(1);
        let held = lock.lock().unwrap();
        assert!(lock_until(&lock, Instant::now() + Duration::from_millis(20)).is_none());
        std::thread::scope(|scope| {
            let waits = scope
                .spawn(|| lock_until(&lock, Instant::now() + Duration::from_secs(60)).map(|guard| *guard));
            drop(held);
            assert_eq!(waits.join().unwrap(), Some(1));
        });
    }

    /// The second of two waits gets the time that the first one left.
    #[test]
    fn several_locks_have_one_deadline() {
        let locks = [Mutex::new(1), Mutex::new(2), Mutex::new(3)];
        let held = [locks[0].lock().unwrap(), locks[1].lock().unwrap()];
        let until = Instant::now() + Duration::from_millis(20);
        assert!(lock_until(&locks[0], until).is_none() && Instant::now() >= until);
        assert!(lock_until(&locks[1], until).is_none());
        assert_eq!(
            lock_until(&locks[2], until).map(|guard| *guard),
            Some(3),
            "one that is free is had all the same"
        );
        drop(held);
    }
}
