//! Locks that are held while the kernel waits for a disk, taken with a limit by threads that may not wait for ever.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// How often a lock is tried. Those who wait here wait for a disk, so that this adds little.
const EVERY: Duration = Duration::from_millis(5);

/// Takes a lock within `timeout`; none: another thread holds it still.
pub(super) fn lock_within<T>(lock: &Mutex<T>, timeout: Duration) -> Option<MutexGuard<'_, T>> {
    let end = Instant::now() + timeout;
    loop {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(_)) => unreachable!("no holder panics"),
            Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
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
        assert!(lock_within(&lock, Duration::from_millis(20)).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lock_within(&lock, Duration::from_secs(60)).map(|guard| *guard));
            drop(held);
            assert_eq!(waits.join().unwrap(), Some(1));
        });
    }
}
