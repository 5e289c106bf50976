//! A frame on its way through a switch: what is read of it, and the virtio-net header that says what is still to be done.

use std::sync::Arc;

use super::End;
use super::macs::Address;

/// Bytes of a frame that are looked at: Ethernet, two VLAN tags, IPv6, and TCP up to the length of its header.
pub const LOOK_BYTES: usize = 14 + 2 * 4 + 40 + 13;

/// EtherType of a VLAN tag (802.1Q, 9.4).
pub(super) const ETH_VLAN: u16 = 0x8100;
const ETH_QINQ: u16 = 0x88A8;
/// Of the outer tag, before 802.1ad had a number for it.
const ETH_QINQ_OLD: u16 = 0x9100;
const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86DD;
const IP_TCP: u8 = 6;
const IP_UDP: u8 = 17;

/// Flag of [`Header`]: the checksum is to be computed.
pub const NEEDS_CSUM: u8 = 1;
/// Flag of [`Header`]: the checksum was found right.
pub(super) const DATA_VALID: u8 = 2;
/// [`Header::gso_type`]: one packet.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4, to be cut into segments.
pub const GSO_TCPV4: u8 = 1;
/// TCP over IPv6, likewise.
pub(super) const GSO_TCPV6: u8 = 4;
/// UDP, each segment a datagram of its own.
pub const GSO_UDP: u8 = 5;
/// With one of TCP's: the first segment alone has CWR (RFC 3168).
pub const GSO_ECN: u8 = 0x80;

/// The virtio-net header, less its number of buffers (Virtio 1.3, 5.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// [`NEEDS_CSUM`], or 2: the checksum was found right.
    pub flags: u8,
    /// [`GSO_NONE`], [`GSO_UDP`], [`GSO_TCPV4`] or 4 for TCP over IPv6, the last two with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of all headers of the frame; a hint.
    pub hdr_len: u16,
    /// Bytes of data of each segment.
    pub gso_size: u16,
    /// Where the checksum begins.
    pub csum_start: u16,
    /// Where it is put, from there.
    pub csum_offset: u16,
}

impl Header {
    /// As a guest wrote it.
    pub fn parse(bytes: [u8; 10]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// As a guest reads it, with a place for the number of buffers.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        (bytes[0], bytes[1]) = (self.flags, self.gso_type);
        for (at, word) in [(2, self.hdr_len), (4, self.gso_size), (6, self.csum_start), (8, self.csum_offset)]
        {
            bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Whether it makes sense for a frame of `len` bytes, whose packet begins at `payload`: another guest will believe it. A
    /// checksum is written behind the addresses and tags only, which others have checked by then.
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
}

impl Header {
    /// The header of the same frame with bytes more, or fewer, before its packet.
    pub fn moved(self, by: isize) -> Self {
        let moved = |at: u16| usize::from(at).saturating_add_signed(by).min(u16::MAX.into()) as u16;
        match by {
            0 => self,
            _ => Self {
                // 0: it is not told.
                hdr_len: if self.hdr_len == 0 { 0 } else { moved(self.hdr_len) },
                csum_start: if self.flags & NEEDS_CSUM == 0 {
                    self.csum_start
                } else {
                    moved(self.csum_start)
                },
                ..self
            },
        }
    }
}

/// A frame that is about to be sent, as its sender looks at it.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Its first bytes, up to [`LOOK_BYTES`], where nobody else writes.
    pub first: &'a [u8],
    /// What they say.
    pub look: Look,
    /// Bytes of the longest packet that it will be cut into, or its own: what an MTU is for.
    pub bytes: usize,
}

impl<'a> Packet<'a> {
    /// A frame of `len` bytes that begins with `first`, 14 at least. None: its header makes no sense.
    pub fn new(first: &'a [u8], header: &Header, len: usize) -> Option<Self> {
        let look = look(first);
        if !header.is_sane(len, look.payload) {
            return None;
        }
        let start = usize::from(header.csum_start);
        let headers = match header.gso_type & !GSO_ECN {
            GSO_NONE => None,
            GSO_UDP => Some(UDP_BYTES),
            // Behind options of IP it is not among the bytes that are looked at: then the least is taken.
            _ => Some(first.get(start + 12).map_or(TCP_MIN, |byte| usize::from(byte >> 4) * 4).max(TCP_MIN)),
        };
        let cut = headers.map_or(len, |bytes| len.min(start + bytes + usize::from(header.gso_size)));
        Some(Self { first, look, bytes: cut.saturating_sub(look.payload) })
    }
}

/// Bytes of UDP's header, and of TCP's without options.
const UDP_BYTES: usize = 8;
const TCP_MIN: usize = 20;

/// What a switch needs to know of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Whom it is for.
    pub destination: Address,
    /// Who sends it.
    pub source: Address,
    /// Of its flow, the same both ways.
    pub hash: u32,
    /// Where its packet begins: behind addresses, up to two VLAN tags, and the EtherType.
    pub payload: usize,
}

/// Looks at the first bytes of a frame, 14 at least.
pub fn look(bytes: &[u8]) -> Look {
    let six = |at: usize| -> [u8; 6] { bytes[at..at + 6].try_into().expect("six bytes") };
    let (destination, source) = (Address::new(six(0)), Address::new(six(6)));
    let payload = payload(bytes);
    let hash = flow(bytes, payload).unwrap_or_else(|| station_hash(&bytes[..12]));
    Look { destination, source, hash, payload }
}

/// The 16-bit word at a place, if it is there.
pub(super) fn word_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Whether an EtherType is that of a VLAN tag of any kind.
pub(super) fn is_tag(kind: u16) -> bool {
    matches!(kind, ETH_VLAN | ETH_QINQ | ETH_QINQ_OLD)
}

/// Returns where the packet of a frame begins: behind addresses, up to two VLAN tags of any kind, and the EtherType. The frame
/// may end before that.
pub fn payload(bytes: &[u8]) -> usize {
    let mut at = 12;
    while at < 20 && word_at(bytes, at).is_some_and(is_tag) {
        at += 4;
    }
    at + 2
}

/// Every bit of the word changes about half of the result's: shifts and odd factors in turn.
pub(super) fn mix(mut word: u64) -> u32 {
    for factor in [0xFF51_AFD7_ED55_8CCD_u64, 0xC4CE_B9FE_1A85_EC53] {
        word = (word ^ word >> 33).wrapping_mul(factor);
    }
    (word >> 32) as u32
}

/// Of what is no IP: by the two stations, whichever is which.
fn station_hash(both: &[u8]) -> u32 {
    both.chunks(6).fold(0, |sum, station| {
        let bytes = station.iter().fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
        sum ^ mix(bytes)
    })
}

/// Of IP: addresses, protocol and ports, where it is no fragment.
fn flow(bytes: &[u8], ip: usize) -> Option<u32> {
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
    // The same whichever side is which.
    let (from, to) = (side(addresses, port(0))?, side(addresses + length, port(1))?);
    Some(mix(u64::from(from ^ to) << 8 | u64::from(protocol)).wrapping_add(from.wrapping_add(to)))
}

/// A piece of a sender's memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte.
    pub ptr: *mut u8,
    /// How many.
    pub len: usize,
}

// SAFETY: an address and a length; the memory is there until the description that has it is home (see the switch).
unsafe impl Send for Piece {}

impl Frame {
    /// A description whose home is `home`.
    pub fn at(home: &Arc<End>) -> Self {
        Self {
            home: home.clone(),
            slot: 0,
            lane: 0,
            tick: 0,
            pieces: Vec::new(),
            len: 0,
            header: Header::default(),
            fate: Fate::NoRoom,
        }
    }
}

/// A frame of a sender, described. Made by the queue that has the sender's ring; with whoever is to copy the bytes, or at home.
pub struct Frame {
    /// Where it goes when it was copied, or not.
    pub home: Arc<End>,
    /// The sender's own: which request.
    pub slot: u16,
    /// The sender's own: to whom.
    pub lane: u16,
    /// When it was sent, in the sender's ticks.
    pub tick: u32,
    /// The frame, from its Ethernet header on.
    pub pieces: Vec<Piece>,
    /// Its bytes.
    pub len: usize,
    /// What is still to be done.
    pub header: Header,
    /// What became of it; set by the one who sends it home.
    pub fate: Fate,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was taken out of its sender's memory.
    Taken,
    /// There was no room for it, or not in time.
    NoRoom,
    /// It is not what its header says.
    Lie,
}
