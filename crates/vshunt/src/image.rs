//! `vshunt image …`: commands for images that no process uses, with the names of qemu-img.
//!
//! The commands run in this process, without a daemon. They lock the image as QEMU does.

pub(crate) mod absent;
mod access;
mod amend;
mod args;
mod bitmap;
mod chain;
mod check;
mod compare;
mod convert;
mod create;
mod dd;
mod file;
mod holder;
mod info;
mod journal;
mod map;
mod measure;
mod progress;
mod rebase;
mod resize;
mod snapshot;
mod units;

use std::path::Path;

use args::ImageCommand;
pub(crate) use args::{AFTER, ImageArgs};
use file::{For, ImageFile};
pub(crate) use info::{chain, data_file};
pub(crate) use progress::{Bar, summary};
use qcow2::Image;
use qcow2::check::{Repair, check as check_image};
use qcow2::header::incompatible;

use crate::outcome::{Failure, Outcome};

/// The image formats of these commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageFormat {
    Raw,
    Qcow2,
}

pub(crate) fn run(command: ImageCommand, quiet: bool) -> Outcome {
    match command {
        ImageCommand::Create(args) => create::run(*args, quiet),
        ImageCommand::Convert(args) => convert::run(*args, quiet),
        ImageCommand::Info(args) => info::run(&args),
        ImageCommand::Map(args) => map::run(&args),
        ImageCommand::Measure(args) => measure::run(&args),
        ImageCommand::Compare(args) => compare::run(&args, quiet),
        ImageCommand::Check(args) => check::run(&args, quiet),
        ImageCommand::Amend(args) => amend::run(&args, quiet),
        ImageCommand::Rebase(args) => rebase::run(&args, quiet),
        ImageCommand::Dd(args) => dd::run(&args, quiet),
        ImageCommand::Resize(args) => resize::run(&args, quiet),
        ImageCommand::Snapshot(args) => snapshot::run(&args, quiet),
        ImageCommand::Bitmap(args) => bitmap::run(&args, quiet),
    }
}

/// Returns the failure for an error with an image, with the remedy.
fn failed(path: &Path, e: &qcow2::Error) -> Failure {
    let path = path.display();
    Failure::Failed(match e {
        qcow2::Error::Corrupt(_) => {
            format!("{path}: {e}; `vshunt image check -r all {path}` repairs what can be repaired")
        }
        qcow2::Error::Header(_) => {
            format!("{path}: {e}; `vshunt image check` cannot repair that: take the image from a backup")
        }
        _ => format!("{path}: {e}"),
    })
}

/// Opens an image for a change. Returns it with its format. A qcow2 image is checked first, because
/// clusters that are free by its reference counts are overwritten. An image that was not closed is
/// repaired.
fn changing(path: &Path, format: Option<ImageFormat>, quiet: bool) -> Outcome<(ImageFile, ImageFormat)> {
    let file = ImageFile::open(path, For::Writing)?;
    let format = match format {
        Some(format) => format,
        None => file.probe(path)?,
    };
    if format == ImageFormat::Raw {
        return Ok((file, format));
    }
    let fail = |e: qcow2::Error| failed(path, &e);
    let header = Image::open(&file).map_err(fail)?.header().clone();
    let dirty = header.is_open() && !header.has(incompatible::CORRUPT);
    if dirty {
        file.recover(path)?;
    }
    let mut bar = Bar::new("checking", quiet);
    let repair = if dirty { Repair::All } else { Repair::No };
    let result = check_image(&file, repair, &mut Silent(&mut bar)).map_err(fail)?;
    if result.corruptions > 0 || result.check_errors > 0 || header.has(incompatible::CORRUPT) {
        let why = format!("{} errors were found", result.corruptions + result.check_errors);
        return Err(failed(path, &qcow2::Error::Corrupt(why)));
    }
    if dirty {
        file.recovered();
    }
    Ok((file, format))
}

/// Shows the progress of a check, without its findings.
struct Silent<'b>(&'b mut Bar);

impl qcow2::check::Findings for Silent<'_> {
    fn found(&mut self, _: &str) {}

    fn progress(&mut self, done: u64, total: u64) {
        self.0.set(done, total);
    }
}

fn no_qcow2(path: &Path, what: &str) -> Failure {
    Failure::Failed(format!("{}: images of format raw have no {what}", path.display()))
}
