//! `vshunt image bitmap`.

use std::path::Path;

use qcow2::{Error, Image, bitmap};

use super::args::BitmapArgs;
use super::file::{For, ImageFile};
use super::{ImageFormat, changing, failed, no_qcow2};
use crate::outcome::{Failure, Outcome, warn};

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

/// A bitmap that `convert` copies.
pub(super) struct Copied {
    name: String,
    enabled: bool,
    bits: bitmap::Bits,
}

/// Reads the bitmaps of an image. `shared`: it is not locked. `skip_broken`: those that their last
/// writer did not store are left out.
///
/// # Errors
/// A bitmap cannot be read, or was not stored.
pub(super) fn read_all(path: &Path, shared: bool, skip_broken: bool) -> Outcome<Vec<Copied>> {
    let file = ImageFile::open(path, if shared { For::Sharing } else { For::Reading })?;
    let fail = |e: Error| failed(path, &e);
    let image = Image::open(&file).map_err(fail)?;
    let mut all = Vec::new();
    for found in bitmap::read_directory(&image).map_err(fail)? {
        let name = found.name();
        if found.has(bitmap::flag::IN_USE) {
            if skip_broken {
                warn(&format!("{}: bitmap {name} was not stored, and is not copied", path.display()));
                continue;
            }
            return Err(Failure::Failed(format!(
                "{}: bitmap {name} was not stored by the last writer; remove it, or give --skip-broken-bitmaps",
                path.display()
            )));
        }
        let bits = bitmap::load(&image, &name).map_err(fail)?;
        all.push(Copied { name, enabled: found.has(bitmap::flag::AUTO), bits });
    }
    Ok(all)
}

/// Adds bitmaps to a qcow2 image with a disk of the same size.
pub(super) fn add_all(path: &Path, bitmaps: &[Copied]) -> Outcome {
    if bitmaps.is_empty() {
        return Ok(());
    }
    let file = ImageFile::open(path, For::Writing)?;
    let fail = |e: Error| failed(path, &e);
    let mut image = Image::open(&file).map_err(fail)?;
    for Copied { name, enabled, bits } in bitmaps {
        bitmap::add(&mut image, name, Some(bits.granularity_bits()), *enabled).map_err(fail)?;
        bitmap::merge(&mut image, name, bits).map_err(fail)?;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use qcow2::create::{Options, create};

    use super::*;

    #[test]
    fn bitmaps_are_copied_with_their_bits() {
        const SIZE: u64 = 64 << 20;
        let dir = tempfile::tempdir().unwrap();
        let made = |name: &str| {
            let path = dir.path().join(name);
            let file = ImageFile::open(&path, For::Making).unwrap();
            create(&file, None, &Options::new(SIZE), &mut |_, _| {}).unwrap();
            path
        };
        let (from, to) = (made("from"), made("to"));
        let mut bits = bitmap::Bits::new(SIZE, 12).unwrap();
        bits.set_range(1 << 20, 10 << 12);
        {
            let file = ImageFile::open(&from, For::Writing).unwrap();
            let mut image = Image::open(&file).unwrap();
            bitmap::add(&mut image, "on", Some(12), true).unwrap();
            bitmap::add(&mut image, "off", None, false).unwrap();
            bitmap::merge(&mut image, "on", &bits).unwrap();
        }
        add_all(&to, &read_all(&from, false, false).unwrap()).unwrap();
        let copied = read_all(&to, false, false).unwrap();
        let told: Vec<_> =
            copied.iter().map(|c| (c.name.as_str(), c.enabled, c.bits.granularity_bits())).collect();
        assert_eq!(told, [("on", true, 12), ("off", false, 16)]);
        assert!(
            copied[0].bits.bytes() == bits.bytes() && copied[1].bits.bytes().iter().all(|byte| *byte == 0)
        );
    }
}
