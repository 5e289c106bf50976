//! A copy of the first bytes of a served image. They are the only metadata that two requests may
//! change at the same time.
//!
//! A flush writes the journal's generation there. A request that finds the image corrupt sets the
//! corrupt bit. Growing or shrinking the disk sets its size. Each of them changes the copy in
//! memory and writes all of it.
//!
//! Two such writes may be in flight at the same time, and may reach the image in either order.
//! Therefore each is recorded here from its start to its end ([`HeaderCopy::ended`],
//! [`HeaderCopy::failed`], [`HeaderCopy::wait_settled`]). A write that ends is repeated if the copy
//! was changed since, or if a write of an older copy was in flight when it started, because that
//! one may have reached the image later. A change is final once its write has ended and need not be
//! repeated.

use crate::bytes::{low_u8, put, to_usize};
use crate::lock::Locked;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::header::{INCOMPATIBLE_AT, SIZE_AT, incompatible};
use crate::journal::OpenHeader;

/// The first bytes as they have to be in the image, a [unit](crate::served::Served::unit) of them.
pub(crate) struct HeaderCopy {
    state: Mutex<State>,
    /// Signals that a write has ended. Only control waits for it.
    over: Condvar,
}

/// The guarded state. The lock is held for a change or a copy, and no other lock is taken with it.
struct State {
    first: OpenHeader,
    /// Grows with each change.
    version: u64,
    /// Writes started.
    started: u64,
    /// Writes in flight: of a flush, of a request that marks the image, of control.
    writing: Vec<Write>,
}

/// A write in flight.
#[derive(Clone, Copy)]
struct Write {
    number: u64,
    version: u64,
    /// Whether a write of an older version was in flight when it started.
    over_older: bool,
}

/// The bytes to write, and the number of that write.
pub(crate) type Copied = (Vec<u8>, u64);

impl State {
    /// Starts a write of the present copy.
    fn start(&mut self) -> Copied {
        self.started += 1;
        let (number, version) = (self.started, self.version);
        let over_older = self.writing.iter().any(|w| w.version < version);
        self.writing.push(Write { number, version, over_older });
        (self.first.bytes().to_vec(), number)
    }

    /// Ends a write. Returns it, and whether it has to be repeated.
    fn end(&mut self, number: u64) -> Option<(Write, bool)> {
        let at = self.writing.iter().position(|w| w.number == number)?;
        let write = self.writing.swap_remove(at);
        Some((write, write.over_older || write.version != self.version))
    }
}

impl HeaderCopy {
    pub(crate) fn new(first: OpenHeader) -> Self {
        Self {
            state: Mutex::new(State { first, version: 0, started: 0, writing: Vec::new() }),
            over: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Changes the copy, and starts a write of it.
    fn change(&self, f: impl FnOnce(&mut OpenHeader)) -> Copied {
        let mut state = self.lock();
        f(&mut state.first);
        state.version += 1;
        state.start()
    }

    /// Sets the journal's generation, and starts a write.
    pub(crate) fn set_generation(&self, generation: u64) -> Copied {
        self.change(|first| first.set_generation(generation))
    }

    /// Sets the size of the disk in bytes, and starts a write.
    pub(crate) fn set_size(&self, size: u64) -> Copied {
        let at = to_usize(SIZE_AT);
        self.change(|first| put(first.fields(), at, &size.to_be_bytes()))
    }

    /// Marks the image as corrupt, and starts a write.
    pub(crate) fn set_corrupt(&self) -> Copied {
        // The bit is in the last, lowest byte of the field.
        self.change(|first| {
            if let Some(byte) = first.fields().get_mut(INCOMPATIBLE_AT + 7) {
                *byte |= low_u8(incompatible::CORRUPT);
            }
        })
    }

    /// Records that a write has succeeded. If the copy has to be written again, starts that write
    /// and returns it. `None`: everything is in the image.
    pub(crate) fn ended(&self, number: u64) -> Option<Copied> {
        let mut state = self.lock();
        let (_, again) = state.end(number)?;
        self.over.notify_all();
        again.then(|| state.start())
    }

    /// Records that a write has failed. It may have reached the image.
    pub(crate) fn failed(&self, number: u64) {
        self.lock().end(number);
        self.over.notify_all();
    }

    /// Like [`ended`](Self::ended), for control. It waits for writes of older versions, for at most
    /// `limit`, instead of writing again in the meantime.
    ///
    /// # Errors
    /// `TimedOut`. The contents of the image are unknown then.
    pub(crate) fn wait_settled(&self, number: u64, limit: Duration) -> io::Result<Option<Copied>> {
        let mut state = self.lock();
        let Some((write, again)) = state.end(number) else { return Ok(None) };
        self.over.notify_all();
        let older = |state: &mut State| state.writing.iter().any(|w| w.version < write.version);
        let (mut state, waited) =
            self.over.wait_timeout_while(state, limit, older).unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("an earlier write of the image's header has not ended for {} s", limit.as_secs()),
            ));
        }
        Ok(again.then(|| state.start()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::create::{Options, create};
    use crate::journal::mark_open;
    use crate::memory::Memory;

    fn first() -> HeaderCopy {
        let file = Memory::new(Vec::new(), 64 << 20);
        create(&file, None, &Options::new(1 << 20), &mut |_, _| {}).unwrap();
        HeaderCopy::new(mark_open(&file, [1; 16]).unwrap())
    }

    const NO_TIME: Duration = Duration::ZERO;

    fn size_in(bytes: &[u8]) -> u64 {
        let at = SIZE_AT as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn a_write_that_is_over_late_is_done_again_with_all_changes() {
        let first = first();
        let (_, early) = first.set_size(0x0102_0304);
        let (late, number) = first.set_corrupt();
        assert_eq!(size_in(&late), 0x0102_0304);
        let (bytes, again) = first.ended(early).unwrap();
        assert_eq!(bytes, late);
        // The write that started during the older one may have reached the image before it.
        let (bytes, last) = first.ended(number).unwrap();
        assert_eq!(bytes, late);
        assert_eq!((first.ended(again), first.ended(last)), (None, None));
    }

    #[test]
    fn a_write_is_done_again_until_no_older_one_was_under_way() {
        let first = first();
        let (_, early) = first.set_generation(1);
        let (late, mut number) = first.set_corrupt();
        for over in [false, false, true] {
            if over {
                first.failed(early);
            }
            let (bytes, again) = first.ended(number).expect("the older one may have come later");
            assert_eq!(bytes, late);
            number = again;
        }
        assert_eq!(first.ended(number), None);
    }

    #[test]
    fn control_waits_for_older_writes_and_writes_again() {
        let first = first();
        let (_, early) = first.set_generation(1);
        let late = first.set_size(4 << 20).1;
        assert_eq!(first.wait_settled(late, NO_TIME).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (bytes, size) = first.set_size(5 << 20);
        std::thread::scope(|scope| {
            let control = scope.spawn(|| first.wait_settled(size, Duration::from_secs(600)).unwrap());
            let (again, request) = first.ended(early).unwrap();
            assert_eq!((size_in(&again), &again), (5 << 20, &bytes));
            let (again, size) = control.join().unwrap().expect("the flush's write may have come later");
            assert_eq!(again, bytes);
            assert_eq!(first.wait_settled(size, NO_TIME).unwrap(), None);
            assert_eq!(first.ended(request), None);
        });
    }
}
