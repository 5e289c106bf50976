//! Files that a command line names. The client opens them with the user's rights and passes the
//! descriptors to the daemon.
//!
//! In a sandbox, the daemon opens only configured files, and files whose descriptors a client has
//! passed (`qmp::fdset`). Files that the client cannot open are not passed: the error message of
//! the daemon then names them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde_json::json;
use vshunt_sandbox::SandboxInfo;
use vshunt_types::spec::{DiskInfo, DiskSpec, Format};

use super::call::{call, send};
use super::client::Client;
use crate::image;
use crate::outcome::Outcome;

/// A file or folder that the daemon needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    path: PathBuf,
    write: bool,
}

impl Wanted {
    /// Returns the folder in which a file is made. A symbolic link there is followed.
    pub(super) fn folder_of(path: &Path) -> Vec<Self> {
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let folder = real.parent().map(|folder| Self { path: folder.to_owned(), write: false });
        folder.into_iter().collect()
    }

    /// Returns a single file.
    pub(super) fn file(path: &Path, write: bool) -> Vec<Self> {
        vec![Self { path: path.to_owned(), write }]
    }

    /// Returns the files of an image. A qcow2 image may have a data file and backing images.
    /// `write`: the image and its data file are written; `below`: the backing images are written,
    /// too.
    pub(super) fn image(path: &Path, format: Format, write: bool, below: bool) -> Vec<Self> {
        if is_served_by_vshunt(path) {
            return Vec::new();
        }
        if format != Format::Qcow2 {
            return Self::file(path, write);
        }
        let data = image::data_file(path);
        let own = |file: &Path| file == path || Some(file) == data.as_deref();
        let all = image::chain(path).into_iter();
        all.map(|file| Self { write: below || (write && own(&file)), path: file }).collect()
    }

    /// Returns all files of a disk that is added.
    pub(super) fn disk(spec: &DiskSpec) -> Vec<Self> {
        let file = spec.file.as_deref();
        let files = file.map(|file| Self::image(file, spec.format(), !spec.readonly, false));
        let certificates = vshunt_block::certificates_of(spec).map(|folder| Self::file(&folder, false));
        [files, certificates].into_iter().flatten().flatten().collect()
    }

    fn open(&self) -> Option<File> {
        if is_served_by_vshunt(&self.path) {
            return None;
        }
        let open = |write| {
            let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
            OpenOptions::new().read(true).write(write).custom_flags(flags).open(&self.path)
        };
        // Before it is opened, because opening some devices has side effects.
        let kind = std::fs::metadata(&self.path).ok()?.file_type();
        let named_by_proc = self.path.starts_with("/proc");
        match kind.is_file() || kind.is_dir() || kind.is_block_device() || named_by_proc {
            true if self.write => open(true).or_else(|_| open(false)).ok(),
            true => open(false).ok(),
            false => None,
        }
    }
}

/// Returns whether a path leads to a mount of vshunt. Such a file is not opened here: its server
/// may be the daemon that runs the command, which refuses the file and may not answer the open.
/// Only the kernel is asked.
pub(super) fn is_served_by_vshunt(path: &Path) -> bool {
    let Ok(seen) = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()) else { return false };
    let device = format!("{}:{}", seen.stx_dev_major, seen.stx_dev_minor);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // Mount id, parent id, device, and after ` - ` the type of the file system
    // (proc_pid_mountinfo(5)).
    mounts.lines().any(|line| {
        line.split(' ').nth(2) == Some(&device)
            && line.split_once(" - ").is_some_and(|(_, rest)| rest.starts_with("fuse.vshunt "))
    })
}

/// Returns the files of a disk of the daemon, to be written.
pub(super) fn of_disk(client: &mut Client, name: &str) -> Outcome<Vec<Wanted>> {
    let disks: Vec<DiskInfo> = call(client, "query-disks", json!({}))?;
    let spec = disks.into_iter().map(|disk| disk.spec).find(|spec| spec.name == name);
    Ok(spec
        .and_then(|spec| Some(Wanted::image(spec.file.as_deref()?, spec.format(), true, true)))
        .unwrap_or_default())
}

/// Runs `command` while the daemon may open `wanted`, and also `made` once the command has made it.
/// The daemon may open the files of a disk as long as the disk has them.
pub(super) fn with<T>(
    client: &mut Client,
    wanted: impl FnOnce(&mut Client) -> Outcome<Vec<Wanted>>,
    made: &[Wanted],
    command: impl FnOnce(&mut Client) -> Outcome<T>,
) -> Outcome<T> {
    let info: SandboxInfo = call(client, "query-sandbox", json!({}))?;
    // Mountpoints and namespaces are restricted even without Landlock.
    if !matches!(info.landlock.as_str(), "process" | "missing") {
        return command(client);
    }
    let mut sets = Vec::new();
    let wanted = wanted(client)?;
    let result = pass(client, &wanted, &mut sets).and_then(|()| command(client));
    let after = match result {
        Ok(_) => pass(client, made, &mut sets),
        Err(_) => Ok(()),
    };
    for set in sets {
        send(client, "remove-fd", json!({ "fdset-id": set }))?;
    }
    result.and_then(|value| after.map(|()| value))
}

fn pass(client: &mut Client, wanted: &[Wanted], sets: &mut Vec<u64>) -> Outcome {
    for wanted in wanted {
        if let Some(file) = wanted.open() {
            sets.push(client.add_fd(&file, &wanted.path.to_string_lossy())?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_passed_with_all_below_it_and_only_it_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("base"), vec![0; 1 << 20]).unwrap();
        let make = |name: &str, below: &str, format: &str| {
            let (image, below) = (path(name), path(below));
            let args = ["vshunt", "image", "create", "-q", "-f", "qcow2", "-F", format, "-b"];
            let args =
                args.map(Into::into).into_iter().chain([below.into_os_string(), image.into_os_string()]);
            let args: Vec<std::ffi::OsString> = args.collect();
            crate::cli::run(&args).unwrap();
        };
        make("middle", "base", "raw");
        make("top", "middle", "qcow2");
        let wanted = |name: &str, write| Wanted { path: path(name), write };
        let all = |top, below| [wanted("top", top), wanted("middle", below), wanted("base", below)];
        assert_eq!(Wanted::image(&path("top"), Format::Qcow2, true, false), all(true, false));
        assert_eq!(Wanted::image(&path("top"), Format::Qcow2, false, false), all(false, false));
        assert_eq!(Wanted::image(&path("top"), Format::Qcow2, true, true), all(true, true));
        // The content of a raw image is the disk, so its header is not read.
        assert_eq!(Wanted::image(&path("top"), Format::Raw, true, false), [wanted("top", true)]);
        let link = path("link");
        std::os::unix::fs::symlink(path("top"), &link).unwrap();
        let real = std::fs::canonicalize(dir.path()).unwrap();
        assert_eq!(Wanted::folder_of(&link), [Wanted { path: real, write: false }]);
    }

    #[test]
    fn what_is_no_image_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
            .unwrap();
        for path in [fifo.as_path(), Path::new("/dev/null"), &dir.path().join("none")] {
            assert!(Wanted { path: path.to_owned(), write: false }.open().is_none(), "{}", path.display());
        }
        assert!(Wanted { path: dir.path().to_owned(), write: false }.open().is_some());
    }
}
