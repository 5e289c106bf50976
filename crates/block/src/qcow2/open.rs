//! Opens an image with its data file and its backing images. Called by control threads, before
//! there are requests.

use std::fmt::Display;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use qcow2::check::{Quiet, Repair, check};
use qcow2::header::{Header, incompatible};
use qcow2::journal::Changes;
use qcow2::{Chain, FileId, Layer, Served, Settings, Storage, make_ready_for, make_ready_in_fixed_file};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::{Cache, DiskSpec, Format};

use super::bitmaps::Bitmaps;
use super::journal::{self, JournalView, Recovered};
use super::journal_file::{self, JournalFile};
use super::{Qcow2, repair_command};
use crate::file_storage::in_folder_of;
use crate::image_file::{ImageFile, Remote, remote_of};
use crate::limits::Limits;
use crate::overlay_xattr;
use crate::raw;

/// Most backing images of an image.
pub const CHAIN_MAX: usize = 256;

/// The files that are open so far.
struct OpenFiles {
    files: Vec<ImageFile>,
    limits: Option<Limits>,
    /// The remote file of the image, if it is open already.
    remote: Option<Remote>,
}

/// A storage to read an open file.
type Plain = Box<dyn Storage>;

impl OpenFiles {
    /// Opens one more file. Returns its number, the size of a raw disk in it, and a storage to read
    /// it.
    fn add(&mut self, spec: &DiskSpec) -> Result<(FileId, u64, Plain)> {
        let (file, size, limits) = match remote_of(spec)? {
            None => {
                let (raw, size, limits) = raw::open(spec)?;
                (ImageFile::Local(raw), size, limits)
            }
            Some(part) => {
                let (remote, limits) = match self.remote.take() {
                    Some(open) => open.again(),
                    None => Remote::open(spec, &part)?,
                };
                let bytes = remote.bytes();
                (ImageFile::Remote(remote), bytes, limits)
            }
        };
        let plain = file
            .storage(spec.readonly, spec.cache == Cache::Unsafe)
            .map_err(|e| Error::io(format_args!("cannot read {}", file.path().display()), e))?;
        self.limits.get_or_insert(limits);
        self.files.push(file);
        Ok((self.files.len() as FileId - 1, size, plain))
    }
}

/// Opens and locks the image of `spec`, its data file and its backing images, and reads their
/// headers. `growable`: the disk may get longer while it is served. `remote`: the file of the image
/// if it is on a server and open already, so that its connections and its lock stay.
pub(crate) fn open(spec: &DiskSpec, growable: bool, remote: Option<Remote>) -> Result<(Qcow2, u64, Limits)> {
    let Some(path) = &spec.file.clone().or_else(|| spec.uri.as_ref().map(PathBuf::from)) else {
        return Err(Error::invalid(format!(
            "disk {} has format qcow2, which needs an image: add file=PATH, or uri=URI for one on a server",
            spec.name
        )));
    };
    let mut opened = OpenFiles { files: vec![], limits: None, remote };
    // The image orders the flushes of its files itself, since its map is written later than the
    // data.
    let cache = if spec.cache == Cache::Unsafe { Cache::Unsafe } else { Cache::Writeback };
    let top = open_image(&mut opened, &DiskSpec { cache, size: None, ..spec.clone() }, path, growable)
        .map_err(|e| raw::with_way_to_make(e, spec))?;
    let own_files = opened.files.len();
    let (image, mut backing, mut unclean) = (top.image, top.backing, Vec::from_iter(top.unclean));
    let size = image.size();
    if spec.size.is_some_and(|s| s != size) {
        return Err(Error::invalid(format!(
            "{} has a disk of {size} bytes, not {}: the size of a qcow2 disk is taken from the image, leave out size=",
            path.display(),
            spec.size.unwrap_or(0)
        )));
    }
    let (mut layers, mut backing_bytes) = (Vec::new(), None);
    // The image above, which has the name of the next one.
    let mut above = path.clone();
    let mut seen = Vec::from_iter(identity(path));
    while let Some(lower) = backing.take() {
        check_next(path, &above, &lower, layers.len(), &mut seen)?;
        let part = DiskSpec { file: Some(lower.path.clone()), readonly: true, size: None, ..spec.clone() };
        match lower.format {
            Format::Qcow2 => {
                let next = open_image(&mut opened, &part, &lower.path, false)
                    .map_err(|e| lower.explained(e, path, &above))?;
                backing_bytes.get_or_insert(next.image.size());
                unclean.extend(next.unclean);
                layers.push(Layer::Qcow2(Arc::new(next.image)));
                backing = next.backing;
            }
            _ => {
                let (file, size, _) = opened.add(&part).map_err(|e| lower.explained(e, path, &above))?;
                backing_bytes.get_or_insert(size);
                layers.push(Layer::Raw { file, size });
            }
        }
        above = lower.path;
    }
    let limits = limits(opened.limits.expect("the image was opened"), &image, spec.readonly);
    // After this the image is marked as open, so nothing that follows may fail.
    let (image, journal, marked) = with_journal(image, spec, path, &opened.files[0]);
    let qcow2 = Qcow2 {
        chain: Chain::new(Arc::new(image), layers),
        journal,
        marked,
        lost_writes: top.lost_writes,
        unclean,
        files: opened.files,
        own_files,
        backing_bytes,
        bitmaps: top.bitmaps,
        readonly: spec.readonly,
        abandoned: AtomicBool::new(false),
        no_sync: spec.cache == Cache::Unsafe,
        writethrough: spec.cache == Cache::Writethrough,
    };
    Ok((qcow2, size, limits))
}

/// A backing image, as the image above names it.
struct BackingName {
    path: PathBuf,
    format: Format,
}

impl BackingName {
    /// Adds to an error what the image is. If it is missing, adds how `above`, which names it, gets
    /// another name. (A new file would read as zeroes.)
    fn explained(&self, e: Error, top: &Path, above: &Path) -> Error {
        let e = e.context(format!("{} has the backing image {}", top.display(), self.path.display()));
        if e.kind() != Kind::NotFound {
            return e;
        }
        let format = if self.format == Format::Qcow2 { "qcow2" } else { "raw" };
        e.remedy(format!(
            "put it back, or name where it is now: vshunt image rebase -u -b FILE -F {format} {}",
            above.display()
        ))
    }
}

/// Returns what tells a file or a device from all others.
fn identity(path: &Path) -> Option<(u64, u64)> {
    match std::fs::metadata(path).ok()? {
        // A device can have several nodes.
        m if m.file_type().is_block_device() => Some((0, m.rdev())),
        m => Some((m.dev(), m.ino())),
    }
}

/// Refuses the next image of a chain if it is one of those above it, or one too many. `count`: how
/// many backing images are open. `seen`: the files so far, to which it is added.
fn check_next(
    top: &Path,
    above: &Path,
    lower: &BackingName,
    count: usize,
    seen: &mut Vec<(u64, u64)>,
) -> Result<()> {
    let (top, above, shown) = (top.display(), above.display(), lower.path.display());
    let id = identity(&lower.path);
    if id.is_some_and(|id| seen.contains(&id)) {
        return Err(Error::invalid(format!(
            "{above} has the backing image {shown}, which is below itself: name another one with 'vshunt image rebase -u -b \
             FILE -F FORMAT {above}'"
        )));
    }
    if count == CHAIN_MAX {
        return Err(Error::limit(format!(
            "{top} has more than {CHAIN_MAX} backing images; 'qemu-img convert -O qcow2 {top} COPY' makes one image of them"
        )));
    }
    seen.extend(id);
    Ok(())
}

/// An image, opened without its backing images.
struct OpenImage {
    image: Served,
    backing: Option<BackingName>,
    bitmaps: Bitmaps,
    /// Writes that an earlier daemon completed may be missing.
    lost_writes: bool,
    /// Set if the image was not closed and is only read.
    unclean: Option<UncleanImage>,
}

/// A report about an image that was not closed cleanly and is only read.
#[derive(Clone, Debug)]
pub struct UncleanImage {
    /// A sentence that names the image and its state.
    pub text: String,
    /// Whether completed writes may be missing.
    pub lost_writes: bool,
}

/// Marks an image as open and starts its journal. With a journal, completed writes survive if this
/// process is killed. An image with `cache=writethrough` needs none. Returns the image, its
/// journal, and whether it is marked.
fn with_journal(
    mut image: Served,
    spec: &DiskSpec,
    path: &Path,
    file: &ImageFile,
) -> (Served, Option<JournalFile>, bool) {
    if spec.readonly {
        return (image, None, false);
    }
    let shown = path.display();
    let repair = repair_command(path, file.remote().is_some(), "leaks");
    let unmarked = |e: &dyn Display| {
        tracing::warn!(
            "{shown} cannot be marked as open ({e}): if vshunt is killed, clusters may leak; '{repair}' frees them"
        );
    };
    let stable = spec.cache == Cache::Writethrough;
    let plain = match file.storage(false, spec.cache == Cache::Unsafe) {
        Ok(plain) => plain,
        Err(e) => {
            unmarked(&e);
            return (image, None, false);
        }
    };
    // A journal belongs to a file of this host: another host may be the next to open a remote one.
    let local = file.local().filter(|_| !stable && image.header().version >= 3);
    if let Some(file) = local {
        match journal::start(file.image(), path, &*plain, image.header()) {
            Ok((journal, open_header, place)) => {
                return (image.with_journal(journal, open_header), Some(place), true);
            }
            Err(e) => tracing::warn!(
                "{shown} has no journal in /dev/shm ({e}): if vshunt is killed, writes since the last flush are lost, and the \
                 guest has to be restarted; where space is missing, free some, then remove the disk and add it again"
            ),
        }
    }
    match qcow2::journal::mark_open_without_journal(&*plain, stable) {
        Ok(open_header) => (image.with_open_header(open_header), None, true),
        Err(e) => {
            unmarked(&e);
            // The mark may have been written nevertheless. If it cannot be read, the header of the
            // open is used.
            if let Err(e) = image.reload_open_header(&*plain) {
                tracing::debug!("{shown}: {e}");
            }
            (image, None, false)
        }
    }
}

/// Repairs an image that was not closed. Returns whether completed writes may be missing.
fn repair_unclean(
    file: &ImageFile,
    plain: &dyn Storage,
    header: &Header,
    path: &Path,
) -> std::result::Result<bool, qcow2::Error> {
    let shown = path.display();
    let recovered = match file.local() {
        Some(raw) => journal::recover(raw.image(), plain, path)?,
        None => journal::without_journal(header),
    };
    // A journal remains if its daemon was killed between closing the image and removing the
    // journal.
    let forget = || file.local().into_iter().for_each(|raw| journal_file::remove(raw.image()));
    let lost_writes = match recovered {
        Recovered::Clean => {
            forget();
            return Ok(false);
        }
        Recovered::Changes(0) | Recovered::CountsOnly => false,
        Recovered::Changes(n) => {
            tracing::info!("{shown} was not closed: {n} changes of its map are applied from its journal");
            false
        }
        Recovered::Lost(why) => {
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
            return Err(qcow2::Error::Invalid(format!(
                "it was not closed, and {} errors in it cannot be repaired: copy what can be read with 'vshunt image \
                 convert', or take the image from a backup",
                found.corruptions + found.check_errors
            )));
        }
    }
    forget();
    Ok(lost_writes)
}

/// Opens one image and reads the name of its backing image.
fn open_image(opened: &mut OpenFiles, spec: &DiskSpec, path: &Path, growable: bool) -> Result<OpenImage> {
    let shown = path.display();
    let (file, _, plain) = opened.add(spec)?;
    let plain = &*plain;
    let of = &opened.files[usize::from(file)];
    let fixed_bytes = of.remote().map(Remote::bytes);
    let repair = repair_command(path, of.remote().is_some(), "all");
    let raw_format = of.remote().map_or("raw", |_| "nbd");
    let wrong = |e: qcow2::Error| match e {
        qcow2::Error::Io { what, source } => Error::io(format_args!("cannot read {what} of {shown}"), source),
        qcow2::Error::Unsupported(_) => Error::unsupported(format!("{shown}: {e}")),
        qcow2::Error::NotQcow2 => Error::invalid(format!(
            "{shown} is not a qcow2 image; if it is a raw one use format={raw_format}"
        )),
        qcow2::Error::Corrupt(_) => Error::invalid(format!("{shown}: {e}; '{repair}' may repair it")),
        qcow2::Error::Header(_) => {
            Error::invalid(format!("{shown}: {e}; a check cannot repair that: take the image from a backup"))
        }
        e => Error::invalid(format!("{shown}: {e}")),
    };
    let mut header = qcow2::Image::open(plain).map_err(wrong)?.header().clone();
    let mut lost_writes = false;
    let mut bitmaps = Bitmaps::default();
    if !spec.readonly {
        if header.has(incompatible::CORRUPT) {
            return Err(Error::invalid(format!(
                "{shown} is marked as corrupt: repair it with '{repair}', or add readonly=on"
            )));
        }
        lost_writes = repair_unclean(of, plain, &header, path).map_err(wrong)?;
        match fixed_bytes {
            None => make_ready_for(plain, growable),
            Some(_) => make_ready_in_fixed_file(plain),
        }
        .map_err(wrong)?;
        bitmaps = Bitmaps::open(plain).map_err(wrong)?;
        header = qcow2::Image::open(plain).map_err(wrong)?.header().clone();
    }
    if fixed_bytes.is_some() {
        check_names_no_file(&header, path)?;
    }
    let (changes, unclean) = match spec.readonly {
        true => read_journal(of, &header, path, !spec.locking),
        false => (None, None),
    };
    let data = match &header.data_file {
        Some(name) if header.has(incompatible::DATA_FILE) => {
            let part = DiskSpec { file: Some(in_folder_of(path, name)), size: None, ..spec.clone() };
            opened.add(&part).map_err(|e| without_data(e, path, name))?.0
        }
        _ => file,
    };
    let backing = match (&header.backing, header.backing_format.as_deref()) {
        (None, _) => None,
        (Some(name), Some("raw")) => {
            Some(BackingName { path: in_folder_of(path, name), format: Format::Raw })
        }
        (Some(name), Some("qcow2")) => {
            Some(BackingName { path: in_folder_of(path, name), format: Format::Qcow2 })
        }
        (Some(name), Some(other)) => {
            return Err(Error::unsupported(format!(
                "{shown} has the backing image {name} of format {other}; only raw and qcow2 are supported"
            )));
        }
        (Some(name), None) => {
            // A guest controls the contents of a raw disk. If the format were guessed from them,
            // the guest could name any file of the host as a backing image.
            return Err(Error::invalid(format!(
                "{shown} does not name the format of its backing image {name}: add it with 'vshunt image rebase -u -b {name} \
                 -F FORMAT {shown}'"
            )));
        }
    };
    let settings =
        Settings { file, data, cache_bytes: spec.cache_size, writable: !spec.readonly, room: growable };
    let mut image = Served::open(plain, header, settings).map_err(wrong)?;
    if let Some(bytes) = fixed_bytes {
        image = image.with_fixed_file(bytes);
    }
    if let Some(changes) = changes {
        image = image.with_changes(changes).map_err(wrong)?;
    }
    Ok(OpenImage { image, backing, bitmaps, lost_writes, unclean })
}

/// Adds to an error about the data file of `image` what that file is.
fn without_data(e: Error, image: &Path, name: &str) -> Error {
    let shown = image.display();
    let missing = e.kind() == Kind::NotFound;
    let e = e.context(format!("{shown} keeps its data in {name}"));
    match missing {
        true => e.remedy(format!(
            "put it back, or name where it is now: vshunt image amend -o data_file=FILE {shown}"
        )),
        false => e,
    }
}

/// Refuses an image on a server that names other files. The server chooses these names, and they
/// would be opened with the rights of this daemon, so that a guest could read any file of this
/// host.
fn check_names_no_file(header: &Header, path: &Path) -> Result<()> {
    let shown = path.display();
    let (what, name) = match (&header.backing, &header.data_file) {
        (Some(name), _) => ("has the backing image", name),
        (None, Some(name)) if header.has(incompatible::DATA_FILE) => ("keeps its data in", name),
        _ => return Ok(()),
    };
    Err(Error::unsupported(format!(
        "{shown} {what} {name}, and a server may not choose which files of this host are opened: make the image independent \
         with 'qemu-img convert -O qcow2', or serve an image of this host"
    )))
}

/// Reads the journal of an image that is only read. Returns its changes and the report about the
/// image.
fn read_journal(
    file: &ImageFile,
    header: &Header,
    path: &Path,
    shared: bool,
) -> (Option<Changes>, Option<UncleanImage>) {
    let shown = path.display();
    // During a commit the overlay hides what the backing image lacks.
    let quiet = overlay_xattr::is_committing(path);
    let view = match file.local() {
        Some(raw) => journal::read_only(raw.image(), header, shared),
        None => journal::read_only_without(header),
    };
    let (changes, text, lost_writes) = match view {
        JournalView::Complete => return (None, None),
        JournalView::Changes(changes) => {
            let n = changes.count();
            (
                Some(changes),
                format!("{shown} was not closed: {n} changes of its map are read from its journal"),
                false,
            )
        }
        // Another process is known to use the image.
        JournalView::InUse => {
            let text = format!(
                "{shown} is open in another vshunt process and is only read here: recent writes may be missing"
            );
            tracing::warn!("{text}");
            return (None, Some(UncleanImage { text, lost_writes: true }));
        }
        JournalView::Lost(why) => (
            None,
            format!("{shown} was not closed and {why}: writes that were not flushed may be missing"),
            true,
        ),
    };
    match (quiet, lost_writes) {
        (true, _) => return (changes, None),
        (false, false) => tracing::info!("{text}"),
        // The two cannot be told apart.
        (false, true) if file.remote().is_some() => tracing::warn!(
            "{text}, or another host has it open; open it once for writing to repair it, but only if no other host uses it"
        ),
        (false, true) => tracing::warn!("{text}; open it once for writing to repair it"),
    }
    (changes, Some(UncleanImage { text, lost_writes }))
}

/// Returns the limits of the disk, from those of the image file.
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
