//! The commands of the control socket: their arguments, and what each does. `table.rs` has the table of all commands.
//!
//! A command runs on the reader thread of the client that sent it, and blocks that client only. The commands of QEMU's
//! storage daemon are in `qemu.rs`. The other commands take the types of `vshunt_types::spec` as they are.
//!
//! The reference (docs/reference/qmp.md) shows the doc comments of the structs that arguments are read into.

mod table;

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

pub(crate) use self::table::COMMANDS;
use super::fdset::Fdsets;
use super::message::QmpError;
use super::qemu;

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
    /// The name of the disk or network.
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetSet {
    /// The name of the network.
    name: String,
    /// How the kernel chooses the queue of a frame for the guest.
    steering: Steering,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportRemove {
    /// The name of the export.
    name: String,
    /// Remove it even if a front end is connected or the mounted file is open.
    #[serde(default)]
    force: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerId {
    /// The id of the worker.
    id: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QueueAttach {
    /// The name of the export.
    export: String,
    /// The index of the queue within the export.
    index: u16,
    /// The id of the worker.
    worker: u32,
    /// How long the requests in flight may take, in milliseconds, at most 3,600,000. Absent: 10,000.
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
pub(super) mod tests;
