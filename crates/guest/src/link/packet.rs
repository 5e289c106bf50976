//! Packet sockets: the host's end of a tap, frame by frame or in batches.
//!
//! A socket and its batches belong to one thread.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netdevice, recv, send, socket_with,
    sockopt,
};

use super::{failed, set_up};
use crate::error::{Error, Kind, Result, fail};

/// Bytes of a socket's receive buffer. It is large, so that a receiver that is late for a short
/// time loses nothing.
const RECEIVE_BYTES: usize = 64 << 20;

/// `struct sockaddr_ll`: an interface and a type of frame.
#[repr(C)]
struct LinkAddress {
    family: u16,
    protocol: u16,
    index: i32,
    rest: [u8; 12],
}

// SAFETY: the pointer is to a whole `struct sockaddr_ll`, 20 bytes, and `self` outlives the call.
unsafe impl SocketAddrArg for LinkAddress {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f(std::ptr::from_ref(self).cast(), size_of::<Self>() as SocketAddrLen)
    }
}

const _: () = assert!(size_of::<LinkAddress>() == 20);

/// A packet socket on one interface.
pub struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Sets the interface up, and receives frames of one type there. 0: no frames; such a socket
    /// costs the sender nothing.
    ///
    /// # Errors
    /// There is no such interface, or the process lacks CAP_NET_RAW.
    pub fn open(name: &str, ethertype: u16) -> Result<Self> {
        // No type at first, because frames of other interfaces arrive until the socket is bound.
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .map_err(failed("a packet socket"))?;
        set_up(name, &socket)?;
        let index = netdevice::name_to_index(&socket, name).map_err(failed("SIOCGIFINDEX"))? as i32;
        if ethertype != 0 {
            let _ = sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BYTES);
        }
        let family = AddressFamily::PACKET.as_raw();
        let address = LinkAddress { family, protocol: ethertype.to_be(), index, rest: [0; 12] };
        bind(&socket, &address).map_err(failed("binding the packet socket"))?;
        Ok(Self { socket })
    }

    /// Sends frames directly to the driver, without the queueing disciplines, as the kernel's
    /// packet generator does.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn bypass_qdisc(&self) -> Result<()> {
        self.set(libc::PACKET_QDISC_BYPASS).map_err(failed("PACKET_QDISC_BYPASS"))
    }

    /// Puts a virtio-net header of 10 bytes before received and sent frames.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn with_header(&self) -> Result<()> {
        self.set(libc::PACKET_VNET_HDR).map_err(failed("PACKET_VNET_HDR"))
    }

    fn set(&self, option: libc::c_int) -> rustix::io::Result<()> {
        let one: libc::c_int = 1;
        // SAFETY: the option is an int, which outlives the call.
        let done = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                (&raw const one).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if done == 0 { Ok(()) } else { Err(last_errno()) }
    }

    /// Returns the frames since the last call that were dropped because the socket's buffer was
    /// full.
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn dropped(&self) -> Result<u64> {
        let mut stats = [0u32; 2];
        let mut len = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: the kernel writes a struct tpacket_stats, two u32, and at most `len` bytes.
        let done = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                stats.as_mut_ptr().cast(),
                &mut len,
            )
        };
        if done == 0 { Ok(stats[1].into()) } else { Err(failed("PACKET_STATISTICS")(last_errno())) }
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// Those of send(2), including a lack of room.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        send(&self.socket, frame, SendFlags::empty()).map(drop).map_err(failed("sending into the interface"))
    }

    /// Receives the next frame within `wait`. Returns its length.
    ///
    /// # Errors
    /// Those of recv(2).
    pub fn recv(&self, frame: &mut [u8], wait: Duration) -> Result<Option<usize>> {
        if !self.wait(wait) {
            return Ok(None);
        }
        recv(&self.socket, frame, RecvFlags::DONTWAIT)
            .map(|(len, _)| Some(len))
            .map_err(failed("receiving from the interface"))
    }

    /// Waits for a frame. Returns whether there may be one.
    pub fn wait(&self, wait: Duration) -> bool {
        let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        poll(&mut fds, Some(&limit)).unwrap_or(0) > 0
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Buffers, and the kernel's descriptions of them. The descriptions point at the buffers, whose
/// heap memory does not move.
struct Batch {
    frames: Vec<Box<[u8]>>,
    /// The vectors that `heads` refer to.
    _vectors: Vec<libc::iovec>,
    heads: Vec<libc::mmsghdr>,
}

impl Batch {
    fn new(count: usize, bytes: usize) -> Self {
        let mut frames: Vec<Box<[u8]>> = (0..count).map(|_| vec![0; bytes].into()).collect();
        let mut vectors: Vec<_> = frames
            .iter_mut()
            .map(|frame| libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: bytes })
            .collect();
        let heads = vectors
            .iter_mut()
            .map(|vector| {
                // SAFETY: an all-zero `mmsghdr` is valid: a message without address, data and
                // control.
                let mut head: libc::mmsghdr = unsafe { std::mem::zeroed() };
                head.msg_hdr.msg_iov = vector;
                head.msg_hdr.msg_iovlen = 1;
                head
            })
            .collect();
        Self { frames, _vectors: vectors, heads }
    }
}

// SAFETY: the raw pointers refer to heap memory that the struct owns. It stays in place when the
// struct moves.
unsafe impl Send for Batch {}

/// Frames that are sent together.
pub struct Outbox {
    batch: Batch,
    lens: Vec<usize>,
    bytes: usize,
}

impl Outbox {
    /// Makes room for `count` frames of up to `bytes`.
    pub fn new(count: usize, bytes: usize) -> Self {
        Self { batch: Batch::new(count, bytes), lens: vec![0; count], bytes }
    }

    /// Returns the number of frames that it has room for.
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Returns whether it has room for none.
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// Returns `len` bytes of frame `at`, to be written.
    pub fn frame(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(len <= self.bytes, "a frame longer than the outbox was made for");
        self.lens[at] = len;
        &mut self.batch.frames[at][..len]
    }

    /// Sends the first `count` frames. Returns how many were sent, and how many were skipped
    /// because the interface had no room.
    ///
    /// # Errors
    /// Those of sendmmsg(2), except a lack of room.
    pub fn send(&mut self, socket: &PacketSocket, count: usize) -> Result<(u64, u64)> {
        let (mut at, mut taken, mut refused) = (0, 0, 0);
        for (head, &len) in self.batch.heads[..count].iter_mut().zip(&self.lens) {
            // SAFETY: each head points at the vector with the same index, which `batch` owns.
            unsafe { (*head.msg_hdr.msg_iov).iov_len = len };
        }
        while at < count {
            let rest = &mut self.batch.heads[at..count];
            // SAFETY: every head describes a buffer of `batch` with at least the given length. The
            // kernel only reads it.
            let n = unsafe {
                libc::sendmmsg(socket.socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, 0)
            };
            if n > 0 {
                at += n as usize;
                taken += n as u64;
                continue;
            }
            match last_errno() {
                Errno::NOBUFS | Errno::AGAIN | Errno::BUSY => {
                    at += 1;
                    refused += 1;
                }
                Errno::INTR => {}
                Errno::NETDOWN | Errno::NXIO => {
                    return Err(fail!(Lost, "the interface went down or is gone: nothing can be sent to it"));
                }
                errno => return Err(failed("sending into the interface")(errno)),
            }
        }
        Ok((taken, refused))
    }
}

/// Frames that were received together.
pub struct Inbox {
    batch: Batch,
    lens: Vec<usize>,
}

impl Inbox {
    /// Makes room for `count` frames of up to `bytes`. Longer frames are truncated.
    pub fn new(count: usize, bytes: usize) -> Self {
        Self { batch: Batch::new(count, bytes), lens: Vec::with_capacity(count) }
    }

    /// Receives the frames that are there, without waiting. Returns their number.
    ///
    /// # Errors
    /// Those of recvmmsg(2).
    pub fn recv(&mut self, socket: &PacketSocket) -> Result<usize> {
        self.lens.clear();
        let heads = &mut self.batch.heads;
        // SAFETY: every head describes a buffer of `batch` with its length. The kernel writes no
        // more than that.
        let n = unsafe {
            libc::recvmmsg(
                socket.socket.as_raw_fd(),
                heads.as_mut_ptr(),
                heads.len() as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if n < 0 {
            return match last_errno() {
                Errno::AGAIN | Errno::INTR => Ok(0),
                Errno::NETDOWN => {
                    Err(Error::new(Kind::Lost, "the interface went down: nothing comes from it"))
                }
                errno => Err(failed("receiving from the interface")(errno)),
            };
        }
        self.lens.extend(heads[..n as usize].iter().map(|head| head.msg_len as usize));
        Ok(n as usize)
    }

    /// Returns the frames of the last [`Inbox::recv`].
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        self.batch.frames.iter().zip(&self.lens).map(|(frame, &len)| &frame[..len.min(frame.len())])
    }
}
