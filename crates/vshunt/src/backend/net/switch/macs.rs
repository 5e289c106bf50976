//! Which port an Ethernet address is behind: learnt from frames' senders, forgotten after a while (IEEE 802.1Q, 8.7).
//!
//! A table of small sets, read and written by any worker without a lock. Each entry is one word, so that what is read is an
//! address with its own port; two that learn at once may lose one of the two, which the next frame mends. Who makes up
//! addresses pushes out its own, not its neighbours'.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::frame::mix;

/// Sets, a power of two, and entries of one.
const SETS: usize = 1024;
const WAYS: usize = 8;
/// Seconds after which an address that sends nothing is forgotten (802.1Q's recommended value).
pub(super) const AGE_S: u32 = 300;

/// An Ethernet address, in the low 48 bits, the first byte lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(u64);

impl Address {
    pub(super) fn new(bytes: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = bytes;
        Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }

    /// Whether it is of several stations, or of all.
    pub fn is_group(self) -> bool {
        self.0 & 1 != 0
    }

    fn set(self) -> usize {
        mix(self.0) as usize % SETS
    }

    fn with(self, port: u16) -> u64 {
        self.0 | u64::from(port) << 48
    }
}

/// `word`: address and port; 0: free (no station has that address).
#[derive(Default)]
struct Entry {
    word: AtomicU64,
    seen_s: AtomicU32,
}

impl Entry {
    fn port(&self) -> u16 {
        (self.word.load(Relaxed) >> 48) as u16
    }

    fn is_of(&self, address: Address) -> bool {
        self.word.load(Relaxed) & (u64::MAX >> 16) == address.0
    }

    fn is_old(&self, now_s: u32) -> bool {
        now_s.saturating_sub(self.seen_s.load(Relaxed)) > AGE_S
    }

    fn is_free(&self, now_s: u32) -> bool {
        self.word.load(Relaxed) == 0 || self.is_old(now_s)
    }
}

/// See the module.
pub(super) struct Macs(Box<[[Entry; WAYS]]>);

impl Macs {
    pub(super) fn new() -> Self {
        Self((0..SETS).map(|_| Default::default()).collect())
    }

    pub(super) fn find(&self, address: Address, now_s: u32) -> Option<u16> {
        let entry = self.0[address.set()].iter().find(|entry| entry.is_of(address))?;
        (address.0 != 0 && !entry.is_old(now_s)).then(|| entry.port())
    }

    pub(super) fn learn(&self, address: Address, port: u16, now_s: u32) {
        if address.0 == 0 {
            return;
        }
        let set = &self.0[address.set()];
        if let Some(entry) = set.iter().find(|entry| entry.is_of(address)) {
            // Mostly nothing changes: a line that others read stays theirs.
            if entry.port() != port {
                entry.word.store(address.with(port), Relaxed);
            }
            if entry.seen_s.load(Relaxed) != now_s {
                entry.seen_s.store(now_s, Relaxed);
            }
            return;
        }
        let own =
            || set.iter().filter(|entry| entry.port() == port).min_by_key(|entry| entry.seen_s.load(Relaxed));
        let Some(entry) = set.iter().find(|entry| entry.is_free(now_s)).or_else(own) else { return };
        entry.seen_s.store(now_s, Relaxed);
        entry.word.store(address.with(port), Relaxed);
    }

    /// All that was behind a port.
    pub(super) fn forget(&self, port: u16) {
        for entry in self.0.iter().flatten().filter(|entry| entry.port() == port) {
            entry.word.store(0, Relaxed);
        }
    }

    pub(super) fn len(&self, now_s: u32) -> usize {
        self.0.iter().flatten().filter(|entry| !entry.is_free(now_s)).count()
    }
}
