//! The synchronous face: one request, one call. For tests and for setting the load loop up; not for speed.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio::driver::DriverSeg;
use virtio::ring::RingFeatures;

use super::config::{Config, feature, request, status};
use super::kernel::{Kernel, KernelOptions};
use super::log::{DirtyLog, MissedPage};
use super::memory::{Area, DEFAULT_BASE, Memory, PAGE, RegionSpec};
use super::queue::{Completion, Queue, QueueShape};
use super::session::Session;
use super::transport::Transport;
use super::{Options, RingSetup, SECTOR, fresh_base};
use crate::error::{Result, fail};

/// Bytes of each queue's buffer for the synchronous calls; longer reads and writes are cut into several requests.
const BOUNCE: usize = 256 << 10;

/// A connected block device.
pub struct Disk {
    transport: Transport,
    options: Options,
    memory: Arc<Memory>,
    queues: Vec<Queue>,
    bounce: Vec<Area>,
    log: Option<DirtyLog>,
    /// Chains of raw requests that are outstanding, by queue and cookie.
    chains: HashMap<(u16, u16), Vec<DriverSeg>>,
    /// Completions taken while another one was waited for.
    done: HashMap<u16, VecDeque<Completion>>,
}

impl Disk {
    /// Connects to a vhost-user socket, negotiates, and sets memory and queues going.
    pub fn connect(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let session = Session::open(path.as_ref().to_path_buf(), &options)?;
        Self::over(Transport::Socket(Box::new(session)), options)
    }

    /// Opens `/dev/vhost-blk` and sets memory, backend and queues going.
    pub fn open_kernel(kernel: &KernelOptions, options: Options) -> Result<Self> {
        let kernel = Kernel::open(kernel, &options)?;
        Self::over(Transport::Kernel(Box::new(kernel)), options)
    }

    /// Sets memory and queues going on a device that was negotiated with by the same options.
    pub fn over(transport: Transport, options: Options) -> Result<Self> {
        if options.queues == 0 || options.queues > transport.max_queues() {
            return Err(fail!(
                Usage,
                "{} queues were asked for, the server has {}: use --queues 1 to {1}",
                options.queues,
                transport.max_queues()
            ));
        }
        if !options.queue_size.is_power_of_two() && !options.packed || options.queue_size == 0 {
            return Err(fail!(Usage, "a split ring's size is a power of two, not {}", options.queue_size));
        }
        let has = |bit: u64| transport.features() & bit != 0;
        let features = RingFeatures {
            indirect: has(feature::INDIRECT_DESC),
            event_idx: has(feature::EVENT_IDX),
            packed: has(feature::RING_PACKED),
        };
        let shape = QueueShape { size: options.queue_size, features, indirect_cap: options.indirect_cap };
        let memory = Memory::new(&regions(&options, &shape))?;
        let queues =
            (0..options.queues).map(|q| Queue::new(&memory, q, shape)).collect::<Result<Vec<_>>>()?;
        let bounce = queues.iter().map(|_| memory.alloc(BOUNCE, PAGE)).collect::<Result<Vec<_>>>()?;
        let mut disk = Self {
            transport,
            options,
            memory,
            queues,
            bounce,
            log: None,
            chains: HashMap::new(),
            done: HashMap::new(),
        };
        let base = fresh_base(features.packed);
        let rings: Vec<_> = disk.queues.iter().map(|q| RingSetup { parts: q.parts(), base }).collect();
        disk.transport.start(&disk.memory, &rings)?;
        Ok(disk)
    }

    /// What the device says of itself, as last read.
    pub fn config(&self) -> &Config {
        self.transport.config()
    }

    /// Size in sectors of 512 bytes, as last read.
    pub fn capacity(&self) -> u64 {
        self.transport.config().capacity
    }

    /// The connection.
    ///
    /// # Panics
    /// The device is not reached by a socket: for tests of the protocol alone.
    pub fn session(&mut self) -> &mut Session {
        match &mut self.transport {
            Transport::Socket(session) => session,
            Transport::Kernel(_) => panic!("a device of the kernel has no session"),
        }
    }

    /// What the device is reached by.
    pub fn transport(&mut self) -> &mut Transport {
        &mut self.transport
    }

    /// Guest memory, to allocate buffers from.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// A queue, for raw access to its ring.
    pub fn queue(&mut self, q: u16) -> &mut Queue {
        &mut self.queues[usize::from(q)]
    }

    /// How many queues were set up.
    pub fn queue_count(&self) -> u16 {
        self.queues.len() as u16
    }

    /// The connection and the queues apart, for the load loop.
    pub(crate) fn split(&mut self) -> (&mut Transport, &Arc<Memory>, &mut [Queue]) {
        (&mut self.transport, &self.memory, &mut self.queues)
    }

    /// Reads into `bytes` (a multiple of 512) from `sector`.
    pub fn read(&mut self, q: u16, sector: u64, bytes: &mut [u8]) -> Result<()> {
        for (i, part) in bytes.chunks_mut(BOUNCE).enumerate() {
            let at = sector + (i * BOUNCE) as u64 / SECTOR;
            self.expect_ok(q, request::IN, at, part.len())?;
            self.bounce[usize::from(q)].read(0, part);
        }
        Ok(())
    }

    /// Writes `bytes` (a multiple of 512) to `sector`.
    pub fn write(&mut self, q: u16, sector: u64, bytes: &[u8]) -> Result<()> {
        for (i, part) in bytes.chunks(BOUNCE).enumerate() {
            let at = sector + (i * BOUNCE) as u64 / SECTOR;
            self.bounce[usize::from(q)].write(0, part);
            self.expect_ok(q, request::OUT, at, part.len())?;
        }
        Ok(())
    }

    /// Flushes.
    pub fn flush(&mut self, q: u16) -> Result<()> {
        self.expect_ok(q, request::FLUSH, 0, 0)
    }

    /// Discards `(sector, sectors)` ranges in one request.
    pub fn discard(&mut self, q: u16, ranges: &[(u64, u32)]) -> Result<()> {
        self.ranges(q, request::DISCARD, ranges, 0)
    }

    /// Writes zeroes to `(sector, sectors)` ranges in one request; `unmap` allows the device to deallocate.
    pub fn write_zeroes(&mut self, q: u16, ranges: &[(u64, u32)], unmap: bool) -> Result<()> {
        self.ranges(q, request::WRITE_ZEROES, ranges, u32::from(unmap))
    }

    fn ranges(&mut self, q: u16, kind: u32, ranges: &[(u64, u32)], flags: u32) -> Result<()> {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|(sector, count)| {
                [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
            })
            .collect();
        self.bounce[usize::from(q)].write(0, &bytes);
        self.expect_ok(q, kind, 0, bytes.len())
    }

    /// The device's identity, up to its first NUL.
    pub fn get_id(&mut self, q: u16) -> Result<String> {
        self.expect_ok(q, request::GET_ID, 0, 20)?;
        let mut id = [0; 20];
        self.bounce[usize::from(q)].read(0, &mut id);
        let end = id.iter().position(|&b| b == 0).unwrap_or(id.len());
        Ok(String::from_utf8_lossy(&id[..end]).into_owned())
    }

    /// Any request whose data, `len` bytes, lie in the queue's bounce buffer; returns the status byte.
    pub fn request(&mut self, q: u16, kind: u32, sector: u64, len: usize) -> Result<u8> {
        self.request_len(q, kind, sector, len).map(|(status, _)| status)
    }

    /// The queue's bounce buffer: data of [`Disk::request`].
    pub fn bounce(&self, q: u16) -> &Area {
        &self.bounce[usize::from(q)]
    }

    /// As [`Disk::request`]; the status byte, and the bytes that the device says it wrote.
    pub fn request_len(&mut self, q: u16, kind: u32, sector: u64, len: usize) -> Result<(u8, u32)> {
        let data = self.bounce[usize::from(q)].part(0, len);
        let queue = &mut self.queues[usize::from(q)];
        let slot = queue.take_slot().ok_or_else(|| fail!(Io, "queue {q} has no free slot"))?;
        if !queue.stage(slot, kind, sector, (data.guest(), len as u32)) {
            queue.give_slot(slot);
            return Err(fail!(Io, "queue {q} has no free descriptors"));
        }
        queue.publish();
        let completion = self.wait_for(q, Some(slot))?;
        let status = self.queues[usize::from(q)].status(slot);
        if let Some(log) = &mut self.log {
            let queue = &self.queues[usize::from(q)];
            log.expect(queue.status_addr(slot), 1, "status");
            if matches!(kind, request::IN | request::GET_ID) {
                log.expect(data.guest(), u64::from(completion.len.saturating_sub(1)), "data");
            }
        }
        Ok((status, completion.len))
    }

    fn expect_ok(&mut self, q: u16, kind: u32, sector: u64, len: usize) -> Result<()> {
        match self.request(q, kind, sector, len)? {
            status::OK => Ok(()),
            bad => Err(fail!(
                Io,
                "request type {kind} of {len} bytes at sector {sector} failed: {}",
                status_name(bad)
            )),
        }
    }

    /// Puts any chain on a queue and kicks as the ring says; header and status are the caller's affair.
    /// `indirect` puts it into the slot's table of `Options::indirect_cap` descriptors. Returns its cookie.
    pub fn submit(&mut self, q: u16, segs: &[DriverSeg], indirect: bool) -> Result<u16> {
        let queue = &mut self.queues[usize::from(q)];
        let slot = queue.take_slot().ok_or_else(|| fail!(Io, "queue {q} has no free slot"))?;
        if !queue.stage_chain(slot, segs, indirect) {
            queue.give_slot(slot);
            return Err(fail!(Io, "queue {q} has no room for a chain of {}", segs.len()));
        }
        queue.publish();
        self.chains.insert((q, slot), segs.to_vec());
        Ok(slot)
    }

    /// Waits for the next completion of a raw request on `q`.
    pub fn wait(&mut self, q: u16) -> Result<Completion> {
        self.wait_for(q, None)
    }

    /// Waits for the completion of `cookie`, or of any if `None`; those of others are kept for later.
    pub fn wait_for(&mut self, q: u16, cookie: Option<u16>) -> Result<Completion> {
        let deadline = Instant::now() + self.options.timeout;
        loop {
            self.take_completions(q)?;
            let done = self.done.entry(q).or_default();
            if let Some(at) = done.iter().position(|c| cookie.is_none_or(|want| want == c.cookie)) {
                let completion = done.remove(at).expect("an index that position returned");
                self.queues[usize::from(q)].give_slot(completion.cookie);
                return Ok(completion);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(fail!(Io, "queue {q}: no completion within {:?}", self.options.timeout));
            }
            let queue = &mut self.queues[usize::from(q)];
            let ready = queue.wait(left, self.transport.ring_fd(q));
            if !ready && !self.queues[usize::from(q)].has_used() {
                self.check_alive(q)?;
            }
        }
    }

    /// An error if nothing more will come from queue `q`.
    fn check_alive(&self, q: u16) -> Result<()> {
        match self.transport.kernel() {
            Some(kernel) if kernel.take_broken(q) => Err(kernel.broken(q)),
            None if self.is_gone() => {
                Err(fail!(Lost, "the server went away with requests of queue {q} outstanding"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the server has closed the connection.
    pub fn is_gone(&self) -> bool {
        let Transport::Socket(session) = &self.transport else { return false };
        let mut byte = [0u8];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(session.fds().0, &mut byte, flags) {
            Ok((_, 0)) => true,
            Err(e) => e != rustix::io::Errno::AGAIN,
            Ok(_) => false,
        }
    }

    /// Moves what the ring has completed to `done` and notes what the device must have logged.
    fn take_completions(&mut self, q: u16) -> Result<()> {
        let queue = &mut self.queues[usize::from(q)];
        loop {
            let (slot, _) = queue.next_used();
            let Some(completion) = queue.poll()? else { return Ok(()) };
            let chain = self.chains.remove(&(q, completion.cookie));
            if let Some(log) = &mut self.log {
                expect_ring(log, queue, slot);
                for (addr, len) in written(chain.as_deref().unwrap_or_default(), completion.len) {
                    log.expect(addr, len, "data or status");
                }
            }
            self.done.entry(q).or_default().push_back(completion);
        }
    }

    /// Switches dirty logging on as a VMM does: log, features, then each ring's address again.
    pub fn start_logging(&mut self) -> Result<()> {
        let log = DirtyLog::new(&self.memory)?;
        self.transport.set_log(&log)?;
        self.log = Some(log);
        self.switch_logging(true)
    }

    /// Switches dirty logging off; the log stays to be looked at.
    pub fn stop_logging(&mut self) -> Result<Option<DirtyLog>> {
        self.switch_logging(false)?;
        Ok(self.log.take())
    }

    fn switch_logging(&mut self, on: bool) -> Result<()> {
        let parts: Vec<_> = self.queues.iter().map(|queue| queue.parts().clone()).collect();
        self.transport.switch_logging(&parts, on)
    }

    /// The log, while logging is on.
    pub fn log(&mut self) -> Option<&mut DirtyLog> {
        self.log.as_mut()
    }

    /// Pages that the device wrote since logging began and did not mark.
    pub fn missed_pages(&self) -> Vec<MissedPage> {
        self.log.as_ref().map(DirtyLog::missed).unwrap_or_default()
    }

    /// Stops a queue (GET_VRING_BASE); returns where it stands.
    pub fn stop_queue(&mut self, q: u16) -> Result<u32> {
        self.transport.stop_ring(q)
    }

    /// Sets a stopped queue going again.
    pub fn start_queue(&mut self, q: u16, base: u32) -> Result<()> {
        let parts = self.queues[usize::from(q)].parts();
        self.transport.start_ring(&RingSetup { parts, base }, self.log.is_some())
    }

    /// After the server's death: connects again within `wait`, with memory, rings and the in-flight region as they
    /// are. What is outstanding stays so, to be completed exactly once.
    pub fn reconnect(&mut self, wait: Duration) -> Result<()> {
        if self.session().inflight().is_none() {
            return Err(fail!(Usage, "the server gave no in-flight region: its death cannot be survived"));
        }
        for q in 0..self.queues.len() as u16 {
            self.take_completions(q)?;
        }
        let base = |q: &Queue| match self.options.stale_packed_base && q.parts().packed {
            true => fresh_base(true),
            false => q.base_after_loss(),
        };
        let rings: Vec<_> =
            self.queues.iter().map(|q| RingSetup { parts: q.parts(), base: base(q) }).collect();
        let Transport::Socket(session) = &mut self.transport else { return Ok(()) };
        session.reopen(&self.memory, &rings, Instant::now() + wait)?;
        for queue in &self.queues {
            queue.parts().kick();
        }
        Ok(())
    }

    /// Waits up to `wait` for the server to say that the configuration changed; what it is then.
    pub fn wait_config_change(&mut self, wait: Duration) -> Result<Option<Config>> {
        self.session().wait_config_change(wait)
    }
}

/// One region for rings, slots, bounce buffers and what is asked for, if no regions were named.
fn regions(options: &Options, shape: &QueueShape) -> Vec<RegionSpec> {
    if !options.regions.is_empty() {
        return options.regions.clone();
    }
    let a_queue = shape.memory() + BOUNCE as u64;
    let size = (a_queue * u64::from(options.queues) + options.buffer_bytes + PAGE).next_multiple_of(2 << 20);
    vec![RegionSpec { guest_addr: DEFAULT_BASE, size }]
}

/// What a completion writes to the ring itself: the used element and the index, or the used descriptor.
fn expect_ring(log: &mut DirtyLog, queue: &Queue, packed_slot: u16) {
    let parts = queue.parts();
    if parts.packed {
        log.expect(parts.desc.guest() + 16 * u64::from(packed_slot), 16, "packed descriptor");
    } else {
        let slot = u64::from(parts.device.load_u16(2).wrapping_sub(1) % parts.size);
        log.expect(parts.device.guest() + 4 + 8 * slot, 8, "used element");
        log.expect(parts.device.guest() + 2, 2, "used index");
    }
}

/// The pieces that the device wrote of a chain of which it says `len` bytes: the first `len`, and the last byte of
/// all, where the status is.
fn written(chain: &[DriverSeg], len: u32) -> Vec<(u64, u64)> {
    let mut left = u64::from(len);
    let mut pieces = Vec::new();
    for seg in chain.iter().filter(|s| s.writable) {
        let here = left.min(u64::from(seg.len));
        pieces.push((seg.addr, here));
        left -= here;
    }
    if let Some(last) = chain.last().filter(|s| s.writable && s.len > 0) {
        pieces.push((last.addr + u64::from(last.len) - 1, 1));
    }
    pieces
}

/// A status byte in words.
pub(crate) fn status_name(status: u8) -> String {
    match status {
        status::OK => "OK".into(),
        status::IOERR => "IOERR, the server had an I/O error".into(),
        status::UNSUPP => "UNSUPP, the server does not know this request".into(),
        status::UNTOUCHED => "the server completed it without a status".into(),
        other => format!("status {other}"),
    }
}
