use std::io::{IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

use super::super::{Address, Metrics};
use super::*;

/// The time limit of each step in these tests.
const PATIENCE: Duration = Duration::from_secs(60);

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

/// A server that answers with `bytes` bytes and counts the requests.
struct Rig {
    _dir: tempfile::TempDir,
    path: PathBuf,
    made: Arc<AtomicU32>,
    metrics: Metrics,
}

impl Rig {
    fn new(bytes: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let mut metrics = Metrics::bind(&Address::Unix(path.clone())).unwrap();
        let made = Arc::new(AtomicU32::new(0));
        let count = made.clone();
        let render = move || {
            count.fetch_add(1, Ordering::Relaxed);
            "x".repeat(bytes)
        };
        metrics.start_with(Box::new(render)).unwrap();
        Self { _dir: dir, path, made, metrics }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn ask(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        answer(&mut stream)
    }
}

fn answer(stream: &mut UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Reads an answer. For a client that sends for longer than the server reads: an error may end its
/// connection after the answer.
fn heard(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

/// Returns the length in the header of an answer and the length of the body.
fn lengths(answer: &str) -> (usize, usize) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let field = head.lines().find_map(|l| l.strip_prefix("Content-Length: ")).unwrap();
    (field.parse().unwrap(), body.len())
}

#[test]
fn each_request_has_its_answer() {
    let rig = Rig::new(100);
    let cases: [(&[u8], &str, (usize, usize)); 5] = [
        (GET, "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4;", (100, 100)),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", (100, 0)),
        (b"GET /nope HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found\r\n", (24, 24)),
        (b"PUT /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed\r\n", (32, 32)),
        (
            b"HEAD / HTTP/1.1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n",
            (62, 0),
        ),
    ];
    for (request, start, want) in cases {
        let answer = rig.ask(request);
        assert!(answer.starts_with(start), "{answer}");
        assert_eq!(lengths(&answer), want, "{answer}");
    }
    assert!(rig.ask(b"GET / HTTP/1.1\r\n\r\n").ends_with(" Metrics for Prometheus are at /metrics.\n"));
    assert!(rig.ask(b"PUT /metrics HTTP/1.1\r\n\r\n").contains("\r\nAllow: GET, HEAD\r\n"));
    assert_eq!(rig.made.load(Ordering::Relaxed), 2, "a refusal looks at nothing");
}

#[test]
fn a_request_may_come_in_pieces_and_with_more_behind_it() {
    let rig = Rig::new(10);
    let mut stream = rig.connect();
    for byte in GET {
        stream.write_all(&[*byte]).unwrap();
    }
    assert_eq!(lengths(&answer(&mut stream)), (10, 10));
    // Bytes after the request do not discard the answer.
    let long = [GET, &[b'z'; 300_000]].concat();
    let mut stream = rig.connect();
    let _ = stream.write_all(&long);
    assert_eq!(lengths(&heard(&mut stream)), (10, 10));
    // A client that shuts down its sending side at once.
    let mut stream = rig.connect();
    stream.write_all(GET).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(lengths(&answer(&mut stream)), (10, 10));
}

#[test]
fn an_endless_header_is_cut_off() {
    let rig = Rig::new(10);
    let mut stream = rig.connect();
    let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n");
    let mut written = 0;
    while stream.write_all(b"X-More: 0123456789\r\n").is_ok() {
        written += 1;
        assert!(written < 10_000_000, "nobody stops it");
    }
    assert!(heard(&mut stream).starts_with("HTTP/1.1 431 "));
    assert_eq!(lengths(&rig.ask(GET)), (10, 10));
}

#[test]
fn clients_that_do_nothing_hold_up_nobody() {
    let rig = Rig::new(10);
    let silent: Vec<UnixStream> = (0..200)
        .map(|i| {
            let mut stream = rig.connect();
            // Half of them start a request. Errors of closed connections are ignored.
            let _ = if i % 2 == 0 { stream.write_all(b"GET /me") } else { Ok(()) };
            stream
        })
        .collect();
    for _ in 0..10 {
        assert_eq!(lengths(&rig.ask(GET)), (10, 10));
    }
    // The first were closed. The last are still served.
    let mut silent = silent.into_iter();
    let first = silent.nth(1).unwrap();
    assert_eq!((&first).read(&mut [0]).unwrap(), 0);
    let mut last = silent.next_back().unwrap();
    last.write_all(GET).unwrap();
    assert_eq!(lengths(&answer(&mut last)), (10, 10));
}

#[test]
fn clients_that_do_not_read_hold_up_nobody() {
    let bytes = 16 << 20;
    let rig = Rig::new(bytes);
    let mut slow: Vec<UnixStream> = (0..CONNECTIONS_MAX - 1)
        .map(|_| {
            let mut stream = rig.connect();
            stream.write_all(GET).unwrap();
            stream
        })
        .collect();
    for _ in 0..4 {
        assert_eq!(lengths(&rig.ask(GET)), (bytes, bytes));
    }
    // One of them starts to read.
    assert_eq!(lengths(&answer(slow.last_mut().unwrap())), (bytes, bytes));
}

#[test]
fn the_end_waits_for_no_client() {
    let mut rig = Rig::new(16 << 20);
    let mut slow = rig.connect();
    slow.write_all(GET).unwrap();
    let silent = rig.connect();
    assert_eq!(lengths(&rig.ask(GET)).1, 16 << 20);
    let path = rig.path.clone();
    rig.metrics = Metrics::bind(&Address::Unix(path.with_extension("other"))).unwrap();
    assert!(!path.exists());
    assert_eq!((&silent).read(&mut [0]).unwrap(), 0);
}

/// Sends `bytes` with a descriptor.
fn pass(stream: &UnixStream, bytes: &[u8], fd: &impl AsFd) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

/// Descriptors are closed when the bytes with them are read, so that no client keeps its connection
/// open by passing its own end.
#[test]
fn descriptors_that_clients_pass_are_closed() {
    let render: Render = Box::new(String::new);
    for begin in [&b"GET /me"[..], b"GET /metrics HTTP/1.1\r\n\r\n"] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut connection = Connection::new(ours.into(), Instant::now());
        let mut page = Page { render: &render, text: None };
        pass(&theirs, begin, &theirs);
        pass(&theirs, b"x", &theirs);
        drop(theirs);
        // Answered connections have ended one iteration later.
        for _ in 0..4 {
            connection.proceed(&mut page);
        }
        assert!(matches!(connection.state, State::Over), "{begin:?}");
    }
}
