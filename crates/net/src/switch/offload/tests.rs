use std::sync::Arc;

use super::*;
use crate::switch::port_queue::Piece;
use crate::switch::{PortOptions, Switch, VlanConfig};

/// Kinds of VLAN tags that a frame can have: none, one, or two.
const TAGS: [&[u16]; 8] = [
    &[],
    &[0x8100],
    &[0x88A8],
    &[0x9100],
    &[0x8100, 0x8100],
    &[0x88A8, 0x8100],
    &[0x9100, 0x8100],
    &[0x9100, 0x9100],
];

/// Makes a TCP packet of `data` bytes as a guest sends it, with only the pseudo header's sum.
fn super_frame(v4: bool, tags: &[u16], data: usize, size: u16) -> (Vec<u8>, Header) {
    let mut bytes = vec![2; 12];
    for kind in tags {
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0, 7]);
    }
    let ip_at = bytes.len() + 2;
    let tcp_len = 32 + data;
    if v4 {
        bytes.extend([8, 0, 0x45, 0]);
        bytes.extend(((20 + tcp_len) as u16).to_be_bytes());
        bytes.extend([0xFF, 0xFE, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    } else {
        bytes.extend([0x86, 0xDD, 0x60, 0, 0, 0]);
        bytes.extend((tcp_len as u16).to_be_bytes());
        bytes.extend([6, 64]);
        bytes.extend([0xFD; 32]);
    }
    let tcp = bytes.len();
    bytes.extend([
        0,
        80,
        0,
        81,
        0xFF,
        0xFF,
        0xFF,
        0,
        0,
        0,
        0,
        9,
        0x80,
        0x10 | FIN | PSH | CWR,
        1,
        0,
        0,
        0,
        0,
        0,
    ]);
    bytes.extend([1; 12]);
    bytes.extend((0..data).map(|i| (i * 7 + i / 251) as u8));
    let partial = fold(pseudo_sum(&bytes, ip_at, tcp, v4, IP_TCP).unwrap());
    bytes[tcp + TCP_CSUM..tcp + TCP_CSUM + 2].copy_from_slice(&partial.to_be_bytes());
    let gso_type = GSO_ECN | if v4 { GSO_TCPV4 } else { 4 };
    let header = Header {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: 0,
        gso_size: size,
        csum_start: tcp as u16,
        csum_offset: TCP_CSUM as u16,
    };
    (bytes, header)
}

fn describe(bytes: &mut [u8], header: Header) -> SentFrame {
    let options = PortOptions {
        name: "a".to_owned(),
        mac: None,
        mac_filter: false,
        mac_limit: 1,
        vlans: VlanConfig::Plain,
        isolated: false,
        reserved: false,
        mtu: 1500,
        tap: None,
    };
    let end = Switch::new("s").join(1, options).unwrap().queues[0].clone();
    let mut frame = SentFrame::from(&Arc::clone(&end));
    let (a, b) = bytes.split_at_mut(bytes.len() / 3);
    for part in [a, b] {
        frame.pieces.push(Piece { ptr: part.as_mut_ptr(), len: part.len() });
    }
    (frame.len, frame.header) = (bytes.len(), header);
    frame
}

fn all_of(segments: &mut Segments) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(piece) = segments.next() {
        all.push(piece.to_vec());
        segments.pop();
    }
    all
}

#[test]
fn segments_are_packets_of_their_own() {
    for (v4, tags) in TAGS.iter().flat_map(|tags| [(true, *tags), (false, *tags)]) {
        for (data, size) in [(1, 1448), (1448, 1448), (1449, 1448), (64_000, 1448), (4001, 500), (0, 100)] {
            let (mut bytes, header) = super_frame(v4, tags, data, size);
            let mut made = Segments::default();
            assert!(made.make(&describe(&mut bytes, header), AcceptedOffloads::default()), "{tags:x?}");
            let all = all_of(&mut made);
            let (tcp, size) = (usize::from(header.csum_start), usize::from(size));
            let ip = 14 + 4 * tags.len();
            assert_eq!(all.len(), data.div_ceil(size).max(1));
            let mut got = Vec::new();
            for (i, piece) in all.iter().enumerate() {
                let (first, last) = (i == 0, i + 1 == all.len());
                assert_eq!(
                    fold(sum(&piece[tcp..], pseudo_sum(piece, ip, tcp, v4, IP_TCP).unwrap())),
                    0xFFFF,
                    "TCP's checksum"
                );
                let length = if v4 {
                    assert_eq!(fold(sum(&piece[ip..ip + 20], 0)), 0xFFFF, "IP's checksum");
                    assert_eq!(
                        u16::from_be_bytes([piece[ip + 4], piece[ip + 5]]),
                        0xFFFEu16.wrapping_add(i as u16)
                    );
                    u16::from_be_bytes([piece[ip + 2], piece[ip + 3]])
                } else {
                    u16::from_be_bytes([piece[ip + 4], piece[ip + 5]]) + 40
                };
                assert_eq!(usize::from(length), piece.len() - ip);
                let seq = u32::from_be_bytes(piece[tcp + 4..tcp + 8].try_into().unwrap());
                assert_eq!(seq, 0xFFFF_FF00u32.wrapping_add((i * size) as u32));
                let flags = piece[tcp + TCP_FLAGS];
                assert_eq!((flags & (FIN | PSH) != 0, flags & CWR != 0), (last, first));
                got.extend_from_slice(&piece[tcp + 32..]);
            }
            assert_eq!(got, bytes[tcp + 32..]);
        }
    }
}

#[test]
fn datagrams_of_their_own() {
    for v4 in [true, false] {
        // The headers of the TCP packet, changed to those of UDP.
        let (mut bytes, header) = super_frame(v4, &[], 5000, 1);
        let at = usize::from(header.csum_start);
        bytes.drain(at + UDP..at + 32);
        bytes[14 + if v4 { 9 } else { 6 }] = IP_UDP as u8;
        let header = Header { gso_type: GSO_UDP, gso_size: 1472, csum_offset: UDP_CSUM as u16, ..header };
        let mut made = Segments::default();
        assert!(made.make(&describe(&mut bytes, header), AcceptedOffloads::default()));
        let all = all_of(&mut made);
        assert_eq!(all.iter().map(|p| p.len() - at - UDP).collect::<Vec<_>>(), [1472, 1472, 1472, 584]);
        for piece in &all {
            assert_eq!(fold(sum(&piece[at..], pseudo_sum(piece, 14, at, v4, IP_UDP).unwrap())), 0xFFFF);
            assert_eq!(usize::from(u16::from_be_bytes([piece[at + 4], piece[at + 5]])), piece.len() - at);
        }
        assert_eq!(all.iter().flat_map(|p| p[at + UDP..].to_vec()).collect::<Vec<_>>(), bytes[at + UDP..]);
        let all = [VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6];
        assert!(
            AcceptedOffloads::new(all.iter().fold(0, |bits, number| bits | bit(*number))).all_of(&header)
        );
    }
}

#[test]
fn a_checksum_is_computed() {
    let (mut bytes, header) = super_frame(true, &[], 301, 1448);
    let header = Header { gso_type: GSO_NONE, gso_size: 0, ..header };
    let mut made = Segments::default();
    assert!(made.make(&describe(&mut bytes, header), AcceptedOffloads::default()));
    let all = all_of(&mut made);
    let [piece] = &all[..] else { panic!("{}", all.len()) };
    assert_eq!(fold(sum(&piece[34..], pseudo_sum(piece, 14, 34, true, IP_TCP).unwrap())), 0xFFFF);
    assert_eq!((&piece[..50], &piece[52..]), (&bytes[..50], &bytes[52..]));
}

#[test]
fn what_a_guest_accepted_goes_as_it_is() {
    let all =
        [VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_ECN];
    let accepted = AcceptedOffloads::new(all.iter().fold(0, |bits, number| bits | bit(*number)));
    let (_, header) = super_frame(true, &[], 1, 1);
    assert!(accepted.all_of(&header) && accepted.all_of(&Header::default()));
    for without in all.iter().filter(|number| **number != VIRTIO_NET_F_GUEST_TSO6) {
        let fewer =
            all.iter().filter(|number| *number != without).fold(0, |bits, number| bits | bit(*number));
        assert!(!AcceptedOffloads::new(fewer).all_of(&header), "{without}");
    }
    assert!(AcceptedOffloads::default().all_of(&Header::default()));
}

#[test]
fn what_is_made_of_a_frame_is_bounded() {
    let (mut bytes, header) = super_frame(false, &[], 65_000, 1);
    let mut made = Segments::default();
    assert!(!made.make(&describe(&mut bytes, header), AcceptedOffloads::default()));
    assert_eq!(made.len(), 0);
    // Headers that are long, and that each segment has a copy of.
    let start = 32_768;
    bytes[start + TCP_OFFSET] = 0x50;
    let header = Header { gso_size: 100, csum_start: start as u16, ..header };
    assert!(!made.make(&describe(&mut bytes, header), AcceptedOffloads::default()));
    assert!(made.len() == 0 && made.bytes.is_empty());
}

#[test]
fn frames_that_lie_are_no_harm() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut next = move || rng.u64(..);
    let mut made = Segments::default();
    let mut whole = 0;
    for _ in 0..20_000 {
        let (mut bytes, mut header) = super_frame(
            next() % 2 == 0,
            TAGS[next() as usize % TAGS.len()],
            next() as usize % 3000,
            4 + next() as u16 % 2000,
        );
        for _ in 0..next() % 4 {
            let at = next() as usize % 60;
            bytes[at] = next() as u8;
        }
        bytes.truncate(14 + next() as usize % bytes.len());
        match next() % 8 {
            0 => header.csum_start = next() as u16 % 100,
            1 => header.csum_offset = next() as u16,
            2 => header.gso_type = GSO_NONE,
            3 => (header.gso_type, header.csum_offset) = (GSO_UDP, UDP_CSUM as u16),
            _ => {}
        }
        if header.is_sane(bytes.len(), 14) {
            whole += u32::from(made.make(&describe(&mut bytes, header), AcceptedOffloads::default()));
            let total: usize = all_of(&mut made).iter().map(Vec::len).sum();
            assert!(total < 10_000_000);
        }
    }
    assert!(whole > 1000, "{whole}");
}

#[test]
fn who_accepted_no_checksums_is_told_of_none() {
    let valid = Header { flags: 2, ..Header::default() };
    let (none, some) = (AcceptedOffloads::new(0), AcceptedOffloads::new(bit(VIRTIO_NET_F_GUEST_CSUM)));
    assert!(none.all_of(&valid) && some.all_of(&valid));
    assert_eq!(none.shown(valid), Header::default());
    assert_eq!(some.shown(valid), valid);
}
