//! qcow2 images. `crates/qcow2` determines the steps of a request, and this module carries them out
//! on files of this host, or on a disk of a server ([`ImageFile`]).
//!
//! What must never happen: an image stays behind while parts of its map are only in memory.
//! [`close`](Qcow2::close) does the last flush.

mod bitmaps;
mod handle;
mod journal;
mod journal_file;
mod journal_name;
mod open;
mod qemu_img;
mod sweep;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use qcow2::bitmap::Loaded;
use qcow2::{Chain, Storage};
use rustix::fs::{AtFlags, StatxFlags, statx};
use vshunt_engine::{Token, Uring};
use vshunt_sandbox::{self as sandbox, ThreadKind};

use self::bitmaps::Bitmaps;
pub(super) use self::bitmaps::store_in_use;
pub(super) use self::handle::Qcow2Handle;
pub use self::journal::{JournalView, Recovered, read_only, recover};
use self::journal_file::JournalFile;
pub use self::journal_file::{path_of, remove};
pub(super) use self::open::open;
pub use self::open::{CHAIN_MAX, UncleanImage};
pub use self::sweep::sweep;
use super::bounce::Pool;
use super::cost::Zeroing;
use super::image_file::{ImageFile, Remote};
use super::nbd::begin;
use super::raw::Raw;
use super::{Io, Op, Step};

/// An open image, with its backing images.
pub(super) struct Qcow2 {
    chain: Chain,
    /// The files by number: the image, its data file if it has one, its backing images.
    files: Vec<ImageFile>,
    /// How many of them are the image and its data file.
    own_files: usize,
    /// Size of the backing image, bytes, if there is one.
    backing_bytes: Option<u64>,
    bitmaps: Bitmaps,
    readonly: bool,
    /// The journal of the map, if there is one.
    journal: Option<JournalFile>,
    /// The header marks the image as open.
    marked: bool,
    /// Writes that an earlier daemon completed may be missing.
    lost_writes: bool,
    /// Reports about images of the chain that were not closed and are only read.
    unclean: Vec<UncleanImage>,
    /// The image is about to be deleted.
    abandoned: AtomicBool,
    /// A flush does nothing.
    no_sync: bool,
    /// Writes are on stable storage when they complete.
    writethrough: bool,
}

impl Qcow2 {
    /// Makes the image usable by one queue of the worker that owns `uring`.
    pub(super) fn attach(self: &Arc<Self>, uring: &mut Uring) -> Qcow2Handle {
        Qcow2Handle::new(self, uring)
    }

    /// See [`Disk::survives_kill`](super::Disk::survives_kill).
    pub(super) fn survives_kill(&self) -> bool {
        self.readonly || self.writethrough || self.journal.is_some()
    }

    /// See [`Disk::lost_writes`](super::Disk::lost_writes).
    pub(super) fn lost_writes(&self) -> bool {
        self.lost_writes
    }

    /// See [`Disk::unclean_images`](super::Disk::unclean_images).
    pub(super) fn unclean_images(&self) -> &[UncleanImage] {
        &self.unclean
    }

    /// Returns whether a call on one of the files may wait for another program.
    pub(super) fn may_wait(&self) -> bool {
        self.files().any(Raw::may_wait)
    }

    /// Returns how a range is zeroed.
    pub(super) fn zeroing(&self) -> Zeroing {
        // A raw data file has the number 1, and the zeroes are written or punched there.
        let data = self.files.get(1).and_then(ImageFile::local);
        let punches =
            self.chain.top().has_raw_data() && data.is_some_and(|raw| raw.zeroing(false) == Zeroing::Marks);
        match self.chain.marks_zeroes() || punches {
            true => Zeroing::MarksClusters(self.cluster_bytes()),
            false => Zeroing::Writes,
        }
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        self.chain.top().cluster_size()
    }

    /// Returns whether the image can store dirty bitmaps.
    pub(super) fn supports_bitmaps(&self) -> bool {
        self.chain.top().header().version >= 3
    }

    pub(super) fn direct_in_use(&self) -> bool {
        self.files[0].direct_in_use()
    }

    /// Returns those of its files that are on this host: the image, its data file if it has one,
    /// and its backing images.
    pub(super) fn files(&self) -> impl Iterator<Item = &Raw> {
        self.files.iter().filter_map(ImageFile::local)
    }

    /// Returns the image and its data file, as far as they are on this host.
    pub(super) fn own_files(&self) -> impl Iterator<Item = &Raw> {
        self.files.iter().take(self.own_files).filter_map(ImageFile::local)
    }

    /// Returns the blocks of 512 bytes that are allocated for the image, its data file and its
    /// backing images. None if one of them is no file of this host, or if the file system does not
    /// tell.
    pub(super) fn blocks(&self) -> Option<u64> {
        let blocks = |file: &ImageFile| {
            let raw = file.local().filter(|raw| raw.is_file())?;
            // A program or host that serves the file is not asked: it may hang. The last known
            // number counts.
            let flags = AtFlags::STATX_DONT_SYNC;
            let told = statx(raw.image(), "", AtFlags::EMPTY_PATH | flags, StatxFlags::BLOCKS).ok()?;
            Some(told.stx_blocks)
        };
        // The image has a header, so a file without blocks is one whose blocks are not told. Tools
        // take a disk without blocks for one of zeroes only.
        blocks(self.image()).filter(|n| *n > 0)?;
        // The server of a file may tell any number.
        self.files.iter().map(blocks).try_fold(0, |sum: u64, blocks| Some(sum.saturating_add(blocks?)))
    }

    /// Returns the file of the image.
    pub(super) fn image(&self) -> &ImageFile {
        &self.files[0]
    }

    /// Opens one of the files for a control thread: 0 is the image, 1 its data file. None: there is
    /// none.
    pub(super) fn storage(&self, number: usize) -> Option<std::io::Result<Box<dyn Storage>>> {
        self.files.get(number).map(|file| file.storage(false, false))
    }

    /// Returns the image's file if it is on a server.
    pub(super) fn remote(&self) -> Option<&Remote> {
        self.files[0].remote()
    }

    /// Returns the size of the backing image, bytes, if there is one.
    pub(super) fn backing_bytes(&self) -> Option<u64> {
        self.backing_bytes
    }

    /// Returns the number of backing images.
    pub(super) fn backing_images(&self) -> usize {
        self.chain.backing_images()
    }

    /// Returns whether a path leads to one of the files.
    pub(super) fn is_of(&self, path: &std::path::Path) -> bool {
        self.files().any(|raw| raw.is_of(path))
    }

    /// Changes the size of the disk. Before it shrinks, the caller has zeroed the bytes beyond the
    /// new end; so new bytes read as zeroes. Blocks. No write may be in flight.
    ///
    /// # Errors
    /// `EFBIG` if the L1 table is too small, `EIO` for a corrupt image, else the system's.
    pub(super) fn set_size(&self, size: u64) -> std::io::Result<()> {
        let (top, file) = (self.chain.top(), &self.files[0]);
        if size > top.room() {
            return Err(std::io::Error::from_raw_os_error(libc::EFBIG));
        }
        // A corrupt image does not grow, even if the corruption is found during this call.
        let check = || match top.is_corrupt() {
            true => Err(std::io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        };
        check()?;
        top.write_size(size, |bytes| file.merge(0, bytes, self.writethrough))?;
        check()?;
        top.set_size(size);
        Ok(())
    }

    /// Flushes and waits.
    pub(super) fn flush_now(self: &Arc<Self>) -> std::io::Result<()> {
        self.flush_times(1)
    }

    /// Flushes so often, and waits. On a thread of its own: when an io_uring is closed it
    /// interrupts the next wait of its thread, and callers are not prepared for that.
    fn flush_times(self: &Arc<Self>, times: u32) -> std::io::Result<()> {
        if self.readonly {
            return Ok(());
        }
        const NAME: &str = "vshunt-qcow2";
        let Some(remote) = self.remote() else {
            let thread = std::thread::Builder::new().name(NAME.to_owned());
            return std::thread::scope(|scope| {
                thread.spawn_scoped(scope, || self.flush_here(times))?.join().expect("it does not panic")
            });
        };
        // A flush changes the image. So none begins on a server that hangs.
        remote.lives()?;
        remote.wait_for(&begin(NAME, self, None, move |image| image.flush_here(times))?)?
    }

    /// Flushes so often with an io_uring of its own. Needs no [`Disk`](super::Disk), so it works
    /// after the last handle was dropped.
    fn flush_here(self: &Arc<Self>, times: u32) -> std::io::Result<()> {
        let (mut uring, pool, mut io) = (Uring::new()?, Pool::default(), Io::default());
        let handle = self.attach(&mut uring);
        let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
        let mut left = times;
        io.reset(Op::Flush, 0, true);
        let mut step = handle.begin(&pool, &mut uring, &mut io, token, true);
        let res = loop {
            match step {
                Step::Done(0..) if left > 1 => {
                    left -= 1;
                    io.reset(Op::Flush, 0, true);
                    step = handle.begin(&pool, &mut uring, &mut io, token, true);
                }
                Step::Done(res) => break res,
                Step::Wait => {
                    let Ok(res) = uring.next_result() else {
                        // The kernel may still write to the memory of the request.
                        tracing::error!("an io_uring failed; ending at once");
                        std::process::abort();
                    };
                    step = handle.resume(&pool, &mut uring, &mut io, token, res);
                }
            }
        };
        handle.detach(&mut uring);
        // Requests that this one woke at its end would wait for ever otherwise.
        if uring.send().is_err() {
            tracing::error!("an io_uring failed; ending at once");
            std::process::abort();
        }
        if res < 0 { Err(std::io::Error::from_raw_os_error(-res)) } else { Ok(()) }
    }

    /// Returns whether the metadata was found to be corrupt since the image was opened.
    pub(super) fn is_corrupt(&self) -> bool {
        self.chain.top().is_corrupt()
    }

    /// Logs the corruption of the image once. Called after a request that failed.
    #[cold]
    fn log_corruption(&self) {
        let Some((why, marked)) = self.chain.top().take_corruption() else { return };
        let shown = self.files[0].path().display();
        let mark = if marked { "it is marked as corrupt, " } else { "" };
        let repair = repair_command(self.files[0].path(), self.remote().is_some(), "all");
        let text = format!(
            "{shown} is corrupt: {why}. {mark}requests that need this fail, and nothing was written over; stop serving it \
             and repair it with '{repair}'"
        );
        // Workers write no log lines. If no thread can be started, the message is lost.
        let thread = std::thread::Builder::new().name("vshunt-qcow2".to_owned());
        sandbox::detach(ThreadKind::Session, thread, move || tracing::error!("{text}"));
    }

    /// Closes the image after its last use: flushes it and removes its mark. Returns whether that
    /// succeeded.
    pub(super) fn close(self: &Arc<Self>) -> bool {
        if self.abandoned.load(Relaxed) {
            self.journal.iter().for_each(JournalFile::remove);
            return true;
        }
        // The second flush writes the reference counts that the first one lowered, the third the
        // space reserved for both.
        if let Err(e) = self.flush_times(3) {
            let what = match self.journal {
                Some(_) => {
                    "are in its journal; open the image again before the machine restarts, or they are lost"
                }
                None => "are lost",
            };
            tracing::error!("the image's last changes {what}: {e}");
            return false;
        }
        if self.readonly {
            return true;
        }
        // Without clusters that were reserved at the end and not used, and with all of the last
        // one: other programs may not read an image that ends inside it.
        self.files[0].end_at(self.chain.top().end());
        let plain = || self.files[0].storage(false, self.no_sync);
        // Before the bitmaps, since they are changed only in an image that is not marked as open.
        if self.marked {
            let opened = plain().map_err(qcow2::Error::io("cannot open it"));
            if let Err(e) = opened.and_then(|plain| qcow2::journal::mark_closed(&*plain)) {
                tracing::error!("the image stays marked as not closed, and is repaired next time: {e}");
                return false;
            }
        }
        self.journal.iter().for_each(JournalFile::remove);
        if self.is_corrupt() {
            // The reference counts cannot be trusted, so a bitmap could overwrite a cluster that is
            // in use.
            tracing::error!(
                "the image's bitmaps are not written back, and count as inconsistent: it is to be repaired first"
            );
        } else if let Err(e) = self.bitmaps.close(plain) {
            tracing::error!("the image's bitmaps are not written back, and count as inconsistent: {e}");
        }
        true
    }

    /// See [`Disk::abandon`](super::Disk::abandon).
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Relaxed);
    }

    /// Returns the bitmaps for the next image of the disk. They stay marked as in use in this one.
    pub(super) fn bitmaps_for_next(&self) -> Vec<Loaded> {
        self.bitmaps.for_next()
    }

    /// See [`Disk::take_bitmaps`](super::Disk::take_bitmaps).
    pub(super) fn take_bitmaps(&self) -> Vec<Loaded> {
        self.bitmaps.take()
    }

    /// See [`Disk::put_bitmaps`](super::Disk::put_bitmaps).
    pub(super) fn put_bitmaps(&self, bitmaps: Vec<Loaded>) {
        self.bitmaps.put(bitmaps);
    }
}

/// Returns the command that repairs an image: `what` it repairs is `all` or `leaks`. `remote`: the
/// path is the URI of a server.
pub(super) fn repair_command(path: &Path, remote: bool, what: &str) -> String {
    let shown = path.display();
    if !remote {
        return format!("vshunt image check -r {what} {shown}");
    }
    format!("qemu-img check -r {what} {}", qemu_img::image_of(&shown.to_string()))
}

#[cfg(test)]
mod tests;
