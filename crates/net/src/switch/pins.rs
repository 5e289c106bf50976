//! Addresses whose port is known by configuration: they are never learnt, and no other port may use them as a source.
//!
//! A part of the snapshot of a switch's ports ([`View`](super::View)): made anew when ports change, then only read.

use super::frame::mix;
use super::macs::Address;

/// An address and its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pin {
    pub(super) address: Address,
    pub(super) port: u16,
    /// It is the host's, found by us, and not an export's, which the operator gave.
    pub(super) host: bool,
}

/// See the module. An open table, at most half full; empty where there are none.
#[derive(Default)]
pub(super) struct Pins {
    slots: Box<[Option<Pin>]>,
    count: usize,
}

impl Pins {
    /// Of these, those of exports first. An address of the host that is an export's, too, is the export's.
    pub(super) fn new(pins: impl Iterator<Item = Pin>) -> Self {
        let pins: Vec<_> = pins.filter(|pin| pin.address.is_stations()).collect();
        if pins.is_empty() {
            return Self::default();
        }
        let mut this = Self { slots: vec![None; (2 * pins.len()).next_power_of_two()].into(), count: 0 };
        for pin in pins {
            if pin.host && this.of(pin.address).any(|other| !other.host || other == pin) {
                continue;
            }
            let free = this.probe(pin.address).find(|at| this.slots[*at].is_none());
            let Some(at) = free else { unreachable!("half of the slots are free") };
            this.slots[at] = Some(pin);
            this.count += 1;
        }
        this
    }

    /// All of them, in no order.
    pub(super) fn all(&self) -> impl Iterator<Item = Pin> + '_ {
        self.slots.iter().copied().flatten()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    fn probe(&self, address: Address) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        let start = mix(address.number()) as usize;
        (0..=mask).map(move |step| start.wrapping_add(step) & mask)
    }

    /// Those of an address: several where ports of different VLANs have the same one.
    #[inline]
    pub(super) fn of(&self, address: Address) -> impl Iterator<Item = Pin> + '_ {
        let some = (!self.slots.is_empty()).then(|| self.probe(address));
        some.into_iter().flatten().map_while(|at| self.slots[at]).filter(move |pin| pin.address == address)
    }
}
