//! A FUSE server of a few lines, and a mount namespace that hides the mounts of a test from other
//! processes.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// The contents of the file.
pub(super) const CONTENTS: &[u8] = b"the disk's contents";

pub(super) const NOBODY: u32 = 65534;

/// Runs a test as root in a thread with a mount namespace of its own. Prints a line if it is
/// skipped.
pub(super) fn privately(test: impl FnOnce(&Path) + Send + 'static) {
    let all_ids = std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| map.contains("4294967295"));
    if !rustix::process::geteuid().is_root() || !all_ids {
        println!("skipped: needs root, and not only that of a user namespace");
        return;
    }
    if let Err(e) = std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        println!("skipped: needs /dev/fuse, which cannot be opened: {e}");
        return;
    }
    // Of the thread outside: the one inside may lose the right to remove it.
    let folder = folder();
    let path = folder.path().to_owned();
    let result = thread::spawn(move || {
        // SAFETY: the call takes no memory, and affects this thread only.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
            println!("skipped: needs a mount namespace of its own ({})", std::io::Error::last_os_error());
            return;
        }
        mount_with("none", Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE);
        hide_fusectl();
        test(&path);
    })
    .join();
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

/// Makes a temporary folder of root in a place that [`NOBODY`] can enter. TMPDIR may lie in a
/// folder of root alone.
fn folder() -> tempfile::TempDir {
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    for parent in [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()] {
        let Ok(dir) = tempfile::tempdir_in(parent) else { continue };
        std::fs::set_permissions(&dir, mode(0o711)).unwrap();
        let path = dir.path().to_owned();
        let enter = move || {
            become_nobody();
            rustix::fs::accessat(CWD, &path, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
        };
        if thread::spawn(enter).join().unwrap() {
            std::fs::set_permissions(&dir, mode(0o700)).unwrap();
            return dir;
        }
    }
    panic!("user {NOBODY} can enter neither TMPDIR ({:?}) nor /tmp nor /var/tmp", std::env::temp_dir());
}

/// Calls mount(2) without data.
pub(super) fn mount_with(source: &str, target: &Path, kind: &str, flags: libc::c_ulong) {
    let c = |s: &str| std::ffi::CString::new(s).unwrap();
    let (source, target, kind) = (c(source), c(target.to_str().unwrap()), c(kind));
    // SAFETY: the C strings live until the call returns.
    let rc = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) };
    assert_eq!(rc, 0, "mount over {target:?}: {}", std::io::Error::last_os_error());
}

/// Mounts over `path` as another program would. INIT waits in the session.
pub(super) fn mount_fuse(path: &Path, kind: &str) -> OwnedFd {
    let session =
        rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .unwrap();
    let c = |s: &str| std::ffi::CString::new(s).unwrap();
    let (source, target, kind) = (c("vshunt:raw"), c(path.to_str().unwrap()), c(kind));
    let data = c(&format!("fd={},rootmode=100000,user_id=0,group_id=0", session.as_raw_fd()));
    // SAFETY: the C strings live until the call returns.
    let rc = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, data.as_ptr().cast()) };
    assert_eq!(rc, 0, "mount over {target:?}: {}", std::io::Error::last_os_error());
    session
}

/// Replaces /dev/fuse by one with this mode. Uses `folder`/device.
pub(super) fn own_device(folder: &Path, mode: u32) {
    let device = folder.join("device");
    let mode = Mode::from_raw_mode(mode);
    rustix::fs::mknodat(CWD, &device, FileType::CharacterDevice, mode, rustix::fs::makedev(10, 229)).unwrap();
    rustix::fs::chmod(&device, mode).unwrap();
    bind(&device, Path::new("/dev/fuse"));
    // Without the flag nodev, which the folder's mount has on many machines.
    mount_with("none", Path::new("/dev/fuse"), "", libc::MS_BIND | libc::MS_REMOUNT);
}

/// Where fusectl is mounted.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Mounts it in this mount namespace, where `privately` has hidden the machine's.
pub(super) fn mount_fusectl() {
    mount_with("none", Path::new(CONNECTIONS), "fusectl", 0);
}

/// Unmounts fusectl in this mount namespace, which systemd mounts at boot. So a test starts without
/// it on each machine.
fn hide_fusectl() {
    let path = std::ffi::CString::new(CONNECTIONS).unwrap();
    // SAFETY: the C string lives until the call returns.
    while unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) } == 0 {}
}

pub(super) fn bind(from: &Path, to: &Path) {
    mount_with(from.to_str().unwrap(), to, "", libc::MS_BIND);
}

pub(super) fn umount(path: &Path, flags: i32) {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the C string lives until the call returns.
    let rc = unsafe { libc::umount2(path.as_ptr(), flags) };
    assert_eq!(rc, 0, "umount: {}", std::io::Error::last_os_error());
}

/// Makes the calling thread, and no other, run as the user nobody. This cannot be undone.
pub(super) fn become_nobody() {
    // The functions of libc would change all threads.
    // SAFETY: the call takes no memory: the list is empty.
    assert_eq!(unsafe { libc::syscall(libc::SYS_setgroups, 0, 0) }, 0);
    for call in [libc::SYS_setresgid, libc::SYS_setresuid] {
        // SAFETY: the calls take numbers only.
        assert_eq!(unsafe { libc::syscall(call, NOBODY, NOBODY, NOBODY) }, 0);
    }
}

/// A server in a thread. Dropping it closes the session, as the kernel does for a killed daemon.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    /// Number of requests that it read and does not answer.
    held: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers all requests except those of the operation `hold`.
    pub(super) fn start(session: OwnedFd, hold: u32) -> Self {
        let (stop, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (its_stop, its_held) = (stop.clone(), held.clone());
        let thread = thread::spawn(move || {
            while !its_stop.load(Ordering::Relaxed) {
                let timeout = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
                let _ = poll(&mut [PollFd::new(&session, PollFlags::IN)], Some(&timeout));
                match answer(&session, hold) {
                    Ok(true) | Err(Errno::AGAIN | Errno::NOENT | Errno::INTR) => {}
                    Ok(false) => drop(its_held.fetch_add(1, Ordering::Relaxed)),
                    Err(_) => return,
                }
            }
        });
        Self { stop, held, thread: Some(thread) }
    }

    pub(super) fn wait_for_held(&self) {
        while self.held.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

pub(super) const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
pub(super) const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
pub(super) const INIT: u32 = 26;
const FORGET: u32 = 2;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// Reads a request and answers it. Returns false if it is held.
fn answer(session: &OwnedFd, hold: u32) -> rustix::io::Result<bool> {
    let mut request = vec![0; 1 << 18];
    let n = rustix::io::read(session, &mut request[..])?;
    let u32_at = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    assert_eq!(n, u32_at(0) as usize);
    let opcode = u32_at(4);
    if opcode == hold {
        return Ok(false);
    }
    let (error, body) = match opcode {
        FORGET | BATCH_FORGET | INTERRUPT => return Ok(true),
        INIT => (0, init()),
        GETATTR | SETATTR => (0, attributes()),
        // A file handle and FOPEN_DIRECT_IO.
        OPEN => (0, [0u32, 0, 1, 0].iter().flat_map(|n| n.to_ne_bytes()).collect()),
        READ => {
            let offset = CONTENTS.len().min(u32_at(48) as usize);
            (0, CONTENTS[offset..].to_vec())
        }
        STATFS => (0, vec![0; 80]),
        FLUSH | RELEASE => (0, Vec::new()),
        _ => (-libc::ENOSYS, Vec::new()),
    };
    let mut reply = u32::try_from(16 + body.len()).unwrap().to_ne_bytes().to_vec();
    reply.extend(error.to_ne_bytes());
    reply.extend(&request[8..16]);
    reply.extend(body);
    rustix::io::write(session, &reply).map(|_| true)
}

/// A fuse_init_out of protocol 7.31.
fn init() -> Vec<u8> {
    let (major, minor, max_readahead, flags) = (7u32, 31u32, 0u32, 0u32);
    let (background, max_write, granularity) = (12 << 16 | 12u32, 4096u32, 1u32);
    let mut body: Vec<u8> = [major, minor, max_readahead, flags, background, max_write, granularity]
        .iter()
        .flat_map(|n| n.to_ne_bytes())
        .collect();
    body.resize(64, 0);
    body
}

/// A fuse_attr_out that the kernel does not cache.
fn attributes() -> Vec<u8> {
    let mut body = vec![0; 16];
    for n in [1, CONTENTS.len() as u64, 1, 0, 0, 0] {
        body.extend(n.to_ne_bytes());
    }
    for n in [0, 0, 0, libc::S_IFREG | 0o644, 1, 0, 0, 0, 512, 0] {
        body.extend(u32::to_ne_bytes(n));
    }
    assert_eq!(body.len(), 104);
    body
}
