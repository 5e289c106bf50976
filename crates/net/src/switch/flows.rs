//! Which of a guest's queue pairs a flow is to come in by: the one on which the guest last sent it.
//!
//! A flow is known by a hash that is the same both ways. One word an entry, a table of fixed size: a flow whose place another
//! one took goes by its hash alone, as one does that the guest never sent, or not for a while.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Entries, a power of two.
const ENTRIES: usize = 4096;
/// Seconds after which a flow that the guest does not send any more is forgotten.
pub(super) const AGE_S: u32 = 30;

/// The hash, seconds (16 bits), and the pair plus one (16 bits); 0: none.
pub(super) struct Flows(Box<[AtomicU64]>);

fn pack(hash: u32, pair: u16, now_s: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(now_s as u16) << 16 | u64::from(pair + 1)
}

impl Flows {
    pub(super) fn new() -> Self {
        Self((0..ENTRIES).map(|_| AtomicU64::new(0)).collect())
    }

    fn entry(&self, hash: u32) -> &AtomicU64 {
        &self.0[hash as usize % ENTRIES]
    }

    pub(super) fn learn(&self, hash: u32, pair: u16, now_s: u32) {
        let (entry, word) = (self.entry(hash), pack(hash, pair, now_s));
        if entry.load(Relaxed) != word {
            entry.store(word, Relaxed);
        }
    }

    pub(super) fn find(&self, hash: u32, now_s: u32) -> Option<u16> {
        let word = self.entry(hash).load(Relaxed);
        let age = (now_s as u16).wrapping_sub((word >> 16) as u16);
        let known = (word >> 32) as u32 == hash && u32::from(age) <= AGE_S;
        (word as u16).checked_sub(1).filter(|_| known)
    }
}
