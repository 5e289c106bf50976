//! Stream: an overlay gets all that its backing images have, and then stands alone.
//!
//! | step | what happens | if the daemon is killed after it |
//! | --- | --- | --- |
//! | 1 | [`Op::Populate`](super::Op::Populate) copies, cluster by cluster, while guests go on | the overlay has more clusters of its own, and reads the same |
//! | 2 | all of it is on stable storage (with `cache=unsafe`, it need not be); no block is left that only a backing image has | the same |
//! | 3 | the queues are drained; one write of the header removes the name of the backing image | the overlay stands alone |
//! | 4 | the image is opened again, and the backing image is unmarked | the same; its mark is removed by the next program that opens it |

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qcow2::Image;
use qcow2::amend::{Amendment, amend};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::DiskSpec;

use super::disk::Disk;
use super::file_storage::{FileStorage, in_folder_of};
use super::overlay_xattr;
use super::path_fd::open_image;
use super::replace::shown;
use super::{DiskAccess, Extent};

/// Longest range that is asked for at once, bytes.
const SEEK_BYTES: u64 = 1 << 40;

impl Disk {
    /// Returns the file below the image, if the image can get what that has.
    ///
    /// # Errors
    /// `Invalid` if there is none, `Unsupported` if the image needs it for something else.
    pub fn below_for_stream(&self, now: &DiskSpec) -> Result<PathBuf> {
        let shown = shown(now);
        let Some(path) = now.file.as_ref().filter(|_| self.is_qcow2()) else {
            return Err(Error::invalid(format!(
                "disk {} is no qcow2 overlay: there is nothing below it that it could get",
                now.name
            )));
        };
        let file = open_image(path, false).map_err(|e| Error::io(format_args!("cannot open {shown}"), e))?;
        let plain = FileStorage::new(file);
        let image = Image::open(&plain).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        let header = image.header();
        let Some(below) = &header.backing else {
            return Err(Error::invalid(format!(
                "{shown} has no backing image: there is nothing that it could get"
            )));
        };
        if header.snapshots > 0 {
            return Err(Error::unsupported(format!(
                "{shown} has internal snapshots, which would still need {below}: delete them ('vshunt snapshot {} --delete \
                 NAME'), or copy the disk with 'vshunt mirror'",
                now.name
            )));
        }
        Ok(in_folder_of(path, below))
    }

    /// Returns the offset of the first byte that only a backing image has. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn first_needed_below(self: &Arc<Self>) -> io::Result<Option<u64>> {
        let (mut disk, size) = (DiskAccess::new(self.clone())?, self.size_bytes());
        let mut at = 0;
        while at < size {
            let own = disk.seek(at, (size - at).min(SEEK_BYTES), true)?;
            if own.extent != Extent::Absent {
                at += own.len;
                continue;
            }
            let all = disk.seek(at, own.len, false)?;
            if all.extent == Extent::Zero {
                at += all.len;
                continue;
            }
            // A guest may have written there since the first answer.
            let again = disk.seek(at, own.len, true)?;
            if again.extent == Extent::Absent {
                return Ok(Some(at));
            }
            at += again.len;
        }
        Ok(None)
    }

    /// Removes the name of the backing image from the image, which has all that it needs, on stable
    /// storage. The queues are drained, as [`replace`](Self::replace) requires. `below`: the file
    /// that was below.
    ///
    /// # Errors
    /// Those of [`replace`](Self::replace) and of the change, after which the disk continues as
    /// before.
    pub fn leave_below(&self, now: &DiskSpec, below: &Path) -> Result<()> {
        let wrong = |e: qcow2::Error| Error::invalid(format!("{}: {e}", shown(now)));
        self.replace(now, now, &[], |closed| {
            let file = closed.file(0)?;
            let mut image = Image::open(&*file).map_err(wrong)?;
            if image.header().is_open() {
                return Err(Error::busy(format!(
                    "{} could not be closed, and keeps its backing image; try again",
                    shown(now)
                )));
            }
            amend(&mut image, &Amendment { backing: Some(None), ..Amendment::default() }).map_err(wrong)
        })?;
        if let Some(overlay) = &now.file
            && let Err(e) = overlay_xattr::clear_overlay_of(below, overlay)
        {
            tracing::warn!("{} stays marked as being below {}: {e}", below.display(), overlay.display());
        }
        Ok(())
    }
}
