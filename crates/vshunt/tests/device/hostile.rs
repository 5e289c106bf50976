//! A guest, or its VMM, that means harm or is broken: it gets an error or a queue that stands,
//! nobody else anything.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use vshunt_guest::driver::{
    Area, Code, Options, Payload, RegionSpec, RingParts, RingSetup, fresh_base, packed_base, request, status,
};

use super::rig::{
    Backing, LOAD_BYTES, Load, MIB, Machine, PATIENCE, Rig, Rng, attach, by_kernel, header, layouts,
    new_eventfd, signalled, small, wait_for,
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor as the guest writes it; `next` is the buffer id in a packed ring.
#[derive(Clone, Copy)]
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Desc {
    Desc { addr, len, flags, next }
}

/// A ring written by hand.
struct Raw {
    parts: RingParts,
    /// Split: free running. Packed: slot.
    avail: u16,
    wrap: bool,
    used: u16,
    used_wrap: bool,
    arena: Area,
}

impl Raw {
    fn new(machine: &mut Machine, q: u16) -> Self {
        // The driver's own side of it goes: this ring is ours.
        drop(machine.take_queue(q));
        let arena = machine.memory.alloc(256 << 10, 4096).unwrap();
        let parts = machine.parts[usize::from(q)].clone();
        Self { parts, avail: 0, wrap: true, used: 0, used_wrap: true, arena }
    }

    fn at(&self, offset: u64) -> u64 {
        self.arena.guest() + offset
    }

    /// Writes a descriptor to the split table.
    fn table(&self, index: u16, d: Desc) {
        let bytes =
            [&d.addr.to_le_bytes()[..], &d.len.to_le_bytes(), &d.flags.to_le_bytes(), &d.next.to_le_bytes()];
        self.parts.desc.write(usize::from(index) * 16, &bytes.concat());
    }

    /// Offers a head on the split ring.
    fn head(&mut self, head: u16) {
        let slot = usize::from(self.avail % self.parts.size);
        self.parts.driver.write(4 + 2 * slot, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
        self.parts.driver.store_u16(2, self.avail);
    }

    /// Offers a chain, at descriptor 0 of a split ring or the next slots of a packed one.
    fn chain(&mut self, chain: &[Desc]) {
        if !self.parts.packed {
            for (i, d) in chain.iter().enumerate() {
                self.table(i as u16, *d);
            }
            self.head(0);
            return;
        }
        let (first, first_wrap) = (self.avail, self.wrap);
        for (i, d) in chain.iter().enumerate() {
            let wrap_bit = if self.wrap { 1 << 7 } else { 1 << 15 };
            // The first one's flags come last: they give the chain away.
            let flags = if i == 0 { 0 } else { d.flags | wrap_bit };
            let bytes = [&d.addr.to_le_bytes()[..], &d.len.to_le_bytes(), &d.next.to_le_bytes()].concat();
            let at = usize::from(self.avail) * 16;
            self.parts.desc.write(at, &bytes);
            if i > 0 {
                self.parts.desc.store_u16(at + 14, flags);
            }
            self.avail += 1;
            if self.avail == self.parts.size {
                (self.avail, self.wrap) = (0, !self.wrap);
            }
        }
        let wrap_bit = if first_wrap { 1 << 7 } else { 1 << 15 };
        self.parts.desc.store_u16(usize::from(first) * 16 + 14, chain[0].flags | wrap_bit);
    }

    /// Waits for the next used element, of a chain of `descs`; its length.
    fn used(&mut self, descs: u16) -> u32 {
        self.parts.kick();
        let mut word = [0; 4];
        if self.parts.packed {
            let at = usize::from(self.used) * 16;
            let want = if self.used_wrap { 1 << 7 | 1 << 15 } else { 0 };
            wait_for("a used descriptor", || {
                (self.parts.desc.load_u16(at + 14) & (1 << 7 | 1 << 15) == want).then_some(())
            });
            self.parts.desc.read(at + 8, &mut word);
            self.used += descs;
            if self.used >= self.parts.size {
                (self.used, self.used_wrap) = (self.used - self.parts.size, !self.used_wrap);
            }
        } else {
            wait_for("a used element", || (self.parts.device.load_u16(2) != self.used).then_some(()));
            let slot = usize::from(self.used % self.parts.size);
            self.parts.device.read(4 + 8 * slot + 4, &mut word);
            self.used = self.used.wrapping_add(1);
        }
        u32::from_le_bytes(word)
    }

    /// A sane read of sector 0, with the header and status where nobody else has theirs.
    fn sane(&mut self) {
        self.arena.write(0, &header(request::IN, 0));
        self.arena.write(64, &[status::UNTOUCHED]);
        let chain = [
            desc(self.at(0), 16, NEXT, 1),
            desc(self.at(4096), 512, NEXT | WRITE, 2),
            desc(self.at(64), 1, WRITE, 7),
        ];
        self.chain(&chain);
        assert_eq!(self.used(3), 513);
        assert_eq!(self.arena.part(64, 1).to_vec(), [status::OK]);
    }
}

/// An export `e` whose queue 0 is under attack, and verified load on its queue 1 and on another
/// export.
struct Field {
    // Dropped in this order: the load ends before the server.
    load: Vec<Load>,
    machine: Machine,
    _other: Machine,
    err: OwnedFd,
    rig: Rig,
}

impl Field {
    fn new(options: &Options) -> Self {
        let rig = Rig::ram(2 * LOAD_BYTES, 2);
        rig.disk("other", Backing::Ram, LOAD_BYTES, |_| {});
        rig.export("other", "other", 1, |_| {});
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options.clone() });
        let mut other = Machine::connect(&rig.socket("other"), small());
        let load = vec![machine.load(1), other.load(0)];
        let err = new_eventfd();
        machine.session.wire().tell(Code::SetVringErr, &Payload::new().u64(0), &[err.as_fd()]).unwrap();
        Self { load, machine, _other: other, err, rig }
    }

    fn others_go_on(&self) {
        self.load.iter().for_each(|l| l.progress(20));
    }

    /// Queue 0 was broken: it says so everywhere, stands, and works again after a restart.
    fn broken_and_mended(&mut self, raw: &mut Raw, reason: &str) {
        raw.parts.kick();
        let said = self.rig.broken("e", 0);
        assert!(said.contains(reason), "{said:?} is to say {reason:?}");
        assert!(signalled(&self.err, PATIENCE));
        assert_eq!(self.rig.queue("e", 0).state, "broken");
        self.others_go_on();
        let base = self.machine.session.stop_ring(0).unwrap();
        assert_eq!(self.rig.queue("e", 0).state, "stopped");
        // Its driver cleans the ring up and continues where the device stopped.
        if raw.parts.packed {
            raw.parts.desc.fill(0);
            (raw.avail, raw.wrap) = (base as u16 & 0x7fff, base & 1 << 15 != 0);
            (raw.used, raw.used_wrap) = (raw.avail, raw.wrap);
            assert_eq!(base, packed_base(raw.avail, raw.wrap));
            // Descriptors of the lap before, so that none looks available or used.
            let stale = if raw.wrap { 0u16 } else { 1 << 7 | 1 << 15 };
            for slot in 0..raw.parts.size {
                let flags = if slot < raw.avail { stale ^ (1 << 7 | 1 << 15) } else { stale };
                raw.parts.desc.store_u16(usize::from(slot) * 16 + 14, flags);
            }
        } else {
            raw.avail = base as u16;
            raw.used = raw.parts.device.load_u16(2);
            raw.parts.driver.store_u16(2, raw.avail);
        }
        let ring = RingSetup { parts: &raw.parts.clone(), base };
        self.machine.session.set_ring(&ring, false).unwrap();
        raw.sane();
        assert_eq!(self.rig.queue("e", 0).state, "running");
        self.others_go_on();
    }
}

#[test]
fn an_available_index_that_jumps_breaks_the_queue() {
    for jump in [65u16, 1000, 0x8000, 0xffff] {
        let mut field = Field::new(&small());
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.sane();
        raw.parts.driver.store_u16(2, raw.avail.wrapping_add(jump));
        field.broken_and_mended(&mut raw, "available index");
    }
}

#[test]
fn a_head_outside_of_the_table_breaks_the_queue() {
    for head in [64u16, 0x7fff, u16::MAX] {
        let mut field = Field::new(&small());
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.sane();
        raw.head(head);
        field.broken_and_mended(&mut raw, "head");
    }
}

#[test]
fn a_packed_chain_without_end_breaks_the_queue() {
    let options = Options { packed: true, queue_size: 16, ..small() };
    let mut field = Field::new(&options);
    let mut raw = Raw::new(&mut field.machine, 0);
    raw.sane();
    let endless = [desc(raw.at(0), 1, NEXT, 0); 16];
    raw.chain(&endless);
    field.broken_and_mended(&mut raw, "does not end");
}

#[test]
fn a_broken_queue_works_again_after_a_device_reset() {
    for options in layouts() {
        let mut field = Field::new(&options);
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.sane();
        if options.packed {
            raw.chain(&[desc(0, 1, NEXT, 0); 100]);
        } else {
            raw.head(u16::MAX);
        }
        raw.parts.kick();
        field.rig.broken("e", 0);
        field.load.remove(0).end();
        field.machine.session.reset_device().unwrap();
        field.machine.renew();
        let features = field.machine.session.features();
        field.machine.session.set_features(features).unwrap();
        for q in 0..2 {
            let parts = field.machine.parts[q].clone();
            let ring = RingSetup { parts: &parts, base: fresh_base(options.packed) };
            field.machine.session.set_ring(&ring, false).unwrap();
            field.machine.session.enable(q as u16, true).unwrap();
        }
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.sane();
        field.load.push(field.machine.load(1));
        field.others_go_on();
    }
}

/// Requests that are wrong by themselves: each is answered, and the queue continues.
#[test]
fn bad_chains_are_answered_and_the_queue_continues() {
    for options in layouts() {
        let mut field = Field::new(&options);
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.arena.write(0, &header(request::IN, 0));
        let (head, stat) = (desc(raw.at(0), 16, NEXT, 1), desc(raw.at(64), 1, WRITE, 9));
        let region = &field.machine.memory.regions()[0];
        let (start, end) = (region.guest_addr, region.guest_addr + region.size);
        let table = raw.at(8192);
        let data = |addr: u64, len: u32, next| desc(addr, len, NEXT | WRITE, next);
        let mut cases: Vec<(&str, Vec<Desc>)> = Vec::new();
        for (addr, len) in [
            (0u64, 512u32),
            (start - 1, 512),
            (start - 512, 512),
            (end - 511, 512),
            (end, 512),
            (u64::MAX, 512),
            (u64::MAX - 511, 512),
            (u64::MAX - 256, 512),
            (1 << 63, 512),
            (start, u32::MAX),
            (u64::MAX - u64::from(u32::MAX), u32::MAX),
        ] {
            cases.push(("data outside of memory", vec![head, data(addr, len, 2), stat]));
            cases.push((
                "header outside of memory",
                vec![desc(addr, len, NEXT, 1), data(raw.at(4096), 512, 2), stat],
            ));
        }
        cases.push((
            "readable after writable",
            vec![head, data(raw.at(4096), 512, 2), desc(raw.at(0), 16, NEXT, 3), stat],
        ));
        for (what, addr, len) in [
            ("an indirect table of no bytes", table, 0),
            ("of a length that is no multiple", table, 17),
            ("of more than can be", table, 16 * 1025),
            ("of 4 GiB", table, 0xffff_fff0),
            ("outside of memory", end, 32),
            ("across the end of memory", end - 16, 32),
            ("at the end of addresses", u64::MAX - 15, 32),
        ] {
            cases.push((what, vec![desc(addr, len, INDIRECT, 9)]));
            cases.push((what, vec![head, desc(addr, len, INDIRECT, 9)]));
        }
        // An indirect descriptor that continues; one inside a table; flags that contradict each
        // other.
        cases.push(("indirect and next", vec![desc(table, 32, INDIRECT | NEXT, 1), stat]));
        let inner = [desc(raw.at(0), 16, NEXT, 1), desc(table, 32, INDIRECT, 0)];
        let bytes: Vec<u8> = inner
            .iter()
            .flat_map(|d| {
                let (a, b) = if options.packed { (d.next, d.flags) } else { (d.flags, d.next) };
                [&d.addr.to_le_bytes()[..], &d.len.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()].concat()
            })
            .collect();
        raw.arena.write(8192, &bytes);
        cases.push(("indirect inside indirect", vec![desc(table, 32, INDIRECT, 9)]));
        if !options.packed {
            cases.push(("a loop of one", vec![desc(raw.at(0), 16, NEXT, 0)]));
            cases.push(("a loop", vec![head, desc(raw.at(4096), 512, NEXT | WRITE, 1)]));
            cases.push(("next outside of the table", vec![desc(raw.at(0), 16, NEXT, 64)]));
            cases.push(("next far outside", vec![desc(raw.at(0), 16, NEXT, u16::MAX)]));
        }
        for (what, chain) in cases {
            raw.arena.write(64, &[status::UNTOUCHED]);
            raw.arena.part(4096, 512).fill(0xa5);
            raw.chain(&chain);
            let len = raw.used(chain.len() as u16);
            let answer = raw.arena.part(64, 1).to_vec()[0];
            assert!(
                len <= 1 && (answer == status::IOERR || answer == status::UNTOUCHED),
                "{what}: {len}, {answer}"
            );
            // Where the end of the chain is unknown, the status goes to the last byte that was
            // found.
            assert!(raw.arena.part(4096, 511).to_vec() == [0xa5; 511], "{what}");
            raw.sane();
        }
        assert_eq!(field.rig.queue("e", 0).state, "running");
        field.others_go_on();
        assert!(!signalled(&field.err, Duration::ZERO));
    }
}

#[test]
fn a_buffer_across_adjoining_regions_is_legal() {
    let rig = Rig::ram(MIB, 1);
    for options in layouts() {
        let mut specs = vec![RegionSpec { guest_addr: 0x4000_0000, size: 8 * MIB }];
        specs.extend((0..8).map(|i| RegionSpec { guest_addr: 0x8000_0000 + i * 4096, size: 4096 }));
        let mut client = rig.connect("e", Options { regions: specs, ..options });
        let bytes: Vec<u8> = (0..32 << 10).map(|i| (i / 100) as u8).collect();
        client.write(0, &bytes);
        client.arena.write(0, &header(request::IN, 1));
        let base = client.arena.guest();
        let seg = |addr, len, writable| vshunt_guest::driver::DriverSeg { addr, len, writable };
        let data = seg(0x8000_0000 + 100, 7 * 4096, true);
        let cookie =
            client.disk.submit(0, &[seg(base, 16, false), data, seg(base + 64, 1, true)], false).unwrap();
        assert_eq!(client.disk.wait_for(0, Some(cookie)).unwrap().len, 7 * 4096 + 1);
        for (i, want) in bytes[512..][..7 * 4096].iter().enumerate() {
            let area = client.disk.memory().area(0x8000_0000 + 100 + i as u64, 1).unwrap();
            assert_eq!(area.to_vec(), [*want], "byte {i}");
        }
        // One byte more than there is: refused as a whole.
        let data = seg(0x8000_0000 + 512, 8 * 4096 - 511, true);
        let cookie =
            client.disk.submit(0, &[seg(base, 16, false), data, seg(base + 64, 1, true)], false).unwrap();
        client.disk.wait_for(0, Some(cookie)).unwrap();
        assert_eq!(client.arena.part(64, 1).to_vec(), [status::IOERR]);
    }
}

#[test]
fn random_descriptors_harm_nobody() {
    let mut rng = Rng::new();
    for options in layouts() {
        let mut field = Field::new(&Options { buffer_bytes: 32 << 20, ..options.clone() });
        for _ in 0..40 {
            let raw = Raw::new(&mut field.machine, 0);
            let areas = [raw.parts.desc.clone(), raw.parts.driver.clone(), raw.arena.part(0, 16 << 10)];
            for _ in 0..50 {
                let area = &areas[rng.below(3) as usize];
                let at = rng.below(area.len() as u64 - 3) as usize & !1;
                let bytes = match rng.below(4) {
                    0 => rng.bytes(2),
                    1 => (rng.below(8) as u16).to_le_bytes().to_vec(),
                    2 => vec![0x80 * rng.below(2) as u8, 0x80 * rng.below(2) as u8],
                    _ => raw.at(rng.below(8192)).to_le_bytes()[..4].to_vec(),
                };
                area.write(at, &bytes[..bytes.len().min(area.len() - at)]);
                if rng.chance(30) {
                    raw.parts.kick();
                }
            }
            field.others_go_on();
            let base = field.machine.session.stop_ring(0).unwrap();
            assert!(options.packed || base < 1 << 16);
            field.machine.renew_one(0);
            let parts = field.machine.parts[0].clone();
            let ring = RingSetup { parts: &parts, base: fresh_base(options.packed) };
            field.machine.session.set_ring(&ring, false).unwrap();
            field.machine.session.enable(0, true).unwrap();
        }
        field.others_go_on();
    }
}

#[test]
fn the_same_head_twice() {
    // Both are served: which is the guest's affair. No slot is lost, nothing is done twice over.
    let mut field = Field::new(&small());
    let mut raw = Raw::new(&mut field.machine, 0);
    raw.sane();
    for _ in 0..100 {
        for _ in 0..64 {
            raw.head(0);
        }
        for _ in 0..64 {
            raw.used(1);
        }
    }
    raw.sane();
    assert_eq!(field.rig.queue("e", 0).in_flight, 0);
    field.others_go_on();
}

#[test]
fn ring_addresses_outside_of_memory() {
    for options in layouts() {
        let mut field = Field::new(&options);
        let mut raw = Raw::new(&mut field.machine, 0);
        let base = field.machine.session.stop_ring(0).unwrap();
        let good = raw.parts.clone();
        let user = |area: &Area| area.host() as u64;
        let region = &field.machine.memory.regions()[0];
        let (start, end) = (region.user_addr(), region.user_addr() + region.size);
        for bad in [0, start - 4096, end, end - 16, !15, u64::MAX - 4095, good.desc.guest()] {
            for which in 0..3 {
                let mut at = [user(&good.desc), user(&good.device), user(&good.driver)];
                // A packed ring's event structures have just four bytes.
                at[which] = if bad == end - 16 && options.packed && which > 0 { end } else { bad };
                let payload =
                    Payload::new().u32(0).u32(0).u64(at[0]).u64(at[1]).u64(at[2]).u64(good.device.guest());
                let wire = field.machine.session.wire();
                let index = Payload::new().u64(0);
                let told = wire
                    .tell(Code::SetVringAddr, &payload, &[])
                    .and_then(|()| wire.tell(Code::SetVringKick, &index, &[good.kick.as_fd()]));
                let e = told.unwrap_err();
                assert!(e.to_string().contains("refused"), "{bad:#x}: {e}");
                assert!(field.rig.broken("e", 0).contains("outside of the guest's memory"));
                assert!(signalled(&field.err, PATIENCE));
                field.machine.session.stop_ring(0).unwrap();
            }
        }
        field.others_go_on();
        field.machine.session.set_ring(&RingSetup { parts: &good, base }, false).unwrap();
        raw.sane();
    }
}

#[test]
fn misaligned_rings_and_bases_end_the_attempt_only() {
    for options in layouts() {
        let field = Field::new(&options);
        for (desc, device, driver) in [(8u64, 0u64, 0u64), (0, 2, 0), (0, 0, 1)] {
            let mut machine = Machine::connect(&field.rig.socket("other2"), small_other(&field.rig));
            machine.session.stop_ring(0).unwrap();
            let at = |area: &Area, off: u64| area.host() as u64 + off;
            let p = machine.parts[0].clone();
            let payload = Payload::new().u32(0).u32(0).u64(at(&p.desc, desc)).u64(at(&p.device, device));
            let payload = payload.u64(at(&p.driver, driver)).u64(0);
            machine.session.wire().tell(Code::SetVringAddr, &payload, &[]).unwrap_err();
            field.rig.daemon.export_remove("other2", true).unwrap();
        }
        field.others_go_on();
    }
    // A packed ring's position lies in the ring.
    let Some(packed) = layouts().into_iter().find(|options| options.packed) else { return };
    let mut field = Field::new(&packed);
    let mut raw = Raw::new(&mut field.machine, 0);
    let good = field.machine.session.stop_ring(0).unwrap();
    for base in [100u32, 0x7fff, 0xffff_ffff, 100 << 16 | 0x8000] {
        let ring = RingSetup { parts: &raw.parts.clone(), base };
        assert!(field.machine.session.set_ring(&ring, false).is_err(), "{base:#x}");
        field.machine.session.stop_ring(0).unwrap();
    }
    field.machine.session.set_ring(&RingSetup { parts: &raw.parts.clone(), base: good }, false).unwrap();
    raw.sane();
    field.others_go_on();
}

/// One more export, for what ends its connection.
fn small_other(rig: &Rig) -> Options {
    rig.export("other2", "other", 1, |spec| spec.readonly = true);
    small()
}

#[test]
fn ring_sizes_that_no_ring_has() {
    for options in layouts() {
        let mut field = Field::new(&options);
        let mut raw = Raw::new(&mut field.machine, 0);
        let base = field.machine.session.stop_ring(0).unwrap();
        let mut bad = vec![0u32, 1025, 2048, 32768, 65536, 1 << 16 | 64, u32::MAX];
        if !options.packed {
            bad.extend([3, 100, 1023]);
        }
        for size in bad {
            let payload = Payload::new().u32(0).u32(size);
            let e = field.machine.session.wire().tell(Code::SetVringNum, &payload, &[]).unwrap_err();
            assert!(e.to_string().contains("refused"), "{size}: {e}");
        }
        field.machine.session.set_ring(&RingSetup { parts: &raw.parts.clone(), base }, false).unwrap();
        raw.sane();
        field.others_go_on();
    }
}

#[test]
fn a_storm_of_kicks_starves_nobody() {
    let field = Field::new(&small());
    let kick = field.machine.parts[0].kick.clone();
    let before = field.rig.queue("e", 0).requests;
    let end = Instant::now() + Duration::from_millis(300);
    field.load.iter().for_each(Load::forget_longest);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while Instant::now() < end {
                    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
                }
            });
        }
        field.others_go_on();
    });
    assert!(field.load.iter().all(|l| l.longest() < PATIENCE / 3));
    assert_eq!(field.rig.queue("e", 0).requests, before);
    // A counter that is full is no more than a kick.
    let full = (u64::MAX - 1).to_ne_bytes();
    rustix::io::read(&kick, &mut [0; 8]).unwrap();
    rustix::io::write(&kick, &full).unwrap();
    field.others_go_on();
}

/// A write to a full eventfd blocks: the worker would stand, and with it all its queues.
#[test]
fn a_full_call_descriptor_blocks_nobody() {
    for options in layouts() {
        let mut field = Field::new(&options);
        let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for code in [Code::SetVringCall, Code::SetVringErr] {
            field.machine.session.wire().tell(code, &Payload::new().u64(0), &[full.as_fd()]).unwrap();
        }
        let mut raw = Raw::new(&mut field.machine, 0);
        raw.sane();
        field.others_go_on();
        let base = field.machine.session.stop_ring(0).unwrap();
        field.machine.session.wire().tell(Code::SetVringNum, &Payload::new().u32(0).u32(64), &[]).unwrap();
        assert!(base > 0);
        field.others_go_on();
    }
}

/// Its flag is cleared, its counter is full, and the ring breaks: a write to it waits for ever.
#[test]
fn a_full_error_descriptor_blocks_nobody() {
    let mut field = Field::new(&small());
    let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let index = Payload::new().u64(0);
    field.machine.session.wire().tell(Code::SetVringErr, &index, &[full.as_fd()]).unwrap();
    field.err = full;
    let mut raw = Raw::new(&mut field.machine, 0);
    raw.sane();
    raw.head(64);
    // The session answers, and the ring works again.
    field.broken_and_mended(&mut raw, "head");
}

/// A worker that waits for, or writes to, what is no eventfd might spin or block.
#[test]
fn descriptors_that_are_no_eventfds_are_refused() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let (closed, _) = rustix::pipe::pipe().unwrap();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let datagram = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let mut field = Field::new(&small());
    for fd in [file.as_fd(), null.as_fd(), closed.as_fd(), datagram.as_fd(), socket.as_fd()] {
        for code in [Code::SetVringKick, Code::SetVringCall, Code::SetVringErr] {
            // A stream socket to notify by is User-mode Linux's way; see
            // tests/bad-input/test_memory.py.
            if code == Code::SetVringCall && fd.as_raw_fd() == socket.as_raw_fd() && !by_kernel() {
                continue;
            }
            let e = field.machine.session.wire().tell(code, &Payload::new().u64(0), &[fd]).unwrap_err();
            assert!(e.to_string().contains("refused"), "{e}");
            field.others_go_on();
        }
    }
    Raw::new(&mut field.machine, 0).sane();
}

/// Rings full of the largest requests there are do not keep a neighbour on the same worker waiting
/// for them: it gets some requests done before half of them is. The test's thread may be late
/// to see that, so that it tries again.
#[test]
fn huge_chains_leave_room_for_neighbours() {
    /// Huge requests of each of the two queues.
    const HUGE: usize = 48;
    for backing in [Backing::Ram, Backing::Tmpfs] {
        let rig = Rig::new();
        rig.disk("big", backing, 128 * MIB, |_| {});
        rig.disk("d", Backing::Ram, LOAD_BYTES, |_| {});
        rig.export("big", "big", 2, |_| {});
        rig.export("e", "d", 1, |_| {});
        let mut machine = Machine::connect(&rig.socket("e"), small());
        let options =
            Options { queues: 2, queue_size: 128, indirect_cap: 1024, buffer_bytes: 72 * MIB, ..small() };
        let mut big = Machine::connect(&rig.socket("big"), options);
        let area = big.memory.alloc(64 << 20, 4096).unwrap();
        let head = big.memory.alloc(4096, 4096).unwrap();
        head.write(0, &header(request::IN, 0));
        let seg = |addr, len, writable| vshunt_guest::driver::DriverSeg { addr, len, writable };
        // 64 MiB in 1022 pieces.
        let piece = 64 * 1024u32;
        let mut chain = vec![seg(head.guest(), 16, false)];
        chain.extend((0..1022u64).map(|i| seg(area.guest() + i * u64::from(piece), piece, true)));
        chain.push(seg(head.guest() + 64, 1, true));
        let load = machine.load(0);
        load.progress(50);
        let start = Instant::now();
        let mut queues = [big.take_queue(0), big.take_queue(1)];
        loop {
            for queue in &mut queues {
                for _ in 0..HUGE {
                    let slot = queue.take_slot().unwrap();
                    assert!(queue.stage_chain(slot, &chain, true));
                }
                queue.publish();
            }
            load.progress(20);
            let mut done = [0; 2];
            for (queue, done) in queues.iter_mut().zip(&mut done) {
                while let Some(over) = queue.poll().unwrap() {
                    queue.give_slot(over.cookie);
                    *done += 1;
                }
            }
            let before: usize = done.iter().sum();
            for (queue, done) in queues.iter_mut().zip(done) {
                // Each for itself: all of them take minutes where all is emulated.
                for _ in done..HUGE {
                    let over = wait_for("a huge request", || queue.poll().unwrap());
                    queue.give_slot(over.cookie);
                }
            }
            println!("{backing:?}: {before} of {} huge requests were done", 2 * HUGE);
            if before < HUGE {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{backing:?}: a neighbour waits for huge requests");
        }
    }
}

/// A driver of `queues` queues whose chains each ask for 64 MiB of the disk, in one buffer.
fn asking_for_much(rig: &Rig, export: &str, queues: u16) -> (Machine, Vec<vshunt_guest::driver::DriverSeg>) {
    let options = Options { queues, buffer_bytes: 72 * MIB, ..small() };
    let machine = Machine::connect(&rig.socket(export), options);
    let area = machine.memory.alloc(64 << 20, 4096).unwrap();
    let head = machine.memory.alloc(4096, 4096).unwrap();
    head.write(0, &header(request::IN, 0));
    let seg = |addr, len, writable| vshunt_guest::driver::DriverSeg { addr, len, writable };
    let chain = vec![
        seg(head.guest(), 16, false),
        seg(area.guest(), 64 << 20, true),
        seg(head.guest() + 64, 1, true),
    ];
    (machine, chain)
}

/// While one queue of a worker copies long requests, its other queues are served between the parts.
///
/// Three short requests, one after the other, take three iterations of the worker. If an iteration
/// ends after all long requests, they are not first. The test's thread may be late
/// to see them, so that it tries again.
#[test]
fn a_long_request_is_copied_a_part_in_each_iteration() {
    if by_kernel() {
        return;
    }
    const QUEUES: u16 = 4;
    for backing in [Backing::Ram, Backing::Tmpfs] {
        let rig = Rig::new();
        rig.disk("big", backing, 64 * MIB, |_| {});
        rig.disk("d", Backing::Ram, MIB, |_| {});
        rig.export("big", "big", QUEUES, |_| {});
        rig.export("e", "d", 1, |_| {});
        let mut client = rig.connect("e", small());
        let (mut machine, chain) = asking_for_much(&rig, "big", QUEUES);
        let mut queues: Vec<_> = (0..QUEUES).map(|q| machine.take_queue(q)).collect();
        let start = Instant::now();
        loop {
            for queue in &mut queues {
                let slot = queue.take_slot().unwrap();
                assert!(queue.stage_chain(slot, &chain, queue.indirect()));
            }
            // All are there before the worker is told of the first one.
            for queue in &mut queues {
                queue.publish();
            }
            (0..3).for_each(|_| assert_eq!(client.read(0, 4096).len(), 4096));
            let over: Vec<_> = queues.iter_mut().map(|queue| queue.poll().unwrap()).collect();
            let in_time = over.iter().all(Option::is_none);
            for (queue, over) in queues.iter_mut().zip(over) {
                let done = over.unwrap_or_else(|| wait_for("a long request", || queue.poll().unwrap()));
                queue.give_slot(done.cookie);
            }
            if in_time {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{backing:?}: short requests wait for long ones");
        }
    }
}

/// A queue that moves, and a ring that stops, wait for the long request that is under way, and for
/// those behind it.
#[test]
fn queues_move_and_stop_with_long_requests_under_way() {
    if by_kernel() {
        return;
    }
    for backing in [Backing::Ram, Backing::Tmpfs] {
        let rig = Rig::new();
        rig.disk("big", backing, 64 * MIB, |_| {});
        rig.export("big", "big", 1, |_| {});
        let other = rig.daemon.worker_new(vshunt_types::spec::WorkerSpec::default()).unwrap();
        let (mut machine, chain) = asking_for_much(&rig, "big", 1);
        let mut queue = machine.take_queue(0);
        let ask = |queue: &mut vshunt_guest::driver::Queue| {
            for _ in 0..3 {
                let slot = queue.take_slot().unwrap();
                assert!(queue.stage_chain(slot, &chain, queue.indirect()));
            }
            queue.publish();
        };
        for round in 0..10 {
            ask(&mut queue);
            let worker = if round % 2 == 0 { other } else { 0 };
            attach(&rig.daemon, "big", 0, worker);
            for _ in 0..3 {
                let done = wait_for("a long request", || queue.poll().unwrap());
                assert_eq!(done.len, (64 << 20) + 1);
            }
        }
        ask(&mut queue);
        machine.session.stop_ring(0).unwrap();
        // What was taken is over, and what was not is still in the ring.
        let mut over = 0;
        while queue.poll().unwrap().is_some() {
            over += 1;
        }
        assert!(over <= 3 && rig.queue("big", 0).in_flight == 0, "{over}");
    }
}
