//! The blocking thread of a mount: does what a request needs and io_uring has no operation for.
//!
//! These are: seeking data and holes, file system statistics, times, changes of the size, writes of
//! less than a block, and attributes of an image that another program serves. Workers never wait
//! for them. The thread also reports [`MountEvent`]s, since their handler may wait.
//!
//! A queue hands over a [`Task`] and continues. Its eventfd is signalled when the [`TaskResult`] is
//! in its [`CompletionQueue`].

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vshunt_types::sync::Locked;

use vshunt_block::{Disk, FileAttributes, NewTime};
use vshunt_engine::EventFd;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};

use super::rmw_lock::RmwLock;
use crate::abi::StatfsOut;
use vshunt_types::convert::{at_most, to_usize};

/// The unit of the space of a disk that has no file system of its own, bytes.
const BLOCK_BYTES: u64 = 4096;

/// Results of tasks for one queue, and interrupts of its requests.
pub(super) struct CompletionQueue {
    /// Slots and results. Held for a push or a swap.
    list: Mutex<Vec<(u16, TaskResult)>>,
    /// Requests of any queue whose tasks have got a signal. Held for a push or a swap.
    interrupts: Mutex<Vec<u64>>,
    eventfd: Arc<EventFd>,
}

impl CompletionQueue {
    /// A queue whose `eventfd` is signalled after each result.
    pub(super) fn new(eventfd: Arc<EventFd>) -> Self {
        Self { list: Mutex::default(), interrupts: Mutex::default(), eventfd }
    }

    /// Takes all results: slots and results.
    pub(super) fn take(&self) -> Vec<(u16, TaskResult)> {
        std::mem::take(&mut *self.list.locked())
    }

    /// Takes the requests that were interrupted, by their `unique`.
    pub(super) fn take_interrupts(&self) -> Vec<u64> {
        std::mem::take(&mut *self.interrupts.locked())
    }

    /// Notes that the task of a request, maybe one of this queue, has got a signal.
    pub(super) fn interrupt(&self, unique: u64) {
        self.interrupts.locked().push(unique);
        self.eventfd.signal();
    }

    fn push(&self, slot: u16, result: TaskResult) {
        self.list.locked().push((slot, result));
        self.eventfd.signal();
    }
}

/// The data of a request: address and length. The slot's buffer belongs to the request until the
/// task has completed.
pub(super) struct BufferBytes(pub(super) *const u8, pub(super) usize);
// SAFETY: the queue that made the value uses the bytes again only after the result of the task, and
// the buffers are not unmapped while a task is in flight (the queue is not at rest then).
unsafe impl Send for BufferBytes {}

/// Work for the blocking thread.
pub(super) enum Task {
    /// `lseek` with SEEK_DATA or SEEK_HOLE in a file of that size, bytes.
    Seek { offset: u64, size: u64, hole: bool },
    /// `statvfs`.
    Statfs,
    /// The attributes of a disk, if that may take long.
    Attributes,
    /// `futimens`.
    Times { atime: NewTime, mtime: NewTime },
    /// A write that is no multiple of blocks. `grow`: another request may have shortened the file
    /// meanwhile.
    Merge { offset: u64, bytes: BufferBytes, fua: bool, grow: bool },
    /// Sets the size of the file while no write is in flight.
    Truncate { end: u64 },
    /// Makes the file at least `end` bytes long. One after the other on this thread: two such
    /// requests may come in any order, and the later one must not cut off what the earlier one
    /// made.
    Lengthen { end: u64 },
    /// Zeroes the ends of a range that are less than a block, and the whole range where it contains
    /// no whole block.
    ZeroEdges { offset: u64, len: u64, block: u64 },
}

impl Task {
    fn changes_size(&self) -> bool {
        matches!(self, Self::Lengthen { .. } | Self::Truncate { .. } | Self::Merge { grow: true, .. })
    }
}

/// Result of a task.
pub(super) enum TaskResult {
    /// 0, or a negative errno.
    Done(i32),
    /// Where data or a hole begins.
    Offset(u64),
    /// File system statistics.
    Statfs(Box<StatfsOut>),
    /// Attributes of the disk as a file.
    Attributes(Box<FileAttributes>),
}

/// What happened to a mount, for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MountEvent {
    /// A user of the file changed its size; the new one, bytes.
    Resized(u64),
    /// A queue lost one or all of its entries.
    QueueBroken {
        /// Index within the export.
        queue: u16,
        /// What happened.
        reason: String,
    },
}

/// Called on the blocking thread with each event.
pub(crate) type EventHandler = Box<dyn Fn(MountEvent) + Send>;

enum Message {
    Task(Arc<CompletionQueue>, u16, Task),
    Report(MountEvent),
}

/// See the module. When it is dropped the thread completes all tasks and ends.
pub(super) struct BlockingThread {
    messages: Option<Sender<Message>>,
    thread: Option<JoinHandle<()>>,
}

impl BlockingThread {
    /// Starts the thread for an export.
    ///
    /// # Errors
    /// The system's: no thread.
    pub(super) fn start(
        export: &str,
        disk: Arc<Disk>,
        lock: Arc<RmwLock>,
        on_event: EventHandler,
    ) -> Result<Self> {
        let (messages, received) = channel::<Message>();
        let run = move || {
            for message in received {
                match message {
                    Message::Task(completions, slot, task) => {
                        let before = disk.size_bytes();
                        completions.push(slot, run_task(&disk, &lock, &task));
                        if task.changes_size() && disk.size_bytes() != before {
                            on_event(MountEvent::Resized(disk.size_bytes()));
                        }
                    }
                    Message::Report(event) => on_event(event),
                }
            }
        };
        let name = format!("{export}/blocking").chars().take(15).collect();
        let builder = std::thread::Builder::new().name(name);
        let thread = sandbox::spawn(ThreadKind::Mount, builder, run)
            .map_err(|e| Error::io(format_args!("cannot start a thread for export {export}"), e))?;
        Ok(Self { messages: Some(messages), thread: Some(thread) })
    }

    /// Has a task of the slot `slot` done. The result goes to `completions`.
    pub(super) fn submit(&self, completions: &Arc<CompletionQueue>, slot: u16, task: Task) {
        self.send(Message::Task(completions.clone(), slot, task));
    }

    /// Has an event reported.
    pub(super) fn report(&self, event: MountEvent) {
        self.send(Message::Report(event));
    }

    fn send(&self, message: Message) {
        if let Some(messages) = &self.messages {
            // The thread receives until the sender is dropped.
            let _ = messages.send(message);
        }
    }
}

impl Drop for BlockingThread {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The errno of an error, negative.
fn negative_errno(e: &io::Error) -> i32 {
    -e.raw_os_error().unwrap_or(libc::EIO)
}

fn done(result: io::Result<()>) -> TaskResult {
    TaskResult::Done(result.map_or_else(|e| negative_errno(&e), |()| 0))
}

fn run_task(disk: &Arc<Disk>, lock: &RmwLock, task: &Task) -> TaskResult {
    match *task {
        Task::Seek { offset, size, hole } => match seek(disk, offset, size, hole) {
            Ok(at) => TaskResult::Offset(at),
            Err(e) => TaskResult::Done(negative_errno(&e)),
        },
        Task::Statfs => match statfs(disk) {
            Ok(out) => TaskResult::Statfs(Box::new(out)),
            Err(e) => TaskResult::Done(negative_errno(&e)),
        },
        Task::Attributes => TaskResult::Attributes(Box::new(disk.file_attributes())),
        Task::Times { atime, mtime } => done(disk.set_file_times(atime, mtime)),
        Task::Merge { offset, bytes: BufferBytes(ptr, len), fua, grow } => {
            // SAFETY: the bytes are the data of a request. Its queue does not use or unmap them
            // before it has the result.
            let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
            done(lock.exclusively(|| {
                if grow {
                    disk.lengthen(offset + len as u64)?;
                }
                disk.merge(offset, bytes, fua)
            }))
        }
        // A write to the last cluster that does not know the new size must not be in flight.
        Task::Lengthen { end } if disk.is_qcow2() => done(lock.exclusively(|| disk.lengthen(end).map(drop))),
        Task::Lengthen { end } => done(disk.lengthen(end).map(drop)),
        Task::Truncate { end } => done(lock.exclusively(|| disk.truncate(end))),
        Task::ZeroEdges { offset, len, block } => {
            done(lock.exclusively(|| zero_edges(disk, offset, len, block)))
        }
    }
}

fn seek(disk: &Arc<Disk>, offset: u64, size: u64, hole: bool) -> io::Result<u64> {
    if offset >= size {
        return Err(io::Error::from_raw_os_error(libc::ENXIO));
    }
    let whole = if hole { size } else { offset };
    let Some(file) = disk.image() else {
        // The end of the file counts as a hole, and has no data after it.
        return match disk.seek(offset, hole)?.min(size) {
            at if at >= size && !hole => Err(io::Error::from_raw_os_error(libc::ENXIO)),
            at => Ok(at),
        };
    };
    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
    let from = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::ENXIO))?;
    // SAFETY: lseek takes no memory. It moves the descriptor's own offset, which no other code
    // uses.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    match u64::try_from(at) {
        Ok(at) => Ok(at.min(size)),
        Err(_) => match io::Error::last_os_error() {
            // A block device has no map: all of it is data.
            e if e.raw_os_error() == Some(libc::EINVAL) => Ok(whole),
            e => Err(e),
        },
    }
}

fn statfs(disk: &Disk) -> io::Result<StatfsOut> {
    let Some(file) = disk.image() else {
        // A file system of the size of the disk.
        let free = disk.free_bytes();
        return Ok(StatfsOut {
            blocks: disk.size_bytes() / BLOCK_BYTES,
            bfree: free.map_or(0, |free| free.unallocated / BLOCK_BYTES),
            bavail: free.map_or(0, |free| free.available / BLOCK_BYTES),
            bsize: at_most(BLOCK_BYTES, u32::MAX),
            frsize: at_most(BLOCK_BYTES, u32::MAX),
            namelen: 255,
            files: 1,
            ..Default::default()
        });
    };
    let mut vfs = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `vfs` has room for the one statvfs that the call writes.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), vfs.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it has written all of it.
    let vfs = unsafe { vfs.assume_init() };
    Ok(StatfsOut {
        blocks: vfs.f_blocks,
        bfree: vfs.f_bfree,
        bavail: vfs.f_bavail,
        files: vfs.f_files,
        ffree: vfs.f_ffree,
        bsize: at_most(vfs.f_bsize, u32::MAX),
        namelen: at_most(vfs.f_namemax, u32::MAX),
        frsize: at_most(vfs.f_frsize, u32::MAX),
        ..Default::default()
    })
}

fn zero_edges(disk: &Arc<Disk>, offset: u64, len: u64, block: u64) -> io::Result<()> {
    let end = offset + len;
    let (first, last) = (offset.next_multiple_of(block), end & !(block - 1));
    let zero = |from: u64, to: u64| match from < to {
        true => disk.merge(from, &vec![0; to_usize(to - from)], false),
        false => Ok(()),
    };
    if first >= last {
        return zero(offset, end);
    }
    zero(offset, first)?;
    zero(last, end)
}
