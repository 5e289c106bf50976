//! The poll of an eventfd that calls a queue, or a time that passes, on its worker's ring.

use std::os::fd::RawFd;

use io_uring::types::Timespec;

use crate::{Token, Uring};

/// What a poll's news ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PollEvent {
    /// Nothing: it goes on, or was to end.
    Nothing,
    /// [`PollState::begin`].
    BeginAgain,
    /// What is polled cannot be waited for.
    Useless,
}

/// Whether the poll is on the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PollState {
    /// Nothing is.
    #[default]
    Off,
    /// It is.
    On,
    /// Cancelled, its last completion yet to come; `again`: armed anew meanwhile.
    Ending {
        /// To be polled again then.
        again: bool,
    },
}

impl PollState {
    /// Attach: polls `fd`, with `token`, until [`end`](Self::end).
    pub fn begin(&mut self, uring: &mut Uring, fd: RawFd, token: Token) {
        match self {
            Self::Off => {
                uring.poll(fd, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// [`begin`](Self::begin), for one event.
    pub fn begin_once(&mut self, uring: &mut Uring, fd: RawFd, token: Token) {
        match self {
            Self::Off => {
                uring.poll_once(fd, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// [`begin`](Self::begin), for a time that passes once.
    pub fn begin_timeout(&mut self, uring: &mut Uring, after: &'static Timespec, token: Token) {
        match self {
            Self::Off => {
                uring.timeout(after, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// Detach: the poll with `token` ends.
    pub fn end(&mut self, uring: &mut Uring, token: Token) {
        match self {
            Self::On => {
                uring.cancel(token);
                *self = Self::Ending { again: false };
            }
            Self::Ending { .. } => *self = Self::Ending { again: false },
            Self::Off => {}
        }
    }

    /// Its last completion came. What it was before: whether to [`begin`](Self::begin) again is the caller's to say.
    pub fn ended(&mut self) -> Self {
        std::mem::take(self)
    }

    /// News of it where it waits for kicks: what is to be done.
    pub fn on_event(&mut self, result: i32, more: bool) -> PollEvent {
        if more {
            return PollEvent::Nothing;
        }
        let before = self.ended();
        // What is no eventfd may fail for good, or be ready for good: armed again and again it would keep us busy.
        let over = i32::from(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL);
        let useless = if result < 0 { result != -libc::ECANCELED } else { result & over != 0 };
        match before {
            Self::On if useless => PollEvent::Useless,
            _ if before.restarts() => PollEvent::BeginAgain,
            _ => PollEvent::Nothing,
        }
    }

    /// Whether one that [`ended`](Self::ended) is to be begun again, if the kernel ended it by itself.
    pub fn restarts(self) -> bool {
        matches!(self, Self::On | Self::Ending { again: true })
    }
}
