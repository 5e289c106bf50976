//! `vshunt image bitmap`.

use std::path::Path;

use qcow2::{Error, Image, bitmap};

use super::args::BitmapArgs;
use super::file::{For, ImageFile};
use super::{ImageFormat, changing, failed, no_qcow2};
use crate::outcome::{Failure, Outcome};

pub(super) fn run(args: &BitmapArgs, quiet: bool) -> Outcome {
    let path = &args.file;
    let flags = [args.add, args.remove, args.clear, args.enable, args.disable];
    if !flags.contains(&true) && args.merge.is_empty() {
        return Err(Failure::Usage(
            "what to do? give --add, --remove, --clear, --merge, --enable or --disable".into(),
        ));
    }
    let granularity_bits = args.granularity.map(log2).transpose()?;
    let (file, format) = changing(path, args.format, quiet)?;
    if format != ImageFormat::Qcow2 {
        return Err(no_qcow2(path, "bitmaps"));
    }
    let mut image = Image::open(&file).map_err(|e| failed(path, &e))?;
    let name = args.bitmap.as_str();
    let fail = |e: Error| failed(path, &e);
    if args.add {
        bitmap::add(&mut image, name, granularity_bits, !args.disable).map_err(fail)?;
    }
    if args.clear {
        bitmap::clear(&mut image, name).map_err(fail)?;
    }
    for source in &args.merge {
        let bits = match &args.source_file {
            Some(other) => load(other, args.source_format, source)?,
            None => bitmap::load(&image, source).map_err(fail)?,
        };
        bitmap::merge(&mut image, name, &bits).map_err(fail)?;
    }
    if args.enable || (args.disable && !args.add) {
        bitmap::enable(&mut image, name, args.enable).map_err(fail)?;
    }
    if args.remove {
        bitmap::remove(&mut image, name).map_err(fail)?;
    }
    Ok(())
}

fn log2(granularity: u64) -> Outcome<u32> {
    match granularity.is_power_of_two() {
        true => Ok(granularity.trailing_zeros()),
        false => Err(Failure::Usage(format!("the granularity {granularity} is not a power of two"))),
    }
}

/// Reads the bits of a bitmap of another image.
fn load(path: &Path, format: Option<ImageFormat>, name: &str) -> Outcome<bitmap::Bits> {
    if format == Some(ImageFormat::Raw) {
        return Err(no_qcow2(path, "bitmaps"));
    }
    let file = ImageFile::open(path, For::Reading)?;
    let image = Image::open(&file).map_err(|e| failed(path, &e))?;
    bitmap::load(&image, name).map_err(|e| failed(path, &e))
}
