//! The commands of the control socket: one table of names, arguments and what each does.
//!
//! Run on the reader thread of the client that asked; a command blocks that client only. Those that QEMU's storage
//! daemon has are in `qemu.rs`. The arguments of ours are the spec types as they are.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use vshunt_daemon::export::{ATTACH_TIMEOUT, Daemon};
use vshunt_sandbox as sandbox;
use vshunt_types::spec::{DiskSpec, ExportSpec, NetSpec, Steering, WorkerSpec};

use super::fdset::{self, Fdsets};
use super::jobs::qmp as jobs;
use super::message::{self, QmpError};
use super::{qemu, snapshot};

/// Longest time an attach may be given: a client's thread is not to be parked for ever.
const ATTACH_TIMEOUT_MS_MAX: u64 = 3_600_000;

/// Why the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A signal, by number.
    Signal(i32),
    /// The command `quit`.
    Quit,
    /// The one export of `vshunt-blk --fd` has lost its peer.
    PeerGone,
}

/// What a command may act on.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) stop: Sender<Stop>,
    /// Descriptors that clients passed.
    pub(crate) fdsets: Arc<Fdsets>,
}

/// The arguments of a command under way.
pub(crate) struct Arguments {
    command: &'static str,
    members: Map<String, Value>,
    /// The descriptor that came with `add-fd`.
    fd: Option<OwnedFd>,
}

impl Arguments {
    /// Takes the descriptor that came with the command.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// All members as `T`; a member that `T` does not know is an error.
    pub(crate) fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        let Self { command, members, .. } = self;
        serde_json::from_value(Value::Object(members))
            .map_err(|e| QmpError::generic(format!("arguments of '{command}': {e}")))
    }

    /// Takes one member out, for commands whose other members are a spec.
    fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, QmpError> {
        let command = self.command;
        let value = self
            .members
            .remove(name)
            .ok_or_else(|| QmpError::generic(format!("arguments of '{command}': missing field `{name}`")))?;
        serde_json::from_value(value)
            .map_err(|e| QmpError::generic(format!("arguments of '{command}': `{name}`: {e}")))
    }
}

type Answer = Result<Value, QmpError>;

/// One command.
pub(crate) struct Command {
    /// Its name on the wire.
    pub(crate) name: &'static str,
    /// Its arguments in short, for the help; `[x]` may be left out.
    pub(crate) arguments: &'static str,
    run: fn(&Context, Arguments) -> Answer,
}

const fn command(
    name: &'static str,
    arguments: &'static str,
    run: fn(&Context, Arguments) -> Answer,
) -> Command {
    Command { name, arguments, run }
}

/// Every command after negotiation.
pub(crate) const COMMANDS: &[Command] = &[
    command(fdset::ADD_FD, "[fdset-id opaque], with one descriptor (SCM_RIGHTS)", fdset::add_fd),
    command("backup-start", jobs::BACKUP_START, jobs::backup_start),
    command("bitmap-add", "disk name [granularity persistent disabled]", jobs::bitmap_add),
    command("block-commit", "device [job-id speed auto-dismiss]", jobs::block_commit),
    command(
        "block-dirty-bitmap-add",
        "node name [granularity persistent disabled]",
        jobs::block_dirty_bitmap_add,
    ),
    command("block-dirty-bitmap-clear", "node name", |c, a| jobs::with_bitmap(c, a, Daemon::bitmap_clear)),
    command("block-dirty-bitmap-disable", "node name", |c, a| {
        jobs::with_bitmap(c, a, |d, disk, name| d.bitmap_record(disk, name, false))
    }),
    command("block-dirty-bitmap-enable", "node name", |c, a| {
        jobs::with_bitmap(c, a, |d, disk, name| d.bitmap_record(disk, name, true))
    }),
    command("block-dirty-bitmap-merge", "node target bitmaps", jobs::block_dirty_bitmap_merge),
    command("block-dirty-bitmap-remove", "node name", |c, a| jobs::with_bitmap(c, a, Daemon::bitmap_remove)),
    command("block-export-add", qemu::BLOCK_EXPORT_ADD, qemu::block_export_add),
    command("block-export-del", "id [mode: safe|hard]", qemu::block_export_del),
    command("block-job-cancel", "device", |c, a| jobs::by_device(c, a, Daemon::job_cancel)),
    command("block-job-dismiss", "id", |c, a| jobs::by_id(c, a, Daemon::job_dismiss)),
    command("block-job-pause", "device", |c, a| jobs::by_device(c, a, Daemon::job_pause)),
    command("block-job-resume", "device", |c, a| jobs::by_device(c, a, Daemon::job_resume)),
    command("block-job-set-speed", "device speed", jobs::block_job_set_speed),
    command("block_resize", "node-name size", qemu::block_resize),
    command("blockdev-add", qemu::BLOCKDEV_ADD, qemu::blockdev_add),
    command("blockdev-backup", jobs::BLOCKDEV_BACKUP, jobs::blockdev_backup),
    command("blockdev-del", "node-name", qemu::blockdev_del),
    command("blockdev-snapshot", "node overlay", snapshot::snapshot_onto),
    command("blockdev-snapshot-delete-internal-sync", "device id|name", snapshot::delete_internal_sync),
    command("blockdev-snapshot-internal-sync", "device name", snapshot::internal_sync),
    command("blockdev-snapshot-sync", snapshot::SNAPSHOT_SYNC, snapshot::snapshot_sync),
    command("commit-start", "disk [job speed]", jobs::commit_start),
    command("disk-add", "name [format file size readonly direct cache locking cache-size]", disk_add),
    command("disk-remove", "name", disk_remove),
    command(
        "export-add",
        "type name disk|net [socket|mountpoint tap queues workers readonly serial block-size poll-us engine mac mtu \
         mac-filter mac-limit vlan trunk isolated reserved memory-may-block writable growable allow-other transport \
         passthrough]",
        export_add,
    ),
    command("export-remove", "name [force]", export_remove),
    command("job-cancel", "id", |c, a| jobs::by_id(c, a, Daemon::job_cancel)),
    command("job-dismiss", "id", |c, a| jobs::by_id(c, a, Daemon::job_dismiss)),
    command("job-pause", "id", |c, a| jobs::by_id(c, a, Daemon::job_pause)),
    command("job-resume", "id", |c, a| jobs::by_id(c, a, Daemon::job_resume)),
    command("job-set-speed", "id [speed]", jobs::job_set_speed),
    command("net-add", "type name [ifname|fd netns queues steering address owner group persist]", net_add),
    command("net-remove", "name", net_remove),
    command("net-set", "name steering", net_set),
    command("query-block-exports", "", qemu::query_block_exports),
    command("query-block-jobs", "", jobs::query_block_jobs),
    command("query-commands", "", query_commands),
    command("query-disks", "", |c, a| list(a, || c.daemon.disks())),
    command("query-exports", "", |c, a| list(a, || c.daemon.exports())),
    command("query-fdsets", "", fdset::query_fdsets),
    command("query-jobs", "", |c, a| list(a, || c.daemon.jobs())),
    command("query-named-block-nodes", "[flat]", qemu::query_named_block_nodes),
    command("query-net-addresses", "name", query_net_addresses),
    command("query-nets", "", |c, a| list(a, || c.daemon.nets())),
    command("query-queues", "", |c, a| list(a, || c.daemon.queues())),
    command("query-sandbox", "", |_, a| sandbox(a)),
    command("query-version", "", |_, a| a.read::<Nothing>().map(|_| message::version())),
    command("query-workers", "", |c, a| list(a, || c.daemon.workers())),
    command("queue-attach", "export index worker [timeout-ms]", queue_attach),
    command("quit", "", quit),
    command("remove-fd", "fdset-id [fd]", fdset::remove_fd),
    command("worker-free", "id", worker_free),
    command("worker-new", "[name cpu nice poll-us kind export]", worker_new),
    command("worker-set", "id [name cpu nice poll-us]", worker_set),
];

/// Runs the command called `name`. `fd`: the descriptor that came with it, of `add-fd` alone.
pub(crate) fn run(context: &Context, name: &str, members: Map<String, Value>, fd: Option<OwnedFd>) -> Answer {
    let Some(command) = COMMANDS.iter().find(|c| c.name == name) else {
        return Err(QmpError::command_not_found(format!("The command {name} has not been found")));
    };
    let arguments = Arguments { command: command.name, members, fd };
    let answer = sandbox::as_command(|| (command.run)(context, arguments))
        .unwrap_or_else(|e| Err(QmpError::generic(format!("the command cannot be run: {e}"))));
    context.fdsets.prune(&context.daemon);
    answer
}

/// The answer of a command that returns nothing.
pub(crate) fn done<T>(_: T) -> Value {
    json!({})
}

/// No arguments.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetSet {
    name: String,
    steering: Steering,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportRemove {
    name: String,
    #[serde(default)]
    force: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerId {
    id: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QueueAttach {
    export: String,
    index: u16,
    worker: u32,
    timeout_ms: Option<u64>,
}

fn list<T: Serialize>(arguments: Arguments, get: impl FnOnce() -> Vec<T>) -> Answer {
    arguments.read::<Nothing>()?;
    serde_json::to_value(get()).map_err(|e| QmpError::generic(format!("cannot write the answer: {e}")))
}

fn sandbox(arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    serde_json::to_value(vshunt_sandbox::info())
        .map_err(|e| QmpError::generic(format!("cannot write the answer: {e}")))
}

fn disk_add(context: &Context, arguments: Arguments) -> Answer {
    let disk: DiskSpec = arguments.read()?;
    let file = disk.file.map(|file| context.fdsets.resolve(file, !disk.readonly)).transpose()?;
    Ok(done(context.daemon.disk_add(DiskSpec { file, ..disk })?))
}

fn disk_remove(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.disk_remove(&arguments.read::<Named>()?.name)?))
}

/// Said to a client that names a file descriptor for a network.
const NO_TAP_FD: &str = "a file descriptor cannot be named over the control socket; \
     give an interface's ifname, or pass fd=N to `vshunt serve --net`";

fn net_add(context: &Context, arguments: Arguments) -> Answer {
    let spec: NetSpec = arguments.read()?;
    if spec.fd.is_some() {
        return Err(QmpError::generic(NO_TAP_FD));
    }
    Ok(done(context.daemon.net_add(spec)?))
}

fn net_remove(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.net_remove(&arguments.read::<Named>()?.name)?))
}

fn net_set(context: &Context, arguments: Arguments) -> Answer {
    let NetSet { name, steering } = arguments.read()?;
    Ok(done(context.daemon.net_set(&name, steering)?))
}

fn query_net_addresses(context: &Context, arguments: Arguments) -> Answer {
    let addresses = context.daemon.net_addresses(&arguments.read::<Named>()?.name)?;
    serde_json::to_value(addresses).map_err(|e| QmpError::generic(format!("cannot write the answer: {e}")))
}

fn export_add(context: &Context, arguments: Arguments) -> Answer {
    let spec: ExportSpec = arguments.read()?;
    if spec.fd.is_some() {
        return Err(QmpError::generic(qemu::NO_FD));
    }
    Ok(done(context.daemon.export_add(spec)?))
}

fn export_remove(context: &Context, arguments: Arguments) -> Answer {
    let ExportRemove { name, force } = arguments.read()?;
    Ok(json!({ "disconnected": context.daemon.export_take_down(&name, force)? }))
}

fn worker_new(context: &Context, arguments: Arguments) -> Answer {
    let id = context.daemon.worker_new(arguments.read::<WorkerSpec>()?)?;
    Ok(json!({ "id": id }))
}

fn worker_set(context: &Context, mut arguments: Arguments) -> Answer {
    let id = arguments.take("id")?;
    Ok(done(context.daemon.worker_set(id, arguments.read()?)?))
}

fn worker_free(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.worker_free(arguments.read::<WorkerId>()?.id)?))
}

fn queue_attach(context: &Context, arguments: Arguments) -> Answer {
    let QueueAttach { export, index, worker, timeout_ms } = arguments.read()?;
    let timeout_ms = timeout_ms.unwrap_or(ATTACH_TIMEOUT.as_millis() as u64);
    if timeout_ms > ATTACH_TIMEOUT_MS_MAX {
        return Err(QmpError::generic(format!("timeout-ms is at most {ATTACH_TIMEOUT_MS_MAX}")));
    }
    let timeout = Duration::from_millis(timeout_ms);
    Ok(done(context.daemon.queue_attach(&export, index, worker, timeout)?))
}

fn query_commands(_: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(COMMANDS.iter().map(|c| json!({ "name": c.name })).collect())
}

fn quit(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    // The receiver is gone only when the daemon is ending already, which is what was asked for.
    let _ = context.stop.send(Stop::Quit);
    Ok(json!({}))
}

#[cfg(test)]
mod tests;
