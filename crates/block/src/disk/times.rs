//! The attributes that a disk has as a file: its times and its allocated space.
//!
//! A raw disk in a file has those of its file. Other disks keep times here. They begin with those
//! of the image file, or with the time when the disk was opened. A raw disk on a block device has
//! the later ones of both.
//!
//! A write does not read a clock. Each [`DiskHandle`](crate::DiskHandle) has a [`WriteMark`], which
//! it sets when a request that may have changed the disk is complete. The next caller who asks for
//! the times clears the marks, and stores the time of that moment as the time of the writes. POSIX
//! allows that (XBD 4.12, "File Times Update"): a file's times are marked for update, and are
//! updated at the latest when they are asked for. What must never happen: a write completes after
//! the times were asked for, and the times stay as they are.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::fstatvfs;
use vshunt_types::sync::Locked;

use super::Disk;
use crate::backend::Backend;
use crate::file_times::{FileTimes, NewTime, Time, set_times};

/// Most files whose attributes a worker asks for at once. Each takes less than a microsecond.
const FILES_AT_ONCE_MAX: usize = 16;

/// The attributes that a disk has as a file, besides its size.
#[derive(Clone, Copy, Debug)]
pub struct FileAttributes {
    /// Its times.
    pub times: FileTimes,
    /// Allocated blocks of 512 bytes, if that is known.
    pub blocks: Option<u64>,
}

/// The space that a disk has not used.
#[derive(Clone, Copy, Debug)]
pub struct FreeBytes {
    /// Bytes of the disk for which nothing is allocated.
    pub unallocated: u64,
    /// How many of them its file system has space for.
    pub available: u64,
}

/// Says that a handle has changed the disk since the times were last brought up to date. It has a
/// cache line of its own (two, since processors fetch pairs), so that workers do not slow each
/// other down.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct WriteMark(AtomicBool);

impl WriteMark {
    /// Called when a request that may have changed the disk is complete, before its user learns
    /// that.
    #[inline]
    pub(crate) fn set(&self) {
        // After the data: a thread that clears the mark, and then reads the disk, sees the data.
        self.0.store(true, Ordering::Release);
    }

    fn take(&self) -> bool {
        // A mark that is not set stays in the cache of its worker.
        self.0.load(Ordering::Acquire) && self.0.swap(false, Ordering::AcqRel)
    }
}

/// The times of a disk. Any thread.
pub(crate) struct Times {
    /// Guards the times and the list of marks. Held for a walk through the marks.
    state: Mutex<State>,
}

struct State {
    times: FileTimes,
    /// Those of a device node which could not be set and do not count as long as they stay.
    hidden: Option<FileTimes>,
    marks: Vec<Arc<WriteMark>>,
}

impl Times {
    /// Begins with these times, or with the current time.
    pub(super) fn new(times: Option<FileTimes>) -> Self {
        let now = now();
        let times = times.unwrap_or(FileTimes { atime: now, mtime: now, ctime: now });
        Self { state: Mutex::new(State { times, hidden: None, marks: Vec::new() }) }
    }

    /// Returns the mark of a new handle.
    pub(crate) fn mark(&self) -> Arc<WriteMark> {
        let mark = Arc::<WriteMark>::default();
        let state = &mut *self.state.locked();
        let mut written = false;
        state.marks.retain(|mark| {
            let is_used = Arc::strong_count(mark) > 1;
            if !is_used {
                // After the end of the handle, which may have set its mark just before.
                fence(Ordering::Acquire);
                written |= mark.take();
            }
            is_used
        });
        if written {
            state.changed();
        }
        state.marks.push(mark.clone());
        mark
    }

    /// Notes a change that no handle made.
    pub(crate) fn changed(&self) {
        self.state.locked().changed();
    }

    /// Sets the times of an image that the disk had until now.
    pub(crate) fn adopt(&self, times: FileTimes) {
        self.state.locked().times = times;
    }

    fn current(&self) -> FileTimes {
        let mut state = self.state.locked();
        state.update();
        state.times
    }

    /// Returns the current times of a disk on a device whose node has these: the later ones, except
    /// where they are hidden.
    fn beside(&self, node: FileTimes) -> FileTimes {
        let mut state = self.state.locked();
        state.update();
        state.beside(node)
    }

    /// Sets times. `node`: those of a device node that could not be set.
    fn set(&self, atime: NewTime, mtime: NewTime, node: Option<FileTimes>) {
        let mut state = self.state.locked();
        state.update();
        if let Some(node) = node {
            state.times = state.beside(node);
            state.hidden = Some(node);
        }
        let (now, old) = (now(), state.times);
        state.times =
            FileTimes { atime: atime.after(old.atime, now), mtime: mtime.after(old.mtime, now), ctime: now };
    }
}

impl State {
    /// Gives the writes since the last call the current time.
    fn update(&mut self) {
        // All marks are cleared, so no `any`.
        if self.marks.iter().fold(false, |written, mark| mark.take() | written) {
            self.changed();
        }
    }

    fn beside(&self, node: FileTimes) -> FileTimes {
        let (own, hidden) = (self.times, self.hidden);
        let of = |get: fn(&FileTimes) -> Time| match hidden.is_some_and(|hidden| get(&hidden) == get(&node)) {
            true => get(&own),
            false => get(&own).max(get(&node)),
        };
        FileTimes { atime: of(|t| t.atime), mtime: of(|t| t.mtime), ctime: of(|t| t.ctime) }
    }

    fn changed(&mut self) {
        let now = now();
        (self.times.mtime, self.times.ctime) = (now, now);
    }
}

/// Returns the current time.
fn now() -> Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (i64::try_from(now.as_secs()).unwrap_or(i64::MAX), now.subsec_nanos())
}

impl Disk {
    /// Returns the attributes of the disk as a file. May wait for another program or host, or until
    /// the image is replaced.
    pub fn file_attributes(&self) -> FileAttributes {
        let backend = self.backend();
        let blocks = match self.frozen_parts() {
            Some(frozen) => frozen.source.file_attributes().blocks,
            None => blocks_in(&backend),
        };
        FileAttributes { times: self.times_in(&backend), blocks }
    }

    /// Returns the attributes of the disk as a file, for a worker. None if
    /// [`file_attributes`](Self::file_attributes) may wait, or asks for those of many files.
    pub fn file_attributes_now(&self) -> Option<FileAttributes> {
        // `replace` holds the lock while it flushes.
        let backend = self.backend.try_read().ok()?.clone();
        let waits = match &backend {
            Backend::Raw(raw) => raw.attributes_may_wait(),
            backend => backend.files().nth(FILES_AT_ONCE_MAX).is_some(),
        };
        if waits {
            return None;
        }
        let blocks = match self.frozen_parts() {
            Some(frozen) => frozen.source.file_attributes_now()?.blocks,
            None => blocks_in(&backend),
        };
        Some(FileAttributes { times: self.times_in(&backend), blocks })
    }

    /// Returns the bytes that can still be written to the disk before its image has no more space,
    /// as far as that is known: those of the disk that are not allocated, and not more than its
    /// file system has for this process. None for disks whose [`FileAttributes::blocks`] are not
    /// known. Blocks.
    pub fn free_bytes(&self) -> Option<FreeBytes> {
        let blocks = self.file_attributes().blocks?;
        let unallocated = self.size_bytes().saturating_sub(blocks.saturating_mul(512));
        let below = match &self.backend() {
            Backend::Qcow2(image) => {
                let own = image.own_files().last().filter(|raw| !raw.may_wait());
                own.and_then(|raw| fstatvfs(raw.image()).ok())
            }
            _ => None,
        };
        let room = below.map_or(u64::MAX, |vfs| vfs.f_bavail.saturating_mul(vfs.f_frsize));
        Some(FreeBytes { unallocated, available: unallocated.min(room) })
    }

    /// Returns the times of the disk, which is made of `backend`.
    fn times_in(&self, backend: &Backend) -> FileTimes {
        let file = match backend {
            Backend::Raw(raw) => raw.image().metadata().ok().map(|metadata| FileTimes::of(&metadata)),
            _ => None,
        };
        match (backend, file) {
            (Backend::Raw(raw), Some(file)) if raw.is_file() => file,
            // The node of a device notes the writes of all programs, but no discards.
            (_, Some(node)) => self.times.beside(node),
            (_, None) => self.times.current(),
        }
    }

    /// Sets times of the disk as a file. They stay until the next change. Blocks. If this process
    /// may not set those of a device node, they are kept here.
    ///
    /// # Errors
    /// The system's.
    pub fn set_file_times(&self, atime: NewTime, mtime: NewTime) -> io::Result<()> {
        let mut node = None;
        if let Backend::Raw(raw) = &self.backend()
            && let Err(e) = set_times(raw.image(), atime, mtime)
        {
            if raw.is_file() || !matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::EROFS)) {
                return Err(e);
            }
            node = Some(FileTimes::of(&raw.image().metadata()?));
        }
        self.times.set(atime, mtime, node);
        Ok(())
    }

    /// Gives writes that are complete the current time as that of the last change. Called when a
    /// user of the disk ends, so that the time is near that of its writes.
    pub fn update_file_times(&self) {
        self.times.current();
    }

    /// Continues with the times of the file that the disk is about to leave.
    pub(crate) fn keep_file_times(&self, backend: &Backend) {
        self.times.adopt(self.times_in(backend));
    }
}

/// Returns the blocks of 512 bytes that are allocated for a disk that is made of `backend`: those
/// of all its files. None if that is not known: a device or a server has other figures.
fn blocks_in(backend: &Backend) -> Option<u64> {
    match backend {
        Backend::Raw(raw) if raw.is_file() => Some(raw.image().metadata().ok()?.blocks()),
        Backend::Qcow2(image) => image.blocks(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
