use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::process::Command;

use vshunt_engine::{Token, Uring};
use vshunt_types::error::Kind as ErrorKind;
use vshunt_types::spec::{Cache, Direct, DiskSpec};

use super::*;
use crate::Disk;
use crate::backend::Backend;
use crate::handle::Handle;
use crate::tests::{Ask, LoopDevice, Rig, image, in_own_mounts, is_root, open_soon, raw_spec, scratch};

const SIZE: u64 = 4 << 20;

fn raw(rig: &Rig) -> &Raw {
    match &rig.handle.handle {
        Handle::Raw { raw, .. } => raw,
        _ => panic!("not a raw disk"),
    }
}

/// Returns the file of a disk that has no other users.
fn alone(disk: &mut Disk) -> &mut Raw {
    match disk.backend.get_mut().unwrap() {
        Backend::Raw(raw) => Arc::get_mut(raw).expect("no handle has it"),
        _ => panic!("a raw disk"),
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 512 + i) as u8).collect()
}

/// Runs `test` on files with both drivers, with O_DIRECT and without.
fn everywhere(mut test: impl FnMut(&str, &DiskSpec)) {
    for (parent, direct) in
        [("/dev/shm", Direct::Auto), ("/var/tmp", Direct::Auto), ("/var/tmp", Direct::Off)]
    {
        let dir = scratch(parent);
        let spec = DiskSpec { direct, ..raw_spec(&image(&dir, "disk.img", SIZE)) };
        test(&format!("{parent}, direct {direct:?}"), &spec);
    }
}

#[test]
fn more_segments_than_one_call_takes() {
    everywhere(|what, spec| {
        let mut rig = Rig::new(spec);
        for count in [1023, 1024, 1025, 3000] {
            let mut data = pattern(count * 512 + 4096);
            let base = data.as_mut_ptr();
            let base = base.wrapping_add(base.align_offset(4096));
            let segments: Vec<_> = (0..count).map(|i| (base.wrapping_add(i * 512), 512)).collect();
            let len = count as u64 * 512;
            let ask = |op| Ask { segments: segments.clone(), ..Ask::new(op, 512, len) };
            assert_eq!(rig.run(ask(Op::Write)), 0, "{what}");
            let written = data.clone();
            let at = base.addr() - data.as_ptr().addr();
            assert!(rig.read(512, len as usize) == written[at..at + len as usize], "{what}");
            data[at..at + len as usize].fill(0);
            assert_eq!(rig.run(ask(Op::Read)), 0, "{what}");
            assert!(data == written, "{what}");
        }
    });
}

#[test]
fn short_transfers_are_resumed() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    for (direct, step) in [(Direct::Off, 1000), (Direct::Auto, 4096), (Direct::Auto, 512)] {
        for aligned in [true, false] {
            let mut rig = Rig::new(&DiskSpec { direct, ..raw_spec(&path) });
            let mut data = pattern(64 << 10);
            let mut room = vec![0; data.len() + 8192];
            let at = room.as_ptr().align_offset(4096) + usize::from(!aligned);
            for op in [Op::Write, Op::Read] {
                let from = if op == Op::Write { data.as_mut_ptr() } else { room[at..].as_mut_ptr() };
                // Three segments, so that pieces end within and across them.
                let segments = vec![
                    (from, 20 << 10),
                    (from.wrapping_add(20 << 10), 4 << 10),
                    (from.wrapping_add(24 << 10), 40 << 10),
                ];
                let ask = Ask { segments, ..Ask::new(op, 8192, 64 << 10) };
                let mut round = 0;
                let res = rig.run_with(&[ask], |_, res| {
                    round += 1;
                    match round % 4 {
                        0 => -libc::EINTR,
                        1 => -libc::EAGAIN,
                        _ => res.min(step),
                    }
                });
                assert_eq!(res, [0]);
                assert!(round > 8, "it was not in pieces");
            }
            assert!(room[at..at + data.len()] == data, "direct {direct:?}, aligned {aligned}");
        }
    }
}

#[test]
fn unaligned_requests_go_in_shorter_pieces_when_there_are_many() {
    let dir = scratch("/var/tmp");
    let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", SIZE)));
    if !rig.disk().direct_in_use() || raw(&rig).memory_mask == 0 {
        eprintln!("skipped: unaligned buffers, which /var/tmp does not mind");
        return;
    }
    let data = pattern(SIZE as usize);
    assert_eq!(rig.write(0, &data), 0);
    const LEN: usize = 256 << 10;
    let mut room = vec![0u8; 100 * (LEN + 4096) + 4096];
    let base = room.as_mut_ptr();
    let base = base.wrapping_add(base.align_offset(4096) + 1);
    for op in [Op::Read, Op::Write] {
        let at = |i: usize| i % 16 * LEN;
        let guest: Vec<_> = (0..100).map(|i| base.wrapping_add(i * (LEN + 4096))).collect();
        let asks: Vec<_> = guest
            .iter()
            .enumerate()
            .map(|(i, &p)| Ask { segments: vec![(p, LEN)], ..Ask::new(op, at(i) as u64, LEN as u64) })
            .collect();
        let mut pieces = std::collections::BTreeSet::new();
        let results = rig.run_with(&asks, |io, res| {
            pieces.insert(io.state.asked);
            res
        });
        assert!(results.iter().all(|r| *r == 0), "{results:?}");
        assert!(pieces.contains(&(LEN as u32)) && pieces.contains(&4096), "{pieces:?}");
        for (i, p) in guest.iter().enumerate() {
            // SAFETY: the range is within `room`, which no other code uses now.
            let got = unsafe { std::slice::from_raw_parts(*p, LEN) };
            assert!(got == &data[at(i)..at(i) + LEN], "{op:?} {i}");
        }
    }
    assert!(rig.read(0, SIZE as usize) == data);
}

#[test]
fn direct_requests_reach_the_device_in_batches() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    for (direct, sent) in [(Direct::Auto, [0, 8, 16]), (Direct::Off, [0, 0, 0])] {
        let mut rig = Rig::new(&DiskSpec { direct, ..raw_spec(&path) });
        if rig.disk().path() == "inline" || (direct == Direct::Auto && !rig.disk().direct_in_use()) {
            eprintln!("skipped: direct I/O, which /var/tmp does not have");
            continue;
        }
        // What the kernel has taken: the head of the submission queue.
        let info = format!("/proc/self/fdinfo/{}", rig.uring.id());
        let taken = || {
            let text = std::fs::read_to_string(&info).unwrap();
            let head = text.lines().find_map(|line| line.strip_prefix("SqHead:")).unwrap();
            head.trim().parse::<u32>().unwrap()
        };
        let room = AlignedBuf::new(16 << 12).unwrap();
        let mut ios: Box<[Io]> = (0..16).map(|_| Io::default()).collect();
        let before = taken();
        let mut seen = vec![0];
        for (i, io) in (0..).zip(ios.iter_mut()) {
            io.reset(Op::Read, i << 12, false);
            // SAFETY: `room` and `ios` live until the ring is idle, below.
            unsafe { io.push(room.ptr().wrapping_add((i as usize) << 12), 4096) };
            let token = Token { index: 0, generation: 0, slot: i as u16, op: 0 };
            assert!(matches!(rig.handle.start(&mut rig.uring, io, token), Step::Wait));
            if i % 8 == 7 {
                seen.push(taken() - before);
            }
        }
        assert_eq!(seen, sent, "direct {direct:?}");
        let handle = &rig.handle;
        let mut done = 0;
        let finish = |uring: &mut Uring, token: Token, res| {
            let step = handle.resume(uring, &mut ios[usize::from(token.slot)], token, res);
            assert!(matches!(step, Step::Done(0)));
            done += 1;
        };
        rig.uring.run_until_idle(finish).unwrap();
        assert_eq!(done, 16);
    }
}

#[test]
fn errors_end_a_request_and_a_write_of_nothing_is_one() {
    let dir = scratch("/var/tmp");
    let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", SIZE)));
    let mut data = vec![1; 8192];
    for (told, wanted) in [(0, -libc::EIO), (-libc::ENOSPC, -libc::ENOSPC), (-libc::EIO, -libc::EIO)] {
        assert_eq!(rig.run_with(&[Ask::with(Op::Write, 0, &mut data)], |_, _| told), [wanted]);
    }
    for told in [-libc::EAGAIN, -libc::EINTR] {
        assert_eq!(rig.run_with(&[Ask::with(Op::Write, 0, &mut data)], |_, _| told), [told], "without end");
    }
    // The next request is not affected.
    assert_eq!(rig.write(0, &[2; 4096]), 0);
    assert_eq!(rig.flush(), 0);
}

#[test]
fn reads_past_the_end_of_the_file_give_zeroes() {
    everywhere(|what, spec| {
        let mut rig = Rig::new(spec);
        for end in [8192, 8192 + 512, 8192 + 100, 100, 0] {
            assert_eq!(rig.write(0, &pattern(16384)), 0);
            // Another program truncates the file.
            let file = fs::OpenOptions::new().write(true).open(spec.file.as_ref().unwrap()).unwrap();
            file.set_len(end).unwrap();
            let mut wanted = pattern(16384);
            wanted[end as usize..].fill(0);
            assert!(rig.read(0, 16384) == wanted, "{what}, end {end}");
            assert!(rig.read(12288, 4096) == [0; 4096], "{what}, end {end}");
        }
    });
}

#[test]
fn zeroes_and_discards_by_every_way_there_is() {
    everywhere(|what, spec| {
        for ways in [0, method::PUNCH, method::ZERO_RANGE, method::PUNCH | method::ZERO_RANGE, 0xff] {
            for (unmap, cache) in [(true, Cache::Writeback), (false, Cache::Writethrough)] {
                let mut rig = Rig::new(&DiskSpec { cache, ..spec.clone() });
                let data = pattern(SIZE as usize);
                assert_eq!(rig.write(0, &data), 0);
                raw(&rig).methods.store(ways, Ordering::Relaxed);
                let (from, len) = (3 * 512, (2 << 20) + 5 * 512);
                assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap }, from, len)), 0, "{what}");
                let mut wanted = data;
                wanted[from as usize..(from + len) as usize].fill(0);
                assert!(rig.read(0, SIZE as usize) == wanted, "{what}, ways {ways}, unmap {unmap}");
                assert_eq!(rig.run(Ask::new(Op::Discard, from, len)), 0, "{what}");
                assert!(rig.read(0, SIZE as usize) == wanted, "{what}, ways {ways}");
                for op in [Op::Discard, Op::WriteZeroes { unmap }] {
                    assert_eq!(rig.run(Ask::new(op, 512, 0)), 0, "{what}: of no length");
                }
            }
        }
    });
}

#[test]
fn ways_that_are_missing_are_not_tried_again() {
    let dir = scratch("/var/tmp");
    let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", SIZE)));
    let mut stages = Vec::new();
    let mut refuse = |rig: &mut Rig, op, errno: i32| {
        stages.clear();
        let res = rig.run_with(&[Ask::new(op, 0, 8192)], |io, res| {
            stages.push(io.state.stage);
            if matches!(io.state.stage, Stage::ZeroWrite | Stage::Sync) { res } else { -errno }
        });
        (res[0], stages.clone())
    };
    let unmap = Op::WriteZeroes { unmap: true };
    assert_eq!(raw(&rig).zeroing(false), Zeroing::Marks);
    // EINVAL may concern only the range.
    let all = vec![Stage::ZeroPunch, Stage::ZeroRange, Stage::ZeroWrite];
    assert_eq!(refuse(&mut rig, unmap, libc::EINVAL), (0, all.clone()));
    // Limits charge zeroes from then on.
    assert_eq!(raw(&rig).zeroing(true), Zeroing::Writes);
    assert_eq!(refuse(&mut rig, Op::Discard, libc::EINVAL), (0, vec![Stage::DiscardPunch]));
    // Any other error is an error of the request.
    assert_eq!(refuse(&mut rig, unmap, libc::ENOSPC), (-libc::ENOSPC, vec![Stage::ZeroPunch]));
    assert_eq!(refuse(&mut rig, Op::Discard, libc::EIO), (-libc::EIO, vec![Stage::DiscardPunch]));
    assert_eq!(refuse(&mut rig, unmap, libc::EOPNOTSUPP), (0, all));
    assert_eq!(refuse(&mut rig, unmap, libc::EOPNOTSUPP), (0, vec![Stage::ZeroWrite]));
    assert_eq!(refuse(&mut rig, Op::Discard, libc::EOPNOTSUPP), (0, vec![]));
}

#[test]
fn space_is_given_back() {
    use std::os::unix::fs::MetadataExt;
    everywhere(|what, spec| {
        let mut rig = Rig::new(spec);
        assert!(rig.disk().limits().can_discard, "{what}");
        let blocks = || fs::metadata(spec.file.as_ref().unwrap()).unwrap().blocks();
        for op in [Op::Discard, Op::WriteZeroes { unmap: true }] {
            assert_eq!(rig.write(0, &pattern(1 << 20)), 0);
            assert_eq!(rig.flush(), 0);
            assert!(blocks() >= 2048, "{what}");
            assert_eq!(rig.run(Ask::new(op, 0, 1 << 20)), 0);
            assert!(blocks() < 64, "{what}: {op:?}");
        }
    });
}

#[test]
fn what_is_to_be_stable_is_synced() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    // cache, fua asked -> flags of a write, stages of a WriteZeroes, of a flush
    let (zero, sync) = (vec![Stage::ZeroRange], vec![Stage::ZeroRange, Stage::Sync]);
    for (cache, fua, flags, wanted, flush) in [
        (Cache::Writeback, false, 0, &zero, 1),
        (Cache::Writeback, true, libc::RWF_DSYNC, &sync, 1),
        (Cache::Writethrough, false, libc::RWF_DSYNC, &sync, 1),
        (Cache::Unsafe, true, 0, &zero, 0),
    ] {
        let mut rig = Rig::new(&DiskSpec { cache, ..raw_spec(&path) });
        let mut io = Io::default();
        io.reset(Op::Write, 0, fua);
        assert_eq!(raw(&rig).write_flags(&io), flags);
        let mut stages = Vec::new();
        let ask = Ask { fua, ..Ask::new(Op::WriteZeroes { unmap: false }, 0, 4096) };
        assert_eq!(
            rig.run_with(&[ask], |io, res| {
                stages.push(io.state.stage);
                res
            }),
            [0]
        );
        assert_eq!(&stages, wanted, "{cache:?}");
        let mut operations = 0;
        rig.run_with(&[Ask::new(Op::Flush, 0, 0)], |_, res| {
            operations += 1;
            res
        });
        assert_eq!(operations, flush);
    }
}

#[test]
fn a_flush_that_failed_is_not_forgotten_while_pages_are_cached() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    for (direct, after) in [(Direct::Off, -libc::EIO), (Direct::Auto, 0)] {
        let mut rig = Rig::new(&DiskSpec { direct, ..raw_spec(&path) });
        if direct == Direct::Auto && !rig.disk().direct_in_use() {
            eprintln!("skipped: flushes with O_DIRECT, which /var/tmp does not have");
            continue;
        }
        assert_eq!(rig.flush(), 0);
        assert_eq!(rig.run_with(&[Ask::new(Op::Flush, 0, 0)], |_, _| -libc::EIO), [-libc::EIO]);
        assert_eq!(rig.flush(), after);
        // A sync by a control thread uses the same file.
        assert_eq!(rig.disk().sync().err().map_or(0, |e| -e.raw_os_error().unwrap()), after);
        assert_eq!(rig.write(0, &[1; 512]), 0);
    }
}

#[test]
fn a_sync_that_failed_is_not_forgotten_either() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    let spec = DiskSpec { direct: Direct::Off, locking: false, ..raw_spec(&path) };
    let Ok(mut disk) = Arc::try_unwrap(Disk::open(&spec).unwrap()) else { panic!("it is ours alone") };
    let raw = alone(&mut disk);
    // A pipe, which cannot be synced, instead of a device that fails.
    let (pipe, _) = std::io::pipe().unwrap();
    let good = std::mem::replace(&mut raw.file, Arc::new(File::from(std::os::fd::OwnedFd::from(pipe))));
    let errno = disk.sync().unwrap_err().raw_os_error().unwrap();
    let raw = alone(&mut disk);
    raw.file = good;
    assert_eq!(disk.sync().unwrap_err().raw_os_error(), Some(errno));
    let mut uring = vshunt_engine::Uring::new().unwrap();
    let handle = Arc::new(disk).attach(&mut uring);
    assert_eq!(Rig { uring, handle }.flush(), -errno);
}

/// O_DIRECT in units of a page, on a file with requests in sectors: as on a file system on a disk
/// with 4096-byte sectors, but such a disk is not needed.
#[test]
fn requests_smaller_than_a_direct_block_go_aside() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    let disk = Disk::open(&DiskSpec { locking: false, ..raw_spec(&path) }).unwrap();
    if !disk.direct_in_use() {
        eprintln!("skipped: O_DIRECT in large units, which /var/tmp does not have at all");
        return;
    }
    let Ok(mut disk) = Arc::try_unwrap(disk) else { panic!("it is ours alone") };
    let raw = alone(&mut disk);
    raw.offset_mask = 4095;
    let buffered: SharedFile = Arc::new(File::options().read(true).write(true).open(&path).unwrap());
    raw.buffered = Some(buffered);
    let disk = Arc::new(disk);
    let mut uring = vshunt_engine::Uring::new().unwrap();
    let handle = disk.attach(&mut uring);
    let mut rig = Rig { uring, handle };
    let mut model = vec![0; SIZE as usize];
    for i in 0..400u64 {
        let (at, len) = (i * 7919 % 8000 * 512, 512 << (i % 5));
        let data = vec![i as u8 | 1; len];
        let mut via = Vec::new();
        let mut room = data.clone();
        let res = rig.run_with(&[Ask::with(Op::Write, at, &mut room)], |io, res| {
            via.push(io.state.buffered);
            res
        });
        assert_eq!((res[0], via), (0, vec![(at | len as u64) & 4095 != 0]));
        model[at as usize..][..len].copy_from_slice(&data);
        let (at, len) = (at / 4096 * 4096, 12288.min(SIZE - at / 4096 * 4096) as usize);
        assert!(rig.read(at, len) == model[at as usize..][..len], "step {i}");
    }
    assert_eq!(rig.flush(), 0);
    assert!(fs::read(&path).unwrap() == model);
}

#[test]
fn a_device_with_large_sectors() {
    let dir = scratch("/dev/shm");
    let path = image(&dir, "disk.img", SIZE);
    let Some(device) = LoopDevice::new(&path, 4096) else { return };
    let mut rig = Rig::new(&DiskSpec { direct: Direct::On, ..raw_spec(&device.0) });
    let limits = rig.disk().limits();
    assert_eq!((limits.block_size, limits.physical_block_exp), (4096, 0));
    assert!(limits.can_discard && limits.can_zero);
    assert!(raw(&rig).buffered.is_some());
    // Less than a sector: guests do not send it. A read or write succeeds, and a discard has no
    // effect.
    let data = pattern(16384);
    assert_eq!(rig.write(0, &data), 0);
    assert_eq!(rig.run(Ask::new(Op::Discard, 512, 512)), 0);
    assert!(rig.read(0, 16384) == data);
    assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, 4096 + 512, 4096)), 0);
    let mut wanted = data;
    wanted[4608..8704].fill(0);
    assert!(rig.read(0, 16384) == wanted);
}

#[test]
fn devices_discard_by_the_block_layers_command() {
    let dir = scratch("/dev/shm");
    let path = image(&dir, "disk.img", SIZE);
    let Some(device) = LoopDevice::new(&path, 512) else { return };
    let mut rig = Rig::new(&raw_spec(&device.0));
    // The kernel does not say when it writes zeroes.
    assert_eq!(raw(&rig).zeroing(false), Zeroing::Writes);
    assert_eq!(rig.write(0, &pattern(1 << 20)), 0);
    let mut results = Vec::new();
    let res = rig.run_with(&[Ask::new(Op::Discard, 4096, 1 << 19)], |io, res| {
        results.push((io.state.stage, res));
        res
    });
    assert_eq!(res, [0]);
    if results[0] == (Stage::DiscardCommand, 0) {
        assert_eq!(results.len(), 1);
    } else {
        eprintln!("this kernel has no BLOCK_URING_CMD_DISCARD: {results:?}");
        assert_eq!(results[1], (Stage::DiscardPunch, 0));
    }
    assert!(rig.read(4096, 1 << 19) == vec![0; 1 << 19], "a loop device over a file reads zeroes");
    assert!(rig.read(0, 4096) == pattern(4096));

    // The disk has the size of the device.
    assert_eq!(rig.disk().size_bytes(), SIZE);
    rig.disk().resize(SIZE).unwrap();
    let e = rig.disk().resize(SIZE * 2).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.to_string().contains("4194304 bytes and cannot be resized to 8388608"), "{e}");
    assert_eq!(rig.disk().size_bytes(), SIZE);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(SIZE * 2).unwrap();
    assert!(Command::new("losetup").arg("-c").arg(&device.0).status().unwrap().success());
    rig.disk().resize(SIZE * 2).unwrap();
    assert_eq!(rig.disk().size_bytes(), SIZE * 2);
}

#[test]
fn files_are_resized() {
    everywhere(|what, spec| {
        let mut rig = Rig::new(spec);
        let path = spec.file.as_ref().unwrap();
        assert_eq!(rig.write(SIZE - 512, &[1; 512]), 0);
        rig.disk().resize(SIZE * 2).unwrap();
        assert_eq!((rig.disk().size_bytes(), fs::metadata(path).unwrap().len()), (SIZE * 2, SIZE * 2));
        assert_eq!(rig.write(SIZE * 2 - 512, &[2; 512]), 0, "{what}");
        rig.disk().resize(SIZE - 512).unwrap();
        rig.disk().resize(SIZE).unwrap();
        assert_eq!(rig.read(SIZE - 512, 512), [0; 512], "{what}");
        for wrong in [0, 1000, u64::MAX - 511] {
            let e = rig.disk().resize(wrong).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
        }
        assert_eq!(rig.disk().size_bytes(), SIZE);
        drop(rig);
        let e = open_soon(&DiskSpec { readonly: true, ..spec.clone() }).resize(SIZE).unwrap_err();
        assert!(e.to_string().contains("readonly=on and cannot be resized"), "{e}");
    });
}

#[test]
fn offsets_have_64_bits() {
    for parent in ["/dev/shm", "/var/tmp"] {
        let dir = scratch(parent);
        let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", 6 << 30)));
        let (at, data) = ((5 << 30) + 4096, pattern(8192));
        assert_eq!(rig.write(at, &data), 0);
        assert!(rig.read(at, 8192) == data);
        let mut stored = vec![0; 8192];
        File::open(dir.path().join("disk.img")).unwrap().read_exact_at(&mut stored, at).unwrap();
        assert!(stored == data);
        assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, 0, 6 << 30)), 0);
        assert!(rig.read(at, 8192) == vec![0; 8192]);
    }
}

#[test]
fn what_is_no_image_is_refused() {
    let dir = scratch("/var/tmp");
    let file = |name: &str| dir.path().join(name);
    let fails = |spec: &DiskSpec, kind: ErrorKind, wanted: &[&str]| {
        let e = Disk::open(spec).err().unwrap_or_else(|| panic!("{spec:?} is accepted"));
        assert_eq!(e.kind(), kind, "{e}");
        for w in wanted {
            assert!(e.to_string().contains(w), "{e}");
        }
    };
    use ErrorKind::{Invalid, Io, NotFound};
    fails(&raw_spec(&file("none")), NotFound, &["there is no image", "none; truncate -s 10G"]);
    fails(
        &raw_spec(&file("none.qcow2")),
        NotFound,
        &["none.qcow2; vshunt image create -f qcow2", "10G would make"],
    );
    fails(&raw_spec(dir.path()), Invalid, &["is a directory"]);
    fails(&raw_spec("/dev/zero".as_ref()), Invalid, &["/dev/zero is a character device"]);
    fails(&raw_spec("/proc/self/mem".as_ref()), Invalid, &["/proc/self/mem is on proc"]);
    // A file may have any length: the disk has whole sectors.
    for (name, len, size) in [("empty", 0, 0), ("odd", 1025, 1536)] {
        assert_eq!(open_soon(&raw_spec(&image(&dir, name, len))).size_bytes(), size, "{name}");
    }
    let good = raw_spec(&image(&dir, "good", 4096));
    fails(
        &DiskSpec { size: Some(512), ..good.clone() },
        Invalid,
        &["good has 4096 bytes, not 512", "leave out size="],
    );
    open_soon(&DiskSpec { size: Some(4096), ..good.clone() });

    let fifo = file("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    fails(&raw_spec(&fifo), Invalid, &["is a FIFO"]);
    fails(&DiskSpec { readonly: true, ..raw_spec(&fifo) }, Invalid, &["is a FIFO"]);
    let _socket = std::os::unix::net::UnixListener::bind(file("socket")).unwrap();
    fails(&raw_spec(&file("socket")), Invalid, &["is a socket"]);
    symlink(file("good"), file("link")).unwrap();
    open_soon(&raw_spec(&file("link")));
    symlink(file("loop"), file("loop")).unwrap();
    fails(&raw_spec(&file("loop")), Io, &["cannot open"]);

    // A running program.
    fs::copy("/bin/sleep", file("program")).unwrap();
    let mut child = Command::new(file("program")).arg("60").spawn().unwrap();
    fails(&raw_spec(&file("program")), ErrorKind::Busy, &["program is a program that runs"]);
    child.kill().unwrap();
    child.wait().unwrap();

    // Permissions, as a user that they restrict. On a thread of its own, because its user id cannot
    // be restored.
    let good = good.clone();
    let path = good.file.clone().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            // SAFETY: the bare system call changes the user of this thread only. The thread ends
            // after the test.
            if is_root() && unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) } != 0 {
                eprintln!("skipped: permissions, because this root cannot become another user");
                return;
            }
            fails(&good, Io, &["cannot open", "add readonly=on", "Permission denied"]);
            open_soon(&DiskSpec { readonly: true, ..good.clone() });
        });
    });
}

#[test]
fn what_can_only_be_read_says_so() {
    if !is_root() {
        eprintln!("skipped: read-only file systems and devices, which need root to make");
        return;
    }
    let dir = scratch("/dev/shm");
    let path = image(&dir, "disk.img", SIZE);
    let fails = |path: &std::path::Path, wanted: &str| {
        let e = Disk::open(&raw_spec(path)).err().expect("it can only be read").to_string();
        assert!(e.contains("readonly=on") && e.contains(wanted), "{e}");
        open_soon(&DiskSpec { readonly: true, ..raw_spec(path) });
    };
    if let Some(device) = LoopDevice::with(&path, &["--read-only"]) {
        fails(&device.0, "is a read-only device");
    }
    in_own_mounts(|mount| {
        mount(&["--bind", dir.path().to_str().unwrap()], &dir);
        mount(&["-o", "remount,ro,bind"], &dir);
        fails(&path, "Read-only file system");
    });
}

#[test]
fn file_systems_in_memory_that_can_less_than_tmpfs() {
    if !is_root() {
        eprintln!("skipped: ramfs and hugetlbfs, which need root to mount");
        return;
    }
    let dir = scratch("/dev/shm");
    in_own_mounts(|mount| {
        // No fallocate, and no O_DIRECT.
        if mount(&["-t", "ramfs", "none"], &dir) {
            let spec = raw_spec(&image(&dir, "disk.img", SIZE));
            let e = Disk::open(&DiskSpec { direct: Direct::On, ..spec.clone() }).err();
            if let Some(e) = e {
                assert_eq!(e.kind(), ErrorKind::Unsupported);
                assert!(e.to_string().contains("disk.img cannot be used with direct=on"), "{e}");
            }
            let mut rig = Rig::new(&spec);
            assert_eq!((rig.disk().path(), rig.disk().direct_in_use()), ("inline", false));
            assert!(!rig.disk().limits().can_discard && rig.disk().limits().can_zero);
            assert_eq!(rig.write(0, &pattern(1 << 21)), 0);
            assert_eq!(rig.run(Ask::new(Op::Discard, 0, 4096)), 0);
            assert_eq!(rig.run(Ask::new(Op::WriteZeroes { unmap: true }, 4096, (1 << 20) + 512)), 0);
            let mut wanted = pattern(1 << 21);
            wanted[4096..(1 << 20) + 4608].fill(0);
            assert!(rig.read(0, 1 << 21) == wanted);
        }
        if mount(&["-t", "hugetlbfs", "none"], &dir) {
            let spec = raw_spec(&image(&dir, "disk.img", 2 << 20));
            let e = Disk::open(&spec).err().expect("it cannot be written");
            assert_eq!(e.kind(), ErrorKind::Unsupported);
            assert!(e.to_string().contains("is on a hugetlbfs") && e.to_string().contains("tmpfs"), "{e}");
            let mut rig = Rig::new(&DiskSpec { readonly: true, ..spec });
            assert_eq!(rig.read(512, 4096), [0; 4096]);
        }
    });
}

/// Operations whose time depends on the size of the file do not run on the worker.
#[test]
fn long_ranges_of_files_in_memory_are_the_rings() {
    const LARGE: u64 = 64 << 20;
    let dir = scratch("/dev/shm");
    let mut rig = Rig::new(&raw_spec(&image(&dir, "disk.img", LARGE)));
    for op in [Op::Discard, Op::WriteZeroes { unmap: true }, Op::WriteZeroes { unmap: false }, Op::Allocate] {
        assert_eq!(rig.write(0, &pattern(1 << 20)), 0);
        assert_eq!(rig.write(LARGE - (1 << 20), &pattern(1 << 20)), 0);
        for (offset, len, by_ring) in [(0, 1 << 20, false), (512, LARGE - 512, true)] {
            let mut completions = 0;
            let results = rig.run_with(&[Ask::new(op, offset, len)], |_, res| {
                completions += 1;
                res
            });
            assert_eq!((results, completions > 0), (vec![0], by_ring), "{op:?} of {len} bytes");
        }
        if op != Op::Allocate {
            assert!(rig.read(LARGE - (1 << 20), 1 << 20).iter().all(|byte| *byte == 0), "{op:?}");
        }
    }
}

#[test]
fn direct_is_told_as_it_is() {
    let dir = scratch("/var/tmp");
    let path = image(&dir, "disk.img", SIZE);
    assert!(!open_soon(&DiskSpec { direct: Direct::Off, ..raw_spec(&path) }).direct_in_use());
    let auto = open_soon(&raw_spec(&path)).direct_in_use();
    match Disk::open(&DiskSpec { direct: Direct::On, locking: false, ..raw_spec(&path) }) {
        Ok(disk) => assert!(disk.direct_in_use() && auto),
        Err(e) => assert!(!auto && e.to_string().contains("use direct=auto"), "{e}"),
    }
}

#[test]
fn limits_of_a_file() {
    everywhere(|what, spec| {
        let rig = Rig::new(spec);
        let limits = rig.disk().limits();
        assert_eq!(limits.block_size, 512, "{what}");
        assert!(limits.can_discard && limits.can_zero);
        assert_eq!(limits.discard_align % 512, 0);
        assert!(limits.max_discard_bytes >= 1 << 40 && limits.max_discard_bytes / 512 <= u64::from(u32::MAX));
        assert_eq!(512 << limits.physical_block_exp, limits.min_io);
    });
}
