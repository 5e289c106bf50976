//! One queue pair's end at a switch: what came for its guest, what came home to it, and the eventfd that wakes its worker.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use rustix::event::{EventfdFlags, eventfd};

use super::Frame;

/// Frames that wait for one guest at most: more would only come later.
pub(super) const INBOX_MAX: usize = 512;

/// See the module. Any worker's; the one that has the queue pair takes.
pub struct End {
    /// Guards the list, and that nothing is put there once the end is closed; held for a push or a take of some frames.
    inbox: Mutex<Inbox>,
    /// Guards the list; likewise.
    home: Mutex<Vec<Frame>>,
    /// As in the inbox, for those who only look.
    open: AtomicBool,
    /// There may be something in the one, or the other.
    has_frames: AtomicBool,
    has_returns: AtomicBool,
    /// What waited in the inbox was fetched back.
    changed: AtomicBool,
    /// The worker has looked for the last time before it is signalled for.
    asleep: AtomicBool,
    eventfd: OwnedFd,
}

#[derive(Default)]
struct Inbox {
    open: bool,
    frames: VecDeque<Frame>,
}

impl AsRawFd for End {
    fn as_raw_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }
}

impl End {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            inbox: Mutex::default(),
            home: Mutex::default(),
            open: AtomicBool::new(false),
            has_frames: AtomicBool::new(false),
            has_returns: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    #[cfg(test)]
    pub(super) fn eventfd(&self) -> &OwnedFd {
        &self.eventfd
    }

    /// Whether its guest takes frames.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Its guest takes frames from now on.
    pub fn open(&self) {
        self.inbox.locked().open = true;
        self.open.store(true, Ordering::Relaxed);
    }

    /// Its guest takes none any more. What waited goes home.
    pub fn close(&self) {
        self.open.store(false, Ordering::Relaxed);
        let frames = {
            let mut inbox = self.inbox.locked();
            inbox.open = false;
            std::mem::take(&mut inbox.frames)
        };
        let mut frames: Vec<_> = frames.into();
        Self::send_home(&mut frames);
    }

    /// Puts frames there, in their order, and wakes the worker; those that found no room stay in `frames`.
    pub fn put(&self, frames: &mut Vec<Frame>) {
        {
            let mut inbox = self.inbox.locked();
            let room = if inbox.open { INBOX_MAX.saturating_sub(inbox.frames.len()) } else { 0 };
            let count = room.min(frames.len());
            inbox.frames.extend(frames.drain(..count));
            // Under the lock, as whoever takes says that there is nothing.
            self.has_frames.store(true, Ordering::Relaxed);
        }
        self.ring();
    }

    /// Takes up to `most` frames, the oldest first.
    pub fn take(&self, most: usize, into: &mut VecDeque<Frame>) {
        let mut inbox = self.inbox.locked();
        let count = most.min(inbox.frames.len());
        into.extend(inbox.frames.drain(..count));
        self.has_frames.store(!inbox.frames.is_empty(), Ordering::Relaxed);
    }

    /// Puts back what was taken and found no room in the guest's buffers. It goes home where the end was closed meanwhile.
    pub fn put_back(&self, frames: &mut VecDeque<Frame>) {
        let mut inbox = self.inbox.locked();
        if !inbox.open {
            drop(inbox);
            return Self::send_home(&mut frames.drain(..).collect());
        }
        while let Some(frame) = frames.pop_back() {
            inbox.frames.push_front(frame);
            self.has_frames.store(true, Ordering::Relaxed);
        }
    }

    /// Takes frames of `of` that were sent before `tick` out again: nobody has copied them.
    pub fn revoke(&self, of: &Arc<Self>, tick: u32, into: &mut Vec<Frame>) {
        {
            let mut inbox = self.inbox.locked();
            let is_wanted =
                |frame: &Frame| Arc::ptr_eq(&frame.home, of) && (frame.tick.wrapping_sub(tick) as i32) < 0;
            if !inbox.frames.iter().any(&is_wanted) {
                return;
            }
            for frame in std::mem::take(&mut inbox.frames) {
                match is_wanted(&frame) {
                    true => into.push(frame),
                    false => inbox.frames.push_back(frame),
                }
            }
            self.has_frames.store(!inbox.frames.is_empty(), Ordering::Relaxed);
            self.changed.store(true, Ordering::Relaxed);
        }
        self.ring();
    }

    /// Sends frames back to their senders, those of one together where they lie together.
    pub fn send_home(frames: &mut Vec<Frame>) {
        while let Some(last) = frames.last() {
            let home = last.home.clone();
            let first =
                frames.iter().rposition(|frame| !Arc::ptr_eq(&frame.home, &home)).map_or(0, |at| at + 1);
            {
                let mut list = home.home.locked();
                list.extend(frames.drain(first..));
                home.has_returns.store(true, Ordering::Relaxed);
            }
            home.ring();
        }
    }

    /// Takes what came home.
    pub fn take_home(&self, into: &mut Vec<Frame>) {
        let mut home = self.home.locked();
        into.append(&mut home);
        self.has_returns.store(false, Ordering::Relaxed);
    }

    fn ring(&self) {
        // Between the flags and the look at its sleep; `sleep` has the like.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // Cannot fail: the counter would have to reach 2^64 - 1.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Whether frames for the guest may be there.
    #[inline]
    pub fn has_frames(&self) -> bool {
        self.has_frames.load(Ordering::Relaxed)
    }

    /// Whether frames of the guest may have come home.
    #[inline]
    pub fn has_returns(&self) -> bool {
        self.has_returns.load(Ordering::Relaxed)
    }

    /// Whether frames that it may wait with are not there any more.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed)
    }

    /// [`has_changed`](Self::has_changed), which is seen.
    pub fn take_changed(&self) {
        if self.has_changed() {
            self.changed.store(false, Ordering::Relaxed);
        }
    }

    /// The worker rests: it is signalled for from now on, and looks once more after this.
    pub fn sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The worker is up.
    pub fn wake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}
