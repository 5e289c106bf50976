//! The contents of an image with its backing images, for commands that read and write them.

use std::path::Path;

use vshunt_block::{Disk, DiskAccess};
use vshunt_types::spec::{DiskSpec, Format};

use super::ImageFormat;
use super::file::{For, ImageFile};
use crate::outcome::{Failure, Outcome, note};

/// The purpose for which an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Reading,
    /// Reading, even if another process writes.
    Sharing,
    Writing,
}

/// An open image.
pub(super) struct Opened {
    pub(super) disk: DiskAccess,
    pub(super) format: ImageFormat,
    /// Whether completed writes may be missing.
    pub(super) lost_writes: bool,
}

/// Returns the format of an image, detected if it is not given. Refuses what cannot be opened.
pub(super) fn format_of(path: &Path, format: Option<ImageFormat>, wanted: Wanted) -> Outcome<ImageFormat> {
    let purpose = match wanted {
        Wanted::Reading => For::Reading,
        Wanted::Sharing => For::Sharing,
        Wanted::Writing => For::Writing,
    };
    let file = ImageFile::open(path, purpose)?;
    format.map_or_else(|| file.probe(path), Ok)
}

/// Returns the description of an image as a disk.
pub(super) fn spec(path: &Path, format: ImageFormat, wanted: Wanted) -> DiskSpec {
    DiskSpec {
        name: path.display().to_string(),
        file: Some(path.to_owned()),
        format: Some(if format == ImageFormat::Raw { Format::Raw } else { Format::Qcow2 }),
        readonly: wanted != Wanted::Writing,
        locking: wanted != Wanted::Sharing,
        ..DiskSpec::default()
    }
}

/// Opens an image with its backing images, and warns the user about each that was not closed.
pub(super) fn open(path: &Path, format: Option<ImageFormat>, wanted: Wanted) -> Outcome<Opened> {
    let format = format_of(path, format, wanted)?;
    let failed = |e: vshunt_types::error::Error| Failure::Failed(e.to_string());
    let disk = Disk::open(&spec(path, format, wanted)).map_err(failed)?;
    let readings = disk.unclean_images();
    readings.iter().for_each(|reading| note(&reading.text));
    let lost_writes = disk.lost_writes() || readings.iter().any(|reading| reading.lost_writes);
    let disk = DiskAccess::new(disk)
        .map_err(|e| Failure::Failed(format!("{}: an io_uring cannot be made: {e}", path.display())))?;
    Ok(Opened { disk, format, lost_writes })
}
