//! The process that holds the locks of an image, for messages.
//!
//! The kernel gives no process for these locks. `/proc/PID/fdinfo` lists the locks of each
//! descriptor. Only processes of the same user can be read; root reads all.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::outcome::one_line;

/// How long the search may take. There may be very many descriptors.
const SEARCH_TIME: Duration = Duration::from_millis(500);

/// Returns the words for the process that has locked a file: `another process`, and its name and
/// id if it can be found.
pub(super) fn of(file: &File) -> String {
    let another = "another process";
    match file.metadata().ok().and_then(|meta| search(&inode(&meta))) {
        Some((pid, name)) => format!("{another} ({}, pid {pid})", one_line(&name)),
        None => another.to_owned(),
    }
}

/// Returns the file as `/proc` writes it in a line about a lock.
fn inode(meta: &std::fs::Metadata) -> String {
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    format!("{major:02x}:{minor:02x}:{}", meta.ino())
}

fn search(inode: &str) -> Option<(u32, String)> {
    let start = Instant::now();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in ids.filter(|pid| *pid != std::process::id()) {
        let folder = Path::new("/proc").join(pid.to_string());
        let Ok(descriptors) = std::fs::read_dir(folder.join("fdinfo")) else { continue };
        for descriptor in descriptors.flatten() {
            if start.elapsed() > SEARCH_TIME {
                return None;
            }
            let info = std::fs::read_to_string(descriptor.path()).unwrap_or_default();
            if has_lock(&info, inode) {
                let name = std::fs::read_to_string(folder.join("comm")).unwrap_or_default();
                return Some((pid, name.trim_end().to_owned()));
            }
        }
    }
    None
}

/// Returns whether a text of `fdinfo` has a lock on this file that belongs to an open file.
fn has_lock(info: &str, inode: &str) -> bool {
    let locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    locks
        .map(|lock| lock.split_whitespace().collect::<Vec<_>>())
        .any(|words| words.contains(&"OFDLCK") && words.contains(&inode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_open_files_are_found_in_fdinfo() {
        let info = "pos:\t0\nflags:\t02\nlock:\t1: OFDLCK  ADVISORY  READ -1 fe:01:77 100 100\n";
        assert!(has_lock(info, "fe:01:77") && !has_lock(info, "fe:01:7"));
        assert!(!has_lock(&info.replace("OFDLCK", "POSIX "), "fe:01:77"));
    }

    #[test]
    fn a_file_without_a_lock_is_another_process_only() {
        assert_eq!(of(&tempfile::tempfile().unwrap()), "another process");
    }
}
