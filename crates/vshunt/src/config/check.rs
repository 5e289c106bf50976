//! Checks of a whole configuration, before anything is started, and `vshunt config check`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use vshunt_daemon::Check;
use vshunt_types::spec::{ExportKind, ExportSpec, WorkerSpec, Workers};
use vshunt_vhost_user::accounts;

use super::file::{AttachSpec, Place};
use super::{Control, Setup, check_control_access, control_path};
use crate::keyval::closest;
use crate::metrics::Address;
use crate::outcome::{Failure, Outcome, print};

/// Prints what is wrong with a configuration file, and what is missing on this machine. Nothing is
/// started.
///
/// # Errors
/// Usage: the file cannot be read, or something is wrong. The message has all of it.
pub(crate) fn file(path: &Path) -> Outcome {
    let (mut setup, mut wrong) = super::read(path)?;
    wrong.extend(problems(&setup));
    match std::mem::take(&mut setup.sandbox).with_defaults(Default::default()) {
        Ok(sandbox) => setup.sandbox = sandbox,
        Err(e) => wrong.push(format!("{}{e}", setup.places.of_key("allow-path"))),
    }
    if setup.control == Control::Off && setup.exports.is_empty() && !setup.places.lacks_names {
        let at = setup.places.of_key("control");
        wrong.push(format!("{at}there is neither an [[export]] nor a control socket to add one"));
    }
    if !wrong.is_empty() {
        return Err(all(&wrong));
    }
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
    print(&format!("{}: no errors; {}\n", path.display(), counts.join(", ")))
}

/// Returns the failure with these messages, each on a line of its own.
pub(super) fn all(wrong: &[String]) -> Failure {
    Failure::Usage(wrong.join("\nvshunt: "))
}

/// Returns all that is wrong with a configuration. What comes from a file has its place.
pub(super) fn problems(setup: &Setup) -> Vec<String> {
    let mut wrong = Vec::new();
    let places = &setup.places;
    if let Err(e) = (WorkerSpec { poll_us: setup.poll_us, ..WorkerSpec::default() }).check() {
        wrong.push(format!("{}{e}", places.of_key("poll-us")));
    }
    if let Err(e) = check_control_access(setup) {
        let key = setup.control_access.first_key().unwrap_or_default();
        wrong.push(format!("{}{e}", places.of_key(&format!("control-{key}"))));
    }
    let mut twice = |kind: &str, names: &[&str], at: &[Place]| {
        for (item, name) in names.iter().enumerate().filter(|(item, name)| names[..*item].contains(name)) {
            let at = places.shown(at, item);
            wrong.push(format!("{at}there are two of {kind} {name}; give one another name"));
        }
    };
    twice("disk", &disk_names(setup), &places.disks);
    twice("net", &net_names(setup), &places.nets);
    let exports: Vec<&str> = setup.exports.iter().map(|e| e.name.as_str()).collect();
    twice("export", &exports, &places.exports);
    let finished = |item: &usize| !places.lacks_names && !places.unfinished.contains(item);
    for (item, export) in setup.exports.iter().enumerate().filter(|(item, _)| finished(item)) {
        let of_file = item < places.exports.len();
        let found = backends(setup, export, of_file);
        wrong.extend(found.into_iter().map(|why| places.shown(&places.exports, item) + &why));
    }
    wrong.extend(same_paths(setup));
    for (item, attach) in setup.attach.iter().enumerate().filter(|_| !places.lacks_names) {
        let found = attached(setup, attach).err();
        wrong.extend(found.map(|why| places.shown(&places.attach, item) + &why));
    }
    wrong
}

fn disk_names(setup: &Setup) -> Vec<&str> {
    setup.disks.iter().map(|d| d.name.as_str()).collect()
}

fn net_names(setup: &Setup) -> Vec<&str> {
    setup.nets.iter().map(|n| n.name.as_str()).collect()
}

/// Returns ` (did you mean …?)`, if a name is similar.
fn meant(name: &str, names: &[&str]) -> String {
    closest(name, names).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"))
}

/// Returns what is missing of the disk and the networks of an export.
fn backends(setup: &Setup, export: &ExportSpec, of_file: bool) -> Vec<String> {
    let (name, nets, disks) = (&export.name, net_names(setup), disk_names(setup));
    let remedy = |kind: &str| if of_file { format!("[[{kind}]]") } else { format!("--{kind}") };
    let missing = export.net.iter().chain(&export.tap).filter(|net| !nets.contains(&net.as_str()));
    let mut wrong: Vec<String> = missing
        .map(|net| {
            let meant = meant(net, &nets);
            format!("export {name} is of network {net}, which is not there{meant}; add {}", remedy("net"))
        })
        .collect();
    let disk = &export.disk;
    if export.net.is_none() && !disks.contains(&disk.as_str()) {
        let meant = meant(disk, &disks);
        wrong.push(format!(
            "export {name} is of disk {disk}, which is not there{meant}; add {}",
            remedy("disk")
        ));
    }
    wrong
}

/// Returns the paths that two sockets or mountpoints would have.
fn same_paths(setup: &Setup) -> Vec<String> {
    let mut users: BTreeMap<PathBuf, String> = BTreeMap::new();
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if let Some(path) = own_control(setup) {
        users.insert(whole(&path), "the control socket".to_owned());
    }
    if let Some(Address::Unix(path)) = &setup.metrics {
        users.insert(whole(path), "the socket for metrics".to_owned());
    }
    let mut wrong = Vec::new();
    for (item, export) in setup.exports.iter().enumerate() {
        let Some(path) = export.socket.as_ref().or(export.mountpoint.as_ref()) else { continue };
        let name = format!("export {}", export.name);
        if let Some(other) = users.get(&whole(path)) {
            let at = setup.places.shown(&setup.places.exports, item);
            let path = path.display();
            wrong.push(format!("{at}{name}: {path} is used by {other} already; choose another path"));
        }
        users.entry(whole(path)).or_insert(name);
    }
    wrong
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
fn attached(setup: &Setup, attach: &AttachSpec) -> Result<(), String> {
    let (wanted, worker) = (&attach.queues, &attach.worker);
    let exports: Vec<&str> = setup.exports.iter().map(|e| e.name.as_str()).collect();
    let Some(export) = setup.exports.iter().find(|e| e.name == wanted.export) else {
        let name = &wanted.export;
        let meant = meant(name, &exports);
        return Err(format!(
            "queues of export {name} are attached, which is not there{meant}; add [[export]]"
        ));
    };
    // A network device can have a control queue behind its others.
    let control = u16::from(export.kind == ExportKind::VhostUserNet);
    if let (Some(queues), Some(indices)) = (export.queues, &wanted.indices)
        && *indices.end() >= queues + control
    {
        return Err(format!(
            "queue {} of export {} is attached, which has queues 0 to {}; give it more, or leave this one out",
            indices.end(),
            export.name,
            queues + control - 1
        ));
    }
    let own = export_workers(&setup.exports);
    let mut names = worker_names(setup);
    names.push("worker-0".to_owned());
    let known = |name: &str| names.iter().any(|n| n == name) || own(name);
    match worker.parse::<usize>() {
        Ok(id) if id <= setup.workers.len() => Ok(()),
        Err(_) if known(worker) => Ok(()),
        _ => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Err(format!(
                "worker {worker} is not there{}; give the name of a [[worker]], or 0",
                meant(worker, &names)
            ))
        }
    }
}

/// Returns the names that the workers of the configuration get.
fn worker_names(setup: &Setup) -> Vec<String> {
    let user = setup.workers.iter().filter(|w| w.export.is_none());
    let named =
        user.enumerate().map(|(at, w)| w.name.clone().unwrap_or_else(|| format!("worker-{}", at + 1)));
    named.chain(setup.first_worker.iter().filter_map(|w| w.name.clone())).collect()
}

/// Returns whether a name is one of a worker that an export makes: `EXPORT/N`.
fn export_workers(exports: &[ExportSpec]) -> impl Fn(&str) -> bool {
    |name| {
        let Some((export, index)) = name.rsplit_once('/') else { return false };
        let Some(export) = exports.iter().find(|e| e.name == export) else { return false };
        let Ok(index) = index.parse::<u32>() else { return false };
        match export.workers {
            Workers::Default => false,
            Workers::Count(n) => index < n,
            Workers::PerQueue | Workers::PerCpu => export.queues.is_none_or(|n| index < u32::from(n)),
        }
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
        let path = export.socket.as_ref().or(export.mountpoint.as_ref());
        found.extend(path.and_then(|path| no_folder(path)).map(|why| format!("{at}: {why}")));
        let ids = ids(export.owner.as_deref(), export.group.as_deref());
        found.extend(ids.map(|why| format!("{at}: {why}")));
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
