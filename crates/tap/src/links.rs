//! Reads and changes interfaces through a socket. The socket stays in the network namespace in
//! which it was made (rtnetlink(7)).
//!
//! Control threads call this. What must never happen: an answer is about an interface of the same
//! name in another namespace.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use vshunt_types::sync::Locked;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use vshunt_types::spec::NetCounters as Counters;

use crate::ifreq;
use vshunt_types::convert::{len_u16, len_u32};

// linux/netlink.h, linux/rtnetlink.h
const HEADER_BYTES: usize = 16;
const IFINFO_BYTES: usize = 16;
const ATTRIBUTE_BYTES: usize = 4;
const TYPE_MASK: u16 = 0x3FFF;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
// linux/if_link.h
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_STATS64: u16 = 23;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_PI: u16 = 4;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;

/// Room for the kernel's description of one interface, which is about 1.5 KiB.
const ANSWER_BYTES: usize = 32 << 10;

/// The kind of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkKind {
    /// A tun or tap of /dev/net/tun.
    Tun,
    /// A macvtap or ipvtap, whose files are /dev/tapN.
    Macvtap,
    /// A bridge of the kernel.
    Bridge,
    /// An interface of another driver.
    Other,
}

/// The current state of an interface.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) index: i32,
    pub(super) kind: LinkKind,
    /// The Ethernet address, if it has one.
    pub(super) address: Option<[u8; 6]>,
    pub(super) mtu: u32,
    /// The bridge, bond or similar interface that it is a port of.
    pub(super) master: Option<i32>,
    /// Queues of a multi-queue tun or tap that programs have open, attached or not. 0 for all
    /// others.
    pub(super) queues: u32,
    /// Whether a tun or tap puts struct tun_pi before each frame.
    pub(super) packet_information: bool,
    pub(super) counters: Counters,
}

/// Reads and changes interfaces in the network namespace in which it was made.
#[derive(Debug)]
pub(super) struct Links {
    socket: OwnedFd,
    /// The number of the last request. The lock is held until its answer was read. The answer is
    /// there when the request was sent.
    last_request: Mutex<u32>,
}

impl Links {
    pub(super) fn new() -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        // Protocol 0: NETLINK_ROUTE.
        let socket = socket_with(family, SocketType::RAW, flags, None)?;
        Ok(Self { socket, last_request: Mutex::new(0) })
    }

    /// Returns the interface of that name, if there is one.
    pub(super) fn find(&self, name: &str) -> io::Result<Option<Link>> {
        self.request(0, Some(name))
    }

    /// Returns the interface of that index, if there is one.
    pub(super) fn find_index(&self, index: i32) -> io::Result<Option<Link>> {
        self.request(index, None)
    }

    fn request(&self, index: i32, name: Option<&str>) -> io::Result<Option<Link>> {
        let mut last = self.last_request.locked();
        *last = last.wrapping_add(1);
        send(&self.socket, &request_message(index, name, *last), SendFlags::empty())?;
        let mut answer = vec![0; ANSWER_BYTES];
        loop {
            let (_, len) = recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT)?;
            let message = answer.get(..len).unwrap_or(&answer);
            // The answer of an earlier request that was not read.
            if number(message, 8) != Some(*last) {
                continue;
            }
            return match (half(message, 4), number(message, HEADER_BYTES)) {
                (Some(RTM_NEWLINK), _) => Ok(Link::of(message)),
                (Some(NLMSG_ERROR), Some(errno)) => match -errno.cast_signed() {
                    libc::ENODEV => Ok(None),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                },
                _ => Err(io::ErrorKind::InvalidData.into()),
            };
        }
    }

    pub(super) fn set_mtu(&self, name: &str, mtu: u32) -> io::Result<()> {
        ifreq::set_mtu(&self.socket, name, mtu)
    }

    pub(super) fn set_up(&self, name: &str) -> io::Result<()> {
        ifreq::set_up(&self.socket, name)
    }
}

/// Makes RTM_GETLINK, by index, or by name if the index is 0.
fn request_message(index: i32, name: Option<&str>, number: u32) -> Vec<u8> {
    let attribute = name.map_or(0, |name| ATTRIBUTE_BYTES + name.len() + 1);
    let len = HEADER_BYTES + IFINFO_BYTES + attribute.next_multiple_of(4);
    let mut message = Vec::with_capacity(len);
    message.extend(len_u32(len).to_ne_bytes());
    message.extend(RTM_GETLINK.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend(number.to_ne_bytes());
    // The sender, and struct ifinfomsg, which has only the index.
    message.extend([0; 4 + 4]);
    message.extend(index.to_ne_bytes());
    message.extend([0; IFINFO_BYTES - 8]);
    if let Some(name) = name {
        message.extend(len_u16(attribute).to_ne_bytes());
        message.extend(IFLA_IFNAME.to_ne_bytes());
        message.extend(name.as_bytes());
    }
    message.resize(len, 0);
    message
}

impl Link {
    /// Parses an RTM_NEWLINK.
    fn of(message: &[u8]) -> Option<Self> {
        let index = number(message, HEADER_BYTES + 4)?.cast_signed();
        let all = message.get(HEADER_BYTES + IFINFO_BYTES..)?;
        let info = attribute(all, IFLA_LINKINFO).unwrap_or_default();
        let kind = match attribute(info, IFLA_INFO_KIND) {
            Some(b"tun\0") => LinkKind::Tun,
            Some(b"macvtap\0" | b"ipvtap\0") => LinkKind::Macvtap,
            Some(b"bridge\0") => LinkKind::Bridge,
            _ => LinkKind::Other,
        };
        let data = attribute(info, IFLA_INFO_DATA).unwrap_or_default();
        let queues = |which| attribute(data, which).and_then(|bytes| number(bytes, 0)).unwrap_or(0);
        let queues = match kind {
            LinkKind::Tun => queues(IFLA_TUN_NUM_QUEUES) + queues(IFLA_TUN_NUM_DISABLED_QUEUES),
            _ => 0,
        };
        Some(Self {
            index,
            kind,
            address: attribute(all, IFLA_ADDRESS).and_then(|bytes| bytes.try_into().ok()),
            mtu: number(attribute(all, IFLA_MTU)?, 0)?,
            master: attribute(all, IFLA_MASTER).and_then(|bytes| number(bytes, 0)).map(u32::cast_signed),
            queues,
            packet_information: kind == LinkKind::Tun
                && attribute(data, IFLA_TUN_PI).is_some_and(|bytes| bytes != [0]),
            counters: counters(attribute(all, IFLA_STATS64)?, kind)?,
        })
    }
}

/// Parses a struct rtnl_link_stats64. A tap receives what the guest sent. A macvtap is the guest's
/// own end.
fn counters(stats: &[u8], kind: LinkKind) -> Option<Counters> {
    let at = |index: usize| Some(u64::from_ne_bytes(stats.get(8 * index..8 * index + 8)?.try_into().ok()?));
    // Both directions, receive first: packets, bytes, (errors,) dropped.
    let (received, sent) = ([at(0)?, at(2)?, at(6)?], [at(1)?, at(3)?, at(7)?]);
    let (from, to) = if kind == LinkKind::Macvtap { (sent, received) } else { (received, sent) };
    let [from_guest_packets, from_guest_bytes, from_guest_dropped] = from;
    let [to_guest_packets, to_guest_bytes, to_guest_dropped] = to;
    Some(Counters {
        from_guest_packets,
        from_guest_bytes,
        from_guest_dropped,
        to_guest_packets,
        to_guest_bytes,
        to_guest_dropped,
    })
}

/// Returns the value of the attribute `which` in `all`.
fn attribute(mut all: &[u8], which: u16) -> Option<&[u8]> {
    loop {
        let (len, kind) = (usize::from(half(all, 0)?), half(all, 2)?);
        let value = all.get(ATTRIBUTE_BYTES..len)?;
        if kind & TYPE_MASK == which {
            return Some(value);
        }
        all = all.get(len.next_multiple_of(4)..)?;
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_lie_are_none() {
        let all = [8, 0, 1, 0, 1, 2, 3, 4, 5, 0, 2, 0x80, 9, 0, 0, 0];
        assert_eq!(attribute(&all, 1), Some(&[1, 2, 3, 4][..]));
        assert_eq!(attribute(&all, 2), Some(&[9][..]), "the upper bits are flags");
        assert_eq!(attribute(&all, 3), None);
        for lie in [[0, 0, 1, 0], [3, 0, 1, 0], [9, 0, 1, 0]] {
            assert_eq!(attribute(&lie, 1), None);
            assert_eq!(attribute(&lie, 2), None);
        }
    }

    #[test]
    fn counters_are_the_guests() {
        let stats: Vec<u8> = (0_u64..24).flat_map(u64::to_ne_bytes).collect();
        let tap = counters(&stats, LinkKind::Tun).unwrap();
        assert_eq!((tap.from_guest_packets, tap.from_guest_bytes, tap.from_guest_dropped), (0, 2, 6));
        assert_eq!((tap.to_guest_packets, tap.to_guest_bytes, tap.to_guest_dropped), (1, 3, 7));
        let other = counters(&stats, LinkKind::Macvtap).unwrap();
        assert_eq!((other.from_guest_packets, other.to_guest_packets), (1, 0));
        assert_eq!(counters(&stats[..40], LinkKind::Tun), None);
    }
}
