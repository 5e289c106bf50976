//! The poll of an eventfd that calls a queue, on its worker's ring.

use std::os::fd::RawFd;

use crate::worker::{Ring, Token};

/// Whether the poll is on the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Listen {
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

impl Listen {
    /// Attach: polls `fd`, with `token`, until [`end`](Self::end).
    pub(super) fn begin(&mut self, ring: &mut Ring, fd: RawFd, token: Token) {
        match self {
            Self::Off => {
                ring.poll(fd, token);
                *self = Self::On;
            }
            Self::Ending { .. } => *self = Self::Ending { again: true },
            Self::On => {}
        }
    }

    /// Detach: the poll with `token` ends.
    pub(super) fn end(&mut self, ring: &mut Ring, token: Token) {
        match self {
            Self::On => {
                ring.cancel(token);
                *self = Self::Ending { again: false };
            }
            Self::Ending { .. } => *self = Self::Ending { again: false },
            Self::Off => {}
        }
    }

    /// Its last completion came. What it was before: whether to [`begin`](Self::begin) again is the caller's to say.
    pub(super) fn ended(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Whether one that [`ended`](Self::ended) is to be begun again, if the kernel ended it by itself.
    pub(super) fn goes_on(self) -> bool {
        matches!(self, Self::On | Self::Ending { again: true })
    }
}
