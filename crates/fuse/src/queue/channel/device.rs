//! One descriptor of /dev/fuse: the session's, or a clone of it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use libc::iovec;

use crate::abi::{InHeader, OutHeader, Plain};
use vshunt_types::convert::len_u32;

/// Bytes of a request's arguments that are read together with its header. The arguments of a write
/// are that long, so that its data begins at the start of the buffer, on a page.
pub(super) const PREFIX_ARGS: usize = 40;
const PREFIX: usize = size_of::<InHeader>() + PREFIX_ARGS;

/// The start of a request.
pub(super) struct Prefix([u8; PREFIX]);

impl Prefix {
    /// The header.
    pub(super) fn header(&self) -> InHeader {
        InHeader::read(&self.0).unwrap_or_default()
    }

    /// The first arguments.
    pub(super) fn args(&self) -> &[u8; PREFIX_ARGS] {
        self.0.last_chunk().unwrap_or(&[0; PREFIX_ARGS])
    }
}

/// Result of a read.
pub(super) enum ReadOutcome {
    /// A request: its prefix, and the number of bytes in the buffer.
    Request { prefix: Prefix, in_buffer: usize },
    /// There is no request now.
    Nothing,
    /// A signal, or a request that was taken back: read again.
    Again,
    /// The mount is gone.
    Gone,
}

/// See the module. Reads do not wait. One queue uses it.
pub(super) struct Device {
    fd: Arc<OwnedFd>,
}

impl Device {
    pub(super) fn new(fd: Arc<OwnedFd>) -> Self {
        Self { fd }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Whether a read would return a request or an error.
    pub(super) fn is_readable(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&*self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Reads a request.
    ///
    /// # Safety
    /// `buffer` has `len` bytes, and nothing else uses them during the call.
    #[inline]
    pub(super) unsafe fn read(&self, buffer: *mut u8, len: usize) -> ReadOutcome {
        let mut prefix = Prefix([0; PREFIX]);
        let parts = [
            iovec { iov_base: prefix.0.as_mut_ptr().cast(), iov_len: PREFIX },
            iovec { iov_base: buffer.cast(), iov_len: len },
        ];
        // SAFETY: the first part is `prefix`, which is borrowed by this function alone. The second
        // is `buffer`, which the caller keeps valid and unused.
        let n = unsafe { libc::readv(self.fd(), parts.as_ptr(), 2) };
        match usize::try_from(n) {
            Ok(n) if n >= size_of::<InHeader>() => {
                return ReadOutcome::Request { prefix, in_buffer: n.saturating_sub(PREFIX) };
            }
            Ok(_) => return ReadOutcome::Gone,
            Err(_) => {}
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) => ReadOutcome::Nothing,
            // ENOENT: the task that made the request gave up during the read.
            Some(libc::EINTR | libc::ENOENT) => ReadOutcome::Again,
            // The shortage may pass, and the request is still there.
            Some(libc::ENOMEM) => ReadOutcome::Nothing,
            _ => ReadOutcome::Gone,
        }
    }

    /// Replies with a header and, if `error` is 0, `body` and `data` (address and length).
    ///
    /// # Safety
    /// `data` is readable for its length.
    #[inline]
    pub(super) unsafe fn reply(&self, unique: u64, error: i32, body: &[u8], data: (*const u8, usize)) {
        let len = size_of::<OutHeader>() + body.len() + data.1;
        let header = OutHeader { len: len_u32(len), error, unique };
        let parts = [
            iovec { iov_base: header.bytes().as_ptr().cast_mut().cast(), iov_len: size_of::<OutHeader>() },
            iovec { iov_base: body.as_ptr().cast_mut().cast(), iov_len: body.len() },
            iovec { iov_base: data.0.cast_mut().cast(), iov_len: data.1 },
        ];
        let count = if data.1 > 0 {
            3
        } else if body.is_empty() {
            1
        } else {
            2
        };
        // SAFETY: the kernel only reads the parts: `header` and `body` are borrowed here, and the
        // caller keeps `data` readable.
        let n = unsafe { libc::writev(self.fd(), parts.as_ptr(), count) };
        // A reply fails if the task gave up, or if the mount is gone, which the next read reports.
        let _ = n;
    }
}
