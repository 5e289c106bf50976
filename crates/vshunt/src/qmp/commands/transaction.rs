//! `transaction`: several disks at one point in time.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vshunt_daemon::{PointAction, SnapshotWish};

use super::jobs::{self, BitmapName, BlockdevBackup, NewBitmap};
use super::snapshot::SnapshotSync;
use crate::qmp::context::{Answer, Arguments, Context};
use crate::qmp::message::QmpError;

pub(crate) const ACTIONS: &str = "actions: [{type: blockdev-snapshot-sync | blockdev-backup | backup-start | \
                                    block-dirty-bitmap-add | block-dirty-bitmap-clear, data: …}] [properties]";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Transaction {
    /// Objects with `type` and `data`. The type is the name of a command, and the data its
    /// arguments.
    actions: Vec<Action>,
    /// `completion-mode`: only `individual` is accepted.
    properties: Option<Properties>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Action {
    #[serde(rename = "type")]
    kind: String,
    data: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Properties {
    completion_mode: Option<String>,
}

/// An action that was read.
enum Asked {
    Snapshot(SnapshotWish),
    Point(PointAction),
}

impl Action {
    fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        let kind = self.kind;
        serde_json::from_value(self.data).map_err(|e| QmpError::generic(format!("the data of a {kind}: {e}")))
    }

    fn asked(self, context: &Context) -> Result<Asked, QmpError> {
        Ok(Asked::Point(match self.kind.as_str() {
            "blockdev-snapshot-sync" => {
                return self.read::<SnapshotSync>()?.wish(context).map(Asked::Snapshot);
            }
            "blockdev-backup" => {
                let backup = self.read::<BlockdevBackup>()?;
                let (spec, auto_dismiss) = backup.spec()?;
                PointAction::Backup { spec, auto_dismiss }
            }
            "backup-start" => {
                let spec = jobs::with_files(context, self.read()?)?;
                PointAction::Backup { spec, auto_dismiss: false }
            }
            "block-dirty-bitmap-add" => PointAction::BitmapAdd(self.read::<NewBitmap>()?.spec()),
            "block-dirty-bitmap-clear" => {
                let BitmapName { node, name } = self.read()?;
                PointAction::BitmapClear { disk: node, name }
            }
            other => {
                return Err(QmpError::generic(format!(
                    "a transaction has no action {other}, only blockdev-snapshot-sync, or blockdev-backup, backup-start, \
                     block-dirty-bitmap-add and block-dirty-bitmap-clear"
                )));
            }
        }))
    }
}

/// Does something to several disks at one point in time, or nothing: takes snapshots, or starts
/// backups and changes dirty bitmaps.
pub(crate) fn transaction(context: &Context, arguments: Arguments) -> Answer {
    let Transaction { actions, properties } = arguments.read()?;
    if properties.and_then(|p| p.completion_mode).is_some_and(|mode| mode != "individual") {
        return Err(QmpError::generic(
            "each job of a transaction ends by itself, whatever the others do; leave 'completion-mode' out",
        ));
    }
    if actions.is_empty() {
        return Err(QmpError::generic("'actions' is empty: give at least one"));
    }
    let (mut wishes, mut points) = (Vec::new(), Vec::new());
    for action in actions {
        match action.asked(context)? {
            Asked::Snapshot(wish) => wishes.push(wish),
            Asked::Point(action) => points.push(action),
        }
    }
    match (wishes.is_empty(), points.is_empty()) {
        (false, false) => Err(QmpError::generic(
            "a transaction has either snapshots, or backups and changes of bitmaps; use two",
        )),
        (false, true) => {
            context.daemon.disks_snapshot(&wishes)?;
            Ok(json!({}))
        }
        (true, _) => match context.daemon.point_in_time(&points)? {
            jobs if jobs.is_empty() => Ok(json!({})),
            jobs => Ok(json!({ "jobs": jobs })),
        },
    }
}
