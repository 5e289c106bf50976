//! Disks of a small server in this process, which notes what it is asked.

mod fewer;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::nbd::transmission_flag::{
    CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
};
use ::nbd::{BlockSizes, Settings};
use vshunt_types::spec::{Cache, DiskSpec, Format};
use vshunt_types::sync::Locked;

use super::table::payload_max;
use crate::backend::Backend;
use crate::bounce::AlignedBuf;
use crate::copy::{Copy, CopyQueue};
use crate::{Bits, CopyAfterWrite, Disk, Extent, Io, Look, Op};
use vshunt_engine::{QueueSet, Settings as WorkerSettings, Uring, Workers};

const SIZE: usize = 4 << 20;
const ALL: u16 = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | CAN_MULTI_CONN;

/// What a server offers.
#[derive(Clone, Copy)]
pub(super) struct Offer {
    flags: u16,
    structured: bool,
    blocks: [u32; 3],
    /// The number of the command with which a connection ends, unanswered. 0: none does.
    ends_after: u32,
    /// The numbers of the connections that end so.
    ends: (u32, u32),
    /// Reads are answered in chunks of 4 KiB, those of zeroes as holes, the last one first; and
    /// extents are longer than was asked.
    in_chunks: bool,
    /// The flags of extents that are not zero.
    data_flags: u32,
    /// What it does to a connection that it does not give.
    manner: Manner,
    /// The number of the connection from which on the export has half its size. 0: none.
    shrinks_at: u32,
}

/// What a server does to a connection that it does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// It closes it.
    Close,
    /// It leaves it unanswered.
    Silence,
    /// It answers NBD_OPT_GO with that error.
    Error(u32),
}

pub(super) const OFFER: Offer = Offer {
    flags: ALL,
    structured: true,
    blocks: [1, 4096, 1 << 20],
    ends_after: 0,
    ends: (1, u32::MAX),
    in_chunks: false,
    data_flags: 0,
    manner: Manner::Close,
    shrinks_at: 0,
};

/// Type, flags, offset and length of a command.
type Asked = (u16, u16, u64, u32);

#[derive(Default)]
struct Notes {
    data: Vec<u8>,
    asked: Vec<Asked>,
    connections: u32,
    /// The type of commands that it does not begin, nor anything behind them on their connection.
    holds: Option<u16>,
}

/// The connections of a server.
struct Doors {
    /// How many it gives at a time.
    gives: usize,
    /// Those that it has given, by their numbers, which begin with 1.
    given: BTreeMap<u32, UnixStream>,
    /// Those that it leaves unanswered.
    silent: Vec<UnixStream>,
}

pub(super) struct Server {
    dir: tempfile::TempDir,
    notes: Arc<Mutex<Notes>>,
    doors: Arc<Mutex<Doors>>,
}

impl Server {
    pub(super) fn new(offer: Offer) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let data = (0..SIZE).map(|i| (i / 512 % 251 + 1) as u8).collect();
        let notes = Arc::new(Mutex::new(Notes { data, ..Notes::default() }));
        let doors = Doors { gives: usize::MAX, given: BTreeMap::new(), silent: Vec::new() };
        let doors = Arc::new(Mutex::new(doors));
        let (theirs, their_doors) = (notes.clone(), doors.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, notes, doors) = (stream.unwrap(), theirs.clone(), their_doors.clone());
                let mut seen = notes.locked();
                seen.connections += 1;
                let number = seen.connections;
                let ends_after =
                    if number >= offer.ends.0 && number <= offer.ends.1 { offer.ends_after } else { 0 };
                drop(seen);
                std::thread::spawn(move || {
                    visit(stream, number, &notes, &doors, Offer { ends_after, ..offer })
                });
            }
        });
        Self { dir, notes, doors }
    }

    /// Ends a connection that it has given.
    fn end(&self, number: u32) {
        self.doors.locked().given[&number].shutdown(std::net::Shutdown::Both).unwrap();
    }

    fn spec(&self) -> DiskSpec {
        let uri = format!("nbd+unix:///x?socket={}", self.dir.path().join("s").display());
        DiskSpec { name: "d".into(), uri: Some(uri), reconnect_delay: Some(60), ..DiskSpec::default() }
    }

    pub(super) fn open(&self) -> Rig {
        Rig { disk: Disk::open(&self.spec()).unwrap(), uring: Uring::new().unwrap(), io: Io::default() }
    }

    /// Returns what was asked since the last call.
    fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.notes.locked().asked)
    }
}

fn number<const N: usize>(stream: &mut UnixStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes[8 - N..])?;
    Ok(u64::from_be_bytes(bytes))
}

/// Serves a connection if it is given.
fn visit(stream: UnixStream, number: u32, notes: &Mutex<Notes>, doors: &Mutex<Doors>, offer: Offer) {
    let mut all = doors.locked();
    let gives = all.given.len() < all.gives;
    match offer.manner {
        _ if gives => _ = all.given.insert(number, stream.try_clone().unwrap()),
        Manner::Close => return,
        Manner::Silence => return all.silent.push(stream),
        Manner::Error(_) => {}
    }
    drop(all);
    let manner = if gives { Manner::Close } else { offer.manner };
    let shrinks_at = u32::from(offer.shrinks_at != 0 && number >= offer.shrinks_at);
    // The client may end it at any time.
    let _ = serve(stream, notes, Offer { manner, shrinks_at, ..offer });
    doors.locked().given.remove(&number);
}

fn serve(mut s: UnixStream, notes: &Mutex<Notes>, offer: Offer) -> io::Result<()> {
    s.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    number::<4>(&mut s)?;
    loop {
        number::<8>(&mut s)?;
        let (option, len) = (number::<4>(&mut s)? as u32, number::<4>(&mut s)?);
        s.read_exact(&mut vec![0; len as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let head =
                [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()];
            s.write_all(&[&head.concat()[..], &(data.len() as u32).to_be_bytes(), data].concat())
        };
        match option {
            8 if offer.structured => reply(1, &[])?,
            10 => {
                reply(4, b"\0\0\0\x05base:allocation")?;
                reply(1, &[])?;
            }
            7 => {
                if let Manner::Error(kind) = offer.manner {
                    reply(1 << 31 | kind, b"no more")?;
                    return Ok(());
                }
                let size = (SIZE as u64 >> offer.shrinks_at).to_be_bytes();
                reply(3, &[&[0, 0][..], &size, &offer.flags.to_be_bytes()].concat())?;
                reply(3, &[&[0, 3][..], &offer.blocks.map(u32::to_be_bytes).concat()].concat())?;
                reply(1, &[])?;
                break;
            }
            _ => reply(1 << 31 | 1, &[])?,
        }
    }
    for nth in 1.. {
        assert_eq!(number::<4>(&mut s)?, 0x2560_9513);
        let (flags, kind) = (number::<2>(&mut s)? as u16, number::<2>(&mut s)? as u16);
        let cookie = number::<8>(&mut s)?.to_be_bytes();
        let (offset, len) = (number::<8>(&mut s)?, number::<4>(&mut s)? as u32);
        if kind == 2 || nth == offer.ends_after {
            return Ok(());
        }
        let range = offset as usize..offset as usize + len as usize;
        let mut payload = vec![0; if kind == 1 { len as usize } else { 0 }];
        s.read_exact(&mut payload)?;
        let mut notes = loop {
            let notes = notes.locked();
            if notes.holds != Some(kind) {
                break notes;
            }
            drop(notes);
            std::thread::sleep(Duration::from_millis(1));
        };
        notes.asked.push((kind, flags, offset, len));
        match kind {
            1 => notes.data[range.clone()].copy_from_slice(&payload),
            4 | 6 => notes.data[range.clone()].fill(0),
            _ => {}
        }
        let chunk = |last: bool, kind: u16, body: &[u8]| {
            let head =
                [&0x668e_33efu32.to_be_bytes()[..], &u16::from(last).to_be_bytes(), &kind.to_be_bytes()];
            [&head.concat()[..], &cookie, &(body.len() as u32).to_be_bytes(), body].concat()
        };
        let simple = [&0x6744_6698u32.to_be_bytes()[..], &[0; 4], &cookie].concat();
        let reply = match (kind, offer.structured) {
            (0, true) if offer.in_chunks => {
                let chunks = range.step_by(4096).rev().map(|at| {
                    let part = &notes.data[at..at + 4096];
                    let at = (at as u64).to_be_bytes();
                    match part.iter().all(|byte| *byte == 0) {
                        true => chunk(false, 2, &[&at[..], &4096u32.to_be_bytes()].concat()),
                        false => chunk(false, 1, &[&at[..], part].concat()),
                    }
                });
                [chunks.collect::<Vec<_>>().concat(), chunk(true, 0, &[])].concat()
            }
            (0, true) => {
                let body = [&offset.to_be_bytes()[..], &notes.data[range]].concat();
                [chunk(false, 1, &body), chunk(true, 0, &[])].concat()
            }
            (0, false) => [&simple[..], &notes.data[range]].concat(),
            (7, _) => {
                let zeroes = |at: usize| notes.data[at..at + 512].iter().all(|b| *b == 0);
                let first = zeroes(range.start);
                let end = range.clone().step_by(512).find(|at| zeroes(*at) != first).unwrap_or(range.end);
                let more = if offer.in_chunks { 1 << 20 } else { 0 };
                let extent = [5, (end - range.start) as u32 + more, if first { 3 } else { offer.data_flags }];
                chunk(true, 5, &extent.map(u32::to_be_bytes).concat())
            }
            _ => simple,
        };
        drop(notes);
        s.write_all(&reply)?;
    }
    Ok(())
}

pub(super) struct Rig {
    pub(super) disk: Arc<Disk>,
    uring: Uring,
    io: Io,
}

impl Rig {
    fn settings(&self) -> Settings {
        match &self.disk.backend() {
            Backend::Nbd(nbd) => *nbd.settings(),
            _ => panic!("the disk is on a server"),
        }
    }

    /// Carries out a request. A write has this byte.
    fn run(&mut self, op: Op, offset: u64, len: usize, fua: bool, byte: u8) -> Result<Vec<u8>, i32> {
        let mut buf = AlignedBuf::new(len.max(1)).unwrap();
        buf.bytes().fill(byte);
        let handle = self.disk.attach(&mut self.uring);
        self.io.reset(op, offset, fua);
        if matches!(op, Op::Read | Op::Write) {
            // Segments of different lengths.
            let mut at = 0;
            for part in [100, 3000, usize::MAX] {
                let n = part.min(len - at);
                // SAFETY: the buffer has `len` bytes, and lives until `run` returns, which waits
                // for the request. So does `io`.
                unsafe { self.io.push(buf.ptr().wrapping_add(at), n) };
                at += n;
            }
        } else {
            self.io.request.len = len as u64;
        }
        let result = handle.run(&mut self.uring, &mut self.io);
        handle.detach(&mut self.uring);
        result.map(|()| buf.bytes()[..len].to_vec()).map_err(|e| e.raw_os_error().unwrap())
    }
}

/// Servers with several connections and with one, with chunks and without.
fn each(test: impl Fn(Offer) + Sync) {
    std::thread::scope(|scope| {
        for (structured, flags) in
            [true, false].into_iter().flat_map(|s| [(s, ALL), (s, ALL & !CAN_MULTI_CONN)])
        {
            let test = &test;
            scope.spawn(move || test(Offer { flags, structured, ..OFFER }));
        }
    });
}

#[test]
fn reads_and_writes_are_done_in_pieces_that_the_server_takes() {
    each(|offer| {
        let server = Server::new(Offer { blocks: [512, 4096, 64 << 10], ..offer });
        let mut rig = server.open();
        assert_eq!((rig.disk.size_bytes(), rig.disk.limits().block_size), (SIZE as u64, 512));
        let whole = server.notes.locked().data.clone();
        assert!(rig.run(Op::Read, 0, SIZE, false, 0).unwrap() == whole);
        assert_eq!(server.asked().len(), SIZE / (64 << 10));
        rig.run(Op::Write, 1 << 20, 200 << 10, false, 7).unwrap();
        let asked: Vec<_> = server.asked().iter().map(|a| (a.0, a.2 - (1 << 20), a.3)).collect();
        let kib = 1 << 10;
        assert_eq!(
            asked,
            [(1, 0, 64 << 10), (1, 64 * kib, 64 << 10), (1, 128 * kib, 64 << 10), (1, 192 * kib, 8 << 10)]
        );
        assert_eq!(rig.run(Op::Read, 1 << 20, 200 << 10, false, 0).unwrap(), vec![7; 200 << 10]);
        assert_eq!(rig.run(Op::Read, 100, 512, false, 0), Err(libc::EINVAL));
        assert_eq!(rig.run(Op::Write, SIZE as u64, 512, false, 0), Err(libc::EIO));
    });
}

#[test]
fn the_server_is_asked_for_what_the_request_asks() {
    each(|offer| {
        let server = Server::new(offer);
        let mut rig = server.open();
        let mut ask = |op, fua| {
            rig.run(op, 8192, 4096, fua, 1).unwrap();
            server.asked()
        };
        assert_eq!(ask(Op::Write, true), [(1, 1, 8192, 4096)]);
        assert_eq!(ask(Op::Flush, false), [(3, 0, 0, 0)]);
        assert_eq!(ask(Op::Discard, false), [(4, 0, 8192, 4096)]);
        assert_eq!(ask(Op::WriteZeroes { unmap: true }, true), [(6, 1, 8192, 4096)]);
        assert_eq!(ask(Op::WriteZeroes { unmap: false }, false), [(6, 2, 8192, 4096)]);
        assert_eq!(rig.run(Op::Allocate, 0, 4096, false, 0), Err(libc::EOPNOTSUPP));
    });
}

#[test]
fn no_server_is_sent_more_than_32_mib_whatever_it_states() {
    let server = Server::new(OFFER);
    let settings = server.open().settings();
    let most = |minimum, maximum| {
        let blocks = BlockSizes { minimum, preferred: minimum, maximum };
        payload_max(&Settings { blocks, ..settings })
    };
    assert_eq!([most(1, u32::MAX), most(4096, 64 << 20)], [32 << 20; 2]);
    assert_eq!([most(1, 64 << 10), most(1, 1000), most(1, 100)], [64 << 10, 512, 1]);
}

#[test]
fn nothing_is_asked_about_no_bytes() {
    each(|offer| {
        let server = Server::new(offer);
        let mut rig = server.open();
        for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes { unmap: true }] {
            rig.run(op, 4096, 0, false, 0).unwrap();
            assert_eq!(server.asked(), [], "{op:?}");
        }
    });
}

#[test]
fn a_read_of_many_chunks_and_holes_is_whole() {
    for flags in [ALL, ALL & !CAN_MULTI_CONN] {
        let server = Server::new(Offer { flags, in_chunks: true, blocks: [1, 4096, 32 << 20], ..OFFER });
        let mut rig = server.open();
        for at in (0..SIZE as u64).step_by(16 << 10) {
            rig.run(Op::WriteZeroes { unmap: true }, at, 4096, false, 0).unwrap();
        }
        let whole = server.notes.locked().data.clone();
        server.asked();
        assert!(rig.run(Op::Read, 0, SIZE, false, 9).unwrap() == whole);
        assert_eq!(server.asked(), [(0, 0, 0, SIZE as u32)]);
    }
}

#[test]
fn extents_that_are_longer_than_the_question_are_cut() {
    // A hole that is not zero is data: other bytes may be read there.
    for data_flags in [0, 1] {
        let server = Server::new(Offer { in_chunks: true, data_flags, ..OFFER });
        let mut rig = server.open();
        rig.run(Op::WriteZeroes { unmap: true }, 1 << 20, 4096, false, 0).unwrap();
        for (at, extent) in [(0, Extent::Data), (1 << 20, Extent::Zero)] {
            rig.run(Op::Seek { look: Look::Disk }, at, 4096, false, 0).unwrap();
            let found = rig.io.request.found.unwrap();
            assert_eq!((found.extent, found.len), (extent, 4096));
        }
    }
}

#[test]
fn read_only_servers_do_not_take_several_connections_because_of_that() {
    for (one, connections) in [(0, 1), (CAN_MULTI_CONN, 3)] {
        let server = Server::new(Offer { flags: HAS_FLAGS | READ_ONLY | one, ..OFFER });
        let disk = Disk::open(&DiskSpec { readonly: true, ..server.spec() }).unwrap();
        let (mut rig, mut other) = (Rig::new(&disk), Rig::new(&disk));
        let handles = [rig.disk.attach(&mut rig.uring), other.disk.attach(&mut other.uring)];
        rig.ask();
        other.ask();
        // A server that allows several is asked for one by each.
        soon(|| server.notes.locked().connections == connections);
        let [first, second] = handles;
        first.detach(&mut rig.uring);
        second.detach(&mut other.uring);
    }
}

#[test]
fn what_a_server_does_not_know_is_done_in_another_way() {
    for one in [0, CAN_MULTI_CONN] {
        let server = Server::new(Offer { flags: HAS_FLAGS | SEND_FLUSH | one, ..OFFER });
        let mut rig = server.open();
        rig.run(Op::Write, 0, 4096, true, 1).unwrap();
        assert_eq!(server.asked(), [(1, 0, 0, 4096), (3, 0, 0, 0)]);
        rig.run(Op::Discard, 0, 4096, false, 0).unwrap();
        assert_eq!(server.asked(), []);
        rig.run(Op::WriteZeroes { unmap: true }, 512, 2 << 20, true, 0).unwrap();
        assert_eq!(server.asked(), [(1, 0, 512, 1 << 20), (1, 0, 512 + (1 << 20), 1 << 20), (3, 0, 0, 0)]);
        assert!(rig.run(Op::Read, 512, 2 << 20, false, 9).unwrap().iter().all(|b| *b == 0));
        let trims = Server::new(Offer { flags: HAS_FLAGS | SEND_FLUSH | SEND_TRIM | one, ..OFFER });
        let mut rig = trims.open();
        rig.run(Op::Discard, 0, 4096, false, 0).unwrap();
        rig.run(Op::WriteZeroes { unmap: true }, 0, 4096, false, 0).unwrap();
        assert_eq!(trims.asked(), [(4, 0, 0, 4096), (1, 0, 0, 4096)]);
        let bare = Server::new(Offer { flags: HAS_FLAGS | one, ..OFFER });
        let mut rig = bare.open();
        rig.run(Op::Flush, 0, 0, false, 0).unwrap();
        assert_eq!(bare.asked(), []);
        assert!(!rig.disk.limits().can_discard);
        // Guests count on a flush that a server without one cannot do.
        let stores = Server::new(Offer { flags: HAS_FLAGS | SEND_FUA | one, ..OFFER });
        let mut rig = stores.open();
        rig.run(Op::Write, 0, 4096, false, 1).unwrap();
        rig.run(Op::Flush, 0, 0, false, 0).unwrap();
        assert_eq!(stores.asked(), [(1, 1, 0, 4096)]);
        let through = DiskSpec { cache: Cache::Writethrough, ..bare.spec() };
        let e = Disk::open(&through).err().unwrap().to_string();
        assert!(e.contains("cache=writethrough needs one of them"), "{e}");
    }
}

#[test]
fn data_and_zeroes_are_found() {
    for flags in [ALL, ALL & !CAN_MULTI_CONN] {
        let server = Server::new(Offer { flags, ..OFFER });
        let mut rig = server.open();
        rig.run(Op::WriteZeroes { unmap: true }, 1 << 20, 1 << 20, false, 0).unwrap();
        let mut found = |at: u64| {
            rig.run(Op::Seek { look: Look::Disk }, at, SIZE - at as usize, false, 0).unwrap();
            let found = rig.io.request.found.unwrap();
            (found.extent, found.len)
        };
        assert_eq!(found(0), (Extent::Data, 1 << 20));
        // The server may have had writes of earlier clients in a cache.
        let asked: Vec<_> = server.asked().iter().map(|a| a.0).collect();
        assert_eq!(asked, [6, 3, 7]);
        assert_eq!(found(1 << 20), (Extent::Zero, 1 << 20));
        assert_eq!(found(1 << 21), (Extent::Data, 2 << 20));
        assert_eq!(rig.disk.seek(4096, true).unwrap(), 1 << 20);
        assert_eq!(rig.disk.seek(1 << 20, false).unwrap(), 2 << 20);
    }
}

#[test]
fn what_a_server_may_have_in_a_cache_is_not_called_zero() {
    each(|offer| {
        if !offer.structured {
            return;
        }
        let server = Server::new(offer);
        let mut rig = server.open();
        for i in 0..50u64 {
            rig.run(Op::Write, i * 4096, 4096, i % 5 == 0, 0).unwrap();
            rig.run(Op::Seek { look: Look::Disk }, 0, SIZE, false, 0).unwrap();
            let found = rig.io.request.found.unwrap();
            let asked: Vec<_> = server.asked().iter().map(|a| a.0).collect();
            // With a flush, the whole range counts. Without one, and without a question, it is
            // data.
            match asked[..] {
                [1, 3, 7] => assert_eq!(found.extent, Extent::Zero),
                [1, 7] => assert_eq!((i % 5, found.extent), (0, Extent::Zero), "{i}"),
                [1] => assert_eq!((found.extent, found.len), (Extent::Data, SIZE as u64)),
                _ => panic!("{asked:?}"),
            }
        }
    });
}

#[test]
fn a_write_that_a_flush_makes_stable_is_sent_again_with_it() {
    for one in [0, CAN_MULTI_CONN] {
        let offer = Offer { flags: HAS_FLAGS | SEND_FLUSH | one, blocks: [1, 4096, 4096], ..OFFER };
        // The first connection ends with the flush, or with the second of two pieces.
        for (len, ends_after, again) in [(4096, 2, vec![1, 3]), (8192, 2, vec![1, 1, 3])] {
            let server = Server::new(Offer { ends_after, ends: (1, 1), ..offer });
            let mut rig = server.open();
            rig.run(Op::Write, 0, len, true, 9).unwrap();
            let asked: Vec<_> = server.asked().iter().map(|a| a.0).collect();
            assert_eq!(asked, [vec![1], again].concat());
        }
    }
}

#[test]
fn a_request_with_which_each_connection_ends_fails() {
    each(|offer| {
        let server = Server::new(Offer { ends_after: 1, ..offer });
        let spec = DiskSpec { reconnect_delay: Some(1), ..server.spec() };
        let mut rig =
            Rig { disk: Disk::open(&spec).unwrap(), uring: Uring::new().unwrap(), io: Io::default() };
        assert_eq!(rig.run(Op::Read, 0, 4096, false, 0), Err(libc::EIO));
        assert!(server.notes.locked().connections > 1);
    });
}

#[test]
fn requests_in_flight_are_sent_again_when_a_connection_ends() {
    each(|offer| {
        let server = Server::new(Offer { ends_after: 5, ..offer });
        let mut rig = server.open();
        let handle = rig.disk.attach(&mut rig.uring);
        for i in 0..20u8 {
            rig.run(Op::Write, u64::from(i) * 4096, 4096, false, i).unwrap();
        }
        for i in 0..20u8 {
            let read = rig.run(Op::Read, u64::from(i) * 4096, 4096, false, 0xFF).unwrap();
            assert_eq!(read, vec![i; 4096], "{i}");
        }
        handle.detach(&mut rig.uring);
        assert!(server.notes.locked().connections >= 40 / 5);
    });
}

#[test]
fn handles_of_a_ring_share_a_connection_that_ends_with_the_last_one() {
    let server = Server::new(OFFER);
    let mut rig = server.open();
    let handles: Vec<_> = (0..3).map(|_| rig.disk.attach(&mut rig.uring)).collect();
    rig.ask();
    soon(|| rig.disk.connections().unwrap().own == 1);
    rig.run(Op::Read, 0, 512, false, 0).unwrap();
    // The other one is that of the open.
    assert_eq!(server.notes.locked().connections, 2);
    handles.into_iter().for_each(|handle| handle.detach(&mut rig.uring));
    assert_eq!(rig.disk.connections().unwrap().own, 0);
    rig.run(Op::Read, 0, 512, false, 0).unwrap();
    soon(|| server.doors.locked().given.len() == 1);
    assert_eq!(server.notes.locked().connections, 2);
}

#[test]
fn cache_and_readonly_are_kept() {
    let server = Server::new(OFFER);
    let spec = DiskSpec { cache: Cache::Writethrough, ..server.spec() };
    let mut rig = Rig { disk: Disk::open(&spec).unwrap(), ..server.open() };
    rig.run(Op::Write, 0, 512, false, 0).unwrap();
    assert_eq!(server.asked(), [(1, 1, 0, 512)]);
    rig.disk = Disk::open(&DiskSpec { cache: Cache::Unsafe, ..server.spec() }).unwrap();
    rig.run(Op::Write, 0, 512, true, 0).unwrap();
    rig.run(Op::Flush, 0, 0, false, 0).unwrap();
    assert_eq!(server.asked(), [(1, 0, 0, 512)]);
    rig.disk = Disk::open(&DiskSpec { readonly: true, ..server.spec() }).unwrap();
    for op in [Op::Write, Op::Discard, Op::WriteZeroes { unmap: false }] {
        assert_eq!(rig.run(op, 0, 512, false, 0), Err(libc::EROFS));
    }
    let read_only = Server::new(Offer { flags: ALL | READ_ONLY, ..OFFER });
    let e = Disk::open(&read_only.spec()).err().unwrap().to_string();
    assert!(e.contains("readonly=on"), "{e}");
    let raw = DiskSpec { format: Some(Format::Raw), file: Some("/x".into()), ..server.spec() };
    let e = Disk::check(&raw).unwrap_err().to_string();
    assert!(e.contains("uri is for a server"), "{e}");
}

/// Also if guests were let go before it was stopped. Then nothing else makes its queue look.
#[test]
fn a_stopped_copy_leaves_its_source_while_its_target_hangs() {
    let server = Server::new(OFFER);
    let ram = DiskSpec {
        name: "s".into(),
        format: Some(Format::Ram),
        size: Some(SIZE as u64),
        ..DiskSpec::default()
    };
    let (source, target) = (Disk::open(&ram).unwrap(), Disk::open(&server.spec()).unwrap());
    let work = Arc::new(CopyAfterWrite::new(SIZE as u64, 12).unwrap());
    let all = Bits::new(SIZE as u64, 12).unwrap();
    all.set(all.all());
    work.add(&all);
    let copy = Arc::new(Copy::new(source, target, work.clone(), std::thread::current()));
    let workers = Workers::new(0).unwrap();
    let home = workers.create(None, &WorkerSettings::default()).unwrap();
    let set = QueueSet::new("copy", &workers, &[home]).unwrap();
    // While it is held, the server answers nothing.
    let hangs = server.notes.locked();
    set.start(0, Box::new(CopyQueue::new(copy.clone(), set.stats(0).clone())));
    soon(|| set.stats(0).in_flight.load(Relaxed) > 0);
    std::thread::sleep(Duration::from_millis(100));
    work.end_now();
    copy.stop.store(true, Relaxed);
    copy.work.notify();
    soon(|| copy.leave_source());
    assert!(!copy.over.load(Acquire), "the target did not hang");
    drop(hangs);
    soon(|| copy.over.load(Acquire));
    drop(set.stop(0));
    drop(set);
    workers.end_all();
}

/// Waits until something is so.
fn soon(is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < end, "not within 60 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}
