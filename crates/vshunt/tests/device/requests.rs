//! Each type of request, done right and done wrong (Virtio 1.3, 5.2.6).

use vshunt_guest::driver::{DriverSeg, feature, request, status};
use vshunt_types::spec::{Cache, LimitsSpec};

use super::rig::{Backing, Client, MIB, Reply, Rig, by_kernel, layouts, range, shapes, small};

const SECTORS: u64 = 4 * MIB / 512;

fn each_shape(backing: Backing, f: impl Fn(&mut Client)) {
    let rig = Rig::new();
    rig.disk("d", backing, 4 * MIB, |_| {});
    rig.export("e", "d", 1, |_| {});
    for options in shapes() {
        let mut client = rig.connect("e", options);
        f(&mut client);
        drop(client);
    }
    assert_eq!(rig.queue("e", 0).in_flight, 0);
}

#[test]
fn in_and_out() {
    each_shape(Backing::Ram, |c| {
        let bytes: Vec<u8> = (0..9 * 512).map(|i| (i % 251) as u8).collect();
        c.write(3, &bytes);
        assert_eq!(c.read(3, bytes.len()), bytes);
        // The last sector, and a request of the whole disk's end.
        c.write(SECTORS - 1, &bytes[..512]);
        assert_eq!(c.read(SECTORS - 1, 512), bytes[..512]);
        assert_eq!(c.read(SECTORS - 16, 16 * 512)[15 * 512..], bytes[..512]);
    });
}

#[test]
fn past_the_end_is_an_error_and_moves_nothing() {
    each_shape(Backing::Ram, |c| {
        c.write(SECTORS - 1, &[7; 512]);
        let failed = Reply { status: status::IOERR, len: 1, data: vec![0xa5; 1024] };
        for sector in [SECTORS - 1, SECTORS, SECTORS + 1, u64::MAX / 512, u64::MAX / 512 + 1, u64::MAX - 1] {
            assert_eq!(c.go(0, request::IN, sector, &[], 1024), failed, "sector {sector:#x}");
            assert_eq!(c.status(request::OUT, sector, &[9; 1024], 0), status::IOERR, "sector {sector:#x}");
        }
        // A sector number that wraps to one that exists.
        assert_eq!(c.status(request::OUT, 1 << 55, &[9; 512], 0), status::IOERR);
        assert_eq!(c.status(request::OUT, (1 << 55) + 1, &[9; 512], 0), status::IOERR);
        assert_eq!(c.read(SECTORS - 1, 512), [7; 512]);
    });
}

#[test]
fn lengths_that_are_no_sectors() {
    each_shape(Backing::Ram, |c| {
        for len in [1, 511, 513, 1000] {
            assert_eq!(c.status(request::IN, 0, &[], len), status::IOERR, "{len}");
            assert_eq!(c.status(request::OUT, 0, &vec![1; len], 0), status::IOERR, "{len}");
        }
        assert_eq!(c.status(request::IN, 0, &[], 0), status::OK);
        assert_eq!(c.status(request::OUT, 0, &[], 0), status::OK);
        assert_eq!(c.status(request::IN, SECTORS, &[], 0), status::OK);
        assert_eq!(c.status(request::IN, SECTORS + 1, &[], 0), status::IOERR);
    });
}

#[test]
fn flush() {
    for backing in [Backing::Ram, Backing::Direct, Backing::Buffered, Backing::Tmpfs] {
        each_shape(backing, |c| {
            c.write(0, &[1; 512]);
            let reply = c.go(0, request::FLUSH, 0, &[], 0);
            assert_eq!((reply.status, reply.len), (status::OK, 1));
            // The sector is reserved: a driver that puts something there is not refused.
            assert_eq!(c.status(request::FLUSH, u64::MAX, &[], 0), status::OK);
        });
    }
}

#[test]
fn get_id_short_and_long() {
    let rig = Rig::new();
    rig.disk("d", Backing::Ram, MIB, |_| {});
    rig.export("e", "d", 1, |spec| spec.serial = Some("serial-0123456789abc".into()));
    rig.export("short", "d", 1, |spec| {
        spec.serial = Some("abc".into());
        spec.readonly = true;
    });
    rig.export("named", "d", 1, |spec| spec.readonly = true);
    for options in layouts() {
        let mut c = rig.connect("e", options.clone());
        for room in [1, 5, 19, 20, 21, 64] {
            let reply = c.go(0, request::GET_ID, 0, &[], room);
            let n = room.min(20);
            assert_eq!((reply.status, reply.len as usize), (status::OK, n + 1));
            assert_eq!(reply.data[..n], b"serial-0123456789abc"[..n]);
            assert!(reply.data[n..].iter().all(|&b| b == 0xa5), "more than the id was written");
        }
        assert_eq!(c.go(0, request::GET_ID, 0, &[], 0).status, status::OK);
        // Split over buffers.
        c.arena.write(0, &super::rig::header(request::GET_ID, 0));
        let at = |offset: u64, len, writable| DriverSeg { addr: c.arena.guest() + offset, len, writable };
        let segs =
            [at(0, 16, false), at(100, 1, true), at(200, 7, true), at(300, 12, true), at(400, 1, true)];
        let cookie = c.disk.submit(0, &segs, false).unwrap();
        assert_eq!(c.disk.wait_for(0, Some(cookie)).unwrap().len, 21);
        let part = |offset, len| c.arena.part(offset, len).to_vec();
        assert_eq!([part(100, 1), part(200, 7), part(300, 12)].concat(), b"serial-0123456789abc");
        let reply = rig.connect("short", options.clone()).go(0, request::GET_ID, 0, &[], 20);
        assert_eq!(reply.data, b"abc\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        let reply = rig.connect("named", options).go(0, request::GET_ID, 0, &[], 20);
        assert_eq!(reply.data[..2], *b"d\0");
    }
}

#[test]
fn discard_and_write_zeroes() {
    for backing in [Backing::Ram, Backing::Direct, Backing::Buffered, Backing::Tmpfs] {
        each_shape(backing, |c| {
            assert_ne!(c.disk.session().features() & feature::BLK_WRITE_ZEROES, 0);
            c.write(8, &[5; 64 * 512]);
            for (sector, sectors, flags) in [(10, 3, 0), (20, 8, 1), (31, 1, 0)] {
                let reply = c.go(0, request::WRITE_ZEROES, 0, &range(sector, sectors, flags), 0);
                assert_eq!((reply.status, reply.len), (status::OK, 1), "{backing:?} {sector}");
                let around = c.read(sector - 1, (sectors as usize + 2) * 512);
                let (mid, end) = (512, 512 + sectors as usize * 512);
                assert!(around[..mid].iter().chain(&around[end..]).all(|&b| b == 5), "{backing:?} {sector}");
                assert!(around[mid..end].iter().all(|&b| b == 0), "{backing:?} {sector}");
            }
            if c.disk.session().features() & feature::BLK_DISCARD != 0 {
                assert_eq!(c.status(request::DISCARD, 0, &range(40, 16, 0), 0), status::OK);
                assert!(c.read(39, 512).iter().chain(&c.read(56, 512)).all(|&b| b == 5));
            }
        });
    }
}

#[test]
fn discard_and_write_zeroes_refused() {
    each_shape(Backing::Ram, |c| {
        c.write(0, &[5; 4096]);
        let config = *c.disk.config();
        let cases = |max: u32| {
            [
                (range(0, 8, 2).to_vec(), status::UNSUPP),
                (range(0, 8, 0x8000_0001).to_vec(), status::UNSUPP),
                (range(SECTORS, 1, 0).to_vec(), status::IOERR),
                (range(SECTORS - 1, 2, 0).to_vec(), status::IOERR),
                (range(u64::MAX, 1, 0).to_vec(), status::IOERR),
                (range(1 << 55, 8, 0).to_vec(), status::IOERR),
                (range(0, max.saturating_add(1), 0).to_vec(), status::IOERR),
                (range(0, u32::MAX, 0).to_vec(), status::IOERR),
                (range(0, 8, 0)[..15].to_vec(), status::IOERR),
                // More than the one range that is offered (max_*_seg).
                ([range(0, 8, 0), range(8, 8, 0)].concat(), status::UNSUPP),
                ([range(0, 8, 0); 9].concat(), status::UNSUPP),
                ([&range(0, 8, 0)[..], &[0]].concat(), status::UNSUPP),
                (vec![], status::IOERR),
                (range(0, 0, 0).to_vec(), status::OK),
            ]
        };
        for (kind, max) in [
            (request::DISCARD, config.max_discard_sectors),
            (request::WRITE_ZEROES, config.max_write_zeroes_sectors),
        ] {
            for (bytes, want) in cases(max) {
                assert_eq!(c.status(kind, 0, &bytes, 0), want, "type {kind}: {bytes:x?}");
            }
        }
        // Unmap is no flag of a discard (5.2.6.1).
        assert_eq!(c.status(request::DISCARD, 0, &range(0, 8, 1), 0), status::UNSUPP);
        assert_eq!(c.read(0, 4096), [5; 4096]);
    });
}

#[test]
fn more_than_the_maximum_on_a_large_disk() {
    let rig = Rig::ram(1 << 40, 1);
    let mut c = rig.connect("e", small());
    let config = *c.disk.config();
    for (kind, max) in [
        (request::DISCARD, config.max_discard_sectors),
        (request::WRITE_ZEROES, config.max_write_zeroes_sectors),
    ] {
        assert!(max >= 2048);
        assert_eq!(c.status(kind, 0, &range(9, max, 0), 0), status::OK);
        assert_eq!(c.status(kind, 0, &range(9, max + 1, 0), 0), status::IOERR);
    }
}

/// With what these requests say in bytes, the last one would wait for weeks.
#[test]
fn what_is_refused_or_moves_no_data_costs_no_bytes_of_the_limits() {
    if by_kernel() {
        println!("left out: the kernel has no limits");
        return;
    }
    let rig = Rig::new();
    rig.disk("d", Backing::Ram, 16 * MIB, |_| {});
    let limits = LimitsSpec { bps: Some(100_000), ..LimitsSpec::default() };
    rig.export("e", "d", 1, |spec| spec.limits = Some(limits));
    let mut c = rig.connect("e", small());
    let sectors = 16 * MIB / 512;
    for kind in [request::DISCARD, request::WRITE_ZEROES] {
        for bytes in [
            range(0, u32::MAX, 0),
            range(u64::MAX, u32::MAX, 0),
            range(sectors, 1 << 22, 0),
            range(0, u32::MAX, 0x8000_0000),
        ] {
            assert_ne!(c.status(kind, 0, &bytes, 0), status::OK, "type {kind}: {bytes:x?}");
        }
    }
    for _ in 0..32 {
        let past_the_end = c.status(request::OUT, sectors - 1, &[1; 512 << 10], 0);
        assert_eq!(past_the_end, status::IOERR);
        let all = range(0, u32::try_from(sectors).unwrap(), 0);
        for kind in [request::DISCARD, request::WRITE_ZEROES] {
            assert_eq!(c.status(kind, 0, &all, 0), status::OK, "type {kind}");
        }
    }
    assert_eq!(c.read(0, 4096), [0; 4096]);
}

#[test]
fn unknown_types() {
    each_shape(Backing::Ram, |c| {
        for kind in [2, 3, 5, 6, 7, 9, 10, 12, 14, 15, 24, 0x8000_0000, 0x8000_0001, u32::MAX] {
            let reply = c.go(0, kind, 0, &[], 64);
            assert_eq!((reply.status, reply.len), (status::UNSUPP, 1), "type {kind}");
            assert_eq!(reply.data, [0xa5; 64]);
            assert_eq!(c.status(kind, 0, &[1; 512], 0), status::UNSUPP, "type {kind}");
        }
    });
}

#[test]
fn a_request_without_header_or_status() {
    each_shape(Backing::Ram, |c| {
        let base = c.arena.guest();
        let at = |offset: u64, len, writable| DriverSeg { addr: base + offset, len, writable };
        let status_of = |c: &mut Client, segs: &[DriverSeg]| {
            c.arena.write(64, &[status::UNTOUCHED]);
            let cookie = c.disk.submit(0, segs, false).unwrap();
            let len = c.disk.wait_for(0, Some(cookie)).unwrap().len;
            (c.arena.part(64, 1).to_vec()[0], len)
        };
        c.arena.write(0, &super::rig::header(request::OUT, 0));
        let (head, short, tail) = (at(0, 16, false), at(0, 15, false), at(64, 1, true));
        assert_eq!(status_of(c, &[short, tail]), (status::IOERR, 1));
        assert_eq!(status_of(c, &[tail]), (status::IOERR, 1));
        // Nowhere to answer: completed all the same, and nothing is written.
        assert_eq!(status_of(c, &[head]), (status::UNTOUCHED, 0));
        assert_eq!(status_of(c, &[head, at(4096, 512, false)]), (status::UNTOUCHED, 0));
        // Buffers of no bytes are no place for a status.
        assert_eq!(status_of(c, &[head, tail, at(99, 0, true)]).0, status::OK);
        c.write(0, &[1; 512]);
    });
}

#[test]
fn a_read_only_export_refuses_writes() {
    let rig = Rig::new();
    for (name, backing) in [("ram", Backing::Ram), ("file", Backing::Direct)] {
        rig.disk(name, backing, 4 * MIB, |_| {});
        rig.export(name, name, 1, |spec| spec.readonly = true);
    }
    rig.disk("ro", Backing::Buffered, 4 * MIB, |spec| spec.readonly = true);
    rig.export("ro", "ro", 1, |_| {});
    for name in ["ram", "file", "ro"] {
        for options in layouts() {
            let mut c = rig.connect(name, options);
            let features = c.disk.session().features();
            assert_ne!(features & feature::BLK_RO, 0);
            assert_eq!(
                features & (feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES | feature::BLK_CONFIG_WCE),
                0
            );
            assert_eq!(c.status(request::OUT, 0, &[1; 512], 0), status::IOERR);
            assert_eq!(c.status(request::DISCARD, 0, &range(0, 8, 0), 0), status::IOERR);
            assert_eq!(c.status(request::WRITE_ZEROES, 0, &range(0, 8, 0), 0), status::IOERR);
            assert_eq!(c.status(request::FLUSH, 0, &[], 0), status::OK);
            assert_eq!(c.read(0, 512), [0; 512]);
        }
    }
}

#[test]
fn two_exports_of_one_disk() {
    for backing in [Backing::Ram, Backing::Direct, Backing::Buffered, Backing::Tmpfs] {
        let rig = Rig::new();
        rig.disk("d", backing, 4 * MIB, |_| {});
        rig.export("w", "d", 1, |_| {});
        let second = vshunt_types::spec::ExportSpec {
            name: "w2".into(),
            disk: "d".into(),
            socket: Some(rig.socket("w2")),
            queues: Some(1),
            ..Default::default()
        };
        let refused = rig.daemon.export_add(second).unwrap_err().to_string();
        assert!(refused.contains("export w") && refused.contains("readonly=on"), "{refused}");
        assert!(!rig.socket("w2").exists());
        rig.export("r", "d", 1, |spec| spec.readonly = true);
        let (mut writer, mut reader) = (rig.connect("w", small()), rig.connect("r", small()));
        for round in 1..20u8 {
            writer.write(round.into(), &[round; 1024]);
            assert_eq!(reader.read(round.into(), 1024), [round; 1024], "{backing:?}");
        }
    }
}

#[test]
fn every_cache_mode_answers() {
    let rig = Rig::new();
    for (name, cache) in [("wb", Cache::Writeback), ("wt", Cache::Writethrough), ("un", Cache::Unsafe)] {
        rig.disk(name, Backing::Direct, MIB, |spec| spec.cache = cache);
        rig.export(name, name, 1, |_| {});
        let mut c = rig.connect(name, small());
        let wce = c.disk.session().features() & feature::BLK_CONFIG_WCE != 0;
        assert_eq!((wce, c.disk.config().writeback), (cache == Cache::Writeback, u8::from(name != "wt")));
        c.write(1, &[3; 512]);
        assert_eq!(c.status(request::FLUSH, 0, &[], 0), status::OK);
        assert_eq!(c.status(request::WRITE_ZEROES, 0, &range(1, 1, 0), 0), status::OK);
        assert_eq!(c.read(1, 512), [0; 512]);
    }
}
