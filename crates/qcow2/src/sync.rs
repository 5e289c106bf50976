//! Primitives for shared state, from the standard library, or from loom, which tries every
//! interleaving (`scripts/loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now as pause;
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop as pause;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};
