//! `vshunt image convert`.

use std::path::Path;

use super::args::{ConvertArgs, CreateArgs};
use super::file::{For, ImageFile};
use super::progress::Bar;
use super::{ImageFormat, create, failed};
use crate::control::{Failure, Outcome};
use crate::export::convert;
use crate::export::spec::{DiskSpec, Format};

pub(super) fn run(args: ConvertArgs, quiet: bool) -> Outcome {
    if args.compress && args.output_format == ImageFormat::Raw {
        return Err(Failure::Usage(
            "a raw image has no compressed clusters; leave out -c, or give -O qcow2".into(),
        ));
    }
    let same = |a: &Path, b: &Path| matches!((std::fs::canonicalize(a), std::fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b);
    if same(&args.from, &args.to) {
        return Err(Failure::Usage(format!("{} cannot be copied to itself", args.from.display())));
    }
    let (format, size) = source(&args)?;
    let new = !args.to.exists();
    if args.no_create && new {
        return Err(Failure::Failed(format!(
            "{} is not there; leave out -n to have it made",
            args.to.display()
        )));
    }
    if !args.no_create {
        let create = CreateArgs {
            format: args.output_format,
            backing: None,
            backing_format: None,
            unsafe_backing: false,
            options: args.options,
            file: args.to.clone(),
            size: Some(size),
        };
        create::run(create, true)?;
    }
    let disk = |name: &str, file: &Path, format, readonly| DiskSpec {
        name: name.to_owned(),
        file: Some(file.to_owned()),
        format: if format == ImageFormat::Raw { Format::Raw } else { Format::Qcow2 },
        readonly,
        locking: true,
        ..DiskSpec::default()
    };
    let from = DiskSpec { locking: !args.force_share, ..disk("source", &args.from, format, true) };
    let to = disk("target", &args.to, args.output_format, false);
    let fresh = !args.no_create && !args.to.metadata().is_ok_and(|m| !m.is_file());
    let mut bar = Bar::new("converting", quiet);
    let done = convert(&from, &to, args.compress, fresh, &mut |done, all| bar.set(done, all));
    drop(bar);
    done.map_err(|e| {
        if new {
            // What was begun and failed is not left behind.
            let _ = std::fs::remove_file(&args.to);
        }
        Failure::Failed(e.to_string())
    })
}

/// Format of the image that is copied, and the size of its disk.
fn source(args: &ConvertArgs) -> Outcome<(ImageFormat, u64)> {
    let shown = args.from.display();
    let file = ImageFile::open(&args.from, if args.force_share { For::Sharing } else { For::Reading })?;
    let cannot = |e: std::io::Error| Failure::Failed(format!("cannot read {shown}: {e}"));
    let format = match args.format {
        Some(format) => format,
        None => file.probe().map_err(cannot)?,
    };
    let size = match format {
        ImageFormat::Raw => qcow2::Storage::len(&file).map_err(cannot)?,
        ImageFormat::Qcow2 => qcow2::Image::open(&file).map_err(|e| failed(&args.from, &e))?.header().size,
    };
    if !size.is_multiple_of(512) || size == 0 {
        return Err(Failure::Failed(format!(
            "{shown} has {size} bytes, which is no size of a disk: not a positive multiple of 512"
        )));
    }
    Ok((format, size))
}
