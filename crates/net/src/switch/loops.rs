//! Loops through two uplinks of a switch: sending of probes, and blocking of an uplink whose probe
//! came back.
//!
//! See `probe` for the frames. The uplink with the higher number is blocked for as long as probes
//! come.

use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

use super::port::{BLOCK_S, Port};
use super::probe::{self, GROUP, PROBE_EVERY_S};
use super::{Switch, View};

// A VLAN that is probed in each round keeps the uplink blocked even if two probes in a row are
// lost.
const _: () = assert!(BLOCK_S > 3 * PROBE_EVERY_S);

impl Switch {
    /// Returns whether the switch has another uplink that can make a loop with this one.
    fn can_loop(view: &View, port: &Port) -> bool {
        view.all().any(|other| other.index != port.index && other.is_uplink() && other.can_reach(port))
    }

    /// Sends the probes of an uplink's round, if there is another uplink. Called by a thread that
    /// may block, every [`PROBE_EVERY_S`] seconds, with the number of the round.
    pub fn probe(&self, port: &Port, round: u32) {
        let Some(tap) = port.tap.as_ref().and_then(Weak::upgrade) else { return };
        if !Self::can_loop(&self.view(), port) {
            return;
        }
        for vlan in probe::vlans(&port.vlans, round, port.probe.seen.load(Relaxed)) {
            // An interface that is down or full takes no frame. The next round follows soon.
            let _ = tap.inject(&port.probe.frame(vlan));
        }
    }

    /// Returns whether a frame that entered by an uplink is a probe of this switch. Such a frame is
    /// not forwarded. If another uplink sent it, the uplink with the higher number is blocked for a
    /// while.
    #[inline]
    pub(super) fn is_probe(&self, view: &View, port: &Port, first: &[u8], now_s: u32) -> bool {
        first.starts_with(&GROUP) && self.is_own_probe(view, port, first, now_s)
    }

    #[cold]
    fn is_own_probe(&self, view: &View, port: &Port, first: &[u8], now_s: u32) -> bool {
        let Some((id, vlan)) = probe::parse(first) else { return false };
        let Some(from) = view.all().find(|from| from.is_uplink() && from.probe.id == id) else {
            return false;
        };
        if from.index != port.index && from.can_reach(port) {
            from.probe.seen.store(vlan, Relaxed);
            let (stays, blocked) = if from.index < port.index { (&**from, port) } else { (port, &**from) };
            if blocked.block(stays.index, now_s) {
                // The stations behind it are now reached through the other uplink.
                self.macs.forget(blocked.index);
            }
        }
        true
    }

    /// Returns the warning about a blocked uplink. It names the other uplink of the loop, and the
    /// remedy.
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
