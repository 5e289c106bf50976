//! Tests of mounts with a real kernel. Each test runs as root in a mount namespace of its own, and
//! is skipped without that right.

mod refusals;
mod server;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use self::server::*;
use super::*;

const PLAIN: Options = Options { source: "vshunt:d0", readonly: false, allow_other: AllowOther::Auto };
/// No operation.
const NOTHING: u32 = 0;
/// The limit for operations that must not hang.
const SOON_S: u64 = 60;
/// How long a step is repeated that other processes may disturb.
const TRY_S: u64 = 5;

fn mounted(path: &Path, options: &Options) -> (Server, Mount) {
    let (session, mount) = mount(Mountpoint::prepare(path).unwrap(), options).unwrap();
    (Server::start(session, NOTHING), mount)
}

/// Unmounts. A process that another test starts has all files that are open here, until it executes
/// its program. So a mount may be in use for a moment.
fn unmounted(mount: &Mount) {
    let begin = Instant::now();
    loop {
        match mount.unmount(false) {
            Err(e) if e.kind() == Kind::Busy && begin.elapsed().as_secs() < TRY_S => thread::yield_now(),
            done => return done.unwrap(),
        }
    }
}

/// Returns the fields after the mount point in the line of mountinfo for `path`.
fn table_line(path: &Path) -> Option<String> {
    let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let wanted = format!(" {} ", path.display());
    text.lines().rfind(|l| l.contains(&wanted)).map(|l| l.split_once(&wanted).unwrap().1.to_owned())
}

fn refusal(path: &Path) -> (Kind, String) {
    let e = Mountpoint::prepare(path).expect_err("nothing to mount over");
    (e.kind(), e.to_string().replace(path.to_str().unwrap_or("?"), "PATH"))
}

#[test]
fn a_disk_is_a_file_while_it_is_mounted() {
    privately(|folder| {
        let path = folder.join("disk");
        let (_server, mount) = mounted(&path, &PLAIN);
        assert_eq!(fs::read(&path).unwrap(), CONTENTS);
        assert!(fs::metadata(&path).unwrap().is_file());
        assert!(mount.still_there() && mount.allow_other());
        assert_eq!(mount.path(), path);
        let line = table_line(&path).unwrap();
        assert!(line.starts_with("rw,nosuid,nodev,relatime - fuse.vshunt vshunt:d0 rw,"), "{line}");
        assert!(line.contains("user_id=0,group_id=0,default_permissions,allow_other"), "{line}");
        unmounted(&mount);
        assert!(!path.exists() && !mount.still_there());
        unmounted(&mount);
        mount.unmount(true).unwrap();
    });
}

#[test]
fn options_reach_the_kernel() {
    privately(|folder| {
        let path = folder.join("disk");
        let options = Options { source: "vshunt:a,b c\\d", readonly: true, allow_other: AllowOther::Off };
        let (_server, mount) = mounted(&path, &options);
        let line = table_line(&path).unwrap();
        assert!(
            line.starts_with("ro,nosuid,nodev,relatime - fuse.vshunt vshunt:a,b\\040c\\134d ro,"),
            "{line}"
        );
        assert!(!line.contains("allow_other") && !mount.allow_other());
        assert_eq!(File::options().write(true).open(&path).unwrap_err().raw_os_error(), Some(libc::EROFS));
        let at = Mountpoint::prepare(&folder.join("other")).unwrap();
        let e = super::mount(at, &Options { source: "a\0b", ..PLAIN }).unwrap_err();
        assert_eq!((e.kind(), e.to_string().as_str()), (Kind::Invalid, "\"a\\0b\" has a zero byte"));
        assert!(!folder.join("other").exists());
    });
}

#[test]
fn a_file_that_was_there_is_kept_with_its_contents() {
    privately(|folder| {
        let path = folder.join("disk");
        for before in ["", "precious"] {
            fs::write(&path, before).unwrap();
            let (_server, mount) = mounted(&path, &PLAIN);
            assert_eq!(fs::read(&path).unwrap(), CONTENTS);
            drop(mount);
            assert_eq!(fs::read_to_string(&path).unwrap(), before);
        }
    });
}

#[test]
fn a_file_that_was_made_goes_unless_it_is_not_ours_any_more() {
    privately(|folder| {
        let path = folder.join("disk");
        drop(Mountpoint::prepare(&path).unwrap());
        assert!(!path.exists());
        // Another in its place, even an empty one, and contents that somebody gave it.
        let at = Mountpoint::prepare(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap();
        drop(at);
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        let at = Mountpoint::prepare(&path).unwrap();
        fs::write(&path, "x").unwrap();
        drop(at);
        assert_eq!(fs::read(&path).unwrap(), b"x");
    });
}

/// A daemon in a process of its own, for [`what_a_killed_daemon_left_is_taken_away`].
#[test]
#[ignore = "run by another test"]
fn daemon() {
    let path = PathBuf::from(std::env::var_os(DAEMON_PATH).expect("a path to mount over"));
    let (_server, _mount) = mounted(&path, &PLAIN);
    println!("\nready");
    let _ = io::stdin().read(&mut [0]);
}
const DAEMON_PATH: &str = "VSHUNT_TEST_MOUNT";

#[test]
fn what_a_killed_daemon_left_is_taken_away() {
    privately(|folder| {
        let path = folder.join("disk");
        for before in [None, Some("precious")] {
            if let Some(before) = before {
                fs::write(&path, before).unwrap();
            }
            let mut daemon = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "--nocapture", "mount::tests::daemon"])
                .env(DAEMON_PATH, &path)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = BufReader::new(daemon.stdout.take().unwrap()).lines();
            assert!(said.any(|line| line.unwrap() == "ready"));
            assert_eq!(fs::read(&path).unwrap(), CONTENTS);
            let (kind, said) = refusal(&path);
            assert_eq!(kind, Kind::Busy);
            assert_eq!(
                said,
                "another vshunt has its disk mounted over PATH (vshunt:d0); remove that export, or name another file (if \
                 its daemon is gone: umount -l PATH)"
            );
            daemon.kill().unwrap();
            daemon.wait().unwrap();
            assert_eq!(fs::metadata(&path).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));

            let (_server, mount) = mounted(&path, &PLAIN);
            assert_eq!(fs::read(&path).unwrap(), CONTENTS);
            unmounted(&mount);
            // An empty file below counts as made by the killed daemon.
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), before);
        }
    });
}

#[test]
fn dead_mounts_over_dead_mounts_all_go() {
    privately(|folder| {
        let path = folder.join("disk");
        fs::write(&path, "precious").unwrap();
        for _ in 0..3 {
            drop(mount_fuse(&path, "fuse.vshunt"));
        }
        drop(Mountpoint::prepare(&path).unwrap());
        assert_eq!(table_line(&path), None);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    });
}

#[test]
fn a_stuck_server_is_neither_robbed_nor_waited_for() {
    privately(|folder| {
        let path = folder.join("disk");
        File::create(&path).unwrap();
        // One that does not read its requests, then one that never answers what it has read.
        for hold in [None, Some(GETATTR)] {
            let session = mount_fuse(&path, "fuse.vshunt");
            let server = hold.map(|hold| Server::start(session.try_clone().unwrap(), hold));
            let start = Instant::now();
            let (kind, said) = refusal(&path);
            assert_eq!(kind, Kind::Busy, "{said}");
            assert!(start.elapsed().as_secs() < SOON_S);
            if let Some(server) = &server {
                server.wait_for_held();
            }
            umount(&path, libc::MNT_DETACH);
        }
    });
}

#[test]
fn what_others_mounted_is_left_alone() {
    privately(|folder| {
        let path = folder.join("disk");
        fs::write(&path, "below").unwrap();
        let dead = mount_fuse(&path, "fuse.other");
        drop(dead);
        let words = "; unmount it (umount PATH), or name another file";
        let said = "something is mounted over PATH already (vshunt:raw, type fuse.other)";
        assert_eq!(refusal(&path), (Kind::Exists, format!("{said}{words}")));
        umount(&path, 0);

        fs::write(folder.join("bound"), "bound").unwrap();
        bind(&folder.join("bound"), &path);
        let (kind, said) = refusal(&path);
        assert_eq!(kind, Kind::Exists);
        assert!(
            said.starts_with("something is mounted over PATH already (") && said.ends_with(words),
            "{said}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"bound");
    });
}

#[test]
fn a_mount_in_use_stays_unless_it_has_to_go() {
    privately(|folder| {
        let path = folder.join("disk");
        let (_server, mount) = mounted(&path, &PLAIN);
        let mut user = File::open(&path).unwrap();
        let e = mount.unmount(false).unwrap_err();
        let shown = path.display();
        let said = format!(
            "{shown} is in use; stop its users (fuser -v {shown} names them, loop devices do not show there: losetup -j \
             {shown}), or take it from them by --force"
        );
        assert_eq!((e.kind(), e.to_string()), (Kind::Busy, said));
        assert!(mount.still_there());
        assert_eq!(fs::read(&path).unwrap(), CONTENTS);
        mount.unmount(true).unwrap();
        assert!(!mount.still_there() && !path.exists());
        assert!(user.read(&mut [0; 16]).is_err());
    });
}

#[test]
fn a_hard_end_frees_a_caller_that_waits_for_the_server() {
    privately(|folder| {
        for hold in [READ, INIT] {
            let path = folder.join("disk");
            let (session, mount) = mount(Mountpoint::prepare(&path).unwrap(), &PLAIN).unwrap();
            let server = Server::start(session, hold);
            let (tid, tids) = std::sync::mpsc::channel();
            let caller = thread::spawn({
                let path = path.clone();
                move || {
                    tid.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
                    fs::read(path)
                }
            });
            server.wait_for_held();
            // With INIT held the caller waits in open(2) before anything of it is seen here.
            let call = format!("/proc/self/task/{}/syscall", tids.recv().unwrap());
            let waits_in = if hold == INIT { libc::SYS_openat } else { libc::SYS_read };
            let begin = Instant::now();
            while !fs::read_to_string(&call).unwrap().starts_with(&format!("{waits_in} ")) {
                assert!(begin.elapsed().as_secs() < SOON_S, "the caller does not wait");
                thread::sleep(Duration::from_millis(1));
            }
            let start = Instant::now();
            mount.unmount(true).unwrap();
            let errno = caller.join().unwrap().unwrap_err().raw_os_error().unwrap();
            assert!([libc::ECONNABORTED, libc::ENOTCONN].contains(&errno), "errno {errno}");
            assert!(start.elapsed().as_secs() < SOON_S);
            assert!(!path.exists());
        }
    });
}

#[test]
fn no_call_of_the_daemon_waits_for_a_server_that_answers_nothing() {
    privately(|folder| {
        let path = folder.join("disk");
        for hard in [false, true] {
            let start = Instant::now();
            let (_session, mount) = mount(Mountpoint::prepare(&path).unwrap(), &PLAIN).unwrap();
            assert!(mount.still_there());
            mount.unmount(hard).unwrap();
            assert!(!path.exists());
            assert!(start.elapsed().as_secs() < SOON_S);
        }
    });
}

#[test]
fn what_is_mounted_over_ours_is_left_alone() {
    privately(|folder| {
        let path = folder.join("disk");
        mount_fusectl();
        let (_server, mount) = mounted(&path, &PLAIN);
        let mut user = File::open(&path).unwrap();
        fs::write(folder.join("bound"), "bound").unwrap();
        bind(&folder.join("bound"), &path);
        let shown = path.display();
        for hard in [false, true] {
            let e = mount.unmount(hard).unwrap_err();
            let said = format!(
                "something else is mounted over the disk's file {shown}; unmount that first: umount {shown}"
            );
            assert_eq!((e.kind(), e.to_string()), (Kind::Busy, said));
            assert_eq!(fs::read(&path).unwrap(), b"bound");
            assert!(mount.still_there());
        }
        assert!(user.read(&mut [0; 16]).is_err(), "aborted all the same");
        umount(&path, 0);
        mount.unmount(true).unwrap();
        assert!(!path.exists());
    });
}

#[test]
fn what_is_mounted_in_place_of_the_mount_is_left_alone() {
    privately(|folder| {
        let path = folder.join("disk");
        let (_server, mount) = mounted(&path, &PLAIN);
        umount(&path, 0);
        assert!(!mount.still_there());
        let start = Instant::now();
        // It gets our numbers, as the first free ones, unless other tests are quicker.
        let numbers = |id: MountId| (id.id, id.device);
        let _other = loop {
            let other = mount_fuse(&path, "fuse.vshunt");
            let theirs = look(open_path(&path, false).unwrap()).unwrap().mount;
            if numbers(theirs) == numbers(mount.id) || start.elapsed().as_secs() > TRY_S {
                break other;
            }
            umount(&path, 0);
        };
        assert!(!mount.still_there());
        mount.unmount(true).unwrap();
        drop(mount);
        assert!(table_line(&path).is_some());
        umount(&path, 0);
        assert!(path.exists(), "the process that mounted over it may still want it");
    });
}

#[test]
fn after_an_administrator_unmounted_it_the_file_still_goes() {
    privately(|folder| {
        let path = folder.join("disk");
        let (_server, mount) = mounted(&path, &PLAIN);
        umount(&path, libc::MNT_DETACH);
        assert!(!mount.still_there() && path.exists());
        unmounted(&mount);
        assert!(!path.exists());
    });
}

#[test]
fn a_mount_whose_folder_was_renamed_is_found() {
    privately(|folder| {
        fs::create_dir(folder.join("a")).unwrap();
        let (_server, mount) = mounted(&folder.join("a/disk"), &PLAIN);
        fs::rename(folder.join("a"), folder.join("b")).unwrap();
        assert!(mount.still_there());
        unmounted(&mount);
        assert!(!folder.join("b/disk").exists());
    });
}

#[test]
fn two_that_prepare_the_same_file_exclude_each_other() {
    privately(|folder| {
        let path = folder.join("disk");
        let first = Mountpoint::prepare(&path).unwrap();
        let (kind, said) = refusal(&path);
        assert_eq!(kind, Kind::Busy);
        assert!(
            said.starts_with("PATH is locked (flock), by another vshunt that is about to mount there"),
            "{said}"
        );
        assert!(path.exists());
        drop(first);
        assert!(!path.exists());
    });
}

#[test]
fn links_to_files_are_followed() {
    privately(|folder| {
        fs::create_dir(folder.join("d")).unwrap();
        fs::write(folder.join("d/disk"), "precious").unwrap();
        let link = folder.join("link");
        symlink("d/disk", &link).unwrap();
        let (_server, mount) = mounted(&link, &PLAIN);
        assert_eq!(mount.path(), folder.join("d/disk"));
        assert_eq!(fs::read(folder.join("d/disk")).unwrap(), CONTENTS);
        unmounted(&mount);
        assert_eq!(fs::read(&link).unwrap(), b"precious");
    });
}

#[test]
fn odd_names_work() {
    privately(|folder| {
        for name in [&b"a b,c\\d\\040\"#\n\te"[..], b"not \xff\xfe UTF-8", b"-u", b" "] {
            let path = folder.join(std::ffi::OsStr::from_bytes(name));
            let (server, mount) = mounted(&path, &PLAIN);
            assert_eq!(fs::read(&path).unwrap(), CONTENTS);
            assert!(mount.still_there());
            unmounted(&mount);
            assert!(!path.exists());
            drop(server);
        }
    });
}

#[test]
fn a_further_channel_serves_the_same_mount() {
    privately(|folder| {
        let path = folder.join("disk");
        let (session, mount) = mount(Mountpoint::prepare(&path).unwrap(), &PLAIN).unwrap();
        let further = clone_channel(&session).unwrap();
        let flags = rustix::fs::fcntl_getfl(&further).unwrap();
        assert!(flags.contains(OFlags::NONBLOCK));
        for fd in [&session, &further] {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let _server = Server::start(further, NOTHING);
        assert_eq!(fs::read(&path).unwrap(), CONTENTS);
        unmounted(&mount);
        let no_session = open_device().unwrap();
        let e = clone_channel(&no_session).unwrap_err();
        assert_eq!(e.kind(), Kind::Io);
        assert!(e.to_string().starts_with("cannot make a further channel of a FUSE connection: "), "{e}");
    });
}
