//! The thread `vshunt-nbd` of a disk, which makes connections. It ends with the disk.
//!
//! It makes one connection at a time. The shared one comes first: while it is lost, no worker gets
//! one. A try for a worker ends at once when the shared one is lost ([`Connector`]).

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::connect::Needs;
use super::connector::{Asked, Connector, Event};
use super::port::{Connected, Message};
use super::stream::Limit;

/// Pause between two tries for the shared connection: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// A connection that is lost sooner was of no use.
const USEFUL: Duration = Duration::from_secs(1);
/// Most log lines about a server in a time.
const LOG_LINES: u32 = 20;
const LOG_WINDOW: Duration = Duration::from_secs(60);
/// Longest time without a look.
const IDLE: Duration = Duration::from_secs(3600);

/// When the shared connection is tried.
struct Tries {
    next: Instant,
    /// The pause after the next failure.
    pause: Duration,
    /// When the last connection was made.
    made: Option<Instant>,
    /// The last one that was lost was of no use.
    useless: bool,
}

impl Tries {
    fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Counts a lost connection. The server may end each of them after a few replies, so none is
    /// made at once after the last one; and less and less if it does so before the first reply.
    fn lost(&mut self, now: Instant, replied: bool) {
        self.useless = self.made.is_some_and(|made| now < made + USEFUL);
        if replied || !self.useless {
            self.pause = PAUSE;
        } else if self.next <= now {
            self.failed(now);
        }
        self.next = self.made.map_or(self.next, |made| self.next.max(made + PAUSE));
    }
}

/// What the log says about one kind of trouble with the server.
struct Log {
    /// The last trouble. None: there is none.
    told: Option<String>,
    /// Start of the current [`LOG_WINDOW`], and the lines in it.
    window: Instant,
    lines: u32,
}

impl Log {
    fn new() -> Self {
        Self { told: None, window: Instant::now(), lines: 0 }
    }

    /// Returns whether a trouble is worth a line: it is another one than the last, and there were
    /// few lines. The server chooses the text and how often it changes.
    fn is_new(&mut self, trouble: &str) -> bool {
        if self.told.as_deref() == Some(trouble) || !self.has_room() {
            return false;
        }
        self.told = Some(trouble.to_owned());
        true
    }

    /// Returns whether the end of a trouble is worth a line.
    fn is_well(&mut self) -> bool {
        self.told.take().is_some() && self.has_room()
    }

    fn has_room(&mut self) -> bool {
        if self.window.elapsed() > LOG_WINDOW {
            (self.window, self.lines) = (Instant::now(), 0);
        }
        self.lines += 1;
        self.lines <= LOG_LINES
    }
}

/// What the thread does next.
enum Work<'a> {
    /// It writes log lines.
    Tell(Vec<Event>),
    /// It makes the shared connection, for which requests wait until that time, perhaps in a short
    /// try.
    Common(Limit<'a>, Option<Instant>, bool),
    /// It makes a connection for a worker.
    Own(Limit<'a>),
    End,
}

/// The state of the thread.
struct Maker<'a> {
    connector: &'a Connector,
    needs: &'a Needs,
    tries: Tries,
    log: Log,
    /// About connections of workers. Queues come and go, so it says nothing of an end of trouble.
    own_log: Log,
}

impl Connector {
    /// Makes the connections that are asked for, until the disk is closed.
    pub(super) fn run(&self, needs: &Needs) {
        let tries = Tries { next: Instant::now(), pause: PAUSE, made: None, useless: false };
        let mut maker = Maker { connector: self, needs, tries, log: Log::new(), own_log: Log::new() };
        loop {
            match self.next(&maker.tries) {
                Work::Tell(events) => events.into_iter().for_each(|event| maker.tell(event)),
                Work::Common(limit, until, short) => maker.make_common(limit, until, short),
                Work::Own(limit) => maker.make_own(limit),
                Work::End => return,
            }
        }
    }

    /// Waits for something to do.
    fn next(&self, tries: &Tries) -> Work<'_> {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return Work::End;
            }
            if !state.events.is_empty() {
                return Work::Tell(std::mem::take(&mut state.events));
            }
            let now = Instant::now();
            if let Some(ask) = state.common.as_mut().filter(|ask| ask.until.is_some_and(|until| until <= now))
            {
                ask.until = None;
                ask.port.send(Message::Expired);
            }
            let until = state.common.as_ref().map(|ask| ask.until);
            let next = match until {
                Some(until) if tries.next <= now => {
                    let (limit, short) = self.begin_common(&mut state);
                    return Work::Common(limit, until, short);
                }
                Some(until) => until.map_or(tries.next, |until| until.min(tries.next)),
                None if state.wanting.is_empty() => now + IDLE,
                None if state.own_tries.next <= now => return Work::Own(self.begin_own(&mut state)),
                None => state.own_tries.next,
            };
            state = self.wait(state, next - now);
        }
    }
}

impl Maker<'_> {
    fn connect(&self, limit: Limit<'_>) -> Result<Connected, String> {
        let connected = self.connector.target.connect(limit)?;
        self.needs.check(&connected.settings).map(|()| connected)
    }

    /// Makes the shared connection. `until`: until when requests wait for it. `short`: a server
    /// that does not answer in time is no trouble yet.
    fn make_common(&mut self, limit: Limit<'_>, until: Option<Instant>, short: bool) {
        let made = self.connect(limit);
        let now = Instant::now();
        let mut state = self.connector.lock();
        let interrupted = !std::mem::take(&mut state.trying);
        match made {
            Ok(connected) => self.made(state, connected, now),
            Err(_) if interrupted => {}
            Err(why) => {
                self.tries.failed(now);
                state.replace_common(now);
                drop(state);
                if short && now >= limit.until {
                    return;
                }
                self.tell_common(&format!("{} {why}", self.connector.uri), until);
            }
        }
    }

    /// Makes a connection for a worker.
    fn make_own(&mut self, limit: Limit<'_>) {
        let made = self.connect(limit);
        let (uri, now) = (&self.connector.uri, Instant::now());
        let mut state = self.connector.lock();
        let interrupted = !std::mem::take(&mut state.trying);
        if made.is_ok() || !interrupted {
            state.own_tries.tried(now, made.is_ok());
        }
        match made {
            Ok(connected) => self.made(state, connected, now),
            Err(_) if interrupted => {}
            Err(why) => {
                state.refused = Some(format!("the server {why}"));
                // It may count one that has just ended.
                let may_pass = state.own_tries.failures < 2 && now < limit.until;
                drop(state);
                if may_pass {
                    return;
                }
                self.tell_own(&format!(
                    "{uri} gives a worker no connection of its own (it {why}): the worker uses the one that all share"
                ));
            }
        }
    }

    /// Gives a new connection to those that need it most. What was asked for may have changed since
    /// the try began.
    fn made(&mut self, mut state: MutexGuard<'_, Asked>, connected: Connected, now: Instant) {
        if state.common.is_none() {
            if state.wanting.is_empty() {
                state.refused = None;
                return connected.end();
            }
            let port = state.wanting.remove(0);
            return state.give(port, connected);
        }
        state.give_common(connected);
        self.tries.made = Some(now);
        if !self.tries.useless {
            state.own_tries.begin_again(now);
            state.refused = None;
            self.own_log.told = None;
        }
        drop(state);
        if self.log.is_well() {
            tracing::warn!("disk {}: {} is connected again", self.connector.name, self.connector.uri);
        }
    }

    /// Writes a log line about something that workers have seen.
    fn tell(&mut self, event: Event) {
        let uri = &self.connector.uri;
        match event {
            Event::Lost(lost, until) => {
                let now = Instant::now();
                self.tries.lost(now, lost.replied);
                if self.tries.useless {
                    self.connector.lock().replace_common(now);
                }
                self.tell_common(&format!("the connection to {uri} is lost: {}", lost.why), until);
            }
            Event::LostOwn(lost) => self.tell_own(&format!(
                "a worker's connection to {uri} is lost: {}; the worker uses the one that all share",
                lost.why
            )),
            Event::HandedOver => {
                if self.log.is_well() {
                    tracing::warn!(
                        "disk {}: {uri} is connected again: all workers share the connection that one of them had",
                        self.connector.name
                    );
                }
            }
        }
    }

    fn tell_own(&mut self, trouble: &str) {
        match self.own_log.is_new(trouble) {
            true => tracing::warn!("disk {}: {trouble}", self.connector.name),
            false => tracing::debug!("disk {}: {trouble}", self.connector.name),
        }
    }

    /// Writes a log line about a server that cannot be used. `until`: when requests that wait for
    /// it will fail.
    fn tell_common(&mut self, trouble: &str, until: Option<Instant>) {
        let waits = match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None if self.connector.reconnect_ms == 0 => {
                "requests fail until it is back (reconnect-delay=60 would let them wait for 60 s)".into()
            }
            None => "requests fail until it is back".into(),
            Some(left) => {
                format!("requests wait for it, for {} s at most", left.as_millis().div_ceil(1000))
            }
        };
        match self.log.is_new(trouble) {
            true => tracing::warn!("disk {}: {trouble}; {waits}", self.connector.name),
            false => tracing::debug!("disk {}: {trouble}", self.connector.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_tried_at_once_and_then_with_pauses() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let new = || Tries { next: start, pause: PAUSE, made: Some(start), useless: false };
        // One that was of use, though perhaps nothing was asked: at once.
        for replied in [true, false] {
            let mut tries = new();
            tries.lost(at(1000), replied);
            assert!(tries.next <= at(1000) && !tries.useless);
        }
        // One that ended soon: not at once.
        let mut tries = new();
        tries.lost(at(40), true);
        assert!(tries.next == at(100) && tries.useless);
        // Those that end before they reply: longer and longer.
        let mut tries = new();
        let pauses: Vec<_> = (0..7)
            .map(|_| {
                let now = tries.next;
                tries.made = Some(now);
                tries.lost(now, false);
                assert!(tries.useless);
                (tries.next - now).as_millis()
            })
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 2000, 2000]);
    }
}
