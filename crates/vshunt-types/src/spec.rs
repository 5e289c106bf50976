//! What users ask for and what they are told: plain data, the same in flags, TOML, QMP and `--json`.

use std::os::fd::RawFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

mod drops;
mod job;
mod net;
mod port;

pub use drops::{DROP_REASONS, DropReason, NetDrops};
pub use job::{BackupSpec, BitmapInfo, BitmapSpec, JobInfo, JobKind, JobStatus};
pub use net::{
    AddressOrigin, Mac, NetAddress, NetCounters, NetInfo, NetKind, NetQueueCounters, NetSpec, Steering,
};
pub use port::{PortInfo, PortState, VLAN_MAX, Vlans};

/// Kind of image behind a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A file or block device, byte for byte.
    #[default]
    Raw,
    /// A qcow2 image, with those that it stands on.
    Qcow2,
    /// Discards writes, reads nothing (the guest's buffer stays as it is): for measuring.
    Null,
    /// Memory of the daemon; gone with it.
    Ram,
}

/// Whether the page cache is passed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// O_DIRECT where the file system has it.
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
    /// When the guest's flush completes; the guest may switch to the next at run time.
    #[default]
    Writeback,
    /// When the write completes; the guest is told that there is no cache.
    Writethrough,
    /// Never waited for: flushes complete at once. Data is lost with the host's power.
    Unsafe,
}

/// A disk: the backend of exports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskSpec {
    /// Unique among disks.
    pub name: String,
    /// Kind of image; `raw` if nothing is said, which an image that begins as qcow2 is not opened as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The image; `raw` needs it, the others have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Bytes, a multiple of 512; needed by `null` and `ram`. `raw` takes it from the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Refuse writes, open the image read-only.
    #[serde(default)]
    pub readonly: bool,
    /// Whether the page cache is passed by.
    #[serde(default)]
    pub direct: Direct,
    /// When a write is on stable storage.
    #[serde(default)]
    pub cache: Cache,
    /// Lock the image as QEMU does; off only where the file system cannot.
    #[serde(default = "yes")]
    pub locking: bool,
    /// Of a qcow2 disk: bytes of memory for the map of where its clusters lie. What the whole disk needs, 32 MiB at most, if
    /// nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_size: Option<u64>,
}

impl DiskSpec {
    /// Kind of image.
    pub fn format(&self) -> Format {
        self.format.unwrap_or_default()
    }
}

fn yes() -> bool {
    true
}

/// On how many workers an export starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workers {
    /// All queues on worker 0.
    #[default]
    Default,
    /// A new worker for each queue.
    PerQueue,
    /// A new worker for each queue, kept on one CPU: queue 0's on CPU 0 and so on, in turn.
    PerCpu,
    /// So many new workers, queues dealt out in turn.
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
    /// A network card for a VMM, over a UNIX socket.
    VhostUserNet,
    /// A file on the host.
    Fuse,
    /// A tap that is a port of a switch.
    Uplink,
}

/// Who serves an export's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Workers of this process.
    #[default]
    User,
    /// The kernel (`/dev/vhost-blk`, `/dev/vhost-net`), or an error.
    Kernel,
    /// The kernel where it can.
    Auto,
}

/// Who runs a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerKind {
    /// This process.
    #[default]
    User,
    /// The kernel, for one export.
    Kernel,
}

/// Whether users other than the daemon's may use a mounted file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AllowOther {
    /// Only the daemon's user; not even root.
    Off,
    /// All whom the file's permissions let, or an error.
    On,
    /// On where that may be asked for: by root, or with `user_allow_other` in /etc/fuse.conf. Off elsewhere.
    #[default]
    Auto,
}

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// The best that the kernel has.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// Descriptors of /dev/fuse, one a queue.
    #[serde(rename = "dev")]
    Dev,
    /// io_uring: a queue for each CPU.
    #[serde(rename = "io_uring", alias = "io-uring")]
    IoUring,
}

/// Whether the kernel may read and write the image by itself.
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
    /// Kind of device.
    #[serde(rename = "type")]
    pub kind: ExportKind,
    /// Unique among exports.
    pub name: String,
    /// Name of the disk served; of a network's export empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub disk: String,
    /// vhost-user-net: name of the network. uplink: of the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<String>,
    /// uplink: name of the network that is the tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Where to listen; made by us and removed at the end. Exclusive with `fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// An inherited socket, listening (socket activation) or connected (the export ends with its peer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<RawFd>,
    /// Queues offered: virtqueues, 1..=256, or a network's queue pairs, 1..=128, or a tap's queues, likewise; absent: one for each online CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// On how many workers it starts.
    #[serde(default)]
    pub workers: Workers,
    /// Refuse the guest's writes (always so for a read-only disk).
    #[serde(default)]
    pub readonly: bool,
    /// What GET_ID returns, at most 20 bytes; absent: the disk's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Logical block size told to the guest, a power of two in 512..=4096; absent: what the disk needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// Bound of adaptive polling for the workers made for this export, µs; absent: the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_us: Option<u32>,
    /// vhost-user-net: the card's address, for front-ends that ask us; absent: the front-end's or the guest's choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// vhost-user-net on a switch: whether only frames from `mac` leave the port; absent: on where `mac` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_filter: Option<bool>,
    /// On a switch: addresses that are learnt behind the port at most, 1..=8192; absent: 256, of an uplink 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_limit: Option<u32>,
    /// On a switch: the VLAN, 1..=4094, whose frames are untagged at the port. Frames of other VLANs are dropped unless
    /// `trunk` names them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// On a switch: the VLANs whose frames are tagged at the port.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "Vlans::deserialize")]
    pub trunk: Option<Vlans>,
    /// On a switch: whether no frames go between this port and other isolated ones; absent: not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// On a switch: whether frames to 01:80:c2:00:00:00 to 0f (STP, LACP, LLDP) pass, between ports that say so; absent: not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<bool>,
    /// vhost-user-net and uplink: bytes of the longest IP packet, which the interface gets; absent: the interface's. A port
    /// of a switch drops what is longer; its guest is told 1500 where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// vhost-user: who serves it; absent: user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// vhost-user: whether front ends may share memory in files whose file system makes an access wait (a disk's, a FUSE mount's).
    /// A worker that waits serves none of its queues. Absent: memfd, tmpfs and hugetlbfs only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_may_block: Option<bool>,
    /// fuse: the regular file that is mounted over; made if it is not there, and then removed at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mountpoint: Option<PathBuf>,
    /// fuse: whether the file can be written; absent: not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable: Option<bool>,
    /// fuse: whether its size can be changed by writing beyond the end, and by truncating; absent: not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growable: Option<bool>,
    /// fuse: absent: auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_other: Option<AllowOther>,
    /// fuse: absent: auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// fuse: absent: auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passthrough: Option<Passthrough>,
}

impl ExportSpec {
    /// The disk or network that it serves.
    pub fn of(&self) -> &str {
        self.net.as_deref().unwrap_or(&self.disk)
    }

    /// Whether writes are refused, whatever the disk can do.
    pub fn refuses_writes(&self) -> bool {
        match self.kind {
            ExportKind::VhostUserBlk => self.readonly,
            ExportKind::VhostUserNet | ExportKind::Uplink => false,
            ExportKind::Fuse => !self.writable.unwrap_or(false),
        }
    }
}

/// A worker to be made, or what is to change of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct WorkerSpec {
    /// Who runs it; absent: user. Only of one to be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<WorkerKind>,
    /// The export whose queues a worker of the kernel can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Shown in lists and, as the worker was made with it and cut to 15 bytes, as its thread's name; absent:
    /// `worker-ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// CPUs it may run on; empty: all of the daemon's, as for a new worker when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Vec<usize>>,
    /// -20..=19; absent: the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nice: Option<i32>,
    /// Bound of adaptive polling, µs, 0: never poll; absent: the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_us: Option<u32>,
}

/// A disk as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskInfo {
    /// What was asked for.
    #[serde(flatten)]
    pub spec: DiskSpec,
    /// Bytes now.
    pub size_bytes: u64,
    /// Whether the page cache is passed by.
    pub direct_in_use: bool,
    /// How requests reach it: `ring`, `inline` (memory-backed file), `memory`, `none`.
    pub path: String,
    /// Exports that use it.
    pub exports: Vec<String>,
    /// The job that reads or writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Its dirty bitmaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
}

/// A worker as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct WorkerInfo {
    /// Never reused while the daemon lives.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Who runs it.
    pub kind: WorkerKind,
    /// The one export whose queues a worker of the kernel can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Thread id.
    pub tid: i32,
    /// CPUs it may run on.
    pub cpu: Vec<usize>,
    /// Its nice value.
    pub nice: i32,
    /// Bound of adaptive polling, µs.
    pub poll_us: u32,
    /// Its queues, `export:index`.
    pub queues: Vec<String>,
    /// CPU time used, µs.
    pub cpu_time_us: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Requests completed while attached here.
    pub requests: u64,
    /// It has something to do and has not run for a second. Never for workers of the kernel.
    #[serde(default)]
    pub stalled: bool,
}

/// A queue as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct QueueInfo {
    /// Name of its export.
    pub export: String,
    /// Index within the export.
    pub index: u16,
    /// Id of the worker it is attached to.
    pub worker: u32,
    /// `stopped` (the guest does not use it), `running`, `broken` (the guest misused it).
    pub state: String,
    /// Descriptors of the ring; 0 before its first start, and as it was while it is stopped.
    pub size: u16,
    /// Whether it is a packed virtqueue.
    pub packed: bool,
    /// Requests taken and not completed.
    pub in_flight: u32,
    /// Times it was started, or moved to another worker while it ran.
    pub generation: u32,
    /// Requests completed.
    pub requests: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Bytes read by the guest.
    pub read_bytes: u64,
    /// Bytes written by the guest.
    pub write_bytes: u64,
    /// Kicks seen.
    pub kicks: u64,
    /// Notifications sent.
    pub notifications: u64,
    /// vhost-user-net: what went through, each way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<NetQueueCounters>,
}

/// An export as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportInfo {
    /// What was asked for.
    #[serde(flatten)]
    pub spec: ExportSpec,
    /// `user` or `kernel`.
    pub engine: Engine,
    /// Why not the kernel, where that was left to us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_reason: Option<String>,
    /// Whether a front-end is connected.
    pub connected: bool,
    /// Whether it is being removed: its users are disconnected, and it goes when its last request ends.
    #[serde(default)]
    pub removing: bool,
    /// Virtio features, or flags of FUSE's INIT, agreed on, by name.
    pub features: Vec<String>,
    /// fuse: how it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountInfo>,
    /// On a switch: its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<PortInfo>,
    /// Its queues.
    pub queue_list: Vec<QueueInfo>,
}

/// CPU numbers, ascending, as taskset has them: `0-3,6`.
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

/// A mount as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MountInfo {
    /// `dev` or `io_uring`.
    pub transport: Transport,
    /// Why not io_uring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport_reason: Option<String>,
    /// Whether reads and writes go to the image within the kernel.
    pub passthrough: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passthrough_reason: Option<String>,
    /// Whether other users may use the file.
    pub allow_other: bool,
    /// Times that it is open now.
    pub open_files: u32,
    /// Over io_uring: idle entries that are still with former workers of their queues, which forward requests that come
    /// with them.
    #[serde(default)]
    pub forwarded_entries: u32,
}
