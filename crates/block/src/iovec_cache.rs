//! Vectors for the segments of requests that have more than fit in a slot.
//!
//! A request takes a vector when its segments are added, and returns it when it completes. Both
//! happen on its worker's thread. Each thread keeps some vectors for later requests of all its
//! queues, without a lock.
//!
//! What must never happen: each slot of each queue keeps a long vector because a guest sent long
//! requests once.

use std::cell::RefCell;

use libc::iovec;

/// Segments of a short and of a long vector. A request of 64 KiB in scattered pages fits in a short
/// one. Requests of Linux fit in a long one, since the seg_max of a device is 126.
const SEGMENTS: [usize; 2] = [16, 128];
/// How many vectors of each length a thread keeps.
const KEPT: [usize; 2] = [32, 8];
/// Most bytes that a thread keeps.
pub(super) const KEPT_BYTES_MAX: usize = 32 << 10;
const _: () = assert!((SEGMENTS[0] * KEPT[0] + SEGMENTS[1] * KEPT[1]) * size_of::<iovec>() <= KEPT_BYTES_MAX);

thread_local! {
    static SPARE: RefCell<[Vec<Vec<iovec>>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Returns an empty vector for at least `segments`.
#[cold]
pub(super) fn take(segments: usize) -> Vec<iovec> {
    let Some(class) = SEGMENTS.iter().position(|&most| segments <= most) else {
        return Vec::with_capacity(segments.next_power_of_two());
    };
    let spare = SPARE.try_with(|spare| spare.borrow_mut()[class].pop());
    spare.ok().flatten().unwrap_or_else(|| Vec::with_capacity(SEGMENTS[class]))
}

/// Takes a vector back.
#[cold]
pub(super) fn give(mut vec: Vec<iovec>) {
    let Some(class) = SEGMENTS.iter().position(|&n| vec.capacity() == n) else { return };
    vec.clear();
    // When the thread is about to end there is no cache, and the vector is freed.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare[class].len() < KEPT[class] {
            spare[class].push(vec);
        }
    });
}

/// Returns the bytes that this thread keeps.
#[cfg(test)]
pub(super) fn kept_bytes() -> usize {
    SPARE.with(|spare| spare.borrow().iter().flatten().map(|v| v.capacity() * size_of::<iovec>()).sum())
}
