//! The processes that receive descriptors. The parent module says why they exist.
//!
//! One process, the *spawner*, is forked before the daemon has threads, images or guests. It forks
//! receivers when the daemon asks for one. Each receiver has a socket to the daemon, and handles
//! one request at a time:
//!
//! | sender | message | descriptors |
//! | --- | --- | --- |
//! | daemon | [`RECEIVE`] or [`RECEIVE_ANY`], room in bytes (u32) | the connection |
//! | receiver | [`ANSWER`], [`TOO_MANY`] or [`FAILED`] | the accepted descriptors |
//! | daemon | or [`CLOSE`], which has no answer, and 0 (u32) | the connection |
//! | receiver | [`FINISHED`], after it has closed all its descriptors | |
//!
//! The processes end when the daemon closes its end of the socket. The sockets are of type
//! `SOCK_SEQPACKET`.
//!
//! Each parent waits for its children when it ends: in a container, the first process may reap
//! none, and they would stay as zombies. Both waits have a limit, because a receiver may be blocked
//! in a close. The kernel gives the children of a killed daemon to the first process.

use std::ffi::CStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

use super::{Descriptors, FDS_MAX, NAME_MAX, ROOM_MAX, Receipt, receive, stop_reading, too_many};
use vshunt_types::convert::len_u32;

/// First byte of a request: receive, and pass on the descriptors whose close never blocks.
const RECEIVE: u8 = 0;
/// First byte of a request: receive, and pass on all descriptors except sockets whose queue cannot
/// be emptied.
const RECEIVE_ANY: u8 = 1;
/// First byte of a request: discard all that was sent and not read.
const CLOSE: u8 = 2;

/// First byte of an answer: the number of bytes (u32), the bytes, and the names of refused
/// descriptors, each ended by a zero.
const ANSWER: u8 = 0;
/// First byte of an answer: there were too many descriptors.
const TOO_MANY: u8 = 1;
/// First byte of an answer: the call failed with the errno (i32) that follows.
const FAILED: u8 = 2;
/// The message after which a receiver is ready for the next request.
const FINISHED: u8 = 3;

/// Bytes of the largest message.
const MESSAGE_MAX: usize = 8192;
/// Idle receivers that are kept for the next front end.
const IDLE_MAX: usize = 4;
/// How long the spawner may take for an answer.
const SPAWN_WAIT: Duration = Duration::from_secs(5);

/// How long the spawner waits for the end of the receivers, at its own end.
const RECEIVERS_WAIT: Duration = Duration::from_secs(1);
/// How long the daemon waits for the end of the spawner.
const SPAWNER_WAIT: Duration = Duration::from_secs(2);
/// The interval between two looks at children that end.
const REAP_INTERVAL: Duration = Duration::from_millis(2);

/// The spawner.
struct Spawner {
    id: libc::pid_t,
    /// The lock is held for one request and its answer.
    socket: Mutex<OwnedFd>,
}

static SPAWNER: OnceLock<Spawner> = OnceLock::new();
/// Idle receivers. Guards the list alone.
static IDLE: Mutex<Vec<Process>> = Mutex::new(Vec::new());

/// Ends the spawner and the receivers when it is dropped, and reaps the spawner. By then no session
/// may be left.
#[derive(Debug)]
pub struct Receivers(());

impl Drop for Receivers {
    fn drop(&mut self) {
        IDLE.locked().clear();
        let Some(Spawner { id, socket }) = SPAWNER.get() else { return };
        let _ = rustix::net::shutdown(&*socket.locked(), rustix::net::Shutdown::Both);
        // The calling thread may not wait for processes.
        if let Err(e) = sandbox::errand(|| reap(*id, SPAWNER_WAIT)) {
            tracing::debug!("the process that makes receivers is not reaped: {e}");
        }
    }
}

/// Waits until a child, or each child for -1, has ended and is reaped, at most for `wait`.
fn reap(id: libc::pid_t, wait: Duration) {
    let deadline = Instant::now() + wait;
    // SAFETY: the call takes no pointer: the status is not asked for.
    while unsafe { libc::waitpid(id, std::ptr::null_mut(), libc::WNOHANG) } == 0 && Instant::now() < deadline
    {
        std::thread::sleep(REAP_INTERVAL);
    }
}

/// Starts the spawner. Called once, before the process has a second thread. The processes end when
/// the result is dropped.
///
/// # Errors
/// The system cannot make another process.
pub fn start(mode: sandbox::Mode) -> Result<Receivers> {
    let cannot = |e: io::Error| Error::io("cannot start the process that receives descriptors", e);
    let (ours, theirs) = pair().map_err(cannot)?;
    // SAFETY: this is the only thread (the caller ensures it), so no lock is held in the child.
    match unsafe { libc::fork() } {
        -1 => Err(cannot(io::Error::last_os_error())),
        0 => {
            drop(ours);
            run(theirs, c"vshunt-spawner", |socket| spawn_processes(&socket, mode))
        }
        id => {
            let _ = SPAWNER.set(Spawner { id, socket: Mutex::new(ours) });
            Ok(Receivers(()))
        }
    }
}

/// A process that receives descriptors. It ends when this is dropped.
pub(super) struct Process {
    socket: OwnedFd,
    id: u32,
}

impl Process {
    /// Lets a process do [`receive`]. The caller then waits for the [`answer`](Self::answer). None
    /// if no spawner was started.
    ///
    /// # Errors
    /// There is no process, or the connection cannot be passed to it. Nothing was received.
    pub(super) fn receive(stream: BorrowedFd<'_>, room: usize, any: bool) -> io::Result<Option<Self>> {
        Self::request(if any { RECEIVE_ANY } else { RECEIVE }, len_u32(room), stream)
    }

    /// Lets a process close an ended connection. None if no spawner was started.
    ///
    /// # Errors
    /// There is no process, or the connection cannot be passed to it.
    pub(super) fn close(stream: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        Self::request(CLOSE, 0, stream)
    }

    /// Sends a request to an idle process, or to a new one.
    fn request(what: u8, room: u32, stream: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        // All idle processes may have been killed. The one after them is new.
        for _ in 0..=IDLE_MAX {
            let Some(process) = Self::take()? else { return Ok(None) };
            match process.send(what, room, stream) {
                Ok(()) => return Ok(Some(process)),
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
                Err(e) => {
                    process.keep();
                    let why = if e.raw_os_error() == Some(libc::ETOOMANYREFS) {
                        "; processes of the daemon's user send more descriptors than anybody receives: run VMMs as other users, \
                         or raise the daemon's limit (ulimit -Hn, LimitNOFILE=)"
                    } else {
                        ""
                    };
                    return Err(io::Error::new(
                        e.kind(),
                        format!("a connection cannot be passed to a process: {e}{why}"),
                    ));
                }
            }
        }
        Err(io::Error::other("the processes that receive descriptors end at once"))
    }

    /// Takes an idle process, or makes one. None if no spawner was started.
    fn take() -> io::Result<Option<Self>> {
        let Some(spawner) = SPAWNER.get() else { return Ok(None) };
        if let Some(idle) = IDLE.locked().pop() {
            return Ok(Some(idle));
        }
        let spawner = spawner.socket.locked();
        ask(&spawner).map(Some).map_err(|e| {
            let ended = matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof);
            let remedy = if ended { "; the one that makes them has ended: restart the daemon" } else { "" };
            io::Error::new(e.kind(), format!("there is no process to receive descriptors: {e}{remedy}"))
        })
    }

    /// Keeps the process for the next request of any export.
    fn keep(self) {
        let mut idle = IDLE.locked();
        if idle.len() < IDLE_MAX {
            idle.push(self);
        }
    }

    /// Keeps the process for the next request if it finishes the current one within `wait`. Returns
    /// it if it does not. None if it finished, or has ended: then all its descriptors are closed,
    /// too.
    pub(super) fn unless_finished(self, wait: Duration) -> Option<Self> {
        self.keep_if_finished(wait).unwrap_or(None)
    }

    /// Does what [`unless_finished`](Self::unless_finished) does. Its answers are dropped.
    ///
    /// # Errors
    /// The process ended before it finished.
    pub(super) fn keep_if_finished(self, wait: Duration) -> io::Result<Option<Self>> {
        let deadline = Instant::now() + wait;
        while let Some((bytes, _)) = await_message(&self.socket, deadline, 0)? {
            if bytes == [FINISHED] {
                self.keep();
                return Ok(None);
            }
        }
        Ok(Some(self))
    }

    /// Returns the process id.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Waits for the bytes and the descriptors that the process received.
    ///
    /// # Errors
    /// It failed, or does not answer within `wait`.
    pub(super) fn answer(&self, wait: Duration) -> io::Result<(Vec<u8>, Descriptors)> {
        let Some(received) = await_message(&self.socket, Instant::now() + wait, FDS_MAX)? else {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "descriptors were not received in time"));
        };
        parse_answer(received)
    }

    /// Lets the process close an ended connection after its current work.
    ///
    /// # Errors
    /// It has ended, or has too many requests.
    pub(super) fn close_later(&self, stream: BorrowedFd<'_>) -> io::Result<()> {
        self.send(CLOSE, 0, stream)
    }

    fn send(&self, what: u8, room: u32, stream: BorrowedFd<'_>) -> io::Result<()> {
        let [a, b, c, d] = room.to_ne_bytes();
        send(&self.socket, &[what, a, b, c, d], &[stream])
    }
}

fn parse_answer((bytes, taken): (Vec<u8>, Vec<OwnedFd>)) -> io::Result<(Vec<u8>, Descriptors)> {
    let wrong = || io::Error::other("the process that receives descriptors says what it cannot mean");
    let (kind, rest) = bytes.split_first().ok_or_else(wrong)?;
    let (number, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
    match *kind {
        ANSWER => {
            let len = u32::from_ne_bytes(*number) as usize;
            let (bytes, names) = rest.split_at_checked(len).ok_or_else(wrong)?;
            let name = |name: &[u8]| String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
            let refused = names.split_inclusive(|byte| *byte == 0).map(name).collect();
            Ok((bytes.to_vec(), Descriptors { taken, refused }))
        }
        TOO_MANY => Err(too_many()),
        FAILED => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(*number))),
        _ => Err(wrong()),
    }
}

/// Asks the spawner for a new process.
///
/// # Errors
/// The spawner has ended, does not answer in time, or cannot make a process.
fn ask(spawner: &OwnedFd) -> io::Result<Process> {
    // An earlier call may have timed out before its answer arrived. The process of that answer ends
    // here.
    while await_message(spawner, Instant::now(), 1)?.is_some() {}
    send(spawner, &[0], &[])?;
    let answer = await_message(spawner, Instant::now() + SPAWN_WAIT, 1)?;
    let (bytes, mut fds) = answer.ok_or(io::ErrorKind::TimedOut)?;
    let number = bytes.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
    match fds.pop() {
        Some(socket) => Ok(Process { socket, id: number.unsigned_abs() }),
        None => Err(io::Error::from_raw_os_error(number)),
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn send(to: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(too_many());
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Waits until `deadline` for a message with up to `room` descriptors. More descriptors are dropped
/// if `room` is 0, and are an error otherwise. None if there is no message in time.
///
/// # Errors
/// The other end is closed.
fn await_message(
    from: &OwnedFd,
    deadline: Instant,
    room: usize,
) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = rustix::event::Timespec::try_from(left).expect("it is short");
        match poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(None),
            Ok(_) => return read_message(from, room).map(Some),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Waits for a message without a deadline. `room`: see [`await_message`].
fn read_message(from: &OwnedFd, room: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0u8; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = match room {
        0 => RecvAncillaryBuffer::default(),
        _ => RecvAncillaryBuffer::new(&mut space),
    };
    let mut iov = [IoSliceMut::new(&mut bytes)];
    let got = loop {
        match recvmsg(from, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            got => break got?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if room > 0 && got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(too_many());
    }
    Ok((super::start_of(&mut bytes, got.bytes).to_vec(), fds))
}

/// Runs a process that was just forked. It keeps only `socket`, and never returns.
fn run(socket: OwnedFd, name: &CStr, body: impl FnOnce(OwnedFd) -> io::Result<()>) -> ! {
    let live = || -> io::Result<()> {
        // In its own session, signals of a terminal to the daemon do not reach it. It ends when the
        // daemon closes the socket.
        let _ = rustix::process::setsid();
        rustix::thread::set_name(name)?;
        body(keep_only(socket)?)
    };
    let ended = catch_unwind(AssertUnwindSafe(live));
    // `_exit` runs no exit handlers and flushes no buffers, which were copied from the daemon.
    // SAFETY: the call ends this process.
    unsafe { libc::_exit(if matches!(ended, Ok(Ok(()))) { 0 } else { 1 }) }
}

/// Closes all descriptors except `socket`, whose number may change. The standard descriptors become
/// /dev/null, so that a program which waits for the end of the daemon's output does not wait for
/// this process.
///
/// # Errors
/// A system call failed.
fn keep_only(socket: OwnedFd) -> io::Result<OwnedFd> {
    const KEPT: i32 = 3;
    let null = match std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        Ok(file) => OwnedFd::from(file),
        // A root may have no devices. This descriptor can neither be read nor written.
        Err(_) => rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
    };
    // Their descriptors are replaced or closed below, so they must not close them again.
    let (socket, null) = (std::mem::ManuallyDrop::new(socket), std::mem::ManuallyDrop::new(null));
    // Above all that is kept, so that nothing is replaced before it was copied.
    // SAFETY: a copy of an open descriptor; nothing else changes.
    let high = checked(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 16) })?;
    for standard in 0..KEPT {
        // SAFETY: this process was just forked and has one thread, and no object of it owns a
        // standard descriptor.
        checked(unsafe { libc::dup2(null.as_raw_fd(), standard) })?;
    }
    // SAFETY: this process has one thread, and uses no object any more that owns descriptor KEPT.
    checked(unsafe { libc::dup3(high, KEPT, libc::O_CLOEXEC) })?;
    // SAFETY: this process has one thread, and uses no object any more that owns a descriptor:
    // `socket` and `null` are forgotten.
    if unsafe { libc::syscall(libc::SYS_close_range, KEPT + 1, u32::MAX, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: KEPT is open since `dup3`, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(KEPT) })
}

/// Returns a result of the C library, or the error that errno says.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Runs the spawner: makes a process for each message of the daemon, until the daemon has ended.
fn spawn_processes(socket: &OwnedFd, mode: sandbox::Mode) -> io::Result<()> {
    sandbox::confine_spawner(mode)?;
    // The kernel reaps ended children.
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    while read_message(socket, 0).is_ok() {
        let sent = spawn_process(mode).and_then(|(end, id)| send(socket, &id.to_ne_bytes(), &[end.as_fd()]));
        if let Err(e) = sent {
            // Memory, or the limit of descriptors in flight, may be used up. If the daemon has
            // ended, the loop ends.
            let _ = send(socket, &e.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes(), &[]);
        }
    }
    reap(-1, RECEIVERS_WAIT);
    Ok(())
}

/// Makes a receiver. Returns the daemon's end of its socket, and its process id.
fn spawn_process(mode: sandbox::Mode) -> io::Result<(OwnedFd, i32)> {
    let (end, theirs) = pair()?;
    // SAFETY: the spawner has one thread, so no lock is held in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(end);
            run(theirs, c"vshunt-receiver", |socket| {
                sandbox::confine_receiver(mode)?;
                serve_requests(&socket)
            })
        }
        id => Ok((end, id)),
    }
}

/// Runs a receiver: handles requests of the daemon until the daemon has ended.
fn serve_requests(socket: &OwnedFd) -> io::Result<()> {
    while let Ok((request, mut fds)) = read_message(socket, 1) {
        let (Some((what, room)), Some(stream)) = (request.split_first(), fds.pop()) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        // Each drop below may block, and forever.
        if *what == CLOSE {
            stop_reading(&stream);
            drop(stream);
        } else {
            let room = room.first_chunk().map_or(0, |room| u32::from_ne_bytes(*room) as usize);
            let received = receive(stream.as_fd(), room, *what == RECEIVE_ANY);
            // Otherwise the connection would stay open after the daemon closes it.
            drop(stream);
            let answered = answer(socket, &received);
            drop(received);
            answered?;
        }
        send(socket, &[FINISHED], &[])?;
    }
    Ok(())
}

/// Sends the result of a read to the daemon.
fn answer(socket: &OwnedFd, received: &io::Result<Receipt>) -> io::Result<()> {
    const { assert!(1 + 4 + ROOM_MAX + FDS_MAX * (NAME_MAX + 1) <= MESSAGE_MAX) };
    let message = |kind, number: [u8; 4]| [&[kind], number.as_slice()].concat();
    match received {
        Ok(Receipt { too_many: true, .. }) => send(socket, &message(TOO_MANY, [0; 4]), &[]),
        Ok(Receipt { bytes, descriptors, .. }) => {
            let mut all = message(ANSWER, len_u32(bytes.len()).to_ne_bytes());
            all.extend(bytes);
            for name in &descriptors.refused {
                all.extend(name.bytes().chain([0]));
            }
            let fds: Vec<_> = descriptors.taken.iter().map(AsFd::as_fd).collect();
            send(socket, &all, &fds)
        }
        Err(e) => {
            let number = e.raw_os_error().unwrap_or(libc::EIO);
            send(socket, &message(FAILED, number.to_ne_bytes()), &[])
        }
    }
}
