//! The first words with the kernel: INIT, and the image for passthrough.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::Transport;

use super::plan::Plan;
use crate::queue::TRANSFER_BYTES_MAX;
use crate::queue::abi::{
    BackingMap, DEV_IOC_BACKING_CLOSE, DEV_IOC_BACKING_OPEN, InHeader, InitIn, InitOut, MAJOR, MINOR,
    MINOR_MIN, OutHeader, Plain, init, op,
};

/// How long INIT, which the kernel queues when it mounts, may take to come.
const INIT_WAIT: Duration = Duration::from_secs(10);
/// Requests of tasks that do not wait for them (asynchronous reads and writes) at a time, over all queues. For a daemon
/// without CAP_SYS_ADMIN the kernel lowers it to its parameter `max_user_bgreq`.
const BACKGROUND_MAX: u16 = 4096;
/// The kernel's smallest buffer for reading requests (FUSE_MIN_READ_BUFFER).
const READ_BUFFER: usize = 8192;
const PAGE_BYTES: u32 = 4096;

/// What was agreed on: INIT's flags.
pub(super) fn negotiate(session: &OwnedFd, plan: &Plan) -> Result<u64> {
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
        flags: agreed as u32,
        flags2: (agreed >> 32) as u32,
        max_background: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX / 4 * 3,
        max_write: TRANSFER_BYTES_MAX,
        time_gran: 1,
        max_pages: (TRANSFER_BYTES_MAX / PAGE_BYTES) as u16,
        max_stack_depth: u32::from(agreed & init::PASSTHROUGH != 0),
        ..Default::default()
    };
    let header = OutHeader { len: (size_of::<OutHeader>() + size_of::<InitOut>()) as u32, error: 0, unique };
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
                let bytes = &bytes[..n];
                let header = InHeader::read(bytes).filter(|h| h.opcode == op::INIT);
                // Older kernels send less of it than there is room for.
                let mut body = [0; size_of::<InitIn>()];
                let sent = bytes.get(size_of::<InHeader>()..).unwrap_or(&[]);
                let n = sent.len().min(body.len());
                body[..n].copy_from_slice(&sent[..n]);
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

/// Tells the kernel of the image: the id by which OPEN names it.
pub(super) fn open_backing(session: &OwnedFd, image: &File) -> io::Result<i32> {
    let map = BackingMap { fd: image.as_raw_fd(), ..Default::default() };
    // SAFETY: the ioctl reads a map of that layout.
    let id = unsafe { libc::ioctl(session.as_raw_fd(), DEV_IOC_BACKING_OPEN, &raw const map) };
    if id > 0 { Ok(id) } else { Err(io::Error::last_os_error()) }
}

/// The reverse.
pub(super) fn close_backing(session: &OwnedFd, id: i32) {
    // SAFETY: the ioctl reads an id.
    unsafe { libc::ioctl(session.as_raw_fd(), DEV_IOC_BACKING_CLOSE, &raw const id) };
}
