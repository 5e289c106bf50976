use std::io::{self, Read, Write};

use super::*;
use crate::{HandshakeError, negotiate};

fn offer() -> Offer {
    Offer {
        name: "d".into(),
        size: 1 << 30,
        flags: transmission_flag::HAS_FLAGS | transmission_flag::SEND_FLUSH,
        blocks: BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 },
        contexts: vec![ALLOCATION.into(), "qemu:dirty-bitmap:b".into()],
        refusal: None,
    }
}

/// A stream to a server of this crate.
struct Server {
    offer: Offer,
    shake: Negotiation,
    agreed: Option<Agreed>,
    tls: bool,
    over: bool,
}

impl Server {
    fn new(offer: Offer) -> Self {
        Self { offer, shake: Negotiation::new(), agreed: None, tls: false, over: false }
    }
}

impl Read for Server {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let out = self.shake.output();
        let n = out.len().min(to.len());
        to[..n].copy_from_slice(&out[..n]);
        self.shake.sent(n);
        if n == 0 {
            assert!(self.over, "the client waits for ever");
        }
        if self.shake.output().is_empty() && !self.over {
            self.write_all(&[])?;
        }
        Ok(n)
    }
}

impl Write for Server {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.shake.receive(bytes);
        match self.shake.step(&self.offer) {
            Ok(Progress::More) => {}
            // The test has no TLS, so the client continues as if there were some.
            Ok(Progress::StartTls) => self.tls = true,
            Ok(Progress::Ready(agreed)) => (self.agreed, self.over) = (Some(agreed), true),
            Ok(Progress::Over) => self.over = true,
            Err(e) => return Err(io::Error::other(e)),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

/// Sends flags and options, and returns the kinds of the replies.
fn replies(options: &[Vec<u8>]) -> Result<Vec<u32>, Violation> {
    replies_of(Negotiation::new(), options)
}

fn replies_of(mut shake: Negotiation, options: &[Vec<u8>]) -> Result<Vec<u32>, Violation> {
    let mut all = Vec::new();
    shake.receive(&3u32.to_be_bytes());
    for option in options {
        shake.receive(option);
    }
    loop {
        all.extend_from_slice(shake.output());
        shake.sent(usize::MAX);
        let progress = shake.step(&offer())?;
        if progress != Progress::More || shake.output().is_empty() {
            all.extend_from_slice(shake.output());
            break;
        }
    }
    let (mut from, mut kinds) = (Bytes(&all[18..]), Vec::new());
    while !from.0.is_empty() {
        assert_eq!(from.u64(), Some(REPLY_MAGIC));
        from.u32().unwrap();
        kinds.push(from.u32().unwrap());
        from.string().unwrap();
    }
    Ok(kinds)
}

#[test]
fn the_client_of_this_crate_agrees_with_it() {
    for name in ["d", ""] {
        let mut server = Server::new(offer());
        let settings = negotiate(&mut server, name).unwrap();
        assert_eq!((settings.size, settings.headers), (1 << 30, Headers::Extended));
        assert_eq!(settings.blocks, offer().blocks);
        assert_eq!(settings.allocation, Some(0));
        assert!(settings.has(transmission_flag::SEND_FLUSH | transmission_flag::SEND_DF));
        let agreed = server.agreed.unwrap();
        assert_eq!(agreed.headers, Headers::Extended);
        assert_eq!(agreed.contexts, [ALLOCATION]);
        assert!(server.shake.into_rest().is_empty());
    }
}

#[test]
fn a_client_hears_why_it_is_refused() {
    let mut server = Server::new(offer());
    match negotiate(&mut server, "other") {
        Err(HandshakeError::UnknownExport { names, .. }) => assert_eq!(names, ["d"]),
        other => panic!("{other:?}"),
    }
    let mut server = Server::new(Offer { refusal: Some("it is full".into()), ..offer() });
    match negotiate(&mut server, "d") {
        Err(HandshakeError::Refused(why)) => assert_eq!(why, "it is full"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn options_that_are_wrong_are_answered_and_the_handshake_continues() {
    let name = text(b"d");
    let go = [&name[..], &0u16.to_be_bytes()].concat();
    let kinds = replies(&[
        option(OPT_STARTTLS, &[]),
        option(99, b"x"),
        option(OPT_LIST, b"x"),
        option(OPT_SET_META_CONTEXT, &[&name[..], &0u32.to_be_bytes()].concat()),
        option(OPT_GO, b"xx"),
        option(OPT_INFO, &[&text(b"e")[..], &0u16.to_be_bytes()].concat()),
        option(OPT_EXTENDED_HEADERS, &[]),
        option(OPT_STRUCTURED_REPLY, &[]),
        option(OPT_SET_META_CONTEXT, &[&name[..], &9u32.to_be_bytes()].concat()),
        option(OPT_LIST_META_CONTEXT, &[&name[..], &1u32.to_be_bytes(), &text(b"qemu:")].concat()),
        option(OPT_LIST_META_CONTEXT, &[&name[..], &0u32.to_be_bytes()].concat()),
        option(OPT_LIST, &[]),
        option(OPT_GO, &go),
    ]);
    let invalid = REP_ERR_INVALID;
    assert_eq!(
        kinds.unwrap(),
        [
            REP_ERR_POLICY,
            REP_ERR_UNSUP,
            invalid,
            invalid,
            invalid,
            REP_ERR_UNKNOWN,
            REP_ACK,
            REP_ERR_EXT_HEADER_REQD,
            invalid,
            REP_META_CONTEXT,
            REP_ACK,
            REP_META_CONTEXT,
            REP_META_CONTEXT,
            REP_ACK,
            REP_SERVER,
            REP_ACK,
            REP_INFO,
            REP_INFO,
            REP_ACK,
        ]
    );
}

#[test]
fn what_breaks_the_protocol_ends_it() {
    let mut magic = option(OPT_LIST, &[]);
    magic[0] = 0;
    assert!(replies(&[magic]).is_err());
    let huge = [&OPTION_MAGIC.to_be_bytes()[..], &OPT_LIST.to_be_bytes(), &u32::MAX.to_be_bytes()].concat();
    assert_eq!(replies(&[huge]), Err(Violation("an option that is too long")));
    let many = vec![option(99, &[]); OPTIONS_MAX as usize + 1];
    assert_eq!(replies(&many), Err(Violation("too many options")));
    let mut shake = Negotiation::new();
    shake.receive(&u32::MAX.to_be_bytes());
    assert!(shake.step(&offer()).is_err());
}

#[test]
fn a_client_that_does_not_read_is_not_read_from() {
    let mut shake = Negotiation::new();
    assert_eq!(shake.room(), 0);
    shake.sent(usize::MAX);
    assert_eq!(shake.room(), OPTION_HEADER + OPTION_BYTES_MAX);
    shake.receive(&3u32.to_be_bytes());
    for _ in 0..100 {
        shake.receive(&option(OPT_LIST, &[]));
    }
    shake.step(&offer()).unwrap();
    let one = shake.output().len();
    shake.step(&offer()).unwrap();
    assert_eq!((shake.output().len(), shake.room()), (one, 0));
}

#[test]
fn the_old_option_ends_the_handshake_with_or_without_zeroes() {
    for (flags, len) in [(1u32, 10 + 124), (3, 10)] {
        let mut shake = Negotiation::new();
        shake.sent(usize::MAX);
        shake.receive(&[&flags.to_be_bytes()[..], &option(OPT_EXPORT_NAME, b"d"), b"rest"].concat());
        assert!(matches!(shake.step(&offer()), Ok(Progress::Ready(_))));
        assert_eq!(shake.output().len(), len);
        assert_eq!(shake.into_rest(), b"rest");
    }
    let mut shake = Negotiation::new();
    shake.sent(usize::MAX);
    shake.receive(&[&3u32.to_be_bytes()[..], &option(OPT_EXPORT_NAME, b"e")].concat());
    assert_eq!(shake.step(&offer()), Ok(Progress::Over));
}

#[test]
fn larger_blocks_are_for_clients_that_ask_for_them() {
    let large = Offer { blocks: BlockSizes { minimum: 4096, ..offer().blocks }, ..offer() };
    let mut shake = Negotiation::new();
    shake.sent(usize::MAX);
    let asks = |wanted: &[u8]| option(OPT_GO, &[&text(b"d")[..], wanted].concat());
    shake.receive(&[&3u32.to_be_bytes()[..], &asks(&[0, 0])].concat());
    assert_eq!(shake.step(&large), Ok(Progress::More));
    assert_eq!(shake.output()[12..16], REP_ERR_BLOCK_SIZE_REQD.to_be_bytes());
    shake.sent(usize::MAX);
    shake.receive(&asks(&[0, 1, 0, 3]));
    assert!(matches!(shake.step(&large), Ok(Progress::Ready(_))));
}

#[test]
fn nothing_is_possible_before_tls_but_the_end() {
    let name = text(b"d");
    let go = [&name[..], &[0, 0]].concat();
    let options = [
        option(OPT_LIST, &[]),
        option(OPT_STRUCTURED_REPLY, &[]),
        option(OPT_EXTENDED_HEADERS, &[]),
        option(OPT_SET_META_CONTEXT, &[&name[..], &[0; 4]].concat()),
        option(OPT_INFO, &go),
        option(OPT_GO, &go),
        option(77, &[1]),
        option(OPT_STARTTLS, &[1]),
        option(OPT_ABORT, &[]),
    ];
    let mut wanted = vec![REP_ERR_TLS_REQD; 7];
    wanted.extend([REP_ERR_INVALID, REP_ACK]);
    assert_eq!(replies_of(Negotiation::with_tls(), &options), Ok(wanted));
    let mut shake = Negotiation::with_tls();
    shake.sent(usize::MAX);
    shake.receive(&[&3u32.to_be_bytes()[..], &option(OPT_EXPORT_NAME, b"d")].concat());
    assert_eq!(shake.step(&offer()), Ok(Progress::Over));
    assert!(shake.output().is_empty());
    assert_eq!(replies(&[option(OPT_STARTTLS, &[])]), Ok(vec![REP_ERR_POLICY]));
}

#[test]
fn nothing_from_before_tls_counts_within_it() {
    let mut server = Server::new(offer());
    server.shake = Negotiation::with_tls();
    let greeted = crate::greet(&mut server).unwrap();
    greeted.start_tls(&mut server).unwrap();
    assert!(server.tls);
    assert_eq!(server.shake.room(), 0);
    assert_eq!(server.shake.step(&offer()), Ok(Progress::More));
    server.shake.secured();
    let settings = greeted.negotiate(&mut server, "d").unwrap();
    assert_eq!(settings.size, 1 << 30);
    for behind in [&[0x16u8][..], &option(OPT_STRUCTURED_REPLY, &[])] {
        let mut shake = Negotiation::with_tls();
        shake.sent(usize::MAX);
        shake.receive(&[&3u32.to_be_bytes()[..], &option(OPT_STARTTLS, &[]), behind].concat());
        assert!(shake.step(&offer()).is_err());
    }
}

#[test]
fn tls_begins_once() {
    let mut shake = Negotiation::with_tls();
    shake.sent(usize::MAX);
    shake.receive(&[&3u32.to_be_bytes()[..], &option(OPT_STARTTLS, &[])].concat());
    assert_eq!(shake.step(&offer()), Ok(Progress::StartTls));
    shake.sent(usize::MAX);
    shake.secured();
    shake.receive(&option(OPT_STARTTLS, &[]));
    assert_eq!(shake.step(&offer()), Ok(Progress::More));
    assert_eq!(Bytes(&shake.output()[12..]).u32(), Some(REP_ERR_INVALID));
}
