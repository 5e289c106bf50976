//! Copy before write: copies a disk as it was at one point in time, while guests write to it.
//!
//! A write to a block that is not copied yet first reads the old data, on its own handle and
//! worker, and passes it to the copy queue. It waits for that read, and for reads of the same
//! blocks by other writes, but not for the target. If all memory for old data is in use, it waits
//! until the copy queue has written some. When a job ends for any reason, all waiting writes
//! continue.
//!
//! With a fleecing file (`fleece`), the write also stores the old data there, and returns the
//! memory. The copy queue reads the file later, in the order of the disk.
//!
//! What must never happen: a write replaces a block while it is still being read for the copy, or
//! before its old data is in the fleecing file; a waiting write is not woken.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::*, fence};
use std::sync::{Mutex, MutexGuard};

use qcow2::Waker;
use vshunt_engine::EventFd;
use vshunt_types::sync::Locked;

use super::bits::Bits;
use super::bounce::AlignedBuf;
use super::fleece::Fleece;
use super::wake_now::wake_now;

/// Most bytes of old data that one read takes.
const READ_BYTES_MAX: u64 = 256 << 10;
/// Memory for old data that is not in the target yet, bytes.
const HELD_BYTES_MAX: usize = 32 << 20;
/// The value of `ended` while the copy runs.
const RUNNING: i32 = 1;

/// Old data of some blocks.
pub struct OldData {
    /// The blocks.
    pub(super) blocks: Range<u64>,
    /// The range on the disk, bytes.
    pub(super) bytes: Range<u64>,
    pub(super) buf: AlignedBuf,
}

impl OldData {
    /// Returns the start of the range on the disk, bytes.
    pub fn offset(&self) -> u64 {
        self.bytes.start
    }

    /// Returns the range on the disk, bytes.
    pub fn bytes(&self) -> Range<u64> {
        self.bytes.clone()
    }

    /// Returns the data.
    pub fn contents(&mut self) -> &mut [u8] {
        let len = (self.bytes.end - self.bytes.start) as usize;
        &mut self.buf.bytes()[..len]
    }
}

/// Reads and writes in flight, and the memory for old data.
#[derive(Default)]
struct State {
    /// Writes that wait for a read of these blocks.
    waiting: Vec<(Range<u64>, Waker)>,
    /// Number of reads in flight.
    reads: usize,
    /// Old data that was read and is not in the target yet.
    full: VecDeque<OldData>,
    /// Writes that wait for memory.
    no_memory: Vec<Waker>,
    /// Bytes of all buffers in use.
    held: usize,
    /// Buffers for later reads. Together with the buffers in use they take at most
    /// [`HELD_BYTES_MAX`].
    spare: Vec<AlignedBuf>,
    spare_bytes: usize,
}

/// A copy, shared by the handles of the source and the copy queue.
pub struct CopyBeforeWrite {
    /// Blocks to be copied whose read has not started.
    todo: Bits,
    /// Blocks that are being read, or stored in the fleecing file. A bit is set here before it is
    /// cleared in `todo`.
    reading: Bits,
    /// What is in the fleecing file. None: there is none, and old data stays in memory.
    fleece: Option<Fleece>,
    /// Guards reads, waiting writes and memory. Held only for look-ups, not for I/O.
    state: Mutex<State>,
    /// Length of `State::full`, to be read without the lock.
    full: AtomicUsize,
    /// [`RUNNING`], or how the copy ended: 0 if it was stopped, else a negative errno. Changed
    /// while the lock is held.
    ended: AtomicI32,
    /// Whether the copy ended because the fleecing file could not be written.
    fleece_failed: AtomicBool,
    /// Wakes the copy queue.
    eventfd: EventFd,
    /// Whether the copy queue sleeps.
    asleep: AtomicBool,
}

/// What a write does next.
pub(super) enum Next {
    /// It starts the write.
    Write,
    /// It waits for a wake-up.
    Wait,
    /// It reads the old data into this buffer first, then calls [`CopyBeforeWrite::read`] or
    /// `read_failed`.
    Read(OldData),
}

impl CopyBeforeWrite {
    /// Starts a copy of the blocks that are set in `todo`.
    ///
    /// # Errors
    /// `OutOfMemory`, and those of the system.
    pub fn new(todo: Bits) -> std::io::Result<Self> {
        let reading = Bits::new(todo.size(), todo.granularity().trailing_zeros())
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            todo,
            reading,
            fleece: None,
            state: Mutex::default(),
            full: AtomicUsize::new(0),
            ended: AtomicI32::new(RUNNING),
            fleece_failed: AtomicBool::new(false),
            eventfd: EventFd::make()?,
            asleep: AtomicBool::new(false),
        })
    }

    /// Makes writes store old data in the fleecing file of the disk
    /// ([`Disk::set_fleece`](super::Disk::set_fleece)).
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn fleeced(mut self) -> std::io::Result<Self> {
        let fleece = Fleece::new(&self.todo).ok_or(std::io::ErrorKind::OutOfMemory)?;
        self.fleece = Some(fleece);
        Ok(self)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Returns the blocks whose read has not started.
    pub fn todo(&self) -> &Bits {
        &self.todo
    }

    /// Returns whether a write to these bytes has to call [`next`](Self::next) first.
    #[inline]
    pub(super) fn concerns(&self, bytes: Range<u64>) -> bool {
        let blocks = self.todo.blocks(bytes);
        // In this order: a reader sets its bit in `reading` before it clears the one in `todo`.
        let concerns = self.todo.any(blocks.clone()) || self.reading.any(blocks);
        // The write comes after the marks of its blocks: see `frozen::see`.
        fence(Release);
        concerns
    }

    /// Returns what a write to these bytes does next.
    pub(super) fn next(&self, bytes: Range<u64>, waker: Waker) -> Next {
        let blocks = self.todo.blocks(bytes);
        let mut state = self.state();
        if self.has_ended().is_some() {
            return Next::Write;
        }
        let most = (READ_BYTES_MAX / self.todo.granularity()).max(1);
        if let Some(run) = self.todo.run(blocks.clone(), most) {
            let bytes = self.todo.bytes(run.clone());
            let len = (bytes.end - bytes.start) as usize;
            if state.held > 0 && state.held + len > HELD_BYTES_MAX {
                state.no_memory.push(waker);
                return Next::Wait;
            }
            let kept = state.spare.iter().rposition(|b| b.len() >= len && b.len() <= 4 * len);
            let buf = kept
                .map(|i| state.spare.swap_remove(i))
                .inspect(|b| state.spare_bytes -= b.len())
                .or_else(|| AlignedBuf::new(len.next_multiple_of(4096)));
            let Some(buf) = buf else {
                if state.held == 0 {
                    // No other read will free memory, so the copy cannot be completed.
                    self.ended.store(-libc::ENOMEM, SeqCst);
                    return Next::Write;
                }
                state.no_memory.push(waker);
                return Next::Wait;
            };
            state.held += buf.len();
            state.reads += 1;
            self.begin_read(run.clone());
            return Next::Read(OldData { blocks: run, bytes, buf });
        }
        if self.reading.any(blocks.clone()) {
            state.waiting.push((blocks, waker));
            return Next::Wait;
        }
        Next::Write
    }

    /// Marks blocks as being read. The lock is held.
    fn begin_read(&self, blocks: Range<u64>) {
        self.reading.set(blocks.clone());
        self.todo.clear(blocks);
    }

    /// Hands old data to the copy queue after its read, and wakes the writes that waited for it.
    pub(super) fn read(&self, old: OldData, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        state.reads -= 1;
        self.end_read(&mut state, old.blocks.clone(), wake);
        if self.has_ended().is_some() {
            state.held -= old.buf.len();
            return;
        }
        state.full.push_back(old);
        self.full.store(state.full.len(), SeqCst);
        drop(state);
        self.notify();
    }

    /// Ends the read of some blocks and wakes the writes that waited for it.
    fn end_read(&self, state: &mut State, blocks: Range<u64>, wake: &mut dyn FnMut(Waker)) {
        self.reading.clear(blocks.clone());
        state.waiting.retain(|(wanted, waker)| {
            let met = wanted.start < blocks.end && blocks.start < wanted.end;
            if met {
                wake(*waker);
            }
            !met
        });
    }

    /// Takes note that old data is in the fleecing file, and wakes the writes that waited for it.
    pub(super) fn stored(&self, old: OldData, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        state.reads -= 1;
        let running = self.fleece.as_ref().filter(|_| self.has_ended().is_none());
        let first = running.is_some_and(|fleece| fleece.add(old.blocks.clone()));
        self.end_read(&mut state, old.blocks.clone(), wake);
        self.recycle(&mut state, old, wake);
        drop(state);
        if first {
            // If there is more, the copy queue knows, or has to wait for its speed limit.
            self.notify();
        }
    }

    /// Returns the first run of blocks in a range that are in the fleecing file: the bytes of the
    /// range that belong to them.
    pub(super) fn kept_run(&self, bytes: Range<u64>) -> Option<Range<u64>> {
        // The number is raised before a write to these blocks begins.
        let kept = self.fleece.as_ref().filter(|fleece| fleece.count() > 0)?.kept();
        let run = kept.bytes(kept.run(kept.blocks(bytes.clone()), u64::MAX - bytes.end)?);
        Some(run.start.max(bytes.start)..run.end.min(bytes.end))
    }

    /// Ends the copy, since old data cannot be stored in the fleecing file.
    pub(super) fn store_failed(&self, old: OldData, errno: i32, wake: &mut dyn FnMut(Waker)) {
        if self.has_ended().is_none() {
            self.fleece_failed.store(true, SeqCst);
        }
        self.read_failed(old, errno, wake);
    }

    /// Ends the copy, since the old data cannot be read.
    pub(super) fn read_failed(&self, old: OldData, errno: i32, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        state.reads -= 1;
        state.held -= old.buf.len();
        // The end comes before the blocks are free for writes, which do not take the lock then.
        self.end_with(&mut state, errno, wake);
        self.reading.clear(old.blocks);
        drop(state);
        self.notify();
    }

    /// Returns the first block of a range that the copy queue has not taken. The lock is held.
    fn first_left(&self, blocks: Range<u64>) -> Option<u64> {
        let first = self.todo.first(blocks.clone());
        let Some(fleece) = self.fleece.as_ref().filter(|fleece| fleece.count() > 0) else { return first };
        fleece.kept().first(blocks.start..first.unwrap_or(blocks.end)).or(first)
    }

    /// Returns a run of blocks for the copy queue: the first one after `from`, or else from the
    /// start of the disk. The run is at most `bytes` long and does not cross a multiple of that
    /// length. `kept` gets the parts of it whose old data is in the fleecing file; the queue reads
    /// the others from the disk.
    pub fn read_ahead(&self, from: u64, bytes: u64, kept: &mut Vec<Range<u64>>) -> Option<Range<u64>> {
        let (all, most) = (self.todo.all(), (bytes / self.todo.granularity()).max(1));
        let _state = self.state();
        if self.has_ended().is_some() {
            return None;
        }
        let first = self.first_left(from..all.end).or_else(|| self.first_left(0..from.min(all.end)))?;
        let end = all.end.min(first + most - first % most);
        let Some(fleece) = self.fleece.as_ref().filter(|fleece| fleece.count() > 0) else {
            let run = self.todo.run(first..end, most)?;
            self.begin_read(run.clone());
            return Some(run);
        };
        let mut at = first;
        loop {
            if let Some(run) = self.todo.run_from(at..end) {
                at = run.end;
                self.begin_read(run);
            } else if let Some(run) = fleece.kept().run_from(at..end) {
                at = run.end;
            } else {
                break;
            }
        }
        fleece.take(first..at, kept);
        Some(first..at)
    }

    /// Ends a read of the copy queue.
    pub fn end_read_ahead(&self, blocks: Range<u64>, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        self.end_read(&mut state, blocks, wake);
    }

    /// Returns old data to be written to the target.
    pub fn take(&self) -> Option<OldData> {
        let mut state = self.state();
        let old = state.full.pop_front();
        self.full.store(state.full.len(), SeqCst);
        old
    }

    /// Returns the memory of old data after it was written.
    pub fn written(&self, old: OldData, wake: &mut dyn FnMut(Waker)) {
        self.recycle(&mut self.state(), old, wake);
    }

    /// Keeps the memory of old data for later reads, and wakes the writes that wait for memory.
    fn recycle(&self, state: &mut State, old: OldData, wake: &mut dyn FnMut(Waker)) {
        state.held -= old.buf.len();
        if state.held + state.spare_bytes + old.buf.len() <= HELD_BYTES_MAX && self.has_ended().is_none() {
            state.spare_bytes += old.buf.len();
            state.spare.push(old.buf);
        }
        for waker in std::mem::take(&mut state.no_memory) {
            wake(waker);
        }
    }

    /// Returns whether there is old data to be written.
    #[inline]
    pub fn has_full(&self) -> bool {
        self.full.load(SeqCst) > 0
    }

    /// Returns whether the copy queue has taken all that is to be copied.
    pub fn is_over(&self) -> bool {
        let state = self.state();
        let stored = self.has_stored();
        state.reads == 0 && state.full.is_empty() && !stored && self.todo.first(self.todo.all()).is_none()
    }

    /// Returns whether writes store old data in a fleecing file.
    pub(super) fn is_fleeced(&self) -> bool {
        self.fleece.is_some()
    }

    /// Returns whether there is old data in the fleecing file that the copy queue has not taken.
    #[inline]
    pub fn has_stored(&self) -> bool {
        self.fleece.as_ref().is_some_and(|fleece| fleece.count() > 0)
    }

    /// Returns the old data in the fleecing file that the copy queue has not taken, bytes. None:
    /// there is no such file.
    pub fn stored_bytes(&self) -> Option<u64> {
        self.fleece.as_ref().map(|fleece| fleece.count() * self.todo.granularity())
    }

    /// Returns a number that rises when old data was stored in the fleecing file.
    pub fn stores(&self) -> u64 {
        self.fleece.as_ref().map_or(0, Fleece::stored)
    }

    /// Returns whether the copy ended because the fleecing file could not be written.
    pub fn has_fleece_failed(&self) -> bool {
        self.fleece_failed.load(SeqCst)
    }

    /// Returns how the copy ended, or nothing while it runs: 0 if it was stopped, or the negative
    /// errno of a failed read.
    #[inline]
    pub fn has_ended(&self) -> Option<i32> {
        Some(self.ended.load(SeqCst)).filter(|why| *why <= 0)
    }

    /// Returns the number of writes that wait for memory.
    pub fn held_up(&self) -> usize {
        self.state().no_memory.len()
    }

    /// Stops the copy. All waiting writes continue, and old data is dropped.
    pub fn end(&self, wake: &mut dyn FnMut(Waker)) {
        self.end_with(&mut self.state(), 0, wake);
    }

    /// Stops the copy from a control thread, with an io_uring of its own.
    pub fn end_now(&self) {
        wake_now(|wake| self.end(wake));
    }

    /// Ends the copy with a status, unless it has ended before.
    fn end_with(&self, state: &mut State, why: i32, wake: &mut dyn FnMut(Waker)) {
        if self.has_ended().is_none() {
            self.ended.store(why, SeqCst);
        }
        state.waiting.drain(..).for_each(|(_, waker)| wake(waker));
        state.no_memory.drain(..).for_each(&mut *wake);
        for old in std::mem::take(&mut state.full) {
            state.held -= old.buf.len();
        }
        self.full.store(0, SeqCst);
        state.spare.clear();
        state.spare_bytes = 0;
    }

    /// Returns the eventfd that wakes the copy queue while it sleeps.
    pub fn eventfd(&self) -> RawFd {
        self.eventfd.fd()
    }

    /// Sets whether the copy queue sleeps.
    pub fn set_asleep(&self, yes: bool) {
        self.asleep.store(yes, SeqCst);
    }

    /// Wakes the copy queue if it sleeps.
    pub fn notify(&self) {
        if self.asleep.swap(false, SeqCst) {
            self.eventfd.signal();
        }
    }
}
