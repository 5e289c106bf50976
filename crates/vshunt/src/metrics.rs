//! Metrics of a running daemon for Prometheus: what `status` tells, at `GET /metrics`, as
//! OpenMetrics text.
//!
//! `families` is the table of all metrics, filled from the same lists as the control socket's
//! queries: nothing is counted here. `http` reads requests, `serve` has the connections, `address`
//! listens. Made and ended by `crate::serve`, on the main thread; one thread of its own, `metrics`,
//! looks and answers. Nothing is asked of whoever connects, so it never changes anything. What must
//! never happen: that a client makes others wait, or a worker.

mod address;
pub(crate) mod families;
mod http;
mod serve;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

pub(crate) use address::Address;
use address::Listening;
use families::Snapshot;
use rustix::event::{EventfdFlags, eventfd};
use serve::{Render, Scrapes};
use vshunt_daemon::Daemon;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_vhost_user::socket_file::SocketFile;

/// The place where metrics are asked for. Its thread ends, and its socket's file goes, when it is
/// dropped.
pub(crate) struct Metrics {
    /// The file of a UNIX socket; goes before the listener.
    file: Option<SocketFile>,
    listener: Arc<OwnedFd>,
    /// Where, with the port that there is.
    at: Address,
    /// Makes the thread end.
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Listens. Who comes waits until [`start`](Self::start).
    ///
    /// # Errors
    /// Another program listens there, or the system refuses.
    pub(crate) fn bind(address: &Address) -> Result<Self> {
        Self::on(address.listen()?)
    }

    /// Takes a socket that listens, which the service manager made and keeps.
    ///
    /// # Errors
    /// It does not listen.
    pub(crate) fn inherited(fd: OwnedFd) -> Result<Self> {
        Self::on(Listening::inherited(fd)?)
    }

    fn on(listening: Listening) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("cannot make an eventfd", e.into()))?;
        Ok(Self {
            file: listening.file,
            listener: Arc::new(listening.fd),
            at: listening.at,
            wake: Arc::new(wake),
            thread: None,
        })
    }

    /// Answers from now on.
    pub(crate) fn start(&mut self, daemon: Arc<Daemon>) -> Result<()> {
        self.start_with(Box::new(move || families::text(Snapshot::of(&daemon))))
    }

    fn start_with(&mut self, render: Render) -> Result<()> {
        let scrapes = Scrapes::new(self.listener.clone(), self.wake.clone(), render);
        let builder = thread::Builder::new().name("metrics".into());
        let thread = sandbox::spawn(ThreadKind::Metrics, builder, move || scrapes.run());
        self.thread = Some(thread.map_err(|e| Error::io("cannot start serving metrics", e))?);
        Ok(())
    }

    /// Answers no more. Does not wait: a look at the daemon may be under way.
    pub(crate) fn close(&self) {
        // The counter is far from full.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Where, for messages.
    pub(crate) fn shown(&self) -> String {
        self.at.to_string()
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.close();
        self.file = None;
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported already.
            let _ = thread.join();
        }
    }
}
