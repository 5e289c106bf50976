//! The configuration space (Virtio 1.3, 5.2.4), and what can be changed there.

use vshunt_guest::Kind;
use vshunt_guest::driver::{feature, protocol};

use super::rig::{Backing, MIB, Rig, layouts, small};

#[test]
fn says_what_the_disk_is() {
    let rig = Rig::new();
    rig.disk("d", Backing::Direct, 8 * MIB, |_| {});
    rig.export("e", "d", 3, |spec| spec.block_size = Some(4096));
    let client = rig.connect("e", small());
    let config = *client.disk.config();
    assert_eq!((config.capacity, config.blk_size, config.num_queues), (8 * MIB / 512, 4096, 3));
    assert!(config.seg_max >= 64 && config.seg_max <= 1022, "{config:?}");
    assert_eq!((config.writeback, config.write_zeroes_may_unmap), (1, 1));
    assert!(config.max_write_zeroes_sectors >= 2048 && config.max_write_zeroes_seg == 1);
    assert!(config.max_discard_sectors >= 2048 && config.max_discard_seg == 1);
    assert!(config.discard_sector_alignment >= 1);
    assert!(config.physical_block_exp <= 3);
}

#[test]
fn seg_max_segments_are_taken() {
    let rig = Rig::ram(MIB, 1);
    let mut c = rig.connect("e", vshunt_guest::Options { indirect_cap: 1024, ..small() });
    let segs = c.disk.config().seg_max as usize;
    use vshunt_guest::driver::{DriverSeg, request};
    c.arena.write(0, &super::rig::header(request::IN, 0));
    let at =
        |offset: usize, len, writable| DriverSeg { addr: c.arena.guest() + offset as u64, len, writable };
    let mut chain = vec![at(0, 16, false)];
    chain.extend((0..segs).map(|i| at(4096 + i * 1024, 512, true)));
    chain.push(at(64, 1, true));
    let cookie = c.disk.submit(0, &chain, true).unwrap();
    assert_eq!(c.disk.wait_for(0, Some(cookie)).unwrap().len as usize, segs * 512 + 1);
}

#[test]
fn read_in_parts() {
    let rig = Rig::ram(5 * MIB, 2);
    let mut client = rig.connect("e", small());
    let session = client.disk.session();
    let whole = session.read_config_bytes(0, 60).unwrap();
    assert_eq!(whole.len(), 60);
    for offset in 0..60 {
        for len in [1, 2, 4, 8] {
            let part = session.read_config_bytes(offset, len).unwrap();
            let have = (60 - offset as usize).min(len as usize);
            assert_eq!(part[..have], whole[offset as usize..][..have], "{offset}+{len}");
        }
    }
    // A front end that knows of more than we have gets zeroes.
    let longer = session.read_config_bytes(0, 256).unwrap();
    assert_eq!((longer.len(), &longer[..60]), (256, &whole[..]));
    assert!(longer[100..].iter().all(|&b| b == 0));
}

#[test]
fn reading_beyond_it_is_an_error_and_not_the_end() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    // "uses a zero length of payload to indicate an error" (vhost-user, "Virtio device config
    // space").
    assert!(client.disk.session().read_config_bytes(200, 8).unwrap().is_empty());
    client.write(0, &[1; 512]);
}

#[test]
fn the_write_cache_is_switched_while_it_runs() {
    let rig = Rig::new();
    rig.disk("d", Backing::Direct, MIB, |_| {});
    rig.export("e", "d", 1, |_| {});
    for options in layouts() {
        let mut client = rig.connect("e", options);
        assert_eq!(client.disk.config().writeback, 1);
        for value in [0u8, 1, 0] {
            client.write(0, &[value; 512]);
            client.disk.session().write_config_bytes(32, &[value]).unwrap();
            assert_eq!(client.disk.session().read_config().unwrap().writeback, value);
            client.write(1, &[value; 512]);
        }
        // A reset brings the default back.
        client.disk.session().reset_device().unwrap();
        assert_eq!(client.disk.session().read_config().unwrap().writeback, 1);
    }
}

#[test]
fn the_switched_off_cache_survives_a_pause() {
    // QEMU pauses a machine by GET_VRING_BASE and status 0, and says nothing of the cache when it
    // continues.
    let rig = Rig::ram(MIB, 1);
    for options in layouts() {
        let mut client = rig.connect("e", options);
        client.disk.session().write_config_bytes(32, &[0]).unwrap();
        client.write(0, &[1; 512]);
        let base = client.disk.stop_queue(0).unwrap();
        let features = client.disk.session().features();
        client.disk.session().set_status(0).unwrap();
        client.disk.session().set_features(features).unwrap();
        client.disk.start_queue(0, base).unwrap();
        client.write(0, &[2; 512]);
        assert_eq!(client.disk.session().read_config().unwrap().writeback, 0);
        drop(client);
        // Nor does a connection that breaks switch it on again.
        let mut client = rig.connect("e", small());
        assert_eq!(client.disk.config().writeback, 0);
        client.disk.session().reset_device().unwrap();
    }
}

#[test]
fn rings_continue_after_a_pause_that_begins_with_the_status() {
    // QEMU before 8.1 sends status 0 first, and GET_VRING_BASE after it.
    let rig = Rig::ram(MIB, 1);
    for options in layouts() {
        let mut client = rig.connect("e", options);
        for value in 1..=3 {
            client.write(0, &[value; 512]);
        }
        let features = client.disk.session().features();
        client.disk.session().set_status(0).unwrap();
        let base = client.disk.stop_queue(0).unwrap();
        assert!(![0, 0x8000_8000].contains(&base), "the ring begins again at 0");
        client.disk.session().set_features(features).unwrap();
        client.disk.start_queue(0, base).unwrap();
        client.write(0, &[4; 512]);
        client.disk.session().reset_device().unwrap();
    }
}

#[test]
fn what_the_guest_may_not_write_is_refused_and_the_device_continues() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    let refused = [(0u32, &[1u8; 8][..]), (32, &[1, 1]), (31, &[0]), (33, &[0]), (34, &[1, 0])];
    for (offset, bytes) in refused {
        let e = client.disk.session().write_config_bytes(offset, bytes).unwrap_err();
        assert!(e.kind() == Kind::Lost && e.to_string().contains("refused SetConfig"), "{offset}: {e}");
        client.write(0, &[1; 512]);
    }
    assert_eq!(client.disk.session().read_config().unwrap().capacity, MIB / 512);
    drop(client);
    // The switch is there only for those who took the feature.
    let options = vshunt_guest::Options { refuse_features: feature::BLK_CONFIG_WCE, ..small() };
    let mut client = rig.connect("e", options);
    assert!(client.disk.session().write_config_bytes(32, &[0]).is_err());
    client.write(0, &[1; 512]);
}

#[test]
fn mq_is_not_offered_for_one_queue() {
    let rig = Rig::lasting(MIB, 1);
    let mut client = rig.connect("e", small());
    assert_eq!(client.disk.session().features() & feature::BLK_MQ, 0);
    assert_eq!(client.disk.session().max_queues(), 1);
    assert_eq!(client.disk.session().protocol() & protocol::SUPPORTED, protocol::SUPPORTED);
}

#[test]
fn a_disk_in_memory_has_no_inflight_region() {
    // The next daemon begins with an empty disk, and a guest must not continue on it.
    if crate::rig::by_kernel() || crate::rig::by_qcow2() {
        return;
    }
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", small());
    assert_eq!(
        client.disk.session().protocol() & protocol::SUPPORTED,
        protocol::SUPPORTED & !protocol::INFLIGHT_SHMFD
    );
    client.write(0, &[1; 512]);
}
