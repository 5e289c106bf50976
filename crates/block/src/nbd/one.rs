//! The connection of a disk that all workers share, on a thread of its own.
//!
//! It is made when the disk is opened, and made again when it is lost. A worker sends its requests
//! by it as long as it has no connection of its own.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use vshunt_engine::Uring;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};

use super::Shared;
use super::conn::Conn;
use super::port::{Connected, Message};

/// The thread that serves the connection. It ends when this is dropped.
pub(super) struct One {
    shared: Arc<Shared>,
}

impl One {
    /// Starts the thread with the first connection, and waits until it can take requests.
    ///
    /// # Errors
    /// The system has no thread or no io_uring.
    pub(super) fn start(shared: &Arc<Shared>, first: Connected) -> Result<Self> {
        let cannot = |e| Error::io("cannot start the thread of an NBD connection", e);
        let (ready, is_ready) = sync_channel(1);
        shared.common.send(Message::Connected(first));
        let theirs = shared.clone();
        let run = move || {
            let mut uring = match Uring::new().and_then(|uring| sandbox::ring_is_made().map(|()| uring)) {
                Ok(uring) => uring,
                Err(e) => return drop(ready.send(Err(e))),
            };
            let _ = ready.send(Ok(()));
            Conn::add_common(&theirs, &mut uring);
            if uring.run_clients(|| theirs.common.gone.is_set()).is_err() {
                // The kernel may still write to the memory of requests.
                tracing::error!("an io_uring failed; ending at once");
                std::process::abort();
            }
        };
        let builder = std::thread::Builder::new().name("vshunt-nbd-one".to_owned());
        sandbox::spawn(ThreadKind::Worker, builder, run).map_err(cannot)?;
        is_ready.recv().unwrap_or_else(|e| Err(std::io::Error::other(e))).map_err(cannot)?;
        Ok(Self { shared: shared.clone() })
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.shared.common.gone.set();
        self.shared.common.wake();
    }
}
