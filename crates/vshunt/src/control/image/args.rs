//! The command line of `vshunt image`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use serde::Deserialize;

use super::ImageFormat;
use crate::control::keyval::parse_size;

pub(crate) const AFTER: &str = "\
Exit status:
  As of every command (vshunt --help). `check` and `convert` have their own, in
  vshunt image check --help and vshunt image convert --help.

Examples:
  vshunt image create -f qcow2 disk.qcow2 20G
  vshunt image create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
  vshunt image convert -O qcow2 -c disk.raw disk.qcow2
  vshunt image info --output=json disk.qcow2
  vshunt image check -r all disk.qcow2
  vshunt image resize disk.qcow2 +10G
  vshunt image snapshot -c before-update disk.qcow2
  vshunt image bitmap --add disk.qcow2 b0";

/// What `vshunt image` was told.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    // Named as the global flag, and not global itself: `-c` means something else below (qemu-img's names).
    #[arg(short, long, hide = true)]
    control: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Make an image
    #[command(after_long_help = CREATE_AFTER)]
    Create(Box<CreateArgs>),
    /// Copy an image to a new one, of another format or with other options
    #[command(after_long_help = CONVERT_AFTER)]
    Convert(Box<ConvertArgs>),
    /// Describe an image
    #[command(after_long_help = INFO_AFTER)]
    Info(InfoArgs),
    /// Check an image, and repair it
    #[command(after_long_help = CHECK_AFTER)]
    Check(CheckArgs),
    /// Change the size of an image's disk
    #[command(after_long_help = "Examples:\n  vshunt image resize disk.qcow2 40G\n  \
        vshunt image resize disk.qcow2 +10G\n  vshunt image resize --shrink disk.qcow2 5G")]
    Resize(ResizeArgs),
    /// List, take, apply and delete internal snapshots
    #[command(after_long_help = "Examples:\n  vshunt image snapshot -l disk.qcow2\n  \
        vshunt image snapshot -c before-update disk.qcow2\n  vshunt image snapshot -a before-update disk.qcow2")]
    Snapshot(SnapshotArgs),
    /// Add, remove and change persistent dirty bitmaps
    ///
    /// What is asked for is done in this order: add, clear, merge, enable or disable, remove.
    #[command(after_long_help = "Examples:\n  vshunt image bitmap --add disk.qcow2 b0\n  \
        vshunt image bitmap --merge b0 --clear disk.qcow2 b1\n  \
        vshunt image bitmap --merge b0 -b other.qcow2 disk.qcow2 b0")]
    Bitmap(BitmapArgs),
}

const CREATE_AFTER: &str = "\
Options of qcow2 (-o NAME=VALUE,NAME=VALUE; a comma in a value is `,,`):
  backing_file      name of the image below; the same as -b
  backing_fmt       its format; the same as -F
  cluster_size      bytes of a cluster, 512 to 2M [65536]
  compat            0.10 or 1.1 [1.1]; also v2 and v3
  compression_type  of compressed clusters: zlib or zstd [zlib]
  data_file         name of a file of its own for the guest's data
  data_file_raw     that file has to stay a raw image by itself [off]
  extended_l2       clusters have 32 subclusters [off]
  lazy_refcounts    counts may be written late, and repaired after a crash [off]
  preallocation     off, metadata, falloc or full [off]
  refcount_bits     bits of a reference count, 1 to 64 [16]
  size              size of the disk; the same as SIZE
Options of raw:
  preallocation     off, falloc or full [off]
  size              size of the disk; the same as SIZE

Names of other files are relative to the folder of the image.

Examples:
  vshunt image create -f qcow2 disk.qcow2 20G
  vshunt image create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
  vshunt image create -f qcow2 -o cluster_size=2M,preallocation=metadata d 1T
  vshunt image create -f raw -o preallocation=falloc disk.img 20G";

const CONVERT_AFTER: &str = "\
What reads as zeroes takes no space in the new image. Images below the first one
are copied with it: the new one stands on none.

An image whose vshunt was killed is copied with what is in its journal. Where that
is missing, or belongs to another state of the image, a warning says so.

Exit status:
  0   the copy is whole
  1   it failed, and there is no copy
  2   the command line is wrong
  3   there is a copy, which may lack what was written last and not flushed

Examples:
  vshunt image convert -O qcow2 disk.raw disk.qcow2
  vshunt image convert -O qcow2 -c -o compression_type=zstd disk.raw disk.qcow2
  vshunt image convert overlay.qcow2 disk.raw";

const INFO_AFTER: &str = "\
An image that a vshunt has open, or was killed with, is not `cleanly shut down`. Its
line `map journal` names the file in /dev/shm with changes of the image's map that
are not in the image yet, and its state. With --output=json this is `map-journal`:
  filename  the file; absent for an image that was written without one
  state     pending: `changes` changes are there, and `vshunt image check -r all`
            or the next start brings them in; in-use: a running vshunt has it;
            lost: it is missing or is not the image's, and `why`

Examples:
  vshunt image info disk.qcow2
  vshunt image info --backing-chain --output=json overlay.qcow2";

const CHECK_AFTER: &str = "\
Exit status:
  0   nothing is wrong, or nothing any more
  1   the image could not be checked
  2   it is corrupt
  3   clusters are leaked: a waste of space, no harm to data; or the image was
      not closed, and what its journal has is not in it (`-r all` brings it in)
  63  images of this format cannot be checked

With --output=json an image that was not closed has `not-closed` (true) and
`map-journal`, as `vshunt image info` has it.

What is repaired with `-r all`: reference counts that are wrong, entries of
tables that cannot be right, and the marks for dirty and corrupt. An entry whose
data cannot be where it says reads as zeroes then.

Examples:
  vshunt image check disk.qcow2
  vshunt image check -r leaks disk.qcow2
  vshunt image check --output=json disk.qcow2";

/// What `create -o help` prints: the options' part of the help.
pub(super) fn create_options() -> &'static str {
    CREATE_AFTER.split_once("\n\nNames").map_or(CREATE_AFTER, |(options, _)| options)
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    Human,
    Json,
}

fn format() -> impl TypedValueParser<Value = ImageFormat> {
    PossibleValuesParser::new(["raw", "qcow2"]).map(|name| match name.as_str() {
        "raw" => ImageFormat::Raw,
        _ => ImageFormat::Qcow2,
    })
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|e| e.to_string())
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Format of the image
    #[arg(short, long, default_value = "raw", value_parser = format())]
    pub(super) format: ImageFormat,
    /// Name of the image below, whose contents show through
    #[arg(short, long, value_name = "NAME")]
    pub(super) backing: Option<String>,
    /// Format of the image below
    #[arg(short = 'F', long, value_name = "FORMAT")]
    pub(super) backing_format: Option<String>,
    /// Do not look at the image below
    #[arg(short = 'u', long)]
    pub(super) unsafe_backing: bool,
    /// Options of the format; may be repeated
    #[arg(short, value_name = "NAME=VALUE,…")]
    pub(super) options: Vec<String>,
    /// The image
    pub(super) file: PathBuf,
    /// Size of the disk in bytes, or with K, M, G or T; that of the image below if not given
    #[arg(value_parser = size)]
    pub(super) size: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Format of the image that is copied [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Format of the new image
    #[arg(short = 'O', long, default_value = "raw", value_parser = format())]
    pub(super) output_format: ImageFormat,
    /// Options of the new image's format, as of `create`; may be repeated
    #[arg(short, value_name = "NAME=VALUE,…")]
    pub(super) options: Vec<String>,
    /// Write compressed clusters (qcow2)
    #[arg(short)]
    pub(super) compress: bool,
    /// Write to an image that is there, as large
    #[arg(short = 'n', conflicts_with = "options")]
    pub(super) no_create: bool,
    /// Even if another process uses the image that is copied; what it writes meanwhile is copied or not
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// The image that is copied
    pub(super) from: PathBuf,
    /// The new image; one that is there is replaced
    pub(super) to: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// Format of the image [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// How to print
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(super) output: Output,
    /// Describe the images below too
    #[arg(long)]
    pub(super) backing_chain: bool,
    /// Even if another process uses the image; what is shown may be out of date then
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// The image
    pub(super) file: PathBuf,
}

/// What to repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Repaired {
    /// Clusters that nothing refers to
    Leaks,
    /// Everything
    All,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Format of the image [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Repair what is wrong; an image that was not closed needs `all`
    #[arg(short, long, value_name = "WHAT")]
    pub(super) repair: Option<Repaired>,
    /// How to print
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(super) output: Output,
    /// Even if another process uses the image; what it is about to write looks wrong then
    #[arg(short = 'U', long, conflicts_with = "repair")]
    pub(super) force_share: bool,
    /// The image
    pub(super) file: PathBuf,
}

/// A size that may be relative: `+1G`, `-512M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    To(u64),
    By(u64),
    Less(u64),
}

fn change(text: &str) -> Result<Change, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => size(more).map(Change::By),
        (_, Some(less)) => size(less).map(Change::Less),
        _ => size(text).map(Change::To),
    }
}

/// How much has its place from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// Nothing
    Off,
    /// Tables: data has its place, but no space
    Metadata,
    /// Space too
    Falloc,
    /// Space with zeroes written to it
    Full,
}

#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    /// Format of the image [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Allow a size below the present one: what lies beyond is lost
    #[arg(long)]
    pub(super) shrink: bool,
    /// What has its place of what the disk grows by
    #[arg(long, value_name = "MODE")]
    pub(super) preallocation: Option<Mode>,
    /// The image
    pub(super) file: PathBuf,
    /// New size in bytes, or with K, M, G or T; with + or - before it: by how much
    #[arg(value_name = "[+|-]SIZE", value_parser = change, allow_hyphen_values = true)]
    pub(super) size: Change,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// Format of the image [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// List the snapshots; this is done if nothing else is asked for
    #[arg(short, long, group = "what")]
    list: bool,
    /// Take one
    #[arg(short, long, value_name = "NAME", group = "what")]
    pub(super) create: Option<String>,
    /// Make the disk what it was when this one was taken; name or id
    #[arg(short, long, value_name = "SNAPSHOT", group = "what")]
    pub(super) apply: Option<String>,
    /// Delete one; name or id
    #[arg(short, long, value_name = "SNAPSHOT", group = "what")]
    pub(super) delete: Option<String>,
    /// List them even if another process uses the image
    #[arg(short = 'U', long, conflicts_with_all = ["create", "apply", "delete"])]
    pub(super) force_share: bool,
    /// The image
    pub(super) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BitmapArgs {
    /// Format of the image [default: as it begins]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Add it, enabled unless --disable is given
    #[arg(long)]
    pub(super) add: bool,
    /// Remove it
    #[arg(long, conflicts_with_all = ["add", "clear", "merge", "enable", "disable"])]
    pub(super) remove: bool,
    /// Set all its bits to 0
    #[arg(long)]
    pub(super) clear: bool,
    /// Let it track writes
    #[arg(long)]
    pub(super) enable: bool,
    /// Let it track none
    #[arg(long, conflicts_with = "enable")]
    pub(super) disable: bool,
    /// Set all bits that another bitmap has set; may be repeated
    #[arg(long, value_name = "SOURCE")]
    pub(super) merge: Vec<String>,
    /// The image that the other bitmaps are in, if another
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    pub(super) source_file: Option<PathBuf>,
    /// Its format
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format(), requires = "source_file")]
    pub(super) source_format: Option<ImageFormat>,
    /// Bytes that a bit of a new bitmap stands for, 512 to 2G [default: those of a cluster, 4K to 64K]
    #[arg(short, long, value_name = "SIZE", value_parser = size, requires = "add")]
    pub(super) granularity: Option<u64>,
    /// The image
    pub(super) file: PathBuf,
    /// Name of the bitmap
    pub(super) bitmap: String,
}
