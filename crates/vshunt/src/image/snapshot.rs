//! `vshunt image snapshot`.

use std::time::{SystemTime, UNIX_EPOCH};

use qcow2::info::info;
use qcow2::{Image, snapshot};

use super::args::SnapshotArgs;
use super::file::{For, ImageFile};
use super::info::snapshot_table;
use super::{ImageFormat, changing, failed, no_qcow2};
use crate::outcome::{Outcome, print};

pub(super) fn run(args: &SnapshotArgs, quiet: bool) -> Outcome {
    let path = &args.file;
    if args.create.is_none() && args.apply.is_none() && args.delete.is_none() {
        return list(args);
    }
    let (file, format) = changing(path, args.format, quiet)?;
    if format != ImageFormat::Qcow2 {
        return Err(no_qcow2(path, "snapshots"));
    }
    let mut image = Image::open(&file).map_err(|e| failed(path, &e))?;
    let done = match (&args.create, &args.apply, &args.delete) {
        (Some(name), ..) => snapshot::create(&mut image, name, now()).map(drop),
        (_, Some(name), _) => snapshot::apply(&mut image, name),
        (_, _, Some(name)) => snapshot::delete(&mut image, name),
        _ => Ok(()),
    };
    done.map_err(|e| failed(path, &e))
}

fn list(args: &SnapshotArgs) -> Outcome {
    let path = &args.file;
    let file = ImageFile::open(path, if args.force_share { For::Sharing } else { For::Reading })?;
    let format = match args.format {
        Some(format) => format,
        None => file.probe(path)?,
    };
    if format != ImageFormat::Qcow2 {
        return Err(no_qcow2(path, "snapshots"));
    }
    let list = info(&file).map_err(|e| failed(path, &e))?.snapshots;
    if list.is_empty() {
        return Ok(());
    }
    print(&format!("Snapshot list:\n{}", snapshot_table(&list)))
}

/// Returns the time since 1970 in seconds and nanoseconds.
fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (u32::try_from(now.as_secs()).unwrap_or(u32::MAX), now.subsec_nanos())
}
