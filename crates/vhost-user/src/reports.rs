//! What workers report to the session thread, and what the observer knows of the connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::time::Instant;

use vshunt_engine::EventFd;
use vshunt_types::sync::Locked;

use super::rate::Rate;

/// A queue broke.
pub(super) struct Report {
    pub(super) queue: u16,
    /// The virtqueue whose error descriptor is signalled.
    pub(super) ring: Option<u16>,
    pub(super) reason: String,
}

/// Reports of workers to the session thread.
///
/// The session thread may log and block, and a worker may not. It also signals the error
/// descriptors: a worker would need an io_uring ([`EventFd::new`]) for each.
pub(super) struct Reports {
    /// Guards the list alone; held for a push or a swap.
    list: Mutex<Vec<Report>>,
    /// Wakes the session thread, to read the list or to end.
    eventfd: EventFd,
}

impl Reports {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { list: Mutex::default(), eventfd: EventFd::make()? })
    }

    /// Reports that a queue broke. A ring breaks at most once after each start, so the list is
    /// bounded.
    pub(super) fn add(&self, queue: u16, ring: Option<u16>, reason: &str) {
        let report = Report { queue, ring, reason: reason.to_owned() };
        self.list.locked().push(report);
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.eventfd.signal();
    }

    /// Takes all reports, and resets the eventfd.
    pub(super) fn take(&self) -> Vec<Report> {
        self.eventfd.take();
        std::mem::take(&mut *self.list.locked())
    }
}

impl AsFd for Reports {
    /// Readable when there are reports, or when the session thread is to end.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// What the observer was last told of the connection.
pub(super) struct ConnectionNews {
    /// Whether a front end is connected.
    pub(super) connected: bool,
    pub(super) rate: Rate,
}

impl ConnectionNews {
    /// Returns whether the observer has to be told of this state at `now`. If so, the state counts
    /// as told.
    pub(super) fn take(&mut self, connected: bool, now: Instant) -> bool {
        let take = self.connected != connected && self.rate.take(now);
        if take {
            self.connected = connected;
        }
        take
    }

    /// Returns when the observer has to be told of this state, `now` or later; none if it knows the
    /// state.
    pub(super) fn due(&self, connected: bool, now: Instant) -> Option<Instant> {
        (self.connected != connected).then(|| self.rate.next(now))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_state_is_told_however_often_it_changed() {
        let now = Instant::now();
        let mut news = ConnectionNews { connected: false, rate: Rate::new(2, 1) };
        assert!(!news.take(false, now) && news.due(false, now).is_none());
        assert!(news.take(true, now) && !news.take(true, now) && news.take(false, now));
        assert!(!news.take(true, now));
        let due = news.due(true, now).unwrap();
        assert_eq!(due, now + Duration::from_secs(1));
        assert!(news.due(false, now).is_none(), "the observer knows this state");
        assert!(news.take(true, due) && news.due(true, due).is_none());
    }
}
