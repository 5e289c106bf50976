//! Locking without a word about poisoned locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose holders leave its data whole when they panic.
///
/// The programs abort on a panic, so only a test can see a poisoned lock. There the data of the failed thread is of use to the
/// threads that clean up.
pub trait Locked<T: ?Sized> {
    /// Waits for the lock.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T: ?Sized> Locked<T> for Mutex<T> {
    #[inline]
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
