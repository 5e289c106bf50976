use std::io::BufRead;
use std::os::unix::net::UnixListener;
use std::thread;

use super::*;

const SHORT: Limits = Limits {
    greeting: Duration::from_millis(300),
    answer: Duration::from_millis(300),
    line: 1 << 20,
    events: 100,
};
/// Limit for answers that do come: on a busy machine they may come late.
const PATIENCE: Duration = Duration::from_secs(60);
const PATIENT: Limits = Limits { greeting: PATIENCE, answer: PATIENCE, ..SHORT };
const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
const DONE: &[u8] = b"{\"return\": {}}\n";

/// Starts a daemon that greets clients and agrees with the first one, and then does something else.
/// Returns the result of a command that is sent to it with these limits.
fn with_limits(
    limits: Limits,
    command: &str,
    then: impl FnOnce(&UnixListener, UnixStream) + Send + 'static,
) -> ClientError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(GREETING).unwrap();
        io::BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
        stream.write_all(DONE).unwrap();
        then(&listener, stream);
    });
    let mut client = Client::start(connected(&path, PATIENT).unwrap(), &path, PATIENT).unwrap();
    client.limits = limits;
    let e = client.execute(command, Map::new()).unwrap_err();
    drop(client);
    daemon.join().unwrap();
    e
}

fn with(command: &str, then: impl FnOnce(&UnixListener, UnixStream) + Send + 'static) -> ClientError {
    with_limits(SHORT, command, then)
}

/// Waits until the client has ended.
fn until_end(mut stream: &UnixStream) {
    let _ = io::copy(&mut stream, &mut io::sink());
}

#[test]
fn a_question_is_not_waited_for_without_limit() {
    let e = with("query-disks", |_, stream| until_end(&stream));
    assert!(matches!(e, ClientError::Unreachable { .. }), "{e}");
    let said = e.to_string();
    assert!(said.contains("/s: no answer to query-disks came for 0.3 s; is its daemon stopped"), "{said}");
    // A few bytes are no answer.
    let e = with("query-disks", |_, mut stream| {
        while stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(10));
        }
    });
    assert!(e.to_string().contains("no answer to query-disks"), "{e}");
}

#[test]
fn a_long_command_is_waited_for_while_the_daemon_greets_others() {
    let greeted = Limits { greeting: PATIENCE, ..SHORT };
    let e = with_limits(greeted, "queue-attach", |listener, mut stream| {
        // Three times of waiting, in each of which the client looks.
        for _ in 0..3 {
            listener.accept().unwrap().0.write_all(GREETING).unwrap();
        }
        stream.write_all(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"busy\"}}\n").unwrap();
    });
    assert!(matches!(&e, ClientError::Refused { desc, .. } if desc == "busy"), "{e}");
    let e = with("queue-attach", |_, stream| until_end(&stream));
    assert!(e.to_string().contains("no greeting came for 0.3 s"), "{e}");
}

#[test]
fn a_line_without_end_does_not_fill_the_memory() {
    let sends = |mut stream: UnixStream| while stream.write_all(&[b'x'; 4096]).is_ok() {};
    let e = with_limits(PATIENT, "query-disks", move |_, stream| sends(stream));
    assert!(e.to_string().contains("/s sent a line of more than 1048576 bytes"), "{e}");
}

#[test]
fn events_without_end_do_not_fill_the_memory() {
    let sends = |mut stream: UnixStream| while stream.write_all(b"{\"event\": \"A\"}\n").is_ok() {};
    let e = with_limits(PATIENT, "quit", move |_, stream| sends(stream));
    assert!(e.to_string().contains("/s sent 100 events and no answer to quit"), "{e}");
}

#[test]
fn a_daemon_that_accepts_or_greets_nobody_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let e = Client::start(connected(&path, SHORT).unwrap(), &path, SHORT).unwrap_err();
    assert!(e.to_string().contains("no greeting came for 0.3 s; is its daemon stopped"), "{e}");
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting: Vec<_> = (0..2).map_while(|_| connected(&path, SHORT).ok()).collect();
    let e = connected(&path, SHORT).unwrap_err();
    assert!(e.to_string().contains("it accepted no client for 0.3 s"), "{e}");
}

#[test]
fn lines_come_whole_in_whatever_pieces_they_are_sent() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut client = Client::new(ours, Path::new("s"), SHORT);
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    theirs.write_all(b"{\"a\":1}\r\n{\"b\"").unwrap();
    assert_eq!(client.read(None).unwrap(), Some(json!({ "a": 1 })));
    assert_eq!(client.read(soon()).unwrap(), None);
    theirs.write_all(b":2}\n{}\n").unwrap();
    assert_eq!(client.read(None).unwrap(), Some(json!({ "b": 2 })));
    assert_eq!(client.read(None).unwrap(), Some(json!({})));
    assert!(!client.wait_closed(Duration::from_millis(20)));
}
