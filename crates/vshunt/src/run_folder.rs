//! The folder for sockets and mounted files whose path the user does not give: `/run/vshunt` for
//! root, and `vshunt` in the user's runtime folder for other users.
//!
//! Called on the main thread, before the sandbox starts. What must never happen: using a folder
//! that another local user has made or can change. Such a user could replace the sockets.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, Mode, OFlags};
use rustix::process::geteuid;

use crate::outcome::{Failure, Outcome};

/// The name of the folder.
const NAME: &str = "vshunt";
/// The folder of root is made here.
const OF_ROOT: &str = "/run";
/// The service manager makes a folder for each user here.
const OF_USERS: &str = "/run/user";
/// The mode of a folder that is made.
const MODE: u32 = 0o700;
/// Members of the group of a file may write it.
const GROUP_WRITES: u32 = 0o020;
/// All users may write a file.
const OTHERS_WRITE: u32 = 0o002;
/// In a folder, users may remove and rename only their own files.
const STICKY: u32 = 0o1000;

/// Returns the folder in which each user's programs keep their sockets. For root this is `/run`,
/// otherwise `$XDG_RUNTIME_DIR` unless it is relative (as the XDG Base Directory Specification
/// says), otherwise the folder that the service manager has made for the
/// user.
///
/// None: there is none.
pub(crate) fn parent() -> Option<PathBuf> {
    if geteuid().is_root() {
        return Some(OF_ROOT.into());
    }
    whole(std::env::var_os("XDG_RUNTIME_DIR")).or_else(|| {
        let made = Path::new(OF_USERS).join(geteuid().as_raw().to_string());
        let is_own = |meta: std::fs::Metadata| meta.is_dir() && meta.uid() == geteuid().as_raw();
        std::fs::symlink_metadata(&made).is_ok_and(is_own).then_some(made)
    })
}

/// Returns the value of a variable that is the whole path of a folder.
fn whole(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Returns the folder. It is made if it is missing.
///
/// # Errors
/// There is no place for it, it cannot be made, or another user could change it. `remedy` says what
/// to give in its place.
pub(crate) fn make(remedy: &str) -> Outcome<PathBuf> {
    let made = parent().ok_or_else(no_parent).and_then(|parent| make_in(&parent));
    made.map_err(|why| Failure::Failed(format!("{why}; {remedy}")))
}

/// Looks for the folder without making it. Returns its path, and whether it is there.
///
/// # Errors
/// The reason why [`make`] would fail.
pub(crate) fn look() -> Result<(PathBuf, bool), String> {
    look_in(&parent().ok_or_else(no_parent)?)
}

fn look_in(parent: &Path) -> Result<(PathBuf, bool), String> {
    check(parent, true)?;
    let folder = parent.join(NAME);
    let is_there = std::fs::symlink_metadata(&folder).is_ok();
    let written = if is_there {
        check(&folder, false)?;
        &folder
    } else {
        parent
    };
    rustix::fs::access(written, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|e| format!("{} cannot be written: {}", written.display(), io::Error::from(e)))?;
    Ok((folder, is_there))
}

fn no_parent() -> String {
    let user = geteuid().as_raw();
    let unset = std::env::var_os("XDG_RUNTIME_DIR").is_none_or(|value| value.is_empty());
    let why = if unset { "not set" } else { "relative" };
    format!("no folder for the socket: XDG_RUNTIME_DIR is {why}, and there is no {OF_USERS}/{user}")
}

fn make_in(parent: &Path) -> Result<PathBuf, String> {
    check(parent, true)?;
    let folder = parent.join(NAME);
    match DirBuilder::new().mode(MODE).create(&folder) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(format!("cannot make the folder {}: {e}", folder.display())),
    }
    check(&folder, false)?;
    Ok(folder)
}

/// Checks that only this user and root can change the entries of a folder. With `sticky`, other
/// users may add entries, if they cannot replace those of this user.
fn check(folder: &Path, sticky: bool) -> Result<(), String> {
    let shown = folder.display();
    // The parent may be a link that its owner made. The folder itself may not.
    let follow = if sticky { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | follow;
    let opened = rustix::fs::open(folder, flags, Mode::empty());
    let meta = opened.and_then(rustix::fs::fstat).map_err(|e| match e {
        rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP if !sticky => {
            format!("{shown} is there and is no folder")
        }
        e => format!("cannot look at the folder {shown}: {e}"),
    })?;
    if ![0, geteuid().as_raw()].contains(&meta.st_uid) {
        return Err(format!("{shown} belongs to user {}, who could replace what is in it", meta.st_uid));
    }
    let others = match meta.st_mode & OTHERS_WRITE != 0 {
        true if sticky && meta.st_mode & STICKY != 0 => return Ok(()),
        true => "all users",
        false if sticky && meta.st_mode & GROUP_WRITES != 0 && meta.st_mode & STICKY == 0 => "its group",
        false => return Ok(()),
    };
    Err(format!("{others} may change the folder {shown} (mode {:03o})", meta.st_mode & 0o7777))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_relative_folder_is_ignored() {
        assert_eq!(whole(Some("/run/user/1".into())), Some("/run/user/1".into()));
        assert!(
            [None, Some(""), Some("run"), Some("./x")].iter().all(|v| whole(v.map(Into::into)).is_none())
        );
    }

    #[test]
    fn it_is_made_for_its_user_only_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let folder = make_in(dir.path()).unwrap();
        assert_eq!((folder.clone(), mode(&folder)), (dir.path().join("vshunt"), 0o700));
        assert_eq!(make_in(dir.path()).unwrap(), folder);
        // The administrator may have opened it for a group.
        set_mode(&folder, 0o2770);
        assert_eq!(make_in(dir.path()).unwrap(), folder);
    }

    #[test]
    fn a_look_finds_it_and_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vshunt");
        assert_eq!(look_in(dir.path()), Ok((path.clone(), false)));
        assert!(!path.exists());
        make_in(dir.path()).unwrap();
        assert_eq!(look_in(dir.path()), Ok((path.clone(), true)));
        set_mode(&path, 0o777);
        assert!(look_in(dir.path()).unwrap_err().contains("all users may change the folder"));
        assert!(look_in(&dir.path().join("none")).unwrap_err().contains("cannot look at the folder"));
        if !geteuid().is_root() {
            set_mode(&path, 0o500);
            assert!(look_in(dir.path()).unwrap_err().contains("cannot be written"));
        }
    }

    #[test]
    fn what_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = make_in(dir.path()).unwrap();
        set_mode(&folder, 0o777);
        assert!(make_in(dir.path()).unwrap_err().contains("all users may change the folder"));
        // Also if it is sticky: others could bind a socket under the name first.
        set_mode(&folder, 0o1777);
        assert!(make_in(dir.path()).unwrap_err().contains("(mode 1777)"));
        set_mode(&folder, 0o700);
        set_mode(dir.path(), 0o777);
        assert!(make_in(dir.path()).unwrap_err().contains("all users may change the folder"));
        set_mode(dir.path(), 0o1777);
        make_in(dir.path()).unwrap();
        set_mode(dir.path(), 0o770);
        assert!(make_in(dir.path()).unwrap_err().contains("its group may change the folder"));
    }

    #[test]
    fn what_another_user_has_planted_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vshunt");
        std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert!(make_in(dir.path()).unwrap_err().ends_with("is there and is no folder"));
        std::fs::remove_file(&path).unwrap();
        symlink("nowhere", &path).unwrap();
        assert!(make_in(dir.path()).unwrap_err().ends_with("is there and is no folder"));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(make_in(dir.path()).unwrap_err().ends_with("is there and is no folder"));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        if geteuid().is_root() {
            chown(&path, Some(65534), None).unwrap();
            assert!(make_in(dir.path()).unwrap_err().contains("belongs to user 65534"));
        }
        assert!(make_in(&dir.path().join("none")).unwrap_err().contains("cannot look at the folder"));
    }
}
