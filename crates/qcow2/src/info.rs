//! What an image says of itself.

use crate::bitmap::{self, Bitmap};
use crate::header::Header;
use crate::snapshot::{self, Snapshot};
use crate::{Image, Result, Storage};

/// Everything but its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The header.
    pub header: Header,
    /// Its internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Its persistent bitmaps.
    pub bitmaps: Vec<Bitmap>,
}

/// Reads it.
///
/// # Errors
/// No image, one that is not understood, or tables of snapshots or bitmaps that cannot be.
pub fn info(file: &dyn Storage) -> Result<Info> {
    let image = Image::open(file)?;
    let (snapshots, _) = snapshot::read_table(&image)?;
    let bitmaps = bitmap::read_directory(&image)?;
    Ok(Info { header: image.header, snapshots, bitmaps })
}
