//! The threads of this process, listed completely.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::mem::MaybeUninit;

use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};

/// Listings that lacked a thread before [`own_threads`] gives up. Each takes some µs.
const ATTEMPTS_MAX: u32 = 10_000;

/// More than an entry of /proc/self/task takes in a listing, bytes.
const ENTRY_BYTES: usize = 64;

/// Returns the ids of this process's threads. Each thread that lives all the time is among them.
///
/// A listing of /proc/self/task ends early if the thread at which it has come ends at that moment
/// (Linux 6.18, `next_tid` of fs/proc/base.c). Threads are listed in the order in which they
/// started. So an older thread that is missing is one entry too few, for which a thread that starts
/// meanwhile does not make up, and the listing is repeated.
///
/// # Errors
/// The system's. Threads end all the time, so that no listing was complete.
pub fn own_threads() -> io::Result<BTreeSet<i32>> {
    for _ in 0..ATTEMPTS_MAX {
        let least = count()?;
        let listed = list(least)?;
        if listed.len() >= least {
            return Ok(listed);
        }
    }
    Err(io::Error::other("threads of this process end all the time, and cannot be listed"))
}

/// Returns the number of threads of this process (proc(5), /proc/pid/stat, field 20).
fn count() -> io::Result<usize> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // Fields are counted after the command's name, which may contain any character.
    let count = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(17)?.parse().ok());
    count.ok_or_else(|| io::Error::other("/proc/self/stat does not tell the number of threads"))
}

/// Lists threads with one call for all of them. A second call continues at a position, which skips
/// threads if others have ended.
fn list(expected: usize) -> io::Result<BTreeSet<i32>> {
    let task =
        openat(CWD, "/proc/self/task", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = vec![MaybeUninit::uninit(); (expected + 64) * ENTRY_BYTES];
    let mut entries = RawDir::new(task, &mut buffer);
    let mut listed = BTreeSet::new();
    while let Some(entry) = entries.next() {
        listed.extend(entry?.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn threads_that_end_hide_no_other() {
        for turn in 0..2_000 {
            let (started, end) = (Barrier::new(3), AtomicU32::new(0));
            let id = AtomicU32::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    started.wait();
                    while end.load(Relaxed) == 0 {}
                    // Ends while the listing is at it, in some turns.
                    (0..turn % 500).for_each(|_| std::hint::spin_loop());
                });
                scope.spawn(|| {
                    id.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Relaxed);
                    started.wait();
                    while end.load(Relaxed) != 2 {
                        std::thread::yield_now();
                    }
                });
                started.wait();
                end.store(1, Relaxed);
                let listed = own_threads().unwrap();
                end.store(2, Relaxed);
                assert!(listed.contains(&(id.load(Relaxed) as i32)), "turn {turn}: {listed:?}");
            });
        }
    }
}
