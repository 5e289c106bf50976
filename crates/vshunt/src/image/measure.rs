//! `vshunt image measure`.

use qcow2::info::info;
use qcow2::measure::{Measured, Needed, bitmaps_bytes, measure};
use serde_json::json;

use super::args::{MeasureArgs, Output};
use super::chain::{self, Chain, Layer};
use super::{ImageFormat, create, failed};
use crate::outcome::{Failure, Outcome, print};

pub(super) fn run(args: &MeasureArgs) -> Outcome {
    if create::is_help(&args.options) {
        return create::help(args.output_format);
    }
    let (measured, bitmaps) = match (args.size, &args.file) {
        (Some(_), Some(_)) => {
            return Err(Failure::Usage("--size and an image contradict each other; give one of them".into()));
        }
        (None, None) => return Err(Failure::Usage("what is measured? give --size or an image".into())),
        (Some(_), None) if args.snapshot.is_some() => {
            return Err(Failure::Usage("-l needs the image that has the snapshot".into()));
        }
        (Some(size), None) => (of_size(args, size)?, None),
        (None, Some(file)) => {
            let layers = chain::open(file, args.format, args.force_share)?;
            of_image(args, &layers)?
        }
    };
    let (required, full) = (measured.required, measured.fully_allocated);
    let text = match (args.output, bitmaps) {
        (Output::Json, None) => format!("{:#}\n", json!({ "required": required, "fully-allocated": full })),
        (Output::Json, Some(bitmaps)) => {
            format!("{:#}\n", json!({ "bitmaps": bitmaps, "required": required, "fully-allocated": full }))
        }
        (Output::Human, _) => {
            let bitmaps = bitmaps.map_or(String::new(), |n| format!("bitmaps size: {n}\n"));
            format!("required size: {required}\nfully allocated size: {full}\n{bitmaps}")
        }
    };
    print(&text)
}

/// Returns the sizes of a new image for an empty disk of `size` bytes.
fn of_size(args: &MeasureArgs, size: u64) -> Outcome<Measured> {
    if args.output_format == ImageFormat::Raw {
        create::raw_options(&args.options)?;
        return raw(size, "--size");
    }
    let options = create::qcow2_options(&args.options, size)?;
    measure(&options, Some(0)).map_err(|e| Failure::Usage(e.to_string()))
}

fn raw(size: u64, what: &str) -> Outcome<Measured> {
    let size = size.checked_next_multiple_of(512).filter(|size| i64::try_from(*size).is_ok());
    let size = size.ok_or_else(|| Failure::Usage(format!("{what}: a disk of that size is too large")))?;
    Ok(Measured { required: size, fully_allocated: size })
}

/// Returns the sizes of a copy of an image, and the bytes of its bitmaps if both can have bitmaps.
fn of_image(args: &MeasureArgs, layers: &[Layer]) -> Outcome<(Measured, Option<u64>)> {
    let mut chain = Chain::new(layers, args.snapshot.as_deref())?;
    let [top, ..] = layers else { unreachable!("the image itself is there") };
    let size = chain.size();
    if args.output_format == ImageFormat::Raw {
        create::raw_options(&args.options)?;
        return Ok((raw(size, &top.path.display().to_string())?, None));
    }
    let options = create::qcow2_options(&args.options, size)?;
    options.check().map_err(|e| Failure::Usage(e.to_string()))?;
    let mut needed = Needed::new(options.cluster_size);
    let mut at = 0;
    while at < size && options.backing.is_none() {
        let part = chain.at(at, size)?;
        if part.data && !part.zero {
            needed.add(at, part.len);
        }
        at += part.len;
    }
    // How much of a backing file the copy shares with the image is not known.
    let data = options.backing.is_none().then(|| needed.bytes());
    let measured = measure(&options, data).map_err(|e| Failure::Usage(e.to_string()))?;
    if top.format != ImageFormat::Qcow2 || options.version < 3 {
        return Ok((measured, None));
    }
    let found = info(top.storage()).map_err(|e| failed(&top.path, &e))?;
    let bitmaps = bitmaps_bytes(&found.bitmaps, found.header.size, options.cluster_size);
    let bitmaps = (found.header.version >= 3).then_some(bitmaps);
    Ok((measured, bitmaps))
}
