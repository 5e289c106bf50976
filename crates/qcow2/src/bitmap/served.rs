//! The bitmaps of a disk that is served. They are in memory from the opening for writing to the
//! end.
//!
//! Before the first write, [`mark_in_use`] marks all of them as in use, on stable storage. A later
//! reader of that mark knows that writes may be missing. At the end, [`store`] writes them back.
//! After a crash, [`load_all`] sets all bits of bitmaps in use, because it is better to copy
//! clusters again than to miss one.

use super::bits::BYTES_MAX;
use super::edit::{Contents, Edited, commit, kept, load_bits};
use super::{Bitmap, Bits, DIRTY_TRACKING, GRANULARITY_BITS, NAME_MAX, flag, read_directory};
use crate::{Error, Image, Result};

/// A bitmap in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The name.
    pub name: String,
    /// The bits, with the granularity.
    pub bits: Bits,
    /// Whether it tracks writes.
    pub enabled: bool,
    /// Whether all bits were set because the stored bitmap was inconsistent.
    pub inconsistent: bool,
    /// Whether writes may have been missed. The bitmap is then left in use, so that it is
    /// inconsistent at the next opening.
    pub missed: bool,
}

/// Returns the name, if it can be used.
fn usable_name(bitmap: &Bitmap) -> Option<&str> {
    if !bitmap.extra.is_empty() && !bitmap.has(flag::EXTRA_COMPATIBLE) {
        return None;
    }
    std::str::from_utf8(&bitmap.name).ok()
}

/// Reads all bitmaps except those with unknown extra data or with names that are not text.
///
/// # Errors
/// Those of the directory and of the storage; more bits than memory is allowed for.
pub fn load_all(image: &Image<'_>) -> Result<Vec<Loaded>> {
    let (mut all, mut bytes) = (Vec::new(), 0);
    for bitmap in &read_directory(image)? {
        let Some(name) = usable_name(bitmap) else { continue };
        let inconsistent = bitmap.has(flag::IN_USE);
        let mut bits = Bits::new(image.header.size, bitmap.granularity_bits)?;
        bytes += bits.bytes().len() as u64;
        if bytes > BYTES_MAX {
            return Err(Error::unsupported(format!(
                "its bitmaps need more than {BYTES_MAX} bytes of memory: remove some, or take a larger granularity"
            )));
        }
        if inconsistent {
            bits.set_range(0, image.header.size);
        } else {
            bits = load_bits(image, bitmap)?;
        }
        let (name, enabled) = (name.to_owned(), bitmap.has(flag::AUTO));
        all.push(Loaded { name, bits, enabled, inconsistent, missed: false });
    }
    Ok(all)
}

/// Marks all bitmaps as in use, on stable storage. This includes disabled ones, because they may be
/// enabled later.
///
/// # Errors
/// Those of the directory and of the storage.
pub fn mark_in_use(image: &mut Image<'_>) -> Result<()> {
    let mut list = kept(image)?;
    if list.iter().all(|e| e.bitmap.has(flag::IN_USE)) {
        return Ok(());
    }
    list.iter_mut().for_each(|e| e.bitmap.flags |= flag::IN_USE);
    commit(image, list)
}

/// Makes `all` the bitmaps of the image, no longer in use. Bitmaps that are not among them are
/// removed, and new ones are added. Those that [`load_all`] leaves out stay unchanged.
///
/// # Errors
/// Bits of a disk of another size, an invalid name or granularity, two bitmaps of one name, an
/// image of version 2, and those of the storage.
pub fn store(image: &mut Image<'_>, all: Vec<Loaded>) -> Result<()> {
    if image.header.version < 3 && !all.is_empty() {
        return Err(Error::unsupported("images with compat=0.10 have no bitmaps"));
    }
    let mut list = kept(image)?;
    for e in list.iter_mut().filter(|e| usable_name(&e.bitmap).is_some()) {
        e.contents = Contents::Gone;
    }
    let old = list.len();
    for Loaded { name, bits, enabled, missed, .. } in all {
        if bits.size() != image.header.size {
            return Err(Error::invalid(format!("the bits for bitmap {name} are of a disk of another size")));
        }
        if name.is_empty() || name.len() > NAME_MAX || !GRANULARITY_BITS.contains(&bits.granularity_bits()) {
            return Err(Error::invalid(format!("a bitmap cannot have the name '{name}' or its granularity")));
        }
        let at = list.iter().position(|e| e.bitmap.name == name.as_bytes());
        let mut new = Edited {
            bitmap: Bitmap { name: name.clone().into_bytes(), kind: DIRTY_TRACKING, ..Bitmap::default() },
            contents: Contents::Gone,
        };
        let there = at.and_then(|at| list.get_mut(at));
        let is_new = there.is_none();
        let e = there.unwrap_or(&mut new);
        if at.is_some_and(|at| at >= old) || !matches!(e.contents, Contents::Gone) {
            return Err(Error::invalid(format!("there are two bitmaps {name}")));
        }
        e.bitmap.flags = e.bitmap.flags & flag::EXTRA_COMPATIBLE
            | if enabled { flag::AUTO } else { 0 }
            | if missed { flag::IN_USE } else { 0 };
        e.bitmap.granularity_bits = bits.granularity_bits();
        e.contents = Contents::New(bits);
        if is_new {
            list.push(new);
        }
    }
    commit(image, list)
}
