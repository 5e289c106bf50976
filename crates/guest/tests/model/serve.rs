//! One connection of the model, and its queue threads.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio::blk::split_request;
use virtio::inflight::{Inflight, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use virtio::ring::{Chain, DeviceRing, Head, RingAddrs, RingFeatures, Seg, UsedLog, ring_sizes};
use vshunt_guest::driver::{
    CONFIG_LEN, Message, NEED_REPLY, Payload, REPLY, VERSION, Wire, feature, protocol, request,
};

use super::{Mapping, QUEUES, Shared};

const OFFER: u64 = feature::VERSION_1
    | feature::PROTOCOL_FEATURES
    | feature::RING_PACKED
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::LOG_ALL
    | feature::BLK_FLUSH
    | feature::BLK_MQ;

#[derive(Default)]
struct Vring {
    size: u16,
    desc: u64,
    driver: u64,
    device: u64,
    log_addr: Option<u64>,
    base: u32,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    thread: Option<JoinHandle<u32>>,
}

struct Life<'a> {
    shared: &'a Arc<Shared>,
    wire: Wire,
    features: u64,
    regions: Vec<(u64, u64, u64, Arc<Mapping>)>,
    memory: Arc<GuestMemory>,
    vrings: Vec<Vring>,
    inflight: Option<(Arc<Mapping>, usize)>,
    log: Option<Arc<DirtyLog>>,
    channel: Option<UnixStream>,
}

/// Serves one connection until it ends or the model dies.
pub(super) fn connection(stream: UnixStream, shared: &Arc<Shared>) {
    shared.stop.store(false, Ordering::Release);
    shared.dying.store(false, Ordering::Release);
    let mut life = Life {
        shared,
        wire: Wire::from_stream(stream, Duration::from_secs(5)),
        features: 0,
        regions: Vec::new(),
        memory: Arc::new(GuestMemory::empty()),
        vrings: (0..QUEUES).map(|_| Vring::default()).collect(),
        inflight: None,
        log: None,
        channel: None,
    };
    while !shared.dying.load(Ordering::Acquire) && !shared.quit.load(Ordering::Acquire) {
        if shared.behaviour.announce.swap(false, Ordering::AcqRel) {
            let header = [2u32, VERSION, 0].map(u32::to_le_bytes).concat();
            let mut channel = life.channel.as_ref().expect("a backend channel");
            std::io::Write::write_all(&mut channel, &header).expect("announce");
        }
        let mut fds = [PollFd::from_borrowed_fd(life.wire.socket(), PollFlags::IN)];
        if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 })).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(message) = life.wire.recv() else { break };
        life.handle(message);
    }
    // All threads have stopped before the socket closes, as in a process that is killed.
    shared.stop.store(true, Ordering::Release);
    for vring in &mut life.vrings {
        vring.thread.take().map(|t| t.join().expect("a queue thread"));
    }
    if shared.dying.load(Ordering::Acquire) {
        let behaviour = &shared.behaviour;
        let deaths = behaviour.deaths.fetch_add(1, Ordering::AcqRel) + 1;
        if deaths < behaviour.deaths_wanted.load(Ordering::Acquire) {
            behaviour.die_after.store(2000 + 97 * i64::from(deaths), Ordering::Release);
        }
    }
}

fn u64_at(m: &Message, at: usize) -> u64 {
    u64::from_le_bytes(m.payload[at..at + 8].try_into().expect("8 bytes"))
}

fn u32_at(m: &Message, at: usize) -> u32 {
    u32::from_le_bytes(m.payload[at..at + 4].try_into().expect("4 bytes"))
}

impl Life<'_> {
    fn reply(&mut self, code: u32, payload: &[u8]) {
        let _ = self.wire.send(code, VERSION | REPLY, payload, &[]);
    }

    fn reply_u64(&mut self, code: u32, value: u64) {
        self.reply(code, &Payload::new().u64(value));
    }

    fn handle(&mut self, mut m: Message) {
        let code = m.code;
        let ring = || u32_at(&m, 0) as usize;
        match code {
            1 => {
                let offer = self.shared.net.as_ref().map_or(OFFER, |net| net.offer());
                return self.reply_u64(code, offer);
            }
            15 => {
                let refused = self.shared.behaviour.refuse_protocol.load(Ordering::Acquire);
                return self.reply_u64(code, protocol::SUPPORTED & !refused);
            }
            17 => return self.reply_u64(code, u64::from(QUEUES)),
            36 => return self.reply_u64(code, 8),
            40 => return self.reply_u64(code, 0xf),
            24 => {
                if self.shared.net.is_some() {
                    let config = super::net::CONFIG;
                    return self.reply(code, &Payload::new().bytes(&m.payload[..12]).bytes(&config));
                }
                let mut config = [0; CONFIG_LEN];
                config[..8].copy_from_slice(&self.shared.sectors.load(Ordering::Acquire).to_le_bytes());
                return self.reply(code, &Payload::new().bytes(&m.payload[..12]).bytes(&config));
            }
            31 => return self.new_inflight(&m),
            6 => {
                let mapping = Mapping::new(&m.fds[0], u64_at(&m, 8), u64_at(&m, 0) as usize);
                // SAFETY: the log itself keeps the mapping.
                self.log =
                    Some(Arc::new(unsafe { DirtyLog::new(mapping.host, mapping.len, mapping.clone()) }));
                return self.reply_u64(code, 0);
            }
            11 => {
                let base = self.stop(ring());
                return self.reply(code, &Payload::new().u32(ring() as u32).u32(base));
            }
            2 => {
                self.features = u64_at(&m, 0);
                self.spread_log();
            }
            5 => (0..u32_at(&m, 0) as usize).for_each(|i| self.add_region(&m, 8 + 32 * i, i)),
            37 => self.add_region(&m, 8, 0),
            8 => self.vrings[ring()].size = u32_at(&m, 4) as u16,
            10 => self.vrings[ring()].base = u32_at(&m, 4),
            9 => self.set_addr(&m),
            12 => self.vrings[u64_at(&m, 0) as usize].kick = m.fds.pop(),
            13 => self.vrings[u64_at(&m, 0) as usize].call = m.fds.pop(),
            18 if u32_at(&m, 4) == 1 => self.start(ring()),
            21 => self.channel = m.fds.pop().map(UnixStream::from),
            32 => {
                let size = u64_at(&m, 0) as usize;
                self.inflight =
                    Some((Mapping::new(&m.fds[0], u64_at(&m, 8), size), size / usize::from(QUEUES)));
            }
            _ => {}
        }
        if m.flags & NEED_REPLY != 0 {
            self.reply_u64(code, 0);
        }
    }

    fn new_inflight(&mut self, m: &Message) {
        let queue_size = u16::from_le_bytes([m.payload[18], m.payload[19]]);
        let each = inflight_queue_size(queue_size, true).max(inflight_queue_size(queue_size, false));
        let size = (each * usize::from(QUEUES)) as u64;
        let fd = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, size).expect("ftruncate");
        let payload = Payload::new().u64(size).u64(0).bytes(&m.payload[16..20]).u32(0);
        let _ = self.wire.send(m.code, VERSION | REPLY, &payload, &[fd.as_fd()]);
    }

    fn add_region(&mut self, m: &Message, at: usize, fd: usize) {
        let (guest, size, user) = (u64_at(m, at), u64_at(m, at + 8), u64_at(m, at + 16));
        self.regions.push((guest, size, user, Mapping::new(&m.fds[fd], u64_at(m, at + 24), size as usize)));
        let regions = self.regions.iter().map(|(guest, size, user, mapping)| Region {
            guest_addr: *guest,
            user_addr: *user,
            size: *size,
            host: mapping.host,
            keep: mapping.clone(),
        });
        // SAFETY: each region is a whole mapping, which the region keeps.
        self.memory = Arc::new(unsafe { GuestMemory::new(regions.collect()) }.expect("a memory table"));
    }

    fn set_addr(&mut self, m: &Message) {
        let vring = &mut self.vrings[u32_at(m, 0) as usize];
        (vring.desc, vring.device, vring.driver) = (u64_at(m, 8), u64_at(m, 16), u64_at(m, 24));
        vring.log_addr = (u32_at(m, 4) & 1 != 0).then(|| u64_at(m, 32));
        self.spread_log();
    }

    fn spread_log(&self) {
        let on = self.features & feature::LOG_ALL != 0;
        let used = |vring: &Vring| {
            let log = self.log.clone().filter(|_| on)?;
            let desc_addr = self.memory.user_to_guest(vring.desc)?;
            Some(UsedLog { log, device_addr: vring.log_addr?, desc_addr })
        };
        *self.shared.used_logs.lock().expect("logs") = self.vrings.iter().map(used).collect();
        self.shared.log_epoch.fetch_add(1, Ordering::AcqRel);
    }

    fn stop(&mut self, ring: usize) -> u32 {
        self.shared.stop.store(true, Ordering::Release);
        let vring = &mut self.vrings[ring];
        let base = vring.thread.take().map_or(vring.base, |t| t.join().expect("a queue thread"));
        self.shared.stop.store(false, Ordering::Release);
        base
    }

    fn start(&mut self, index: usize) {
        let vring = &self.vrings[index];
        let features = RingFeatures::from_bits(self.features);
        let sizes = ring_sizes(vring.size, features);
        let host =
            |user, len: usize| self.memory.user_to_host(user, len as u64).expect("a ring inside memory");
        let addrs = RingAddrs {
            desc: host(vring.desc, sizes.desc),
            driver: host(vring.driver, sizes.driver),
            device: host(vring.device, sizes.device),
        };
        // SAFETY: the areas are in mappings that the queue thread keeps through `memory`.
        let mut ring = unsafe { DeviceRing::new(vring.size, features, addrs, vring.base) }.expect("a ring");
        let mut replays = Vec::new();
        if let Some((mapping, each)) = &self.inflight {
            // SAFETY: the range is this queue's part of the mapping, which the ring keeps.
            let part = unsafe {
                let base = mapping.host.add(each * index);
                Inflight::new(base, *each, vring.size, features.packed, mapping.clone())
            };
            replays = ring.set_inflight(part.expect("an in-flight region")).expect("recovery");
        }
        let mut queue = QueueThread {
            index,
            shared: Arc::clone(self.shared),
            memory: Arc::clone(&self.memory),
            ring,
            kick: vring.kick.as_ref().expect("kick").try_clone().expect("dup"),
            call: vring.call.as_ref().expect("call").try_clone().expect("dup"),
            log: None,
            log_epoch: u32::MAX,
            pending: Vec::new(),
            chain: Chain::new(),
            spare: Vec::new(),
            rng: 0x9e37_79b9_7f4a_7c15 ^ (index as u64 + 1),
        };
        self.vrings[index].thread = Some(std::thread::spawn(move || {
            for replay in &replays {
                queue.ring.replay(&queue.memory.clone(), replay, &mut queue.chain).expect("a replay");
                match queue.shared.net.is_some() {
                    true => queue.carry_on(),
                    false => queue.carry_out(),
                }
            }
            match queue.shared.net.is_some() {
                true => queue.run_nic(),
                false => queue.run(),
            }
            queue.ring.base()
        }));
    }
}

pub(super) struct QueueThread {
    pub(super) index: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) ring: DeviceRing,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    log: Option<UsedLog>,
    log_epoch: u32,
    /// Requests that are done and not completed yet. They complete out of order.
    pending: Vec<(Head, u32)>,
    pub(super) chain: Chain,
    /// Receive buffers of a network device that were taken for a frame that needs more.
    pub(super) spare: Vec<(Head, Seg)>,
    rng: u64,
}

impl QueueThread {
    fn draw(&mut self) -> u64 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        self.rng
    }

    pub(super) fn ended(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire) || self.shared.dying.load(Ordering::Acquire)
    }

    fn run(&mut self) {
        let memory = Arc::clone(&self.memory);
        let null = self.shared.behaviour.null.load(Ordering::Acquire);
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.shared.behaviour.hang.load(Ordering::Acquire) {
                std::thread::sleep(std::time::Duration::from_millis(1));
                continue;
            }
            let mut taken = 0;
            while taken < 64 && self.ring.pop(&memory, &mut self.chain).expect("a sound ring") {
                taken += 1;
                // The request may have arrived after a change of the log that the previous check
                // did not see.
                self.take_up_log();
                self.carry_out();
                if counts_down(&self.shared.behaviour.die_after) {
                    self.shared.dying.store(true, Ordering::Release);
                }
                if self.shared.dying.load(Ordering::Acquire) {
                    return;
                }
            }
            self.give_back(taken, null);
            if taken == 0 && self.pending.is_empty() && !null && !self.ring.enable_kick() {
                let mut fds = [PollFd::new(&self.kick, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
                if !fds[0].revents().is_empty() {
                    let _ = rustix::io::read(&self.kick, &mut [0; 8]);
                }
            }
        }
    }

    fn take_up_log(&mut self) {
        let epoch = self.shared.log_epoch.load(Ordering::Acquire);
        if epoch != self.log_epoch {
            self.log_epoch = epoch;
            self.log = self.shared.used_logs.lock().expect("logs")[self.index].clone();
            let forget = self.shared.behaviour.forget_to_log.load(Ordering::Acquire);
            self.ring.set_used_log(self.log.clone().filter(|_| !forget));
        }
    }

    /// Completes some requests that are done, in any order. Completes all if no new requests
    /// arrived.
    fn give_back(&mut self, taken: usize, null: bool) {
        let keep = if null || taken == 0 { 0 } else { self.draw() as usize % (self.pending.len() + 1) };
        while self.pending.len() > keep {
            let at = if null { self.pending.len() - 1 } else { self.draw() as usize % self.pending.len() };
            let (head, written) = self.pending.swap_remove(at);
            self.ring.push(head, written);
            if counts_down(&self.shared.behaviour.twice_in) {
                self.ring.push(head, written);
            }
        }
        if self.ended() {
            return; // killed between the used elements and the index
        }
        if self.ring.publish() {
            let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
        }
    }

    /// Executes the request of the chain.
    fn carry_out(&mut self) {
        let mut data = Vec::new();
        let asked = split_request(&self.chain, &mut data).expect("a sound request");
        let null = self.shared.behaviour.null.load(Ordering::Relaxed);
        let lost = asked.kind == request::OUT && counts_down(&self.shared.behaviour.lose_write_in);
        let mut written = 1;
        if !null && !lost && matches!(asked.kind, request::IN | request::OUT) {
            let mut disk = self.shared.data.lock().expect("disk");
            let mut at = asked.sector as usize * 512;
            for seg in &data {
                let place = disk[at..at + seg.len as usize].as_mut_ptr();
                // SAFETY: both ranges have `seg.len` bytes. The slice checked one, and the ring's
                // translation the other.
                unsafe {
                    match asked.kind {
                        request::IN => seg.ptr.copy_from(place, seg.len as usize),
                        _ => place.copy_from(seg.ptr, seg.len as usize),
                    }
                }
                at += seg.len as usize;
            }
        }
        if asked.kind == request::IN {
            written += asked.data_len as u32;
            data.iter().for_each(|seg| self.mark(seg.ptr, u64::from(seg.len)));
        }
        // SAFETY: the request names this status byte, which is in guest memory as the ring checked.
        unsafe { asked.status.write_volatile(0) };
        self.mark(asked.status, 1);
        self.pending.push((self.chain.head, written));
    }

    fn mark(&self, host: *mut u8, len: u64) {
        let forget = self.shared.behaviour.forget_to_log.load(Ordering::Relaxed);
        if let (Some(log), Some(guest), false) = (&self.log, self.memory.host_to_guest(host), forget) {
            log.log.mark(guest, len);
        }
    }
}

/// Returns whether this step made the counter reach zero.
pub(super) fn counts_down(counter: &std::sync::atomic::AtomicI64) -> bool {
    counter.load(Ordering::Relaxed) > 0 && counter.fetch_sub(1, Ordering::AcqRel) == 1
}
