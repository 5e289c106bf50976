//! `vshunt snapshot`: snapshots of disks in use.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::snapshot::SnapshotArgs;
use super::call::{absolute, send};
use super::client::Client;
use super::jobs::continues_in;
use super::passing::{self, Wanted};
use crate::outcome::{Outcome, print_line};

/// Sends the command for this command line. Prints where the disk continues, unless `quiet`.
pub(super) fn run(client: &mut Client, args: SnapshotArgs, quiet: bool) -> Outcome {
    let SnapshotArgs { disk, to, others, existing, internal, delete } = args;
    if let Some(to) = to {
        let mut all = vec![(disk, to)];
        all.extend(others);
        return external(client, all, existing, quiet);
    }
    let (command, name) = match internal {
        Some(name) => ("blockdev-snapshot-internal-sync", Some(name)),
        None => ("blockdev-snapshot-delete-internal-sync", delete),
    };
    let arguments = json!({ "name": name, "device": disk });
    passing::with(client, |_| Ok(Vec::new()), &[], |client| send(client, command, arguments))
}

/// Takes snapshots of disks at one point in time, each in its overlay.
fn external(client: &mut Client, all: Vec<(String, PathBuf)>, existing: bool, quiet: bool) -> Outcome {
    let mode = if existing { "existing" } else { "absolute-paths" };
    let (mut wanted, mut made, mut actions, mut said) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (disk, file) in all {
        let file = absolute(Some(file))?.unwrap_or_default();
        wanted.extend(Wanted::folder_of(&file));
        made.extend(Wanted::file(&file, true));
        said.push(continues_in(&disk, &file.display().to_string()));
        actions.push(json!({ "device": disk, "snapshot-file": file, "format": "qcow2", "mode": mode }));
    }
    let action = |data: Value| json!({ "type": "blockdev-snapshot-sync", "data": data });
    let (command, arguments) = match <[Value; 1]>::try_from(actions) {
        Ok([one]) => ("blockdev-snapshot-sync", one),
        Err(all) => {
            let actions: Vec<_> = all.into_iter().map(action).collect();
            ("transaction", json!({ "actions": actions }))
        }
    };
    passing::with(client, |_| Ok(wanted), &made, |client| send(client, command, arguments))?;
    if quiet { Ok(()) } else { said.iter().try_for_each(|line| print_line(line)) }
}
