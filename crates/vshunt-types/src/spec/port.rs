//! Ports of a switch: the requests of users, and present states.

use std::fmt;
use std::str::FromStr;

use serde::de::Deserializer;
use serde::{Deserialize, Serialize};

/// The highest VLAN identifier; 4095 is reserved (IEEE 802.1Q, table 9-2).
pub const VLAN_MAX: u16 = 4094;
const WORDS: usize = 64;

/// A set of VLANs, as users write it: `1,2,10-20`.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct Vlans(Box<[u64; WORDS]>);

impl Default for Vlans {
    fn default() -> Self {
        Self(Box::new([0; WORDS]))
    }
}

impl Vlans {
    /// Returns whether the VLAN is in the set.
    #[inline]
    pub fn has(&self, vlan: u16) -> bool {
        self.0.get(usize::from(vlan) / 64).is_some_and(|word| word >> (vlan % 64) & 1 != 0)
    }

    /// Returns all VLANs of the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (1..=VLAN_MAX).filter(|vlan| self.has(*vlan))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Reads the set from a number or a string.
    ///
    /// # Errors
    /// Those of the deserializer, or the text is not a list of VLANs.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        let text = super::net::text_or_number(deserializer)?;
        text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

impl FromStr for Vlans {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("`{text}` is no list of VLANs; write for example 1,2,10-20, each 1 to {VLAN_MAX}");
        let number = |word: &str| {
            let digits = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
            word.parse::<u16>().ok().filter(|vlan| digits && (1..=VLAN_MAX).contains(vlan)).ok_or_else(bad)
        };
        let mut vlans = Self::default();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            for vlan in first..=last {
                vlans.0[usize::from(vlan) / 64] |= 1 << (vlan % 64);
            }
        }
        Ok(vlans)
    }
}

impl fmt::Display for Vlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut next = 1;
        while let Some(first) = (next..=VLAN_MAX).find(|vlan| self.has(*vlan)) {
            let last = (first..=VLAN_MAX).take_while(|vlan| self.has(*vlan)).last().unwrap_or(first);
            match first == last {
                true => write!(f, "{separator}{first}")?,
                false => write!(f, "{separator}{first}-{last}")?,
            }
            (separator, next) = (",", last + 1);
        }
        Ok(())
    }
}

impl fmt::Debug for Vlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vlans({self})")
    }
}

impl From<Vlans> for String {
    fn from(vlans: Vlans) -> Self {
        vlans.to_string()
    }
}

/// Whether a port forwards frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortState {
    /// Frames pass.
    Forwarding,
    /// No frames pass: the uplink makes a loop with another uplink.
    Blocked,
}

/// A port of a switch in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PortInfo {
    /// The number on the switch.
    pub number: u16,
    /// Whether frames pass.
    pub state: PortState,
    /// Whether the source of frames has to be the `mac` of the export.
    pub mac_filter: bool,
    /// Addresses that are learnt behind it.
    pub addresses: u32,
    /// How many can be learnt.
    pub mac_limit: u32,
    /// Bytes of the longest IP packet that passes.
    pub mtu: u32,
    /// How often the uplink was blocked because of a loop.
    pub loops: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_vlans() {
        for (text, shown) in [
            ("1", "1"),
            ("4094", "4094"),
            ("10-20,1,2", "1-2,10-20"),
            ("5,5-7,6-8", "5-8"),
            ("63-65", "63-65"),
            ("1-4094", "1-4094"),
        ] {
            let vlans: Vlans = text.parse().unwrap();
            assert_eq!(vlans.to_string(), shown);
            assert_eq!(shown.parse::<Vlans>().unwrap(), vlans);
        }
        for bad in ["", "0", "4095", "1-", "-1", "3-2", "1,,2", "+1", "a", "1 ,2", "70000"] {
            assert!(bad.parse::<Vlans>().unwrap_err().contains("is no list of VLANs"), "{bad}");
        }
        let vlans: Vlans = "2,64-66".parse().unwrap();
        assert_eq!(vlans.iter().collect::<Vec<_>>(), [2, 64, 65, 66]);
        assert!(!vlans.has(0) && !vlans.has(4095) && !vlans.has(u16::MAX) && !vlans.is_empty());
        assert!(Vlans::default().is_empty());
    }
}
