//! The command line of `vshunt image`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};

use super::ImageFormat;
use crate::control::keyval::parse_size;

pub(crate) const AFTER: &str = "\
Exit status:
  As of every command (vshunt --help), but for `check`, whose own is in
  vshunt image check --help.

Examples:
  vshunt image create -f qcow2 disk.qcow2 20G
  vshunt image create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
  vshunt image info --output=json disk.qcow2
  vshunt image check -r all disk.qcow2";

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
    /// Describe an image
    #[command(after_long_help = "Examples:\n  vshunt image info disk.qcow2\n  \
        vshunt image info --backing-chain --output=json overlay.qcow2")]
    Info(InfoArgs),
    /// Check an image, and repair it
    #[command(after_long_help = CHECK_AFTER)]
    Check(CheckArgs),
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

const CHECK_AFTER: &str = "\
Exit status:
  0   nothing is wrong, or nothing any more
  1   the image could not be checked
  2   it is corrupt
  3   clusters are leaked: a waste of space, no harm to data
  63  images of this format cannot be checked

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
    /// Repair what is wrong
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
