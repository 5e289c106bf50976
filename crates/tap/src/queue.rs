//! A queue of a tap, and the kernel's index of each queue.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_types::error::{Error, Result};

use crate::ifreq;
use vshunt_types::convert::len_u16;

/// Most frames that one [`TapQueue::discard`] drops: a few times the capacity of a queue.
const DISCARD_MAX: u64 = 10_000;

/// The attached queues of a tap, by their numbers in [`Tap::queues`](crate::Tap::queues), at the
/// kernel's index of each. When a queue is detached, the last one takes its place. A queue that is
/// attached becomes the last one. The lock is held during each call that changes it, so that it
/// agrees with the kernel.
#[derive(Debug, Default)]
pub(super) struct AttachOrder(Mutex<Vec<usize>>);

impl AttachOrder {
    /// Returns the queues, from index 0 on.
    pub(super) fn now(&self) -> Vec<usize> {
        self.0.locked().clone()
    }

    /// Calls a function that changes it.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        change(&mut self.0.locked())
    }
}

/// The state of a queue's file when it becomes a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileOrigin {
    /// It was just attached to the interface, and is attached as a queue.
    Joined,
    /// Another program opened it. It may be attached or not.
    Given,
}

/// One queue of a tap.
#[derive(Debug)]
pub struct TapQueue {
    file: File,
    name: String,
    number: usize,
    /// Whether the tap is multi-queue. The kernel detaches only queues of such taps.
    multi_queue: bool,
    /// Whether io_uring can read and write it without waiting. Before Linux 6.4 it cannot.
    nowait: bool,
    order: Arc<AttachOrder>,
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for TapQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// One call reads one frame, behind its header. `WouldBlock` if none waits. A buffer that is too
/// short truncates the frame.
impl Read for &TapQueue {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&self.file).read_vectored(buffers)
    }
}

/// One call writes one frame, behind its header. It is sent completely, or not at all.
impl Write for &TapQueue {
    fn write(&mut self, frame: &[u8]) -> io::Result<usize> {
        (&self.file).write(frame)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        (&self.file).write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TapQueue {
    /// Makes a queue of the file that `join` returns. It is detached, if possible.
    pub(super) fn new(
        name: &str,
        number: usize,
        multi_queue: bool,
        order: &Arc<AttachOrder>,
        origin: FileOrigin,
        join: impl FnOnce() -> Result<File>,
    ) -> Result<Self> {
        order.change(|attached| {
            let file = join()?;
            let detached = match multi_queue {
                true => ifreq::set_queue(&file, ifreq::IFF_DETACH_QUEUE),
                false => {
                    attached.push(number);
                    Ok(())
                }
            };
            match detached {
                // It was not attached.
                Err(e) if origin == FileOrigin::Given && e.raw_os_error() == Some(libc::EINVAL) => {}
                other => other.map_err(|e| Self::refused(name, false, e))?,
            }
            let nowait = takes_nowait(&file);
            Ok(Self { file, name: name.to_owned(), number, multi_queue, nowait, order: order.clone() })
        })
    }

    fn refused(name: &str, on: bool, e: io::Error) -> Error {
        let what = if on { "attached" } else { "detached" };
        Error::io(format!("a queue of tap {name} cannot be {what}"), e)
    }

    /// Lets frames arrive at this queue. Idempotent.
    ///
    /// # Errors
    /// Those of the ioctl.
    pub fn attach(&self) -> Result<()> {
        self.set(true)
    }

    /// Lets no frames arrive at this queue. Frames that wait in it are dropped (a macvtap keeps
    /// them). Frames that are written to it are still sent. This does nothing on a tap that is not
    /// multi-queue. Idempotent.
    ///
    /// # Errors
    /// Those of the ioctl.
    pub fn detach(&self) -> Result<()> {
        self.set(false)
    }

    /// Drops the frames that wait in it. Returns their number. It is bounded, because more may
    /// arrive meanwhile.
    pub fn discard(&self) -> u64 {
        let mut frames = 0;
        // Longer frames are truncated, which also removes them.
        let mut bytes = [0; 64];
        while frames < DISCARD_MAX && rustix::io::read(&self.file, &mut bytes).is_ok() {
            frames += 1;
        }
        frames
    }

    /// Returns whether io_uring can use RWF_NOWAIT. The descriptor is non-blocking in any case.
    pub fn has_nowait(&self) -> bool {
        self.nowait
    }

    /// Returns whether frames may arrive at it.
    pub fn attached(&self) -> bool {
        self.index().is_some()
    }

    /// Returns its index among the attached queues, which the kernel and steering programs use.
    /// `None` while it is detached. It changes when others are detached: see
    /// [`Tap::order`](crate::Tap::order).
    pub fn index(&self) -> Option<u16> {
        let place = self.order.change(|attached| attached.iter().position(|number| *number == self.number));
        place.map(len_u16)
    }

    fn set(&self, on: bool) -> Result<()> {
        self.order.change(|attached| {
            let at = attached.iter().position(|number| *number == self.number);
            if at.is_some() == on || !self.multi_queue {
                return Ok(());
            }
            let flag = if on { ifreq::IFF_ATTACH_QUEUE } else { ifreq::IFF_DETACH_QUEUE };
            ifreq::set_queue(&self.file, flag).map_err(|e| Self::refused(&self.name, on, e))?;
            match at {
                Some(at) => drop(attached.swap_remove(at)),
                None => attached.push(self.number),
            }
            Ok(())
        })
    }
}

/// Returns whether RWF_NOWAIT is supported. It writes a frame of one byte, which no tap accepts.
fn takes_nowait(file: &File) -> bool {
    let frame = [IoSlice::new(&[0])];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    rustix::io::pwritev2(file, &frame, u64::MAX, flags) != Err(rustix::io::Errno::OPNOTSUPP)
}
