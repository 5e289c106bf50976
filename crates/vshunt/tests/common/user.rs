//! A user without rights, for tests that run as root.
//!
//! Root may open, enter and execute more than others. Each resource of that user, such as a folder,
//! the program or a device, is therefore checked as that user, or made for it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The user, and its group.
pub(crate) const NOBODY: u32 = 65534;

/// The limit of locked memory of a user on most systems, in bytes. It has room for some 150
/// io_urings of all processes of the user. Those of root do not count.
const MEMLOCK_USUAL: u64 = 8 << 20;

/// Returns the reason why this process cannot start daemons as [`NOBODY`].
pub(crate) fn cannot_become_nobody() -> Option<&'static str> {
    static WHY: OnceLock<Option<&str>> = OnceLock::new();
    *WHY.get_or_init(|| {
        if !is_root() {
            return Some("needs root, to become another user");
        }
        if thread::spawn(become_nobody).join().unwrap().is_err() {
            return Some("this root of a user namespace cannot become another user");
        }
        // The programs that this process starts inherit the limit.
        let limit = getrlimit(Resource::Memlock);
        let usual = |limit: Option<u64>| limit.map(|bytes| bytes.max(MEMLOCK_USUAL));
        let wanted = Rlimit { current: usual(limit.current), maximum: usual(limit.maximum) };
        if wanted != limit && setrlimit(Resource::Memlock, wanted).is_err() {
            return Some("the limit of locked memory (ulimit -l) is below 8 MiB and cannot be raised");
        }
        None
    })
}

/// Whether this process can start daemons as [`NOBODY`]. If not, prints that the test `name` is
/// skipped.
pub(crate) fn root_or_skip(name: &str) -> bool {
    if let Some(why) = cannot_become_nobody() {
        println!("skip {name}: {why}");
    }
    cannot_become_nobody().is_none()
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this process and the daemons that it starts can have any number of io_urings. If not,
/// prints that the test `name` is skipped.
pub(crate) fn many_urings_or_skip(name: &str) -> bool {
    let exempt = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK));
    let can = exempt || getrlimit(Resource::Memlock).current.is_none();
    if !can {
        println!("skip {name}: needs CAP_IPC_LOCK or no limit of locked memory (ulimit -l)");
    }
    can
}

/// Runs `f` as [`NOBODY`] on a thread of its own. Where this process cannot become that user, it
/// runs `f` as its own user.
pub(crate) fn as_nobody<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let run = || {
        if cannot_become_nobody().is_none() {
            become_nobody().unwrap();
        }
        f()
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Makes the calling thread, and no other, run as [`NOBODY`] without groups. The functions of the C
/// library would change all threads.
fn become_nobody() -> io::Result<()> {
    // SAFETY: the call reads no memory, since the list is empty.
    done(unsafe { libc::syscall(libc::SYS_setgroups, 0, 0) })?;
    for call in [libc::SYS_setresgid, libc::SYS_setresuid] {
        // SAFETY: the calls take numbers only.
        done(unsafe { libc::syscall(call, NOBODY, NOBODY, NOBODY) })?;
    }
    Ok(())
}

fn done(code: libc::c_long) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether [`NOBODY`] has this access to a path, including all folders on the path.
fn reaches(path: &Path, access: Access) -> bool {
    as_nobody(|| rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS).is_ok())
}

/// A temporary folder with the mode `mode` in a place that [`NOBODY`] can enter. TMPDIR may lie in
/// a folder of root alone.
pub(crate) fn folder(mode: u32) -> tempfile::TempDir {
    for parent in [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()] {
        let Ok(dir) = tempfile::tempdir_in(parent) else { continue };
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o711)).unwrap();
        if reaches(dir.path(), Access::EXEC_OK) {
            fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
            return dir;
        }
    }
    panic!("user {NOBODY} can enter neither TMPDIR ({:?}) nor /tmp nor /var/tmp", std::env::temp_dir());
}

/// The program `vshunt`, where [`NOBODY`] may execute it: a copy in `folder` if the build folder is
/// closed to other users, or if the program is, as one that was built with the umask 077.
pub(crate) fn program(folder: &Path) -> PathBuf {
    let access = Access::READ_OK | Access::EXEC_OK;
    let built = PathBuf::from(env!("CARGO_BIN_EXE_vshunt"));
    if reaches(&built, access) {
        return built;
    }
    let copy = folder.join("vshunt");
    super::copy_program(&copy);
    assert!(reaches(&copy, access), "user {NOBODY} cannot execute {}", copy.display());
    copy
}

/// Runs `test` where [`NOBODY`] may open the device at `path`. Returns the reason if it cannot be
/// done.
///
/// As root, `test` runs on a thread with a mount namespace of its own, and `path` there is a node
/// of mode 0666. The programs that the thread starts are in that namespace, too. The machine's node
/// keeps its mode, which is 0600 until udev sets another.
pub(crate) fn with_device(path: &Path, test: impl FnOnce() + Send) -> Result<(), String> {
    let run = || {
        let made = if is_root() { own_device(path) } else { Ok(()) };
        let open = || File::options().read(true).write(true).open(path);
        if let Err(e) = as_nobody(open) {
            let why = made.err().map(|e| format!("; no node of its own: {e}")).unwrap_or_default();
            return Err(format!("this user cannot open {}: {e}{why}", path.display()));
        }
        test();
        Ok(())
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Gives the calling thread a mount namespace with a node of mode 0666 in the place of the device
/// at `path`.
fn own_device(path: &Path) -> io::Result<()> {
    let like = fs::metadata(path)?;
    if !like.file_type().is_char_device() {
        return Err(io::Error::other("it is no character device"));
    }
    let folder = tempfile::tempdir()?;
    // SAFETY: the call takes no memory, and affects this thread only.
    done(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into())?;
    mount("none", Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE)?;
    release_mounts();
    // Of its own, because the file system of the folder may be mounted with nodev.
    mount("none", folder.path(), "tmpfs", 0)?;
    let node = folder.path().join("node");
    let mode = Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(CWD, &node, FileType::CharacterDevice, mode, like.rdev())?;
    rustix::fs::chmod(&node, mode)?; // mknod obeys the umask
    mount(node.to_str().unwrap(), path, "", libc::MS_BIND)?;
    unmount(folder.path().to_str().unwrap())
}

/// Unmounts the copies of other daemons' FUSE mounts in the namespace of the calling thread. They
/// would keep the mounts alive for as long as the namespace exists.
fn release_mounts() {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    for line in table.lines().filter(|line| line.contains(" - fuse.vshunt ")) {
        // A path with a space or the like is escaped, and its mount stays.
        if let Some(path) = line.split(' ').nth(4) {
            let _ = unmount(path);
        }
    }
}

fn mount(source: &str, target: &Path, kind: &str, flags: libc::c_ulong) -> io::Result<()> {
    let c = |s: &str| std::ffi::CString::new(s).unwrap();
    let (source, target, kind) = (c(source), c(target.to_str().unwrap()), c(kind));
    // SAFETY: the C strings live until the call returns.
    done(
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) }
            .into(),
    )
}

fn unmount(path: &str) -> io::Result<()> {
    let path = std::ffi::CString::new(path).unwrap();
    // SAFETY: the C string lives until the call returns.
    done(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }.into())
}

/// Returns the reason why [`NOBODY`] cannot mount by `fusermount3`, which has to be set-user-id
/// root.
pub(crate) fn no_fusermount3() -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join("fusermount3"))
        .find(|file| reaches(file, Access::EXEC_OK));
    let Some(program) = found else { return Some("fusermount3 is not on the PATH (package fuse3)".into()) };
    let meta = fs::metadata(&program).unwrap();
    if meta.uid() != 0 || meta.mode() & libc::S_ISUID == 0 {
        return Some(format!("{} is not set-user-id root", program.display()));
    }
    let on = rustix::fs::statvfs(&program).unwrap();
    if on.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID) {
        return Some(format!("{} lies on a file system that is mounted with nosuid", program.display()));
    }
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    if status.lines().any(|line| line.starts_with("NoNewPrivs:") && line.ends_with('1')) {
        return Some("this process has no_new_privs set, and fusermount3 gets no rights".into());
    }
    None
}
