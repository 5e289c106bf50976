//! What a request needs of the image and io_uring has no operation for: done by a thread of the export, so that no worker
//! waits: seeking data and holes, file system statistics, times, other sizes, writes of less than a block, and attributes
//! of an image that another program serves. And what is told to others, which may wait ([`News`]).
//!
//! A queue hands over a [`Task`] and goes on; its eventfd rings when the [`Answer`] is there.

use std::fs::Metadata;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vshunt_types::sync::Locked;

use vshunt_block::Disk;
use vshunt_engine::EventFd;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};

use super::abi::StatfsOut;
use super::gate::Gate;
use super::shared::{errno, look};

/// Answers for one queue. Its lock guards the list; held for a push or a swap.
pub(super) struct Desk {
    answers: Mutex<Vec<(u16, Answer)>>,
    eventfd: Arc<EventFd>,
}

impl Desk {
    pub(super) fn new(eventfd: Arc<EventFd>) -> Self {
        Self { answers: Mutex::default(), eventfd }
    }

    /// Takes what is there.
    pub(super) fn take(&self) -> Vec<(u16, Answer)> {
        std::mem::take(&mut *self.answers.locked())
    }

    fn put(&self, slot: u16, answer: Answer) {
        self.answers.locked().push((slot, answer));
        self.eventfd.signal();
    }
}

/// Bytes of a request's buffer, which stays its own until the task is answered.
pub(super) struct Bytes(pub(super) *const u8, pub(super) usize);
// SAFETY: an address and a length; the queue that made it leaves the bytes alone until the answer.
unsafe impl Send for Bytes {}

/// What is to be done.
pub(super) enum Task {
    /// `lseek` with SEEK_DATA or SEEK_HOLE in a file of that size.
    Seek { offset: u64, size: u64, hole: bool },
    /// `statvfs`.
    Statfs,
    /// `fstat` of an image for which that may wait.
    Look,
    /// `futimens`; of each: seconds, nanoseconds.
    Times { atime: (i64, i64), mtime: (i64, i64) },
    /// A write that is no multiple of blocks; `grow`: another may have cut the file short of it meanwhile.
    Merge { offset: u64, bytes: Bytes, fua: bool, grow: bool },
    /// Another end of the file, while no write is under way.
    Truncate { end: u64 },
    /// Room for what lies before `end`. Here and one after the other, for two that the disk is to grow by may come in any
    /// order, and the later must not cut off what the earlier made.
    Lengthen { end: u64 },
    /// Zeroes at the ends of a range, where they are less than a block; all of it where there is no block between.
    Edges { offset: u64, len: u64, block: u64 },
}

/// How it went.
pub(super) enum Answer {
    /// 0, or a negative errno.
    Done(i32),
    /// Where data or a hole is.
    Offset(u64),
    /// Statistics.
    Statfs(Box<StatfsOut>),
    /// What the image says of itself.
    Looked(Option<Box<Metadata>>),
}

/// What others want to know of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A user of the file gave it another size.
    Resized(u64),
    /// A queue lost part of its strength, or all.
    Broken {
        /// Index within the export.
        queue: u16,
        /// What happened.
        why: String,
    },
}

/// Told on the clerk's thread.
pub type Tell = Box<dyn Fn(News) + Send>;

enum Order {
    Task(Arc<Desk>, u16, Task),
    Tell(News),
}

/// The thread; ends when it is dropped, with all that was ordered done.
pub(super) struct Clerk {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Clerk {
    pub(super) fn start(export: &str, disk: Arc<Disk>, gate: Arc<Gate>, tell: Tell) -> Result<Self> {
        let (orders, todo) = channel::<Order>();
        let run = move || {
            for order in todo {
                match order {
                    Order::Task(desk, slot, task) => {
                        let before = disk.size_bytes();
                        desk.put(slot, do_task(&disk, &gate, &task));
                        if changes_size(&task) && disk.size_bytes() != before {
                            tell(News::Resized(disk.size_bytes()));
                        }
                    }
                    Order::Tell(news) => tell(news),
                }
            }
        };
        let builder = std::thread::Builder::new().name(format!("{export}/clerk").chars().take(15).collect());
        let thread = sandbox::spawn(ThreadKind::Mount, builder, run)
            .map_err(|e| Error::io(format_args!("cannot start a thread for export {export}"), e))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn order(&self, desk: &Arc<Desk>, slot: u16, task: Task) {
        self.send(Order::Task(desk.clone(), slot, task));
    }

    pub(super) fn tell(&self, news: News) {
        self.send(Order::Tell(news));
    }

    fn send(&self, order: Order) {
        // Its thread ends only after the sender is gone.
        let _ = self.orders.as_ref().expect("until it is dropped").send(order);
    }
}

impl Drop for Clerk {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn done(result: io::Result<()>) -> Answer {
    Answer::Done(result.map_or_else(|e| errno(&e), |()| 0))
}

fn changes_size(task: &Task) -> bool {
    matches!(task, Task::Lengthen { .. } | Task::Truncate { .. } | Task::Merge { grow: true, .. })
}

fn do_task(disk: &Arc<Disk>, gate: &Gate, task: &Task) -> Answer {
    match *task {
        Task::Seek { offset, size, hole } => match seek(disk, offset, size, hole) {
            Ok(at) => Answer::Offset(at),
            Err(e) => Answer::Done(errno(&e)),
        },
        Task::Statfs => match statfs(disk) {
            Ok(out) => Answer::Statfs(Box::new(out)),
            Err(e) => Answer::Done(errno(&e)),
        },
        Task::Look => Answer::Looked(look(disk).map(Box::new)),
        Task::Times { atime, mtime } => done(times(disk, atime, mtime)),
        Task::Merge { offset, bytes: Bytes(ptr, len), fua, grow } => {
            // SAFETY: a request's buffer, which its queue leaves alone until we answer.
            let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
            done(gate.closed(|| {
                if grow {
                    disk.lengthen(offset + len as u64)?;
                }
                disk.merge(offset, bytes, fua)
            }))
        }
        // A write of the last cluster that does not know the disk's new end would be in the way.
        Task::Lengthen { end } if disk.is_qcow2() => done(gate.closed(|| disk.lengthen(end).map(drop))),
        Task::Lengthen { end } => done(disk.lengthen(end).map(drop)),
        Task::Truncate { end } => done(gate.closed(|| disk.truncate(end))),
        Task::Edges { offset, len, block } => done(gate.closed(|| edges(disk, offset, len, block))),
    }
}

fn seek(disk: &Arc<Disk>, offset: u64, size: u64, hole: bool) -> io::Result<u64> {
    if offset >= size {
        return Err(io::Error::from_raw_os_error(libc::ENXIO));
    }
    let whole = if hole { size } else { offset };
    let Some(file) = disk.image() else {
        // There is a hole at the end, and nowhere else is data.
        return match disk.seek(offset, hole)?.min(size) {
            at if at >= size && !hole => Err(io::Error::from_raw_os_error(libc::ENXIO)),
            at => Ok(at),
        };
    };
    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
    // SAFETY: a call without memory. (Nobody uses the descriptor's own offset.)
    let at = unsafe { libc::lseek(file.as_raw_fd(), offset as libc::off_t, whence) };
    if at < 0 {
        let e = io::Error::last_os_error();
        // A block device has no map: all of it is data.
        return if e.raw_os_error() == Some(libc::EINVAL) { Ok(whole) } else { Err(e) };
    }
    Ok((at as u64).min(size))
}

fn statfs(disk: &Disk) -> io::Result<StatfsOut> {
    let Some(file) = disk.image() else {
        let blocks = disk.size_bytes() / 4096;
        return Ok(StatfsOut {
            blocks,
            bsize: 4096,
            frsize: 4096,
            namelen: 255,
            files: 1,
            ..Default::default()
        });
    };
    let mut vfs = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: room for one statvfs, which the call fills when it succeeds.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), vfs.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: filled.
    let vfs = unsafe { vfs.assume_init() };
    Ok(StatfsOut {
        blocks: vfs.f_blocks,
        bfree: vfs.f_bfree,
        bavail: vfs.f_bavail,
        files: vfs.f_files,
        ffree: vfs.f_ffree,
        bsize: vfs.f_bsize as u32,
        namelen: vfs.f_namemax as u32,
        frsize: vfs.f_frsize as u32,
        ..Default::default()
    })
}

fn times(disk: &Disk, atime: (i64, i64), mtime: (i64, i64)) -> io::Result<()> {
    let Some(file) = disk.image() else { return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)) };
    let times = [atime, mtime].map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
    // SAFETY: two timespecs, as the call reads them.
    match unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn edges(disk: &Arc<Disk>, offset: u64, len: u64, block: u64) -> io::Result<()> {
    let end = offset + len;
    let (first, last) = (offset.next_multiple_of(block), end & !(block - 1));
    let zero = |from: u64, to: u64| match from < to {
        true => disk.merge(from, &vec![0; (to - from) as usize], false),
        false => Ok(()),
    };
    if first >= last {
        return zero(offset, end);
    }
    zero(offset, first)?;
    zero(last, end)
}
