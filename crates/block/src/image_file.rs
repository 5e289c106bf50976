//! A file below an image format: a file or device of this host, or a disk on a server.
//!
//! The format numbers its files. A handle of an image has one handle for each of them, and starts
//! steps there as requests. A step completes with the token of the guest's request, whatever
//! carries it out, so the format is resumed in the same way.
//!
//! | file | who carries out a step |
//! | --- | --- |
//! | local | [`Raw`]: the worker's io_uring, or the worker's thread at once |
//! | remote | [`Nbd`]: its client on the worker's io_uring |
//!
//! A daemon opens a remote file for writing once ([`nbd`]).
//!
//! A remote file has the length that it had when it was opened. It never becomes longer: writes
//! beyond its end fail with ENOSPC, and bytes beyond its end read as zeroes.

mod storage;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Receiver;

use qcow2::Storage;
use vshunt_engine::{Token, Uring};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ConnectionsInfo, DiskSpec, Format};

use self::storage::RemoteStorage;
use super::bounce::Pool;
use super::file_storage::FileStorage;
use super::limits::Limits;
use super::nbd::{self, Nbd, NbdHandle};
use super::raw::{Raw, UringFiles};
use super::shared_client::ClientHandle;
use super::{Io, Op, Step, failures};

/// A file below an image format.
pub(super) enum ImageFile {
    Local(Raw),
    Remote(Remote),
}

/// An [`ImageFile`], as one queue of a worker uses it.
pub(super) enum FileHandle {
    Local(UringFiles),
    Nbd(NbdHandle),
}

/// A file on a server. A clone refers to the same connections, and to the same lock.
#[derive(Clone)]
pub(super) struct Remote {
    nbd: Arc<Nbd>,
    /// Its length, bytes.
    bytes: u64,
    limits: Limits,
    uri: String,
    reconnect_delay: u32,
    /// A write of a control thread was not answered in time. It may still be carried out, at any
    /// time, so nothing else may be written.
    lost: Arc<AtomicBool>,
}

/// Returns the description of the remote file of an image, if it is on a server.
///
/// # Errors
/// `Invalid` if there is a file of this host, too.
pub(super) fn remote_of(spec: &DiskSpec) -> Result<Option<DiskSpec>> {
    let (Format::Qcow2, Some(uri)) = (spec.format(), &spec.uri) else { return Ok(None) };
    if let Some(file) = &spec.file {
        return Err(Error::invalid(format!(
            "disk {} has two images: leave out file={} or uri={uri}",
            spec.name,
            file.display()
        )));
    }
    Ok(Some(DiskSpec { format: Some(Format::Nbd), size: None, cache_size: None, ..spec.clone() }))
}

impl Remote {
    /// Opens the remote file that [`remote_of`] described. Returns it with its limits.
    ///
    /// # Errors
    /// Those of `nbd` disks; `Unsupported` for a server whose blocks are longer than a
    /// sector, or that cannot make writes stable.
    pub(super) fn open(spec: &DiskSpec, part: &DiskSpec) -> Result<(Self, Limits)> {
        let uri = spec.uri.clone().unwrap_or_default();
        let (nbd, bytes, limits) = nbd::open_part(part)?;
        let nbd = Arc::new(nbd);
        let (reconnect_delay, lost) = (spec.reconnect_delay.unwrap_or(0), Arc::default());
        Ok((Self { nbd, bytes, limits, uri, reconnect_delay, lost }, limits))
    }

    /// Uses an open file for an image that is opened again.
    pub(super) fn again(self) -> (Self, Limits) {
        let limits = self.limits;
        (self, limits)
    }

    /// Returns its length, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of which offsets and lengths of transfers are multiples.
    pub(super) fn unit(&self) -> u64 {
        u64::from(self.nbd.settings().blocks.minimum)
    }

    /// Returns for how many seconds a request waits for a lost connection.
    pub(super) fn reconnect_delay(&self) -> u32 {
        self.reconnect_delay
    }

    /// Describes its connections.
    pub(super) fn connections(&self) -> ConnectionsInfo {
        self.nbd.connections()
    }

    pub(super) fn attach(&self, uring: &mut Uring) -> FileHandle {
        FileHandle::Nbd(self.nbd.attach(uring))
    }

    /// See [`Nbd::lives`].
    pub(super) fn lives(&self) -> io::Result<()> {
        self.nbd.lives()
    }

    /// Waits for the result of a change of the image by a command. If the server hangs, the change
    /// may take effect at any time, so the file is of no more use.
    ///
    /// # Errors
    /// Those of [`Nbd::wait_for`].
    pub(super) fn wait_for<T>(&self, result: &Receiver<T>) -> io::Result<T> {
        self.nbd.wait_for(result).inspect_err(|_| self.lost.store(true, Relaxed))
    }

    /// See [`Nbd::attach_aside`].
    pub(super) fn attach_aside(&self, uring: &mut Uring) -> FileHandle {
        FileHandle::Nbd(self.nbd.attach_aside(uring))
    }

    /// Cuts a request to the bytes that exist. Returns its result if nothing is left of it.
    fn cut(&self, io: &mut Io) -> Option<i32> {
        let request = &mut io.request;
        let left = self.bytes.saturating_sub(request.offset);
        if request.op == Op::Flush || request.len <= left {
            return None;
        }
        match request.op {
            Op::Read => {
                // SAFETY: the segments are valid by the contract of `IoVecs::push`.
                unsafe { request.iov.zero_range(left..request.len) };
                if left > 0 {
                    // They are not shown again: this is the only use of the segments.
                    let _ = request.iov.hide_after(left);
                }
            }
            Op::Discard | Op::WriteZeroes { unmap: true } => {}
            _ => return Some(-libc::ENOSPC),
        }
        request.len = left;
        (left == 0).then_some(0)
    }

    /// See [`ImageFile::start`].
    #[inline]
    pub(super) fn start(&self, handle: &FileHandle, uring: &mut Uring, io: &mut Io, token: Token) -> Step {
        if self.lost.load(Relaxed) {
            return Step::Done(-libc::EIO);
        }
        if let Some(res) = self.cut(io) {
            return Step::Done(res);
        }
        match handle {
            FileHandle::Nbd(nbd) => nbd.start(uring, io, token),
            FileHandle::Local(_) => Step::Done(-libc::EIO),
        }
    }
}

impl FileHandle {
    /// Undoes [`Remote::attach`].
    pub(super) fn detach(self, uring: &mut Uring) {
        match self {
            Self::Nbd(nbd) => nbd.detach(uring),
            Self::Local(_) => {}
        }
    }
}

impl ImageFile {
    /// Makes the file usable by one queue of the worker that owns `uring`.
    pub(super) fn attach(&self, uring: &mut Uring) -> FileHandle {
        match self {
            Self::Local(raw) => FileHandle::Local(raw.register(uring)),
            Self::Remote(remote) => remote.attach(uring),
        }
    }

    /// Undoes [`attach`](Self::attach).
    pub(super) fn detach(&self, handle: FileHandle, uring: &mut Uring) {
        match self {
            Self::Local(raw) => raw.unregister(uring),
            Self::Remote(_) => handle.detach(uring),
        }
    }

    /// Starts a request of the file. The functions are those of
    /// [`DiskHandle`](super::DiskHandle::start).
    #[inline]
    pub(super) fn start(
        &self,
        handle: &FileHandle,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
    ) -> Step {
        match (self, handle) {
            (Self::Local(raw), _) if raw.at_once(io) => Step::Done(raw.run_inline(io, pool)),
            (Self::Local(raw), FileHandle::Local(files)) => raw.start(*files, pool, uring, io, token),
            (Self::Remote(remote), _) => {
                // A format punches what it does not read again, so that is a hint: without it, a
                // server that knows no WriteZeroes would be sent the zeroes.
                if io.request.op == (Op::WriteZeroes { unmap: true }) {
                    io.request.op = Op::Discard;
                }
                remote.start(handle, uring, io, token)
            }
            (Self::Local(_), _) => Step::Done(-libc::EIO),
        }
    }

    /// Continues a request of the file after a completion with `res`.
    #[inline]
    pub(super) fn resume(
        &self,
        handle: &FileHandle,
        pool: &Pool,
        uring: &mut Uring,
        io: &mut Io,
        token: Token,
        res: i32,
    ) -> Step {
        match (self, handle) {
            (Self::Local(raw), FileHandle::Local(files)) => raw.resume(*files, pool, uring, io, token, res),
            // The clients complete whole requests.
            (_, FileHandle::Nbd(nbd)) => {
                nbd.heard(res);
                Step::Done(res)
            }
            (Self::Remote(_), FileHandle::Local(_)) => Step::Done(res),
        }
    }

    /// Returns the file if it is one of this host.
    pub(super) fn local(&self) -> Option<&Raw> {
        match self {
            Self::Local(raw) => Some(raw),
            Self::Remote(_) => None,
        }
    }

    /// Returns the file if it is on a server.
    pub(super) fn remote(&self) -> Option<&Remote> {
        match self {
            Self::Local(_) => None,
            Self::Remote(remote) => Some(remote),
        }
    }

    /// Returns its path or its URI, for messages.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Local(raw) => raw.path(),
            Self::Remote(remote) => Path::new(&remote.uri),
        }
    }

    /// Returns the URI of a file on a server.
    pub(super) fn uri(&self) -> Option<&str> {
        self.remote().map(|remote| remote.uri.as_str())
    }

    /// See [`Disk::direct_in_use`](super::Disk::direct_in_use).
    pub(super) fn direct_in_use(&self) -> bool {
        match self {
            Self::Local(raw) => raw.direct_in_use(),
            Self::Remote(_) => false,
        }
    }

    /// Returns where it is, for the remedy of a request that failed. `asked`: it was sent.
    pub(super) fn place(&self, asked: bool) -> failures::Storage {
        match self.remote() {
            None => failures::Storage::Here,
            Some(_) => failures::Storage::Server { asked },
        }
    }

    /// Opens the file for a control thread. Calls of the storage block.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn storage(&self, readonly: bool, no_sync: bool) -> io::Result<Box<dyn Storage>> {
        Ok(match self {
            Self::Local(raw) => Box::new(FileStorage::of(raw, readonly, no_sync)?),
            Self::Remote(remote) => Box::new(RemoteStorage::new(remote.clone(), no_sync)?),
        })
    }

    /// Writes bytes at `offset` while other requests are in flight, which do not touch the blocks
    /// around them. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn merge(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        match self {
            Self::Local(raw) => raw.merge(offset, bytes, fua),
            Self::Remote(remote) => {
                let storage = RemoteStorage::new(remote.clone(), false)?;
                storage.write_at(offset, bytes)?;
                if fua { storage.sync() } else { Ok(()) }
            }
        }
    }

    /// Lets a file of this host end at `end`. A device keeps its length.
    pub(super) fn end_at(&self, end: u64) {
        let Self::Local(raw) = self else { return };
        let file = raw.image();
        if raw.is_file() && file.metadata().is_ok_and(|m| m.len() != end) {
            let _ = file.set_len(end);
        }
    }
}
