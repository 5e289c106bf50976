//! What the queues of one mount share: the disk, the attributes of the file, the blocking thread
//! and the lock of writes.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use vshunt_block::{Disk, FileAttributes, Time};
use vshunt_engine::{EventFd, LimitCell};
use vshunt_types::convert::at_most;
use vshunt_types::error::Result;
use vshunt_types::sync::Locked;

use super::blocking::{BlockingThread, CompletionQueue, EventHandler, MountEvent, Task};
use super::rmw_lock::{RmwLock, WriteShare};
use crate::abi::{self, Attr, ROOT_ID, Statx, StatxTime};

/// How a mount is served. Fixed when it is made.
pub(crate) struct MountConfig {
    /// Name of the export.
    pub(crate) name: String,
    /// The backend.
    pub(crate) disk: Arc<Disk>,
    /// Whether writes are possible.
    pub(crate) writable: bool,
    /// Whether users of the file may change its size.
    pub(crate) growable: bool,
    /// The limits of the export.
    pub(crate) limits: Arc<LimitCell>,
    /// Counts how often the file is open.
    pub(crate) opens: Arc<AtomicU32>,
    /// Passthrough: the kernel's id of the image. The kernel then serves reads and writes.
    pub(crate) backing_id: Option<i32>,
    /// Called with each event, on a thread that may wait.
    pub(crate) on_event: EventHandler,
}

/// See the module. Any thread's.
pub(crate) struct FuseShared {
    disk: Arc<Disk>,
    blocking: BlockingThread,
    lock: Arc<RmwLock>,
    /// Those of all queues. Held for an interrupt, and when a queue is made.
    queues: Mutex<Vec<Arc<CompletionQueue>>>,
    // Fixed.
    pub(super) writable: bool,
    pub(super) growable: bool,
    pub(super) limits: Arc<LimitCell>,
    /// The disk is `none`: the queue makes the zeroes of reads.
    pub(super) reads_are_zero: bool,
    backing_id: Option<i32>,
    opens: Arc<AtomicU32>,
    /// The connection has ended.
    ended: AtomicBool,
    // Attributes, as chmod and chown set them.
    /// When they were set, nanoseconds since 1970; 0 if they were not.
    changed_ns: AtomicU64,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
}

impl FuseShared {
    /// For queues with these eventfds, by queue index.
    ///
    /// # Errors
    /// The system's: no thread.
    pub(crate) fn new(config: MountConfig, eventfds: &[Arc<EventFd>]) -> Result<Self> {
        let MountConfig { name, disk, writable, growable, limits, opens, backing_id, on_event } = config;
        let lock = Arc::new(RmwLock::new(eventfds));
        let blocking = BlockingThread::start(&name, disk.clone(), lock.clone(), on_event)?;
        Ok(Self {
            blocking,
            lock,
            queues: Mutex::default(),
            writable,
            growable,
            limits,
            reads_are_zero: disk.path() == "none",
            opens,
            ended: AtomicBool::new(false),
            backing_id,
            changed_ns: AtomicU64::new(0),
            mode: AtomicU32::new(if writable { 0o600 } else { 0o400 }),
            uid: AtomicU32::new(rustix::process::getuid().as_raw()),
            gid: AtomicU32::new(rustix::process::getgid().as_raw()),
            disk,
        })
    }

    /// Notes that the connection has ended. The kernel then gives back all entries of ring queues,
    /// so queues that are stopped from now on wait for theirs.
    pub(crate) fn end(&self) {
        self.ended.store(true, Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Makes known where a queue gets results and interrupts.
    pub(super) fn add_queue(&self, completions: Arc<CompletionQueue>) {
        self.queues.locked().push(completions);
    }

    /// Tells all queues that the task of a request has got a signal. The kernel may tell that to
    /// another queue than the one that has the request. That one has taken it before, so it knows
    /// the request when it looks.
    pub(super) fn interrupt(&self, unique: u64) {
        for queue in self.queues.locked().iter() {
            queue.interrupt(unique);
        }
    }

    /// Gives a task to the blocking thread.
    pub(super) fn submit(&self, completions: &Arc<CompletionQueue>, slot: u16, task: Task) {
        self.blocking.submit(completions, slot, task);
    }

    /// Has an event reported.
    pub(super) fn report(&self, event: MountEvent) {
        self.blocking.report(event);
    }

    /// The share of a queue in the lock of writes.
    pub(super) fn write_share(&self, queue: u16) -> Option<Arc<WriteShare>> {
        self.lock.share(queue)
    }

    /// Whether a write needs the lock: not where an image has bytes for blocks and the file is
    /// never shortened.
    #[inline]
    fn needs_lock(&self) -> bool {
        self.disk.alignment() != 1 || self.growable
    }

    /// A write starts. False: it has to wait, see [`RmwLock::lock_shared`]. `held` is set if the
    /// write holds the lock.
    #[inline]
    pub(super) fn lock_write(&self, share: &WriteShare, held: &mut bool) -> bool {
        if !self.needs_lock() {
            return true;
        }
        *held = self.lock.lock_shared(share);
        *held
    }

    /// A write has ended.
    #[inline]
    pub(super) fn unlock_write(&self, share: &WriteShare, held: &mut bool) {
        if std::mem::take(held) {
            self.lock.unlock_shared(share);
        }
    }

    /// Counts an open file. Returns the answer to OPEN.
    pub(super) fn open(&self) -> abi::OpenOut {
        self.opens.fetch_add(1, Relaxed);
        match self.backing_id {
            Some(backing_id) => abi::OpenOut { fh: 0, open_flags: abi::open::PASSTHROUGH, backing_id },
            None => abi::OpenOut {
                fh: 0,
                open_flags: abi::open::DIRECT_IO | abi::open::PARALLEL_DIRECT_WRITES,
                backing_id: 0,
            },
        }
    }

    /// RELEASE: counts a closed file. The time of its last write is not later than this.
    pub(super) fn release(&self) {
        self.disk.update_file_times();
        self.opens.fetch_sub(1, Relaxed);
    }

    /// chmod: sets the permissions. Those to write are left out where writes are impossible.
    pub(super) fn set_mode(&self, mode: u32) {
        let possible = if self.writable { 0o777 } else { 0o555 };
        self.mode.store(mode & possible, Relaxed);
        self.note_change();
    }

    pub(super) fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) {
        if let Some(uid) = uid {
            self.uid.store(uid, Relaxed);
        }
        if let Some(gid) = gid {
            self.gid.store(gid, Relaxed);
        }
        self.note_change();
    }

    /// chmod and chown change the time of the last change of attributes.
    fn note_change(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.changed_ns.store(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// The size of the file, bytes. With passthrough the kernel may have made the image longer by
    /// itself. (There is no such passthrough where asking for the image's attributes may wait.)
    pub(super) fn size(&self) -> u64 {
        let known = self.disk.size_bytes();
        match (self.backing_id, self.disk.image()) {
            (Some(_), Some(file)) if self.growable => file.metadata().map_or(known, |m| m.size()),
            _ => known,
        }
    }

    /// The attributes of the file, from those that the disk has.
    pub(super) fn attr(&self, of: &FileAttributes) -> Attr {
        const SECOND_NS: u64 = 1_000_000_000;
        let size = self.size();
        let changed = self.changed_ns.load(Relaxed);
        let changed: Time = ((changed / SECOND_NS).cast_signed(), at_most(changed % SECOND_NS, u32::MAX));
        let (atime, mtime, ctime) = (of.times.atime, of.times.mtime, of.times.ctime.max(changed));
        Attr {
            ino: ROOT_ID,
            size,
            blocks: of.blocks.unwrap_or(size / 512),
            // The kernel reads them as signed.
            atime: atime.0.cast_unsigned(),
            atimensec: atime.1,
            mtime: mtime.0.cast_unsigned(),
            mtimensec: mtime.1,
            ctime: ctime.0.cast_unsigned(),
            ctimensec: ctime.1,
            mode: libc::S_IFREG | self.mode.load(Relaxed),
            nlink: 1,
            uid: self.uid.load(Relaxed),
            gid: self.gid.load(Relaxed),
            blksize: 4096,
            ..Default::default()
        }
    }

    /// The attributes in the format of statx. There is no birth time.
    pub(super) fn statx(&self, of: &FileAttributes) -> Statx {
        let attr = self.attr(of);
        let time = |s: u64, n: u32| StatxTime { tv_sec: s.cast_signed(), tv_nsec: n, reserved: 0 };
        Statx {
            mask: libc::STATX_BASIC_STATS,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: u16::try_from(attr.mode).unwrap_or(0),
            ino: attr.ino,
            size: attr.size,
            blocks: attr.blocks,
            atime: time(attr.atime, attr.atimensec),
            mtime: time(attr.mtime, attr.mtimensec),
            ctime: time(attr.ctime, attr.ctimensec),
            ..Default::default()
        }
    }
}
