//! Frames for a guest that does not take them as they were sent: with a checksum to be computed, or longer than its MTU.
//! Done here, with copies; guests that agreed on the same features, as most do, never come by.

use virtio::features::bit;
use virtio::mem;
use virtio::net::*;
use vshunt_net::switch::{Frame, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_UDP, Header, NEEDS_CSUM, payload};

/// What a guest takes of what others leave to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    csum: bool,
    tso4: bool,
    tso6: bool,
    uso: bool,
    ecn: bool,
}

impl Takes {
    /// As these features say.
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

    /// As a tap does, of a kernel that knows UDP segments or not.
    pub fn of_tap(uso: bool) -> Self {
        Self { csum: true, tso4: true, tso6: true, uso, ecn: true }
    }

    /// Whether a frame can go to it as it is.
    pub(super) fn all_of(self, header: &Header) -> bool {
        (self.csum || header.flags & NEEDS_CSUM == 0) && self.segments(header.gso_type)
    }

    /// The header of such a frame: who takes no checksums is told of none, not of one that was found right either (Virtio
    /// 1.3, 5.1.6.4.1).
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

/// Bytes of headers, and segments of one frame at most: what is made of one frame is bounded by their product. Longer headers
/// and shorter segments than those no stack sends.
const HEADERS_MAX: usize = 512;
const SEGMENTS_MAX: usize = 1024;
const IPV4_MIN: usize = 20;
const IPV6: usize = 40;
const TCP_MIN: usize = 20;
// Of a TCP header (RFC 9293, 3.1).
const TCP_SEQ: usize = 4;
const TCP_OFFSET: usize = 12;
const TCP_FLAGS: usize = 13;
const TCP_CSUM: usize = 16;
const FIN: u8 = 1;
const PSH: u8 = 8;
const CWR: u8 = 0x80;
// Of a UDP header (RFC 768).
const UDP: usize = 8;
const UDP_LEN: usize = 4;
const UDP_CSUM: usize = 6;
// What IP calls the two.
const IP_TCP: u64 = 6;
const IP_UDP: u64 = 17;

/// A frame's pieces, the next one first.
#[derive(Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    whole: Vec<u8>,
    /// Where each ends.
    ends: Vec<usize>,
    next: usize,
}

impl Pieces {
    pub(super) fn len(&self) -> usize {
        self.ends.len() - self.next
    }

    /// Nothing is left to be done for any.
    pub(super) fn next(&self) -> Option<&[u8]> {
        let end = *self.ends.get(self.next)?;
        let start = self.next.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start..end])
    }

    pub(super) fn pop(&mut self) {
        self.next += 1;
    }

    /// Makes a frame into what the guest takes. False: it is not what its header says.
    pub(super) fn make(&mut self, frame: &Frame, takes: Takes) -> bool {
        self.bytes.clear();
        self.ends.clear();
        self.next = 0;
        self.whole.clear();
        for piece in &frame.pieces {
            let at = self.whole.len();
            self.whole.reserve(piece.len);
            // SAFETY: the sender's memory is mapped until the description is home; its guest may write there meanwhile, so the
            // bytes are read once, and what they say is checked in the copy. There is room for them, which they fill.
            unsafe {
                mem::copy(piece.ptr, self.whole.as_mut_ptr().add(at), piece.len);
                self.whole.set_len(at + piece.len);
            }
        }
        let header = frame.header;
        if !takes.segments(header.gso_type) {
            return self.cut(&header).is_some();
        }
        // Only a checksum is missing: who takes segments takes that, too.
        self.bytes.extend_from_slice(&self.whole);
        let start = usize::from(header.csum_start);
        put_csum(&mut self.bytes, start, usize::from(header.csum_offset), 0);
        self.ends.push(self.bytes.len());
        true
    }

    /// Cuts TCP into segments, or UDP into datagrams, each with headers of its own.
    fn cut(&mut self, header: &Header) -> Option<()> {
        let whole = &self.whole;
        let at = usize::from(header.csum_start);
        let udp = header.gso_type == GSO_UDP;
        let (headers, csum, protocol) = match udp {
            true => (UDP, UDP_CSUM, IP_UDP),
            false => (usize::from(*whole.get(at + TCP_OFFSET)? >> 4) * 4, TCP_CSUM, IP_TCP),
        };
        let data = at + headers;
        let least = if udp { UDP } else { TCP_MIN };
        if usize::from(header.csum_offset) != csum || headers < least || data > whole.len() {
            return None;
        }
        let (ip, v4) = network_header(whole, at)?;
        if !udp && v4 != (header.gso_type & !GSO_ECN == GSO_TCPV4) {
            return None;
        }
        let size = usize::from(header.gso_size);
        let count = (whole.len() - data).div_ceil(size).max(1);
        // Each has a copy of the headers.
        if data > HEADERS_MAX || count > SEGMENTS_MAX {
            return None;
        }
        for i in 0..count {
            let from = data + i * size;
            let part = &whole[from..(from + size).min(whole.len())];
            let start = self.bytes.len();
            self.bytes.extend_from_slice(&whole[..data]);
            self.bytes.extend_from_slice(part);
            let piece = &mut self.bytes[start..];
            match udp {
                true => {
                    let len = (UDP + part.len()) as u16;
                    piece[at + UDP_LEN..at + UDP_LEN + 2].copy_from_slice(&len.to_be_bytes());
                }
                false => segment(&mut piece[at..], i * size, i == 0, i + 1 == count),
            }
            finish_ip(piece, ip, v4, i as u16);
            let pseudo = pseudo_sum(piece, ip, at, v4, protocol);
            piece[at + csum..at + csum + 2].fill(0);
            put_csum(piece, at, csum, pseudo);
            self.ends.push(self.bytes.len());
        }
        Some(())
    }
}

/// The TCP header of a segment whose data begins `from` bytes behind the whole's.
fn segment(tcp: &mut [u8], from: usize, first: bool, last: bool) {
    if !last {
        tcp[TCP_FLAGS] &= !(FIN | PSH);
    }
    if !first {
        tcp[TCP_FLAGS] &= !CWR;
    }
    let seq = u32::from_be_bytes(tcp[TCP_SEQ..TCP_SEQ + 4].try_into().expect("four bytes"));
    tcp[TCP_SEQ..TCP_SEQ + 4].copy_from_slice(&seq.wrapping_add(from as u32).to_be_bytes());
}

/// Returns where the IP header is and whether it is IPv4. It lies behind Ethernet and up to two VLAN tags, and before `at`.
fn network_header(bytes: &[u8], at: usize) -> Option<(usize, bool)> {
    let ip = payload(bytes);
    let v4 = match (bytes.get(ip - 2..ip)?, bytes.get(ip)? >> 4) {
        ([8, 0], 4) => true,
        ([0x86, 0xDD], 6) => false,
        _ => return None,
    };
    let fits = at >= ip + if v4 { IPV4_MIN } else { IPV6 };
    (fits && (!v4 || usize::from(bytes[ip] & 15) * 4 == at - ip)).then_some((ip, v4))
}

/// Length, and for IPv4 identification and checksum, of the packet at `ip`, which is segment `i`.
fn finish_ip(piece: &mut [u8], ip: usize, v4: bool, i: u16) {
    let len = piece.len() - ip;
    if !v4 {
        let payload = (len - IPV6) as u16;
        piece[ip + 4..ip + 6].copy_from_slice(&payload.to_be_bytes());
        return;
    }
    let header = usize::from(piece[ip] & 15) * 4;
    piece[ip + 2..ip + 4].copy_from_slice(&(len as u16).to_be_bytes());
    let id = u16::from_be_bytes([piece[ip + 4], piece[ip + 5]]).wrapping_add(i);
    piece[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
    piece[ip + 10..ip + 12].fill(0);
    let sum = !fold(sum(&piece[ip..ip + header], 0));
    piece[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
}

/// Of addresses, protocol and length (RFC 9293, 3.1; RFC 8200, 8.1).
fn pseudo_sum(piece: &[u8], ip: usize, at: usize, v4: bool, protocol: u64) -> u64 {
    let addresses = if v4 { &piece[ip + 12..ip + 20] } else { &piece[ip + 8..ip + 40] };
    sum(addresses, protocol + (piece.len() - at) as u64)
}

/// Adds 16-bit words.
fn sum(bytes: &[u8], start: u64) -> u64 {
    let words = bytes.chunks(2);
    words.fold(start, |sum, w| sum + u64::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)])))
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    sum as u16
}

/// The Internet checksum of all from `start` on (RFC 1071), put `offset` behind it; what is there counts, and `more`.
fn put_csum(bytes: &mut [u8], start: usize, offset: usize, more: u64) {
    let Some(rest) = bytes.get(start..) else { return };
    let at = start + offset;
    let csum = match !fold(sum(rest, more)) {
        // To UDP a zero means that there is none (RFC 768), and to others both are the same.
        0 => 0xFFFF,
        csum => csum,
    };
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&csum.to_be_bytes());
    }
}

#[cfg(test)]
mod tests;
