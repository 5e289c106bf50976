//! Events of the daemon.

use vshunt_engine::WorkerId;
use vshunt_types::spec::{BalanceOutcome, JobInfo, JobStatus, ResizeDecision};

/// An event. Listeners are called on the thread where it happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A front end connected.
    ExportConnected {
        /// The export.
        name: String,
    },
    /// The front end disconnected.
    ExportDisconnected {
        /// The export.
        name: String,
    },
    /// An export was removed.
    ExportDeleted {
        /// The export.
        name: String,
    },
    /// A queue was attached to a worker.
    QueueAttached {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// Its worker now.
        worker: WorkerId,
    },
    /// It was decided that a queue should be on another worker.
    QueueBalanced {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// Its worker before.
        from: WorkerId,
        /// The worker that it should be on.
        worker: WorkerId,
        /// What was done.
        outcome: BalanceOutcome,
        /// Why it should be there.
        reason: String,
    },
    /// It was decided that an export should have another number of workers.
    WorkersBalanced {
        /// The export.
        export: String,
        /// What was decided and done.
        decision: ResizeDecision,
    },
    /// A guest violated the rules of a ring. The queue is stopped until the guest resets it.
    QueueBroken {
        /// The export.
        export: String,
        /// The queue's index.
        index: u16,
        /// The violation.
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
    /// The state of a job changed.
    JobStatus {
        /// Its name.
        id: String,
        /// The state.
        status: JobStatus,
    },
    /// A mirror is ready to be completed, or was not completed and stays ready, with an error.
    JobReady(JobInfo),
    /// A job has copied all, and waits for the command to finalize it.
    JobPending(JobInfo),
    /// A job ended.
    JobEnded(JobInfo),
    /// A disk cannot be used any more: all its requests fail, or all its writes.
    DiskLost {
        /// The disk.
        name: String,
        /// Why.
        reason: String,
    },
    /// A disk was resized.
    DiskResized {
        /// The disk.
        name: String,
        /// Its size now, bytes.
        size_bytes: u64,
    },
}

pub(super) type Listener = Box<dyn Fn(&Event) + Send + Sync>;
