//! One virtqueue as its driver holds it: the ring, its notifications, and a fixed set of slots for requests.
//!
//! A queue belongs to one thread at a time: the test's, or a load thread's. A slot has a header, a status byte and an
//! indirect table of its own in guest memory, so that a request allocates nothing; its number is the ring's cookie.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use virtio::driver::{DriverRing, DriverSeg, Indirect, Used};
use virtio::ring::{RingAddrs, RingFeatures, ring_sizes};

use super::config::{request, status};
use super::layout::Shuffle;
use super::memory::{Area, Memory, PAGE};
use super::session::{packed_base, split_base};
use crate::error::{Error, Kind, Result, fail};

/// A slot's bytes in guest memory before its indirect table: header (16), status (1), the rest of the cache line.
const SLOT_HEAD: usize = 64;
/// Where the status byte lies in a slot.
const SLOT_STATUS: usize = 16;

/// Bytes of a request's header, which a frame has room for before its data.
pub const FRAME_HEAD: usize = 16;

/// Whether the device writes the data of a request of this type.
#[inline]
fn device_writes(kind: u32) -> bool {
    matches!(kind, request::IN | request::GET_ID)
}

/// What identifies a ring to the server; cheap to clone, so that the connection's thread can hand it over again
/// while a load thread owns the queue.
#[derive(Clone, Debug)]
pub struct RingParts {
    /// The queue's number.
    pub index: u16,
    /// Descriptors.
    pub size: u16,
    /// Whether the ring is packed.
    pub packed: bool,
    /// Descriptor table (packed: the ring itself).
    pub desc: Area,
    /// Available ring (packed: driver event suppression).
    pub driver: Area,
    /// Used ring (packed: device event suppression).
    pub device: Area,
    /// Driver to device.
    pub kick: Arc<OwnedFd>,
    /// Device to driver.
    pub call: Arc<OwnedFd>,
}

impl RingParts {
    /// Notifies the device whether it asked for it or not.
    pub fn kick(&self) {
        signal(self.kick.as_fd());
    }

    /// Wakes whoever sleeps on this queue's completions.
    pub fn wake(&self) {
        signal(self.call.as_fd());
    }
}

/// Adds one to an eventfd. It fails only if the counter is full, and then its reader has all it needs.
fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot that `submit` returned.
    pub cookie: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// One virtqueue.
pub struct Queue {
    parts: RingParts,
    ring: DriverRing,
    indirect: bool,
    /// Slots: `meta` is cut into `stride` bytes each.
    meta: Area,
    stride: usize,
    indirect_cap: u16,
    /// Cuts requests into descriptors by chance; none: header, data, status.
    shuffle: Option<Shuffle>,
    /// Shuffled, by slot: guest address of the status byte, which may lie behind the data.
    status_at: Vec<u64>,
    free: Vec<u16>,
    /// By slot: ring descriptors that it holds; 0 means that nothing is outstanding under this cookie.
    held: Vec<u16>,
    /// Split: the used index up to which completions were taken. Packed: where the next used descriptor will be.
    next_used: u16,
    wrap: bool,
    /// Notifications that the device sent, as far as the eventfd was emptied.
    calls: u64,
    /// The call eventfd turned out to be non-blocking (servers make it so): ask poll(2) before reading.
    call_nonblocking: bool,
}

/// What a queue is made with.
#[derive(Clone, Copy, Debug)]
pub struct QueueShape {
    /// Descriptors, a power of two if split.
    pub size: u16,
    /// Negotiated ring features.
    pub features: RingFeatures,
    /// Descriptors of each slot's indirect table.
    pub indirect_cap: u16,
}

impl QueueShape {
    fn stride(&self) -> usize {
        (SLOT_HEAD + 16 * usize::from(self.indirect_cap)).next_multiple_of(64)
    }

    /// Bytes of guest memory that a queue of this shape takes.
    pub fn memory(&self) -> u64 {
        let sizes = ring_sizes(self.size, self.features);
        let areas = [sizes.desc, sizes.driver, sizes.device, self.stride() * usize::from(self.size)];
        areas.iter().map(|&bytes| (bytes as u64).next_multiple_of(PAGE)).sum()
    }
}

impl Queue {
    /// Makes the queue in `memory`, empty.
    pub fn new(memory: &Arc<Memory>, index: u16, shape: QueueShape) -> Result<Self> {
        let sizes = ring_sizes(shape.size, shape.features);
        let new_eventfd = || {
            let fd = eventfd(0, EventfdFlags::CLOEXEC);
            fd.map(Arc::new)
                .map_err(|e| Error::with(Kind::System, "cannot make an eventfd: raise ulimit -n", e))
        };
        let parts = RingParts {
            index,
            size: shape.size,
            packed: shape.features.packed,
            desc: memory.alloc(sizes.desc, PAGE)?,
            driver: memory.alloc(sizes.driver, PAGE)?,
            device: memory.alloc(sizes.device, PAGE)?,
            kick: new_eventfd()?,
            call: new_eventfd()?,
        };
        let stride = shape.stride();
        let meta = memory.alloc(stride * usize::from(shape.size), PAGE)?;
        meta.fill(0);
        let addrs =
            RingAddrs { desc: parts.desc.host(), driver: parts.driver.host(), device: parts.device.host() };
        // SAFETY: the areas have the sizes that `ring_sizes` names and stay mapped as long as `parts` holds them, in
        // this same struct; the allocator gives them to nobody else, so the driver's side is this ring's alone.
        let mut ring = unsafe { DriverRing::new(shape.size, shape.features, addrs) };
        ring.disable_notify();
        Ok(Self {
            parts,
            ring,
            indirect: shape.features.indirect,
            meta,
            stride,
            indirect_cap: shape.indirect_cap,
            shuffle: None,
            status_at: Vec::new(),
            free: (0..shape.size).rev().collect(),
            held: vec![0; usize::from(shape.size)],
            next_used: 0,
            wrap: true,
            calls: 0,
            call_nonblocking: false,
        })
    }

    /// What the server knows of the ring; raw access to its memory for tests that play a hostile guest.
    pub fn parts(&self) -> &RingParts {
        &self.parts
    }

    /// Whether indirect descriptors were negotiated.
    pub fn indirect(&self) -> bool {
        self.indirect
    }

    /// Slots that are free.
    #[inline]
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Notifications of the device so peer, counted when the eventfd is emptied; wake-ups by [`RingParts::wake`] are among
    /// them.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Reserves a slot; `None` if all are outstanding.
    #[inline]
    pub fn take_slot(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives a slot back after its completion, or unused.
    #[inline]
    pub fn give_slot(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Requests outstanding.
    pub fn outstanding(&self) -> usize {
        self.held.iter().filter(|&&h| h != 0).count()
    }

    #[inline]
    fn slot_at(&self, slot: u16) -> (u64, *mut u8) {
        let offset = usize::from(slot) * self.stride;
        debug_assert!(offset + self.stride <= self.meta.len());
        // SAFETY: slots are numbered below the ring size, for which `meta` was made; it stays mapped with `self`.
        (self.meta.guest() + offset as u64, unsafe { self.meta.host().add(offset) })
    }

    /// Stages a request in `slot`: header, `data` (guest address and bytes, none for a flush), status.
    /// False if the ring has no room; the slot is still the caller's then.
    #[inline]
    pub fn stage(&mut self, slot: u16, kind: u32, sector: u64, data: (u64, u32)) -> bool {
        let (guest, host) = self.slot_at(slot);
        // SAFETY: the slot's first 64 bytes are header and status; the device does not look at them before the
        // request is published, and the slot is free (the caller took it).
        unsafe {
            host.cast::<u64>().write_volatile(u64::from(kind).to_le());
            host.add(8).cast::<u64>().write_volatile(sector.to_le());
            host.add(SLOT_STATUS).write_volatile(status::UNTOUCHED);
        }
        let device_writes = device_writes(kind);
        if self.shuffle.is_some() {
            self.status_at[usize::from(slot)] = guest + SLOT_STATUS as u64;
            return self.stage_cut(slot, guest, data, device_writes);
        }
        let head = DriverSeg { addr: guest, len: 16, writable: false };
        let body = DriverSeg { addr: data.0, len: data.1, writable: device_writes };
        let tail = DriverSeg { addr: guest + SLOT_STATUS as u64, len: 1, writable: true };
        if data.1 == 0 {
            self.stage_chain(slot, &[head, tail], self.indirect)
        } else {
            self.stage_chain(slot, &[head, body, tail], self.indirect)
        }
    }

    /// From now on requests are cut into descriptors by chance, and take direct and indirect ones in turn.
    pub fn set_shuffle(&mut self, shuffle: Shuffle) {
        self.status_at = (0..self.parts.size).map(|slot| self.status_addr(slot)).collect();
        self.shuffle = Some(shuffle);
    }

    /// As [`Queue::stage`], shuffled, for data at `at` of `frame` with [`FRAME_HEAD`] bytes before and one behind it
    /// that are the request's too: header and status may lie there, and share descriptors with the data.
    ///
    /// # Panics
    /// The frame does not hold that, or no [`Queue::set_shuffle`] came before: a programmer's mistake.
    pub fn stage_framed(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        frame: &Area,
        (at, len): (usize, u32),
    ) -> bool {
        let rng = &mut self.shuffle.as_mut().expect("set_shuffle was called").rng;
        let (head_in_frame, status_in_frame) = (!rng.one_in(3), !rng.one_in(3));
        let (meta, _) = self.slot_at(slot);
        let mut header = [0; FRAME_HEAD];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let mut header_at = meta;
        if head_in_frame {
            frame.write(at - FRAME_HEAD, &header);
            header_at = frame.guest() + (at - FRAME_HEAD) as u64;
        } else {
            self.meta.write(usize::from(slot) * self.stride, &header);
        }
        let mut status_at = meta + SLOT_STATUS as u64;
        if status_in_frame {
            frame.write(at + len as usize, &[status::UNTOUCHED]);
            status_at = frame.guest() + (at + len as usize) as u64;
        } else {
            self.meta.write(usize::from(slot) * self.stride + SLOT_STATUS, &[status::UNTOUCHED]);
        }
        self.status_at[usize::from(slot)] = status_at;
        self.stage_cut(slot, header_at, (frame.guest() + at as u64, len), device_writes(kind))
    }

    /// Cuts and stages a request whose header, data and status lie where they are said to; in three descriptors if the
    /// ring has no room for more.
    fn stage_cut(&mut self, slot: u16, header: u64, data: (u64, u32), device_writes: bool) -> bool {
        let Some(mut shuffle) = self.shuffle.take() else { return false };
        let (header, status) = ((header, FRAME_HEAD as u32), (self.status_at[usize::from(slot)], 1));
        let none = (0, 0);
        let (readable, writable) = match device_writes {
            true => ([header, none], [data, status]),
            false => ([header, data], [status, none]),
        };
        let indirect = self.indirect && !shuffle.rng.one_in(3);
        let mut staged = self.stage_chain(slot, shuffle.cut(&readable, &writable), indirect);
        if !staged {
            let segs = [(header, false), (data, device_writes), (status, true)]
                .map(|((addr, len), writable)| DriverSeg { addr, len, writable });
            let segs = if data.1 == 0 { &[segs[0], segs[2]][..] } else { &segs[..] };
            staged = self.stage_chain(slot, segs, self.indirect);
        }
        self.shuffle = Some(shuffle);
        staged
    }

    /// Stages any chain under the cookie `slot`, by the slot's indirect table if `indirect`
    /// (and there is more than one buffer). False if there is no room.
    #[inline]
    pub fn stage_chain(&mut self, slot: u16, segs: &[DriverSeg], indirect: bool) -> bool {
        let table = if indirect {
            let (guest, host) = self.slot_at(slot);
            // SAFETY: the table follows the slot's head within the stride.
            let ptr = unsafe { host.add(SLOT_HEAD) };
            Some(Indirect { ptr, addr: guest + SLOT_HEAD as u64, cap: self.indirect_cap })
        } else {
            None
        };
        if self.ring.add(segs, table, slot).is_err() {
            return false;
        }
        self.held[usize::from(slot)] = if indirect && segs.len() > 1 { 1 } else { segs.len() as u16 };
        true
    }

    /// Publishes what was staged and kicks if the device wants it. True if it kicked.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let wanted = self.ring.publish();
        if wanted {
            self.parts.kick();
        }
        wanted
    }

    /// Takes a completion. An error is a device that completes what is not outstanding.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Completion>> {
        match self.ring.poll() {
            Some(used) => self.completed(used).map(Some),
            None => self.nothing_used(),
        }
    }

    #[inline]
    fn completed(&mut self, used: Used) -> Result<Completion> {
        let held = self.held.get_mut(usize::from(used.cookie)).map(std::mem::take).unwrap_or(0);
        if held == 0 {
            return Err(self.not_outstanding());
        }
        if self.parts.packed {
            self.next_used += held;
            if self.next_used >= self.parts.size {
                self.next_used -= self.parts.size;
                self.wrap = !self.wrap;
            }
        } else {
            self.next_used = self.next_used.wrapping_add(1);
        }
        Ok(Completion { cookie: used.cookie, len: used.len })
    }

    /// The ring passes over ids that are not outstanding (split) or stops at them (packed). Either way it shows in
    /// where the ring stands when it has nothing more to give.
    #[inline]
    fn nothing_used(&mut self) -> Result<Option<Completion>> {
        let more = if self.parts.packed {
            self.ring.has_used()
        } else {
            self.parts.device.load_u16(2) != self.next_used
        };
        if !more {
            return Ok(None);
        }
        // It came just now, or it was passed over.
        match self.ring.poll() {
            Some(used) => self.completed(used).map(Some),
            None => Err(self.not_outstanding()),
        }
    }

    #[cold]
    fn not_outstanding(&self) -> Error {
        fail!(
            Io,
            "queue {}: the server completed a request twice, or one that was never asked for",
            self.parts.index
        )
    }

    /// The status byte of a slot.
    #[inline]
    pub fn status(&self, slot: u16) -> u8 {
        if self.shuffle.is_some() {
            return self.shuffled_status(slot);
        }
        // SAFETY: within the slot; the device wrote it before it published the completion.
        unsafe { self.slot_at(slot).1.add(SLOT_STATUS).read_volatile() }
    }

    #[cold]
    fn shuffled_status(&self, slot: u16) -> u8 {
        let mut byte = [status::UNTOUCHED];
        // It was put into this memory, or staging had panicked.
        if let Some(area) = self.meta.elsewhere(self.status_at[usize::from(slot)], 1) {
            area.read(0, &mut byte);
        }
        byte[0]
    }

    /// Guest address of a slot's status byte.
    pub fn status_addr(&self, slot: u16) -> u64 {
        let own = self.slot_at(slot).0 + SLOT_STATUS as u64;
        self.status_at.get(usize::from(slot)).copied().unwrap_or(own)
    }

    /// Where a packed ring's next used descriptor will lie.
    pub fn next_used(&self) -> (u16, bool) {
        (self.next_used, self.wrap)
    }

    /// The vring base that continues this ring after the server died. Every completion must have been taken
    /// ([`Queue::poll`] returned `None`) since.
    pub fn base_after_loss(&self) -> u32 {
        if self.parts.packed {
            packed_base(self.next_used, self.wrap)
        } else {
            split_base(&self.parts.device)
        }
    }

    /// Whether a completion is there.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.ring.has_used()
    }

    /// Asks for a notification at the next completion; true if one is there already.
    pub fn enable_notify(&mut self) -> bool {
        self.ring.enable_notify()
    }

    /// Asks for a notification once `count` more buffers came back, where EVENT_IDX allows that (else at the next one); true
    /// if so many are there already.
    pub fn enable_notify_after(&mut self, count: u16) -> bool {
        self.ring.enable_notify_after(count)
    }

    /// Asks for none.
    pub fn disable_notify(&mut self) {
        self.ring.disable_notify();
    }

    /// Empties the call eventfd, sleeping until it is signalled. For a thread with this one queue.
    pub fn sleep(&mut self) {
        if !self.call_nonblocking {
            match self.read_call() {
                Err(rustix::io::Errno::AGAIN) => self.call_nonblocking = true,
                _ => return,
            }
        }
        let mut fds = [PollFd::new(&*self.parts.call, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        self.drain_call();
    }

    /// Empties the call eventfd after poll(2) said that it is readable.
    pub fn drain_call(&mut self) {
        let _ = self.read_call();
    }

    fn read_call(&mut self) -> rustix::io::Result<()> {
        let mut count = [0; 8];
        rustix::io::read(&*self.parts.call, &mut count)?;
        self.calls += u64::from_ne_bytes(count);
        Ok(())
    }

    /// Waits for a completion up to `wait`, or until `also` (the connection) becomes readable.
    /// True if a completion is there.
    pub fn wait(&mut self, wait: Duration, also: BorrowedFd<'_>) -> bool {
        if self.enable_notify() {
            self.disable_notify();
            return true;
        }
        let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut fds =
            [PollFd::new(&*self.parts.call, PollFlags::IN), PollFd::from_borrowed_fd(also, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&limit));
        let called = fds[0].revents().contains(PollFlags::IN);
        if called {
            self.drain_call();
        }
        self.disable_notify();
        self.has_used()
    }
}
