//! The thread of an export: accepts connections, does their handshakes, starts their queues, and
//! takes the queues back when connections end.
//!
//! It waits in poll(2) only, until something happens or a time limit expires. Handshakes have a
//! number and a time limit. When there are too many, the oldest one is given up: so clients that
//! say nothing keep others out for an instant only.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use vshunt_engine::{Observer, QueueSet};
use vshunt_vhost_user::rate::Rate;

use crate::listen::Listening;
use crate::queue::ConnectionQueue;
use crate::shake::{Outcome, SHAKE_LIMIT, Shake, Shaken, describe};
use crate::shared::{Ended, Shared};
use crate::tls::{Carrier, shut_down};

/// Most handshakes at a time. When one more client connects, the oldest handshake is given up.
const SHAKES_MAX: usize = 64;
/// Most connections that are accepted before others are looked at.
const ACCEPTS_MAX: u32 = 32;
/// How long nothing is accepted after the system had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the queues have time to end by themselves when the export ends.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Log lines and events that clients cause: at once, and each second after that.
const LINES: Rate = Rate::new(32, 1);
const EVENTS: Rate = Rate::new(64, 8);
/// A peer that does not answer for this time is gone: seconds until the first question, and
/// between two.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(10), 6);

/// Serves an export until it ends.
pub(crate) fn run(shared: &Arc<Shared>, listening: Listening, queues: &QueueSet, observer: &dyn Observer) {
    let slots = (0..queues.len()).map(|_| None).collect();
    let mut server = Server {
        shared,
        queues,
        observer,
        slots,
        shakes: Vec::new(),
        lines: LINES,
        events: EVENTS,
        told: false,
        paused_until: None,
    };
    while !shared.is_stopping() {
        server.tell_connected(Instant::now());
        server.wait(listening.fd.as_fd());
        // Before the handshakes, which may wait for these queues.
        server.take_back();
        server.proceed();
        server.accept(listening.fd.as_fd());
        server.expire();
    }
    // The file is removed before the listener is closed, see `SocketFile`.
    let Listening { file, fd } = listening;
    drop(file);
    drop(fd);
    server.end();
}

/// The connection of a queue.
struct Connection {
    peer: String,
    /// What the queue reads and writes.
    socket: Arc<OwnedFd>,
    /// With TLS. The queue is not free before its thread has ended.
    carrier: Option<Carrier>,
    /// The queue has ended.
    over: bool,
}

struct Server<'a> {
    shared: &'a Arc<Shared>,
    queues: &'a QueueSet,
    observer: &'a dyn Observer,
    /// For each queue: the connection that it serves.
    slots: Vec<Option<Connection>>,
    shakes: Vec<Shake>,
    lines: Rate,
    events: Rate,
    /// What the observer knows.
    told: bool,
    /// When connections are accepted again.
    paused_until: Option<Instant>,
}

impl Server<'_> {
    fn name(&self) -> &str {
        &self.shared.name
    }

    /// Waits until there is something to do.
    fn wait(&self, listener: BorrowedFd<'_>) {
        let now = Instant::now();
        let mut until = self.shakes.iter().map(|shake| shake.until).min();
        let mut sooner = |at: Option<Instant>| until = until.into_iter().chain(at).min();
        sooner(self.paused_until);
        if self.told != self.is_connected() {
            sooner(Some(self.events.next(now)));
        }
        let mut fds = vec![PollFd::new(&*self.shared.eventfd, PollFlags::IN)];
        if self.paused_until.is_none() {
            fds.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
        }
        // The others continue when a queue is free.
        for shake in self.shakes.iter().filter(|shake| !shake.held) {
            let events = if shake.waits_for_room() { PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::from_borrowed_fd(shake.fd(), events));
        }
        let limit = until.map(|at| at.saturating_duration_since(now));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // An error is like a wake-up: all is looked at then.
        let _ = poll(&mut fds, limit.as_ref());
        self.shared.eventfd.take();
    }

    fn is_connected(&self) -> bool {
        self.shared.connections.load(SeqCst) > 0
    }

    fn tell_connected(&mut self, now: Instant) {
        let connected = self.is_connected();
        if connected != self.told && self.events.take(now) {
            self.told = connected;
            self.observer.connected(connected);
        }
    }

    /// Accepts connections that wait.
    fn accept(&mut self, listener: BorrowedFd<'_>) {
        if self.paused_until.is_some_and(|at| at > Instant::now()) {
            return;
        }
        self.paused_until = None;
        for _ in 0..ACCEPTS_MAX {
            // Blocking sockets: an io_uring waits for them itself.
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) => self.begin(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(e) => {
                    self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    if self.lines.take(Instant::now()) {
                        let e = io::Error::from(e);
                        tracing::warn!(
                            "export {}: no connection can be accepted: {e}; if there are too many open files, raise their \
                             limit (ulimit -n, LimitNOFILE=)",
                            self.name()
                        );
                    }
                    return;
                }
            }
        }
    }

    fn begin(&mut self, socket: OwnedFd) {
        let peer = describe(&socket);
        // They fail on a UNIX socket.
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let (idle, every, count) = KEEPALIVE;
        if sockopt::set_tcp_keepidle(&socket, idle).is_ok() {
            let _ = sockopt::set_tcp_keepintvl(&socket, every);
            let _ = sockopt::set_tcp_keepcnt(&socket, count);
            let _ = sockopt::set_socket_keepalive(&socket, true);
        }
        if self.shakes.len() >= SHAKES_MAX {
            // Those that have agreed have a queue as soon as the client reads.
            let oldest = self.shakes.remove(0);
            self.note(&oldest.peer, "is disconnected: more clients wait for their handshake than can be");
        }
        self.shakes.push(Shake::new(socket, peer, self.shared.tls.clone(), Instant::now()));
        let last = self.shakes.len() - 1;
        self.proceed_with(last);
    }

    /// Continues with all handshakes.
    fn proceed(&mut self) {
        let mut at = 0;
        while at < self.shakes.len() {
            if !self.proceed_with(at) {
                at += 1;
            }
        }
    }

    /// Continues with a handshake. Returns whether it was removed from the list.
    fn proceed_with(&mut self, at: usize) -> bool {
        let claimed = self.shakes.iter().filter(|shake| shake.has_agreed()).count();
        let free = self.slots.iter().filter(|slot| slot.is_none()).count();
        let full = free <= claimed;
        // A client that connects again at once, or the next of its kind, finds the queue of the
        // connection before it, which may still have to make its writes stable.
        let held = full && self.one_leaves();
        let Some(shake) = self.shakes.get_mut(at) else { return false };
        shake.held = held && !shake.has_agreed();
        if shake.held {
            return false;
        }
        let refusal = full.then(|| {
            format!("the export has {} clients, which is its most (queues=N allows more)", self.slots.len())
        });
        let offer = self.shared.offer(refusal);
        let Some(shake) = self.shakes.get_mut(at) else { return false };
        match shake.proceed(&offer) {
            Outcome::Waits => false,
            Outcome::Close(why) => {
                let shake = self.shakes.remove(at);
                match why {
                    Some(why) => self.note(&shake.peer, &why),
                    None if shake.was_refused() => {
                        self.note(&shake.peer, "is refused: all queues have a client");
                    }
                    None => {}
                }
                true
            }
            Outcome::Ready => {
                let shake = self.shakes.remove(at);
                if let Some(shaken) = shake.shaken() {
                    self.start(shaken);
                }
                true
            }
        }
    }

    /// Returns whether a queue will be free soon.
    fn one_leaves(&self) -> bool {
        self.slots.iter().flatten().any(|connection| connection.over) || self.shared.one_leaves()
    }

    /// Starts the queue of a connection.
    fn start(&mut self, shaken: Shaken) {
        let Shaken { socket, peer, secured, agreed, rest } = shaken;
        let Some((index, slot)) = (0u16..).zip(&mut self.slots).find(|(_, slot)| slot.is_none()) else {
            return;
        };
        let carried = match secured {
            Some(secured) => {
                let (name, eventfd) = (&self.shared.name, self.shared.eventfd.clone());
                Carrier::start(name, eventfd, socket, secured).map(|(fd, own)| (fd, Some(own)))
            }
            None => Ok((socket, None)),
        };
        let (socket, carrier) = match carried {
            Ok((socket, carrier)) => (Arc::new(socket), carrier),
            Err(e) => {
                return self.note(&peer, &format!("is disconnected: there is no thread for its TLS ({e})"));
            }
        };
        let stats = self.queues.stats(index).clone();
        let queue = ConnectionQueue::new(self.shared.clone(), index, socket.clone(), &agreed, &rest, stats);
        match queue {
            Ok(queue) => {
                tracing::debug!("export {}: {peer} is connected to queue {index}", self.shared.name);
                *slot = Some(Connection { peer, socket: socket.clone(), carrier, over: false });
                self.shared.connected(index, socket);
                let begin = Instant::now();
                self.queues.start(index, Box::new(queue));
                self.resume_shakes(begin);
            }
            Err(e) => self.note(&peer, &format!("is disconnected: there is no memory for its queue ({e})")),
        }
    }

    /// Takes back the queues of connections that have ended.
    fn take_back(&mut self) {
        for Ended { queue, why, flush_errno } in self.shared.take_ended() {
            let peer =
                self.slots.get(usize::from(queue)).and_then(Option::as_ref).map(|slot| slot.peer.as_str());
            let of = format!("{} (queue {queue})", peer.unwrap_or("a client"));
            if let Some(errno) = flush_errno {
                // Clients cannot keep it out of the log: only the storage causes it.
                let (name, e) = (self.name(), io::Error::from_raw_os_error(errno));
                tracing::error!("export {name}: {of} has ended, and its last writes may be lost: {e}");
            }
            match why {
                Some(why) => self.note(&of, &why),
                None => tracing::debug!("export {}: {of} has ended", self.name()),
            }
            // It has nothing left to do, so it does not wait for the disk.
            let begin = Instant::now();
            drop(self.queues.stop(queue));
            self.resume_shakes(begin);
            self.shared.disconnected(queue);
            if let Some(Some(connection)) = self.slots.get_mut(usize::from(queue)) {
                connection.over = true;
            }
        }
        let mut broken = Vec::new();
        for slot in &mut self.slots {
            let Some(connection) = slot.as_ref().filter(|connection| connection.over) else { continue };
            let Some(carrier) = &connection.carrier else {
                *slot = None;
                continue;
            };
            let Some(end) = carrier.end() else { continue };
            if end.violation {
                broken.push((connection.peer.clone(), format!("is disconnected: {}", end.why)));
            }
            *slot = None;
        }
        for (peer, why) in broken {
            self.note(&peer, &why);
        }
    }

    /// Lets handshakes have the time that a call at `begin` took: it waits while other queues of
    /// the export are drained.
    fn resume_shakes(&mut self, begin: Instant) {
        let waited = begin.elapsed();
        self.shakes.iter_mut().for_each(|shake| shake.until += waited);
    }

    /// Gives up handshakes that take too long.
    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(at) = self.shakes.iter().position(|shake| shake.until <= now) {
            let shake = self.shakes.remove(at);
            let limit = SHAKE_LIMIT.as_secs();
            let why = match shake.held {
                true => {
                    format!("is refused: no queue became free within {limit} s, though clients are leaving")
                }
                false => format!("is disconnected: its handshake took more than {limit} s"),
            };
            self.note(&shake.peer, &why);
        }
    }

    fn note(&mut self, peer: &str, what: &str) {
        if self.lines.take(Instant::now()) {
            tracing::warn!("export {}: {peer} {what}", self.name());
        }
    }

    /// Disconnects all clients, and drains their queues.
    fn end(mut self) {
        self.shakes.clear();
        self.slots.iter().flatten().for_each(|connection| shut_down(&connection.socket));
        // The queues end by themselves, after they have made their writes stable. One that waits
        // for its limits is not waited for.
        let until = Instant::now() + END_LIMIT;
        while self.slots.iter().flatten().any(|connection| !connection.over) && Instant::now() < until {
            let limit = until.saturating_duration_since(Instant::now());
            let _ = poll(
                &mut [PollFd::new(&*self.shared.eventfd, PollFlags::IN)],
                Timespec::try_from(limit).ok().as_ref(),
            );
            self.shared.eventfd.take();
            self.take_back();
        }
        drop(self.queues.stop_all());
        self.slots.drain(..).flatten().filter_map(|connection| connection.carrier).for_each(Carrier::stop);
        self.shared.connections.store(0, SeqCst);
        self.tell_connected(Instant::now());
    }
}
