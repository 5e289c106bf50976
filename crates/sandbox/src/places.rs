//! Where errands act for clients: mountpoints and network namespaces. Landlock does not restrict
//! errands.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, openat, statx};
use vshunt_types::error::{Error, Result};

use super::{Access, RUNNING, Rule};

/// Device number and inode.
type Id = (u64, u64);

/// The configured and allowed paths, as they were at the start.
pub(super) struct Places {
    /// Without symbolic links.
    folders: Vec<(PathBuf, Access)>,
    /// Files that rules name.
    files: Vec<(Id, Access)>,
}

impl Places {
    pub(super) fn new(rules: &[Rule]) -> Self {
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        for rule in rules {
            match std::fs::canonicalize(&rule.path) {
                Ok(path) if path.is_dir() => folders.push((path, rule.access)),
                _ => files.extend(id_at(&rule.path).map(|id| (id, rule.access))),
            }
        }
        Self { folders, files }
    }

    fn contain(&self, path: &Path, id: Option<Id>, change: bool) -> bool {
        self.folders.iter().any(|(folder, access)| path.starts_with(folder) && access.is_place(change))
            || self.files.iter().any(|(file, access)| Some(*file) == id && access.is_place(change))
    }
}

/// Checks that the daemon may act for a client on the file or folder that `fd` refers to. `change`:
/// it is to be mounted over, or a file is to be made in it. `shown` is what the error calls it.
///
/// # Errors
/// `Invalid` if it is neither configured nor allowed, and no client has passed a descriptor of it
/// or of its folder.
pub fn check_place(fd: impl AsFd, change: bool, shown: impl std::fmt::Display) -> Result<()> {
    let Some((running, places)) = RUNNING.get().and_then(|r| Some((r, r.places.as_ref()?))) else {
        return Ok(());
    };
    let (path, id) = (path_of(fd.as_fd()), id_of(fd.as_fd()));
    let granted = || {
        running.granted.list().iter().any(|granted| {
            let of = (**granted).as_fd();
            (id.is_some() && id_of(of) == id) || path_of(of).is_some_and(|of| is_below(path.as_deref(), &of))
        })
    };
    match path.as_deref().is_some_and(|path| places.contain(path, id, change)) || granted() {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{shown} is outside of what the sandbox allows: use 'vshunt disk add' and the like, which pass a descriptor of \
             it, or start the daemon with --allow-path=FOLDER"
        ))),
    }
}

fn is_below(path: Option<&Path>, folder: &Path) -> bool {
    path.is_some_and(|path| path.starts_with(folder))
}

fn path_of(fd: BorrowedFd<'_>) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

fn id_of(fd: BorrowedFd<'_>) -> Option<Id> {
    let seen = statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((makedev(seen.stx_dev_major, seen.stx_dev_minor), seen.stx_ino))
}

fn id_at(path: &Path) -> Option<Id> {
    id_of(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_in_a_folder_or_a_file_of_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| std::fs::canonicalize(dir.path()).unwrap().join(name);
        for folder in ["read", "write", "sockets", "mounts"] {
            std::fs::create_dir(path(folder)).unwrap();
        }
        std::fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink(path("write"), path("link")).unwrap();
        let rule = |(name, access): (&str, Access)| Rule { path: path(name), access };
        let rules = [
            ("read", Access::Read),
            ("link", Access::Write),
            ("file", Access::Write),
            ("none", Access::Write),
            ("sockets", Access::Sockets),
            ("mounts", Access::Mounts),
        ];
        let places = Places::new(&rules.map(rule));
        let contain = |name: &str, change| places.contain(&path(name), id_at(&path(name)), change);
        assert!(contain("write/a", true) && contain("write", true) && contain("file", true));
        assert!(!contain("sockets/a", true) && !contain("sockets/a", false));
        assert!(contain("mounts/a", true) && !contain("mounts/a", false));
        assert!(contain("read/a", false) && !contain("read/a", true));
        assert!(!contain("written", false) && !contain("none", false) && !contain("", false));
    }
}
