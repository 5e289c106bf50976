//! Files of a tap that another program opened, and the check that they can be used.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use vshunt_types::error::{Error, Result};

use crate::ifreq;
use crate::links::Links;
use crate::netns::Netns;

/// The device number of /dev/net/tun. A macvtap's files have another.
const TUN: (u32, u32) = (10, 200);
/// kcmp(2): compares whether two descriptors refer to the same open file.
const KCMP_FILE: libc::c_int = 0;

/// The files of one tap.
pub(super) struct Given {
    pub(super) name: String,
    pub(super) macvtap: bool,
    pub(super) multi_queue: bool,
    pub(super) files: Vec<File>,
    /// Access to the interface. `None` if its namespace may not be entered.
    pub(super) links: Option<Links>,
}

/// The properties of one descriptor.
#[derive(PartialEq, Eq)]
struct Joined {
    name: String,
    macvtap: bool,
    multi_queue: bool,
    address: [u8; 6],
}

/// Parses a list of descriptors such as `7:8:9`.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid): it is no such list, or has a descriptor twice.
pub fn parse_fds(text: &str) -> Result<Vec<i32>> {
    let wrong = |why: String| Err(Error::invalid(format!("fd={text}: {why}")));
    let mut fds = Vec::new();
    for part in text.split(':') {
        match part.parse() {
            Ok(fd) if fd < 0 || part.starts_with('+') => return wrong(format!("{part} is no descriptor")),
            Ok(fd) if fds.contains(&fd) => {
                return wrong(format!("{fd} is there twice; each queue has one of its own"));
            }
            Ok(fd) => fds.push(fd),
            Err(_) => return wrong("write numbers, one a queue: 7 or 7:8:9".to_owned()),
        }
    }
    Ok(fds)
}

impl Given {
    /// Checks descriptors (at least one), and makes them non-blocking and close-on-exec.
    pub(super) fn new(fds: Vec<OwnedFd>) -> Result<Self> {
        let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let files: Vec<File> = fds.into_iter().map(File::from).collect();
        let (Some(first), Some(first_number)) = (files.first(), numbers.first()) else {
            return Err(Error::invalid("no descriptor is given; a tap has one queue at least"));
        };
        let tap = inspect(first, *first_number)?;
        for (at, (file, number)) in files.iter().zip(&numbers).enumerate().skip(1) {
            if inspect(file, *number)? != tap {
                return Err(Error::invalid(format!(
                    "descriptors {first_number} and {number} are not of the same tap, opened the same way; each network has one"
                )));
            }
            let mut before = files.iter().zip(&numbers).take(at);
            if let Some((_, same)) = before.find(|(other, _)| same_file(file, other)) {
                return Err(Error::invalid(format!(
                    "descriptors {same} and {number} are the same queue; open the tap once more for each"
                )));
            }
        }
        if files.len() > 1 && !tap.multi_queue {
            return Err(Error::unsupported(format!(
                "descriptor {first_number} is of {}, a tap with one queue; give no other, or open all with IFF_MULTI_QUEUE",
                tap.name
            )));
        }
        for (file, number) in files.iter().zip(&numbers) {
            own(file).map_err(|e| Error::io(format!("descriptor {number} cannot be set up"), e.into()))?;
        }
        let links = links(first, &tap);
        // TUNGETIFF does not report this: IFF_NO_PI is IFF_NOFILTER there.
        if let Some(Ok(Some(link))) = links.as_ref().map(|links| links.find(&tap.name))
            && link.packet_information
        {
            return Err(Error::invalid(format!(
                "descriptor {first_number} has packet information before each frame; open it with IFF_NO_PI"
            )));
        }
        Ok(Self { name: tap.name, macvtap: tap.macvtap, multi_queue: tap.multi_queue, files, links })
    }
}

fn inspect(file: &File, number: i32) -> Result<Joined> {
    let wrong = |why: &str| Err(Error::invalid(format!("descriptor {number} {why}")));
    let no_tap =
        "is no tap; pass one of /dev/net/tun (IFF_TAP, IFF_NO_PI, IFF_VNET_HDR), or of a macvtap's /dev/tapN";
    let device = match file.metadata() {
        Ok(metadata) if metadata.file_type().is_char_device() => metadata.rdev(),
        Ok(_) => return wrong(no_tap),
        Err(e) => return Err(Error::io(format!("descriptor {number} cannot be looked at"), e)),
    };
    let (name, flags) = match ifreq::joined(file) {
        Ok(joined) => joined,
        Err(e) if e.raw_os_error() == Some(libc::EBADFD) => {
            return wrong("is of /dev/net/tun and joined to no interface; join it with TUNSETIFF before");
        }
        Err(_) => return wrong(no_tap),
    };
    let has = |flag| flags & flag != 0;
    if !has(ifreq::IFF_TAP) {
        return wrong("is of a tun, which has IP packets; open a tap: IFF_TAP");
    }
    if !has(ifreq::IFF_VNET_HDR) {
        return wrong("has no virtio-net header before each frame; open it with IFF_VNET_HDR");
    }
    let macvtap = (rustix::fs::major(device), rustix::fs::minor(device)) != TUN;
    let address = ifreq::address(file).map_err(|e| {
        Error::io(format!("the address of descriptor {number}'s interface cannot be read"), e)
    })?;
    // A macvtap has as many queues as open files, independently of its flags.
    Ok(Joined { name, macvtap, multi_queue: macvtap || has(ifreq::IFF_MULTI_QUEUE), address })
}

/// Returns whether both are the same open file. If the kernel does not report it, they are not.
fn same_file(one: &File, other: &File) -> bool {
    let (own, one, other) = (std::process::id(), one.as_raw_fd(), other.as_raw_fd());
    // SAFETY: kcmp compares two descriptors of this process and accesses no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one, other) == 0 }
}

fn own(file: &File) -> rustix::io::Result<()> {
    rustix::io::fcntl_setfd(file, FdFlags::CLOEXEC)?;
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::NONBLOCK)
}

/// Opens access to the interface in its namespace, if the kernel reports it and this process may
/// enter it. Otherwise in the namespace of this process, if the interface is there.
fn links(file: impl AsFd, tap: &Joined) -> Option<Links> {
    let there = ifreq::netns(file).and_then(Netns::of).and_then(|netns| netns.run(Links::new)?);
    there.ok().or_else(|| {
        let here = Links::new().ok()?;
        let link = here.find(&tap.name).ok()??;
        (link.address == Some(tap.address)).then_some(here)
    })
}
