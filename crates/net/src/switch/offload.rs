//! Frames for a guest that does not accept them as they were sent: with a checksum to be computed,
//! or longer than its MTU.
//!
//! The work is done here, with copies. Guests that agreed on the same features, as most do, never
//! need it. The bytes are a guest's, so nothing here indexes a slice.

use virtio::features::bit;
use virtio::mem;
use virtio::net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6,
};

use super::frame::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_UDP, Header, NEEDS_CSUM, payload, word_at};
use super::port_queue::SentFrame;

/// The offload work that a receiver does itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AcceptedOffloads {
    csum: bool,
    tso4: bool,
    tso6: bool,
    uso: bool,
    ecn: bool,
}

impl AcceptedOffloads {
    /// Returns the offload work that a guest with these features does itself.
    pub(super) fn new(features: u64) -> Self {
        let has = |number| features & bit(number) != 0;
        let csum = has(VIRTIO_NET_F_GUEST_CSUM);
        Self {
            csum,
            tso4: csum && has(VIRTIO_NET_F_GUEST_TSO4),
            tso6: csum && has(VIRTIO_NET_F_GUEST_TSO6),
            uso: csum && has(VIRTIO_NET_F_GUEST_USO4) && has(VIRTIO_NET_F_GUEST_USO6),
            ecn: has(VIRTIO_NET_F_GUEST_ECN),
        }
    }

    /// Returns the offload work of a tap, of a kernel with or without UDP segments.
    pub(super) fn of_tap(uso: bool) -> Self {
        Self { csum: true, tso4: true, tso6: true, uso, ecn: true }
    }

    /// Returns whether the receiver accepts a frame as it is.
    pub(super) fn all_of(self, header: &Header) -> bool {
        (self.csum || header.flags & NEEDS_CSUM == 0) && self.segments(header.gso_type)
    }

    /// Returns the header of such a frame as the receiver sees it. A receiver without checksum
    /// offload sees no flags, not even that a checksum was verified (Virtio 1.3, 5.1.6.4.1).
    pub(super) fn shown(self, header: Header) -> Header {
        if self.csum { header } else { Header { flags: 0, ..header } }
    }

    fn segments(self, gso_type: u8) -> bool {
        let whole = match gso_type & !GSO_ECN {
            GSO_NONE => true,
            GSO_TCPV4 => self.tso4,
            GSO_UDP => self.uso,
            _ => self.tso6,
        };
        whole && (self.ecn || gso_type & GSO_ECN == 0)
    }
}

/// Most bytes of headers of one frame. No network stack sends longer ones.
const HEADERS_MAX: usize = 512;
/// Most segments of one frame. No network stack sends shorter segments. Together with
/// [`HEADERS_MAX`] it bounds the memory.
const SEGMENTS_MAX: usize = 1024;
const IPV4_MIN: usize = 20;
const IPV6: usize = 40;
const TCP_MIN: usize = 20;
// Offsets and flags of a TCP header (RFC 9293, 3.1).
const TCP_SEQ: usize = 4;
const TCP_OFFSET: usize = 12;
const TCP_FLAGS: usize = 13;
const TCP_CSUM: usize = 16;
const FIN: u8 = 1;
const PSH: u8 = 8;
const CWR: u8 = 0x80;
// Length and offsets of a UDP header (RFC 768).
const UDP: usize = 8;
const UDP_LEN: usize = 4;
const UDP_CSUM: usize = 6;
// Protocol numbers of IP.
const IP_TCP: u64 = 6;
const IP_UDP: u64 = 17;

/// The segments of a frame, or the frame with its checksum.
#[derive(Default)]
pub(super) struct Segments {
    bytes: Vec<u8>,
    /// The frame, copied from its sender's memory.
    whole: Vec<u8>,
    /// Offset of each segment's end in `bytes`.
    ends: Vec<usize>,
    /// Number of segments that were taken.
    given: usize,
    /// Offset of the next segment in `bytes`.
    start: usize,
}

impl Segments {
    /// Returns the number of segments that are left.
    pub(super) fn len(&self) -> usize {
        self.ends.len() - self.given
    }

    /// Returns the next segment, which needs no further offload work.
    pub(super) fn next(&self) -> Option<&[u8]> {
        self.bytes.get(self.start..*self.ends.get(self.given)?)
    }

    /// Removes the next segment.
    pub(super) fn pop(&mut self) {
        if let Some(end) = self.ends.get(self.given) {
            (self.given, self.start) = (self.given + 1, *end);
        }
    }

    /// Makes the segments of a frame. Returns false if the frame's contents contradict its header.
    pub(super) fn make(&mut self, frame: &SentFrame, accepted: AcceptedOffloads) -> bool {
        self.bytes.clear();
        self.ends.clear();
        (self.given, self.start) = (0, 0);
        self.whole.clear();
        for piece in &frame.pieces {
            let at = self.whole.len();
            self.whole.reserve(piece.len);
            let Some(to) = self.whole.spare_capacity_mut().get_mut(..piece.len) else { return false };
            // SAFETY: the sender keeps its memory mapped until the description was returned, and
            // `frame` is that description. Its guest may write there at the same time, so each byte
            // is read once and checked in the copy. `to` is this vector's own memory, as long as
            // the piece.
            unsafe { mem::copy(piece.ptr, to.as_mut_ptr().cast(), piece.len) };
            // SAFETY: the capacity was reserved, and the copy initialized the bytes.
            unsafe { self.whole.set_len(at + piece.len) };
        }
        let header = frame.header;
        if !accepted.segments(header.gso_type) {
            let cut = self.cut(&header);
            if cut.is_none() {
                self.ends.clear();
            }
            return cut.is_some();
        }
        // Only a checksum is missing: a receiver that accepts segments accepts that, too.
        self.bytes.extend_from_slice(&self.whole);
        let start = usize::from(header.csum_start);
        put_csum(&mut self.bytes, start, usize::from(header.csum_offset), 0);
        self.ends.push(self.bytes.len());
        true
    }

    /// Cuts TCP into segments, or UDP into datagrams, each with its own headers.
    fn cut(&mut self, header: &Header) -> Option<()> {
        let whole = &self.whole;
        let at = usize::from(header.csum_start);
        let udp = header.gso_type == GSO_UDP;
        let (headers, csum, protocol) = match udp {
            true => (UDP, UDP_CSUM, IP_UDP),
            false => (usize::from(*whole.get(at + TCP_OFFSET)? >> 4) * 4, TCP_CSUM, IP_TCP),
        };
        let least = if udp { UDP } else { TCP_MIN };
        let (front, data) = whole.split_at_checked(at + headers)?;
        if usize::from(header.csum_offset) != csum || headers < least {
            return None;
        }
        let (ip, v4) = network_header(whole, at)?;
        if !udp && v4 != (header.gso_type & !GSO_ECN == GSO_TCPV4) {
            return None;
        }
        let size = usize::from(header.gso_size);
        let count = data.len().div_ceil(size).max(1);
        // Each segment has a copy of the headers.
        if front.len() > HEADERS_MAX || count > SEGMENTS_MAX {
            return None;
        }
        for i in 0..count {
            let from = i * size;
            let part = data.get(from..(from + size).min(data.len()))?;
            let start = self.bytes.len();
            self.bytes.extend_from_slice(front);
            self.bytes.extend_from_slice(part);
            let segment = self.bytes.get_mut(start..)?;
            match udp {
                true => put(segment, at + UDP_LEN, length(UDP + part.len()))?,
                false => finish_tcp(segment.get_mut(at..)?, from, i == 0, i + 1 == count)?,
            }
            finish_ip(segment, ip, v4, length(i))?;
            let pseudo = pseudo_sum(segment, ip, at, v4, protocol)?;
            put(segment, at + csum, 0)?;
            put_csum(segment, at, csum, pseudo);
            self.ends.push(self.bytes.len());
        }
        Some(())
    }
}

/// Converts a length or a number of a segment to a 16-bit field. A packet of valid length is
/// shorter than 2^16 bytes.
fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

/// Stores a 16-bit word. `None`: the offset is beyond the end.
fn put(bytes: &mut [u8], at: usize, word: u16) -> Option<()> {
    bytes.get_mut(at..at + 2)?.copy_from_slice(&word.to_be_bytes());
    Some(())
}

/// Completes the TCP header of a segment whose data starts `from` bytes behind the first segment's
/// data.
fn finish_tcp(tcp: &mut [u8], from: usize, first: bool, last: bool) -> Option<()> {
    let flags = tcp.get_mut(TCP_FLAGS)?;
    if !last {
        *flags &= !(FIN | PSH);
    }
    if !first {
        *flags &= !CWR;
    }
    let seq: &mut [u8; 4] = tcp.get_mut(TCP_SEQ..)?.first_chunk_mut()?;
    let offset = u32::try_from(from).unwrap_or(u32::MAX);
    *seq = u32::from_be_bytes(*seq).wrapping_add(offset).to_be_bytes();
    Some(())
}

/// Returns the offset of the IP header, and whether it is IPv4. It is behind Ethernet and up to two
/// VLAN tags, and before `at`.
fn network_header(bytes: &[u8], at: usize) -> Option<(usize, bool)> {
    let ip = payload(bytes);
    let first = *bytes.get(ip)?;
    let v4 = match (word_at(bytes, ip - 2)?, first >> 4) {
        (0x0800, 4) => true,
        (0x86DD, 6) => false,
        _ => return None,
    };
    let fits = at >= ip + if v4 { IPV4_MIN } else { IPV6 };
    (fits && (!v4 || usize::from(first & 15) * 4 == at - ip)).then_some((ip, v4))
}

/// Completes the IP header at `ip` of segment `i`: length, and for IPv4 identification and
/// checksum.
fn finish_ip(segment: &mut [u8], ip: usize, v4: bool, i: u16) -> Option<()> {
    let packet = segment.get_mut(ip..)?;
    let len = packet.len();
    if !v4 {
        return put(packet, 4, length(len.checked_sub(IPV6)?));
    }
    let header = packet.get_mut(..usize::from(*packet.first()? & 15) * 4)?;
    put(header, 2, length(len))?;
    let id = word_at(header, 4)?.wrapping_add(i);
    put(header, 4, id)?;
    put(header, 10, 0)?;
    let sum = !fold(sum(header, 0));
    put(header, 10, sum)
}

/// Returns the sum of addresses, protocol and length (RFC 9293, 3.1; RFC 8200, 8.1).
fn pseudo_sum(segment: &[u8], ip: usize, at: usize, v4: bool, protocol: u64) -> Option<u64> {
    let addresses = if v4 { ip + 12..ip + 20 } else { ip + 8..ip + 40 };
    let len = segment.len().checked_sub(at)? as u64;
    Some(sum(segment.get(addresses)?, protocol + len))
}

/// Adds 16-bit words.
fn sum(bytes: &[u8], start: u64) -> u64 {
    let word = |word: &[u8]| match *word {
        [high, low] => u16::from_be_bytes([high, low]),
        [high] => u16::from_be_bytes([high, 0]),
        _ => 0,
    };
    bytes.chunks(2).fold(start, |sum, two| sum + u64::from(word(two)))
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    (sum & 0xFFFF) as u16
}

/// Stores the Internet checksum of all bytes from `start` on (RFC 1071), at `start + offset`. The
/// bytes there count, and so does `more`.
fn put_csum(bytes: &mut [u8], start: usize, offset: usize, more: u64) {
    let Some(rest) = bytes.get(start..) else { return };
    let csum = match !fold(sum(rest, more)) {
        // In UDP, zero means that there is no checksum (RFC 768). In TCP both values are equal.
        0 => 0xFFFF,
        csum => csum,
    };
    // A header is valid only if its checksum is inside the frame.
    let _ = put(bytes, start + offset, csum);
}

#[cfg(test)]
mod tests;
