//! Header, data and status anywhere: requests cut into buffers at random, over regions' ends,
//! against a model.

use std::sync::Arc;

use vshunt_guest::driver::{DriverSeg, Memory, Options, RegionSpec, request, status};
use vshunt_types::spec::{DiskSpec, Format};

use super::rig::{Backing, Client, MIB, Rig, Rng, header, layouts, range, shapes};

const DISK: usize = 1 << 20;
const SECTORS: u64 = (DISK / 512) as u64;

/// Guest memory by guest address, over the ends of regions.
struct Guest {
    memory: Arc<Memory>,
    base: u64,
    len: usize,
}

impl Guest {
    fn pieces(&self, addr: u64, len: usize, mut f: impl FnMut(u64, usize, usize)) {
        let (mut at, mut done) = (addr, 0);
        while done < len {
            let region =
                self.memory.regions().iter().find(|r| at >= r.guest_addr && at < r.guest_addr + r.size);
            let region = region.expect("inside of guest memory");
            let n = (len - done).min((region.guest_addr + region.size - at) as usize);
            f(at, done, n);
            (at, done) = (at + n as u64, done + n);
        }
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        self.pieces(addr, bytes.len(), |at, from, n| {
            self.memory.area(at, n).unwrap().write(0, &bytes[from..from + n]);
        });
    }

    fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pieces(addr, len, |at, from, n| {
            self.memory.area(at, n).unwrap().read(0, &mut bytes[from..from + n]);
        });
        bytes
    }
}

/// Cuts `total` bytes into `count` pieces of at least one byte, many of them of just that.
fn cut(rng: &mut Rng, total: usize, count: usize) -> Vec<usize> {
    let count = count.clamp(1, total);
    let mut lens = vec![1; count];
    let mut left = total - count;
    while left > 0 {
        let n = 1 + rng.below(left as u64) as usize;
        lens[rng.below(count as u64) as usize] += n;
        left -= n;
    }
    lens
}

/// One request: `readable` bytes and room for `writable` ones, cut into at most `most` buffers that
/// lie anywhere. Returns status, used length, and what was written before the status.
fn scattered(
    c: &mut Client,
    guest: &Guest,
    rng: &mut Rng,
    readable: &[u8],
    writable: usize,
    (most, indirect): (usize, bool),
) -> (u8, u32, Vec<u8>) {
    let sectorwise = rng.chance(30);
    let first = 1 + rng.below(most as u64 - 1) as usize;
    let mut lens = cut(rng, readable.len(), first);
    let readables = lens.len();
    let second = 1 + rng.below((most - readables) as u64) as usize;
    lens.extend(cut(rng, writable, second));
    if sectorwise && readable.len() > 16 {
        lens.splice(..readables, [16, readable.len() - 16]);
    }
    let readables = if sectorwise && readable.len() > 16 { 2 } else { readables };
    // Places: in random order, with random gaps.
    let total: usize = lens.iter().sum();
    let mut order: Vec<usize> = (0..lens.len()).collect();
    rng.shuffle(&mut order);
    let gap = (guest.len - total) as u64 / (lens.len() as u64 + 1);
    let mut segs = vec![DriverSeg { addr: 0, len: 0, writable: false }; lens.len()];
    let mut at = guest.base;
    for i in order {
        at += rng.below(gap.min(5000) + 1);
        if sectorwise {
            at = at.next_multiple_of(512);
        }
        segs[i] = DriverSeg { addr: at, len: lens[i] as u32, writable: i >= readables };
        at += lens[i] as u64;
    }
    assert!(at <= guest.base + guest.len as u64);
    let canary = rng.next() as u8;
    guest.write(guest.base, &vec![canary; guest.len]);
    let mut from = 0;
    for seg in &segs[..readables] {
        guest.write(seg.addr, &readable[from..from + seg.len as usize]);
        from += seg.len as usize;
    }
    let before = guest.read(guest.base, guest.len);
    // Buffers of no bytes mean nothing, wherever they are.
    if segs.len() < most && rng.chance(20) {
        let seg = DriverSeg { addr: rng.next(), len: 0, writable: false };
        segs.insert(rng.below(readables as u64 + 1) as usize, seg);
    }
    let cookie = c.disk.submit(0, &segs, indirect).unwrap();
    let completion = c.disk.wait_for(0, Some(cookie)).unwrap();
    let after = guest.read(guest.base, guest.len);
    let mut expected = before;
    let mut got = Vec::new();
    for seg in segs.iter().filter(|s| s.writable) {
        let at = (seg.addr - guest.base) as usize;
        let bytes = &after[at..at + seg.len as usize];
        got.extend_from_slice(bytes);
        expected[at..at + seg.len as usize].copy_from_slice(bytes);
    }
    assert!(after == expected, "something outside of the request's buffers was written");
    let status = got.pop().unwrap();
    (status, completion.len, got)
}

fn program(backing: Backing, rounds: usize) {
    let mut rng = Rng::new();
    let rig = Rig::new();
    rig.disk("d", backing, DISK as u64, |_| {});
    rig.export("e", "d", 1, |_| {});
    let mut model = vec![0u8; DISK];
    for options in shapes() {
        let first = RegionSpec { guest_addr: 0x4000_0000, size: 4 * MIB };
        // Regions that adjoin in the guest, at odd places for what lies across, and one far off.
        let odd = [(0x1_0000_0000, 12 << 10), (0x1_0000_3000, 4 << 10), (0x1_0000_4000, 300 << 10)];
        let mut regions = vec![first];
        regions.extend(odd.map(|(guest_addr, size)| RegionSpec { guest_addr, size }));
        let mut c = rig.connect("e", Options { regions, ..options.clone() });
        let guest = Guest { memory: c.disk.memory().clone(), base: 0x1_0000_0000, len: 316 << 10 };
        for round in 0..rounds {
            let indirect = options.indirect && rng.chance(60);
            let shape =
                (usize::from(if indirect { options.indirect_cap } else { options.queue_size }), indirect);
            let most = if rng.chance(80) { 16 } else { 200 };
            let sectors = 1 + rng.below(most);
            let sector = rng.below(SECTORS - sectors + 1);
            let (at, len) = (sector as usize * 512, sectors as usize * 512);
            let context =
                format!("{backing:?} {options:?} round {round}: sector {sector}, {sectors} sectors");
            match rng.below(10) {
                0..4 => {
                    let bytes = rng.bytes(len);
                    let out = [&header(request::OUT, sector)[..], &bytes].concat();
                    // The status may be the end of a larger buffer, of which the rest has no use.
                    let room = 1 + rng.below(3) as usize;
                    let (status, _, _) = scattered(&mut c, &guest, &mut rng, &out, room, shape);
                    assert_eq!(status, status::OK, "{context}");
                    model[at..at + len].copy_from_slice(&bytes);
                }
                4..8 => {
                    let out = header(request::IN, sector);
                    let (status, used, got) = scattered(&mut c, &guest, &mut rng, &out, len + 1, shape);
                    assert_eq!((status, used as usize), (status::OK, len + 1), "{context}");
                    assert!(got == model[at..at + len], "{context}: not what was written");
                }
                8 => {
                    let out = [header(request::WRITE_ZEROES, 0), range(sector, sectors as u32, 1)].concat();
                    let (status, used, _) = scattered(&mut c, &guest, &mut rng, &out, 1, shape);
                    assert_eq!((status, used), (status::OK, 1), "{context}");
                    model[at..at + len].fill(0);
                }
                _ => {
                    let out = header(request::GET_ID, 0);
                    let (status, used, got) = scattered(&mut c, &guest, &mut rng, &out, 21, shape);
                    assert_eq!((status, used, &got[..2]), (status::OK, 21, &b"d\0"[..]), "{context}");
                }
            }
        }
    }
    let mut c = rig.connect("e", super::rig::small());
    assert!((0..4).all(|i| c.read(i * 512, 256 << 10) == model[i as usize * (256 << 10)..][..256 << 10]));
}

#[test]
fn in_memory() {
    program(Backing::Ram, 60);
}

#[test]
fn in_a_file_by_direct_io() {
    program(Backing::Direct, 40);
}

#[test]
fn in_a_file_by_the_page_cache() {
    program(Backing::Buffered, 40);
}

#[test]
fn in_a_thin_image() {
    program(Backing::Qcow2, 40);
}

#[test]
fn in_a_file_in_memory() {
    program(Backing::Tmpfs, 40);
}

#[test]
fn every_byte_a_buffer() {
    let rig = Rig::ram(MIB, 1);
    for packed in layouts().iter().map(|options| options.packed) {
        for indirect in [false, true] {
            let options = Options { packed, queue_size: 1024, indirect_cap: 1024, ..super::rig::small() };
            let mut c = rig.connect("e", options);
            let fill = |c: &Client, at: usize, bytes: &[u8]| c.arena.write(at, bytes);
            let bytes: Vec<u8> = (0..512).map(|i| (i * 7 % 253) as u8).collect();
            let ones = |c: &Client, at: u64, n: u64, writable| {
                (0..n)
                    .map(|i| DriverSeg { addr: c.arena.guest() + at + i, len: 1, writable })
                    .collect::<Vec<_>>()
            };
            // 16 + 512 + 1 buffers; then read back into as many.
            fill(&c, 0, &[&header(request::OUT, 9)[..], &bytes].concat());
            let segs = [ones(&c, 0, 528, false), ones(&c, 4000, 1, true)].concat();
            let cookie = c.disk.submit(0, &segs, indirect).unwrap();
            assert_eq!(c.disk.wait_for(0, Some(cookie)).unwrap().len, 1);
            fill(&c, 0, &header(request::IN, 9));
            let segs = [ones(&c, 0, 16, false), ones(&c, 5000, 513, true)].concat();
            let cookie = c.disk.submit(0, &segs, indirect).unwrap();
            assert_eq!(c.disk.wait_for(0, Some(cookie)).unwrap().len, 513);
            assert_eq!(c.arena.part(5000, 512).to_vec(), bytes);
            // As many buffers as the ring has: 1022 of data.
            let big: Vec<u8> = (0..1022 * 512).map(|i| (i / 512 % 251) as u8).collect();
            let mut segs = vec![DriverSeg { addr: c.arena.guest(), len: 16, writable: false }];
            let data = |writable| {
                let base = c.arena.guest() + (1 << 20);
                (0..1022).rev().map(move |i| DriverSeg { addr: base + i * 512, len: 512, writable })
            };
            segs.extend(data(false));
            segs.push(DriverSeg { addr: c.arena.guest() + 64, len: 1, writable: true });
            fill(&c, 0, &header(request::OUT, 0));
            fill(&c, 1 << 20, &big);
            let cookie = c.disk.submit(0, &segs, indirect).unwrap();
            c.disk.wait_for(0, Some(cookie)).unwrap();
            assert_eq!(c.arena.part(64, 1).to_vec(), [status::OK]);
            assert_eq!(c.read(5, 512), big[1016 * 512..][..512]);
        }
    }
}

/// Drivers of Windows go by no `seg_max`: requests of many pages come as chains that are longer,
/// also longer than the ring where they are indirect. They want limits of discards that are not
/// zero. (A disk has no setting for discards.)
#[test]
fn chains_longer_than_seg_max_on_raw_disks() {
    chains_longer_than_seg_max(&[Backing::Ram, Backing::Direct, Backing::Buffered, Backing::Tmpfs]);
}

#[test]
fn chains_longer_than_seg_max_on_thin_disks() {
    chains_longer_than_seg_max(&[Backing::Qcow2]);
}

/// A disk that keeps nothing: the answers alone are looked at.
#[test]
fn chains_longer_than_seg_max_on_null_disks() {
    let rig = Rig::new();
    let null =
        DiskSpec { name: "d".into(), format: Some(Format::Null), size: Some(4 * MIB), ..DiskSpec::default() };
    rig.daemon.disk_add(null).unwrap();
    long_chains(&rig, false, "null");
}

fn chains_longer_than_seg_max(backings: &[Backing]) {
    for &backing in backings {
        let rig = Rig::new();
        rig.disk("d", backing, 4 * MIB, |_| {});
        long_chains(&rig, true, &format!("{backing:?}"));
    }
}

/// `keeps`: the disk `d` has what was written to it.
fn long_chains(rig: &Rig, keeps: bool, what: &str) {
    const PIECE: usize = 512;
    rig.export("e", "d", 1, |_| {});
    for packed in layouts().iter().map(|options| options.packed) {
        for (queue_size, indirect) in [(128, true), (256, true), (1024, false)] {
            let options = Options { packed, indirect, queue_size, indirect_cap: 1024, ..super::rig::small() };
            let mut c = rig.connect("e", options);
            let config = *c.disk.config();
            assert!(config.seg_max > 0 && config.max_discard_sectors > 0 && config.max_discard_seg > 0);
            assert!(config.discard_sector_alignment > 0);
            assert!(config.max_write_zeroes_sectors > 0 && config.max_write_zeroes_seg > 0);
            for pieces in [130, 257, 600, 1000] {
                let context = format!("{what}, packed {packed}, ring {queue_size}, {pieces} pieces");
                let bytes: Vec<u8> = (0..pieces * PIECE).map(|i| (i / 7 + pieces) as u8).collect();
                let status = long_chain(&mut c, request::OUT, &bytes, pieces, indirect);
                assert_eq!(status, status::OK, "{context}");
                c.arena.part(1 << 20, pieces * 1024 + 256).fill(0xa5);
                let status = long_chain(&mut c, request::IN, &[], pieces, indirect);
                assert_eq!(status, status::OK, "{context}");
                assert!(!keeps || read_pieces(&c, pieces) == bytes, "{context}: not what was written");
                let out = range(3, 8, 0);
                for kind in [request::DISCARD, request::WRITE_ZEROES] {
                    assert_eq!(c.status(kind, 0, &out, 0), status::OK, "{context}");
                }
                if keeps {
                    assert_eq!(c.read(3, 8 * 512), [0; 8 * 512], "{context}");
                    assert_eq!(c.read(11, 512), bytes[11 * 512..][..512], "{context}");
                }
            }
        }
    }
}

/// Where piece `n` of a long chain lies: with gaps, and not in the order of the disk.
fn piece_at(n: usize, pieces: usize) -> usize {
    (1 << 20) + (pieces - 1 - n) * 1024 + (n % 2) * 256
}

/// A read or write at the disk's start of so many pieces of 512 bytes, a descriptor each; its
/// status.
fn long_chain(c: &mut Client, kind: u32, bytes: &[u8], pieces: usize, indirect: bool) -> u8 {
    let at = |offset: usize, len: u32, writable| DriverSeg {
        addr: c.arena.guest() + offset as u64,
        len,
        writable,
    };
    c.arena.write(0, &header(kind, 0));
    for (n, piece) in bytes.chunks(512).enumerate() {
        c.arena.write(piece_at(n, pieces), piece);
    }
    let mut segs = vec![at(0, 16, false)];
    segs.extend((0..pieces).map(|n| at(piece_at(n, pieces), 512, kind == request::IN)));
    segs.push(at(64, 1, true));
    c.arena.write(64, &[status::UNTOUCHED]);
    let cookie = c.disk.submit(0, &segs, indirect).unwrap();
    c.disk.wait_for(0, Some(cookie)).unwrap();
    c.arena.part(64, 1).to_vec()[0]
}

/// What a read by [`long_chain`] left.
fn read_pieces(c: &Client, pieces: usize) -> Vec<u8> {
    (0..pieces).flat_map(|n| c.arena.part(piece_at(n, pieces), 512).to_vec()).collect()
}
