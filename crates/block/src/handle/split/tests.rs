use vshunt_types::spec::{Direct, DiskSpec, Format};

use super::*;
use crate::tests::{Ask, Random, Rig, image, memory_spec, raw_spec, scratch};

const MIB: usize = 1 << 20;

/// Runs requests at the same time, each with one segment. Returns their results, and the slots of
/// the completions in order.
fn run(rig: &mut Rig, asks: &mut [(Op, u64, &mut [u8])]) -> (Vec<Option<i32>>, Vec<u16>) {
    let mut ios: Box<[Io]> = asks.iter().map(|_| Io::default()).collect();
    let mut results = vec![None; asks.len()];
    let mut order = Vec::new();
    for (i, ((op, offset, data), io)) in asks.iter_mut().zip(ios.iter_mut()).enumerate() {
        io.reset(*op, *offset, false);
        match op {
            // SAFETY: the memory outlives the run; `ios` neither moves nor is dropped before the
            // end.
            Op::Read | Op::Write => unsafe { io.push(data.as_mut_ptr(), data.len()) },
            _ => io.request.len = data.len() as u64,
        }
        let token = Token { index: 1, generation: 2, slot: i as u16, op: 3 };
        if let Step::Done(res) = rig.handle.start(&mut rig.uring, io, token) {
            results[i] = Some(res);
        }
    }
    let done_at_once = results.clone();
    let handle = &rig.handle;
    rig.uring
        .run_until_idle(|uring, token, res| {
            order.push(token.slot);
            let i = usize::from(token.slot);
            assert_eq!(results[i], None, "a completion after the end");
            if let Step::Done(res) = handle.resume(uring, &mut ios[i], token, res) {
                results[i] = Some(res);
            }
        })
        .unwrap();
    for (io, (_, offset, data)) in ios.iter().zip(asks.iter()) {
        assert_eq!((io.request.offset, io.request.len), (*offset, data.len() as u64), "as the queue asked");
    }
    assert!(handle.is_idle() && results.iter().all(Option::is_some));
    (done_at_once, order)
}

fn ram(size: usize) -> Rig {
    Rig::new(&memory_spec(Format::Ram, size as u64))
}

#[test]
fn one_request_of_a_queue_gets_a_part_in_each_iteration() {
    let mut rig = ram(16 * MIB);
    let (mut a, mut b, mut c, mut d) = (vec![1; 4 * MIB], vec![2; 3 * MIB], vec![3; 4096], vec![4; MIB]);
    let mut asks = [
        (Op::Write, 0, &mut a[..]),
        (Op::Write, 4 * MIB as u64, &mut b[..]),
        (Op::Write, 8 * MIB as u64, &mut c[..]),
        (Op::Write, 9 * MIB as u64, &mut d[..]),
    ];
    let (at_once, order) = run(&mut rig, &mut asks);
    // Short requests do not wait.
    assert_eq!(at_once, [None, None, Some(0), Some(0)]);
    // The first part of A was complete when it started.
    assert_eq!(order, [0, 0, 0, 1, 1, 1]);
    assert!(rig.read(0, 7 * MIB) == [a, b].concat());
    assert!(rig.read(8 * MIB as u64, 4096) == c && rig.read(9 * MIB as u64, MIB) == d);
}

#[test]
fn parts_end_at_their_multiples() {
    let mut rig = ram(4 * MIB);
    let mut data = vec![1; 2 * MIB];
    let (_, order) = run(&mut rig, &mut [(Op::Write, 512, &mut data[..])]);
    assert_eq!(order.len(), 2, "three parts: the last one is 512 bytes");
    assert!(rig.read(512, data.len()) == data);
    assert_eq!(rig.read(0, 512), [0; 512]);
}

#[test]
fn long_ranges_are_cleared_in_parts() {
    for op in [Op::Discard, Op::WriteZeroes { unmap: false }] {
        let mut rig = ram(32 * MIB);
        let mut data = vec![7; 32 * MIB];
        assert_eq!(rig.write(0, &data), 0);
        let len = 3 * CLEAR_BYTES as usize + 512;
        let (at_once, order) = run(&mut rig, &mut [(op, 0, &mut data[..len])]);
        assert_eq!((at_once[0], order.len()), (None, 3));
        let now = rig.read(0, 32 * MIB);
        assert!(now[..len].iter().all(|b| *b == 0) && now[len..].iter().all(|b| *b == 7));
    }
}

#[test]
fn a_part_that_fails_ends_its_request_alone() {
    let mut rig = ram(3 * MIB);
    let (mut long, mut good) = (vec![1; 5 * MIB], vec![2; 2 * MIB]);
    let token = |slot| Token { index: 1, generation: 2, slot, op: 3 };
    let mut ios: Box<[Io]> = (0..2).map(|_| Io::default()).collect();
    let mut results = [None; 2];
    for (i, data) in [&mut long, &mut good].into_iter().enumerate() {
        ios[i].reset(Op::Write, 0, false);
        // SAFETY: the memory outlives the run; `ios` neither moves nor is dropped before the end.
        unsafe { ios[i].push(data.as_mut_ptr(), data.len()) };
        assert_eq!(rig.handle.start(&mut rig.uring, &mut ios[i], token(i as u16)), Step::Wait);
    }
    let handle = &rig.handle;
    rig.uring
        .run_until_idle(|uring, token, res| {
            let i = usize::from(token.slot);
            if let Step::Done(res) = handle.resume(uring, &mut ios[i], token, res) {
                results[i] = Some(res);
            }
        })
        .unwrap();
    assert_eq!(results, [Some(-libc::EIO), Some(0)]);
    assert!(rig.handle.is_idle());
    assert!(ios.iter().all(|io| io.request.iov.left_bytes() == 0 && io.request.iov.left().is_empty()));
    assert!(rig.read(0, 2 * MIB) == good);
}

/// Random long and short requests, some with many segments, against a model, on each kind of disk
/// that splits requests.
#[test]
fn random_long_requests() {
    const BYTES: usize = 12 * MIB;
    let (dir, real) = (scratch("/dev/shm"), scratch("/var/tmp"));
    let qcow2 = ::qcow2::memory::Memory::new(Vec::new(), 32 << 20);
    ::qcow2::create::create(&qcow2, None, &::qcow2::create::Options::new(BYTES as u64), &mut |_, _| {})
        .unwrap();
    let thin = dir.path().join("thin.qcow2");
    std::fs::write(&thin, qcow2.bytes()).unwrap();
    for spec in [
        memory_spec(Format::Ram, BYTES as u64),
        raw_spec(&image(&dir, "raw.img", BYTES as u64)),
        DiskSpec { direct: Direct::Off, ..raw_spec(&image(&real, "raw.img", BYTES as u64)) },
        DiskSpec { format: Some(Format::Qcow2), ..raw_spec(&thin) },
    ] {
        let mut random = Random::new(23);
        let mut rig = Rig::new(&spec);
        assert!(rig.handle.split.copy_bytes.is_some());
        let mut model = vec![0; BYTES];
        let mut guest = vec![0; BYTES];
        for round in 0..40 {
            let sectors = (BYTES / 512) as u64;
            let first = random.below(sectors);
            let count = 1 + random.below(sectors - first);
            let (offset, len) = (first as usize * 512, count as usize * 512);
            let write = random.below(2) == 0;
            let op = if write { Op::Write } else { Op::Read };
            guest.fill(round);
            let mut ask = Ask::new(op, offset as u64, len as u64);
            let most = [len, 1 << 20, 70_000][random.below(3) as usize] as u64;
            let mut at = 0;
            while at < len {
                let n = (1 + random.below(most) as usize).min(len - at);
                ask.segments.push((guest[at..].as_mut_ptr(), n));
                at += n;
            }
            assert_eq!(rig.run(ask), 0);
            if write {
                model[offset..offset + len].fill(round);
            } else {
                assert!(guest[..len] == model[offset..offset + len], "round {round}");
            }
        }
        assert!(rig.read(0, BYTES) == model);
    }
}
