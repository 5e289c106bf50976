//! The poll of a queue's eventfd, or a queue's timer, on its worker's io_uring.

use std::os::fd::RawFd;

use io_uring::types::Timespec;

use crate::{Token, Uring};

/// What a completion of a poll requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PollEvent {
    /// Nothing: the poll continues, or was meant to end.
    Nothing,
    /// The poll has to be started again with [`PollState::start`].
    Restart,
    /// The file cannot be polled.
    Useless,
}

/// Whether the poll is on the io_uring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PollState {
    /// There is no poll.
    #[default]
    Off,
    /// The poll is active.
    On,
    /// The poll was cancelled, and its last completion has not arrived.
    Ending {
        /// Whether the poll is to be started again after that.
        again: bool,
    },
}

impl PollState {
    /// Polls `fd` with `token` until [`end`](Self::end).
    pub fn start(&mut self, uring: &mut Uring, fd: RawFd, token: Token) {
        match self {
            Self::Off => {
                uring.poll(fd, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// Polls `fd` with `token` for one event.
    pub fn start_once(&mut self, uring: &mut Uring, fd: RawFd, token: Token) {
        match self {
            Self::Off => {
                uring.poll_once(fd, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// Starts a timer that expires once.
    pub fn start_timeout(&mut self, uring: &mut Uring, after: &'static Timespec, token: Token) {
        match self {
            Self::Off => {
                uring.timeout(after, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// Ends the poll or timer with `token`.
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

    /// Records the last completion, and returns the state before it. The caller decides whether to
    /// [`start`](Self::start) again.
    pub fn ended(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Records a completion of a poll that waits for kicks, and returns what it requires.
    pub fn on_event(&mut self, result: i32, more: bool) -> PollEvent {
        if more {
            return PollEvent::Nothing;
        }
        let before = self.ended();
        // A file that is no eventfd may fail on each poll, or be ready on each poll. Polling it
        // again and again would keep the worker busy.
        let over = i32::from(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL);
        let useless = if result < 0 { result != -libc::ECANCELED } else { result & over != 0 };
        match before {
            Self::On if useless => PollEvent::Useless,
            _ if before.restarts() => PollEvent::Restart,
            _ => PollEvent::Nothing,
        }
    }

    /// Whether a poll that was in this state before it [`ended`](Self::ended) has to be started
    /// again, because the kernel ended it or a start came in the meantime.
    pub fn restarts(self) -> bool {
        matches!(self, Self::On | Self::Ending { again: true })
    }
}
