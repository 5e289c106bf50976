//! Networks: the requests of users, and present states.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::NetDrops;

/// Kind of network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// An interface of the host whose other end is the network device of a guest.
    Tap,
    /// Joins the exports of this daemon that use it, uplinks included.
    Switch,
}

/// How the queue of a frame for the guest is chosen among the attached queues of a tap. All but
/// `auto` are eBPF programs (CAP_BPF).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Steering {
    /// By the flow table of the kernel: the queue on which the guest last sent frames of the flow.
    #[default]
    Auto,
    /// By the hash that the kernel already has, from the sending socket (which changes it when TCP
    /// retransmits) or the NIC; `rss` if there is none.
    Hash,
    /// By a hash over addresses and ports that is the same for both directions of a flow.
    Rss,
    /// By the CPU that sends the frame.
    Cpu,
}

impl Steering {
    /// All values with their names.
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
    /// The kind of network.
    #[serde(rename = "type")]
    pub kind: NetKind,
    /// The name, unique among networks. Flags and configuration files may leave it out if there is
    /// an `ifname`: it is then that name.
    pub name: String,
    /// tap: the interface, a tap or macvtap. An existing one is adopted and stays. Otherwise a tap
    /// is made, and removed with the network. Exclusive with `fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ifname: Option<String>,
    /// tap: open descriptors of the interface, one for each queue: `7` or `7:8:9`. Not over the
    /// control socket.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub fd: Option<String>,
    /// tap: the network namespace of `ifname`: a name (`ip netns`) or a path. Absent: that of the
    /// daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// tap: the number of queues that the interface is opened with, 1 to 256, which is the limit
    /// for an export. Absent: as many as the export has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// tap: how the queue of a frame for the guest is chosen. Absent: `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steering: Option<Steering>,
    /// tap: the MAC address of the interface itself. The guest's address is the key `mac` of the
    /// export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Mac>,
    /// tap: the user, by name or number, that may open the interface without CAP_NET_ADMIN.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub owner: Option<String>,
    /// tap: the group, by name or number, that may.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number")]
    pub group: Option<String>,
    /// tap: whether the interface stays when the daemon ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persist: Option<bool>,
}

/// Reads a string that may be written as a number.
///
/// # Errors
/// It is neither.
pub fn text_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
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

/// A network in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetInfo {
    /// The keys that the network was added with; `ifname` and `steering` as they are in force.
    #[serde(flatten)]
    pub spec: NetSpec,
    /// Whether the daemon made the interface, and removes it with the network.
    pub made: bool,
    /// Whether the interface can have more than one queue.
    pub multi_queue: bool,
    /// Queues of the interface that are open.
    pub open_queues: u16,
    /// Bytes of the longest IP packet. Absent if the interface is missing, or there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The exports that use it; at most one for a tap.
    pub exports: Vec<String>,
    /// switch: how many addresses it knows the ports of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<usize>,
    /// tap: the counters of the interface. Absent if the interface is missing, has moved to another
    /// network namespace, or is in one that the daemon may not enter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetCounters>,
}

/// How a switch knows the port of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressOrigin {
    /// It is the `mac` of the export.
    Configured,
    /// It is an address of the interface of the uplink, or of its bridge.
    Host,
    /// A frame with this source came in by the port.
    Learnt,
}

/// An address whose port a switch knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetAddress {
    /// The Ethernet address.
    pub address: Mac,
    /// The VLAN in which it was learnt. Absent without VLANs. An address that was not learnt holds
    /// in all VLANs of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// The export of the port.
    pub export: String,
    /// How the port is known.
    pub origin: AddressOrigin,
    /// Of a learnt address: seconds since it sent a frame. It is forgotten after 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_s: Option<u32>,
}

/// Traffic of an interface, as the kernel counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetCounters {
    /// Frames that the guest sent.
    pub from_guest_packets: u64,
    /// Bytes of these frames.
    pub from_guest_bytes: u64,
    /// Frames that the guest sent and the host did not take.
    pub from_guest_dropped: u64,
    /// Frames for the guest.
    pub to_guest_packets: u64,
    /// Bytes of these frames.
    pub to_guest_bytes: u64,
    /// Frames for the guest that found no attached queue, or a full one.
    pub to_guest_dropped: u64,
}

/// Traffic of a queue pair that a worker of the daemon serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetQueueCounters {
    /// Frames that the guest received.
    pub to_guest_packets: u64,
    /// Bytes of these frames, without virtio-net headers.
    pub to_guest_bytes: u64,
    /// Batches in which the guest received frames.
    pub to_guest_batches: u64,
    /// Frames that the guest sent and the network took.
    pub from_guest_packets: u64,
    /// Bytes of these frames, without virtio-net headers.
    pub from_guest_bytes: u64,
    /// Batches in which these frames were taken.
    pub from_guest_batches: u64,
    /// Frames that were dropped, by reason.
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
            (None, [0, 0, 0, 0, 0, 0]) => {
                Err(format!("`{text}` is not the address of a device; give another one"))
            }
            (None, [first, ..]) if first & 1 != 0 => Err(format!(
                "`{text}` is a group address: its first byte is odd; give a network device one with an even first byte"
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
        assert!("00:00:00:00:00:00".parse::<Mac>().unwrap_err().contains("not the address of a device"));
    }
}
