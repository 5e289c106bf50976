//! `vshunt image create`.

use std::ops::Range;
use std::path::{Path, PathBuf};

use qcow2::Storage;
use qcow2::create::{DataFile, Options, Preallocation, create};
use qcow2::header::Compression;
use serde::Deserialize;

use super::args::{CreateArgs, Mode};
use super::file::{For, ImageFile, id};
use super::info::{self, beside};
use super::progress::Bar;
use super::{ImageFormat, chain, failed};
use crate::keyval;
use crate::outcome::{Failure, Outcome, print, print_line};

/// The options of `-o`, with the names of qemu-img.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    pub(super) size: Option<u64>,
    pub(super) compat: Option<String>,
    pub(super) cluster_size: Option<u64>,
    pub(super) refcount_bits: Option<u64>,
    pub(super) extended_l2: Option<bool>,
    pub(super) lazy_refcounts: Option<bool>,
    pub(super) preallocation: Option<Mode>,
    pub(super) backing_file: Option<String>,
    pub(super) backing_fmt: Option<String>,
    pub(super) data_file: Option<String>,
    pub(super) data_file_raw: Option<bool>,
    pub(super) keep_data_file: Option<bool>,
    pub(super) compression_type: Option<Type>,
}

impl Mode {
    pub(super) fn preallocation(self) -> Preallocation {
        match self {
            Self::Off => Preallocation::Off,
            Self::Metadata => Preallocation::Metadata,
            Self::Falloc => Preallocation::Falloc,
            Self::Full => Preallocation::Full,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Type {
    Zlib,
    Zstd,
}

/// Returns whether `-o` is a request for the list of options.
pub(super) fn is_help(options: &[String]) -> bool {
    options.iter().flat_map(|o| o.split(',')).any(|o| o == "help" || o == "?")
}

/// Prints the list of options, as in the help.
pub(super) fn help(format: ImageFormat) -> Outcome {
    print(&format!("{}\n", super::args::create_options(format).trim_end()))
}

pub(super) fn run(args: CreateArgs, quiet: bool) -> Outcome {
    if is_help(&args.options) {
        return help(args.format);
    }
    let path = args.file.as_deref().ok_or_else(|| no_file("which image? give its name, and a size"))?;
    let wanted = wanted(&args)?;
    match args.format {
        ImageFormat::Raw => raw(path, &wanted, quiet),
        ImageFormat::Qcow2 => qcow2(path, args.unsafe_backing, wanted, quiet),
    }
}

/// The data file of the target of a copy.
pub(super) struct CopyData {
    pub(super) path: PathBuf,
    /// Whether it belongs to the image that is replaced.
    pub(super) replaced: bool,
}

/// Checks the options `-o` for the target of a copy, and returns its data file. A backing file and
/// a size are refused, because a copy has its own; so is a data file with data, unless it is to be
/// emptied, or belongs to the image that is replaced.
pub(super) fn data_file(options: &[String], image: &Path) -> Outcome<Option<CopyData>> {
    let w = parsed(options)?;
    if w.backing_file.is_some() || w.backing_fmt.is_some() {
        return Err(Failure::Usage(
            "a copy has no backing file; leave out backing_file and backing_fmt".into(),
        ));
    }
    if w.size.is_some() {
        return Err(Failure::Usage(
            "a copy has the size of its source; leave out size, and resize the copy afterwards".into(),
        ));
    }
    if w.keep_data_file == Some(true) {
        return Err(Failure::Usage(
            "a copy overwrites its data file; leave out keep_data_file, and give data_file the name of a new file"
                .into(),
        ));
    }
    let Some(path) = w.data_file.map(|name| beside(image, &name)) else { return Ok(None) };
    let old = id(&path).is_some();
    let replaced = old && info::data_file(image).is_some_and(|of_old| id(&of_old) == id(&path));
    if old && !replaced && w.keep_data_file.is_none() {
        let shown = path.display();
        let cannot = |e| Failure::Failed(format!("cannot read {shown}: {e}"));
        if ImageFile::open(&path, For::Sharing)?.has_data().map_err(cannot)? {
            return Err(Failure::Failed(format!(
                "{shown} has data; give data_file another name, or keep_data_file=off if its contents are to be lost"
            )));
        }
    }
    Ok(Some(CopyData { path, replaced }))
}

/// Parses options `-o`. The last one of a name counts.
pub(super) fn parsed(options: &[String]) -> Outcome<Wanted> {
    let text = last_of_each(&options.join(","));
    match options.is_empty() {
        true => Ok(Wanted::default()),
        false => keyval::parse(&text).map_err(|e| Failure::Usage(format!("-o {text}: {e}"))),
    }
}

/// Returns a list of options without those that a later one with the same name replaces.
pub(super) fn last_of_each(text: &str) -> String {
    let mut list: Vec<String> = Vec::new();
    // A value may contain `,,`, which is a comma.
    for part in text.replace(",,", "\0").split(',') {
        let name = |option: &str| option.split('=').next().map(str::to_owned);
        list.retain(|old| name(old) != name(part));
        list.push(part.to_owned());
    }
    list.join(",").replace('\0', ",,")
}

/// Parses the options `-o` for an image of format raw that is not made.
pub(super) fn raw_options(options: &[String]) -> Outcome {
    if parsed(options)?.of_qcow2() { Err(only_raw()) } else { Ok(()) }
}

/// Parses the options `-o` for a qcow2 image of `size` bytes that is not made. The backing file
/// need not exist.
pub(super) fn qcow2_options(options: &[String], size: u64) -> Outcome<Options> {
    let w = parsed(options)?;
    let backing = w.backing_file.clone().map(|name| (name, w.backing_fmt.clone().unwrap_or_default()));
    w.options(size, backing)
}

/// Returns the version for a value of `compat`.
pub(super) fn version(compat: &str) -> Outcome<u32> {
    match compat {
        "1.1" | "v3" => Ok(3),
        "0.10" | "v2" => Ok(2),
        other => Err(Failure::Usage(format!("compat={other} is neither 0.10 nor 1.1"))),
    }
}

fn only_raw() -> Failure {
    Failure::Usage(
        "format raw has the options size and preallocation=off|falloc|full; give the format qcow2 for others"
            .into(),
    )
}

impl Wanted {
    /// Returns whether there are options that format raw does not have.
    fn of_qcow2(&self) -> bool {
        self.compat.is_some()
            || self.cluster_size.is_some()
            || self.refcount_bits.is_some()
            || self.extended_l2.is_some()
            || self.lazy_refcounts.is_some()
            || self.backing_file.is_some()
            || self.data_file.is_some()
            || self.data_file_raw.is_some()
            || self.keep_data_file.is_some()
            || self.compression_type.is_some()
            || self.preallocation == Some(Mode::Metadata)
    }

    /// Returns the options of a qcow2 image.
    fn options(self, size: u64, backing: Option<(String, String)>) -> Outcome<Options> {
        let version = self.compat.as_deref().map_or(Ok(3), version)?;
        if self.data_file.is_none() && self.data_file_raw.is_some() {
            return Err(Failure::Usage(
                "data_file_raw without data_file; give the name of the data file too".into(),
            ));
        }
        let raw = self.data_file_raw.unwrap_or(false);
        let defaults = Options::new(size);
        Ok(Options {
            version,
            size,
            cluster_size: self.cluster_size.unwrap_or(defaults.cluster_size),
            refcount_bits: self.refcount_bits.unwrap_or(defaults.refcount_bits),
            extended_l2: self.extended_l2.unwrap_or(false),
            lazy_refcounts: self.lazy_refcounts.unwrap_or(false),
            compression: match self.compression_type {
                Some(Type::Zstd) => Compression::Zstd,
                _ => Compression::Zlib,
            },
            backing,
            data_file: self.data_file.map(|name| DataFile { name, raw }),
            keep_data_file: self.keep_data_file.unwrap_or(false),
            preallocation: self.preallocation.unwrap_or(Mode::Off).preallocation(),
        })
    }
}

/// Merges options and flags with the same meaning.
fn wanted(args: &CreateArgs) -> Outcome<Wanted> {
    let mut w = parsed(&args.options)?;
    let twice = |what: &str| Err(Failure::Usage(format!("{what} is given twice, as a flag and with -o")));
    match (&args.backing, &w.backing_file) {
        (Some(_), Some(_)) => return twice("the backing file"),
        (Some(name), None) => w.backing_file = Some(name.clone()),
        _ => {}
    }
    match (&args.backing_format, &w.backing_fmt) {
        (Some(_), Some(_)) => return twice("the backing format"),
        (Some(name), None) => w.backing_fmt = Some(name.clone()),
        _ => {}
    }
    match (args.size, w.size) {
        (Some(_), Some(_)) => return twice("the size"),
        (Some(size), None) => w.size = Some(size),
        _ => {}
    }
    if w.backing_fmt.is_some() && w.backing_file.is_none() {
        return Err(Failure::Usage("a backing format without a backing file; give -b NAME too".into()));
    }
    Ok(w)
}

/// Returns the failure for a missing name of a file. Only `-o help` needs none.
pub(super) fn no_file(question: &str) -> Failure {
    Failure::Usage(question.to_owned())
}

fn no_size(path: &Path) -> Failure {
    Failure::Usage(format!("{}: how large? give a size, for example 20G", path.display()))
}

fn raw(path: &Path, w: &Wanted, quiet: bool) -> Outcome {
    if w.of_qcow2() {
        return Err(only_raw());
    }
    let size = w.size.ok_or_else(|| no_size(path))?.next_multiple_of(512);
    let new = !path.exists();
    let file = ImageFile::open(path, For::Making)?;
    large_enough(path, &file, size)?;
    if !quiet {
        let text = format!("Formatting '{}', fmt=raw size={size}", path.display());
        print_line(&text).inspect_err(|_| remove(path, new))?;
    }
    let mut bar = Bar::new("preallocating", quiet);
    let mode = w.preallocation.unwrap_or(Mode::Off);
    let done = file.set_len(0).and_then(|()| file.set_len(size));
    let done = done.and_then(|()| fill(&file, 0..size, mode, &mut bar));
    drop(bar);
    done.map_err(|e| {
        remove(path, new);
        Failure::Failed(format!("cannot make {}: {e}", path.display()))
    })
}

/// Refuses a device that is smaller than the disk that goes there.
fn large_enough(path: &Path, file: &ImageFile, size: u64) -> Outcome {
    let shown = path.display();
    let len = file.len().map_err(|e| Failure::Failed(format!("cannot read {shown}: {e}")))?;
    match file.is_device() && len < size {
        true => Err(Failure::Failed(format!(
            "{shown} has {len} bytes, and the disk {size}: choose a larger device, or make it larger"
        ))),
        false => Ok(()),
    }
}

/// Allocates the space of a range of a raw image.
pub(super) fn fill(file: &ImageFile, range: Range<u64>, mode: Mode, bar: &mut Bar) -> std::io::Result<()> {
    const PIECE: u64 = 8 << 20;
    let size = range.end - range.start;
    let zeroes = if mode == Mode::Full { vec![0; PIECE.min(size) as usize] } else { Vec::new() };
    let mut done = 0;
    while done < size && matches!(mode, Mode::Falloc | Mode::Full) {
        let n = PIECE.min(size - done);
        match mode {
            Mode::Falloc => file.allocate(range.start + done, n)?,
            _ => file.write_at(range.start + done, &zeroes[..n as usize])?,
        }
        done += n;
        bar.set(done, size);
    }
    file.sync()
}

/// Removes an incomplete file.
fn remove(path: &Path, new: bool) {
    if new {
        let _ = std::fs::remove_file(path);
    }
}

fn qcow2(path: &Path, unsafe_backing: bool, w: Wanted, quiet: bool) -> Outcome {
    let backing = match (w.backing_file.clone(), w.backing_fmt.clone()) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(Failure::Usage(
                "a backing file without its format; give -F raw or -F qcow2: what a guest wrote decides else"
                    .into(),
            ));
        }
        (Some(name), Some(format)) => Some((name, format)),
    };
    let size = match (w.size, &backing) {
        (Some(size), _) => size,
        (None, Some((name, format))) if !unsafe_backing => backing_size(path, name, format)?,
        _ => return Err(no_size(path)),
    };
    if let (Some(_), Some((name, format)), false) = (w.size, &backing, unsafe_backing) {
        backing_size(path, name, format)?;
    }
    let empties_data = w.keep_data_file == Some(false);
    let options = w.options(size, backing)?;
    options.check().map_err(|e| Failure::Usage(e.to_string()))?;
    not_below(path, &options, unsafe_backing)?;
    make(path, &options, empties_data, quiet)
}

/// Refuses to overwrite a file of the images that will be below the new one. With `-u` these are
/// not opened, and only the backing file is compared.
fn not_below(path: &Path, options: &Options, unsafe_backing: bool) -> Outcome {
    let Some((name, format)) = &options.backing else { return Ok(()) };
    let below = beside(path, name);
    let data = options.data_file.as_ref().map(|data| beside(path, &data.name));
    let written: Vec<&Path> = std::iter::once(path).chain(data.as_deref()).collect();
    let format = match format.as_str() {
        "qcow2" if !unsafe_backing => ImageFormat::Qcow2,
        _ => ImageFormat::Raw,
    };
    match unsafe_backing && !below.exists() {
        true => Ok(()),
        false => chain::check_above(path, &written, &below, format),
    }
}

/// Returns the size in bytes of the disk in the backing image, which has to exist and be readable.
pub(super) fn backing_size(image: &Path, name: &str, format: &str) -> Outcome<u64> {
    let path = beside(image, name);
    let file = ImageFile::open(&path, For::Sharing)?;
    match format {
        "raw" => file.len().map_err(|e| Failure::Failed(format!("cannot read {}: {e}", path.display()))),
        "qcow2" => Ok(qcow2::info::info(&file).map_err(|e| failed(&path, &e))?.header.size),
        other => Err(Failure::Usage(format!(
            "the format {other} of a backing file is not known here; raw and qcow2 are, and -u does not look at it"
        ))),
    }
}

/// Opens the data file of a new image. It is empty then, or is kept as it is.
///
/// # Errors
/// A file with data is neither to be kept nor, with `empties`, to be emptied.
fn open_data(path: &Path, options: &Options, empties: bool) -> Outcome<ImageFile> {
    let shown = path.display();
    if options.keep_data_file {
        let file = ImageFile::open(path, For::Writing)?;
        large_enough(path, &file, options.size)?;
        return Ok(file);
    }
    let file = ImageFile::open(path, For::Making)?;
    let cannot = |e| Failure::Failed(format!("cannot make {shown}: {e}"));
    if !empties && file.has_data().map_err(cannot)? {
        return Err(Failure::Failed(format!(
            "{shown} has data; give data_file another name, or keep_data_file=on if its contents are to be the disk, or \
             keep_data_file=off if they are to be lost"
        )));
    }
    file.set_len(0).map_err(cannot)?;
    Ok(file)
}

fn make(path: &Path, options: &Options, empties_data: bool, quiet: bool) -> Outcome {
    let new = !path.exists();
    let data_path = options.data_file.as_ref().map(|d| beside(path, &d.name));
    let data_new = data_path.as_ref().is_some_and(|data| !data.exists());
    let removed = |e: Failure| {
        remove(path, new);
        data_path.iter().for_each(|data| remove(data, data_new));
        e
    };
    let file = ImageFile::open(path, For::Making)?;
    let open_data = |data: &PathBuf| match id(data).is_some_and(|data| id(path) == Some(data)) {
        true => Err(Failure::Usage(format!(
            "{} cannot be its own data file; give data_file another name",
            path.display()
        ))),
        false => open_data(data, options, empties_data),
    };
    let data = data_path.as_ref().map(open_data).transpose().map_err(removed)?;
    if !quiet {
        print_line(&formatting(path, options)).map_err(removed)?;
    }
    let mut bar = Bar::new("preallocating", quiet);
    let made = create(&file, data.as_ref().map(|d| d as &dyn Storage), options, &mut |done, all| {
        bar.set(done, all);
    });
    drop(bar);
    made.map(drop).map_err(|e| removed(failed(path, &e)))
}

/// Returns the line that qemu-img prints.
fn formatting(path: &Path, o: &Options) -> String {
    let on = |on: bool| if on { "on" } else { "off" };
    let mut words =
        vec![format!("cluster_size={}", o.cluster_size), format!("extended_l2={}", on(o.extended_l2))];
    match o.preallocation {
        Preallocation::Off => {}
        Preallocation::Metadata => words.push("preallocation=metadata".into()),
        Preallocation::Falloc => words.push("preallocation=falloc".into()),
        Preallocation::Full => words.push("preallocation=full".into()),
    }
    let compression = if o.compression == Compression::Zlib { "zlib" } else { "zstd" };
    words.push(format!("compression_type={compression}"));
    if o.keep_data_file {
        words.push("keep_data_file=on".into());
    }
    words.push(format!("size={}", o.size));
    if let Some((name, format)) = &o.backing {
        words.push(format!("backing_file={name} backing_fmt={format}"));
    }
    if o.version == 2 {
        words.push("compat=0.10".into());
    }
    if let Some(data) = &o.data_file {
        words.push(format!("data_file={} data_file_raw={}", data.name, on(data.raw)));
    }
    words.push(format!("lazy_refcounts={} refcount_bits={}", on(o.lazy_refcounts), o.refcount_bits));
    format!("Formatting '{}', fmt=qcow2 {}", path.display(), words.join(" "))
}
