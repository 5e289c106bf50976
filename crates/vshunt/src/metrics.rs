//! Metrics of a running daemon for Prometheus: the values of `status`, at `GET /metrics`, as
//! OpenMetrics text.
//!
//! `families` is the table of all metrics. It reads the same lists as the queries of the control
//! socket and counts nothing itself. `http` parses requests, `serve` has the connections, and
//! `address` listens. `crate::serve` makes and ends it on the main thread. Its only thread,
//! `metrics`, reads the lists and answers. There is no authentication, so no request changes the
//! daemon. What must never happen: a client makes other clients or a worker wait.

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

/// The HTTP server for metrics. When it is dropped, its thread ends and the file of its socket is
/// removed.
pub(crate) struct Metrics {
    /// The file of a UNIX socket. It is dropped before the listener.
    file: Option<SocketFile>,
    listener: Arc<OwnedFd>,
    /// The address, with the port in use.
    at: Address,
    /// The eventfd that ends the thread.
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Listens on `address`. Clients wait until [`start`](Self::start).
    ///
    /// # Errors
    /// Another program listens there, or the system refuses.
    pub(crate) fn bind(address: &Address) -> Result<Self> {
        Self::on(address.listen()?)
    }

    /// Takes a listening socket that the service manager made.
    ///
    /// # Errors
    /// The socket does not listen.
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

    /// Starts to answer.
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

    /// Stops to answer. Does not wait for a scrape in progress.
    pub(crate) fn close(&self) {
        // The write cannot fail, because the counter is small.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Returns the address for messages.
    pub(crate) fn shown(&self) -> String {
        self.at.to_string()
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.close();
        self.file = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported already.
            let _ = thread.join();
        }
    }
}
