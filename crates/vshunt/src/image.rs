//! `vshunt image …`: images that nobody uses, under the names that users of qemu-img know.
//!
//! All of it runs in this process, without a daemon; the image is locked meanwhile as QEMU locks
//! it.

mod args;
mod bitmap;
mod check;
mod convert;
mod create;
mod file;
mod info;
mod journal;
mod progress;
mod resize;
mod snapshot;
mod units;

use std::path::Path;

use args::ImageCommand;
pub(crate) use args::{AFTER, ImageArgs};
use file::{For, ImageFile};
pub(crate) use info::{chain, data_file};
pub(crate) use progress::Bar;
use qcow2::Image;
use qcow2::check::{Repair, check as check_image};
use qcow2::header::incompatible;

use crate::outcome::{Failure, Outcome};

/// Formats that these commands know.
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
        ImageCommand::Check(args) => check::run(&args, quiet),
        ImageCommand::Resize(args) => resize::run(&args, quiet),
        ImageCommand::Snapshot(args) => snapshot::run(&args, quiet),
        ImageCommand::Bitmap(args) => bitmap::run(&args, quiet),
    }
}

/// What failed with which image, and what helps.
fn failed(path: &Path, e: &qcow2::Error) -> Failure {
    let path = path.display();
    Failure::Failed(match e {
        qcow2::Error::Corrupt(_) => {
            format!("{path}: {e}; `vshunt image check -r all {path}` repairs what can be repaired")
        }
        _ => format!("{path}: {e}"),
    })
}

/// Opens an image that is to be changed, and its format. A qcow2 image is checked first: what its
/// counts call free is written to. One that was not closed is repaired.
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

/// Shows how far the check is, and not what it finds.
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
