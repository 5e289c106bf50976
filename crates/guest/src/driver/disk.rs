//! Synchronous calls: one request for each call. For tests and for the setup of the load loop. They
//! are not fast.

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

/// Bytes of each queue's buffer for the synchronous calls. Longer reads and writes are split into
/// several requests.
const BOUNCE: usize = 256 << 10;

/// A connected block device.
pub struct Disk {
    transport: Transport,
    options: Options,
    memory: Arc<Memory>,
    queues: Vec<Queue>,
    bounce: Vec<Area>,
    log: Option<DirtyLog>,
    /// Chains of raw requests in flight, by queue and cookie.
    chains: HashMap<(u16, u16), Vec<DriverSeg>>,
    /// Completions that were taken during the wait for another one.
    done: HashMap<u16, VecDeque<Completion>>,
}

impl Disk {
    /// Connects to a vhost-user socket, negotiates, and starts the queues.
    pub fn connect(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let session = Session::open(path.as_ref().to_path_buf(), &options)?;
        Self::over(Transport::Socket(Box::new(session)), options)
    }

    /// Opens `/dev/vhost-blk`, sets up memory and backend, and starts the queues.
    pub fn open_kernel(kernel: &KernelOptions, options: Options) -> Result<Self> {
        let kernel = Kernel::open(kernel, &options)?;
        Self::over(Transport::Kernel(Box::new(kernel)), options)
    }

    /// Sets up memory and starts the queues of a device that was negotiated with the same options.
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

    /// Returns the configuration as last read.
    pub fn config(&self) -> &Config {
        self.transport.config()
    }

    /// Returns the size in sectors of 512 bytes, as last read.
    pub fn capacity(&self) -> u64 {
        self.transport.config().capacity
    }

    /// Returns the connection.
    ///
    /// # Panics
    /// The device has no socket. Only tests of the protocol call this.
    pub fn session(&mut self) -> &mut Session {
        match &mut self.transport {
            Transport::Socket(session) => session,
            Transport::Kernel(_) => panic!("a device of the kernel has no session"),
        }
    }

    /// Returns the transport of the device.
    pub fn transport(&mut self) -> &mut Transport {
        &mut self.transport
    }

    /// Returns guest memory, to allocate buffers from.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns a queue, for raw access to its ring.
    pub fn queue(&mut self, q: u16) -> &mut Queue {
        &mut self.queues[usize::from(q)]
    }

    /// Returns the number of queues that were set up.
    pub fn queue_count(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Returns the transport, the memory and the queues separately, for the load loop.
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

    /// Sends a flush.
    pub fn flush(&mut self, q: u16) -> Result<()> {
        self.expect_ok(q, request::FLUSH, 0, 0)
    }

    /// Discards the ranges, each `(sector, sectors)`, in one request.
    pub fn discard(&mut self, q: u16, ranges: &[(u64, u32)]) -> Result<()> {
        self.ranges(q, request::DISCARD, ranges, 0)
    }

    /// Writes zeroes to the ranges, each `(sector, sectors)`, in one request. With `unmap` the
    /// device may deallocate them.
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

    /// Returns the identity of the device, up to its first NUL.
    pub fn get_id(&mut self, q: u16) -> Result<String> {
        self.expect_ok(q, request::GET_ID, 0, 20)?;
        let mut id = [0; 20];
        self.bounce[usize::from(q)].read(0, &mut id);
        let end = id.iter().position(|&b| b == 0).unwrap_or(id.len());
        Ok(String::from_utf8_lossy(&id[..end]).into_owned())
    }

    /// Makes any request whose data, `len` bytes, are in the queue's bounce buffer. Returns the
    /// status byte.
    pub fn request(&mut self, q: u16, kind: u32, sector: u64, len: usize) -> Result<u8> {
        self.request_len(q, kind, sector, len).map(|(status, _)| status)
    }

    /// Returns the queue's bounce buffer, which has the data of [`Disk::request`].
    pub fn bounce(&self, q: u16) -> &Area {
        &self.bounce[usize::from(q)]
    }

    /// Like [`Disk::request`]. Returns the status byte, and the bytes that the device reports as
    /// written.
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

    /// Puts any chain on a queue and notifies the device if it asks for that. The caller sets the
    /// header and reads the status. With `indirect` the chain is in the slot's table of
    /// `Options::indirect_cap` descriptors. Returns the cookie.
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

    /// Waits for the next completion of a raw request on queue `q`.
    pub fn wait(&mut self, q: u16) -> Result<Completion> {
        self.wait_for(q, None)
    }

    /// Waits for the completion of `cookie`, or for any if `None`. Other completions are kept for
    /// later calls.
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

    /// Returns an error if queue `q` can complete nothing more.
    fn check_alive(&self, q: u16) -> Result<()> {
        match self.transport.kernel() {
            Some(kernel) if kernel.take_broken(q) => Err(kernel.broken(q)),
            None if self.is_gone() => {
                Err(fail!(Lost, "the server went away with requests of queue {q} outstanding"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the server has closed the connection.
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

    /// Moves the completions of the ring to `done`, and records what the device must have logged.
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

    /// Starts dirty logging as a VMM does: log, features, then the address of each ring again.
    pub fn start_logging(&mut self) -> Result<()> {
        let log = DirtyLog::new(&self.memory)?;
        self.transport.set_log(&log)?;
        self.log = Some(log);
        self.switch_logging(true)
    }

    /// Stops dirty logging. Returns the log.
    pub fn stop_logging(&mut self) -> Result<Option<DirtyLog>> {
        self.switch_logging(false)?;
        Ok(self.log.take())
    }

    fn switch_logging(&mut self, on: bool) -> Result<()> {
        let parts: Vec<_> = self.queues.iter().map(|queue| queue.parts().clone()).collect();
        self.transport.switch_logging(&parts, on)
    }

    /// Returns the log while logging is on.
    pub fn log(&mut self) -> Option<&mut DirtyLog> {
        self.log.as_mut()
    }

    /// Returns pages that the device wrote since logging started and did not mark.
    pub fn missed_pages(&self) -> Vec<MissedPage> {
        self.log.as_ref().map(DirtyLog::missed).unwrap_or_default()
    }

    /// Stops a queue (GET_VRING_BASE). Returns its base.
    pub fn stop_queue(&mut self, q: u16) -> Result<u32> {
        self.transport.stop_ring(q)
    }

    /// Starts a stopped queue again.
    pub fn start_queue(&mut self, q: u16, base: u32) -> Result<()> {
        let parts = self.queues[usize::from(q)].parts();
        self.transport.start_ring(&RingSetup { parts, base }, self.log.is_some())
    }

    /// Connects again within `wait` after the death of the server, with the same memory, rings and
    /// in-flight region. Requests in flight stay in flight, and the new server must complete each
    /// exactly once.
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

    /// Waits up to `wait` for a message that the configuration changed. Returns the new
    /// configuration.
    pub fn wait_config_change(&mut self, wait: Duration) -> Result<Option<Config>> {
        self.session().wait_config_change(wait)
    }
}

/// Returns the regions, or one region for rings, slots, bounce buffers and `buffer_bytes` if none
/// were named.
fn regions(options: &Options, shape: &QueueShape) -> Vec<RegionSpec> {
    if !options.regions.is_empty() {
        return options.regions.clone();
    }
    let a_queue = shape.memory() + BOUNCE as u64;
    let size = (a_queue * u64::from(options.queues) + options.buffer_bytes + PAGE).next_multiple_of(2 << 20);
    vec![RegionSpec { guest_addr: DEFAULT_BASE, size }]
}

/// Records what a completion writes to the ring: the used element and the index, or the used
/// descriptor.
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

/// Returns the pieces of a chain that the device wrote if it reports `len` bytes: the first `len`
/// bytes, and the last byte, which is the status.
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

/// Returns the name of a status byte.
pub(crate) fn status_name(status: u8) -> String {
    match status {
        status::OK => "OK".into(),
        status::IOERR => "IOERR, the server had an I/O error".into(),
        status::UNSUPP => "UNSUPP, the server does not know this request".into(),
        status::UNTOUCHED => "the server completed it without a status".into(),
        other => format!("status {other}"),
    }
}
