//! Room for the segments of requests that have more than fit in a slot.
//!
//! A request takes room when its segments are pushed and gives it back when it ends, both on its worker's thread, so
//! each worker keeps some for the next requests of any of its queues: per thread, and with no lock.
//! What must never happen: room kept in each slot of each queue because a guest once sent long requests.

use std::cell::RefCell;

use libc::iovec;

/// Segments that have room in a short one, and those in a long one: what requests of up to 64 KiB in scattered pages
/// have, and more than Linux's largest (we offer a seg_max of 126).
const SEGMENTS: [usize; 2] = [16, 128];
/// Of each, how many a worker keeps.
const KEPT: [usize; 2] = [32, 8];
/// What a worker keeps at most.
pub(super) const KEPT_BYTES_MAX: usize = 32 << 10;
const _: () = assert!((SEGMENTS[0] * KEPT[0] + SEGMENTS[1] * KEPT[1]) * size_of::<iovec>() <= KEPT_BYTES_MAX);

thread_local! {
    static SPARE: RefCell<[Vec<Vec<iovec>>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Empty room for at least `segments`.
#[cold]
pub(super) fn take(segments: usize) -> Vec<iovec> {
    let Some(class) = SEGMENTS.iter().position(|&most| segments <= most) else {
        return Vec::with_capacity(segments.next_power_of_two());
    };
    let spare = SPARE.try_with(|spare| spare.borrow_mut()[class].pop());
    spare.ok().flatten().unwrap_or_else(|| Vec::with_capacity(SEGMENTS[class]))
}

/// Takes room back.
#[cold]
pub(super) fn give(mut room: Vec<iovec>) {
    let Some(class) = SEGMENTS.iter().position(|&n| room.capacity() == n) else { return };
    room.clear();
    // Not at all where the thread is about to end: then it is freed.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare[class].len() < KEPT[class] {
            spare[class].push(room);
        }
    });
}

/// Bytes that this thread keeps.
#[cfg(test)]
pub(super) fn kept_bytes() -> usize {
    SPARE.with(|spare| spare.borrow().iter().flatten().map(|v| v.capacity() * size_of::<iovec>()).sum())
}
