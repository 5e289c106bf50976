//! Descriptors that clients pass with `add-fd`, in numbered sets, as QEMU has them.
//!
//! A passed descriptor has two uses. `/dev/fdset/N` names its file where a command takes the file
//! of a disk. It also is a permission: command threads may open its file, or files in its folder,
//! even if the configured paths of the sandbox do not contain them (`sandbox::set_granted`).
//!
//! Life cycle: a descriptor is *listed* from `add-fd` until `remove-fd`, or until the last client
//! leaves if no disk uses its file. A removed descriptor whose file belongs to a disk is *kept*,
//! unlisted, until no disk has that file: a resize or a snapshot opens the file again.
//!
//! Called by client threads. What must never happen: a descriptor stays open and no list contains
//! it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, fcntl_getfl, makedev, statx};
use rustix::path::Arg;
use serde_json::{Value, json};
use vshunt_daemon::Daemon;
use vshunt_sandbox as sandbox;
use vshunt_types::sync::Locked;

use super::message::QmpError;

/// The most sets at the same time. A client needs one for each image of a backing chain, during one
/// command.
pub(crate) const SETS_MAX: usize = 1024;
/// The most descriptors in one set. One for each access mode is enough.
pub(crate) const SET_FDS_MAX: usize = 16;

/// The prefix of a path that names a set.
const PREFIX: &str = "/dev/fdset/";

type Result<T> = std::result::Result<T, QmpError>;

/// A descriptor that a client passed.
struct Passed {
    file: File,
    /// The device number and the inode.
    id: (u64, u64),
    /// O_RDONLY, O_WRONLY or O_RDWR, and O_PATH.
    access: OFlags,
}

impl Passed {
    /// Reads the properties of a descriptor. Sends no request to the server of a FUSE mount,
    /// because that may be this process or may hang.
    fn new(fd: OwnedFd) -> rustix::io::Result<Self> {
        let id = identity(&fd, "")?;
        let access = fcntl_getfl(&fd)? & (OFlags::RWMODE | OFlags::PATH);
        Ok(Self { file: File::from(fd), id, access })
    }

    fn can(&self, write: bool) -> bool {
        self.access == OFlags::RDWR || (!write && self.access == OFlags::RDONLY)
    }

    /// Returns a path that leads to its file, if there is one.
    fn name(&self) -> Option<PathBuf> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        let there = identity(CWD, &path).ok();
        (path.is_absolute() && there == Some(self.id)).then_some(path)
    }
}

fn identity(folder: impl AsFd, path: impl Arg) -> rustix::io::Result<(u64, u64)> {
    let seen = statx(folder, path, AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((makedev(seen.stx_dev_major, seen.stx_dev_minor), seen.stx_ino))
}

struct Listed {
    passed: Arc<Passed>,
    opaque: Option<String>,
}

#[derive(Default)]
struct Sets {
    listed: BTreeMap<u32, Vec<Listed>>,
    /// Removed descriptors whose files belong to disks.
    kept: Vec<Arc<Passed>>,
    /// The number of connected clients.
    clients: usize,
    /// The number of changes of the lists.
    changes: u64,
}

impl Sets {
    /// Keeps a removed descriptor, unless one of the same file and access mode is kept.
    fn keep(&mut self, passed: Arc<Passed>) {
        if !self.kept.iter().any(|kept| (kept.id, kept.access) == (passed.id, passed.access)) {
            self.kept.push(passed);
        }
    }

    /// Counts a change of the lists. Returns the descriptors that are listed or kept, for
    /// [`Change::publish`].
    fn changed(&mut self) -> Change {
        self.changes += 1;
        let all = self.listed.values().flatten().map(|fd| &fd.passed).chain(&self.kept);
        Change { number: self.changes, passed: all.cloned().collect() }
    }
}

/// A change of the lists that is to be reported to the sandbox.
struct Change {
    number: u64,
    passed: Vec<Arc<Passed>>,
}

impl Change {
    /// Reports the permissions to the sandbox. Opens the configured paths and closes descriptors.
    /// Both may wait for a file system, so the caller does not hold the lock.
    fn publish(self) {
        // A descriptor that is only for writing, or for a path (O_PATH), does not show the right to
        // read the file.
        let shows = self.passed.into_iter().filter(|passed| passed.can(false));
        sandbox::set_granted(self.number, shows.map(|passed| passed as sandbox::Granted).collect());
    }
}

impl AsFd for Passed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// All sets of a daemon.
#[derive(Default)]
pub(crate) struct Fdsets {
    /// Guards the lists. Held for changes of them. No file is opened, closed or waited for while it
    /// is held.
    sets: Mutex<Sets>,
}

impl Fdsets {
    fn lock(&self) -> MutexGuard<'_, Sets> {
        // The lists are consistent between any two statements, so they stay valid after a panic.
        self.sets.locked()
    }

    pub(super) fn add(&self, id: Option<u32>, opaque: Option<String>, fd: OwnedFd) -> Result<Value> {
        let passed = Passed::new(fd)
            .map_err(|e| QmpError::generic(format!("the descriptor cannot be looked at: {e}")))?;
        let number = passed.file.as_raw_fd();
        let mut sets = self.lock();
        let id = match id {
            Some(id) => id,
            None => (0..).find(|id| !sets.listed.contains_key(id)).unwrap_or(u32::MAX),
        };
        if !sets.listed.contains_key(&id) && sets.listed.len() == SETS_MAX {
            return Err(QmpError::generic(format!(
                "there are {SETS_MAX} fd sets, which is the limit; remove-fd one"
            )));
        }
        let set = sets.listed.entry(id).or_default();
        if set.len() == SET_FDS_MAX {
            return Err(QmpError::generic(format!(
                "fd set {id} has {SET_FDS_MAX} descriptors, which is the limit; remove-fd one"
            )));
        }
        set.push(Listed { passed: Arc::new(passed), opaque });
        let change = sets.changed();
        drop(sets);
        change.publish();
        Ok(json!({ "fdset-id": id, "fd": number }))
    }

    pub(super) fn remove(&self, id: u32, number: Option<i32>, daemon: &Daemon) -> Result<()> {
        let is_it = |fd: &Listed| number.is_none_or(|number| fd.passed.file.as_raw_fd() == number);
        let mut sets = self.lock();
        let Some(set) = sets.listed.get_mut(&id).filter(|set| set.iter().any(is_it)) else {
            let fd = number.map(|number| format!(", fd:{number}")).unwrap_or_default();
            return Err(QmpError::generic(format!("File descriptor named 'fdset-id:{id}{fd}' not found")));
        };
        let removed: Vec<Listed> = set.extract_if(.., |fd| is_it(fd)).collect();
        if set.is_empty() {
            sets.listed.remove(&id);
        }
        removed.iter().filter(|fd| daemon.has_file(fd.passed.id)).for_each(|fd| sets.keep(fd.passed.clone()));
        let change = sets.changed();
        drop(sets);
        change.publish();
        Ok(())
    }

    pub(super) fn list(&self) -> Value {
        let fd = |fd: &Listed| match &fd.opaque {
            Some(opaque) => json!({ "fd": fd.passed.file.as_raw_fd(), "opaque": opaque }),
            None => json!({ "fd": fd.passed.file.as_raw_fd() }),
        };
        let set = |(id, set): (&u32, &Vec<Listed>)| json!({ "fdset-id": id, "fds": set.iter().map(fd).collect::<Vec<_>>() });
        self.lock().listed.iter().map(set).collect()
    }

    /// Counts a client that has connected.
    pub(crate) fn client_connected(&self) {
        self.lock().clients += 1;
    }

    /// Counts a client that has disconnected. After the last one, all descriptors are closed whose
    /// files belong to no disk.
    pub(crate) fn client_disconnected(&self, daemon: &Daemon) {
        let mut sets = self.lock();
        sets.clients = sets.clients.saturating_sub(1);
        if sets.clients > 0 || sets.listed.is_empty() {
            return;
        }
        let unused = |fd: &mut Listed| !daemon.has_file(fd.passed.id);
        let gone: Vec<Listed> = sets.listed.values_mut().flat_map(|set| set.extract_if(.., unused)).collect();
        sets.listed.retain(|_, set| !set.is_empty());
        let change = sets.changed();
        drop(sets);
        change.publish();
        drop(gone);
    }

    /// Closes kept descriptors whose files belong to no disk any more.
    pub(crate) fn prune(&self, daemon: &Daemon) {
        let mut sets = self.lock();
        let gone: Vec<_> = sets.kept.extract_if(.., |kept| !daemon.has_file(kept.id)).collect();
        if !gone.is_empty() {
            let change = sets.changed();
            drop(sets);
            change.publish();
        }
    }

    /// Returns the path that `file` means: for `/dev/fdset/N` the path of the set's file, otherwise
    /// `file` itself.
    ///
    /// `write`: the file will be written, which requires a descriptor for writing. A disk uses
    /// paths (an overlay names its backing image, a resize opens the image again), so the file must
    /// have one.
    ///
    /// # Errors
    /// The set does not exist, none of its descriptors has the access mode, or its file has no path
    /// here. The message has the remedy.
    pub(crate) fn resolve(&self, file: PathBuf, write: bool) -> Result<PathBuf> {
        let Some(id) = file.to_str().and_then(|text| text.strip_prefix(PREFIX)) else { return Ok(file) };
        let shown = file.display();
        let fitting = {
            let sets = self.lock();
            let Some(set) = id.parse().ok().and_then(|id: u32| sets.listed.get(&id)) else {
                return Err(QmpError::generic(format!("there is no fd set for {shown}; add-fd makes one")));
            };
            set.iter().map(|fd| &fd.passed).find(|passed| passed.can(write)).cloned()
        };
        let Some(passed) = fitting else {
            let (mode, remedy) = match write {
                true => ("O_RDWR", "pass one that is, or add the disk with readonly"),
                false => ("O_RDONLY or O_RDWR", "pass one that is"),
            };
            return Err(QmpError::generic(format!("no descriptor of {shown} is open with {mode}; {remedy}")));
        };
        passed.name().ok_or_else(|| {
            QmpError::generic(format!(
                "the file of {shown} has no name that leads to it here (it was removed, or is of another mount \
                 namespace), and a disk needs one to open its image again: give a path, and start the daemon with \
                 --allow-path=FOLDER if it may not open it"
            ))
        })
    }
}
