//! Calls that name an interface: struct ifreq of `<linux/if.h>`, and the numbers of `<linux/if_tun.h>`.
//!
//! A name means what it means in the network namespace of the file that is asked.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

// linux/if_tun.h
pub(super) const TUNSETIFF: libc::Ioctl = 0x4004_54CA;
pub(super) const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54D0;
pub(super) const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54D8;
pub(super) const TUNSETQUEUE: libc::Ioctl = 0x4004_54D9;
pub(super) const IFF_TAP: u16 = 0x0002;
pub(super) const IFF_MULTI_QUEUE: u16 = 0x0100;
pub(super) const IFF_ATTACH_QUEUE: u16 = 0x0200;
pub(super) const IFF_DETACH_QUEUE: u16 = 0x0400;
pub(super) const IFF_NO_PI: u16 = 0x1000;
pub(super) const IFF_VNET_HDR: u16 = 0x4000;

/// Bytes of struct ifreq on 64-bit systems: the name, and a union of 24.
const IFREQ_BYTES: usize = 40;

/// struct ifreq. What is read of the union depends on the call.
#[repr(C, align(8))]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    value: [u8; IFREQ_BYTES - libc::IFNAMSIZ],
}

const _: () = assert!(size_of::<IfReq>() == size_of::<libc::ifreq>());

impl IfReq {
    fn new(name: &str) -> Self {
        let mut req = Self { name: [0; libc::IFNAMSIZ], value: [0; IFREQ_BYTES - libc::IFNAMSIZ] };
        // The last byte stays zero.
        let n = name.len().min(libc::IFNAMSIZ - 1);
        req.name[..n].copy_from_slice(&name.as_bytes()[..n]);
        req
    }

    fn with_flags(mut self, flags: u16) -> Self {
        self.value[..2].copy_from_slice(&flags.to_ne_bytes());
        self
    }

    fn with_number(mut self, number: i32) -> Self {
        self.value[..4].copy_from_slice(&number.to_ne_bytes());
        self
    }

    fn number(&self) -> i32 {
        i32::from_ne_bytes(self.value[..4].try_into().expect("4 bytes"))
    }

    fn call(&mut self, fd: impl AsFd, code: libc::Ioctl) -> io::Result<()> {
        // SAFETY: the codes of this module and of `<linux/sockios.h>` used here read and write a struct ifreq, as long as
        // this one is (asserted above), with a name that ends.
        match unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), code, self as *mut Self) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// TUNSETIFF: joins a file of /dev/net/tun to an interface, which is made if there is none of that name.
pub(super) fn join(tun: impl AsFd, name: &str, flags: u16) -> io::Result<()> {
    IfReq::new(name).with_flags(flags).call(tun, TUNSETIFF)
}

/// TUNSETQUEUE.
pub(super) fn set_queue(tun: impl AsFd, flag: u16) -> io::Result<()> {
    IfReq::new("").with_flags(flag).call(tun, TUNSETQUEUE)
}

/// A call to a file of /dev/net/tun whose argument is a number.
pub(super) fn set_number(tun: impl AsFd, code: libc::Ioctl, number: libc::c_ulong) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    match unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), code, number) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A call to a file of /dev/net/tun whose argument is a pointer to an int.
pub(super) fn set_int(tun: impl AsFd, code: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    match unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), code, &raw const value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Asks and tells of interfaces in the network namespace in which it was made.
#[derive(Debug)]
pub(super) struct Links(OwnedFd);

impl Links {
    pub(super) fn new() -> io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self(socket))
    }

    /// Its number; none if there is no such interface.
    pub(super) fn index(&self, name: &str) -> Option<i32> {
        let mut req = IfReq::new(name);
        req.call(&self.0, libc::SIOCGIFINDEX).ok().map(|()| req.number())
    }

    pub(super) fn mtu(&self, name: &str) -> io::Result<u32> {
        let mut req = IfReq::new(name);
        req.call(&self.0, libc::SIOCGIFMTU)?;
        Ok(req.number() as u32)
    }

    pub(super) fn set_mtu(&self, name: &str, mtu: u32) -> io::Result<()> {
        IfReq::new(name).with_number(mtu as i32).call(&self.0, libc::SIOCSIFMTU)
    }

    /// Sets IFF_UP.
    pub(super) fn set_up(&self, name: &str) -> io::Result<()> {
        let mut req = IfReq::new(name);
        req.call(&self.0, libc::SIOCGIFFLAGS)?;
        let flags = u16::from_ne_bytes([req.value[0], req.value[1]]) | libc::IFF_UP as u16;
        req.with_flags(flags).call(&self.0, libc::SIOCSIFFLAGS)
    }
}
