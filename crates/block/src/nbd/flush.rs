//! Requests of control threads, which give up a server that hangs.
//!
//! They go by the shared connection, which was made long ago: a server that hangs takes them, and
//! never answers. So a command first waits for a sign of life ([`Nbd::lives`]), and sends nothing
//! until there is one. A server that is slow gives one, and then the command waits.
//!
//! | the server | a command |
//! | --- | --- |
//! | allows several connections, and gives no sign of life | fails after [`TRY`]; while the connection is lost, after `reconnect-delay` if that is longer |
//! | gave a sign, and gives no other one for [`SILENCE`] | fails |
//! | allows one connection | waits: what it does before may take that long |

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use vshunt_engine::{EventFd, Uring};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::spec::Cache;

use super::Nbd;
use super::connector::TRY;
use super::port::Connected;
use super::stream::Limit;
use crate::bounce::AlignedBuf;
use crate::limits::SECTOR_BYTES;
use crate::shared_client::{flush_here, run_here};
use crate::{Io, Op};

/// How long the answer to a read may take before a connection is tried, too. Some servers count
/// connections for ever.
const QUIET: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 3 });
/// How long a request of a command may take before the server is asked for another sign of life.
const SILENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 300 });

impl Nbd {
    /// Flushes and waits.
    ///
    /// # Errors
    /// The flush's; `TimedOut` if the server hangs. The flush may still be carried out then, on a
    /// thread that keeps the disk.
    pub(crate) fn flush_now(self: &Arc<Self>) -> io::Result<()> {
        if self.shared.readonly || self.shared.cache == Cache::Unsafe {
            return Ok(());
        }
        self.lives()?;
        let flush = |nbd: &Arc<Self>| flush_here(|uring| nbd.attach_late(uring));
        let flushed = begin("vshunt-flush", self, None, flush)?;
        self.wait_for(&flushed)?
    }

    /// Waits for a sign of life of a server that allows several connections: it answers a read, or
    /// accepts, refuses or closes a connection. Blocks.
    ///
    /// # Errors
    /// `TimedOut`: there is none for [`TRY`]; while the shared connection is lost, for as long as
    /// requests wait for it.
    pub(crate) fn lives(self: &Arc<Self>) -> io::Result<()> {
        let connector = &self.shared.connector;
        let settings = self.settings();
        // A length that each server knows: guests read sectors.
        let len = u64::from(settings.blocks.minimum).max(SECTOR_BYTES) as usize;
        if !connector.several || settings.size < len as u64 {
            return Ok(());
        }
        let until = match connector.is_lost() {
            // Requests fail at once.
            Some(None) => return Ok(()),
            Some(Some(until)) => until.max(Instant::now() + TRY),
            None => Instant::now() + TRY,
        };
        let interrupt = Arc::new(EventFd::make()?);
        let read = move |nbd: &Arc<Self>| {
            let (mut uring, mut io) = (Uring::new()?, Io::default());
            let buf = AlignedBuf::new(len).ok_or(io::ErrorKind::OutOfMemory)?;
            io.reset(Op::Read, 0, false);
            // SAFETY: the buffer has `len` bytes, and lives until this closure returns, as `io`
            // does. `run_here` waits for the request.
            unsafe { io.push(buf.ptr(), len) };
            run_here(|uring| nbd.attach_aside(uring), &mut uring, &mut io)
        };
        let answered = begin("vshunt-flush", self, Some(interrupt.clone()), read)?;
        // A read that fails is an answer, too: so will the request of the command.
        if !matches!(answered.recv_timeout(QUIET), Err(RecvTimeoutError::Timeout)) {
            return Ok(());
        }
        let nbd = self.clone();
        let connect = move || {
            let limit = Limit { until, interrupt: &interrupt };
            nbd.shared.connector.target.connect(limit).map(Connected::end).is_ok() || Instant::now() < until
        };
        // The caller may be a thread that makes no sockets.
        let thread = std::thread::Builder::new().name("vshunt-nbd-sign".to_owned());
        let gave = sandbox::spawn(ThreadKind::Remote, thread, connect)?.join().expect("it does not panic");
        if gave || answered.try_recv().is_ok() { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Waits for the result of a request of a command. Blocks.
    ///
    /// # Errors
    /// `TimedOut` if the server gave no sign of life for long.
    pub(crate) fn wait_for<T>(self: &Arc<Self>, result: &Receiver<T>) -> io::Result<T> {
        loop {
            match result.recv_timeout(SILENCE) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the thread of a request has ended"));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(hangs) = self.lives() {
                        return result.try_recv().map_err(|_| hangs);
                    }
                }
            }
        }
    }
}

/// Carries out a request on a thread that keeps the disk or image of which it is. Returns where the
/// result arrives; `ended` is signalled then.
///
/// # Errors
/// The system has no thread.
pub(crate) fn begin<K: Send + Sync + 'static, T: Send + 'static>(
    name: &str,
    of: &Arc<K>,
    ended: Option<Arc<EventFd>>,
    request: impl FnOnce(&Arc<K>) -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (done, is_done) = sync_channel(1);
    let of = of.clone();
    let run = move || {
        let result = request(&of);
        // Before the caller may close it.
        drop(of);
        // The caller may have given up.
        let _ = done.send(result);
        if let Some(ended) = ended {
            ended.signal();
        }
    };
    sandbox::spawn(ThreadKind::Control, std::thread::Builder::new().name(name.to_owned()), run)?;
    Ok(is_done)
}
