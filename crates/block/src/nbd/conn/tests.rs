//! Outcomes of a cancelled read, and connections that no worker needs.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use vshunt_engine::Token;

use super::*;
use crate::backend::Backend;
use crate::nbd::tests::{OFFER, Rig, Server};

/// A connection to a server that the test plays, beside the disk's own shared connection.
struct Bench {
    uring: Uring,
    id: ClientId,
    shared: Arc<Shared>,
    /// The end of the server.
    peer: UnixStream,
    _rig: Rig,
    _server: Server,
}

fn connected(shared: &Shared) -> (Connected, UnixStream) {
    let (socket, peer) = UnixStream::pair().unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (Connected { socket: socket.into(), settings: shared.settings, replied: true, ended: None }, peer)
}

impl Bench {
    /// `state`: that of a worker, or of a shared connection, before it has its socket.
    fn new(state: State) -> Self {
        let server = Server::new(OFFER);
        let rig = server.open();
        let Backend::Nbd(nbd) = rig.disk.backend() else { panic!("the disk is on a server") };
        let shared = nbd.shared.clone();
        let mut uring = Uring::new().unwrap();
        let port = Arc::new(Port::new().unwrap());
        if state == State::Sharing {
            shared.connector.join();
        }
        let id = uring.add_client(Box::new(Conn::new(&shared, Some(port), state)));
        uring.submit_client(id);
        let (connection, peer) = connected(&shared);
        uring.with_client(id, |conn: &mut Conn, uring| conn.up(uring, id, connection));
        uring.send().unwrap();
        Self { uring, id, shared, peer, _rig: rig, _server: server }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Conn, &mut Uring, ClientId) -> T) -> T {
        let id = self.id;
        self.uring.with_client(id, |conn: &mut Conn, uring| f(conn, uring, id))
    }

    /// Serves the ring until something is so.
    fn until(&mut self, is: impl Fn(&Conn) -> bool) {
        let (end, id) = (Instant::now() + Duration::from_secs(60), self.id);
        while !self.with(|conn, _, _| is(conn)) {
            assert!(Instant::now() < end, "not within 60 s");
            // A wake-up for each look.
            self.uring.done(Token { index: 0, generation: 0, slot: 0, op: 0 }, 0);
            self.uring.next_result().unwrap();
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!(id, self.id);
        }
    }
}

/// The disk has its shared connection, so the worker gets its own back.
fn is_back(conn: &Conn) -> bool {
    conn.state == State::Up && conn.reader.busy && !conn.reader.stops
}

#[test]
fn a_read_that_was_cancelled_in_vain_is_cancelled_again() {
    for result in [-libc::ENOENT, -libc::EALREADY] {
        let mut bench = Bench::new(State::Sharing);
        bench.with(|conn, uring, id| {
            conn.state = State::HandingOver;
            // As if a cancel had found the read at work, and the read had found nothing.
            conn.reader.stops = true;
            conn.complete(uring, id, OP_CANCEL, result, false);
            assert!(conn.reader.busy && conn.state == State::HandingOver);
        });
        bench.until(is_back);
    }
}

#[test]
fn a_read_that_ends_without_bytes_is_not_the_end_of_the_connection() {
    for result in [-libc::ECANCELED, -libc::EINTR, -libc::EAGAIN] {
        for state in [State::HandingOver, State::Up] {
            let mut bench = Bench::new(State::Sharing);
            // The real one ends first.
            bench.with(|conn, uring, id| {
                conn.state = State::Draining;
                uring.cancel_for_client(id, OP_RECEIVE);
                conn.sender.busy = true;
            });
            bench.until(|conn| !conn.reader.busy);
            bench.with(|conn, uring, id| {
                (conn.state, conn.sender.busy, conn.reader.busy) = (state, false, true);
                conn.reader.stops = state == State::HandingOver;
                conn.complete(uring, id, OP_RECEIVE, result, false);
            });
            bench.until(is_back);
        }
    }
}

/// Nothing was asked for, so bytes at that moment belong to no reply. They are not dropped: the
/// connection is not used any more.
#[test]
fn bytes_that_come_with_the_cancel_end_the_connection() {
    for bytes in [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9][..], &[0x67], &[]] {
        let mut bench = Bench::new(State::Sharing);
        match bytes {
            [] => bench.peer.shutdown(std::net::Shutdown::Write).unwrap(),
            bytes => bench.peer.write_all(bytes).unwrap(),
        }
        bench.with(|conn, uring, id| conn.begin_hand_over(uring, id));
        bench.until(|conn| conn.state == State::Sharing);
        // Reset, if bytes were left unread.
        let ended = bench.peer.read(&mut [0]);
        assert!(matches!(&ended, Ok(0)) || ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    }
}

/// The one that all share has ended, and its thread does not know that yet.
#[test]
fn a_connection_that_no_worker_needs_replaces_one_that_ends() {
    let mut bench = Bench::new(State::Waiting);
    let (spare, peer) = connected(&bench.shared);
    bench.peer.shutdown(std::net::Shutdown::Both).unwrap();
    bench.with(|conn, _, _| {
        assert_eq!(conn.state, State::Up);
        conn.take_spare(spare);
        assert!(conn.spare.is_some());
    });
    bench.until(|conn| conn.state == State::Up && conn.spare.is_none() && conn.reader.busy);
    peer.set_nonblocking(true).unwrap();
    assert_eq!((&peer).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_connection_that_nobody_needs_is_ended() {
    let mut bench = Bench::new(State::Waiting);
    let (spare, mut peer) = connected(&bench.shared);
    bench.with(|conn, _, _| conn.take_spare(spare));
    let mut said = Vec::new();
    peer.read_to_end(&mut said).unwrap();
    let mut header = [0; REQUEST_BYTES_MAX];
    let len = ::nbd::DISCONNECT.encode(bench.shared.settings.headers, &mut header);
    assert_eq!(said, &header[..len]);
}

/// The shared connection may be lost at that time, and would fail it.
#[test]
fn a_request_that_comes_during_the_hand_over_is_passed_on_behind_the_connection() {
    let mut bench = Bench::new(State::Sharing);
    let shared = bench.shared.clone();
    bench.with(|conn, uring, id| {
        conn.begin_hand_over(uring, id);
        let mut io = crate::Io::default();
        io.reset(crate::Op::Flush, 0, false);
        let token = Token { index: 0, generation: 0, slot: 7, op: 0 };
        conn.start(uring, id, shared.begin(&mut io, Dest::Here(token)));
        assert_eq!((conn.state, conn.waiting.len()), (State::HandingOver, 1));
        // Not before the connection was given away: nothing keeps the ring busy yet.
        assert_eq!(uring.pending(), 0);
    });
    bench.until(is_back);
    let mut results = Vec::new();
    bench.uring.run_until_idle(|_, token, res| results.push((token.slot, res))).unwrap();
    assert!(results.is_empty() || results == [(7, 0)], "{results:?}");
    bench.with(|conn, _, _| assert_eq!((conn.waiting.len(), conn.table.len()), (0, 0)));
}
