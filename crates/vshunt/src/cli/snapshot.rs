//! `vshunt snapshot`: snapshots of disks in use.

use serde_json::json;

use super::args::snapshot::SnapshotArgs;
use super::call::{absolute, send};
use super::client::Client;
use super::passing::{self, Wanted};
use crate::outcome::{Outcome, print_line};

/// Sends the command for this command line. Prints where the disk continues, unless `quiet`.
pub(super) fn run(client: &mut Client, args: SnapshotArgs, quiet: bool) -> Outcome {
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
    arguments["device"] = disk.as_str().into();
    let wanted = overlay.as_deref().map_or_else(Vec::new, Wanted::folder_of);
    let made = overlay.as_deref().map_or_else(Vec::new, |file| Wanted::file(file, true));
    passing::with(client, |_| Ok(wanted), &made, |client| send(client, command, arguments))?;
    match overlay {
        Some(file) if !quiet => {
            print_line(&format!("{disk} continues in {}; serve it by this name from now on", file.display()))
        }
        _ => Ok(()),
    }
}
