//! What the sandbox permits a daemon with this configuration.
//!
//! Called on the main thread before threads exist that stay. A control client may add disks,
//! networks and exports. Therefore a daemon with a control socket keeps each capability that some
//! kind of them needs. A client opens files that are not configured itself, and passes them
//! (`qmp::fdset`).

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use vshunt_sandbox::{Access, CapabilitySet, Rule, SandboxConfig};
use vshunt_types::spec::{ExportKind, Format, ListenAddress, NetKind};

use crate::config::{Control, Setup, control_path};
use crate::image;
use crate::metrics::Address;

/// Paths that the daemon reads in addition to the configured ones: names of users and groups,
/// network namespaces, files of the kernel.
const READ: [&str; 9] =
    ["/proc", "/sys", "/etc", "/usr", "/lib", "/lib64", "/nix/store", "/run/netns", "/run/systemd/userdb"];

/// Paths that the daemon writes in addition to the configured ones: journals of thin images.
const WRITTEN: [&str; 1] = ["/dev/shm"];

/// Devices that exports open.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/fuse", "/dev/net/tun", "/dev/vhost-net", "/dev/vhost-blk"];

/// Returns the configuration of the sandbox. `control`: there is a control socket.
pub(super) fn plan(setup: &Setup, control: bool) -> SandboxConfig {
    let mounts = setup.exports.iter().any(|e| e.kind == ExportKind::Fuse);
    for path in setup.sandbox.allow_paths.iter().filter(|path| !path.exists()) {
        tracing::warn!("--allow-path={}: there is no such folder, so it allows nothing", path.display());
    }
    SandboxConfig {
        mode: setup.sandbox.mode.unwrap_or_default(),
        workers: setup.sandbox.workers,
        capabilities: capabilities(setup, control, mounts),
        paths: paths(setup),
        set_user_id: !rustix::process::geteuid().is_root() && (control || mounts),
    }
}

fn capabilities(setup: &Setup, control: bool, mounts: bool) -> CapabilitySet {
    // For images and sockets of other users, the scheduling of workers, and limits.
    let mut needed = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::FOWNER
        | CapabilitySet::IPC_LOCK
        | CapabilitySet::SYS_NICE
        | CapabilitySet::SYS_RESOURCE;
    let taps = setup.nets.iter().any(|n| n.kind == NetKind::Tap);
    if control || taps {
        needed |= CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
    }
    if control || setup.nets.iter().any(|n| n.netns.is_some()) {
        needed |= CapabilitySet::SYS_PTRACE;
    }
    // For mounts and for network namespaces. A tap that is passed may be in another namespace.
    if control || mounts || taps {
        needed |= CapabilitySet::SYS_ADMIN;
    }
    // Exports start to listen when the sandbox exists.
    let is_low = |listen: &ListenAddress| matches!(listen, ListenAddress::Tcp(at) if at.port() < 1024);
    if control || setup.exports.iter().filter_map(|e| e.listen.as_ref()).any(is_low) {
        needed |= CapabilitySet::NET_BIND_SERVICE;
    }
    needed
}

/// Returns the paths that may be opened: the folders of all configured files, paths that the daemon
/// needs in addition, and paths that the user allows.
fn paths(setup: &Setup) -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut add = |path: PathBuf, access| rules.push(Rule { path, access });
    for disk in &setup.disks {
        vshunt_block::certificates_of(disk).into_iter().for_each(|folder| add(folder, Access::Read));
        let Some(file) = &disk.file else { continue };
        let files = match disk.format() {
            Format::Qcow2 => image::chain(file),
            // The content of a raw image comes from its guest and is not parsed.
            _ => vec![file.clone()],
        };
        // Overlays and backups are made in the folder of an image. The folder of a device contains
        // other devices.
        let device = std::fs::metadata(file).is_ok_and(|m| m.file_type().is_block_device());
        folder_of(file).filter(|_| !device).into_iter().for_each(|folder| add(folder, Access::Write));
        // A commit opens backing images for writing, also to mark them.
        files.into_iter().for_each(|file| add(file, Access::Write));
    }
    let control = match &setup.control {
        Control::At(path) => Some(path.clone()),
        Control::Default | Control::IfFree => control_path(None),
        Control::Off => None,
    };
    let metrics = match &setup.metrics {
        Some(Address::Unix(path)) => Some(path.clone()),
        _ => None,
    };
    let sockets = setup.exports.iter().filter_map(|e| e.socket_path().map(Path::to_owned));
    for socket in sockets.chain(control).chain(metrics) {
        folder_of(&socket).into_iter().for_each(|folder| add(folder, Access::Sockets));
    }
    for mountpoint in setup.exports.iter().filter_map(|e| e.mountpoint.as_deref()) {
        folder_of(mountpoint).into_iter().for_each(|folder| add(folder, Access::Mounts));
    }
    for folder in setup.exports.iter().filter_map(|e| e.tls_certificates.as_deref()) {
        add(folder.to_owned(), Access::Read);
    }
    for net in &setup.nets {
        net.netns
            .iter()
            .filter(|name| name.contains('/'))
            .for_each(|path| add(PathBuf::from(path), Access::Read));
    }
    READ.iter().for_each(|path| add(PathBuf::from(path), Access::Read));
    // For the names of NBD servers. It is often a link to a file below /run, which is replaced
    // there.
    folder_of(Path::new("/etc/resolv.conf")).into_iter().for_each(|folder| add(folder, Access::Read));
    WRITTEN.iter().chain(&DEVICES).for_each(|path| add(PathBuf::from(path), Access::Write));
    macvtaps().into_iter().for_each(|device| add(device, Access::Write));
    setup.sandbox.allow_paths.iter().for_each(|path| add(path.clone(), Access::Write));
    rules
}

/// Returns the folder of a file, with symbolic links followed. None for the root folder, because it
/// would allow all paths.
fn folder_of(path: &Path) -> Option<PathBuf> {
    let real = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path)).ok()?;
    real.parent().filter(|folder| folder.parent().is_some()).map(Path::to_owned)
}

/// Returns the device files of all existing macvtaps.
fn macvtaps() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let is_one = |name: &str| {
        let number = name.strip_prefix("tap");
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    entries.filter(|e| is_one(&e.file_name().to_string_lossy())).map(|e| e.path()).collect()
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::{DiskSpec, ExportSpec};

    use super::*;

    #[test]
    fn what_clients_may_add_is_left_to_the_daemon() {
        let disk = DiskSpec { name: "d".into(), file: Some("/images/a.img".into()), ..DiskSpec::default() };
        let export = ExportSpec { socket: Some("/run/v/a.sock".into()), ..ExportSpec::default() };
        let mount = ExportSpec { mountpoint: Some("/mnt/v/a".into()), ..ExportSpec::default() };
        let setup = Setup {
            control: Control::Off,
            disks: vec![disk],
            exports: vec![export, mount],
            pidfile: Some("/run/pid/a".into()),
            ..Setup::default()
        };
        let alone = plan(&setup, false);
        let client = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN | CapabilitySet::NET_BIND_SERVICE;
        assert!(!alone.capabilities.intersects(client));
        let paths = alone.paths;
        for (path, access) in
            [("/images", Access::Write), ("/run/v", Access::Sockets), ("/mnt/v", Access::Mounts)]
        {
            assert!(paths.contains(&Rule { path: path.into(), access }), "{path}: {paths:?}");
        }
        assert!(!paths.iter().any(|rule| rule.path == Path::new("/run/pid")), "{paths:?}");
        assert!(!paths.iter().any(|rule| rule.path == Path::new("/")));
        let asked = plan(&setup, true);
        assert!(asked.capabilities.contains(client));
        assert_eq!(asked.paths, paths);
    }

    #[test]
    fn an_export_may_listen_on_a_port_below_1024() {
        for (listen, needs) in [("1023", true), ("1024", false), ("unix:/run/v/a", false)] {
            let export = ExportSpec { listen: Some(listen.parse().unwrap()), ..ExportSpec::default() };
            let setup = Setup { control: Control::Off, exports: vec![export], ..Setup::default() };
            let kept = plan(&setup, false).capabilities.contains(CapabilitySet::NET_BIND_SERVICE);
            assert_eq!(kept, needs, "{listen}");
        }
    }
}
