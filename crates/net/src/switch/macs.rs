//! The ports of stations. They are learnt from frames' senders, by VLAN, and forgotten after a
//! while (IEEE 802.1Q, 8.7 and 8.8).
//!
//! The table consists of small sets. Any worker reads and writes it without a lock. Each entry is
//! one word, so that a reader sees a station with its own port. A change is a compare-and-swap. If
//! two workers change an entry at once, one of them loses, and the next frame of its station
//! repairs that.
//!
//! The table is shared fairly. A port has a limit of entries. At its limit it gives up one of its
//! old entries ([`Learnt`]). In a full set, the port that has the most entries in the table gives
//! one up. So a port with few entries always gets a place. Guests do not know the set of a station,
//! because the hash has a secret of the switch.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::PORTS_MAX;
use crate::slots::slot;
use vshunt_types::convert::{len_u32, low_u16};

/// Number of sets, a power of two, and entries of each.
const SET_BITS: u32 = 10;
const SETS: usize = 1 << SET_BITS;
const _: () = assert!(SET_BITS <= u16::BITS);
const WAYS: usize = 8;
/// Addresses that the table has room for.
pub const MACS_MAX: usize = SETS * WAYS;
/// Seconds after which an address that sends nothing is forgotten (802.1Q's recommended value).
pub(super) const AGE_S: u32 = 300;

/// Bits of an address and a VLAN together.
const KEY_BITS: u32 = 48 + 12;
const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
/// A word consists of the rest of the scattered key, [`KNOWN`], and the port.
const TAG_SHIFT: u32 = u64::BITS - (KEY_BITS - SET_BITS);
const KNOWN: u64 = 1 << (TAG_SHIFT - 1);
const _: () = assert!(PORTS_MAX as u64 <= KNOWN);
/// Number of places of a port's list in which the oldest address is searched. It bounds the work
/// for one frame.
const PLACES_SEARCHED: usize = 16;

/// An Ethernet address, in the low 48 bits, the first byte lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(u64);

impl Address {
    /// Makes an address of the bytes of a frame.
    pub const fn new(bytes: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = bytes;
        Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }

    /// Returns whether it is the address of several stations, or of all.
    pub fn is_group(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns whether a station can have this address: it is neither a group's nor zero.
    pub fn is_stations(self) -> bool {
        !self.is_group() && self.0 != 0
    }

    /// Returns whether bridges do not forward frames for it: 01:80:c2:00:00:00 to 0f (802.1Q, table
    /// 8-1).
    pub fn is_reserved(self) -> bool {
        const FIRST: Address = Address::new([1, 0x80, 0xC2, 0, 0, 0]);
        self.0 & !(0xF << 40) == FIRST.0
    }

    pub(super) fn number(self) -> u64 {
        self.0
    }

    /// Returns the bytes as they are in a frame.
    pub(super) fn bytes(self) -> [u8; 6] {
        let [a, b, c, d, e, f, ..] = self.0.to_le_bytes();
        [a, b, c, d, e, f]
    }
}

/// `word`: see above. 0: free.
#[derive(Default)]
struct Entry {
    word: AtomicU64,
    seen_s: AtomicU32,
}

fn port_of(word: u64) -> u16 {
    low_u16(word & (KNOWN - 1))
}

impl Entry {
    fn word(&self) -> u64 {
        self.word.load(Relaxed)
    }

    fn seen_s(&self) -> u32 {
        self.seen_s.load(Relaxed)
    }

    fn is_old(&self, now_s: u32) -> bool {
        now_s.saturating_sub(self.seen_s()) > AGE_S
    }

    fn is_free(&self, now_s: u32) -> bool {
        self.word() == 0 || self.is_old(now_s)
    }

    fn is_of_port(&self, port: u16) -> bool {
        let word = self.word();
        word != 0 && port_of(word) == port
    }
}

/// The places in the table where a port has addresses. There are as many as its limit. Any worker
/// that has a queue of the port uses it.
pub(super) struct Learnt {
    /// [`NOWHERE`], or an entry's number. The entry may belong to another port by now.
    places: Box<[AtomicU32]>,
    /// The index of the next place to use, modulo the number of places.
    next: AtomicUsize,
}

const NOWHERE: u32 = u32::MAX;

impl Learnt {
    /// Makes the list of a port that may have `limit` addresses, at least one.
    pub(super) fn new(limit: u32) -> Self {
        let limit = limit.clamp(1, len_u32(MACS_MAX));
        Self { places: (0..limit).map(|_| AtomicU32::new(NOWHERE)).collect(), next: AtomicUsize::new(0) }
    }

    /// Returns the limit.
    pub(super) fn limit(&self) -> u32 {
        len_u32(self.places.len())
    }

    /// Stores an entry. Returns the entry that it replaces. If that belongs to the port, the port
    /// has to give it up.
    fn note(&self, entry: u32, seen_s: impl Fn(u32) -> Option<u32>) -> u32 {
        let start = self.next.fetch_add(1, Relaxed) % self.places.len();
        let (before, after) = self.places.split_at(start);
        let mut oldest: Option<(&AtomicU32, u32)> = None;
        for place in after.iter().chain(before).take(PLACES_SEARCHED) {
            match seen_s(place.load(Relaxed)) {
                None => {
                    oldest = Some((place, 0));
                    break;
                }
                Some(seen_s) if oldest.is_none_or(|(_, least)| seen_s < least) => {
                    oldest = Some((place, seen_s));
                }
                Some(_) => {}
            }
        }
        // There is at least one place.
        oldest.map_or(NOWHERE, |(place, _)| place.swap(entry, Relaxed))
    }
}

/// A station that was learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) address: Address,
    pub(super) vlan: u16,
    pub(super) port: u16,
    /// Seconds since it sent a frame.
    pub(super) age_s: u32,
}

/// Returns the inverse of a multiplication by `odd`, modulo 2^64. Newton's method doubles the
/// number of correct bits each time, from 3 at first.
fn inverse(odd: u64) -> u64 {
    (0..5).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))))
}

/// See the module.
pub(super) struct Macs {
    sets: Box<[[Entry; WAYS]; SETS]>,
    /// Entries of each port.
    counts: Box<[AtomicU32]>,
    secret: u64,
}

impl Macs {
    pub(super) fn new() -> Self {
        let sets: Box<[[Entry; WAYS]]> = (0..SETS).map(|_| Default::default()).collect();
        Self {
            sets: sets.try_into().unwrap_or_else(|_| unreachable!("it has SETS elements")),
            counts: (0..PORTS_MAX).map(|_| AtomicU32::new(0)).collect(),
            secret: RandomState::new().build_hasher().finish(),
        }
    }

    /// Returns the set with this number.
    #[inline(always)]
    #[expect(clippy::indexing_slicing, reason = "the remainder is less than the length of the array")]
    fn set(&self, number: usize) -> &[Entry; WAYS] {
        &self.sets[number % SETS]
    }

    /// Returns the number of the set of a station, and the word's upper bits. The key is scattered
    /// by steps that can be inverted (a shift, an odd factor). So the two together identify the
    /// station.
    fn place(&self, address: Address, vlan: u16) -> (usize, u64) {
        let mut key = (address.0 | u64::from(vlan) << 48) ^ (self.secret & KEY_MASK);
        for factor in self.factors() {
            key = (key ^ key >> 31).wrapping_mul(factor) & KEY_MASK;
        }
        key ^= key >> 31;
        (usize::from(low_u16(key)) % SETS, key >> SET_BITS << TAG_SHIFT | KNOWN)
    }

    fn factors(&self) -> [u64; 2] {
        [0xFF51_AFD7_ED55_8CCD_u64 ^ (self.secret & !1), 0xC4CE_B9FE_1A85_EC53]
    }

    /// Returns the station of an entry with this word in that set. This inverts
    /// [`place`](Self::place).
    fn station(&self, set: usize, word: u64) -> (Address, u16) {
        let mut key = word >> TAG_SHIFT << SET_BITS | set as u64;
        // The shift is more than half of the key, so a second application inverts it.
        key ^= key >> 31;
        for factor in self.factors().into_iter().rev() {
            key = key.wrapping_mul(inverse(factor)) & KEY_MASK;
            key ^= key >> 31;
        }
        key ^= self.secret & KEY_MASK;
        (Address(key & ((1 << 48) - 1)), low_u16(key >> 48))
    }

    /// Returns the port of a station in a VLAN.
    pub(super) fn find(&self, address: Address, vlan: u16, now_s: u32) -> Option<u16> {
        let (set, tag) = self.place(address, vlan);
        let entry = self.set(set).iter().find(|entry| entry.word() & !(KNOWN - 1) == tag)?;
        let word = entry.word();
        // The second read may find another station there.
        let same = word & !(KNOWN - 1) == tag && !entry.is_old(now_s);
        same.then(|| port_of(word))
    }

    /// Records that a station of a VLAN sent a frame by a port, whose list is `own`.
    #[inline]
    pub(super) fn learn(&self, address: Address, vlan: u16, port: u16, own: &Learnt, now_s: u32) {
        if !address.is_stations() {
            return;
        }
        let (set, tag) = self.place(address, vlan);
        let word = tag | u64::from(port);
        match self.set(set).iter().enumerate().find(|(_, entry)| entry.word() & !(KNOWN - 1) == tag) {
            Some((way, entry)) => {
                let old = entry.word();
                if old != word {
                    return self.change((set, way), old, word, own, now_s);
                }
                // Usually nothing changes. Then the cache line stays shared with its readers.
                if entry.seen_s() != now_s {
                    entry.seen_s.store(now_s, Relaxed);
                }
            }
            None => self.add(set, word, own, now_s),
        }
    }

    /// Finds a place for a station that is new.
    #[cold]
    fn add(&self, set: usize, word: u64, own: &Learnt, now_s: u32) {
        let entries = self.set(set);
        let ways = || entries.iter().enumerate();
        let found = ways().find(|(_, entry)| entry.is_free(now_s)).or_else(|| {
            let share = |port| self.count(port);
            let port = port_of(word);
            let most = entries.iter().map(|entry| port_of(entry.word())).max_by_key(|port| share(*port))?;
            let giver = if share(most) > share(port) { most } else { port };
            ways().filter(|(_, entry)| entry.is_of_port(giver)).min_by_key(|(_, entry)| entry.seen_s())
        });
        if let Some((way, entry)) = found {
            self.change((set, way), entry.word(), word, own, now_s);
        }
    }

    /// Gives an entry to a station. If another worker changed it meanwhile, that change stays.
    #[cold]
    fn change(&self, (set, way): (usize, usize), old: u64, new: u64, own: &Learnt, now_s: u32) {
        let Some(entry) = self.set(set).get(way) else { return };
        if !self.swap(entry, old, new) {
            return;
        }
        entry.seen_s.store(now_s, Relaxed);
        let number = len_u32(set * WAYS + way);
        if old != 0 && port_of(old) == port_of(new) {
            // The entry is already among the port's places.
            return;
        }
        let port = port_of(new);
        let is_own = |at: u32| {
            let entry = self.sets.as_flattened().get(at as usize)?;
            (at != number && entry.is_of_port(port)).then_some(entry)
        };
        if let Some(entry) = is_own(own.note(number, |at| is_own(at).map(Entry::seen_s))) {
            self.swap(entry, entry.word(), 0);
        }
    }

    /// Changes an entry's word, and updates the counts of the ports. Returns false if another
    /// worker changed the entry first.
    fn swap(&self, entry: &Entry, old: u64, new: u64) -> bool {
        let done = entry.word.compare_exchange(old, new, Relaxed, Relaxed).is_ok();
        if done && old != 0 {
            slot(&self.counts, port_of(old)).fetch_sub(1, Relaxed);
        }
        if done && new != 0 {
            slot(&self.counts, port_of(new)).fetch_add(1, Relaxed);
        }
        done
    }

    /// Forgets all stations behind a port.
    pub(super) fn forget(&self, port: u16) {
        for entry in self.sets.iter().flatten().filter(|entry| entry.is_of_port(port)) {
            let word = entry.word();
            if word != 0 && port_of(word) == port {
                self.swap(entry, word, 0);
            }
        }
    }

    /// Returns the number of entries of a port. Some may be too old to count.
    pub(super) fn count(&self, port: u16) -> u32 {
        slot(&self.counts, port).load(Relaxed)
    }

    /// Returns all stations that are known, in no order. Entries that change meanwhile may be
    /// missing.
    pub(super) fn all(&self, now_s: u32) -> Vec<Known> {
        let known = |(number, entry): (usize, &Entry)| {
            let (word, seen_s) = (entry.word(), entry.seen_s());
            // The time belongs to this station only if the entry still does.
            if word == 0 || entry.is_old(now_s) || entry.word() != word {
                return None;
            }
            let (address, vlan) = self.station(number / WAYS, word);
            let port = port_of(word);
            Some(Known { address, vlan, port, age_s: now_s.saturating_sub(seen_s) })
        };
        self.sets.as_flattened().iter().enumerate().filter_map(known).collect()
    }

    /// Returns the number of stations that are known.
    pub(super) fn len(&self, now_s: u32) -> usize {
        self.sets.iter().flatten().filter(|entry| !entry.is_free(now_s)).count()
    }
}
