//! A tap with several queues, and a raw socket at its other side: the network that the driver's frames come out in.

use std::fs::File;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Setter, ioctl};
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netdevice, recv, send,
    socket_with, sockopt,
};

use super::frame::ETHERTYPE;
use crate::error::{Error, Kind, Result};

/// `struct ifreq`: a name, then a union of 24 bytes, of which only the flags are used here.
#[repr(C)]
#[derive(Clone, Copy)]
struct IfReq {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<IfReq>() == 40);

const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
const SIOCSIFFLAGS: u32 = 0x8914;
/// IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_MULTI_QUEUE.
const TAP_FLAGS: i16 = 0x0002 | 0x1000 | 0x4000 | 0x0100;
const IFF_UP: i16 = 1;

/// Bytes of the header before each frame: virtio 1.3, 5.1.6, with `num_buffers`.
pub(super) const VNET_HEADER: usize = 12;

fn oops(what: &str) -> impl Fn(rustix::io::Errno) -> Error + '_ {
    move |errno| {
        let hint = match errno {
            rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => " (run as root)",
            _ => "",
        };
        Error::with(Kind::System, format!("{what} failed{hint}"), errno)
    }
}

impl IfReq {
    fn new(name: &str, flags: i16) -> Result<Self> {
        if name.is_empty() || name.len() > 15 {
            return Err(Error::new(Kind::Usage, "--tap: a name of 1 to 15 bytes"));
        }
        let mut request = Self { name: [0; 16], flags, rest: [0; 22] };
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(request)
    }
}

/// Makes the tap, or joins it if it is there: a file a queue. It is gone when they are closed.
pub(super) fn open(name: &str, queues: u16) -> Result<Vec<File>> {
    let request = IfReq::new(name, TAP_FLAGS)?;
    let one = |_| {
        let file = File::options().read(true).write(true).open("/dev/net/tun").map_err(|e| {
            let what =
                "cannot open /dev/net/tun: the module tun is not loaded, or this is not root; modprobe tun";
            Error::with(Kind::Connect, what, e)
        })?;
        // SAFETY: TUNSETIFF reads and writes a struct ifreq, of which this is a copy.
        unsafe { ioctl(&file, Setter::<TUNSETIFF, IfReq>::new(request)) }.map_err(oops("TUNSETIFF"))?;
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        unsafe { ioctl(&file, Setter::<TUNSETVNETHDRSZ, i32>::new(VNET_HEADER as i32)) }
            .map_err(oops("TUNSETVNETHDRSZ"))?;
        Ok(file)
    };
    (0..queues).map(one).collect()
}

/// `struct sockaddr_ll`: an interface and a type of frame.
#[repr(C)]
struct LinkAddress {
    family: u16,
    protocol: u16,
    index: i32,
    rest: [u8; 12],
}

// SAFETY: the pointer is to a whole `struct sockaddr_ll`, 20 bytes, for the time of the call.
unsafe impl SocketAddrArg for LinkAddress {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f(std::ptr::from_ref(self).cast(), size_of::<Self>() as SocketAddrLen)
    }
}

const _: () = assert!(size_of::<LinkAddress>() == 20);

/// The other side of a tap.
pub(super) struct FarEnd {
    socket: OwnedFd,
}

impl FarEnd {
    /// Brings the tap up and listens on it for our frames.
    pub(super) fn open(name: &str) -> Result<Self> {
        let protocol = NonZeroU32::new(u32::from(ETHERTYPE.to_be())).map(Protocol::from_raw);
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, protocol)
            .map_err(oops("a packet socket"))?;
        let up = IfReq::new(name, IFF_UP)?;
        // SAFETY: SIOCSIFFLAGS reads a struct ifreq.
        unsafe { ioctl(&socket, Setter::<SIOCSIFFLAGS, IfReq>::new(up)) }.map_err(oops("SIOCSIFFLAGS"))?;
        let index = netdevice::name_to_index(&socket, name).map_err(oops("SIOCGIFINDEX"))? as i32;
        let family = AddressFamily::PACKET.as_raw();
        let address = LinkAddress { family, protocol: ETHERTYPE.to_be(), index, rest: [0; 12] };
        bind(&socket, &address).map_err(oops("binding the packet socket"))?;
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20);
        Ok(Self { socket })
    }

    /// Sends a frame into the tap.
    pub(super) fn send(&self, frame: &[u8]) -> Result<()> {
        send(&self.socket, frame, SendFlags::empty()).map(drop).map_err(oops("sending into the tap"))
    }

    /// The next frame out of the tap within `wait`; its length.
    pub(super) fn recv(&self, frame: &mut [u8], wait: Duration) -> Result<Option<usize>> {
        let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        if poll(&mut fds, Some(&limit)).unwrap_or(0) == 0 {
            return Ok(None);
        }
        recv(&self.socket, frame, RecvFlags::DONTWAIT)
            .map(|(len, _)| Some(len))
            .map_err(oops("receiving from the tap"))
    }
}
