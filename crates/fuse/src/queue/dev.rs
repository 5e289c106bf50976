//! A channel of a mount: one descriptor of /dev/fuse, its own or a clone of the first.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use libc::iovec;

use super::abi::{InHeader, OutHeader, Plain};

/// What of a request's arguments lies with its header rather than in its buffer: just those of a write, so that data
/// begins at the buffer's start, on a page.
pub(super) const FRONT_ARGS: usize = 40;
const FRONT: usize = size_of::<InHeader>() + FRONT_ARGS;

/// What a read of the channel came to.
pub(super) enum Taken {
    /// A request: its front, and how many bytes are in the buffer.
    Request { front: [u8; FRONT], in_buffer: usize },
    /// Nothing is there now.
    Nothing,
    /// Something went by, look again.
    Again,
    /// The mount is gone.
    Gone,
}

/// See the module. Non-blocking; used by one queue.
pub(super) struct Channel {
    fd: Arc<OwnedFd>,
}

impl Channel {
    pub(super) fn new(fd: Arc<OwnedFd>) -> Self {
        Self { fd }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Whether something is there to take.
    pub(super) fn is_readable(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&*self.fd, PollFlags::IN)];
        // An error is news, too.
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Takes a request.
    ///
    /// # Safety
    /// `buffer` has `len` bytes that nothing else uses.
    #[inline]
    pub(super) unsafe fn read(&self, buffer: *mut u8, len: usize) -> Taken {
        let mut front = [0; FRONT];
        let parts = [
            iovec { iov_base: front.as_mut_ptr().cast(), iov_len: FRONT },
            iovec { iov_base: buffer.cast(), iov_len: len },
        ];
        // SAFETY: two parts, both valid for their lengths: ours, and the caller's promise.
        let n = unsafe { libc::readv(self.fd(), parts.as_ptr(), 2) };
        if n >= size_of::<InHeader>() as isize {
            return Taken::Request { front, in_buffer: (n as usize).saturating_sub(FRONT) };
        }
        match if n < 0 { io::Error::last_os_error().raw_os_error() } else { None } {
            Some(libc::EAGAIN) => Taken::Nothing,
            // ENOENT: the one who asked gave up while it was handed over.
            Some(libc::EINTR | libc::ENOENT) => Taken::Again,
            // It passes, and the request is still there.
            Some(libc::ENOMEM) => Taken::Nothing,
            _ => Taken::Gone,
        }
    }

    /// Replies: a header and `small` or an error; with data, that follows.
    ///
    /// # Safety
    /// `data` is readable for its length.
    #[inline]
    pub(super) unsafe fn reply(&self, unique: u64, error: i32, small: &[u8], data: (*const u8, usize)) {
        let len = size_of::<OutHeader>() + small.len() + data.1;
        let header = OutHeader { len: len as u32, error, unique };
        let parts = [
            iovec { iov_base: header.bytes().as_ptr().cast_mut().cast(), iov_len: size_of::<OutHeader>() },
            iovec { iov_base: small.as_ptr().cast_mut().cast(), iov_len: small.len() },
            iovec { iov_base: data.0.cast_mut().cast(), iov_len: data.1 },
        ];
        let count = if data.1 > 0 {
            3
        } else if small.is_empty() {
            1
        } else {
            2
        };
        // SAFETY: the parts are valid for their lengths: ours, the caller's slice, the caller's promise.
        let n = unsafe { libc::writev(self.fd(), parts.as_ptr(), count) };
        // What fails is a request whose asker gave up, or a mount that is gone, which the next read tells.
        let _ = n;
    }
}
