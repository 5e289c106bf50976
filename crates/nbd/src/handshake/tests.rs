//! Handshakes as byte vectors: what the server sends is prepared, what the client sends is
//! compared.

use std::collections::VecDeque;

use super::*;

/// A server that says what it was given, whatever it is told.
#[derive(Default)]
struct Script {
    says: VecDeque<u8>,
    heard: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.says.read(to)
    }
}

impl Write for Script {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.heard.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    [b"NBDMAGICIHAVEOPT".as_slice(), &flags.to_be_bytes()].concat()
}

fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat()
}

fn info_export(size: u64, flags: u16) -> Vec<u8> {
    let data = [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
    answer(OPT_GO, REP_INFO, &data)
}

fn info_blocks(sizes: [u32; 3]) -> Vec<u8> {
    let [a, b, c] = sizes.map(u32::to_be_bytes);
    answer(OPT_GO, REP_INFO, &[&3u16.to_be_bytes()[..], &a, &b, &c].concat())
}

fn run(says: &[Vec<u8>]) -> (Result<Settings>, Vec<u8>) {
    let mut script = Script { says: says.concat().into(), heard: Vec::new() };
    (negotiate(&mut script, "x"), script.heard)
}

fn no(option: u32) -> Vec<u8> {
    answer(option, REP_ERR_UNSUP, b"what?")
}

#[test]
fn a_server_that_knows_all_is_asked_for_all() {
    let context = [&9u32.to_be_bytes()[..], b"base:allocation"].concat();
    let (got, heard) = run(&[
        greeting(3),
        answer(OPT_EXTENDED_HEADERS, REP_ACK, &[]),
        answer(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &context),
        answer(OPT_SET_META_CONTEXT, REP_ACK, &[]),
        info_blocks([512, 4096, 1 << 20]),
        info_export(1 << 30, 0x16d),
        answer(OPT_GO, REP_INFO, &[0, 2, 1, 2, 3]),
        answer(OPT_GO, REP_ACK, &[]),
    ]);
    let got = got.unwrap();
    assert_eq!((got.size, got.flags, got.headers), (1 << 30, 0x16d, Headers::Extended));
    assert_eq!(got.blocks, BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 });
    assert_eq!(got.allocation, Some(9));
    let option = |option: u32, data: &[u8]| {
        [b"IHAVEOPT".as_slice(), &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let expected = [
        vec![0, 0, 0, 3],
        option(11, &[]),
        option(10, b"\0\0\0\x01x\0\0\0\x01\0\0\0\x0fbase:allocation"),
        option(7, b"\0\0\0\x01x\0\x01\0\x03"),
    ];
    assert_eq!(heard, expected.concat());
}

#[test]
fn what_a_server_lacks_is_done_without() {
    let (got, _) = run(&[
        greeting(1),
        no(OPT_EXTENDED_HEADERS),
        answer(OPT_STRUCTURED_REPLY, REP_ACK, &[]),
        no(OPT_SET_META_CONTEXT),
        info_export(512, 1),
        answer(OPT_GO, REP_ACK, &[]),
    ]);
    let got = got.unwrap();
    assert_eq!((got.headers, got.allocation, got.blocks.minimum), (Headers::Structured, None, 1));
    assert_eq!(got.blocks.maximum, 32 << 20);
    // Neither OPT_GO: the older option, with and without zeroes behind the answer.
    for flags in [1, 3] {
        let zeroes = if flags == 1 { vec![0; 124] } else { Vec::new() };
        let (got, heard) = run(&[
            greeting(flags),
            no(OPT_EXTENDED_HEADERS),
            no(OPT_STRUCTURED_REPLY),
            no(OPT_GO),
            [&4096u64.to_be_bytes()[..], &5u16.to_be_bytes(), &zeroes].concat(),
        ]);
        let got = got.unwrap();
        assert_eq!((got.size, got.flags, got.headers), (4096, 5, Headers::Simple));
        assert!(heard.ends_with(b"IHAVEOPT\0\0\0\x01\0\0\0\x01x"));
    }
}

#[test]
fn a_server_that_refuses_is_quoted() {
    let start = [greeting(3), no(OPT_EXTENDED_HEADERS), no(OPT_STRUCTURED_REPLY)].concat();
    let says = |rest: &[Vec<u8>]| run(&[start.clone(), rest.concat()]).0.unwrap_err().to_string();
    let name = |name: &str| answer(OPT_LIST, REP_SERVER, &text(name));
    let unknown = answer(OPT_GO, REP_ERR_UNKNOWN, b"");
    assert_eq!(
        says(&[unknown.clone(), name("a"), name("b\n"), answer(OPT_LIST, REP_ACK, &[])]),
        "has no export named \"x\"; it has \"a\", \"b\\n\""
    );
    let many: Vec<u8> = (0..100).flat_map(|_| name("n")).collect();
    assert_eq!(says(&[unknown.clone(), many, no(OPT_LIST)]).matches("\"n\"").count(), 8);
    assert!(says(&[unknown, no(OPT_LIST)]).contains("write its name behind the host"));
    assert!(says(&[answer(OPT_GO, REP_ERR_TLS_REQD, b"")]).starts_with("requires TLS"));
    assert_eq!(says(&[answer(OPT_GO, REP_ERR_POLICY, b"not\x07 you.\n")]), "refuses: not you");
    assert_eq!(says(&[answer(OPT_GO, REP_ERR_POLICY, b"")]), "refuses: its policy does not allow it");
    assert!(says(&[]).contains("closes the connection"));
    assert!(says(&[no(OPT_GO)]).contains("no export named"));
}

#[test]
fn a_server_that_breaks_the_protocol_is_refused() {
    let wrong = |says: &[Vec<u8>]| match run(says).0 {
        Err(HandshakeError::Protocol(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(wrong(&[vec![0; 18]]).contains("begin"));
    assert!(wrong(&[b"NBDMAGICIHAVEOPX\0\0".to_vec()]).contains("begin"));
    assert!(wrong(&[[b"NBDMAGIC".as_slice(), &OLD_MAGIC.to_be_bytes(), &[0; 2]].concat()]).contains("old"));
    assert!(wrong(&[greeting(0)]).contains("old"));
    assert!(wrong(&[greeting(1), vec![0; 20]]).contains("magic"));
    assert!(wrong(&[greeting(1), no(OPT_GO)]).contains("another option"));
    let long = [&answer(OPT_EXTENDED_HEADERS, REP_ACK, &[])[..16], &[0xFF; 4]].concat();
    assert!(wrong(&[greeting(1), long]).contains("too long"));
    assert!(wrong(&[greeting(1), answer(OPT_EXTENDED_HEADERS, 77, &[])]).contains("belong"));
    let start = [greeting(3), no(OPT_EXTENDED_HEADERS), no(OPT_STRUCTURED_REPLY)].concat();
    let go = |rest: Vec<u8>| wrong(&[start.clone(), rest]);
    assert!(go(answer(OPT_GO, REP_ACK, &[])).contains("size"));
    assert!(go(answer(OPT_GO, REP_INFO, &[0, 0, 1])).contains("too short"));
    assert!(go(answer(OPT_GO, REP_INFO, &[0, 3]).repeat(2)).contains("too short"));
    assert!(go(answer(OPT_GO, REP_INFO, &[0, 9]).repeat(5000)).contains("too many"));
    for sizes in
        [[0, 4096, 4096], [3, 4096, 4096], [1 << 17, 1 << 17, 1 << 20], [512, 256, 4096], [512, 512, 256]]
    {
        assert!(go(info_blocks(sizes)).contains("block sizes"), "{sizes:?}");
    }
}

#[test]
fn tls_begins_only_if_the_server_says_so() {
    let start = |answer: Vec<u8>| {
        let mut script = Script { says: [greeting(3), answer].concat().into(), heard: Vec::new() };
        let greeted = greet(&mut script).unwrap();
        let started = greeted.start_tls(&mut script);
        assert!(script.heard.ends_with(b"IHAVEOPT\0\0\0\x05\0\0\0\0"));
        // What comes behind the answer is for TLS.
        (started, script.says.len())
    };
    let ack = answer(OPT_STARTTLS, REP_ACK, &[]);
    assert!(matches!(start([ack.clone(), vec![1, 2, 3]].concat()), (Ok(()), 3)));
    for kind in [REP_ERR_UNSUP, REP_ERR_POLICY] {
        assert!(matches!(start(answer(OPT_STARTTLS, kind, b"no")).0, Err(HandshakeError::NoTls)));
    }
    let other = answer(OPT_STARTTLS, REP_ERROR | 99, b"why");
    assert!(matches!(start(other).0, Err(HandshakeError::Refused(why)) if why == "why"));
    for wrong in [
        answer(OPT_STARTTLS, REP_ACK, &[0]),
        answer(OPT_STARTTLS, REP_INFO, &[]),
        answer(OPT_GO, REP_ACK, &[]),
        vec![0; 20],
    ] {
        assert!(matches!(start(wrong).0, Err(HandshakeError::Protocol(_))));
    }
    assert!(matches!(start(ack[..19].to_vec()).0, Err(HandshakeError::Io(_))));
}
