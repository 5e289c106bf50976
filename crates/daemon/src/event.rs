//! What the daemon tells those who listen.

use vshunt_engine::WorkerId;
use vshunt_types::spec::{JobInfo, JobStatus};

/// What happened; told to listeners on the thread where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A front-end connected.
    ExportConnected {
        /// The export.
        name: String,
    },
    /// The front-end went.
    ExportDisconnected {
        /// The export.
        name: String,
    },
    /// An export is gone.
    ExportDeleted {
        /// The export.
        name: String,
    },
    /// A queue moved.
    QueueAttached {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// Where it is now.
        worker: WorkerId,
    },
    /// A guest misused a ring; it stands until the guest resets it.
    QueueBroken {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// What the guest did.
        reason: String,
    },
    /// A worker was made.
    WorkerNew {
        /// Its id.
        id: WorkerId,
    },
    /// A worker was freed.
    WorkerFreed {
        /// Its id.
        id: WorkerId,
    },
    /// A job came into another state.
    JobStatus {
        /// Its name.
        id: String,
        /// The state.
        status: JobStatus,
    },
    /// A job is over.
    JobEnded(JobInfo),
    /// A disk has another size.
    DiskResized {
        /// The disk.
        name: String,
        /// Bytes now.
        size_bytes: u64,
    },
}

pub(super) type Listener = Box<dyn Fn(&Event) + Send + Sync>;
