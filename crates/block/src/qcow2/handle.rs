//! An image, as one queue of a worker uses it: requests and their steps.
//!
//! Most requests take the fast path ([`FastPath`]): they are one transfer of the guest's bytes. On
//! a file of this host it is carried out with the queue's own [`Io`]. Other requests take several
//! steps. Their [`Qcow2State`] has the request and a second [`Io`] for the current step. A request
//! that waits for another one is woken by a message to the io_uring of its worker, from any worker.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use io_uring::opcode;
use qcow2::{Batch, Buf, Context, FastPath, FileId, Request, User, Waker};
use vshunt_engine::{Token, Uring, on_file};

use super::Qcow2;
use crate::bounce::Pool;
use crate::cost::Zeroing;
use crate::failures;
use crate::image_file::{FileHandle, ImageFile};
use crate::io::Qcow2State;
use crate::{Io, IoVecs, Op, Step};

/// An image, as one queue of a worker uses it.
pub(crate) struct Qcow2Handle {
    image: Arc<Qcow2>,
    files: Vec<FileHandle>,
    user: RefCell<User>,
    /// While the queue takes several requests.
    batch: Cell<Option<Batch>>,
}

impl Qcow2Handle {
    pub(super) fn new(image: &Arc<Qcow2>, uring: &mut Uring) -> Self {
        let files = image.files.iter().map(|file| file.attach(uring)).collect();
        let user = RefCell::new(image.chain.top().join());
        Self { image: image.clone(), files, user, batch: Cell::default() }
    }

    /// See [`DiskHandle::begin_batch`](crate::DiskHandle::begin_batch).
    pub(crate) fn begin_batch(&self) {
        self.end_batch();
        self.batch.set(Some(Batch::begin(&self.image.chain, &mut self.user.borrow_mut())));
    }

    /// See [`DiskHandle::end_batch`](crate::DiskHandle::end_batch).
    pub(crate) fn end_batch(&self) {
        if let Some(batch) = self.batch.take() {
            batch.end(&self.image.chain, &mut self.user.borrow_mut());
        }
    }

    /// Returns the path of the image, or its URI.
    pub(crate) fn path(&self) -> &Path {
        self.image.files[0].path()
    }

    /// Returns where the image is, for messages. `asked`: the request was sent.
    pub(crate) fn place(&self, asked: bool) -> failures::Storage {
        self.image.files[0].place(asked)
    }

    pub(crate) fn zeroing(&self) -> Zeroing {
        self.image.zeroing()
    }

    /// See [`DiskHandle::start`](crate::DiskHandle::start).
    #[inline]
    pub(crate) fn start(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
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
        let offset = io.request.offset;
        let step = match self.file(fast_path.file) {
            (ImageFile::Local(raw), FileHandle::Local(files)) => {
                io.request.offset = fast_path.offset;
                if raw.inline() {
                    Step::Done(raw.run_inline(io, pool))
                } else {
                    raw.start(*files, pool, uring, io, token)
                }
            }
            (file, handle) => start_copy(file, handle, pool, uring, io, token, fast_path.offset),
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
    pub(super) fn begin(
        &self,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        stable: bool,
    ) -> Step {
        let op = match io.request.op {
            Op::Read => qcow2::Op::Read,
            Op::Write => qcow2::Op::Write,
            Op::WriteCompressed => qcow2::Op::WriteCompressed,
            Op::Populate => qcow2::Op::Populate,
            Op::Seek { look } => qcow2::Op::Seek { look },
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

    /// See [`DiskHandle::resume`](crate::DiskHandle::resume).
    #[inline]
    pub(crate) fn resume(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        if let Some((fast_path, offset)) = io.state.fast_path.take() {
            let (file, handle) = self.file(fast_path.file);
            let step = file.resume(handle, pool, uring, io, token, res);
            return self.after_fast(io, fast_path, offset, step);
        }
        self.resume_steps(pool, uring, io, token, res)
    }

    /// Continues a request that takes several steps.
    fn resume_steps(&self, pool: &Pool, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let Some(mut state) = io.state.qcow2.take() else { return Step::Done(-libc::EIO) };
        let step = if std::mem::take(&mut state.direct) {
            let extends = std::mem::take(&mut state.extends);
            Some(if extends { self.after_extend(res) } else { res })
        } else {
            let (file, handle) = self.file(state.file);
            done(file.resume(handle, pool, uring, &mut state.inner, token, res))
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

    /// Returns the result of [`Extend`](qcow2::Step::Extend) for that of fallocate.
    fn after_extend(&self, res: i32) -> i32 {
        match -res {
            // A block device keeps its length.
            libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS
                if self.image.image().local().is_none_or(|raw| !raw.is_file()) =>
            {
                0
            }
            libc::ENODEV | libc::ENOSYS => -libc::EOPNOTSUPP,
            _ => res,
        }
    }

    /// See [`DiskHandle::detach`](crate::DiskHandle::detach).
    pub(crate) fn detach(self, uring: &mut Uring) {
        self.end_batch();
        self.image.files.iter().zip(self.files).for_each(|(file, handle)| file.detach(handle, uring));
        self.image.chain.top().leave(self.user.into_inner());
    }

    /// Returns a file by its number.
    fn file(&self, file: FileId) -> (&ImageFile, &FileHandle) {
        (&self.image.files[usize::from(file)], &self.files[usize::from(file)])
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
                qcow2::Step::Extend { file, offset, len } => match self.file(file) {
                    (ImageFile::Local(raw), FileHandle::Local(files)) if !raw.inline() => {
                        (state.direct, state.extends) = (true, true);
                        let entry = on_file!(files.file(), |fd| {
                            opcode::Fallocate::new(fd, len).offset(offset).build()
                        });
                        // SAFETY: fallocate refers to no memory.
                        unsafe { uring.push(entry, token) };
                        return Step::Wait;
                    }
                    // Space ahead would be memory that nothing uses.
                    (ImageFile::Local(_), _) => Some(-libc::EOPNOTSUPP),
                    // A remote file never grows.
                    _ => Some(0),
                },
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
        let guest = |inner: &mut Io, data: Range<u64>| push_guest(inner, &io.request.iov, data);
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
        let (file, handle) = self.file(file);
        file.start(handle, pool, uring, &mut state.inner, token)
    }
}

/// Starts a request of the fast path on a remote file, with segments of its own: a client of an
/// io_uring takes them, and those of the guest's request may have a hidden rest.
fn start_copy(
    file: &ImageFile,
    handle: &FileHandle,
    pool: &Pool,
    uring: &mut Uring,
    io: &mut Io,
    token: Token,
    offset: u64,
) -> Step {
    let mut state = io.state.qcow2.take().unwrap_or_default();
    state.inner.reset(io.request.op, offset, false);
    push_guest(&mut state.inner, &io.request.iov, 0..io.request.len);
    let step = file.start(handle, pool, uring, &mut state.inner, token);
    if let Step::Done(_) = step {
        state.inner.request.iov.clear();
    }
    io.state.qcow2 = Some(state);
    step
}

/// Adds a range of the guest's bytes as segments of the current step.
fn push_guest(inner: &mut Io, iov: &IoVecs, data: Range<u64>) {
    // SAFETY: the segments are valid until the request is complete, by the contract of
    // `IoVecs::push`, and `inner` completes before it. `inner` is boxed in the state of the
    // request, so it does not move.
    iov.for_range(data, |ptr, len| unsafe { inner.push(ptr, len) });
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
