//! One job: its description, its state, and what it uses while it copies.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use vshunt_block::copy::Copy;
use vshunt_block::{CopyBeforeWrite, Disk};
use vshunt_engine::QueueSet;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{CopyMode, JobInfo, JobKind, JobStatus};
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
    /// The frozen disk of a pull backup.
    pub(super) pull: Option<String>,
    /// It ends by itself, without a command.
    pub(super) auto_finalize: bool,
    /// It is dismissed automatically when it has concluded.
    pub(super) auto_dismiss: bool,
    state: Mutex<JobState>,
}

/// What the start of any job can ask for.
#[derive(Clone, Copy, Default)]
pub(super) struct JobOptions {
    /// The speed limit in bytes per second. 0: no limit. None: guests keep most of their speed.
    pub(super) speed: Option<u64>,
    /// Whether it ends by itself, without a command. None: it does.
    pub(super) auto_finalize: Option<bool>,
    /// Whether it is dismissed automatically when it has concluded.
    pub(super) auto_dismiss: bool,
}

pub(super) struct JobState {
    pub(super) status: JobStatus,
    pub(super) speed: Option<u64>,
    pub(super) cancelled: bool,
    /// The file or URI that its disk continues in, once it has moved the disk.
    pub(super) continues_in: Option<String>,
    /// Whether a pull backup, or a mirror that is ready, has to end.
    pub(super) completed: bool,
    /// Whether it has copied all, and waits for the command to finalize it.
    pub(super) awaits_finalize: bool,
    /// Whether that command was given.
    pub(super) finalized: bool,
    /// How a mirror copies what guests write.
    pub(super) copy_mode: Option<CopyMode>,
    /// Whether the disk of a mirror then continues in the target.
    pub(super) switch: bool,
    /// For how long guests may be held then.
    pub(super) hold: Duration,
    pub(super) paused: bool,
    /// Why it failed, or why a mirror that is ready was not completed.
    pub(super) error: Option<String>,
    pub(super) total: u64,
    pub(super) done: u64,
    /// Number of this job among the concluded ones, to find the oldest.
    pub(super) ended: u64,
    /// What it uses while it copies.
    pub(super) active: Option<ActiveCopy>,
    /// What it uses while it keeps a point in time for a pull backup.
    pub(super) pull: Option<ActivePull>,
    /// Whether the point in time of a pull backup has been.
    pub(super) begun: bool,
    /// The thread of a mirror that is ready, or of a job that waits to be finalized.
    pub(super) thread: Option<std::thread::Thread>,
    /// The target of a mirror.
    pub(super) target: Option<Arc<Disk>>,
}

/// What a job uses while it copies.
#[derive(Clone)]
pub(super) struct ActiveCopy {
    pub(super) copy: Arc<Copy>,
    pub(super) queue: Arc<QueueSet>,
    pub(super) thread: std::thread::Thread,
}

/// What a pull backup uses while it keeps its point in time.
pub(super) struct ActivePull {
    pub(super) work: Arc<CopyBeforeWrite>,
    pub(super) thread: std::thread::Thread,
}

impl Job {
    pub(super) fn new(id: &str, kind: JobKind, disk: &str, target: String, options: JobOptions) -> Self {
        let JobOptions { speed, auto_finalize, auto_dismiss } = options;
        let state = JobState {
            status: JobStatus::Running,
            speed,
            cancelled: false,
            continues_in: None,
            completed: false,
            awaits_finalize: false,
            finalized: false,
            copy_mode: None,
            switch: false,
            hold: Duration::ZERO,
            paused: false,
            error: None,
            total: 0,
            done: 0,
            ended: 0,
            active: None,
            pull: None,
            begun: false,
            thread: None,
            target: None,
        };
        Self {
            id: id.to_owned(),
            kind,
            disk: disk.to_owned(),
            target,
            fleece: None,
            pull: None,
            auto_finalize: auto_finalize.unwrap_or(true),
            auto_dismiss,
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.locked()
    }

    pub(super) fn info(&self) -> JobInfo {
        let ends = self.is_cancelled() && !self.is_concluded();
        let waits_for = if ends { self.storage_in_use() } else { None };
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
            fleece_bytes: match (&state.active, &state.pull) {
                (Some(active), _) => active.copy.work.stored_bytes(),
                (None, Some(pull)) => pull.work.stored_bytes(),
                (None, None) => None,
            },
            pull: self.pull.clone(),
            error: state.error.clone(),
            cancelled: state.cancelled,
            waits_for,
            continues_in: state.continues_in.clone(),
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
            copy_mode: state.copy_mode,
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
        state.awaits_finalize = false;
        state.status = if copied.is_ok() { JobStatus::Pending } else { JobStatus::Aborting };
        copied
    }

    /// Returns the storage whose requests a job waits for that has to end. None: there are none.
    pub(super) fn storage_in_use(&self) -> Option<String> {
        Some(match self.active()?.copy.leave_source() {
            true => self.target.clone(),
            false => format!("disk {} or {}", self.disk, self.target),
        })
    }

    pub(super) fn active(&self) -> Option<ActiveCopy> {
        self.state().active.clone()
    }

    fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// Returns whether it has copied all, and is about to end.
    pub(super) fn is_pending(&self) -> bool {
        self.state().status == JobStatus::Pending
    }

    pub(super) fn is_concluded(&self) -> bool {
        self.state().status == JobStatus::Concluded
    }

    /// Returns whether the target of a mirror has the file with that device number and inode. Does
    /// not wait.
    pub(super) fn target_has_file(&self, id: (u64, u64)) -> bool {
        self.state().target.as_ref().is_some_and(|target| target.may_have_file(id))
    }

    /// Wakes its thread after a change.
    pub(super) fn wake(&self) {
        if let Some(work) = self.active() {
            work.copy.work.notify();
            work.thread.unpark();
        }
        let state = self.state();
        if let Some(pull) = &state.pull {
            pull.thread.unpark();
        }
        if let Some(thread) = &state.thread {
            thread.unpark();
        }
    }
}
