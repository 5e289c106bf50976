//! Bytes of an NBD server, in pieces of any length, to requests in flight.
//!
//! A request has a range of memory, and nothing may be put outside of it.

use nbd::{Expected, HEADER_BYTES_MAX, Headers, Receiver, Requests, Wanted, negotiate};

use super::bytes::Bytes;

/// Requests in flight. Their cookies are 0 to this.
const REQUESTS: u64 = 8;
/// Bytes of the longest request.
const BYTES_MAX: u64 = 4096;

struct Request {
    wanted: Wanted,
    offset: u64,
    memory: Vec<u8>,
    /// The bytes that chunks were announced for.
    covered: Vec<bool>,
    left: u64,
    failed: bool,
    done: bool,
}

struct Table(Vec<Request>);

impl Table {
    fn of(&mut self, slot: u32) -> &mut Request {
        let request = &mut self.0[slot as usize];
        assert!(!request.done, "a reply that is complete has more");
        request
    }
}

impl Requests for Table {
    fn find(&mut self, cookie: u64) -> Option<Expected> {
        let slot = u32::try_from(cookie).ok()?;
        let request = self.0.get(slot as usize).filter(|request| !request.done)?;
        Some(Expected {
            slot,
            wanted: request.wanted,
            offset: request.offset,
            len: request.memory.len() as u64,
            left: request.left,
            failed: request.failed,
        })
    }

    fn covers(&mut self, slot: u32, at: u64, len: u64) -> bool {
        let place = &mut self.of(slot).covered[at as usize..][..len as usize];
        let is_free = !place.contains(&true);
        place.fill(true);
        is_free
    }

    fn data(&mut self, slot: u32, at: u64, bytes: &[u8]) {
        self.of(slot).memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn zeroes(&mut self, slot: u32, at: u64, len: u64) {
        self.of(slot).memory[at as usize..][..len as usize].fill(0);
    }

    fn arrived(&mut self, slot: u32, len: u64) {
        let request = self.of(slot);
        request.left = request.left.checked_sub(len).expect("no more data than was asked for");
    }

    fn status(&mut self, slot: u32, len: u64, _flags: u64) {
        assert!(len > 0 && self.of(slot).wanted == Wanted::Status);
    }

    fn error(&mut self, slot: u32, errno: i32) {
        assert!(errno > 0);
        self.of(slot).failed = true;
    }

    fn done(&mut self, slot: u32) {
        let request = self.of(slot);
        let whole = request.wanted != Wanted::Data || request.left == 0 || request.failed;
        assert!(whole, "a read without all of its data succeeds");
        request.done = true;
    }
}

/// A server that sends the input, whatever it hears.
struct Server<'a>(&'a [u8]);

impl std::io::Read for Server<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(to)
    }
}

impl std::io::Write for Server<'_> {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        Ok(from.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Makes replies of which most are nearly right.
fn replies(bytes: &mut Bytes<'_>, headers: Headers, table: &Table) -> Vec<u8> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let choice = bytes.u8();
        let cookie = u64::from(bytes.u8() % 10);
        let request = table.0.get(cookie as usize);
        let (offset, len) = request.map_or((0, 0), |r| (r.offset, r.memory.len() as u64));
        let at = if choice & 1 == 0 { 0 } else { u64::from(bytes.u16()) % BYTES_MAX };
        let count = if choice & 2 == 0 { len } else { u64::from(bytes.u16()) % BYTES_MAX };
        let kind = [0, 1, 1, 2, 5, 6, 0x8001, 0x8002][bytes.below(8)];
        let number = u32::from(bytes.u8() % 128);
        let body = match kind {
            1 => [&(offset + at).to_be_bytes()[..], &vec![choice; count as usize]].concat(),
            2 => [&(offset + at).to_be_bytes()[..], &(count as u32).to_be_bytes()].concat(),
            5 => [0, count as u32, number].map(u32::to_be_bytes).concat(),
            6 => [&[0; 8][..], &count.to_be_bytes(), &u64::from(number).to_be_bytes()].concat(),
            0x8001 | 0x8002 => [&number.to_be_bytes()[..], &[0, 2, b'n', b'o'], &[0; 8]].concat(),
            _ => Vec::new(),
        };
        if headers == Headers::Simple || choice & 0x1C == 0 {
            all.extend(
                [&[0x67, 0x44, 0x66, 0x98][..], &(number / 100).to_be_bytes(), &cookie.to_be_bytes()]
                    .concat(),
            );
            let data = request.filter(|r| r.wanted == Wanted::Data && number < 100);
            all.extend(data.map_or(Vec::new(), |r| vec![choice; r.memory.len()]));
        } else {
            let last = u16::from(choice & 0x20 != 0);
            let wide = headers == Headers::Extended;
            let magic: u32 = if wide { 0x6e8a_278c } else { 0x668e_33ef };
            all.extend([&magic.to_be_bytes()[..], &last.to_be_bytes(), &u16::to_be_bytes(kind)].concat());
            all.extend(cookie.to_be_bytes());
            let len = body.len() as u64;
            match wide {
                true => all.extend([offset.to_be_bytes(), len.to_be_bytes()].concat()),
                false => all.extend((len as u32).to_be_bytes()),
            }
            all.extend(body);
        }
        if choice & 0xC0 == 0xC0 {
            all.extend(bytes.take(3));
        }
    }
    all
}

/// Takes the input as a server's handshake, and as a description of its replies.
pub fn nbd_replies(input: &[u8]) {
    let _ = negotiate(&mut Server(input), "x");
    let mut bytes = Bytes(input);
    let headers = [Headers::Simple, Headers::Structured, Headers::Extended][usize::from(bytes.u8() % 3)];
    let mut table = Table(Vec::new());
    for _ in 0..REQUESTS {
        let len = u64::from(bytes.u16()) % BYTES_MAX + 1;
        let wanted = [Wanted::Data, Wanted::Status, Wanted::Nothing][usize::from(bytes.u8() % 3)];
        table.0.push(Request {
            wanted,
            offset: u64::from(bytes.u16()),
            memory: vec![0; len as usize],
            covered: vec![false; len as usize],
            left: if wanted == Wanted::Data { len } else { 0 },
            failed: false,
            done: false,
        });
    }
    let piece = usize::from(bytes.u8()) + 1;
    let mut receiver = Receiver::new(headers, Some(0));
    let mut waiting = Vec::new();
    let replies = replies(&mut bytes, headers, &table);
    let mut rest = &replies[..];
    while !rest.is_empty() {
        let (now, behind) = rest.split_at(piece.min(rest.len()));
        if let Some(direct) = receiver.direct().filter(|_| waiting.is_empty() && piece % 2 == 0) {
            let len = (now.len() as u64).min(direct.left);
            table.data(direct.slot, direct.at, &now[..len as usize]);
            receiver.received(len, &mut table);
            rest = &rest[len as usize..];
            continue;
        }
        rest = behind;
        waiting.extend_from_slice(now);
        match receiver.take(&waiting, &mut table) {
            Ok(used) => drop(waiting.drain(..used)),
            Err(_) => return,
        }
        assert!(waiting.len() < HEADER_BYTES_MAX, "a header is never longer");
    }
}
