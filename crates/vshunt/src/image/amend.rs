//! `vshunt image amend`.

use std::path::Path;

use qcow2::Image;
use qcow2::amend::{Amendment, amend};

use super::args::{AmendArgs, Mode, amend_options};
use super::create::{self, Wanted};
use super::{ImageFormat, changing, failed, no_qcow2, resize};
use crate::outcome::{Failure, Outcome, print};

pub(super) fn run(args: &AmendArgs, quiet: bool) -> Outcome {
    if create::is_help(&args.options) {
        return print(&format!("{}\n", amend_options()));
    }
    let Some(path) = &args.file else {
        return Err(Failure::Usage("which image? give its name after the options".into()));
    };
    let wanted = create::parsed(&args.options)?;
    if let Some(name) = fixed(&wanted) {
        return Err(Failure::Usage(format!(
            "{name} cannot be changed; copy the image with 'vshunt image convert -O qcow2 -o {name}=…'"
        )));
    }
    if wanted.keep_data_file.is_some() {
        return Err(Failure::Usage(
            "keep_data_file is for a new image; leave it out: a change of the name leaves the data file as it is"
                .into(),
        ));
    }
    let version = wanted.compat.as_deref().map(create::version).transpose()?;
    let (file, format) = changing(path, args.format, quiet)?;
    if format != ImageFormat::Qcow2 {
        return Err(no_qcow2(path, "options that can be changed"));
    }
    let mut image = Image::open(&file).map_err(|e| failed(path, &e))?;
    let size = larger(path, wanted.size, image.header().size)?;
    let amendment = Amendment {
        version,
        lazy_refcounts: wanted.lazy_refcounts,
        backing: backing(path, &wanted, image.header())?,
        data_file: wanted.data_file.clone(),
        data_file_raw: wanted.data_file_raw,
    };
    amend(&mut image, &amendment).map_err(|e| failed(path, &e))?;
    drop(image);
    match size {
        Some(size) => resize::qcow2(path, &file, size, Mode::Off, quiet),
        None => Ok(()),
    }
}

/// Returns the name of an option that only a new image can have.
fn fixed(w: &Wanted) -> Option<&'static str> {
    let options = [
        ("cluster_size", w.cluster_size.is_some()),
        ("refcount_bits", w.refcount_bits.is_some()),
        ("extended_l2", w.extended_l2.is_some()),
        ("compression_type", w.compression_type.is_some()),
        ("preallocation", w.preallocation.is_some()),
    ];
    options.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
}

/// Returns the backing file after the change: `None` if it stays as it is.
fn backing(
    path: &Path,
    wanted: &Wanted,
    header: &qcow2::header::Header,
) -> Outcome<Option<Option<(String, String)>>> {
    let name = match (&wanted.backing_file, &wanted.backing_fmt) {
        (None, None) => return Ok(None),
        (Some(name), _) if name.is_empty() => return Ok(Some(None)),
        (name, _) => name.as_ref().or(header.backing.as_ref()),
    };
    let Some(name) = name else {
        let shown = path.display();
        return Err(Failure::Usage(format!("{shown} has no backing file; give backing_file=NAME too")));
    };
    match wanted.backing_fmt.as_ref().or(header.backing_format.as_ref()) {
        Some(format) => Ok(Some(Some((name.clone(), format.clone())))),
        None => {
            Err(Failure::Usage("a backing file without its format; give backing_fmt=raw or qcow2".into()))
        }
    }
}

/// Returns the new size of the disk if it is another one.
fn larger(path: &Path, size: Option<u64>, old: u64) -> Outcome<Option<u64>> {
    let Some(size) = size.map(|size| size.checked_next_multiple_of(512).unwrap_or(size)) else {
        return Ok(None);
    };
    if size < old {
        let shown = path.display();
        return Err(Failure::Usage(format!(
            "size={size} would cut {shown}, which has {old} bytes; use 'vshunt image resize --shrink' if you mean it"
        )));
    }
    Ok(Some(size).filter(|size| *size != old))
}
