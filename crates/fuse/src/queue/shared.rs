//! What the queues of one mount share: the disk, the file's attributes, the clerk and the gate.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::{SystemTime, UNIX_EPOCH};

use vshunt_block::Disk;
use vshunt_types::error::Result;

use super::abi::{self, Attr, ROOT_ID, Statx, StatxTime};
use super::clerk::{Clerk, Desk, News, Task, Tell};
use super::gate::Gate;
use super::{EventFd, Slot};

/// Seconds and nanoseconds since 1970.
type Time = (i64, u32);

/// What a mount is, decided when it is made.
pub struct Setup {
    /// Name of the export.
    pub name: String,
    /// The backend.
    pub disk: Arc<Disk>,
    /// Writes are possible.
    pub writable: bool,
    /// The file's size may be changed by those who use it.
    pub growable: bool,
    /// Counts how often the file is open.
    pub opens: Arc<AtomicU32>,
    /// Where the kernel is to go with reads and writes: the id that it gave for the image.
    pub backing_id: Option<i32>,
    /// Called with what others want to know; on a thread that may wait.
    pub tell: Tell,
}

/// See the module. Any thread's.
pub struct FuseShared {
    disk: Arc<Disk>,
    clerk: Clerk,
    gate: Arc<Gate>,
    // Fixed.
    pub(super) writable: bool,
    pub(super) growable: bool,
    /// To look at the image may wait: the clerk does.
    pub(super) looks_wait: bool,
    /// Reads are to be zeroes of ours: the disk gives none.
    pub(super) gives_nothing: bool,
    backing_id: Option<i32>,
    opens: Arc<AtomicU32>,
    /// The connection has ended.
    ended: AtomicBool,
    made: Time,
    // Attributes, as chmod and chown set them.
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
}

impl FuseShared {
    /// For queues with these eventfds.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(setup: Setup, eventfds: &[Arc<EventFd>]) -> Result<Self> {
        let Setup { name, disk, writable, growable, opens, backing_id, tell } = setup;
        let gate = Arc::new(Gate::new(eventfds));
        let clerk = Clerk::start(&name, disk.clone(), gate.clone(), tell)?;
        let made = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            clerk,
            gate,
            writable,
            growable,
            looks_wait: disk.image_may_wait(),
            gives_nothing: disk.path() == "none",
            opens,
            ended: AtomicBool::new(false),
            backing_id,
            made: (made.as_secs() as i64, made.subsec_nanos()),
            mode: AtomicU32::new(if writable { 0o600 } else { 0o400 }),
            uid: AtomicU32::new(rustix::process::getuid().as_raw()),
            gid: AtomicU32::new(rustix::process::getgid().as_raw()),
            disk,
        })
    }

    /// The connection has ended, so that the kernel gives back all entries of ring queues: queues that are stopped from now
    /// on wait for theirs.
    pub fn end(&self) {
        self.ended.store(true, Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    pub(super) fn order(&self, desk: &Arc<Desk>, slot: u16, task: Task) {
        self.clerk.order(desk, slot, task);
    }

    pub(super) fn tell(&self, news: News) {
        self.clerk.tell(news);
    }

    /// A write begins; see [`Gate::enter`]. There is nothing to keep apart where bytes can be written alone and the file
    /// is not cut.
    #[inline]
    pub(super) fn enter(&self, me: u16, slot: &mut Slot) -> bool {
        if self.disk.alignment() == 1 && !self.growable {
            return true;
        }
        slot.entered = self.gate.enter(me);
        slot.entered
    }

    /// A write is over.
    #[inline]
    pub(super) fn leave(&self, me: u16, slot: &mut Slot) {
        if std::mem::take(&mut slot.entered) {
            self.gate.leave(me);
        }
    }

    /// What OPEN answers: flags and the backing file.
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

    /// RELEASE: an open file is closed.
    pub(super) fn release(&self) {
        self.opens.fetch_sub(1, Relaxed);
    }

    /// chmod: permissions only, and none to write where there is no writing.
    pub(super) fn set_mode(&self, mode: u32) {
        let possible = if self.writable { 0o777 } else { 0o555 };
        self.mode.store(mode & possible, Relaxed);
    }

    pub(super) fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) {
        if let Some(uid) = uid {
            self.uid.store(uid, Relaxed);
        }
        if let Some(gid) = gid {
            self.gid.store(gid, Relaxed);
        }
    }

    /// The file's size. Where the kernel writes by itself, it may have made the image longer. (Images whose looks wait have
    /// no such passthrough.)
    pub(super) fn size(&self) -> u64 {
        let known = self.disk.size_bytes();
        match (self.backing_id, self.disk.image()) {
            (Some(_), Some(file)) if self.growable => file.metadata().map_or(known, |m| m.size()),
            _ => known,
        }
    }

    /// The attributes, `seen` being what the image says of itself.
    pub(super) fn attr(&self, seen: Option<&Metadata>) -> Attr {
        let size = self.size();
        let mut attr = Attr {
            ino: ROOT_ID,
            size,
            blocks: size / 512,
            mode: libc::S_IFREG | self.mode.load(Relaxed),
            nlink: 1,
            uid: self.uid.load(Relaxed),
            gid: self.gid.load(Relaxed),
            blksize: 4096,
            ..Default::default()
        };
        let (mut times, made) = ([self.made; 3], self.made);
        if let Some(meta) = seen {
            let nsec = |n: i64| u32::try_from(n).unwrap_or(0);
            if meta.file_type().is_file() {
                attr.blocks = meta.blocks();
            }
            times = [
                (meta.atime(), nsec(meta.atime_nsec())),
                (meta.mtime(), nsec(meta.mtime_nsec())),
                (meta.ctime(), nsec(meta.ctime_nsec())),
            ];
        }
        let seconds = |(s, _): Time| u64::try_from(s).unwrap_or(made.0 as u64);
        (attr.atime, attr.atimensec) = (seconds(times[0]), times[0].1);
        (attr.mtime, attr.mtimensec) = (seconds(times[1]), times[1].1);
        (attr.ctime, attr.ctimensec) = (seconds(times[2]), times[2].1);
        attr
    }

    /// The same as statx has it. A birth time is not known.
    pub(super) fn statx(&self, seen: Option<&Metadata>) -> Statx {
        let attr = self.attr(seen);
        let time = |s: u64, n: u32| StatxTime { tv_sec: s as i64, tv_nsec: n, reserved: 0 };
        Statx {
            mask: libc::STATX_BASIC_STATS,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: attr.mode as u16,
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

/// What the image says of itself; may wait where [`FuseShared::looks_wait`].
pub(super) fn look(disk: &Disk) -> Option<Metadata> {
    disk.image()?.metadata().ok()
}

/// `errno`, negative, of an error.
pub(super) fn errno(e: &io::Error) -> i32 {
    -e.raw_os_error().unwrap_or(libc::EIO)
}
