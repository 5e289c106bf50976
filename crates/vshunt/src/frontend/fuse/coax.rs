//! Gets idle entries of ring queues back from the kernel.
//!
//! An entry that waits in the kernel for a request belongs to the io_uring of the worker that it was submitted on, and
//! there is no command that gives it back; a request does. So whoever wants a ring queue at rest sends it as many
//! requests as it has idle entries: reads of one byte of our own file, from the queue's CPU, all at once and without
//! waiting. The queue keeps them, and they are answered where it goes on.
//!
//! Called by control threads, while they hold a queue's slot. Must never wait for the queue that is coaxed.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::queue::fuse::RING_ENTRIES;
use crate::worker::{Coax, Coaxing};

/// Reads for one queue that may be under way: some are served before it is told to come to rest.
const QUEUE_READS_MAX: usize = 8 * RING_ENTRIES as usize;
/// How long the end waits for its reads, which the queue answers once it goes on.
const END_WAIT: Duration = Duration::from_secs(1);

/// The ring queues of a mount.
pub(super) struct RingCoax {
    pub(super) path: PathBuf,
    /// Device number of our mount: what is at the path may have become something else.
    pub(super) device: u64,
    /// Of each queue, entries that are with the kernel.
    pub(super) idle: Arc<[Arc<AtomicU32>]>,
}

impl Coax for RingCoax {
    fn begin(&self) -> io::Result<Box<dyn Coaxing>> {
        let file =
            File::options().read(true).custom_flags(libc::O_DIRECT | libc::O_CLOEXEC).open(&self.path)?;
        if file.metadata()?.dev() != self.device {
            return Err(io::Error::other("something else is mounted there now"));
        }
        let reads = Reads::new(file, QUEUE_READS_MAX + self.idle.len() * usize::from(RING_ENTRIES))?;
        Ok(Box::new(Session { reads: Some(reads), idle: self.idle.clone() }))
    }
}

struct Session {
    reads: Option<Reads>,
    idle: Arc<[Arc<AtomicU32>]>,
}

impl Coaxing for Session {
    fn ask(&mut self, index: u16) -> io::Result<()> {
        let (Some(idle), Some(reads)) = (self.idle.get(usize::from(index)), &mut self.reads) else {
            return Ok(());
        };
        let n = (idle.load(Relaxed) as usize).min(reads.max.saturating_sub(reads.under_way));
        if n == 0 {
            return Ok(());
        }
        let before = sched_getaffinity(None)?;
        let mut there = CpuSet::new();
        there.set(usize::from(index));
        sched_setaffinity(None, &there).map_err(|e| {
            io::Error::new(
                io::Error::from(e).kind(),
                format!("entries of CPU {index}'s queue come back by requests made on that CPU, where we may not run"),
            )
        })?;
        let sent = reads.submit(n);
        let _ = sched_setaffinity(None, &before);
        sent
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(mut reads) = self.reads.take() else { return };
        let until = Instant::now() + END_WAIT;
        while reads.under_way > 0 && Instant::now() < until {
            reads.reap(until - Instant::now());
        }
        if reads.under_way > 0 {
            tracing::debug!("{} reads of a coaxed queue are still under way", reads.under_way);
            // Ending them waits for the queue; that is not ours to do here.
            let _ = std::thread::Builder::new().name("fuse-coax-end".into()).spawn(move || drop(reads));
        }
    }
}

/// `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    reqprio: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

const IOCB_CMD_PREAD: u16 = 0;

/// Reads through the kernel's own AIO: unlike io_uring it sends each from the calling thread, so from its CPU.
struct Reads {
    file: File,
    context: u64,
    /// Where they read to; nobody looks at it.
    sink: Box<[u8; 512]>,
    under_way: usize,
    /// Room: all queues may be drained together, and keep theirs.
    max: usize,
}

impl Reads {
    fn new(file: File, max: usize) -> io::Result<Self> {
        let mut context = 0u64;
        // SAFETY: the context is written to a variable of its size.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, max as libc::c_long, &raw mut context) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, context, sink: Box::new([0; 512]), under_way: 0, max })
    }

    fn submit(&mut self, n: usize) -> io::Result<()> {
        let read = Iocb {
            opcode: IOCB_CMD_PREAD,
            fd: self.file.as_raw_fd() as u32,
            buf: self.sink.as_mut_ptr() as u64,
            nbytes: 1,
            ..Default::default()
        };
        let mut reads = vec![read; n];
        let pointers: Vec<*mut Iocb> = reads.iter_mut().map(std::ptr::from_mut).collect();
        // SAFETY: n pointers to control blocks, which the kernel copies; the sink lives until the context is destroyed,
        // which waits for the reads.
        let sent =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, n as libc::c_long, pointers.as_ptr()) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        self.under_way += sent as usize;
        self.reap(Duration::ZERO);
        Ok(())
    }

    fn reap(&mut self, wait: Duration) {
        let mut events = [IoEvent::default(); 64];
        let time = libc::timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let least = libc::c_long::from(!wait.is_zero());
        // SAFETY: room for 64 events, a time to read.
        let n = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                least,
                events.len() as libc::c_long,
                events.as_mut_ptr(),
                &raw const time,
            )
        };
        self.under_way -= usize::try_from(n).unwrap_or(0);
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once; it waits for the reads, so the sink is theirs until then.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
