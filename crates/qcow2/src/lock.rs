//! Locking without handling of poisoned locks.

use std::sync::PoisonError;

/// Locks a mutex whose holders leave its data whole when they panic.
///
/// The programs abort on a panic, so only a test can see a poisoned lock.
pub(crate) trait Locked {
    /// The guard.
    type Guard<'a>
    where
        Self: 'a;

    /// Waits for the lock.
    fn locked(&self) -> Self::Guard<'_>;
}

impl<T> Locked for std::sync::Mutex<T> {
    type Guard<'a>
        = std::sync::MutexGuard<'a, T>
    where
        T: 'a;

    #[inline]
    fn locked(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(loom)]
impl<T> Locked for loom::sync::Mutex<T> {
    type Guard<'a>
        = loom::sync::MutexGuard<'a, T>
    where
        T: 'a;

    fn locked(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
