//! Metrics as a scraper sees them: over HTTP, read strictly, while the daemon has other things to
//! do.

#[path = "../common/mod.rs"]
mod common;
mod openmetrics;
mod place;
mod truth;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::PATIENCE;
use openmetrics::Scrape;

pub(crate) const RAM: [&str; 2] = ["--disk", "name=d0,format=ram,size=16M"];

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text\r\n\r\n";

/// The body of an answer that went well and is whole.
fn ask(mut stream: impl Read + Write) -> String {
    stream.write_all(GET).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"),
        "{head}"
    );
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    body.to_owned()
}

fn scrape(socket: &Path) -> Scrape {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    openmetrics::parse(&ask(stream))
}
