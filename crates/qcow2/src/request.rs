//! A request on a disk. In each step it returns what to read, write or wait for, and the caller
//! does that.
//!
//! [`Request::start`] and [`Request::resume`] return at once, with a [`Step`]. Between two steps a
//! request holds nothing except the clusters whose entries it is going to change (see
//! [`crate::map`]). A request that holds clusters waits only for metadata and flushes, never for
//! other clusters, so two requests never wait for each other.
//!
//! A write to an unallocated cluster has these steps: hold its entry; take a cluster from the
//! reserve; read the part that the request does not cover from below; write the data; change the
//! entry, in memory. The next flush makes it stable, data and counts before entries ([`flush`]).

mod buffer;
mod change;
mod fetch;
mod flush;
mod generation;
mod mark_corrupt;
mod pack;
mod populate;
mod seek;
mod table;
mod zero;

use crate::bytes::to_usize;
use crate::lock::Locked;
use std::ops::Range;

use self::buffer::Buffer;
use self::change::Change;
use self::fetch::Fetch;
use self::flush::Flush;
use self::generation::NewGeneration;
use self::mark_corrupt::Mark;
use self::pack::Pack;
pub use self::seek::{Extent, Found, Look};
use self::table::NewTable;
use crate::epoch::Epoch;
use crate::map::Load;
use crate::served::{Chain, Miss, Served, Source, User};
use crate::{FileId, Waker};

const EIO: i32 = -5;
const EINVAL: i32 = -22;
const ENOSPC: i32 = -28;
const EROFS: i32 = -30;
const EOPNOTSUPP: i32 = -95;

/// The operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Op {
    /// From disk to guest.
    #[default]
    Read,
    /// From guest to disk.
    Write,
    /// Writes one whole cluster compressed. (The last cluster of the disk may be shorter.) If it
    /// cannot be compressed or is allocated already, it is written uncompressed. This is for jobs
    /// that fill an image: it costs the caller's thread the compression.
    WriteCompressed,
    /// Makes the range read as zeroes.
    Zero {
        /// Whether its space may be given back.
        unmap: bool,
    },
    /// The range's contents are no longer needed.
    Discard,
    /// Copies to the image what its backing images have in the range, in units that the map can
    /// tell apart, so that the image does not need them there. The disk reads the same before and
    /// after. Keep the range short: a whole unit, and up to all of the range, is in memory at once.
    Populate,
    /// Makes everything that was completed before stable.
    Flush,
    /// Transfers nothing. [`Request::found`] then returns the type of the disk's contents from the
    /// first byte on, and for how many bytes it holds.
    Seek {
        /// What is looked for.
        look: Look,
    },
}

/// A buffer of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buf {
    /// For metadata.
    Meta,
    /// For data.
    Data,
}

/// What the caller does next.
///
/// `data` counts the request's bytes from 0. Ranges of buffers are those of [`Request::bytes`].
/// After each step except `Park` and `Done` the result goes to [`Request::resume`]: 0 or more, or a
/// negative errno. Transfers are complete or failed. Bytes beyond the end of a file read as zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Transfers the guest's bytes from or to a file.
    Data {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// The guest's bytes.
        data: Range<u64>,
    },
    /// Fills the guest's bytes with zeroes.
    Zeroes {
        /// The guest's bytes.
        data: Range<u64>,
    },
    /// Copies from the data buffer, at `at`, to the guest's bytes.
    Copy {
        /// The guest's bytes.
        data: Range<u64>,
        /// The offset in the buffer.
        at: usize,
    },
    /// Copies the guest's bytes to the data buffer, at `at`.
    Gather {
        /// The guest's bytes.
        data: Range<u64>,
        /// The offset in the buffer.
        at: usize,
    },
    /// Reads into a buffer.
    Read {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// The buffer.
        buf: Buf,
        /// The range of the buffer.
        range: Range<usize>,
    },
    /// Writes from a buffer.
    Write {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// The buffer.
        buf: Buf,
        /// The range of the buffer.
        range: Range<usize>,
    },
    /// Writes, one after the other, `head` bytes of the data buffer, the guest's bytes, and the
    /// `tail` bytes behind the head in the buffer.
    Around {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// Bytes from the start of the buffer.
        head: usize,
        /// The guest's bytes.
        data: Range<u64>,
        /// Bytes of the buffer after `head`.
        tail: usize,
    },
    /// Makes a range of a file read as zeroes.
    ZeroFile {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// The length.
        len: u64,
        /// Whether its space is given back.
        punch: bool,
    },
    /// Gives a range of a file back to the file system. If that is not possible, nothing is done,
    /// and the step succeeds.
    Discard {
        /// The file.
        file: FileId,
        /// The offset in it.
        offset: u64,
        /// The length.
        len: u64,
    },
    /// Allocates the space of a range at a file's end. Later writes are much faster then. It never
    /// makes the file shorter. `EOPNOTSUPP`: the file has no space ahead, so a write makes it
    /// longer. A file that keeps its length needs nothing.
    Extend {
        /// The file.
        file: FileId,
        /// The start of the range.
        offset: u64,
        /// The length of the range.
        len: u64,
    },
    /// Makes everything that was written to a file stable.
    Sync {
        /// The file.
        file: FileId,
    },
    /// Nothing, until the [`Waker`] of the request is called. Then `resume` with 0.
    Park,
    /// The request has ended: 0, or a negative errno.
    Done(i32),
}

/// The caller's part of each step.
pub struct Context<'a> {
    /// The disk.
    pub chain: &'a Chain,
    /// The state that the caller's queue has on the disk.
    pub user: &'a mut User,
    /// How this request is woken.
    pub waker: Waker,
    /// Wakes other requests.
    pub wake: &'a mut dyn FnMut(Waker),
    /// Whether writes are refused.
    pub readonly: bool,
}

/// The purpose of the step in flight.
#[derive(Debug, Default)]
enum Pending {
    #[default]
    Nothing,
    /// Transfers this number of the guest's bytes.
    Data(u64),
    Slice(usize, u64),
    /// Fetches a piece.
    Fetch,
    Change,
    Pack,
    /// Reads a refcount block at this offset.
    Counts(u64),
    Table,
    /// Allocates space of the file.
    Extend {
        /// The end of the space.
        to: u64,
        /// The end of the clusters that the request needs.
        need: u64,
    },
    /// Writes the end of the clusters that the request needs, so that the file reaches to there.
    Lengthen(u64),
    Flush,
    /// Writes the header with a new generation.
    Generation,
    /// Writes the header with the corrupt mark.
    Mark,
    Parked,
}

/// A request. It stays in its caller's slot and is used again and again.
#[derive(Debug, Default)]
pub struct Request {
    op: Op,
    /// The offset on the disk of the guest's byte 0.
    begin: u64,
    pos: u64,
    end: u64,
    /// Whether it has to be stable when it is done.
    stable: bool,
    busy: bool,
    /// Whether it has waited for room in the map.
    made_room: bool,
    /// Whether there is no space for more than it needs.
    no_more: bool,
    epoch: Option<Epoch>,
    pending: Pending,
    meta: Buffer,
    data: Buffer,
    fetch: Option<Fetch>,
    change: Option<Change>,
    pack: Option<Pack>,
    found: Option<Found>,
    /// An L2 table that the request makes.
    table: Option<NewTable>,
    flush: Option<Box<Flush>>,
    /// A new generation of the image that the request writes.
    generation: Option<NewGeneration>,
    /// The corrupt mark of the image that the request writes.
    mark: Option<Mark>,
}

/// What a request does next.
enum Next {
    Again,
    Step(Step),
    Fail(i32),
}

impl Request {
    /// Starts a request for `len` bytes at `pos`, which are within the disk. `stable`: it is on
    /// stable storage when it is done.
    pub fn start(&mut self, op: Op, pos: u64, len: u64, stable: bool, cx: &mut Context<'_>) -> Step {
        debug_assert!(!self.busy, "a request was begun before the last one ended");
        self.busy = true;
        (self.op, self.begin, self.pos, self.end) = (op, pos, pos, pos + len);
        // A read changes nothing that would have to become stable.
        self.stable = (stable && !matches!(op, Op::Read | Op::Seek { .. })) || op == Op::Flush;
        (self.made_room, self.no_more) = (false, false);
        self.epoch = Some(cx.chain.top().epochs.enter(&cx.user.member));
        self.found = None;
        if cx.readonly && !matches!(op, Op::Read | Op::Flush | Op::Seek { .. }) {
            return self.done(EROFS, cx);
        }
        if op == Op::WriteCompressed && !cx.chain.top().is_one_cluster(pos, pos + len) {
            return self.done(EINVAL, cx);
        }
        self.stable &= !cx.readonly;
        self.run_steps(cx)
    }

    /// Continues with the result of the last step.
    #[expect(
        clippy::indexing_slicing,
        reason = "the step that reads a slice makes the buffer as long as a slice"
    )]
    pub fn resume(&mut self, res: i32, cx: &mut Context<'_>) -> Step {
        let failed = res.min(0);
        match std::mem::take(&mut self.pending) {
            Pending::Nothing | Pending::Parked => {}
            Pending::Mark if failed < 0 => {
                self.mark_failed(cx);
                return self.fail(EIO, cx);
            }
            Pending::Mark => {}
            Pending::Generation => self.wrote_generation(failed == 0, cx),
            Pending::Data(_) if failed < 0 => return self.fail(failed, cx),
            Pending::Data(n) => self.pos += n,
            Pending::Slice(layer, slice) => {
                let image = cx.chain.image(layer);
                let read = &self.meta[..image.map.slice_bytes()];
                if failed == 0
                    && layer == 0
                    && let Some(why) = image.wrong_slice(slice, read)
                {
                    image.map.loaded(slice, None, cx.wake);
                    return self.mark_corrupt(why, cx);
                }
                if failed == 0 {
                    image.patch_slice(slice, &mut self.meta[..image.map.slice_bytes()]);
                }
                let bytes = (failed == 0).then(|| &self.meta[..image.map.slice_bytes()]);
                let placed = image.map.loaded(slice, bytes, cx.wake);
                if failed < 0 {
                    return self.fail(failed, cx);
                }
                if !placed && layer == 0 {
                    // All frames are dirty. They are written first.
                    self.flush.get_or_insert_with(|| Box::new(Flush::new(true)));
                } else if !placed {
                    return self.fail(EIO, cx);
                }
            }
            Pending::Fetch => {
                if let Err(e) = self.fetched(failed, cx) {
                    return self.fail(e, cx);
                }
            }
            Pending::Change if failed < 0 => return self.fail(failed, cx),
            Pending::Change => self.changed(cx),
            Pending::Pack if failed < 0 => return self.fail(failed, cx),
            Pending::Pack => self.packed(cx),
            Pending::Counts(index) => {
                let wrong = cx.chain.top().wrong_counts(index, &self.meta).filter(|_| failed == 0);
                let bytes = (failed == 0 && wrong.is_none()).then(|| self.meta[..].into());
                cx.chain.top().alloc.locked().loaded(index, bytes, cx.wake);
                if let Some(why) = wrong {
                    return self.mark_corrupt(why, cx);
                }
                if failed < 0 {
                    return self.fail(failed, cx);
                }
            }
            Pending::Extend { need, .. } if failed == EOPNOTSUPP => return self.lengthen(need, cx),
            Pending::Extend { to: len, .. } | Pending::Lengthen(len) => {
                self.extended((failed == 0).then_some(len), cx);
                if failed < 0 && !(failed == ENOSPC && self.wants_less(cx)) {
                    return self.fail(failed, cx);
                }
            }
            Pending::Table if failed < 0 => return self.fail(failed, cx),
            Pending::Table => self.table_made(cx),
            Pending::Flush => {
                if let Err(e) = self.flushed(failed, cx.chain.top()) {
                    return self.fail(e, cx);
                }
            }
        }
        self.run_steps(cx)
    }

    /// Returns one of its buffers, to read into or to write from, as the step says.
    pub fn bytes(&mut self, buf: Buf) -> &mut [u8] {
        match buf {
            Buf::Meta => &mut self.meta,
            Buf::Data => &mut self.data,
        }
    }

    fn leave_epoch(&mut self, cx: &mut Context<'_>) {
        if let Some(epoch) = self.epoch.take() {
            cx.chain.top().epochs.exit(&cx.user.member, epoch);
        }
    }

    fn run_steps(&mut self, cx: &mut Context<'_>) -> Step {
        loop {
            let next = if self.mark.is_some() {
                self.step_mark(cx)
            } else if self.generation.is_some() {
                self.step_generation(cx)
            } else if self.flush.is_some() {
                self.step_flush(cx)
            } else if self.table.is_some() {
                self.step_table(cx)
            } else if self.fetch.is_some() {
                self.step_fetch(cx)
            } else if self.change.is_some() {
                self.step_change(cx)
            } else if self.pack.is_some() {
                self.step_pack(cx)
            } else if self.pos < self.end {
                match self.op {
                    Op::Read => self.step_read(cx),
                    Op::Write => self.step_write(self.end, cx),
                    Op::WriteCompressed => self.step_pack_start(cx),
                    Op::Populate => self.step_populate(cx),
                    Op::Seek { look } => self.step_seek(look, cx),
                    _ => self.step_zero(cx),
                }
            } else if std::mem::take(&mut self.stable) {
                // It no longer uses the map, and its flush may be waiting for that.
                self.leave_epoch(cx);
                self.flush = Some(Box::new(Flush::new(false)));
                Next::Again
            } else {
                return self.done(0, cx);
            };
            match next {
                Next::Again => {}
                Next::Step(step) => return step,
                Next::Fail(e) => return self.fail(e, cx),
            }
        }
    }

    /// Releases everything that it holds, and ends.
    fn fail(&mut self, e: i32, cx: &mut Context<'_>) -> Step {
        self.abandon_flush(cx);
        self.abandon_table(cx);
        self.abandon_change(cx);
        self.abandon_pack(cx);
        (self.fetch, self.found, self.generation, self.mark) = (None, None, None, None);
        self.done(e, cx)
    }

    fn done(&mut self, res: i32, cx: &mut Context<'_>) -> Step {
        self.leave_epoch(cx);
        self.busy = false;
        self.pending = Pending::Nothing;
        self.meta.rest();
        self.data.rest();
        Step::Done(res)
    }

    /// Returns the guest's bytes for a range of the disk.
    fn guest(&self, pos: u64, len: u64) -> Range<u64> {
        pos - self.begin..pos - self.begin + len
    }

    fn step(&mut self, pending: Pending, step: Step) -> Next {
        self.pending = pending;
        Next::Step(step)
    }

    fn park(&mut self) -> Next {
        self.step(Pending::Parked, Step::Park)
    }

    /// Lets a missing slice be read.
    fn load(&mut self, layer: usize, miss: Miss, cx: &mut Context<'_>) -> Next {
        let Miss::Slice(slice) = miss else { return Next::Fail(EIO) };
        let image = cx.chain.image(layer);
        match image.map.load(slice, cx.waker) {
            Load::Here => Next::Again,
            Load::Wait => self.park(),
            Load::Yours => {
                let Some(offset) = image.slice_offset(slice) else {
                    image.map.loaded(slice, None, cx.wake);
                    return Next::Fail(EIO);
                };
                let len = image.map.slice_bytes();
                self.meta.reset(len);
                let step = Step::Read { file: image.file, offset, buf: Buf::Meta, range: 0..len };
                self.step(Pending::Slice(layer, slice), step)
            }
        }
    }

    /// Lets a refcount block be read, or waits for one.
    fn load_counts(&mut self, take: crate::alloc::Take, image: &Served) -> Next {
        use crate::alloc::Take;
        match take {
            Take::Load(index, offset) => {
                let len = to_usize(image.cluster_size());
                self.meta.reset(len);
                let step = Step::Read { file: image.file, offset, buf: Buf::Meta, range: 0..len };
                self.step(Pending::Counts(index), step)
            }
            Take::Wait => self.park(),
            Take::Full => Next::Fail(ENOSPC),
            Take::Got(_) => Next::Again,
        }
    }

    fn step_read(&mut self, cx: &mut Context<'_>) -> Next {
        let (pos, left) = (self.pos, self.end - self.pos);
        match cx.chain.find(pos, left) {
            Err((layer, miss)) => self.load(layer, miss, cx),
            Ok((_, Source::Zero | Source::Below, n)) => {
                let data = self.guest(pos, n);
                self.step(Pending::Data(n), Step::Zeroes { data })
            }
            Ok((layer, Source::Data(offset), n)) => {
                let (file, data) = (cx.chain.data_of(layer), self.guest(pos, n));
                self.step(Pending::Data(n), Step::Data { file, offset, data })
            }
            Ok((_, Source::Compressed(_), n)) => {
                // It is decompressed into the buffer and then copied.
                self.fetch = Some(Fetch::for_guest(pos, n));
                Next::Again
            }
        }
    }
}
