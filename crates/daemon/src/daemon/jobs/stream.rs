//! Streams: the overlay of a disk gets what is below it, and then stands alone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vshunt_block::copy::Copy;
use vshunt_block::{Bits, CopyBeforeWrite};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::{JobKind, OverlayJobSpec};

use super::rounds::{BLOCK_SHIFT, no_memory, sync};
use super::run::CopyPlan;
use crate::daemon::Daemon;
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::job::{Job, JobOptions};

/// How often the end is tried, and the pause between two tries.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// A running stream.
struct Stream {
    entry: Arc<DiskEntry>,
    /// The file below the overlay.
    below: PathBuf,
}

impl Daemon {
    /// Starts to copy to the overlay of a disk what its backing images have. Returns the name of
    /// the job.
    ///
    /// # Errors
    /// The disk has no overlay, or is in use in a way that does not allow it.
    pub fn stream_start(&self, spec: &OverlayJobSpec, auto_dismiss: bool) -> Result<String> {
        let name = &spec.disk;
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        self.exports_for_job(&entry)?;
        let now = entry.spec();
        let below = entry.disk.below_for_stream(&now)?;
        let id = self.job_name(spec.job.as_deref(), "stream")?;
        let claim = self.claim_source(&entry, &id)?;
        let target = now.image();
        let options = JobOptions { speed: spec.speed, auto_finalize: spec.auto_finalize, auto_dismiss };
        let job = Arc::new(Job::new(&id, JobKind::Stream, name, target, options));
        let thread = self.job_thread(&id)?;
        self.state().enter(job.clone())?;
        claim.keep();
        let stream = Stream { entry: entry.clone(), below };
        self.launch(thread, job, move |daemon, job| stream.run(daemon, job));
        Ok(id.clone())
    }
}

impl Stream {
    /// Runs the stream, on the thread of the job.
    fn run(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let copied = self.copy(daemon, job).and_then(|()| self.make_stable(job));
        let copied = copied.and_then(|()| daemon.await_finalize(job));
        let settled = job.decide(copied);
        daemon.tell_status(job);
        let entry = &self.entry;
        let mut tries = TRIES;
        let result = settled.and_then(|()| {
            loop {
                tries -= 1;
                match self.leave(daemon) {
                    // Some request is slow.
                    Err(e) if e.kind() == Kind::Busy && tries > 0 => {
                        tracing::debug!("job {}: {e}", job.id);
                        std::thread::sleep(PAUSE);
                    }
                    Err(e) => {
                        return Err(e.remedy(
                            "the disk keeps its backing image, and the next stream copies only the rest",
                        ));
                    }
                    Ok(()) => return Ok(()),
                }
            }
        });
        let _op = entry.op_lock();
        entry.watched.release();
        result
    }

    /// Makes the overlay stand alone.
    fn leave(&self, daemon: &Daemon) -> Result<()> {
        let entry = &self.entry;
        let _op = entry.op_lock();
        let exports = daemon.state().exports_of(entry)?;
        let now = entry.spec();
        with_disk_drained(entry, &exports, || entry.disk.leave_below(&now, &self.below))
    }

    /// Copies all that the overlay does not have.
    fn copy(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let disk = self.entry.disk.clone();
        let todo = Bits::new(disk.size_bytes(), BLOCK_SHIFT).ok_or_else(no_memory)?;
        todo.set(todo.all());
        let work = CopyBeforeWrite::new(todo).map_err(|e| Error::io("a job cannot be set up", e))?;
        job.state().total = disk.size_bytes();
        let plan = CopyPlan {
            entry: Some(self.entry.clone()),
            worker: None,
            copy: Box::new(move |owner| Copy::populating(disk, Arc::new(work), owner)),
        };
        daemon.copy(job, plan)
    }

    /// Makes the overlay stable, and checks that it needs nothing below it any more. Guests go on,
    /// and nothing that they do makes a block need it again.
    fn make_stable(&self, job: &Arc<Job>) -> Result<()> {
        let disk = &self.entry.disk;
        let cannot = |e| Error::io(format_args!("cannot read the map of disk {}", job.disk), e);
        if let Some(at) = disk.first_needed_below().map_err(cannot)? {
            return Err(Error::invalid(format!(
                "disk {} still needs {} at byte {at}, which is a fault of this program; it keeps it",
                job.disk,
                self.below.display()
            )));
        }
        sync(job, disk)
    }
}
