//! Loops through two uplinks of a switch: found by frames of our own that come back.
//!
//! While a switch has several uplinks, each of them sends a probe every few seconds ([`Switch::probe`], on the uplink's own
//! thread). A probe that was sent by one uplink and comes in by another one shows that both lead to the same network; the
//! one with the higher number is blocked for as long as probes come ([`Switch::is_probe`], on a worker). Guests get no
//! probes, and cannot make any: a probe has a random number of its uplink. A station on the network of one uplink sees the
//! number of that one only, which means nothing there. Probes of other switches pass like other frames, so that a loop through
//! several daemons shows, too.
//!
//! ```text
//! destination (group) | source | [tag] | 0x9000 | "vshunt lp" | id of the uplink (16) | zeroes
//! ```

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Weak;

use super::frame::{ETH_VLAN, word_at};
use super::vlan::Lan;
use super::{Port, Switch, View};

/// Where probes go: a group's address, locally administered.
const GROUP: [u8; 6] = [0x03, b'v', b's', b'h', b'l', b'p'];
/// EtherType of configuration tests (Ethernet 2.0, 8), with which other vendors look for loops, too.
const ETH_TEST: u16 = 0x9000;
const MAGIC: [u8; 9] = *b"vshunt lp";
/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;
/// VLANs of an uplink that get a probe of their own: bounds what is sent at once.
const VLANS_PROBED: usize = 64;

/// A random number.
type Number = [u8; 16];

/// By which a switch knows the probes of an uplink.
pub(super) struct Id(Number);

impl Id {
    pub(super) fn random() -> Self {
        // Each is seeded by the system's random numbers.
        let mut id = [0; 16];
        for half in id.chunks_exact_mut(8) {
            half.copy_from_slice(&RandomState::new().build_hasher().finish().to_ne_bytes());
        }
        Self(id)
    }
}

impl Switch {
    /// The probe of an uplink, in a VLAN or without a tag.
    pub(super) fn probe_frame(port: &Port, vlan: Option<u16>) -> Vec<u8> {
        let id = &port.probe.0;
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
        frame.resize(frame.len().max(FRAME_MIN), 0);
        frame
    }

    /// Whether the switch has several uplinks that can make a loop with this one.
    fn can_loop(view: &View, port: &Port) -> bool {
        view.all().any(|other| other.index != port.index && other.is_uplink() && other.meets(port))
    }

    /// Sends an uplink's probes, if there is another uplink. Called by a thread that may wait.
    pub fn probe(&self, port: &Port) {
        let Some(tap) = port.tap.as_ref().and_then(Weak::upgrade) else { return };
        if !Self::can_loop(&self.view(), port) {
            return;
        }
        let (bare, tagged) = match &port.lan {
            Lan::Plain => (true, Vec::new()),
            Lan::Vlans { native, tagged } => (native.is_some(), tagged.iter().take(VLANS_PROBED).collect()),
        };
        for vlan in bare.then_some(None).into_iter().chain(tagged.into_iter().map(Some)) {
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
        let Some(number) = first.get(id..id + size_of::<Number>()) else { return false };
        let Some(from) = view.all().find(|from| from.is_uplink() && from.probe.0 == number) else {
            return false;
        };
        if from.index != port.index && from.meets(port) {
            let (stays, goes) = if from.index < port.index { (&**from, port) } else { (port, &**from) };
            if goes.block(stays.index, now_s) {
                // What was learnt there is to be found by the other uplink.
                self.macs.forget(goes.index);
            }
        }
        true
    }

    /// What to tell of an uplink that is blocked: which network it is, and what helps.
    pub fn loop_of(&self, port: &Port) -> String {
        let view = self.view();
        let other = view.port(port.loop_with().into()).map_or("another uplink", |other| other.name.as_str());
        let (name, switch) = (&port.name, &self.name);
        format!(
            "uplinks {name} and {other} of switch {switch} lead to the same network, which makes a loop; {name} is blocked as \
             long as it stands: remove one of the two (export remove {name}), or separate their networks"
        )
    }
}
