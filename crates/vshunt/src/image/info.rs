//! `vshunt image info`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use qcow2::Storage;
use qcow2::bitmap::flag;
use qcow2::header::{Compression, LAZY_REFCOUNTS, autoclear, incompatible};
use qcow2::info::{Info, info};
use qcow2::snapshot::Snapshot;
use serde_json::{Map, Value, json};
use vshunt_block::CHAIN_MAX;

use super::args::{InfoArgs, Output};
use super::file::{For, ImageFile, id};
use super::journal::MapJournal;
use super::{ImageFormat, failed, units};
use crate::outcome::{Failure, Outcome, one_line, print};

/// The description of one image.
struct Described {
    path: PathBuf,
    size_bytes: u64,
    space_bytes: u64,
    /// The length of the file, or the size of the device, bytes.
    file_bytes: u64,
    device: bool,
    /// The metadata of a qcow2 image.
    qcow2: Option<Info>,
    /// Its map journal, if it was not closed.
    journal: Option<MapJournal>,
}

pub(super) fn run(args: &InfoArgs) -> Outcome {
    let purpose = if args.force_share { For::Sharing } else { For::Reading };
    let mut chain = vec![describe(&args.file, args.format, purpose)?];
    while let Some((path, format)) = chain.last().and_then(below).filter(|_| args.backing_chain) {
        check_below(&path, chain.iter().map(|d| d.path.as_path()))?;
        let format = known(format.as_deref(), &path)?;
        let above = chain.last().map(|d| d.path.as_path());
        let described = describe(&path, format, purpose).map_err(|e| explained(e, above, &path, format))?;
        chain.push(described);
    }
    let text = match (args.output, args.backing_chain) {
        (Output::Human, _) => chain.iter().map(human).collect::<Vec<_>>().join("\n"),
        (Output::Json, true) => format!("{:#}\n", Value::Array(chain.iter().map(json).collect())),
        (Output::Json, false) => format!("{:#}\n", json(&chain[0])),
    };
    print(&text)
}

fn known(name: Option<&str>, path: &Path) -> Outcome<Option<ImageFormat>> {
    match name {
        None => Ok(None),
        Some("raw") => Ok(Some(ImageFormat::Raw)),
        Some("qcow2") => Ok(Some(ImageFormat::Qcow2)),
        Some(other) => Err(Failure::Failed(format!(
            "{}: format {other} is not known; raw and qcow2 are",
            path.display()
        ))),
    }
}

/// Describes an image, with its journal.
fn describe(path: &Path, format: Option<ImageFormat>, purpose: For) -> Outcome<Described> {
    let (file, mut described) = look(path, format, purpose)?;
    described.journal = described.qcow2.as_ref().and_then(|info| file.journal(&info.header));
    Ok(described)
}

/// Opens an image and describes what is in its file.
fn look(path: &Path, format: Option<ImageFormat>, purpose: For) -> Outcome<(ImageFile, Described)> {
    let file = ImageFile::open(path, purpose)?;
    let io = |e| Failure::Failed(format!("cannot read {}: {e}", path.display()));
    let format = match format {
        Some(format) => format,
        None => file.probe(path)?,
    };
    let file_bytes = file.len().map_err(io)?;
    let qcow2 = match format {
        ImageFormat::Qcow2 => Some(info(&file).map_err(|e| failed(path, &e))?),
        ImageFormat::Raw => None,
    };
    let size_bytes = match &qcow2 {
        Some(info) => info.header.size,
        None => file_bytes.next_multiple_of(512),
    };
    let (space_bytes, device) = (file.space().map_err(io)?, file.is_device());
    let path = path.to_owned();
    Ok((file, Described { path, size_bytes, space_bytes, file_bytes, device, qcow2, journal: None }))
}

/// Returns the path and the format of the backing image.
fn below(of: &Described) -> Option<(PathBuf, Option<String>)> {
    let header = &of.qcow2.as_ref()?.header;
    Some((beside(&of.path, header.backing.as_ref()?), header.backing_format.clone()))
}

/// Refuses a backing image that is one of those above, or that makes the chain too long.
pub(super) fn check_below<'a>(path: &Path, above: impl Iterator<Item = &'a Path>) -> Outcome {
    let above = Vec::from_iter(above);
    let (Some(top), Some(last)) = (above.first(), above.last()) else { return Ok(()) };
    let (shown, top, last) = (path.display(), top.display(), last.display());
    let own = id(path);
    if above.iter().any(|image| *image == path || own.is_some_and(|own| id(image) == Some(own))) {
        return Err(Failure::Failed(format!(
            "{last} has the backing image {shown}, which is below itself: name another one with 'vshunt image rebase -u -b FILE \
             -F FORMAT {last}'"
        )));
    }
    if above.len() > CHAIN_MAX {
        return Err(Failure::Failed(format!(
            "{top} has more than {CHAIN_MAX} backing images; 'qemu-img convert -O qcow2 {top} COPY' makes one image of them"
        )));
    }
    Ok(())
}

/// Adds to the failure for the image `path`, if it is missing, which image names it as its backing
/// image, and how that one gets another name. `above`: none for the image that a user has named.
pub(super) fn explained(
    e: Failure,
    above: Option<&Path>,
    path: &Path,
    format: Option<ImageFormat>,
) -> Failure {
    let (Some(above), Failure::Failed(text), false) = (above, &e, path.exists()) else { return e };
    let above = above.display();
    let format = match format {
        Some(ImageFormat::Raw) => "raw",
        Some(ImageFormat::Qcow2) => "qcow2",
        None => "FORMAT",
    };
    Failure::Failed(format!(
        "{above} has a backing image that is missing: {text}; put it back, or name where it is now: vshunt image rebase -u -b \
         FILE -F {format} {above}"
    ))
}

/// Opens the data file of an image.
pub(super) fn open_data(image: &Path, data: &Path, purpose: For) -> Outcome<ImageFile> {
    ImageFile::open(data, purpose).map_err(|e| match &e {
        Failure::Failed(text) if !data.exists() => Failure::Failed(format!(
            "{0} has a data file that is missing: {text}; put it back, or name where it is now: vshunt image amend -o \
             data_file=FILE {0}",
            image.display()
        )),
        _ => e,
    })
}

/// Returns the files of a qcow2 image and of its backing images, by their headers. Nothing is
/// locked. The list ends at an image that cannot be read. Images of other formats are not parsed.
pub(crate) fn chain(image: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut next = Some(image.to_owned());
    for _ in 0..=CHAIN_MAX {
        let Some(path) = next.take().filter(|path| !files.contains(path)) else { break };
        files.push(path.clone());
        let Ok((_, described)) = look(&path, Some(ImageFormat::Qcow2), For::Sharing) else { break };
        let header = described.qcow2.as_ref().map(|info| &info.header);
        files.extend(header.and_then(|h| h.data_file.as_ref()).map(|name| beside(&path, name)));
        match below(&described) {
            Some((path, Some(format))) if format == "qcow2" => next = Some(path),
            Some((path, _)) => files.push(path),
            None => {}
        }
    }
    files
}

/// Returns the data file of a qcow2 image, by its header.
pub(crate) fn data_file(image: &Path) -> Option<PathBuf> {
    let (_, described) = look(image, Some(ImageFormat::Qcow2), For::Sharing).ok()?;
    Some(beside(image, described.qcow2?.header.data_file.as_ref()?))
}

/// Returns the path for a file name in an image. The name is relative to the folder of the image.
pub(super) fn beside(image: &Path, name: &str) -> PathBuf {
    match image.parent() {
        // A URL or an absolute path is not changed.
        Some(folder) if !name.split('/').next().unwrap_or_default().contains(':') => folder.join(name),
        _ => PathBuf::from(name),
    }
}

fn compat(info: &Info) -> &'static str {
    if info.header.version < 3 { "0.10" } else { "1.1" }
}

fn compression(info: &Info) -> &'static str {
    match info.header.compression {
        Compression::Zlib => "zlib",
        Compression::Zstd => "zstd",
    }
}

fn flags(of: u32) -> Vec<&'static str> {
    let names = [(flag::IN_USE, "in-use"), (flag::AUTO, "auto")];
    names.iter().filter(|(bit, _)| of & bit != 0).map(|(_, name)| *name).collect()
}

fn human(of: &Described) -> String {
    let mut text = String::new();
    let _ = write!(
        text,
        "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {}\n",
        one_line(&of.path.display().to_string()),
        if of.qcow2.is_some() { "qcow2" } else { "raw" },
        units::size(of.size_bytes),
        of.size_bytes,
        units::size(of.space_bytes)
    );
    let Some(info) = &of.qcow2 else { return text };
    let h = &info.header;
    let _ = writeln!(text, "cluster_size: {}", h.cluster_size());
    if h.is_open() {
        text.push_str("cleanly shut down: no\n");
        if let Some(journal) = &of.journal {
            let _ = writeln!(text, "map journal: {}", journal.text());
        }
    }
    if let Some(name) = &h.backing {
        let full = beside(&of.path, name);
        let actual = if full == Path::new(name) {
            String::new()
        } else {
            format!(" (actual path: {})", one_line(&full.display().to_string()))
        };
        let _ = writeln!(text, "backing file: {}{actual}", one_line(name));
        if let Some(format) = &h.backing_format {
            let _ = writeln!(text, "backing file format: {}", one_line(format));
        }
    }
    if !info.snapshots.is_empty() {
        text.push_str("Snapshot list:\n");
        text.push_str(&snapshot_table(&info.snapshots));
    }
    text.push_str("Format specific information:\n");
    human_specific(info, &mut text);
    text
}

fn human_specific(info: &Info, text: &mut String) {
    let h = &info.header;
    let _ = write!(text, "    compat: {}\n    compression type: {}\n", compat(info), compression(info));
    if h.version >= 3 {
        let _ = writeln!(text, "    lazy refcounts: {}", h.compatible & LAZY_REFCOUNTS != 0);
    }
    if !info.bitmaps.is_empty() {
        text.push_str("    bitmaps:\n");
    }
    for (n, b) in info.bitmaps.iter().enumerate() {
        let _ = writeln!(text, "        [{n}]:\n            flags:");
        for (k, name) in flags(b.flags).into_iter().enumerate() {
            let _ = writeln!(text, "                [{k}]: {name}");
        }
        let _ = writeln!(
            text,
            "            name: {}\n            granularity: {}",
            one_line(&b.name()),
            1u64 << b.granularity_bits
        );
    }
    let _ = writeln!(text, "    refcount bits: {}", 1 << h.refcount_order);
    if h.version >= 3 {
        if let Some(name) = &h.data_file {
            let raw = h.autoclear & autoclear::RAW_DATA != 0;
            let _ = writeln!(text, "    data file: {}\n    data file raw: {raw}", one_line(name));
        }
        let corrupt = h.has(incompatible::CORRUPT);
        let _ =
            writeln!(text, "    corrupt: {corrupt}\n    extended l2: {}", h.has(incompatible::EXTENDED_L2));
    }
}

/// Formats snapshots like `qemu-img snapshot -l`.
pub(super) fn snapshot_table(list: &[Snapshot]) -> String {
    let mut text = String::new();
    let mut line = |cells: [&str; 6]| {
        let [id, tag, state, date, clock, icount] = cells;
        let _ = writeln!(text, "{id:<7} {tag:<16} {state:>8}{date:>20}{clock:>16}{icount:>11}");
    };
    line(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]);
    for s in list {
        let icount = s.icount.filter(|n| *n != u64::MAX).map_or("--".to_owned(), |n| n.to_string());
        let (state, date) = (units::size(s.vm_state_bytes), units::date(s.date_s));
        line([
            &one_line(&s.id()),
            &one_line(&s.name()),
            &state,
            &date,
            &units::clock(s.vm_clock_ns),
            &icount,
        ]);
    }
    text
}

/// Describes the file of an image, as QEMU 8.0 and newer do: a node below that of the format.
fn json_file(of: &Described) -> Value {
    json!({
        "children": [],
        "filename": of.path.display().to_string(),
        "format": if of.device { "host_device" } else { "file" },
        "virtual-size": of.file_bytes.next_multiple_of(512),
        "actual-size": of.space_bytes,
        "dirty-flag": false,
        "format-specific": { "type": "file", "data": {} },
    })
}

fn json(of: &Described) -> Value {
    let mut map = Map::new();
    map.insert("children".into(), json!([{ "name": "file", "info": json_file(of) }]));
    map.insert("filename".into(), json!(of.path.display().to_string()));
    map.insert("virtual-size".into(), json!(of.size_bytes));
    map.insert("actual-size".into(), json!(of.space_bytes));
    map.insert("format".into(), json!(if of.qcow2.is_some() { "qcow2" } else { "raw" }));
    let Some(info) = &of.qcow2 else {
        map.insert("dirty-flag".into(), json!(false));
        return Value::Object(map);
    };
    let h = &info.header;
    map.insert("dirty-flag".into(), json!(h.is_open()));
    map.insert("cluster-size".into(), json!(h.cluster_size()));
    if let Some(journal) = &of.journal {
        map.insert("map-journal".into(), journal.json());
    }
    if let Some(name) = &h.backing {
        map.insert("backing-filename".into(), json!(name));
        map.insert("full-backing-filename".into(), json!(beside(&of.path, name).display().to_string()));
        if let Some(format) = &h.backing_format {
            map.insert("backing-filename-format".into(), json!(format));
        }
    }
    if !info.snapshots.is_empty() {
        map.insert("snapshots".into(), info.snapshots.iter().map(json_snapshot).collect());
    }
    map.insert("format-specific".into(), json!({ "type": "qcow2", "data": json_specific(info) }));
    Value::Object(map)
}

fn json_snapshot(s: &Snapshot) -> Value {
    const NS: u64 = 1_000_000_000;
    let mut value = json!({
        "id": s.id(),
        "name": s.name(),
        "vm-state-size": s.vm_state_bytes,
        "date-sec": s.date_s,
        "date-nsec": s.date_ns,
        "vm-clock-sec": s.vm_clock_ns / NS,
        "vm-clock-nsec": s.vm_clock_ns % NS,
    });
    if let Some(icount) = s.icount.filter(|n| *n != u64::MAX) {
        value["icount"] = json!(icount);
    }
    value
}

fn json_specific(info: &Info) -> Value {
    let h = &info.header;
    let mut value = json!({
        "compat": compat(info),
        "compression-type": compression(info),
        "refcount-bits": 1 << h.refcount_order,
    });
    if h.version < 3 {
        return value;
    }
    value["lazy-refcounts"] = json!(h.compatible & LAZY_REFCOUNTS != 0);
    value["corrupt"] = json!(h.has(incompatible::CORRUPT));
    value["extended-l2"] = json!(h.has(incompatible::EXTENDED_L2));
    if let Some(name) = &h.data_file {
        value["data-file"] = json!(name);
        value["data-file-raw"] = json!(h.autoclear & autoclear::RAW_DATA != 0);
    }
    if !info.bitmaps.is_empty() {
        let one = |b: &qcow2::bitmap::Bitmap| json!({ "name": b.name(), "granularity": 1u64 << b.granularity_bits, "flags": flags(b.flags) });
        value["bitmaps"] = info.bitmaps.iter().map(one).collect();
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_images_are_relative_to_their_folder() {
        for (image, name, path) in [
            ("a.qcow2", "b", "b"),
            ("/d/a.qcow2", "b", "/d/b"),
            ("d/a.qcow2", "../b", "d/../b"),
            ("d/a.qcow2", "/b", "/b"),
            ("d/a.qcow2", "nbd://host/x", "nbd://host/x"),
            ("d/a.qcow2", "x/y:z", "d/x/y:z"),
        ] {
            assert_eq!(beside(Path::new(image), name), PathBuf::from(path), "{image} {name}");
        }
    }
}
