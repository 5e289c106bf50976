//! Snapshots of disks in use: QEMU's commands for them, and `vshunt snapshot`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use serde::Deserialize;
use serde_json::{Value, json};
use vshunt_block::SnapshotInfo;
use vshunt_daemon::export::OverlayMode;

use super::Outcome;
use super::api::{Arguments, Context, done};
use super::client::Client;
use super::message::QmpError;
use super::passing::{self, Wanted};
use super::run::{absolute, send};

/// Arguments of `blockdev-snapshot-sync` for the help.
pub(crate) const SNAPSHOT_SYNC: &str =
    "device|node-name snapshot-file [format: qcow2, mode: absolute-paths|existing]";

pub(crate) const AFTER: &str = "\
Guests pause while a snapshot is taken, and see no error. With --to the disk continues in a new
image, the overlay. The old image becomes its backing file and does not change any more. From then
on, serve the disk by the name of the overlay. An --internal snapshot is stored in the qcow2 image.
'vshunt image snapshot -l -U FILE' lists them; -a applies one while no program uses the image.

Examples:
  vshunt snapshot d0 --to /var/lib/vm/d0-monday.qcow2
  vshunt snapshot d0 --internal monday
  vshunt snapshot d0 --delete monday";

#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("what").args(["to", "internal", "delete"]).required(true)))]
pub(crate) struct SnapshotArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// Continue in a new qcow2 image, whose backing file is the present one
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// FILE exists, and its backing file is the present image
    #[arg(long, requires = "to")]
    existing: bool,
    /// Take a snapshot inside the qcow2 image
    #[arg(long, value_name = "NAME")]
    internal: Option<String>,
    /// Delete a snapshot inside the qcow2 image
    #[arg(long, value_name = "NAME")]
    delete: Option<String>,
}

/// What the command line asks for, as a command of the socket.
pub(crate) fn run(client: &mut Client, args: SnapshotArgs) -> Outcome {
    let SnapshotArgs { disk, to, existing, internal, delete } = args;
    let to = absolute(to)?;
    let overlay = to.clone();
    let (command, mut arguments) = match (to, internal, delete) {
        (Some(file), ..) => {
            let mode = if existing { "existing" } else { "absolute-paths" };
            ("blockdev-snapshot-sync", json!({ "snapshot-file": file, "format": "qcow2", "mode": mode }))
        }
        (_, Some(name), _) => ("blockdev-snapshot-internal-sync", json!({ "name": name })),
        (_, _, name) => ("blockdev-snapshot-delete-internal-sync", json!({ "name": name })),
    };
    arguments["device"] = disk.into();
    let wanted = overlay.as_deref().map_or_else(Vec::new, Wanted::folder_of);
    let made = overlay.as_deref().map_or_else(Vec::new, |file| Wanted::file(file, true));
    passing::with(client, |_| Ok(wanted), &made, |client| send(client, command, arguments))
}

type Answer = Result<Value, QmpError>;

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    AbsolutePaths,
    Existing,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SnapshotSync {
    /// The name of the disk. Either this or `node-name` is required.
    device: Option<String>,
    /// The name of the disk.
    node_name: Option<String>,
    /// The path of the overlay.
    snapshot_file: PathBuf,
    /// Only the name of the disk is accepted: the disk keeps its name.
    snapshot_node_name: Option<String>,
    /// Only `qcow2` is accepted.
    format: Option<String>,
    /// `absolute-paths` makes the overlay. `existing` uses an overlay that names the image of the
    /// disk as its backing file.
    #[serde(default)]
    mode: Mode,
}

pub(crate) fn snapshot_sync(context: &Context, arguments: Arguments) -> Answer {
    let args = arguments.read::<SnapshotSync>()?;
    let disk = match (args.device, args.node_name) {
        (Some(disk), None) | (None, Some(disk)) => disk,
        _ => return Err(QmpError::generic("give one of 'device' and 'node-name': the disk's name")),
    };
    if args.format.is_some_and(|f| f != "qcow2") {
        return Err(QmpError::generic("'format' of an overlay can be qcow2 only"));
    }
    if args.snapshot_node_name.is_some_and(|name| name != disk) {
        return Err(QmpError::generic(format!(
            "the disk keeps its name, and what is below has none; leave 'snapshot-node-name' out, or set it to {disk}"
        )));
    }
    let mode = match args.mode {
        Mode::AbsolutePaths => OverlayMode::New,
        Mode::Existing => OverlayMode::Existing,
    };
    let overlay = context.fdsets.resolve(args.snapshot_file, true)?;
    Ok(done(context.daemon.disk_snapshot(&disk, &overlay, mode)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    /// The name of the disk.
    node: String,
    /// The name of an overlay that `blockdev-add` added with `backing` null.
    overlay: String,
}

pub(crate) fn snapshot_onto(context: &Context, arguments: Arguments) -> Answer {
    let Snapshot { node, overlay } = arguments.read()?;
    Ok(done(context.daemon.snapshot_onto(&node, &overlay)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Internal {
    /// The name of the disk.
    device: String,
    /// The name of the snapshot.
    name: String,
}

pub(crate) fn internal_sync(context: &Context, arguments: Arguments) -> Answer {
    let Internal { device, name } = arguments.read()?;
    Ok(done(context.daemon.disk_snapshot_internal(&device, &name)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// The name of the disk.
    device: String,
    /// The id of the snapshot. `id`, `name` or both are required.
    id: Option<String>,
    /// The name of the snapshot.
    name: Option<String>,
}

pub(crate) fn delete_internal_sync(context: &Context, arguments: Arguments) -> Answer {
    let Delete { device, id, name } = arguments.read()?;
    if id.is_none() && name.is_none() {
        return Err(QmpError::generic("give 'id', 'name' or both"));
    }
    let gone = context.daemon.disk_snapshot_delete(&device, id.as_deref(), name.as_deref())?;
    Ok(info(&gone))
}

/// QEMU's SnapshotInfo.
fn info(s: &SnapshotInfo) -> Value {
    const SECOND: u64 = 1_000_000_000;
    json!({
        "id": s.id,
        "name": s.name,
        "vm-state-size": s.vm_state_bytes,
        "date-sec": s.date_s,
        "date-nsec": s.date_ns,
        "vm-clock-sec": s.vm_clock_ns / SECOND,
        "vm-clock-nsec": s.vm_clock_ns % SECOND,
    })
}
