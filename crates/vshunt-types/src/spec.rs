//! Requests and states of disks, networks, exports and workers: plain data, the same in flags,
//! TOML, QMP and `--json`.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};

mod access;
mod balance;
mod drops;
mod idle;
mod job;
mod latency;
mod limits;
mod listen;
mod net;
mod port;

pub use access::{SocketAccess, SocketMode};
pub use balance::{BalanceDecision, BalanceInfo, BalanceMode, BalanceOutcome, ResizeDecision, ResizeOutcome};
pub use drops::{DROP_REASONS, DropReason, NetDrops};
pub use job::{
    BackupSpec, BitmapInfo, BitmapSpec, CopyMode, JobInfo, JobKind, JobStatus, MirrorSpec, OverlayJobSpec,
};
pub use latency::{LatencyFigures, LatencyInfo, LatencyMode};
pub use limits::{Burst, LIMIT_MAX, LimitKind, LimitsSpec};
pub use listen::ListenAddress;
pub use net::{
    AddressOrigin, Mac, NetAddress, NetCounters, NetInfo, NetKind, NetQueueCounters, NetSpec, Steering,
    text_or_number,
};
pub use port::{PortInfo, PortState, VLAN_MAX, Vlans};

/// Kind of image behind a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A file or a block device, byte for byte.
    #[default]
    Raw,
    /// A qcow2 image, with its chain of backing images.
    Qcow2,
    /// Discards writes and leaves read buffers unchanged, for measuring.
    Null,
    /// Memory of the daemon. It is lost when the daemon ends.
    Ram,
    /// An export of an NBD server.
    Nbd,
    /// Another disk as it was when a pull backup began. Only `backup-start` makes such a disk.
    Frozen,
}

/// Whether a disk bypasses the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// O_DIRECT where the file system supports it.
    #[default]
    Auto,
    /// O_DIRECT, or an error.
    On,
    /// Through the page cache.
    Off,
}

/// When a write is on stable storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// When the flush of the guest completes. The guest may switch to `writethrough` at run time.
    #[default]
    Writeback,
    /// When the write completes. The guest sees no write cache.
    Writethrough,
    /// At no defined time: flushes complete at once. A power failure loses data.
    Unsafe,
}

/// A disk: the backend of exports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskSpec {
    /// The name, unique among disks. Flags and configuration files may leave it out if there is a
    /// `file`: it is then the name of the file without its ending. With a `uri` it is `nbd`.
    pub name: String,
    /// The format. Absent: `raw`, or that of the `uri`. A file that begins as a qcow2 image is
    /// refused as `raw`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The path of the image, for `raw` and `qcow2`. A `qcow2` image on a server has a `uri`
    /// instead.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "shown_path")]
    pub file: Option<PathBuf>,
    /// The size in bytes, a multiple of 512, for `null` and `ram`. Files and servers have their
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Whether writes are refused and the image is opened read-only.
    #[serde(default)]
    pub readonly: bool,
    /// Whether the page cache is bypassed.
    #[serde(default)]
    pub direct: Direct,
    /// When a write is on stable storage.
    #[serde(default)]
    pub cache: Cache,
    /// Whether the image is locked, with the locks that QEMU uses. Switch it off only if the file
    /// system has no locks. Absent: true.
    #[serde(default = "yes")]
    pub locking: bool,
    /// For `qcow2`: bytes of memory for the cluster map. Absent: the map of the whole disk, at most
    /// 32 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_size: Option<u64>,
    /// For `nbd`: the server and its export, as `nbd://host:port/export` or
    /// `nbd+unix:///export?socket=/path`; `nbds` instead of `nbd` for TLS. Absent port: 10809.
    /// Bytes with a meaning in URIs are written as in `%2F`. For `qcow2`: the server that has the
    /// image, in the same way. The keys of `nbd` disks are for it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// For `nbd`: how long requests wait for a lost connection before they fail, in seconds (0 to
    /// 86400). Requests in flight are sent again. Absent: 0, they fail at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reconnect_delay: Option<u32>,
    /// For `nbd`: how long the server is tried again when the disk is added, in seconds (0 to
    /// 86400). Absent: 0, it is tried once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_timeout: Option<u32>,
}

impl DiskSpec {
    /// Kind of image.
    pub fn format(&self) -> Format {
        self.format.unwrap_or(if self.uri.is_some() { Format::Nbd } else { Format::Raw })
    }

    /// The file or URI of the image, for messages. Empty for memory.
    pub fn image(&self) -> String {
        let file = self.file.as_ref().map(|file| file.display().to_string());
        file.or_else(|| self.uri.clone()).unwrap_or_default()
    }
}

/// Writes a path as text. Bytes that are not UTF-8 become U+FFFD: one such name must not hide all
/// others from a list. A path that is sent to a daemon must be UTF-8.
fn shown_path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_deref().map(Path::to_string_lossy).serialize(serializer)
}

fn yes() -> bool {
    true
}

/// The workers that an export starts with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    expecting = "workers: default, per-queue, per-cpu, auto or a number is wanted"
)]
pub enum Workers {
    /// Worker 0, for all queues.
    #[default]
    Default,
    /// A new worker for each queue.
    PerQueue,
    /// A new worker for each queue, pinned to one CPU: CPU 0 for queue 0, and so on in turn.
    PerCpu,
    /// One new worker, and more while they pay: at most one for each CPU.
    Auto,
    /// This number of new workers; the queues are distributed in turn.
    #[serde(untagged)]
    Count(u32),
}

/// Kind of device an export is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExportKind {
    /// A disk for a VMM, over a UNIX socket.
    #[default]
    VhostUserBlk,
    /// A network device for a VMM, over a UNIX socket.
    VhostUserNet,
    /// A disk as a file of the host.
    Fuse,
    /// A tap as a port of a switch.
    Uplink,
    /// A disk for NBD clients.
    Nbd,
}

impl ExportKind {
    /// Returns the kind of limits that such an export can have. `None`: it can have none.
    pub fn limits(self) -> Option<LimitKind> {
        match self {
            Self::VhostUserBlk | Self::Fuse | Self::Nbd => Some(LimitKind::Disk),
            Self::VhostUserNet => Some(LimitKind::Network),
            Self::Uplink => None,
        }
    }
}

/// What serves the requests of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Workers of the daemon.
    #[default]
    User,
    /// The kernel (`/dev/vhost-blk`, `/dev/vhost-net`), or an error.
    Kernel,
    /// The kernel where it can, otherwise workers of the daemon.
    Auto,
}

/// What runs a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerKind {
    /// A thread of the daemon.
    #[default]
    User,
    /// A task of the kernel, for one export.
    Kernel,
}

/// Whether users other than the daemon's may use a mounted file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AllowOther {
    /// Only the user of the daemon may use it; not even root.
    Off,
    /// The permissions of the file decide, or an error.
    On,
    /// `on` where the system allows it (root, or `user_allow_other` in /etc/fuse.conf), otherwise
    /// `off`.
    #[default]
    Auto,
}

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// `io_uring` where it works, otherwise `dev`.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// Descriptors of /dev/fuse, one for each queue.
    #[serde(rename = "dev")]
    Dev,
    /// A ring queue for each CPU.
    #[serde(rename = "io_uring", alias = "io-uring")]
    IoUring,
}

/// Whether the kernel may read and write the image itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Passthrough {
    /// Where it can.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// An export: a device as its user sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ExportSpec {
    /// The kind of device.
    #[serde(rename = "type")]
    pub kind: ExportKind,
    /// The name, unique among exports. Flags and configuration files may leave it out: it is then
    /// that of the disk, tap or network.
    pub name: String,
    /// vhost-user-blk, fuse, nbd: the name of the disk.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub disk: String,
    /// vhost-user-net: the name of the network. uplink: the name of the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<String>,
    /// uplink: the name of the network that is the tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// vhost-user: the path to listen on. The socket is made, and removed at the end. Exclusive
    /// with `fd`.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "shown_path")]
    pub socket: Option<PathBuf>,
    /// vhost-user: an inherited socket. It listens (socket activation), or it is connected and the
    /// export ends with its peer. Not over the control socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<RawFd>,
    /// nbd: where clients connect: `unix:PATH`, `ADDRESS:PORT`, or `PORT` of 127.0.0.1. A UNIX
    /// socket is made, and removed at the end. Without TLS, every client that reaches a TCP port
    /// may use the export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<ListenAddress>,
    /// nbd: TLS, which every client then has to use. A folder with `server-cert.pem`,
    /// `server-key.pem`, `ca-cert.pem`, and `ca-crl.pem` if certificates were revoked. They are
    /// read when the export is added.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "shown_path")]
    pub tls_certificates: Option<PathBuf>,
    /// nbd, with `tls-certificates`: whether a client has to show a certificate that the authority
    /// of `ca-cert.pem` has signed. Absent: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_verify_peer: Option<bool>,
    /// vhost-user, nbd: the user, by name or number, that owns the socket. Absent: that of the
    /// daemon. Not with `fd`, nor for a TCP port.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "net::text_or_number")]
    pub owner: Option<String>,
    /// vhost-user, nbd: the group, by name or number, of the socket. Absent: that of the daemon.
    /// Not with `fd`, nor for a TCP port.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "net::text_or_number")]
    pub group: Option<String>,
    /// vhost-user, nbd: the mode of the socket in octal digits, as a string: `0600`, `0660`, `0606`
    /// or `0666`. Absent: `0660` if `group` is given, otherwise the umask of the daemon decides.
    /// Not with `fd`, nor for a TCP port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<SocketMode>,
    /// The number of queues: virtqueues (1 to 256), queue pairs of a network device (1 to 128),
    /// queues of an uplink's tap, or connections of NBD clients (1 to 256). Absent: 16
    /// connections; 256 virtqueues of a disk, but one for each CPU with `workers=per-cpu` or the
    /// kernel engine; one for each CPU for all other exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// The workers that the export starts with: `default`, `per-queue`, `per-cpu`, `auto` or a
    /// number. With `per-cpu` a worker does not poll unless `poll-us` is given. `per-queue` makes
    /// one for each CPU if `queues` is absent and 256 virtqueues are offered. `auto` starts with
    /// one worker, makes more while they pay, at most one for each CPU, and ends those that are
    /// not needed; `balance` is `auto` then.
    #[serde(default)]
    pub workers: Workers,
    /// vhost-user-blk: whether writes of the guest are refused. They are always refused for a
    /// read-only disk.
    #[serde(default)]
    pub readonly: bool,
    /// vhost-user-blk: the serial number that the guest sees, at most 20 bytes. Absent: the name of
    /// the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// vhost-user-blk: the logical block size that the guest sees, a power of two from 512 to 4096.
    /// Absent: the smallest that the disk supports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// The polling limit of the workers that are made for this export, in microseconds. Absent:
    /// that of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_us: Option<u32>,
    /// vhost-user-blk, fuse, nbd: whether the service times of requests are measured. Absent:
    /// `sampled`. It has no effect on requests that the kernel serves (`engine=kernel`,
    /// passthrough).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyMode>,
    /// vhost-user-net: the address of the guest, for front ends that ask for it. Absent: the front
    /// end or the guest chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// vhost-user-net on a switch: whether the port drops frames whose source is not `mac`. Absent:
    /// true if `mac` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_filter: Option<bool>,
    /// On a switch: how many addresses are learnt behind the port, 1 to 8192. At the limit an old
    /// address of the port is forgotten. Absent: 256; for an uplink 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_limit: Option<u32>,
    /// On a switch: the VLAN, 1 to 4094, whose frames are untagged at the port. Frames of other
    /// VLANs are dropped unless `trunk` contains them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// On a switch: the VLANs whose frames are tagged at the port, for example `1,2,10-20`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "Vlans::deserialize")]
    pub trunk: Option<Vlans>,
    /// On a switch: whether frames between this port and other isolated ports are dropped. Absent:
    /// false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// On a switch: whether frames to 01:80:c2:00:00:00 to 0f (STP, PAUSE, LACP, 802.1X, LLDP) pass
    /// between ports that both have this key. Absent: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<bool>,
    /// vhost-user-net, uplink: bytes of the longest IP packet. A tap gets this MTU; a port of a
    /// switch drops longer packets. Absent: the MTU of the tap; on a switch 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// vhost-user: what serves the requests. Absent: `user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// vhost-user: whether guest memory may be in files of any file system. If that file system
    /// does not answer, a worker waits with all its queues. Absent: memfd, tmpfs and hugetlbfs
    /// only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_may_block: Option<bool>,
    /// fuse: the regular file that is mounted over. A missing file is made, and removed at the end.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "shown_path")]
    pub mountpoint: Option<PathBuf>,
    /// fuse, nbd: whether the disk can be written. Absent: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable: Option<bool>,
    /// fuse: whether writes beyond the end and truncation change the size. Absent: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growable: Option<bool>,
    /// fuse: whether other users may use the file. Absent: `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_other: Option<AllowOther>,
    /// fuse: how requests come from the kernel. Absent: `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// fuse: whether the kernel may read and write the image itself. Absent: `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passthrough: Option<Passthrough>,
    /// vhost-user-blk, fuse, nbd: limits of operations and bytes per second. vhost-user-net: of
    /// packets and bytes per second. They can be changed at run time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSpec>,
    /// vhost-user, uplink, nbd: whether queues are moved to less busy workers: `off`, `auto` or
    /// `dry-run`. It can be changed at run time. Absent: the setting of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<BalanceMode>,
}

impl ExportSpec {
    /// Returns the name of the disk or network that it serves.
    pub fn of(&self) -> &str {
        self.net.as_deref().unwrap_or(&self.disk)
    }

    /// Returns the path of the UNIX socket that the daemon makes for it.
    pub fn socket_path(&self) -> Option<&Path> {
        match &self.listen {
            Some(ListenAddress::Unix(path)) => Some(path),
            _ => self.socket.as_deref(),
        }
    }

    /// Returns where users find it: an address, a path, a descriptor or a tap.
    pub fn place(&self) -> Option<String> {
        let path = self.socket.as_ref().or(self.mountpoint.as_ref());
        let listen = self.listen.as_ref().map(ToString::to_string);
        let named = listen.or_else(|| path.map(|path| path.display().to_string()));
        named.or_else(|| self.fd.map(|fd| format!("fd {fd}"))).or_else(|| self.tap.clone())
    }

    /// Replaces each of its paths by what `f` returns for it.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map_paths<E>(&mut self, mut f: impl FnMut(PathBuf) -> Result<PathBuf, E>) -> Result<(), E> {
        let listen = match &mut self.listen {
            Some(ListenAddress::Unix(path)) => Some(path),
            _ => None,
        };
        let paths = [&mut self.socket, &mut self.mountpoint, &mut self.tls_certificates];
        for path in paths.into_iter().flatten().chain(listen) {
            *path = f(std::mem::take(path))?;
        }
        Ok(())
    }

    /// Returns who may connect to its socket.
    pub fn socket_access(&self) -> SocketAccess {
        SocketAccess { owner: self.owner.clone(), group: self.group.clone(), mode: self.mode }
    }

    /// Returns whether writes are refused even if the disk permits them.
    pub fn refuses_writes(&self) -> bool {
        match self.kind {
            ExportKind::VhostUserBlk => self.readonly,
            ExportKind::VhostUserNet | ExportKind::Uplink => false,
            ExportKind::Fuse | ExportKind::Nbd => !self.writable.unwrap_or(false),
        }
    }
}

/// A worker that is made, or the changes of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct WorkerSpec {
    /// What runs the worker. Absent: `user`. It cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<WorkerKind>,
    /// For `kind=kernel`: the export whose queues the worker can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// The name in lists. The thread keeps the name that the worker was made with, cut to 15 bytes.
    /// Absent: `worker-ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The CPUs that the worker may run on. An empty list: all CPUs of the daemon, which is also
    /// the default of a new worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Vec<usize>>,
    /// The nice value, -20 to 19. Absent: that of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nice: Option<i32>,
    /// The limit of adaptive polling in microseconds. 0: never poll. Absent: that of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_us: Option<u32>,
}

/// A disk in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskInfo {
    /// The keys that the disk was added with.
    #[serde(flatten)]
    pub spec: DiskSpec,
    /// The present size in bytes.
    pub size_bytes: u64,
    /// Whether the page cache is bypassed (O_DIRECT).
    pub direct_in_use: bool,
    /// How requests reach the disk: `ring`, operations on the io_uring of the worker; `inline`, a
    /// file in memory (tmpfs, hugetlbfs) that the worker copies at once; `memory`, a `ram` disk;
    /// `frozen`, those of two other disks; `none`, a `null` disk.
    pub path: String,
    /// Of a disk, or an image, on an NBD server: its connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionsInfo>,
    /// The exports that use it.
    pub exports: Vec<String>,
    /// The job that reads or writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Its dirty bitmaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
}

/// The connections of a disk to its NBD server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ConnectionsInfo {
    /// How many workers have a connection of their own. A worker asks for it with its eighth
    /// request.
    pub own: u32,
    /// How many workers have none, and send their requests by the connection that all share.
    /// Commands that read or write the disk count, too.
    pub sharing: u32,
    /// Whether the connection that all share is there. Otherwise requests of workers without their
    /// own wait or fail, as `reconnect-delay` says.
    pub shared: bool,
    /// Why workers share: what the server did at the last try for a further connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// A worker in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct WorkerInfo {
    /// The id. It is not used again while the daemon lives.
    pub id: u32,
    /// The name.
    pub name: String,
    /// What runs the worker. A kernel worker is a thread of the daemon, too; it does not poll.
    pub kind: WorkerKind,
    /// Of a kernel worker: the export whose queues it can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// The thread id.
    pub tid: i32,
    /// The CPUs that it may run on.
    pub cpu: Vec<usize>,
    /// The nice value.
    pub nice: i32,
    /// The limit of adaptive polling in microseconds.
    pub poll_us: u32,
    /// Its queues, as `export:index`.
    pub queues: Vec<String>,
    /// The CPU time used, in microseconds.
    pub cpu_time_us: u64,
    /// The time in which it handled requests or messages, in microseconds. Waits for a CPU or in
    /// the kernel meanwhile are part of it. Of a kernel worker: its CPU time.
    #[serde(default)]
    pub busy_us: u64,
    /// The time in which it polled, in microseconds: it looked for requests again and again. 0 for
    /// a kernel worker.
    #[serde(default)]
    pub polling_us: u64,
    /// The time in which it slept, in microseconds, with the system calls that sleep and wake up.
    /// The three times add up to that since the worker was made.
    #[serde(default)]
    pub sleeping_us: u64,
    /// How often it slept.
    pub sleeps: u64,
    /// The requests that completed while their queue was attached here.
    pub requests: u64,
    /// Whether it has work and has not run for one second, because it waits in the kernel or gets
    /// no CPU. Its queues stand still. Never true for a kernel worker.
    #[serde(default)]
    pub stalled: bool,
}

/// A queue in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct QueueInfo {
    /// The name of the export.
    pub export: String,
    /// The index within the export. Queue N of a network device is the pair of receive ring 2N and
    /// transmit ring 2N + 1.
    pub index: u16,
    /// The id of the worker that it is attached to.
    pub worker: u32,
    /// `stopped`: the guest does not use it. `running`. `broken`: the guest misused it, and it
    /// stops until the guest resets it; or the tap of the device or uplink is missing, and the
    /// export and its network have to be removed and added again.
    pub state: String,
    /// Descriptors of the ring, as of its last start; 0 before the first. Of a mount or an NBD
    /// connection: requests that can be in flight.
    pub size: u16,
    /// Whether the ring is a packed virtqueue.
    pub packed: bool,
    /// Requests that are taken and not completed.
    pub in_flight: u32,
    /// How often it was started, or moved while it ran.
    pub generation: u32,
    /// Requests completed since the export was added; for a network frames. With `engine=kernel`
    /// the counters of a network device are 0, because the kernel does not report them.
    pub requests: u64,
    /// Reads among them. 0 for a network, and with `engine=kernel`.
    #[serde(default)]
    pub reads: u64,
    /// Writes among them.
    #[serde(default)]
    pub writes: u64,
    /// Flushes among them; of a mount, fsync.
    #[serde(default)]
    pub flushes: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Bytes that the guest read.
    pub read_bytes: u64,
    /// Bytes that the guest wrote.
    pub write_bytes: u64,
    /// Kicks of the guest that were seen. Of a mount: how often a channel was woken. Of an NBD
    /// connection: how often something was received.
    pub kicks: u64,
    /// Notifications sent to the guest. Of a mount: replies. Of an NBD connection: messages with
    /// replies.
    pub notifications: u64,
    /// How long the queue waited for its limits, in microseconds. Both directions of a queue pair
    /// add to it.
    #[serde(default)]
    pub limited_us: u64,
    /// Whether it waits for its limits now.
    #[serde(default)]
    pub limited: bool,
    /// vhost-user-net, uplink: frames in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<NetQueueCounters>,
    /// vhost-user-blk, fuse, nbd: service times since the export was added. Absent before the first
    /// start of the queue, with `latency=off` and with `engine=kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_times: Option<LatencyInfo>,
}

impl QueueInfo {
    /// Queues of one export that never started are shown one by one up to this number.
    pub const IDLE_SHOWN: usize = 8;

    /// Returns whether the guest has started the queue, or tried to, since the export was added.
    pub fn has_started(&self) -> bool {
        self.size > 0 || self.state != "stopped"
    }
}

/// An export in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportInfo {
    /// The keys that the export was added with.
    #[serde(flatten)]
    pub spec: ExportSpec,
    /// What serves the requests: `user` or `kernel`.
    pub engine: Engine,
    /// With `engine=auto`: why it is not `kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_reason: Option<String>,
    /// Whether a front end or a client is connected, or the file is mounted.
    pub connected: bool,
    /// Whether the front end that is connected has ended or closed the connection. The export is
    /// free for the next one when the requests in flight have ended.
    #[serde(default)]
    pub leaving: bool,
    /// Whether it is being removed. Its users are disconnected, and it ends with its last request.
    #[serde(default)]
    pub removing: bool,
    /// The virtio features, or the flags of FUSE INIT, that were negotiated, by name. nbd: the
    /// flags that clients are offered.
    pub features: Vec<String>,
    /// fuse: how it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountInfo>,
    /// On a switch: its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<PortInfo>,
    /// How its queues follow load. Absent if they do not, and never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balancing: Option<BalanceInfo>,
    /// With limits: the longest time in milliseconds for which they hold back the first request of
    /// a queue, if all queues of the export have requests of the longest kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_ms_max: Option<u64>,
    /// vhost-user-blk, fuse, nbd: service times of all queues together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_times: Option<LatencyInfo>,
    /// Its queues.
    pub queue_list: Vec<QueueInfo>,
    /// The number of queues that `query-exports` left out with `started-only`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub queues_left_out: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Formats CPU numbers, which ascend, like taskset: `0-3,6`.
pub fn cpu_list(cpus: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let text = |&(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// A mount in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MountInfo {
    /// `dev` or `io_uring`.
    pub transport: Transport,
    /// With `transport=auto`: why it is not `io_uring`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport_reason: Option<String>,
    /// Whether the kernel reads and writes the image itself.
    pub passthrough: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passthrough_reason: Option<String>,
    /// Whether other users may use the file.
    pub allow_other: bool,
    /// How often the file is open.
    pub open_files: u32,
    /// With `io_uring`: idle entries that are still with former workers of the queues. These
    /// workers forward the requests that come with them. The thread of a freed worker ends when
    /// none of these entries is its own.
    #[serde(default)]
    pub forwarded_entries: u32,
}
