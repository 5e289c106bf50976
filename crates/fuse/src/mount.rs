//! The mount side of a FUSE export: a disk's contents as one regular file, mounted over a regular file.
//!
//! A FUSE mount has a root that need not be a folder (`rootmode=100000`): then the mount *is* one file. This module
//! makes the mount and ends it; it reads and writes nothing on the session's descriptors, where the kernel's INIT
//! already waits when [`mount`] returns.
//!
//! Called by control threads, never by a worker: an end that is not hard may wait for the server to write pages back
//! and fusermount3 is waited for. The order of an end: [`Mount::unmount`] while the queues still serve, then close the
//! channels. What must never happen: a mount or a file that is not ours is taken away; a request to a server, our own
//! or a dead one, from a thread of this process (`mount/table.rs` says which calls are safe).

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

pub use self::point::{Mountpoint, identity, remove_left_behind, uncover};
use self::table::{MountId, look, open_path};
use self::umount::{How, Outcome};
use crate::queue::abi::DEV_IOC_CLONE;

/// The kernel's side of FUSE.
const DEVICE: &str = "/dev/fuse";
/// What a mount of ours is called in mount tables; what stands after the dot is for people and for us.
const FS_TYPE: &str = "fuse.vshunt";
/// The kernel checks permissions, and so asks for the file's attributes at each open. Without that it takes the file for
/// empty until somebody asks, and ends asynchronous reads beyond the size that it knows.
const CHECKED: &str = "default_permissions";
/// Looks at a path that others change at the same time, before giving up.
const ROUNDS: u32 = 8;
/// FUSE_DEV_IOC_CLONE of <linux/fuse.h>. Named a reading one, it takes the number of a session's descriptor.
const CLONE: Opcode = DEV_IOC_CLONE as Opcode;

/// How to mount.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// What mount tables show as the device, for example `vshunt:d0`.
    pub source: &'a str,
    /// Refuse writers in the kernel.
    pub readonly: bool,
    /// Who may use the file.
    pub allow_other: AllowOther,
}

/// What is mounted. Ended the hard way when dropped.
#[derive(Debug)]
pub struct Mount {
    at: Mountpoint,
    id: MountId,
    allow_other: bool,
    /// Unmounting was done; held while it is being done, so that two do not take each other's next mount for ours.
    ended: Mutex<bool>,
}

/// Mounts over `at`: the session's descriptor of /dev/fuse (not blocking, closed on exec, INIT waiting) and the mount.
///
/// By mount(2), and where that is not allowed by fusermount3. Does not wait for the file to be served.
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

/// A further channel of the connection that `session` belongs to, not blocking and closed on exec.
pub fn clone_channel(session: &OwnedFd) -> Result<OwnedFd> {
    let channel = open_device()?;
    let number = u32::try_from(session.as_raw_fd()).expect("a descriptor is not negative");
    // SAFETY: the kernel reads a u32 for this opcode, which it checks to be the descriptor of a session.
    unsafe { rustix::ioctl::ioctl(&channel, Setter::<CLONE, u32>::new(number)) }
        .map_err(|e| Error::io("cannot make a further channel of a FUSE connection", e.into()))?;
    Ok(channel)
}

impl Mount {
    /// Where it is mounted: absolute and without symbolic links.
    pub fn path(&self) -> &Path {
        self.at.path()
    }

    /// Device number and inode of the file that it is mounted over.
    pub fn below(&self) -> (u64, u64) {
        self.at.identity()
    }

    /// Whether others may use the file: what [`AllowOther`] came to.
    pub fn allow_other(&self) -> bool {
        self.allow_other
    }

    /// Whether it is still mounted; an administrator may have unmounted it. Something mounted over it does not count.
    pub fn still_there(&self) -> bool {
        // What cannot be told is not taken for an end.
        !matches!(self.place(), Ok(Place::Gone))
    }

    /// Whether [`unmount`](Self::unmount) has ended it.
    pub fn was_ended(&self) -> bool {
        *self.ended.locked()
    }

    /// Its device number, which its file has too.
    pub fn device(&self) -> u64 {
        let (major, minor) = self.id.device;
        rustix::fs::makedev(major, minor)
    }

    /// Ends the mount and removes the file below it if that was made for it. Nothing happens the second time.
    ///
    /// Not `hard`: fails with [`Kind::Busy`] while the file is in use. `hard`: the connection is aborted, so that users
    /// get errors and none hangs, and the mount goes at once. Those who mounted by fusermount3 may have no means to
    /// abort; then users hang until the session's channels are closed, which the caller does next.
    ///
    /// Fails with [`Kind::Busy`] where something else has been mounted over it, which is left alone; when `hard` the
    /// connection is aborted all the same if fusectl is mounted (/sys/fs/fuse/connections).
    ///
    /// An Ok does not mean that the connection has ended: a mount that was copied to another mount namespace lives on
    /// there until the channels are closed.
    pub fn unmount(&self, hard: bool) -> Result<()> {
        let mut ended = self.ended.locked();
        if !*ended {
            let was_at = self.end(hard)?;
            *ended = true;
            self.at.remove(&was_at);
        }
        Ok(())
    }

    /// Aborts the connection of `session`, which is this mount's, if it has not ended with the mount.
    /// Returns whether it has ended.
    pub fn sever(&self, session: &OwnedFd) -> bool {
        let severed = umount::sever(session, self.id.device);
        if let Err(e) = &severed {
            tracing::warn!("{}: cannot end its connection: {e}", self.path().display());
        }
        severed.is_ok()
    }

    /// Ends the mount; where it was last.
    fn end(&self, hard: bool) -> Result<PathBuf> {
        let mut how = if hard { How::Abort } else { How::Soft };
        let mut at = self.path().to_owned();
        let device = self.id.device;
        for _ in 0..ROUNDS {
            match self.place()? {
                Place::Gone => return Ok(at),
                Place::Here(path) => at = path,
                Place::Covered(path) => {
                    if hard {
                        umount::abort(device);
                    }
                    let path = path.display();
                    return Err(Error::busy(format!(
                        "something else is mounted over the disk's file {path}; unmount that first: umount {path}"
                    )));
                }
            }
            match (umount::end(&at, device, how)?, hard) {
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

    /// Looks where the mount is now. A folder above it may have been renamed since, and it may have been moved.
    fn place(&self) -> Result<Place> {
        let Some(entry) = table::entry(self.id.id)?.filter(|e| e.device == self.id.device) else {
            return Ok(Place::Gone);
        };
        let seen = match open_path(&entry.point, false).and_then(look) {
            Ok(seen) => seen,
            Err(Errno::NOENT) => return Ok(Place::Gone),
            Err(e) => {
                return Err(Error::io(
                    format!("cannot look at the mount {}", entry.point.display()),
                    e.into(),
                ));
            }
        };
        Ok(match seen.mount {
            id if id == self.id => Place::Here(entry.point),
            // Numbers are used again: it is another that has them now.
            id if id.id == self.id.id => Place::Gone,
            _ => Place::Covered(entry.point),
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

/// Where the mount is, and whether its path leads to it.
enum Place {
    Here(PathBuf),
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
            "{DEVICE} is not the FUSE device; make it anew, as root: rm {DEVICE}; mknod {DEVICE} c 10 229"
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
        // SAFETY: C strings that live over the call; the kernel copies them.
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

/// By the program that may; the session and whether others may use the file.
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

/// The errno of the call of libc before this one.
fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
