//! One queue pair's part of a switch: frames for its guest, frames that were returned to it, and
//! the eventfd that wakes its worker.
//!
//! A frame stays in its sender's memory. Its description, a [`SentFrame`], goes to the inbox of the
//! receiver's queue. The receiver's worker copies the bytes and returns the description to the
//! sender's queue.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use vshunt_engine::EventFd;
use vshunt_types::sync::Locked;

use super::frame::Header;

/// Most frames that wait for one guest. A longer inbox would only add latency.
pub(super) const INBOX_MAX: usize = 512;

/// A piece of a sender's memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte.
    pub ptr: *mut u8,
    /// Number of bytes.
    pub len: usize,
}

// SAFETY: an address and a length. The sender's queue keeps the memory mapped until the description
// that contains the piece was returned, so any worker may read it until then.
unsafe impl Send for Piece {}

/// The description of a frame. The queue that owns the sender's ring makes it. It is at the sender,
/// in an inbox, or with the worker that copies the bytes.
pub struct SentFrame {
    /// The sender's queue, to which the description is returned.
    pub sender: Arc<PortQueue>,
    /// The sender's request; only the sender uses it.
    pub slot: u16,
    /// The sender's number of the destination; only the sender uses it.
    pub destination: u16,
    /// The time when it was sent, in the sender's ticks.
    pub tick: u32,
    /// The frame, from its Ethernet header on.
    pub pieces: Vec<Piece>,
    /// Bytes of the frame.
    pub len: usize,
    /// Offload work that has still to be done.
    pub header: Header,
    /// The result for the frame. The worker that returns it sets this.
    pub outcome: Outcome,
}

impl SentFrame {
    /// Makes an empty description that is returned to `sender`.
    pub fn from(sender: &Arc<PortQueue>) -> Self {
        Self {
            sender: sender.clone(),
            slot: 0,
            destination: 0,
            tick: 0,
            pieces: Vec::new(),
            len: 0,
            header: Header::default(),
            outcome: Outcome::NoRoom,
        }
    }
}

/// The result for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was copied out of its sender's memory.
    Taken,
    /// There was no room for it, or not soon enough.
    NoRoom,
    /// Its contents contradict its header.
    Invalid,
}

/// See the module. Any worker puts frames there; the worker that has the queue pair takes them.
pub struct PortQueue {
    /// Guards the list, and that nothing is added once the queue is closed. Held to push or take
    /// some frames.
    inbox: Mutex<Inbox>,
    /// Guards the list of returned frames. Held to push or take some frames.
    returns: Mutex<Vec<SentFrame>>,
    /// Copy of `Inbox::open` that is read without the lock.
    open: AtomicBool,
    /// Whether the inbox may have frames.
    has_frames: AtomicBool,
    /// Whether the list of returns may have frames.
    has_returns: AtomicBool,
    /// Whether senders have revoked frames in the inbox.
    changed: AtomicBool,
    /// Whether the worker has checked both lists for the last time and has to be signalled from now
    /// on.
    asleep: AtomicBool,
    eventfd: EventFd,
}

#[derive(Default)]
struct Inbox {
    open: bool,
    frames: VecDeque<SentFrame>,
}

impl AsRawFd for PortQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.eventfd.fd()
    }
}

impl PortQueue {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            inbox: Mutex::default(),
            returns: Mutex::default(),
            open: AtomicBool::new(false),
            has_frames: AtomicBool::new(false),
            has_returns: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            eventfd: EventFd::make()?,
        }))
    }

    #[cfg(test)]
    pub(super) fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    /// Returns whether its guest takes frames.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Opens the inbox for frames.
    pub fn open(&self) {
        self.inbox.locked().open = true;
        self.open.store(true, Ordering::Relaxed);
    }

    /// Closes the inbox, and returns the waiting frames to their senders.
    pub fn close(&self) {
        self.open.store(false, Ordering::Relaxed);
        let frames = {
            let mut inbox = self.inbox.locked();
            inbox.open = false;
            std::mem::take(&mut inbox.frames)
        };
        let mut frames: Vec<_> = frames.into();
        Self::return_all(&mut frames);
    }

    /// Puts frames into the inbox, in order, and wakes the worker. Frames without room stay in
    /// `frames`.
    pub fn put(&self, frames: &mut Vec<SentFrame>) {
        {
            let mut inbox = self.inbox.locked();
            let room = if inbox.open { INBOX_MAX.saturating_sub(inbox.frames.len()) } else { 0 };
            let count = room.min(frames.len());
            inbox.frames.extend(frames.drain(..count));
            // Under the lock, as `take` clears it under the lock.
            self.has_frames.store(true, Ordering::Relaxed);
        }
        self.signal();
    }

    /// Takes up to `most` frames, the oldest first.
    pub fn take(&self, most: usize, into: &mut VecDeque<SentFrame>) {
        let mut inbox = self.inbox.locked();
        let count = most.min(inbox.frames.len());
        into.extend(inbox.frames.drain(..count));
        self.has_frames.store(!inbox.frames.is_empty(), Ordering::Relaxed);
    }

    /// Puts back frames that were taken and for which the guest's buffers had no room. If the queue
    /// was closed since, they are returned to their senders.
    pub fn put_back(&self, frames: &mut VecDeque<SentFrame>) {
        let mut inbox = self.inbox.locked();
        if !inbox.open {
            drop(inbox);
            return Self::return_all(&mut frames.drain(..).collect());
        }
        while let Some(frame) = frames.pop_back() {
            inbox.frames.push_front(frame);
            self.has_frames.store(true, Ordering::Relaxed);
        }
    }

    /// Takes frames of `sender` that were sent before `tick` out of the inbox. No worker has copied
    /// them.
    pub fn revoke(&self, sender: &Arc<Self>, tick: u32, into: &mut Vec<SentFrame>) {
        {
            let mut inbox = self.inbox.locked();
            let is_wanted =
                |frame: &SentFrame| Arc::ptr_eq(&frame.sender, sender) && is_before(frame.tick, tick);
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
        self.signal();
    }

    /// Returns frames to their senders. Neighbours of one sender are returned together.
    pub fn return_all(frames: &mut Vec<SentFrame>) {
        while let Some(last) = frames.last() {
            let sender = last.sender.clone();
            let first =
                frames.iter().rposition(|frame| !Arc::ptr_eq(&frame.sender, &sender)).map_or(0, |at| at + 1);
            {
                let mut returns = sender.returns.locked();
                returns.extend(frames.drain(first..));
                sender.has_returns.store(true, Ordering::Relaxed);
            }
            sender.signal();
        }
    }

    /// Takes the frames that were returned.
    pub fn take_returns(&self, into: &mut Vec<SentFrame>) {
        let mut returns = self.returns.locked();
        into.append(&mut returns);
        self.has_returns.store(false, Ordering::Relaxed);
    }

    fn signal(&self) {
        // Orders the flags before the read of `asleep`. `sleep` has the matching fence.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // This cannot fail: the counter would have to reach 2^64 - 1.
            self.eventfd.signal();
        }
    }

    /// Returns whether there may be frames for the guest.
    #[inline]
    pub fn has_frames(&self) -> bool {
        self.has_frames.load(Ordering::Relaxed)
    }

    /// Returns whether frames of the guest may have been returned.
    #[inline]
    pub fn has_returns(&self) -> bool {
        self.has_returns.load(Ordering::Relaxed)
    }

    /// Returns whether frames were revoked since [`take_changed`](Self::take_changed).
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed)
    }

    /// Clears [`has_changed`](Self::has_changed).
    pub fn take_changed(&self) {
        if self.has_changed() {
            self.changed.store(false, Ordering::Relaxed);
        }
    }

    /// Prepares for sleep: the worker is signalled from now on, and checks both lists once more
    /// after this.
    pub fn sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Ends the sleep: the worker needs no signal.
    pub fn wake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}

/// Returns whether tick `one` is before tick `other`. Ticks wrap around.
pub(super) fn is_before(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() < 0
}
