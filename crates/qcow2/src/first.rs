//! The first bytes of an image that is served: the only piece of metadata that two requests may change at the same time.
//!
//! A flush writes the journal's generation there, a request that finds the image corrupt sets the mark for that, and a disk
//! that grows or shrinks gets its size. Each changes a copy in memory and writes all of it. A write that is over and finds the
//! copy changed since is done again, so that the last write has all changes.

use std::sync::Mutex;

use crate::header::{INCOMPATIBLE_AT, SIZE_AT, generation_at, incompatible};

/// The first bytes as they are to be in the image, a [unit](crate::served::Served::unit) of them.
pub(crate) struct First(Mutex<State>);

/// Guarded by the lock: held for a change or a copy, taken alone.
struct State {
    bytes: Vec<u8>,
    /// Grows with each change.
    version: u64,
}

/// What is to be written, and the version that it is of.
pub(crate) type Copied = (Vec<u8>, u64);

impl First {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(Mutex::new(State { bytes, version: 0 }))
    }

    fn change(&self, f: impl FnOnce(&mut [u8])) -> Copied {
        let mut state = self.0.lock().expect("no holder panics");
        f(&mut state.bytes);
        state.version += 1;
        (state.bytes.clone(), state.version)
    }

    /// Sets the journal's generation.
    pub(crate) fn set_generation(&self, generation: u64) -> Copied {
        self.change(|bytes| {
            let at = generation_at(bytes);
            bytes[at..at + 8].copy_from_slice(&generation.to_be_bytes());
        })
    }

    /// Sets the size of the disk, bytes.
    pub(crate) fn set_size(&self, size: u64) -> Copied {
        let at = SIZE_AT as usize;
        self.change(|bytes| bytes[at..at + 8].copy_from_slice(&size.to_be_bytes()))
    }

    /// Marks the image as corrupt.
    pub(crate) fn set_corrupt(&self) -> Copied {
        // In the field's last, lowest byte.
        self.change(|bytes| bytes[INCOMPATIBLE_AT + 7] |= incompatible::CORRUPT as u8)
    }

    /// What is to be written again after a write of `version`; none: nothing was changed since.
    pub(crate) fn since(&self, version: u64) -> Option<Copied> {
        let state = self.0.lock().expect("no holder panics");
        (state.version != version).then(|| (state.bytes.clone(), state.version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_is_over_late_is_done_again_with_all_changes() {
        let first = First::new(vec![0; 512]);
        let (_, early) = first.set_size(0x0102_0304);
        let (late, version) = first.set_corrupt();
        assert_eq!(late[SIZE_AT as usize..][..8], 0x0102_0304u64.to_be_bytes());
        assert_eq!(first.since(early), Some((late, version)));
        assert_eq!(first.since(version), None);
    }
}
