//! `/dev/vhost-net` and a tap: frames in both directions, over queue pairs. Each pair has its own
//! vhost device, and so its own kernel worker.
//!
//! The driver is at one end of the tap, a raw socket at the other. Frames are sent in windows. All
//! frames of a window have to arrive undamaged and once before the next window is sent, so that no
//! frame is dropped because a buffer is full.

mod frame;

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use serde::Serialize;
use vhost_kernel::Vhost;
use virtio::driver::DriverSeg;
use virtio::ring::RingFeatures;

use self::frame::{Direction, ETHERTYPE, FRAME_MAX, FRAME_MIN};
use crate::driver::{
    Area, DEFAULT_BASE, Memory, PAGE, Queue, QueueShape, RegionSpec, RingParts, feature, kernel_region,
    kernel_vring_addr,
};
use crate::error::{Error, Kind, Result, fail};
use crate::link::{PacketSocket, VNET_HEADER, open_tap};
use crate::rng::Rng;

/// Frames of a window, over all queue pairs.
const WINDOW: u64 = 64;
/// Bytes of a buffer: header, frame, and some spare bytes.
const BUFFER: usize = 2048;
const RX: u16 = 0;
const TX: u16 = 1;

/// The parameters of [`run`].
#[derive(Clone, Debug)]
pub struct VhostNetPlan {
    /// `/dev/vhost-net`.
    pub device: PathBuf,
    /// Name of the tap.
    pub tap: String,
    /// Queue pairs.
    pub pairs: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Frames in each direction.
    pub frames: u64,
    /// Seed of the frame lengths.
    pub seed: u32,
    /// Time limit of a frame.
    pub patience: Duration,
}

/// The results.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Report {
    /// Queue pairs.
    pub pairs: u16,
    /// Frames from the driver, all of which arrived at the tap.
    pub sent: u64,
    /// Frames into the tap, all of which arrived at the driver.
    pub received: u64,
    /// Frames sent per second, including the waits between windows.
    pub sent_per_s: f64,
    /// Frames received per second, including the waits between windows.
    pub received_per_s: f64,
}

fn vhost_error(e: vhost_kernel::Error) -> Error {
    let kind = if matches!(e, vhost_kernel::Error::Open { .. }) { Kind::Connect } else { Kind::System };
    Error::new(kind, e.to_string())
}

/// A queue with a buffer for each slot.
struct Side {
    queue: Queue,
    buffers: Area,
}

impl Side {
    fn new(memory: &Arc<Memory>, index: u16, shape: QueueShape) -> Result<Self> {
        let queue = Queue::new(memory, index, shape)?;
        Ok(Self { queue, buffers: memory.alloc(usize::from(shape.size) * BUFFER, PAGE)? })
    }

    fn buffer(&self, slot: u16) -> Area {
        self.buffers.part(usize::from(slot) * BUFFER, BUFFER)
    }
}

/// One queue pair: a vhost device, its two rings and its queue of the tap.
struct Pair {
    // Dropped first, because the kernel writes to the memory that the sides keep mapped.
    vhost: Vhost,
    errors: OwnedFd,
    rx: Side,
    tx: Side,
    tap: File,
}

impl Pair {
    fn open(plan: &VhostNetPlan, tap: File) -> Result<Self> {
        let vhost = Vhost::open(&plan.device).map_err(vhost_error)?;
        vhost.set_owner().map_err(vhost_error)?;
        let offered = vhost.features().map_err(vhost_error)?;
        let features = offered & (feature::VERSION_1 | feature::EVENT_IDX | feature::INDIRECT_DESC);
        if features & feature::VERSION_1 == 0 {
            return Err(fail!(Connect, "{} does not offer VIRTIO_F_VERSION_1", plan.device.display()));
        }
        let ring = RingFeatures {
            indirect: features & feature::INDIRECT_DESC != 0,
            event_idx: features & feature::EVENT_IDX != 0,
            packed: false,
        };
        let shape = QueueShape { size: plan.queue_size, features: ring, indirect_cap: 2 };
        let size = 2 * (shape.memory() + u64::from(plan.queue_size) * BUFFER as u64 + PAGE);
        let memory =
            Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size: size.next_multiple_of(PAGE) }])?;
        let (rx, tx) = (Side::new(&memory, RX, shape)?, Side::new(&memory, TX, shape)?);
        let errors = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::with(Kind::System, "cannot make an eventfd: raise ulimit -n", e))?;
        vhost.set_features(features).map_err(vhost_error)?;
        let regions: Vec<_> = memory.regions().iter().map(kernel_region).collect();
        // SAFETY: the regions are memfd mappings that this process accesses only by raw pointers.
        // The sides keep them mapped until the device is closed.
        unsafe { vhost.set_mem_table(&regions) }.map_err(vhost_error)?;
        let pair = Self { vhost, errors, rx, tx, tap };
        for side in [&pair.rx, &pair.tx] {
            pair.start(side.queue.parts())?;
        }
        Ok(pair)
    }

    fn start(&self, parts: &RingParts) -> Result<()> {
        let (vhost, index) = (&self.vhost, u32::from(parts.index));
        vhost.set_vring_num(index, u32::from(parts.size)).map_err(vhost_error)?;
        vhost.set_vring_base(index, 0).map_err(vhost_error)?;
        // SAFETY: the parts have the lengths of `ring_sizes` and are in the memory of the table
        // above. This process accesses it only by raw pointers, and the sides keep it mapped until
        // the device is closed.
        unsafe { vhost.set_vring_addr(&kernel_vring_addr(parts, false)) }.map_err(vhost_error)?;
        vhost.set_vring_call(index, Some(parts.call.as_fd())).map_err(vhost_error)?;
        vhost.set_vring_err(index, Some(self.errors.as_fd())).map_err(vhost_error)?;
        vhost.set_vring_kick(index, Some(parts.kick.as_fd())).map_err(vhost_error)?;
        vhost.net_set_backend(index, Some(self.tap.as_fd())).map_err(vhost_error)
    }

    /// Gives all free buffers to the device.
    fn refill(&mut self) {
        while let Some(slot) = self.rx.queue.take_slot() {
            let buffer = self.rx.buffer(slot);
            let seg = DriverSeg { addr: buffer.guest(), len: BUFFER as u32, writable: true };
            if !self.rx.queue.stage_chain(slot, &[seg], false) {
                self.rx.queue.give_slot(slot);
                break;
            }
        }
        self.rx.queue.publish();
    }

    /// Stages a frame. With `apart`, its header has its own descriptor.
    fn send(&mut self, frame: &[u8], apart: bool) -> bool {
        let Some(slot) = self.tx.queue.take_slot() else { return false };
        let buffer = self.tx.buffer(slot);
        buffer.write(0, &[0; VNET_HEADER]);
        buffer.write(VNET_HEADER, frame);
        let whole = VNET_HEADER + frame.len();
        let cut = if apart { VNET_HEADER } else { whole };
        let seg = |from: usize, to: usize| DriverSeg {
            addr: buffer.guest() + from as u64,
            len: (to - from) as u32,
            writable: false,
        };
        let segs = [seg(0, cut), seg(cut, whole)];
        let indirect = apart && self.tx.queue.indirect();
        let staged = self.tx.queue.stage_chain(slot, &segs[..1 + usize::from(apart)], indirect);
        if !staged {
            self.tx.queue.give_slot(slot);
        }
        staged
    }

    fn check(&self) -> Result<()> {
        match rustix::io::read(&self.errors, &mut [0; 8]) {
            Ok(_) => Err(fail!(Io, "a ring of vhost-net is broken: the device says so by its error eventfd")),
            Err(_) => Ok(()),
        }
    }
}

/// Sends the frames.
///
/// # Errors
/// A frame is lost, damaged or received twice. vhost-net refuses a call, or accepts one that it
/// does not support.
pub fn run(plan: &VhostNetPlan) -> Result<Report> {
    let taps = open_tap(&plan.tap, plan.pairs)?;
    let mut pairs = taps.into_iter().map(|tap| Pair::open(plan, tap)).collect::<Result<Vec<_>>>()?;
    let peer = PacketSocket::open(&plan.tap, ETHERTYPE)?;
    // Workers cannot be created for vhost-net. A pair has the worker that is created with its
    // device.
    match pairs[0].vhost.new_worker() {
        Err(e) if e.errno() == Errno::NOTTY => {}
        Err(e) => return Err(vhost_error(e)),
        Ok(id) => return Err(fail!(Io, "vhost-net made a worker, {id}: it is said to offer none")),
    }
    let mut rng = Rng::new(u64::from(plan.seed), 7000);
    let begin = Instant::now();
    for first in (0..plan.frames).step_by(WINDOW as usize) {
        outward(&mut pairs, &peer, plan, first..plan.frames.min(first + WINDOW), &mut rng)?;
    }
    let outward_s = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    for first in (0..plan.frames).step_by(WINDOW as usize) {
        inward(&mut pairs, &peer, plan, first..plan.frames.min(first + WINDOW), &mut rng)?;
    }
    let inward_s = begin.elapsed().as_secs_f64();
    for pair in &pairs {
        pair.check()?;
        for ring in [RX, TX] {
            pair.vhost.net_set_backend(u32::from(ring), None).map_err(vhost_error)?;
        }
    }
    let rate = |seconds: f64| plan.frames as f64 / seconds.max(1e-9);
    Ok(Report {
        pairs: plan.pairs,
        sent: plan.frames,
        received: plan.frames,
        sent_per_s: rate(outward_s),
        received_per_s: rate(inward_s),
    })
}

fn frame_len(rng: &mut Rng) -> usize {
    FRAME_MIN + rng.below((FRAME_MAX - FRAME_MIN + 1) as u64) as usize
}

/// Records a received frame. Returns an error if it was not expected.
fn arrived(missing: &mut HashSet<u64>, frame: &[u8], direction: Direction) -> Result<()> {
    match frame::number(frame, direction) {
        Ok(Some(number)) if missing.remove(&number) => Ok(()),
        Ok(Some(number)) => {
            Err(fail!(Verify, "frame {number} ({direction:?}) came twice, or long after it was sent"))
        }
        Ok(None) => Ok(()),
        Err(why) => Err(fail!(Verify, "{why} ({direction:?})")),
    }
}

fn lost(missing: &HashSet<u64>, direction: Direction, plan: &VhostNetPlan) -> Error {
    let first = missing.iter().min().copied().unwrap_or_default();
    fail!(
        Io,
        "{} frames ({direction:?}) did not arrive within {:?}, the first is {first}",
        missing.len(),
        plan.patience
    )
}

/// Sends frames from the driver to the peer end.
fn outward(
    pairs: &mut [Pair],
    peer: &PacketSocket,
    plan: &VhostNetPlan,
    numbers: std::ops::Range<u64>,
    rng: &mut Rng,
) -> Result<()> {
    let mut missing: HashSet<u64> = numbers.clone().collect();
    let mut bytes = [0; BUFFER];
    let count = pairs.len() as u64;
    for number in numbers {
        let frame = &mut bytes[..frame_len(rng)];
        frame::fill(frame, Direction::Out, number);
        if !pairs[(number % count) as usize].send(frame, rng.one_in(2)) {
            return Err(fail!(
                Usage,
                "a queue of {} has no room for a window of {WINDOW} frames",
                plan.queue_size
            ));
        }
    }
    for pair in &mut *pairs {
        pair.tx.queue.publish();
    }
    let deadline = Instant::now() + plan.patience;
    while !missing.is_empty() {
        if let Some(len) = peer.recv(&mut bytes, Duration::from_millis(20))? {
            arrived(&mut missing, &bytes[..len], Direction::Out)?;
        } else if Instant::now() > deadline {
            pairs.iter().try_for_each(Pair::check)?;
            return Err(lost(&missing, Direction::Out, plan));
        }
    }
    // The buffers have to be returned, too.
    for pair in pairs {
        while pair.tx.queue.outstanding() > 0 {
            while let Some(done) = pair.tx.queue.poll()? {
                pair.tx.queue.give_slot(done.cookie);
            }
            if pair.tx.queue.outstanding() > 0 {
                pair.tx.queue.wait(Duration::from_millis(20), pair.errors.as_fd());
                if Instant::now() > deadline + plan.patience {
                    return Err(fail!(
                        Io,
                        "{} frames were sent and not given back",
                        pair.tx.queue.outstanding()
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Sends frames from the peer end to the driver. The tap chooses the queue.
fn inward(
    pairs: &mut [Pair],
    peer: &PacketSocket,
    plan: &VhostNetPlan,
    numbers: std::ops::Range<u64>,
    rng: &mut Rng,
) -> Result<()> {
    let mut missing: HashSet<u64> = numbers.clone().collect();
    let mut bytes = [0; BUFFER];
    pairs.iter_mut().for_each(Pair::refill);
    for number in numbers {
        let frame = &mut bytes[..frame_len(rng)];
        frame::fill(frame, Direction::In, number);
        peer.send(frame)?;
    }
    let deadline = Instant::now() + plan.patience;
    while !missing.is_empty() {
        let mut came = false;
        for pair in &mut *pairs {
            while let Some(done) = pair.rx.queue.poll()? {
                came = true;
                let len = done.len as usize;
                if !(VNET_HEADER..=BUFFER).contains(&len) {
                    return Err(fail!(
                        Io,
                        "vhost-net says that it wrote {len} bytes into a buffer of {BUFFER}"
                    ));
                }
                pair.rx.buffer(done.cookie).read(0, &mut bytes[..len]);
                pair.rx.queue.give_slot(done.cookie);
                arrived(&mut missing, &bytes[VNET_HEADER..len], Direction::In)?;
            }
        }
        if !came && !sleep(pairs) && Instant::now() > deadline {
            pairs.iter().try_for_each(Pair::check)?;
            return Err(lost(&missing, Direction::In, plan));
        }
    }
    Ok(())
}

/// Waits for frames on any pair. Returns whether there may be some.
fn sleep(pairs: &mut [Pair]) -> bool {
    let mut ready = false;
    for pair in &mut *pairs {
        ready |= pair.rx.queue.enable_notify();
    }
    if !ready {
        let limit = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let mut fds: Vec<_> =
            pairs.iter().map(|pair| PollFd::new(&*pair.rx.queue.parts().call, PollFlags::IN)).collect();
        ready = poll(&mut fds, Some(&limit)).unwrap_or(0) > 0;
        let called: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (pair, _) in pairs.iter_mut().zip(called).filter(|(_, called)| *called) {
            pair.rx.queue.drain_call();
        }
    }
    pairs.iter_mut().for_each(|pair| pair.rx.queue.disable_notify());
    ready
}
