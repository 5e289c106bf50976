//! The guest's side: a vhost-user front end with the driver of a network device.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio::features::*;
use virtio::net::*;
use virtio::ring::RingFeatures;
use vshunt_guest::driver::{
    Area, Code, DEFAULT_BASE, DriverSeg, Memory, NEED_REPLY, Payload, Queue, QueueShape, RegionSpec, VERSION,
    Wire, protocol,
};

use crate::control::Control;
use crate::{Outcome, text};

/// Descriptors of a ring.
pub(crate) const RING_SIZE: u16 = 256;
/// A receive buffer: longer frames fill several.
const BUFFER_BYTES: usize = 2048;
/// A transmit slot: a header and the longest frame.
const SLOT_BYTES: usize = 12 << 10;
const MEMORY_BYTES: u64 = 64 << 20;
/// Longest that frames sent may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Messages that the driver of disks does not have.
const SEND_RARP: u32 = 19;
const NET_SET_MTU: u32 = 20;
const RARP: u64 = 1 << 2;
const NET_MTU: u64 = 1 << 4;

/// Who serves it, and what kind of guest it is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kind {
    /// Workers of the daemon, rather than the kernel.
    pub(crate) user: bool,
    /// Packed rings.
    pub(crate) packed: bool,
    /// No event index.
    pub(crate) plain: bool,
    /// Its front end leaves the control queue to the device.
    pub(crate) control: bool,
}

impl Kind {
    /// What such a guest takes of what is offered.
    fn wanted(self) -> u64 {
        let mut wanted = WANTED;
        if self.packed {
            wanted |= bit(VIRTIO_F_RING_PACKED);
        }
        if self.plain {
            wanted &= !bit(VIRTIO_RING_F_EVENT_IDX);
        }
        if self.control {
            wanted |= bit(VIRTIO_NET_F_CTRL_VQ) | bit(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
            wanted |= bit(VIRTIO_NET_F_GUEST_CSUM);
        }
        wanted
    }
}

/// What this guest takes of what is offered.
pub(crate) const WANTED: u64 = bit(VIRTIO_NET_F_MRG_RXBUF)
    | bit(VIRTIO_NET_F_MQ)
    | bit(VIRTIO_NET_F_MTU)
    | bit(VIRTIO_NET_F_MAC)
    | bit(VIRTIO_NET_F_STATUS)
    | bit(VIRTIO_RING_F_INDIRECT_DESC)
    | bit(VIRTIO_RING_F_EVENT_IDX)
    | bit(VHOST_USER_F_PROTOCOL_FEATURES)
    | bit(VIRTIO_F_VERSION_1);

/// A frame, its buffers, and where it was written.
type Taken = (Vec<u8>, u16, Vec<u64>);

struct Pair {
    rx: Queue,
    buffers: Area,
    /// Taken before they were asked for.
    early: VecDeque<Taken>,
    tx: Queue,
    /// One for each descriptor.
    slots: Area,
}

/// See the module.
pub(crate) struct Guest {
    pub(crate) wire: Wire,
    pub(crate) offered: u64,
    kind: Kind,
    features: u64,
    memory: Arc<Memory>,
    pairs: Vec<Pair>,
    /// Its ring is behind the pairs'.
    pub(crate) control: Option<Control>,
    log: Option<Area>,
    /// Bytes, offset, file.
    inflight: Option<(u64, u64, OwnedFd)>,
}

/// Connects, and agrees on protocol features: the connection, and what is offered to the guest.
fn greet(socket: &Path, kind: Kind) -> Outcome<(Wire, u64)> {
    let mut wire = Wire::connect(socket, Duration::from_secs(20)).map_err(text)?;
    let offered = wire.ask_u64(Code::GetFeatures).map_err(text)?;
    wire.tell(Code::SetOwner, &[], &[]).map_err(text)?;
    let theirs = wire.ask_u64(Code::GetProtocolFeatures).map_err(text)?;
    let ours = (protocol::SUPPORTED & !protocol::BACKEND_REQ) | RARP | NET_MTU;
    if theirs & (RARP | NET_MTU | protocol::CONFIG) != RARP | NET_MTU | protocol::CONFIG
        || (theirs & protocol::INFLIGHT_SHMFD != 0) != kind.user
    {
        return Err(format!("protocol features {theirs:#x} are offered"));
    }
    let agreed = Payload::new().u64(theirs & ours);
    wire.tell(Code::SetProtocolFeatures, &agreed, &[]).map_err(text)?;
    wire.reply_ack = true;
    Ok((wire, offered))
}

fn numbers(index: u16, value: u32) -> Payload {
    Payload::new().u32(index.into()).u32(value)
}

impl Guest {
    /// Connects and negotiates.
    pub(crate) fn connect(socket: &Path, kind: Kind) -> Outcome<Self> {
        let (wire, offered) = greet(socket, kind)?;
        let memory =
            Memory::new(&[RegionSpec { guest_addr: DEFAULT_BASE, size: MEMORY_BYTES }]).map_err(text)?;
        let features = offered & kind.wanted();
        let (pairs, control) = (Vec::new(), None);
        Ok(Self { wire, offered, kind, features, memory, pairs, control, log: None, inflight: None })
    }

    /// Whether the daemon has hung up.
    pub(crate) fn lost(&self) -> bool {
        let mut byte = 0u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: one byte at most is written to `byte`, which lives over the call.
        let n = unsafe { libc::recv(self.wire.socket().as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
        n == 0 || (n < 0 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::WouldBlock)
    }

    /// Connects again, to a daemon that was started after another died, and hands the rings over as
    /// they stand.
    pub(crate) fn reconnect(&mut self, socket: &Path, within: Duration) -> Outcome {
        let end = Instant::now() + within;
        loop {
            match self.hand_over(socket) {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                result => return result,
            }
        }
    }

    fn hand_over(&mut self, socket: &Path) -> Outcome {
        (self.wire, _) = greet(socket, self.kind)?;
        self.tell_features()?;
        self.tell_memory()?;
        for ring in 0..self.ring_count(self.pairs.len() as u16) {
            let base = self.base(ring)?;
            self.tell_ring(ring, base)?;
        }
        (0..self.pairs.len() as u16).try_for_each(|pair| self.enable(pair, true))?;
        self.enable_control()
    }

    /// With so many pairs.
    fn ring_count(&self, pairs: u16) -> u16 {
        2 * pairs + u16::from(self.kind.control)
    }

    /// Where a ring stands by what the device has used: takes that first.
    pub(crate) fn base(&mut self, ring: u16) -> Outcome<u32> {
        let Some(pair) = self.pairs.get_mut(usize::from(ring / 2)) else {
            return Ok(self.queue(ring).base_after_loss());
        };
        if ring.is_multiple_of(2) {
            // Looked at later: they are kept.
            while let Some(taken) = pair.take()? {
                pair.early.push_back(taken);
            }
            return Ok(pair.rx.base_after_loss());
        }
        pair.take_back()?;
        Ok(pair.tx.base_after_loss())
    }

    /// The configuration space.
    pub(crate) fn config(&mut self) -> Outcome<Vec<u8>> {
        let ask = Payload::new().u32(0).u32(12).u32(0).bytes(&[0; 12]);
        let reply = self.wire.ask(Code::GetConfig, &ask, &[]).map_err(text)?;
        reply.payload.get(12..24).map(<[u8]>::to_vec).ok_or_else(|| format!("{:?}", reply.payload))
    }

    pub(crate) fn rings(&mut self) -> Outcome<u64> {
        self.wire.ask_u64(Code::GetQueueNum).map_err(text)
    }

    fn tell_features(&mut self) -> Outcome {
        self.wire.tell(Code::SetFeatures, &Payload::new().u64(self.features), &[]).map_err(text)
    }

    /// The in-flight region and memory.
    fn tell_memory(&mut self) -> Outcome {
        if let Some((size, offset, fd)) = &self.inflight {
            let rings = self.ring_count(self.pairs.len() as u16);
            let tell = Payload::new().u64(*size).u64(*offset).u16(rings).u16(RING_SIZE).u32(0);
            self.wire.tell(Code::SetInflightFd, &tell, &[fd.as_fd()]).map_err(text)?;
        }
        let region = &self.memory.regions()[0];
        let table = Payload::new().u32(1).u32(0).u64(region.guest_addr).u64(region.size);
        let table = table.u64(region.user_addr()).u64(0);
        self.wire.tell(Code::SetMemTable, &table, &[region.fd()]).map_err(text)
    }

    /// The region that outlives the daemon.
    fn get_inflight(&mut self, pairs: u16) -> Outcome {
        let ask = Payload::new().u64(0).u64(0).u16(self.ring_count(pairs)).u16(RING_SIZE).u32(0);
        let mut reply = self.wire.ask(Code::GetInflightFd, &ask, &[]).map_err(text)?;
        let word = |at: usize| Some(u64::from_le_bytes(reply.payload.get(at..at + 8)?.try_into().ok()?));
        let (size, offset) = word(0).zip(word(8)).ok_or("GET_INFLIGHT_FD was answered too short")?;
        let fd = reply.fds.pop().ok_or("GET_INFLIGHT_FD was answered without a file")?;
        self.inflight = Some((size, offset, fd));
        Ok(())
    }

    /// Tells of memory, and makes the rings.
    pub(crate) fn set_up(&mut self, pairs: u16) -> Outcome {
        self.tell_features()?;
        if self.kind.user {
            self.get_inflight(pairs)?;
        }
        let ring = RingFeatures::from_bits(self.features);
        let shape = QueueShape { size: RING_SIZE, features: ring, indirect_cap: 4 };
        for k in 0..pairs {
            let make = |index| Queue::new(&self.memory, index, shape).map_err(text);
            let (rx, tx) = (make(2 * k)?, make(2 * k + 1)?);
            let alloc = |bytes| self.memory.alloc(bytes, 4096).map_err(text);
            let buffers = alloc(BUFFER_BYTES * usize::from(RING_SIZE))?;
            let slots = alloc(SLOT_BYTES * usize::from(RING_SIZE))?;
            let mut pair = Pair { rx, buffers, early: VecDeque::new(), tx, slots };
            for _ in 0..RING_SIZE {
                let slot = pair.rx.take_slot().ok_or("no slot")?;
                pair.give(slot)?;
            }
            pair.rx.publish();
            self.pairs.push(pair);
        }
        if self.kind.control {
            self.control = Some(Control::new(&self.memory, 2 * pairs, shape)?);
        }
        self.tell_memory()?;
        (0..self.ring_count(pairs)).try_for_each(|ring| self.tell_ring(ring, 0))?;
        self.enable_control()
    }

    fn queue(&self, ring: u16) -> &Queue {
        let Some(pair) = self.pairs.get(usize::from(ring / 2)) else {
            return &self.control.as_ref().expect("the only ring behind the pairs'").queue;
        };
        if ring.is_multiple_of(2) { &pair.rx } else { &pair.tx }
    }

    /// All of a ring but that it is enabled.
    pub(crate) fn tell_ring(&mut self, ring: u16, base: u32) -> Outcome {
        let parts = self.queue(ring).parts().clone();
        self.wire.tell(Code::SetVringNum, &numbers(ring, RING_SIZE.into()), &[]).map_err(text)?;
        self.wire.tell(Code::SetVringBase, &numbers(ring, base), &[]).map_err(text)?;
        self.tell_addresses(ring)?;
        let which = Payload::new().u64(ring.into());
        self.wire.tell(Code::SetVringCall, &which, &[parts.call.as_fd()]).map_err(text)?;
        self.wire.tell(Code::SetVringKick, &which, &[parts.kick.as_fd()]).map_err(text)
    }

    fn tell_addresses(&mut self, ring: u16) -> Outcome {
        let parts = self.queue(ring).parts().clone();
        let flags = u32::from(self.log.is_some());
        let user = |area: &Area| area.host() as u64;
        let addresses = numbers(ring, flags).u64(user(&parts.desc)).u64(user(&parts.device));
        let addresses = addresses.u64(user(&parts.driver)).u64(parts.device.guest());
        self.wire.tell(Code::SetVringAddr, &addresses, &[]).map_err(text)
    }

    /// SET_VRING_ENABLE of both rings of a pair.
    pub(crate) fn enable(&mut self, pair: u16, on: bool) -> Outcome {
        [2 * pair, 2 * pair + 1].into_iter().try_for_each(|ring| self.enable_ring(ring, on))
    }

    fn enable_control(&mut self) -> Outcome {
        match self.control {
            Some(_) => self.enable_ring(2 * self.pairs.len() as u16, true),
            None => Ok(()),
        }
    }

    fn enable_ring(&mut self, ring: u16, on: bool) -> Outcome {
        self.wire.tell(Code::SetVringEnable, &numbers(ring, on.into()), &[]).map_err(text)
    }

    /// GET_VRING_BASE.
    pub(crate) fn stop(&mut self, ring: u16) -> Outcome<u32> {
        let reply = self.wire.ask(Code::GetVringBase, &numbers(ring, 0), &[]).map_err(text)?;
        let base = reply.payload.get(4..8).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
        base.ok_or_else(|| "GET_VRING_BASE was answered too short".to_owned())
    }

    /// SEND_RARP or NET_SET_MTU; false: it was refused.
    fn send_own(&mut self, code: u32, value: u64) -> Outcome<bool> {
        let flags = VERSION | NEED_REPLY;
        self.wire.send(code, flags, &Payload::new().u64(value), &[]).map_err(text)?;
        let reply = self.wire.recv().map_err(text)?;
        Ok(reply.code == code && reply.payload == [0; 8])
    }

    pub(crate) fn announce(&mut self, mac: [u8; 6]) -> Outcome<bool> {
        let [a, b, c, d, e, f] = mac;
        self.send_own(SEND_RARP, u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }

    pub(crate) fn set_mtu(&mut self, mtu: u64) -> Outcome<bool> {
        self.send_own(NET_SET_MTU, mtu)
    }

    /// Has every page that is written logged from now on, as a migration does. The log lies in
    /// guest memory here.
    pub(crate) fn log_writes(&mut self) -> Outcome {
        let bytes = ((DEFAULT_BASE + MEMORY_BYTES) / 4096).div_ceil(8);
        // A region of its own, whose file is the log.
        let size = bytes.next_multiple_of(4096);
        let log = Memory::new(&[RegionSpec { guest_addr: 0, size }]).map_err(text)?;
        let message = Payload::new().u64(size).u64(0);
        let fd = log.regions()[0].fd();
        self.wire.ask(Code::SetLogBase, &message, &[fd]).map_err(text)?;
        self.log = log.area(0, size as usize);
        let features = Payload::new().u64(self.features | bit(VHOST_F_LOG_ALL));
        self.wire.tell(Code::SetFeatures, &features, &[]).map_err(text)?;
        (0..2 * self.pairs.len() as u16).try_for_each(|ring| self.tell_addresses(ring))?;
        // The host says something now and then by itself: what came before was not logged.
        for pair in &mut self.pairs {
            while pair.take()?.is_some() {}
        }
        Ok(())
    }

    /// Whether a page is marked in the log.
    fn is_marked(&self, guest: u64) -> bool {
        let page = guest / 4096;
        let Some(log) = &self.log else { return false };
        let mut byte = [0];
        log.read((page / 8) as usize, &mut byte);
        byte[0] & 1 << (page % 8) != 0
    }

    /// Sends a frame on a pair. Waits for room.
    pub(crate) fn send(&mut self, pair: u16, frame: &[u8]) -> Outcome {
        let wire = self.wire.socket();
        let pair = &mut self.pairs[usize::from(pair)];
        let end = Instant::now() + PATIENCE;
        loop {
            if pair.send(frame)? {
                return Ok(());
            }
            if Instant::now() > end {
                return Err("frames sent do not come back".to_owned());
            }
            pair.tx.wait(Duration::from_millis(100), wire);
        }
    }

    /// Sends a frame on a pair if there is room.
    pub(crate) fn try_send(&mut self, pair: u16, frame: &[u8]) -> Outcome<bool> {
        self.pairs[usize::from(pair)].send(frame)
    }

    /// Waits until every frame that was sent on a pair is done.
    pub(crate) fn flush(&mut self, pair: u16) -> Outcome {
        let wire = self.wire.socket();
        let pair = &mut self.pairs[usize::from(pair)];
        let end = Instant::now() + PATIENCE;
        loop {
            pair.take_back()?;
            match pair.tx.outstanding() {
                0 => return Ok(()),
                n if Instant::now() > end => return Err(format!("{n} frames sent do not come back")),
                _ => drop(pair.tx.wait(Duration::from_millis(100), wire)),
            }
        }
    }

    /// The next frame on a pair, with how many buffers it filled; none within `wait`. Sleeps until
    /// it is notified. Where writes are logged, its pages must be marked.
    pub(crate) fn receive(&mut self, pair: u16, wait: Duration) -> Outcome<Option<(Vec<u8>, u16)>> {
        let at = usize::from(pair);
        if let Some((bytes, buffers, _)) = self.pairs[at].early.pop_front() {
            return Ok(Some((bytes, buffers)));
        }
        if !self.pairs[at].rx.has_used() {
            let wire = self.wire.socket();
            if !self.pairs[at].rx.wait(wait, wire) {
                return Ok(None);
            }
        }
        let Some((bytes, buffers, pages)) = self.pairs[at].take()? else { return Ok(None) };
        if self.log.is_some()
            && let Some(page) = pages.into_iter().find(|page| !self.is_marked(*page))
        {
            return Err(format!("guest address {page:#x} was written and its page is not marked"));
        }
        Ok(Some((bytes, buffers)))
    }
}

impl Pair {
    /// Sends a frame if there is room.
    fn send(&mut self, frame: &[u8]) -> Outcome<bool> {
        self.take_back()?;
        let Some(slot) = self.tx.take_slot() else { return Ok(false) };
        let area = self.slots.part(usize::from(slot) * SLOT_BYTES, NET_HDR_BYTES + frame.len());
        area.write(0, &[0; NET_HDR_BYTES]);
        area.write(NET_HDR_BYTES, frame);
        let seg = DriverSeg { addr: area.guest(), len: area.len() as u32, writable: false };
        if !self.tx.stage_chain(slot, &[seg], false) {
            return Err("the transmit ring is full".to_owned());
        }
        self.tx.publish();
        Ok(true)
    }

    /// Takes back what was sent.
    fn take_back(&mut self) -> Outcome {
        while let Some(done) = self.tx.poll().map_err(text)? {
            self.tx.give_slot(done.cookie);
        }
        Ok(())
    }

    /// Gives a receive buffer to the device.
    fn give(&mut self, slot: u16) -> Outcome {
        let addr = self.buffers.guest() + u64::from(slot) * BUFFER_BYTES as u64;
        let seg = DriverSeg { addr, len: BUFFER_BYTES as u32, writable: true };
        match self.rx.stage_chain(slot, &[seg], false) {
            true => Ok(()),
            false => Err("the receive ring is full".to_owned()),
        }
    }

    fn take(&mut self) -> Outcome<Option<Taken>> {
        let (mut frame, mut pages, mut got, mut want) = (Vec::new(), Vec::new(), 0, 1);
        let end = Instant::now() + Duration::from_secs(5);
        while got < want {
            let Some(done) = self.rx.poll().map_err(text)? else {
                if got == 0 {
                    return Ok(None);
                }
                if Instant::now() > end {
                    return Err(format!("{got} of {want} buffers of a frame came"));
                }
                continue;
            };
            let len = done.len as usize;
            if len > BUFFER_BYTES || (got == 0 && len < NET_HDR_BYTES) {
                return Err(format!("{len} bytes in a buffer of {BUFFER_BYTES}"));
            }
            let part = self.buffers.part(usize::from(done.cookie) * BUFFER_BYTES, len);
            pages.extend([part.guest(), part.guest() + len as u64 - 1]);
            let bytes = part.to_vec();
            if got == 0 {
                want = u16::from_le_bytes([bytes[10], bytes[11]]);
                frame.extend_from_slice(&bytes[NET_HDR_BYTES..]);
            } else {
                frame.extend_from_slice(&bytes);
            }
            got += 1;
            self.give(done.cookie)?;
        }
        self.rx.publish();
        Ok(Some((frame, got, pages)))
    }
}
