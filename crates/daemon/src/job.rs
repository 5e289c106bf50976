//! One job: its description, its state, and what it uses while it copies.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use vshunt_block::copy::Copy;
use vshunt_engine::QueueSet;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{JobInfo, JobKind, JobStatus};
use vshunt_types::sync::Locked;

/// One job. Its lock is held for look-ups and changes of the state only. It is the last one in the
/// lock order.
pub(super) struct Job {
    pub(super) id: String,
    pub(super) kind: JobKind,
    pub(super) disk: String,
    /// The target, a file or a disk, as it is shown.
    pub(super) target: String,
    /// The fleecing file.
    pub(super) fleece: Option<PathBuf>,
    /// It is dismissed automatically when it has concluded.
    pub(super) auto_dismiss: bool,
    state: Mutex<JobState>,
}

pub(super) struct JobState {
    pub(super) status: JobStatus,
    pub(super) speed: Option<u64>,
    pub(super) cancelled: bool,
    pub(super) paused: bool,
    pub(super) error: Option<String>,
    pub(super) total: u64,
    pub(super) done: u64,
    /// Number of this job among the concluded ones, to find the oldest.
    pub(super) ended: u64,
    /// What it uses while it copies.
    pub(super) active: Option<ActiveCopy>,
}

/// What a job uses while it copies.
#[derive(Clone)]
pub(super) struct ActiveCopy {
    pub(super) copy: Arc<Copy>,
    pub(super) queue: Arc<QueueSet>,
    pub(super) thread: std::thread::Thread,
}

impl Job {
    pub(super) fn new(id: &str, kind: JobKind, disk: &str, target: String, speed: Option<u64>) -> Self {
        let state = JobState {
            status: JobStatus::Running,
            speed,
            cancelled: false,
            paused: false,
            error: None,
            total: 0,
            done: 0,
            ended: 0,
            active: None,
        };
        Self {
            id: id.to_owned(),
            kind,
            disk: disk.to_owned(),
            target,
            fleece: None,
            auto_dismiss: false,
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.locked()
    }

    pub(super) fn info(&self) -> JobInfo {
        let state = self.state();
        let done = state.active.as_ref().map_or(state.done, |w| w.copy.done.load(Relaxed));
        JobInfo {
            id: self.id.clone(),
            kind: self.kind,
            disk: self.disk.clone(),
            target: self.target.clone(),
            status: state.status,
            done_bytes: done.min(state.total),
            total_bytes: state.total,
            speed: state.speed,
            fleece: self.fleece.clone(),
            fleece_bytes: state.active.as_ref().and_then(|w| w.copy.work.stored_bytes()),
            error: state.error.clone(),
            cancelled: state.cancelled,
        }
    }

    /// Decides at the end of the copy whether the job was cancelled. A job that has copied all
    /// cannot be cancelled any more. So the result and its report are always the same.
    pub(super) fn decide(&self, copied: Result<()>) -> Result<()> {
        let mut state = self.state();
        let copied = copied.and_then(|()| match state.cancelled {
            true => Err(Error::busy("it was cancelled")),
            false => Ok(()),
        });
        state.status = if copied.is_ok() { JobStatus::Pending } else { JobStatus::Aborting };
        copied
    }

    pub(super) fn active(&self) -> Option<ActiveCopy> {
        self.state().active.clone()
    }

    pub(super) fn is_concluded(&self) -> bool {
        self.state().status == JobStatus::Concluded
    }

    /// Wakes its thread after a change.
    pub(super) fn wake(&self) {
        if let Some(work) = self.active() {
            work.copy.work.notify();
            work.thread.unpark();
        }
    }
}
