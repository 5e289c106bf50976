//! What the connections of a disk ask of the thread that makes them ([`maker`](super::maker)).
//!
//! Called by workers, by the thread of the shared connection and by control threads. No call waits
//! for a server.
//!
//! | connection | made |
//! | --- | --- |
//! | the shared one | when the disk is opened; again, as soon as it is lost |
//! | a worker's own | when the worker asks, as long as the shared one is there. If the server gives none, it is tried again later ([`OwnTries`]) |
//!
//! If the shared connection is lost and a try for another one fails, or takes longer than
//! [`SHORT_TRY`], a worker is asked to hand over its own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vshunt_engine::EventFd;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::spec::ConnectionsInfo;
use vshunt_types::sync::Locked;

use super::connect::{Needs, Target};
use super::port::{Connected, Lost, Message, Port};
use super::stream::Limit;

/// Longest time of one try: connecting and the handshake. It is less than the time after which jobs
/// give up storage that hangs (`STALL` of the daemon).
pub(super) const TRY: Duration = Duration::from_secs(if cfg!(test) { 6 } else { 10 });
/// Longest time of the first try after the shared connection was lost, if a worker could hand over
/// its own instead. Most servers answer sooner. Later tries may take [`HAND_OVER`] then.
const SHORT_TRY: Duration = Duration::from_millis(250);
/// Pause between two tries to give a worker its own connection: at first, and at most.
const MORE_PAUSE: Duration = Duration::from_secs(1);
const MORE_PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long a worker that was asked to hand its connection over is waited for before the next one
/// is asked.
const HAND_OVER: Duration = Duration::from_secs(1);
/// No worker gets a connection for so long after the shared one was made again: the server may have
/// few, and other disks have to find it first. More than the longest pause between their tries.
const OTHERS_FIRST: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 3000 });

/// Asks for connections to one export.
pub(super) struct Connector {
    /// The disk's name, and its URI: for log lines.
    pub(super) name: String,
    pub(super) uri: String,
    pub(super) target: Target,
    pub(super) reconnect_ms: u64,
    /// The server allows several connections.
    pub(super) several: bool,
    /// Guards what is asked for. Held for a look or a change, never while connecting. The messages
    /// of a [`Port`] are locked under it.
    state: Mutex<Asked>,
    /// Announces a change of `state`.
    changed: Condvar,
    /// Ends the present try.
    interrupt: EventFd,
}

/// What is asked for.
pub(super) struct Asked {
    /// The shared connection, while there is none.
    pub(super) common: Option<Ask>,
    /// When a worker was last asked to hand over its own for it.
    asked: Option<Instant>,
    /// Workers that want a connection of their own, in the order of their asking.
    pub(super) wanting: Vec<Arc<Port>>,
    /// Workers that have one.
    having: Vec<Arc<Port>>,
    /// Workers that use the disk, with a connection of their own or without one.
    members: u32,
    pub(super) own_tries: OwnTries,
    /// Why the server gave no further connection: a sentence without its end.
    pub(super) refused: Option<String>,
    /// What the log has to say.
    pub(super) events: Vec<Event>,
    /// A try is under way, and it is not interrupted.
    pub(super) trying: bool,
    pub(super) stopped: bool,
}

/// The shared connection, which is wanted.
pub(super) struct Ask {
    pub(super) port: Arc<Port>,
    /// Until when requests wait. None: they have failed already.
    pub(super) until: Option<Instant>,
    /// It was tried since it was lost.
    pub(super) tried: bool,
}

/// What the thread writes to the log, because workers do not.
pub(super) enum Event {
    /// The shared connection was lost. Its requests wait until that time.
    Lost(Lost, Option<Instant>),
    /// A worker has lost its own.
    LostOwn(Lost),
    /// A worker's connection is the shared one now.
    HandedOver,
}

/// When a worker's own connection is tried.
pub(super) struct OwnTries {
    pub(super) next: Instant,
    /// The pause after the next failure.
    pause: Duration,
    /// When the last try ended.
    tried: Option<Instant>,
    /// The next try is not before this time.
    others_first: Option<Instant>,
    /// Failures in a row.
    pub(super) failures: u32,
}

impl OwnTries {
    fn new() -> Self {
        Self { next: Instant::now(), pause: MORE_PAUSE, tried: None, others_first: None, failures: 0 }
    }

    /// Counts a try that the server did not interrupt.
    pub(super) fn tried(&mut self, now: Instant, made: bool) {
        self.tried = Some(now);
        self.failures = if made { 0 } else { self.failures + 1 };
        if !made {
            self.next = now + self.pause;
            self.pause = (self.pause * 2).min(MORE_PAUSE_MAX);
        }
    }

    /// Counts the loss of a worker's own connection. One that never replied is a failure of the
    /// server. Otherwise there may be a new one at once, but not at once after the last one.
    fn lost(&mut self, now: Instant, replied: bool) {
        if replied {
            self.forget(now);
        } else if self.next <= now {
            self.tried(now, false);
        }
    }

    /// Forgets failures, because the shared connection was made again: the server may be another
    /// process now.
    pub(super) fn begin_again(&mut self, now: Instant) {
        self.others_first = Some(now + OTHERS_FIRST);
        self.forget(now);
    }

    fn forget(&mut self, now: Instant) {
        (self.pause, self.failures) = (MORE_PAUSE, 0);
        self.next = self.soon(now);
    }

    /// Ends the pause, because a queue has come to a worker.
    fn hurry(&mut self, now: Instant) {
        self.next = self.next.min(self.soon(now));
    }

    fn soon(&self, now: Instant) -> Instant {
        let next = self.tried.map_or(now, |tried| tried + MORE_PAUSE);
        self.others_first.map_or(next, |first| first.max(next))
    }
}

impl Connector {
    /// `several`: the server allows several connections.
    ///
    /// # Errors
    /// The system has no eventfd.
    pub(super) fn new(
        (name, uri): (String, String),
        target: Target,
        reconnect_ms: u64,
        several: bool,
    ) -> std::io::Result<Self> {
        let (state, changed, interrupt) = (Mutex::new(Asked::new()), Condvar::new(), EventFd::make()?);
        Ok(Self { name, uri, target, reconnect_ms, several, state, changed, interrupt })
    }

    /// Starts the thread. It ends after [`stop`](Self::stop).
    ///
    /// # Errors
    /// The system has no thread.
    pub(super) fn start(self: &Arc<Self>, needs: Needs) -> std::io::Result<()> {
        let connector = self.clone();
        let thread = std::thread::Builder::new().name("vshunt-nbd".to_owned());
        sandbox::spawn(ThreadKind::Remote, thread, move || connector.run(&needs)).map(drop)
    }

    /// Ends the thread, and the try that it is in. Does not wait for that.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        self.end_try(&mut state);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Asked> {
        self.state.locked()
    }

    /// Waits for a change of what is asked for, for at most `limit`.
    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, Asked>, limit: Duration) -> MutexGuard<'a, Asked> {
        let waited = self.changed.wait_timeout(state, limit);
        waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    /// Says that a try for a worker begins. Returns the limit of it.
    pub(super) fn begin_own(&self, state: &mut Asked) -> Limit<'_> {
        self.begin(state, Instant::now() + TRY)
    }

    /// Says that a try for the shared connection begins. Returns the limit of it, and whether it is
    /// a short one.
    pub(super) fn begin_common(&self, state: &mut Asked) -> (Limit<'_>, bool) {
        let now = Instant::now();
        let short = !state.having.is_empty();
        let mut end = now + TRY;
        if let Some(ask) = &mut state.common {
            let tried = std::mem::replace(&mut ask.tried, true);
            if short {
                end = now + if tried { HAND_OVER } else { SHORT_TRY };
            }
            end = ask.until.map_or(end, |until| until.min(end));
        }
        (self.begin(state, end), short)
    }

    fn begin(&self, state: &mut Asked, until: Instant) -> Limit<'_> {
        // An interruption of an earlier try, which had ended by itself.
        self.interrupt.take();
        state.trying = true;
        Limit { until, interrupt: &self.interrupt }
    }

    /// Interrupts the present try, and wakes the thread.
    fn end_try(&self, state: &mut Asked) {
        if std::mem::take(&mut state.trying) {
            self.interrupt.signal();
        }
        self.changed.notify_all();
    }

    /// Returns until when first requests wait for a lost connection.
    pub(super) fn first_until(&self) -> Instant {
        Instant::now() + TRY.max(Duration::from_millis(self.reconnect_ms))
    }

    /// Counts a worker that begins to use the disk.
    pub(super) fn join(&self) {
        self.lock().members += 1;
    }

    /// Says that a request waits for the lost shared connection until that time.
    pub(super) fn wait_until(&self, until: Instant) {
        let mut state = self.lock();
        if let Some(ask) = &mut state.common {
            ask.until = Some(ask.until.map_or(until, |before| before.min(until)));
            self.changed.notify_all();
        }
    }

    /// Undoes [`join`](Self::join). `port`: that of the worker.
    pub(super) fn part(&self, port: Option<&Arc<Port>>) {
        let mut state = self.lock();
        state.members -= 1;
        if let Some(port) = port {
            state.remove(port);
        }
    }

    /// Asks for a connection for one worker, which has none.
    pub(super) fn ask(&self, port: &Arc<Port>) {
        let mut state = self.lock();
        state.wanting.push(port.clone());
        state.own_tries.hurry(Instant::now());
        self.changed.notify_all();
    }

    /// Says that a queue has come to a worker that has asked.
    pub(super) fn hurry(&self) {
        self.lock().own_tries.hurry(Instant::now());
        self.changed.notify_all();
    }

    /// Says that a worker has lost its own connection. It asks for another one.
    pub(super) fn lost_own(&self, port: &Arc<Port>, lost: Lost) {
        let mut state = self.lock();
        state.remove(port);
        state.wanting.push(port.clone());
        state.own_tries.lost(Instant::now(), lost.replied);
        state.refused = Some(match lost.replied {
            true => format!("a further connection was lost: {}", lost.why),
            false => format!("a further connection ended before it was of use: {}", lost.why),
        });
        state.events.push(Event::LostOwn(lost));
        self.changed.notify_all();
    }

    /// Says that the shared connection is lost. It waits for another one.
    pub(super) fn lost(&self, ask: Ask, lost: Lost) {
        let mut state = self.lock();
        state.events.push(Event::Lost(lost, ask.until));
        state.common = Some(ask);
        self.end_try(&mut state);
    }

    /// Makes a connection the shared one, if that is lost. Otherwise a worker gets it: the one with
    /// this port, which had it, or another one that wants one. Returns it if none does.
    pub(super) fn hand_over(&self, port: Option<&Arc<Port>>, connected: Connected) -> Option<Connected> {
        let mut state = self.lock();
        if let Some(port) = port {
            state.remove(port);
        }
        let stays = port.filter(|port| !port.gone.is_set());
        if state.common.is_some() {
            state.give_common(connected);
            state.events.push(Event::HandedOver);
            if let Some(port) = stays {
                state.wanting.push(port.clone());
            }
            self.end_try(&mut state);
        } else if let Some(port) = stays {
            state.give(port.clone(), connected);
        } else if !state.wanting.is_empty() {
            let port = state.wanting.remove(0);
            state.give(port, connected);
        } else if state.stopped {
            connected.end();
        } else {
            return Some(connected);
        }
        None
    }

    /// Returns whether the shared connection is lost, and until when requests wait for it.
    pub(super) fn is_lost(&self) -> Option<Option<Instant>> {
        self.lock().common.as_ref().map(|ask| ask.until)
    }

    /// Describes the connections.
    pub(super) fn info(&self) -> ConnectionsInfo {
        let state = self.lock();
        let own = u32::try_from(state.having.len()).unwrap_or(u32::MAX);
        let sharing = state.members.saturating_sub(own);
        let refused = match self.several {
            true => state.refused.clone(),
            false => Some(
                "the server does not say that it allows several connections (NBD_FLAG_CAN_MULTI_CONN)"
                    .to_owned(),
            ),
        };
        ConnectionsInfo {
            own,
            sharing,
            shared: state.common.is_none(),
            // While the shared one is lost, the server has another trouble.
            refused: refused.filter(|_| sharing > 0 && state.common.is_none()),
        }
    }
}

impl Asked {
    fn new() -> Self {
        Self {
            common: None,
            asked: None,
            wanting: Vec::new(),
            having: Vec::new(),
            members: 0,
            own_tries: OwnTries::new(),
            refused: None,
            events: Vec::new(),
            trying: false,
            stopped: false,
        }
    }

    /// Gives a connection to a worker.
    pub(super) fn give(&mut self, port: Arc<Port>, connected: Connected) {
        port.send(Message::Connected(connected));
        self.having.push(port);
        if self.wanting.is_empty() {
            self.refused = None;
        }
    }

    /// Makes a connection the shared one, which is lost.
    pub(super) fn give_common(&mut self, connected: Connected) {
        let Some(ask) = self.common.take() else { return connected.end() };
        ask.port.send(Message::Connected(connected));
        self.asked = None;
        self.keep_all();
    }

    /// If the shared connection is lost, asks a worker for its own. If the worker does not hand it
    /// over in time (it may wait for replies for long), the next call asks another one.
    pub(super) fn replace_common(&mut self, now: Instant) {
        if self.common.is_some() && self.asked.is_none_or(|asked| now >= asked + HAND_OVER) {
            self.asked = Some(now);
            self.ask_a_worker();
        }
    }

    /// Asks a worker for its connection.
    pub(super) fn ask_a_worker(&mut self) {
        if let Some(port) = self.having.first() {
            port.send(Message::HandOver);
            self.having.rotate_left(1);
        }
    }

    /// Lets workers that were asked for their connections keep them.
    pub(super) fn keep_all(&self) {
        self.having.iter().for_each(|port| port.send(Message::Keep));
    }

    fn remove(&mut self, port: &Arc<Port>) {
        let other = |other: &Arc<Port>| !Arc::ptr_eq(other, port);
        self.wanting.retain(other);
        self.having.retain(other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_gives_no_more_is_tried_less_and_less() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut own_tries = OwnTries { next: start, ..OwnTries::new() };
        let pauses: Vec<_> = (0..8)
            .map(|_| {
                let now = own_tries.next;
                own_tries.tried(now, false);
                (own_tries.next - now).as_secs()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        // A queue that comes ends the pause, but two tries are a second apart.
        let tried = own_tries.tried.unwrap();
        own_tries.hurry(tried + Duration::from_millis(10));
        assert_eq!(own_tries.next, tried + MORE_PAUSE);
        own_tries.hurry(at(3600));
        assert_eq!(own_tries.next, tried + MORE_PAUSE);
        // The server may be another one.
        own_tries.tried(own_tries.next, false);
        assert_eq!(own_tries.pause, MORE_PAUSE_MAX);
        own_tries.forget(at(3600));
        assert_eq!(own_tries.pause, MORE_PAUSE);
        assert!(own_tries.next < at(3600));
    }

    #[test]
    fn a_connection_that_is_lost_at_once_is_a_failure() {
        let start = Instant::now();
        let mut own_tries = OwnTries { next: start, ..OwnTries::new() };
        own_tries.tried(start, true);
        assert_eq!(own_tries.next, start);
        // It replied: there is another one, a second after the last.
        own_tries.lost(start, true);
        assert_eq!(own_tries.next, start + MORE_PAUSE);
        let now = own_tries.next;
        own_tries.tried(now, true);
        own_tries.lost(now, false);
        own_tries.lost(now, false);
        assert_eq!((own_tries.next, own_tries.pause), (now + MORE_PAUSE, MORE_PAUSE * 2));
    }

    #[test]
    fn other_disks_find_a_server_that_is_back_before_workers_ask_for_more() {
        let start = Instant::now();
        let mut own_tries = OwnTries { next: start, ..OwnTries::new() };
        own_tries.begin_again(start);
        assert_eq!(own_tries.next, start + OTHERS_FIRST);
        own_tries.hurry(start);
        assert_eq!(own_tries.next, start + OTHERS_FIRST);
        own_tries.lost(start, true);
        assert_eq!(own_tries.next, start + OTHERS_FIRST);
    }

    #[test]
    fn one_worker_after_the_other_is_asked_for_its_connection() {
        let start = Instant::now();
        let ports = [0, 1].map(|_| Arc::new(Port::new().unwrap()));
        let mut asked = Asked { having: ports.to_vec(), ..Asked::new() };
        let counts = || {
            ports.each_ref().map(|port| {
                let mut messages = Vec::new();
                port.take(&mut messages);
                messages.len()
            })
        };
        // Nobody needs one.
        asked.replace_common(start);
        assert_eq!(counts(), [0, 0]);
        let port = Arc::new(Port::new().unwrap());
        asked.common = Some(Ask { port, until: None, tried: false });
        asked.replace_common(start);
        asked.replace_common(start + HAND_OVER / 2);
        assert_eq!(counts(), [1, 0]);
        asked.replace_common(start + HAND_OVER);
        assert_eq!(counts(), [0, 1]);
    }
}
