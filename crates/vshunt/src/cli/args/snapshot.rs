//! Flags of `vshunt snapshot`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

pub(crate) const AFTER: &str = "\
Guests pause while a snapshot is taken, and see no error. With --to the disk continues in a new
image, the overlay. The old image becomes its backing file and does not change any more. From then
on, serve the disk by the name of the overlay. An --internal snapshot is stored in the qcow2 image.
'vshunt image snapshot -l -U FILE' lists them; -a applies one while no program uses the image.

Examples:
  vshunt snapshot d0 --to /var/lib/vm/d0-monday.qcow2
  vshunt snapshot d0 --to d0-monday.qcow2 --and d1=d1-monday.qcow2
  vshunt snapshot d0 --internal monday
  vshunt snapshot d0 --delete monday";

#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("what").args(["to", "internal", "delete"]).required(true)))]
pub(crate) struct SnapshotArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// Continue in a new qcow2 image, whose backing file is the present one
    #[arg(long, value_name = "FILE")]
    pub(crate) to: Option<PathBuf>,
    /// Take a snapshot of this disk, too, at the same point in time; may be repeated
    #[arg(long = "and", value_name = "DISK=FILE", requires = "to", value_parser = disk_and_file)]
    pub(crate) others: Vec<(String, PathBuf)>,
    /// FILE exists, and its backing file is the present image
    #[arg(long, requires = "to")]
    pub(crate) existing: bool,
    /// Take a snapshot inside the qcow2 image
    #[arg(long, value_name = "NAME")]
    pub(crate) internal: Option<String>,
    /// Delete a snapshot inside the qcow2 image
    #[arg(long, value_name = "NAME")]
    pub(crate) delete: Option<String>,
}

pub(super) fn disk_and_file(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((disk, file)) if !disk.is_empty() && !file.is_empty() => Ok((disk.to_owned(), file.into())),
        _ => Err(
            "write the name of a disk and the path of its file, for example d1=/var/lib/vm/d1-monday.qcow2"
                .into(),
        ),
    }
}
