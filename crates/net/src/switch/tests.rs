use super::frame::*;
use super::macs::Address;
use super::port_queue::{Piece, SentFrame};
use super::*;

mod learning;
mod ports;

/// Inspects the frame `bytes`, which has an Ethernet header.
fn inspect(bytes: &[u8]) -> FrameInfo {
    super::frame::inspect(bytes).unwrap()
}

/// Makes a frame between two hosts, with ports.
fn frame(v6: bool, tags: usize, from: (u8, u16), to: (u8, u16), protocol: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, to.0, 2, 0, 0, 0, 0, from.0];
    (0..tags).for_each(|_| bytes.extend([0x81, 0, 0, 5]));
    if v6 {
        bytes.extend([0x86, 0xDD, 0x60, 0, 0, 0, 0, 8, protocol, 64]);
        for host in [from.0, to.0] {
            bytes.extend([0xFD, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
        }
    } else {
        bytes.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
        bytes.extend([10, 0, 0, from.0, 10, 0, 0, to.0]);
    }
    bytes.extend(from.1.to_be_bytes());
    bytes.extend(to.1.to_be_bytes());
    bytes.extend([0; 8]);
    bytes
}

fn guest(name: &str) -> PortOptions {
    PortOptions {
        name: name.to_owned(),
        mac: None,
        mac_filter: false,
        mac_limit: MACS_GUEST,
        vlans: VlanConfig::Plain,
        isolated: false,
        reserved: false,
        mtu: 1500,
        tap: None,
    }
}

fn vlans(vlan: Option<u16>, trunk: &str) -> VlanConfig {
    let trunk = (!trunk.is_empty()).then(|| trunk.parse().unwrap());
    VlanConfig::new(vlan, trunk.as_ref())
}

#[test]
fn a_flow_has_one_hash_both_ways() {
    let mut all = std::collections::HashSet::new();
    for (v6, tags) in [(false, 0), (false, 1), (true, 0), (true, 2)] {
        for port in 1000..1100 {
            let there = inspect(&frame(v6, tags, (1, port), (2, 80), 6));
            let back = inspect(&frame(v6, tags, (2, 80), (1, port), 6));
            assert_eq!(there.hash, back.hash);
            assert_eq!((there.source, there.destination), (back.destination, back.source));
            all.insert((v6, there.hash));
        }
    }
    // Tags do not change the flow, and different flows have different hashes.
    assert!(all.len() > 195, "{}", all.len());
    let tcp = inspect(&frame(false, 0, (1, 5), (2, 6), 6)).hash;
    assert_ne!(tcp, inspect(&frame(false, 0, (1, 5), (2, 6), 17)).hash);
}

#[test]
fn flows_spread_over_any_number_of_ends() {
    for ends in [2u32, 3, 4, 7] {
        let mut counts = vec![0; ends as usize];
        for port in 0..4000 {
            let hash = inspect(&frame(false, 0, (1, 1000 + port), (2, 80), 6)).hash;
            counts[(hash % ends) as usize] += 1;
        }
        let fair = 4000 / ends as usize;
        assert!(counts.iter().all(|n| (fair * 8 / 10..fair * 12 / 10).contains(n)), "{counts:?}");
    }
}

#[test]
fn any_bytes_are_looked_at() {
    let whole = frame(true, 2, (1, 5), (2, 6), 17);
    for len in 14..whole.len() {
        inspect(&whole[..len]);
    }
    // Fragments of one packet stay together: only the first one has ports.
    let mut first = frame(false, 0, (1, 5), (2, 6), 17);
    first[20] = 0x20;
    let mut later = frame(false, 0, (1, 99), (2, 98), 17);
    later[21] = 7;
    assert_eq!(inspect(&first).hash, inspect(&later).hash);
}

#[test]
fn headers_that_make_no_sense() {
    let sane = |header: Header| header.is_sane(100, 14);
    assert!(sane(Header::default()));
    assert!(sane(Header { flags: DATA_VALID, ..Header::default() }));
    let csum = Header { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    assert!(sane(csum) && sane(Header { csum_start: 82, ..csum }));
    assert!(!sane(Header { csum_start: 83, ..csum }));
    assert!(!sane(Header { csum_start: u16::MAX, csum_offset: u16::MAX, ..csum }));
    let tso = Header { gso_type: GSO_TCPV4, gso_size: 10, ..csum };
    assert!(sane(tso) && sane(Header { gso_type: GSO_TCPV6 | GSO_ECN, ..tso }));
    assert!(!sane(Header { gso_size: 0, ..tso }) && !sane(Header { flags: 0, ..tso }));
    assert!(
        sane(Header { gso_type: GSO_UDP, ..tso }) && !sane(Header { gso_type: GSO_UDP, gso_size: 0, ..tso })
    );
    for gso_type in [2, 3, 6, 0x7F, GSO_ECN, GSO_UDP | GSO_ECN] {
        assert!(!sane(Header { gso_type, ..tso }), "{gso_type}");
    }
    assert!(!sane(Header { flags: 4, ..csum }));
    // A checksum within the addresses or the tags would change checked bytes.
    let early = Header { csum_start: 13, csum_offset: 0, ..csum };
    assert!(!sane(early) && sane(Header { csum_start: 14, ..early }));
    assert!(!Header { csum_start: 14, ..early }.is_sane(100, 18));
    assert_eq!(Header::parse(tso.to_bytes()[..10].try_into().unwrap()), tso);
}

#[test]
fn transmit_follows_receive() {
    let switch = Switch::new("s");
    let port = switch.join(4, guest("a")).unwrap();
    assert!(port.queue_for(7, 0).is_none());
    port.queues.iter().take(3).for_each(|end| end.open());
    let at = |hash, now| {
        let end = port.queue_for(hash, now).unwrap();
        port.queues.iter().position(|e| Arc::ptr_eq(e, end)).unwrap()
    };
    assert_eq!((at(6, 0), at(7, 0), at(8, 0)), (0, 1, 2));
    port.learn(6, 2, 0);
    assert_eq!((at(6, 0), at(6, flows::AGE_S), at(6, flows::AGE_S + 1)), (2, 2, 0));
    // A pair that takes no frames gets none.
    port.learn(6, 3, 0);
    assert_eq!(at(6, 0), 0);
}

#[test]
fn ports_come_and_go() {
    let switch = Switch::new("s");
    let (a, b) = (switch.join(1, guest("a")).unwrap(), switch.join(2, guest("b")).unwrap());
    let version = switch.version();
    let info = inspect(&frame(false, 0, (1, 5), (2, 6), 6));
    let route = |from: &Port, info: &FrameInfo| switch.route(&switch.view(), from, info, 0, 0).unwrap();
    assert_eq!(route(&a, &info), Route::All);
    let back = inspect(&frame(false, 0, (2, 6), (1, 5), 6));
    assert_eq!(route(&b, &back), Route::Port(a.index));
    assert_eq!(route(&a, &info), Route::Port(b.index));
    assert_eq!(route(&b, &info), Route::Nowhere);
    assert_eq!(switch.addresses(), 2);
    switch.leave(b.index);
    assert!(switch.version() > version && switch.view().port(b.index.into()).is_none());
    assert_eq!(route(&a, &info), Route::All);
    assert_eq!(switch.join(1, guest("c")).unwrap().index, b.index);
}

#[test]
fn descriptions_return() {
    let (from, to) = (PortQueue::new().unwrap(), PortQueue::new().unwrap());
    let send = |slot, tick| {
        let mut frame = SentFrame::from(&from);
        (frame.slot, frame.tick) = (slot, tick);
        frame.pieces.push(Piece { ptr: std::ptr::null_mut(), len: 0 });
        frame
    };
    let slots = |frames: &[SentFrame]| frames.iter().map(|f| f.slot).collect::<Vec<_>>();
    // A closed queue takes no frames.
    let mut frames = vec![send(0, 0)];
    to.put(&mut frames);
    assert_eq!(slots(&frames), [0]);
    to.open();
    frames.extend([send(1, 0), send(2, 1), send(3, 2)]);
    to.put(&mut frames);
    assert!(frames.is_empty() && to.has_frames());
    let mut taken = Default::default();
    to.take(1, &mut taken);
    assert_eq!((taken.len(), taken[0].slot, to.has_frames()), (1, 0, true));
    to.put_back(&mut taken);
    // Frames sent before tick 1 are revoked, and others stay.
    let mut returned = Vec::new();
    to.revoke(&from, 1, &mut returned);
    assert_eq!(slots(&returned), [0, 1]);
    PortQueue::return_all(&mut returned);
    assert!(from.has_returns());
    from.take_returns(&mut returned);
    assert_eq!((slots(&returned), from.has_returns()), (vec![0, 1], false));
    // Waiting frames are returned when the queue closes.
    to.close();
    assert!(!to.is_open());
    returned.clear();
    from.take_returns(&mut returned);
    assert_eq!(slots(&returned), [2, 3]);
}

#[test]
fn a_sleeping_queue_is_signalled_once() {
    let (from, to) = (PortQueue::new().unwrap(), PortQueue::new().unwrap());
    to.open();
    let signalled = || to.eventfd().take();
    let put = || to.put(&mut vec![SentFrame::from(&from)]);
    put();
    assert!(!signalled());
    to.sleep();
    put();
    put();
    assert!(signalled() && !signalled());
    to.wake();
    put();
    assert!(!signalled());
}

#[test]
fn an_inbox_has_an_end() {
    let (from, to) = (PortQueue::new().unwrap(), PortQueue::new().unwrap());
    to.open();
    let mut frames: Vec<_> = (0..2000).map(|_| SentFrame::from(&from)).collect();
    to.put(&mut frames);
    assert_eq!(frames.len(), 2000 - port_queue::INBOX_MAX);
}
