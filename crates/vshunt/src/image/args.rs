//! The command line of `vshunt image`.

mod examine;
mod modify;

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use serde::Deserialize;

use self::examine::{COMPARE_AFTER, MAP_AFTER, MEASURE_AFTER};
pub(crate) use self::examine::{CompareArgs, MapArgs, MeasureArgs};
use self::modify::{AMEND_AFTER, DD_AFTER, REBASE_AFTER};
pub(crate) use self::modify::{AmendArgs, DdArgs, RebaseArgs, amend_options};
use super::ImageFormat;
use crate::keyval::{self, parse_size};
use crate::values::{SizeChange, size_change};

pub(crate) const AFTER: &str = "\
Exit status:
  As for every command (vshunt --help). `check`, `compare`, `convert` and `dd`
  have codes of their own: see for example vshunt image check --help.

Examples:
  vshunt image create -f qcow2 disk.qcow2 20G
  vshunt image create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
  vshunt image convert -O qcow2 -c disk.raw disk.qcow2
  vshunt image info --output=json disk.qcow2
  vshunt image map disk.qcow2
  vshunt image measure -O qcow2 disk.raw
  vshunt image compare disk.raw disk.qcow2
  vshunt image rebase -b base2.qcow2 -F qcow2 overlay.qcow2
  vshunt image check -r all disk.qcow2
  vshunt image resize disk.qcow2 +10G
  vshunt image snapshot -c before-update disk.qcow2
  vshunt image bitmap --add disk.qcow2 b0";

/// The arguments of `vshunt image`.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    // Has the name of the global flag and is not global itself, because `-c` has another meaning in
    // the subcommands (the names of qemu-img).
    #[arg(short, long, hide = true)]
    control: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Create an image
    #[command(after_long_help = CREATE_AFTER)]
    Create(Box<CreateArgs>),
    /// Copy an image to a new one, with another format or other options
    #[command(after_long_help = CONVERT_AFTER)]
    Convert(Box<ConvertArgs>),
    /// Describe an image
    #[command(after_long_help = INFO_AFTER)]
    Info(InfoArgs),
    /// Show where the contents of a disk are in its image and in the images below
    #[command(after_long_help = MAP_AFTER)]
    Map(MapArgs),
    /// Show how much space a copy of an image needs
    #[command(after_long_help = MEASURE_AFTER)]
    Measure(MeasureArgs),
    /// Compare what a guest reads from two images
    #[command(after_long_help = COMPARE_AFTER)]
    Compare(CompareArgs),
    /// Check an image, and repair it
    #[command(after_long_help = CHECK_AFTER)]
    Check(CheckArgs),
    /// Change options of an image
    #[command(after_long_help = AMEND_AFTER)]
    Amend(AmendArgs),
    /// Change the backing file of an image
    #[command(after_long_help = REBASE_AFTER)]
    Rebase(RebaseArgs),
    /// Copy a part of an image to a new one
    #[command(after_long_help = DD_AFTER)]
    Dd(DdArgs),
    /// Change the size of the disk in an image
    #[command(after_long_help = "Examples:\n  vshunt image resize disk.qcow2 40G\n  \
        vshunt image resize disk.qcow2 +10G\n  vshunt image resize --shrink disk.qcow2 5G")]
    Resize(ResizeArgs),
    /// List, take, apply and delete internal snapshots
    #[command(after_long_help = "Examples:\n  vshunt image snapshot -l disk.qcow2\n  \
        vshunt image snapshot -c before-update disk.qcow2\n  vshunt image snapshot -a before-update disk.qcow2")]
    Snapshot(SnapshotArgs),
    /// Add, remove and change persistent dirty bitmaps
    ///
    /// Several actions are done in this order: add, clear, merge, enable or disable, remove.
    #[command(after_long_help = "Examples:\n  vshunt image bitmap --add disk.qcow2 b0\n  \
        vshunt image bitmap --merge b0 --clear disk.qcow2 b1\n  \
        vshunt image bitmap --merge b0 -b other.qcow2 disk.qcow2 b0")]
    Bitmap(BitmapArgs),
}

const CREATE_AFTER: &str = "\
Options of qcow2 (-o NAME=VALUE,NAME=VALUE; a comma in a value is `,,`):
  backing_file      name of the backing file; the same as -b
  backing_fmt       its format; the same as -F
  cluster_size      bytes of a cluster, 512 to 2M [65536]
  compat            0.10 or 1.1 [1.1]; also v2 and v3
  compression_type  of compressed clusters: zlib or zstd [zlib]
  data_file         name of a separate file for the guest's data
  data_file_raw     that file has to stay a valid raw image [off]
  extended_l2       clusters have 32 subclusters [off]
  keep_data_file    on: that file is there, and its contents are the disk (needs
                    data_file_raw=on or preallocation=metadata); off: a file with
                    data is emptied. Without this a file with data is refused
  lazy_refcounts    counts may be written late, and are repaired after a crash [off]
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
Zeroes take no space in the new image. The contents of backing files are copied,
and the new image has no backing file. With -n, zeroes are written where the
source reads as zeroes, and the target keeps its space and its options.
At the end there is a line with bytes, seconds and rate, unless -q is given.

An image whose vshunt was killed is copied with the changes in its map journal. If
the journal is missing, or belongs to another state of the image, there is a
warning. If the command is killed, the new image is incomplete: remove it.

Exit status:
  0   the copy is complete
  1   it failed, and there is no copy
  2   the command line is wrong
  3   there is a copy, but the last writes before the kill may be missing

Examples:
  vshunt image convert -O qcow2 disk.raw disk.qcow2
  vshunt image convert -O qcow2 -c -o compression_type=zstd disk.raw disk.qcow2
  vshunt image convert overlay.qcow2 disk.raw";

const INFO_AFTER: &str = "\
An image that a vshunt has open, or had open when it was killed, is not `cleanly
shut down`. The line `map journal` names the file in /dev/shm with changes of the
cluster map that are not in the image yet, and its state. With --output=json this
is `map-journal`:
  filename  the file; absent for an image that was written without one
  state     pending: there are `changes` changes; `vshunt image check -r all` or
            the next start applies them; in-use: a running vshunt uses it; lost:
            it is missing or belongs to another image, and `why` gives the reason

Examples:
  vshunt image info disk.qcow2
  vshunt image info --backing-chain --output=json overlay.qcow2";

const CHECK_AFTER: &str = "\
Exit status:
  0   the image is correct, or was repaired
  1   the image could not be checked
  2   the image is corrupt
  3   clusters are leaked: space is wasted, and no data is damaged; or the image
      was not closed, and the changes in its journal are not applied (`-r all`
      applies them)
  63  images of this format cannot be checked

With --output=json an image that was not closed has `not-closed` (true) and
`map-journal`: see vshunt image info --help.

`-r all` repairs wrong reference counts, invalid entries of tables, and the
marks for dirty and corrupt. An entry that points to an impossible place reads
as zeroes after that.

Examples:
  vshunt image check disk.qcow2
  vshunt image check -r leaks disk.qcow2
  vshunt image check --output=json disk.qcow2";

/// Returns the output of `-o help` for a format: the part of the help with its options.
pub(super) fn create_options(format: ImageFormat) -> &'static str {
    let options = CREATE_AFTER.split_once("\n\nNames").map_or(CREATE_AFTER, |(options, _)| options);
    let of_raw = options.find(RAW_OPTIONS).unwrap_or(options.len());
    match format {
        ImageFormat::Qcow2 => &options[..of_raw],
        ImageFormat::Raw => &options[of_raw..],
    }
}

/// The line above the options of format raw.
const RAW_OPTIONS: &str = "Options of raw:";

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
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
    /// Name of the backing file, whose contents show through
    #[arg(short, long, value_name = "NAME")]
    pub(super) backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FORMAT")]
    pub(super) backing_format: Option<String>,
    /// Do not open the backing file
    #[arg(short = 'u', long)]
    pub(super) unsafe_backing: bool,
    /// Options of the format; may be repeated, `-o help` lists them
    #[arg(short, value_name = "NAME=VALUE,…")]
    pub(super) options: Vec<String>,
    /// The image
    pub(super) file: Option<PathBuf>,
    #[arg(value_parser = size, help = concat!("Size of the disk in bytes, or with ", keyval::size_units!(), " (",
        keyval::size_rule!(), ") [default: that of the backing file]"))]
    pub(super) size: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Format of the image that is copied [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Format of the new image
    #[arg(short = 'O', long, default_value = "raw", value_parser = format())]
    pub(super) output_format: ImageFormat,
    /// Options of the new image, as for `create`; may be repeated, `-o help` lists them
    #[arg(short, value_name = "NAME=VALUE,…")]
    pub(super) options: Vec<String>,
    /// Write compressed clusters (qcow2)
    #[arg(short)]
    pub(super) compress: bool,
    /// Show the progress, also if stderr is not a terminal
    #[arg(short, long)]
    pub(super) progress: bool,
    /// Write to an existing image, which is as large or larger; the rest of it stays as it is
    #[arg(short = 'n', conflicts_with = "options")]
    pub(super) no_create: bool,
    /// Copy the persistent dirty bitmaps of the image, too (qcow2)
    #[arg(long)]
    pub(super) bitmaps: bool,
    /// Leave out bitmaps that the last writer did not store
    #[arg(long, requires = "bitmaps")]
    pub(super) skip_broken_bitmaps: bool,
    /// With -n: the existing image reads as zeroes, so only data is written
    #[arg(long, requires = "no_create")]
    pub(super) target_is_zero: bool,
    /// Copy even if another process uses the image; what it writes meanwhile may be copied or not
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// The image that is copied
    pub(super) from: Option<PathBuf>,
    /// The new image; an existing one is replaced
    pub(super) to: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Form of the output
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(super) output: Output,
    /// Describe the backing files, too
    #[arg(long)]
    pub(super) backing_chain: bool,
    /// Describe the image even if another process uses it; the output may be out of date
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// The image
    pub(super) file: PathBuf,
}

/// The errors that are repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Repaired {
    /// Clusters that nothing refers to
    Leaks,
    /// Everything
    All,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Repair what is wrong; an image that was not closed needs `all`
    #[arg(short, long, value_name = "WHAT")]
    pub(super) repair: Option<Repaired>,
    /// Form of the output
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(super) output: Output,
    /// Check the image even if another process uses it; what that process is about to write looks
    /// wrong then
    #[arg(short = 'U', long, conflicts_with = "repair")]
    pub(super) force_share: bool,
    /// The image
    pub(super) file: PathBuf,
}

/// How much of the disk is allocated in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// Nothing
    Off,
    /// Tables: data has its place, and no space
    Metadata,
    /// Space, too
    Falloc,
    /// Space, with zeroes written to it
    Full,
}

#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Allow a smaller size: the data beyond it is lost
    #[arg(long)]
    pub(super) shrink: bool,
    /// What is allocated for the part that the disk grows by
    #[arg(long, value_name = "MODE")]
    pub(super) preallocation: Option<Mode>,
    /// The image
    pub(super) file: PathBuf,
    #[arg(value_name = "[+|-]SIZE", value_parser = size_change, allow_hyphen_values = true,
        help = concat!("New size in bytes, or with ", keyval::size_units!(), " (", keyval::size_rule!(),
            "); with + or - a change of the size"))]
    pub(super) size: SizeChange,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// List the snapshots, which is the default action
    #[arg(short, long, group = "what")]
    list: bool,
    /// Take a snapshot
    #[arg(short, long, value_name = "NAME", group = "what")]
    pub(super) create: Option<String>,
    /// Return the disk to this snapshot; name or id
    #[arg(short, long, value_name = "SNAPSHOT", group = "what")]
    pub(super) apply: Option<String>,
    /// Delete this snapshot; name or id
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
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(super) format: Option<ImageFormat>,
    /// Add the bitmap, enabled unless --disable is given
    #[arg(long)]
    pub(super) add: bool,
    /// Remove the bitmap
    #[arg(long, conflicts_with_all = ["add", "clear", "merge", "enable", "disable"])]
    pub(super) remove: bool,
    /// Clear all its bits
    #[arg(long)]
    pub(super) clear: bool,
    /// Record writes
    #[arg(long)]
    pub(super) enable: bool,
    /// Record no writes
    #[arg(long, conflicts_with = "enable")]
    pub(super) disable: bool,
    /// Set all bits that are set in another bitmap; may be repeated
    #[arg(long, value_name = "SOURCE")]
    pub(super) merge: Vec<String>,
    /// The image of the other bitmaps, if it is another one
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    pub(super) source_file: Option<PathBuf>,
    /// Format of that image
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format(), requires = "source_file")]
    pub(super) source_format: Option<ImageFormat>,
    /// Bytes for each bit of a new bitmap, 512 to 2G [default: the size of a cluster, within 4K to
    /// 64K]
    #[arg(short, long, value_name = "SIZE", value_parser = size, requires = "add")]
    pub(super) granularity: Option<u64>,
    /// The image
    pub(super) file: PathBuf,
    /// Name of the bitmap
    pub(super) bitmap: String,
}
