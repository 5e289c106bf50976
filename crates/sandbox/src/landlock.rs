//! Restricts which files a thread may open (landlock(7)).
//!
//! Descriptors that are open already are not restricted, nor are descriptors that other processes
//! pass.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, fcntl_getfl, statx};
use rustix::io::Errno;

use super::{Access, Rule};

/// LANDLOCK_ACCESS_FS_* of linux/landlock.h that a rule can grant.
mod access {
    pub(super) const WRITE_FILE: u64 = 1 << 1;
    pub(super) const READ_FILE: u64 = 1 << 2;
    pub(super) const READ_DIR: u64 = 1 << 3;
    pub(super) const REMOVE_FILE: u64 = 1 << 5;
    pub(super) const MAKE_REG: u64 = 1 << 8;
    pub(super) const MAKE_SOCK: u64 = 1 << 9;
    /// Renaming between folders; since version 2.
    pub(super) const REFER: u64 = 1 << 13;
    /// Since version 3.
    pub(super) const TRUNCATE: u64 = 1 << 14;
    /// On devices that are opened from now on; since version 5.
    pub(super) const IOCTL_DEV: u64 = 1 << 15;
    /// Rights on a file that is no folder.
    pub(super) const OF_FILES: u64 = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
    /// Rights to read only.
    pub(super) const READING: u64 = READ_FILE | READ_DIR;
    /// Rights on a folder of sockets. Listing is needed to lock the folder.
    pub(super) const SOCKETS: u64 = MAKE_SOCK | REMOVE_FILE | READ_DIR;
    /// Rights to read and to change.
    pub(super) const ALL: u64 = OF_FILES | READ_DIR | REMOVE_FILE | MAKE_REG | MAKE_SOCK | REFER;
}

/// LANDLOCK_CREATE_RULESET_VERSION.
const ASK_VERSION: u32 = 1;
/// LANDLOCK_RULE_PATH_BENEATH.
const PATH_BENEATH: libc::c_int = 1;

/// `struct landlock_ruleset_attr` of the first version. The kernel accepts a structure that is
/// shorter than its own.
#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: i32,
}

/// Returns the version of the kernel's Landlock interface. 0: there is none, or it is switched off.
pub fn version() -> u32 {
    let none = std::ptr::null::<u8>();
    // SAFETY: with this flag the kernel reads no memory.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, ASK_VERSION) };
    u32::try_from(version).unwrap_or(0)
}

/// A descriptor that a client passed. It grants the access that it is open for; a folder grants
/// everything in it.
pub type Granted = Arc<dyn AsFd + Send + Sync>;

/// Rules that threads can be restricted by.
pub(super) struct Ruleset {
    fd: OwnedFd,
    /// Kept open, see [`pinned`](Self::pinned).
    _paths: Vec<OwnedFd>,
}

impl Ruleset {
    /// Makes a ruleset that refuses all file access except what `rules` and `granted` allow. None:
    /// the kernel has no Landlock.
    ///
    /// Missing paths are left out. An older kernel restricts less.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(rules: &[Rule], granted: &[Granted]) -> io::Result<Option<Self>> {
        let handled: u64 = match version() {
            0 => return Ok(None),
            1 => (1 << 13) - 1,
            2 => (1 << 14) - 1,
            3 | 4 => (1 << 15) - 1,
            5.. => (1 << 16) - 1,
        };
        let attr = RulesetAttr { handled_access_fs: handled };
        // SAFETY: the kernel reads the given number of bytes of `attr`, which lives until the call
        // returns.
        let fd = unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size_of::<RulesetAttr>(), 0)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
        let ruleset = Self { fd: unsafe { OwnedFd::from_raw_fd(fd as i32) }, _paths: Vec::new() };
        for rule in rules {
            ruleset.add(rule, handled)?;
        }
        for granted in granted {
            let fd = (**granted).as_fd();
            ruleset.allow(fd, allowed_by(fd)? & handled)?;
        }
        Ok(Some(ruleset))
    }

    /// Does the same as [`new`](Self::new), and keeps the files open. A rule belongs to an inode,
    /// and procfs makes another inode for the same name if nothing has used it for a while.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn pinned(rules: &[Rule]) -> io::Result<Option<Self>> {
        let open =
            |rule: &Rule| rustix::fs::open(&rule.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
        // Opened before the rules are made, so that the rules belong to the same inodes.
        let paths = rules.iter().filter_map(open).collect();
        Ok(Self::new(rules, &[])?.map(|ruleset| Self { _paths: paths, ..ruleset }))
    }

    fn add(&self, rule: &Rule, handled: u64) -> io::Result<()> {
        let wanted = match rule.access {
            Access::Read => access::READING,
            Access::Write => access::ALL,
            Access::Sockets => access::SOCKETS,
            Access::Mounts => return Ok(()),
        };
        let path = match rustix::fs::open(&rule.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(path) => path,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => return Ok(()),
            Err(e) => {
                // An operation that needs the path fails later, and names it.
                tracing::warn!("sandbox: {} cannot be opened ({e}), so it stays closed", rule.path.display());
                return Ok(());
            }
        };
        let allowed = match kind_of(path.as_fd())? {
            FileType::Directory => wanted,
            FileType::CharacterDevice => wanted & access::OF_FILES | access::IOCTL_DEV,
            _ => wanted & access::OF_FILES,
        };
        let allowed = allowed & handled;
        self.allow(path.as_fd(), allowed)
    }

    /// Allows `access` to the file of a descriptor, and to everything below it.
    fn allow(&self, path: BorrowedFd<'_>, access: u64) -> io::Result<()> {
        if access == 0 {
            return Ok(());
        }
        let attr = PathBeneath { allowed_access: access, parent_fd: path.as_raw_fd() };
        let ruleset = self.fd.as_raw_fd();
        // SAFETY: the kernel reads `attr`, of the layout that this kind of rule has; it lives over
        // the call.
        let rc =
            unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, PATH_BENEATH, &raw const attr, 0) };
        match io::Error::last_os_error() {
            _ if rc == 0 => Ok(()),
            // A socket, or a file without a path (a memfd, a namespace): Landlock does not restrict
            // these.
            e if e.raw_os_error() == Some(libc::EBADFD) => Ok(()),
            e => Err(e),
        }
    }

    /// Restricts the calling thread by these rules, in addition to those that apply already. It
    /// must have `no_new_privs`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn enter(&self) -> io::Result<()> {
        // SAFETY: this call takes no memory.
        let rc = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.fd.as_raw_fd(), 0) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Returns the type of the file of a descriptor. Sends no request to the server of a FUSE mount,
/// since the daemon may serve the configured path itself.
fn kind_of(fd: BorrowedFd<'_>) -> io::Result<FileType> {
    let seen = statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(seen.stx_mode.into()))
}

/// The access that an open descriptor grants: for a file the access that it is open for, for a
/// folder all that a rule can allow. A descriptor that is open with O_PATH or only for writing
/// grants nothing, since it shows no right to read.
fn allowed_by(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let folder = kind_of(fd)? == FileType::Directory;
    Ok(match fcntl_getfl(fd)? & (OFlags::RWMODE | OFlags::PATH) {
        OFlags::RDONLY if folder => access::ALL,
        OFlags::RDONLY => access::READ_FILE | access::IOCTL_DEV,
        OFlags::RDWR => access::OF_FILES,
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;

    /// Runs `work` on a thread that may open only what threads that serve guests may. None: the
    /// kernel has no Landlock.
    fn confined<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
        let ruleset = Ruleset::pinned(&table::guest_paths()).unwrap()?;
        let run = || {
            rustix::thread::set_no_new_privs(true).unwrap();
            ruleset.enter().unwrap();
            work()
        };
        Some(std::thread::scope(|scope| scope.spawn(run).join().unwrap()))
    }

    #[test]
    fn threads_that_serve_guests_read_about_their_own_process_only() {
        let open = |path: &str| std::fs::File::open(path).map(drop).map_err(|e| e.kind());
        let refused = Err(io::ErrorKind::PermissionDenied);
        let seen = confined(|| {
            let own = [
                "/proc/self/status",
                "/proc/thread-self/comm",
                "/proc/self/task",
                "/sys/devices/system/cpu/online",
            ];
            let others = ["/proc/version", "/proc", "/proc/sys/kernel/ostype", "/sys/kernel", "/etc/passwd"];
            (own.map(open), others.map(open))
        });
        let Some((own, others)) = seen else { return };
        assert_eq!(own, [Ok(()); 4]);
        assert_eq!(others, [refused; 5]);
    }

    #[test]
    fn a_folder_of_sockets_is_no_folder_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        let rule = Rule { path: dir.path().to_owned(), access: Access::Sockets };
        let Some(ruleset) = Ruleset::new(&[rule], &[]).unwrap() else { return };
        let run = || {
            rustix::thread::set_no_new_privs(true).unwrap();
            ruleset.enter().unwrap();
            assert!(std::fs::File::open(path("file")).is_err());
            assert!(std::fs::File::create(path("new")).is_err());
            assert!(std::fs::File::open(dir.path()).is_ok());
            std::os::unix::net::UnixListener::bind(path("socket")).map(drop).unwrap();
            std::fs::remove_file(path("socket")).unwrap();
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }
}
