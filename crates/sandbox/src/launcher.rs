//! The thread that keeps its rights, so that others can give up theirs.
//!
//! A thread inherits the confinement of the one that makes it, so a worker that a control client asks for cannot be made
//! by that client's thread. The launcher makes it instead. It runs no code but this: it waits for nothing but the next
//! thread to make. What must never happen: an errand that runs on the launcher itself, where it would hold up others.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use vshunt_types::error::{Error, Result};

use super::{CapabilitySet, Mode, RUNNING, ThreadKind, capabilities, enter};

/// Makes a thread; runs on the launcher.
type Making = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether the calling thread is the launcher. What a thread that could not be made would have owned is dropped there,
    /// and may ask for an errand.
    static IS_LAUNCHER: Cell<bool> = const { Cell::new(false) };
}

pub(super) struct Launcher {
    orders: Sender<Making>,
}

impl Launcher {
    /// Starts it; it ends with the process.
    pub(super) fn start(mode: Mode, keep: CapabilitySet, set_user_id: bool) -> Result<Self> {
        let (orders, todo) = channel::<Making>();
        let (ready, is_ready) = sync_channel(1);
        let run = move || {
            IS_LAUNCHER.set(true);
            let _ = ready.send(confine(mode, keep, set_user_id));
            todo.into_iter().for_each(|make| make());
        };
        let cannot = |e| Error::io("cannot start the thread that makes threads (the sandbox's launcher)", e);
        Builder::new().name("launcher".into()).spawn(run).map_err(cannot)?;
        is_ready.recv().unwrap_or_else(|e| Err(io::Error::other(e))).map_err(cannot)?;
        Ok(Self { orders })
    }

    /// Makes a thread with the launcher's rights.
    fn make<T: Send + 'static>(
        &self,
        builder: Builder,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let (answer, made) = sync_channel(1);
        let make = move || {
            let _ = answer.send(builder.spawn(body));
        };
        self.orders.send(Box::new(make)).map_err(|_| io::Error::other("the launcher has ended"))?;
        made.recv().unwrap_or_else(|e| Err(io::Error::other(e)))
    }
}

/// The launcher gives up what nothing needs, and nothing else.
fn confine(mode: Mode, keep: CapabilitySet, set_user_id: bool) -> io::Result<()> {
    if !mode.restricts() {
        return Ok(());
    }
    if !set_user_id {
        rustix::thread::set_no_new_privs(true)?;
    }
    capabilities::keep(keep)
}

/// Makes a thread of a kind, confined before `body` begins.
///
/// # Errors
/// The system has no thread. A thread that cannot be confined ends the process: it would serve guests unconfined.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    builder: Builder,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let Some(running) = RUNNING.get() else { return builder.spawn(body) };
    running.launcher.make(builder, confined(kind, body))
}

/// Makes a thread as [`spawn`] does, and does not wait for it: for workers, which wait for no thread. Nothing happens if the
/// system has no thread for it.
pub fn detach(kind: ThreadKind, builder: Builder, body: impl FnOnce() + Send + 'static) {
    let Some(running) = RUNNING.get() else { return drop(builder.spawn(body)) };
    let body = confined(kind, body);
    // The launcher ends with the process.
    let _ = running.launcher.orders.send(Box::new(move || drop(builder.spawn(body))));
}

/// Has `body` begin with the thread's confinement.
fn confined<T>(kind: ThreadKind, body: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || {
        if let Err(e) = enter(kind) {
            tracing::error!("a {} thread cannot be confined ({e}); ending at once", kind.name());
            std::process::abort();
        }
        body()
    }
}

/// Does something that the calling thread may not, on a thread that may, and waits for its end.
///
/// # Errors
/// The system has no thread for it; it was not done.
pub fn errand<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(running) = RUNNING.get().filter(|_| !IS_LAUNCHER.get()) else { return Ok(work()) };
    let mut result = None;
    let slot = &mut result;
    let work: Box<dyn FnOnce() + Send + '_> = Box::new(move || *slot = Some(work()));
    // SAFETY: only the lifetime is changed. This function neither returns nor unwinds while the box exists: `make` answers
    // after the thread took it or after it was dropped with a thread that could not be made, and `join` waits for the rest.
    let work: Box<dyn FnOnce() + Send + 'static> = unsafe { std::mem::transmute(work) };
    if let Err(panic) = running.launcher.make(Builder::new().name("errand".into()), work)?.join() {
        std::panic::resume_unwind(panic);
    }
    Ok(result.expect("the thread has ended well"))
}
