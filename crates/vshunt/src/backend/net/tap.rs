//! A tap with several queues: an Ethernet interface of the host whose other end we have.
//!
//! [`Tap::open`] makes the interface or adopts one that is there. Each [`TapQueue`] is an open file of /dev/net/tun, for
//! whoever moves frames: `read` and `write` of one frame each behind a virtio-net header, or the kernel's vhost-net. A
//! queue begins detached, so that the kernel sends nothing to where nobody reads; [`TapQueue::attach`] and
//! [`TapQueue::detach`] change that at any time (TUNSETQUEUE).
//!
//! Called by control threads and by the session thread, never while a frame is moved. What must never happen: an adopted
//! interface removed, or one that another program uses taken over.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use super::ifreq::{self, Links};
use crate::error::{Error, Result};
pub use crate::export::spec::NetCounters as Counters;

/// Bytes of an interface's name at most (IFNAMSIZ less the end).
pub const NAME_MAX: usize = 15;
/// Queues of one tap at most (the kernel's MAX_TAP_QUEUES).
pub const QUEUES_MAX: u16 = 256;
/// The smallest MTU: IPv4's, and the kernel's for Ethernet.
pub const MTU_MIN: u32 = 68;
/// The largest MTU of a tap: 64 KiB less one byte and the Ethernet header.
pub const MTU_MAX: u32 = 65521;

/// Bytes of a virtio-net header without and with its number of buffers (Virtio 1.3, 5.1.6). Legacy guests that do not merge
/// buffers have the short one.
pub const HEADER_SHORT: u32 = 10;
/// See [`HEADER_SHORT`].
pub const HEADER_LONG: u32 = 12;

const CLONE_DEVICE: &str = "/dev/net/tun";

// linux/if_tun.h, TUN_F_*
const F_CSUM: u32 = 0x01;
const F_TSO4: u32 = 0x02;
const F_TSO6: u32 = 0x04;
const F_TSO_ECN: u32 = 0x08;
const F_UFO: u32 = 0x10;
const F_USO: u32 = 0x60;

/// What the reader of the queues takes off the kernel's hands (TUNSETOFFLOAD).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Frames whose checksum is not computed yet. Without it nothing below holds.
    pub csum: bool,
    /// TCP segments over IPv4 longer than the MTU.
    pub tso4: bool,
    /// TCP segments over IPv6 longer than the MTU.
    pub tso6: bool,
    /// Such segments with ECN.
    pub ecn: bool,
    /// UDP fragments.
    pub ufo: bool,
    /// UDP segments (both IP versions, or neither).
    pub uso: bool,
}

impl Offloads {
    /// The kernel's bits. It refuses combinations that make no sense, so they are left out.
    fn bits(self) -> u32 {
        if !self.csum {
            return 0;
        }
        let tso = self.tso4 || self.tso6;
        let bit = |on: bool, bits| if on { bits } else { 0 };
        F_CSUM
            | bit(self.tso4, F_TSO4)
            | bit(self.tso6, F_TSO6)
            | bit(self.ecn && tso, F_TSO_ECN)
            | bit(self.ufo, F_UFO)
            | bit(self.uso, F_USO)
    }
}

/// One queue of a tap.
#[derive(Debug)]
pub struct TapQueue {
    file: File,
    name: String,
    /// The kernel detaches queues of such taps only.
    multi_queue: bool,
    /// Held over the call, so that it says what is so.
    attached: Mutex<bool>,
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl TapQueue {
    /// Of a file that was joined just now. Detached, where that can be.
    fn new(file: File, name: &str, multi_queue: bool) -> Result<Self> {
        let queue = Self { file, name: name.to_owned(), multi_queue, attached: Mutex::new(true) };
        queue.detach()?;
        Ok(queue)
    }

    /// For all queues of its tap.
    fn set_offloads(&self, offloads: Offloads) -> Result<()> {
        ifreq::set_number(&self.file, ifreq::TUNSETOFFLOAD, offloads.bits().into())
            .map_err(|e| Error::io(format!("tap {} cannot have {offloads:?}", self.name), e))
    }

    /// Lets frames come to this queue. Idempotent.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(&self) -> Result<()> {
        self.set(true)
    }

    /// Lets no frame come to this queue; those that wait in it are dropped. Frames written to it are still taken. Does
    /// nothing on a tap that is not multi-queue. Idempotent.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self) -> Result<()> {
        self.set(false)
    }

    /// Whether frames may come to it.
    pub fn attached(&self) -> bool {
        *self.attached.lock().expect("no holder panics")
    }

    fn set(&self, on: bool) -> Result<()> {
        let mut attached = self.attached.lock().expect("no holder panics");
        if *attached == on || !self.multi_queue {
            return Ok(());
        }
        let flag = if on { ifreq::IFF_ATTACH_QUEUE } else { ifreq::IFF_DETACH_QUEUE };
        let (name, what) = (&self.name, if on { "attached" } else { "detached" });
        ifreq::set_queue(&self.file, flag)
            .map_err(|e| Error::io(format!("a queue of tap {name} cannot be {what}"), e))?;
        *attached = on;
        Ok(())
    }
}

/// A tap interface, for as long as this lives: one that was made goes with its last open file.
#[derive(Debug)]
pub struct Tap {
    name: String,
    made: bool,
    multi_queue: bool,
    uso: bool,
    links: Links,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queues: Vec<Arc<TapQueue>>,
    header: u32,
    offloads: Offloads,
}

impl Tap {
    /// Opens `queues` queues (one at least) of the tap called `name`, all detached. An interface of that name is adopted,
    /// and stays when we go; else one is made, set up, and removed with us.
    ///
    /// # Errors
    /// With what to do: no /dev/net/tun, no permission, a name that none can have, an interface that is no tap, is in use,
    /// or has one queue where more are asked for; more queues than a tap can have.
    pub fn open(name: &str, queues: u16) -> Result<Self> {
        check_name(name)?;
        let links = Links::new().map_err(|e| Error::io(format!("cannot look for interface {name}"), e))?;
        let index = links.index(name);
        if index.is_some_and(|index| has_carrier(name, index)) {
            return Err(busy(name));
        }
        let file = open_tun()?;
        let multi_queue = join_first(&file, name, index.is_some())?;
        let first = Arc::new(TapQueue::new(file, name, multi_queue)?);
        let with_uso = Offloads { csum: true, uso: true, ..Offloads::default() };
        let uso = first.set_offloads(with_uso).is_ok();
        first.set_offloads(Offloads::default())?;
        // The header that an adopted one has is not known.
        let state = State { queues: vec![first], header: 0, offloads: Offloads::default() };
        let made = index.is_none();
        let tap = Self { name: name.to_owned(), made, multi_queue, uso, links, state: Mutex::new(state) };
        tap.set_header(HEADER_SHORT)?;
        tap.queues(queues)?;
        if tap.made {
            tap.links
                .set_up(name)
                .map_err(|e| Error::io(format!("tap {name} was made and cannot be set up"), e))?;
        }
        Ok(tap)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it goes when this goes.
    pub fn made(&self) -> bool {
        self.made
    }

    /// Whether it can have more queues than one.
    pub fn multi_queue(&self) -> bool {
        self.multi_queue
    }

    /// Whether it knows UDP segments ([`Offloads::uso`]): Linux 6.2 and later.
    pub fn has_uso(&self) -> bool {
        self.uso
    }

    /// Queues that are open.
    pub fn open_queues(&self) -> u16 {
        self.state().queues.len() as u16
    }

    /// The first `count` queues; those that are not open yet are opened.
    ///
    /// # Errors
    /// It is not multi-queue, or cannot have so many.
    pub fn queues(&self, count: u16) -> Result<Vec<Arc<TapQueue>>> {
        let name = &self.name;
        if count > 1 && !self.multi_queue {
            return Err(Error::unsupported(format!(
                "interface {name} is a tap with one queue, and {count} are asked for; give queues=1, or make it anew: \
                 ip tuntap add dev {name} mode tap multi_queue"
            )));
        }
        let mut state = self.state();
        while state.queues.len() < usize::from(count) {
            let file = open_tun()?;
            ifreq::join(&file, name, flags(true)).map_err(|e| explain(name, e, true))?;
            state.queues.push(Arc::new(TapQueue::new(file, name, true)?));
        }
        Ok(state.queues[..usize::from(count)].to_vec())
    }

    /// Sets how long the header before each frame is: [`HEADER_SHORT`] or [`HEADER_LONG`]. For all queues.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_header(&self, bytes: u32) -> Result<()> {
        let mut state = self.state();
        if state.header == bytes {
            return Ok(());
        }
        ifreq::set_int(state.queues[0].as_fd(), ifreq::TUNSETVNETHDRSZ, bytes as i32)
            .map_err(|e| Error::io(format!("tap {} cannot have headers of {bytes} bytes", self.name), e))?;
        state.header = bytes;
        Ok(())
    }

    /// Sets what readers take off the kernel's hands. For all queues.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_offloads(&self, offloads: Offloads) -> Result<()> {
        let mut state = self.state();
        if state.offloads != offloads {
            state.queues[0].set_offloads(offloads)?;
            state.offloads = offloads;
        }
        Ok(())
    }

    /// Bytes of the longest IP packet.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn mtu(&self) -> Result<u32> {
        let name = &self.name;
        self.links.mtu(name).map_err(|e| Error::io(format!("the MTU of tap {name} cannot be read"), e))
    }

    /// Sets it.
    ///
    /// # Errors
    /// It is out of range, or not ours to set.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        let name = &self.name;
        check_mtu(mtu)?;
        self.links.set_mtu(name, mtu).map_err(|e| match e.raw_os_error() {
            Some(libc::EPERM) => Error::io(
                format!(
                    "tap {name} cannot be given an MTU without CAP_NET_ADMIN; run as root, or leave out mtu"
                ),
                e,
            ),
            _ => Error::io(format!("tap {name} cannot be given an MTU of {mtu}"), e),
        })
    }

    /// Sends a frame to the host as if it came from the guest.
    ///
    /// # Errors
    /// The interface is down.
    pub fn inject(&self, frame: &[u8]) -> Result<()> {
        let state = self.state();
        let header = [0; HEADER_LONG as usize];
        let parts = [IoSlice::new(&header[..state.header as usize]), IoSlice::new(frame)];
        match rustix::io::writev(&*state.queues[0], &parts) {
            Ok(_) => Ok(()),
            Err(e) => {
                Err(Error::io(format!("tap {} does not take a frame (is it up?)", self.name), e.into()))
            }
        }
    }

    /// What went through it; none where it is not in the network namespace of the calling thread (any more).
    pub fn counters(&self) -> Option<Counters> {
        let text = std::fs::read_to_string("/proc/thread-self/net/dev").ok()?;
        parse_counters(&text, &self.name)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

/// Whether an interface can have that name.
///
/// # Errors
/// [`Invalid`](crate::error::Kind::Invalid), with what would be right.
pub fn check_name(name: &str) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("no interface can be called {name:?}: {why}")));
    match name {
        "" => wrong("a name has a letter at least"),
        "." | ".." => wrong("that is a folder's"),
        _ if name.len() > NAME_MAX => wrong(&format!("it has {} bytes; {NAME_MAX} is the most", name.len())),
        // `%d` would have the kernel choose a number, and we would not know which.
        _ if name.contains(|c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace()) => {
            wrong("it may not contain '/', ':', '%' or a space")
        }
        _ => Ok(()),
    }
}

/// Whether a tap can have that MTU.
///
/// # Errors
/// [`Invalid`](crate::error::Kind::Invalid), with the range.
pub fn check_mtu(mtu: u32) -> Result<()> {
    match (MTU_MIN..=MTU_MAX).contains(&mtu) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("mtu={mtu} is out of range; {MTU_MIN} to {MTU_MAX} is possible")))
        }
    }
}

fn open_tun() -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(CLONE_DEVICE);
    file.map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Error::unsupported(format!(
            "there is no {CLONE_DEVICE}: the module tun is not loaded or not installed; as root: modprobe tun"
        )),
        Some(libc::EACCES | libc::EPERM) => Error::io(
            format!("no permission to open {CLONE_DEVICE}; run as root, or let this user read and write it"),
            e,
        ),
        _ => Error::io(format!("cannot open {CLONE_DEVICE}"), e),
    })
}

fn flags(multi_queue: bool) -> u16 {
    let flags = ifreq::IFF_TAP | ifreq::IFF_NO_PI | ifreq::IFF_VNET_HDR;
    if multi_queue { flags | ifreq::IFF_MULTI_QUEUE } else { flags }
}

/// Joins the first file; returns whether the interface is multi-queue.
fn join_first(file: &File, name: &str, exists: bool) -> Result<bool> {
    match ifreq::join(file, name, flags(true)) {
        Ok(()) => Ok(true),
        // One that is there may be of one queue: the kernel refuses the other kind.
        Err(e) if exists && e.raw_os_error() == Some(libc::EINVAL) => {
            ifreq::join(file, name, flags(false)).map(|()| false).map_err(|e| explain(name, e, exists))
        }
        Err(e) => Err(explain(name, e, exists)),
    }
}

fn explain(name: &str, e: io::Error, exists: bool) -> Error {
    match Errno::from_io_error(&e) {
        Some(Errno::BUSY) => busy(name),
        Some(Errno::TOOBIG) => {
            Error::limit(format!("tap {name} cannot have more queues; {QUEUES_MAX} is the most"))
        }
        Some(Errno::INVAL) if exists => {
            Error::invalid(format!("interface {name} is there and is no tap; give another ifname"))
        }
        Some(Errno::PERM) if exists => Error::io(
            format!(
                "no permission to use tap {name}; run as root (CAP_NET_ADMIN), or make it for this user: ip tuntap add \
                 dev {name} mode tap multi_queue user NAME"
            ),
            e,
        ),
        Some(Errno::PERM) => Error::io(
            format!(
                "no permission to make tap {name}; run as root (CAP_NET_ADMIN), or make it before, for this user: ip \
                 tuntap add dev {name} mode tap multi_queue user NAME"
            ),
            e,
        ),
        _ => Error::io(format!("cannot have tap {name}"), e),
    }
}

fn busy(name: &str) -> Error {
    Error::busy(format!("tap {name} is in use by another program; end that, or give another ifname"))
}

/// Whether a program has a queue of a tap that is up. The kernel would let us add ours to the others' and deal frames out
/// among all. It cannot be told of one that is down, or where /sys shows another network namespace.
fn has_carrier(name: &str, index: i32) -> bool {
    let dir = Path::new("/sys/class/net").join(name);
    let read = |file| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
    read("ifindex").trim() == index.to_string()
        && !read("tun_flags").is_empty()
        && read("carrier").trim() == "1"
}

/// The line of `name` in /proc/net/dev.
fn parse_counters(text: &str, name: &str) -> Option<Counters> {
    let line = text.lines().find_map(|l| l.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
    let n: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // Receive: bytes packets errs drop fifo frame compressed multicast; transmit: bytes packets errs drop …
    let at = |i: usize| n.get(i).copied();
    Some(Counters {
        from_guest_bytes: at(0)?,
        from_guest_packets: at(1)?,
        from_guest_dropped: at(3)?,
        to_guest_bytes: at(8)?,
        to_guest_packets: at(9)?,
        to_guest_dropped: at(11)?,
    })
}

#[cfg(test)]
mod tests;
