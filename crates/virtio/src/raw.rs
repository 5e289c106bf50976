//! Accesses to fields in memory that another party writes at the same time: the guest, or the next
//! process that serves it.
//!
//! The rings, the in-flight region and the drivers call it, on the thread that owns the queue.
//! Every access is volatile or atomic, so the compiler does not repeat or invent accesses, and
//! keeps their order. Callers ensure the alignment: ring areas are checked when a ring is made,
//! tables of the guest when they are read. Copies of many bytes are in [`mem`](crate::mem).

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Prefetches the cache line at `ptr` for a later read. This is not an access, so any address is
/// allowed. It does nothing on architectures for which stable Rust has no such instruction.
#[inline(always)]
pub(crate) fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this is a hint. Every CPU of this architecture has the instruction, which faults at
    // no address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

macro_rules! accessors {
    ($($int:ty, $atomic:ty, $get:ident, $put:ident, $load:ident, $store:ident;)*) => { $(
        /// Makes one plain volatile load.
        ///
        /// # Safety
        /// `ptr` is readable and aligned.
        #[inline(always)]
        #[allow(dead_code, reason = "one family for all widths")]
        pub(crate) unsafe fn $get(ptr: *const u8) -> $int {
            // SAFETY: the caller promises that `ptr` is readable for the width, and aligned to it.
            unsafe { ptr.cast::<$int>().read_volatile() }
        }

        /// Makes one plain volatile store.
        ///
        /// # Safety
        /// `ptr` is writable and aligned.
        #[inline(always)]
        #[allow(dead_code, reason = "one family for all widths")]
        pub(crate) unsafe fn $put(ptr: *mut u8, value: $int) {
            // SAFETY: the caller promises that `ptr` is writable for the width, and aligned to it.
            unsafe { ptr.cast::<$int>().write_volatile(value) }
            crash_point();
        }

        /// Makes one atomic load.
        ///
        /// # Safety
        /// `ptr` is readable, writable and aligned.
        #[inline(always)]
        #[allow(dead_code, reason = "one family for all widths")]
        pub(crate) unsafe fn $load(ptr: *mut u8, order: Ordering) -> $int {
            // SAFETY: the caller promises that `ptr` may be accessed with this width, and is
            // aligned to it. All other accesses in this process are atomic or volatile.
            unsafe { <$atomic>::from_ptr(ptr.cast()) }.load(order)
        }

        /// Makes one atomic store.
        ///
        /// # Safety
        /// `ptr` is writable and aligned.
        #[inline(always)]
        #[allow(dead_code, reason = "one family for all widths")]
        pub(crate) unsafe fn $store(ptr: *mut u8, value: $int, order: Ordering) {
            // SAFETY: the caller promises that `ptr` may be accessed with this width, and is
            // aligned to it. All other accesses in this process are atomic or volatile.
            unsafe { <$atomic>::from_ptr(ptr.cast()) }.store(value, order);
            crash_point();
        }
    )* };
}

accessors! {
    u16, AtomicU16, get_u16, put_u16, load_u16, store_u16;
    u32, AtomicU32, get_u32, put_u32, load_u32, store_u32;
    u64, AtomicU64, get_u64, put_u64, load_u64, store_u64;
}

/// Makes one volatile store of a byte.
///
/// # Safety
/// `ptr` is writable.
#[inline(always)]
pub(crate) unsafe fn put_u8(ptr: *mut u8, value: u8) {
    // SAFETY: the caller promises that `ptr` is writable.
    unsafe { ptr.write_volatile(value) }
    crash_point();
}

/// In tests, a simulated kill may happen here, right after a store.
#[cfg(not(test))]
#[inline(always)]
fn crash_point() {}

#[cfg(test)]
use crate::testing::crash_point;
