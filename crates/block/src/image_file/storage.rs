//! A file on a server as the storage of an image: to open, check, repair and change qcow2 images.
//!
//! Requests are carried out by a thread with an io_uring of its own, by the connection that workers
//! share. The caller waits for each with a limit, because a server may never answer. If it
//! does not, the storage is of no more use. Its thread keeps the memory of the request, and ends
//! when the server answers or its connection is lost. If the request writes, it may take effect at
//! any time until then, so the whole file is of no more use: all other requests fail (`lost`), and
//! nobody opens the file again before the thread has ended (`nbd`, `in_use`).

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use qcow2::Storage;
use vshunt_engine::{Token, Uring};
use vshunt_sandbox::{self as sandbox, ThreadKind};

use super::Remote;
use crate::{Io, Op, Step};

/// How long a request may take, in addition to the time for which it waits for a connection.
const LIMIT: Duration = Duration::from_secs(30);
/// Most bytes of one read or write.
const PART_BYTES: u64 = 4 << 20;
/// Most bytes of one request that transfers nothing. A server may write as many zeroes.
const RANGE_BYTES: u64 = 64 << 20;

/// A request for the thread.
struct Ask {
    op: Op,
    offset: u64,
    len: u64,
    bytes: Vec<u8>,
}

/// Its result, 0 or a negative errno, and its bytes.
type Answer = (i32, Vec<u8>);

/// A file on a server.
pub(super) struct RemoteStorage {
    bytes: u64,
    /// Transfers are multiples of this.
    unit: u64,
    /// Syncs do nothing.
    no_sync: bool,
    limit: Duration,
    /// A request did not end in time.
    lost: Cell<bool>,
    /// The same of the file.
    file_lost: Arc<AtomicBool>,
    /// None: it is being dropped.
    asks: Option<Sender<Ask>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
}

impl RemoteStorage {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread or no io_uring.
    pub(super) fn new(remote: Remote, no_sync: bool) -> io::Result<Self> {
        let (bytes, unit) = (remote.bytes(), remote.unit());
        let limit = LIMIT + Duration::from_secs(remote.reconnect_delay().into());
        let file_lost = remote.lost.clone();
        let ((asks, asked), (answer, answers)) = (channel(), channel());
        let thread = std::thread::Builder::new().name("vshunt-image".to_owned());
        let body = move || serve(&remote, &asked, &answer);
        let thread = sandbox::spawn(ThreadKind::Worker, thread, body)?;
        let (asks, thread) = (Some(asks), Some(thread));
        Ok(Self { bytes, unit, no_sync, limit, lost: Cell::new(false), file_lost, asks, answers, thread })
    }

    fn run(&self, op: Op, offset: u64, len: u64, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "the server does not answer");
        if self.lost.get() {
            return Err(timed_out());
        }
        let ended = || io::Error::other("the thread for requests to the server has ended");
        let asks = self.asks.as_ref().ok_or_else(ended)?;
        asks.send(Ask { op, offset, len, bytes }).map_err(|_| ended())?;
        match self.answers.recv_timeout(self.limit) {
            Ok((0.., bytes)) => Ok(bytes),
            Ok((errno, _)) => Err(io::Error::from_raw_os_error(-errno)),
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
            Err(RecvTimeoutError::Timeout) => {
                self.lost.set(true);
                if !matches!(op, Op::Read | Op::Flush) {
                    self.file_lost.store(true, Relaxed);
                }
                Err(timed_out())
            }
        }
    }

    /// Returns the whole units around a part of a range: their start and their end.
    fn around(&self, from: u64, len: u64) -> (u64, u64) {
        let end = from + len.min(PART_BYTES);
        (from / self.unit * self.unit, end.next_multiple_of(self.unit).min(self.bytes))
    }

    fn read(&self, first: u64, end: u64) -> io::Result<Vec<u8>> {
        let len = usize::try_from(end - first).map_err(io::Error::other)?;
        self.run(Op::Read, first, end - first, vec![0; len])
    }

    /// Checks that a range is within the file.
    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len).is_some_and(|end| end <= self.bytes) {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    fn in_parts(&self, op: Op, mut offset: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let part = len.min(RANGE_BYTES);
            self.run(op, offset, part, Vec::new())?;
            (offset, len) = (offset + part, len - part);
        }
        Ok(())
    }
}

impl Storage for RemoteStorage {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            let from = offset.saturating_add(at as u64);
            if from >= self.bytes {
                break;
            }
            let left = (buf.len() - at) as u64;
            let (first, end) = self.around(from, left.min(self.bytes - from));
            let read = self.read(first, end)?;
            let read = &read[(from - first) as usize..];
            let len = read.len().min(buf.len() - at);
            buf[at..at + len].copy_from_slice(&read[..len]);
            at += len;
        }
        buf[at..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        let mut at = 0;
        while at < buf.len() {
            let from = offset + at as u64;
            let len = ((buf.len() - at) as u64).min(PART_BYTES);
            let (first, end) = self.around(from, len);
            let part = &buf[at..at + len as usize];
            let bytes = match (first, end) == (from, from + len) {
                true => part.to_vec(),
                false => {
                    let mut whole = self.read(first, end)?;
                    whole[(from - first) as usize..][..part.len()].copy_from_slice(part);
                    whole
                }
            };
            self.run(Op::Write, first, end - first, bytes)?;
            at += part.len();
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        match len {
            len if len == self.bytes => Ok(()),
            len if len > self.bytes => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)?;
        self.in_parts(Op::WriteZeroes { unmap: false }, offset, len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        // A hint: nobody reads these bytes before they are written again. A server that knows no
        // WriteZeroes would be sent the zeroes.
        self.in_parts(Op::Discard, offset, len.min(self.bytes.saturating_sub(offset)))
    }

    fn sync(&self) -> io::Result<()> {
        if self.no_sync { Ok(()) } else { self.run(Op::Flush, 0, 0, Vec::new()).map(drop) }
    }
}

impl Drop for RemoteStorage {
    fn drop(&mut self) {
        drop(self.asks.take());
        // Its requests have ended before the caller uses the file in another way.
        if let Some(thread) = self.thread.take().filter(|_| !self.lost.get()) {
            let _ = thread.join();
        }
    }
}

/// Carries out requests until the storage is dropped.
fn serve(remote: &Remote, asked: &Receiver<Ask>, answer: &Sender<Answer>) {
    let uring = Uring::new().and_then(|uring| sandbox::ring_is_made().map(|()| uring));
    let Ok(mut uring) = uring else { return };
    let mut io = Box::<Io>::default();
    let handle = remote.attach_aside(&mut uring);
    let token = Token { index: 0, generation: 0, slot: 0, op: 0 };
    while let Ok(mut ask) = asked.recv() {
        io.reset(ask.op, ask.offset, false);
        if matches!(ask.op, Op::Read | Op::Write) {
            // SAFETY: the bytes are on the heap and belong to `ask`, which is kept until the
            // request is complete. `io` is boxed, and nothing else uses it.
            unsafe { io.push(ask.bytes.as_mut_ptr(), ask.bytes.len()) };
        } else {
            io.request.len = ask.len;
        }
        let res = match remote.start(&handle, &mut uring, &mut io, token) {
            Step::Done(res) => res,
            Step::Wait => {
                let Ok(res) = uring.next_result() else {
                    // The kernel may still write to the memory of the request.
                    tracing::error!("an io_uring failed; ending at once");
                    std::process::abort();
                };
                res
            }
        };
        io.request.iov.clear();
        // The caller may have given up.
        let _ = answer.send((res, ask.bytes));
    }
    handle.detach(&mut uring);
}
