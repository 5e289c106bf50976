//! One job: its description, its state, and what it has while it copies.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use vshunt_block::copy::Copy;
use vshunt_engine::QueueSet;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{JobInfo, JobKind, JobStatus};
use vshunt_types::sync::Locked;

/// One job. Its lock is taken for look-ups and changes of the state alone, last of all.
pub(super) struct Job {
    pub(super) id: String,
    pub(super) kind: JobKind,
    pub(super) disk: String,
    /// The file or disk that it copies to, as it is shown.
    pub(super) target: String,
    /// It goes without being asked when it has concluded.
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
    /// Counts concluded jobs, so that the oldest is known.
    pub(super) ended: u64,
    /// While it copies.
    pub(super) at_work: Option<AtWork>,
}

/// What a job has while it copies.
#[derive(Clone)]
pub(super) struct AtWork {
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
            at_work: None,
        };
        Self {
            id: id.to_owned(),
            kind,
            disk: disk.to_owned(),
            target,
            auto_dismiss: false,
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.locked()
    }

    pub(super) fn info(&self) -> JobInfo {
        let state = self.state();
        let done = state.at_work.as_ref().map_or(state.done, |w| w.copy.done.load(Relaxed));
        JobInfo {
            id: self.id.clone(),
            kind: self.kind,
            disk: self.disk.clone(),
            target: self.target.clone(),
            status: state.status,
            done_bytes: done.min(state.total),
            total_bytes: state.total,
            speed: state.speed,
            error: state.error.clone(),
            cancelled: state.cancelled,
        }
    }

    /// The copy is over. Decides whether the job was cancelled, which it cannot be any more if all
    /// was copied: what ends it then and what is told of it are the same.
    pub(super) fn decide(&self, copied: Result<()>) -> Result<()> {
        let mut state = self.state();
        let copied = copied.and_then(|()| match state.cancelled {
            true => Err(Error::busy("it was cancelled")),
            false => Ok(()),
        });
        state.status = if copied.is_ok() { JobStatus::Pending } else { JobStatus::Aborting };
        copied
    }

    pub(super) fn at_work(&self) -> Option<AtWork> {
        self.state().at_work.clone()
    }

    pub(super) fn is_concluded(&self) -> bool {
        self.state().status == JobStatus::Concluded
    }

    /// Has its thread look at what was changed.
    pub(super) fn wake(&self) {
        if let Some(work) = self.at_work() {
            work.copy.work.notify();
            work.thread.unpark();
        }
    }
}
