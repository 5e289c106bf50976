//! What users say of networks and are told of them.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::NetDrops;

/// Kind of network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// An interface of the host whose other end is the guest's card.
    Tap,
    /// The exports of this daemon that use it, joined to each other and to uplinks.
    Switch,
}

/// Which of a tap's attached queues a frame for the guest comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Steering {
    /// By the kernel's flow table: where the guest last sent frames of that flow.
    #[default]
    Auto,
    /// By the hash that the kernel has of the frame already, of its sender's socket (which takes another when TCP
    /// retransmits) or a network card; [`Rss`](Self::Rss) where it has none.
    Hash,
    /// By a hash over addresses and ports, the same for both directions of a flow, whoever sent it.
    Rss,
    /// By the CPU that sends the frame.
    Cpu,
}

impl Steering {
    /// All ways, with the words for them.
    pub const ALL: [(&str, Self); 4] =
        [("auto", Self::Auto), ("hash", Self::Hash), ("rss", Self::Rss), ("cpu", Self::Cpu)];
}

impl FromStr for Steering {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(word, _)| *word == text);
        found
            .map(|(_, steering)| *steering)
            .ok_or_else(|| format!("`{text}` is none of auto, hash, rss, cpu"))
    }
}

impl fmt::Display for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::ALL.iter().find(|(_, steering)| steering == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
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
    /// The interface, a tap or macvtap. One that is there is adopted and stays; else a tap is made, set up, and removed with
    /// the network. Of a tap; either this or `fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ifname: Option<String>,
    /// Open descriptors of the interface, one a queue: `7` or `7:8:9`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub fd: Option<String>,
    /// The network namespace of `ifname`, a name as `ip netns` has it or a path; absent: ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Queues that the interface is opened with, 1..=256, and the most that an export can have; absent: as the export asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Which queue a frame for the guest comes to; absent: [`Steering::Auto`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steering: Option<Steering>,
    /// The interface's own Ethernet address; absent: as it is. The guest's is the export's `mac`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Mac>,
    /// The user, by name or number, who may open the interface.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub owner: Option<String>,
    /// The group whose members may.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub group: Option<String>,
    /// Whether an interface that is made stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persist: Option<bool>,
}

/// What may be written as a number where that is all of it.
pub(super) fn text_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    struct Either;

    impl Visitor<'_> for Either {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number or a string")
        }

        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Some(text.to_owned()))
        }

        fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
            Ok(Some(number.to_string()))
        }

        fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
            Ok(Some(number.to_string()))
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }
    }

    deserializer.deserialize_any(Either)
}

/// A network as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetInfo {
    /// What was asked for, and which interface and steering there are.
    #[serde(flatten)]
    pub spec: NetSpec,
    /// Whether the interface was made, and goes with the network.
    pub made: bool,
    /// Whether it can have more queues than one.
    pub multi_queue: bool,
    /// Queues of it that are open.
    pub open_queues: u16,
    /// Bytes of the longest IP packet; none where the interface is gone, or there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Exports that use it: of a tap one at most.
    pub exports: Vec<String>,
    /// Of a switch: Ethernet addresses that it knows the ports of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<usize>,
    /// What went through the interface; none where it is gone, or in another network namespace by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetCounters>,
}

/// How a switch knows which port an address is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressOrigin {
    /// It is the `mac` of the export.
    Configured,
    /// It is an address of the uplink's interface, or of the bridge that this is a port of.
    Host,
    /// A frame from it came in by the port.
    Learnt,
}

/// An Ethernet address that a switch knows the port of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetAddress {
    /// The address.
    pub address: Mac,
    /// The VLAN in which it was learnt; none: without VLANs, or, of one that was not learnt, all VLANs of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// The export whose port it is behind.
    pub export: String,
    /// How that is known.
    pub origin: AddressOrigin,
    /// Of one that was learnt: seconds since it sent a frame. It is forgotten after 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_s: Option<u32>,
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

/// What went through a queue pair that a worker of this process serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetQueueCounters {
    /// Frames that the guest got.
    pub to_guest_packets: u64,
    /// Their bytes, without virtio-net headers.
    pub to_guest_bytes: u64,
    /// How often it was given some: packets by batches is how many come together.
    pub to_guest_batches: u64,
    /// Frames that the guest sent, and the network took.
    pub from_guest_packets: u64,
    /// Their bytes, likewise.
    pub from_guest_bytes: u64,
    /// How often some were taken together.
    pub from_guest_batches: u64,
    /// Frames that did not get through.
    pub drops: NetDrops,
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
    fn words_for_steering() {
        for (word, steering) in Steering::ALL {
            assert_eq!((word.parse(), steering.to_string()), (Ok(steering), word.to_owned()));
            assert_eq!(serde_json::to_value(steering).unwrap(), word);
        }
        assert!("Rss".parse::<Steering>().unwrap_err().contains("none of"));
    }

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
