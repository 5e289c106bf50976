//! A worker's io_uring, as queues and backends use it.
//!
//! One worker thread owns it, and nothing here is shared. Operations are pushed, and go to the
//! kernel in one `io_uring_enter` for each batch. Each carries a [`Token`], with which its
//! completion finds its queue. The memory that a pushed operation names must stay valid until its
//! completion was taken.

mod clients;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::process::{Resource, getrlimit};
use vshunt_sandbox as sandbox;

pub(super) use self::clients::CLIENT_INDEX;
use self::clients::Clients;
pub use self::clients::{ClientId, RingClient};

/// Operations that fit between two enters. For more, an extra enter is made.
const SQ_ENTRIES: u32 = 256;
/// Operations of devices that one enter submits.
const DEVICE_BATCH: u32 = 8;
/// Completions that fit before the kernel puts them on its overflow list.
const CQ_ENTRIES: u32 = 1024;
/// Fixed files of a worker. Each disk takes at most two.
const FIXED_FILES: u32 = 256;

/// Most io-wq threads that one ring may have for operations on files and block devices.
///
/// Each is a kernel thread (some 30 KiB). The limit keeps a worker with very many queues from using
/// up the threads of its service or user (systemd's TasksMax). Above it, a disk that hangs can
/// delay the operations of other disks on the same worker.
pub(super) const IO_WQ_THREADS_MAX: u32 = 2048;

/// Widths of the parts of a [`Token`]. Together they fill `user_data`.
const SLOT_BITS: u32 = 16;
const OP_BITS: u32 = 8;
const INDEX_BITS: u32 = 16;
const GENERATION_BITS: u32 = 24;
const _: () = assert!(SLOT_BITS + OP_BITS + INDEX_BITS + GENERATION_BITS == 64);

/// Names one operation: the queue of this worker, the queue's slot, the kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The queue's index among the worker's queues.
    pub index: u16,
    /// Low bits of that index's use count, by which a completion for a queue that has left is
    /// recognised.
    pub generation: u32,
    /// The slot, which the queue chooses.
    pub slot: u16,
    /// The kind of operation, which the queue chooses.
    pub op: u8,
}

impl Token {
    /// Largest generation. The next one is 0.
    pub const GENERATION_MAX: u32 = (1 << GENERATION_BITS) - 1;

    /// Packs into `user_data`.
    #[inline]
    pub fn pack(self) -> u64 {
        debug_assert!(self.generation <= Self::GENERATION_MAX);
        u64::from(self.slot)
            | u64::from(self.op) << SLOT_BITS
            | u64::from(self.index) << (SLOT_BITS + OP_BITS)
            | u64::from(self.generation) << (SLOT_BITS + OP_BITS + INDEX_BITS)
    }

    /// The reverse of [`pack`](Self::pack).
    #[inline]
    pub fn unpack(data: u64) -> Self {
        Self {
            slot: data as u16,
            op: (data >> SLOT_BITS) as u8,
            index: (data >> (SLOT_BITS + OP_BITS)) as u16,
            generation: (data >> (SLOT_BITS + OP_BITS + INDEX_BITS)) as u32,
        }
    }

    /// Returns a token of the same queue with another slot and operation.
    #[inline]
    pub fn with(self, slot: u16, op: u8) -> Self {
        Self { slot, op, ..self }
    }
}

/// A file that is registered with a ring: a fixed file if there was room, otherwise the plain
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UringFile {
    /// Index among the ring's registered files.
    Fixed(u32),
    /// A plain descriptor.
    Plain(RawFd),
}

/// Applies an opcode constructor to a [`UringFile`] of either kind.
#[macro_export]
macro_rules! on_file {
    ($file:expr, |$fd:ident| $make:expr) => {
        match $file {
            $crate::UringFile::Fixed(i) => {
                let $fd = io_uring::types::Fixed(i);
                $make
            }
            $crate::UringFile::Plain(f) => {
                let $fd = io_uring::types::Fd(f);
                $make
            }
        }
    };
}

/// One io_uring with its registered files. Its submission entries are wide (SQE128), as
/// FUSE-over-io_uring requires.
pub struct Uring {
    io: IoUring<squeue::Entry128>,
    /// For each descriptor, its fixed index and how many queues registered it.
    files: HashMap<RawFd, FixedFile>,
    free: Vec<u32>,
    /// Operations that are pushed and not completed, for draining.
    pending: u64,
    /// Operations for devices that were pushed since the last enter.
    for_devices: u32,
    /// Completions of operations that a system call did at once; see [`done`](Self::done).
    at_once: Vec<Completion>,
    /// Completions of the worker's next iteration; see [`defer`](Self::defer).
    deferred: Vec<Completion>,
    /// What has operations of its own here.
    clients: Clients,
    /// The taskrun flag is set although no task work waits. The kernel sets it after it has added
    /// work, possibly so late that the work is done by then. The flag stays set until there is work
    /// again.
    stale: bool,
    /// Threads that io-wq may have for operations on files. 0: the kernel's own limit.
    io_wq_threads: u32,
    /// The lowest and the highest limit that is requested.
    io_wq_bounds: (u32, u32),
}

struct FixedFile {
    index: Option<u32>,
    users: u32,
    /// Keeps the descriptor, and so its number, open while it is registered.
    _file: Arc<dyn AsRawFd + Send + Sync>,
}

impl Uring {
    /// Makes an io_uring that only the calling thread may use.
    pub fn new() -> io::Result<Self> {
        let restricted = sandbox::restricts_rings();
        let mut builder = IoUring::<squeue::Entry128>::builder();
        builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_cqsize(CQ_ENTRIES);
        if restricted {
            builder.setup_r_disabled();
        }
        let uring = builder.build(SQ_ENTRIES)?;
        let free = match uring.submitter().register_files_sparse(FIXED_FILES) {
            Ok(()) => (0..FIXED_FILES).rev().collect(),
            Err(_) => Vec::new(),
        };
        if restricted {
            restrict(&uring)?;
        }
        Ok(Self {
            io: uring,
            files: HashMap::new(),
            free,
            pending: 0,
            for_devices: 0,
            at_once: Vec::new(),
            deferred: Vec::new(),
            clients: Clients::default(),
            stale: false,
            io_wq_threads: 0,
            // Determined here, because a worker's thread may not query limits later.
            io_wq_bounds: io_wq_bounds(),
        })
    }

    /// Lets `waits` operations on files wait at the same time, as far as [`IO_WQ_THREADS_MAX`] and
    /// RLIMIT_NPROC allow.
    ///
    /// A flush, an fallocate and a buffered read or write each occupy a thread of io-wq until the
    /// file answers. The kernel's own limit is four threads for each CPU, for the whole ring. A
    /// disk that hangs would use them up for all disks.
    pub(super) fn allow_waits(&mut self, waits: u32) {
        let (least, most) = self.io_wq_bounds;
        let wanted = waits.min(most).max(least);
        if wanted == self.io_wq_threads {
            return;
        }
        // 0 leaves the unbounded workers, which are for files of other kinds, as they are. If the
        // call fails, the former limit holds.
        if self.io.submitter().register_iowq_max_workers(&mut [wanted, 0]).is_ok() {
            self.io_wq_threads = wanted;
        }
    }

    /// Registers a file. Each call is to be undone by one of
    /// [`unregister_file`](Self::unregister_file).
    pub fn register_file(&mut self, file: &Arc<dyn AsRawFd + Send + Sync>) -> UringFile {
        let fd = file.as_raw_fd();
        let (free, uring) = (&mut self.free, &self.io);
        let known = self.files.entry(fd).or_insert_with(|| {
            let index = free.pop().filter(|&i| {
                let fixed = uring.submitter().register_files_update(i, &[fd]).is_ok_and(|n| n == 1);
                if !fixed {
                    free.push(i);
                }
                fixed
            });
            FixedFile { index, users: 0, _file: file.clone() }
        });
        known.users += 1;
        known.index.map_or(UringFile::Plain(fd), UringFile::Fixed)
    }

    /// Undoes one [`register_file`](Self::register_file).
    pub fn unregister_file(&mut self, fd: RawFd) {
        let Some(known) = self.files.get_mut(&fd) else { return };
        known.users -= 1;
        if known.users > 0 {
            return;
        }
        if let Some(FixedFile { index: Some(i), .. }) = self.files.remove(&fd) {
            // If this fails, the kernel keeps the file open until the next one takes its index.
            let _ = self.io.submitter().register_files_update(i, &[-1]);
            self.free.push(i);
        }
    }

    /// Queues an operation for the next enter.
    ///
    /// # Safety
    /// Every buffer that `entry` names stays valid until its completion was taken. The queue that
    /// pushes it upholds this: with operations in flight it does not leave its worker and does not
    /// drop its memory table.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        // SAFETY: the caller promises that what the entry names is valid until its completion.
        unsafe { self.push_wide(entry.into(), token) }
    }

    /// Tells that a device does the operation that was pushed last. After [`DEVICE_BATCH`] of them
    /// they are submitted, so that the device begins while the next requests are taken: the kernel
    /// passes on what one enter submits only at the end of it.
    #[inline]
    pub fn pushed_for_device(&mut self) {
        self.for_devices += 1;
        if self.for_devices == DEVICE_BATCH {
            self.submit_pushed();
        }
    }

    /// Queues an entry of 128 bytes, like [`push`](Self::push).
    ///
    /// # Safety
    /// That of [`push`](Self::push).
    #[inline]
    pub unsafe fn push_wide(&mut self, entry: squeue::Entry128, token: Token) {
        let entry = entry.user_data(token.pack());
        self.pending += 1;
        loop {
            // SAFETY: the caller promises that what the entry names is valid until its completion.
            if unsafe { self.io.submission().push(&entry) }.is_ok() {
                return;
            }
            self.make_room();
        }
    }

    /// Submits the pushed operations, so that more fit.
    #[cold]
    fn make_room(&mut self) {
        if !self.submit_pushed() {
            // The kernel has no room until completions are taken. An enter with GETEVENTS moves
            // them to its overflow list.
            let _ = self.io.submitter().submit_and_wait(0);
        }
    }

    /// Submits the pushed operations. Returns false if the kernel takes none now.
    fn submit_pushed(&mut self) -> bool {
        self.for_devices = 0;
        let Err(e) = self.io.submit() else { return true };
        if !passing(&e) {
            // Operations on the ring can be neither served nor returned: see `pool`, at the error
            // of an enter.
            tracing::error!("a worker's io_uring failed ({e}); ending at once");
            std::process::abort();
        }
        false
    }

    /// Asks for a completion for each event of a pollable file, until [`cancel`](Self::cancel).
    /// Events are edges: an eventfd need not be read.
    pub fn poll(&mut self, fd: RawFd, token: Token) {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        // SAFETY: a poll names no memory.
        unsafe { self.push(entry, token) }
    }

    /// Asks for one completion when a pollable file is ready for reading.
    pub fn poll_once(&mut self, fd: RawFd, token: Token) {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build();
        // SAFETY: a poll names no memory.
        unsafe { self.push(entry, token) }
    }

    /// Asks for a completion after the time `after`.
    pub fn timeout(&mut self, after: &'static types::Timespec, token: Token) {
        let entry = opcode::Timeout::new(after).build();
        // SAFETY: the time is `'static`.
        unsafe { self.push(entry, token) }
    }

    /// Asks for a completion after the time `after`, like [`timeout`](Self::timeout).
    ///
    /// # Safety
    /// `after` stays valid and unchanged until its completion was taken.
    pub unsafe fn timer(&mut self, after: *const types::Timespec, token: Token) {
        // SAFETY: the caller promises that the time stays valid.
        unsafe { self.push(opcode::Timeout::new(after).build(), token) }
    }

    /// Ends the operation with that token. It completes, with -ECANCELED if it was still in flight.
    /// The cancellation itself has no completion.
    pub fn cancel(&mut self, token: Token) {
        let entry = opcode::AsyncCancel::new(token.pack())
            .build()
            .flags(squeue::Flags::SKIP_SUCCESS)
            .user_data(IGNORE);
        self.push_ignored(&entry.into());
    }

    fn push_ignored(&mut self, entry: &squeue::Entry128) {
        loop {
            // SAFETY: such entries name no memory.
            if unsafe { self.io.submission().push(entry) }.is_ok() {
                return;
            }
            self.make_room();
        }
    }

    /// Adds a completion for an operation that a system call has done at once. It is taken like one
    /// of the ring.
    pub fn done(&mut self, token: Token, result: i32) {
        self.pending += 1;
        self.at_once.push(Completion { token, result, more: false });
    }

    /// Adds a completion with 0 to the worker's next iteration. It is for an operation that the
    /// calling thread does itself and has interrupted, so that the worker's other queues are
    /// served.
    pub fn defer(&mut self, token: Token) {
        self.pending += 1;
        self.deferred.push(Completion { token, result: 0, more: false });
    }

    /// Starts an iteration. Completions that were [`defer`](Self::defer)red in the one before can
    /// now be taken.
    #[inline]
    pub(super) fn start_iteration(&mut self) {
        if !self.deferred.is_empty() {
            self.at_once.append(&mut self.deferred);
            // The worker does not rest while there are some, and kicks of other queues must not
            // wait for that.
            self.stale = false;
        }
    }

    /// Returns whether the next iteration already has completions, so the worker must not sleep.
    #[inline]
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Returns the name of this ring for other threads' rings; see [`wake`](Self::wake).
    pub fn id(&self) -> u64 {
        self.io.as_raw_fd() as u64
    }

    /// Counts a completion that has no pushed operation: that of a [`wake`](Self::wake) by another
    /// ring.
    pub fn expect_wake(&mut self) {
        self.pending += 1;
    }

    /// Completes, with 0, the operation that waits with this (packed) token on the ring with that
    /// [`id`](Self::id). The ring has to exist as long as something waits on it.
    pub fn wake(&mut self, id: u64, token: u64) {
        if id != self.id() {
            return self.wake_with(id, token, 0);
        }
        let entry = opcode::Nop::new().build().user_data(token);
        self.push_ignored(&entry.into());
    }

    /// Submits the pushed operations, waits for one completion, and returns its result. For control
    /// threads, with one operation at a time.
    ///
    /// # Errors
    /// Those of io_uring_enter(2).
    pub fn next_result(&mut self) -> io::Result<i32> {
        let mut completions = Vec::new();
        while completions.is_empty() {
            self.start_iteration();
            self.enter(true)?;
            self.reap(&mut completions);
        }
        Ok(completions[0].result)
    }

    /// Submits the pushed operations and waits for nothing. This is the last call of a control
    /// thread on a ring that has woken others.
    ///
    /// # Errors
    /// Those of io_uring_enter(2).
    pub fn send(&mut self) -> io::Result<()> {
        while self.clients.have_asked() || !self.io.submission().is_empty() {
            self.enter(false)?;
        }
        Ok(())
    }

    /// Returns the number of operations that are pushed and not completed.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// Returns whether completions can be taken without an enter.
    #[inline]
    pub(super) fn has_completions(&mut self) -> bool {
        !self.at_once.is_empty() || !self.io.completion().is_empty()
    }

    /// Returns whether only an enter can make progress: operations are pushed, or completions wait
    /// for task work or did not fit.
    #[inline]
    pub(super) fn wants_enter(&mut self) -> bool {
        let asked = self.clients.have_asked();
        let submission = self.io.submission();
        asked || !submission.is_empty() || (submission.taskrun() && !self.stale) || submission.cq_overflow()
    }

    /// Returns whether only an enter can tell if completions wait for task work.
    pub(super) fn must_sleep(&self) -> bool {
        self.stale
    }

    /// Submits the pushed operations and collects completions. Waits for one completion if `wait`.
    /// Returns how many operations were submitted.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<usize> {
        self.submit_clients();
        self.for_devices = 0;
        let flag_alone = self.io.submission().is_empty();
        let wait = wait && self.at_once.is_empty() && self.deferred.is_empty();
        let submitted = match self.io.submitter().submit_and_wait(usize::from(wait)) {
            Ok(count) => count,
            Err(e) if passing(&e) => 0,
            Err(e) => return Err(e),
        };
        self.stale = flag_alone && !wait && !self.has_completions() && self.io.submission().taskrun();
        Ok(submitted)
    }

    /// Sleeps until there is a completion, or for at most `limit`. Returns false if the limit ended
    /// the sleep.
    pub(super) fn wait(&mut self, limit: Option<std::time::Duration>) -> io::Result<bool> {
        self.submit_clients();
        self.for_devices = 0;
        let Some(limit) = limit.filter(|_| self.at_once.is_empty() && self.deferred.is_empty()) else {
            return self.enter(true).map(|_| true);
        };
        let time = types::Timespec::from(limit);
        let args = types::SubmitArgs::new().timespec(&time);
        self.stale = false;
        match self.io.submitter().submit_with_args(1, &args) {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => Ok(false),
            Err(e) if passing(&e) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Moves the available completions to `into`.
    #[inline]
    pub(super) fn reap(&mut self, into: &mut Vec<Completion>) {
        for cqe in self.io.completion() {
            if cqe.user_data() == IGNORE {
                continue;
            }
            let more = cqueue::more(cqe.flags());
            let token = Token::unpack(cqe.user_data());
            let completion = Completion { token, result: cqe.result(), more };
            if token.index == CLIENT_INDEX {
                self.clients.arrive(completion);
                continue;
            }
            if !more {
                self.pending -= 1;
            }
            into.push(completion);
        }
        if self.clients.have_arrived() {
            self.complete_clients();
        }
        self.pending -= self.at_once.len() as u64;
        into.append(&mut self.at_once);
    }
}

/// Returns the kernel's own limit of a ring's io-wq threads for files (`io_init_wq_offload`), and
/// the highest limit that may be set.
fn io_wq_bounds() -> (u32, u32) {
    // SAFETY: the call only reads a number.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    let kernels = u32::try_from(cpus).unwrap_or(1).max(1).saturating_mul(4).min(SQ_ENTRIES);
    let processes = getrlimit(Resource::Nproc).current.unwrap_or(u64::MAX);
    (kernels, u32::try_from(processes).unwrap_or(u32::MAX).min(IO_WQ_THREADS_MAX))
}

/// Makes the ring refuse operations that the daemon does not use, and enables it.
fn restrict(uring: &IoUring<squeue::Entry128>) -> io::Result<()> {
    let operations = sandbox::URING_OPERATIONS.map(Restriction::sqe_op);
    let registrations = sandbox::URING_REGISTRATIONS.map(Restriction::register_op);
    let flags = [Restriction::sqe_flags_allowed(sandbox::URING_FLAGS)];
    let mut all: Vec<_> = operations.into_iter().chain(registrations).chain(flags).collect();
    uring.submitter().register_restrictions(&mut all)?;
    uring.submitter().register_enable_rings()
}

/// Returns whether an enter that failed in this way may be repeated.
fn passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

/// The completion of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The token that it was pushed with.
    pub(super) token: Token,
    /// The kernel's result.
    pub(super) result: i32,
    /// Whether the operation has more completions.
    pub(super) more: bool,
}

/// `user_data` of operations whose completion is ignored: a token with every bit set, which no
/// queue has.
const IGNORE: u64 = u64::MAX;

impl Uring {
    /// Passes each completion to `take` until no operation is in flight. For threads that use a
    /// ring without a worker.
    pub fn run_until_idle(&mut self, mut take: impl FnMut(&mut Self, Token, i32)) -> io::Result<()> {
        let mut taken = Vec::new();
        while self.pending > 0 {
            self.start_iteration();
            self.enter(true)?;
            self.reap(&mut taken);
            for Completion { token, result, .. } in taken.drain(..) {
                take(self, token, result);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_file_that_cannot_be_had_costs_no_place() {
        struct Closed;
        impl AsRawFd for Closed {
            fn as_raw_fd(&self) -> RawFd {
                RawFd::MAX
            }
        }
        let mut uring = Uring::new().unwrap();
        let free = uring.free.len();
        let file: Arc<dyn AsRawFd + Send + Sync> = Arc::new(Closed);
        assert_eq!(uring.register_file(&file), UringFile::Plain(RawFd::MAX));
        assert_eq!(uring.free.len(), free);
        uring.unregister_file(RawFd::MAX);
        assert_eq!(uring.free.len(), free);
    }

    #[test]
    fn what_was_done_at_once_completes_in_its_order() {
        let mut uring = Uring::new().unwrap();
        let token = |slot| Token { index: 1, generation: 2, slot, op: 3 };
        assert!(!uring.has_completions());
        for slot in 0..3 {
            uring.done(token(slot), -i32::from(slot));
        }
        assert!(uring.has_completions() && !uring.wants_enter());
        // The call does not wait for completions of the kernel.
        assert!(uring.wait(None).unwrap() && uring.wait(Some(std::time::Duration::from_secs(60))).unwrap());
        let mut seen = Vec::new();
        uring.run_until_idle(|_, token, result| seen.push((token, result))).unwrap();
        assert_eq!(seen, [(token(0), 0), (token(1), -1), (token(2), -2)]);
        assert!(uring.pending() == 0 && !uring.has_completions());
    }

    #[test]
    fn operations_of_devices_are_submitted_in_batches() {
        let mut uring = Uring::new().unwrap();
        let push = |uring: &mut Uring| {
            // SAFETY: a no-op names no memory.
            unsafe { uring.push(opcode::Nop::new().build(), Token::unpack(0)) };
        };
        let push_for_device = |uring: &mut Uring| {
            push(uring);
            uring.pushed_for_device();
            uring.io.submission().len()
        };
        let left: Vec<_> = (0..16).map(|_| push_for_device(&mut uring)).collect();
        assert_eq!(left, [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0]);
        // After an enter, the device has all that was pushed, and a batch begins.
        assert_eq!(push_for_device(&mut uring), 1);
        uring.enter(false).unwrap();
        let left: Vec<_> = (0..8).map(|_| push_for_device(&mut uring)).collect();
        assert_eq!(left, [1, 2, 3, 4, 5, 6, 7, 0]);
        // Other operations do not count, and go with them.
        (0..20).for_each(|_| push(&mut uring));
        assert_eq!(uring.io.submission().len(), 20);
        let left: Vec<_> = (0..8).map(|_| push_for_device(&mut uring)).collect();
        assert_eq!(left, [21, 22, 23, 24, 25, 26, 27, 0]);
        let mut seen = 0;
        uring.run_until_idle(|_, _, _| seen += 1).unwrap();
        assert_eq!(seen, 16 + 1 + 8 + 20 + 8);
    }

    #[test]
    fn a_place_that_cannot_be_emptied_is_used_again() {
        let open =
            || -> Arc<dyn AsRawFd + Send + Sync> { Arc::new(std::fs::File::open("/dev/null").unwrap()) };
        let (first, second) = (open(), open());
        let mut uring = Uring::new().unwrap();
        let free = uring.free.len();
        let place = uring.register_file(&first);
        assert!(matches!(place, UringFile::Fixed(_)));
        // Another thread may not change it (EEXIST, IORING_SETUP_SINGLE_ISSUER).
        let fd = first.as_raw_fd();
        let mut uring = std::thread::spawn(move || {
            uring.unregister_file(fd);
            uring
        })
        .join()
        .unwrap();
        assert_eq!(uring.free.len(), free);
        assert_eq!(uring.register_file(&second), place);
        uring.unregister_file(second.as_raw_fd());
        assert_eq!(uring.free.len(), free);
    }

    #[test]
    fn a_ring_that_takes_nothing_ends_the_process() {
        const CHILD: &str = "VSHUNT_TEST_BROKEN_RING";
        if std::env::var_os(CHILD).is_some() {
            // Another thread's io_uring: every enter fails (EEXIST, IORING_SETUP_SINGLE_ISSUER).
            let mut uring = Uring::new().unwrap();
            let pushed = std::thread::spawn(move || {
                for _ in 0..=SQ_ENTRIES {
                    // SAFETY: a no-op names no memory.
                    unsafe { uring.push(opcode::Nop::new().build(), Token::unpack(0)) };
                }
            });
            let _ = pushed.join();
            return;
        }
        use std::os::unix::process::ExitStatusExt;
        let name = "uring::tests::a_ring_that_takes_nothing_ends_the_process";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if std::time::Instant::now() > until {
                child.kill().unwrap();
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
    }
}
