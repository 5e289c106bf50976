//! The command line of the commands that examine images and change none.

use std::path::PathBuf;

use clap::Args;

use super::{Output, format, size};
use crate::image::ImageFormat;

pub(super) const MEASURE_AFTER: &str = "\
Prints the bytes that a copy of an image needs with the data that it has now, and
when all of it is written. With --size the copy is of an empty disk of that size.
`bitmaps` is the space for persistent bitmaps, which `required` does not contain.

Examples:
  vshunt image measure -O qcow2 disk.raw
  vshunt image measure -O qcow2 -o cluster_size=2M --size 1T
  vshunt image measure --output=json -O qcow2 -l before-update disk.qcow2";

pub(super) const MAP_AFTER: &str = "\
Without --output=json only data is listed, and the file and the offset where it
is. With it there is an object for each part of the disk:
  start, length  of the part, bytes
  depth          the image that decides: 0 is FILE, 1 the image below it
  present        that image has it; if not, no image of the chain has it
  zero, data     it reads as zeroes; there is data
  compressed     it is compressed, and has no offset of its own
  offset         where it begins in the file of that image

The map is that of the last flush: changes in the journal of an image that was
not closed are not in it, and there is a warning.

Examples:
  vshunt image map disk.qcow2
  vshunt image map --output=json --start-offset=1G --max-length=1M disk.qcow2";

pub(super) const COMPARE_AFTER: &str = "\
Compares what a guest reads. If one disk is longer, the rest of it has to be zero;
there is a warning then.

Exit status:
  0   the contents are equal
  1   they differ
  2   the command line is wrong, or an image cannot be opened
  3   the map of an image cannot be read (with --strict)
  4   the contents of an image cannot be read

Examples:
  vshunt image compare disk.raw disk.qcow2
  vshunt image compare -q -f raw -F qcow2 old.img new.qcow2 && echo same";

#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Format of the copy
    #[arg(short = 'O', long, default_value = "raw", value_parser = format())]
    pub(crate) output_format: ImageFormat,
    /// Options of the copy, as for `create`; may be repeated, `-o help` lists them
    #[arg(short, value_name = "NAME=VALUE,…")]
    pub(crate) options: Vec<String>,
    /// Size of an empty disk, in place of an image
    #[arg(short, long, value_parser = size)]
    pub(crate) size: Option<u64>,
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(crate) format: Option<ImageFormat>,
    /// Measure this internal snapshot of the image; name or id
    #[arg(short = 'l', long)]
    pub(crate) snapshot: Option<String>,
    /// Form of the output
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(crate) output: Output,
    /// Measure the image even if another process uses it; the output may be out of date
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
    /// The image
    pub(crate) file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MapArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(crate) format: Option<ImageFormat>,
    /// Start at this offset of the disk [default: 0]
    #[arg(short, long, value_name = "OFFSET", value_parser = size)]
    pub(crate) start_offset: Option<u64>,
    /// Bytes that are examined [default: all]
    #[arg(short = 'l', long, value_name = "LENGTH", value_parser = size)]
    pub(crate) max_length: Option<u64>,
    /// Form of the output
    #[arg(long, value_name = "FORM", default_value = "human")]
    pub(crate) output: Output,
    /// Show the map even if another process uses the image; the output may be out of date
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
    /// The image
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Format of the first image [default: detected]
    #[arg(short = 'f', long = "format", value_name = "FORMAT", value_parser = format())]
    pub(crate) first_format: Option<ImageFormat>,
    /// Format of the second image [default: detected]
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format())]
    pub(crate) second_format: Option<ImageFormat>,
    /// Show the progress, also if stderr is not a terminal
    #[arg(short, long)]
    pub(crate) progress: bool,
    /// The sizes have to be equal, and the parts that the images have
    #[arg(short, long)]
    pub(crate) strict: bool,
    /// Compare the images even if other processes use them
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
    /// The first image
    pub(crate) first: PathBuf,
    /// The second image
    pub(crate) second: PathBuf,
}
