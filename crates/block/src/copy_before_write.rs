//! Copy before write: what a disk was at one point in time, while it goes on being written.
//!
//! A write to a block that is not copied yet first has the old contents read (by its own handle, on its own worker) and
//! left for the copier, then goes on. It waits for that read and for others' reads of the same blocks, never for the
//! target; when all room is taken, for the copier to have written a piece. A job that ends for whatever reason lets all
//! of them go.
//!
//! What must never happen: a write that replaces a block which somebody still reads for the copy; a waiter that nobody
//! wakes.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard};
use vshunt_types::sync::Locked;

use qcow2::Waker;
use vshunt_engine::Uring;

use super::Io;
use super::bits::Bits;
use super::bounce::AlignedBuf;

/// Longest piece that is read at once.
const PIECE_BYTES_MAX: u64 = 256 << 10;
/// Memory for pieces that are not in the target yet.
const HELD_BYTES_MAX: usize = 32 << 20;
/// Of `ended`: they go on.
const GOES_ON: i32 = 1;

/// Old contents of some blocks.
pub struct Piece {
    /// Which blocks.
    pub(super) blocks: Range<u64>,
    /// Which bytes of the disk.
    pub(super) bytes: Range<u64>,
    pub(super) buf: AlignedBuf,
}

impl Piece {
    /// Where on the disk it begins.
    pub fn offset(&self) -> u64 {
        self.bytes.start
    }

    /// Which bytes of the disk.
    pub fn bytes(&self) -> Range<u64> {
        self.bytes.clone()
    }

    /// Its contents.
    pub fn contents(&mut self) -> &mut [u8] {
        let len = (self.bytes.end - self.bytes.start) as usize;
        &mut self.buf.bytes()[..len]
    }
}

#[derive(Default)]
struct Busy {
    /// Blocks whose old contents are being read, and who waits for that.
    waiting: Vec<(Range<u64>, Waker)>,
    /// Reads under way.
    reads: usize,
    /// Read, and not in the target yet.
    full: VecDeque<Piece>,
    /// Who waits for room.
    no_room: Vec<Waker>,
    /// Bytes of all buffers that are not spare.
    held: usize,
    /// Kept for the next pieces; with those that are held, they are no more than may be held.
    spare: Vec<AlignedBuf>,
    spare_bytes: usize,
}

/// What the handles of a disk and the copier share.
pub struct CopyBeforeWrite {
    /// Blocks to be copied that nobody has begun to read.
    todo: Bits,
    /// Blocks that somebody reads. Set before the bit in `todo` goes.
    reading: Bits,
    /// Guards who reads and who waits; held for look-ups alone.
    busy: Mutex<Busy>,
    /// Pieces in `full`, for who looks without the lock.
    full: AtomicUsize,
    /// Why there are no more copies: 0 where that was asked for, or a negative errno; [`GOES_ON`] before. Set with the lock
    /// held.
    ended: AtomicI32,
    /// What the copier waits for.
    eventfd: OwnedFd,
    /// Whether it waits.
    asleep: AtomicBool,
}

/// What a write does next.
pub(super) enum Next {
    /// It may go on.
    Go,
    /// It will be woken.
    Wait,
    /// It reads this first, and says so.
    Read(Piece),
}

impl CopyBeforeWrite {
    /// For a copy of the blocks that are set in `todo`.
    ///
    /// # Errors
    /// Of memory, and the system's.
    pub fn new(todo: Bits) -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let reading = Bits::new(todo.size(), todo.granularity().trailing_zeros())
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            todo,
            reading,
            busy: Mutex::default(),
            full: AtomicUsize::new(0),
            ended: AtomicI32::new(GOES_ON),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            asleep: AtomicBool::new(false),
        })
    }

    fn busy(&self) -> MutexGuard<'_, Busy> {
        self.busy.locked()
    }

    /// The blocks that nobody has begun to read.
    pub fn todo(&self) -> &Bits {
        &self.todo
    }

    /// Whether a write to these bytes has something to do before.
    #[inline]
    pub(super) fn concerns(&self, bytes: Range<u64>) -> bool {
        let blocks = self.todo.blocks(bytes);
        // In this order: who reads has set its bit before the other went.
        self.todo.any(blocks.clone()) || self.reading.any(blocks)
    }

    /// What a write to these bytes does next.
    pub(super) fn next(&self, bytes: Range<u64>, waker: Waker) -> Next {
        let blocks = self.todo.blocks(bytes);
        let mut busy = self.busy();
        if self.has_ended().is_some() {
            return Next::Go;
        }
        let most = (PIECE_BYTES_MAX / self.todo.granularity()).max(1);
        if let Some(run) = self.todo.run(blocks.clone(), most) {
            let bytes = self.todo.bytes(run.clone());
            let len = (bytes.end - bytes.start) as usize;
            if busy.held > 0 && busy.held + len > HELD_BYTES_MAX {
                busy.no_room.push(waker);
                return Next::Wait;
            }
            let kept = busy.spare.iter().rposition(|b| b.len() >= len && b.len() <= 4 * len);
            let buf = kept
                .map(|i| busy.spare.swap_remove(i))
                .inspect(|b| busy.spare_bytes -= b.len())
                .or_else(|| AlignedBuf::new(len.next_multiple_of(4096)));
            let Some(buf) = buf else {
                if busy.held == 0 {
                    // There is nobody to give memory back: the copy cannot be what it is to be.
                    self.ended.store(-libc::ENOMEM, SeqCst);
                    return Next::Go;
                }
                busy.no_room.push(waker);
                return Next::Wait;
            };
            busy.held += buf.len();
            busy.reads += 1;
            self.begin_read(run.clone());
            return Next::Read(Piece { blocks: run, bytes, buf });
        }
        if self.reading.any(blocks.clone()) {
            busy.waiting.push((blocks, waker));
            return Next::Wait;
        }
        Next::Go
    }

    /// With the lock held.
    fn begin_read(&self, blocks: Range<u64>) {
        self.reading.set(blocks.clone());
        self.todo.clear(blocks);
    }

    /// A piece is read: it is the copier's now, and who waited for it goes on.
    pub(super) fn read(&self, piece: Piece, wake: &mut dyn FnMut(Waker)) {
        let mut busy = self.busy();
        busy.reads -= 1;
        self.end_read(&mut busy, piece.blocks.clone(), wake);
        if self.has_ended().is_some() {
            busy.held -= piece.buf.len();
            return;
        }
        busy.full.push_back(piece);
        self.full.store(busy.full.len(), SeqCst);
        drop(busy);
        self.rouse();
    }

    fn end_read(&self, busy: &mut Busy, blocks: Range<u64>, wake: &mut dyn FnMut(Waker)) {
        self.reading.clear(blocks.clone());
        busy.waiting.retain(|(wanted, waker)| {
            let met = wanted.start < blocks.end && blocks.start < wanted.end;
            if met {
                wake(*waker);
            }
            !met
        });
    }

    /// The old contents cannot be read: there will be no copy.
    pub(super) fn read_failed(&self, piece: Piece, errno: i32, wake: &mut dyn FnMut(Waker)) {
        let mut busy = self.busy();
        busy.reads -= 1;
        busy.held -= piece.buf.len();
        self.reading.clear(piece.blocks);
        self.end_with(&mut busy, errno, wake);
        drop(busy);
        self.rouse();
    }

    /// The copier reads a run of blocks, from `from` on and then from the disk's beginning, of `bytes` at most and within
    /// one stretch of that length.
    pub fn ahead(&self, from: u64, bytes: u64) -> Option<Range<u64>> {
        let (all, most) = (self.todo.all(), (bytes / self.todo.granularity()).max(1));
        let _busy = self.busy();
        if self.has_ended().is_some() {
            return None;
        }
        let first = self.todo.first(from..all.end).or_else(|| self.todo.first(0..from.min(all.end)))?;
        let run = self.todo.run(first..all.end, most - first % most)?;
        self.begin_read(run.clone());
        Some(run)
    }

    /// The copier has read these.
    pub fn copied(&self, blocks: Range<u64>, wake: &mut dyn FnMut(Waker)) {
        let mut busy = self.busy();
        self.end_read(&mut busy, blocks, wake);
    }

    /// A piece to be written to the target.
    pub fn take(&self) -> Option<Piece> {
        let mut busy = self.busy();
        let piece = busy.full.pop_front();
        self.full.store(busy.full.len(), SeqCst);
        piece
    }

    /// It is written.
    pub fn written(&self, piece: Piece, wake: &mut dyn FnMut(Waker)) {
        let mut busy = self.busy();
        busy.held -= piece.buf.len();
        if busy.held + busy.spare_bytes + piece.buf.len() <= HELD_BYTES_MAX && self.has_ended().is_none() {
            busy.spare_bytes += piece.buf.len();
            busy.spare.push(piece.buf);
        }
        for waker in std::mem::take(&mut busy.no_room) {
            wake(waker);
        }
    }

    /// Whether there is a piece to be written.
    #[inline]
    pub fn has_full(&self) -> bool {
        self.full.load(SeqCst) > 0
    }

    /// Whether all that was to be copied has been given to the copier, and taken.
    pub fn is_over(&self) -> bool {
        let busy = self.busy();
        busy.reads == 0 && busy.full.is_empty() && self.todo.first(self.todo.all()).is_none()
    }

    /// Whether writes do nothing any more: 0 where that was asked for, or the negative errno of the read that failed.
    #[inline]
    pub fn has_ended(&self) -> Option<i32> {
        Some(self.ended.load(SeqCst)).filter(|why| *why <= 0)
    }

    /// Writers that wait for the copier.
    pub fn held_up(&self) -> usize {
        self.busy().no_room.len()
    }

    /// No more copies: whoever waits goes on, and what was read is dropped.
    pub fn end(&self, wake: &mut dyn FnMut(Waker)) {
        self.end_with(&mut self.busy(), 0, wake);
    }

    /// The same, for who has no ring: on a control thread.
    pub fn end_now(&self) {
        match Uring::new() {
            Ok(mut ring) => {
                self.end(&mut |w| ring.wake(w.who, w.token));
                if ring.send().is_err() {
                    // Who waits cannot be told.
                    tracing::error!("an io_uring failed; ending at once");
                    std::process::abort();
                }
            }
            Err(e) => {
                let mut waiting = 0;
                self.end(&mut |_| waiting += 1);
                if waiting > 0 {
                    tracing::error!("{waiting} writes wait and cannot be woken ({e}); ending at once");
                    std::process::abort();
                }
            }
        }
    }

    fn end_with(&self, busy: &mut Busy, why: i32, wake: &mut dyn FnMut(Waker)) {
        if self.has_ended().is_none() {
            self.ended.store(why, SeqCst);
        }
        busy.waiting.drain(..).for_each(|(_, waker)| wake(waker));
        busy.no_room.drain(..).for_each(&mut *wake);
        for piece in std::mem::take(&mut busy.full) {
            busy.held -= piece.buf.len();
        }
        self.full.store(0, SeqCst);
        busy.spare.clear();
        busy.spare_bytes = 0;
    }

    /// Becomes readable when there is something for the copier that says it sleeps.
    pub fn eventfd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Says whether the copier is to be called.
    pub fn sleeps(&self, yes: bool) {
        self.asleep.store(yes, SeqCst);
    }

    /// Calls the copier, if it sleeps.
    pub fn rouse(&self) {
        if self.asleep.swap(false, SeqCst) {
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }
}

/// Of a write that reads before.
#[derive(Default)]
pub(super) struct Before {
    /// The read.
    pub(super) inner: Io,
    /// What it reads.
    pub(super) piece: Option<Piece>,
    /// It is under way: a completion with the request's token is not the write's.
    pub(super) active: bool,
}
