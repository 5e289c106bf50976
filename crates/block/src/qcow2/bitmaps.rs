//! The persistent dirty bitmaps of an image that is open for writing.
//!
//! They are read and marked as in use when it is opened, and wait here for who tracks writes. At the end they are written
//! back, but for those that may have missed a write: these stay in use, and whoever opens the image next takes all of the disk
//! for written. Control threads only.
//!
//! What must never happen: a bitmap in the image that says less than was written.

use std::sync::Mutex;
use vshunt_types::sync::Locked;

use qcow2::bitmap::{Loaded, load_all, mark_in_use, store};
use qcow2::{Image, Result, Storage};

#[derive(Default)]
pub(super) struct Bitmaps {
    /// Guards what is below; taken alone.
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    list: Vec<Loaded>,
    /// The image has some, all in use.
    in_image: bool,
    /// Somebody tracks writes, and has them.
    out: bool,
    /// Somebody did so from before the first write on, and has brought them back.
    tracked: bool,
}

impl Bitmaps {
    /// Reads those of an image that is about to be written, and marks them.
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

    /// Hands them to who tracks writes.
    pub(super) fn take(&self) -> Vec<Loaded> {
        let mut held = self.held.locked();
        held.out = true;
        std::mem::take(&mut held.list)
    }

    /// Those that are to be written at the close, for the image that its disk goes on in; here they are left in use, since they
    /// say nothing of what is written there.
    pub(super) fn leave(&self) -> Vec<Loaded> {
        let mut held = self.held.locked();
        held.list.iter_mut().for_each(|b| b.missed = true);
        held.list.clone()
    }

    /// They are back, as they are to be written.
    pub(super) fn put(&self, list: Vec<Loaded>) {
        let mut held = self.held.locked();
        (held.out, held.tracked, held.list) = (false, true, list);
    }

    /// Writes them to an image that nobody uses any more.
    pub(super) fn close(&self, storage: impl FnOnce() -> std::io::Result<Box<dyn Storage>>) -> Result<()> {
        let mut held = self.held.locked();
        if held.out || (!held.in_image && held.list.is_empty()) {
            return Ok(());
        }
        let mut list = std::mem::take(&mut held.list);
        let tracked = held.tracked;
        list.iter_mut().for_each(|b| b.missed |= b.enabled && !tracked);
        let storage = storage().map_err(qcow2::Error::io("the image"))?;
        store(&mut Image::open(&*storage)?, list)
    }
}

/// Puts them into an image that nobody has open, in use from the start.
pub(crate) fn enter(storage: &dyn Storage, list: Vec<Loaded>) -> Result<()> {
    store(&mut Image::open(storage)?, list)
}
