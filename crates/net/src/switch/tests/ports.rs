//! The frames that ports pass, and their form.

use std::sync::Weak;

use super::*;

/// Makes a frame from one address to another, with these tags and an EtherType.
fn tagged(from: [u8; 6], to: [u8; 6], tags: &[(u16, u16)], len: usize) -> Vec<u8> {
    let mut bytes = [to, from].concat();
    for (kind, tag) in tags {
        bytes.extend([kind.to_be_bytes(), tag.to_be_bytes()].concat());
    }
    bytes.extend([0x88, 0xB5]);
    let packet = bytes.len();
    bytes.extend((0..len).map(|i| (i % 251) as u8));
    assert_eq!(bytes.len(), packet + len);
    bytes
}

const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
const B: [u8; 6] = [2, 0, 0, 0, 0, 2];
const PLAIN: Header =
    Header { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

fn admit(port: &Port, bytes: &[u8]) -> Result<u16, DropReason> {
    let first = &bytes[..bytes.len().min(INSPECTED_BYTES)];
    port.admit(&Packet::new(first, &PLAIN, bytes.len()).unwrap(), 1)
}

/// Returns the bytes that leave by `to` of a frame that entered by `from`.
fn pass(from: &Port, to: &Port, bytes: &[u8]) -> Result<Vec<u8>, DropReason> {
    let first = &bytes[..bytes.len().min(INSPECTED_BYTES)];
    let packet = Packet::new(first, &PLAIN, bytes.len()).unwrap();
    let vlan = from.admit(&packet, 1)?;
    let form = to.accept(from, &packet, vlan, 1)?;
    let start = FrameStart::new(packet.first, vlan);
    if !start.has(form) {
        return Err(DropReason::Vlan);
    }
    let whole = [start.bytes(form), &bytes[start.replaced()..]].concat();
    assert_eq!(whole.len(), bytes.len().wrapping_add_signed(start.longer(form)));
    Ok(whole)
}

fn port(switch: &Switch, options: PortOptions) -> Arc<Port> {
    switch.join(1, options).unwrap()
}

#[test]
fn only_its_own_address_leaves_a_filtered_port() {
    let switch = Switch::new("s");
    let a = port(&switch, PortOptions { mac: Some(A), mac_filter: true, ..guest("a") });
    assert_eq!(admit(&a, &tagged(A, B, &[], 50)), Ok(0));
    assert_eq!(admit(&a, &tagged(B, A, &[], 50)), Err(DropReason::ForeignSource));
    assert_eq!(admit(&a, &tagged([1, 0, 0, 0, 0, 1], A, &[], 50)), Err(DropReason::BadSource));
    assert_eq!(admit(&a, &tagged([0; 6], A, &[], 50)), Err(DropReason::BadSource));
}

#[test]
fn a_configured_address_is_learnt_nowhere_else() {
    let switch = Switch::new("s");
    let a = port(&switch, PortOptions { mac: Some(A), ..guest("a") });
    let (b, up) =
        (port(&switch, guest("b")), port(&switch, PortOptions { tap: Some(Weak::new()), ..guest("u") }));
    let to_a = inspect(&tagged(B, A, &[], 50));
    let as_a = inspect(&tagged(A, B, &[], 50));
    let route = |from: &Port, info: &FrameInfo| switch.route(&switch.view(), from, info, 0, 1);
    // The address is known before it ever sent, and no other port may use it as a source.
    assert_eq!(route(&b, &to_a), Ok(Route::Port(a.index)));
    assert_eq!(
        (route(&b, &as_a), route(&up, &as_a)),
        (Err(DropReason::ForeignSource), Err(DropReason::ForeignSource))
    );
    assert_eq!((route(&a, &as_a), route(&b, &to_a)), (Ok(Route::Port(b.index)), Ok(Route::Port(a.index))));
    // The host's address may be at another uplink, too, and is not learnt there either.
    let host = [2, 0, 0, 0, 0, 9];
    switch.set_hosts(&up, vec![host, A]);
    let other = port(&switch, PortOptions { tap: Some(Weak::new()), ..guest("v") });
    let as_host = inspect(&tagged(host, B, &[], 50));
    assert_eq!(route(&b, &as_host), Err(DropReason::ForeignSource));
    assert_eq!(
        (route(&up, &as_host), route(&other, &as_host)),
        (Ok(Route::Port(b.index)), Ok(Route::Port(b.index)))
    );
    assert_eq!(route(&b, &inspect(&tagged(B, host, &[], 50))), Ok(Route::Port(up.index)));
    // An address of both an export and the host belongs to the export.
    assert_eq!(route(&b, &to_a), Ok(Route::Port(a.index)));
    // It is removed with its port.
    switch.leave(a.index);
    assert_eq!((route(&up, &as_a), route(&b, &to_a)), (Ok(Route::Port(b.index)), Ok(Route::Port(up.index))));
    // Two ports of a VLAN cannot have the same address. Ports of different VLANs can.
    let with = |name, vlans| PortOptions { mac: Some(B), vlans, ..guest(name) };
    let c = port(&switch, with("c", vlans(Some(1), "")));
    let e = switch.join(1, with("d", vlans(None, "1-5"))).err().unwrap();
    assert!(e.to_string().contains("its mac is that of export c"), "{e}");
    let d = port(&switch, with("d", vlans(Some(2), "")));
    let view = switch.view();
    let to_b = inspect(&tagged(A, B, &[], 50));
    assert_eq!(switch.route(&view, &d, &to_b, 1, 1), Ok(Route::Port(c.index)));
    assert_eq!(switch.route(&view, &c, &to_b, 2, 1), Ok(Route::Port(d.index)));
}

#[test]
fn a_route_is_looked_up_once_an_iteration() {
    let switch = Switch::new("s");
    let ports = [
        port(&switch, PortOptions { mac: Some(B), ..guest("b") }),
        port(&switch, guest("a")),
        port(&switch, guest("c")),
    ];
    let [b, a, c] = &ports;
    let view = switch.view();
    let mut last = LastRoute::default();
    let find = |info: &FrameInfo, vlan| switch.route(&view, a, info, vlan, 1);
    let mut route = |bytes: &[u8], vlan| last.or_find(&inspect(bytes), vlan, || find(&inspect(bytes), vlan));
    let to_b = tagged(A, B, &[], 50);
    assert_eq!(route(&to_b, 0), Ok(Route::Port(b.index)));
    assert_eq!(route(&to_b, 0), Ok(Route::Port(b.index)));
    // The last route holds for both addresses and the VLAN.
    assert_eq!(route(&tagged(B, B, &[], 50), 0), Err(DropReason::ForeignSource));
    assert_eq!(route(&tagged(A, [2, 0, 0, 0, 0, 7], &[], 50), 0), Ok(Route::All));
    assert_eq!(route(&to_b, 7), Ok(Route::All));
    assert_eq!(route(&to_b, 0), Ok(Route::Port(b.index)));
    // A station that moved is found in the next iteration.
    let station = [2, 0, 0, 0, 0, 9];
    switch.macs.learn(Address::new(station), 0, b.index, &b.learnt, 1);
    assert_eq!(route(&tagged(A, station, &[], 50), 0), Ok(Route::Port(b.index)));
    switch.macs.learn(Address::new(station), 0, c.index, &c.learnt, 1);
    assert_eq!(route(&tagged(A, station, &[], 50), 0), Ok(Route::Port(b.index)));
    last = LastRoute::default();
    let to_station = inspect(&tagged(A, station, &[], 50));
    assert_eq!(last.or_find(&to_station, 0, || find(&to_station, 0)), Ok(Route::Port(c.index)));
    // A port's own address is not learnt.
    assert_eq!(switch.route(&view, b, &inspect(&tagged(B, A, &[], 50)), 0, 1), Ok(Route::Port(a.index)));
    assert_eq!(switch.macs.find(Address::new(B), 0, 1), None);
}

#[test]
fn reserved_addresses_pass_between_ports_that_say_so() {
    let switch = Switch::new("s");
    let with = |name| PortOptions { reserved: true, ..guest(name) };
    let (a, b, c) = (port(&switch, guest("a")), port(&switch, with("b")), port(&switch, with("c")));
    for last in 0..=0x1F {
        let frame = tagged(A, [1, 0x80, 0xC2, 0, 0, last], &[], 50);
        let refused = if last < 0x10 { Err(DropReason::Reserved) } else { Ok(frame.clone()) };
        assert_eq!((pass(&a, &b, &frame), pass(&b, &a, &frame)), (refused.clone(), refused), "{last:#x}");
        assert_eq!(pass(&b, &c, &frame), Ok(frame));
    }
}

#[test]
fn isolated_ports_meet_others_only() {
    let switch = Switch::new("s");
    let with = |name| PortOptions { isolated: true, ..guest(name) };
    let (a, b, c) = (port(&switch, guest("a")), port(&switch, with("b")), port(&switch, with("c")));
    let frame = tagged(A, B, &[], 50);
    assert_eq!(pass(&b, &c, &frame), Err(DropReason::Isolated));
    assert_eq!((pass(&a, &b, &frame), pass(&b, &a, &frame)), (Ok(frame.clone()), Ok(frame.clone())));
}

#[test]
fn vlans_are_networks_of_their_own() {
    let switch = Switch::new("s");
    let with = |name: &str, vlans| port(&switch, PortOptions { vlans, ..guest(name) });
    let plain = with("plain", VlanConfig::Plain);
    let (five, six) = (with("five", vlans(Some(5), "")), with("six", vlans(Some(6), "")));
    let trunk = with("trunk", vlans(None, "5,6"));
    let hybrid = with("hybrid", vlans(Some(6), "5"));
    let tag = |kind: u16, tag: u16, len| tagged(A, B, &[(kind, tag)], len);
    let bare = |len| tagged(A, B, &[], len);
    for len in [0, 1, 2, 4, 10, 46, 1400] {
        // Tags are added and removed, and the payload stays.
        assert_eq!(pass(&five, &trunk, &bare(len)), Ok(tag(0x8100, 5, len)));
        assert_eq!(pass(&trunk, &five, &tag(0x8100, 5, len)), Ok(bare(len)));
        assert_eq!(pass(&five, &hybrid, &bare(len)), Ok(tag(0x8100, 5, len)));
        assert_eq!(pass(&six, &hybrid, &bare(len)), Ok(bare(len)));
        assert_eq!(pass(&hybrid, &trunk, &bare(len)), Ok(tag(0x8100, 6, len)));
        // The priority stays if there is a tag for it. VLAN 0 has only a priority.
        assert_eq!(pass(&trunk, &hybrid, &tag(0x8100, 0xE005, len)), Ok(tag(0x8100, 0xE005, len)));
        assert_eq!(pass(&five, &trunk, &tag(0x8100, 0xE000, len)), Ok(tag(0x8100, 0xE005, len)));
        assert_eq!(pass(&five, &trunk, &tag(0x8100, 0, len)), Ok(tag(0x8100, 5, len)));
        // Between ports without VLANs tags are payload.
        let other = with(&format!("plain{len}"), VlanConfig::Plain);
        for frame in [bare(len), tag(0x8100, 5, len), tag(0x88A8, 9, len), tag(0x9100, 9, len)] {
            assert_eq!(pass(&plain, &other, &frame), Ok(frame));
        }
        switch.leave(other.index);
    }
    let no = Err(DropReason::NoReceiver);
    assert_eq!(
        (pass(&five, &six, &bare(9)), pass(&five, &plain, &bare(9)), pass(&plain, &five, &bare(9))),
        (no.clone(), no.clone(), no)
    );
    // On an access port a tag cannot choose a VLAN, not even its own. A trunk port has no VLAN for
    // a frame without a tag.
    for frame in [
        tag(0x8100, 5, 50),
        tag(0x8100, 6, 50),
        tag(0x8100, 0xFFF, 50),
        tag(0x88A8, 5, 50),
        tag(0x9100, 0, 50),
    ] {
        assert_eq!(admit(&five, &frame), Err(DropReason::Vlan));
    }
    assert_eq!(
        (admit(&trunk, &bare(50)), admit(&trunk, &tag(0x8100, 7, 50))),
        (Err(DropReason::Vlan), Err(DropReason::Vlan))
    );
    // A frame that ends in its tag.
    assert_eq!(admit(&trunk, &tag(0x8100, 5, 0)[..17]), Err(DropReason::Vlan));
    assert_eq!(admit(&five, &tag(0x8100, 0, 0)[..14]), Err(DropReason::Vlan));
    // A second tag passes behind the first, and never becomes the first.
    for inner in [(0x8100, 6), (0x88A8, 6), (0x9100, 6)] {
        let double = tagged(A, B, &[(0x8100, 5), inner], 50);
        assert_eq!(pass(&trunk, &hybrid, &double), Ok(double.clone()));
        assert_eq!(pass(&trunk, &five, &double), Err(DropReason::Vlan));
        let hidden = tagged(A, B, &[(0x8100, 0), inner], 50);
        assert_eq!(pass(&six, &hybrid, &hidden), Err(DropReason::Vlan));
    }
}

#[test]
fn an_mtu_is_for_packets() {
    let switch = Switch::new("s");
    let with = |name, mtu| port(&switch, PortOptions { mtu, ..guest(name) });
    let (a, b, large) = (with("a", 1500), with("b", 1400), with("large", 9000));
    for tags in [&[][..], &[(0x8100, 5)], &[(0x88A8, 7), (0x8100, 5)]] {
        let frame = |len| tagged(A, B, tags, len);
        assert_eq!((admit(&a, &frame(1500)), admit(&a, &frame(1501))), (Ok(0), Err(DropReason::OverMtu)));
        assert_eq!(pass(&a, &b, &frame(1401)), Err(DropReason::OverMtu));
        assert_eq!(pass(&large, &a, &frame(1501)), Err(DropReason::OverMtu));
        assert!(pass(&a, &b, &frame(1400)).is_ok() && admit(&large, &frame(9000)).is_ok());
    }
    // The packet of a frame with segments is as long as one segment: the segment's data and
    // headers.
    let segments = |v6: bool, tcp: Option<u8>, gso_size: u16| {
        let mut bytes = frame(v6, 0, (1, 5), (2, 6), if tcp.is_some() { 6 } else { 17 });
        bytes.resize(60_000, 0);
        let start = if v6 { 54 } else { 34 };
        if let Some(words) = tcp {
            bytes[start + 12] = words << 4;
        }
        let gso_type = match (tcp, v6) {
            (None, _) => GSO_UDP,
            (_, true) => GSO_TCPV6,
            (_, false) => GSO_TCPV4,
        };
        let header = Header {
            flags: NEEDS_CSUM,
            gso_type,
            gso_size,
            csum_start: start as u16,
            csum_offset: 6,
            ..Header::default()
        };
        Packet::new(&bytes[..INSPECTED_BYTES], &header, bytes.len()).unwrap().bytes
    };
    assert_eq!((segments(false, Some(5), 1460), segments(true, Some(5), 1440)), (1500, 1500));
    assert_eq!((segments(false, Some(8), 1448), segments(true, Some(8), 1428)), (1500, 1500));
    assert_eq!((segments(false, None, 1472), segments(true, None, 1452)), (1500, 1500));
    // A frame that is not cut is no longer than itself.
    assert_eq!(segments(false, Some(5), u16::MAX), 60_000 - 14);
}

#[test]
fn offloads_move_with_a_tag() {
    let header = Header {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    let more = Header { hdr_len: 58, csum_start: 38, ..header };
    assert_eq!((header.moved(4), more.moved(-4), header.moved(0)), (more, header, header));
    // Unknown values stay unknown, and invalid hints stay in range.
    assert_eq!(Header::default().moved(4), Header::default());
    assert_eq!(Header { hdr_len: u16::MAX, ..header }.moved(4).hdr_len, u16::MAX);
    assert_eq!(Header { hdr_len: 2, ..header }.moved(-4).hdr_len, 0);
}

#[test]
fn a_loop_of_uplinks_blocks_the_later_one() {
    let switch = Switch::new("s");
    let uplink = |name| port(&switch, PortOptions { tap: Some(Weak::new()), ..guest(name) });
    let (a, b, c) = (uplink("a"), uplink("b"), port(&switch, guest("c")));
    let view = switch.view();
    let probe = |from: &Port, vlan| from.probe.frame(vlan);
    // A probe of another switch, an own probe that enters by the uplink that sent it, and a frame
    // that only resembles a probe.
    let other = Switch::new("s");
    let theirs = port(&other, PortOptions { tap: Some(Weak::new()), ..guest("theirs") });
    assert!(!switch.is_probe(&view, &a, &theirs.probe.frame(None), 1));
    assert!(switch.is_probe(&view, &a, &probe(&a, None), 1));
    assert!(!switch.is_probe(&view, &a, &probe(&b, None)[..38], 1));
    assert!(!a.is_blocked(1) && !b.is_blocked(1));
    switch.macs.learn(Address::new(A), 0, b.index, &b.learnt, 1);
    for (now_s, (sent, seen), vlan) in [(1, (&a, &b), None), (2, (&b, &a), Some(7))] {
        assert!(switch.is_probe(&view, seen, &probe(sent, vlan), now_s));
        assert_eq!((a.is_blocked(now_s), b.is_blocked(now_s)), (false, true));
    }
    assert_eq!((b.loops(), switch.addresses_of(&b)), (1, 0));
    let text = switch.loop_of(&b);
    assert!(text.contains("uplinks b and a of switch s") && text.contains("export remove b"), "{text}");
    let bytes = tagged(A, B, &[], 50);
    let packet = Packet::new(&bytes, &PLAIN, bytes.len()).unwrap();
    assert_eq!(
        (b.admit(&packet, 2), b.accept(&c, &packet, 0, 2)),
        (Err(DropReason::Loop), Err(DropReason::Loop))
    );
    // It forwards again once no probe came for a while.
    assert!(b.is_blocked(2 + port::BLOCK_S - 1) && !b.is_blocked(2 + port::BLOCK_S));
    // Uplinks that pass no frames to each other make no loop.
    let alone = |name| {
        port(&switch, PortOptions { tap: Some(Weak::new()), vlans: vlans(Some(9), ""), ..guest(name) })
    };
    let (d, e) =
        (alone("d"), port(&switch, PortOptions { isolated: true, tap: Some(Weak::new()), ..guest("e") }));
    let view = switch.view();
    assert!(switch.is_probe(&view, &d, &probe(&a, None), 1) && !d.is_blocked(1));
    let f = port(&switch, PortOptions { isolated: true, tap: Some(Weak::new()), ..guest("f") });
    assert!(switch.is_probe(&switch.view(), &f, &probe(&e, None), 1) && !f.is_blocked(1));
}
