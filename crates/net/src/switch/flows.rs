//! The queue pair of a guest that gets the frames of a flow: the pair on which the guest last sent
//! the flow.
//!
//! A flow is identified by a hash that is the same in both directions. The table has a fixed size
//! and one word for each entry. If another flow has overwritten the entry of a flow, its hash alone
//! decides. The same holds for a flow that the guest never sent, or has not sent for [`AGE_S`]
//! seconds.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of entries, a power of two.
const ENTRIES: usize = 4096;
/// Seconds after which a flow is forgotten that the guest has stopped sending.
pub(super) const AGE_S: u32 = 30;

/// Each entry: the hash, seconds (16 bits), and the pair plus one (16 bits). 0: no flow.
pub(super) struct Flows(Box<[AtomicU64; ENTRIES]>);

/// Returns the low 16 bits of a word; times are compared modulo 2^16.
fn low16(word: u64) -> u16 {
    (word & 0xFFFF) as u16
}

fn pack(hash: u32, pair: u16, now_s: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(low16(now_s.into())) << 16 | u64::from(pair + 1)
}

impl Flows {
    pub(super) fn new() -> Self {
        Self(Box::new([const { AtomicU64::new(0) }; ENTRIES]))
    }

    #[expect(clippy::indexing_slicing, reason = "an index modulo the length of an array is within it")]
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
        let age = low16(now_s.into()).wrapping_sub(low16(word >> 16));
        let known = (word >> 32) as u32 == hash && u32::from(age) <= AGE_S;
        low16(word).checked_sub(1).filter(|_| known)
    }
}
