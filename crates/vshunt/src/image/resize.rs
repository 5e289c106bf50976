//! `vshunt image resize`.

use std::path::Path;

use qcow2::header::Header;
use qcow2::resize::Around;
use qcow2::{Image, Storage};
use vshunt_block::Disk;
use vshunt_types::spec::{Cache, DiskSpec, Format};

use super::args::{Mode, ResizeArgs};
use super::chain::no_format;
use super::create::{backing_size, fill};
use super::file::{For, ImageFile};
use super::info::{beside, explained, open_data};
use super::progress::Bar;
use super::{ImageFormat, changing, failed};
use crate::outcome::{Failure, Outcome, print};

pub(super) fn run(args: &ResizeArgs, quiet: bool) -> Outcome {
    let path = &args.file;
    let (file, format) = changing(path, args.format, quiet)?;
    let io = |e| Failure::Failed(format!("cannot read {}: {e}", path.display()));
    let old = match format {
        ImageFormat::Raw => file.len().map_err(io)?,
        ImageFormat::Qcow2 => Image::open(&file).map_err(|e| failed(path, &e))?.header().size,
    };
    let size = args.size.of(old).ok_or_else(|| {
        Failure::Failed(format!("{} has {old} bytes, which cannot be changed by that much", path.display()))
    })?;
    let size = size.checked_next_multiple_of(512).unwrap_or(u64::MAX);
    if size < old && !args.shrink {
        return Err(Failure::Failed(format!(
            "this would cut {} from {old} to {size} bytes and lose what lies beyond; give --shrink if you mean it",
            path.display()
        )));
    }
    let mode = args.preallocation.unwrap_or(Mode::Off);
    if size < old && mode != Mode::Off {
        return Err(Failure::Usage("preallocation is for images that grow".into()));
    }
    match format {
        ImageFormat::Raw => raw(path, &file, (old, size), mode, quiet)?,
        ImageFormat::Qcow2 => qcow2(path, &file, size, mode, quiet)?,
    }
    if quiet { Ok(()) } else { print("Image resized.\n") }
}

fn raw(path: &Path, file: &ImageFile, (old, size): (u64, u64), mode: Mode, quiet: bool) -> Outcome {
    if mode == Mode::Metadata {
        return Err(Failure::Usage("format raw has preallocation=off, falloc and full".into()));
    }
    if file.is_device() {
        return Err(Failure::Failed(format!("{} is a block device, which keeps its size", path.display())));
    }
    let mut bar = Bar::new("preallocating", quiet);
    let done = file.set_len(size).and_then(|()| fill(file, old..size.max(old), mode, &mut bar));
    done.map_err(|e| Failure::Failed(format!("cannot resize {}: {e}", path.display())))
}

/// Changes the size of the disk in a qcow2 image, which was checked.
pub(super) fn qcow2(path: &Path, file: &ImageFile, size: u64, mode: Mode, quiet: bool) -> Outcome {
    let header = Image::open(file).map_err(|e| failed(path, &e))?.header().clone();
    let data = match &header.data_file {
        Some(name) => Some(open_data(path, &beside(path, name), For::Writing)?),
        None => None,
    };
    // The backing image matters only for the part by which the disk grows.
    let below = if size > header.size { below(path, &header)? } else { None };
    let ends_within = !header.size.is_multiple_of(header.cluster_size());
    if ends_within && below.is_some_and(|below| below > header.size || mode != Mode::Off) {
        own_last_cluster(path)?;
    }
    let mut image = Image::open(file).map_err(|e| failed(path, &e))?;
    let around =
        Around { data: data.as_ref().map(|d| d as &dyn Storage), below, preallocation: mode.preallocation() };
    let mut bar = Bar::new("preallocating", quiet);
    qcow2::resize::resize(&mut image, size, &around, &mut |done, all| bar.set(done, all))
        .map_err(|e| failed(path, &e))
}

/// Copies the last cluster of the disk from the backing image into the image. The image is opened
/// as a disk, with its backing chain.
fn own_last_cluster(path: &Path) -> Outcome {
    let spec = DiskSpec {
        name: path.display().to_string(),
        file: Some(path.to_owned()),
        format: Some(Format::Qcow2),
        // All writes are stable when it is closed, so it needs no journal.
        cache: Cache::Writethrough,
        // This process has locked it through another descriptor.
        locking: false,
        ..DiskSpec::default()
    };
    let disk = Disk::open(&spec).map_err(|e| Failure::Failed(e.to_string()))?;
    // The content of the disk does not change, so its bitmaps stay valid.
    let bitmaps = disk.take_bitmaps();
    let done = disk.own_last_cluster();
    disk.put_bitmaps(bitmaps);
    done.and_then(|()| disk.close()).map_err(|e| Failure::Failed(format!("{}: {e}", path.display())))
}

fn below(path: &Path, header: &Header) -> Outcome<Option<u64>> {
    match (&header.backing, &header.backing_format) {
        (None, _) => Ok(None),
        (Some(name), Some(format)) => {
            let below = beside(path, name);
            let of = if format == "raw" { ImageFormat::Raw } else { ImageFormat::Qcow2 };
            backing_size(path, name, format).map(Some).map_err(|e| explained(e, Some(path), &below, Some(of)))
        }
        (Some(name), None) => Err(no_format(path, Some(name))),
    }
}
