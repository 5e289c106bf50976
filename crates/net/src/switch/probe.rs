//! Loops through two uplinks of a switch: found by frames of our own that come back.
//!
//! While a switch has several uplinks, each of them sends a probe every few seconds ([`Switch::probe`], on the uplink's own
//! thread). A probe that was sent by one uplink and comes in by another one shows that both lead to the same network; the
//! one with the higher number is blocked for as long as probes come ([`Switch::is_probe`], on a worker). Guests get no
//! probes, and cannot make any: a probe has a random number of its uplink. A station on the network of one uplink sees the
//! number of that one only, which means nothing there. Probes of other switches pass like other frames, so that a loop through
//! several daemons shows, too.
//!
//! A trunk may have thousands of VLANs, of which one may be the only one that makes a loop. Each turn probes some of them, so
//! that all have had a probe after some turns ([`probed`]). The VLAN whose probe came back last gets one in every turn:
//! the loop is to be seen more often than every [`BLOCK_S`] seconds.
//!
//! ```text
//! destination (group) | source | [tag] | 0x9000 | "vshunt lp" | id of the uplink (16) | VLAN of the tag, or 0 (2) | zeroes
//! ```

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Weak;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use super::frame::{ETH_VLAN, word_at};
use super::port::BLOCK_S;
use super::vlan::{Lan, NO_VLAN, VLAN_BITS};
use super::{Port, Switch, View};

/// Where probes go: a group's address, locally administered.
const GROUP: [u8; 6] = [0x03, b'v', b's', b'h', b'l', b'p'];
/// EtherType of configuration tests (Ethernet 2.0, 8), with which other vendors look for loops, too.
const ETH_TEST: u16 = 0x9000;
const MAGIC: [u8; 9] = *b"vshunt lp";
/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;
/// Tagged VLANs that one turn probes, besides the one whose probe came back last: bounds what is sent at once.
const VLANS_A_TURN: usize = 64;
/// Seconds between an uplink's turns.
pub const PROBE_EVERY_S: u32 = 2;
// A VLAN that is probed in each turn keeps the uplink blocked, though two probes in a row are lost.
const _: () = assert!(BLOCK_S > 3 * PROBE_EVERY_S);

/// A random number.
type Number = [u8; 16];

/// What an uplink has for its probes.
pub(super) struct Probe {
    /// By which the switch knows them.
    id: Number,
    /// The VLAN whose probe came back last; [`NO_VLAN`] if it had no tag, or none came back. Any thread's.
    seen: AtomicU16,
}

impl Probe {
    pub(super) fn new() -> Self {
        // Each is seeded by the system's random numbers.
        let mut id = [0; 16];
        for half in id.chunks_exact_mut(8) {
            half.copy_from_slice(&RandomState::new().build_hasher().finish().to_ne_bytes());
        }
        Self { id, seen: AtomicU16::new(NO_VLAN) }
    }
}

/// Returns the VLANs in which a turn sends probes; none stands for a probe without a tag. `seen`: the tagged VLAN that is
/// probed in each turn, if the port has it.
fn probed(lan: &Lan, turn: u32, seen: u16) -> Vec<Option<u16>> {
    let Lan::Vlans { native, tagged } = lan else { return vec![None] };
    let all: Vec<u16> = tagged.iter().collect();
    let turns = all.len().div_ceil(VLANS_A_TURN).max(1);
    let part: &[u16] = all.chunks(VLANS_A_TURN).nth(turn as usize % turns).unwrap_or_default();
    let again = Some(seen).filter(|vlan| tagged.has(*vlan) && !part.contains(vlan));
    native.map(|_| None).into_iter().chain(part.iter().copied().chain(again).map(Some)).collect()
}

impl Switch {
    /// The probe of an uplink, in a VLAN or without a tag.
    pub(super) fn probe_frame(port: &Port, vlan: Option<u16>) -> Vec<u8> {
        let id = &port.probe.id;
        let mut frame = GROUP.to_vec();
        // Locally administered, one station's.
        frame.push(0x02);
        frame.extend(&id[..5]);
        if let Some(vlan) = vlan {
            frame.extend(ETH_VLAN.to_be_bytes());
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend(ETH_TEST.to_be_bytes());
        frame.extend(MAGIC);
        frame.extend(id);
        frame.extend(vlan.unwrap_or(NO_VLAN).to_be_bytes());
        frame.resize(frame.len().max(FRAME_MIN), 0);
        frame
    }

    /// Whether the switch has several uplinks that can make a loop with this one.
    fn can_loop(view: &View, port: &Port) -> bool {
        view.all().any(|other| other.index != port.index && other.is_uplink() && other.meets(port))
    }

    /// Sends the probes of an uplink's turn, if there is another uplink. Called by a thread that may wait, every
    /// [`PROBE_EVERY_S`] seconds, with the number of the turn.
    pub fn probe(&self, port: &Port, turn: u32) {
        let Some(tap) = port.tap.as_ref().and_then(Weak::upgrade) else { return };
        if !Self::can_loop(&self.view(), port) {
            return;
        }
        for vlan in probed(&port.lan, turn, port.probe.seen.load(Relaxed)) {
            // An interface that is down, or has no room, takes none: the next ones come soon.
            let _ = tap.inject(&Self::probe_frame(port, vlan));
        }
    }

    /// Whether a frame that came in by an uplink is a probe of this switch's own, which ends here. One that was sent by
    /// another uplink shows a loop: the one of both with the higher number is blocked for a while.
    #[inline]
    pub fn is_probe(&self, view: &View, port: &Port, first: &[u8], now_s: u32) -> bool {
        first.starts_with(&GROUP) && self.is_own_probe(view, port, first, now_s)
    }

    #[cold]
    fn is_own_probe(&self, view: &View, port: &Port, first: &[u8], now_s: u32) -> bool {
        let at = if word_at(first, 12) == Some(ETH_VLAN) { 16 } else { 12 };
        let (magic, id) = (at + 2, at + 2 + MAGIC.len());
        if word_at(first, at) != Some(ETH_TEST) || first.get(magic..id) != Some(&MAGIC[..]) {
            return false;
        }
        let end = id + size_of::<Number>();
        let (Some(number), Some(vlan)) = (first.get(id..end), word_at(first, end)) else { return false };
        let Some(from) = view.all().find(|from| from.is_uplink() && from.probe.id == number) else {
            return false;
        };
        if from.index != port.index && from.meets(port) {
            from.probe.seen.store(vlan & VLAN_BITS, Relaxed);
            let (stays, goes) = if from.index < port.index { (&**from, port) } else { (port, &**from) };
            if goes.block(stays.index, now_s) {
                // What was learnt there is to be found by the other uplink.
                self.macs.forget(goes.index);
            }
        }
        true
    }

    /// Returns the warning about an uplink that is blocked: with which other one it makes a loop, and the remedy.
    pub fn loop_of(&self, port: &Port) -> String {
        let view = self.view();
        let other = view.port(port.loop_with().into()).map_or("another uplink", |other| other.name.as_str());
        let (name, switch) = (&port.name, &self.name);
        format!(
            "uplinks {name} and {other} of switch {switch} are connected to the same network, which makes a loop; {name} is \
             blocked while the loop exists: remove one of the two (vshunt export remove {name}), or separate their networks"
        )
    }
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::Vlans;

    use super::*;

    fn trunk(native: Option<u16>, tagged: &str) -> Lan {
        Lan::new(native, tagged.parse::<Vlans>().ok().as_ref())
    }

    #[test]
    fn every_vlan_has_its_turn() {
        for last in [1_u32, 63, 64, 65, 128, 129, 4094] {
            let lan = trunk(None, &format!("1-{last}"));
            let turns = last.div_ceil(VLANS_A_TURN as u32);
            let sent: Vec<_> = (0..turns).flat_map(|turn| probed(&lan, turn, NO_VLAN)).collect();
            assert_eq!(sent, (1..=last as u16).map(Some).collect::<Vec<_>>());
            assert!((0..turns).all(|turn| probed(&lan, turn, NO_VLAN).len() <= VLANS_A_TURN));
            // Then the first ones have theirs again.
            assert_eq!(probed(&lan, turns, NO_VLAN), probed(&lan, 0, NO_VLAN));
        }
    }

    #[test]
    fn the_vlan_of_a_loop_is_probed_in_each_turn() {
        let lan = trunk(Some(500), "1-200");
        for turn in 0..8 {
            for seen in [1, 64, 65, 200] {
                let vlans = probed(&lan, turn, seen);
                assert_eq!(vlans.iter().filter(|vlan| **vlan == Some(seen)).count(), 1, "{turn} {seen}");
                // The native VLAN's has no tag.
                assert_eq!(vlans.iter().filter(|vlan| vlan.is_none()).count(), 1);
            }
            // What came back with a VLAN that the port does not have was changed on its way.
            assert!(!probed(&lan, turn, 201).contains(&Some(201)));
        }
        assert_eq!((probed(&Lan::Plain, 3, 7), probed(&trunk(Some(5), ""), 3, 5)), (vec![None], vec![None]));
    }
}
