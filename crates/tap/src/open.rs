//! Opens the files of a tap. It makes the interface, or adopts an existing one by its name.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

use crate::links::{Link, Links};
use crate::netns::Netns;
use crate::steering::Steering;
use crate::{NAME_MAX, QUEUES_MAX, ifreq};

pub(super) const CLONE_DEVICE: &str = "/dev/net/tun";

/// Time to wait for another program's tap. A program that was killed keeps its queues until its
/// io_uring has ended the operations in flight.
const BUSY_WAIT_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
const RETRY: Duration = Duration::from_millis(10);

/// Options of a tap. The default sets nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The network namespace of the interface, by name (for `ip netns`) or by path. `None`: that of
    /// the calling thread.
    pub netns: Option<String>,
    /// How the queue of a frame is chosen.
    pub steering: Steering,
    /// The Ethernet address of the interface, which is the host's end and not the guest's. `None`:
    /// unchanged.
    pub address: Option<[u8; 6]>,
    /// The user id that may open the interface without CAP_NET_ADMIN.
    pub owner: Option<u32>,
    /// The group id whose members may open it.
    pub group: Option<u32>,
    /// Whether an interface that is made stays when its last file is closed.
    pub persist: bool,
}

/// The source of the files of a tap's queues.
#[derive(Debug)]
pub(super) enum Source {
    /// /dev/net/tun, opened in the interface's namespace.
    Clone(Netns),
    /// The device of a macvtap.
    Macvtap(PathBuf),
    /// They were given, and no more can be opened.
    Given,
}

impl Source {
    /// Opens the first file of `name`. Returns it, and whether it is multi-queue.
    pub(super) fn first(&self, name: &str, exists: bool) -> Result<(File, bool)> {
        let Self::Clone(netns) = self else { return Ok((self.more(name)?, true)) };
        let file = open_tun(netns)?;
        match ifreq::join(&file, name, flags(true)) {
            Ok(()) => Ok((file, true)),
            // An existing interface may have one queue. Then the kernel refuses multi-queue.
            Err(e) if exists && e.raw_os_error() == Some(libc::EINVAL) => {
                let joined = ifreq::join(&file, name, flags(false));
                joined.map(|()| (file, false)).map_err(|e| explain(name, e, exists))
            }
            Err(e) => Err(explain(name, e, exists)),
        }
    }

    /// Opens one more file, which is attached.
    pub(super) fn more(&self, name: &str) -> Result<File> {
        match self {
            Self::Clone(netns) => {
                let file = open_tun(netns)?;
                ifreq::join(&file, name, flags(true)).map_err(|e| explain(name, e, true))?;
                Ok(file)
            }
            Self::Macvtap(path) => open_macvtap(path, name),
            Self::Given => Err(Error::limit(format!(
                "tap {name} has no more queues than descriptors; pass one for each: fd=7:8:9"
            ))),
        }
    }
}

/// Checks whether an interface can have that name.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with valid names.
pub fn check_name(name: &str) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("no interface can be called {name:?}: {why}")));
    match name {
        "" => wrong("a name has a letter at least"),
        "." | ".." => wrong("that is a folder's"),
        _ if name.len() > NAME_MAX => wrong(&format!("it has {} bytes; {NAME_MAX} is the most", name.len())),
        // `%d` would let the kernel choose a number, which this process would not know.
        _ if name.contains(|c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace()) => {
            wrong("it may not contain '/', ':', '%' or a space")
        }
        _ => Ok(()),
    }
}

/// Returns the interface, if it exists. Waits for a while if another program uses it.
pub(super) fn find_unused(links: &Links, name: &str) -> io::Result<Option<Link>> {
    let start = Instant::now();
    loop {
        match links.find(name)? {
            Some(link) if link.queues > 0 && start.elapsed() < BUSY_WAIT_MAX => std::thread::sleep(RETRY),
            link => return Ok(link),
        }
    }
}

fn open_nonblocking(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens /dev/net/tun. The file makes and finds interfaces in the namespace in which it was opened.
fn open_tun(netns: &Netns) -> Result<File> {
    let file = netns.run(|| open_nonblocking(Path::new(CLONE_DEVICE))).and_then(|opened| opened);
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

/// Tests whether this process can open /dev/net/tun, and whether the kernel's taps can have several
/// queues. Makes no interface.
///
/// # Errors
/// There is no /dev/net/tun, or no permission. The message has the remedy.
pub fn probe() -> Result<bool> {
    let tun = open_tun(&Netns::open(None)?)?;
    let features = ifreq::features(&tun).map_err(|e| Error::io("cannot query the module tun", e))?;
    Ok(features & u32::from(ifreq::IFF_MULTI_QUEUE) != 0)
}

/// Returns the device file of a macvtap. Its number is the interface's index, which an interface of
/// another namespace may have, too.
pub(super) fn macvtap_device(name: &str, link: &Link, netns: &Netns) -> Result<PathBuf> {
    let path = PathBuf::from(format!("/dev/tap{}", link.index));
    let file = open_macvtap(&path, name)?;
    // /sys shows the interfaces of this process's namespace.
    let wanted = std::fs::read_to_string(format!("/sys/class/net/{name}/tap{}/dev", link.index));
    let other = |wanted: String| {
        let device = file.metadata().map_or(0, |metadata| metadata.rdev());
        wanted.trim() != format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
    };
    let other = netns.is_own() && wanted.is_ok_and(other);
    let same = ifreq::joined(&file).is_ok_and(|(called, _)| called == name)
        && ifreq::address(&file).is_ok_and(|address| link.address == Some(address));
    match same && !other {
        true => Ok(path),
        false => Err(Error::unsupported(format!(
            "{} is of another network namespace's interface than {name}; pass descriptors of the right device: fd=N",
            path.display()
        ))),
    }
}

fn open_macvtap(path: &Path, name: &str) -> Result<File> {
    // The device appeared with the interface, perhaps after the sandbox was set up.
    let opened = sandbox::errand(|| open_nonblocking(path)).and_then(|file| file);
    opened.map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::unsupported(format!(
            "there is no {} of macvtap {name}; where /dev is not the system's, pass open descriptors: fd=N",
            path.display()
        )),
        Some(libc::EACCES | libc::EPERM) => Error::io(
            format!("no permission to open {} of macvtap {name}; run as root, or chown it", path.display()),
            e,
        ),
        Some(libc::EBUSY) => no_more_queues(name),
        _ => Error::io(format!("cannot open {} of macvtap {name}", path.display()), e),
    })
}

fn flags(multi_queue: bool) -> u16 {
    let flags = ifreq::IFF_TAP | ifreq::IFF_NO_PI | ifreq::IFF_VNET_HDR;
    if multi_queue { flags | ifreq::IFF_MULTI_QUEUE } else { flags }
}

fn explain(name: &str, e: io::Error, exists: bool) -> Error {
    match Errno::from_io_error(&e) {
        Some(Errno::BUSY) => busy(name),
        Some(Errno::TOOBIG) => no_more_queues(name),
        Some(Errno::INVAL) if exists => no_tap(name),
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

pub(super) fn no_tap(name: &str) -> Error {
    Error::invalid(format!("interface {name} is there and is no tap; give another ifname"))
}

pub(super) fn busy(name: &str) -> Error {
    Error::busy(format!("tap {name} is in use by another program; end that, or give another ifname"))
}

fn no_more_queues(name: &str) -> Error {
    Error::limit(format!("tap {name} cannot have more queues; {QUEUES_MAX} is the most"))
}

/// Sets the requested address, through a file of the interface.
pub(super) fn set_address(name: &str, file: impl AsFd, options: &Options) -> Result<()> {
    let Some(address) = options.address else { return Ok(()) };
    ifreq::set_address(file, address)
        .map_err(|e| Error::io(format!("interface {name} cannot have the address that is asked for"), e))
}

/// Sets owner and group, and then persistence. Persistence is last, so that an error before it
/// leaves no interface.
pub(super) fn set_rights(name: &str, macvtap: bool, file: impl AsFd, options: &Options) -> Result<()> {
    let numbers = [
        ("owner", ifreq::TUNSETOWNER, options.owner),
        ("group", ifreq::TUNSETGROUP, options.group),
        ("persist", ifreq::TUNSETPERSIST, options.persist.then_some(1)),
    ];
    for (what, code, number) in numbers {
        let Some(number) = number else { continue };
        if macvtap {
            return Err(Error::unsupported(format!(
                "{name} is a macvtap, which stays until 'ip link delete', and whose device is chowned; leave out {what}"
            )));
        }
        ifreq::set_number(&file, code, number.into())
            .map_err(|e| Error::io(format!("tap {name} cannot have {what}={number}"), e))?;
    }
    Ok(())
}
