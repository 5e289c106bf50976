//! Network interfaces of the host: taps, packet sockets, counters, and a separate network
//! namespace.
//!
//! Measurements of a network ([`crate::net`], [`crate::kernel`]) use it as the host's end. It
//! consists of a few ioctls, and shares no code with the server.

mod packet;
mod tap;

pub use self::packet::{Inbox, Outbox, PacketSocket};
pub use self::tap::{VNET_HEADER, open_tap, steer_to_first};

use std::os::fd::AsFd;

use rustix::ioctl::{Setter, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::error::{Error, Kind, Result, fail};

const SIOCSIFFLAGS: u32 = 0x8914;
const IFF_UP: i16 = 1;

/// `struct ifreq`: a name, then a union of 24 bytes, of which only the flags are used here.
#[repr(C)]
#[derive(Clone, Copy)]
struct IfReq {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<IfReq>() == 40);

impl IfReq {
    fn new(name: &str, flags: i16) -> Result<Self> {
        if name.is_empty() || name.len() > 15 || name.contains('\0') {
            return Err(fail!(Usage, "{name:?} is no interface's name: those have 1 to 15 bytes"));
        }
        let mut request = Self { name: [0; 16], flags, rest: [0; 22] };
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(request)
    }
}

fn failed(what: &str) -> impl Fn(rustix::io::Errno) -> Error + '_ {
    move |errno| {
        let hint = match errno {
            rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => " (run as root)",
            rustix::io::Errno::NODEV => {
                ": there is none in this network namespace (ip netns exec NAME runs in another)"
            }
            _ => "",
        };
        Error::with(Kind::System, format!("{what} failed{hint}"), errno)
    }
}

/// Moves this process into its own network namespace, which has no other traffic. Call this before
/// other threads start, because those would stay in the previous namespace.
///
/// # Errors
/// The process is not root.
pub fn own_namespace() -> Result<()> {
    // SAFETY: unshare(2) accesses no memory of this process. The new namespace applies to this
    // thread and to threads that it starts.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Error::with(Kind::Connect, "cannot make a network namespace: run as root (CAP_SYS_ADMIN)", error))
}

/// Sets an interface up.
///
/// # Errors
/// There is no interface of that name, or the process is not root.
pub fn bring_up(name: &str) -> Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(failed("a socket"))?;
    set_up(name, &socket)
}

fn set_up(name: &str, socket: impl AsFd) -> Result<()> {
    let up = IfReq::new(name, IFF_UP)?;
    // SAFETY: SIOCSIFFLAGS reads a struct ifreq, which `up` is.
    let setter = unsafe { Setter::<SIOCSIFFLAGS, IfReq>::new(up) };
    // SAFETY: the setter holds the structure for the call, which accesses no other memory.
    unsafe { ioctl(socket, setter) }.map_err(|e| failed(&format!("bringing interface {name} up"))(e))
}

/// Stops the host's IPv6 traffic on an interface. Call this before the interface is up. Without
/// IPv6 it has no effect and is no error.
pub fn disable_ipv6(name: &str) {
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
}

/// Counters of an interface on the host's side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Frames that the host received from it. For a tap, those that were written to its queues.
    pub received: u64,
    /// Bytes of the received frames.
    pub received_bytes: u64,
    /// Received frames that were dropped.
    pub received_dropped: u64,
    /// Frames that were sent to it.
    pub sent: u64,
    /// Frames to be sent that were dropped because there was no room.
    pub sent_dropped: u64,
}

/// Returns the counters of an interface in the namespace of the calling thread.
///
/// # Errors
/// There is no interface of that name.
pub fn counters(name: &str) -> Result<LinkCounters> {
    let path = "/proc/thread-self/net/dev";
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::with(Kind::System, format!("cannot read {path}"), e))?;
    find_counters(&text, name)
        .ok_or_else(|| fail!(Usage, "there is no interface {name} in this network namespace"))
}

fn find_counters(text: &str, name: &str) -> Option<LinkCounters> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
    let fields: Vec<u64> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    let [received_bytes, received, _, received_dropped, ..] = fields[..] else { return None };
    Some(LinkCounters {
        received,
        received_bytes,
        received_dropped,
        sent: *fields.get(9)?,
        sent_dropped: *fields.get(11)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_the_whole_name() {
        let text = "Inter-|   Receive\n face |bytes packets errs\n vs0:  100 2 0 1 0 0 0 0 7 5 0 3 0 0 0 0\n\
                    avs0: 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n";
        let want =
            LinkCounters { received: 2, received_bytes: 100, received_dropped: 1, sent: 5, sent_dropped: 3 };
        assert_eq!(find_counters(text, "vs0"), Some(want));
        assert_eq!(find_counters(text, "vs"), None);
    }

    #[test]
    fn names_are_checked() {
        assert!(IfReq::new("", 0).is_err() && IfReq::new("sixteen-letters-", 0).is_err());
        assert!(IfReq::new("fifteen-letters", 0).is_ok());
    }
}
