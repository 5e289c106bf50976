//! What the session thread waits for.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::super::Inner;
use super::super::session::Session;
use super::super::waiting::Waiting;

/// How long connections that are over, and could not be closed, wait for the next attempt.
const CLOSE_PAUSE: Duration = Duration::from_millis(100);

/// Why a wait of the session thread ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wakeup {
    /// The awaited descriptor is readable.
    Readable,
    /// The time is over.
    Late,
    /// The export ends.
    Ends,
}

/// What became ready in a wait.
struct Ready {
    /// The awaited descriptor.
    awaited: bool,
    /// Rings whose server reports an error.
    broken_rings: Vec<u16>,
    /// The control queue of a network device has a command.
    command: bool,
    /// A connection that waits, or the listener.
    others: bool,
}

impl Inner {
    /// Waits until `fd` is readable, or until a time. Meanwhile it passes on reports, runs commands
    /// of the device, and reads ahead from connections that wait.
    ///
    /// `with`: the session, and the connections that wait. Without them, `fd` is the listener. No
    /// connection is accepted while too many connections that are over could not be closed.
    pub(super) fn wait(
        &self,
        fd: BorrowedFd<'_>,
        until: Option<Instant>,
        with: Option<(&Session, &mut Waiting<'_>)>,
    ) -> Wakeup {
        let (session, mut waiting) = with.unzip();
        loop {
            self.pass_on_reports(session);
            // After the eventfd was reset: `stop` sets the flag before it signals.
            if self.stopping.load(SeqCst) {
                return Wakeup::Ends;
            }
            let ready = match self.poll(fd, until, session.is_some(), waiting.as_deref()) {
                Ok(Some(ready)) => ready,
                Ok(None) if until.is_some_and(|until| until <= Instant::now()) => return Wakeup::Late,
                Ok(None) | Err(Errno::INTR) => continue,
                Err(_) => return Wakeup::Ends,
            };
            if ready.others
                && let Some(waiting) = &mut waiting
            {
                waiting.update(&mut self.receiver());
            }
            if ready.command
                && let Some(network) = self.device.network()
            {
                network.run_command();
            }
            for ring in ready.broken_rings {
                if self.server.is_broken(ring) {
                    let queue = self.server.queue_of(ring).unwrap_or_default();
                    self.reports.add(queue, Some(ring), "the kernel finds its ring or its addresses wrong");
                }
            }
            if ready.awaited {
                return if self.stopping.load(Relaxed) { Wakeup::Ends } else { Wakeup::Readable };
            }
        }
    }

    /// Polls once. None: the time is over, or something else is due.
    fn poll(
        &self,
        fd: BorrowedFd<'_>,
        until: Option<Instant>,
        in_session: bool,
        waiting: Option<&Waiting<'_>>,
    ) -> rustix::io::Result<Option<Ready>> {
        let (room, again) = {
            let mut receiver = self.receiver();
            (receiver.has_room(&self.name), receiver.has_ended().then(|| Instant::now() + CLOSE_PAUSE))
        };
        let awaited = if room || in_session { PollFlags::IN } else { PollFlags::empty() };
        let alarms: Vec<_> = (0..self.server.rings())
            .filter_map(|ring| self.server.alarm(ring).map(|alarm| (ring, alarm)))
            .collect();
        let command = self.device.network().and_then(|network| network.command_eventfd());
        let others = waiting.iter().filter(|_| room).flat_map(|waiting| waiting.fds());
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![PollFd::from_borrowed_fd(fd, awaited), readable(self.reports.as_fd())];
        fds.extend(alarms.iter().map(|(_, alarm)| readable(*alarm)));
        fds.extend(command.map(readable));
        fds.extend(others.map(readable));
        self.tell_connected();
        let now = Instant::now();
        let due = self.news().due(self.connected.load(Relaxed), now);
        let left =
            until.into_iter().chain(due).chain(again).min().map(|at| at.saturating_duration_since(now));
        let left = left.map(|left| Timespec::try_from(left).expect("deadlines are minutes ahead at most"));
        if poll(&mut fds, left.as_ref())? == 0 {
            return Ok(None);
        }
        // In the order in which they were added.
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let awaited = ready.next() == Some(true);
        // Reports are taken when the caller polls again.
        let _ = ready.next();
        let broken_rings =
            alarms.iter().filter(|_| ready.next() == Some(true)).map(|(ring, _)| *ring).collect();
        let command = command.is_some() && ready.next() == Some(true);
        let others = ready.any(|ready| ready);
        Ok(Some(Ready { awaited, broken_rings, command, others }))
    }
}
