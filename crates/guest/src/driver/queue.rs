//! One virtqueue on the driver's side: the ring, its notifications, and a fixed set of slots for
//! requests.
//!
//! A queue belongs to one thread at a time, which is a test's or a load thread. Each slot has its
//! own header, status byte and indirect table in guest memory, so that a request allocates nothing.
//! The number of the slot is the ring's cookie.

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

/// Bytes of a slot before its indirect table: header (16), status (1), the rest of the cache line.
const SLOT_HEAD: usize = 64;
/// Offset of the status byte in a slot.
const SLOT_STATUS: usize = 16;

/// Bytes of a request's header. A frame has them before its data.
pub const FRAME_HEAD: usize = 16;

/// Returns whether the device writes the data of a request of this type.
#[inline]
fn device_writes(kind: u32) -> bool {
    matches!(kind, request::IN | request::GET_ID)
}

/// The parts of a ring that the server knows. A clone is cheap, so that the connection's thread can
/// pass the ring to a new server while a load thread owns the queue.
#[derive(Clone, Debug)]
pub struct RingParts {
    /// The index of the queue.
    pub index: u16,
    /// Number of descriptors.
    pub size: u16,
    /// Whether the ring is packed.
    pub packed: bool,
    /// Descriptor table (packed: the ring itself).
    pub desc: Area,
    /// Available ring (packed: driver event suppression).
    pub driver: Area,
    /// Used ring (packed: device event suppression).
    pub device: Area,
    /// Eventfd from driver to device.
    pub kick: Arc<OwnedFd>,
    /// Eventfd from device to driver.
    pub call: Arc<OwnedFd>,
}

impl RingParts {
    /// Notifies the device, even if it did not ask for a notification.
    pub fn kick(&self) {
        signal(self.kick.as_fd());
    }

    /// Wakes a thread that waits for this queue's completions.
    pub fn wake(&self) {
        signal(self.call.as_fd());
    }
}

/// Adds one to an eventfd. This fails only if the counter is full, and then its reader wakes
/// anyway.
fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot that `submit` returned.
    pub cookie: u16,
    /// Bytes that the device reports as written.
    pub len: u32,
}

/// One virtqueue.
pub struct Queue {
    parts: RingParts,
    ring: DriverRing,
    indirect: bool,
    /// Memory of the slots, `stride` bytes each.
    meta: Area,
    stride: usize,
    indirect_cap: u16,
    /// Splits requests into descriptors at random. `None`: header, data, status.
    shuffle: Option<Shuffle>,
    /// Guest address of each slot's status byte in shuffled requests, where it may be behind the
    /// data.
    status_at: Vec<u64>,
    free: Vec<u16>,
    /// Ring descriptors of each slot. 0: no request is in flight under this cookie.
    held: Vec<u16>,
    /// Split: the used index up to which completions were taken. Packed: the position of the next
    /// used descriptor.
    next_used: u16,
    wrap: bool,
    /// Notifications by the device, counted when the eventfd is emptied.
    calls: u64,
    /// Whether the call eventfd is non-blocking, which servers may set. Then poll(2) comes before
    /// each read.
    call_nonblocking: bool,
}

/// The parameters of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueShape {
    /// Number of descriptors, a power of two if split.
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

    /// Returns the bytes of guest memory that a queue of this shape needs.
    pub fn memory(&self) -> u64 {
        let sizes = ring_sizes(self.size, self.features);
        let areas = [sizes.desc, sizes.driver, sizes.device, self.stride() * usize::from(self.size)];
        areas.iter().map(|&bytes| (bytes as u64).next_multiple_of(PAGE)).sum()
    }
}

impl Queue {
    /// Makes an empty queue in `memory`.
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
        // SAFETY: the areas have the sizes of `ring_sizes` and stay mapped as long as `parts`, in
        // this same struct, holds them. The allocator gives them to nothing else, so only this ring
        // uses the driver's side.
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

    /// Returns the parts that the server knows. Tests that act as a hostile guest use the memory
    /// directly.
    pub fn parts(&self) -> &RingParts {
        &self.parts
    }

    /// Returns whether indirect descriptors were negotiated.
    pub fn indirect(&self) -> bool {
        self.indirect
    }

    /// Returns the number of free slots.
    #[inline]
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Returns the notifications by the device so far, counted when the eventfd is emptied. They
    /// include those by [`RingParts::wake`].
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Reserves a slot. Returns `None` if all are in use.
    #[inline]
    pub fn take_slot(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Releases a slot after its completion, or unused.
    #[inline]
    pub fn give_slot(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Returns the number of requests in flight.
    pub fn outstanding(&self) -> usize {
        self.held.iter().filter(|&&h| h != 0).count()
    }

    #[inline]
    fn slot_at(&self, slot: u16) -> (u64, *mut u8) {
        let offset = usize::from(slot) * self.stride;
        debug_assert!(offset + self.stride <= self.meta.len());
        // SAFETY: slot numbers are below the ring size, for which `meta` was made. `self` keeps it
        // mapped.
        (self.meta.guest() + offset as u64, unsafe { self.meta.host().add(offset) })
    }

    /// Stages a request in `slot`: header, `data` (guest address and bytes, none for a flush),
    /// status. Returns false if the ring has no room. The slot then still belongs to the caller.
    #[inline]
    pub fn stage(&mut self, slot: u16, kind: u32, sector: u64, data: (u64, u32)) -> bool {
        let (guest, host) = self.slot_at(slot);
        // SAFETY: the slot begins with the header, aligned to 8 (`slot_at`). The caller owns the
        // slot, and the device does not access it before the request is published.
        unsafe { host.cast::<u64>().write_volatile(u64::from(kind).to_le()) };
        // SAFETY: bytes 8 to 15 of the header of the slot, which the caller owns.
        unsafe { host.wrapping_add(8).cast::<u64>().write_volatile(sector.to_le()) };
        // SAFETY: the status byte is inside the slot, which the caller owns as above.
        unsafe { host.wrapping_add(SLOT_STATUS).write_volatile(status::UNTOUCHED) };
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

    /// From now on, splits requests into descriptors at random, alternately with direct and
    /// indirect descriptors.
    pub fn set_shuffle(&mut self, shuffle: Shuffle) {
        self.status_at = (0..self.parts.size).map(|slot| self.status_addr(slot)).collect();
        self.shuffle = Some(shuffle);
    }

    /// Like [`Queue::stage`], with random splits, for data at `at` of `frame`. The request also
    /// owns [`FRAME_HEAD`] bytes before the data and one byte behind. Header and status may be
    /// there, and may share descriptors with the data.
    ///
    /// # Panics
    /// The frame has no room for them, or [`Queue::set_shuffle`] was not called before.
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

    /// Splits and stages a request whose header, data and status are at the given addresses. It
    /// uses three descriptors if the ring has no room for more.
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

    /// Stages any chain under the cookie `slot`. With `indirect`, and more than one buffer, it is
    /// in the slot's indirect table. Returns false if there is no room.
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

    /// Publishes the staged requests, and kicks if the device asks for it. Returns whether it
    /// kicked.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let wanted = self.ring.publish();
        if wanted {
            self.parts.kick();
        }
        wanted
    }

    /// Takes a completion. It is an error if the device completes a request that is not in flight.
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

    /// Checks the ring's position when it has no more completions. The ring skips ids that are not
    /// in flight (split), or stops at them (packed).
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
        // A completion has just arrived, or an id was skipped.
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

    /// Returns the status byte of a slot.
    #[inline]
    pub fn status(&self, slot: u16) -> u8 {
        if self.shuffle.is_some() {
            return self.shuffled_status(slot);
        }
        // SAFETY: the byte is inside the slot. The device wrote it before it published the
        // completion.
        unsafe { self.slot_at(slot).1.wrapping_add(SLOT_STATUS).read_volatile() }
    }

    #[cold]
    fn shuffled_status(&self, slot: u16) -> u8 {
        let mut byte = [status::UNTOUCHED];
        // The address is in this memory, because staging succeeded.
        if let Some(area) = self.meta.elsewhere(self.status_at[usize::from(slot)], 1) {
            area.read(0, &mut byte);
        }
        byte[0]
    }

    /// Returns the guest address of a slot's status byte.
    pub fn status_addr(&self, slot: u16) -> u64 {
        let own = self.slot_at(slot).0 + SLOT_STATUS as u64;
        self.status_at.get(usize::from(slot)).copied().unwrap_or(own)
    }

    /// Returns the position of a packed ring's next used descriptor.
    pub fn next_used(&self) -> (u16, bool) {
        (self.next_used, self.wrap)
    }

    /// Returns the vring base that continues this ring after the death of the server. All
    /// completions must have been taken since ([`Queue::poll`] returned `None`).
    pub fn base_after_loss(&self) -> u32 {
        if self.parts.packed {
            packed_base(self.next_used, self.wrap)
        } else {
            split_base(&self.parts.device)
        }
    }

    /// Returns whether there is a completion.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.ring.has_used()
    }

    /// Asks for a notification at the next completion. Returns true if there is one already.
    pub fn enable_notify(&mut self) -> bool {
        self.ring.enable_notify()
    }

    /// Asks for a notification after `count` more completions, if EVENT_IDX was negotiated, or else
    /// at the next one. Returns true if there are that many already.
    pub fn enable_notify_after(&mut self, count: u16) -> bool {
        self.ring.enable_notify_after(count)
    }

    /// Asks for no notifications.
    pub fn disable_notify(&mut self) {
        self.ring.disable_notify();
    }

    /// Waits until the call eventfd is signalled, and empties it. For a thread with only this
    /// queue.
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
    /// Returns whether there is a completion.
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
