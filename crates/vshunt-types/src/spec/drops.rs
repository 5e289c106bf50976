//! Reasons why frames are dropped. Counters, `status`, JSON and metrics take their names from this
//! list. The reference (docs/reference/qmp.md) shows the docstrings of the list.

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

/// Makes the enum and the table of its names from one list.
macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $reason:ident = $name:literal,)+) => {
        /// Why a frame was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $reason,)+
        }

        impl DropReason {
            /// All reasons with their names, in the order in which they are shown.
            pub const ALL: &'static [(&'static str, Self)] = &[$(($name, Self::$reason)),+];

            /// Returns the name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)+
                }
            }
        }
    };
}

reasons! {
    /// Its descriptors point outside the guest's memory, or are not a valid chain.
    Malformed = "malformed",
    /// It is shorter than the virtio-net header and an Ethernet header.
    TooShort = "too-short",
    /// It is longer than any frame, or than the one receive buffer of a guest without merged
    /// buffers.
    TooLong = "too-long",
    /// The receive ring stopped before it had buffers for the frame.
    NoBuffers = "no-buffers",
    /// Its virtio-net header is invalid, or places a checksum within the addresses or tags.
    BadHeader = "bad-header",
    /// The interface is down or missing.
    Down = "down",
    /// The host, or the receiving guest, had no room.
    NoRoom = "no-room",
    /// It waited in a tap's queue that was detached, or the guest sent it by a transmit ring that
    /// is switched off.
    Detached = "detached",
    /// It was in flight when a former daemon ended. It may have been sent, and is not sent twice.
    Unknown = "unknown",
    /// No other port of the switch takes it.
    NoReceiver = "no-receiver",
    /// Its source is a group address, or zero.
    BadSource = "bad-source",
    /// Its source is not the port's `mac` (`mac-filter`), or is configured for another port.
    ForeignSource = "foreign-source",
    /// It is for 01:80:c2:00:00:00 to 0f, and not both ports have `reserved=on`.
    Reserved = "reserved",
    /// Its port is not in its VLAN, or does not take its tags.
    Vlan = "vlan",
    /// It is longer than the MTU of the sending or of the receiving port.
    OverMtu = "over-mtu",
    /// Both ports are isolated.
    Isolated = "isolated",
    /// The sending or the receiving port is an uplink that is blocked because of a loop.
    Loop = "loop",
    /// The limits of the receiving port of a switch had no room for it.
    Limited = "limited",
    /// The host did not take it, for another reason.
    Other = "other",
}

/// How many reasons there are.
pub const DROP_REASONS: usize = DropReason::ALL.len();

/// Dropped frames, by reason: an object with the names of [`DropReason::ALL`] as keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetDrops([u64; DROP_REASONS]);

impl NetDrops {
    /// Returns the counters that `count` gives for each reason.
    pub fn new(count: impl Fn(DropReason) -> u64) -> Self {
        let mut drops = Self::default();
        for (counter, (_, why)) in drops.0.iter_mut().zip(DropReason::ALL) {
            *counter = count(*why);
        }
        drops
    }

    /// Returns all counters with their names.
    pub fn each(&self) -> [(&'static str, u64); DROP_REASONS] {
        std::array::from_fn(|at| (DropReason::ALL[at].0, self.0[at]))
    }
}

impl Serialize for NetDrops {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.each())
    }
}

impl<'de> Deserialize<'de> for NetDrops {
    /// Reads an object. A missing reason counts 0, and an unknown one is ignored, because the
    /// daemon may be older or newer than its client.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ByName)
    }
}

/// Reads counters by their names.
struct ByName;

impl<'de> Visitor<'de> for ByName {
    type Value = NetDrops;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of counters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NetDrops, A::Error> {
        let mut drops = NetDrops::default();
        while let Some(key) = map.next_key::<String>()? {
            match DropReason::ALL.iter().position(|(name, _)| *name == key) {
                Some(at) => drops.0[at] = map.next_value()?,
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(drops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_users_know() {
        // Scripts and dashboards read the names, so a name never changes.
        let names = [
            "malformed",
            "too-short",
            "too-long",
            "no-buffers",
            "bad-header",
            "down",
            "no-room",
            "detached",
            "unknown",
            "no-receiver",
            "bad-source",
            "foreign-source",
            "reserved",
            "vlan",
            "over-mtu",
            "isolated",
            "loop",
            "limited",
            "other",
        ];
        let drops = NetDrops::new(|why| why as u64 + 1);
        assert_eq!(drops.each().map(|(name, _)| name), names);
        assert!(DropReason::ALL.iter().all(|(name, why)| why.name() == *name));
        assert_eq!(drops.each().map(|(_, count)| count), std::array::from_fn(|at| at as u64 + 1));
        let json = serde_json::to_value(drops).unwrap();
        assert_eq!((json.as_object().unwrap().len(), &json["loop"]), (names.len(), &17.into()));
        assert_eq!(serde_json::from_value::<NetDrops>(json).unwrap(), drops);
        let other = serde_json::from_str::<NetDrops>(r#"{"vlan":7,"of-the-future":[1]}"#).unwrap();
        assert_eq!(other, NetDrops::new(|why| if why == DropReason::Vlan { 7 } else { 0 }));
    }
}
