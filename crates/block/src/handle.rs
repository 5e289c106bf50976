//! A disk as one queue on one worker uses it.

use std::io;
use std::sync::Arc;

use qcow2::Waker;
use vshunt_engine::{Token, Uring};

use super::bounce::{AlignedBuf, Pool};
use super::copy_before_write::{CopyBeforeWrite, Next};
use super::parts::LongRequests;
use super::watch::Watch;
use super::{Disk, Extent, Io, Kind, Op, RingFiles, Step, forget, qcow2 as image};

/// A disk as one worker's queue uses it: made and used on that worker's thread, with that worker's ring and no other.
pub struct DiskHandle {
    pub(super) disk: Arc<Disk>,
    pub(super) kind: Arc<Kind>,
    pub(super) files: RingFiles,
    /// Of a qcow2 disk.
    pub(super) image: Option<Box<image::Handle>>,
    pub(super) pool: Pool,
    /// What is done beside each write, if anything is.
    pub(super) watch: Option<Arc<Watch>>,
    pub(super) long: LongRequests,
}

impl Disk {
    /// [`merge`](Self::merge) as the disk's queues would do it. On a thread of its own: the
    /// end of a ring interrupts what its thread waits for next, which callers are not prepared for.
    pub(super) fn merge_as_queue(self: &Arc<Self>, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let granule = self.granule();
        let first = offset / granule * granule;
        let len = ((offset + bytes.len() as u64).next_multiple_of(granule) - first) as usize;
        self.read_and_write(first, len, fua, |buf| {
            buf[(offset - first) as usize..][..bytes.len()].copy_from_slice(bytes);
        })
    }

    /// Makes a range of any bytes read as zeroes, by the operations that the disk's queues use, and gives its space back. Blocks.
    pub(super) fn clear(self: &Arc<Self>, range: std::ops::Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let whole = range.start.next_multiple_of(super::SECTOR_BYTES);
        if whole > range.start {
            self.merge_as_queue(range.start, &vec![0; (whole.min(range.end) - range.start) as usize], false)?;
        }
        if whole >= range.end {
            return Ok(());
        }
        self.as_queue(|handle, ring, io| {
            io.reset(Op::WriteZeroes { unmap: true }, whole, false);
            io.len = range.end - whole;
            handle.run(ring, io)
        })
    }

    /// Reads a range of whole sectors and writes the same bytes back, by the operations that the disk's queues use. Blocks.
    pub(super) fn rewrite(self: &Arc<Self>, offset: u64, len: u64) -> io::Result<()> {
        self.read_and_write(offset, len as usize, false, |_| {})
    }

    fn read_and_write(
        self: &Arc<Self>,
        first: u64,
        len: usize,
        fua: bool,
        change: impl FnOnce(&mut [u8]) + Send,
    ) -> io::Result<()> {
        let mut buf = AlignedBuf::new(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut change = Some(change);
        self.as_queue(|handle, ring, io| {
            let mut merged = Ok(());
            for op in [Op::Read, Op::Write] {
                if op == Op::Write
                    && let Some(change) = change.take()
                {
                    change(&mut buf.bytes()[..len]);
                }
                io.reset(op, first, fua && op == Op::Write);
                // SAFETY: the buffer and `io` stay here until the request is done.
                unsafe { io.push(buf.ptr(), len) };
                merged = merged.and_then(|()| handle.run(ring, io));
            }
            merged
        })
    }

    /// [`seek`](Self::seek) as the disk's queues would do it; likewise.
    pub(super) fn seek_as_queue(self: &Arc<Self>, offset: u64, hole: bool) -> io::Result<u64> {
        let size = self.size_bytes();
        let mut at = offset / self.granule() * self.granule();
        self.as_queue(|handle, ring, io| {
            while at < size {
                io.reset(Op::Seek { own: false }, at, false);
                io.len = size - at;
                handle.run(ring, io)?;
                let Some(found) = io.found.filter(|found| found.len > 0) else { break };
                if (found.extent == Extent::Zero) == hole {
                    return Ok(at.max(offset));
                }
                at += found.len;
            }
            Ok(size)
        })
    }

    /// Does something with a handle and a ring of its own.
    fn as_queue<T: Send>(
        self: &Arc<Self>,
        work: impl FnOnce(&DiskHandle, &mut Uring, &mut Io) -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let work = || {
            let (mut ring, mut io) = (Uring::new()?, Io::default());
            let handle = self.attach(&mut ring);
            let done = work(&handle, &mut ring, &mut io);
            handle.detach(&mut ring);
            done
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("vshunt-aside".to_owned());
            thread.spawn_scoped(scope, work)?.join().expect("it does not panic")
        })
    }
}

impl DiskHandle {
    /// Begins a request. On [`Step::Wait`] an operation with `token` is on the ring; its result goes to
    /// [`resume`](Self::resume). `io` stays where it is until [`Step::Done`], and so does the memory that its segments
    /// name ([`IoVecs::push`](super::IoVecs::push)).
    ///
    /// A disk in memory copies a request before this returns. It copies long requests in parts, see `parts`.
    #[inline]
    pub fn start(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let step = match self.long.part_bytes(io) {
            None => self.start_whole(uring, io, token),
            Some(part_bytes) => self.start_in_parts(part_bytes, uring, io, token),
        };
        Self::stepped(io, step)
    }

    /// Begins a request, or a part of one.
    #[inline]
    pub(super) fn start_whole(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        match &self.watch {
            Some(watch) if io.op.changes() => self.start_watched(watch, uring, io, token),
            _ => self.begin(uring, io, token),
        }
    }

    /// Goes on with a request after its operation on the ring completed with `res`.
    #[inline]
    pub fn resume(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        let step = if self.long.has(io) {
            self.resume_in_parts(uring, io, token, res)
        } else {
            self.resume_whole(uring, io, token, res)
        };
        Self::stepped(io, step)
    }

    /// Goes on with a request, or a part of one.
    #[inline]
    pub(super) fn resume_whole(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        match &self.watch {
            Some(watch) if io.before.as_ref().is_some_and(|b| b.active) => {
                let before = watch.before.as_ref().expect("it was there when the request began");
                self.resume_before(before, uring, io, token, res)
            }
            _ => self.advance(uring, io, token, res),
        }
    }

    #[inline]
    fn begin(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        match &*self.kind {
            Kind::Null => Step::Done(super::null(io)),
            Kind::Gone => Step::Done(-libc::EIO),
            Kind::Ram(ram) => Step::Done(ram.request(io, self.disk.readonly)),
            Kind::Raw(raw) if raw.at_once(io) => Step::Done(raw.run_inline(io, &self.pool)),
            Kind::Raw(raw) => raw.start(self.files, &self.pool, uring, io, token),
            Kind::Qcow2(_) => self.image().start(&self.pool, uring, io, token),
        }
    }

    #[inline]
    fn advance(&self, uring: &mut Uring, io: &mut Io, token: Token, res: i32) -> Step {
        match &*self.kind {
            Kind::Raw(raw) => raw.resume(self.files, &self.pool, uring, io, token, res),
            Kind::Qcow2(_) => self.image().resume(&self.pool, uring, io, token, res),
            // The others are never under way; a completion that says otherwise is not ours.
            Kind::Null | Kind::Ram(_) | Kind::Gone => Step::Done(-libc::EIO),
        }
    }

    /// A request that is over names no memory any more, and has none for naming it.
    #[inline]
    fn stepped(io: &mut Io, step: Step) -> Step {
        if let Step::Done(_) = step {
            io.iov.clear();
        }
        step
    }

    /// A write that bitmaps take note of, or that a backup has something read before.
    #[cold]
    fn start_watched(&self, watch: &Watch, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let range = io.offset..io.offset + io.len;
        watch.note(range.clone());
        match &watch.before {
            Some(before) if before.concerns(range) => {
                io.before.get_or_insert_default().active = true;
                self.before(before, uring, io, token)
            }
            _ => self.begin(uring, io, token),
        }
    }

    /// Reads what is to be read before a write; then begins it.
    fn before(&self, cbw: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        let waker = Waker { who: uring.id(), token: token.pack() };
        loop {
            match cbw.next(io.offset..io.offset + io.len, waker) {
                Next::Go => {
                    io.before.as_mut().expect("it is there").active = false;
                    return self.begin(uring, io, token);
                }
                Next::Wait => {
                    uring.expect_wake();
                    return Step::Wait;
                }
                Next::Read(mut piece) => {
                    let mut slot = io.before.take().expect("it is there");
                    slot.inner.reset(Op::Read, piece.offset(), false);
                    let bytes = piece.contents();
                    // SAFETY: the piece stays in the slot, which is boxed, until the read is done; nobody else has it.
                    unsafe { slot.inner.push(bytes.as_mut_ptr(), bytes.len()) };
                    slot.piece = Some(piece);
                    let step = self.begin(uring, &mut slot.inner, token);
                    io.before = Some(slot);
                    match step {
                        Step::Wait => return Step::Wait,
                        Step::Done(res) => self.has_read(cbw, uring, io, res),
                    }
                }
            }
        }
    }

    fn resume_before(
        &self,
        cbw: &CopyBeforeWrite,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        let mut slot = io.before.take().expect("it is active");
        // Without one it was woken.
        let step = slot.piece.is_some().then(|| self.advance(uring, &mut slot.inner, token, res));
        io.before = Some(slot);
        match step {
            Some(Step::Wait) => return Step::Wait,
            Some(Step::Done(res)) => self.has_read(cbw, uring, io, res),
            None => {}
        }
        self.before(cbw, uring, io, token)
    }

    fn has_read(&self, cbw: &CopyBeforeWrite, uring: &mut Uring, io: &mut Io, res: i32) {
        let slot = io.before.as_mut().expect("it is active");
        slot.inner.iov.clear();
        let piece = slot.piece.take().expect("it was being read");
        let mut wake = |w: Waker| uring.wake(w.who, w.token);
        match res {
            0.. => cbw.read(piece, &mut wake),
            errno => cbw.read_failed(piece, errno, &mut wake),
        }
    }

    /// Undoes [`Disk::attach`], on the same thread, with no request under way.
    pub fn detach(self, uring: &mut Uring) {
        debug_assert!(self.long.is_idle(), "a long request is under way");
        match &*self.kind {
            Kind::Raw(raw) => forget(raw, uring),
            Kind::Qcow2(_) => self.image.expect("made with it").detach(uring),
            Kind::Null | Kind::Ram(_) | Kind::Gone => {}
        }
    }

    /// Does a request, and waits for it. For control threads, with a ring of their own.
    pub fn run(&self, uring: &mut Uring, io: &mut Io) -> io::Result<()> {
        let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
        let mut step = self.start(uring, io, token);
        loop {
            match step {
                Step::Done(res) => {
                    // Those whom it woke at its end would wait for ever.
                    if uring.send().is_err() {
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    }
                    return if res < 0 { Err(io::Error::from_raw_os_error(-res)) } else { Ok(()) };
                }
                Step::Wait => {
                    let Ok(res) = uring.next_result() else {
                        // It cannot be told whether the kernel still writes to its memory.
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    };
                    step = self.resume(uring, io, token, res);
                }
            }
        }
    }

    fn image(&self) -> &image::Handle {
        self.image.as_ref().expect("made with it")
    }
}
