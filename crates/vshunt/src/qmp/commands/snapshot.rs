//! Snapshots of disks in use, with QEMU's commands.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};
use vshunt_block::SnapshotInfo;
use vshunt_daemon::{OverlayMode, SnapshotWish};

use crate::qmp::context::{Answer, Arguments, Context, done};
use crate::qmp::message::QmpError;

/// Arguments of `blockdev-snapshot-sync` for the help.
pub(crate) const SNAPSHOT_SYNC: &str =
    "device|node-name snapshot-file [format: qcow2, mode: absolute-paths|existing]";

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    AbsolutePaths,
    Existing,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct SnapshotSync {
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

impl SnapshotSync {
    pub(super) fn wish(self, context: &Context) -> Result<SnapshotWish, QmpError> {
        let disk = match (self.device, self.node_name) {
            (Some(disk), None) | (None, Some(disk)) => disk,
            _ => return Err(QmpError::generic("give one of 'device' and 'node-name': the disk's name")),
        };
        if self.format.is_some_and(|f| f != "qcow2") {
            return Err(QmpError::generic("'format' of an overlay can be qcow2 only"));
        }
        if self.snapshot_node_name.is_some_and(|name| name != disk) {
            return Err(QmpError::generic(format!(
                "the disk keeps its name, and what is below has none; leave 'snapshot-node-name' out, or set it to {disk}"
            )));
        }
        let mode = match self.mode {
            Mode::AbsolutePaths => OverlayMode::New,
            Mode::Existing => OverlayMode::Existing,
        };
        let overlay = context.fdsets.resolve(self.snapshot_file, true)?;
        Ok(SnapshotWish { disk, overlay, mode })
    }
}

pub(crate) fn snapshot_sync(context: &Context, arguments: Arguments) -> Answer {
    let wish = arguments.read::<SnapshotSync>()?.wish(context)?;
    Ok(done(context.daemon.disks_snapshot(&[wish])?))
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

/// Returns QEMU's SnapshotInfo.
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
