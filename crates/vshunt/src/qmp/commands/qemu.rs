//! Commands of QEMU's storage daemon, with its arguments and defaults. They work on disks and
//! exports.
//!
//! A command fails if it has a member of QEMU that changes what the guest sees and that is not
//! supported here. Members that select parts of QEMU (`aio`) are accepted without effect. Defaults
//! differ from those of `disk-add` and `export-add` where QEMU's do: `writable` is false,
//! `num-queues` is 1, `logical-block-size` is 512. There is one exception: without `cache.direct`,
//! the page cache is bypassed where possible. Guests see no difference.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use vshunt_types::spec::{
    AllowOther, Cache, Direct, DiskInfo, DiskSpec, ExportKind, ExportSpec, Format, Passthrough, Transport,
    Workers,
};

use super::nbd_server::NbdServer;
use crate::qmp::context::{Answer, Arguments, Context, Nothing, done};
use crate::qmp::message::QmpError;

/// Arguments of `blockdev-add` for the help.
pub(crate) const BLOCKDEV_ADD: &str = "driver: raw|qcow2|file|host_device|nbd|null-co|ram, node-name \
     [filename | server export reconnect-delay open-timeout | file: {…}] [size read-only cache: {direct no-flush} cache-size locking writethrough backing: null]";

/// Arguments of `block-export-add` for the help.
pub(crate) const BLOCK_EXPORT_ADD: &str = "type: vhost-user-blk, id node-name addr: {type: unix, path} \
     [writable num-queues logical-block-size workers serial poll-us memory-may-block]; or type: fuse, id node-name mountpoint \
     [writable growable allow-other num-queues workers transport passthrough poll-us]";

/// The error for a file descriptor number.
pub(crate) const NO_FD: &str = "a file descriptor cannot be named over the control socket; \
     give a socket's path, or pass fd=N to `vshunt serve --export`";

/// The size of null-co if none is given, in bytes (QEMU: 1 GiB).
const NULL_SIZE_DEFAULT: u64 = 1 << 30;

fn refuse<T>(why: impl Into<String>) -> Result<T, QmpError> {
    Err(QmpError::generic(why))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Driver {
    #[serde(rename = "raw")]
    Raw,
    #[serde(rename = "qcow2")]
    Qcow2,
    #[serde(rename = "file")]
    File,
    #[serde(rename = "host_device")]
    HostDevice,
    #[serde(rename = "null-co", alias = "null-aio")]
    Null,
    #[serde(rename = "ram")]
    Ram,
    #[serde(rename = "nbd")]
    Nbd,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct CacheMembers {
    /// Whether the page cache is bypassed.
    direct: Option<bool>,
    /// Whether flushes complete at once.
    no_flush: Option<bool>,
}

/// Values of QEMU: on, off, auto. `on` has the effect that QEMU gives to `auto`: lock where the
/// system supports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OnOffAuto {
    On,
    Off,
    Auto,
}

/// A node of QEMU's graph. `raw` over a protocol node is one disk here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Node {
    /// The format, or the kind of file. For a file, exactly one of `filename` and `file` names it.
    driver: Driver,
    /// The name of the disk. Required.
    node_name: Option<String>,
    /// The path of the image.
    filename: Option<PathBuf>,
    /// For `raw` and `qcow2`: the node of the file, written here as an object: `file`,
    /// `host_device` or `nbd`. A name of another node is refused.
    file: Option<Child>,
    /// For `nbd`: `{"type": "inet", "host": HOST, "port": PORT}` or
    /// `{"type": "unix", "path": SOCKET}`.
    server: Option<Value>,
    /// For `nbd`: the name of the export. Absent: the server's default export.
    export: Option<String>,
    /// For `nbd`: the key of a disk of that name.
    reconnect_delay: Option<u32>,
    /// For `nbd`: the key of a disk of that name.
    open_timeout: Option<u32>,
    /// Refused: use `disk-add` with `uri` `nbds://`.
    tls_creds: Option<String>,
    /// For `null-co` (absent: 1 GiB) and `ram`: bytes. A file has its own size.
    size: Option<u64>,
    /// Whether writes are refused. Absent: false.
    read_only: Option<bool>,
    /// Only false is accepted.
    auto_read_only: Option<bool>,
    /// `direct` is the key `direct` of a disk; `no-flush` is `cache=unsafe`.
    cache: Option<CacheMembers>,
    /// `off` is `locking=off` of a disk.
    locking: Option<OnOffAuto>,
    /// Only `unmap` and `on` are accepted: discards are always passed on.
    discard: Option<String>,
    /// Only `off` is accepted.
    detect_zeroes: Option<String>,
    /// For `qcow2`: null for an overlay that waits for `blockdev-snapshot`. Absent: the image names
    /// its backing file.
    #[serde(default, deserialize_with = "said")]
    backing: Option<Value>,
    /// For `qcow2`: bytes of memory for the cluster map. An addition to QEMU's members.
    cache_size: Option<u64>,
    /// True is `cache=writethrough` of a disk. An addition to QEMU's members.
    writethrough: Option<bool>,
    /// Accepted without effect: all disks use io_uring.
    #[serde(rename = "aio")]
    _aio: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Child {
    Name(String),
    Node(Box<Node>),
}

/// Reads a member that is present, also if it is `null`.
fn said<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

impl Node {
    /// Returns whether it is an overlay whose backing image is not set yet.
    fn is_overlay(&self) -> Result<bool, QmpError> {
        match &self.backing {
            None => Ok(false),
            Some(_) if self.driver != Driver::Qcow2 => refuse("'backing' belongs to driver qcow2 only"),
            Some(Value::Null) => Ok(true),
            Some(_) => refuse(
                "nodes do not stack here: leave 'backing' out, and the image itself names its backing image; null is for an \
                 overlay that waits for blockdev-snapshot",
            ),
        }
    }

    /// Refuses members of a server in a node of another driver.
    fn check_driver(&self) -> Result<(), QmpError> {
        if self.tls_creds.is_some() {
            return refuse("'tls-creds' is not possible: use disk-add with uri nbds://…");
        }
        let of_nbd = [
            ("server", self.server.is_some()),
            ("export", self.export.is_some()),
            ("reconnect-delay", self.reconnect_delay.is_some()),
            ("open-timeout", self.open_timeout.is_some()),
        ];
        match (self.driver, of_nbd.iter().find(|(_, given)| *given)) {
            (Driver::Nbd, _) if self.filename.is_some() => {
                refuse("'filename' belongs to drivers of files: leave it out")
            }
            (Driver::Nbd, _) if self.server.is_none() => refuse("'server' is missing"),
            (Driver::Nbd, _) | (_, None) => Ok(()),
            (_, Some((name, _))) => refuse(format!(
                "'{name}' belongs to driver nbd only: for qcow2, give it in 'file': {{\"driver\": \"nbd\", …}}"
            )),
        }
    }

    /// Returns the URI of a node on a server.
    fn uri(&self) -> Result<Option<String>, QmpError> {
        let Some(server) = &self.server else { return Ok(None) };
        match serde_json::from_value::<NbdServer>(server.clone()) {
            Ok(server) => Ok(Some(server.uri(self.export.as_deref().unwrap_or_default()))),
            Err(e) => refuse(format!("'server': {e}")),
        }
    }

    fn into_disk(self) -> Result<DiskSpec, QmpError> {
        let Some(name) = self.node_name.clone() else {
            return refuse("'node-name' is missing; the disk's name is taken from it");
        };
        let node = self.with_child()?;
        if node.auto_read_only == Some(true) {
            return refuse("'auto-read-only' is not possible; use read-only");
        }
        if !matches!(node.discard.as_deref(), None | Some("unmap" | "on")) {
            return refuse("discards are always passed on; leave 'discard' out or set it to unmap");
        }
        if !matches!(node.detect_zeroes.as_deref(), None | Some("off")) {
            return refuse("'detect-zeroes' is not possible; leave it out");
        }
        let (format, size) = match node.driver {
            Driver::Null => (Format::Null, Some(node.size.unwrap_or(NULL_SIZE_DEFAULT))),
            Driver::Ram => (Format::Ram, node.size),
            Driver::Nbd => (Format::Nbd, node.size),
            Driver::Qcow2 if node.server.is_some() => (Format::Qcow2, node.size),
            _ if node.filename.is_none() => return refuse("'filename' is missing"),
            _ if node.size.is_some() => return refuse("a file has its own size; leave 'size' out"),
            Driver::Qcow2 => (Format::Qcow2, None),
            _ => (Format::Raw, None),
        };
        if node.cache_size.is_some() && format != Format::Qcow2 {
            return refuse("'cache-size' belongs to driver qcow2 only");
        }
        let cache = node.cache.unwrap_or_default();
        let uri = node.uri()?;
        Ok(DiskSpec {
            name,
            format: Some(format),
            file: node.filename,
            uri,
            reconnect_delay: node.reconnect_delay,
            open_timeout: node.open_timeout,
            size,
            readonly: node.read_only.unwrap_or(false),
            direct: match cache.direct {
                Some(true) => Direct::On,
                Some(false) => Direct::Off,
                None => Direct::Auto,
            },
            cache: match (cache.no_flush, node.writethrough) {
                (Some(true), Some(true)) => {
                    return refuse("'no-flush' and 'writethrough' exclude each other");
                }
                (Some(true), _) => Cache::Unsafe,
                (_, Some(true)) => Cache::Writethrough,
                _ => Cache::Writeback,
            },
            locking: node.locking != Some(OnOffAuto::Off),
            cache_size: node.cache_size,
        })
    }

    /// Merges the protocol node under `raw` or `qcow2` into this node. It inherits the members that
    /// it does not have.
    fn with_child(mut self) -> Result<Self, QmpError> {
        self.check_driver()?;
        if let Some(Child::Node(child)) = &self.file {
            child.check_driver()?;
        }
        match (self.driver, self.file.take()) {
            (_, None) => Ok(self),
            (_, Some(Child::Node(child))) if child.backing.is_some() => {
                refuse("'backing' belongs to the node of driver qcow2 itself, not into its 'file'")
            }
            (Driver::Raw, Some(Child::Node(child))) if self.filename.is_some() || child.file.is_some() => {
                refuse("'file' of driver raw must be the one node that names a file or null-co")
            }
            (Driver::Qcow2, Some(Child::Node(child)))
                if self.filename.is_some()
                    || child.file.is_some()
                    || !matches!(child.driver, Driver::File | Driver::HostDevice | Driver::Nbd) =>
            {
                refuse("'file' of driver qcow2 must be the one node that names a file, or one of nbd")
            }
            (driver @ (Driver::Raw | Driver::Qcow2), Some(Child::Node(child))) => {
                let child = *child;
                let inherited = self.cache.unwrap_or_default();
                let cache = child.cache.unwrap_or_default();
                Ok(Self {
                    driver: if driver == Driver::Qcow2 { driver } else { child.driver },
                    cache_size: self.cache_size,
                    read_only: self.read_only.or(child.read_only),
                    auto_read_only: self.auto_read_only.or(child.auto_read_only),
                    cache: Some(CacheMembers {
                        direct: cache.direct.or(inherited.direct),
                        no_flush: cache.no_flush.or(inherited.no_flush),
                    }),
                    size: self.size.or(child.size),
                    locking: child.locking.or(self.locking),
                    discard: child.discard.or(self.discard),
                    detect_zeroes: self.detect_zeroes.or(child.detect_zeroes),
                    writethrough: self.writethrough.or(child.writethrough),
                    ..child
                })
            }
            (Driver::Raw | Driver::Qcow2, Some(Child::Name(name))) => refuse(format!(
                "nodes do not stack here: give the members of {name} inside 'file', or export {name} itself"
            )),
            (_, Some(_)) => refuse("'file' belongs to drivers raw and qcow2 only"),
        }
    }
}

pub(crate) fn blockdev_add(context: &Context, arguments: Arguments) -> Answer {
    let node = arguments.read::<Node>()?;
    let overlay = node.is_overlay()?;
    let disk = node.into_disk()?;
    let file = disk.file.map(|file| context.fdsets.resolve(file, !disk.readonly)).transpose()?;
    let disk = DiskSpec { file, ..disk };
    let added = if overlay { context.daemon.overlay_add(disk) } else { context.daemon.disk_add(disk) };
    Ok(done(added?))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct NodeName {
    /// The name of the disk.
    node_name: String,
}

pub(crate) fn blockdev_del(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.disk_remove(&arguments.read::<NodeName>()?.node_name)?))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Resize {
    /// The name of the disk.
    node_name: String,
    /// The new size in bytes, a multiple of 512 and of the block size of each export.
    size: u64,
}

pub(crate) fn block_resize(context: &Context, arguments: Arguments) -> Answer {
    let Resize { node_name, size } = arguments.read()?;
    Ok(done(context.daemon.disk_resize(&node_name, size)?))
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum Address {
    Unix { path: PathBuf },
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockExport {
    /// `vhost-user-blk` or `fuse`. Networks are exported by `export-add`.
    #[serde(rename = "type")]
    kind: ExportKind,
    /// The name of the export.
    id: String,
    /// The name of the disk.
    node_name: String,
    /// For `vhost-user-blk`, where it is required: `{"type": "unix", "path": SOCKET}`.
    addr: Option<Value>,
    /// For `fuse`: the regular file that is mounted over.
    mountpoint: Option<PathBuf>,
    /// For `fuse`: whether the size of the file can be changed.
    growable: Option<bool>,
    /// For `fuse`: whether other users may use the file.
    allow_other: Option<AllowOther>,
    /// For `fuse`: how requests come from the kernel. An addition to QEMU's members.
    transport: Option<Transport>,
    /// For `fuse`: whether the kernel may read and write the image itself. An addition to QEMU's
    /// members.
    passthrough: Option<Passthrough>,
    /// Whether the user may write.
    #[serde(default)]
    writable: bool,
    /// Accepted if the disk has `cache=writethrough`.
    #[serde(default)]
    writethrough: bool,
    /// The number of queues. Absent: 1 for `vhost-user-blk`, one for each CPU for `fuse`.
    num_queues: Option<u16>,
    /// For `vhost-user-blk`: the block size that the guest sees. Absent: 512.
    logical_block_size: Option<u32>,
    /// Refused: use `workers`, or `worker-new` and `queue-attach`.
    iothread: Option<Value>,
    /// Only false is accepted.
    #[serde(default)]
    fixed_iothread: bool,
    /// The workers that the export starts with. An addition to QEMU's members.
    #[serde(default)]
    workers: Workers,
    /// The serial number that the guest sees. An addition to QEMU's members.
    serial: Option<String>,
    /// The polling limit of the workers that are made for the export, in microseconds. An addition
    /// to QEMU's members.
    poll_us: Option<u32>,
    /// Whether guest memory may be in files of any file system. An addition to QEMU's members.
    memory_may_block: Option<bool>,
}

impl BlockExport {
    fn into_export(self, disks: &[DiskInfo]) -> Result<ExportSpec, QmpError> {
        if self.iothread.is_some() || self.fixed_iothread {
            return refuse("iothreads are workers here: set 'workers', or use worker-new and queue-attach");
        }
        let disk = disks.iter().find(|d| d.spec.name == self.node_name);
        if self.writethrough && disk.is_some_and(|d| d.spec.cache != Cache::Writethrough) {
            return refuse(format!(
                "'writethrough' belongs to the disk: add {} with \"writethrough\": true",
                self.node_name
            ));
        }
        let export = ExportSpec {
            kind: self.kind,
            name: self.id,
            disk: self.node_name,
            queues: self.num_queues,
            workers: self.workers,
            serial: self.serial,
            block_size: self.logical_block_size,
            poll_us: self.poll_us,
            memory_may_block: self.memory_may_block,
            mountpoint: self.mountpoint,
            growable: self.growable,
            allow_other: self.allow_other,
            transport: self.transport,
            passthrough: self.passthrough,
            ..Default::default()
        };
        match (self.kind, self.addr) {
            (ExportKind::Fuse, None) => Ok(ExportSpec { writable: Some(self.writable), ..export }),
            (ExportKind::Fuse, Some(_)) => {
                refuse("'addr' belongs to vhost-user-blk; a mount has a 'mountpoint'")
            }
            (ExportKind::Nbd, _) => refuse("an NBD server needs an address: use export-add with 'listen'"),
            (ExportKind::VhostUserNet | ExportKind::Uplink, _) => {
                refuse("a network is no block device: net-add and export-add serve one")
            }
            (ExportKind::VhostUserBlk, None) => refuse("'addr' is missing"),
            (ExportKind::VhostUserBlk, Some(addr)) => Ok(ExportSpec {
                socket: Some(socket(addr)?),
                readonly: !self.writable,
                queues: Some(self.num_queues.unwrap_or(1)),
                block_size: Some(self.logical_block_size.unwrap_or(512)),
                ..export
            }),
        }
    }
}

fn socket(addr: Value) -> Result<PathBuf, QmpError> {
    if addr["type"] == "fd" {
        return refuse(NO_FD);
    }
    match serde_json::from_value(addr) {
        Ok(Address::Unix { path }) => Ok(path),
        Err(e) => refuse(format!("'addr': {e}")),
    }
}

pub(crate) fn block_export_add(context: &Context, arguments: Arguments) -> Answer {
    let export = arguments.read::<BlockExport>()?.into_export(&context.daemon.disks())?;
    Ok(done(context.daemon.export_add(export)?))
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RemoveMode {
    #[default]
    Safe,
    Hard,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockExportDel {
    /// The name of the export.
    id: String,
    /// `hard` removes the export even if a front end is connected or the mounted file is open.
    #[serde(default)]
    mode: RemoveMode,
}

pub(crate) fn block_export_del(context: &Context, arguments: Arguments) -> Answer {
    let BlockExportDel { id, mode } = arguments.read()?;
    Ok(done(context.daemon.export_remove(&id, mode == RemoveMode::Hard)?))
}

pub(crate) fn query_block_exports(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    let info = |e: vshunt_types::spec::ExportInfo| json!({ "id": e.spec.name, "type": e.spec.kind, "node-name": e.spec.disk, "shutting-down": false });
    let of_disks = context.daemon.exports().into_iter().filter(|e| e.spec.net.is_none());
    Ok(of_disks.map(info).collect())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Flat {
    /// Accepted without effect: backing images are no nodes.
    #[serde(rename = "flat")]
    _flat: Option<bool>,
}

pub(crate) fn query_named_block_nodes(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Flat>()?;
    let nodes = context.daemon.disks().into_iter().chain(context.daemon.overlays());
    Ok(nodes.map(|disk| block_device_info(&disk)).collect())
}

/// Returns the members of QEMU's BlockDeviceInfo that exist here, except limits, which exports
/// have.
pub(super) fn block_device_info(disk: &DiskInfo) -> Value {
    let driver = match disk.spec.format() {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
        Format::Null => "null-co",
        Format::Ram => "ram",
        Format::Nbd => "nbd",
        // QEMU's driver with the same purpose.
        Format::Frozen => "snapshot-access",
    };
    let file = match &disk.spec.file {
        Some(path) => path.to_string_lossy().into_owned(),
        None => disk.spec.uri.clone().unwrap_or_else(|| format!("{driver}:")),
    };
    json!({
        "node-name": disk.spec.name,
        "drv": driver,
        "ro": disk.spec.readonly,
        "file": file,
        "cache": {
            "writeback": disk.spec.cache != Cache::Writethrough,
            "direct": disk.direct_in_use,
            "no-flush": disk.spec.cache == Cache::Unsafe,
        },
        "encrypted": false,
        "detect_zeroes": "off",
        "backing_file_depth": 0,
        "write_threshold": 0,
        "image": { "filename": file, "format": driver, "virtual-size": disk.size_bytes },
    })
}
