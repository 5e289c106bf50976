//! The command line of the commands that change what an image stands on and its options, and of
//! `dd`.

use std::path::PathBuf;

use clap::Args;

use super::format;
use crate::image::ImageFormat;

pub(super) const AMEND_AFTER: &str = "\
Options that can be changed (-o NAME=VALUE,NAME=VALUE; a comma in a value is `,,`):
  backing_file      name of the backing file, as with rebase -u; empty: none
  backing_fmt       its format
  compat            0.10 or 1.1; also v2 and v3
  data_file         name of the data file, which the image has to have already
  data_file_raw     off: that file need not stay a valid raw image
  lazy_refcounts    counts may be written late, and are repaired after a crash
  size              a larger size of the disk

Others are chosen when an image is made: copy it with vshunt image convert.
compat=0.10 is refused if the image has what that version cannot store.

All options except `size` change in one write of the header; `size` follows. If
the command is killed, the image opens, and each of both steps is done or not.

Examples:
  vshunt image amend -o compat=1.1,lazy_refcounts=on disk.qcow2
  vshunt image amend -o backing_file=new.qcow2 -o backing_fmt=qcow2 disk.qcow2";

/// Returns the output of `amend -o help`: the part of the help with the options.
pub(crate) fn amend_options() -> &'static str {
    AMEND_AFTER.split_once("\n\nOthers").map_or(AMEND_AFTER, |(options, _)| options)
}

pub(super) const REBASE_AFTER: &str = "\
A guest reads the same from the image before and after: where the old and the new
backing file differ, the contents are copied into the image. With -u only the name
in the image changes, for a backing file that was moved or renamed.

If the command is killed, the image opens and reads the same as before, with the
old backing file or with the new one. Keep the old one until the end.

Examples:
  vshunt image rebase -b base2.qcow2 -F qcow2 overlay.qcow2
  vshunt image rebase -b \"\" overlay.qcow2
  vshunt image rebase -u -b moved/base.raw -F raw overlay.qcow2";

pub(super) const DD_AFTER: &str = "\
Operands:
  if=FILE   the image that is read
  of=FILE   the new image; an existing one is replaced
  bs=SIZE   bytes of a block, 1 to 2G - 1 [512]
  count=N   blocks that are copied [all]
  skip=N    blocks that are left out at the start of the input [0]

The new image has the size of what is copied, rounded up to 512 bytes. If the
command is killed, the new image is incomplete: remove it.

Exit status:
  0, 1, 2   as for every command (vshunt --help)
  3   there is a copy of an image whose vshunt was killed, and the last writes
      before the kill may be missing

Examples:
  vshunt image dd -O qcow2 bs=1M count=100 skip=1 if=disk.raw of=part.qcow2";

#[derive(Debug, Args)]
pub(crate) struct AmendArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(crate) format: Option<ImageFormat>,
    /// Options that are changed; may be repeated, `-o help` lists them
    #[arg(short, value_name = "NAME=VALUE,…", required = true)]
    pub(crate) options: Vec<String>,
    /// The image
    pub(crate) file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RebaseArgs {
    /// Format of the image [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(crate) format: Option<ImageFormat>,
    /// Name of the new backing file, relative to the folder of the image; empty: none
    #[arg(short, long, value_name = "NAME")]
    pub(crate) backing: String,
    /// Format of the new backing file
    #[arg(short = 'F', long, value_name = "FORMAT")]
    pub(crate) backing_format: Option<String>,
    /// Change the name only. The new backing file need not exist
    #[arg(short = 'u', long)]
    pub(crate) unsafe_backing: bool,
    /// Show the progress, also if stderr is not a terminal
    #[arg(short, long, conflicts_with = "unsafe_backing")]
    pub(crate) progress: bool,
    /// The image
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DdArgs {
    /// Format of the image that is read [default: detected]
    #[arg(short, long, value_parser = format())]
    pub(crate) format: Option<ImageFormat>,
    /// Format of the new image
    #[arg(short = 'O', long, default_value = "raw", value_parser = format())]
    pub(crate) output_format: ImageFormat,
    /// Copy even if another process uses the image; what it writes meanwhile may be copied or not
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
    /// What is copied: see below
    #[arg(value_name = "NAME=VALUE", required = true)]
    pub(crate) operands: Vec<String>,
}
