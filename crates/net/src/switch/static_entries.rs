//! Addresses whose port is known by configuration. They are never learnt, and no other port may use
//! them as a source.
//!
//! The table is a part of the snapshot of a switch's ports ([`View`](super::View)): it is built
//! when ports change, and only read after that.

use super::frame::mix;
use super::macs::Address;

/// An address and its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StaticEntry {
    pub(super) address: Address,
    pub(super) port: u16,
    /// Whether the daemon found it as an address of the host. Otherwise the operator gave it for an
    /// export.
    pub(super) host: bool,
}

/// See the module. An open-addressing table, at most half full. It has no slots if there are no
/// entries.
#[derive(Default)]
pub(super) struct StaticEntries {
    slots: Box<[Option<StaticEntry>]>,
    count: usize,
}

impl StaticEntries {
    /// Builds the table. `entries` lists those of exports first. An address of both the host and an
    /// export belongs to the export.
    pub(super) fn new(entries: impl Iterator<Item = StaticEntry>) -> Self {
        let entries: Vec<_> = entries.filter(|entry| entry.address.is_stations()).collect();
        if entries.is_empty() {
            return Self::default();
        }
        let mut this = Self { slots: vec![None; (2 * entries.len()).next_power_of_two()].into(), count: 0 };
        for entry in entries {
            if entry.host && this.of(entry.address).any(|other| !other.host || other == entry) {
                continue;
            }
            let free = this.probe(entry.address).find(|at| this.slots.get(*at).is_some_and(Option::is_none));
            if let Some(slot) = free.and_then(|at| this.slots.get_mut(at)) {
                *slot = Some(entry);
                this.count += 1;
            } else {
                debug_assert!(false, "half of the slots are free");
            }
        }
        this
    }

    /// Returns all entries, in no order.
    pub(super) fn all(&self) -> impl Iterator<Item = StaticEntry> + '_ {
        self.slots.iter().copied().flatten()
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Returns the slots of an address, in the order in which they are tried. Called only if there
    /// are slots.
    fn probe(&self, address: Address) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        let start = mix(address.number()) as usize;
        (0..=mask).map(move |step| start.wrapping_add(step) & mask)
    }

    /// Returns the entries of an address. There are several if ports of different VLANs have the
    /// same one.
    #[inline]
    pub(super) fn of(&self, address: Address) -> impl Iterator<Item = StaticEntry> + '_ {
        let some = (!self.slots.is_empty()).then(|| self.probe(address));
        let entry = |at: usize| self.slots.get(at).copied().flatten();
        some.into_iter().flatten().map_while(entry).filter(move |entry| entry.address == address)
    }
}
