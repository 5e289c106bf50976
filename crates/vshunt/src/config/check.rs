//! Checks of a whole configuration, before anything is started, and `vshunt config check`.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use vshunt_daemon::Check;
use vshunt_types::spec::{ExportKind, ExportSpec, WorkerSpec, Workers};
use vshunt_vhost_user::accounts;

use super::file::{AttachSpec, Place};
use super::told::Told;
use super::{Control, Setup, check_control_access, control_path};
use crate::keyval::{closest, whole};
use crate::metrics::Address;
use crate::outcome::{Outcome, print_line};

/// Prints what is wrong with a configuration file, and what is missing on this machine. Nothing is
/// started.
///
/// # Errors
/// Usage: the file cannot be read, or something is wrong. The message has all of it.
pub(crate) fn file(path: &Path) -> Outcome {
    let (mut setup, mut wrong) = super::read(path)?;
    problems(&setup, &mut wrong);
    match std::mem::take(&mut setup.sandbox).with_defaults(Default::default()) {
        Ok(sandbox) => setup.sandbox = sandbox,
        Err(e) => wrong.tell(|| format!("{}{e}", setup.places.of_key("allow-path"))),
    }
    if setup.control == Control::Off && setup.exports.is_empty() && !setup.places.lacks_names {
        let at = setup.places.of_key("control");
        wrong.tell(|| format!("{at}there is neither an [[export]] nor a control socket to add one"));
    }
    wrong.end()?;
    for warning in warnings(&setup) {
        crate::outcome::warn(&warning);
    }
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let counts = [
        count(setup.disks.len(), "disk"),
        count(setup.nets.len(), "network"),
        count(setup.workers.len(), "worker"),
        count(setup.exports.len(), "export"),
    ];
    print_line(&format!("{}: no errors; {}", path.display(), counts.join(", ")))
}

/// The names of a configuration. They are collected once: there can be a hundred thousand.
/// In order, so that suggestions are the same each time.
struct Names<'a> {
    disks: BTreeSet<&'a str>,
    nets: BTreeSet<&'a str>,
    exports: BTreeMap<&'a str, &'a ExportSpec>,
    workers: BTreeSet<String>,
}

impl<'a> Names<'a> {
    fn of(setup: &'a Setup) -> Self {
        Self {
            disks: setup.disks.iter().map(|disk| disk.name.as_str()).collect(),
            nets: setup.nets.iter().map(|net| net.name.as_str()).collect(),
            exports: setup.exports.iter().map(|export| (export.name.as_str(), export)).collect(),
            workers: worker_names(setup).collect(),
        }
    }
}

/// Tells all that is wrong with a configuration. What comes from a file has its place.
pub(super) fn problems(setup: &Setup, wrong: &mut Told) {
    let places = &setup.places;
    if let Err(e) = (WorkerSpec { poll_us: setup.poll_us, ..WorkerSpec::default() }).check() {
        wrong.tell(|| format!("{}{e}", places.of_key("poll-us")));
    }
    if let Err(e) = check_control_access(setup) {
        let key = setup.control_access.first_key().unwrap_or_default();
        wrong.tell(|| format!("{}{e}", places.of_key(&format!("control-{key}"))));
    }
    for (key, path) in own_paths(setup) {
        if path.as_os_str().as_bytes().contains(&0) {
            wrong.tell(|| format!("{}{key}: {path:?} has a NUL byte; no path has one", places.of_key(key)));
        }
    }
    let mut twice = |kind: &str, names: &mut dyn Iterator<Item = &str>, at: &[Place]| {
        let mut seen = HashSet::new();
        for (item, name) in names.enumerate().filter(|(_, name)| !seen.insert(*name)) {
            wrong.tell(|| {
                format!("{}there are two of {kind} {name}; give one another name", places.shown(at, item))
            });
        }
    };
    twice("disk", &mut setup.disks.iter().map(|disk| disk.name.as_str()), &places.disks);
    twice("net", &mut setup.nets.iter().map(|net| net.name.as_str()), &places.nets);
    twice("export", &mut setup.exports.iter().map(|export| export.name.as_str()), &places.exports);
    let names = Names::of(setup);
    let finished = |item: &usize| !places.lacks_names && !places.unfinished.contains(item);
    for (item, export) in setup.exports.iter().enumerate().filter(|(item, _)| finished(item)) {
        let at = || places.shown(&places.exports, item);
        backends(&names, export, item < places.exports.len(), &mut |why| wrong.tell(|| at() + &why()));
    }
    same_paths(setup, wrong);
    for (item, attach) in setup.attach.iter().enumerate().filter(|_| !places.lacks_names) {
        attached(setup, &names, attach, &mut |why| {
            wrong.tell(|| places.shown(&places.attach, item) + &why());
        });
    }
}

/// Returns the paths that belong to the daemon itself, with their keys.
fn own_paths(setup: &Setup) -> Vec<(&'static str, &Path)> {
    let mut paths = Vec::new();
    if let Control::At(path) = &setup.control {
        paths.push(("control", path.as_path()));
    }
    if let Some(Address::Unix(path)) = &setup.metrics {
        paths.push(("metrics", path.as_path()));
    }
    paths.extend(setup.pidfile.iter().map(|path| ("pidfile", path.as_path())));
    paths.extend(setup.sandbox.allow_paths.iter().map(|path| ("allow-path", path.as_path())));
    paths
}

/// Returns ` (did you mean …?)`, if a name is similar.
fn meant<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    /// Names that are compared at most, which takes some microseconds for each.
    const COMPARED: usize = 1000;
    let names: Vec<&str> = names.take(COMPARED).collect();
    closest(name, &names).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"))
}

/// Takes a message. It is made only if there is room for it.
type Tell<'t> = &'t mut dyn FnMut(&dyn Fn() -> String);

/// Tells what is missing of the disk and the networks of an export.
fn backends(names: &Names<'_>, export: &ExportSpec, of_file: bool, tell: Tell<'_>) {
    let name = &export.name;
    let remedy = |kind: &str| if of_file { format!("[[{kind}]]") } else { format!("--{kind}") };
    for net in export.net.iter().chain(&export.tap).filter(|net| !names.nets.contains(net.as_str())) {
        tell(&|| {
            let meant = meant(net, names.nets.iter().copied());
            format!("export {name} is of network {net}, which is not there{meant}; add {}", remedy("net"))
        });
    }
    let disk = &export.disk;
    if export.net.is_none() && !names.disks.contains(disk.as_str()) {
        tell(&|| {
            let meant = meant(disk, names.disks.iter().copied());
            format!("export {name} is of disk {disk}, which is not there{meant}; add {}", remedy("disk"))
        });
    }
}

/// Tells the paths that two sockets or mountpoints would have.
fn same_paths(setup: &Setup, wrong: &mut Told) {
    let mut users: BTreeMap<PathBuf, String> = BTreeMap::new();
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if let Some(path) = own_control(setup) {
        users.insert(whole(&path), "the control socket".to_owned());
    }
    if let Some(Address::Unix(path)) = &setup.metrics {
        users.insert(whole(path), "the socket for metrics".to_owned());
    }
    for (item, export) in setup.exports.iter().enumerate() {
        let Some(path) = export.socket_path().or(export.mountpoint.as_deref()) else { continue };
        let name = format!("export {}", export.name);
        if let Some(other) = users.get(&whole(path)) {
            let at = || setup.places.shown(&setup.places.exports, item);
            let path = path.display();
            wrong.tell(|| format!("{}{name}: {path} is used by {other} already; choose another path", at()));
        }
        users.entry(whole(path)).or_insert(name);
    }
}

/// Returns the path of the control socket, if the daemon certainly makes one.
fn own_control(setup: &Setup) -> Option<PathBuf> {
    match &setup.control {
        Control::At(path) => Some(path.clone()),
        Control::Default => control_path(None),
        Control::IfFree | Control::Off => None,
    }
}

/// Checks that the queues and the worker of an `[[attach]]` will exist.
fn attached(setup: &Setup, names: &Names<'_>, attach: &AttachSpec, tell: Tell<'_>) {
    let (wanted, worker) = (&attach.queues, &attach.worker);
    let Some(export) = names.exports.get(wanted.export.as_str()) else {
        let name = &wanted.export;
        return tell(&|| {
            let meant = meant(name, names.exports.keys().copied());
            format!("queues of export {name} are attached, which is not there{meant}; add [[export]]")
        });
    };
    // A network device can have a control queue behind its others.
    let control = u16::from(export.kind == ExportKind::VhostUserNet);
    if let (Some(queues), Some(indices)) = (export.queues, &wanted.indices)
        && *indices.end() >= queues + control
    {
        return tell(&|| {
            format!(
                "queue {} of export {} is attached, which has queues 0 to {}; give it more, or leave this one out",
                indices.end(),
                export.name,
                queues + control - 1
            )
        });
    }
    let known =
        |name: &str| name == "worker-0" || names.workers.contains(name) || is_own(&names.exports, name);
    match whole::<usize>(worker) {
        Some(id) if id <= setup.workers.len() => {}
        None if known(worker) => {}
        _ => tell(&|| {
            let all = names.workers.iter().map(String::as_str).chain(["worker-0"]);
            let meant = meant(worker, all);
            format!("worker {worker} is not there{meant}; give the name of a [[worker]], or 0")
        }),
    }
}

/// Returns the names that the workers of the configuration get.
fn worker_names(setup: &Setup) -> impl Iterator<Item = String> {
    let user = setup.workers.iter().filter(|w| w.export.is_none());
    let named =
        user.enumerate().map(|(at, w)| w.name.clone().unwrap_or_else(|| format!("worker-{}", at + 1)));
    named.chain(setup.first_worker.iter().filter_map(|w| w.name.clone()))
}

/// Returns whether a name is one of a worker that an export makes: `EXPORT/N`.
fn is_own(exports: &BTreeMap<&str, &ExportSpec>, name: &str) -> bool {
    let Some((export, index)) = name.rsplit_once('/') else { return false };
    let Some(export) = exports.get(export) else { return false };
    let Ok(index) = index.parse::<u32>() else { return false };
    match export.workers {
        Workers::Default => false,
        Workers::Auto => index == 0,
        Workers::Count(n) => index < n,
        Workers::PerQueue | Workers::PerCpu => export.queues.is_none_or(|n| index < u32::from(n)),
    }
}

/// Returns what is missing on this machine, and may be there when the daemon starts.
fn warnings(setup: &Setup) -> Vec<String> {
    let places = &setup.places;
    let mut found = Vec::new();
    for (item, disk) in setup.disks.iter().enumerate() {
        if let Some(file) = disk.file.as_ref().filter(|file| !file.exists()) {
            let at = places.shown(&places.disks, item);
            found.push(format!("{at}disk {}: there is no file {}", disk.name, file.display()));
        }
    }
    for (item, net) in setup.nets.iter().enumerate() {
        if let Some(path) = net.netns.as_ref().filter(|path| path.contains('/') && !Path::new(path).exists())
        {
            found.push(format!(
                "{}network {}: there is no {path}",
                places.shown(&places.nets, item),
                net.name
            ));
        }
        let at = places.shown(&places.nets, item);
        let ids = ids(net.owner.as_deref(), net.group.as_deref());
        found.extend(ids.map(|why| format!("{at}network {}: {why}", net.name)));
    }
    for (item, export) in setup.exports.iter().enumerate() {
        let at = places.shown(&places.exports, item) + "export " + &export.name;
        let path = export.socket_path().or(export.mountpoint.as_deref());
        found.extend(path.and_then(no_folder).map(|why| format!("{at}: {why}")));
        let ids = ids(export.owner.as_deref(), export.group.as_deref());
        found.extend(ids.map(|why| format!("{at}: {why}")));
        let certificates = vshunt_daemon::check_certificates(export).err();
        found.extend(certificates.map(|e| format!("{}{e}", places.shown(&places.exports, item))));
    }
    let file = places.file.display();
    let own = own_control(setup);
    let paths = own.iter().chain(&setup.pidfile);
    found.extend(paths.filter_map(|path| no_folder(path)).map(|why| format!("{file}: {why}")));
    let control = &setup.control_access;
    let ids = ids(control.owner.as_deref(), control.group.as_deref());
    found.extend(ids.map(|why| format!("{file}: control socket: {why}")));
    let allowed = setup.sandbox.allow_paths.iter().filter(|path| !path.exists());
    found.extend(allowed.map(|path| format!("{file}: allow-path: there is no folder {}", path.display())));
    found
}

/// Returns what is wrong with the names of a user and a group.
fn ids(owner: Option<&str>, group: Option<&str>) -> impl Iterator<Item = String> {
    let owner = owner.and_then(|name| accounts::user(name).err());
    let group = group.and_then(|name| accounts::group(name).err());
    [owner, group].into_iter().flatten().map(|e| e.to_string())
}

/// Returns the message that the folder of a file is missing, if it is.
fn no_folder(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())?;
    Some(format!("there is no folder {} for {}", folder.display(), path.display()))
}
