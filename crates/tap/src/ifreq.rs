//! Calls that name an interface, or that use a tap's file: struct ifreq of `<linux/if.h>`, and the
//! calls of `<linux/if_tun.h>`. Macvtap's files have the same calls.
//!
//! A name is looked up in the network namespace of the file that the call uses.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

// linux/if_tun.h
const TUNSETIFF: libc::Ioctl = 0x4004_54CA;
const TUNGETIFF: libc::Ioctl = 0x8004_54D2_u32 as libc::Ioctl;
const TUNSETQUEUE: libc::Ioctl = 0x4004_54D9;
const TUNGETFEATURES: libc::Ioctl = 0x8004_54CF_u32 as libc::Ioctl;
const TUNGETDEVNETNS: libc::Ioctl = 0x54E3;
/// The argument is a value.
pub(super) const TUNSETPERSIST: libc::Ioctl = 0x4004_54CB;
/// The argument is a value.
pub(super) const TUNSETOWNER: libc::Ioctl = 0x4004_54CC;
/// The argument is a value.
pub(super) const TUNSETGROUP: libc::Ioctl = 0x4004_54CE;
/// The argument is a value.
pub(super) const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54D0;
/// The argument is a pointer to an int.
pub(super) const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54D8;
/// The argument is a pointer to an int.
pub(super) const TUNSETSTEERINGEBPF: libc::Ioctl = 0x8004_54E0_u32 as libc::Ioctl;

pub(super) const IFF_TAP: u16 = 0x0002;
pub(super) const IFF_MULTI_QUEUE: u16 = 0x0100;
pub(super) const IFF_ATTACH_QUEUE: u16 = 0x0200;
pub(super) const IFF_DETACH_QUEUE: u16 = 0x0400;
pub(super) const IFF_NO_PI: u16 = 0x1000;
pub(super) const IFF_VNET_HDR: u16 = 0x4000;

/// The field of struct ifreq has 16 bits.
const IFF_UP: u16 = 1;
const _: () = assert!(IFF_UP as libc::c_int == libc::IFF_UP);

/// Bytes of struct ifreq on 64-bit systems: the name, and a union of 24.
const IFREQ_BYTES: usize = 40;

/// struct ifreq. The call decides which field of the union is used.
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
        let room = req.name.iter_mut().take(libc::IFNAMSIZ - 1);
        room.zip(name.as_bytes()).for_each(|(to, from)| *to = *from);
        req
    }

    fn with_flags(mut self, flags: u16) -> Self {
        self.value[..2].copy_from_slice(&flags.to_ne_bytes());
        self
    }

    fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.value[0], self.value[1]])
    }

    fn with_number(mut self, number: i32) -> Self {
        self.value[..4].copy_from_slice(&number.to_ne_bytes());
        self
    }

    fn call(&mut self, fd: impl AsFd, code: libc::Ioctl) -> io::Result<()> {
        // SAFETY: the codes of this module and of `<linux/sockios.h>` that are used here read and
        // write a struct ifreq. `self` has its size (asserted above) and a name that ends with a
        // zero byte.
        match unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), code, self as *mut Self) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// TUNSETIFF: attaches a file of /dev/net/tun to an interface. The kernel makes the interface if
/// there is none of that name.
pub(super) fn join(tun: impl AsFd, name: &str, flags: u16) -> io::Result<()> {
    IfReq::new(name).with_flags(flags).call(tun, TUNSETIFF)
}

/// TUNGETIFF: returns the interface of a tap's file, and its flags.
pub(super) fn joined(tap: impl AsFd) -> io::Result<(String, u16)> {
    let mut req = IfReq::new("");
    req.call(tap, TUNGETIFF)?;
    let name = req.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok((String::from_utf8_lossy(name).into_owned(), req.flags()))
}

/// TUNGETFEATURES: returns the flags that TUNSETIFF accepts. The file needs no interface.
pub(super) fn features(tun: impl AsFd) -> io::Result<u32> {
    let mut flags: libc::c_uint = 0;
    // SAFETY: TUNGETFEATURES writes an unsigned int, and `flags` outlives the call.
    match unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), TUNGETFEATURES, &raw mut flags) } {
        0 => Ok(flags),
        _ => Err(io::Error::last_os_error()),
    }
}

/// TUNSETQUEUE.
pub(super) fn set_queue(tun: impl AsFd, flag: u16) -> io::Result<()> {
    IfReq::new("").with_flags(flag).call(tun, TUNSETQUEUE)
}

/// Returns the Ethernet address of a tap's file, in any network namespace.
pub(super) fn address(tap: impl AsFd) -> io::Result<[u8; 6]> {
    let mut req = IfReq::new("");
    req.call(tap, libc::SIOCGIFHWADDR)?;
    // struct sockaddr: the family, then the address.
    Ok(req.value[2..8].try_into().expect("6 bytes"))
}

/// Sets the Ethernet address of a tap's file.
pub(super) fn set_address(tap: impl AsFd, address: [u8; 6]) -> io::Result<()> {
    let mut req = IfReq::new("").with_flags(libc::ARPHRD_ETHER);
    req.value[2..8].copy_from_slice(&address);
    req.call(tap, libc::SIOCSIFHWADDR)
}

/// Returns the network namespace that the interface of a tap's file is in (Linux 5.7). This needs
/// CAP_NET_ADMIN there.
pub(super) fn netns(tun: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: TUNGETDEVNETNS has no argument and accesses no memory.
    match unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), TUNGETDEVNETNS) } {
        // SAFETY: the call returned a new descriptor, which nothing else owns.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a call on a tap's file whose argument is a number.
pub(super) fn set_number(tap: impl AsFd, code: libc::Ioctl, number: libc::c_ulong) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD, TUNSETPERSIST, TUNSETOWNER and TUNSETGROUP take their argument by
    // value.
    match unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), code, number) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a call on a tap's file whose argument is a pointer to an int.
pub(super) fn set_int(tap: impl AsFd, code: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ and TUNSETSTEERINGEBPF read an int, which outlives the call.
    match unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), code, &raw const value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// SIOCSIFMTU, on a socket in the interface's namespace.
pub(super) fn set_mtu(socket: impl AsFd, name: &str, mtu: u32) -> io::Result<()> {
    IfReq::new(name).with_number(mtu.cast_signed()).call(socket, libc::SIOCSIFMTU)
}

/// Sets IFF_UP, on a socket in the interface's namespace.
pub(super) fn set_up(socket: impl AsFd, name: &str) -> io::Result<()> {
    let mut req = IfReq::new(name);
    req.call(&socket, libc::SIOCGIFFLAGS)?;
    let flags = req.flags() | IFF_UP;
    req.with_flags(flags).call(&socket, libc::SIOCSIFFLAGS)
}
