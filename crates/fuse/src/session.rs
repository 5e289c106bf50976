//! The start of a FUSE session: the INIT request, and the registration of the image for
//! passthrough.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::Transport;

use super::plan::QueuePlan;
use crate::abi::{
    BackingMap, DEV_IOC_BACKING_CLOSE, DEV_IOC_BACKING_OPEN, InHeader, InitIn, InitOut, MAJOR, MINOR,
    MINOR_MIN, OutHeader, Plain, init, op,
};
use crate::queue::TRANSFER_BYTES_MAX;
use vshunt_types::convert::{at_most, len_u32};

/// How long the INIT request may take. The kernel queues it when it mounts.
const INIT_WAIT: Duration = Duration::from_secs(10);
/// Background requests (asynchronous reads and writes) in flight, over all queues. For a daemon
/// without CAP_SYS_ADMIN the kernel limits it to its parameter `max_user_bgreq`.
const BACKGROUND_MAX: u16 = 4096;
/// The kernel's smallest buffer for reading requests (FUSE_MIN_READ_BUFFER).
const READ_BUFFER: usize = 8192;
/// Pages of the longest transfer.
const MAX_PAGES: u16 = 256;
const _: () = assert!(MAX_PAGES as u32 * 4096 == TRANSFER_BYTES_MAX);

/// Answers INIT. Returns the flags that both sides support.
///
/// # Errors
/// `Unsupported` for a kernel that is too old; the system's.
pub(super) fn negotiate(session: &OwnedFd, plan: &QueuePlan) -> Result<u64> {
    let broken = |e: io::Error| Error::io("the kernel's first FUSE message cannot be had", e);
    let (unique, asked) = read_init(session).map_err(broken)?;
    if asked.major != MAJOR || asked.minor < MINOR_MIN {
        return Err(Error::unsupported(format!(
            "this kernel speaks FUSE {}.{}; {MAJOR}.{MINOR_MIN} is needed (Linux 4.20)",
            asked.major, asked.minor
        )));
    }
    let offered = u64::from(asked.flags)
        | if u64::from(asked.flags) & init::INIT_EXT != 0 { u64::from(asked.flags2) << 32 } else { 0 };
    let mut wanted = init::ASYNC_READ
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::MAX_PAGES
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP;
    if plan.passthrough {
        wanted |= init::PASSTHROUGH;
    }
    if plan.transport == Transport::IoUring {
        wanted |= init::OVER_IO_URING;
    }
    let agreed = offered & wanted;
    let out = InitOut {
        major: MAJOR,
        minor: MINOR,
        max_readahead: asked.max_readahead,
        flags: at_most(agreed & u64::from(u32::MAX), u32::MAX),
        flags2: at_most(agreed >> 32, u32::MAX),
        max_background: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX / 4 * 3,
        max_write: TRANSFER_BYTES_MAX,
        time_gran: 1,
        max_pages: MAX_PAGES,
        max_stack_depth: u32::from(agreed & init::PASSTHROUGH != 0),
        ..Default::default()
    };
    let header = OutHeader { len: len_u32(size_of::<OutHeader>() + size_of::<InitOut>()), error: 0, unique };
    let reply = [header.bytes(), out.bytes()].concat();
    rustix::io::write(session, &reply).map_err(|e| broken(e.into()))?;
    if plan.transport == Transport::IoUring && agreed & init::OVER_IO_URING == 0 {
        return Err(Error::unsupported("this kernel offers FUSE no io_uring; use transport=dev"));
    }
    Ok(agreed)
}

fn read_init(session: &OwnedFd) -> io::Result<(u64, InitIn)> {
    let until = Instant::now() + INIT_WAIT;
    let mut bytes = vec![0; READ_BUFFER];
    loop {
        match rustix::io::read(session, &mut bytes) {
            Ok(n) => {
                let bytes = bytes.get(..n).unwrap_or_default();
                let header = InHeader::read(bytes).filter(|h| h.opcode == op::INIT);
                // Older kernels send a shorter structure; the rest is zero.
                let mut body = [0; size_of::<InitIn>()];
                let sent = bytes.get(size_of::<InHeader>()..).unwrap_or(&[]);
                for (to, from) in body.iter_mut().zip(sent) {
                    *to = *from;
                }
                return match (header, InitIn::read(&body)) {
                    (Some(header), Some(init)) => Ok((header.unique, init)),
                    _ => Err(io::Error::other("it is no INIT")),
                };
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if Instant::now() < until => {
                let mut fds = [PollFd::new(session, PollFlags::IN)];
                let wait = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                let _ = poll(&mut fds, Some(&wait));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Registers the image for passthrough. Returns the id that the reply to OPEN names.
///
/// # Errors
/// The system's.
pub(super) fn open_backing(session: &OwnedFd, image: &File) -> io::Result<i32> {
    let map = BackingMap { fd: image.as_raw_fd(), ..Default::default() };
    // SAFETY: the ioctl reads a `fuse_backing_map`, which is the layout of `map`.
    let id = unsafe { libc::ioctl(session.as_raw_fd(), DEV_IOC_BACKING_OPEN, &raw const map) };
    if id > 0 { Ok(id) } else { Err(io::Error::last_os_error()) }
}

/// Undoes [`open_backing`].
pub(super) fn close_backing(session: &OwnedFd, id: i32) {
    // SAFETY: the ioctl reads an id of 4 bytes, which is what `id` is.
    unsafe { libc::ioctl(session.as_raw_fd(), DEV_IOC_BACKING_CLOSE, &raw const id) };
}
