use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Instant;

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

#[test]
fn who_does_not_read_is_dropped_and_holds_up_nobody() {
    let rig = rig();
    let mut deaf = Raw::connect(&rig);
    deaf.ask("{'execute': 'qmp_capabilities'}");
    let mut well = QmpClient::connect(&rig.path).unwrap();
    let start = Instant::now();
    // More messages than the queue and the socket buffers hold. `well` reads its own meanwhile.
    for n in 0..20 * OUT_QUEUE {
        rig.server.broadcast(message::event("X", json!({ "n": n, "pad": "x".repeat(200) })));
        well.event().unwrap();
    }
    well.execute("query-disks", Map::new()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(rig.server.shared.lock().map.len(), 1, "the deaf one is out");
}

#[test]
fn a_flood_of_requests_waits_for_its_own_reader_only() {
    let rig = rig();
    let deaf = Raw::connect(&rig);
    deaf.0.get_ref().set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    deaf.send("{'execute': 'qmp_capabilities'}");
    while deaf.0.get_ref().write_all("{'execute': 'query-commands'}".repeat(100).as_bytes()).is_ok() {}
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
    match QmpClient::connect(&rig.path) {
        Err(ClientError::Refused { desc, .. }) => assert!(desc.contains("too many"), "{desc}"),
        other => panic!("{other:?}"),
    }
    drop(many);
    let start = Instant::now();
    while QmpClient::connect(&rig.path).is_err() {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(10));
    }
}

mod passed;
