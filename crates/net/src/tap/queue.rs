//! A queue of a tap, and which of them the kernel has under which index.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_types::error::{Error, Result};

use crate::ifreq;

/// Frames that one [`TapQueue::discard`] drops at most: some times what a queue holds.
const DISCARD_MAX: u64 = 10_000;

/// The attached queues of a tap, by their numbers in [`Tap::queues`](super::Tap::queues), at the kernel's index of each: the
/// last one takes the place of one that is detached, and one that is attached comes last. The lock is held over each call
/// that changes it, so that it says what is so.
#[derive(Debug, Default)]
pub(super) struct Order(Mutex<Vec<usize>>);

impl Order {
    /// The queues, from index 0 on.
    pub(super) fn now(&self) -> Vec<usize> {
        self.0.locked().clone()
    }

    /// Does what changes it.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        change(&mut self.0.locked())
    }
}

/// What is known of a queue's file when it becomes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Since {
    /// It was joined just now, and is attached.
    Joined,
    /// It was given to us; it may be attached or not.
    Given,
}

/// One queue of a tap.
#[derive(Debug)]
pub struct TapQueue {
    file: File,
    name: String,
    number: usize,
    /// The kernel detaches queues of such taps only.
    multi_queue: bool,
    /// Whether io_uring reads and writes it without waiting: before Linux 6.4 it refuses that.
    nowait: bool,
    order: Arc<Order>,
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

/// One frame a call, behind its header; `WouldBlock` where none waits. A buffer that is too short loses the frame's end.
impl Read for &TapQueue {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&self.file).read_vectored(buffers)
    }
}

/// One frame a call, behind its header: it goes to the host whole or not at all.
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
    /// A queue that `join` gives the file of. Detached, where that can be.
    pub(super) fn new(
        name: &str,
        number: usize,
        multi_queue: bool,
        order: &Arc<Order>,
        since: Since,
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
                Err(e) if since == Since::Given && e.raw_os_error() == Some(libc::EINVAL) => {}
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

    /// Lets frames come to this queue. Idempotent.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(&self) -> Result<()> {
        self.set(true)
    }

    /// Lets no frame come to this queue; those that wait in it are dropped (by a macvtap they are not). Frames written to it
    /// are still taken. Does nothing on a tap that is not multi-queue. Idempotent.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self) -> Result<()> {
        self.set(false)
    }

    /// Drops the frames that wait in it; says how many. Bounded, since more may come meanwhile.
    pub fn discard(&self) -> u64 {
        let mut frames = 0;
        // Longer frames are cut off, and are over all the same.
        let mut bytes = [0; 64];
        while frames < DISCARD_MAX && rustix::io::read(&self.file, &mut bytes).is_ok() {
            frames += 1;
        }
        frames
    }

    /// Whether RWF_NOWAIT is taken, for io_uring; the descriptor does not wait in any case.
    pub fn has_nowait(&self) -> bool {
        self.nowait
    }

    /// Whether frames may come to it.
    pub fn attached(&self) -> bool {
        self.index().is_some()
    }

    /// Its index among the attached queues, as the kernel counts and as steering programs choose; none while it is
    /// detached. It changes as others are detached: see [`Tap::order`](super::Tap::order).
    pub fn index(&self) -> Option<u16> {
        let place = self.order.change(|attached| attached.iter().position(|number| *number == self.number));
        place.map(|at| at as u16)
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

/// Whether RWF_NOWAIT is taken: by a frame of one byte, which no tap takes.
fn takes_nowait(file: &File) -> bool {
    let frame = [IoSlice::new(&[0])];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    rustix::io::pwritev2(file, &frame, u64::MAX, flags) != Err(rustix::io::Errno::OPNOTSUPP)
}
