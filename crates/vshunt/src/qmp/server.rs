//! The QMP server: accepts clients, runs their commands, and sends them events.
//!
//! | thread | task |
//! | --- | --- |
//! | `ctl-accept` | accepts clients |
//! | `ctl-N` | one for each client: reads, and runs commands one after the other |
//! | `ctl-N-out` | one for each client: writes |
//! | any thread | [`Server::broadcast`], which formats nothing, waits for no client, and makes no blocking call |
//!
//! A client that does not read fills its own queue. If the queue is full, a reply blocks only the
//! reader of that client, and an event disconnects it.
//!
//! Lock: `clients`, held only for accesses to the map and for `try_send`.

use std::collections::HashMap;
use std::io::{ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

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

/// The most messages that wait for one client. Events come in bursts of one for each queue, and an
/// export has up to 256 queues.
const OUT_QUEUE: usize = 1024;

/// The most clients at the same time. Each needs two threads, and a control socket has few clients.
const CLIENTS_MAX: usize = 64;

/// The time limit for sending the last replies and events when the daemon ends.
const FLUSH_TIME: Duration = Duration::from_millis(500);

type Line = Arc<str>;

struct Client {
    out: SyncSender<Line>,
    stream: Arc<UnixStream>,
    /// Whether the client has negotiated. Other clients get no events.
    negotiated: Arc<AtomicBool>,
}

#[derive(Default)]
struct Clients {
    map: HashMap<u64, Client>,
    next: u64,
    /// The number of writer threads that run.
    writers: usize,
    /// Whether new clients are refused.
    closed: bool,
}

struct Shared {
    context: Context,
    clients: Mutex<Clients>,
    /// Signals that a writer thread has ended.
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
        self.shared.lock().map.retain(|id, client| {
            if !client.negotiated.load(Ordering::Acquire) {
                return true;
            }
            match client.out.try_send(Arc::clone(&line)) {
                Ok(()) => true,
                Err(TrySendError::Disconnected(_)) => false,
                Err(TrySendError::Full(_)) => {
                    tracing::warn!(client = id, "control client does not read; its connection is closed");
                    let _ = client.stream.shutdown(Shutdown::Both);
                    false
                }
            }
        });
    }

    /// Takes no more commands, sends queued messages for at most [`FLUSH_TIME`], and closes all
    /// connections.
    pub(crate) fn stop(&self) {
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let mut clients = self.shared.lock();
        clients.closed = true;
        // Readers see the end of the stream. Writers end once the readers and the senders in the
        // map are gone and the queue is empty.
        let streams: Vec<Arc<UnixStream>> = clients
            .map
            .drain()
            .map(|(_, client)| {
                let _ = client.stream.shutdown(Shutdown::Read);
                client.stream
            })
            .collect();
        let waited = self.shared.gone.wait_timeout_while(clients, FLUSH_TIME, |c| c.writers > 0);
        drop(waited);
        for stream in streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The map is consistent between any two statements, so it stays valid after a panic.
        self.clients.locked()
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
    stream.set_nonblocking(false)?;
    // Shared rather than duplicated: a client uses one descriptor.
    let stream = Arc::new(stream);
    let (reading, writing) = (stream.clone(), stream.clone());
    let (out, lines) = sync_channel(OUT_QUEUE);
    let negotiated = Arc::new(AtomicBool::new(false));
    let id = {
        let mut clients = shared.lock();
        if clients.closed || clients.map.len() >= CLIENTS_MAX {
            drop(clients);
            let why = format!("too many control clients; the limit is {CLIENTS_MAX}");
            return (&*stream).write_all(message::reply(None, Err(QmpError::generic(why))).as_bytes());
        }
        let id = clients.next;
        clients.next += 1;
        clients.writers += 1;
        let client = Client { out: out.clone(), stream, negotiated: Arc::clone(&negotiated) };
        clients.map.insert(id, client);
        id
    };
    let writer = {
        let shared = Arc::clone(shared);
        move || {
            write(&writing, &lines);
            drop(writing);
            let mut clients = shared.lock();
            clients.writers -= 1;
            shared.gone.notify_all();
        }
    };
    if let Err(e) = thread::Builder::new().name(format!("ctl-{id}-out")).spawn(writer) {
        let mut clients = shared.lock();
        clients.writers -= 1;
        clients.map.remove(&id);
        return Err(e);
    }
    let reader = {
        let shared = Arc::clone(shared);
        move || {
            let Context { daemon, fdsets, .. } = &shared.context;
            fdsets.client_connected();
            Session { context: &shared.context, out, negotiated, passed: Passed::default() }.read(&reading);
            fdsets.client_disconnected(daemon);
            shared.lock().map.remove(&id);
        }
    };
    thread::Builder::new().name(format!("ctl-{id}")).spawn(reader).map(drop).inspect_err(|_| {
        shared.lock().map.remove(&id);
    })
}

fn write(mut stream: &UnixStream, lines: &Receiver<Line>) {
    while let Ok(line) = lines.recv() {
        if stream.write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    // This also ends the reader if the client has only stopped to receive.
    let _ = stream.shutdown(Shutdown::Both);
}

/// The client has disconnected, or does not receive its replies.
struct Disconnected;

/// The state of the reader thread of one client.
struct Session<'a> {
    context: &'a Context,
    out: SyncSender<Line>,
    negotiated: Arc<AtomicBool>,
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
    fn read(&mut self, stream: &UnixStream) {
        let mut framer = Framer::new();
        let mut bytes = [0; 4096];
        if self.send(message::greeting()).is_err() {
            return;
        }
        loop {
            let count = match receive(stream, &mut bytes) {
                Ok((0, _)) => return,
                Ok((count, fd)) => {
                    self.passed.arrived(fd);
                    count
                }
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            let mut state = Ok(());
            framer.push(&bytes[..count], |frame| {
                if state.is_ok() {
                    let answer = self.answer(frame);
                    state = self.send(answer);
                }
            });
            if state.is_err() {
                return;
            }
            self.passed.end_read(framer.is_in_message());
        }
    }

    /// Queues a reply. Waits while the queue is full, so a client that does not read its replies
    /// delays only itself.
    fn send(&self, line: String) -> Result<(), Disconnected> {
        self.out.send(line.into()).map_err(|_| Disconnected)
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
        match (self.negotiated.load(Ordering::Acquire), negotiation) {
            (true, false) => commands::run(self.context, &request.command, request.arguments, fd),
            (true, true) => Err(QmpError::command_not_found(
                "Capabilities negotiation is already complete, command ignored",
            )),
            (false, false) => {
                Err(QmpError::command_not_found("Expecting capabilities negotiation with 'qmp_capabilities'"))
            }
            (false, true) => {
                negotiate(&request)?;
                self.negotiated.store(true, Ordering::Release);
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
