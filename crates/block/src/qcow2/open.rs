//! Opening an image with all that belongs to it: on a control thread, before there are requests.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use qcow2::check::{Quiet, Repair, check};
use qcow2::header::{Header, incompatible};
use qcow2::journal::Changes;
use qcow2::{Chain, FileId, Layer, Served, Settings, Storage, make_ready_for};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, DiskSpec, Format};

use super::Qcow2;
use super::bitmaps::Bitmaps;
use super::journal::{self, Lacks, Place, Through};
use crate::raw::{self, Raw};
use crate::{Limits, SECTOR_BYTES, mark};

/// Images below one another at most: more is a loop.
const CHAIN_MAX: usize = 200;

/// A raw file as offline work sees it, through the page cache.
pub(crate) struct Plain {
    file: File,
    /// Nothing is ever made stable.
    careless: bool,
}

impl Plain {
    /// A file that nobody else has.
    pub(crate) fn new(file: File) -> Self {
        Self { file, careless: false }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The same file, opened anew: what O_DIRECT demands does not hold for it.
    pub(crate) fn of(raw: &Raw, readonly: bool, careless: bool) -> io::Result<Self> {
        Ok(Self { file: sandbox::reopen(raw.image(), !readonly)?, careless })
    }
}

impl Storage for Plain {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            match self.file.read_at(&mut buf[at..], offset + at as u64) {
                Ok(0) => break,
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        buf[at..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        let meta = self.file.metadata()?;
        if meta.file_type().is_block_device() {
            return rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0)).map_err(Into::into);
        }
        Ok(meta.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::empty(), offset, len)
            .map_err(Into::into)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, len).map_err(Into::into)
    }

    fn sync(&self) -> io::Result<()> {
        if self.careless { Ok(()) } else { self.file.sync_data() }
    }
}

/// What is opened so far.
struct Opened {
    files: Vec<Raw>,
    limits: Option<Limits>,
}

impl Opened {
    /// Opens one more file; its number, size and a way to read it.
    fn add(&mut self, spec: &DiskSpec) -> Result<(FileId, u64, Plain)> {
        let (raw, size, limits) = raw::open_part(spec)?;
        let shown = spec.file.as_deref().unwrap_or(Path::new("")).display();
        let careless = spec.cache == Cache::Unsafe;
        let plain = Plain::of(&raw, spec.readonly, careless)
            .map_err(|e| Error::io(format_args!("cannot read {shown}"), e))?;
        self.limits.get_or_insert(limits);
        self.files.push(raw);
        Ok((self.files.len() as FileId - 1, size, plain))
    }
}

/// Opens, locks and understands the image of `spec`, the ones below it and its data file.
/// `room`: its disk may get longer while it is served.
pub(crate) fn open(spec: &DiskSpec, room: bool) -> Result<(Qcow2, u64, Limits)> {
    let Some(path) = &spec.file else {
        return Err(Error::invalid(format!(
            "disk {} has format qcow2, which needs an image: add file=PATH",
            spec.name
        )));
    };
    let mut opened = Opened { files: vec![], limits: None };
    // Its own way of being durable is the map's too, so the files are flushed when we say so.
    let cache = if spec.cache == Cache::Unsafe { Cache::Unsafe } else { Cache::Writeback };
    let top = open_image(&mut opened, &DiskSpec { cache, size: None, ..spec.clone() }, path, room)?;
    let (image, mut below, mut readings) = (top.image, top.below, Vec::from_iter(top.reading));
    let size = image.size();
    if spec.size.is_some_and(|s| s != size) {
        return Err(Error::invalid(format!(
            "{} has a disk of {size} bytes, not {}: the size of a qcow2 disk is taken from the image, leave out size=",
            path.display(),
            spec.size.unwrap_or(0)
        )));
    }
    if !size.is_multiple_of(SECTOR_BYTES) {
        return Err(Error::invalid(format!(
            "{} has a disk of {size} bytes; the size of a disk must be a multiple of 512",
            path.display()
        )));
    }
    let (mut layers, mut below_size) = (Vec::new(), None);
    while let Some(lower) = below.take() {
        if layers.len() == CHAIN_MAX {
            return Err(Error::invalid(format!("{} stands on more than {CHAIN_MAX} images", path.display())));
        }
        let part = DiskSpec { file: Some(lower.path.clone()), readonly: true, size: None, ..spec.clone() };
        match lower.format {
            Format::Qcow2 => {
                let next = open_image(&mut opened, &part, &lower.path, false)
                    .map_err(|e| e.context(lower.why(path)))?;
                below_size.get_or_insert(next.image.size());
                readings.extend(next.reading);
                layers.push(Layer::Qcow2(Arc::new(next.image)));
                below = next.below;
            }
            _ => {
                let (file, size, _) = opened.add(&part).map_err(|e| e.context(lower.why(path)))?;
                below_size.get_or_insert(size);
                layers.push(Layer::Raw { file, size });
            }
        }
    }
    let limits = limits(opened.limits.expect("the image was opened"), &image, spec.readonly);
    // The last thing that can fail: from here on the image is to be closed.
    let (image, journal, marked) = with_journal(image, spec, path, &opened.files[0]);
    let qcow2 = Qcow2 {
        chain: Chain::new(Arc::new(image), layers),
        journal,
        marked,
        lost: top.lost,
        readings,
        files: opened.files,
        below: below_size,
        bitmaps: top.bitmaps,
        readonly: spec.readonly,
        abandoned: AtomicBool::new(false),
        careless: spec.cache == Cache::Unsafe,
        through: spec.cache == Cache::Writethrough,
    };
    Ok((qcow2, size, limits))
}

/// An image that another names.
struct Lower {
    path: PathBuf,
    format: Format,
}

impl Lower {
    fn why(&self, top: &Path) -> String {
        format!("{} stands on {}", top.display(), self.path.display())
    }
}

struct Top {
    image: Served,
    below: Option<Lower>,
    bitmaps: Bitmaps,
    /// Completed writes of its last daemon may be missing.
    lost: bool,
    /// It was not closed, and is only read.
    reading: Option<Reading>,
}

/// How an image reads that was not closed and is not opened for writing.
#[derive(Clone, Debug)]
pub struct Reading {
    /// What was found, in a sentence that names the image.
    pub text: String,
    /// Completed writes may be missing.
    pub lacks: bool,
}

/// Marks an image that is written as open, and begins its journal, where there can be one: what is completed is not lost
/// then if we are killed. Where each write is stable when it is done there is no need of one. Whether it is marked.
fn with_journal(
    mut image: Served,
    spec: &DiskSpec,
    path: &Path,
    file: &Raw,
) -> (Served, Option<Place>, bool) {
    if spec.readonly {
        return (image, None, false);
    }
    let shown = path.display();
    let stable = spec.cache == Cache::Writethrough;
    let plain = match Plain::of(file, false, spec.cache == Cache::Unsafe) {
        Ok(plain) => plain,
        Err(e) => {
            tracing::warn!("{}", unmarked(&shown, &e));
            return (image, None, false);
        }
    };
    if !stable && image.header().version >= 3 {
        match journal::begin(file.image(), path, &plain, image.header()) {
            Ok((journal, begun, place)) => return (image.with_journal(journal, begun), Some(place), true),
            Err(e) => tracing::warn!(
                "{shown} has no journal in /dev/shm ({e}): if vshunt is killed, writes since the last flush are lost, and the \
                 guest has to be restarted; where space is missing, free some, then remove the disk and add it again"
            ),
        }
    }
    match qcow2::journal::begin_without(&plain, stable) {
        Ok(begun) => (image.with_begun(begun), None, true),
        Err(e) => {
            tracing::warn!("{}", unmarked(&shown, &e));
            // The mark may be there all the same. What was read when the image was opened will do where this cannot be read.
            if let Err(e) = image.begin_again(&plain) {
                tracing::debug!("{shown}: {e}");
            }
            (image, None, false)
        }
    }
}

/// What to tell of an image that cannot be marked as open.
fn unmarked(shown: &dyn Display, e: &dyn Display) -> String {
    format!(
        "{shown} cannot be marked as open ({e}): if vshunt is killed, clusters may leak; 'vshunt image check -r leaks {shown}' \
         frees them"
    )
}

/// Brings an image that was not closed into order. Whether completed writes may be missing.
fn put_right(
    file: &Raw,
    plain: &Plain,
    header: &Header,
    path: &Path,
) -> std::result::Result<bool, qcow2::Error> {
    let shown = path.display();
    let lost = match journal::recover(file.image(), plain, path)? {
        Lacks::Nothing => {
            // One whose owner died between closing the image and removing it.
            journal::forget(file.image());
            return Ok(false);
        }
        Lacks::Recovered(n) => {
            tracing::info!("{shown} was not closed: {n} changes of its map are applied from its journal");
            false
        }
        Lacks::Counts => false,
        Lacks::Lost(why) => {
            tracing::warn!(
                "{shown} was not closed and {why}: writes that were not flushed may be lost, and a guest that was using it \
                 has to be restarted"
            );
            true
        }
    };
    if header.is_open() {
        tracing::info!("{shown} was not closed: its reference counts are repaired");
        let found = check(plain, Repair::All, &mut Quiet)?;
        if found.corruptions > 0 || found.check_errors > 0 {
            return Err(qcow2::Error::Corrupt("it was not closed and cannot be repaired".to_owned()));
        }
    }
    journal::forget(file.image());
    Ok(lost)
}

/// Opens one image, and says which it stands on.
fn open_image(opened: &mut Opened, spec: &DiskSpec, path: &Path, room: bool) -> Result<Top> {
    let shown = path.display();
    let (file, _, plain) = opened.add(spec)?;
    let wrong = |e: qcow2::Error| match e {
        qcow2::Error::Io { what, source } => Error::io(format_args!("cannot read {what} of {shown}"), source),
        qcow2::Error::Unsupported(_) => Error::unsupported(format!("{shown}: {e}")),
        qcow2::Error::NotQcow2 => {
            Error::invalid(format!("{shown} is not a qcow2 image; if it is a raw one use format=raw"))
        }
        e => Error::invalid(format!("{shown}: {e}; 'vshunt image check -r all {shown}' may repair it")),
    };
    let mut header = qcow2::Image::open(&plain).map_err(wrong)?.header().clone();
    let mut lost = false;
    let mut bitmaps = Bitmaps::default();
    if !spec.readonly {
        if header.has(incompatible::CORRUPT) {
            return Err(Error::invalid(format!(
                "{shown} is marked as corrupt: repair it with 'vshunt image check -r all {shown}', or add readonly=on"
            )));
        }
        let of = &opened.files[usize::from(file)];
        lost = put_right(of, &plain, &header, path).map_err(wrong)?;
        make_ready_for(&plain, room).map_err(wrong)?;
        bitmaps = Bitmaps::open(&plain).map_err(wrong)?;
        header = qcow2::Image::open(&plain).map_err(wrong)?.header().clone();
    }
    let (changes, reading) = match spec.readonly {
        true => through(&opened.files[usize::from(file)], &header, path, !spec.locking),
        false => (None, None),
    };
    let data = match &header.data_file {
        Some(name) if header.has(incompatible::DATA_FILE) => {
            let part = DiskSpec { file: Some(beside(path, name)), size: None, ..spec.clone() };
            opened.add(&part).map_err(|e| e.context(format!("{shown} keeps its data in {name}")))?.0
        }
        _ => file,
    };
    let below = match (&header.backing, header.backing_format.as_deref()) {
        (None, _) => None,
        (Some(name), Some("raw")) => Some(Lower { path: beside(path, name), format: Format::Raw }),
        (Some(name), Some("qcow2")) => Some(Lower { path: beside(path, name), format: Format::Qcow2 }),
        (Some(name), Some(other)) => {
            return Err(Error::unsupported(format!(
                "{shown} stands on {name} of format {other}; only raw and qcow2 are supported"
            )));
        }
        (Some(name), None) => {
            // Guessed from its contents, a guest could make its raw disk name any file of the host.
            return Err(Error::invalid(format!(
                "{shown} stands on {name} and does not name the format of that image: add it with 'qemu-img rebase -u -b {name} \
                 -F FORMAT {shown}'"
            )));
        }
    };
    let settings = Settings { file, data, cache_bytes: spec.cache_size, writable: !spec.readonly, room };
    let mut image = Served::open(&plain, header, settings).map_err(wrong)?;
    if let Some(changes) = changes {
        image = image.with_changes(changes).map_err(wrong)?;
    }
    Ok(Top { image, below, bitmaps, lost, reading })
}

/// What a journal has for an image that is only read, and what is to be said about that.
fn through(file: &Raw, header: &Header, path: &Path, shared: bool) -> (Option<Changes>, Option<Reading>) {
    let shown = path.display();
    // What a commit left half done lies below the overlay's own.
    let quiet = mark::is_committing(path);
    let (changes, text, lacks) = match journal::read_through(file.image(), header, shared) {
        Through::Whole => return (None, None),
        Through::Changes(changes) => {
            let n = changes.count();
            (
                Some(changes),
                format!("{shown} was not closed: {n} changes of its map are read from its journal"),
                false,
            )
        }
        // It is known to be used by another process.
        Through::Live => {
            let text = format!(
                "{shown} is open in another vshunt process and is only read here: recent writes may be missing"
            );
            tracing::warn!("{text}");
            return (None, Some(Reading { text, lacks: true }));
        }
        Through::Lost(why) => (
            None,
            format!("{shown} was not closed and {why}: writes that were not flushed may be missing"),
            true,
        ),
    };
    match (quiet, lacks) {
        (true, _) => return (changes, None),
        (false, false) => tracing::info!("{text}"),
        (false, true) => tracing::warn!("{text}; open it once for writing to repair it"),
    }
    (changes, Some(Reading { text, lacks }))
}

/// Which image an overlay in `file` stands on; none if it is no qcow2 image.
pub(crate) fn backing_of(path: &Path, file: File) -> io::Result<Option<PathBuf>> {
    match qcow2::Image::open(&Plain::new(file)) {
        Ok(image) => Ok(image.header().backing.as_ref().map(|name| beside(path, name))),
        Err(qcow2::Error::Io { source, .. }) => Err(source),
        Err(_) => Ok(None),
    }
}

/// A name in an image is relative to the image's own folder.
pub(crate) fn beside(image: &Path, name: &str) -> PathBuf {
    let name = name.strip_prefix("file:").unwrap_or(name);
    image.parent().unwrap_or(Path::new("")).join(name)
}

fn limits(file: Limits, image: &Served, readonly: bool) -> Limits {
    let cluster = image.cluster_size().min(1 << 20) as u32;
    Limits {
        opt_io: cluster.max(file.opt_io),
        max_discard_bytes: if readonly { 0 } else { Limits::DISCARD_BYTES_MAX },
        discard_align: cluster,
        can_discard: !readonly,
        can_zero: !readonly,
        ..file
    }
}
