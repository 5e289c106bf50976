//! A hostile guest: malformed chains, one or several at a time, on rings that the device serves.
//!
//! The device must answer each chain, or signal by the error eventfd that the ring is broken. Then
//! the ring is stopped, emptied and started again. Valid requests in between must be answered
//! correctly. Every wait has a limit, and another thread detects calls to the kernel that do not
//! return.

mod chain;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use serde::Serialize;

use self::chain::{Desc, Draft, NEXT, Offer, Source, WRITE};
use crate::driver::{
    Area, DEFAULT_BASE, Disk, Kernel, Options, PAGE, RegionSpec, RingParts, RingSetup, feature, request,
    status,
};
use crate::error::{Error, Result, fail};
use crate::rng::{Draws, Rng};

/// Guest addresses of the arena's region, far from that of the rings, and of the guard's region,
/// far from both.
const ARENA_BASE: u64 = DEFAULT_BASE + (1 << 30);
const ARENA_BYTES: u64 = 4 << 20;
const GUARD_BASE: u64 = ARENA_BASE + (1 << 30);
const GUARD_BYTES: u64 = 1 << 20;
const GUARD_FILL: u8 = 0x77;
/// Number of chains between two valid requests.
const PROBE_EVERY: u64 = 16;

/// Counts of the results.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    /// Chains made.
    pub chains: u64,
    /// Answered with OK.
    pub ok: u64,
    /// Answered with IOERR.
    pub io_error: u64,
    /// Answered with UNSUPP.
    pub unsupported: u64,
    /// Completed without a status, because the chain had no room for it, or its room was elsewhere.
    pub no_status: u64,
    /// Not answered, because this chain or a previous one broke the ring.
    pub broken: u64,
    /// Heads or indices that have no single valid answer. The device became idle, or broke the
    /// ring.
    pub settled: u64,
    /// Valid requests in between, all answered correctly.
    pub probes: u64,
    /// Rings that were set up again.
    pub restarts: u64,
    /// Bytes of the corpus from which chains were made.
    pub corpus_bytes: usize,
}

/// The parameters of [`run`].
#[derive(Clone, Debug)]
pub struct HostilePlan {
    /// Chains to make.
    pub chains: u64,
    /// Seed of the random numbers.
    pub seed: u32,
    /// Inputs of a fuzzer, concatenated. They are used before the seed.
    pub corpus: Vec<u8>,
    /// Time limit of an answer.
    pub patience: Duration,
}

/// Returns the options of a device for [`run`]: separate memory for rings, for the buffers that
/// chains name, and for a guard that no chain names.
#[must_use]
pub fn options(options: Options) -> Options {
    // Rings, slots and bounce buffers.
    let rings = (u64::from(options.queues) * (1 << 20)).next_multiple_of(2 << 20);
    let regions = vec![
        RegionSpec { guest_addr: DEFAULT_BASE, size: rings },
        RegionSpec { guest_addr: ARENA_BASE, size: ARENA_BYTES },
        RegionSpec { guest_addr: GUARD_BASE, size: GUARD_BYTES },
    ];
    Options { regions, ..options }
}

/// A ring that gets malformed chains.
struct HostileRing {
    parts: RingParts,
    avail: u16,
}

impl HostileRing {
    fn put(&self, at: u16, desc: &Desc) {
        self.parts.desc.write(usize::from(at) * 16, &desc.bytes());
    }

    /// Puts `head` on the available ring, without a notification.
    fn offer(&mut self, head: u16) {
        let slot = usize::from(self.avail % self.parts.size);
        self.parts.driver.write(4 + 2 * slot, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
    }

    /// Notifies the device, and asks for a notification of the next answer.
    fn publish(&self) {
        self.ask(self.used_index());
        self.parts.driver.store_u16(2, self.avail);
        self.parts.kick();
    }

    /// Asks for a notification of the answer at `position`, if EVENT_IDX was negotiated.
    fn ask(&self, position: u16) {
        let event = 4 + 2 * usize::from(self.parts.size);
        if event + 2 <= self.parts.driver.len() {
            self.parts.driver.store_u16(event, position);
        }
    }

    fn used_index(&self) -> u16 {
        self.parts.device.load_u16(2)
    }
}

/// A chain on the ring.
struct Offered {
    head: u16,
    /// The expected place of its status byte.
    state: Option<Area>,
    has_status: bool,
}

struct Hostile<'a> {
    kernel: &'a Kernel,
    plan: &'a HostilePlan,
    rings: Vec<HostileRing>,
    arena: &'a Area,
    source: Source<'a>,
    counts: Counts,
    progress: &'a AtomicU64,
}

/// The result of a wait.
#[derive(PartialEq, Eq)]
enum WaitResult {
    Answered,
    Broken,
}

/// Sends the chains to a device that was opened with [`options`].
///
/// # Errors
/// The device hangs, answers a valid request incorrectly, or writes to memory that no chain named.
pub fn run(disk: &mut Disk, plan: &HostilePlan) -> Result<Counts> {
    let memory = disk.memory().clone();
    let area =
        |at: u64, len: u64| memory.area(at, len as usize).ok_or_else(|| fail!(System, "no hostile memory"));
    let (arena, guard) = (area(ARENA_BASE, ARENA_BYTES)?, area(GUARD_BASE, GUARD_BYTES)?);
    guard.fill(GUARD_FILL);
    let capacity = disk.capacity();
    let parts: Vec<RingParts> = (0..disk.queue_count()).map(|q| disk.queue(q).parts().clone()).collect();
    let Some(kernel) = disk.transport().kernel() else {
        return Err(fail!(Usage, "hostile chains are for the kernel's device"));
    };
    let source = Source {
        rng: Draws::new(plan.corpus.clone(), Rng::new(u64::from(plan.seed), 5000)),
        arena: &arena,
        rings: [0; 3],
        size: parts[0].size,
        capacity,
        indirect: kernel.features() & feature::INDIRECT_DESC != 0,
        valid: false,
    };
    let (progress, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let rings = parts.into_iter().map(|parts| HostileRing { parts, avail: 0 }).collect();
    let counts = Counts::default();
    let mut hostile = Hostile { kernel, plan, rings, arena: &arena, source, counts, progress: &progress };
    let result = std::thread::scope(|scope| {
        scope.spawn(|| watch(plan, &progress, &over));
        let result = hostile.run();
        over.store(true, Ordering::Release);
        result
    });
    result.map_err(|e| fail!(Io, "hostile chain {} of seed {}: {e}", hostile.counts.chains, plan.seed))?;
    match guard.to_vec().iter().position(|&byte| byte != GUARD_FILL) {
        Some(at) => Err(fail!(
            Io,
            "the device wrote to guest address {:#x}, which no chain named (seed {})",
            GUARD_BASE + at as u64,
            plan.seed
        )),
        None => {
            let corpus_bytes = plan.corpus.len() - hostile.source.rng.left();
            Ok(Counts { corpus_bytes, ..hostile.counts })
        }
    }
}

/// Ends the process if a call to the kernel does not return. The calling thread cannot be stopped
/// otherwise.
fn watch(plan: &HostilePlan, progress: &AtomicU64, over: &AtomicBool) {
    let (mut last, mut since) = (progress.load(Ordering::Acquire), Instant::now());
    while !over.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(50));
        let now = progress.load(Ordering::Acquire);
        if now != last {
            (last, since) = (now, Instant::now());
        } else if since.elapsed() > 3 * plan.patience {
            eprintln!(
                "vshunt-bench: hostile chain {now} of seed {}: a call to the kernel has not come back for {:?}: it hangs",
                plan.seed,
                since.elapsed()
            );
            std::process::exit(1);
        }
    }
}

impl Hostile<'_> {
    fn run(&mut self) -> Result<()> {
        for q in 0..self.rings.len() {
            self.restart(q)?;
        }
        let mut probed = 0;
        while self.counts.chains < self.plan.chains {
            let q = self.source.rng.below(self.rings.len() as u64) as usize;
            self.progress.store(self.counts.chains, Ordering::Release);
            self.chains(q)?;
            if self.counts.chains / PROBE_EVERY > probed {
                probed = self.counts.chains / PROBE_EVERY;
                self.probe(q)?;
            }
        }
        (0..self.rings.len()).try_for_each(|q| self.probe(q))
    }

    /// Puts chains on ring `q`: usually one, sometimes several.
    fn chains(&mut self, q: usize) -> Result<()> {
        let most = if self.source.rng.one_in(2) { 1 } else { 2 + self.source.rng.below(7) };
        let most = most.min(self.plan.chains - self.counts.chains);
        let parts = &self.rings[q].parts;
        self.source.rings = [parts.desc.guest(), parts.driver.guest(), parts.device.guest()];
        let before = self.rings[q].used_index();
        let (mut offered, mut at) = (Vec::new(), 0);
        let (mut plain, mut changed) = (true, false);
        for _ in 0..most {
            let draft = self.source.draft();
            // A chain without a single valid answer hides the results of others, so it is usually
            // alone.
            let odd = draft.offer != Offer::Once && !offered.is_empty() && !self.source.rng.one_in(4);
            if odd || at + draft.descs.len() > usize::from(self.source.size) {
                break;
            }
            let chain = self.put(q, &draft, at as u16);
            at += draft.descs.len();
            let ring = &mut self.rings[q];
            match draft.offer {
                Offer::Once | Offer::AtTheRing => ring.offer(chain.head),
                Offer::Again(times) => (0..times).for_each(|_| ring.offer(chain.head)),
                Offer::Jump(by) => ring.avail = ring.avail.wrapping_add(by),
            }
            plain &= draft.offer == Offer::Once;
            changed |= !self.source.valid && self.source.rng.one_in(3);
            offered.push(chain);
            if !plain && !self.source.rng.one_in(4) {
                break;
            }
        }
        self.counts.chains += offered.len() as u64;
        self.rings[q].publish();
        if changed {
            self.change_descriptors(q, at);
        }
        if !plain {
            self.settle(q)?;
            self.counts.settled += offered.len() as u64;
            return self.restart(q);
        }
        let end = self.wait(q, before.wrapping_add(offered.len() as u16))?;
        if end == WaitResult::Broken {
            // All requests in flight are answered when the stop returns.
            self.kernel.stop_ring(q as u16)?;
        }
        self.tally(q, before, &mut offered, changed)?;
        if end == WaitResult::Answered {
            return Ok(());
        }
        self.counts.broken += offered.len() as u64;
        self.restart(q)
    }

    /// Puts a chain into the descriptor table, from `at` on.
    fn put(&self, q: usize, draft: &Draft, at: u16) -> Offered {
        let state = draft.status.and_then(|addr| self.arena.elsewhere(addr, 1));
        if let Some(byte) = &state {
            byte.write(0, &[status::UNTOUCHED]);
        }
        for (i, desc) in draft.descs.iter().enumerate() {
            let next = desc.next.wrapping_add(at);
            self.rings[q].put(at + i as u16, &Desc { next, ..*desc });
        }
        let head = if draft.head == 0 { at } else { draft.head };
        Offered { head, state, has_status: draft.has_status }
    }

    /// Counts the chains that were answered since `before`, and removes them from the list.
    fn tally(&mut self, q: usize, before: u16, offered: &mut Vec<Offered>, changed: bool) -> Result<()> {
        let parts = &self.rings[q].parts;
        let mut position = before;
        // Chains of one burst may share memory. The status of one may be data of another.
        let alone = offered.len() == 1;
        while position != parts.device.load_u16(2) {
            let mut id = [0; 4];
            parts.device.read(4 + 8 * usize::from(position % parts.size), &mut id);
            let id = u32::from_le_bytes(id);
            let Some(found) = offered.iter().position(|chain| u32::from(chain.head) == id) else {
                return Err(fail!(
                    Io,
                    "the device answered head {id}, which was not offered, or answered twice"
                ));
            };
            let chain = offered.swap_remove(found);
            let mut byte = [status::UNTOUCHED];
            if let Some(at) = &chain.state {
                at.read(0, &mut byte);
            }
            match byte[0] {
                status::OK => self.counts.ok += 1,
                status::IOERR => self.counts.io_error += 1,
                status::UNSUPP => self.counts.unsupported += 1,
                other if chain.has_status && alone && !changed => {
                    return Err(fail!(
                        Io,
                        "the device put it back with status {other:#x}, although it has room for one"
                    ));
                }
                _ => self.counts.no_status += 1,
            }
            position = position.wrapping_add(1);
        }
        Ok(())
    }

    /// Changes descriptors while the device reads them. It must read each only once, or check it
    /// again.
    fn change_descriptors(&mut self, q: usize, count: usize) {
        for _ in 0..8 {
            let at = self.source.rng.below(count as u64) as u16;
            let (addr, len) = (self.source.address(), self.source.len());
            let flags = self.source.rng.below(8) as u16;
            let next = self.source.rng.below(u64::from(self.source.size)) as u16;
            self.rings[q].put(at, &Desc { addr, len, flags, next });
        }
    }

    /// Waits until the used index is `until`, or the ring is broken.
    fn wait(&mut self, q: usize, until: u16) -> Result<WaitResult> {
        let deadline = Instant::now() + self.plan.patience;
        loop {
            let ring = &self.rings[q];
            let used = ring.used_index();
            if used == until {
                return Ok(WaitResult::Answered);
            }
            if self.kernel.take_broken(q as u16) {
                return Ok(WaitResult::Broken);
            }
            if Instant::now() > deadline {
                return Err(self.hangs(q, "neither answered it nor broke the ring"));
            }
            ring.ask(used);
            fence(Ordering::SeqCst);
            if ring.used_index() == used {
                self.kernel.wait(&ring.parts, Duration::from_millis(20));
            }
        }
    }

    /// Waits until the ring is broken, or the device is idle and has no request in flight.
    fn settle(&mut self, q: usize) -> Result<()> {
        let deadline = Instant::now() + self.plan.patience;
        let (mut last, mut quiet) = (None, 0);
        while quiet < 3 {
            if self.kernel.take_broken(q as u16) {
                return Ok(());
            }
            let stats = self.stats(q)?;
            let now = Some((stats.requests, stats.kicks));
            quiet = if stats.in_flight == 0 && now == last { quiet + 1 } else { 0 };
            last = now;
            if Instant::now() > deadline {
                return Err(self.hangs(q, "did not come to rest"));
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        Ok(())
    }

    fn stats(&self, q: usize) -> Result<virtio::vhost::BlkVringStats> {
        self.kernel.handle().stats(q as u16)
    }

    #[cold]
    fn hangs(&self, q: usize, what: &str) -> Error {
        let in_flight = self.stats(q).map_or(0, |stats| stats.in_flight);
        fail!(Io, "the device {what} within {:?} ({in_flight} requests in flight)", self.plan.patience)
    }

    /// Stops a ring, empties it, and starts it again.
    fn restart(&mut self, q: usize) -> Result<()> {
        self.kernel.stop_ring(q as u16)?;
        let in_flight = self.stats(q)?.in_flight;
        if in_flight != 0 {
            return Err(fail!(Io, "ring {q} was stopped with {in_flight} requests in flight"));
        }
        let ring = &mut self.rings[q];
        for area in [&ring.parts.desc, &ring.parts.driver, &ring.parts.device] {
            area.fill(0);
        }
        ring.avail = 0;
        let _ = self.kernel.take_broken(q as u16);
        self.kernel.start_ring(&RingSetup { parts: &ring.parts, base: 0 }, false)?;
        self.counts.restarts += 1;
        Ok(())
    }

    /// Makes a valid read, which must be answered correctly.
    fn probe(&mut self, q: usize) -> Result<()> {
        let (header, data, state) = (0, PAGE as usize, 2 * PAGE as usize);
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&request::IN.to_le_bytes());
        self.arena.write(header, &bytes);
        self.arena.write(state, &[status::UNTOUCHED]);
        let at = |offset: usize| self.arena.guest() + offset as u64;
        let ring = &mut self.rings[q];
        ring.put(0, &Desc { addr: at(header), len: 16, flags: NEXT, next: 1 });
        ring.put(1, &Desc { addr: at(data), len: 4096, flags: NEXT | WRITE, next: 2 });
        ring.put(2, &Desc { addr: at(state), len: 1, flags: WRITE, next: 0 });
        let until = ring.used_index().wrapping_add(1);
        ring.offer(0);
        ring.publish();
        if self.wait(q, until)? == WaitResult::Broken {
            return Err(fail!(Io, "a sound request broke ring {q}"));
        }
        let mut byte = [0];
        self.arena.read(state, &mut byte);
        let slot = usize::from(until.wrapping_sub(1) % self.rings[q].parts.size);
        let mut element = [0; 8];
        self.rings[q].parts.device.read(4 + 8 * slot, &mut element);
        if byte[0] != status::OK || element != (4097u64 << 32).to_le_bytes() {
            return Err(fail!(
                Io,
                "a sound read was answered with status {} and the used element {element:02x?}",
                byte[0]
            ));
        }
        self.counts.probes += 1;
        Ok(())
    }
}
