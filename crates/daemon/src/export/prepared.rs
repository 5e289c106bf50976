//! The first step of an export: checks the request, and opens all that it names.

use std::sync::Arc;

use vshunt_block::Disk;
use vshunt_fuse as fuse;
use vshunt_kernel_engine as kernel_engine;
use vshunt_nbd_server::{Bitmaps, CONNECTIONS, Credentials, Listening};
use vshunt_net::Switch;
use vshunt_tap::{Tap, TapQueue};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Engine, ExportKind, ExportSpec, Workers as Spread};

use vshunt_vhost_user::{Socket, adopt, listen};

use crate::check::{MAX_PAIRS, MAX_QUEUES, check_one_place, port_keys};
use crate::net::Net;

/// What an export serves.
pub(crate) enum Backend {
    /// A disk, and its bitmaps.
    Disk(Arc<Disk>, Bitmaps),
    /// A network, and its limit of queue pairs if there is one.
    Net(Net, Option<u16>),
    /// A tap as an uplink of a switch, and the limit of queue pairs of the tap if there is one.
    Uplink(Arc<Tap>, Arc<Switch>, Option<u16>),
}

/// What was opened for an export.
pub(crate) enum Prepared {
    Blk(PreparedBlk),
    Net(PreparedNet),
    Port(PreparedPort),
    Uplink(PreparedUplink),
    Mount(PreparedMount),
    Nbd(PreparedNbd),
}

/// A disk behind a socket.
pub(crate) struct PreparedBlk {
    pub(crate) socket: Socket,
    pub(crate) server: DiskServer,
    pub(crate) disk: Arc<Disk>,
}

/// A tap behind a socket.
pub(crate) struct PreparedNet {
    pub(crate) socket: Socket,
    pub(crate) server: NetServer,
    pub(crate) tap: Arc<Tap>,
}

/// A port of a switch behind a socket.
pub(crate) struct PreparedPort {
    pub(crate) socket: Socket,
    pub(crate) switch: Arc<Switch>,
}

/// A tap as a port of a switch.
pub(crate) struct PreparedUplink {
    pub(crate) tap: Arc<Tap>,
    pub(crate) switch: Arc<Switch>,
}

/// A disk as a file of the host.
pub(crate) struct PreparedMount {
    pub(crate) plan: fuse::QueuePlan,
    pub(crate) disk: Arc<Disk>,
}

/// A disk for NBD clients.
pub(crate) struct PreparedNbd {
    pub(crate) listening: Listening,
    pub(crate) tls: Option<Credentials>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) bitmaps: Bitmaps,
}

/// The server of the rings of a disk.
pub(crate) enum DiskServer {
    /// Workers of this process. `reason`: why the kernel does not serve them, with engine=auto.
    User {
        reason: Option<String>,
    },
    Kernel(kernel_engine::DiskPlan),
}

/// The server of the rings of a network device on a tap.
pub(crate) enum NetServer {
    /// Workers of this process. `reason`: why the kernel does not serve them, with engine=auto.
    User {
        queues: Vec<Arc<TapQueue>>,
        reason: Option<String>,
    },
    Kernel(kernel_engine::NetPlan),
}

impl Prepared {
    /// Checks the whole request, fills in defaults, and opens what it needs. Also returns whether
    /// the export is read-only.
    ///
    /// # Errors
    /// The request is wrong, or something cannot be opened.
    pub(crate) fn open(spec: &mut ExportSpec, backend: Backend) -> Result<(Self, bool)> {
        // The path is absolute because the reader of the list may be in another folder.
        spec.mountpoint = spec.mountpoint.take().map(|path| std::path::absolute(&path).unwrap_or(path));
        let mut readonly = spec.refuses_writes();
        let prepared = match backend {
            Backend::Disk(disk, bitmaps) => {
                check(spec, &disk)?;
                readonly |= disk.readonly();
                if spec.kind == ExportKind::Fuse {
                    let queues = spec.queues.unwrap_or_else(online_cpus);
                    let plan = fuse::plan(spec, &disk, MAX_QUEUES, queues)?;
                    Self::Mount(PreparedMount { plan, disk })
                } else if spec.kind == ExportKind::Nbd {
                    fill_in_connections(spec);
                    check_one_place(spec)?;
                    // As for a mountpoint.
                    let folder = spec.tls_certificates.take();
                    spec.tls_certificates =
                        folder.map(|folder| std::path::absolute(&folder).unwrap_or(folder));
                    let tls = credentials(spec)?;
                    let Some(address) = &spec.listen else { unreachable!("checked above") };
                    let listening = vshunt_nbd_server::listen(address, &spec.socket_access())?;
                    Self::Nbd(PreparedNbd { listening, tls, disk, bitmaps })
                } else {
                    let queues = fill_in_virtqueues(spec);
                    let server = disk_server(spec, &disk, queues)?;
                    Self::Blk(PreparedBlk { socket: open_socket(spec)?, server, disk })
                }
            }
            Backend::Uplink(tap, switch, most) => {
                check_there(&tap)?;
                spec.queues = Some(pairs(spec, Some(&tap), most)?);
                Self::Uplink(PreparedUplink { tap, switch })
            }
            Backend::Net(net, most) => {
                let pairs = pairs(spec, net.tap(), most)?;
                spec.queues = Some(pairs);
                match net {
                    Net::Tap(tap) => {
                        if let Some(key) = port_keys(spec).next() {
                            return Err(Error::invalid(format!(
                                "export {}: {key} is of a port of a switch, and its network is a tap; leave it out",
                                spec.name
                            )));
                        }
                        check_there(&tap)?;
                        let server = net_server(spec, &tap, pairs)?;
                        Self::Net(PreparedNet { socket: open_socket(spec)?, server, tap })
                    }
                    Net::Switch(_) if spec.engine == Some(Engine::Kernel) => {
                        return Err(Error::unsupported(format!(
                            "export {}: the kernel cannot serve a port of a switch; leave out engine=kernel",
                            spec.name
                        )));
                    }
                    Net::Switch(switch) => Self::Port(PreparedPort { socket: open_socket(spec)?, switch }),
                }
            }
        };
        Ok((prepared, readonly))
    }
}

/// Fills in the number of virtqueues of a disk, and returns it.
///
/// A VMM refuses to start if it is asked for more queues than the back end has. Therefore the
/// default is as many as no guest exceeds: a queue that never starts takes about 1 KiB, and
/// no descriptor. With `workers=per-queue`, the number of workers is then that of the CPUs, and the
/// queues are distributed over them in turn.
///
/// The default is the number of CPUs where each queue takes more: one worker pinned to a CPU, or
/// descriptors of the kernel engine.
fn fill_in_virtqueues(spec: &mut ExportSpec) -> u16 {
    let costs_more = spec.workers == Spread::PerCpu || spec.engine.unwrap_or_default() != Engine::User;
    let queues = match spec.queues {
        Some(queues) => queues,
        None if costs_more => online_cpus(),
        None => {
            if spec.workers == Spread::PerQueue {
                spec.workers = Spread::Count(online_cpus().into());
            }
            MAX_QUEUES
        }
    };
    spec.queues = Some(queues);
    queues
}

/// Fills in the number of connections of NBD clients. A queue that never starts takes about 1 KiB,
/// so with `workers=per-queue` it is the workers that are limited, to one for each CPU.
fn fill_in_connections(spec: &mut ExportSpec) {
    if spec.queues.is_none() && spec.workers == Spread::PerQueue {
        spec.workers = Spread::Count(online_cpus().min(CONNECTIONS).into());
    }
    spec.queues.get_or_insert(CONNECTIONS);
}

/// Reads the certificates of an export for NBD clients.
fn credentials(spec: &ExportSpec) -> Result<Option<Credentials>> {
    let Some(folder) = &spec.tls_certificates else { return Ok(None) };
    let read = Credentials::read(folder, spec.tls_verify_peer.unwrap_or(true));
    read.map(Some).map_err(|why| {
        Error::invalid(format!("export {}: tls-certificates={} {why}", spec.name, folder.display()))
    })
}

/// Checks the certificates of an export, if it has some.
///
/// # Errors
/// [`Invalid`](vshunt_types::error::Kind::Invalid), with the file and the remedy.
pub fn check_certificates(spec: &ExportSpec) -> Result<()> {
    credentials(spec).map(drop)
}

/// Checks the request for this disk. [`Check`](crate::Check) has checked the rest.
fn check(spec: &ExportSpec, disk: &Disk) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid(format!("export {}: {why}", spec.name)));
    if spec.writable == Some(true) && disk.readonly() {
        return wrong(format!(
            "disk {} is read-only; leave out writable=on, or open the disk without readonly=on",
            spec.disk
        ));
    }
    let is_file = || disk.image().and_then(|i| i.metadata().ok()).is_none_or(|m| m.file_type().is_file());
    if spec.growable == Some(true) && !is_file() {
        return wrong(format!(
            "disk {} is a block device, which no file can grow; leave out growable=on",
            spec.disk
        ));
    }
    if spec.growable == Some(true) && !disk.write_observers().is_idle() {
        return wrong(format!(
            "disk {} has a job or dirty bitmaps, which no growable file can have: leave out growable=on",
            spec.disk
        ));
    }
    if disk.size_bytes() == 0 && spec.growable != Some(true) {
        return wrong(format!(
            "the image of disk {0} is empty, which only a FUSE export with writable=on,growable=on serves; make it longer: \
             vshunt resize {0} 10G, say",
            spec.disk
        ));
    }
    let least = disk.limits().block_size;
    if spec.block_size.is_some_and(|size| size < least) {
        return Err(Error::invalid(format!(
            "export {}: the disk needs block-size={least} at least",
            spec.name
        )));
    }
    check_block_size(spec, disk.size_bytes())
}

/// Checks that the disk of this export may have that size.
pub(crate) fn check_block_size(spec: &ExportSpec, size_bytes: u64) -> Result<()> {
    match spec.block_size {
        Some(block) if !size_bytes.is_multiple_of(u64::from(block)) => Err(Error::invalid(format!(
            "export {}: a disk of {size_bytes} bytes is no multiple of its block-size={block}",
            spec.name
        ))),
        _ => Ok(()),
    }
}

/// Opens the server of the rings of a disk.
fn disk_server(spec: &ExportSpec, disk: &Disk, queues: u16) -> Result<DiskServer> {
    let asked = spec.engine.unwrap_or_default();
    if asked == Engine::User {
        return Ok(DiskServer::User { reason: None });
    }
    if spec.limits.is_some() {
        // `check` has refused engine=kernel.
        let why = not_the_kernel(spec, "the kernel has no limits".to_owned());
        return Ok(DiskServer::User { reason: Some(why) });
    }
    match (kernel_engine::plan(spec, disk, queues), asked) {
        (Ok(plan), _) => Ok(DiskServer::Kernel(plan)),
        (Err(why), Engine::Auto) => Ok(DiskServer::User { reason: Some(not_the_kernel(spec, why)) }),
        (Err(why), _) => {
            Err(Error::unsupported(format!("export {} cannot be served by the kernel: {why}", spec.name)))
        }
    }
}

/// Logs the reason why the kernel does not serve an export, and returns it.
pub(crate) fn not_the_kernel(spec: &ExportSpec, why: String) -> String {
    tracing::info!("export {}: not served by the kernel: {why}", spec.name);
    why
}

/// Checks that the network interface still exists.
fn check_there(tap: &Tap) -> Result<()> {
    match tap.is_there() {
        true => Ok(()),
        false => Err(Error::not_found(format!(
            "interface {} is gone; remove its network, and add it again",
            tap.name()
        ))),
    }
}

/// Returns the number of queue pairs of an export of a network.
fn pairs(spec: &ExportSpec, tap: Option<&Arc<Tap>>, most: Option<u16>) -> Result<u16> {
    let most = most.unwrap_or(MAX_PAIRS).min(MAX_PAIRS);
    match spec.queues {
        Some(asked) if asked > most => Err(Error::invalid(format!(
            "export {}: queues={asked}, and its network has {most}; give that one more, or this one fewer",
            spec.name
        ))),
        Some(asked) => Ok(asked),
        None if tap.is_some_and(|tap| !tap.multi_queue()) => Ok(1),
        None => Ok(online_cpus().min(most)),
    }
}

/// Opens the server of the rings of a network device on a tap.
fn net_server(spec: &ExportSpec, tap: &Arc<Tap>, pairs: u16) -> Result<NetServer> {
    let by_us = |reason| Ok(NetServer::User { queues: tap.queues(pairs)?, reason });
    let asked = spec.engine.unwrap_or_default();
    if asked == Engine::User {
        return by_us(None);
    }
    if spec.limits.is_some() {
        // `check` has refused engine=kernel.
        return by_us(Some(not_the_kernel(spec, "the kernel has no limits".to_owned())));
    }
    match (kernel_engine::plan_net(spec, tap, pairs), asked) {
        (Ok(plan), _) => Ok(NetServer::Kernel(plan)),
        (Err(why), Engine::Auto) => by_us(Some(not_the_kernel(spec, why))),
        (Err(why), _) => {
            Err(Error::unsupported(format!("export {} cannot be served by the kernel: {why}", spec.name)))
        }
    }
}

fn open_socket(spec: &ExportSpec) -> Result<Socket> {
    check_one_place(spec)?;
    match (&spec.socket, spec.fd) {
        (Some(path), _) => listen(path, &spec.socket_access()),
        (None, Some(fd)) => adopt(fd),
        (None, None) => unreachable!("checked above"),
    }
}

fn online_cpus() -> u16 {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(n).unwrap_or(MAX_QUEUES).min(MAX_QUEUES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_as_many_queues_as_no_guest_exceeds_and_a_worker_for_each_cpu() {
        let filled = |workers, engine, queues| {
            let mut spec = ExportSpec { workers, engine, queues, ..ExportSpec::default() };
            (fill_in_virtqueues(&mut spec), spec.queues, spec.workers)
        };
        let (most, cpus) = (MAX_QUEUES, online_cpus());
        assert_eq!(filled(Spread::Default, None, None), (most, Some(most), Spread::Default));
        assert_eq!(filled(Spread::PerQueue, None, None), (most, Some(most), Spread::Count(u32::from(cpus))));
        assert_eq!(filled(Spread::Count(3), None, None), (most, Some(most), Spread::Count(3)));
        assert_eq!(filled(Spread::PerQueue, None, Some(7)), (7, Some(7), Spread::PerQueue));
        assert_eq!(filled(Spread::PerCpu, None, None), (cpus, Some(cpus), Spread::PerCpu));
        for engine in [Engine::Kernel, Engine::Auto] {
            assert_eq!(filled(Spread::PerQueue, Some(engine), None).0, cpus);
        }
    }
}
