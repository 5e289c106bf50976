//! A front end that sends hostile bytes to the socket of a live export: every message, with file
//! descriptors, rings and memory. The daemon, its workers and the export exist during all inputs.
//! So everything must work again after each input.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a fuzz target, in which one block has one purpose")]

use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use vshunt_daemon::{Daemon, Options};
use vshunt_types::spec::{DiskSpec, ExportSpec, Format};

use crate::bytes::Bytes;

/// Time limit for the back end to end a connection after its front end has left.
const HANG: Duration = Duration::from_secs(20);
const RAM: usize = 256 << 10;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
/// Guest address of the valid rings: one page each for descriptors, available and used, one queue
/// after the other.
const RING: u64 = 0x4000;
const QUEUES: u16 = 3;

struct World {
    socket: PathBuf,
    ram: OwnedFd,
    map: usize,
    _daemon: std::sync::Arc<Daemon>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        // A front end that left is an error of the write, and must not end the process.
        // SAFETY: the call only sets a signal's disposition to ignore.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        let socket = std::env::temp_dir().join(format!("vshunt-fuzz-{}.sock", std::process::id()));
        let daemon = Daemon::new(Options::default()).expect("a daemon");
        daemon
            .disk_add(DiskSpec {
                name: "d".into(),
                format: Some(Format::Ram),
                size: Some(1 << 20),
                ..Default::default()
            })
            .expect("a disk");
        let export = ExportSpec {
            name: "e".into(),
            disk: "d".into(),
            socket: Some(socket.clone()),
            queues: Some(QUEUES),
            ..Default::default()
        };
        daemon.export_add(export).expect("an export");
        let ram = memfd(RAM);
        // SAFETY: a new shared mapping of RAM bytes, which is never unmapped. The kernel chooses
        // the address.
        let map = unsafe {
            let both = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), RAM, both, libc::MAP_SHARED, ram.as_raw_fd(), 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        World { socket, ram, map: map as usize, _daemon: daemon }
    })
}

fn memfd(len: usize) -> OwnedFd {
    // SAFETY: the call returned a new descriptor, which is owned from here on.
    unsafe {
        let fd = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        assert_eq!(libc::ftruncate(fd, len as i64), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

fn eventfd() -> OwnedFd {
    // SAFETY: the call returned a new descriptor, which is owned from here on.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

struct Peer {
    stream: UnixStream,
    world: &'static World,
    kicks: Vec<OwnedFd>,
    /// Whether the back end closed the connection.
    gone: bool,
}

impl Peer {
    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        if self.gone || bytes.is_empty() {
            return;
        }
        let mut control = [0u64; 32];
        let iov = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
        // SAFETY: msghdr is plain data. The control buffer has room for 32 descriptors and is
        // aligned for cmsghdr. Everything outlives the call.
        let sent = unsafe {
            let mut msg: libc::msghdr = std::mem::zeroed();
            msg.msg_iov = &raw const iov as *mut _;
            msg.msg_iovlen = 1;
            if !fds.is_empty() {
                let len = std::mem::size_of_val(fds) as u32;
                msg.msg_control = control.as_mut_ptr().cast();
                msg.msg_controllen = libc::CMSG_SPACE(len) as usize;
                let c = libc::CMSG_FIRSTHDR(&msg);
                (*c).cmsg_level = libc::SOL_SOCKET;
                (*c).cmsg_type = libc::SCM_RIGHTS;
                (*c).cmsg_len = libc::CMSG_LEN(len) as usize;
                std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(c).cast(), fds.len());
            }
            libc::sendmsg(self.stream.as_raw_fd(), &msg, libc::MSG_DONTWAIT)
        };
        self.gone |= sent < 0;
    }

    fn message(&mut self, kind: u32, flags: u32, payload: &[u8], fds: &[RawFd]) {
        let mut bytes = Vec::with_capacity(12 + payload.len());
        for word in [kind, flags, payload.len() as u32] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        self.send(&bytes, fds);
        self.swallow();
    }

    fn words(&mut self, kind: u32, words: &[u64], fds: &[RawFd]) {
        let payload: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.message(kind, 1, &payload, fds);
    }

    /// Reads replies and ignores them.
    fn swallow(&mut self) {
        self.stream.set_nonblocking(true).unwrap();
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.gone = true,
                Ok(_) => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.gone = true,
            }
            break;
        }
    }

    fn poke(&self, at: usize, bytes: &[u8]) {
        if at + bytes.len() <= RAM {
            // SAFETY: the range is inside the mapping. The back end's workers may read there at the
            // same time, as from a guest's memory.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    (self.world.map as *mut u8).add(at),
                    bytes.len(),
                )
            }
        }
    }

    fn table(&mut self, b: Option<&mut Bytes<'_>>) {
        let ram = self.world.ram.as_raw_fd();
        let Some(b) = b else { return self.words(5, &[1, GUEST, RAM as u64, USER, 0], &[ram]) };
        let n = b.below(4);
        let mut words = vec![n as u64];
        for i in 0..n as u64 {
            let bend = b.u8();
            words.push(if bend & 1 != 0 { b.u64() } else { GUEST + i * RAM as u64 });
            words.push(if bend & 2 != 0 { b.u64() } else { RAM as u64 });
            words.push(if bend & 4 != 0 { b.u64() } else { USER + i * RAM as u64 });
            words.push(if bend & 8 != 0 { b.u64() } else { 0 });
        }
        let fds = vec![ram; if b.u8() & 7 == 7 { b.below(6) } else { n }];
        self.words(5, &words, &fds);
    }

    fn ring(&mut self, index: u64, b: Option<&mut Bytes<'_>>) {
        let at = USER + RING * (index & 3) + 0x8000;
        let mut addresses = [index, at, at + 0x2000, at + 0x1000, 0];
        let mut size = 16;
        let mut base = 0;
        if let Some(b) = b {
            match b.u8() % 8 {
                0 => addresses[b.below(5)] = b.u64(),
                1 => addresses[1 + b.below(3)] = USER + u64::from(b.u32()) % (RAM as u64 + 64),
                2 => size = u64::from(b.u16()),
                3 => base = u64::from(b.u32()),
                _ => {}
            }
        }
        self.words(8, &[index | size << 32], &[]);
        self.words(10, &[index | base << 32], &[]);
        self.words(9, &addresses, &[]);
        let (call, kick) = (eventfd(), eventfd());
        self.words(13, &[index], &[call.as_raw_fd()]);
        self.words(12, &[index], &[kick.as_raw_fd()]);
        self.words(18, &[index | 1 << 32], &[]);
        self.kicks.push(kick);
    }

    /// Puts a request into ring `index`'s memory: a header, data and a status, which the input
    /// changes.
    fn request(&mut self, index: usize, b: &mut Bytes<'_>) {
        let at = RING as usize * (index & 3) + 0x8000;
        let data = GUEST + 0x1_8000;
        let bend = b.u8();
        for (i, (addr, len, flags)) in
            [(data, 16u32, 1u16), (data + 0x1000, 512, 1), (data + 0x2000, 1, 2)].into_iter().enumerate()
        {
            let mut bytes = Vec::from(if bend & 3 == i as u8 + 1 { b.u64() } else { addr }.to_le_bytes());
            let len = if bend & 4 != 0 { u32::from(b.u16()) } else { len };
            bytes.extend_from_slice(&len.to_le_bytes());
            let flags =
                if bend & 8 != 0 { u16::from(b.u8() & 7) } else { flags | if i == 1 { 2 } else { 0 } };
            bytes.extend_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(&(i as u16 + 1).to_le_bytes());
            self.poke(at + 16 * i, &bytes);
        }
        let mut header = [0; 16];
        header[0] = b.u8() % 16;
        header[8] = b.u8();
        if bend & 16 != 0 {
            header[8..].copy_from_slice(&b.u64().to_le_bytes());
        }
        self.poke(0x1_8000, &header);
        let count = if bend & 32 != 0 { b.u16() } else { u16::from(b.u8() % 4) };
        self.poke(at + 0x1000 + 2, &count.to_le_bytes());
        self.kick(index);
    }

    fn kick(&self, index: usize) {
        if let Some(kick) = self.kicks.get(index) {
            let one = 1u64;
            // SAFETY: the call writes eight bytes of a local variable to an eventfd of this
            // process.
            unsafe { libc::write(kick.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    fn set_up(&mut self, b: &mut Bytes<'_>) {
        self.message(1, 1, &[], &[]);
        self.message(15, 1, &[], &[]);
        let protocol = if b.u8() & 1 != 0 { b.u64() } else { 0x1_D20B & b.u64() | 9 };
        self.words(16, &[protocol], &[]);
        self.message(3, 1, &[], &[]);
        let optional = (b.u64() & 0x3400_7E46) | u64::from(b.u8() & 1) << 34;
        let wrong = if b.u8() == 255 { b.u64() } else { 0 };
        self.words(2, &[1 << 32 | 1 << 30 | optional | wrong], &[]);
        self.table(None);
        for index in 0..u64::from(b.u8()) % (u64::from(QUEUES) + 1) {
            self.ring(index, None);
        }
    }

    /// Sends a message of any kind with any bytes.
    fn any(&mut self, b: &mut Bytes<'_>) {
        let kind = u32::from(b.u8());
        let kind = if kind < 200 { kind % 46 } else { b.u32() };
        let flags = match b.u8() % 8 {
            0 => b.u32(),
            1 => 1 | 8,
            _ => 1,
        };
        let n = b.below(80);
        let payload = b.take(n);
        let fds = match b.u8() % 8 {
            0 => b.below(12),
            1 | 2 => 1,
            _ => 0,
        };
        let event = eventfd();
        let fds = vec![if fds & 1 == 0 { self.world.ram.as_raw_fd() } else { event.as_raw_fd() }; fds];
        if b.u8() & 15 == 15 {
            // The header has a wrong length.
            let mut bytes = Vec::new();
            for word in [kind, flags, b.u32()] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
            bytes.extend_from_slice(payload);
            self.send(&bytes, &fds);
        } else {
            self.message(kind, flags, payload, &fds);
        }
    }

    fn operation(&mut self, b: &mut Bytes<'_>) {
        let index = u64::from(b.u8() % 4);
        let event = eventfd();
        match b.u8() % 24 {
            0..=3 => self.any(b),
            4 => self.table(Some(b)),
            5 => self.ring(index, Some(b)),
            6..=9 => self.request(index as usize, b),
            10 => self.kick(index as usize),
            11 => self.words(11, &[index], &[]),
            12 => self.words(18, &[index | u64::from(b.u8() & 1) << 32], &[]),
            13 => self.words(12, &[index | u64::from(b.u8() & 1) << 8], &[event.as_raw_fd()]),
            14 => {
                let n = b.below(17);
                let at = b.below(RAM);
                let bytes = b.take(n);
                self.poke(at, bytes);
            }
            15 => {
                // GET_CONFIG, SET_CONFIG
                let mut payload = Vec::new();
                for word in [u32::from(b.u8()), u32::from(b.u8() % 80), u32::from(b.u8() & 3)] {
                    payload.extend_from_slice(&word.to_le_bytes());
                }
                payload.resize(12 + payload[4] as usize, b.u8());
                self.message(24 + u32::from(b.u8() & 1), 1, &payload, &[]);
            }
            16 => {
                // GET_INFLIGHT_FD, SET_INFLIGHT_FD
                let queues = u64::from(b.u8() % 5) | u64::from(b.u16()) << 16;
                let size = if b.u8() & 3 == 3 { b.u64() } else { 4096 };
                let region = memfd(if b.u8() & 1 == 0 { 4096 } else { RAM });
                let kind = 31 + u32::from(b.u8() & 1);
                let fds = [region.as_raw_fd()];
                self.words(kind, &[size, 0, queues], if kind == 32 { &fds } else { &[] });
            }
            17 => {
                // SET_LOG_BASE
                let size = if b.u8() & 3 == 3 { b.u64() } else { 4096 };
                let log = memfd(4096);
                self.words(6, &[size, u64::from(b.u8() & 1) * 4096], &[log.as_raw_fd()]);
            }
            18 => {
                // ADD_MEM_REG, REM_MEM_REG
                let guest = if b.u8() & 3 == 3 { b.u64() } else { GUEST * 16 };
                let fds = [self.world.ram.as_raw_fd()];
                let kind = 37 + u32::from(b.u8() & 1);
                self.words(kind, &[0, guest, RAM as u64, USER * 2, 0], &fds);
            }
            19 => self.words(39, &[u64::from(b.u8())], &[]),
            20 => self.message(34, 1, &[], &[]),
            21 => self.set_up(b),
            22 => self.words(2, &[b.u64()], &[]),
            _ => {
                let n = b.below(24);
                let bytes = b.take(n);
                self.send(bytes, &[]);
            }
        }
    }
}

/// The fuzz target.
pub fn messages(data: &[u8]) {
    let world = world();
    let mut b = Bytes(data);
    // SAFETY: the range is the whole mapping.
    unsafe { std::ptr::write_bytes(world.map as *mut u8, 0, RAM) };
    let stream = UnixStream::connect(&world.socket).expect("the export listens");
    let mut peer = Peer { stream, world, kicks: Vec::new(), gone: false };
    if b.u8() & 3 != 0 {
        peer.set_up(&mut b);
    }
    while !b.is_empty() && !peer.gone {
        peer.operation(&mut b);
    }
    // The back end has to notice that its front end left.
    let _ = peer.stream.shutdown(std::net::Shutdown::Write);
    peer.stream.set_nonblocking(false).unwrap();
    peer.stream.set_read_timeout(Some(HANG)).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match peer.stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the back-end keeps the connection {HANG:?} after its front end left")
            }
            Err(_) => break,
        }
    }
}
