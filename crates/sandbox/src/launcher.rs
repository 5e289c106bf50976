//! The launcher: the thread that keeps its rights, so that all others can give up theirs.
//!
//! A thread inherits the confinement of the thread that makes it. So the thread of a control client
//! cannot make a worker that has rights which the client's thread lacks. The launcher makes it
//! instead. It does nothing else: it waits for the next thread to make. What must never happen: an
//! errand runs on the launcher itself, where it would delay others.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use vshunt_types::error::{Error, Result};

use super::{CapabilitySet, Mode, RUNNING, ThreadKind, capabilities, enter};

/// Makes a thread. Called on the launcher.
type MakeThread = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether the calling thread is the launcher. If a thread cannot be made, its closure is
    /// dropped on the launcher, and dropping it may request an errand.
    static IS_LAUNCHER: Cell<bool> = const { Cell::new(false) };
}

/// A handle of the launcher.
pub(super) struct Launcher {
    requests: Sender<MakeThread>,
}

impl Launcher {
    /// Starts the launcher. It ends with the process.
    ///
    /// # Errors
    /// It cannot be made or confined.
    pub(super) fn start(mode: Mode, keep: CapabilitySet, set_user_id: bool) -> Result<Self> {
        let (requests, received) = channel::<MakeThread>();
        let (ready, is_ready) = sync_channel(1);
        let run = move || {
            IS_LAUNCHER.set(true);
            let _ = ready.send(confine(mode, keep, set_user_id));
            received.into_iter().for_each(|make| make());
        };
        let cannot = |e| Error::io("cannot start the thread that makes threads (the sandbox's launcher)", e);
        Builder::new().name("launcher".into()).spawn(run).map_err(cannot)?;
        is_ready.recv().unwrap_or_else(|e| Err(io::Error::other(e))).map_err(cannot)?;
        Ok(Self { requests })
    }

    /// Makes a thread with the launcher's rights.
    ///
    /// # Errors
    /// The system has no thread.
    fn make<T: Send + 'static>(
        &self,
        builder: Builder,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let (answer, made) = sync_channel(1);
        let make = move || {
            let _ = answer.send(builder.spawn(body));
        };
        self.requests.send(Box::new(make)).map_err(|_| io::Error::other("the launcher has ended"))?;
        made.recv().unwrap_or_else(|e| Err(io::Error::other(e)))
    }
}

/// Confines the launcher: it gives up only the rights that no errand needs.
fn confine(mode: Mode, keep: CapabilitySet, set_user_id: bool) -> io::Result<()> {
    if !mode.restricts() {
        return Ok(());
    }
    if !set_user_id {
        rustix::thread::set_no_new_privs(true)?;
    }
    capabilities::keep(keep)
}

/// Makes a thread of a kind, and confines it before `body` starts.
///
/// # Errors
/// The system has no thread. A thread that cannot be confined ends the process, since it would
/// serve guests unconfined.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    builder: Builder,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let Some(running) = RUNNING.get() else { return builder.spawn(body) };
    running.launcher.make(builder, confined(kind, body))
}

/// Makes a thread as [`spawn`] does, but does not wait for the launcher: workers never wait for
/// another thread. If the system has no thread for it, nothing happens.
pub fn detach(kind: ThreadKind, builder: Builder, body: impl FnOnce() + Send + 'static) {
    let Some(running) = RUNNING.get() else { return drop(builder.spawn(body)) };
    let body = confined(kind, body);
    // The launcher ends with the process.
    let _ = running.launcher.requests.send(Box::new(move || drop(builder.spawn(body))));
}

/// Returns a closure that confines the calling thread, and then runs `body`.
fn confined<T>(kind: ThreadKind, body: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || {
        if let Err(e) = enter(kind) {
            tracing::error!("a {} thread cannot be confined ({e}); ending at once", kind.name());
            std::process::abort();
        }
        body()
    }
}

/// Runs `work`, which the calling thread may not do, on a thread that may, and waits for its end.
///
/// # Errors
/// The system has no thread. `work` was not run.
pub fn errand<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(running) = RUNNING.get().filter(|_| !IS_LAUNCHER.get()) else { return Ok(work()) };
    let mut result = None;
    let slot = &mut result;
    let work: Box<dyn FnOnce() + Send + '_> = Box::new(move || *slot = Some(work()));
    // SAFETY: only the lifetime changes. The box borrows from this function, which neither returns
    // nor unwinds while the box exists: `make` returns after the thread has taken the box, or after
    // the box was dropped because no thread could be made; and `join` waits for the end of the
    // thread.
    let work: Box<dyn FnOnce() + Send + 'static> = unsafe { std::mem::transmute(work) };
    if let Err(panic) = running.launcher.make(Builder::new().name("errand".into()), work)?.join() {
        std::panic::resume_unwind(panic);
    }
    Ok(result.expect("the thread has ended well"))
}
