//! The vhost-user protocol: what is negotiated, refused, stopped, restarted, told.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vshunt_daemon::Event;
use vshunt_guest::Kind;
use vshunt_guest::driver::{
    Code, NEED_REPLY, Options, Payload, RingSetup, SECTOR, VERSION, Wire, feature, fresh_base, packed_base,
    protocol, request, status,
};
use vshunt_types::spec::Cache;

use super::rig::{
    Backing, LOAD_BYTES, MIB, Machine, PATIENCE, Rig, layouts, new_eventfd, shapes, signalled, small,
    wait_for,
};

/// Whether the server has closed the connection.
fn closed(wire: &mut Wire) -> bool {
    match wire.recv() {
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        Ok(message) => panic!("an answer to what should have ended the connection: {message:?}"),
    }
}

fn open(rig: &Rig, export: &str) -> Wire {
    Wire::connect(&rig.socket(export), PATIENCE).unwrap()
}

/// The export takes connections and serves.
fn serves(rig: &Rig, export: &str) {
    let mut client = rig.connect(export, small());
    client.write(0, &[1; 512]);
}

#[test]
fn features_never_offered_are_refused() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    let agreed = client.disk.session().features();
    for bit in [0, 1, 4, 7, 12, 24, 33, 35, 38, 40, 63] {
        let e = client.disk.session().set_features(agreed | 1 << bit).unwrap_err();
        assert!(e.to_string().contains("refused"), "{bit}: {e}");
    }
    // Features do not change under running rings, but logging does.
    assert!(client.disk.session().set_features(agreed & !feature::EVENT_IDX).is_err());
    client.disk.session().set_features(agreed).unwrap();
    client.write(0, &[1; 512]);
    drop(client);
    // Who did not ask for acknowledgements learns it by the end of the connection.
    let options = Options { refuse_protocol: protocol::REPLY_ACK, ..small() };
    let mut client = rig.connect("e", options);
    client.disk.session().set_features(1 << 40).unwrap();
    assert!(closed(client.disk.session().wire()));
    serves(&rig, "e");
}

#[test]
fn protocol_features_never_offered_are_refused() {
    let rig = Rig::lasting(MIB, 1);
    let mut client = rig.connect("e", small());
    let wire = client.disk.session().wire();
    let offered = wire.ask_u64(Code::GetProtocolFeatures).unwrap();
    assert_eq!(offered, protocol::SUPPORTED);
    for bit in [4, 6, 7, 8, 10, 11, 14, 17, 18, 40] {
        let e =
            wire.tell(Code::SetProtocolFeatures, &Payload::new().u64(offered | 1 << bit), &[]).unwrap_err();
        assert!(e.to_string().contains("refused"), "{bit}: {e}");
    }
    client.write(0, &[1; 512]);
}

#[test]
fn refused_messages_are_answered_and_the_device_continues() {
    let rig = Rig::lasting(MIB, 2);
    let mut client = rig.connect("e", Options { queues: 2, ..small() });
    let pair = |a: u32, b: u32| Payload::new().u32(a).u32(b);
    let file = new_eventfd();
    let region =
        |payload: Payload, guest: u64, size: u64| payload.u64(guest).u64(size).u64(0x7000_0000).u64(0);
    let cases = [
        (Code::SetVringNum, pair(2, 64), false),
        (Code::SetVringNum, pair(0, 0), false),
        (Code::SetVringNum, pair(0, 64), false), // it runs
        (Code::SetVringBase, pair(0, 1), false),
        (Code::SetVringBase, pair(9, 1), false),
        (Code::SetVringAddr, Payload::new().u32(0).u32(0).u64(16).u64(16).u64(16).u64(0), false),
        (Code::SetVringEnable, pair(2, 1), false),
        (Code::SetVringCall, Payload::new().u64(2), true),
        (Code::SetVringErr, Payload::new().u64(200), true),
        (Code::SetVringKick, Payload::new().u64(2), true),
        (Code::SetVringKick, Payload::new().u64(0x100), false), // a ring to be polled
        (Code::SetInflightFd, Payload::new().u64(4096).u64(0).u16(2).u16(64).u32(0), true),
        (Code::AddMemReg, region(Payload::new().u64(0), 1 << 40, 4096), true),
        (Code::RemMemReg, region(Payload::new().u64(0), 1 << 40, 4096), false),
        (Code::SetMemTable, region(Payload::new().u32(1).u32(0), 1 << 40, 4096), true),
    ];
    for (i, (code, payload, with_file)) in cases.iter().enumerate() {
        let fds = [file.as_fd()];
        let fds = if *with_file { &fds[..] } else { &[] };
        let e = client.disk.session().wire().tell(*code, payload, fds).unwrap_err();
        assert!(e.kind() == Kind::Lost && e.to_string().contains("refused"), "case {i}, {code:?}: {e}");
        for q in 0..2 {
            let reply = client.go(q, request::OUT, 0, &[i as u8; 512], 0);
            assert_eq!(reply.status, status::OK, "case {i}, {code:?}");
        }
    }
}

#[test]
fn malformed_messages_end_the_connection_and_nothing_else() {
    let rig = Rig::ram(MIB, 1);
    rig.export("other", "d", 1, |spec| spec.readonly = true);
    let mut other = rig.connect("other", small());
    let header = |code: u32, flags: u32, size: u32| {
        [code.to_le_bytes(), flags.to_le_bytes(), size.to_le_bytes()].concat()
    };
    let u64s = |n: usize| vec![0xffu8; n * 8];
    let cases: Vec<Vec<u8>> = vec![
        header(0, 1, 0),
        header(999, 1, 0),
        header(4, 0, 0),
        header(1, 0, 0),
        header(1, 3, 0),
        header(1, 1 | 4, 0),
        header(1, 1, u32::MAX),
        [header(1, 1, 8), u64s(1)].concat(),
        [header(2, 1, 4), vec![0; 4]].concat(),
        [header(5, 1, 8), vec![0; 8]].concat(),
        [header(5, 1, 8), u64s(1)].concat(),
        [header(8, 1, 16), u64s(2)].concat(),
        [header(9, 1, 40), u64s(5)].concat(),
        [header(12, 1, 8), vec![0; 8]].concat(),
        [header(24, 1, 12), u64s(2)[..12].to_vec()].concat(),
        [header(25, 1, 12), u64s(2)[..12].to_vec()].concat(),
        [header(31, 1, 24), u64s(3)].concat(),
        [header(39, 1, 4), vec![0; 4]].concat(),
        [header(39, 0, 8), u64s(1)].concat(),
        [header(39, 1, 64), u64s(8)].concat(),
        [header(40, 1, 8), u64s(1)].concat(),
        [header(21, 1, 0)].concat(),
        (0..4096u32).map(|i| (i * 31) as u8).collect(),
    ];
    for (i, bytes) in cases.iter().enumerate() {
        let mut stream = UnixStream::connect(rig.socket("e")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let end = stream.read_to_end(&mut answer);
        assert!(
            end.is_ok() || end.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
            "case {i}: the connection continues"
        );
        other.read(0, 512);
    }
    serves(&rig, "e");
}

#[test]
fn a_peer_that_goes_or_stalls_in_the_middle_of_a_message() {
    let rig = Rig::ram(MIB, 1);
    let message = [&2u32.to_le_bytes()[..], &1u32.to_le_bytes(), &8u32.to_le_bytes(), &[0; 8]].concat();
    let own = [&39u32.to_le_bytes()[..], &1u32.to_le_bytes(), &8u32.to_le_bytes(), &[0; 8]].concat();
    for message in [message, own] {
        for n in 0..message.len() {
            let mut stream = UnixStream::connect(rig.socket("e")).unwrap();
            stream.write_all(&message[..n]).unwrap();
        }
        serves(&rig, "e");
    }
    // One that stalls holds up nothing but itself: the export goes when it is to.
    let mut stream = UnixStream::connect(rig.socket("e")).unwrap();
    stream.write_all(&[2, 0]).unwrap();
    rig.event("a connection", |e| matches!(e, Event::ExportConnected { .. }).then_some(()));
    rig.daemon.export_remove("e", true).unwrap();
}

#[test]
fn the_second_connection_waits_for_the_first_to_go() {
    let rig = Rig::ram(MIB, 1);
    let client = rig.connect("e", small());
    let mut second = open(&rig, "e");
    second.send(Code::GetFeatures as u32, VERSION, &[], &[]).unwrap();
    let fd = second.socket().try_clone_to_owned().unwrap();
    assert!(!signalled(&fd, Duration::from_millis(50)), "two front ends are served at a time");
    drop(client);
    assert_eq!(second.recv().unwrap().code, Code::GetFeatures as u32);
    drop((second, fd));
    for _ in 0..20 {
        serves(&rig, "e");
    }
}

#[test]
fn status_is_kept_and_zero_resets() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    let wire = client.disk.session().wire();
    assert_eq!(wire.ask_u64(Code::GetStatus).unwrap(), 15);
    wire.tell(Code::SetStatus, &Payload::new().u64(0), &[]).unwrap();
    assert_eq!(wire.ask_u64(Code::GetStatus).unwrap(), 0);
    assert_eq!(rig.queue("e", 0).state, "stopped");
    // Without asking for an acknowledgement there is none.
    wire.send(Code::SetStatus as u32, VERSION, &Payload::new().u64(3), &[]).unwrap();
    assert_eq!(wire.ask_u64(Code::GetStatus).unwrap(), 3);
    client.disk.session().reset_device().unwrap();
    assert_eq!(client.disk.session().wire().ask_u64(Code::GetStatus).unwrap(), 0);
}

#[test]
fn a_device_is_reset_and_used_again() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in layouts() {
        for by_status in [false, true] {
            let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options.clone() });
            for round in 0..4 {
                // An odd number of requests, so that rings do not end where they began.
                let load = [machine.load(0), machine.load(1)];
                load.iter().for_each(|l| l.progress(101));
                if round % 2 == 1 {
                    load.into_iter().for_each(|l| drop(l.end()));
                    if by_status {
                        machine.session.set_status(0).unwrap();
                    } else {
                        machine.session.reset_device().unwrap();
                    }
                } else {
                    load.into_iter().for_each(|l| drop(l.end()));
                    for q in 0..2 {
                        machine.session.stop_ring(q).unwrap();
                    }
                    machine.session.reset_device().unwrap();
                }
                // A reset keeps the memory table; a driver that tells all of it again takes it back
                // first.
                let memory = machine.memory.clone();
                for region in memory.regions() {
                    let payload = Payload::new().u64(0).u64(region.guest_addr).u64(region.size);
                    let payload = payload.u64(region.user_addr()).u64(0);
                    machine.session.wire().tell(Code::RemMemReg, &payload, &[]).unwrap();
                }
                machine.renew();
                machine.start().unwrap();
            }
        }
    }
}

#[test]
fn a_disabled_ring_stands_and_continues_when_enabled() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options });
        let load = [machine.load(0), machine.load(1)];
        for _ in 0..10 {
            load[0].progress(100);
            machine.session.enable(0, false).unwrap();
            // The device's count: the load's own lags behind where its thread has to wait for a
            // CPU.
            let served = rig.queue("e", 0).requests;
            load[1].progress(100);
            assert_eq!(rig.queue("e", 0).requests, served, "a disabled ring is served");
            machine.session.enable(0, true).unwrap();
        }
        load[0].progress(100);
    }
}

#[test]
fn get_vring_base_drains_and_says_where_the_ring_stands() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), options.clone());
        let load = machine.load(0);
        for _ in 0..20 {
            load.progress(50);
            let base = machine.session.stop_ring(0).unwrap();
            let info = rig.queue("e", 0);
            assert_eq!((info.state.as_str(), info.in_flight), ("stopped", 0));
            if !options.packed {
                let used = machine.parts[0].device.load_u16(2);
                assert_eq!(base, u32::from(used), "all that was taken is used");
            }
            let ring = RingSetup { parts: &machine.parts[0], base };
            machine.session.set_ring(&ring, false).unwrap();
            machine.parts[0].kick();
        }
        let queue = load.end();
        let base = machine.session.stop_ring(0).unwrap();
        let (slot, wrap) = queue.next_used();
        let want = if options.packed { packed_base(slot, wrap) } else { u32::from(slot) };
        assert_eq!(base, want);
        // Once more says the same.
        assert_eq!(machine.session.stop_ring(0).unwrap(), want);
    }
}

#[test]
fn a_ring_that_is_given_up_asks_for_kicks() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    for options in shapes().into_iter().filter(|options| !options.event_idx) {
        let mut machine = Machine::connect(&rig.socket("e"), options.clone());
        let load = machine.load(0);
        for round in 0..20 {
            load.progress(50);
            // While requests come it asks for none.
            let base = machine.session.stop_ring(0).unwrap();
            // Split: the used ring's flags. Packed: those of the device's event suppression
            // structure (2.8.10).
            let flags = machine.parts[0].device.load_u16(if options.packed { 2 } else { 0 });
            assert_eq!(flags, 0, "round {round}, packed {}", options.packed);
            machine.session.set_ring(&RingSetup { parts: &machine.parts[0], base }, false).unwrap();
            machine.parts[0].kick();
        }
    }
}

/// QEMU switches a ring off first, and asks for its base then.
#[test]
fn a_ring_that_is_switched_off_and_given_up_asks_for_kicks() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    for options in shapes() {
        let mut machine = Machine::connect(&rig.socket("e"), options.clone());
        let load = machine.load(0);
        for round in 0..20 {
            load.progress(50);
            machine.session.enable(0, false).unwrap();
            let base = machine.session.stop_ring(0).unwrap();
            let flags = machine.parts[0].device.load_u16(if options.packed { 2 } else { 0 });
            assert_eq!(flags, 0, "round {round}, packed {}, event_idx {}", options.packed, options.event_idx);
            machine.session.set_ring(&RingSetup { parts: &machine.parts[0], base }, false).unwrap();
            machine.session.enable(0, true).unwrap();
            machine.parts[0].kick();
        }
    }
}

#[test]
fn a_ring_whose_inflight_region_was_refused_restarts_from_its_base() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    for options in layouts() {
        let options = Options { refuse_protocol: protocol::INFLIGHT_SHMFD, ..options };
        let mut machine = Machine::connect(&rig.socket("e"), options);
        assert!(machine.session.inflight().is_none());
        let load = machine.load(0);
        for _ in 0..20 {
            load.progress(50);
            let base = machine.session.stop_ring(0).unwrap();
            machine.session.set_ring(&RingSetup { parts: &machine.parts[0], base }, false).unwrap();
            machine.parts[0].kick();
        }
        load.progress(50);
    }
}

#[test]
fn call_kick_and_err_change_while_the_ring_runs() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), options);
        let load = machine.load(0);
        let (other, parts) = (new_eventfd(), machine.parts[0].clone());
        let index = Payload::new().u64(0);
        for _ in 0..20 {
            load.progress(20);
            let wire = machine.session.wire();
            wire.tell(Code::SetVringCall, &index, &[other.as_fd()]).unwrap();
            assert!(signalled(&other, PATIENCE), "the new descriptor is notified once");
            wire.tell(Code::SetVringCall, &Payload::new().u64(0x100), &[]).unwrap();
            wire.tell(Code::SetVringErr, &index, &[other.as_fd()]).unwrap();
            wire.tell(Code::SetVringErr, &Payload::new().u64(0x100), &[]).unwrap();
            wire.tell(Code::SetVringCall, &index, &[parts.call.as_fd()]).unwrap();
            let kick = new_eventfd();
            wire.tell(Code::SetVringKick, &index, &[kick.as_fd()]).unwrap();
            wire.tell(Code::SetVringKick, &index, &[parts.kick.as_fd()]).unwrap();
        }
        load.progress(20);
    }
}

#[test]
fn a_resize_is_told_to_every_guest_of_the_disk() {
    for backing in [super::rig::Backing::Ram, super::rig::Backing::Direct] {
        let rig = Rig::new();
        rig.disk("d", backing, 4 * MIB, |_| {});
        rig.export("w", "d", 2, |_| {});
        rig.export("r", "d", 1, |spec| spec.readonly = true);
        let mut writer = Machine::connect(&rig.socket("w"), Options { queues: 2, ..small() });
        let mut reader = rig.connect("r", small());
        let load = [writer.load(0), writer.load(1)];
        for mib in [8u64, 2, 16, 4, 1] {
            load.iter().for_each(|l| l.progress(10));
            rig.daemon.disk_resize("d", mib * MIB).unwrap();
            let config = writer.session.wait_config_change(PATIENCE).unwrap().expect("told");
            assert_eq!(config.capacity, mib * MIB / SECTOR);
            let config = reader.disk.wait_config_change(PATIENCE).unwrap().expect("told");
            assert_eq!(config.capacity, mib * MIB / SECTOR);
            assert_eq!(reader.status(request::IN, mib * MIB / 512 - 1, &[], 512), status::OK);
            assert_eq!(reader.status(request::IN, mib * MIB / 512, &[], 512), status::IOERR);
        }
        load.iter().for_each(|l| l.progress(10));
        assert_eq!(writer.session.wait_config_change(Duration::from_millis(10)).unwrap(), None);
    }
}

#[test]
fn a_guest_that_reads_no_messages_does_not_hold_up_a_resize() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    for i in 0..3000 {
        rig.daemon.disk_resize("d", MIB + i * 512).unwrap();
    }
    client.write(0, &[1; 512]);
    assert_eq!(client.disk.session().read_config().unwrap().capacity, MIB / 512 + 2999);
}

#[test]
fn inflight_regions_that_no_device_has_are_refused() {
    let rig = Rig::ram(MIB, 2);
    for (queues, size) in [(0u16, 64u16), (3, 64), (1, 0), (1, 1025), (u16::MAX, u16::MAX)] {
        let mut client = rig.connect("e", small());
        let ask = Payload::new().u64(0).u64(0).u16(queues).u16(size).u32(0);
        let wire = client.disk.session().wire();
        wire.send(Code::GetInflightFd as u32, VERSION | NEED_REPLY, &ask, &[]).unwrap();
        assert!(closed(wire), "{queues} queues of {size}");
    }
    serves(&rig, "e");
}

#[test]
fn old_style_without_protocol_features() {
    // Rings are enabled from the start then, and there is no configuration space: the driver knows
    // its disk.
    let rig = Rig::ram(MIB, 1);
    let mut machine = Machine::open(&rig.socket("e"), small());
    let rings_enabled = machine.session.features() & !feature::PROTOCOL_FEATURES;
    machine.session.set_features(rings_enabled).unwrap();
    let table = machine.memory.regions().iter().fold(Payload::new().u32(1).u32(0), |payload, r| {
        payload.u64(r.guest_addr).u64(r.size).u64(r.user_addr()).u64(0)
    });
    let fd = machine.memory.regions()[0].fd();
    machine.session.wire().tell(Code::SetMemTable, &table, &[fd]).unwrap();
    let ring = RingSetup { parts: &machine.parts[0], base: fresh_base(false) };
    machine.session.set_ring(&ring, false).unwrap();
    let load = machine.load(0);
    load.progress(100);
}

#[test]
fn a_front_end_that_goes_under_load_leaves_nothing_behind() {
    let rig = Rig::ram(4 * LOAD_BYTES, 4);
    for options in layouts() {
        for _ in 0..3 {
            let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 4, ..options.clone() });
            let mut wires = Vec::new();
            for q in 0..4 {
                let mut queue = machine.take_queue(q);
                let slot = queue.take_slot().unwrap();
                assert!(queue.stage(slot, request::FLUSH, 0, (0, 0)));
                queue.publish();
                wires.push(queue);
            }
            machine.session.shutdown();
            wait_for("the end of the session", || {
                let queues = rig.daemon.queues();
                queues.iter().all(|q| q.state == "stopped" && q.in_flight == 0).then_some(())
            });
        }
    }
    let connected = rig.events().iter().filter(|e| matches!(e, Event::ExportConnected { .. })).count();
    wait_for("as many ends as beginnings", || {
        let ended = rig.events().iter().filter(|e| matches!(e, Event::ExportDisconnected { .. })).count();
        (connected == ended).then_some(())
    });
}

/// What a guest wrote to a thin image since its last flush is found again where its map has a
/// journal, or is written at once. Else it is lost with the daemon, and the guest is not to go on
/// as if it were there.
#[test]
fn only_what_outlives_us_is_offered_to_go_on() {
    let rig = Rig::new();
    rig.disk("thin", Backing::Qcow2, MIB, |_| {});
    rig.disk("old", Backing::Qcow2, MIB, |spec| {
        // Version 2 has nothing that says that it was not closed.
        let image = qcow2::memory::Memory::new(Vec::new(), MIB);
        let options = qcow2::create::Options { version: 2, ..qcow2::create::Options::new(MIB) };
        qcow2::create::create(&image, None, &options, &mut |_, _| {}).unwrap();
        std::fs::write(spec.file.as_ref().unwrap(), image.bytes()).unwrap();
    });
    rig.disk("through", Backing::Qcow2, MIB, |spec| spec.cache = Cache::Writethrough);
    rig.disk("file", Backing::Buffered, MIB, |_| {});
    for (name, offered) in [("thin", true), ("old", false), ("through", true), ("file", true)] {
        rig.export(name, name, 1, |_| {});
        let mut client = rig.connect(name, small());
        let has = client.disk.session().protocol() & protocol::INFLIGHT_SHMFD != 0;
        assert_eq!(has, offered, "{name}");
    }
}
