use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::mpsc::channel;

use serde_json::Map;
use vshunt_daemon::{Daemon, Options};

use super::*;
use crate::cli::client::{Client as QmpClient, ClientError};
use crate::qmp::context::Stop;
use crate::qmp::events;

struct Rig {
    _dir: tempfile::TempDir,
    path: PathBuf,
    server: Server,
    daemon: Arc<Daemon>,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c");
    let daemon = Daemon::new(Options { poll_us: 0 }).unwrap();
    let context = Context {
        daemon: Arc::clone(&daemon),
        stop: channel().0,
        fdsets: Arc::default(),
        startup: Arc::default(),
    };
    let server = Server::new(context).unwrap();
    let events = server.clone();
    daemon.on_event(Box::new(move |e| events.broadcast(events::line(e))));
    server.listen(UnixListener::bind(&path).unwrap()).unwrap();
    Rig { _dir: dir, path, server, daemon }
}

/// A client that sends and receives bytes.
struct Raw(BufReader<UnixStream>);

impl Raw {
    fn connect(rig: &Rig) -> Self {
        let stream = UnixStream::connect(&rig.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut raw = Self(BufReader::new(stream));
        assert!(raw.read().get("QMP").is_some());
        raw
    }

    fn send(&self, text: &str) {
        self.0.get_ref().write_all(text.as_bytes()).unwrap();
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.ends_with("\r\n"), "{line:?}");
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, text: &str) -> Value {
        self.send(text);
        self.read()
    }
}

fn class(answer: &Value) -> &str {
    answer["error"]["class"].as_str().unwrap()
}

#[test]
fn the_greeting_and_negotiation() {
    let rig = rig();
    let mut raw = Raw(BufReader::new(UnixStream::connect(&rig.path).unwrap()));
    let greeting = raw.read();
    assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64());
    assert!(greeting["QMP"]["version"]["package"].as_str().unwrap().starts_with("vshunt "));
    assert_eq!(greeting["QMP"]["capabilities"], json!([]));
    let early = raw.ask("{\"execute\": \"query-version\", \"id\": 1}");
    assert_eq!((class(&early), &early["id"]), ("CommandNotFound", &json!(1)));
    let oob = raw.ask("{'execute': 'qmp_capabilities', 'arguments': {'enable': ['oob']}}");
    assert_eq!(class(&oob), "GenericError");
    let extra = raw.ask("{'execute': 'qmp_capabilities', 'arguments': {'x': 1}}");
    assert_eq!(class(&extra), "GenericError");
    assert_eq!(
        raw.ask("{'execute': 'qmp_capabilities', 'arguments': {'enable': []}}"),
        json!({ "return": {} })
    );
    assert_eq!(class(&raw.ask("{'execute': 'qmp_capabilities'}")), "CommandNotFound");
    assert_eq!(raw.ask("{'execute': 'query-version'}")["return"], greeting["QMP"]["version"]);
}

#[test]
fn pieces_several_at_once_and_rubbish() {
    let rig = rig();
    let mut raw = Raw::connect(&rig);
    let request = "{\"execute\": \"qmp_capabilities\", \"id\": {\"a\": [1]}}";
    for at in 0..request.len() {
        raw.send(&request[at..=at]);
    }
    assert_eq!(raw.read(), json!({ "return": {}, "id": { "a": [1] } }));
    raw.send(
        "{'execute': 'query-disks', 'id': 1}{'execute': 'nope', 'id': 2}\nrubbish\n{'execute': }[]{'id': 3}",
    );
    assert_eq!(raw.read(), json!({ "return": [], "id": 1 }));
    let answer = raw.read();
    assert_eq!((class(&answer), &answer["id"]), ("CommandNotFound", &json!(2)));
    for _ in 0..3 {
        let answer = raw.read();
        assert_eq!((class(&answer), answer.get("id")), ("GenericError", None));
    }
    assert_eq!(raw.read()["id"], 3);
    assert_eq!(raw.ask("{'execute': 'query-disks', 'id': 4}")["id"], 4);
}

#[test]
fn events_go_to_those_who_negotiated() {
    let rig = rig();
    let mut silent = Raw::connect(&rig);
    let mut a = QmpClient::connect(&rig.path).unwrap();
    let mut b = QmpClient::connect(&rig.path).unwrap();
    let made = a.execute("worker-new", Map::new()).unwrap();
    for client in [&mut a, &mut b] {
        let event = client.event().unwrap();
        assert_eq!((&event["event"], &event["data"]), (&json!("WORKER_CREATED"), &made));
        assert!(event["timestamp"]["microseconds"].is_u64());
    }
    assert!(silent.ask("{'execute': 'qmp_capabilities'}").get("return").is_some());
}

/// Waits until the server has so many clients.
fn await_clients(rig: &Rig, count: usize) {
    let start = Instant::now();
    while rig.server.shared.lock().map.len() != count {
        assert!(start.elapsed() < Duration::from_secs(60), "{} clients", rig.server.shared.lock().map.len());
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sends bytes until the server has stopped to read.
fn fill(raw: &Raw, text: &str) {
    raw.0.get_ref().set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    while raw.0.get_ref().write_all(text.repeat(100).as_bytes()).is_ok() {}
}

/// Returns the bytes of answers that wait for each client.
fn unread(rig: &Rig) -> Vec<usize> {
    rig.server.shared.lock().map.values().map(|client| client.outbox.answer_bytes()).collect()
}

/// A client that cannot negotiate because there are too many. Returns what it was told.
fn too_many(rig: &Rig) -> String {
    match QmpClient::connect(&rig.path) {
        Err(ClientError::Refused { desc, .. }) => desc,
        other => panic!("{other:?}"),
    }
}

/// Connects as soon as the server has room. Clients that did nothing have to leave within a second.
fn connect_soon(rig: &Rig) -> QmpClient {
    let start = Instant::now();
    loop {
        match QmpClient::connect(&rig.path) {
            Ok(client) => return client,
            Err(e) => assert!(start.elapsed() < Duration::from_secs(60), "{e}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn who_does_not_read_is_dropped_and_holds_up_nobody() {
    let rig = rig();
    let mut deaf = Raw::connect(&rig);
    deaf.ask("{'execute': 'qmp_capabilities'}");
    let mut well = QmpClient::connect(&rig.path).unwrap();
    let start = Instant::now();
    // Twice as many as may wait. `well` reads its own meanwhile.
    let event = message::event("X", json!({ "pad": "x".repeat(2000) }));
    for _ in 0..2 * outbox::EVENT_BYTES_MAX / event.len() {
        rig.server.broadcast(event.clone());
        well.event().unwrap();
    }
    well.execute("query-disks", Map::new()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
    await_clients(&rig, 1);
}

#[test]
fn a_client_that_pauses_loses_no_event() {
    let rig = rig();
    let mut slow = QmpClient::connect(&rig.path).unwrap();
    let event = message::event("X", json!({}));
    // Many more than a socket holds.
    for _ in 0..20_000 {
        rig.server.broadcast(event.clone());
    }
    for _ in 0..20_000 {
        slow.event().unwrap();
    }
    slow.execute("query-disks", Map::new()).unwrap();
}

#[test]
fn unread_answers_have_a_bound() {
    let rig = rig();
    let deaf = Raw::connect(&rig);
    deaf.send("{'execute': 'qmp_capabilities'}");
    fill(&deaf, "{'execute': 'query-commands'}");
    let answer = QmpClient::connect(&rig.path).unwrap().execute("query-commands", Map::new()).unwrap();
    await_clients(&rig, 1);
    let (most, bytes) = (outbox::ANSWER_BYTES_MAX + 2 * answer.to_string().len(), unread(&rig));
    assert!((outbox::ANSWER_BYTES_MAX..most).contains(&bytes[0]), "{bytes:?}");
    // It continues where it was once it reads.
    let mut deaf = deaf;
    for _ in 0..1000 {
        deaf.read();
    }
}

#[test]
fn a_client_counts_until_its_answers_are_read() {
    let rig = rig();
    let deaf: Vec<_> = (0..CLIENTS_MAX)
        .map(|_| {
            let raw = Raw::connect(&rig);
            raw.send("{'execute': 'qmp_capabilities'}");
            raw.send(&"{'execute': 'query-commands'}".repeat(200));
            raw.0.get_ref().shutdown(Shutdown::Write).unwrap();
            raw
        })
        .collect();
    // They do not lock out others, and none is there once it has been replaced.
    let mut others: Vec<_> = (0..CLIENTS_MAX).map(|_| connect_soon(&rig)).collect();
    assert!(others.iter_mut().all(|client| client.execute("query-disks", Map::new()).is_ok()));
    assert_eq!(rig.server.shared.lock().map.len(), CLIENTS_MAX);
    assert!(too_many(&rig).contains("too many"));
    for mut raw in deaf {
        let mut rest = Vec::new();
        let _ = raw.0.read_to_end(&mut rest);
        let answers = rest.iter().filter(|byte| **byte == b'\n').count();
        assert!(answers < 200, "{answers} answers: it was still connected");
    }
}

#[test]
fn a_flood_of_requests_waits_for_its_own_reader_only() {
    let rig = rig();
    let deaf = Raw::connect(&rig);
    deaf.send("{'execute': 'qmp_capabilities'}");
    fill(&deaf, "{'execute': 'query-commands'}");
    let mut well = QmpClient::connect(&rig.path).unwrap();
    well.execute("query-disks", Map::new()).unwrap();
    let start = Instant::now();
    rig.server.stop();
    assert!(start.elapsed() < 60 * FLUSH_TIME);
}

#[test]
fn the_last_words_arrive_and_then_the_end() {
    let rig = rig();
    let mut client = QmpClient::connect(&rig.path).unwrap();
    rig.server.broadcast(events::shutdown_line(Stop::Quit));
    rig.server.stop();
    assert_eq!(client.event().unwrap()["event"], "SHUTDOWN");
    assert!(matches!(client.event(), Err(ClientError::Broken(_))));
    assert!(rig.daemon.workers().len() == 1);
}

#[test]
fn one_client_too_many_is_told() {
    let rig = rig();
    let many: Vec<_> = (0..CLIENTS_MAX).map(|_| QmpClient::connect(&rig.path).unwrap()).collect();
    assert!(too_many(&rig).contains("too many"));
    drop(many);
    connect_soon(&rig);
}

#[test]
fn clients_that_do_nothing_make_room_and_those_that_wait_stay() {
    let rig = rig();
    let mut waiting = QmpClient::connect(&rig.path).unwrap();
    let mut half = Raw::connect(&rig);
    half.ask("{'execute': 'qmp_capabilities'}");
    half.send("{\"execute\": \"query-di");
    let mut others: Vec<_> = (2..CLIENTS_MAX).map(|_| Raw::connect(&rig)).collect();
    // Each new one replaces one of them, which is told why.
    let clients: Vec<_> = (1..CLIENTS_MAX).map(|_| connect_soon(&rig)).collect();
    let told = half.read();
    assert!(told["error"]["desc"].as_str().unwrap().contains("whole commands"), "{told}");
    assert!(others.iter_mut().all(|silent| class(&silent.read()) == "GenericError"));
    assert_eq!(clients.len(), CLIENTS_MAX - 1);
    assert!(too_many(&rig).contains("too many"));
    rig.server.broadcast(message::event("X", json!({})));
    assert_eq!(waiting.event().unwrap()["event"], "X");
    waiting.execute("query-disks", Map::new()).unwrap();
}

mod passed;
