//! Failed requests in the log.
//!
//! Workers report each failed request of a disk here. At most one in [`INTERVAL_MS`] becomes a line
//! of the log, which also counts the others.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use rustix::process::{Resource, getrlimit};
use vshunt_sandbox::{self as sandbox, ThreadKind};

use super::Op;

/// Between two lines about one disk, ms: a full disk fails thousands of requests a second.
const INTERVAL_MS: u64 = 30_000;

/// Where a disk's data are, for the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// On this host.
    Here,
    /// On a server. `asked`: the request was sent, so the front end had not asked in vain.
    Server { asked: bool },
}

/// The failed requests of a disk.
pub(super) struct Failures {
    opened: Instant,
    // Workers.
    /// Failed requests since the last line.
    count: AtomicU64,
    /// No line before this time, ms since `opened`.
    next_ms: AtomicU64,
}

impl Default for Failures {
    fn default() -> Self {
        Self { opened: Instant::now(), count: AtomicU64::new(0), next_ms: AtomicU64::new(0) }
    }
}

impl Failures {
    /// Takes note of a request to the image at `path` that failed with `errno`. Called on a
    /// worker's thread, or on one that may wait.
    #[cold]
    pub(super) fn note(&self, path: &Path, (op, offset): (Op, u64), errno: i32, storage: Storage) {
        // What a front end can cause at will, and what it may ask in vain.
        let its_own =
            matches!(errno, libc::EINVAL | libc::EOPNOTSUPP | libc::EPERM | libc::EROFS | libc::EFAULT);
        if its_own && storage != (Storage::Server { asked: true }) {
            return;
        }
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        let Some(count) = self.due(now) else { return };
        let limit = getrlimit(Resource::Fsize).current;
        let text = line(path, (op, offset), errno, count, storage, limit);
        // Workers write no log lines. If no thread can be started, the message is lost.
        let thread = std::thread::Builder::new().name("vshunt-disk".to_owned());
        sandbox::detach(ThreadKind::Session, thread, move || tracing::error!("{text}"));
    }

    /// Counts a failed request. Returns the number of those since the last line if a line is due.
    fn due(&self, now_ms: u64) -> Option<u64> {
        self.count.fetch_add(1, Relaxed);
        let next = self.next_ms.load(Relaxed);
        if now_ms < next {
            return None;
        }
        // Another worker may write the line.
        self.next_ms.compare_exchange(next, now_ms.saturating_add(INTERVAL_MS), Relaxed, Relaxed).ok()?;
        Some(self.count.swap(0, Relaxed))
    }
}

/// Returns the line about a request that failed. `limit`: bytes that this process may make a file
/// long (RLIMIT_FSIZE).
fn line(
    path: &Path,
    (op, at): (Op, u64),
    errno: i32,
    count: u64,
    storage: Storage,
    limit: Option<u64>,
) -> String {
    let shown = path.display();
    let what = match op {
        Op::Flush => "a flush".to_owned(),
        Op::Read | Op::Seek { .. } => format!("a read at byte {at}"),
        Op::Write | Op::WriteCompressed => format!("a write at byte {at}"),
        Op::Populate => format!("a copy from below at byte {at}"),
        Op::Discard => format!("a discard at byte {at}"),
        Op::WriteZeroes { .. } => format!("zeroing at byte {at}"),
        Op::Allocate => format!("an allocation at byte {at}"),
    };
    let others = match count {
        0 | 1 => String::new(),
        n => format!(", as did {} other requests since the last such line", n - 1),
    };
    let remedy = match (storage, errno) {
        (Storage::Here, libc::EFBIG) => &too_long(limit),
        (Storage::Server { .. }, libc::ENOSPC) => "; free space on its server, and let the guest try again",
        (Storage::Server { .. }, _) => "; the log of its server may have the reason",
        (Storage::Here, libc::ENOSPC | libc::EDQUOT) => {
            "; free space for the file, and let the guest try again"
        }
        (Storage::Here, _) => "; the kernel's log may have the reason",
    };
    format!("{shown}: {what} failed: {}{others}{remedy}", io::Error::from_raw_os_error(errno))
}

/// Returns the remedy for a file that would become too long.
fn too_long(limit: Option<u64>) -> String {
    match limit {
        Some(bytes) => format!(
            "; vshunt may make no file longer than {bytes} bytes: as root, prlimit --pid {} --fsize=unlimited, and let the guest \
             try again; for the next start raise LimitFSIZE= or ulimit -f",
            std::process::id()
        ),
        None => "; the file system takes no longer files: move the disk to another one ('vshunt mirror')"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_front_end_asked_in_vain_is_a_failure_of_a_server_only() {
        let failures = Failures::default();
        let noted = |storage, errno| {
            failures.next_ms.store(u64::MAX, Relaxed);
            failures.note(Path::new("d"), (Op::Read, 0), errno, storage);
            failures.count.swap(0, Relaxed)
        };
        let (asked, refused) = (Storage::Server { asked: true }, Storage::Server { asked: false });
        for errno in [libc::EPERM, libc::EINVAL, libc::EROFS, libc::EOPNOTSUPP] {
            let counts = [Storage::Here, refused, asked].map(|s| noted(s, errno));
            assert_eq!(counts, [0, 0, 1], "{errno}");
        }
        assert_eq!([Storage::Here, refused, asked].map(|s| noted(s, libc::EIO)), [1; 3]);
    }

    #[test]
    fn one_line_in_an_interval_counts_the_others() {
        let failures = Failures::default();
        assert_eq!(failures.due(0), Some(1));
        for now in 1..=4 {
            assert_eq!(failures.due(now), None);
        }
        assert_eq!(failures.due(INTERVAL_MS - 1), None);
        assert_eq!(failures.due(INTERVAL_MS), Some(6));
        assert_eq!(failures.due(INTERVAL_MS + 1), None);
        assert_eq!(failures.due(9 * INTERVAL_MS), Some(2));
    }

    #[test]
    fn a_line_has_the_error_the_place_and_the_remedy() {
        let write = (Op::Write, 4096);
        assert_eq!(
            line(Path::new("/d.img"), write, libc::ENOSPC, 3, Storage::Here, None),
            "/d.img: a write at byte 4096 failed: No space left on device (os error 28), as did 2 other requests \
             since the last such line; free space for the file, and let the guest try again"
        );
        assert_eq!(
            line(Path::new("/d.img"), write, libc::EIO, 1, Storage::Here, Some(1 << 20)),
            "/d.img: a write at byte 4096 failed: Input/output error (os error 5); the kernel's log may have the \
             reason"
        );
        let too_long = |limit| line(Path::new("/d.img"), write, libc::EFBIG, 1, Storage::Here, limit);
        let text = too_long(Some(1 << 20));
        assert!(
            text.contains("longer than 1048576 bytes: as root, prlimit --pid ")
                && text.contains("LimitFSIZE="),
            "{text}"
        );
        assert!(!too_long(None).contains("LimitFSIZE"));
    }
}
