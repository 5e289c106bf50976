//! The parts of a frame that a switch reads, and the virtio-net header before it.
//!
//! The bytes are a guest's. Nothing here indexes a slice: a read beyond the end is `None`.

use super::macs::Address;

/// Bytes of a frame that are inspected: Ethernet, two VLAN tags, IPv6, and TCP up to the length of
/// its header.
pub(super) const INSPECTED_BYTES: usize = 14 + 2 * 4 + 40 + 13;

/// EtherType of a VLAN tag (802.1Q, 9.4).
pub(super) const ETH_VLAN: u16 = 0x8100;
/// EtherType of a service tag (802.1ad).
const ETH_QINQ: u16 = 0x88A8;
/// EtherType of an outer tag, used before 802.1ad had a number for it.
const ETH_QINQ_OLD: u16 = 0x9100;
const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86DD;
const IP_TCP: u8 = 6;
const IP_UDP: u8 = 17;

/// Flag of [`Header`]: the checksum has to be computed.
pub(super) const NEEDS_CSUM: u8 = 1;
/// Flag of [`Header`]: the checksum was verified.
pub(super) const DATA_VALID: u8 = 2;
/// [`Header::gso_type`]: one packet.
pub(super) const GSO_NONE: u8 = 0;
/// [`Header::gso_type`]: TCP over IPv4, to be cut into segments.
pub(super) const GSO_TCPV4: u8 = 1;
/// [`Header::gso_type`]: TCP over IPv6, to be cut into segments.
pub(super) const GSO_TCPV6: u8 = 4;
/// [`Header::gso_type`]: UDP, each segment a datagram of its own.
pub(super) const GSO_UDP: u8 = 5;
/// Together with a TCP type: only the first segment has CWR (RFC 3168).
pub(super) const GSO_ECN: u8 = 0x80;

/// Bytes of the virtio-net header that describe the frame: all but the number of buffers.
pub(crate) const HEADER_BYTES: usize = 10;

/// The virtio-net header without its number of buffers (Virtio 1.3, 5.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// [`NEEDS_CSUM`], or 2: the checksum was verified.
    pub flags: u8,
    /// [`GSO_NONE`], [`GSO_UDP`], [`GSO_TCPV4`] or 4 for TCP over IPv6. The last two may have
    /// [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of all headers of the frame; a hint.
    pub hdr_len: u16,
    /// Bytes of data of each segment.
    pub gso_size: u16,
    /// Offset at which the checksummed bytes start.
    pub csum_start: u16,
    /// Offset of the checksum, relative to `csum_start`.
    pub csum_offset: u16,
}

impl Header {
    /// Parses the header as a guest wrote it.
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Self {
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1] = bytes;
        Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
        }
    }

    /// Returns the header as a guest reads it, with room for the number of buffers.
    pub fn to_bytes(self) -> [u8; 12] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1, 0, 0]
    }

    /// Returns whether the header is valid for a frame of `len` bytes whose packet starts at
    /// `payload`. Another guest relies on it. A checksum may only be stored behind the addresses
    /// and tags, because the switch checks these before.
    pub fn is_sane(&self, len: usize, payload: usize) -> bool {
        let needs = self.flags & NEEDS_CSUM != 0;
        let start = usize::from(self.csum_start);
        let end = start + usize::from(self.csum_offset) + 2;
        if self.flags & !(NEEDS_CSUM | DATA_VALID) != 0 || (needs && (start < payload || end > len)) {
            return false;
        }
        match self.gso_type & !GSO_ECN {
            GSO_NONE => self.gso_type == GSO_NONE,
            GSO_UDP => self.gso_type == GSO_UDP && needs && self.gso_size > 0,
            GSO_TCPV4 | GSO_TCPV6 => needs && self.gso_size > 0,
            _ => false,
        }
    }

    /// Returns the header of the same frame with `by` bytes more (or fewer, if negative) before its
    /// packet.
    pub fn moved(self, by: isize) -> Self {
        let moved = |at: u16| u16::try_from(usize::from(at).saturating_add_signed(by)).unwrap_or(u16::MAX);
        let needs = self.flags & NEEDS_CSUM != 0;
        match by {
            0 => self,
            _ => Self {
                // 0 means that the sender does not give it.
                hdr_len: if self.hdr_len == 0 { 0 } else { moved(self.hdr_len) },
                csum_start: if needs { moved(self.csum_start) } else { self.csum_start },
                ..self
            },
        }
    }
}

/// A frame that is about to be sent, as its sender sees it.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The first bytes, up to [`INSPECTED_BYTES`], in memory to which no guest writes.
    pub first: &'a [u8],
    /// Their contents.
    pub info: FrameInfo,
    /// Bytes of the longest IP packet into which the frame will be cut, or of its own packet. An
    /// MTU limits this.
    pub bytes: usize,
}

impl<'a> Packet<'a> {
    /// Inspects a frame of `len` bytes that begins with `first`. `None`: it is shorter than an
    /// Ethernet header, or its virtio-net header is invalid.
    pub fn new(first: &'a [u8], header: &Header, len: usize) -> Option<Self> {
        let info = inspect(first)?;
        if !header.is_sane(len, info.payload) {
            return None;
        }
        let start = usize::from(header.csum_start);
        let headers = match header.gso_type & !GSO_ECN {
            GSO_NONE => None,
            GSO_UDP => Some(UDP_BYTES),
            // IP options may move it beyond the inspected bytes. Then the minimum is taken.
            _ => Some(first.get(start + 12).map_or(TCP_MIN, |byte| usize::from(byte >> 4) * 4).max(TCP_MIN)),
        };
        let cut = headers.map_or(len, |bytes| len.min(start + bytes + usize::from(header.gso_size)));
        Some(Self { first, info, bytes: cut.saturating_sub(info.payload) })
    }
}

/// Bytes of a UDP header.
const UDP_BYTES: usize = 8;
/// Bytes of a TCP header without options.
const TCP_MIN: usize = 20;

/// The properties of a frame that a switch needs.
#[derive(Clone, Copy, Debug)]
pub struct FrameInfo {
    /// The destination address.
    pub destination: Address,
    /// The source address.
    pub source: Address,
    /// Hash of the flow, the same in both directions.
    pub hash: u32,
    /// Offset of the packet: behind addresses, up to two VLAN tags, and the EtherType.
    pub payload: usize,
}

/// Inspects the first bytes of a frame. `None`: there are fewer than both addresses have.
#[inline]
pub(super) fn inspect(bytes: &[u8]) -> Option<FrameInfo> {
    let addresses: &[u8; 12] = bytes.first_chunk()?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5] = *addresses;
    let destination = Address::new([d0, d1, d2, d3, d4, d5]);
    let source = Address::new([s0, s1, s2, s3, s4, s5]);
    let payload = payload(bytes);
    let hash = flow_hash(bytes, payload).unwrap_or_else(|| station_hash(addresses));
    Some(FrameInfo { destination, source, hash, payload })
}

/// Returns the 16-bit word at an offset, if the frame has it.
pub(super) fn word_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Returns whether an EtherType is that of a VLAN tag of any kind.
pub(super) fn is_tag(kind: u16) -> bool {
    matches!(kind, ETH_VLAN | ETH_QINQ | ETH_QINQ_OLD)
}

/// Returns the offset of a frame's packet: behind addresses, up to two VLAN tags of any kind, and
/// the EtherType. The frame may end before that.
pub(super) fn payload(bytes: &[u8]) -> usize {
    let mut at = 12;
    while at < 20 && word_at(bytes, at).is_some_and(is_tag) {
        at += 4;
    }
    at + 2
}

/// Mixes a word by alternate shifts and multiplications with odd factors. Every bit of it changes
/// about half of the result's bits.
pub(super) fn mix(mut word: u64) -> u32 {
    for factor in [0xFF51_AFD7_ED55_8CCD_u64, 0xC4CE_B9FE_1A85_EC53] {
        word = (word ^ word >> 33).wrapping_mul(factor);
    }
    (word >> 32) as u32
}

/// Returns the hash of a frame that is not IP: over both stations, in any order.
fn station_hash(both: &[u8; 12]) -> u32 {
    both.chunks(6).fold(0, |sum, station| {
        let bytes = station.iter().fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
        sum ^ mix(bytes)
    })
}

/// Returns the hash of an IP packet at `ip`: over addresses, protocol and, if it is not a fragment,
/// ports.
fn flow_hash(bytes: &[u8], ip: usize) -> Option<u32> {
    let word = |at: usize| word_at(bytes, at);
    let (addresses, length, protocol, ports) = match word(ip - 2)? {
        ETH_IPV4 => {
            let header = usize::from(bytes.get(ip)? & 15) * 4;
            let whole = word(ip + 6)? & 0x3FFF == 0;
            (ip + 12, 4, *bytes.get(ip + 9)?, whole.then_some(ip + header))
        }
        ETH_IPV6 => (ip + 8, 16, *bytes.get(ip + 6)?, Some(ip + 40)),
        _ => return None,
    };
    let side = |at: usize, port: Option<u16>| {
        let address = bytes.get(at..at + length)?;
        let word = address.chunks(4).fold(0u64, |sum, four| {
            let four = four.iter().fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
            sum.rotate_left(13) ^ four.wrapping_mul(0xFF51_AFD7_ED55_8CCD)
        });
        Some(mix(word ^ u64::from(port.unwrap_or(0)).wrapping_mul(0xC4CE_B9FE_1A85_EC53)))
    };
    let has_ports = matches!(protocol, IP_TCP | IP_UDP);
    let port = |number: usize| ports.filter(|_| has_ports).and_then(|at| word(at + 2 * number));
    // XOR and addition do not depend on the order of the two sides.
    let (from, to) = (side(addresses, port(0))?, side(addresses + length, port(1))?);
    Some(mix(u64::from(from ^ to) << 8 | u64::from(protocol)).wrapping_add(from.wrapping_add(to)))
}
