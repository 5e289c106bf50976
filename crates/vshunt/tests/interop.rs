//! A client that is not ours: crate `virtio-driver`, over the real socket, split and packed, while
//! queues move.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};
use vshunt_daemon::{Daemon, Options};
use vshunt_types::spec::{DiskSpec, ExportSpec, Format, Workers};

const QUEUES: usize = 4;
const DISK_BYTES: u64 = 64 << 20;
/// Each queue has a region of its own.
const REGION_BYTES: u64 = DISK_BYTES / QUEUES as u64;
/// Rounds of each queue, moves in all at least; on a slow machine rounds go on until there were
/// enough moves.
const ROUNDS: usize = 150;
const ROUNDS_MAX: usize = 100_000;
const MOVES: u32 = 100;
const BLOCK: usize = 4096;
const DEPTH: usize = 16;

/// Memory that the device may use: a memfd, mapped by both sides.
struct Shared {
    ptr: *mut u8,
    len: usize,
    fd: OwnedFd,
}

impl Shared {
    fn new(len: usize) -> Self {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let ptr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, rustix::mm::MapFlags::SHARED, &fd, 0).unwrap()
        };
        Self { ptr: ptr.cast(), len, fd }
    }

    /// Block `i` of the buffer, for one request at a time.
    #[allow(clippy::mut_from_ref, reason = "each index is used by one request at a time")]
    fn block(&self, i: usize) -> &mut [u8] {
        assert!((i + 1) * BLOCK <= self.len);
        // SAFETY: inside the mapping, which lives as long as the test; see the reason above for
        // aliasing.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * BLOCK), BLOCK) }
    }
}

fn connect(socket: &str, packed: bool) -> Box<VirtioBlkTransport> {
    let mut features = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioFeatureFlags::RING_INDIRECT_DESC.bits()
        | VirtioBlkFeatureFlags::MQ.bits()
        | VirtioBlkFeatureFlags::FLUSH.bits()
        | VirtioBlkFeatureFlags::DISCARD.bits()
        | VirtioBlkFeatureFlags::WRITE_ZEROES.bits();
    if packed {
        features |= VirtioFeatureFlags::RING_PACKED.bits();
    }
    let transport = VhostUser::new(socket, features).unwrap();
    let transport: Box<VirtioBlkTransport> = Box::new(transport);
    assert_eq!(transport.get_features() & VirtioFeatureFlags::RING_PACKED.bits() != 0, packed);
    transport
}

/// Waits for `n` completions of a queue and checks that all went well.
fn complete(transport: &VirtioBlkTransport, index: usize, queue: &mut VirtioBlkQueue<'_, usize>, n: usize) {
    let fd = transport.get_completion_fd(index);
    let mut done = 0;
    while done < n {
        // Twice: the crate has no barrier between the event that it asks for and its next look at a
        // packed ring, so a completion of that moment would be seen by neither side (virtio 1.2,
        // 2.8.14).
        for _ in 0..2 {
            for completion in queue.completions() {
                assert_eq!(completion.ret, 0, "request {}", completion.context);
                done += 1;
            }
            std::sync::atomic::fence(Ordering::SeqCst);
        }
        if done < n {
            let mut fds = [rustix::event::PollFd::new(&*fd, rustix::event::PollFlags::IN)];
            let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "a completion was lost");
            let _ = fd.read();
        }
    }
    assert_eq!(done, n);
}

/// A seeded program of writes, reads, zeroes and discards on one queue's region.
fn drive(
    transport: &VirtioBlkTransport,
    index: usize,
    mut queue: VirtioBlkQueue<'_, usize>,
    memory: &Shared,
    moves: &AtomicU32,
) {
    let kick = transport.get_submission_notifier(index);
    queue.set_used_notif_enabled(true);
    // Kicks only when the device asks for one: a lost one would be seen.
    let kick = |queue: &mut VirtioBlkQueue<'_, usize>| {
        if queue.avail_notif_needed() {
            kick.notify().unwrap();
        }
    };
    let base = index as u64 * REGION_BYTES;
    let blocks = 512usize;
    let mut model = vec![0u8; blocks];
    let mut seed = 0x9e37_79b9_7f4a_7c15u64 ^ index as u64;
    let mut random = move |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % n as u64) as usize
    };
    let mine = |i: usize| memory.block(index * DEPTH + i);
    for round in 0..ROUNDS_MAX {
        if round >= ROUNDS && moves.load(Ordering::Relaxed) >= MOVES {
            break;
        }
        let start = random(blocks - DEPTH);
        let at = |i: usize| base + ((start + i) * BLOCK) as u64;
        for i in 0..DEPTH {
            let value = (round * 7 + i + 1) as u8;
            mine(i).fill(value);
            queue.write(at(i), mine(i), i).unwrap();
            model[start + i] = value;
        }
        kick(&mut queue);
        complete(transport, index, &mut queue, DEPTH);
        if round % 5 == 0 {
            queue.write_zeroes(at(0), (2 * BLOCK) as u64, round % 2 == 0, 0).unwrap();
            queue.flush(1).unwrap();
            kick(&mut queue);
            complete(transport, index, &mut queue, 2);
            model[start] = 0;
            model[start + 1] = 0;
        }
        let start = random(blocks - DEPTH);
        let at = |i: usize| base + ((start + i) * BLOCK) as u64;
        for i in 0..DEPTH {
            mine(i).fill(0xee);
            queue.read(at(i), mine(i), i).unwrap();
        }
        kick(&mut queue);
        complete(transport, index, &mut queue, DEPTH);
        for i in 0..DEPTH {
            assert!(mine(i).iter().all(|&b| b == model[start + i]), "block {} of queue {index}", start + i);
        }
    }
    queue.discard(base, REGION_BYTES, 0).unwrap();
    kick(&mut queue);
    complete(transport, index, &mut queue, 1);
}

fn interop(packed: bool) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let socket = dir.path().join("blk.sock");
    let daemon = Daemon::new(Options::default()).unwrap();
    daemon
        .disk_add(DiskSpec {
            name: "d".into(),
            format: Some(Format::Raw),
            file: Some(image),
            locking: true,
            ..Default::default()
        })
        .unwrap();
    daemon
        .export_add(ExportSpec {
            name: "e".into(),
            disk: "d".into(),
            socket: Some(socket.clone()),
            queues: Some(QUEUES as u16),
            workers: Workers::Count(2),
            ..Default::default()
        })
        .unwrap();
    let mut transport = connect(socket.to_str().unwrap(), packed);
    let config = transport.get_config().unwrap();
    assert_eq!(config.capacity.to_native() * 512, DISK_BYTES);
    let memory = Shared::new(QUEUES * DEPTH * BLOCK);
    transport.map_mem_region(memory.ptr as usize, memory.len, memory.fd.as_raw_fd(), 0).unwrap();
    let queues = VirtioBlkQueue::<usize>::setup_queues(&mut *transport, QUEUES, 64).unwrap();
    for i in 0..QUEUES {
        // SAFETY: a dup of the descriptor, ours alone, to set a flag of the shared file
        // description.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::dup(transport.get_completion_fd(i).as_raw_fd())) };
        rustix::io::ioctl_fionbio(&fd, true).unwrap();
    }
    let over = Arc::new(AtomicBool::new(false));
    let moves = Arc::new(AtomicU32::new(0));
    let mover = {
        let (daemon, over, moves) = (daemon.clone(), over.clone(), moves.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let n = moves.load(Ordering::Relaxed);
                let (queue, to) = (n % QUEUES as u32, n / 2 % 3);
                match daemon.queue_attach("e", queue as u16, to, Duration::from_secs(60)) {
                    Ok(()) => drop(moves.fetch_add(1, Ordering::Relaxed)),
                    // A busy machine may not run a worker for a second.
                    Err(e) => assert!(e.to_string().contains("(stalled)"), "{e}"),
                }
            }
        })
    };
    let (transport, memory, moves) = (&*transport, Memory(&memory), &*moves);
    std::thread::scope(|scope| {
        for (index, queue) in queues.into_iter().enumerate() {
            scope.spawn(move || drive(transport, index, queue, memory.get(), moves));
        }
    });
    over.store(true, Ordering::Relaxed);
    mover.join().unwrap();
    assert!(moves.load(Ordering::Relaxed) >= MOVES, "{moves:?} moves only");
    let errors: u64 = daemon.queues().iter().map(|q| q.errors).sum();
    assert_eq!(errors, 0);
    daemon.shutdown();
}

#[derive(Clone, Copy)]
struct Memory<'a>(&'a Shared);
// SAFETY: threads use disjoint blocks of it.
unsafe impl Send for Memory<'_> {}
impl<'a> Memory<'a> {
    fn get(self) -> &'a Shared {
        self.0
    }
}

#[test]
fn split() {
    interop(false);
}

#[test]
fn packed() {
    interop(true);
}
