//! Tests of mounts that are refused, with their messages, and of mounts without the rights of root.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::server::*;
use super::*;

#[test]
fn what_cannot_be_mounted_over_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    rustix::fs::mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let _listener = UnixListener::bind(at("socket")).unwrap();
    symlink("folder", at("to-folder")).unwrap();
    symlink("nothing", at("to-nothing")).unwrap();
    symlink("round", at("round")).unwrap();
    fs::write(at("file"), "").unwrap();
    let no_file = "and cannot be mounted over; name a regular file, or one that is not there yet";
    let folder_said =
        "PATH is a folder, and a disk's contents are one file; name a file, for example PATH/disk";
    let look = "cannot look at PATH to mount over it";
    let cases = [
        ("folder", Kind::Invalid, folder_said.to_owned()),
        ("to-folder", Kind::Invalid, folder_said.to_owned()),
        ("pipe", Kind::Invalid, format!("PATH is a named pipe {no_file}")),
        ("socket", Kind::Invalid, format!("PATH is a socket {no_file}")),
        (
            "to-nothing",
            Kind::Invalid,
            "PATH is a symbolic link to nothing; make the file that it names, or remove the link".to_owned(),
        ),
        (
            "no/disk",
            Kind::NotFound,
            format!("the folder of PATH is not there; make it: mkdir -p {}", at("no").display()),
        ),
        (
            "file/disk",
            Kind::Io,
            format!("{look} (something on the way to it is no folder): Not a directory (os error 20)"),
        ),
        (
            "round",
            Kind::Io,
            format!(
                "{look} (it is a symbolic link to itself): Too many levels of symbolic links (os error 40)"
            ),
        ),
    ];
    for (name, kind, said) in cases {
        assert_eq!(refusal(&at(name)), (kind, said), "{name}");
    }
    let (kind, said) = refusal(Path::new("/dev/null"));
    assert_eq!((kind, said), (Kind::Invalid, format!("PATH is a character device {no_file}")));
    let (kind, said) = refusal(Path::new(".."));
    assert!(kind == Kind::Invalid && said.starts_with("PATH is a folder"));
    let (kind, said) = refusal(&at("no/.."));
    assert!(kind == Kind::Invalid && said.ends_with(" names no file; name one to mount over"), "{said}");
}

#[test]
fn without_the_device_the_remedy_is_named() {
    privately(|folder| {
        let at = Mountpoint::prepare(&folder.join("disk")).unwrap();
        fs::create_dir(folder.join("dev")).unwrap();
        let dev = folder.join("dev");
        bind(&dev, Path::new("/dev"));
        let e = mount(at, &PLAIN).unwrap_err();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert_eq!(
            e.to_string(),
            "/dev/fuse is not there, for the kernel has not loaded FUSE: modprobe fuse (for a container: --device \
             /dev/fuse)"
        );
        assert!(!folder.join("disk").exists());
    });
}

#[test]
fn without_rights_the_remedy_is_named() {
    privately(|folder| {
        let (open, closed) = (folder.join("open"), folder.join("closed"));
        for (folder, mode) in [(folder, 0o755), (&open, 0o777), (&closed, 0o700)] {
            let _ = fs::create_dir(folder);
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
        }
        own_device(folder, 0o600);
        become_nobody();
        let (kind, said) = refusal(&closed.join("disk"));
        assert_eq!(kind, Kind::Io);
        assert!(
            said.starts_with("cannot look at PATH to mount over it (a folder on the way to it may not be"),
            "{said}"
        );
        let (kind, said) = refusal(&folder.join("disk"));
        assert_eq!(kind, Kind::Io);
        let words = "cannot make the file PATH to mount over (its folder has to be writable; or make the file beforehand)";
        assert!(said.starts_with(words), "{said}");
        let at = Mountpoint::prepare(&open.join("disk")).unwrap();
        let e = mount(at, &PLAIN).unwrap_err();
        assert_eq!(e.kind(), Kind::Io);
        assert_eq!(
            e.to_string(),
            "may not open /dev/fuse (run vshunt as root, or as root: chmod 666 /dev/fuse; for a container: --device \
             /dev/fuse): Permission denied (os error 13)"
        );
    });
}

#[test]
fn without_fusermount3_both_remedies_are_named() {
    privately(|folder| {
        while let Some(program) = helper::find() {
            bind(Path::new("/dev/null"), &program);
        }
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
        own_device(folder, 0o666);
        become_nobody();
        let path = folder.join("disk");
        let e = mount(Mountpoint::prepare(&path).unwrap(), &PLAIN).unwrap_err();
        let shown = path.display();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert_eq!(
            e.to_string(),
            format!(
                "cannot mount over {shown}: that needs CAP_SYS_ADMIN or the program fusermount3, and neither is there; \
                 run vshunt as root (for a container: --cap-add SYS_ADMIN), or install the package fuse3"
            )
        );
    });
}

#[test]
fn those_who_are_not_root_mount_by_fusermount3() {
    privately(|folder| {
        let Some(program) = helper::find() else {
            println!("skipped: needs fusermount3");
            return;
        };
        let meta = fs::metadata(&program).unwrap();
        if meta.uid() != 0 || meta.mode() & libc::S_ISUID == 0 {
            println!("skipped: {} is not set-user-id root", program.display());
            return;
        }
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
        own_device(folder, 0o666);
        fs::write(folder.join("conf"), "mount_max = 1000\n").unwrap();
        // fusermount3 reads it with the rights of the user.
        fs::set_permissions(folder.join("conf"), fs::Permissions::from_mode(0o644)).unwrap();
        if Path::new("/etc/fuse.conf").exists() {
            bind(&folder.join("conf"), Path::new("/etc/fuse.conf"));
        }
        mount_fusectl();
        become_nobody();
        let path = folder.join("a disk");
        let options = Options { source: "vshunt:a,b\\c", readonly: true, ..PLAIN };
        let (server, mount) = mounted(&path, &options);
        assert_eq!(fs::read(&path).unwrap(), CONTENTS);
        assert!(mount.still_there() && !mount.allow_other());
        let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let line = text.lines().find(|l| l.contains("fuse.vshunt") && l.contains("a\\040disk")).unwrap();
        assert!(line.contains("/a\\040disk ro,nosuid,nodev,"), "{line}");
        assert!(line.contains("- fuse.vshunt vshunt:a,b\\134c ro,user_id=65534,group_id=65534"), "{line}");
        let user = File::open(&path).unwrap();
        assert_eq!(mount.unmount(false).unwrap_err().kind(), Kind::Busy);
        drop(user);
        unmounted(&mount);
        assert!(!path.exists());
        drop(server);

        let (_server, mount) = mounted(&path, &PLAIN);
        let mut user = File::open(&path).unwrap();
        mount.unmount(true).unwrap();
        assert!(!path.exists());
        assert!(user.read(&mut [0; 16]).is_err(), "aborted through fusectl");

        // Left by a killed one.
        File::create(&path).unwrap();
        drop(helper::mount(&helper::find().unwrap(), &path, "vshunt:d0", &[]).unwrap());
        assert_eq!(fs::metadata(&path).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
        drop(Mountpoint::prepare(&path).unwrap());
        assert!(!path.exists());

        // What it may not, in its own words.
        let at = Mountpoint::prepare(&path).unwrap();
        let e = super::mount(at, &Options { allow_other: AllowOther::On, ..PLAIN }).unwrap_err();
        assert_eq!(e.kind(), Kind::Io);
        assert!(e.to_string().contains("(fusermount3 says: option allow_other only allowed if"), "{e}");
        assert!(!path.exists());
    });
}
