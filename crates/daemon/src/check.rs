//! Checks of requests that need neither the machine nor the state of the daemon.
//!
//! The command line calls them before anything is started, so that a wrong option or configuration
//! is reported first. [`Daemon`](super::Daemon) calls them again, for other clients of the
//! protocol.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use vshunt_block::Disk;
use vshunt_engine::{Settings, WorkerId};
use vshunt_net::switch;
use vshunt_tap as tap;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{
    BalanceMode, DiskSpec, Engine, ExportKind, ExportSpec, LimitKind, LimitsSpec, ListenAddress, NetKind,
    NetSpec, VLAN_MAX, WorkerKind, WorkerSpec, Workers as Spread,
};
use vshunt_vhost_user::blk::SERIAL_MAX;

/// Virtqueues of one export at most: about what a virtio device of QEMU can have, and the usual
/// limit of VMMs.
pub const MAX_QUEUES: u16 = 256;
/// Queue pairs of one export of a network at most: vhost-user has 8 bits for the index of a
/// virtqueue.
pub const MAX_PAIRS: u16 = 128;

/// A request that can be checked by itself.
pub trait Check {
    /// # Errors
    /// [`Invalid`](vshunt_types::error::Kind::Invalid), with the remedy.
    fn check(&self) -> Result<()>;
}

impl Check for DiskSpec {
    fn check(&self) -> Result<()> {
        check_name("disk", &self.name)?;
        check_path("disk", &self.name, "file", self.file.as_deref())?;
        Disk::check(self)
    }
}

impl Check for NetSpec {
    fn check(&self) -> Result<()> {
        check_name("network", &self.name)?;
        let wrong = |why: String| Err(Error::invalid(format!("network {}: {why}", self.name)));
        check_path("network", &self.name, "netns", self.netns.as_deref().map(Path::new))?;
        if self.kind == NetKind::Switch {
            return check_switch(self);
        }
        let named = match (&self.ifname, &self.fd) {
            (Some(ifname), None) => tap::check_name(ifname),
            (None, Some(fd)) => tap::parse_fds(fd).map(drop),
            (None, None) => return wrong("give ifname=NAME, the interface, or fd=N, its descriptors".into()),
            (Some(_), Some(_)) => {
                return wrong("give either ifname=NAME or fd=N: a descriptor knows its interface".into());
            }
        };
        let netns = self.netns.as_deref().map_or(Ok(()), tap::check_netns);
        if let Err(e) = named.and(netns) {
            return wrong(e.to_string());
        }
        match (&self.fd, self.queues) {
            (Some(_), _) if self.netns.is_some() => {
                wrong("netns= is for an interface by name: a descriptor knows its own; leave it out".into())
            }
            (Some(_), Some(_)) => wrong("there are as many queues as descriptors; leave out queues".into()),
            (_, Some(n)) if !(1..=tap::QUEUES_MAX).contains(&n) => {
                wrong(format!("queues={n} is out of range; a tap has 1 to {}", tap::QUEUES_MAX))
            }
            _ => Ok(()),
        }
    }
}

impl Check for WorkerSpec {
    fn check(&self) -> Result<()> {
        check_worker_name(self.name.as_deref())?;
        match (self.kind.unwrap_or_default(), &self.export) {
            (WorkerKind::Kernel, None) => {
                return Err(Error::invalid(
                    "a worker of the kernel is of one export; name it: export=NAME (--export NAME)",
                ));
            }
            (WorkerKind::User, Some(export)) => {
                return Err(Error::invalid(format!(
                    "a worker of this process is of no export; leave out {export}, or give kind=kernel"
                )));
            }
            (WorkerKind::Kernel, Some(_)) => settings(self).check_kernel()?,
            (WorkerKind::User, None) => {}
        }
        settings(self).check()
    }
}

impl Check for ExportSpec {
    fn check(&self) -> Result<()> {
        check_name("export", &self.name)?;
        let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", self.name)));
        check_path("export", &self.name, "socket", self.socket.as_deref())?;
        check_path("export", &self.name, "mountpoint", self.mountpoint.as_deref())?;
        check_path("export", &self.name, "tls-certificates", self.tls_certificates.as_deref())?;
        if let Some(ListenAddress::Unix(path)) = &self.listen {
            check_path("export", &self.name, "listen", Some(path))?;
        }
        check_kind(self)?;
        check_socket_access(self)?;
        if self.socket.is_some() && self.fd.is_some() {
            return check_one_place(self);
        }
        let most = match self.kind {
            ExportKind::VhostUserNet | ExportKind::Uplink => MAX_PAIRS,
            ExportKind::VhostUserBlk | ExportKind::Fuse | ExportKind::Nbd => MAX_QUEUES,
        };
        if let Some(queues) = self.queues
            && !(1..=most).contains(&queues)
        {
            return wrong(format!("queues={queues} is out of range; 1 to {most} is possible"));
        }
        if let Some(Err(e)) = self.mtu.map(tap::check_mtu) {
            return wrong(e.to_string());
        }
        check_port(self)?;
        if let Some(limits) = &self.limits {
            check_limits(&self.name, self.kind.limits(), limits)?;
            if self.engine == Some(Engine::Kernel) {
                return wrong("the kernel has no limits; leave out engine=kernel, or the limits".to_owned());
            }
        }
        if self.balance.is_some_and(|mode| mode != BalanceMode::Off) && self.engine == Some(Engine::Kernel) {
            return wrong(
                "queues of the kernel engine do not follow load; leave out engine=kernel, or balance"
                    .to_owned(),
            );
        }
        if self.workers == Spread::Count(0) {
            return wrong("workers=0 would serve nothing; give 1 or more, or per-queue".to_owned());
        }
        if self.workers == Spread::Auto {
            check_workers_auto(self)?;
        }
        if let Some(serial) = &self.serial
            && serial.len() > SERIAL_MAX
        {
            return wrong(format!("the serial has {} bytes; {SERIAL_MAX} is the most", serial.len()));
        }
        if let Some(size) = self.block_size
            && (!size.is_power_of_two() || !(512..=4096).contains(&size))
        {
            return wrong(format!("block-size={size} is not one of 512, 1024, 2048, 4096"));
        }
        Settings { poll_us: self.poll_us, ..Settings::default() }.check()
    }
}

/// Checks an export whose number of workers follows load.
fn check_workers_auto(spec: &ExportSpec) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    if spec.kind == ExportKind::Fuse {
        return wrong(
            "the channels of a mount share its requests, so workers=auto has nothing to go by; leave it out, or give \
             per-queue, per-cpu or a number",
        );
    }
    if spec.engine == Some(Engine::Kernel) {
        return wrong(
            "workers of the kernel engine do not follow load; leave out engine=kernel, or give workers=per-queue or a \
             number",
        );
    }
    Ok(())
}

/// Checks a switch, which has only a name.
fn check_switch(spec: &NetSpec) -> Result<()> {
    let keys = [
        ("ifname", spec.ifname.is_some()),
        ("fd", spec.fd.is_some()),
        ("netns", spec.netns.is_some()),
        ("queues", spec.queues.is_some()),
        ("steering", spec.steering.is_some()),
        ("address", spec.address.is_some()),
        ("owner", spec.owner.is_some()),
        ("group", spec.group.is_some()),
        ("persist", spec.persist.is_some()),
    ];
    match keys.iter().find(|(_, given)| *given) {
        Some((key, _)) => Err(Error::invalid(format!(
            "network {}: {key} is of type=tap, not of type=switch; leave it out",
            spec.name
        ))),
        None => Ok(()),
    }
}

/// Checks the options of a port of a switch.
fn check_port(spec: &ExportSpec) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    if spec.mac_filter == Some(true) && spec.mac.is_none() {
        return wrong("mac-filter=on needs the address that may send; give mac=ADDRESS".to_owned());
    }
    let limits = 1..=switch::MACS_MAX as u32;
    if let Some(limit) = spec.mac_limit.filter(|limit| !limits.contains(limit)) {
        return wrong(format!("mac-limit={limit} is out of range; 1 to {} is possible", limits.end()));
    }
    match (spec.vlan, &spec.trunk) {
        (Some(vlan), _) if !(1..=VLAN_MAX).contains(&vlan) => {
            wrong(format!("vlan={vlan} is out of range; 1 to {VLAN_MAX} is possible"))
        }
        (Some(vlan), Some(trunk)) if trunk.has(vlan) => wrong(format!(
            "vlan={vlan} is untagged at the port, and trunk={trunk} has it tagged; leave it out of one of the two"
        )),
        _ => Ok(()),
    }
}

/// Checks the limits of an export. `kind`: what it serves, if that is known.
///
/// # Errors
/// A limit is out of range or of another kind of export, or the name of the group is not usable.
pub fn check_limits(export: &str, kind: Option<LimitKind>, limits: &LimitsSpec) -> Result<()> {
    let of_kind = kind.map_or(Ok(()), |kind| limits.check_kind(kind));
    of_kind.and(limits.check()).map_err(|why| Error::invalid(format!("export {export}: {why}")))?;
    limits.group.as_deref().map_or(Ok(()), |group| check_name("group", group))
}

/// Returns the given options of a port of a switch. They have no effect on a tap.
pub(super) fn port_keys(spec: &ExportSpec) -> impl Iterator<Item = &'static str> {
    let keys = [
        ("mac-filter", spec.mac_filter.is_some()),
        ("mac-limit", spec.mac_limit.is_some()),
        ("vlan", spec.vlan.is_some()),
        ("trunk", spec.trunk.is_some()),
        ("isolated", spec.isolated.is_some()),
        ("reserved", spec.reserved.is_some()),
    ];
    keys.into_iter().filter(|(_, given)| *given).map(|(key, _)| key)
}

/// Checks the requested size of a disk.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with the remedy.
pub fn check_disk_size(size_bytes: u64) -> Result<()> {
    Disk::check_size(size_bytes)
}

/// Checks that the owner, the group and the mode are of a socket that the daemon makes.
fn check_socket_access(spec: &ExportSpec) -> Result<()> {
    let key = spec.socket_access().first_key();
    if let (Some(key), Some(ListenAddress::Tcp(address))) = (key, &spec.listen) {
        return Err(Error::invalid(format!(
            "export {}: {key} is of a UNIX socket, and listen={address} is a TCP port; leave it out, or give \
             listen=unix:PATH",
            spec.name
        )));
    }
    match key.filter(|_| spec.fd.is_some()) {
        Some(key) => Err(Error::invalid(format!(
            "export {}: {key} is of a socket that the daemon makes, and this one is passed to it; leave it out, \
             and let its maker set it (systemd: SocketUser=, SocketGroup=, SocketMode=)",
            spec.name
        ))),
        None => Ok(()),
    }
}

/// Checks that an export has exactly one place: a socket or a mountpoint. [`Check`] allows a
/// missing socket, because the service manager may pass one.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid).
pub fn check_one_place(spec: &ExportSpec) -> Result<()> {
    check_socket_access(spec)?;
    match spec.kind {
        ExportKind::VhostUserBlk | ExportKind::VhostUserNet if spec.socket.is_some() == spec.fd.is_some() => {
            Err(Error::invalid(format!("export {}: give either socket=PATH or fd=N", spec.name)))
        }
        ExportKind::Nbd if spec.listen.is_none() => Err(Error::invalid(format!(
            "export {}: give listen=unix:PATH or listen=ADDRESS:PORT, where clients connect",
            spec.name
        ))),
        ExportKind::Fuse if spec.mountpoint.is_none() => {
            Err(Error::invalid(format!("export {}: give mountpoint=PATH, the file to mount over", spec.name)))
        }
        _ => Ok(()),
    }
}

/// Checks that all given options belong to this kind of export.
fn check_kind(spec: &ExportSpec) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    let kind = kind_name(spec.kind);
    if let Some((key, of, _)) = of_kinds(spec).into_iter().find(|(_, of, on)| *on && !of.contains(&spec.kind))
    {
        if key == "readonly" && matches!(spec.kind, ExportKind::Fuse | ExportKind::Nbd) {
            return wrong(format!(
                "a {kind} export is read-only unless writable=on is given; leave out readonly"
            ));
        }
        let others: Vec<_> = of.iter().map(|kind| kind_name(*kind)).collect();
        let others = others.join(" and ");
        return wrong(format!("{key} is of type={others}, not of type={kind}; leave it out"));
    }
    match spec.kind {
        ExportKind::VhostUserNet if spec.net.is_none() => wrong("give net=NAME, the network to join".into()),
        ExportKind::Uplink if spec.net.is_none() => wrong("give net=NAME, the switch to join".into()),
        ExportKind::Uplink if spec.tap.is_none() => wrong("give tap=NAME, the network that joins it".into()),
        ExportKind::VhostUserBlk | ExportKind::Fuse | ExportKind::Nbd if spec.disk.is_empty() => {
            wrong("give disk=NAME, the disk to serve".into())
        }
        ExportKind::Nbd if spec.tls_verify_peer.is_some() && spec.tls_certificates.is_none() => {
            wrong("tls-verify-peer needs tls-certificates=FOLDER, without which there is no TLS".into())
        }
        ExportKind::Fuse if spec.growable == Some(true) && spec.writable != Some(true) => {
            wrong("growable=on needs writable=on".into())
        }
        _ => Ok(()),
    }
}

fn kind_name(kind: ExportKind) -> &'static str {
    match kind {
        ExportKind::VhostUserBlk => "vhost-user-blk",
        ExportKind::VhostUserNet => "vhost-user-net",
        ExportKind::Fuse => "fuse",
        ExportKind::Uplink => "uplink",
        ExportKind::Nbd => "nbd",
    }
}

/// Returns the options that do not belong to every kind of export: the option, its kinds, and
/// whether it is given.
fn of_kinds(spec: &ExportSpec) -> Vec<(&'static str, &'static [ExportKind], bool)> {
    use ExportKind::{Fuse, Nbd, Uplink, VhostUserBlk, VhostUserNet};
    vec![
        ("disk", &[VhostUserBlk, Fuse, Nbd], !spec.disk.is_empty()),
        ("net", &[VhostUserNet, Uplink], spec.net.is_some()),
        ("tap", &[Uplink], spec.tap.is_some()),
        ("mac", &[VhostUserNet], spec.mac.is_some()),
        ("mac-filter", &[VhostUserNet], spec.mac_filter.is_some()),
        ("mac-limit", &[VhostUserNet, Uplink], spec.mac_limit.is_some()),
        ("vlan", &[VhostUserNet, Uplink], spec.vlan.is_some()),
        ("trunk", &[VhostUserNet, Uplink], spec.trunk.is_some()),
        ("isolated", &[VhostUserNet, Uplink], spec.isolated.is_some()),
        ("reserved", &[VhostUserNet, Uplink], spec.reserved.is_some()),
        ("mtu", &[VhostUserNet, Uplink], spec.mtu.is_some()),
        ("socket", &[VhostUserBlk, VhostUserNet], spec.socket.is_some()),
        ("fd", &[VhostUserBlk, VhostUserNet], spec.fd.is_some()),
        ("listen", &[Nbd], spec.listen.is_some()),
        ("tls-certificates", &[Nbd], spec.tls_certificates.is_some()),
        ("tls-verify-peer", &[Nbd], spec.tls_verify_peer.is_some()),
        ("owner", &[VhostUserBlk, VhostUserNet, Nbd], spec.owner.is_some()),
        ("group", &[VhostUserBlk, VhostUserNet, Nbd], spec.group.is_some()),
        ("mode", &[VhostUserBlk, VhostUserNet, Nbd], spec.mode.is_some()),
        ("engine", &[VhostUserBlk, VhostUserNet], spec.engine.is_some()),
        ("memory-may-block", &[VhostUserBlk, VhostUserNet], spec.memory_may_block.is_some()),
        ("limits", &[VhostUserBlk, VhostUserNet, Fuse, Nbd], spec.limits.is_some()),
        ("latency", &[VhostUserBlk, Fuse, Nbd], spec.latency.is_some()),
        ("balance", &[VhostUserBlk, VhostUserNet, Uplink, Nbd], spec.balance.is_some()),
        ("serial", &[VhostUserBlk], spec.serial.is_some()),
        ("block-size", &[VhostUserBlk], spec.block_size.is_some()),
        ("readonly", &[VhostUserBlk], spec.readonly),
        ("mountpoint", &[Fuse], spec.mountpoint.is_some()),
        ("writable", &[Fuse, Nbd], spec.writable.is_some()),
        ("growable", &[Fuse], spec.growable.is_some()),
        ("allow-other", &[Fuse], spec.allow_other.is_some()),
        ("transport", &[Fuse], spec.transport.is_some()),
        ("passthrough", &[Fuse], spec.passthrough.is_some()),
    ]
}

/// Returns whether an option of exports belongs to exports of this kind.
pub fn is_key_of(kind: ExportKind, key: &str) -> bool {
    let of_kinds = of_kinds(&ExportSpec::default());
    of_kinds.iter().find(|(name, ..)| *name == key).is_none_or(|(_, kinds, _)| kinds.contains(&kind))
}

/// Returns the settings of a worker, without its name.
pub(super) fn settings(spec: &WorkerSpec) -> Settings {
    Settings { cpu: spec.cpu.clone(), nice: spec.nice, poll_us: spec.poll_us, ..Settings::default() }
}

fn check_worker_name(name: Option<&str>) -> Result<()> {
    name.map_or(Ok(()), |name| check_no_id("worker", name))
}

/// Checks the name of a job, which is also the name of its worker and its queue.
pub(super) fn check_job_name(name: &str) -> Result<()> {
    check_no_id("job", name)
}

/// Checks that a name is not a number. Numbers in place of names are ids.
fn check_no_id(what: &str, name: &str) -> Result<()> {
    check_name(what, name)?;
    match name.parse::<WorkerId>() {
        Ok(_) => Err(Error::invalid(format!("{what} name {name:?} would be taken for an id; add a letter"))),
        Err(_) => Ok(()),
    }
}

/// Checks that the system can take a path.
fn check_path(what: &str, name: &str, key: &str, path: Option<&Path>) -> Result<()> {
    match path.filter(|path| path.as_os_str().as_bytes().contains(&0)) {
        Some(path) => {
            Err(Error::invalid(format!("{what} {name}: {key}={path:?} has a NUL byte; no path has one")))
        }
        None => Ok(()),
    }
}

/// Checks a name that users choose. `what`: what has it.
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
        return Err(Error::invalid(format!(
            "{what} name {name:?} is not usable; take 1 to 64 letters, digits, '-', '_' or '.'"
        )));
    }
    // The name is an argument of commands, and a part of the names of files.
    if name.starts_with('-') || name.chars().all(|c| c == '.') {
        return Err(Error::invalid(format!(
            "{what} name {name:?} would be taken for an option or a folder; begin it with a letter or a digit"
        )));
    }
    Ok(())
}
