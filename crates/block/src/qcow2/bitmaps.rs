//! The persistent dirty bitmaps of an image that is open for writing.
//!
//! When the image is opened they are read, and marked as in use in the image. The part of the
//! daemon that tracks writes takes them and puts them back later. When the image is closed they are
//! written. A bitmap that may have missed a write stays marked as in use, so that the next process
//! treats the whole disk as written. Used by control threads only.
//!
//! What must never happen: a valid bitmap in the image lacks a block that was written.

use std::sync::Mutex;

use qcow2::bitmap::{Loaded, load_all, mark_in_use, store};
use qcow2::{Image, Result, Storage};
use vshunt_types::sync::Locked;

#[derive(Default)]
pub(super) struct Bitmaps {
    /// Guards the bitmaps and their state. No other lock is taken while it is held.
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    list: Vec<Loaded>,
    /// The image has bitmaps, all marked as in use.
    in_image: bool,
    /// They were taken and not put back yet.
    taken: bool,
    /// They were put back after every write since the open was tracked.
    tracked: bool,
}

impl Bitmaps {
    /// Reads the bitmaps of an image that is about to be written, and marks them as in use.
    pub(super) fn open(storage: &dyn Storage) -> Result<Self> {
        let mut image = Image::open(storage)?;
        let list = load_all(&image)?;
        mark_in_use(&mut image)?;
        for b in list.iter().filter(|b| b.inconsistent) {
            tracing::warn!(
                "bitmap {} was not written back when the image was used last: all of the disk counts as written",
                b.name
            );
        }
        let held = Held { in_image: image.header().bitmaps.is_some(), list, ..Held::default() };
        Ok(Self { held: Mutex::new(held) })
    }

    /// Returns the bitmaps to the part of the daemon that tracks writes.
    pub(super) fn take(&self) -> Vec<Loaded> {
        let mut held = self.held.locked();
        held.taken = true;
        std::mem::take(&mut held.list)
    }

    /// Returns the bitmaps for the next image of the disk. In this image they stay marked as in
    /// use, since they will not record the writes to the next image.
    pub(super) fn for_next(&self) -> Vec<Loaded> {
        let mut held = self.held.locked();
        held.list.iter_mut().for_each(|b| b.missed = true);
        held.list.clone()
    }

    /// Puts the bitmaps back, as they are to be written.
    pub(super) fn put(&self, list: Vec<Loaded>) {
        let mut held = self.held.locked();
        (held.taken, held.tracked, held.list) = (false, true, list);
    }

    /// Writes the bitmaps to an image without other users.
    pub(super) fn close(&self, storage: impl FnOnce() -> std::io::Result<Box<dyn Storage>>) -> Result<()> {
        let mut held = self.held.locked();
        if held.taken || (!held.in_image && held.list.is_empty()) {
            return Ok(());
        }
        let mut list = std::mem::take(&mut held.list);
        let tracked = held.tracked;
        list.iter_mut().for_each(|b| b.missed |= b.enabled && !tracked);
        let storage = storage().map_err(qcow2::Error::io("the image"))?;
        store(&mut Image::open(&*storage)?, list)
    }
}

/// Stores bitmaps in an image that is not open, marked as in use.
pub(crate) fn store_in_use(storage: &dyn Storage, list: Vec<Loaded>) -> Result<()> {
    store(&mut Image::open(storage)?, list)
}
