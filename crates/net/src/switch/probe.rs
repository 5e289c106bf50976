//! Probes by which a switch finds loops through two of its uplinks.
//!
//! While a switch has several uplinks, each of them sends probes every few seconds
//! ([`Switch::probe`](super::Switch::probe), on the uplink's own thread). If a probe of one uplink
//! enters by another one, both lead to the same network
//! ([`Switch::is_probe`](super::Switch::is_probe), on a worker). Guests get no probes and cannot
//! make any: a probe has a random number of its uplink. A station on the network of one uplink sees
//! only that uplink's number, and the number is no use to it there. Probes of other switches are
//! forwarded like other frames, so a loop through several daemons is found, too.
//!
//! A trunk may have thousands of VLANs, and only one of them may make the loop. Each round probes
//! some of them, so that all have been probed after some rounds ([`vlans`]). The VLAN whose probe
//! came back last is probed in every round, because the loop has to be seen more often than every
//! [`BLOCK_S`](super::port::BLOCK_S) seconds.
//!
//! ```text
//! destination (group) | source | [tag] | 0x9000 | "vshunt lp" | id of the uplink (16) | VLAN of the tag, or 0 (2) | zeroes
//! ```

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::AtomicU16;

use super::frame::{ETH_VLAN, word_at};
use super::vlan::{NO_VLAN, VLAN_BITS, VlanConfig};

/// Destination of probes: a group address, locally administered.
pub(super) const GROUP: [u8; 6] = [0x03, b'v', b's', b'h', b'l', b'p'];
/// EtherType of configuration tests (Ethernet 2.0, 8). Other vendors use it to find loops, too.
const ETH_TEST: u16 = 0x9000;
const MAGIC: [u8; 9] = *b"vshunt lp";
/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;
/// Tagged VLANs that one round probes, besides the VLAN whose probe came back last. Bounds the
/// frames that are sent at once.
const VLANS_A_ROUND: usize = 64;
/// Seconds between an uplink's rounds.
pub(super) const PROBE_EVERY_S: u32 = 2;

/// A random number that identifies an uplink.
type Number = [u8; 16];

/// The probes of one uplink.
pub(super) struct Probe {
    /// The number by which the switch recognizes them.
    pub(super) id: Number,
    /// The VLAN of the last probe that came back. [`NO_VLAN`]: it had no tag, or none came back.
    /// Used by any thread.
    pub(super) seen: AtomicU16,
}

impl Probe {
    pub(super) fn new() -> Self {
        // Each `RandomState` is seeded by the system's random numbers.
        let half = || RandomState::new().build_hasher().finish();
        let id = (u128::from(half()) << 64 | u128::from(half())).to_ne_bytes();
        Self { id, seen: AtomicU16::new(NO_VLAN) }
    }

    /// Returns the probe in a VLAN, or without a tag.
    pub(super) fn frame(&self, vlan: Option<u16>) -> Vec<u8> {
        let mut frame = GROUP.to_vec();
        // Source: a locally administered address of one station.
        frame.push(0x02);
        frame.extend(self.id.iter().take(5));
        if let Some(vlan) = vlan {
            frame.extend(ETH_VLAN.to_be_bytes());
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend(ETH_TEST.to_be_bytes());
        frame.extend(MAGIC);
        frame.extend(self.id);
        frame.extend(vlan.unwrap_or(NO_VLAN).to_be_bytes());
        frame.resize(frame.len().max(FRAME_MIN), 0);
        frame
    }
}

/// Returns the number and the VLAN of a probe. `None`: the frame is no probe.
pub(super) fn parse(first: &[u8]) -> Option<(Number, u16)> {
    let at = if word_at(first, 12) == Some(ETH_VLAN) { 16 } else { 12 };
    let rest = first.get(at + 2..)?.strip_prefix(&MAGIC)?;
    let (id, rest) = rest.split_first_chunk()?;
    (word_at(first, at) == Some(ETH_TEST)).then_some((*id, word_at(rest, 0)? & VLAN_BITS))
}

/// Returns the VLANs in which a round sends probes. `None` stands for a probe without a tag.
/// `seen`: the tagged VLAN that is probed in each round, if the port has it.
pub(super) fn vlans(config: &VlanConfig, round: u32, seen: u16) -> Vec<Option<u16>> {
    let VlanConfig::Vlans { native, tagged } = config else { return vec![None] };
    let all: Vec<u16> = tagged.iter().collect();
    let rounds = all.len().div_ceil(VLANS_A_ROUND).max(1);
    let part: &[u16] = all.chunks(VLANS_A_ROUND).nth(round as usize % rounds).unwrap_or_default();
    let again = Some(seen).filter(|vlan| tagged.has(*vlan) && !part.contains(vlan));
    native.map(|_| None).into_iter().chain(part.iter().copied().chain(again).map(Some)).collect()
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::Vlans;

    use super::*;

    fn trunk(native: Option<u16>, tagged: &str) -> VlanConfig {
        VlanConfig::new(native, tagged.parse::<Vlans>().ok().as_ref())
    }

    #[test]
    fn every_vlan_is_probed_in_some_round() {
        for last in [1_u32, 63, 64, 65, 128, 129, 4094] {
            let lan = trunk(None, &format!("1-{last}"));
            let rounds = last.div_ceil(VLANS_A_ROUND as u32);
            let sent: Vec<_> = (0..rounds).flat_map(|round| vlans(&lan, round, NO_VLAN)).collect();
            assert_eq!(sent, (1..=last as u16).map(Some).collect::<Vec<_>>());
            assert!((0..rounds).all(|round| vlans(&lan, round, NO_VLAN).len() <= VLANS_A_ROUND));
            // Then the rounds repeat.
            assert_eq!(vlans(&lan, rounds, NO_VLAN), vlans(&lan, 0, NO_VLAN));
        }
    }

    #[test]
    fn the_vlan_of_a_loop_is_probed_in_each_round() {
        let lan = trunk(Some(500), "1-200");
        for round in 0..8 {
            for seen in [1, 64, 65, 200] {
                let probed = vlans(&lan, round, seen);
                assert_eq!(probed.iter().filter(|vlan| **vlan == Some(seen)).count(), 1, "{round} {seen}");
                // The probe of the native VLAN has no tag.
                assert_eq!(probed.iter().filter(|vlan| vlan.is_none()).count(), 1);
            }
            // Another switch may have changed the tag to a VLAN that the port does not have.
            assert!(!vlans(&lan, round, 201).contains(&Some(201)));
        }
        assert_eq!(
            (vlans(&VlanConfig::Plain, 3, 7), vlans(&trunk(Some(5), ""), 3, 5)),
            (vec![None], vec![None])
        );
    }
}
