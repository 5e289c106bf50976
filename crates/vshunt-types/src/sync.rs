//! Locking without handling of poisoned locks.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Locks a mutex whose holders leave its data whole when they panic.
///
/// The programs abort on a panic, so only a test can see a poisoned lock. There, the threads that
/// clean up can use the data of the failed thread.
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

/// Locks an `RwLock` whose writers leave its data whole when they panic.
pub trait LockedShared<T: ?Sized> {
    /// Waits until no writer holds the lock.
    fn read_locked(&self) -> RwLockReadGuard<'_, T>;
    /// Waits until no other thread holds the lock.
    fn write_locked(&self) -> RwLockWriteGuard<'_, T>;
}

impl<T: ?Sized> LockedShared<T> for RwLock<T> {
    #[inline]
    fn read_locked(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn write_locked(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}
