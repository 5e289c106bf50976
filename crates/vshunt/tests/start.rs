//! The first use: `vshunt serve FILE` and `vshunt mount FILE` without further flags, as a user with
//! a runtime folder of its own.

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::user::{NOBODY, is_root};
use common::{PATIENCE, output, user, vshunt_at, wait, wait_for};

/// A user's home and runtime folder. For root it is another user, because root has `/run`.
struct User {
    dir: tempfile::TempDir,
    /// The program, where the user may execute it.
    program: PathBuf,
}

impl User {
    /// Returns None, and prints that the test is skipped, if root cannot run daemons as another
    /// user.
    fn new() -> Option<Self> {
        if is_root() && !user::root_or_skip(std::thread::current().name().unwrap_or("a test")) {
            return None;
        }
        let dir = user::folder(0o755);
        let program = user::program(dir.path());
        let user = Self { dir, program };
        fs::create_dir(user.run()).unwrap();
        fs::set_permissions(user.run(), PermissionsExt::from_mode(0o700)).unwrap();
        user.own(user.dir.path());
        user.own(&user.run());
        Some(user)
    }

    fn own(&self, path: &Path) {
        if is_root() {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }

    fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A file with these first bytes, and zeroes up to 1 MiB.
    fn file(&self, name: &str, start: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, start).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        self.own(path.parent().unwrap());
        self.own(&path);
        path
    }

    /// The program, run by this user.
    fn vshunt(&self, args: &[&str]) -> Command {
        let mut command = vshunt_at(&self.program);
        command.args(args).env("XDG_RUNTIME_DIR", self.run()).current_dir(&self.dir);
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn output(&self, args: &[&str]) -> (i32, String, String) {
        output(&mut self.vshunt(args))
    }

    /// The start of a daemon fails like this.
    fn fails(&self, code: i32, args: &[&str]) -> String {
        let (got, out, err) = self.output(args);
        assert_eq!((got, out.as_str()), (code, ""), "{args:?}: {err}");
        assert!(err.starts_with("vshunt: "), "{err}");
        err
    }

    /// Starts a daemon, and waits until it is ready.
    fn start(&self, args: &[&str]) -> Running {
        let (out, err) = (self.path("out"), self.path("err"));
        let mut command = self.vshunt(args);
        let open = |path| fs::File::create(path).unwrap();
        command.stdin(Stdio::null()).stdout(open(&out)).stderr(open(&err));
        let mut running = Running { child: command.spawn().unwrap(), out, err };
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        wait_for("the daemon", || {
            let ended = running.child.try_wait().unwrap();
            assert!(ended.is_none(), "it ended early: {}", read(&running.err));
            read(&running.err).contains("vshunt: serving ")
        });
        running
    }
}

struct Running {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Running {
    /// Ends it as Ctrl-C does; what it printed.
    fn end(&mut self) -> (String, String) {
        // SAFETY: a child of this process that was not reaped, so the id is still its.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, libc::SIGINT) }, 0);
        assert_eq!(wait(&mut self.child), 0);
        self.said()
    }

    fn said(&self) -> (String, String) {
        (fs::read_to_string(&self.out).unwrap(), fs::read_to_string(&self.err).unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_image_is_served_without_flags_and_status_finds_it() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    let mut daemon = user.start(&["serve", "disk.img"]);
    let socket = user.run().join("vshunt/disk.sock");
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    let folder = fs::metadata(user.run().join("vshunt")).unwrap();
    assert_eq!(folder.permissions().mode() & 0o7777, 0o700);
    let (code, out, err) = user.output(&["status"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(
        out.contains("\ndisk  raw ")
            && out.contains("vhost-user-blk")
            && out.contains("disk: queues 0-255 stopped")
    );
    let (out, err) = daemon.end();
    let control = user.run().join("vshunt.sock");
    let ready = format!("vshunt: serving disk on {}, control on {}\n", socket.display(), control.display());
    assert_eq!(err, ready);
    for want in ["-chardev socket,id=vd0,path=", "<disk type='vhostuser'", "--disk vhost_user=true,socket="] {
        assert!(out.contains(want), "{want}: {out}");
    }
    assert_eq!(out.matches(&socket.display().to_string()).count(), 3, "{out}");
    assert!(!socket.exists() && !control.exists());
    assert_eq!(user.start(&["serve", "disk.img", "-v"]).end().0, out);
}

#[test]
fn an_export_has_the_type_and_the_socket_that_serve_gives_it() {
    let Some(user) = User::new() else { return };
    let mut daemon = user.start(&["serve", "--disk", "name=d0,format=null,size=1G"]);
    let socket = user.run().join("vshunt/d0.sock");
    let (code, out, err) = user.output(&["export", "add", "disk=d0"]);
    assert_eq!((code, out, err), (0, format!("{}\n", socket.display()), String::new()));
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    let (_, out, _) = user.output(&["export", "list"]);
    assert!(out.contains("vhost-user-blk"), "{out}");
    daemon.end();
}

#[test]
fn an_image_that_is_served_already_is_named() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    fs::create_dir(user.path("other")).unwrap();
    user.file("other/disk.img", b"");
    let mut daemon = user.start(&["serve", "disk.img"]);
    let socket = user.run().join("vshunt/disk.sock");
    let (code, _, err) = user.output(&["serve", "disk.img"]);
    let want = format!(" already as disk disk on {}", socket.display());
    assert!(code == 1 && err.contains(&want) && !err.contains("disk add"), "{err}");
    // The commands for another one succeed as they are printed.
    let (_, _, err) = user.output(&["serve", "other/disk.img"]);
    let commands: Vec<Vec<&str>> = err
        .lines()
        .filter_map(|line| line.strip_prefix("  vshunt "))
        .map(|line| line.split(' ').collect())
        .collect();
    assert_eq!(commands.len(), 2, "{err}");
    for command in commands {
        let (code, _, err) = user.output(&command);
        assert_eq!(code, 0, "{command:?}: {err}");
    }
    daemon.end();
}

#[test]
fn mount_has_the_flags_of_serve_for_the_log_and_the_control_socket() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    let (code, _, err) = user.output(&["mount", "--no-control", "--control-group", "0", "disk.img"]);
    assert!(code == 2 && err.contains("--control-group is given, and there is no control socket"), "{err}");
    let (code, _, err) = user.output(&["mount", "--log-format=json", "disk.img", "none/file"]);
    let lines: Vec<serde_json::Value> =
        err.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(code == 1 && lines.last().is_some_and(|line| line["level"] == "error"), "{err}");
}

#[test]
fn names_and_formats_follow_from_the_files() {
    let Some(user) = User::new() else { return };
    for (name, dir) in [("disk.img", ""), ("disk.raw", ""), ("my disk.img", "a/"), ("d0.img", "")] {
        user.file(&format!("{dir}{name}"), b"");
    }
    let (code, _, err) = user.output(&["image", "create", "-q", "-f", "qcow2", "cloud.img", "1M"]);
    assert_eq!(code, 0, "{err}");
    let own = ["--disk", "file=d0.img", "--export", "type=vhost-user-blk,disk=d0,socket=s"];
    let images = ["disk.img", "disk.raw", "a/my disk.img", "cloud.img"];
    let mut daemon = user.start(&[&["serve"], &own[..], &images, &["--read-only"]].concat());
    let (_, out, _) = user.output(&["disk", "list", "--json"]);
    let disks: serde_json::Value = serde_json::from_str(&out).unwrap();
    let text = |disk: &serde_json::Value, key: &str| disk[key].as_str().unwrap_or("raw").to_owned();
    let mut told: Vec<_> =
        disks.as_array().unwrap().iter().map(|d| (text(d, "name"), text(d, "format"))).collect();
    told.sort();
    let want = [("cloud", "qcow2"), ("d0", "raw"), ("disk", "raw"), ("disk-2", "raw"), ("mydisk", "raw")];
    assert_eq!(told, want.map(|(name, format)| (name.to_owned(), format.to_owned())));
    for disk in disks.as_array().unwrap() {
        assert_eq!(disk["readonly"], disk["name"] != "d0", "{disk}");
    }
    assert!(user.run().join("vshunt/mydisk.sock").exists());
    let (out, _) = daemon.end();
    assert!(out.contains("vdd") && !out.contains("vde"), "{out}");
    // The lines are for people; -q leaves them out.
    let mut quiet = user.vshunt(&["serve", "-q", "disk.img"]);
    let mut child = quiet.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait_for("the daemon", || user.output(&["status"]).0 == 0);
    assert_eq!(user.output(&["quit"]).0, 0);
    assert_eq!(wait(&mut child), 0);
    assert_eq!(std::io::read_to_string(child.stdout.take().unwrap()).unwrap(), "");
}

#[test]
fn what_is_unclear_is_refused_with_the_remedy() {
    let Some(user) = User::new() else { return };
    // A name of another format is a warning only.
    user.output(&["image", "create", "-q", "-f", "qcow2", "cloud.raw", "1M"]);
    let (_, err) = user.start(&["serve", "cloud.raw"]).end();
    assert!(err.contains("cloud.raw begins as a qcow2 image") && err.contains("format=raw"), "{err}");
    user.file("disk.img", b"");
    user.file("old.img", b"QFI\xfb\0\0\0\x01");
    user.file("not.qcow2", b"");
    user.file("vm.img", b"KDMV");
    user.file("pc.img", &[&[0; 64][..], b"\x7f\x10\xda\xbe"].concat());
    user.file("image.xz", b"\xfd7zXZ\0");
    fs::create_dir(user.path("folder")).unwrap();
    symlink("disk.img", user.path("link.img")).unwrap();
    let create = |args: &[&str]| {
        let (code, _, err) = user.output(&[&["image", "create", "-q", "-f", "qcow2"], args].concat());
        assert_eq!(code, 0, "{err}");
    };
    create(&["-b", "disk.img", "-F", "raw", "overlay.qcow2"]);
    // A guest that writes this into its raw disk would read any file of the host.
    create(&["-b", "/etc/passwd", "-F", "raw", "guest.img", "1M"]);
    let cases: [(&[&str], &str); 12] = [
        (
            &["none.qcow2"],
            "there is no file none.qcow2; make an empty one: vshunt image create -f qcow2 none.qcow2 20G",
        ),
        (
            &["none.img"],
            "there is no file none.img; make an empty one: truncate -s 20G none.img, or vshunt image create",
        ),
        (&["disk.img", "file=x"], "there is no file file=x; the keys of an option are joined by commas"),
        (&["disk.img", "link.img"], "link.img is given twice"),
        (&["folder"], "folder is a directory; an image is a file or a block device"),
        (&["old.img"], "begins as a qcow2 image of version 1"),
        (&["not.qcow2"], "has the name of a qcow2 image and does not begin as one"),
        (
            &["vm.img"],
            "begins as a VMDK image, which is not served; convert it (qemu-img convert -O qcow2 vm.img",
        ),
        (&["pc.img"], "begins as a VDI image"),
        (&["image.xz"], "compressed with xz; decompress it with unxz"),
        (&["guest.img"], "begins as a qcow2 image on top of the file \"/etc/passwd\""),
        (&["--read-only"], "required arguments were not provided: <FILE>"),
    ];
    for (args, want) in cases {
        let err = user.fails(2, &[&["serve"], args].concat());
        assert!(err.replace("\n  ", " ").contains(want), "{args:?}: {err}");
    }
    let many = vec!["disk.img"; 257];
    assert!(user.fails(2, &[&["serve"], &many[..]].concat()).contains("256 are the most"));
    // None of them has left anything, and the name decides.
    assert!(!user.run().join("vshunt.sock").exists());
    user.start(&["serve", "overlay.qcow2"]).end();
}

#[test]
fn a_second_daemon_is_told_how_to_use_the_first_one() {
    let Some(user) = User::new() else { return };
    user.file("a.img", b"");
    user.file("b,c.img", b"");
    let mut first = user.start(&["serve", "a.img"]);
    let err = user.fails(1, &["serve", "b,c.img"]);
    let at = format!("another vshunt answers on {}", user.run().join("vshunt.sock").display());
    assert!(err.contains(&at) && err.contains("its own --control SOCKET, or --no-control"), "{err}");
    // The commands work as they are printed.
    let commands: Vec<_> = err.lines().filter_map(|line| line.strip_prefix("  vshunt ")).collect();
    assert_eq!(commands.len(), 2, "{err}");
    for command in commands {
        let words: Vec<_> = command.splitn(3, ' ').map(|word| word.trim_matches('\'')).collect();
        assert_eq!(user.output(&words), (0, String::new(), String::new()));
    }
    assert!(user.output(&["status"]).1.contains("/vshunt/bc.sock"));
    assert_eq!(user.output(&["export", "remove", "bc"]).0, 0);
    assert_eq!(user.output(&["disk", "remove", "bc"]).0, 0);
    let control = user.path("c.sock");
    user.start(&["serve", "b,c.img", "--control", control.to_str().unwrap()]).end();
    first.end();
}

#[test]
fn a_full_pipe_as_stdout_holds_no_daemon() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    let (_reader, writer) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while (&writer).write(&[0; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
    let err = fs::File::create(user.path("err")).unwrap();
    let mut child = user.vshunt(&["serve", "disk.img"]).stdout(writer).stderr(err).spawn().unwrap();
    wait_for("the daemon", || user.output(&["status"]).0 == 0);
    // SAFETY: a child of this process that was not reaped, so the id is still its.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    assert_eq!(wait(&mut child), 0);
    let said = fs::read_to_string(user.path("err")).unwrap();
    assert!(said.contains("nothing reads stdout") && said.contains("serving disk on"), "{said}");
    assert!(!user.run().join("vshunt/disk.sock").exists());
}

#[test]
fn two_images_whose_names_give_one_socket_are_told_apart() {
    let Some(user) = User::new() else { return };
    user.file("a b.img", b"");
    user.file("ab.img", b"");
    let mut first = user.start(&["serve", "a b.img"]);
    let socket = user.run().join("vshunt/ab.sock");
    let before = fs::metadata(&socket).unwrap();
    let err = user.fails(1, &["serve", "ab.img", "--control", user.path("c").to_str().unwrap()]);
    let want =
        format!("another process listens on {}; choose another path: give the image", socket.display());
    assert!(err.contains(&want) && err.contains("socket=PATH"), "{err}");
    assert_eq!(fs::metadata(&socket).unwrap().ino(), before.ino());
    std::os::unix::net::UnixStream::connect(&socket).unwrap();
    first.end();
    assert!(!socket.exists());
}

#[test]
fn a_path_that_is_not_utf8_hides_no_other() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    let name = std::ffi::OsStr::from_bytes(b"b\xffad\n.img");
    fs::rename(user.file("x.img", b""), user.path("x").with_file_name(name)).unwrap();
    let err = user.path("err");
    let mut command = user.vshunt(&["serve", "-q", "disk.img"]);
    command.arg(name).stdout(Stdio::null()).stderr(fs::File::create(&err).unwrap());
    let mut child = command.spawn().unwrap();
    wait_for("the daemon", || user.output(&["status"]).0 == 0);
    let said = fs::read_to_string(&err).unwrap();
    let (code, table, _) = user.output(&["disk", "list"]);
    assert!(code == 0 && table.contains("b\u{fffd}ad\\n.img"), "{table}{said}");
    let (_, out, _) = user.output(&["disk", "list", "--json"]);
    let disks: serde_json::Value = serde_json::from_str(&out).unwrap();
    let bad = disks.as_array().unwrap().iter().find(|disk| disk["name"] == "bad").unwrap();
    assert!(bad["file"].as_str().unwrap().ends_with("b\u{fffd}ad\n.img"), "{out}");
    let (code, shown, err) = user.output(&["config", "show"]);
    assert_eq!(code, 0, "{err}");
    for want in ["name = \"disk\"\n", "# The file of disk bad, ", "is not UTF-8", "# name = \"bad\"\n"] {
        assert!(shown.contains(want), "{want}: {shown}");
    }
    // What is left is a whole file.
    fs::write(user.path("shown.toml"), &shown).unwrap();
    user.own(&user.path("shown.toml"));
    let (code, out, err) = user.output(&["config", "check", "shown.toml"]);
    assert!(code == 0 && out.contains("1 disk, 0 networks, 0 workers, 1 export"), "{out}{err}");
    assert_eq!(user.output(&["quit"]).0, 0);
    assert_eq!(wait(&mut child), 0);
}

#[test]
fn a_planted_folder_is_refused() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    let folder = user.run().join("vshunt");
    symlink("/tmp", &folder).unwrap();
    let err = user.fails(1, &["serve", "disk.img"]);
    assert!(err.contains("vshunt is there and is no folder; give --disk and --export"), "{err}");
    let err = user.fails(1, &["mount", "disk.img"]);
    assert!(err.contains("vshunt is there and is no folder; give FILE"), "{err}");
    fs::remove_file(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    user.own(&folder);
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(user.fails(1, &["serve", "disk.img"]).contains("all users may change the folder"));
}

#[test]
fn without_a_runtime_folder_the_remedy_is_named() {
    let Some(user) = User::new() else { return };
    user.file("disk.img", b"");
    if !is_root() || Path::new("/run/user/65534").exists() {
        println!(
            "skip without_a_runtime_folder_the_remedy_is_named: needs root, and a user without a folder"
        );
        return;
    }
    let said = |args: &[&str]| output(user.vshunt(args).env_remove("XDG_RUNTIME_DIR"));
    let (code, _, err) = said(&["serve", "disk.img"]);
    assert_eq!(code, 1);
    assert!(
        err.contains("XDG_RUNTIME_DIR is not set, and there is no /run/user/65534; give --disk"),
        "{err}"
    );
    let relative = output(user.vshunt(&["serve", "disk.img"]).env("XDG_RUNTIME_DIR", "run"));
    assert!(relative.0 == 1 && relative.2.contains("XDG_RUNTIME_DIR is relative, and"), "{}", relative.2);
    let (code, _, err) = said(&["status"]);
    assert!(code == 2 && err.contains("give -c SOCKET, or set VSHUNT_CONTROL"), "{err}");
}

#[test]
fn an_image_is_mounted_and_ends_with_ctrl_c_or_umount() {
    let Some(user) = User::new() else { return };
    let why = match user::no_fusermount3() {
        Some(why) => Err(why),
        None => user::with_device(Path::new("/dev/fuse"), || mounted_until_ctrl_c_or_umount(&user)),
    };
    if let Err(why) = why {
        println!("skip an_image_is_mounted_and_ends_with_ctrl_c_or_umount: {why}");
    }
}

fn mounted_until_ctrl_c_or_umount(user: &User) {
    user.file("disk.img", b"begin");
    let mut mount = user.start(&["mount", "disk.img"]);
    let path = user.run().join("vshunt/disk.raw");
    assert_eq!(mount.said().0, format!("{}\n", path.display()));
    let in_mount = |script: &str, path: &Path| {
        let mut command = Command::new("sh");
        command.args(["-ec", script, "sh"]).arg(path);
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        output(&mut command)
    };
    assert_eq!(in_mount("head -c5 \"$1\"", &path), (0, "begin".into(), String::new()));
    let (code, _, err) = in_mount("printf BEGIN | dd of=\"$1\" conv=notrunc status=none", &path);
    assert_eq!(code, 0, "{err}");
    assert!(user.output(&["status"]).1.contains("mounted"));
    // A second one is as easy; it has no control socket.
    user.file("disk.raw", b"other");
    let (out, err) = (user.path("out2"), user.path("err2"));
    let mut command = user.vshunt(&["mount", "--read-only", "disk.raw"]);
    command.stdout(fs::File::create(&out).unwrap()).stderr(fs::File::create(&err).unwrap());
    let mut second = Running { child: command.spawn().unwrap(), out, err };
    wait_for("the second mount", || !second.said().0.is_empty());
    let (at, warned) = second.said();
    assert_eq!(at, format!("{}\n", user.run().join("vshunt/disk-2.raw").display()));
    assert!(warned.contains("no control socket: another vshunt answers on"), "{warned}");
    assert_ne!(in_mount("echo >>\"$1\"", Path::new(at.trim_end())).0, 0);
    // `umount` by the user ends it.
    let start = std::time::Instant::now();
    while in_mount("fusermount3 -u \"$1\"", Path::new(at.trim_end())).0 != 0 {
        assert!(start.elapsed() < PATIENCE);
    }
    assert_eq!(wait(&mut second.child), 0);
    let (_, err) = mount.end();
    assert!(err.starts_with("vshunt: serving disk on "), "{err}");
    assert!(!path.exists());
    assert_eq!(&fs::read(user.path("disk.img")).unwrap()[..5], b"BEGIN");
    // A file of the user's choice. An image that cannot be written is mounted read-only.
    fs::set_permissions(user.path("disk.img"), PermissionsExt::from_mode(0o444)).unwrap();
    let mut mount = user.start(&["mount", "disk.img", "here"]);
    assert_ne!(in_mount("echo >>\"$1\"", &user.path("here")).0, 0);
    let (out, err) = mount.end();
    assert_eq!(out, format!("{}\n", user.path("here").display()));
    assert!(err.contains("disk.img cannot be written (Permission denied"), "{err}");
}
