//! The metadata of an image for users.

use crate::bitmap::{self, Bitmap};
use crate::header::Header;
use crate::snapshot::{self, Snapshot};
use crate::{Image, Result, Storage};

/// Everything except the contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The header.
    pub header: Header,
    /// The internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// The persistent bitmaps.
    pub bitmaps: Vec<Bitmap>,
}

/// Reads the metadata.
///
/// # Errors
/// Not an image, an unsupported one, or invalid tables of snapshots or bitmaps.
pub fn info(file: &dyn Storage) -> Result<Info> {
    let image = Image::open(file)?;
    let (snapshots, _) = snapshot::read_table(&image)?;
    let bitmaps = bitmap::read_directory(&image)?;
    Ok(Info { header: image.header, snapshots, bitmaps })
}
