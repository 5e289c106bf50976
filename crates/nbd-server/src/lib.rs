//! An NBD server: a disk for clients on a UNIX socket or a TCP port.
//!
//! [`NbdServer::start`] starts one thread for each export (`accept`). It accepts connections and
//! does their handshakes (`shake`) without waiting for a client. A connection whose handshake is
//! complete becomes a queue (`queue`), which workers serve and which moves between them like all
//! queues. The export has a fixed number of queues; a client for which there is none is refused. A
//! second thread (`map`) asks file systems where the holes of raw images are, which may wait. With
//! TLS there is a thread for each connection, which encrypts and decrypts (`tls`).
//!
//! What must never happen: a client makes the daemon wait, or use memory without a bound; a client
//! gets bytes of another one.

#![deny(
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]
#![cfg_attr(
    test,
    allow(clippy::indexing_slicing, clippy::cast_possible_truncation, reason = "a failed test may panic")
)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

mod accept;
mod listen;
mod map;
mod queue;
mod shake;
mod shared;
mod tls;

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ::nbd::transmission_flag as flag;
use vshunt_block::{Bitmap, Disk};
use vshunt_engine::{LimitCell, Observer, QueueSet};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

pub use self::listen::{Listening, listen};
use self::map::MapThread;
pub use self::shared::PAYLOAD_BYTES_MAX;
use self::shared::Shared;
pub use self::tls::Credentials;

/// Connections of an export if the request names no number.
pub const CONNECTIONS: u16 = 16;

/// Returns the dirty bitmaps of the disk, which clients may ask for.
pub type Bitmaps = Box<dyn Fn() -> Vec<Arc<Bitmap>> + Send + Sync>;

/// What an export serves.
pub struct Config {
    /// The name of the export, by which clients ask for it.
    pub name: String,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Whether writes are refused.
    pub readonly: bool,
    /// The limits of the export.
    pub limits: Arc<LimitCell>,
    /// The bitmaps of the disk.
    pub bitmaps: Bitmaps,
    /// With TLS, which every client then has to use.
    pub tls: Option<Credentials>,
}

/// A disk that is served to NBD clients.
pub struct NbdServer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl NbdServer {
    /// Serves a disk. `queues` has a queue for each connection that is possible at a time.
    ///
    /// # Errors
    /// The system's: no thread, no descriptors.
    pub fn start(
        config: Config,
        listening: Listening,
        queues: Arc<QueueSet>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let cannot = |e| Error::io(format_args!("cannot serve export {}", config.name), e);
        let map = MapThread::start(&config.name, config.disk.clone()).map_err(cannot)?;
        let name = config.name.clone();
        let cannot = |e| Error::io(format_args!("cannot serve export {name}"), e);
        let shared = Arc::new(Shared::new(config, map, queues.len()).map_err(cannot)?);
        let theirs = shared.clone();
        let run = move || accept::run(&theirs, listening, &queues, &*observer);
        let builder = std::thread::Builder::new().name(thread_name(&name));
        let thread = sandbox::spawn(ThreadKind::NbdServer, builder, run).map_err(cannot)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Returns whether a client is connected whose handshake is complete.
    pub fn connected(&self) -> bool {
        self.shared.connections.load(SeqCst) > 0
    }

    /// Returns whether clients are connected and all of them have closed their ends: the
    /// connections end when their requests have ended.
    pub fn leaving(&self) -> bool {
        self.shared.leaving()
    }

    /// Returns the names of the transmission flags that clients are offered.
    pub fn features(&self) -> Vec<String> {
        let names = [
            (flag::READ_ONLY, "READ_ONLY"),
            (flag::SEND_FLUSH, "SEND_FLUSH"),
            (flag::SEND_FUA, "SEND_FUA"),
            (flag::SEND_TRIM, "SEND_TRIM"),
            (flag::SEND_WRITE_ZEROES, "SEND_WRITE_ZEROES"),
            (flag::CAN_MULTI_CONN, "CAN_MULTI_CONN"),
        ];
        let flags = self.shared.flags();
        names.iter().filter(|(bit, _)| flags & bit != 0).map(|(_, name)| (*name).to_owned()).collect()
    }

    /// Ends the export: closes the listener, disconnects the clients, drains the queues, and makes
    /// their writes stable. Waits for operations of the disk in flight. A second call does nothing.
    pub fn stop(&self) {
        self.shared.end();
        if let Some(thread) = self.thread.locked().take() {
            let _ = thread.join();
        }
        if self.shared.take_unflushed()
            && let Err(e) = self.shared.disk.sync()
        {
            let name = &self.shared.name;
            tracing::error!("export {name}: the last writes of its clients may be lost: {e}");
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the name of the thread of an export. The system cuts it to 15 bytes.
fn thread_name(export: &str) -> String {
    format!("nbd-{export}").chars().take(15).collect()
}
