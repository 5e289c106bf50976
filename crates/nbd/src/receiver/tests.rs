//! Byte vectors of replies, whole and in pieces, right and wrong.

use super::*;
use crate::Covered;

/// Requests by cookie: the index.
#[derive(Clone, Default)]
struct Table(Vec<Request>);

#[derive(Clone, Debug, PartialEq)]
struct Request {
    wanted: Wanted,
    offset: u64,
    bytes: Vec<u8>,
    left: u64,
    covered: Covered,
    errno: i32,
    extent: Option<(u64, u64)>,
    done: bool,
}

impl Table {
    fn of(requests: &[(Wanted, u64, usize)]) -> Self {
        let request = |&(wanted, offset, len): &(Wanted, u64, usize)| Request {
            wanted,
            offset,
            bytes: vec![0xEE; len],
            left: len as u64,
            covered: Covered::default(),
            errno: 0,
            extent: None,
            done: false,
        };
        Self(requests.iter().map(request).collect())
    }
}

impl Requests for Table {
    fn find(&mut self, cookie: u64) -> Option<Expected> {
        let request = self.0.get(cookie as usize).filter(|r| !r.done)?;
        Some(Expected {
            slot: cookie as u32,
            wanted: request.wanted,
            offset: request.offset,
            len: request.bytes.len() as u64,
            left: request.left,
            failed: request.errno != 0,
        })
    }

    fn covers(&mut self, slot: u32, at: u64, len: u64) -> bool {
        self.0[slot as usize].covered.add(at, len)
    }

    fn data(&mut self, slot: u32, at: u64, bytes: &[u8]) {
        self.0[slot as usize].bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn zeroes(&mut self, slot: u32, at: u64, len: u64) {
        self.0[slot as usize].bytes[at as usize..][..len as usize].fill(0);
    }

    fn arrived(&mut self, slot: u32, len: u64) {
        self.0[slot as usize].left -= len;
    }

    fn status(&mut self, slot: u32, len: u64, flags: u64) {
        self.0[slot as usize].extent.get_or_insert((len, flags));
    }

    fn error(&mut self, slot: u32, errno: i32) {
        self.0[slot as usize].errno = errno;
    }

    fn done(&mut self, slot: u32) {
        assert!(!std::mem::replace(&mut self.0[slot as usize].done, true));
    }
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    [&[0x67, 0x44, 0x66, 0x98][..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

fn chunk(last: bool, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let head = [&[0x66, 0x8e, 0x33, 0xef][..], &u16::from(last).to_be_bytes(), &kind.to_be_bytes()].concat();
    [&head[..], &cookie.to_be_bytes(), &(body.len() as u32).to_be_bytes(), body].concat()
}

fn wide_chunk(last: bool, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let head = [&[0x6e, 0x8a, 0x27, 0x8c][..], &u16::from(last).to_be_bytes(), &kind.to_be_bytes()].concat();
    [&head[..], &cookie.to_be_bytes(), &[0; 8], &(body.len() as u64).to_be_bytes(), body].concat()
}

fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes()[..], bytes].concat()
}

fn hole(offset: u64, len: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat()
}

fn error(error: u32, message: &str) -> Vec<u8> {
    [&error.to_be_bytes()[..], &(message.len() as u16).to_be_bytes(), message.as_bytes()].concat()
}

/// Passes `bytes` in pieces of `piece` bytes, and those of data that follow straight to their place
/// if `direct`.
fn feed(
    headers: Headers,
    table: &mut Table,
    bytes: &[u8],
    piece: usize,
    direct: bool,
) -> Result<usize, Violation> {
    let mut receiver = Receiver::new(headers, Some(7));
    let mut waiting = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        if direct
            && waiting.is_empty()
            && let Some(Direct { slot, at, left }) = receiver.direct()
        {
            let len = (left as usize).min(rest.len()).min(piece);
            table.data(slot, at, &rest[..len]);
            receiver.received(len as u64, table);
            rest = &rest[len..];
            continue;
        }
        let (now, behind) = rest.split_at(piece.min(rest.len()));
        rest = behind;
        waiting.extend_from_slice(now);
        let used = receiver.take(&waiting, table)?;
        waiting.drain(..used);
        assert!(waiting.len() < crate::HEADER_BYTES_MAX);
    }
    Ok(waiting.len())
}

/// Checks that `bytes` lead to the same in pieces of any length.
fn accepted(headers: Headers, table: &Table, bytes: &[u8]) -> Table {
    let mut whole = table.clone();
    assert_eq!(feed(headers, &mut whole, bytes, bytes.len(), false), Ok(0));
    for piece in 1..bytes.len().min(90) {
        for direct in [false, true] {
            let mut other = table.clone();
            assert_eq!(feed(headers, &mut other, bytes, piece, direct), Ok(0), "{piece} {direct}");
            assert_eq!(other.0, whole.0, "{piece} {direct}");
        }
    }
    whole
}

fn refused(headers: Headers, table: &Table, bytes: &[u8], why: &str) {
    for piece in [bytes.len(), 1, 7] {
        for direct in [false, true] {
            let e = feed(headers, &mut table.clone(), bytes, piece, direct).unwrap_err();
            assert!(e.0.contains(why), "{e}");
        }
    }
}

use Wanted::{Data, Nothing, Status};

#[test]
fn simple_replies_come_in_any_order() {
    let table = Table::of(&[(Data, 100, 5), (Nothing, 0, 9), (Data, 0, 3), (Data, 7, 4)]);
    let bytes = [simple(0, 2), b"abc".to_vec(), simple(0, 1), simple(28, 3), simple(0, 0), b"12345".to_vec()];
    let after = accepted(Headers::Simple, &table, &bytes.concat()).0;
    assert!(after.iter().all(|r| r.done));
    assert_eq!((&after[0].bytes[..], &after[2].bytes[..]), (&b"12345"[..], &b"abc"[..]));
    assert_eq!(after[3].errno, 28);
}

#[test]
fn chunks_of_several_replies_mix() {
    let table = Table::of(&[(Data, 1000, 6), (Data, 0, 4), (Status, 0, 4096), (Nothing, 5, 5), (Data, 9, 2)]);
    let extents = [&7u32.to_be_bytes()[..], &512u32.to_be_bytes(), &3u32.to_be_bytes(), &[9; 16]].concat();
    for (make, headers) in
        [(chunk as fn(_, _, _, &_) -> _, Headers::Structured), (wide_chunk, Headers::Extended)]
    {
        let wide = headers == Headers::Extended;
        let status = match wide {
            false => make(true, 5, 2, &extents),
            true => {
                let extent = [&512u64.to_be_bytes()[..], &3u64.to_be_bytes(), &[9; 32]].concat();
                make(true, 6, 2, &[&[0, 0, 0, 7, 0, 0, 0, 3][..], &extent].concat())
            }
        };
        let bytes = [
            make(false, 1, 0, &data(1004, b"ef")),
            make(false, 1, 1, &data(0, b"w")),
            status,
            make(false, 2, 0, &hole(1000, 3)),
            make(true, 1, 1, &data(1, b"xyz")),
            make(false, 1, 0, &data(1003, b"d")),
            if wide { make(true, 0, 3, &[]) } else { simple(0, 3) },
            make(true, 0, 0, &[]),
            make(false, 0x8001, 4, &error(5, "no")),
            make(true, 0x8002, 4, &[error(28, "full"), vec![0; 8]].concat()),
        ];
        let after = accepted(headers, &table, &bytes.concat()).0;
        assert!(after.iter().all(|r| r.done));
        assert_eq!((&after[0].bytes[..], &after[1].bytes[..]), (&b"\0\0\0def"[..], &b"wxyz"[..]));
        assert_eq!((after[2].extent, after[4].errno), (Some((512, 3)), 28));
    }
}

#[test]
fn what_is_no_reply_to_a_request_is_a_violation() {
    let table = Table::of(&[(Data, 100, 8), (Nothing, 0, 8), (Status, 0, 8)]);
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        refused(headers, &table, &[0; 64], "magic");
    }
    refused(Headers::Simple, &table, &chunk(true, 0, 1, &[]), "magic");
    refused(Headers::Extended, &table, &simple(0, 1), "magic");
    refused(Headers::Simple, &table, &simple(0, 9), "no request");
    refused(Headers::Simple, &table, &[simple(0, 1), simple(0, 1)].concat(), "no request");
    refused(Headers::Structured, &table, &simple(0, 0), "another one");
    refused(Headers::Structured, &table, &simple(0, 2), "another one");
    let bad = |bytes: Vec<u8>, why: &str| refused(Headers::Structured, &table, &bytes, why);
    bad(chunk(false, 0, 1, &[]), "not the last");
    bad(chunk(true, 0, 1, &[0]), "type or length");
    bad(chunk(true, 3, 1, &[]), "type or length");
    bad(chunk(true, 1, 0, &data(100, b"")), "type or length");
    bad(chunk(true, 2, 0, &[0; 13]), "type or length");
    bad(chunk(true, 5, 2, &[0; 13]), "type or length");
    bad(chunk(true, 0x8001, 0, &[0; 5]), "type or length");
    bad(chunk(true, 0x8001, 0, &[0, 0, 0, 5, 0, 9, 0]), "longer than its chunk");
    bad(chunk(true, 1, 0, &data(99, b"12345678")), "not asked for");
    bad(chunk(true, 1, 0, &data(101, b"12345678")), "not asked for");
    bad(chunk(true, 1, 0, &data(100, b"123456789")), "not asked for");
    bad(chunk(true, 1, 0, &data(u64::MAX, b"12345678")), "not asked for");
    bad(chunk(true, 1, 1, &data(0, b"12345678")), "not asked for");
    bad(chunk(true, 1, 0, &data(100, b"1234567")), "less data");
    bad([chunk(false, 1, 0, &data(100, b"1234567")), chunk(true, 0, 0, &[])].concat(), "less data");
    bad(
        [chunk(false, 1, 0, &data(100, b"12345678")), chunk(true, 1, 0, &data(100, b"1"))].concat(),
        "not asked",
    );
    bad(
        [chunk(false, 1, 0, &data(100, b"1234")), chunk(true, 1, 0, &data(103, b"1234"))].concat(),
        "overlap",
    );
    bad([chunk(false, 1, 0, &data(104, b"1234")), chunk(true, 2, 0, &hole(104, 4))].concat(), "overlap");
    bad([chunk(false, 2, 0, &hole(101, 3)), chunk(true, 1, 0, &data(100, b"12"))].concat(), "overlap");
    bad(chunk(true, 2, 0, &hole(100, 9)), "not asked for");
    bad(chunk(true, 2, 0, &hole(100, 0)), "not asked for");
    bad(chunk(true, 2, 0, &hole(100, 7)), "less data");
    bad(chunk(true, 5, 2, &[[0, 0, 0, 8], [0, 0, 2, 0], [0; 4]].concat()), "extents");
    bad(chunk(true, 5, 2, &[[0, 0, 0, 7], [0; 4], [0; 4]].concat()), "extents");
    bad(chunk(true, 5, 0, &[[0, 0, 0, 7], [0, 0, 2, 0], [0; 4]].concat()), "extents");
    // A header of 4 GiB is refused before its bytes arrive.
    let long = [&chunk(true, 1, 0, &[])[..16], &[0xFF; 4], &100u64.to_be_bytes()].concat();
    bad(long, "not asked for");
}

#[test]
fn a_read_may_fail_with_a_simple_reply_in_any_case() {
    // nbd-server answers so on connections with structured replies.
    let table = Table::of(&[(Data, 0, 8), (Status, 0, 512)]);
    let after = accepted(Headers::Structured, &table, &[simple(28, 0), simple(22, 1)].concat()).0;
    assert_eq!([(after[0].errno, after[0].done), (after[1].errno, after[1].done)], [(28, true), (22, true)]);
}

#[test]
fn a_failed_read_may_have_less_data() {
    let table = Table::of(&[(Data, 0, 8)]);
    let bytes =
        [chunk(false, 1, 0, &data(0, b"abc")), chunk(true, 0x8002, 0, &[error(9, ""), vec![0; 8]].concat())];
    let after = accepted(Headers::Structured, &table, &bytes.concat()).0;
    assert_eq!((after[0].errno, after[0].done, after[0].left), (5, true, 5));
    // The end may come in a chunk of its own.
    let bytes = [chunk(false, 0x8001, 0, &error(12, "x")), chunk(true, 0, 0, &[])];
    assert_eq!(accepted(Headers::Structured, &table, &bytes.concat()).0[0].errno, 12);
}
