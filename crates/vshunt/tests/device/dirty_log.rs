//! The dirty log of a migration: all that the device writes is marked (vhost-user, "Migration").

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vshunt_guest::driver::{
    Area, Code, DriverSeg, Memory, Options, PAGE, Payload, RegionSpec, RingSetup, Session, VERSION, feature,
    request,
};

use super::rig::{LOAD_BYTES, MIB, Machine, Rig, header, layouts, shapes, small};

/// The log as a VMM has it: it takes marks away while the device makes new ones.
struct Log {
    memory: Arc<Memory>,
    bits: Area,
}

impl Log {
    fn new(guest: &Memory) -> Self {
        let end = guest.regions().iter().map(|r| r.guest_addr + r.size).max().unwrap();
        let size = end.div_ceil(PAGE * 8).next_multiple_of(PAGE);
        let memory = Memory::new(&[RegionSpec { guest_addr: 0, size }]).unwrap();
        let bits = memory.alloc(size as usize, 8).unwrap();
        Self { memory, bits }
    }

    /// Takes all marks: addresses of pages.
    fn take(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        for word in 0..self.bits.len() / 8 {
            // SAFETY: aligned to 8 and inside of the area; the device changes it by atomic
            // operations alone.
            let bits = unsafe { AtomicU64::from_ptr(self.bits.host().add(word * 8).cast()) };
            if bits.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let bits = bits.swap(0, Ordering::AcqRel);
            pages.extend((0..64).filter(|b| bits >> b & 1 != 0).map(|b| (word as u64 * 64 + b) * PAGE));
        }
        pages
    }
}

fn start_logging(machine: &mut Machine, log: &Log) {
    let region = &log.memory.regions()[0];
    machine.session.set_log(region.size, region.fd()).unwrap();
    switch(machine, true);
}

fn switch(machine: &mut Machine, on: bool) {
    let features = machine.session.features() | if on { feature::LOG_ALL } else { 0 };
    machine.session.set_features(features).unwrap();
    for parts in &machine.parts {
        machine.session.set_ring_addr(&RingSetup { parts, base: 0 }, on).unwrap();
    }
}

/// A migration: all pages are copied once, then those marked, again and again while load runs;
/// after the rings stopped, what the device alone writes must be the same in the copy.
#[test]
fn a_copy_by_the_log_is_whole() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in shapes() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options.clone() });
        let load = [machine.load(0), machine.load(1)];
        load.iter().for_each(|l| l.progress(20));
        let log = Log::new(&machine.memory);
        start_logging(&mut machine, &log);
        // What the device writes from here on is marked; so the copy begins after the switch.
        let (guest, len) =
            (machine.memory.regions()[0].guest_addr, machine.memory.regions()[0].size as usize);
        let all = machine.memory.area(guest, len).unwrap();
        let mut copy = all.to_vec();
        let mut carry = |pages: BTreeSet<u64>| {
            for page in pages {
                let at = (page - guest) as usize;
                all.read(at, &mut copy[at..at + PAGE as usize]);
            }
        };
        for _ in 0..30 {
            load.iter().for_each(|l| l.progress(10));
            carry(log.take());
        }
        let mut used = Vec::new();
        for (q, load) in load.into_iter().enumerate() {
            used.push(load.end());
            machine.session.stop_ring(q as u16).unwrap();
        }
        carry(log.take());
        for parts in &machine.parts {
            let device = &parts.device;
            // The driver writes nothing in the device area; in a packed ring it does in the
            // descriptors.
            let at = (device.guest() - guest) as usize;
            assert!(
                copy[at..at + device.len()] == device.to_vec(),
                "{options:?}: used ring or event structure"
            );
        }
    }
}

/// Each request's pages, one by one: what was written is marked, and what was not is not.
#[test]
fn just_what_was_written_is_marked() {
    let rig = Rig::ram(MIB, 1);
    for options in shapes() {
        let mut client = rig.connect("e", options.clone());
        client.write(0, &[1; 128 << 10]);
        client.disk.start_logging().unwrap();
        let (base, _) = (client.arena.guest(), ());
        let data_page = base + (1 << 20);
        let mut pages_of = |kind, sector, out: &[u8], room| {
            client.disk.log().unwrap().clear();
            let reply = client.go(0, kind, sector, out, room);
            assert_eq!(client.disk.missed_pages(), [], "{options:?}, type {kind}");
            let marked = client.disk.log().unwrap().marked();
            let data = marked.iter().filter(|&&p| p >= data_page && p < data_page + (1 << 20)).count();
            assert!(marked.contains(&base), "the page of the status");
            (reply.status, data)
        };
        assert_eq!(pages_of(request::IN, 0, &[], 512), (0, 1));
        assert_eq!(pages_of(request::IN, 0, &[], 9 * 4096), (0, 9));
        assert_eq!(pages_of(request::OUT, 0, &[1; 4096], 0), (0, 0));
        assert_eq!(pages_of(request::FLUSH, 0, &[], 0), (0, 0));
        assert_eq!(pages_of(request::GET_ID, 0, &[], 20), (0, 1));
        assert_eq!(pages_of(request::DISCARD, 0, &super::rig::range(0, 8, 0), 0), (0, 0));
        client.disk.stop_logging().unwrap();
        client.write(0, &[1; 512]);
    }
}

#[test]
fn logging_is_switched_on_and_off_under_load() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options });
        let load = [machine.load(0), machine.load(1)];
        let logs = [Log::new(&machine.memory), Log::new(&machine.memory)];
        for round in 0..10 {
            let log = &logs[round % 2];
            start_logging(&mut machine, log);
            load.iter().for_each(|l| l.progress(20));
            assert!(!log.take().is_empty());
            switch(&mut machine, false);
            log.take();
            load.iter().for_each(|l| l.progress(20));
            assert!(log.take().is_empty(), "marked while logging was off");
        }
    }
}

#[test]
fn a_log_that_covers_too_little_is_refused() {
    let rig = Rig::ram(MIB, 1);
    for (size, offset, truncate) in
        [(4096u64, 0u64, false), (0, 0, false), (1 << 20, 1 << 62, false), (1 << 20, 0, true)]
    {
        let mut client = rig.connect("e", small());
        let log = Log::new(client.disk.memory());
        if truncate {
            let fd = log.memory.regions()[0].fd().try_clone_to_owned().unwrap();
            rustix::fs::ftruncate(fd, 4096).unwrap();
        }
        let payload = Payload::new().u64(size).u64(offset);
        let wire = client.disk.session().wire();
        wire.send(Code::SetLogBase as u32, VERSION, &payload, &[log.memory.regions()[0].fd()]).unwrap();
        // It has no answer that says no: the connection ends.
        assert_ne!(wire.recv().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}

/// The log's file, of which the device is told the first bytes only: in the rest no bit may appear.
struct Short {
    memory: Arc<Memory>,
    bits: Area,
    told: u64,
}

impl Short {
    fn new(told: u64) -> Self {
        let memory = Memory::new(&[RegionSpec { guest_addr: 0, size: told.next_multiple_of(PAGE) }]).unwrap();
        let bits = memory.alloc(memory.regions()[0].size as usize, 8).unwrap();
        Self { memory, bits, told }
    }

    fn tell(&self, session: &mut Session) {
        session.set_log(self.told, self.memory.regions()[0].fd()).unwrap();
    }

    fn assert_nothing_beyond(&self) {
        let beyond = &self.bits.to_vec()[self.told as usize..];
        assert!(beyond.iter().all(|&b| b == 0), "marked beyond the end of the log");
    }
}

/// Load for a moment, verified, and the ring is whole after it.
fn serves(rig: &Rig, machine: &mut Machine) {
    let load = machine.load(0);
    load.progress(50);
    machine.put_queue(load.end());
    assert_eq!(rig.queue("e", 0).state, "running");
}

/// Memory whose bits begin at byte 512 of a log.
fn low() -> Options {
    let size = 16 * MIB;
    Options { regions: vec![RegionSpec { guest_addr: 16 * MIB, size }], ..small() }
}

/// QEMU switches logging on before it tells of the log where a guest starts while it migrates;
/// others forget to tell.
#[test]
fn without_a_log_nothing_is_marked() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::connect(&rig.socket("e"), low());
    switch(&mut machine, true);
    serves(&rig, &mut machine);
    // What comes then is logged.
    let log = Log::new(&machine.memory);
    let region = &log.memory.regions()[0];
    machine.session.set_log(region.size, region.fd()).unwrap();
    serves(&rig, &mut machine);
    let used = machine.parts[0].device.guest() / PAGE * PAGE;
    let marked = log.take();
    assert!(marked.contains(&used), "the used ring: {marked:x?}");
    assert!(marked.len() > 1, "data and status: {marked:x?}");
}

#[test]
fn nothing_is_marked_beyond_the_log() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::open(&rig.socket("e"), low());
    // There is no memory yet that it would have to cover.
    let log = Short::new(256);
    log.tell(&mut machine.session);
    machine.start().unwrap();
    switch(&mut machine, true);
    serves(&rig, &mut machine);
    log.assert_nothing_beyond();
    // Covered, but the ring's own place in it is not.
    let log = Short::new(1024);
    log.tell(&mut machine.session);
    let parts = machine.parts[0].clone();
    let user = |area: &Area| area.host() as u64;
    let far = Payload::new()
        .u32(0)
        .u32(1)
        .u64(user(&parts.desc))
        .u64(user(&parts.device))
        .u64(user(&parts.driver))
        .u64(2000 * 8 * PAGE);
    machine.session.wire().tell(Code::SetVringAddr, &far, &[]).unwrap();
    serves(&rig, &mut machine);
    log.assert_nothing_beyond();
    assert!(log.bits.to_vec().iter().any(|&b| b != 0), "what it covers is marked");
}

/// Memory that comes while writes are logged, and lies beyond the log.
#[test]
fn memory_beyond_the_log_is_not_marked() {
    let rig = Rig::ram(MIB, 1);
    let mut client = rig.connect("e", low());
    client.write(0, &[7; 4096]);
    let log = Short::new(1024);
    log.tell(client.disk.session());
    let features = client.disk.session().features() | feature::LOG_ALL;
    client.disk.session().set_features(features).unwrap();
    let more = Memory::new(&[RegionSpec { guest_addr: 48 * MIB, size: 2 * MIB }]).unwrap();
    let region = &more.regions()[0];
    let told = Payload::new().u64(0).u64(region.guest_addr).u64(region.size).u64(region.user_addr()).u64(0);
    client.disk.session().wire().tell(Code::AddMemReg, &told, &[region.fd()]).unwrap();

    // A read whose data goes there.
    client.arena.write(0, &header(request::IN, 0));
    let data = more.area(region.guest_addr, 4096).unwrap();
    let at = |addr, len, writable| DriverSeg { addr, len, writable };
    let base = client.arena.guest();
    let segs = [at(base, 16, false), at(data.guest(), 4096, true), at(base + 64, 1, true)];
    let cookie = client.disk.submit(0, &segs, false).unwrap();
    client.disk.wait_for(0, Some(cookie)).unwrap();
    assert_eq!((client.arena.part(64, 1).to_vec(), data.to_vec()), (vec![0], vec![7; 4096]));
    log.assert_nothing_beyond();

    client.disk.session().wire().tell(Code::RemMemReg, &told, &[]).unwrap();
    log.bits.fill(0);
    assert_eq!(client.read(0, 4096), [7; 4096]);
    assert!(log.bits.to_vec().iter().any(|&b| b != 0), "marked again without it");
    assert_eq!(rig.queue("e", 0).state, "running");
}
