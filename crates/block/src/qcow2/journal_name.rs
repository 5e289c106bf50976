//! The name of a journal's image, at the end of the journal's file.
//!
//! It has the path that the image was opened by, the device, and the file handle
//! (name_to_handle_at(2)). The handle finds the file even if it was renamed.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes after the records of a journal: the fields below, and a path of at most 4096 bytes
/// (PATH_MAX).
pub(super) const NAME_BYTES: u64 = 8192;
const MAGIC: [u8; 8] = *b"VSJNNAM1";
/// Longest file handle, bytes (MAX_HANDLE_SZ).
const HANDLE_MAX: usize = 128;
/// Bytes of a handle's header.
const HANDLE_HEAD: usize = 8;
/// Offsets of the fields: when the image was found missing, its device, the length and bytes of its
/// handle, the length and bytes of its path.
pub(super) const AT_MISSED: usize = 8;
const AT_DEVICE: usize = 16;
const AT_HANDLE: usize = 24;
pub(super) const AT_PATH: usize = AT_HANDLE + 8 + HANDLE_HEAD + HANDLE_MAX;
const PATH_MAX: usize = 4096;
const _: () = assert!(AT_PATH + 8 + PATH_MAX <= NAME_BYTES as usize);

/// The image of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    /// When a sweep first found the image missing, seconds since 1970; 0 if it was not missing.
    pub(super) missed_s: u64,
    /// Device number of the file system; for a block device, of the device itself.
    pub(super) device: u64,
    /// The handle; empty if the file system has none.
    pub(super) handle: Vec<u8>,
    pub(super) path: PathBuf,
}

impl Name {
    /// Returns the name of an image that was opened by `path`.
    pub(super) fn of(image: &File, path: &Path) -> io::Result<Self> {
        let meta = image.metadata()?;
        let block = meta.file_type().is_block_device();
        let device = if block { meta.rdev() } else { meta.dev() };
        let handle = if block { Vec::new() } else { handle_of(image).unwrap_or_default() };
        let path = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
        Ok(Self { missed_s: 0, device, handle, path })
    }

    /// Encodes the name as the bytes at the end of a journal's file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; NAME_BYTES as usize];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        put(AT_MISSED, &self.missed_s.to_le_bytes());
        put(AT_DEVICE, &self.device.to_le_bytes());
        let path = self.path.as_os_str().as_bytes();
        // No longer path can be opened. A journal without a path is never removed.
        let path = if path.len() > PATH_MAX { &[] } else { path };
        for (at, part) in [(AT_HANDLE, &self.handle[..]), (AT_PATH, path)] {
            put(at, &(part.len() as u64).to_le_bytes());
            put(at + 8, part);
        }
        bytes
    }

    /// Decodes the bytes of [`encode`](Self::encode); none for other bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let part = |at: usize, most: usize| {
            let len = usize::try_from(number(at)?).ok().filter(|len| *len <= most)?;
            bytes.get(at + 8..at + 8 + len)
        };
        let path = part(AT_PATH, PATH_MAX).filter(|path| !path.is_empty())?;
        (bytes.get(..8)? == MAGIC).then_some(Self {
            missed_s: number(AT_MISSED)?,
            device: number(AT_DEVICE)?,
            handle: part(AT_HANDLE, HANDLE_HEAD + HANDLE_MAX)?.to_vec(),
            path: PathBuf::from(OsStr::from_bytes(path)),
        })
    }
}

/// Writes the name of an image at `offset` of a journal's file.
pub(super) fn write(file: &File, offset: u64, image: &File, path: &Path) -> io::Result<()> {
    file.write_all_at(&Name::of(image, path)?.encode(), offset)
}

/// A file handle, as in open_by_handle_at(2).
#[repr(C, align(8))]
struct Handle {
    bytes: u32,
    kind: i32,
    data: [u8; HANDLE_MAX],
}
const _: () = assert!(size_of::<Handle>() == HANDLE_HEAD + HANDLE_MAX);

/// Returns the handle of an open file; none if its file system has none.
pub(super) fn handle_of(file: &File) -> Option<Vec<u8>> {
    let mut handle = Handle { bytes: HANDLE_MAX as u32, kind: 0, data: [0; HANDLE_MAX] };
    let mut mount = 0;
    // SAFETY: the kernel writes to `mount` and to `handle`, whose field `bytes` is the length of
    // its data. The empty path ends with a zero. The borrow of `file` keeps the descriptor open.
    let res = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let len = usize::try_from(handle.bytes).ok().filter(|len| res == 0 && *len <= HANDLE_MAX)?;
    let head = [handle.bytes.to_ne_bytes(), handle.kind.to_ne_bytes()].concat();
    Some([&head[..], &handle.data[..len]].concat())
}

/// Returns whether the file of a handle exists on the file system of `folder`; none if that is
/// unknown.
pub(super) fn exists(handle: &[u8], folder: &File) -> Option<bool> {
    let (head, data) = handle.split_at_checked(HANDLE_HEAD).filter(|(_, data)| data.len() <= HANDLE_MAX)?;
    let number = |at: usize| head[at..at + 4].try_into().expect("four bytes");
    let (bytes, kind) = (u32::from_ne_bytes(number(0)), i32::from_ne_bytes(number(4)));
    if bytes as usize != data.len() {
        return None;
    }
    let mut handle = Handle { bytes, kind, data: [0; HANDLE_MAX] };
    handle.data[..data.len()].copy_from_slice(data);
    // SAFETY: the kernel reads `handle`, whose data has `bytes` valid bytes. The borrow of `folder`
    // keeps the descriptor open.
    let fd = unsafe {
        libc::open_by_handle_at(folder.as_raw_fd(), (&raw mut handle).cast(), libc::O_PATH | libc::O_CLOEXEC)
    };
    match fd {
        0.. => {
            // SAFETY: the call returned a new descriptor, which has no other owner.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            Some(true)
        }
        // ESTALE: the file does not exist. EPERM: the call requires CAP_DAC_READ_SEARCH.
        _ => (io::Error::last_os_error().raw_os_error() == Some(libc::ESTALE)).then_some(false),
    }
}
