//! A disk that hangs: its queues stay where they are, others go on, and nothing is lost when it
//! answers again.
//!
//! What hangs is a real image on a real file system. A thread writes to it from memory whose page
//! fault nobody answers (userfaultfd), and holds the inode's lock meanwhile: operations of others
//! on that file wait.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use vshunt_guest::driver::{DriverSeg, Options, request, status};
use vshunt_types::error::Kind;
use vshunt_types::spec::WorkerSpec;

use super::rig::{
    Backing, Client, LOAD_BYTES, MIB, Machine, PATIENCE, Rig, attach, header, layouts, signalled, small,
};

const PAGE: usize = 4096;
/// How long the attach may take that cannot succeed.
const SHORT: Duration = Duration::from_millis(100);

/// An image that answers nobody until this is dropped.
struct Hung {
    faults: Option<OwnedFd>,
    /// Who keeps the others off, and one of these.
    writers: Vec<JoinHandle<()>>,
}

impl Hung {
    /// None where this user may not have a userfaultfd, or the file system lets others write
    /// meanwhile; the test is left out then.
    fn new(image: &Path) -> Option<Self> {
        let Some(faults) = userfaultfd() else {
            println!("left out: no userfaultfd here ({})", std::io::Error::last_os_error());
            return None;
        };
        // SAFETY: new memory that nobody else knows.
        let page = unsafe {
            mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let page = page.unwrap() as usize;
        register(&faults, page);
        let file = File::options().write(true).open(image).unwrap();
        let end = file.metadata().unwrap().len() - PAGE as u64;
        let also = file.try_clone().unwrap();
        let writer = std::thread::spawn(move || {
            // SAFETY: the thread's own page, mapped until below; the kernel alone reads it, as
            // zeroes in the end.
            let bytes = unsafe { std::slice::from_raw_parts(page as *const u8, PAGE) };
            file.write_all_at(bytes, end).unwrap();
            // SAFETY: mapped above, and used no more.
            unsafe { munmap(page as *mut _, PAGE).unwrap() };
        });
        assert!(signalled(&faults, PATIENCE), "the writer faults, with the inode locked");
        let (begun, begins) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            begun.send(()).unwrap();
            also.write_all_at(&[0; PAGE], end).unwrap();
        });
        begins.recv().unwrap();
        std::thread::sleep(SHORT);
        let hangs = !other.is_finished();
        let hung = Self { faults: Some(faults), writers: vec![writer, other] };
        if !hangs {
            println!("left out: this file system writes in spite of another's page fault");
        }
        hangs.then_some(hung)
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // Closed, it lets the kernel answer the fault.
        self.faults = None;
        for writer in self.writers.drain(..) {
            assert!(writer.join().is_ok() || std::thread::panicking());
        }
    }
}

/// A userfaultfd that speaks (linux/userfaultfd.h).
fn userfaultfd() -> Option<OwnedFd> {
    const UFFD_API: u64 = 0xaa;
    const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
    // SAFETY: a new descriptor, ours alone.
    let fd = unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as i32))?
    };
    let mut api = [UFFD_API, 0, 0];
    // SAFETY: a struct uffdio_api, which outlives the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) };
    (rc == 0).then_some(fd)
}

/// Has faults on the missing page wait for the descriptor's owner.
fn register(faults: &OwnedFd, page: usize) {
    const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
    const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
    let mut register = [page as u64, PAGE as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
    // SAFETY: a struct uffdio_register, which outlives the call; the page is the caller's.
    let rc = unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_REGISTER, register.as_mut_ptr()) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// Puts a write of `n + 1`s on sector `8 * n`, whose parts lie where others do not.
fn submit(client: &mut Client, n: usize) -> u16 {
    let (head, status, data) = (2048 + n * 16, 3072 + n, MIB as usize + n * PAGE);
    client.arena.write(head, &header(request::OUT, 8 * n as u64));
    client.arena.write(status, &[0xee]);
    client.arena.write(data, &[n as u8 + 1; PAGE]);
    let base = client.arena.guest();
    let seg =
        |at: usize, len: usize, writable| DriverSeg { addr: base + at as u64, len: len as u32, writable };
    client
        .disk
        .submit(0, &[seg(head, 16, false), seg(data, PAGE, false), seg(status, 1, true)], false)
        .unwrap()
}

#[test]
fn a_queue_of_a_hung_disk_stays_and_moves_once_it_answers() {
    let rig = Rig::new();
    rig.disk("d", Backing::Direct, MIB, |_| {});
    rig.disk("other", Backing::Ram, LOAD_BYTES, |_| {});
    rig.export("e", "d", 1, |_| {});
    rig.export("other", "other", 1, |_| {});
    for options in layouts() {
        let to = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
        let mut neighbour = Machine::connect(&rig.socket("other"), small());
        let load = neighbour.load(0);
        let mut client = rig.connect("e", Options { queues: 1, ..options });
        client.write(100, &[9; 512]);
        let Some(hung) = Hung::new(&rig.dir.path().join("d.img")) else { return };
        let first = submit(&mut client, 0);
        super::rig::wait_for("a request in flight", || (rig.queue("e", 0).in_flight == 1).then_some(()));
        let before = rig.queue("e", 0).generation;
        for _ in 0..3 {
            let start = Instant::now();
            let error = rig.daemon.queue_attach("e", 0, to, SHORT).unwrap_err();
            assert_eq!(error.kind(), Kind::Busy, "{error}");
            assert!(error.to_string().contains("in flight"), "{error}");
            assert!(start.elapsed() >= SHORT && start.elapsed() < PATIENCE / 2);
            let queue = rig.queue("e", 0);
            assert_eq!((queue.worker, queue.generation, queue.state.as_str()), (0, before, "running"));
        }
        // It takes what comes, its worker serves others, and the one that it did not come to can be
        // freed.
        let second = submit(&mut client, 1);
        super::rig::wait_for("another request", || (rig.queue("e", 0).in_flight == 2).then_some(()));
        load.progress(100);
        rig.daemon.worker_free(to).unwrap();
        drop(hung);
        for cookie in [first, second] {
            assert_eq!(client.disk.wait_for(0, Some(cookie)).unwrap().len, 1);
        }
        assert_eq!(client.arena.part(3072, 2).to_vec(), [status::OK; 2]);
        let to = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
        attach(&rig.daemon, "e", 0, to);
        assert_eq!(rig.queue("e", 0).worker, to);
        for n in 0..2 {
            assert_eq!(client.read(8 * n, PAGE), [n as u8 + 1; PAGE]);
        }
        client.write(0, &[9; 512]);
        attach(&rig.daemon, "e", 0, 0);
    }
}
