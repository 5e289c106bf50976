//! Guest memory that changes while rings run.

use std::sync::Arc;

use vshunt_guest::driver::{Code, Memory, Options, Payload, Region, RegionSpec};

use super::rig::{LOAD_BYTES, MIB, Machine, Rig, layouts, small};

const EXTRA_BASE: u64 = 0x2_0000_0000;

fn describe(payload: Payload, region: &Region) -> Payload {
    payload.u64(region.guest_addr).u64(region.size).u64(region.user_addr()).u64(0)
}

fn single(region: &Region) -> Payload {
    describe(Payload::new().u64(0), region)
}

fn extra(n: u64) -> Arc<Memory> {
    let specs: Vec<_> =
        (0..n).map(|i| RegionSpec { guest_addr: EXTRA_BASE + i * 8192, size: 4096 }).collect();
    Memory::new(&specs).unwrap()
}

#[test]
fn regions_come_and_go_under_load() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options });
        let load = [machine.load(0), machine.load(1)];
        let more = extra(4);
        for round in 0..20 {
            let region = &more.regions()[round % 4];
            load.iter().for_each(|l| l.progress(5));
            machine.session.wire().tell(Code::AddMemReg, &single(region), &[region.fd()]).unwrap();
            load.iter().for_each(|l| l.progress(5));
            machine.session.wire().tell(Code::RemMemReg, &single(region), &[]).unwrap();
        }
        // The whole table at once, with and without a region more.
        for round in 0..20usize {
            let regions: Vec<_> =
                machine.memory.regions().iter().chain(more.regions()).take(1 + round % 5).collect();
            let start = Payload::new().u32(regions.len() as u32).u32(0);
            let table = regions.iter().fold(start, |payload, r| describe(payload, r));
            let fds: Vec<_> = regions.iter().map(|r| r.fd()).collect();
            machine.session.wire().tell(Code::SetMemTable, &table, &fds).unwrap();
            load.iter().for_each(|l| l.progress(5));
        }
    }
}

#[test]
fn a_region_that_does_not_fit_changes_nothing() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::connect(&rig.socket("e"), small());
    let load = machine.load(0);
    let (guest, size) = (machine.memory.regions()[0].guest_addr, machine.memory.regions()[0].size);
    // Overlaps: the start, the end, inside, around.
    for (at, len) in [(guest - 4096, 8192), (guest + size - 4096, 8192), (guest + 4096, 4096), (guest, size)]
    {
        let over = Memory::new(&[RegionSpec { guest_addr: at, size: len }]).unwrap();
        let region = &over.regions()[0];
        let e = machine.session.wire().tell(Code::AddMemReg, &single(region), &[region.fd()]).unwrap_err();
        assert!(e.to_string().contains("refused"), "{at:#x}: {e}");
        load.progress(50);
    }
    // Longer than its file; a file at an offset past its end.
    let more = extra(1);
    let region = &more.regions()[0];
    for (size, offset) in [(8192u64, 0u64), (4096, 4096), (4096, 1 << 62)] {
        let payload = Payload::new().u64(0).u64(EXTRA_BASE).u64(size).u64(0x7000_0000).u64(offset);
        assert!(machine.session.wire().tell(Code::AddMemReg, &payload, &[region.fd()]).is_err());
        load.progress(50);
    }
}

/// QEMU tells of its memory once for each queue pair of a network device, and takes it back as
/// often.
#[test]
fn a_region_that_is_added_again_goes_with_the_last() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::connect(&rig.socket("e"), small());
    let load = machine.load(0);
    let more = extra(1);
    let region = &more.regions()[0];
    for _ in 0..3 {
        machine.session.wire().tell(Code::AddMemReg, &single(region), &[region.fd()]).unwrap();
    }
    for _ in 0..3 {
        machine.session.wire().tell(Code::RemMemReg, &single(region), &[region.fd()]).unwrap();
    }
    assert!(machine.session.wire().tell(Code::RemMemReg, &single(region), &[region.fd()]).is_err());
    load.progress(50);
}

#[test]
fn as_many_slots_as_promised() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::connect(&rig.socket("e"), small());
    let slots = machine.session.wire().ask_u64(Code::GetMaxMemSlots).unwrap();
    assert!(slots >= 32);
    let load = machine.load(0);
    let more = extra(slots);
    for (i, region) in more.regions().iter().enumerate() {
        let told = machine.session.wire().tell(Code::AddMemReg, &single(region), &[region.fd()]);
        assert_eq!(told.is_ok(), (i as u64) < slots - 1, "region {i}, besides the first");
    }
    load.progress(50);
}

#[test]
fn rings_wait_for_a_region_that_is_replaced() {
    // QEMU removes a region that changes and adds it again, rings running all the while.
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..options });
        let load = [machine.load(0), machine.load(1)];
        let (memory, more) = (machine.memory.clone(), extra(1));
        let (region, other) = (&memory.regions()[0], &more.regions()[0]);
        for _ in 0..10 {
            load.iter().for_each(|l| l.progress(20));
            let wire = machine.session.wire();
            wire.tell(Code::RemMemReg, &single(region), &[]).unwrap();
            wire.tell(Code::AddMemReg, &single(other), &[other.fd()]).unwrap();
            wire.tell(Code::AddMemReg, &single(region), &[region.fd()]).unwrap();
            wire.tell(Code::RemMemReg, &single(other), &[]).unwrap();
        }
        load.iter().for_each(|l| l.progress(20));
        assert!(rig.events().iter().all(|e| !matches!(e, vshunt_daemon::Event::QueueBroken { .. })));
    }
}

#[test]
fn memory_may_come_after_the_rings() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::open(&rig.socket("e"), small());
    let features = machine.session.features();
    machine.session.set_features(features).unwrap();
    let ring = vshunt_guest::driver::RingSetup { parts: &machine.parts[0], base: 0 };
    machine.session.set_ring(&ring, false).unwrap();
    machine.session.enable(0, true).unwrap();
    let memory = machine.memory.clone();
    let region = &memory.regions()[0];
    machine.session.wire().tell(Code::AddMemReg, &single(region), &[region.fd()]).unwrap();
    machine.load(0).progress(100);
}

#[test]
fn regions_at_an_offset_of_their_file() {
    let rig = Rig::ram(MIB, 1);
    let mut machine = Machine::open(&rig.socket("e"), small());
    let features = machine.session.features();
    machine.session.set_features(features).unwrap();
    let memory = machine.memory.clone();
    let region = &memory.regions()[0];
    // The one region as two, of which the second begins in the middle of the file.
    let half = (region.size / 2).next_multiple_of(4096);
    for (at, size) in [(0, half), (half, region.size - half)] {
        let payload =
            Payload::new().u64(0).u64(region.guest_addr + at).u64(size).u64(region.user_addr() + at).u64(at);
        machine.session.wire().tell(Code::AddMemReg, &payload, &[region.fd()]).unwrap();
    }
    let ring = vshunt_guest::driver::RingSetup { parts: &machine.parts[0], base: 0 };
    machine.session.set_ring(&ring, false).unwrap();
    machine.session.enable(0, true).unwrap();
    machine.load(0).progress(100);
}
