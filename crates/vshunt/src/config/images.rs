//! `vshunt serve FILE…` and `vshunt mount FILE`: a disk and an export for each image, with names,
//! format and place that follow from the file.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use qcow2::header::Header;
use rustix::fs::Access;
use vshunt_block::{has_name_of_qcow2, open_image};
use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec, Format};

use super::Setup;
use crate::foreign;
use crate::outcome::{Failure, Outcome};
use crate::run_folder;
use crate::values::name_of;

/// Images at most in one command line. Each has a socket and a few descriptors.
const IMAGES_MAX: usize = 256;

/// Formats of compressed files, by their first bytes: bytes, name, program that decompresses them.
const COMPRESSED: [(&[u8], &str, &str); 5] = [
    (b"\x1f\x8b\x08", "gzip", "gunzip"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"PK\x03\x04", "zip", "unzip"),
];

/// Adds a disk and a vhost-user-blk export for each image. The socket of the export is in the run
/// folder.
///
/// # Errors
/// Usage: a file is missing, is given twice, or its format is not clear. The run folder cannot be
/// used.
pub(super) fn serve(setup: &mut Setup, images: &[PathBuf], readonly: bool) -> Outcome {
    if images.len() > IMAGES_MAX {
        return Err(Failure::Usage(format!(
            "{} files are given, and {IMAGES_MAX} are the most; start another daemon with its own --control",
            images.len()
        )));
    }
    let mut seen = HashSet::new();
    for image in images {
        let disk = disk(setup, image, readonly)?;
        if !seen.insert(std::fs::canonicalize(image).unwrap_or_else(|_| image.clone())) {
            return Err(Failure::Usage(format!("{} is given twice; leave one out", image.display())));
        }
        let folder = run_folder::make("give --disk and --export with socket=PATH")?;
        let export = ExportSpec {
            kind: ExportKind::VhostUserBlk,
            name: disk.name.clone(),
            disk: disk.name.clone(),
            socket: Some(folder.join(format!("{}.sock", disk.name))),
            ..ExportSpec::default()
        };
        add(setup, disk, export);
    }
    Ok(())
}

/// Adds a disk and a mount for an image. Without `at`, the file to mount over is in the run folder.
///
/// # Errors
/// As for [`serve`].
pub(super) fn mount(setup: &mut Setup, image: &Path, at: Option<PathBuf>, readonly: bool) -> Outcome {
    let disk = disk(setup, image, readonly)?;
    let at = match at {
        Some(at) => at,
        None => free_file(&run_folder::make("give FILE, the file to mount over")?, &disk.name),
    };
    let export = ExportSpec {
        kind: ExportKind::Fuse,
        name: disk.name.clone(),
        disk: disk.name.clone(),
        writable: (!disk.readonly).then_some(true),
        mountpoint: Some(std::path::absolute(&at).unwrap_or(at)),
        ..ExportSpec::default()
    };
    add(setup, disk, export);
    Ok(())
}

fn add(setup: &mut Setup, disk: DiskSpec, export: ExportSpec) {
    setup.images.push(export.name.clone());
    setup.disks.push(disk);
    setup.exports.push(export);
}

/// Returns the disk for an image, under a name that is free.
fn disk(setup: &mut Setup, image: &Path, readonly: bool) -> Outcome<DiskSpec> {
    let format = probe(image)?;
    if let Some(why) = foreign::misnamed(image, format == Format::Qcow2) {
        let file = image.display();
        setup.notes.push(format!(
            "{why}; rename it, or give --disk file={file},format=raw and --export if its name is right"
        ));
    }
    let name = free_name(setup, &name_of(image, "disk"));
    let refused = rustix::fs::access(image, Access::WRITE_OK).err().filter(|_| !readonly);
    if let Some(e) = refused {
        setup.notes.push(format!("{} cannot be written ({e}), so it is served read-only", image.display()));
    }
    Ok(DiskSpec {
        name,
        format: Some(format),
        // Other commands have another working directory.
        file: Some(std::path::absolute(image).unwrap_or_else(|_| image.to_owned())),
        readonly: readonly || refused.is_some(),
        locking: true,
        ..DiskSpec::default()
    })
}

/// Returns `name`, or with a number behind it if a disk or export has that name.
fn free_name(setup: &Setup, name: &str) -> String {
    let taken = |name: &str| {
        setup.disks.iter().any(|disk| disk.name == name)
            || setup.exports.iter().any(|export| export.name == name)
    };
    numbered(name, |name| !taken(name))
}

/// Returns the first of `name`, `name-2`, `name-3`, … that is free.
pub(crate) fn numbered(name: &str, is_free: impl Fn(&str) -> bool) -> String {
    let later = (2u64..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.to_owned()).chain(later).find(|name| is_free(name)).unwrap_or_default()
}

/// Returns a file of the folder that can be mounted over: a new one, or one that a killed daemon
/// has left.
fn free_file(folder: &Path, name: &str) -> PathBuf {
    let path = |name: &str| folder.join(format!("{name}.raw"));
    let is_free = |name: &str| match std::fs::symlink_metadata(path(name)) {
        Ok(meta) => meta.is_file() && meta.len() == 0,
        // A dead mount: the next daemon removes it.
        Err(e) => e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENOTCONN),
    };
    path(&numbered(name, is_free))
}

/// Returns the format of an image.
///
/// The guest of a raw image chooses its first bytes. Therefore the bytes alone never make this
/// process open another file: an image that names a backing or data file is taken as qcow2 only if
/// the name of the image says so.
fn probe(image: &Path) -> Outcome<Format> {
    let shown = image.display();
    let keys = |format: &str| format!("--disk file={shown},format={format} and --export");
    let start = read(image, foreign::START_BYTES)?;
    let named = has_name_of_qcow2(image);
    if let Some(version) = Header::probe(&start) {
        if !Header::knows(version) {
            return Err(Failure::Usage(format!(
                "{shown} begins as a qcow2 image of version {version}, and versions 2 and 3 are known; convert it with \
                 qemu-img, or give {} if its bytes are the disk",
                keys("raw")
            )));
        }
        // An invalid header is reported when the disk is opened.
        let header = Header::parse(&read(image, Header::BYTES_MAX)?).ok().filter(|_| !named);
        if let Some(other) = header.and_then(|header| header.backing.or(header.data_file)) {
            return Err(Failure::Usage(format!(
                "{shown} begins as a qcow2 image on top of the file {other:?}, and its name does not end with .qcow2. If it is \
                 one, rename it or give {}; if a guest has written that into a raw image, give {}",
                keys("qcow2"),
                keys("raw")
            )));
        }
        return Ok(Format::Qcow2);
    }
    if named {
        return Err(Failure::Usage(format!(
            "{shown} has the name of a qcow2 image and does not begin as one; rename it, or give {} if its bytes are the disk",
            keys("raw")
        )));
    }
    if let Some(what) = foreign::format(&start) {
        return Err(Failure::Usage(format!(
            "{shown} begins as {what}, which is not served; convert it (qemu-img convert -O qcow2 {shown} disk.qcow2), or give \
             {} if its bytes are the disk",
            keys("raw")
        )));
    }
    if let Some((_, what, program)) = COMPRESSED.iter().find(|(bytes, ..)| start.starts_with(bytes)) {
        return Err(Failure::Usage(format!(
            "{shown} begins as a file compressed with {what}; decompress it with {program}, or give {} if its bytes are the \
             disk",
            keys("raw")
        )));
    }
    Ok(Format::Raw)
}

/// Reads the first bytes of an image, or all of a shorter one.
fn read(image: &Path, most: usize) -> Outcome<Vec<u8>> {
    let shown = image.display();
    let mut start = Vec::new();
    let file = open_image(image, false).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound if image.to_string_lossy().contains('=') => Failure::Usage(format!(
            "there is no file {shown}; the keys of an option are joined by commas, without spaces: --disk KEY=VALUE,KEY=VALUE"
        )),
        io::ErrorKind::NotFound if image.starts_with("/dev") && !image.starts_with("/dev/shm") => {
            Failure::Usage(format!("there is no device {shown}; check the name, and activate its volume (vgchange -ay)"))
        }
        io::ErrorKind::NotFound if has_name_of_qcow2(image) => Failure::Usage(format!(
            "there is no file {shown}; make an empty one: vshunt image create -f qcow2 {shown} 20G"
        )),
        io::ErrorKind::NotFound => Failure::Usage(format!(
            "there is no file {shown}; make an empty one: truncate -s 20G {shown}, or vshunt image create -f qcow2 disk.qcow2 20G"
        )),
        io::ErrorKind::InvalidInput => Failure::Usage(e.to_string()),
        _ => Failure::Failed(format!("cannot open {shown}: {e}")),
    })?;
    let read = file.take(most as u64).read_to_end(&mut start);
    read.map_err(|e| Failure::Failed(format!("cannot read {shown}: {e}")))?;
    Ok(start)
}
