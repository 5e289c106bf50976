//! The times of files.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// The times of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileTimes {
    /// Of the last read, or as it was set. Disks without a file of their own do not note reads.
    pub atime: Time,
    /// Of the last change of the contents, or as it was set.
    pub mtime: Time,
    /// Of the last change of contents or attributes.
    pub ctime: Time,
}

impl FileTimes {
    /// Returns the times of a file from its metadata.
    pub(super) fn of(metadata: &Metadata) -> Self {
        let nsec = |n: i64| u32::try_from(n).unwrap_or(0);
        Self {
            atime: (metadata.atime(), nsec(metadata.atime_nsec())),
            mtime: (metadata.mtime(), nsec(metadata.mtime_nsec())),
            ctime: (metadata.ctime(), nsec(metadata.ctime_nsec())),
        }
    }

    /// Returns the later time of each kind.
    pub(super) fn later(self, other: Self) -> Self {
        Self {
            atime: self.atime.max(other.atime),
            mtime: self.mtime.max(other.mtime),
            ctime: self.ctime.max(other.ctime),
        }
    }
}

/// What happens to a time of a file, as in utimensat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTime {
    /// It stays (UTIME_OMIT).
    Keep,
    /// It becomes the current time (UTIME_NOW).
    Now,
    /// It is set to this.
    At(Time),
}

impl NewTime {
    /// Returns the time that follows `old`.
    pub(super) fn after(self, old: Time, now: Time) -> Time {
        match self {
            Self::Keep => old,
            Self::Now => now,
            Self::At(time) => time,
        }
    }

    fn timespec(self) -> libc::timespec {
        let (tv_sec, tv_nsec) = match self {
            Self::Keep => (0, libc::UTIME_OMIT),
            Self::Now => (0, libc::UTIME_NOW),
            Self::At((seconds, ns)) => (seconds, ns.into()),
        };
        libc::timespec { tv_sec, tv_nsec }
    }
}

/// Sets times of a file.
///
/// # Errors
/// The system's.
pub(super) fn set_times(file: &File, atime: NewTime, mtime: NewTime) -> io::Result<()> {
    let times = [atime, mtime].map(NewTime::timespec);
    // SAFETY: the call reads two timespecs, which is what `times` is.
    match unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
