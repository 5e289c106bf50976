//! The mount of a FUSE export: a disk's contents as one regular file, mounted over a regular file.
//!
//! The root of a FUSE mount need not be a folder (`rootmode=100000`): then the mount is one file.
//! This module makes the mount and ends it. It does not read or write the session's descriptors,
//! where the kernel's INIT already waits when [`mount`] returns.
//!
//! Control threads call it, never a worker: an unmount without force may wait until the server has
//! written pages back, and fusermount3 takes time. The order of an end: [`Mount::unmount`] while
//! the queues still serve, then close the channels. What must never happen: a mount or a file of
//! another program is removed; a thread of this process sends a request to a FUSE server, be it
//! this daemon or a dead one (`mount/table.rs` says which calls are safe).

mod helper;
mod point;
mod table;
#[cfg(test)]
mod tests;
mod umount;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use vshunt_types::sync::Locked;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::AllowOther;

pub use self::helper::{find as find_helper, may_allow_other};
pub use self::point::{Mountpoint, identity, remove_left_behind, uncover};
use self::table::{MountId, look, open_path};
use self::umount::{How, Outcome};
use crate::abi::DEV_IOC_CLONE;

/// The kernel's side of FUSE.
const DEVICE: &str = "/dev/fuse";
/// The file system type of this program's mounts in mount tables. The kernel uses the part before
/// the dot.
const FS_TYPE: &str = "fuse.vshunt";
/// The kernel checks permissions, and so asks for the file's attributes at each open. Without this
/// option it takes the file for empty until a process asks for them, and ends asynchronous reads
/// beyond the size that it knows.
const CHECKED: &str = "default_permissions";
/// How often a path is examined that other processes change at the same time.
const ROUNDS: u32 = 8;
/// FUSE_DEV_IOC_CLONE of <linux/fuse.h>. Its number says that it reads; it takes the number of a
/// session's descriptor.
#[expect(clippy::cast_possible_truncation, reason = "ioctl numbers have 32 bits; musl's type is narrower")]
const CLONE: Opcode = DEV_IOC_CLONE as Opcode;

/// How to mount.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The source that mount tables show, for example `vshunt:d0`.
    pub source: &'a str,
    /// Refuse writers in the kernel.
    pub readonly: bool,
    /// Whether other users may use the file.
    pub allow_other: AllowOther,
}

/// A mount. Dropping it unmounts by force.
#[derive(Debug)]
pub struct Mount {
    at: Mountpoint,
    id: MountId,
    allow_other: bool,
    /// It was unmounted. Held during an unmount, so that a second one does not take another mount
    /// at the same path for this one.
    ended: Mutex<bool>,
}

/// Mounts over `at`. Returns the session's descriptor of /dev/fuse (not blocking, closed on exec,
/// INIT waiting) and the mount.
///
/// Uses mount(2), and fusermount3 where mount(2) is not permitted. Does not wait for the file to be
/// served.
///
/// # Errors
/// `Busy` if another mount covers `at` meanwhile, `Unsupported` if FUSE or the permission is
/// missing; the system's.
pub fn mount(at: Mountpoint, options: &Options) -> Result<(OwnedFd, Mount)> {
    let shown = at.path().display();
    let session = open_device()?;
    let allow_other = options.allow_other != AllowOther::Off;
    let (session, allow_other) = match mount_directly(&session, &at, options, allow_other) {
        Ok(()) => (session, allow_other),
        Err(Refusal::NotPermitted) => by_helper(&at, options)?,
        Err(Refusal::Other(e)) => return Err(e),
    };
    let seen = open_path(at.path(), false).and_then(look).map_err(|e| vanished(&at, e.into()))?;
    let entry = table::entry(seen.mount.id)?;
    if !seen.is_mount_root || entry.is_none_or(|e| e.fs_type != FS_TYPE) {
        // Closing the session, which the caller never sees, ends what may be left of it.
        return Err(Error::busy(format!(
            "something else was mounted over {shown} at the same time; try again"
        )));
    }
    Ok((session, Mount { at, id: seen.mount, allow_other, ended: Mutex::new(false) }))
}

/// Opens a further channel of the connection that `session` belongs to, not blocking and closed on
/// exec.
///
/// # Errors
/// The system's.
pub fn clone_channel(session: &OwnedFd) -> Result<OwnedFd> {
    let channel = open_device()?;
    // SAFETY: for this opcode the kernel reads a u32, and the setter passes a pointer to one.
    let clone = unsafe { Setter::<CLONE, u32>::new(session.as_raw_fd().cast_unsigned()) };
    // SAFETY: the kernel only reads the number, and checks that it is the descriptor of a session.
    unsafe { rustix::ioctl::ioctl(&channel, clone) }
        .map_err(|e| Error::io("cannot make a further channel of a FUSE connection", e.into()))?;
    Ok(channel)
}

impl Mount {
    /// Where it was mounted: absolute and without symbolic links.
    pub fn path(&self) -> &Path {
        self.at.path()
    }

    /// Device number and inode of the file that it covers.
    pub fn below(&self) -> (u64, u64) {
        self.at.identity()
    }

    /// Whether other users may use the file, as decided for [`AllowOther`].
    pub fn allow_other(&self) -> bool {
        self.allow_other
    }

    /// Whether it is still mounted. An administrator may have unmounted it. A mount over it does
    /// not matter.
    pub fn still_there(&self) -> bool {
        // A mount whose state cannot be read counts as mounted.
        !matches!(self.locate(), Ok(Location::Gone))
    }

    /// Whether [`unmount`](Self::unmount) has ended it.
    pub fn was_ended(&self) -> bool {
        *self.ended.locked()
    }

    /// Its device number, which its file has, too.
    pub fn device(&self) -> u64 {
        let (major, minor) = self.id.device;
        rustix::fs::makedev(major, minor)
    }

    /// Unmounts, and removes the file below if it was made for the mount. A second call does
    /// nothing.
    ///
    /// With `force` the connection is aborted, so that users of the file get errors and none hangs,
    /// and the mount ends at once. A mount that fusermount3 made may be impossible to abort. Then
    /// users hang until the session's channels are closed, which the caller does next. After
    /// success the connection may still exist: a mount that was copied to another mount namespace
    /// lives there until the channels are closed.
    ///
    /// # Errors
    /// [`Kind::Busy`] without `force` while the file is in use, and in any case if another mount
    /// covers it. That mount stays. With `force` the connection is aborted even then, if fusectl is
    /// mounted (/sys/fs/fuse/connections).
    pub fn unmount(&self, force: bool) -> Result<()> {
        let mut ended = self.ended.locked();
        if !*ended {
            let was_at = self.end(force)?;
            *ended = true;
            self.at.remove(&was_at);
        }
        Ok(())
    }

    /// Aborts the connection of `session`, which belongs to this mount, unless it has ended with
    /// the mount. Returns whether it has ended.
    pub fn sever(&self, session: &OwnedFd) -> bool {
        let severed = umount::sever(session, self.id.device);
        if let Err(e) = &severed {
            tracing::warn!("{}: cannot end its connection: {e}", self.path().display());
        }
        severed.is_ok()
    }

    /// Ends the mount. Returns its last path.
    fn end(&self, force: bool) -> Result<PathBuf> {
        let mut how = if force { How::Abort } else { How::Soft };
        let mut at = self.path().to_owned();
        let device = self.id.device;
        for _ in 0..ROUNDS {
            match self.locate()? {
                Location::Gone => return Ok(at),
                Location::Visible(path) => at = path,
                Location::Covered(path) => {
                    if force {
                        umount::abort(device);
                    }
                    let path = path.display();
                    return Err(Error::busy(format!(
                        "something else is mounted over the disk's file {path}; unmount that first: umount {path}"
                    )));
                }
            }
            match (umount::end(&at, device, how)?, force) {
                (Outcome::Ended, _) => {}
                (Outcome::InUse, true) => how = How::Detach,
                (Outcome::InUse, false) => {
                    let path = at.display();
                    return Err(Error::busy(format!(
                        "{path} is in use; stop its users (fuser -v {path} names them, loop devices do not show there: \
                         losetup -j {path}), or take it from them by --force"
                    )));
                }
            }
        }
        Err(Error::busy(format!("{} cannot be unmounted; as root: umount -l {0}", at.display())))
    }

    /// Finds out where the mount is now. It may have been moved, and a folder above it may have
    /// been renamed.
    fn locate(&self) -> Result<Location> {
        let Some(entry) = table::entry(self.id.id)?.filter(|e| e.device == self.id.device) else {
            return Ok(Location::Gone);
        };
        let seen = match open_path(&entry.point, false).and_then(look) {
            Ok(seen) => seen,
            Err(Errno::NOENT) => return Ok(Location::Gone),
            Err(e) => {
                return Err(Error::io(
                    format!("cannot look at the mount {}", entry.point.display()),
                    e.into(),
                ));
            }
        };
        Ok(match seen.mount {
            id if id == self.id => Location::Visible(entry.point),
            // Mount numbers are used again: another mount has this one now.
            id if id.id == self.id.id => Location::Gone,
            _ => Location::Covered(entry.point),
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(e) = self.unmount(true) {
            tracing::warn!("{e}");
        }
    }
}

/// Where a mount is, and whether its path leads to it.
enum Location {
    Visible(PathBuf),
    Covered(PathBuf),
    Gone,
}

enum Refusal {
    NotPermitted,
    Other(Error),
}

fn open_device() -> Result<OwnedFd> {
    let device = open_device_file()?;
    // Linux, Documentation/admin-guide/devices.txt: misc devices are 10, fuse is 229 of them.
    match rustix::fs::fstat(&device) {
        Ok(stat) if stat.st_rdev == rustix::fs::makedev(10, 229) => Ok(device),
        _ => Err(Error::unsupported(format!(
            "{DEVICE} is not the FUSE device; make it again, as root: rm {DEVICE}; mknod {DEVICE} c 10 229"
        ))),
    }
}

fn open_device_file() -> Result<OwnedFd> {
    openat(CWD, DEVICE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).map_err(|e| match e {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Error::unsupported(format!(
            "{DEVICE} is not there, for the kernel has not loaded FUSE: modprobe fuse (for a container: --device \
             {DEVICE})"
        )),
        Errno::ACCESS | Errno::PERM => Error::io(
            format!("may not open {DEVICE} (run vshunt as root, or as root: chmod 666 {DEVICE}; for a container: \
                     --device {DEVICE})"),
            e.into(),
        ),
        e => Error::io(format!("cannot open {DEVICE}"), e.into()),
    })
}

fn mount_directly(
    session: &OwnedFd,
    at: &Mountpoint,
    options: &Options,
    allow_other: bool,
) -> std::result::Result<(), Refusal> {
    let shown = at.path().display();
    let source = CString::new(options.source)
        .map_err(|_| Refusal::Other(Error::invalid(format!("{:?} has a zero byte", options.source))))?;
    let target = CString::new(at.itself().as_os_str().as_bytes()).expect("no zero byte in /proc/self/fd");
    let kind = CString::new(FS_TYPE).expect("no zero byte in a constant");
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let others = if allow_other { ",allow_other" } else { "" };
    let data = format!(
        "fd={},rootmode=100000,user_id={user},group_id={group},{CHECKED}{others}",
        session.as_raw_fd()
    );
    let data = CString::new(data).expect("no zero byte in numbers");
    let readonly = if options.readonly { libc::MS_RDONLY } else { 0 };
    let flags = libc::MS_NOSUID | libc::MS_NODEV | readonly;
    let mount = || {
        // SAFETY: the closure borrows the C strings, so they live until the call returns. The
        // kernel copies them.
        let rc = unsafe {
            libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
        };
        if rc == 0 { Ok(()) } else { Err(last_errno()) }
    };
    let failed = |e| Refusal::Other(Error::io(format!("cannot mount over {shown}"), e));
    let Err(e) = sandbox::errand(mount).map_err(failed)? else { return Ok(()) };
    Err(match e {
        Errno::PERM => Refusal::NotPermitted,
        Errno::NODEV => Refusal::Other(Error::unsupported(
            "the kernel knows no FUSE file systems; load them: modprobe fuse",
        )),
        Errno::NOSPC => Refusal::Other(Error::new(
            Kind::Limit,
            format!(
                "cannot mount over {shown}: the limit of mounts is reached; raise it: sysctl fs.mount-max"
            ),
        )),
        Errno::NOENT => Refusal::Other(vanished(at, io::Error::from(Errno::NOENT))),
        e => Refusal::Other(Error::io(format!("cannot mount over {shown}"), e.into())),
    })
}

/// Mounts by fusermount3. Returns the session, and whether other users may use the file.
fn by_helper(at: &Mountpoint, options: &Options) -> Result<(OwnedFd, bool)> {
    let shown = at.path().display();
    let Some(program) = helper::find() else {
        return Err(Error::unsupported(format!(
            "cannot mount over {shown}: that needs CAP_SYS_ADMIN or the program {}, and neither is there; run vshunt as \
             root (for a container: --cap-add SYS_ADMIN), or install the package fuse3",
            helper::NAME
        )));
    };
    let allow_other = match options.allow_other {
        AllowOther::Off => false,
        AllowOther::On => true,
        AllowOther::Auto => helper::may_allow_other(),
    };
    let mut flags = vec![CHECKED];
    if options.readonly {
        flags.push("ro");
    }
    if allow_other {
        flags.push("allow_other");
    }
    let session = helper::mount(&program, at.path(), options.source, &flags).map_err(|said| {
        Error::new(
            Kind::Io,
            format!(
                "cannot mount over {shown} ({} says: {said}); run vshunt as root (for a container: --cap-add SYS_ADMIN), \
                 or change what {0} complains of",
                helper::NAME
            ),
        )
    })?;
    Ok((session, allow_other))
}

fn vanished(at: &Mountpoint, e: io::Error) -> Error {
    Error::io(format!("{} was taken away while it was being mounted over; try again", at.path().display()), e)
}

/// The errno of the last failed system call of this thread.
fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
