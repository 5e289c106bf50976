//! Workers without virtio. A seeded program attaches a queue of numbered requests to one worker
//! after another; each request must complete exactly once.

mod lines;
mod stalled;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::time::Duration;

use io_uring::{opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use vshunt_types::error::Kind;

use super::*;

const OP_KICK: u8 = 1;
const OP_WORK: u8 = 2;
const SLOTS: u16 = 64;

/// The state that a test queue shares with its peer, in place of a ring.
struct TestRing {
    kick: OwnedFd,
    /// Requests offered so far, and how often each completed.
    offered: AtomicU32,
    done: Vec<AtomicU8>,
    /// The count of offered requests at which the peer kicks.
    kick_at: AtomicU32,
    taken: AtomicU32,
    /// Whether the queue has left a worker.
    left: AtomicBool,
    /// Requests of a queue made by [`TestQueue::held`] complete when this is written to.
    gate: OwnedFd,
}

impl TestRing {
    fn new(requests: usize) -> Arc<Self> {
        Arc::new(Self {
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
            offered: AtomicU32::new(0),
            done: (0..requests).map(|_| AtomicU8::new(0)).collect(),
            kick_at: AtomicU32::new(1),
            taken: AtomicU32::new(0),
            left: AtomicBool::new(false),
            gate: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        })
    }

    /// Completes the held requests, and those that come later.
    fn release(&self) {
        rustix::io::write(&self.gate, &1u64.to_ne_bytes()).unwrap();
    }

    /// Waits until the queue has taken `n` requests.
    fn wait_taken(&self, n: u32) {
        let limit = std::time::Instant::now() + FAR;
        while self.taken.load(Ordering::Relaxed) < n {
            assert!(std::time::Instant::now() < limit, "a request is not taken");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn offer(&self, n: u32) {
        let old = self.offered.fetch_add(n, Ordering::Release);
        fence(Ordering::SeqCst);
        let at = self.kick_at.load(Ordering::Relaxed);
        if old < at && old + n >= at {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    fn wait_done(&self) {
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        while self.done.iter().any(|d| d.load(Ordering::Acquire) == 0) {
            assert!(std::time::Instant::now() < limit, "a request was lost, or a wake-up");
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(self.done.iter().all(|d| d.load(Ordering::Acquire) == 1), "completed more than once");
    }
}

/// Limit for waits that end by themselves, and for calls that return in spite of a stalled worker.
/// It is far above the limits of those calls, for a busy machine.
const FAR: Duration = Duration::from_secs(60);

/// Attaches a queue to a worker that runs. A busy machine may not run the worker for a second; the
/// attach is then refused, and tried again.
fn attach(set: &QueueSet, index: u16, worker: WorkerId) {
    let limit = std::time::Instant::now() + FAR;
    while let Err(e) = set.attach(index, worker, FAR) {
        let waits = e.to_string().contains("(stalled)") && std::time::Instant::now() < limit;
        assert!(waits, "{e}");
    }
}

#[derive(PartialEq, Clone, Copy)]
enum PollState {
    Off,
    On,
    Ending(bool),
}

/// The device side. Each third request completes at once, the others with an operation that takes
/// up to some 100 µs.
struct TestQueue {
    ring: Arc<TestRing>,
    slots: Vec<u32>,
    times: Box<[types::Timespec]>,
    free: Vec<u16>,
    listen: PollState,
    staged: Vec<u32>,
    /// Whether requests are held until [`TestRing::release`].
    held: bool,
    /// Whether all requests complete at once.
    inline: bool,
}

impl TestQueue {
    fn boxed(ring: &Arc<TestRing>) -> Box<dyn Queue> {
        Box::new(Self::new(ring))
    }

    /// A queue whose requests complete after [`TestRing::release`] only.
    fn held(ring: &Arc<TestRing>) -> Box<dyn Queue> {
        let mut queue = Self::new(ring);
        queue.held = true;
        Box::new(queue)
    }

    fn new(ring: &Arc<TestRing>) -> Self {
        Self {
            ring: ring.clone(),
            slots: vec![0; SLOTS.into()],
            times: vec![types::Timespec::new(); SLOTS.into()].into(),
            free: (0..SLOTS).collect(),
            listen: PollState::Off,
            staged: Vec::new(),
            held: false,
            inline: false,
        }
    }
}

impl Queue for TestQueue {
    fn arm(&mut self, uring: &mut Uring, base: Token) {
        match self.listen {
            PollState::Off => {
                uring.poll(self.ring.kick.as_raw_fd(), base.with(0, OP_KICK));
                self.listen = PollState::On;
            }
            PollState::Ending(_) => self.listen = PollState::Ending(true),
            PollState::On => {}
        }
    }

    fn take(&mut self, uring: &mut Uring, base: Token, budget: u32) -> u32 {
        let mut n = 0;
        while n < budget && !self.free.is_empty() && self.has_work() {
            let request = self.ring.taken.fetch_add(1, Ordering::Relaxed);
            n += 1;
            if self.inline || (request.is_multiple_of(3) && !self.held) {
                self.staged.push(request);
                continue;
            }
            let slot = self.free.pop().unwrap();
            self.slots[slot as usize] = request;
            if self.held {
                uring.poll(self.ring.gate.as_raw_fd(), base.with(slot, OP_WORK));
                continue;
            }
            let time = Duration::from_micros(u64::from(request % 128));
            self.times[slot as usize] = types::Timespec::from(time);
            let entry = opcode::Timeout::new(&self.times[slot as usize]).build();
            // SAFETY: the timespec is in a boxed slice that lives as long as the queue, and the
            // queue is at rest before it is dropped.
            unsafe { uring.push(entry, base.with(slot, OP_WORK)) };
        }
        n
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, _result: i32, more: bool) -> u32 {
        if token.op == OP_WORK {
            self.staged.push(self.slots[token.slot as usize]);
            self.free.push(token.slot);
            return 1;
        }
        if !more {
            let again = matches!(self.listen, PollState::On | PollState::Ending(true));
            self.listen = PollState::Off;
            if again {
                self.arm(uring, token);
            }
        }
        0
    }

    fn publish(&mut self) -> bool {
        for request in self.staged.drain(..) {
            self.ring.done[request as usize].fetch_add(1, Ordering::Release);
        }
        false
    }

    fn has_work(&self) -> bool {
        self.ring.taken.load(Ordering::Relaxed) < self.ring.offered.load(Ordering::Acquire)
            && !self.free.is_empty()
    }

    fn wake(&mut self) {
        self.ring.kick_at.store(u32::MAX, Ordering::Relaxed);
    }

    fn sleep(&mut self, _uring: &mut Uring, _base: Token, after: u32) -> bool {
        let taken = self.ring.taken.load(Ordering::Relaxed);
        self.ring.kick_at.store(taken + after, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.ring.offered.load(Ordering::Acquire) >= taken + after && !self.free.is_empty()
    }

    fn disarm(&mut self, uring: &mut Uring, base: Token) {
        match self.listen {
            PollState::On => {
                uring.cancel(base.with(0, OP_KICK));
                self.listen = PollState::Ending(false);
            }
            PollState::Ending(_) => self.listen = PollState::Ending(false),
            PollState::Off => {}
        }
    }

    fn at_rest(&self) -> bool {
        self.free.len() == usize::from(SLOTS) && self.listen == PollState::Off
    }

    fn leave(&mut self, _uring: &mut Uring) {
        self.ring.left.store(true, Ordering::Release);
    }
}

impl Drop for TestQueue {
    fn drop(&mut self) {
        assert!(self.at_rest() && self.staged.is_empty());
    }
}

fn pool(poll_us: u32) -> Arc<Workers> {
    let workers = Workers::new(poll_us).unwrap();
    assert_eq!(workers.create(None, &Settings::default()).unwrap(), 0);
    workers
}

/// Runs a seeded program of offers, attaches, stops, starts, new workers and freed workers, with 6
/// queues.
fn program(seed: u64, poll_us: u32) {
    const QUEUES: u16 = 6;
    const REQUESTS: u32 = 3000;
    let workers = pool(poll_us);
    let set = QueueSet::new("t", &workers, &[0; QUEUES as usize]).unwrap();
    let rings: Vec<_> = (0..QUEUES).map(|_| TestRing::new(REQUESTS as usize)).collect();
    for (i, ring) in rings.iter().enumerate() {
        set.start(i as u16, TestQueue::boxed(ring));
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let mut ids = vec![0];
    let mut left = [REQUESTS; QUEUES as usize];
    while left.iter().any(|&n| n > 0) {
        let q = random.u64(..u64::from(QUEUES)) as usize;
        match random.u64(..12) {
            0..7 => {
                let n = left[q].min(1 + random.u64(..60) as u32);
                rings[q].offer(n);
                left[q] -= n;
            }
            7 | 8 => {
                let to = ids[random.u64(..ids.len() as u64) as usize];
                attach(&set, q as u16, to);
                assert_eq!(set.placement(q as u16).0, to);
            }
            9 if ids.len() < 5 => ids.push(workers.create(None, &Settings::default()).unwrap()),
            10 if ids.len() > 1 => {
                let at = 1 + random.u64(..ids.len() as u64 - 1) as usize;
                let busy = (0..QUEUES).any(|i| set.placement(i).0 == ids[at]);
                match workers.free(ids[at]) {
                    Ok(()) => {
                        assert!(!busy);
                        ids.swap_remove(at);
                    }
                    Err(e) => assert!(busy && e.kind() == Kind::Busy),
                }
            }
            11 => {
                if let Some(queue) = set.stop(q as u16) {
                    set.start(q as u16, queue);
                }
            }
            _ => {}
        }
    }
    for (i, ring) in rings.iter().enumerate() {
        ring.wait_done();
        assert!(set.stop(i as u16).is_some());
    }
    drop(set);
    workers.end_all();
    assert!(workers.states().is_empty());
}

#[test]
fn any_queue_any_worker_any_time() {
    for seed in 1..=12 {
        program(seed * 0x9e37_79b9, [0, 50, 5][seed as usize % 3]);
    }
}

#[test]
fn step_2_out_of_time_leaves_the_queue_where_it_was() {
    let workers = pool(0);
    let other = workers.create(None, &Settings::default()).unwrap();
    let set = QueueSet::new("t", &workers, &[0]).unwrap();
    let ring = TestRing::new(4);
    // The requests take longer than the attach waits.
    set.start(0, TestQueue::held(&ring));
    ring.offer(2);
    ring.wait_taken(2);
    let error = set.attach(0, other, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert_eq!(set.placement(0), (0, 1));
    ring.offer(2);
    ring.release();
    ring.wait_done();
    attach(&set, 0, other);
    assert_eq!(set.placement(0), (other, 2));
    drop(set.stop(0));
}

#[test]
fn a_kick_between_release_and_attach_is_not_lost() {
    let workers = pool(0);
    let ids: Vec<_> = (0..2).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
    let set = Arc::new(QueueSet::new("t", &workers, &[0]).unwrap());
    let ring = TestRing::new(2000);
    set.start(0, TestQueue::boxed(&ring));
    let mover = {
        let set = set.clone();
        std::thread::spawn(move || {
            for i in 0..400 {
                attach(&set, 0, ids[i % 2]);
            }
        })
    };
    for _ in 0..2000 {
        ring.offer(1);
        std::thread::sleep(Duration::from_micros(20));
    }
    mover.join().unwrap();
    ring.wait_done();
    drop(set.stop(0));
}

/// Tests peers that wait for their answers, several on one worker that lets requests coalesce. A
/// peer that stops short of the number that the worker waits for is still served.
#[test]
fn coalescing_leaves_no_request_waiting() {
    const REQUESTS: u32 = 40_000;
    const DEPTH: u32 = 8;
    let workers = pool(0);
    let set = QueueSet::new("t", &workers, &[0; 4]).unwrap();
    let rings: Vec<_> = (0..4).map(|_| TestRing::new(REQUESTS as usize)).collect();
    for (i, ring) in rings.iter().enumerate() {
        let mut queue = TestQueue::new(ring);
        queue.inline = true;
        set.start(i as u16, Box::new(queue));
    }
    std::thread::scope(|scope| {
        for ring in &rings {
            scope.spawn(|| {
                for first in (0..REQUESTS).step_by(DEPTH as usize) {
                    for _ in 0..DEPTH {
                        ring.offer(1);
                    }
                    let start = std::time::Instant::now();
                    let last = (first + DEPTH - 1) as usize;
                    while ring.done[last].load(Ordering::Acquire) == 0 {
                        assert!(start.elapsed() < Duration::from_secs(60), "request {last} was left lying");
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    for i in 0..4 {
        rings[i as usize].wait_done();
        drop(set.stop(i));
    }
}

#[test]
fn functions_run_on_the_worker() {
    let workers = pool(0);
    let set = QueueSet::new("t", &workers, &[0]).unwrap();
    assert!(!set.run_on(0, |_| unreachable!()).unwrap());
    set.start(0, TestQueue::boxed(&TestRing::new(0)));
    let tid = workers.states()[0].tid;
    let (send, receive) = std::sync::mpsc::channel();
    assert!(
        set.run_on(0, move |_| send.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap()).unwrap()
    );
    assert_eq!(receive.recv().unwrap(), tid);
    drop(set.stop(0));
}

const SCHED_BATCH: u32 = 3;

/// Returns the scheduling policies of the threads with this name (proc(5), field 41 of
/// /proc/PID/stat).
fn policies_of(name: &str) -> Vec<u32> {
    let tasks = own_threads().unwrap();
    let stats =
        tasks.iter().filter_map(|tid| std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok());
    let of = |stat: String| {
        let (head, rest) = stat.rsplit_once(") ")?;
        let named = head.ends_with(&format!("({name}"));
        named.then(|| rest.split(' ').nth(38).unwrap().parse().unwrap())
    };
    stats.filter_map(of).collect()
}

#[test]
fn settings_are_checked_and_shown() {
    let workers = pool(7);
    let cpu = workers.states()[0].cpu[0];
    let spec = Settings { cpu: Some(vec![cpu]), nice: Some(5), poll_us: Some(0), batch: true };
    let id = workers.create(Some("a name that is too long for a thread".into()), &spec).unwrap();
    let state = &workers.states()[1];
    assert_eq!((state.id, &state.cpu, state.nice, state.poll_us), (id, &vec![cpu], 5, 0));
    assert_eq!(policies_of("a name that is "), [SCHED_BATCH]);
    let bad = |s: Settings| workers.set(id, None, &s).unwrap_err().kind();
    assert_eq!(bad(Settings { poll_us: Some(POLL_US_MAX + 1), ..Default::default() }), Kind::Invalid);
    assert_eq!(bad(Settings { nice: Some(20), ..Default::default() }), Kind::Invalid);
    assert_eq!(bad(Settings { cpu: Some(vec![100_000]), ..Default::default() }), Kind::Invalid);
    let error =
        workers.set(id, None, &Settings { cpu: Some(vec![1000, 1001]), ..Default::default() }).unwrap_err();
    let may = vshunt_types::spec::cpu_list(&workers.states()[0].cpu);
    assert_eq!(error.to_string(), format!("cannot pin a worker to CPU 1000-1001: the daemon may use {may}"));
    let before = (state.name.clone(), state.cpu.clone(), 5, 0);
    let all = Settings { cpu: Some(vec![]), nice: Some(99), poll_us: Some(3), batch: false };
    workers.set(id, Some("other".into()), &all).unwrap_err();
    let state = workers.states().remove(1);
    assert_eq!((state.name, state.cpu, state.nice, state.poll_us), before, "all or nothing");
    workers.set(id, Some("other".into()), &Settings { nice: None, ..all }).unwrap();
    let state = workers.states().remove(1);
    assert_eq!((state.name.as_str(), state.poll_us), ("other", 3));
    assert_eq!(state.cpu, workers.states()[0].cpu, "pinned no more");
    assert_eq!(workers.free(99).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(workers.free(0).unwrap_err().kind(), Kind::Unsupported);
    workers.free(id).unwrap();
    assert_eq!(workers.set(id, None, &Settings::default()).unwrap_err().kind(), Kind::NotFound);
    assert_ne!(workers.create(None, &Settings::default()).unwrap(), id, "ids are not used again");
}

#[test]
fn an_idle_worker_sleeps() {
    let workers = pool(POLL_US_MAX);
    let set = QueueSet::new("t", &workers, &[0]).unwrap();
    set.start(0, TestQueue::boxed(&TestRing::new(0)));
    // The worker sleeps after some polling.
    let sleeps = || workers.states()[0].sleeps;
    let idle = (0..100).any(|_| {
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(300));
        sleeps() == before
    });
    assert!(idle, "something wakes it again and again");
    drop(set.stop(0));
}

#[test]
fn tokens_pack_whole() {
    let token = Token { index: 0xfffe, generation: Token::GENERATION_MAX, slot: 0xffff, op: 0xff };
    assert_eq!(Token::unpack(token.pack()), token);
    let token = Token { index: 1, generation: 2, slot: 3, op: 4 };
    assert_eq!(Token::unpack(token.pack()), token);
}

/// A queue that leaves the poll of an eventfd on the ring of each worker that it was attached to.
struct Leaver {
    event: Arc<OwnedFd>,
    polls: u32,
    forwarded: Arc<AtomicU32>,
}

const OP_LEFT: u8 = 3;

impl Queue for Leaver {
    fn arm(&mut self, uring: &mut Uring, base: Token) {
        uring.poll_once(self.event.as_raw_fd(), base.with(7, OP_LEFT));
        self.polls += 1;
    }

    fn take(&mut self, _uring: &mut Uring, _base: Token, _budget: u32) -> u32 {
        0
    }

    fn complete(&mut self, _uring: &mut Uring, _token: Token, _result: i32, _more: bool) -> u32 {
        self.polls -= 1;
        0
    }

    fn publish(&mut self) -> bool {
        false
    }

    fn has_work(&self) -> bool {
        false
    }

    fn wake(&mut self) {}

    fn sleep(&mut self, _uring: &mut Uring, _base: Token, _after: u32) -> bool {
        false
    }

    fn disarm(&mut self, _uring: &mut Uring, _base: Token) {}

    fn at_rest(&self) -> bool {
        true
    }

    fn leave(&mut self, _uring: &mut Uring) {}

    fn forwarder(&mut self) -> Option<Box<dyn Forwarder>> {
        let left = std::mem::take(&mut self.polls);
        let forwarded = self.forwarded.clone();
        (left > 0).then(|| Box::new(PollForwarder { left, forwarded }) as Box<dyn Forwarder>)
    }
}

struct PollForwarder {
    left: u32,
    forwarded: Arc<AtomicU32>,
}

impl Forwarder for PollForwarder {
    fn forward(&mut self, token: Token, result: i32) {
        assert!(self.left > 0 && result > 0);
        assert_eq!((token.slot, token.op), (7, OP_LEFT));
        self.left -= 1;
        self.forwarded.fetch_add(1, Ordering::SeqCst);
    }

    fn left(&self) -> u32 {
        self.left
    }
}

/// Returns the number of threads of this process with that name.
fn threads_named(name: &str) -> usize {
    let comm = |tid| std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap_or_default();
    own_threads().unwrap().into_iter().map(comm).filter(|comm| comm.trim() == name).count()
}

#[test]
fn what_a_queue_left_is_forwarded_by_its_former_workers_which_end_then() {
    let workers = pool(0);
    let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let forwarded = Arc::new(AtomicU32::new(0));
    let set = QueueSet::new("left", &workers, &[0]).unwrap();
    set.start(0, Box::new(Leaver { event: event.clone(), polls: 0, forwarded: forwarded.clone() }));
    let former: Vec<_> = ["left-1", "left-2"]
        .map(|name| workers.create(Some(name.to_owned()), &Settings::default()).unwrap())
        .into();
    for &worker in former.iter().chain(&[0]) {
        attach(&set, 0, worker);
    }
    // The workers are freed at once. Their threads stay because of the operations that are left on
    // their rings.
    for &worker in &former {
        workers.free(worker).unwrap();
        assert_eq!(workers.check(worker).unwrap_err().kind(), Kind::NotFound);
    }
    assert_eq!((threads_named("left-1"), threads_named("left-2")), (1, 1));
    assert_eq!(forwarded.load(Ordering::SeqCst), 0);
    // This includes the operation on the ring of the worker that the queue is attached to again.
    rustix::io::write(&*event, &1u64.to_ne_bytes()).unwrap();
    let limit = std::time::Instant::now() + Duration::from_secs(60);
    while forwarded.load(Ordering::SeqCst) < 3 || threads_named("left-1") + threads_named("left-2") > 0 {
        assert!(std::time::Instant::now() < limit, "a completion was lost, or a thread stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    set.stop(0);
    drop(set);
    workers.end_all();
}
