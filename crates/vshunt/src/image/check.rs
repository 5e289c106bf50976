//! `vshunt image check`.

use qcow2::check::{CheckResult, Repair, check};
use serde_json::{Map, Value, json};

use super::args::{CheckArgs, Output, Repaired};
use super::file::{For, ImageFile};
use super::journal::MapJournal;
use super::progress::Bar;
use super::{ImageFormat, failed};
use crate::outcome::{Failure, Outcome, note, print};

/// The exit code for a format without checks, as in qemu-img.
const NOT_CHECKED: u8 = 63;
/// The exit code if there are only leaks, as in qemu-img, and for an image that was not closed.
const LEAKS: u8 = 3;

pub(super) fn run(args: &CheckArgs, quiet: bool) -> Outcome {
    let path = &args.file;
    let purpose = match (args.repair, args.force_share) {
        (Some(_), _) => For::Writing,
        (None, true) => For::Sharing,
        (None, false) => For::Reading,
    };
    let file = ImageFile::open(path, purpose)?;
    let format = match args.format {
        Some(format) => format,
        None => file.probe(path)?,
    };
    if format == ImageFormat::Raw {
        let text = format!("{}: images of format raw cannot be checked", path.display());
        note(&text);
        return Err(Failure::Status(NOT_CHECKED));
    }
    let repair = match args.repair {
        None => Repair::No,
        Some(Repaired::Leaks) => Repair::Leaks,
        Some(Repaired::All) => Repair::All,
    };
    if repair == Repair::Leaks && file.lacking(path)?.is_some() {
        // The reference counts of an image that was not closed are not up to date. They would stay
        // wrong if only leaks were repaired.
        return Err(Failure::Failed(format!(
            "{} was not closed, so that its reference counts are not up to date: use -r all",
            path.display()
        )));
    }
    if repair != Repair::No {
        // Clusters that only the journal refers to would be taken for leaks.
        file.recover(path)?;
    }
    // The image is checked in the state of the last flush. The changes in its journal are counted
    // when they are applied.
    let lacking = if repair == Repair::No { file.lacking(path)? } else { None };
    let mut bar = Bar::new("checking", quiet);
    let result = check(&file, repair, &mut bar).map_err(|e| match e {
        // The advice to repair the image is left out: the repair was just tried.
        qcow2::Error::Corrupt(_) => Failure::Failed(format!("{}: {e}", path.display())),
        e => failed(path, &e),
    });
    drop(bar);
    let result = result?;
    if repair == Repair::All && result.is_clean() {
        file.recovered();
    }
    match args.output {
        Output::Json => {
            print(&format!("{:#}\n", json(&args.file.display().to_string(), &result, lacking.as_ref())))?
        }
        Output::Human if !quiet => print(&human(&result))?,
        Output::Human => {}
    }
    match result {
        CheckResult { check_errors: 1.., .. } => Err(Failure::Status(1)),
        CheckResult { corruptions: 1.., .. } => Err(Failure::Status(2)),
        CheckResult { leaks: 1.., .. } => Err(Failure::Status(LEAKS)),
        _ if lacking.is_some() => Err(Failure::Status(LEAKS)),
        _ => Ok(()),
    }
}

fn human(r: &CheckResult) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    if (r.corruptions_fixed, r.leaks_fixed) != (0, 0) {
        let _ = write!(
            text,
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} corruptions\n\n\
             Double checking the fixed image now...\n",
            r.leaks_fixed, r.corruptions_fixed
        );
    }
    if r.is_clean() {
        text.push_str("No errors were found on the image.\n");
    }
    if r.corruptions > 0 {
        let _ = write!(
            text,
            "\n{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n",
            r.corruptions
        );
    }
    if r.leaks > 0 {
        let _ = write!(
            text,
            "\n{} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n",
            r.leaks
        );
    }
    if r.check_errors > 0 {
        let _ = writeln!(text, "\n{} internal errors have occurred during the check.", r.check_errors);
    }
    if r.total_clusters > 0 && r.allocated_clusters > 0 {
        let percent = |n: u64, of: u64| n as f64 * 100.0 / of as f64;
        let _ = writeln!(
            text,
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            r.allocated_clusters,
            r.total_clusters,
            percent(r.allocated_clusters, r.total_clusters),
            percent(r.fragmented_clusters, r.allocated_clusters),
            percent(r.compressed_clusters, r.allocated_clusters)
        );
    }
    let _ = writeln!(text, "Image end offset: {}", r.image_end_offset);
    text
}

/// Returns the result in the format of QEMU's ImageCheck: numbers that are 0 are left out, except
/// for two. An image that lacks completed writes also has `not-closed` (true) and `map-journal`.
fn json(filename: &str, r: &CheckResult, lacking: Option<&MapJournal>) -> Value {
    let mut map = Map::new();
    map.insert("filename".into(), json!(filename));
    map.insert("format".into(), json!("qcow2"));
    map.insert("check-errors".into(), json!(r.check_errors));
    for (key, n) in [
        ("image-end-offset", r.image_end_offset),
        ("corruptions", r.corruptions),
        ("leaks", r.leaks),
        ("corruptions-fixed", r.corruptions_fixed),
        ("leaks-fixed", r.leaks_fixed),
        ("total-clusters", r.total_clusters),
        ("allocated-clusters", r.allocated_clusters),
        ("fragmented-clusters", r.fragmented_clusters),
        ("compressed-clusters", r.compressed_clusters),
    ] {
        if n != 0 {
            map.insert(key.into(), json!(n));
        }
    }
    if let Some(journal) = lacking {
        map.insert("not-closed".into(), json!(true));
        map.insert("map-journal".into(), journal.json());
    }
    Value::Object(map)
}
