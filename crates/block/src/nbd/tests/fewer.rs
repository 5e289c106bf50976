//! Servers that offer several connections, and give fewer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use vshunt_types::spec::ConnectionsInfo;

use super::super::conn::ASK_AFTER;
use super::super::connect::{Place, Target};
use super::super::connector::{Connector, TRY};
use super::super::stream::Limit;
use super::*;
use crate::{DiskHandle, Step};
use vshunt_engine::{EventFd, Token};

const ERR_POLICY: u32 = 2;
const ERR_SHUTDOWN: u32 = 7;
/// Bytes of the disk that one load uses.
const PART: u64 = 64 << 10;
const BLOCK: usize = 4096;

impl Rig {
    pub(super) fn new(disk: &Arc<Disk>) -> Self {
        Self { disk: disk.clone(), uring: Uring::new().unwrap(), io: Io::default() }
    }

    /// Makes one whose worker has its own connection, and a handle of it.
    fn with_own(disk: &Arc<Disk>) -> (Self, DiskHandle) {
        let mut rig = Self::new(disk);
        let handle = rig.disk.attach(&mut rig.uring);
        rig.run_with(&handle, Op::Read, 512).unwrap();
        rig.ask();
        rig.has_own();
        (rig, handle)
    }

    /// Sends so many requests that a worker with them asks for a connection.
    pub(super) fn ask(&mut self) {
        for _ in 0..ASK_AFTER {
            self.run(Op::Read, 0, 512, false, 0).unwrap();
        }
    }

    /// Carries out a request with a handle that is there already.
    fn run_with(&mut self, handle: &DiskHandle, op: Op, len: usize) -> Result<(), i32> {
        let buf = AlignedBuf::new(len).unwrap();
        self.io.reset(op, 0, false);
        // SAFETY: the buffer has `len` bytes, and lives until the request is complete, as `io`
        // does.
        unsafe { self.io.push(buf.ptr(), len) };
        handle.run(&mut self.uring, &mut self.io).map_err(|e| e.raw_os_error().unwrap())
    }

    /// Waits until a worker has its own connection, and the server has answered on it.
    fn has_own(&mut self) {
        have_own(&self.disk, 1);
        // The connection arrives with the first request, which goes by the shared one.
        for _ in 0..2 {
            self.run(Op::Read, 0, 512, false, 0).unwrap();
        }
    }

    fn info(&self) -> ConnectionsInfo {
        self.disk.connections().unwrap()
    }
}

/// A worker that writes and reads its part of the disk, and compares, until it is stopped.
struct Load {
    stops: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn start(disk: &Arc<Disk>, part: u64) -> Self {
        let (stops, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (disk, theirs) = (disk.clone(), (stops.clone(), done.clone()));
        let thread = std::thread::spawn(move || {
            let mut rig = Rig::new(&disk);
            let handle = rig.disk.attach(&mut rig.uring);
            let mut round = 0u64;
            while !theirs.0.load(Relaxed) {
                let at = part * PART + round * 7 % (PART / BLOCK as u64) * BLOCK as u64;
                let byte = (round % 255) as u8 + 1;
                rig.run(Op::Write, at, BLOCK, round.is_multiple_of(5), byte).unwrap();
                if round.is_multiple_of(16) {
                    rig.run(Op::Flush, 0, 0, false, 0).unwrap();
                }
                let read = rig.run(Op::Read, at, BLOCK, false, 0).unwrap();
                assert!(read == vec![byte; BLOCK], "round {round} reads {} for {byte}", read[0]);
                round += 1;
                theirs.1.store(round, Relaxed);
                // Others need the CPUs, too.
                std::thread::sleep(Duration::from_micros(200));
            }
            handle.detach(&mut rig.uring);
        });
        Self { stops, done, thread: Some(thread) }
    }

    /// Waits until it has done some more.
    fn works(&self) {
        let before = self.done.load(Relaxed);
        soon(|| self.done.load(Relaxed) > before + 20 || self.thread.as_ref().unwrap().is_finished());
        assert!(!self.thread.as_ref().unwrap().is_finished(), "a request failed");
    }

    fn stop(mut self) {
        self.stops.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn open(server: &Server, delay_s: u32) -> Arc<Disk> {
    Disk::open(&DiskSpec { reconnect_delay: Some(delay_s), ..server.spec() }).unwrap()
}

fn loads(disk: &Arc<Disk>, count: u64) -> Vec<Load> {
    (0..count).map(|part| Load::start(disk, part)).collect()
}

/// Waits until so many workers have a connection of their own.
fn have_own(disk: &Arc<Disk>, own: u32) {
    soon(|| disk.connections().unwrap().own == own);
}

#[test]
fn workers_without_a_connection_share_one() {
    let manners = [
        (Manner::Close, "closes the connection in the handshake"),
        (Manner::Error(ERR_POLICY), "refuses: no more"),
        (Manner::Error(ERR_SHUTDOWN), "refuses: it is shutting down"),
        (Manner::Silence, "does not answer in time"),
    ];
    std::thread::scope(|scope| {
        for ((manner, why), gives) in manners.into_iter().flat_map(|m| [(m, 1), (m, 2)]) {
            scope.spawn(move || {
                let server = Server::new(Offer { manner, ..OFFER });
                server.doors.locked().gives = gives;
                let disk = open(&server, 0);
                let loads = loads(&disk, 3);
                loads.iter().for_each(Load::works);
                soon(|| disk.connections().unwrap().refused.is_some());
                have_own(&disk, gives as u32 - 1);
                let info = disk.connections().unwrap();
                assert!(info.refused.as_ref().unwrap().contains(why), "{info:?}");
                assert!(info.shared && info.sharing == 3 - info.own, "{info:?}");
                loads.iter().for_each(Load::works);
                // It gives more now.
                server.doors.locked().gives = 4;
                have_own(&disk, 3);
                assert_eq!(disk.connections().unwrap().refused, None);
                loads.iter().for_each(Load::works);
                loads.into_iter().for_each(Load::stop);
                assert_eq!(disk.connections().unwrap().own, 0);
            });
        }
    });
}

#[test]
fn a_server_that_allows_one_connection_is_asked_for_no_more() {
    let server = Server::new(Offer { flags: ALL & !CAN_MULTI_CONN, ..OFFER });
    let disk = open(&server, 0);
    let loads = loads(&disk, 2);
    loads.iter().for_each(Load::works);
    let info = disk.connections().unwrap();
    assert!(info.shared && info.refused.unwrap().contains("NBD_FLAG_CAN_MULTI_CONN"));
    assert_eq!((info.own, info.sharing), (0, 2));
    loads.into_iter().for_each(Load::stop);
    assert_eq!(server.notes.locked().connections, 1);
    assert_eq!(disk.connections().unwrap().sharing, 0);
}

#[test]
fn few_requests_need_no_connection_of_their_own() {
    let server = Server::new(OFFER);
    let mut rig = server.open();
    for _ in 0..50 {
        rig.run(Op::Read, 0, 512, false, 0).unwrap();
        rig.disk.sync().unwrap();
    }
    assert_eq!(server.notes.locked().connections, 1);
}

/// A server restarts one by one what it has given. It gives a new one to a worker only while the
/// shared one is there.
#[test]
fn connections_that_end_one_by_one_lose_no_write() {
    let server = Server::new(OFFER);
    let disk = open(&server, 60);
    let loads = loads(&disk, 3);
    for _ in 0..10 {
        have_own(&disk, 3);
        let all: Vec<_> = server.doors.locked().given.keys().copied().collect();
        server.end(*all.last().unwrap());
        loads.iter().for_each(Load::works);
        server.end(all[0]);
        loads.iter().for_each(Load::works);
    }
    loads.into_iter().for_each(Load::stop);
}

#[test]
fn a_worker_hands_over_the_only_connection() {
    for manner in [Manner::Close, Manner::Error(ERR_POLICY), Manner::Silence] {
        let server = Server::new(Offer { manner, ..OFFER });
        server.doors.locked().gives = 2;
        let disk = open(&server, 60);
        let loads = loads(&disk, 3);
        have_own(&disk, 1);
        let numbers = || server.doors.locked().given.keys().copied().collect::<Vec<_>>();
        let &[shared, own] = &numbers()[..] else { panic!("{:?}", numbers()) };
        server.doors.locked().gives = 1;
        server.end(shared);
        loads.iter().for_each(Load::works);
        soon(|| disk.connections().unwrap().own == 0 && disk.connections().unwrap().shared);
        loads.iter().for_each(Load::works);
        // The connection of the worker was not ended.
        soon(|| numbers() == [own]);
        // It is the shared one now, and is made again like that.
        server.end(own);
        loads.iter().for_each(Load::works);
        soon(|| disk.connections().unwrap().shared);
        server.doors.locked().gives = 4;
        have_own(&disk, 3);
        loads.into_iter().for_each(Load::stop);
    }
}

#[test]
fn a_worker_that_leaves_hands_over_the_only_connection() {
    // Its messages are read with the next request. Otherwise it has not seen its connection yet.
    for seen in [true, false] {
        let server = Server::new(OFFER);
        let disk = open(&server, 60);
        let mut rig = Rig::new(&disk);
        let handle = rig.disk.attach(&mut rig.uring);
        rig.ask();
        have_own(&disk, 1);
        if seen {
            rig.run(Op::Read, 0, 512, false, 0).unwrap();
        }
        server.doors.locked().gives = 1;
        server.end(1);
        soon(|| !rig.info().shared);
        handle.detach(&mut rig.uring);
        drop(rig.uring);
        soon(|| disk.connections().unwrap().shared);
        soon(|| server.doors.locked().given.keys().eq(&[2]));
        let mut rig = Rig::new(&disk);
        rig.run(Op::Read, 0, 512, false, 0).unwrap();
    }
}

/// A server may count connections for ever, so none is ended that another worker wants.
#[test]
fn a_worker_that_leaves_gives_its_connection_to_another_one() {
    let server = Server::new(OFFER);
    server.doors.locked().gives = 2;
    let disk = open(&server, 0);
    let (mut first, mut second) = (Rig::new(&disk), Rig::new(&disk));
    let handles = [first.disk.attach(&mut first.uring), second.disk.attach(&mut second.uring)];
    first.ask();
    have_own(&disk, 1);
    first.run(Op::Read, 0, 512, false, 0).unwrap();
    second.ask();
    soon(|| second.info().refused.is_some());
    let [leaves, stays] = handles;
    leaves.detach(&mut first.uring);
    drop(first.uring);
    assert_eq!((second.info().own, second.info().refused.clone()), (1, None));
    second.run(Op::Read, 0, 512, false, 0).unwrap();
    assert!(server.doors.locked().given.keys().eq(&[1, 2]));
    stays.detach(&mut second.uring);
}

/// Each time, the worker gets its connection back, because the shared one is there, or keeps it.
#[test]
fn a_connection_that_is_handed_over_again_and_again_loses_nothing() {
    let server = Server::new(OFFER);
    server.doors.locked().gives = 2;
    let disk = open(&server, 0);
    let loads = loads(&disk, 1);
    have_own(&disk, 1);
    let connector = connector(&disk);
    for round in 0..500 {
        have_own(&disk, 1);
        let mut asked = connector.lock();
        asked.ask_a_worker();
        if round % 3 == 0 {
            asked.keep_all();
        }
        drop(asked);
        if round % 20 == 0 {
            loads.iter().for_each(Load::works);
        }
    }
    loads.iter().for_each(Load::works);
    assert!(server.doors.locked().given.keys().eq(&[1, 2]));
    loads.into_iter().for_each(Load::stop);
}

fn connector(disk: &Arc<Disk>) -> Arc<Connector> {
    match &disk.backend() {
        Backend::Nbd(nbd) => nbd.shared.connector.clone(),
        _ => panic!("the disk is on a server"),
    }
}

/// The server may be another one by the time the shared connection sends it.
#[test]
fn without_a_delay_unsent_requests_of_a_lost_connection_fail() {
    for (delay_s, result) in [(0, -libc::EIO), (60, 0)] {
        let server = Server::new(OFFER);
        let disk = open(&server, delay_s);
        let (mut rig, handle) = Rig::with_own(&disk);
        // The server reads nothing behind the first request, and the second one fills the socket.
        // So the third one is not sent.
        server.notes.locked().holds = Some(0);
        let bufs = [512, 1 << 20, 512].map(|len| (AlignedBuf::new(len).unwrap(), len));
        let mut ios = [Io::default(), Io::default(), Io::default()];
        for (i, io) in ios.iter_mut().enumerate() {
            let (op, slot) = (if i == 0 { Op::Read } else { Op::Write }, i as u16);
            io.reset(op, 0, false);
            // SAFETY: the buffers have these lengths, and live until all requests are complete.
            unsafe { io.push(bufs[i].0.ptr(), bufs[i].1) };
            let token = Token { index: 0, generation: 0, slot, op: 0 };
            assert!(matches!(handle.start(&mut rig.uring, io, token), Step::Wait));
            // It is sent, as far as the socket takes it, before the next one is started.
            rig.uring.send().unwrap();
        }
        server.end(2);
        server.notes.locked().holds = None;
        // Requests of a client keep no ring busy, so this poll does, until all have ended.
        let ended = EventFd::make().unwrap();
        rig.uring.poll_once(ended.fd(), Token { index: 0, generation: 0, slot: 3, op: 0 });
        let mut results = BTreeMap::new();
        let take = |_: &mut Uring, token: Token, res| {
            results.insert(token.slot, res);
            if results.len() == 3 {
                ended.signal();
            }
        };
        rig.uring.run_until_idle(take).unwrap();
        results.remove(&3);
        assert_eq!(results, BTreeMap::from([(0, result), (1, result), (2, result)]));
        handle.detach(&mut rig.uring);
    }
}

/// Without `reconnect-delay`, while the server is away.
#[test]
fn first_requests_of_a_worker_let_no_other_one_wait() {
    let server = Server::new(OFFER);
    let disk = open(&server, 0);
    let mut rig = Rig::new(&disk);
    let handle = rig.disk.attach(&mut rig.uring);
    rig.run_with(&handle, Op::Read, 512).unwrap();
    let [there, away] = ["s", "away"].map(|name| server.dir.path().join(name));
    std::fs::rename(&there, &away).unwrap();
    server.end(1);
    soon(|| !disk.connections().unwrap().shared);
    assert_eq!(rig.run_with(&handle, Op::Read, 512), Err(libc::EIO));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Rig::new(&disk).run(Op::Read, 0, 512, false, 0).map(drop));
        let connector = connector(&disk);
        soon(|| connector.lock().common.as_ref().is_some_and(|ask| ask.until.is_some()));
        let start = Instant::now();
        assert_eq!(rig.run_with(&handle, Op::Read, 512), Err(libc::EIO));
        assert!(start.elapsed() < Duration::from_secs(5), "it waited for {:?}", start.elapsed());
        assert!(!first.is_finished());
        std::fs::rename(&away, &there).unwrap();
        first.join().unwrap().unwrap();
    });
    rig.run_with(&handle, Op::Read, 512).unwrap();
    handle.detach(&mut rig.uring);
}

/// Servers may end connections for a while, also those on which they never answered.
#[test]
fn first_requests_outlive_several_connections() {
    let server = Server::new(Offer { ends_after: 1, ends: (1, 3), ..OFFER });
    let disk = open(&server, 0);
    Rig::new(&disk).run(Op::Write, 0, 512, false, 3).unwrap();
    assert_eq!(server.notes.locked().connections, 4);
}

/// While a request is in flight on its own connection. `reconnect-delay=0` lets it fail, as the
/// loss of an only connection does.
#[test]
fn what_was_in_flight_goes_by_the_shared_connection() {
    for (delay_s, result) in [(0, Err(libc::EIO)), (60, Ok(()))] {
        let server = Server::new(OFFER);
        server.doors.locked().gives = 2;
        let disk = open(&server, delay_s);
        let (mut rig, handle) = Rig::with_own(&disk);
        server.asked();
        server.doors.locked().gives = 1;
        let (hangs, is_hanging) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (server, disk) = (&server, &disk);
            scope.spawn(move || {
                // While it is held, the server answers nothing.
                let held = server.notes.locked();
                hangs.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                server.end(2);
                soon(|| disk.connections().unwrap().own == 0);
                drop(held);
            });
            is_hanging.recv().unwrap();
            assert_eq!(rig.run_with(&handle, Op::Write, 512), result);
        });
        assert!(rig.info().shared);
        rig.run(Op::Write, 512, 512, false, 4).unwrap();
        assert_eq!(rig.run(Op::Read, 512, 512, false, 0).unwrap(), vec![4; 512]);
        handle.detach(&mut rig.uring);
    }
}

#[test]
fn a_further_connection_to_another_disk_is_not_used() {
    let server = Server::new(Offer { shrinks_at: 2, ..OFFER });
    let disk = open(&server, 0);
    let loads = loads(&disk, 2);
    soon(|| disk.connections().unwrap().refused.is_some());
    loads.iter().for_each(Load::works);
    let info = disk.connections().unwrap();
    assert!(info.refused.as_ref().unwrap().contains("bytes now and had"), "{info:?}");
    assert_eq!((info.own, info.sharing), (0, 2));
    loads.into_iter().for_each(Load::stop);
}

/// It takes connections and ends them with their first request, except the first two.
#[test]
fn a_worker_replaces_shared_connections_of_no_use() {
    let server = Server::new(Offer { ends_after: 1, ends: (3, u32::MAX), ..OFFER });
    let disk = open(&server, 60);
    let mut loads = loads(&disk, 1);
    have_own(&disk, 1);
    loads.push(Load::start(&disk, 1));
    loads.iter().for_each(Load::works);
    let before = server.notes.locked().connections;
    let start = Instant::now();
    server.end(1);
    loads.iter().for_each(Load::works);
    soon(|| server.doors.locked().given.contains_key(&2) && disk.connections().unwrap().own == 0);
    // Workers still ask for their own.
    loads.iter().for_each(Load::works);
    let (made, time) = (server.notes.locked().connections - before, start.elapsed());
    assert!(u64::from(made) <= 6 + 2 * time.as_secs(), "{made} connections in {time:?}");
    loads.into_iter().for_each(Load::stop);
}

/// A server that takes further connections and ends each with its first request. The shared one is
/// there all the time, so that no request fails, even without `reconnect-delay`.
#[test]
fn further_connections_of_no_use_fail_no_request() {
    let server = Server::new(Offer { ends_after: 1, ends: (2, u32::MAX), ..OFFER });
    let disk = open(&server, 0);
    let loads = loads(&disk, 2);
    soon(|| server.notes.locked().connections > 4);
    loads.iter().for_each(Load::works);
    assert!(disk.connections().unwrap().shared);
    loads.into_iter().for_each(Load::stop);
}

/// A server that ends each further connection with its first request.
#[test]
fn connections_of_no_use_are_not_made_again_and_again() {
    let server = Server::new(Offer { ends_after: 1, ends: (2, u32::MAX), ..OFFER });
    let disk = open(&server, 60);
    let start = Instant::now();
    let loads = loads(&disk, 2);
    soon(|| server.notes.locked().connections > 2);
    loads.iter().for_each(Load::works);
    let (made, time) = (server.notes.locked().connections - 1, start.elapsed());
    // Each worker gets one, and then waits for a second.
    assert!(u64::from(made) <= 2 * (time.as_secs() + 1), "{made} connections in {time:?}");
    // It says nothing while there may be another one.
    let why = || disk.connections().unwrap().refused.unwrap_or_default();
    soon(|| why().contains("ended before it was of use"));
    loads.into_iter().for_each(Load::stop);
}

#[test]
fn a_try_is_interrupted() {
    let server = Server::new(Offer { manner: Manner::Silence, ..OFFER });
    server.doors.locked().gives = 0;
    let place = Place::Unix(server.dir.path().join("s"));
    let target = Target { export: "x".into(), place, tls: None };
    let interrupt = EventFd::make().unwrap();
    let limit = Limit { until: Instant::now() + Duration::from_secs(300), interrupt: &interrupt };
    std::thread::scope(|scope| {
        let tries = scope.spawn(|| target.connect(limit).err().unwrap());
        soon(|| !server.doors.locked().silent.is_empty());
        interrupt.signal();
        tries.join().unwrap();
    });
    assert!(Instant::now() < limit.until);
    // The client has closed it.
    let mut left = server.doors.locked().silent.pop().unwrap();
    assert_eq!(left.read(&mut [0]).unwrap(), 0);
}

/// The removal of the disk interrupts the try that hangs.
#[test]
fn a_disk_is_removed_while_a_further_connection_hangs() {
    let server = Server::new(Offer { manner: Manner::Silence, ..OFFER });
    server.doors.locked().gives = 1;
    let mut rig = server.open();
    let handle = rig.disk.attach(&mut rig.uring);
    rig.ask();
    soon(|| !server.doors.locked().silent.is_empty());
    handle.detach(&mut rig.uring);
    drop(rig);
    let mut left = server.doors.locked().silent.pop().unwrap();
    assert_eq!(left.read(&mut [0]).unwrap(), 0);
    soon(|| server.doors.locked().given.is_empty());
}

/// A server whose first connection is its only one, and which begins no command of one type.
fn stuck(manner: Manner, holds: u16, delay_s: u32) -> (Server, Arc<Disk>) {
    let server = Server::new(Offer { manner, ..OFFER });
    let disk = open(&server, delay_s);
    server.doors.locked().gives = 1;
    server.notes.locked().holds = Some(holds);
    (server, disk)
}

/// Lets it go on after longer than a sign of life may take. Until then a flush waits.
fn is_waited_for(server: &Server, disk: &Disk) {
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| disk.sync());
        std::thread::sleep(TRY + Duration::from_secs(1));
        assert!(!flush.is_finished());
        server.notes.locked().holds = None;
        flush.join().unwrap().unwrap();
    });
}

/// The flush fails. Later the server answers again.
fn is_given_up(server: &Server, disk: &Disk) {
    assert_eq!(disk.sync().unwrap_err().kind(), io::ErrorKind::TimedOut);
    server.notes.locked().holds = None;
    disk.sync().unwrap();
}

/// It takes no new connection, and the shared one answers nothing. The delay is for lost
/// connections.
#[test]
fn a_flush_of_a_server_that_hangs_ends() {
    let (server, disk) = stuck(Manner::Silence, 0, 3600);
    is_given_up(&server, &disk);
    assert!(!server.doors.locked().silent.is_empty());
}

/// It closes a new connection, so it lives.
#[test]
fn a_flush_of_a_slow_server_is_waited_for() {
    let (server, disk) = stuck(Manner::Close, 0, 0);
    is_waited_for(&server, &disk);
    assert!(server.notes.locked().connections >= 2);
}

/// It gives no other connection, and executes nothing behind a flush: it looks as if it hung. But
/// it has answered just before.
#[test]
fn a_flush_that_takes_long_is_waited_for_with_all_connections_in_use() {
    let (server, disk) = stuck(Manner::Silence, 3, 0);
    is_waited_for(&server, &disk);
}

/// It answers before the flush, and then nothing more.
#[test]
fn a_flush_of_a_server_that_hangs_meanwhile_ends() {
    let (server, disk) = stuck(Manner::Silence, 3, 0);
    is_given_up(&server, &disk);
}
