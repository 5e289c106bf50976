//! Network namespaces. A new thread enters each, executes one function and ends. A worker, or a
//! control thread that serves clients, stays in its own namespace.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};

/// The folder in which ip-netns(8) keeps the names.
const NAMES: &str = "/run/netns";
/// The namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace: that of the calling thread, or another. It exists at least as long as this
/// value.
#[derive(Debug)]
pub(super) struct Netns(Option<OwnedFd>);

impl Netns {
    /// Opens the namespace called `which`, by its name for ip-netns(8) or by its path. `None`: that
    /// of the calling thread.
    ///
    /// # Errors
    /// It does not exist, is no network namespace, or may not be entered. The message has the
    /// remedy.
    pub(super) fn open(which: Option<&str>) -> Result<Self> {
        let Some(which) = which else { return Ok(Self(None)) };
        check(which)?;
        let path = if which.contains('/') { PathBuf::from(which) } else { PathBuf::from(NAMES).join(which) };
        // A namespace in /proc of a process needs CAP_SYS_PTRACE, if that process has more rights
        // than this one.
        let open_path =
            || openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from);
        let opened = sandbox::errand(open_path).and_then(|file| file);
        let cannot = |e: io::Error| cannot_open(which, &path, e);
        let found = opened.map_err(cannot)?;
        if which.contains('/') {
            sandbox::check_place(&found, false, format_args!("network namespace {which}"))?;
        }
        // The same file that was checked.
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

    /// Returns the namespace of a descriptor. It may be that of the calling thread.
    pub(super) fn of(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let (there, own) = (file.metadata()?, std::fs::metadata(OWN)?);
        let same = (there.dev(), there.ino()) == (own.dev(), own.ino());
        Ok(Self((!same).then(|| file.into())))
    }

    /// Returns whether it is the namespace of the calling thread.
    pub(super) fn is_own(&self) -> bool {
        self.0.is_none()
    }

    /// Calls `f` there: on this thread, or on a new thread that this call waits for.
    ///
    /// # Errors
    /// The namespace cannot be entered. `f` was not called.
    pub(super) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> io::Result<T> {
        let Some(fd) = &self.0 else { return Ok(f()) };
        // Always a new thread, even if the sandbox lets the calling thread enter: it could not
        // return.
        sandbox::errand(|| {
            std::thread::scope(|scope| {
                let there = || {
                    move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))?;
                    Ok(f())
                };
                let thread =
                    std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, there)?;
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })?
    }
}

/// Opens `path` without waiting. Opening a FIFO could block the thread and its caller for ever.
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

/// Checks whether a network namespace can have that name or path.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with valid values.
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
