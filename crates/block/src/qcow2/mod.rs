//! qcow2 images: `crates/qcow2` says step by step what a request needs, and it is done here, by raw files' own ways.
//!
//! A queue's slot holds the request ([`Slot`]) and one [`Io`] for the step that is under way. A request that waits for
//! another is woken by a message to its worker's ring, from whichever worker that happens on. Most requests need none of
//! that: they are one transfer of the guest's bytes, done by the queue's own [`Io`] ([`FastPath`]).
//!
//! What must never happen: an image left with its map in memory alone. The last flush is [`close`](Qcow2::close)'s.

mod bitmaps;
mod journal;
mod open;
mod sweep;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use io_uring::opcode;
use qcow2::bitmap::Loaded;
use qcow2::{Buf, Chain, Context, FastPath, FileId, Request, User, Waker};
use vshunt_engine::on_file;
use vshunt_engine::{Token, Uring};
use vshunt_sandbox::{self as sandbox, ThreadKind};

use self::bitmaps::Bitmaps;
pub(super) use self::bitmaps::enter as enter_bitmaps;
pub use self::journal::{Lacks, Through, forget, path_of, read_through, recover};
pub use self::open::Reading;
pub(super) use self::open::{Plain, backing_of, beside, open};
pub use self::sweep::sweep;
use super::bounce::Pool;
use super::raw::Raw;
use super::{Io, Op, RingFiles, Step};

/// An open image, with those below it.
pub(super) struct Qcow2 {
    chain: Chain,
    /// By number.
    files: Vec<Raw>,
    /// Size of the image below, bytes, if there is one.
    below: Option<u64>,
    bitmaps: Bitmaps,
    readonly: bool,
    /// Where its map's journal lies.
    journal: Option<journal::Place>,
    /// Its header says that it is open.
    marked: bool,
    /// Completed writes of its last daemon may be missing.
    lost: bool,
    /// Of it and those below: how they read that were not closed and are only read.
    readings: Vec<Reading>,
    /// It is about to be deleted.
    abandoned: AtomicBool,
    /// Flushes are done at once.
    careless: bool,
    /// Writes are stable when they are done.
    through: bool,
}

/// What a queue on a worker has of it.
pub(super) struct Handle {
    image: Arc<Qcow2>,
    files: Vec<RingFiles>,
    user: RefCell<User>,
}

/// A request of a queue's slot.
#[derive(Default)]
pub(super) struct Slot {
    request: Request,
    /// The step under way.
    inner: Io,
    /// It is at this file.
    file: FileId,
    /// It waits for another request, or for space at its file's end: the result is the request's own.
    direct: bool,
    /// The latter.
    extends: bool,
}

impl Qcow2 {
    /// For one queue on the worker that owns `ring`.
    pub(super) fn attach(self: &Arc<Self>, uring: &mut Uring) -> Handle {
        let files = self.files.iter().map(|raw| super::know(raw, uring)).collect();
        Handle { image: self.clone(), files, user: RefCell::new(self.chain.top().join()) }
    }

    /// See [`Disk::outlives_us`](super::Disk::outlives_us).
    pub(super) fn outlives_us(&self) -> bool {
        self.readonly || self.through || self.journal.is_some()
    }

    /// See [`Disk::lost`](super::Disk::lost).
    pub(super) fn lost(&self) -> bool {
        self.lost
    }

    /// See [`Disk::readings`](super::Disk::readings).
    pub(super) fn readings(&self) -> &[Reading] {
        &self.readings
    }

    /// Whether one of its files waits for other programs.
    pub(super) fn may_wait(&self) -> bool {
        self.files.iter().any(Raw::may_wait)
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        self.chain.top().cluster_size()
    }

    /// Whether it can have dirty bitmaps.
    pub(super) fn keeps_bitmaps(&self) -> bool {
        self.chain.top().header().version >= 3
    }

    pub(super) fn direct_in_use(&self) -> bool {
        self.files[0].direct_in_use()
    }

    /// The image itself, its data file if it has one, those below.
    pub(super) fn files(&self) -> &[Raw] {
        &self.files
    }

    /// See the field.
    pub(super) fn below(&self) -> Option<u64> {
        self.below
    }

    /// See [`Disk::keeps_out`](super::Disk::keeps_out).
    pub(super) fn is_of(&self, path: &std::path::Path) -> bool {
        self.files.iter().any(|raw| raw.is_of(path))
    }

    /// Gives its disk another size: of what it is made longer by nothing shows, as `make_room` of the format's crate has
    /// left it; of what it is made shorter by the caller has made zeroes. Blocks. No write may be under way.
    ///
    /// # Errors
    /// `EFBIG` beyond the room that it was opened with, `EIO` for an image that is wrong, else the system's.
    pub(super) fn set_size(&self, size: u64) -> std::io::Result<()> {
        let (top, file) = (self.chain.top(), &self.files[0]);
        if size > top.room() {
            return Err(std::io::Error::from_raw_os_error(libc::EFBIG));
        }
        // One that is found to be wrong meanwhile does not grow.
        let wrong = || match top.is_wrong() {
            true => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        };
        wrong()?;
        top.write_size(size, |bytes| file.merge(0, bytes, self.through))?;
        wrong()?;
        top.set_size(size);
        Ok(())
    }

    /// As [`Op::Flush`], but it waits. On a thread of its own: the end of a ring interrupts what its thread waits for next,
    /// which callers are not prepared for.
    pub(super) fn flush_now(self: &Arc<Self>) -> std::io::Result<()> {
        if self.readonly {
            return Ok(());
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("vshunt-qcow2".to_owned());
            thread.spawn_scoped(scope, || self.flush_here())?.join().expect("it does not panic")
        })
    }

    /// After its last handle is gone, too: without a disk.
    fn flush_here(self: &Arc<Self>) -> std::io::Result<()> {
        let (mut ring, pool, mut io) = (Uring::new()?, Pool::default(), Io::default());
        io.reset(Op::Flush, 0, true);
        let handle = self.attach(&mut ring);
        let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
        let mut step = handle.begin(&pool, &mut ring, &mut io, token, true);
        let res = loop {
            match step {
                Step::Done(res) => break res,
                Step::Wait => {
                    let Ok(res) = ring.next_result() else {
                        // It cannot be told whether the kernel still writes to its memory.
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    };
                    step = handle.resume(&pool, &mut ring, &mut io, token, res);
                }
            }
        };
        handle.detach(&mut ring);
        // Those whom it woke at its end would wait for ever.
        if ring.send().is_err() {
            tracing::error!("an io_uring failed; ending at once");
            std::process::abort();
        }
        if res < 0 { Err(std::io::Error::from_raw_os_error(-res)) } else { Ok(()) }
    }

    /// Whether something was found to be wrong with its metadata since it was opened.
    pub(super) fn is_wrong(&self) -> bool {
        self.chain.top().is_wrong()
    }

    /// After a request that failed: says what is wrong with the image, if that was found and not said yet.
    #[cold]
    fn tell_wrong(&self) {
        let Some((why, marked)) = self.chain.top().tell_wrong() else { return };
        let shown = self.files[0].path().display();
        let mark = if marked { "it is marked as corrupt, " } else { "" };
        let text = format!(
            "{shown} is corrupt: {why}. {mark}requests that need this fail, and nothing was written over; stop serving it \
             and repair it with 'vshunt image check -r all {shown}'"
        );
        // Workers write no log lines. Once for an image; without a thread it goes unsaid.
        let thread = std::thread::Builder::new().name("vshunt-qcow2".to_owned());
        sandbox::detach(ThreadKind::Session, thread, move || tracing::error!("{text}"));
    }

    /// Brings the image into order, after its last user. Whether it is: not marked as in use any more.
    pub(super) fn close(self: &Arc<Self>) -> bool {
        if self.abandoned.load(Relaxed) {
            self.journal.iter().for_each(journal::Place::remove);
            return true;
        }
        // The second one writes what the first one counted down, the third what was reserved for these two.
        for _ in 0..3 {
            if let Err(e) = self.flush_now() {
                let what = match self.journal {
                    Some(_) => {
                        "are in its journal, for whoever opens it next before the machine is started again"
                    }
                    None => "are lost",
                };
                tracing::error!("the image's last changes {what}: {e}");
                return false;
            }
        }
        // What it was made longer by without need.
        let (file, end) = (self.files[0].image(), self.chain.top().end());
        if !self.readonly && self.files[0].can_be_cut() && file.metadata().is_ok_and(|m| m.len() > end) {
            let _ = file.set_len(end);
        }
        if self.readonly {
            return true;
        }
        let plain = || Plain::of(&self.files[0], false, self.careless);
        // First, since a change of bitmaps begins on an image that was closed.
        if self.marked {
            let opened = plain().map_err(qcow2::Error::io("cannot open it"));
            if let Err(e) = opened.and_then(|plain| qcow2::journal::end(&plain)) {
                tracing::error!("the image stays marked as not closed, and is repaired next time: {e}");
                return false;
            }
        }
        self.journal.iter().for_each(journal::Place::remove);
        if self.is_wrong() {
            // They would be put where the counts say that nothing is.
            tracing::error!(
                "the image's bitmaps are not written back, and count as inconsistent: it is to be repaired first"
            );
        } else if let Err(e) = self.bitmaps.close(|| Ok(Box::new(plain()?))) {
            tracing::error!("the image's bitmaps are not written back, and count as inconsistent: {e}");
        }
        true
    }

    /// See [`Disk::abandon`](super::Disk::abandon).
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Relaxed);
    }

    /// Bitmaps that its disk takes along to another image.
    pub(super) fn leave_bitmaps(&self) -> Vec<Loaded> {
        self.bitmaps.leave()
    }

    /// See [`Disk::take_bitmaps`](super::Disk::take_bitmaps).
    pub(super) fn take_bitmaps(&self) -> Vec<Loaded> {
        self.bitmaps.take()
    }

    /// See [`Disk::put_bitmaps`](super::Disk::put_bitmaps).
    pub(super) fn put_bitmaps(&self, bitmaps: Vec<Loaded>) {
        self.bitmaps.put(bitmaps);
    }
}

impl Handle {
    /// See [`DiskHandle::start`](super::DiskHandle::start).
    #[inline]
    pub(super) fn start(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        if io.op == Op::Flush && self.image.careless {
            return Step::Done(0);
        }
        let stable = io.fua || self.image.through;
        match io.op {
            Op::Read => self.short(qcow2::Op::Read, pool, uring, io, token),
            Op::Write if !stable && !self.image.readonly => {
                self.short(qcow2::Op::Write, pool, uring, io, token)
            }
            _ => None,
        }
        .unwrap_or_else(|| self.begin(pool, uring, io, token, stable))
    }

    /// Begins a request that is one transfer; none: it is not.
    #[inline]
    fn short(
        &self,
        op: qcow2::Op,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Option<Step> {
        let hit = FastPath::find(&self.image.chain, &mut self.user.borrow_mut(), op, io.offset, io.len)?;
        let (raw, files) = self.file(hit.file);
        let pos = std::mem::replace(&mut io.offset, hit.offset);
        let step = if raw.inline() {
            Step::Done(raw.run_inline(io, pool))
        } else {
            raw.start(files, pool, uring, io, token)
        };
        Some(self.shortly(io, hit, pos, step))
    }

    /// After a step of a request that takes the fast path.
    #[inline]
    fn shortly(&self, io: &mut Io, hit: FastPath, pos: u64, step: Step) -> Step {
        if step == Step::Wait {
            io.hit = Some((hit, pos));
        } else {
            io.offset = pos;
            hit.end(&self.image.chain, &mut self.user.borrow_mut());
        }
        step
    }

    fn begin(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, stable: bool) -> Step {
        let op = match io.op {
            Op::Read => qcow2::Op::Read,
            Op::Write => qcow2::Op::Write,
            Op::WriteCompressed => qcow2::Op::WriteCompressed,
            Op::Seek { own } => qcow2::Op::Seek { own },
            Op::Flush => qcow2::Op::Flush,
            Op::Discard => qcow2::Op::Discard,
            Op::WriteZeroes { unmap } => qcow2::Op::Zero { unmap },
            // Clusters come when they are written.
            Op::Allocate => return Step::Done(0),
        };
        let mut slot = io.qcow2.take().unwrap_or_default();
        let (offset, len) = (io.offset, io.len);
        let step = self.with(uring, token, |cx| slot.request.start(op, offset, len, stable, cx));
        let step = self.drive(pool, uring, io, &mut slot, token, step);
        io.qcow2 = Some(slot);
        step
    }

    /// See [`DiskHandle::resume`](super::DiskHandle::resume).
    #[inline]
    pub(super) fn resume(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        if let Some((hit, pos)) = io.hit.take() {
            let (raw, files) = self.file(hit.file);
            let step = raw.resume(files, pool, uring, io, token, res);
            return self.shortly(io, hit, pos, step);
        }
        self.go_on(pool, uring, io, token, res)
    }

    fn go_on(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let Some(mut slot) = io.qcow2.take() else { return Step::Done(-libc::EIO) };
        let step = if std::mem::take(&mut slot.direct) {
            // Where a file system cannot take space, and on a block device, it goes without.
            let without = std::mem::take(&mut slot.extends)
                && matches!(-res, libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS);
            Some(if without { 0 } else { res })
        } else {
            let (raw, files) = self.file(slot.file);
            done(raw.resume(files, pool, uring, &mut slot.inner, token, res))
        };
        let step = match step {
            None => Step::Wait,
            Some(res) => {
                slot.inner.iov.clear();
                let next = self.with(uring, token, |cx| slot.request.resume(res, cx));
                self.drive(pool, uring, io, &mut slot, token, next)
            }
        };
        io.qcow2 = Some(slot);
        step
    }

    /// See [`DiskHandle::detach`](super::DiskHandle::detach).
    pub(super) fn detach(self, uring: &mut Uring) {
        self.image.files.iter().for_each(|raw| super::forget(raw, uring));
        self.image.chain.top().leave(self.user.into_inner());
    }

    fn file(&self, file: FileId) -> (&Raw, RingFiles) {
        (&self.image.files[usize::from(file)], self.files[usize::from(file)])
    }

    fn with<R>(&self, uring: &mut Uring, token: Token, f: impl FnOnce(&mut Context<'_>) -> R) -> R {
        let waker = Waker { who: uring.id(), token: token.pack() };
        f(&mut Context {
            chain: &self.image.chain,
            user: &mut self.user.borrow_mut(),
            waker,
            wake: &mut |w: Waker| uring.wake(w.who, w.token),
            readonly: self.image.readonly,
        })
    }

    /// Does steps until one has to be waited for.
    fn drive(
        &self,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        slot: &mut Slot,
        token: Token,
        first: qcow2::Step,
    ) -> Step {
        let mut step = first;
        loop {
            let res = match step {
                qcow2::Step::Done(res) => {
                    io.found = slot.request.found();
                    if res < 0 {
                        self.image.tell_wrong();
                    }
                    return Step::Done(res);
                }
                qcow2::Step::Park => {
                    slot.direct = true;
                    uring.expect_wake();
                    return Step::Wait;
                }
                qcow2::Step::Zeroes { data } => {
                    // SAFETY: the segments are valid until the request is done, by `IoVecs::push`.
                    unsafe { io.iov.zero_range(data) };
                    Some(0)
                }
                qcow2::Step::Copy { data, at } => {
                    let from = &slot.request.bytes(Buf::Data)[at..at + (data.end - data.start) as usize];
                    // SAFETY: as above; `from` is as long as the range.
                    unsafe { io.iov.scatter_range(data, from) };
                    Some(0)
                }
                qcow2::Step::Gather { data, at } => {
                    let to = &mut slot.request.bytes(Buf::Data)[at..at + (data.end - data.start) as usize];
                    // SAFETY: as above; `to` is as long as the range.
                    unsafe { io.iov.gather_range(data, to) };
                    Some(0)
                }
                // Files in memory grow with each write as well.
                qcow2::Step::Extend { file, .. } if self.file(file).0.inline() => Some(0),
                qcow2::Step::Extend { file, offset, len } => {
                    (slot.direct, slot.extends) = (true, true);
                    let entry = on_file!(self.file(file).1.file, |fd| {
                        opcode::Fallocate::new(fd, len).offset(offset).build()
                    });
                    // SAFETY: it names no memory.
                    unsafe { uring.push(entry, token) };
                    return Step::Wait;
                }
                other => done(self.transfer(pool, uring, io, slot, token, other)),
            };
            let Some(res) = res else { return Step::Wait };
            slot.inner.iov.clear();
            step = self.with(uring, token, |cx| slot.request.resume(res, cx));
        }
    }

    /// Begins a step at a file.
    fn transfer(
        &self,
        pool: &Pool,
        uring: &mut Uring,
        io: &Io,
        slot: &mut Slot,
        token: Token,
        step: qcow2::Step,
    ) -> Step {
        let inner = &mut slot.inner;
        let guest = |inner: &mut Io, data: Range<u64>| {
            // SAFETY: the segments are valid until the request is done, by `IoVecs::push`; `inner` is done before, and
            // lies where the request does (boxed, in its slot).
            io.iov.for_range(data, |ptr, len| unsafe { inner.push(ptr, len) });
        };
        let file = match step {
            qcow2::Step::Data { file, offset, data } => {
                let op = if io.op == Op::Read { Op::Read } else { Op::Write };
                inner.reset(op, offset, false);
                guest(inner, data);
                file
            }
            qcow2::Step::Read { file, offset, buf, range } => {
                inner.reset(Op::Read, offset, false);
                own(inner, &mut slot.request, buf, range);
                file
            }
            qcow2::Step::Write { file, offset, buf, range } => {
                inner.reset(Op::Write, offset, false);
                own(inner, &mut slot.request, buf, range);
                file
            }
            qcow2::Step::Around { file, offset, head, data, tail } => {
                inner.reset(Op::Write, offset, false);
                own(inner, &mut slot.request, Buf::Data, 0..head);
                guest(inner, data);
                own(inner, &mut slot.request, Buf::Data, head..head + tail);
                file
            }
            qcow2::Step::ZeroFile { file, offset, len, punch } => {
                inner.reset(Op::WriteZeroes { unmap: punch }, offset, false);
                inner.len = len;
                file
            }
            qcow2::Step::Discard { file, offset, len } => {
                inner.reset(Op::Discard, offset, false);
                inner.len = len;
                file
            }
            qcow2::Step::Sync { file } => {
                inner.reset(Op::Flush, 0, false);
                file
            }
            _ => unreachable!("done by `drive`"),
        };
        slot.file = file;
        let (raw, files) = self.file(file);
        if raw.at_once(&slot.inner) {
            return Step::Done(raw.run_inline(&mut slot.inner, pool));
        }
        raw.start(files, pool, uring, &mut slot.inner, token)
    }
}

/// A segment of one of the request's own buffers.
fn own(inner: &mut Io, request: &mut Request, buf: Buf, range: Range<usize>) {
    let bytes = &mut request.bytes(buf)[range];
    // SAFETY: the request leaves its buffers as they are until it is resumed, and is boxed with `inner`.
    unsafe { inner.push(bytes.as_mut_ptr(), bytes.len()) };
}

fn done(step: Step) -> Option<i32> {
    match step {
        Step::Done(res) => Some(res),
        Step::Wait => None,
    }
}
