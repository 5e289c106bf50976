//! `vshunt image convert`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use vshunt_daemon::ToConvert;

use super::access::{self, Wanted};
use super::args::{ConvertArgs, CreateArgs, Mode};
use super::file::{For, ImageFile, id};
use super::info::{self, beside};
use super::progress::{Bar, summary};
use super::{ImageFormat, bitmap, create, failed, no_qcow2};
use crate::outcome::{Failure, Outcome, note, print};

/// The exit code for a copy of an image that may lack completed writes.
const LACKS: u8 = 3;

pub(super) fn run(args: ConvertArgs, quiet: bool) -> Outcome {
    if create::is_help(&args.options) {
        return create::help(args.output_format);
    }
    if args.compress {
        check_compressed(&args)?;
    }
    let (Some(from_file), Some(to_file)) = (args.from.clone(), args.to.clone()) else {
        return Err(create::no_file(
            "which images? give the name of the one that is copied, and of the new one",
        ));
    };
    let (format, size) = source(&args, &from_file)?;
    not_of(&to_file, from_file.clone(), format == ImageFormat::Qcow2)?;
    let bitmaps = match args.bitmaps {
        true => bitmaps(&args, format, &from_file)?,
        false => Vec::new(),
    };
    let new = !to_file.exists();
    if args.no_create {
        check_there(&to_file)?;
        if !bitmaps.is_empty() {
            check_as_long(&to_file, size)?;
        }
    }
    let reading = if args.force_share { Wanted::Sharing } else { Wanted::Reading };
    let from = access::spec(&from_file, format, reading);
    let to = access::spec(&to_file, args.output_format, Wanted::Writing);
    // Before a file is made, so that an unreadable source replaces nothing.
    let source = ToConvert::open(&from).map_err(|e| Failure::Failed(e.to_string()))?;
    let readings = source.readings();
    readings.iter().for_each(|reading| note(&reading.text));
    let data = create::data_file(&args.options, &to_file)?;
    let mut options = args.options;
    if let Some(data) = &data {
        not_of(&data.path, from_file.clone(), format == ImageFormat::Qcow2)?;
        options.extend(data.replaced.then(|| "keep_data_file=off".to_owned()));
    }
    let data = data.map(|data| (!data.path.exists(), data.path));
    if !args.no_create {
        let create = CreateArgs {
            format: args.output_format,
            backing: None,
            backing_format: None,
            unsafe_backing: false,
            options,
            file: Some(to_file.clone()),
            size: Some(size),
        };
        create::run(create, true)?;
    }
    let fresh = args.target_is_zero || !args.no_create && !to_file.metadata().is_ok_and(|m| !m.is_file());
    let (mut bar, start) = (Bar::bytes("converting", quiet, args.progress), Instant::now());
    let done = source.to(&to, args.compress, fresh, &mut |done, all| bar.set(done, all));
    drop(bar);
    let done = done.map_err(|e| Failure::Failed(e.to_string()));
    let larger =
        done.and_then(|larger| bitmap::add_all(&to_file, &bitmaps).map(|()| larger)).inspect_err(|_| {
            // An incomplete copy is removed.
            let made = [Some((new, to_file.clone())), data];
            for (_, file) in made.into_iter().flatten().filter(|(new, _)| *new) {
                let _ = std::fs::remove_file(file);
            }
        })?;
    if larger > 0 && !quiet {
        note(&format!(
            "{} is {larger} bytes larger than the copy; these stay as they are",
            to_file.display()
        ));
    }
    if !quiet {
        print(&summary("Copied", size, start.elapsed()))?;
    }
    match readings.iter().any(|reading| reading.lost_writes) {
        true => Err(Failure::Status(LACKS)),
        false => Ok(()),
    }
}

/// Checks that an image to which bitmaps are copied has a disk of `size` bytes: they cover a whole
/// disk.
fn check_as_long(target: &Path, size: u64) -> Outcome {
    let file = ImageFile::open(target, For::Reading)?;
    let has = qcow2::Image::open(&file).map_err(|e| failed(target, &e))?.header().size;
    match has == size {
        true => Ok(()),
        false => Err(Failure::Failed(format!(
            "{} has a disk of {has} bytes, and bitmaps of one of {size} are to be copied to it; leave out --bitmaps",
            target.display()
        ))),
    }
}

/// Checks that an image that is not made is there. Reports a wait for another process, which the
/// disk that is made of it would not.
fn check_there(target: &Path) -> Outcome {
    if !target.exists() {
        let shown = target.display();
        return Err(Failure::Failed(format!("{shown} is not there; leave out -n to have it made")));
    }
    ImageFile::open(target, For::Writing).map(drop)
}

/// Checks that the target can have compressed clusters.
fn check_compressed(args: &ConvertArgs) -> Outcome {
    let refused = |why: &str| Err(Failure::Usage(why.to_owned()));
    if args.output_format == ImageFormat::Raw {
        return refused("a raw image has no compressed clusters; leave out -c, or give -O qcow2");
    }
    let wanted = create::parsed(&args.options)?;
    if wanted.data_file.is_some() {
        return refused("an image with a data file has no compressed clusters; leave out -c, or data_file");
    }
    if wanted.preallocation.is_some_and(|mode| mode != Mode::Off) {
        return refused("compressed clusters cannot be preallocated; leave out -c, or preallocation");
    }
    let target = args.to.as_deref().filter(|_| args.no_create);
    match target.and_then(|target| Some((target, info::data_file(target)?))) {
        None => Ok(()),
        Some((target, data)) => Err(Failure::Failed(format!(
            "{} has the data file {}, so it has no compressed clusters; leave out -c",
            target.display(),
            data.display()
        ))),
    }
}

/// Returns the bitmaps of the source, which both formats have to support.
fn bitmaps(args: &ConvertArgs, format: ImageFormat, from: &Path) -> Outcome<Vec<bitmap::Copied>> {
    if args.output_format == ImageFormat::Raw {
        return Err(Failure::Usage(
            "a raw image has no bitmaps; leave out --bitmaps, or give -O qcow2".into(),
        ));
    }
    match format {
        ImageFormat::Raw => Err(no_qcow2(from, "bitmaps; leave out --bitmaps")),
        ImageFormat::Qcow2 => bitmap::read_all(from, args.force_share, args.skip_broken_bitmaps),
    }
}

/// Refuses a target that is a file of the source image, under any name. It would be truncated
/// before it is read.
pub(super) fn not_of(target: &Path, image: PathBuf, is_qcow2: bool) -> Outcome {
    let Some(target_id) = id(target) else { return Ok(()) };
    let (shown, top) = (target.display(), image.display().to_string());
    if id(&image) == Some(target_id) {
        return Err(Failure::Usage(format!("{top} cannot be copied to itself, {shown}")));
    }
    let mut next = is_qcow2.then_some(image);
    for _ in 0..=vshunt_block::CHAIN_MAX {
        let Some(path) = next else { break };
        let file = ImageFile::open(&path, For::Sharing)?;
        let header = qcow2::Image::open(&file).map_err(|e| failed(&path, &e))?.header().clone();
        let below = header.backing.map(|name| beside(&path, &name));
        let data = header.data_file.map(|name| beside(&path, &name));
        if [&below, &data].into_iter().flatten().any(|file| id(file) == Some(target_id)) {
            return Err(Failure::Usage(format!("{top} consists of {shown} too; give the copy another name")));
        }
        next = below.filter(|_| header.backing_format.as_deref() == Some("qcow2"));
    }
    Ok(())
}

/// Returns the format of the source image and the size of its disk in bytes.
fn source(args: &ConvertArgs, from: &Path) -> Outcome<(ImageFormat, u64)> {
    let shown = from.display();
    let file = ImageFile::open(from, if args.force_share { For::Sharing } else { For::Reading })?;
    let cannot = |e: std::io::Error| Failure::Failed(format!("cannot read {shown}: {e}"));
    let format = match args.format {
        Some(format) => format,
        None => file.probe(from)?,
    };
    let size = match format {
        ImageFormat::Raw => qcow2::Storage::len(&file).map_err(cannot)?,
        ImageFormat::Qcow2 => qcow2::Image::open(&file).map_err(|e| failed(from, &e))?.header().size,
    };
    // A raw file may end within a sector. The rest of that sector reads as zeroes.
    match size.checked_next_multiple_of(512) {
        Some(rounded) if size > 0 || format == ImageFormat::Qcow2 => Ok((format, rounded)),
        _ => Err(Failure::Failed(format!("{shown} has {size} bytes, which is no size of a disk"))),
    }
}
