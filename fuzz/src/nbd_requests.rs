//! Bytes of an NBD client, in pieces of any length: a handshake, then requests.
//!
//! The server keeps little of what a client sends, and a request that passes is within the export.

use nbd::server::{Negotiation, OPTION_BYTES_MAX, Offer, Progress, Reply, Request, Rules, Work};
use nbd::{BlockSizes, HEADER_BYTES_MAX, Headers, REQUEST_BYTES_MAX};

use super::bytes::Bytes;

const SIZE: u64 = 1 << 30;
/// The answers to one option: the list of all contexts is the longest.
const OUTPUT_MAX: usize = 8 << 10;

fn offer() -> Offer {
    Offer {
        name: "disk".into(),
        size: SIZE,
        flags: 1,
        blocks: BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 },
        contexts: (0..65).map(|n| format!("qemu:dirty-bitmap:b{n}")).collect(),
        refusal: None,
    }
}

/// Makes options of which most are nearly right.
fn options(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut all = u32::to_be_bytes(if bytes.u8() == 0 { 4 } else { u32::from(bytes.u8() % 4) }).to_vec();
    while !bytes.is_empty() {
        let choice = bytes.u8();
        let option = [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 7, 10][bytes.below(12)];
        let name: &[u8] = [&b"disk"[..], b"", b"else"][bytes.below(3)];
        let name = [&(name.len() as u32).to_be_bytes()[..], name].concat();
        let mut data = match option {
            1 => name[4..].to_vec(),
            6 | 7 => [&name[..], &[0, 2, 0, bytes.u8() % 4, 0, 3]].concat(),
            9 | 10 => {
                let query: &[u8] =
                    [&b"qemu:"[..], b"qemu:dirty-bitmap:b7", b"base:", b"qemu:dirty-bitmap:"][bytes.below(4)];
                let count = u32::from(bytes.u8() % 3);
                let query = [&(query.len() as u32).to_be_bytes()[..], query].concat();
                [&name[..], &count.to_be_bytes(), &query.repeat(count as usize)].concat()
            }
            _ => Vec::new(),
        };
        if choice & 7 == 0 {
            data.extend(bytes.take(5));
        }
        let len = if choice & 0x78 == 0 { u32::from(bytes.u16()) << 8 } else { data.len() as u32 };
        let magic = if choice == 0x80 { 0 } else { 0x4948_4156_454f_5054u64 };
        all.extend([&magic.to_be_bytes()[..], &u32::to_be_bytes(option), &len.to_be_bytes(), &data].concat());
    }
    all
}

fn handshake(mut shake: Negotiation, input: &[u8], piece: usize) -> Option<(Headers, Vec<u8>)> {
    let offer = offer();
    let mut rest = input;
    loop {
        assert!(shake.output().len() <= OUTPUT_MAX, "answers of {} bytes", shake.output().len());
        shake.sent(piece);
        let n = piece.min(rest.len()).min(shake.room());
        let (now, behind) = rest.split_at(n);
        shake.receive(now);
        rest = behind;
        let waits = shake.output().is_empty();
        match shake.step(&offer) {
            Ok(Progress::Ready(agreed)) => {
                assert!(agreed.contexts.iter().all(|name| offer.contexts.contains(name)));
                return Some((agreed.headers, shake.into_rest()));
            }
            // What follows is inside TLS.
            Ok(Progress::StartTls) => {
                shake.sent(usize::MAX);
                assert_eq!(shake.room(), 0);
                shake.secured();
            }
            Ok(Progress::More) if n > 0 || !waits || !shake.output().is_empty() => {}
            Ok(Progress::More | Progress::Over) | Err(_) => return None,
        }
        assert!(shake.room() <= OPTION_BYTES_MAX + 16);
    }
}

fn requests(headers: Headers, mut bytes: &[u8]) {
    let blocks = offer().blocks;
    let rules = Rules { size: SIZE, readonly: false, trims: true, contexts: true, headers, blocks };
    while let Ok(Some((request, used))) = Request::parse(headers, bytes) {
        assert!(used <= REQUEST_BYTES_MAX);
        bytes = &bytes[used..];
        let checked = request.check(&rules);
        if let Ok(Work::Read | Work::Write { .. } | Work::Trim { .. } | Work::WriteZeroes { .. }) = checked {
            assert!(request.offset + request.len <= SIZE && request.offset.is_multiple_of(512));
        }
        if let Ok(Work::Read | Work::Write { .. }) = checked {
            assert!(request.len <= u64::from(blocks.maximum));
        }
        let reply = Reply { headers, kind: request.kind, cookie: request.cookie, offset: request.offset };
        let mut header = [0; HEADER_BYTES_MAX];
        let len = match checked {
            Ok(_) => reply.success(512, &mut header),
            Err(error) => reply.error(error, &mut header),
        };
        assert!((16..=HEADER_BYTES_MAX).contains(&len));
        let payload = usize::try_from(request.payload(headers)).unwrap_or(usize::MAX);
        let Some(behind) = bytes.get(payload..) else { return };
        bytes = behind;
    }
}

/// Takes the input as a client's handshake, as a description of one, and as requests.
pub fn nbd_requests(input: &[u8]) {
    let mut bytes = Bytes(input);
    let piece = usize::from(bytes.u8()) + 1;
    let _ = handshake(Negotiation::new(), input, piece);
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        requests(headers, input);
    }
    let described = options(&mut bytes);
    for shake in [Negotiation::new(), Negotiation::with_tls()] {
        if let Some((headers, rest)) = handshake(shake, &described, piece) {
            requests(headers, &rest);
        }
    }
    // Requests with the right magic number.
    for (headers, magic) in [(Headers::Structured, 0x2560_9513u32), (Headers::Extended, 0x21e4_1c71)] {
        let all: Vec<u8> = input.chunks(28).flat_map(|c| [&magic.to_be_bytes()[..], c].concat()).collect();
        requests(headers, &all);
    }
}
