//! What users say of networks and are told of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Kind of network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// An interface of the host whose other end is the guest's card.
    Tap,
}

/// A network: the backend of exports of type vhost-user-net.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NetSpec {
    /// Kind of network.
    #[serde(rename = "type")]
    pub kind: NetKind,
    /// Unique among networks.
    pub name: String,
    /// The interface. One that is there is adopted and stays; else it is made, set up, and removed with the network.
    pub ifname: String,
    /// Queues that the interface is opened with, 1..=256, and the most that an export can have; absent: as the export asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
}

/// A network as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetInfo {
    /// What was asked for.
    #[serde(flatten)]
    pub spec: NetSpec,
    /// Whether the interface was made, and goes with the network.
    pub made: bool,
    /// Whether it can have more queues than one.
    pub multi_queue: bool,
    /// Queues of it that are open.
    pub open_queues: u16,
    /// Bytes of the longest IP packet; none where the interface is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The export that uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// What went through the interface; none where it is gone, or in another network namespace by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetCounters>,
}

/// What went through a network since its interface was made, as the kernel counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetCounters {
    /// Frames that the guest sent.
    pub from_guest_packets: u64,
    /// Their bytes.
    pub from_guest_bytes: u64,
    /// Frames that the guest sent and the host did not take.
    pub from_guest_dropped: u64,
    /// Frames for the guest.
    pub to_guest_packets: u64,
    /// Their bytes.
    pub to_guest_bytes: u64,
    /// Frames for the guest that found no queue attached, or a full one.
    pub to_guest_dropped: u64,
}

/// An Ethernet address of one station: `52:54:00:12:34:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is no MAC address; write six bytes, for example 52:54:00:12:34:56");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(bad)?;
            // from_str_radix would take a sign.
            *byte = u8::from_str_radix(part, 16).ok().filter(|_| !part.contains('+')).ok_or_else(bad)?;
        }
        match (parts.next(), bytes) {
            (Some(_), _) => Err(bad()),
            (None, [0, 0, 0, 0, 0, 0]) => Err(format!("`{text}` is nobody's address")),
            (None, [first, ..]) if first & 1 != 0 => Err(format!(
                "`{text}` is a group's address: its first byte is odd; a card needs one of its own"
            )),
            _ => Ok(Self(bytes)),
        }
    }
}

impl TryFrom<String> for Mac {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let text = "52:54:00:ab:Cd:ef";
        assert_eq!(text.parse::<Mac>().unwrap().to_string(), text.to_lowercase());
        for bad in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:ef:01",
            "52:54:00:ab:cd:+1",
            "52-54-00-ab-cd-ef",
            "5254:00:ab:cd:ef",
        ] {
            assert!(bad.parse::<Mac>().unwrap_err().contains("is no MAC"), "{bad}");
        }
        assert!("01:00:5e:00:00:01".parse::<Mac>().unwrap_err().contains("group"));
        assert!("00:00:00:00:00:00".parse::<Mac>().unwrap_err().contains("nobody"));
    }
}
