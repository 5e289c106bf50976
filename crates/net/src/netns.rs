//! Network namespaces, each entered by a thread that is made for one errand and ends with it: a worker, or a control thread
//! that clients come back to, stays where it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

/// Where ip-netns(8) keeps the names.
const NAMES: &str = "/run/netns";
/// The calling thread's own.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace, which lives at least as long as this does: the calling thread's, or another.
#[derive(Debug)]
pub(super) struct Netns(Option<OwnedFd>);

impl Netns {
    /// The one called `which`, as ip-netns(8) has it, or with that path; none: the calling thread's.
    ///
    /// # Errors
    /// With what to do: it is not there, is none, or may not be entered.
    pub(super) fn open(which: Option<&str>) -> Result<Self> {
        let Some(which) = which else { return Ok(Self(None)) };
        check(which)?;
        let path = if which.contains('/') { PathBuf::from(which) } else { PathBuf::from(NAMES).join(which) };
        // One that is named by a process needs CAP_SYS_PTRACE where that process may more than we do.
        let look =
            || openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from);
        let opened = sandbox::errand(look).and_then(|file| file);
        let cannot = |e: io::Error| cannot_open(which, &path, e);
        let found = opened.map_err(cannot)?;
        if which.contains('/') {
            sandbox::check_place(&found, false, format_args!("network namespace {which}"))?;
        }
        // The very file that was checked.
        let itself = format!("/proc/self/fd/{}", found.as_raw_fd());
        let file = sandbox::errand(|| open(Path::new(&itself))).and_then(|file| file).map_err(cannot)?;
        let there = Self(Some(file.into()));
        there.run(|| ()).map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL) => Error::invalid(format!("{} is no network namespace", path.display())),
            Some(libc::EPERM) => Error::io(
                format!("no permission to enter network namespace {which}; run as root (CAP_SYS_ADMIN)"),
                e,
            ),
            _ => Error::io(format!("cannot enter network namespace {which}"), e),
        })?;
        Ok(there)
    }

    /// The one that a descriptor is of; the calling thread's, if it is that.
    pub(super) fn of(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let (there, own) = (file.metadata()?, std::fs::metadata(OWN)?);
        let same = (there.dev(), there.ino()) == (own.dev(), own.ino());
        Ok(Self((!same).then(|| file.into())))
    }

    /// Whether it is the calling thread's.
    pub(super) fn is_own(&self) -> bool {
        self.0.is_none()
    }

    /// Does `errand` there: here, or on a thread of its own, whose end is waited for.
    ///
    /// # Errors
    /// It cannot be entered; the errand was not done.
    pub(super) fn run<T: Send>(&self, errand: impl FnOnce() -> T + Send) -> io::Result<T> {
        let Some(fd) = &self.0 else { return Ok(errand()) };
        // In any case on a thread of its own, also where the sandbox lets the calling one enter: it could not come back.
        sandbox::errand(|| {
            std::thread::scope(|scope| {
                let there = || {
                    move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))?;
                    Ok(errand())
                };
                let thread =
                    std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, there)?;
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })?
    }
}

/// Opens what is at `path`, without waiting: a FIFO there would hold the errand and its caller for ever.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

fn cannot_open(which: &str, path: &Path, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::NotFound if which.contains('/') => Error::not_found(format!(
            "there is no network namespace {which}; give the path of one, or its name"
        )),
        io::ErrorKind::NotFound => Error::not_found(format!(
            "there is no network namespace {which} ({}); make it: ip netns add {which}",
            path.display()
        )),
        _ => Error::io(format!("cannot open network namespace {which}"), e),
    }
}

/// Whether a network namespace can be called that, or be at that path.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with what would be right.
pub fn check(which: &str) -> Result<()> {
    match which {
        "" => {
            Err(Error::invalid("netns= names no network namespace; give a name ('ip netns list') or a path"))
        }
        "." | ".." => {
            Err(Error::invalid(format!("netns={which} is a folder; give a name ('ip netns list') or a path")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_is_no_namespace_and_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        let why = Netns::open(path.to_str()).unwrap_err().to_string();
        assert!(why.contains("is no network namespace"), "{why}");
    }
}
