//! qcow2 images. `crates/qcow2` determines the steps of a request, and this module carries them out
//! on raw files.
//!
//! Most requests take the fast path ([`FastPath`]): they are one transfer of the guest's bytes,
//! carried out with the queue's own [`Io`]. Other requests take several steps. Their [`Qcow2State`]
//! has the request and a second [`Io`] for the current step. A request that waits for another one
//! is woken by a message to the io_uring of its worker, from any worker.
//!
//! What must never happen: an image stays behind while parts of its map are only in memory.
//! [`close`](Qcow2::close) does the last flush.

mod bitmaps;
mod journal;
mod journal_file;
mod journal_name;
mod open;
mod sweep;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use io_uring::opcode;
use qcow2::bitmap::Loaded;
use qcow2::{Batch, Buf, Chain, Context, FastPath, FileId, Request, User, Waker};
use vshunt_engine::{Token, Uring, on_file};
use vshunt_sandbox::{self as sandbox, ThreadKind};

use self::bitmaps::Bitmaps;
pub(super) use self::bitmaps::store_in_use;
pub use self::journal::{JournalView, Recovered, read_only, recover};
use self::journal_file::JournalFile;
pub use self::journal_file::{path_of, remove};
pub use self::open::UncleanImage;
pub(super) use self::open::open;
pub use self::sweep::sweep;
use super::bounce::Pool;
use super::file_storage::FileStorage;
use super::io::Qcow2State;
use super::raw::{Raw, UringFiles};
use super::{Io, Op, Step};

/// An open image, with its backing images.
pub(super) struct Qcow2 {
    chain: Chain,
    /// The files by number: the image, its data file if it has one, its backing images.
    files: Vec<Raw>,
    /// Size of the backing image, bytes, if there is one.
    backing_bytes: Option<u64>,
    bitmaps: Bitmaps,
    readonly: bool,
    /// The journal of the map, if there is one.
    journal: Option<JournalFile>,
    /// The header marks the image as open.
    marked: bool,
    /// Writes that an earlier daemon completed may be missing.
    lost_writes: bool,
    /// Reports about images of the chain that were not closed and are only read.
    unclean: Vec<UncleanImage>,
    /// The image is about to be deleted.
    abandoned: AtomicBool,
    /// A flush does nothing.
    no_sync: bool,
    /// Writes are on stable storage when they complete.
    writethrough: bool,
}

/// An image, as one queue of a worker uses it.
pub(super) struct Qcow2Handle {
    image: Arc<Qcow2>,
    files: Vec<UringFiles>,
    user: RefCell<User>,
    /// While the queue takes several requests.
    batch: Cell<Option<Batch>>,
}

impl Qcow2 {
    /// Makes the image usable by one queue of the worker that owns `uring`.
    pub(super) fn attach(self: &Arc<Self>, uring: &mut Uring) -> Qcow2Handle {
        let files = self.files.iter().map(|raw| raw.register(uring)).collect();
        let user = RefCell::new(self.chain.top().join());
        Qcow2Handle { image: self.clone(), files, user, batch: Cell::default() }
    }

    /// See [`Disk::survives_kill`](super::Disk::survives_kill).
    pub(super) fn survives_kill(&self) -> bool {
        self.readonly || self.writethrough || self.journal.is_some()
    }

    /// See [`Disk::lost_writes`](super::Disk::lost_writes).
    pub(super) fn lost_writes(&self) -> bool {
        self.lost_writes
    }

    /// See [`Disk::unclean_images`](super::Disk::unclean_images).
    pub(super) fn unclean_images(&self) -> &[UncleanImage] {
        &self.unclean
    }

    /// Returns whether a call on one of the files may wait for another program.
    pub(super) fn may_wait(&self) -> bool {
        self.files.iter().any(Raw::may_wait)
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        self.chain.top().cluster_size()
    }

    /// Returns whether the image can store dirty bitmaps.
    pub(super) fn supports_bitmaps(&self) -> bool {
        self.chain.top().header().version >= 3
    }

    pub(super) fn direct_in_use(&self) -> bool {
        self.files[0].direct_in_use()
    }

    /// Returns the image, its data file if it has one, and its backing images.
    pub(super) fn files(&self) -> &[Raw] {
        &self.files
    }

    /// Returns the size of the backing image, bytes, if there is one.
    pub(super) fn backing_bytes(&self) -> Option<u64> {
        self.backing_bytes
    }

    /// Returns whether a path leads to one of the files.
    pub(super) fn is_of(&self, path: &std::path::Path) -> bool {
        self.files.iter().any(|raw| raw.is_of(path))
    }

    /// Changes the size of the disk. Before it shrinks, the caller has zeroed the bytes beyond the
    /// new end; so new bytes read as zeroes. Blocks. No write may be in flight.
    ///
    /// # Errors
    /// `EFBIG` if the L1 table is too small, `EIO` for a corrupt image, else the system's.
    pub(super) fn set_size(&self, size: u64) -> std::io::Result<()> {
        let (top, file) = (self.chain.top(), &self.files[0]);
        if size > top.room() {
            return Err(std::io::Error::from_raw_os_error(libc::EFBIG));
        }
        // A corrupt image does not grow, even if the corruption is found during this call.
        let check = || match top.is_corrupt() {
            true => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        };
        check()?;
        top.write_size(size, |bytes| file.merge(0, bytes, self.writethrough))?;
        check()?;
        top.set_size(size);
        Ok(())
    }

    /// Flushes and waits. On a thread of its own: when an io_uring is closed it interrupts the next
    /// wait of its thread, and callers are not prepared for that.
    pub(super) fn flush_now(self: &Arc<Self>) -> std::io::Result<()> {
        if self.readonly {
            return Ok(());
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("vshunt-qcow2".to_owned());
            thread.spawn_scoped(scope, || self.flush_here())?.join().expect("it does not panic")
        })
    }

    /// Flushes with an io_uring of its own. Needs no [`Disk`](super::Disk), so it works after the
    /// last handle was dropped.
    fn flush_here(self: &Arc<Self>) -> std::io::Result<()> {
        let (mut uring, pool, mut io) = (Uring::new()?, Pool::default(), Io::default());
        io.reset(Op::Flush, 0, true);
        let handle = self.attach(&mut uring);
        let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
        let mut step = handle.begin(&pool, &mut uring, &mut io, token, true);
        let res = loop {
            match step {
                Step::Done(res) => break res,
                Step::Wait => {
                    let Ok(res) = uring.next_result() else {
                        // The kernel may still write to the memory of the request.
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    };
                    step = handle.resume(&pool, &mut uring, &mut io, token, res);
                }
            }
        };
        handle.detach(&mut uring);
        // Requests that this one woke at its end would wait for ever otherwise.
        if uring.send().is_err() {
            tracing::error!("an io_uring failed; ending at once");
            std::process::abort();
        }
        if res < 0 { Err(std::io::Error::from_raw_os_error(-res)) } else { Ok(()) }
    }

    /// Returns whether the metadata was found to be corrupt since the image was opened.
    pub(super) fn is_corrupt(&self) -> bool {
        self.chain.top().is_corrupt()
    }

    /// Logs the corruption of the image once. Called after a request that failed.
    #[cold]
    fn log_corruption(&self) {
        let Some((why, marked)) = self.chain.top().take_corruption() else { return };
        let shown = self.files[0].path().display();
        let mark = if marked { "it is marked as corrupt, " } else { "" };
        let text = format!(
            "{shown} is corrupt: {why}. {mark}requests that need this fail, and nothing was written over; stop serving it \
             and repair it with 'vshunt image check -r all {shown}'"
        );
        // Workers write no log lines. If no thread can be started, the message is lost.
        let thread = std::thread::Builder::new().name("vshunt-qcow2".to_owned());
        sandbox::detach(ThreadKind::Session, thread, move || tracing::error!("{text}"));
    }

    /// Closes the image after its last use: flushes it and removes its mark. Returns whether that
    /// succeeded.
    pub(super) fn close(self: &Arc<Self>) -> bool {
        if self.abandoned.load(Relaxed) {
            self.journal.iter().for_each(JournalFile::remove);
            return true;
        }
        // The second flush writes the reference counts that the first one lowered, the third the
        // space reserved for both.
        for _ in 0..3 {
            if let Err(e) = self.flush_now() {
                let what = match self.journal {
                    Some(_) => {
                        "are in its journal; open the image again before the machine restarts, or they are lost"
                    }
                    None => "are lost",
                };
                tracing::error!("the image's last changes {what}: {e}");
                return false;
            }
        }
        // Clusters that were reserved at the end and not used.
        let (file, end) = (self.files[0].image(), self.chain.top().end());
        if !self.readonly && self.files[0].is_file() && file.metadata().is_ok_and(|m| m.len() > end) {
            let _ = file.set_len(end);
        }
        if self.readonly {
            return true;
        }
        let plain = || FileStorage::of(&self.files[0], false, self.no_sync);
        // Before the bitmaps, since they are changed only in an image that is not marked as open.
        if self.marked {
            let opened = plain().map_err(qcow2::Error::io("cannot open it"));
            if let Err(e) = opened.and_then(|plain| qcow2::journal::mark_closed(&plain)) {
                tracing::error!("the image stays marked as not closed, and is repaired next time: {e}");
                return false;
            }
        }
        self.journal.iter().for_each(JournalFile::remove);
        if self.is_corrupt() {
            // The reference counts cannot be trusted, so a bitmap could overwrite a cluster that is
            // in use.
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

    /// Returns the bitmaps for the next image of the disk. They stay marked as in use in this one.
    pub(super) fn bitmaps_for_next(&self) -> Vec<Loaded> {
        self.bitmaps.for_next()
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

impl Qcow2Handle {
    /// See [`DiskHandle::begin_batch`](super::DiskHandle::begin_batch).
    pub(super) fn begin_batch(&self) {
        self.end_batch();
        self.batch.set(Some(Batch::begin(&self.image.chain, &mut self.user.borrow_mut())));
    }

    /// See [`DiskHandle::end_batch`](super::DiskHandle::end_batch).
    pub(super) fn end_batch(&self) {
        if let Some(batch) = self.batch.take() {
            batch.end(&self.image.chain, &mut self.user.borrow_mut());
        }
    }

    /// Returns the path of the image.
    pub(super) fn path(&self) -> &Path {
        self.image.files[0].path()
    }

    /// See [`DiskHandle::start`](super::DiskHandle::start).
    #[inline]
    pub(super) fn start(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        if io.request.op == Op::Flush && self.image.no_sync {
            return Step::Done(0);
        }
        let stable = io.request.fua || self.image.writethrough;
        match io.request.op {
            Op::Read => self.start_fast(qcow2::Op::Read, pool, uring, io, token),
            Op::Write if !stable && !self.image.readonly => {
                self.start_fast(qcow2::Op::Write, pool, uring, io, token)
            }
            _ => None,
        }
        .unwrap_or_else(|| self.begin(pool, uring, io, token, stable))
    }

    /// Starts a request on the fast path. `None`: it takes several steps.
    #[inline]
    fn start_fast(
        &self,
        op: qcow2::Op,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Option<Step> {
        let fast_path = FastPath::find(
            &self.image.chain,
            &mut self.user.borrow_mut(),
            op,
            io.request.offset,
            io.request.len,
        )?;
        let (raw, files) = self.file(fast_path.file);
        let offset = std::mem::replace(&mut io.request.offset, fast_path.offset);
        let step = if raw.inline() {
            Step::Done(raw.run_inline(io, pool))
        } else {
            raw.start(files, pool, uring, io, token)
        };
        Some(self.after_fast(io, fast_path, offset, step))
    }

    /// Handles the result of a step of the fast path. `offset` is the one on the disk.
    #[inline]
    fn after_fast(&self, io: &mut Io, fast_path: FastPath, offset: u64, step: Step) -> Step {
        if step == Step::Wait {
            io.state.fast_path = Some((fast_path, offset));
        } else {
            io.request.offset = offset;
            fast_path.end(&self.image.chain, &mut self.user.borrow_mut());
        }
        step
    }

    /// Starts a request that takes several steps.
    fn begin(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, stable: bool) -> Step {
        let op = match io.request.op {
            Op::Read => qcow2::Op::Read,
            Op::Write => qcow2::Op::Write,
            Op::WriteCompressed => qcow2::Op::WriteCompressed,
            Op::Populate => qcow2::Op::Populate,
            Op::Seek { own } => qcow2::Op::Seek { own },
            Op::Flush => qcow2::Op::Flush,
            Op::Discard => qcow2::Op::Discard,
            Op::WriteZeroes { unmap } => qcow2::Op::Zero { unmap },
            // Clusters are allocated when they are written.
            Op::Allocate => return Step::Done(0),
        };
        self.end_batch();
        let mut state = io.state.qcow2.take().unwrap_or_default();
        let (offset, len) = (io.request.offset, io.request.len);
        let step = self.with(uring, token, |cx| state.request.start(op, offset, len, stable, cx));
        let step = self.drive(pool, uring, io, &mut state, token, step);
        io.state.qcow2 = Some(state);
        step
    }

    /// See [`DiskHandle::resume`](super::DiskHandle::resume).
    #[inline]
    pub(super) fn resume(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        if let Some((fast_path, offset)) = io.state.fast_path.take() {
            let (raw, files) = self.file(fast_path.file);
            let step = raw.resume(files, pool, uring, io, token, res);
            return self.after_fast(io, fast_path, offset, step);
        }
        self.resume_steps(pool, uring, io, token, res)
    }

    /// Continues a request that takes several steps.
    fn resume_steps(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let Some(mut state) = io.state.qcow2.take() else { return Step::Done(-libc::EIO) };
        let step = if std::mem::take(&mut state.direct) {
            // Block devices and some file systems cannot allocate space. The request continues
            // without.
            let without = std::mem::take(&mut state.extends)
                && matches!(-res, libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS);
            Some(if without { 0 } else { res })
        } else {
            let (raw, files) = self.file(state.file);
            done(raw.resume(files, pool, uring, &mut state.inner, token, res))
        };
        let step = match step {
            None => Step::Wait,
            Some(res) => {
                state.inner.request.iov.clear();
                let next = self.with(uring, token, |cx| state.request.resume(res, cx));
                self.drive(pool, uring, io, &mut state, token, next)
            }
        };
        io.state.qcow2 = Some(state);
        step
    }

    /// See [`DiskHandle::detach`](super::DiskHandle::detach).
    pub(super) fn detach(self, uring: &mut Uring) {
        self.end_batch();
        self.image.files.iter().for_each(|raw| raw.unregister(uring));
        self.image.chain.top().leave(self.user.into_inner());
    }

    /// Returns a file by its number.
    fn file(&self, file: FileId) -> (&Raw, UringFiles) {
        (&self.image.files[usize::from(file)], self.files[usize::from(file)])
    }

    /// Calls `f` with the context of a request.
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

    /// Carries out steps until one has to be waited for.
    fn drive(
        &self,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        state: &mut Qcow2State,
        token: Token,
        first: qcow2::Step,
    ) -> Step {
        let mut step = first;
        loop {
            let res = match step {
                qcow2::Step::Done(res) => {
                    io.request.found = state.request.found();
                    if res < 0 {
                        self.image.log_corruption();
                    }
                    return Step::Done(res);
                }
                qcow2::Step::Park => {
                    state.direct = true;
                    uring.expect_wake();
                    return Step::Wait;
                }
                qcow2::Step::Zeroes { data } => {
                    // SAFETY: the segments are valid until the request is complete, by the contract
                    // of `IoVecs::push`.
                    unsafe { io.request.iov.zero_range(data) };
                    Some(0)
                }
                qcow2::Step::Copy { data, at } => {
                    let from = &state.request.bytes(Buf::Data)[at..at + (data.end - data.start) as usize];
                    // SAFETY: the segments are valid until the request is complete, by the contract
                    // of `IoVecs::push`.
                    unsafe { io.request.iov.scatter_range(data, from) };
                    Some(0)
                }
                qcow2::Step::Gather { data, at } => {
                    let to = &mut state.request.bytes(Buf::Data)[at..at + (data.end - data.start) as usize];
                    // SAFETY: the segments are valid until the request is complete, by the contract
                    // of `IoVecs::push`.
                    unsafe { io.request.iov.gather_range(data, to) };
                    Some(0)
                }
                // A file in memory grows by each write without cost.
                qcow2::Step::Extend { file, .. } if self.file(file).0.inline() => Some(0),
                qcow2::Step::Extend { file, offset, len } => {
                    (state.direct, state.extends) = (true, true);
                    let entry = on_file!(self.file(file).1.file(), |fd| {
                        opcode::Fallocate::new(fd, len).offset(offset).build()
                    });
                    // SAFETY: fallocate refers to no memory.
                    unsafe { uring.push(entry, token) };
                    return Step::Wait;
                }
                other => done(self.transfer(pool, uring, io, state, token, other)),
            };
            let Some(res) = res else { return Step::Wait };
            state.inner.request.iov.clear();
            step = self.with(uring, token, |cx| state.request.resume(res, cx));
        }
    }

    /// Starts a step that is a request of a file.
    fn transfer(
        &self,
        pool: &Pool,
        uring: &mut Uring,
        io: &Io,
        state: &mut Qcow2State,
        token: Token,
        step: qcow2::Step,
    ) -> Step {
        let inner = &mut state.inner;
        let guest = |inner: &mut Io, data: Range<u64>| {
            // SAFETY: the segments are valid until the request is complete, by the contract of
            // `IoVecs::push`, and `inner` completes before it. `inner` is boxed in the state of the
            // request, so it does not move.
            io.request.iov.for_range(data, |ptr, len| unsafe { inner.push(ptr, len) });
        };
        let file = match step {
            qcow2::Step::Data { file, offset, data } => {
                let op = if io.request.op == Op::Read { Op::Read } else { Op::Write };
                inner.reset(op, offset, false);
                guest(inner, data);
                file
            }
            qcow2::Step::Read { file, offset, buf, range } => {
                inner.reset(Op::Read, offset, false);
                push_own(inner, &mut state.request, buf, range);
                file
            }
            qcow2::Step::Write { file, offset, buf, range } => {
                inner.reset(Op::Write, offset, false);
                push_own(inner, &mut state.request, buf, range);
                file
            }
            qcow2::Step::Around { file, offset, head, data, tail } => {
                inner.reset(Op::Write, offset, false);
                push_own(inner, &mut state.request, Buf::Data, 0..head);
                guest(inner, data);
                push_own(inner, &mut state.request, Buf::Data, head..head + tail);
                file
            }
            qcow2::Step::ZeroFile { file, offset, len, punch } => {
                inner.reset(Op::WriteZeroes { unmap: punch }, offset, false);
                inner.request.len = len;
                file
            }
            qcow2::Step::Discard { file, offset, len } => {
                inner.reset(Op::Discard, offset, false);
                inner.request.len = len;
                file
            }
            qcow2::Step::Sync { file } => {
                inner.reset(Op::Flush, 0, false);
                file
            }
            _ => unreachable!("`drive` handles the other steps"),
        };
        state.file = file;
        let (raw, files) = self.file(file);
        if raw.at_once(&state.inner) {
            return Step::Done(raw.run_inline(&mut state.inner, pool));
        }
        raw.start(files, pool, uring, &mut state.inner, token)
    }
}

/// Adds a range of one of the request's buffers as a segment.
fn push_own(inner: &mut Io, request: &mut Request, buf: Buf, range: Range<usize>) {
    let bytes = &mut request.bytes(buf)[range];
    // SAFETY: the request does not change its buffers until it is resumed, which is after `inner`
    // completes. It is boxed with `inner`, so neither moves.
    unsafe { inner.push(bytes.as_mut_ptr(), bytes.len()) };
}

/// Returns the result of a step that is complete.
fn done(step: Step) -> Option<i32> {
    match step {
        Step::Done(res) => Some(res),
        Step::Wait => None,
    }
}

#[cfg(test)]
mod tests;
