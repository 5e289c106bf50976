//! Connecting: sockets and handshakes, on threads that may wait.
//!
//! When a disk is opened, a control thread makes the first connection. Later ones are made by the
//! disk's thread `vshunt-nbd`, for connections of workers that ask. It ends with the disk.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ::nbd::{HandshakeError, Settings, greet};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::sync::Locked;

use super::port::{Ask, Connected, Message, Port};
use super::stream::{Stream, Timed};
use super::tls::{Tls, carry};

/// Longest time of one try: connecting and the handshake.
pub(super) const TRY: Duration = Duration::from_secs(10);
/// Pause between two tries: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Most log lines about a server in a time.
const LOG_LINES: u32 = 20;
const LOG_WINDOW: Duration = Duration::from_secs(60);
/// Pause while the queue of a UNIX socket is full.
const FULL: Duration = Duration::from_millis(20);
/// A TCP connection counts as lost when sent data is not acknowledged for so long.
const TCP_TIMEOUT_MS: u32 = 30_000;
/// An idle TCP connection is probed after this time, and then as often; it is lost after so many
/// probes without an answer.
const TCP_IDLE: Duration = Duration::from_secs(10);
const TCP_PROBES: u32 = 3;

/// Where a server is, after its name was looked up.
pub(super) enum Place {
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
}

/// What the disk needs, whatever server answers.
pub(super) struct Needs {
    pub(super) readonly: bool,
    /// What was agreed on when the disk was opened.
    pub(super) settings: Settings,
}

/// Makes connections to one export.
pub(super) struct Connector {
    /// The disk's name, and its URI: for log lines.
    pub(super) name: String,
    pub(super) uri: String,
    pub(super) export: String,
    pub(super) place: Place,
    /// With TLS.
    tls: Option<Tls>,
    pub(super) reconnect_ms: u64,
    /// Guards what is asked for. Held for a look or a push, never while connecting.
    state: Mutex<Asked>,
    /// Announces a change of `state`.
    changed: Condvar,
    /// For connections that have no eventfd of their own.
    idle: Arc<Port>,
}

#[derive(Default)]
struct Asked {
    asks: Vec<Ask>,
    /// The connection that was made when the disk was opened.
    first: Option<Connected>,
    stopped: bool,
}

/// When the server is tried.
struct Tries {
    next: Instant,
    /// The pause after the next failure.
    pause: Duration,
    /// When the last connection was made.
    made: Option<Instant>,
}

impl Tries {
    fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Counts a lost connection. One that never replied counts as a failure of the server, but
    /// those that are lost together count once. A server that ends each connection is not tried
    /// without a pause, either.
    fn lost(&mut self, now: Instant, replied: bool) {
        if replied {
            self.pause = PAUSE;
        } else if self.next <= now {
            self.failed(now);
        }
        self.next = self.made.map_or(self.next, |made| self.next.max(made + PAUSE));
    }
}

/// What the log says about the server.
struct Log {
    /// The last trouble. None: there is none.
    told: Option<String>,
    /// Start of the current [`LOG_WINDOW`], and the lines in it.
    window: Instant,
    lines: u32,
}

impl Log {
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

impl Connector {
    pub(super) fn new(
        name: String,
        uri: String,
        export: String,
        place: Place,
        tls: Option<Tls>,
        reconnect_ms: u64,
    ) -> io::Result<Self> {
        let idle = Arc::new(Port::new()?);
        let (state, changed) = Default::default();
        Ok(Self { name, uri, export, place, tls, reconnect_ms, state, changed, idle })
    }

    /// Starts the thread. `first`: the connection that the first asker gets.
    ///
    /// # Errors
    /// The system has no thread.
    pub(super) fn start(self: &Arc<Self>, needs: Needs, first: Connected) -> io::Result<()> {
        self.state.locked().first = Some(first);
        let connector = self.clone();
        let thread = std::thread::Builder::new().name("vshunt-nbd".to_owned());
        sandbox::spawn(ThreadKind::Remote, thread, move || connector.run(&needs)).map(drop)
    }

    /// Ends the thread, after the try that it is in.
    pub(super) fn stop(&self) {
        self.state.locked().stopped = true;
        self.changed.notify_all();
    }

    /// Returns until when the first requests of a worker wait for its connection.
    pub(super) fn first_until(&self) -> Instant {
        Instant::now() + TRY.max(Duration::from_millis(self.reconnect_ms))
    }

    pub(super) fn no_port(&self) -> Arc<Port> {
        self.idle.clone()
    }

    /// Asks for a connection. Called by workers: it does not wait.
    pub(super) fn ask(&self, ask: Ask) {
        let mut state = self.state.locked();
        match state.first.take() {
            Some(first) if ask.lost.is_none() => {
                drop(state);
                ask.port.send(Message::Connected(first));
            }
            _ => {
                state.asks.push(ask);
                drop(state);
                self.changed.notify_all();
            }
        }
    }

    /// Makes the connections that are asked for, until the disk is closed.
    fn run(&self, needs: &Needs) {
        let mut tries = Tries { next: Instant::now(), pause: PAUSE, made: None };
        let mut log = Log { told: None, window: Instant::now(), lines: 0 };
        let mut state = self.state.locked();
        loop {
            if state.stopped {
                return;
            }
            let now = Instant::now();
            // Also of those that are gone: a front end may leave because its requests failed.
            let lost: Vec<_> =
                state.asks.iter_mut().filter_map(|ask| Some((ask.lost.take()?, ask.until))).collect();
            if !lost.is_empty() {
                drop(state);
                for (lost, until) in lost {
                    tries.lost(now, lost.replied);
                    self.tell(
                        &mut log,
                        &format!("the connection to {} is lost: {}", self.uri, lost.why),
                        until,
                    );
                }
                state = self.state.locked();
                continue;
            }
            state.asks.retain(|ask| !ask.port.gone.is_set());
            for ask in &mut state.asks {
                if ask.until.is_some_and(|until| until <= now) {
                    ask.until = None;
                    ask.port.send(Message::Expired);
                }
            }
            let until = state.asks.iter().filter_map(|ask| ask.until).min();
            if state.asks.is_empty() || tries.next > now {
                let limit = match state.asks.is_empty() {
                    true => Duration::from_secs(3600),
                    false => until.map_or(tries.next, |until| until.min(tries.next)) - now,
                };
                let waited = self.changed.wait_timeout(state, limit);
                state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
                continue;
            }
            drop(state);
            let end = now + TRY;
            let tried = self.connect(until.map_or(end, |until| until.min(end)));
            let tried = tried.and_then(|connected| needs.check(&connected.settings).map(|()| connected));
            match tried {
                Ok(connected) => {
                    tries.made = Some(Instant::now());
                    if log.is_well() {
                        tracing::warn!("disk {}: {} is connected again", self.name, self.uri);
                    }
                    state = self.state.locked();
                    if let Some(at) = state.asks.iter().position(|ask| !ask.port.gone.is_set()) {
                        let ask = state.asks.remove(at);
                        ask.port.send(Message::Connected(connected));
                    }
                }
                Err(why) => {
                    tries.failed(Instant::now());
                    self.tell(&mut log, &format!("{} {why}", self.uri), until);
                    state = self.state.locked();
                }
            }
        }
    }

    /// Writes a log line about a server that cannot be used. `until`: when requests that wait for
    /// it will fail.
    fn tell(&self, log: &mut Log, trouble: &str, until: Option<Instant>) {
        let waits = match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None if self.reconnect_ms == 0 => {
                "requests fail until it is back (reconnect-delay=60 would let them wait for 60 s)".into()
            }
            None => "requests fail until it is back".into(),
            Some(left) => {
                format!("requests wait for it, for {} s at most", left.as_millis().div_ceil(1000))
            }
        };
        match log.is_new(trouble) {
            true => tracing::warn!("disk {}: {trouble}; {waits}", self.name),
            false => tracing::debug!("disk {}: {trouble}", self.name),
        }
    }

    /// Connects, and does the handshake. Ends at `until` at the latest.
    ///
    /// # Errors
    /// A clause about the server.
    pub(super) fn connect(&self, until: Instant) -> Result<Connected, String> {
        let refused = |e: io::Error| match e.kind() {
            io::ErrorKind::ConnectionRefused => {
                "refuses the connection; does the server run, and listen there?".to_owned()
            }
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "does not answer in time".to_owned(),
            io::ErrorKind::NotFound => "names a socket that does not exist; does the server run?".to_owned(),
            _ => format!("cannot be connected: {e}"),
        };
        let mut stream = match &self.place {
            Place::Tcp(addresses) => connect_tcp(addresses, until).map(Stream::Tcp),
            Place::Unix(path) => connect_unix(path, until).map(Stream::Unix),
        }
        .map_err(refused)?;
        let mut timed = Timed { stream: &mut stream, until };
        let said = |e: HandshakeError| e.to_string();
        let greeted = greet(&mut timed).map_err(said)?;
        let Some(tls) = &self.tls else {
            let settings = greeted.negotiate(&mut timed, &self.export).map_err(said)?;
            stream.limit(None).map_err(refused)?;
            return Ok(Connected { socket: stream.into_fd(), settings, ended: None });
        };
        greeted.start_tls(&mut timed).map_err(said)?;
        let mut secured = tls.start(&mut timed)?;
        let mut inside = rustls::Stream::new(&mut secured, &mut timed);
        let settings = greeted.negotiate(&mut inside, &self.export);
        let settings = settings.map_err(|e| format!("{e}{}", tls.remedy(&e)))?;
        let carried = carry(secured, stream).map_err(|e| format!("cannot be used with TLS: {e}"))?;
        Ok(Connected { socket: carried.0.into(), settings, ended: Some(carried.1) })
    }
}

impl Needs {
    /// Compares what a server offers now with what the disk was opened with.
    fn check(&self, now: &Settings) -> Result<(), String> {
        use ::nbd::transmission_flag::{
            CAN_MULTI_CONN, READ_ONLY, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
        };
        let then = &self.settings;
        // A larger one may be another disk, too.
        if now.size != then.size {
            return Err(format!(
                "has {} bytes now and had {}: remove the disk and add it again if that is right",
                now.size, then.size
            ));
        }
        if !self.readonly && now.has(READ_ONLY) {
            return Err("refuses writes now".to_owned());
        }
        let lacks = |flag| then.has(flag) && !now.has(flag);
        // Without CAN_MULTI_CONN a flush need not cover what other connections have written.
        if [CAN_MULTI_CONN, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES].into_iter().any(lacks)
            || now.blocks.minimum > then.blocks.minimum
            || (then.allocation.is_some() && now.allocation.is_none())
        {
            return Err("can do less than when the disk was opened".to_owned());
        }
        Ok(())
    }
}

fn connect_tcp(addresses: &[SocketAddr], until: Instant) -> io::Result<TcpStream> {
    let mut failed = io::ErrorKind::TimedOut.into();
    for (i, address) in addresses.iter().enumerate() {
        // One that does not answer leaves time for the others.
        let left = until.saturating_duration_since(Instant::now()) / (addresses.len() - i) as u32;
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, TCP_IDLE)?;
                sockopt::set_tcp_keepintvl(&stream, TCP_IDLE)?;
                sockopt::set_tcp_keepcnt(&stream, TCP_PROBES)?;
                sockopt::set_tcp_user_timeout(&stream, TCP_TIMEOUT_MS)?;
                return Ok(stream);
            }
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

/// Connects to a UNIX socket. connect(2) would wait without a limit while its queue is full.
fn connect_unix(path: &Path, until: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(e) if e == rustix::io::Errno::AGAIN && Instant::now() < until => std::thread::sleep(FULL),
            Err(e) => return Err(e.into()),
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
        let new = || Tries { next: start, pause: PAUSE, made: None };
        // One that replied: at once, unless it was made a moment ago.
        let mut tries = Tries { made: Some(start), ..new() };
        tries.lost(at(1000), true);
        assert!(tries.next <= at(1000));
        tries.lost(at(40), true);
        assert_eq!(tries.next, at(100));
        // Those that never reply: longer and longer. Two that are lost together count once.
        let mut tries = new();
        let pauses: Vec<_> = (0..7)
            .map(|_| {
                let now = tries.next;
                tries.lost(now, false);
                tries.lost(now, false);
                (tries.next - now).as_millis()
            })
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 2000, 2000]);
    }
}
