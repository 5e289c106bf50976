//! A disk, as one queue on one worker uses it.
//!
//! The queue calls [`start`](DiskHandle::start) for each request, and
//! [`resume`](DiskHandle::resume) for each completion, on the worker's thread. Nothing here blocks.

mod frozen;
mod observed;
mod split;

use std::io;
use std::sync::Arc;

use vshunt_engine::{Direction, Token, Uring};

use self::frozen::FrozenHandle;
use self::split::SplitRequests;
use super::backend::{Backend, null};
use super::bounce::Pool;
use super::cost::{Zeroing, cost};
use super::disk::{Disk, WriteMark};
use super::failures::Storage;
use super::memory::Ram;
use super::nbd::NbdHandle;
use super::qcow2::Qcow2Handle;
use super::raw::{Raw, UringFiles};
use super::shared_client::ClientHandle;
use super::write_observers::WriteObservers;
use super::{Io, Op, Step};

/// A disk, as one queue of a worker uses it. It is made, used and dropped on that worker's thread,
/// with that worker's io_uring.
pub struct DiskHandle {
    /// What serves the requests.
    pub(super) handle: Handle,
    pub(super) pool: Pool,
    /// What is done beside each write, if anything is.
    observers: Option<Arc<WriteObservers>>,
    /// The fleecing file of a backup, for the old data that writes replace.
    fleece: Option<Box<DiskHandle>>,
    split: SplitRequests,
    /// Set when a request that changes the disk is complete. None: the image's file has the times.
    written: Option<Arc<WriteMark>>,
    /// The disk closes its image when its last reference is dropped.
    pub(super) disk: Arc<Disk>,
}

/// A [`Backend`], with what one queue needs to use it.
pub(super) enum Handle {
    Null,
    Ram { ram: Arc<Ram>, readonly: bool },
    Raw { raw: Arc<Raw>, files: UringFiles },
    Qcow2(Box<Qcow2Handle>),
    Nbd(NbdHandle),
    Frozen(Box<FrozenHandle>),
    Gone,
}

impl Disk {
    /// Makes the disk usable by one queue of the worker that owns `uring`. Called on that worker's
    /// thread.
    pub fn attach(self: &Arc<Self>, uring: &mut Uring) -> DiskHandle {
        let mut handle = self.attach_reader(uring);
        let observers = Some(self.write_observers()).filter(|o| !o.is_idle() && !self.readonly);
        let copy = observers.as_ref().and_then(|o| o.copy_before_write.as_ref());
        let fleece = copy.filter(|copy| copy.is_fleeced()).and_then(|_| self.fleece());
        handle.fleece = fleece.map(|file| Box::new(file.attach(uring)));
        handle.observers = observers;
        let file_has_times = matches!(&handle.handle, Handle::Raw { raw, .. } if raw.is_file());
        handle.written = (!self.readonly && !file_has_times).then(|| self.times.mark());
        handle
    }

    /// [`attach`](Self::attach) for a queue that changes nothing.
    pub(super) fn attach_reader(self: &Arc<Self>, uring: &mut Uring) -> DiskHandle {
        let backend = self.backend();
        let split = SplitRequests::new(&backend);
        let handle = match backend {
            Backend::Null => Handle::Null,
            Backend::Ram(ram) => Handle::Ram { ram, readonly: self.readonly },
            Backend::Raw(raw) => Handle::Raw { files: raw.register(uring), raw },
            Backend::Qcow2(image) => Handle::Qcow2(Box::new(image.attach(uring))),
            Backend::Nbd(nbd) => Handle::Nbd(nbd.attach(uring)),
            Backend::Frozen => match self.frozen_parts() {
                Some(frozen) => Handle::Frozen(Box::new(FrozenHandle::new(&frozen, uring))),
                None => Handle::Gone,
            },
            Backend::Gone => Handle::Gone,
        };
        DiskHandle {
            handle,
            pool: Pool::default(),
            observers: None,
            fleece: None,
            split,
            written: None,
            disk: self.clone(),
        }
    }
}

impl DiskHandle {
    /// Says that the queue starts several requests now, until [`end_batch`](Self::end_batch) in the
    /// same call on the worker. Requests of allocated clusters of a qcow2 image then cost less.
    #[inline]
    pub fn begin_batch(&self) {
        if let Handle::Qcow2(image) = &self.handle {
            image.begin_batch();
        }
    }

    /// Undoes [`begin_batch`](Self::begin_batch).
    #[inline]
    pub fn end_batch(&self) {
        if let Handle::Qcow2(image) = &self.handle {
            image.end_batch();
        }
    }

    /// Returns what a request to this disk costs. See [`cost`].
    #[inline]
    pub fn cost(&self, op: Op, offset: u64, len: u64) -> Option<(Direction, u64)> {
        let zeroing = match op {
            Op::WriteZeroes { unmap } => self.zeroing(unmap),
            _ => Zeroing::Marks,
        };
        cost(op, offset, len, zeroing)
    }

    /// Returns how the disk zeroes a range now. Storage that refuses to free a range changes the
    /// answer.
    fn zeroing(&self, unmap: bool) -> Zeroing {
        match &self.handle {
            // Only whole pages of memory are freed; less than two are written.
            Handle::Null | Handle::Ram { .. } | Handle::Frozen(_) | Handle::Gone => Zeroing::Marks,
            Handle::Raw { raw, .. } => raw.zeroing(unmap),
            Handle::Qcow2(image) => image.zeroing(),
            Handle::Nbd(_) => Zeroing::Writes,
        }
    }

    /// Starts a request. On [`Step::Wait`] the io_uring has an operation with `token`; its result
    /// goes to [`resume`](Self::resume). Until [`Step::Done`], `io` stays where it is, and so does
    /// the memory of its segments ([`IoVecs::push`](super::IoVecs::push)).
    ///
    /// A disk in memory copies a request before this returns. It copies long requests in parts.
    #[inline]
    pub fn start(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let step = match self.split.part_bytes(io) {
            None => self.start_whole(uring, io, token),
            Some(part_bytes) => self.start_in_parts(part_bytes, uring, io, token),
        };
        self.stepped(io, step, false)
    }

    /// Starts a request, or a part of one.
    #[inline]
    fn start_whole(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        match &self.observers {
            Some(observers) if io.request.op.changes() => self.start_observed(observers, uring, io, token),
            _ => self.begin(uring, io, token),
        }
    }

    /// Continues a request after its operation on the io_uring completed with `res`.
    #[inline]
    pub fn resume(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let step = if self.split.has(io) {
            self.resume_in_parts(uring, io, token, res)
        } else {
            self.resume_whole(uring, io, token, res)
        };
        self.stepped(io, step, true)
    }

    /// Continues a request, or a part of one.
    #[inline]
    fn resume_whole(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        match &self.observers {
            Some(observers) if io.state.copy_before_write.as_ref().is_some_and(|state| state.active) => {
                self.resume_observed(observers, uring, io, token, res)
            }
            Some(observers) if observers.copy_after_write.is_some() && io.request.op.changes() => {
                self.resume_followed(observers, uring, io, token, res)
            }
            _ => self.advance(uring, io, token, res),
        }
    }

    /// Starts a request on the backend.
    #[inline]
    fn begin(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        match &self.handle {
            Handle::Null => Step::Done(null(io)),
            Handle::Ram { ram, readonly } => Step::Done(ram.request(io, *readonly)),
            Handle::Raw { raw, .. } if raw.at_once(io) => Step::Done(raw.run_inline(io, &self.pool)),
            Handle::Raw { raw, files } => raw.start(*files, &self.pool, uring, io, token),
            Handle::Qcow2(image) => image.start(&self.pool, uring, io, token),
            Handle::Nbd(nbd) => nbd.start(uring, io, token),
            Handle::Frozen(frozen) => frozen.start(uring, io, token),
            Handle::Gone => Step::Done(-libc::EIO),
        }
    }

    /// Continues a request on the backend.
    #[inline]
    fn advance(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        match &self.handle {
            Handle::Raw { raw, files } => raw.resume(*files, &self.pool, uring, io, token, res),
            Handle::Qcow2(image) => image.resume(&self.pool, uring, io, token, res),
            Handle::Nbd(nbd) => nbd.resume(uring, io, token, res),
            Handle::Frozen(frozen) => frozen.resume(uring, io, token, res),
            // These never have an operation in flight, so the completion is not one of theirs.
            Handle::Null | Handle::Ram { .. } | Handle::Gone => Step::Done(-libc::EIO),
        }
    }

    /// Removes the segments of a request that is complete, and returns their memory to the cache.
    /// `asked`: it had an operation on the io_uring.
    #[inline]
    fn stepped(&self, io: &mut Io, step: Step, asked: bool) -> Step {
        if let Step::Done(res) = step {
            if res < 0 {
                self.failed(io, -res, asked);
            }
            // Also a request that failed may have written a part.
            if io.request.op.changes()
                && let Some(mark) = &self.written
            {
                mark.set();
            }
            io.request.iov.clear();
        }
        step
    }

    /// Takes note of a request that failed.
    #[cold]
    fn failed(&self, io: &Io, errno: i32, asked: bool) {
        let (path, storage) = match &self.handle {
            Handle::Raw { raw, .. } => (raw.path(), Storage::Here),
            Handle::Qcow2(image) => (image.path(), image.place(asked)),
            Handle::Nbd(nbd) => (nbd.path(), Storage::Server { asked }),
            // The disks below a frozen one take note.
            Handle::Null | Handle::Ram { .. } | Handle::Frozen(_) | Handle::Gone => return,
        };
        self.disk.failures.note(path, (io.request.op, io.request.offset), errno, storage);
    }

    /// Undoes [`Disk::attach`], on the same thread, with no request in flight.
    pub fn detach(self, uring: &mut Uring) {
        debug_assert!(self.split.is_idle(), "a long request is in flight");
        if let Some(fleece) = self.fleece {
            fleece.detach(uring);
        }
        match self.handle {
            Handle::Raw { raw, .. } => raw.unregister(uring),
            Handle::Qcow2(image) => image.detach(uring),
            Handle::Nbd(nbd) => nbd.detach(uring),
            Handle::Frozen(frozen) => frozen.detach(uring),
            Handle::Null | Handle::Ram { .. } | Handle::Gone => {}
        }
    }

    /// Carries out a request and waits for it. For control threads, with an io_uring of their own.
    ///
    /// # Errors
    /// The request's.
    pub fn run(&self, uring: &mut Uring, io: &mut Io) -> io::Result<()> {
        let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
        let mut step = self.start(uring, io, token);
        loop {
            match step {
                Step::Done(res) => {
                    // Requests that this one woke at its end would wait for ever otherwise.
                    if uring.send().is_err() {
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    }
                    return if res < 0 { Err(io::Error::from_raw_os_error(-res)) } else { Ok(()) };
                }
                Step::Wait => {
                    let Ok(res) = uring.next_result() else {
                        // The kernel may still write to the memory of the request.
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    };
                    step = self.resume(uring, io, token, res);
                }
            }
        }
    }

    /// Returns whether no request is done in parts.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.split.is_idle()
    }
}
