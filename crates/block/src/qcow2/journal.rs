//! The journal of an image's map: its start when an image is opened, and its recovery after a
//! crash.
//!
//! Called by control threads. Workers see only the memory of the journal. `journal_file` has the
//! file.

use std::fs::File;
use std::io;
use std::path::Path;

use qcow2::Storage;
use qcow2::header::{Header, Open, incompatible};
use qcow2::journal::{self, Changes, Journal, OpenHeader, Recovery, Refusal};

use super::journal_file::{BESIDE_READERS, EXCLUSIVE, JournalFile, READER_WAIT, WAIT, boot_id, new_id};
use crate::file_storage::in_folder_of;
use crate::path_fd::open_image;

/// Starts a journal for an image that was closed or repaired. `path` is the path that `image` was
/// opened by.
///
/// # Errors
/// The system's, if there is no space or no /dev/shm. The image is unchanged then.
pub(super) fn start(
    image: &File,
    path: &Path,
    storage: &dyn Storage,
    header: &Header,
) -> io::Result<(Journal, OpenHeader, JournalFile)> {
    let (file, id, boot) = (JournalFile::of(image)?, new_id()?, boot_id()?);
    let memory = file.make(Journal::bytes(header.clusters()), image, path)?;
    let journal = Journal::new(Box::new(memory), id, boot).ok_or_else(|| io::Error::other("it is too small"));
    let started = journal.and_then(|journal| {
        let open_header = journal::mark_open(storage, id).map_err(|e| io::Error::other(e.to_string()))?;
        Ok((journal, open_header))
    });
    match started {
        Ok((journal, open_header)) => Ok((journal, open_header, file)),
        Err(e) => {
            file.remove();
            Err(e)
        }
    }
}

/// What [`recover`] did for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// Nothing: the image was closed.
    Clean,
    /// Nothing: the image was not closed, but each write was on stable storage when it completed.
    /// Its reference counts may be wrong.
    CountsOnly,
    /// It applied this number of records from the journal.
    Changes(u64),
    /// Nothing: writes that completed and were not flushed are lost.
    Lost(LostReason),
}

/// Why there is no usable journal for an image that was not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostReason {
    /// There is no journal, or it cannot be read.
    Missing,
    /// The journal belongs to another state of the image.
    RolledBack,
    /// An earlier version of this program wrote the journal.
    Older,
    /// The image was written without a journal.
    Without,
    /// The image is on a server, and was written with a journal on the host that it was on.
    Elsewhere,
}

impl std::fmt::Display for LostReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => {
                "has no journal in /dev/shm (the machine was rebooted, another program repaired the image, or RemoveIPC= of \
                 systemd-logind removed the journal)"
            }
            Self::RolledBack => {
                "does not match its journal in /dev/shm, which is not used (the image was rolled back or restored from a \
                 copy)"
            }
            Self::Older => {
                "has a journal of an earlier version of vshunt, which does not name the state of the image (to apply it, open \
                 the image with that version first)"
            }
            Self::Without => "was written without a journal",
            Self::Elsewhere => "has its journal on the host where it was a file",
        })
    }
}

impl From<Refusal> for LostReason {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::None | Refusal::Other => Self::Missing,
            Refusal::RolledBack => Self::RolledBack,
            Refusal::Older => Self::Older,
        }
    }
}

/// Returns the state of an image whose header decides it. None if the journal decides.
fn from_header(header: &Header) -> Option<Recovered> {
    if header.mark.is_none() && !header.is_open() {
        return Some(Recovered::Clean);
    }
    match journal::journal_of(header) {
        Some(Open::Journal { .. }) => None,
        Some(Open::Older) => Some(Recovered::Lost(LostReason::Older)),
        Some(Open::Without { stable: true }) => Some(Recovered::CountsOnly),
        Some(Open::Without { stable: false }) => Some(Recovered::Lost(LostReason::Without)),
        None => Some(Recovered::Lost(LostReason::Missing)),
    }
}

/// Returns the state of an image that can have no journal here, because it is on a server.
pub(super) fn without_journal(header: &Header) -> Recovered {
    from_header(header).unwrap_or(Recovered::Lost(LostReason::Elsewhere))
}

/// [`read_only`] for an image on a server. No lock tells whether another process has it open.
pub(super) fn read_only_without(header: &Header) -> JournalView {
    if journal::journal_of(header).is_none() {
        return JournalView::Complete;
    }
    match without_journal(header) {
        Recovered::Lost(why) => JournalView::Lost(why),
        _ => JournalView::Complete,
    }
}

/// Applies the journal of a killed daemon to an image that is open for writing. The caller repairs
/// the reference counts afterwards, before any other change. `path` is the path of the image; the
/// name of its data file is relative to it.
///
/// # Errors
/// Those of the storage; a journal that does not fit the image; a journal of a live daemon.
pub fn recover(image: &File, storage: &dyn Storage, path: &Path) -> qcow2::Result<Recovered> {
    let header = qcow2::Image::open(storage)?.header().clone();
    if let Some(recovered) = from_header(&header) {
        return Ok(recovered);
    }
    let found = JournalFile::of(image).and_then(|file| Ok((file.find(EXCLUSIVE, WAIT)?, boot_id()?)));
    let (memory, boot) = match found {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            let why = io::Error::new(e.kind(), "another vshunt serves the image; stop it");
            return Err(qcow2::Error::io("the map's journal")(why));
        }
        Err(_) => return Ok(Recovered::Lost(LostReason::Missing)),
    };
    if let Some(name) = header.data_file.filter(|_| header.incompatible & incompatible::DATA_FILE != 0) {
        let data = in_folder_of(path, &name);
        let synced = open_image(&data, false).and_then(|data| data.sync_data());
        synced.map_err(qcow2::Error::io("cannot bring the data file to stable storage"))?;
    }
    Ok(match journal::recover(storage, &memory, boot)? {
        Recovery::Done(records) => Recovered::Changes(records),
        Recovery::Refused(why) => Recovered::Lost(why.into()),
    })
}

/// What a process finds that reads an image and does not write to it.
#[derive(Debug)]
pub enum JournalView {
    /// The image has all changes.
    Complete,
    /// The changes that the image lacks.
    Changes(Changes),
    /// A live daemon has the image open.
    InUse,
    /// Writes that completed and were not flushed are lost.
    Lost(LostReason),
}

/// Reads the journal of an image with this header, and changes nothing. `shared`: the caller has
/// not locked the image, so a live daemon may have it open.
pub fn read_only(image: &File, header: &Header, shared: bool) -> JournalView {
    // Another program did not close the image. Its map is complete, and only its counts may be
    // wrong.
    if journal::journal_of(header).is_none() {
        return JournalView::Complete;
    }
    match from_header(header) {
        // Without a journal there is no lock that shows whether the daemon is alive.
        Some(Recovered::Lost(LostReason::Without)) if shared => return JournalView::InUse,
        Some(Recovered::Lost(why)) => return JournalView::Lost(why),
        Some(_) => return JournalView::Complete,
        None => {}
    }
    let found =
        JournalFile::of(image).and_then(|file| Ok((file.find(BESIDE_READERS, READER_WAIT)?, boot_id()?)));
    match found {
        Ok((memory, boot)) => {
            // A device does not shrink.
            let len = image.metadata().map_or(u64::MAX, |m| if m.is_file() { m.len() } else { u64::MAX });
            let changes = Changes::read(header, len, &memory, boot);
            changes.map_or_else(|e| JournalView::Lost(e.into()), JournalView::Changes)
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => JournalView::InUse,
        Err(_) => JournalView::Lost(LostReason::Missing),
    }
}
