//! Copies between memory that another party may access at the same time, and memory of this
//! process.
//!
//! Called by queues and backends for each request whose bytes the processor copies; most requests
//! are not copied.
//!
//! # Memory model The guest, another worker or another process may write the same bytes during a
//! copy. No lock prevents that, and none is needed if the following holds:
//!
//! - A copy accesses foreign memory through raw pointers only. No reference to foreign memory
//!   exists, because the compiler may assume that the bytes behind a reference do not change.
//! - A copy reads each byte once. Compiler fences stand before and after it, so that the compiler
//!   neither reads the source again later, nor merges the copy with accesses before or after it.
//!   Code that decides by copied bytes therefore decides by the same bytes that it uses. Copy
//!   first, then check, then use the copy.
//! - A byte that is written during a copy is copied with its old or its new value. A field of
//!   several bytes may be a mixture of both. The functions of the rings, which must not see a
//!   mixture, use aligned volatile or atomic accesses (`raw`).
//! - A copy orders nothing for other processors. The index of a ring, stored with release and
//!   loaded with acquire, does that.
//!
//! Every pointer must come from [`GuestMemory`](super::GuestMemory), or from another mapping that
//! its owner keeps alive.

use core::sync::atomic::{Ordering, compiler_fence};

/// Copies `len` bytes, each read once. Both ranges may be foreign memory, and they may overlap.
///
/// # Safety
/// `from` is readable and `to` is writable for `len` bytes. No reference to the bytes at `to` is
/// used during the copy.
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the caller promises that `from` is readable and `to` is writable for `len` bytes, and
    // that no reference to the bytes at `to` is used meanwhile. Others may write to both: see the
    // module.
    unsafe { core::ptr::copy(from, to, len) };
    compiler_fence(Ordering::SeqCst);
}

/// Copies `to.len()` bytes from foreign memory, each read once.
///
/// # Safety
/// `from` is readable for `to.len()` bytes.
#[inline(always)]
pub unsafe fn read(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller promises that `from` is readable for as many bytes as `to` has; `to` is an
    // exclusive reference.
    unsafe { copy(from, to.as_mut_ptr(), to.len()) };
}

/// Copies all of `from` to foreign memory.
///
/// # Safety
/// `to` is writable for `from.len()` bytes.
#[inline(always)]
pub unsafe fn write(to: *mut u8, from: &[u8]) {
    // SAFETY: the caller promises that `to` is writable for as many bytes as `from` has; `from` is
    // a reference to memory of this process.
    unsafe { copy(from.as_ptr(), to, from.len()) };
}

/// Writes one byte to foreign memory, such as the status of a request.
///
/// # Safety
/// `to` is writable.
#[inline(always)]
pub unsafe fn write_u8(to: *mut u8, byte: u8) {
    // SAFETY: the caller promises that `to` is writable.
    unsafe { to.write_volatile(byte) };
}

/// Sets `len` bytes of foreign memory to one value.
///
/// # Safety
/// `to` is writable for `len` bytes.
#[inline(always)]
pub unsafe fn fill(to: *mut u8, byte: u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the caller promises that `to` is writable for `len` bytes.
    unsafe { to.write_bytes(byte, len) };
    compiler_fence(Ordering::SeqCst);
}
