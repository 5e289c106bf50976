//! The QMP server: accepts clients, runs their commands, and sends them events.
//!
//! | thread | task |
//! | --- | --- |
//! | `ctl-accept` | accepts clients |
//! | `ctl-N` | one for each client: reads, and runs commands one after the other |
//! | `ctl-N-out` | one for each client: writes |
//! | any thread | [`Server::broadcast`], which formats nothing, waits for no client, and makes no blocking call |
//!
//! A client that does not read fills its own [`Outbox`]. If that is full, the next command waits,
//! which blocks only the reader of that client, and an event disconnects it.
//!
//! A client counts until both of its threads have ended. If there are too many, a new client
//! replaces the one that has been waited for longest: see [`Clients::make_room`].
//!
//! Lock: `clients`, held only for accesses to the map, and to outboxes without waiting for them.

use std::collections::HashMap;
use std::io::{ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

use super::commands::{self, fdset};
use super::context::Context;
use super::framing::{Framer, QmpFrame};
use super::message::{self, QmpError, Request};

mod outbox;

use outbox::{Closed, Line, Outbox};

/// The most clients at the same time. Each needs two threads, and a control socket has few clients.
const CLIENTS_MAX: usize = 64;

/// How long a client has to be waited for until a new one may replace it.
const REPLACEABLE_AFTER: Duration = Duration::from_secs(1);

/// How long a new client waits for the end of the threads of the one that it replaces.
const REPLACING_TIME: Duration = Duration::from_secs(1);

/// The time between two lines of the log about clients that were replaced.
const LOG_PAUSE: Duration = Duration::from_secs(30);

/// The time limit for sending the last replies and events when the daemon ends.
const FLUSH_TIME: Duration = Duration::from_millis(500);

struct Client {
    outbox: Outbox,
    /// Whether the client has negotiated. Other clients get no events.
    negotiated: AtomicBool,
}

#[derive(Default)]
struct Clients {
    map: HashMap<u64, Arc<Client>>,
    next: u64,
    /// Whether new clients are refused.
    closed: bool,
    /// Clients that were replaced since the last line of the log about it.
    replaced: u64,
    /// The time of that line.
    replaced_logged: Option<Instant>,
}

impl Clients {
    /// Closes the connection of the client that has been waited for longest, for a second at least:
    /// because it has not negotiated, has sent a part of a command, or does not read its answers.
    /// Clients whose command runs or who wait for events stay. Returns whether there was one.
    fn make_room(&mut self) -> bool {
        let waited_for = |client: &Client| {
            client.outbox.waited_for_since().filter(|since| since.elapsed() >= REPLACEABLE_AFTER)
        };
        let mut idle: Vec<_> =
            self.map.iter().filter_map(|(id, c)| waited_for(c).map(|since| (since, *id, c))).collect();
        idle.sort_unstable_by_key(|(since, id, _)| (*since, *id));
        let dismissed = idle.into_iter().any(|(since, _, client)| {
            let why = format!(
                "too many control clients, and this one did nothing for {} s; send whole commands, and read the answers",
                since.elapsed().as_secs()
            );
            client.outbox.dismiss(since, &message::reply(None, Err(QmpError::generic(why))))
        });
        self.replaced += u64::from(dismissed);
        if dismissed && self.replaced_logged.is_none_or(|at| at.elapsed() >= LOG_PAUSE) {
            tracing::warn!(
                "too many control clients; the limit is {CLIENTS_MAX}, and {} that did nothing were replaced by others",
                std::mem::take(&mut self.replaced)
            );
            self.replaced_logged = Some(Instant::now());
        }
        dismissed
    }
}

/// The place of a client among all. Both threads of the client have it, and the last one frees it.
struct Place {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.lock().map.remove(&self.id);
        self.shared.gone.notify_all();
    }
}

struct Shared {
    context: Context,
    clients: Mutex<Clients>,
    /// Signals that the threads of a client have ended.
    gone: Condvar,
    /// An eventfd that is readable when the accept loop has to end.
    wake: rustix::fd::OwnedFd,
}

/// A server. Its threads end with [`Server::stop`].
#[derive(Clone)]
pub(crate) struct Server {
    shared: Arc<Shared>,
}

impl Server {
    /// Makes a server without a listener, so that events can be bound to it before clients connect.
    pub(crate) fn new(context: Context) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("cannot make an eventfd", e.into()))?;
        let shared = Shared { context, clients: Mutex::default(), gone: Condvar::new(), wake };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Starts to accept clients.
    pub(crate) fn listen(&self, listener: UnixListener) -> Result<()> {
        let failed = |e| Error::io("cannot start the control server", e);
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::clone(&self.shared);
        thread::Builder::new()
            .name("ctl-accept".into())
            .spawn(move || accept(&shared, &listener))
            .map(drop)
            .map_err(failed)
    }

    /// Sends an event to every client that has negotiated. Never waits.
    pub(crate) fn broadcast(&self, line: String) {
        let line: Line = line.into();
        let clients = self.shared.lock();
        for (id, client) in clients.map.iter().filter(|(_, c)| c.negotiated.load(Ordering::Acquire)) {
            if !client.outbox.event(&line) {
                tracing::warn!(client = id, "control client does not read; its connection is closed");
                client.outbox.close();
            }
        }
    }

    /// Takes no more commands, sends queued messages for at most [`FLUSH_TIME`], and closes all
    /// connections.
    pub(crate) fn stop(&self) {
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let mut clients = self.shared.lock();
        clients.closed = true;
        // Readers see the end of the stream. Writers end once their reader has ended and no message
        // is left.
        for client in clients.map.values() {
            let _ = client.outbox.stream().shutdown(Shutdown::Read);
        }
        let waited = self.shared.gone.wait_timeout_while(clients, FLUSH_TIME, |c| !c.map.is_empty());
        let (clients, _) = waited.unwrap_or_else(PoisonError::into_inner);
        clients.map.values().for_each(|client| client.outbox.close());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The map is consistent between any two statements, so it stays valid after a panic.
        self.clients.locked()
    }

    /// Gives a client a place. None if there is none.
    fn enter(self: &Arc<Self>, client: &Arc<Client>) -> Option<Place> {
        let mut clients = self.lock();
        let full = |c: &mut Clients| !c.closed && c.map.len() >= CLIENTS_MAX;
        if full(&mut clients) && clients.make_room() {
            let waited = self.gone.wait_timeout_while(clients, REPLACING_TIME, full);
            clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if clients.closed || clients.map.len() >= CLIENTS_MAX {
            return None;
        }
        let id = clients.next;
        clients.next += 1;
        clients.map.insert(id, Arc::clone(client));
        Some(Place { shared: Arc::clone(self), id })
    }
}

/// Accepts clients until [`Server::stop`].
///
/// One descriptor is kept in reserve. When all others are in use, a client can still connect, for
/// example to free a worker.
fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    let mut reserve = None;
    loop {
        if reserve.is_none() {
            reserve = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("control socket is closed: {e}");
                return;
            }
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => start(shared, stream),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) if is_out_of_descriptors(&e) && reserve.take().is_some() => {
                if let Ok((stream, _)) = listener.accept() {
                    start(shared, stream);
                }
            }
            Err(e) => {
                // The connection stays pending. The pause keeps this loop from spinning.
                tracing::warn!("cannot accept a control client: {e}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Returns whether the process or the system has no more descriptors.
fn is_out_of_descriptors(e: &std::io::Error) -> bool {
    matches!(Errno::from_io_error(e), Some(Errno::MFILE | Errno::NFILE))
}

fn start(shared: &Arc<Shared>, stream: UnixStream) {
    if let Err(e) = try_start(shared, stream) {
        tracing::warn!("cannot serve a control client: {e}");
    }
}

fn try_start(shared: &Arc<Shared>, stream: UnixStream) -> std::io::Result<()> {
    let client = Arc::new(Client { outbox: Outbox::new(stream)?, negotiated: AtomicBool::new(false) });
    let Some(place) = shared.enter(&client) else {
        let why = format!("too many control clients; the limit is {CLIENTS_MAX}");
        let line = message::reply(None, Err(QmpError::generic(why)));
        return client.outbox.stream().write_all(line.as_bytes());
    };
    let (id, place) = (place.id, Arc::new(place));
    let writer = {
        let (client, place) = (Arc::clone(&client), Arc::clone(&place));
        move || client.outbox.write(place.id)
    };
    thread::Builder::new().name(format!("ctl-{id}-out")).spawn(writer)?;
    let reader = {
        let client = Arc::clone(&client);
        move || {
            let context = &place.shared.context;
            context.fdsets.client_connected();
            Session { context, client: &client, passed: Passed::default() }.read();
            client.outbox.complete();
            context.fdsets.client_disconnected(&context.daemon);
        }
    };
    let started = thread::Builder::new().name(format!("ctl-{id}")).spawn(reader);
    started.map(drop).inspect_err(|_| client.outbox.close())
}

/// The state of the reader thread of one client.
struct Session<'a> {
    context: &'a Context,
    client: &'a Client,
    passed: Passed,
}

/// The descriptor that a client sent with its last bytes, for `add-fd`.
///
/// A descriptor is sent with a byte of the stream. It belongs to the first `add-fd` that ends in
/// the same read or, if a message is incomplete after that read, to that message. In all other
/// cases it is closed. It also is closed when the next one arrives.
///
/// Only a descriptor of a file is kept (see [`is_file`]). A socket could be the client's end of the
/// connection. The daemon would then hold that end open and never see the end of the stream, and
/// the connection would count as a client for ever.
#[derive(Default)]
struct Passed {
    fd: Option<OwnedFd>,
    /// Whether it arrived with the current read.
    fresh: bool,
}

impl Passed {
    /// Takes the descriptor that arrived with a read.
    fn arrived(&mut self, fd: Option<OwnedFd>) {
        let fd = fd.filter(is_file);
        self.fresh = fd.is_some();
        if fd.is_some() {
            self.fd = fd;
        }
    }

    /// Returns the descriptor of a message that has ended. `wants`: the message is an `add-fd`.
    fn take_for_message(&mut self, wants: bool) -> Option<OwnedFd> {
        let fd = self.fd.take_if(|_| wants || !self.fresh);
        fd.filter(|_| wants)
    }

    /// Ends a read whose bytes are all parsed. `unfinished`: the last message is incomplete.
    fn end_read(&mut self, unfinished: bool) {
        if !unfinished {
            self.fd = None;
        }
    }
}

/// Returns whether a descriptor has a path in a file system: a file, a directory, a device or a
/// FIFO. Sockets, io_uring instances and others have none. Sends no request to the server of a FUSE
/// mount.
fn is_file(fd: &OwnedFd) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(fd, "", flags, StatxFlags::TYPE).is_ok_and(|seen| {
        use FileType::{BlockDevice, CharacterDevice, Directory, Fifo, RegularFile};
        let kind = FileType::from_raw_mode(seen.stx_mode.into());
        matches!(kind, RegularFile | Directory | BlockDevice | CharacterDevice | Fifo)
    })
}

/// Reads some bytes, and the descriptor that was sent with them. If a message has more than one
/// descriptor, the others are closed, by the kernel or here.
fn receive(stream: &UnixStream, bytes: &mut [u8]) -> rustix::io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let first = fds.by_ref().flatten().next();
    fds.for_each(drop);
    Ok((got.bytes, first))
}

impl Session<'_> {
    /// Reads and runs commands until the connection ends.
    fn read(&mut self) {
        let outbox = &self.client.outbox;
        let mut framer = Framer::new();
        let mut bytes = [0; 4096];
        let mut state = outbox.answer(message::greeting());
        while state.is_ok() {
            outbox.expect(framer.is_in_message() || !self.negotiated());
            let count = match receive(outbox.stream(), &mut bytes) {
                Ok((0, _)) => return,
                Ok((count, fd)) => {
                    self.passed.arrived(fd);
                    count
                }
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            state = outbox.received();
            framer.push(&bytes[..count], |frame| {
                if state.is_ok() {
                    state = self.serve(frame);
                }
            });
            self.passed.end_read(framer.is_in_message());
        }
    }

    /// Runs a command. Waits before that while too many answers are unread, so a client that does
    /// not read its answers delays only itself.
    fn serve(&mut self, frame: QmpFrame) -> Result<(), Closed> {
        self.client.outbox.wait_for_room()?;
        let answer = self.answer(frame);
        self.client.outbox.answer(answer)
    }

    fn negotiated(&self) -> bool {
        self.client.negotiated.load(Ordering::Acquire)
    }

    fn answer(&mut self, frame: QmpFrame) -> String {
        let request = match frame {
            QmpFrame::Message(text) => Request::parse(&text),
            QmpFrame::Error(why) => Err((None, QmpError::generic(why))),
        };
        let fd = self.passed.take_for_message(request.as_ref().is_ok_and(|r| r.command == fdset::ADD_FD));
        match request {
            Ok(request) => {
                let id = request.id.clone();
                tracing::debug!(command = request.command, "control command");
                let command = request.command.clone();
                let answer = self.run(request, fd);
                if let Err(e) = &answer {
                    tracing::debug!(command, "control command failed: {}", e.desc());
                }
                message::reply(id, answer)
            }
            Err((id, e)) => message::reply(id, Err(e)),
        }
    }

    fn run(&self, request: Request, fd: Option<OwnedFd>) -> Result<Value, QmpError> {
        let negotiation = request.command == "qmp_capabilities";
        match (self.negotiated(), negotiation) {
            (true, false) => commands::run(self.context, &request.command, request.arguments, fd),
            (true, true) => Err(QmpError::command_not_found(
                "Capabilities negotiation is already complete, command ignored",
            )),
            (false, false) => {
                Err(QmpError::command_not_found("Expecting capabilities negotiation with 'qmp_capabilities'"))
            }
            (false, true) => {
                negotiate(&request)?;
                self.client.negotiated.store(true, Ordering::Release);
                Ok(json!({}))
            }
        }
    }
}

fn negotiate(request: &Request) -> Result<(), QmpError> {
    for (name, value) in &request.arguments {
        match value.as_array() {
            Some(list) if name == "enable" && list.is_empty() => {}
            Some(list) if name == "enable" => {
                return Err(QmpError::generic(format!("capability {} is not offered", list[0])));
            }
            _ => {
                return Err(QmpError::generic(format!(
                    "arguments of 'qmp_capabilities': unexpected `{name}`"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
