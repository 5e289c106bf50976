//! Mirrors: a disk in use is copied to another place, and continues there when a command says so.
//!
//! Guests are held only while the last blocks are copied, and only if these are so few that this is
//! over soon, by what earlier rounds took. If guests write too fast for that, or cannot be held,
//! the job stays ready. It can be cancelled until all is in the target. Or each write waits for the
//! target, and little is left at any time (`follow`).
//!
//! What must never happen: the disk continues in a target that lacks a completed write; a guest
//! waits for a target that answers nothing.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use vshunt_block::{Bitmap, Bits, OldImage};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{CopyMode, DiskSpec, Format, JobKind, JobStatus, MirrorSpec};

use super::point::{StartedBitmap, check_complete, start_bitmap};
use super::rounds::{Destination, HoldLimits, Rounds, apart, apart_while, bits, sync, sync_apart};
use super::run::{STALL, cancelled, took_nothing};
use super::target::{Target, Wanted};
use crate::daemon::Daemon;
use crate::daemon::bitmaps::{AddedBitmap, GRANULARITY};
use crate::disk_entry::DiskEntry;
use crate::drained::with_disk_drained;
use crate::event::Event;
use crate::export::Export;
use crate::job::{Job, JobOptions};

/// Between two rounds of a mirror that is ready. Each round holds guests up for a moment.
const TICK: Duration = Duration::from_millis(200);

/// How often a mirror whose guests wait looks whether the target has all.
const CATCH_UP_TICK: Duration = Duration::from_millis(20);

/// How often guests are held to complete a mirror that they wait for, if the target lacks something
/// each time.
const HOLD_TRIES: u32 = 5;

/// Bytes that are copied before the target is made stable, if a bitmap records what is missing.
const STABLE_BYTES: u64 = 256 << 20;

/// For how long guests may be held for what they have written last, by default. It is the downtime
/// that QEMU allows for a migration by default.
pub const HOLD: Duration = Duration::from_millis(300);
/// The longest such time that can be asked for.
pub const HOLD_MAX: Duration = Duration::from_secs(7);
// A copy that takes twice as long as expected still ends before a target counts as hanging.
const _: () = assert!(HOLD_MAX.as_secs() * 2 < STALL.as_secs());

/// How long guests wait at most until the image that their disk leaves is marked.
const MARK: Duration = Duration::from_secs(3);

/// The job is not completed if the rest becomes no less for so many rounds and so long.
const TREND_ROUNDS: u32 = 5;
const TREND_TIME: Duration = Duration::from_secs(4);

/// A running mirror.
struct Mirror {
    rounds: Rounds,
    target: Target,
    /// The blocks of the first round that are not in the target yet.
    missing: Arc<Bits>,
    /// The bitmap that records what the target lacks if the job fails, and later writes if not.
    bitmap: Option<Arc<Bitmap>>,
    /// Whether guests have continued in the old image after the target may have been marked as
    /// complete.
    outdated: Arc<AtomicBool>,
}

impl Daemon {
    /// Starts to mirror a disk. Returns the name of the job.
    ///
    /// # Errors
    /// The request is wrong, the target cannot be used, or the disk is in use in a way that does
    /// not allow it.
    pub fn mirror_start(&self, spec: &MirrorSpec, auto_dismiss: bool) -> Result<String> {
        check(spec)?;
        let name = &spec.disk;
        let entry = self.state().disk(name)?;
        let _op = entry.op_lock();
        let exports = self.exports_for_job(&entry)?;
        let id = self.job_name(spec.job.as_deref(), "mirror")?;
        let options = JobOptions { speed: spec.speed, auto_finalize: spec.auto_finalize, auto_dismiss };
        let job = Job::new(&id, JobKind::Mirror, name, wanted(spec).shown(), options);
        job.state().copy_mode = Some(spec.copy_mode.unwrap_or_default());
        let job = Arc::new(job);
        if let Some(bitmap) = &spec.incremental {
            check_complete(&entry, bitmap, "mirror")?;
        }
        if let Some(bitmap) = &spec.bitmap {
            let added = AddedBitmap { name: bitmap, granularity: GRANULARITY, persistent: None };
            self.place_bitmaps(&entry, &[added])?;
        }
        // It may take long until the target is open.
        let claim = self.claim_source(&entry, &id)?;
        let target = self.open_target(&wanted(spec), &id, &entry)?;
        let ready = check_like(&entry, &target).and_then(|()| self.job_thread(&id)).and_then(|thread| {
            if target.entry.is_some() {
                let marked = target.disk.mark_incomplete(&entry.spec());
                marked.map_err(|e| Error::io(format_args!("cannot mark {}", job.target), e))?;
            }
            check_survives(&entry, &exports, &target, &job)?;
            let missing = bits(&entry.disk)?;
            self.state().enter(job.clone())?;
            let started = Rounds::begin(self, &entry, &exports, (&id, false), || {
                let (bitmap, incremental) = (spec.bitmap.as_deref(), spec.incremental.as_deref());
                let started = start_bitmap(&entry, bitmap, incremental, &id)?;
                match started.as_ref().filter(|_| incremental.is_some()) {
                    Some(StartedBitmap { old: Some(old), .. }) => missing.add(old),
                    _ => missing.set(missing.all()),
                }
                Ok(started.map(|started| started.bitmap))
            });
            match started {
                Ok((rounds, bitmap)) => Ok((thread, rounds, missing, bitmap)),
                Err(e) => {
                    self.withdraw(&id);
                    Err(e)
                }
            }
        });
        let (thread, rounds, missing, bitmap) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                give_up(target, None);
                return Err(e);
            }
        };
        claim.keep();
        warn_of_bitmaps(&entry, &target, &job);
        job.state().target = Some(target.disk.clone());
        let mirror = Mirror { rounds, target, missing, bitmap, outdated: Arc::default() };
        self.launch(thread, job, |daemon, job| mirror.run(daemon, job));
        Ok(id.clone())
    }

    /// Ends a mirror that is ready. `switch`: the disk continues in the target. If not, the target
    /// is a copy of the disk as it is now. `hold`: for how long guests may be held for the rest.
    pub(super) fn mirror_complete(&self, job: &Job, switch: bool, hold: Duration) -> Result<()> {
        let id = &job.id;
        if hold.is_zero() || hold > HOLD_MAX {
            return Err(Error::invalid(format!("guests are held for 1 ms to {} s", HOLD_MAX.as_secs())));
        }
        {
            let mut state = job.state();
            match state.status {
                _ if state.cancelled => return Err(Error::busy(format!("job {id} is being cancelled"))),
                JobStatus::Ready if state.completed => {
                    return Err(Error::busy(format!("job {id} is being completed already")));
                }
                JobStatus::Ready => {
                    (state.completed, state.switch, state.hold, state.error) = (true, switch, hold, None);
                }
                JobStatus::Running | JobStatus::Paused => {
                    return Err(Error::busy(format!(
                        "job {id} is not ready: it still copies; wait for it ('job wait {id}'), then complete it"
                    )));
                }
                JobStatus::Pending if state.awaits_finalize && !state.finalized => {
                    return Err(Error::busy(format!(
                        "job {id} is being completed, and waits to be finalized ('job finalize {id}')"
                    )));
                }
                _ => return Err(Error::busy(format!("job {id} is about to end; wait for it"))),
            }
        }
        job.wake();
        Ok(())
    }

    /// Announces that a mirror can be completed.
    fn announce_ready(&self, job: &Arc<Job>) {
        {
            let mut state = job.state();
            state.thread = Some(std::thread::current());
            // It cannot be paused any more, since it copies only what guests write.
            (state.status, state.paused) = (JobStatus::Ready, false);
            state.active.iter().for_each(|active| active.copy.paused.store(false, Relaxed));
        }
        self.tell_status(job);
        self.tell(&Event::JobReady(job.info()));
    }

    /// Announces that a mirror was not completed, and stays ready.
    fn stay_ready(&self, job: &Job, why: &Error) {
        {
            let mut state = job.state();
            (state.completed, state.error) = (false, Some(why.to_string()));
            (state.status, state.awaits_finalize, state.finalized) = (JobStatus::Ready, false, false);
        }
        if !job.auto_finalize {
            self.tell_status(job);
        }
        tracing::warn!("job {} stays ready: {why}", job.id);
        self.tell(&Event::JobReady(job.info()));
    }
}

impl Mirror {
    /// Runs the mirror, on the thread of the job.
    fn run(self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let mut old = None;
        let result = self.work(daemon, job, &mut old).or_else(|e| job.decide(Err(e)));
        daemon.tell_status(job);
        let switched = result.is_ok() && job.state().switch;
        let source = self.rounds.entry.spec();
        let Self { rounds, target, missing, bitmap, outdated } = self;
        rounds.end_following(daemon);
        rounds.await_source();
        {
            let _op = rounds.entry.op_lock();
            if let Some(bitmap) = bitmap {
                let mut state = bitmap.state();
                if result.is_err() {
                    state.bits.add(&missing);
                }
                state.job = None;
            }
            rounds.end(daemon);
        }
        rounds.end_copies(daemon, job);
        if let Some(old) = old {
            old.close();
        }
        job.state().target = None;
        match &result {
            // What it was made of is the disk's now.
            Ok(()) if switched => drop(target),
            Ok(()) => return target.keep(),
            Err(_) => {
                let source = outdated.load(SeqCst).then_some(source);
                give_up(target, source.as_ref());
            }
        }
        result
    }

    /// Copies, and completes when a command says so. `old` gets what the disk was made of.
    fn work(&self, daemon: &Daemon, job: &Arc<Job>, old: &mut Option<OldImage>) -> Result<()> {
        let target = &self.target.disk;
        self.copy_missing(daemon, job)?;
        self.rounds.shrink(daemon, job, target)?;
        self.catch_up(daemon, job)?;
        daemon.announce_ready(job);
        loop {
            self.follow(daemon, job)?;
            match self.complete(daemon, job, old) {
                Ok(()) => return Ok(()),
                Err(Stop::Failed(e)) => return Err(e),
                Err(Stop::Refused(why)) => daemon.stay_ready(job, &why),
            }
        }
    }

    /// Copies what guests write until a command completes the job.
    fn follow(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        loop {
            {
                let state = job.state();
                if state.cancelled {
                    return Err(cancelled());
                }
                if state.completed && (job.auto_finalize || state.finalized) {
                    return Ok(());
                }
                if state.completed && !state.awaits_finalize {
                    drop(state);
                    daemon.announce_pending(job);
                }
            }
            if !self.keeps_up(daemon, job)? && self.rounds.written_bytes() > 0 {
                self.rounds.next(daemon, job, &self.target.disk)?;
            }
            std::thread::park_timeout(TICK);
        }
    }

    /// Makes guests wait for the target, if they are to, and copies what is left.
    fn catch_up(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        loop {
            let keeps_up = self.keeps_up(daemon, job)?;
            let over = match keeps_up {
                true => self.rounds.following_left(job) == 0,
                // Guests cannot be held for a moment now, or do not wait any more.
                false => job.state().copy_mode != Some(CopyMode::WriteBlocking),
            };
            if over {
                return Ok(());
            }
            if job.state().cancelled {
                return Err(cancelled());
            }
            std::thread::park_timeout(CATCH_UP_TICK);
        }
    }

    /// Returns whether guests wait for the target, as they are to. If it takes nothing, they go on
    /// without it from then on.
    fn keeps_up(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<bool> {
        if job.state().copy_mode != Some(CopyMode::WriteBlocking) {
            return Ok(false);
        }
        if !self.rounds.is_following() {
            self.rounds.await_left(daemon, job)?;
            return self.rounds.begin_following(daemon, job, &self.target.disk);
        }
        self.let_go(daemon, job).map(|()| self.rounds.is_following())
    }

    /// Lets guests that wait for the target go on without it, if it takes nothing.
    fn let_go(&self, daemon: &Daemon, job: &Job) -> Result<()> {
        if !self.rounds.is_following() || self.rounds.check_following(daemon, job)? {
            return Ok(());
        }
        self.rounds.end_following(daemon);
        job.state().copy_mode = Some(CopyMode::Background);
        tracing::warn!(
            "job {}: {}; they do not wait for it any more (copy mode background)",
            job.id,
            took_nothing(job)
        );
        daemon.tell_status(job);
        Ok(())
    }

    /// Copies what is missing in the target. With a bitmap, in parts that are made stable.
    fn copy_missing(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let (target, missing) = (&self.target.disk, &self.missing);
        let to = Destination { disk: target, fresh: self.target.fresh };
        if self.bitmap.is_none() {
            return self.rounds.copy(daemon, job, missing, to);
        }
        let most = STABLE_BYTES / missing.granularity();
        let mut at = 0;
        while let Some(first) = missing.first(at..missing.all().end) {
            at = missing.all().end.min(first + most);
            let part = bits(&self.rounds.entry.disk)?;
            let mut next = first;
            while let Some(run) = missing.run(next..at, most) {
                next = run.end;
                part.set(run);
            }
            self.rounds.copy(daemon, job, &part, to)?;
            sync_apart(job, target, None)?;
            missing.clear(first..at);
        }
        Ok(())
    }

    /// Copies without a limit until the rest takes no longer than guests may be held, and holds
    /// them for it.
    fn complete(&self, daemon: &Daemon, job: &Arc<Job>, old: &mut Option<OldImage>) -> Result<(), Stop> {
        let (target, hold) = (&self.target, job.state().hold);
        let (mut trend, mut tries) = (Trend::new(), HOLD_TRIES);
        loop {
            if job.state().cancelled {
                return Err(cancelled().into());
            }
            // Most data is stable before guests must wait.
            self.settle(daemon, job)?;
            self.flush_source(job)?;
            if self.keeps_up(daemon, job)? {
                self.catch_up(daemon, job)?;
            }
            let follows = self.rounds.is_following();
            // What they wrote meanwhile.
            if !follows && self.rounds.written_bytes() > 0 && !self.rounds.next(daemon, job, &target.disk)? {
                // Their requests hang. The storage may answer soon.
                std::thread::park_timeout(TICK);
            }
            if (follows || self.rounds.rest_takes() <= hold) && self.hold(daemon, job, hold, old)? {
                return Ok(());
            }
            // Guests do not wait for this, if the target hangs.
            self.rounds.await_left(daemon, job)?;
            if follows {
                tries -= 1;
                if tries == 0 {
                    return Err(Stop::Refused(Error::busy(format!(
                        "{} did not have all within the {} ms for which guests may be held: complete the job again, or let \
                         them be held for longer (--hold)",
                        job.target,
                        hold.as_millis()
                    ))));
                }
            } else if !trend.may_shrink(self.rounds.written_bytes()) {
                return Err(Stop::Refused(self.outrun(job, hold)));
            }
        }
    }

    /// Makes the target and its name stable, for as long as that takes.
    fn settle(&self, daemon: &Daemon, job: &Arc<Job>) -> Result<()> {
        let (of, disk, file) = (job.clone(), self.target.disk.clone(), self.target.new_file());
        let settle = move || sync(&of, &disk).and_then(|()| file.map_or(Ok(()), |file| file.put()));
        let settled = apart_while(job, None, settle, || self.let_go(daemon, job))?;
        settled.unwrap_or_else(|| Err(took_nothing(job)))
    }

    /// Flushes the old image before the disk leaves it. What it lacks then does not matter. But
    /// while a flush of it hangs, it keeps the lock that the switch needs.
    fn flush_source(&self, job: &Arc<Job>) -> Result<(), Stop> {
        let entry = &self.rounds.entry;
        if !job.state().switch {
            return Ok(());
        }
        let source = entry.disk.clone();
        match apart(job, Some(Instant::now() + STALL), move || source.sync().is_ok())? {
            Some(_) => Ok(()),
            None => Err(Stop::Refused(self.old_image_hangs(job))),
        }
    }

    /// Returns why a disk cannot leave an image whose flush does not end.
    fn old_image_hangs(&self, job: &Job) -> Error {
        Error::busy(format!(
            "the image of disk {} took nothing for {} s, so the disk cannot leave it: complete the job again when its \
             storage answers, or end it with a complete copy ('vshunt job complete {} --no-switch'), remove the exports of \
             the disk and use {}",
            self.rounds.entry.name,
            STALL.as_secs(),
            job.id,
            job.target
        ))
    }

    /// Returns why a job is not completed whose guests write too fast.
    fn outrun(&self, job: &Job, hold: Duration) -> Error {
        Error::busy(format!(
            "guests of disk {} write faster than {} takes it: {} MiB are left after each round, which take about {} ms, \
             and guests may be held for {} ms: complete the job again when they write less, limit their writes \
             ('vshunt limit'), or let them be held for longer (--hold)",
            job.disk,
            job.target,
            self.rounds.written_bytes().div_ceil(1 << 20),
            self.rounds.rest_takes().as_millis(),
            hold.as_millis()
        ))
    }

    /// Holds guests, copies the rest and completes the job. Returns false if guests have written
    /// too much meanwhile; nothing was changed then.
    fn hold(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        hold: Duration,
        old: &mut Option<OldImage>,
    ) -> Result<bool, Stop> {
        let entry = &self.rounds.entry;
        let _op = entry.op_lock();
        let exports = daemon.state().exports_of(entry)?;
        if job.state().switch {
            // Some may have been added.
            check_survives(entry, &exports, &self.target, job).map_err(Stop::Refused)?;
        }
        // If the guests cannot be held, the user may do something about it.
        let held = with_disk_drained(entry, &exports, || Ok(self.last(daemon, job, hold, old)));
        let done = held.map_err(Stop::Refused)??;
        if let Some(gone) = self.target.entry.as_ref().filter(|_| done && job.state().switch) {
            let mut state = daemon.state();
            if state.disks.get(&gone.name).is_some_and(|there| Arc::ptr_eq(there, gone)) {
                state.disks.remove(&gone.name);
            }
        }
        Ok(done)
    }

    /// Copies the rest while guests are held, and completes the job.
    fn last(
        &self,
        daemon: &Daemon,
        job: &Arc<Job>,
        hold: Duration,
        old: &mut Option<OldImage>,
    ) -> Result<bool, Stop> {
        let (entry, target, begin) = (&self.rounds.entry, &self.target, Instant::now());
        // Nothing is left if guests have waited for the target.
        if self.rounds.is_following() {
            if !self.rounds.finish_following(daemon, job, begin + hold)? {
                return Ok(false);
            }
        } else if self.rounds.rest_takes() > hold {
            return Ok(false);
        }
        let stable = begin + STALL;
        // The estimate may be wrong.
        let limits = HoldLimits { copied: Some(begin + hold * 2), stable: Some(stable) };
        if !self.rounds.last(daemon, job, &target.disk, limits)? {
            return Ok(false);
        }
        if job.state().switch && !entry.disk.may_be_left(Instant::now() + MARK) {
            return Err(Stop::Refused(self.old_image_hangs(job)));
        }
        if let Some(file) = target.new_file() {
            // Its name may be gone since it was made stable.
            apart(job, Some(stable), move || file.check())?.unwrap_or_else(|| Err(took_nothing(job)))?;
        }
        // It cannot be cancelled from here on.
        job.decide(Ok(()))?;
        if let Some(bitmap) = &self.bitmap {
            // It says what the target lacks from now on, or the old image.
            bitmap.take()?;
            entry.watch();
        }
        // Guests continue without the target if this fails.
        self.mark_complete(job, stable).inspect_err(|_| self.outdated.store(true, SeqCst))?;
        if !job.state().switch {
            return Ok(true);
        }
        // A daemon that is killed before this leaves two equal images that can be used.
        let (now, next) = (entry.spec(), target.next(&entry.spec()));
        let mark = entry.disk.mark_left(&next);
        // It is done even if the other steps took long, and its storage may be why the disk moves.
        let marked = apart(job, Some(stable + MARK), mark);
        let marked = match marked {
            Ok(Some(marked)) => marked.map_err(|e| e.to_string()),
            Ok(None) => Err("its storage does not answer".to_owned()),
            Err(e) => Err(e.to_string()),
        };
        if let Err(why) = marked {
            tracing::warn!(
                "{} cannot be marked: {why}; do not use it any more, disk {} is in {}",
                now.image(),
                now.name,
                job.target
            );
        }
        *old = Some(entry.disk.continue_in(&now, &target.disk));
        job.state().continues_in = Some(next.image());
        entry.set_spec(next);
        Ok(true)
    }

    /// Marks the target as complete, by that time.
    fn mark_complete(&self, job: &Arc<Job>, until: Instant) -> Result<()> {
        let (disk, file) = (self.target.disk.clone(), self.target.new_file());
        let (source, outdated) = (self.rounds.entry.spec(), self.outdated.clone());
        let marked = apart(job, Some(until), move || {
            let marked = disk.mark_complete();
            // It took too long. Either this is seen here, or `give_up` marks the file after this.
            if outdated.load(SeqCst) {
                file.iter().for_each(|file| file.mark_outdated(&source));
            }
            marked
        })?;
        let marked = marked.ok_or_else(|| took_nothing(job))?;
        marked.map_err(|e| Error::io(format_args!("cannot mark {} as complete", job.target), e))
    }
}

/// Why a mirror is not completed.
enum Stop {
    /// It stays ready, so that the user can do something about it.
    Refused(Error),
    /// It has failed.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

/// Whether the rest becomes less, from round to round.
struct Trend {
    /// Bytes of the smallest rest.
    best: u64,
    /// When it was seen, and the number of rounds since.
    since: (Instant, u32),
}

impl Trend {
    fn new() -> Self {
        Self { best: u64::MAX, since: (Instant::now(), 0) }
    }

    /// Returns whether another round may help. `rest`: bytes that are left after a round.
    fn may_shrink(&mut self, rest: u64) -> bool {
        if rest < self.best / 10 * 9 {
            *self = Self { best: rest, since: (Instant::now(), 0) };
            return true;
        }
        self.since.1 += 1;
        self.since.1 < TREND_ROUNDS || self.since.0.elapsed() < TREND_TIME
    }
}

/// Releases a target without a complete copy. `outdated`: it may have been marked as a complete
/// copy of this disk.
fn give_up(target: Target, outdated: Option<&DiskSpec>) {
    if let (Some(file), Some(source)) = (target.new_file(), outdated) {
        file.mark_outdated(source);
    }
    // A disk of the daemon stays, and its user knows that the job failed. A new file is removed,
    // and one that was replaced stays marked.
    if target.entry.is_some()
        && let Err(e) = target.disk.mark_complete()
    {
        tracing::warn!("the target of a mirror stays marked as incomplete: {e}");
    }
    target.give_up();
}

/// Says which bitmaps are lost later if the disk continues in the target.
fn warn_of_bitmaps(entry: &DiskEntry, target: &Target, job: &Job) {
    let state = entry.watched.state();
    let kept: Vec<_> = state.bitmaps.iter().filter(|b| b.persistent).map(|b| b.name.as_str()).collect();
    if !kept.is_empty() && !target.disk.supports_bitmaps() {
        tracing::warn!(
            "job {}: {} cannot store dirty bitmaps, so after the switch those of disk {} ({}) are lost when the daemon ends, \
             and the next backup is a full one: mirror to qcow2 to keep them",
            job.id,
            job.target,
            entry.name,
            kept.join(", ")
        );
    }
}

/// Checks the request itself.
fn check(spec: &MirrorSpec) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("mirror of disk {}: {why}", spec.disk)));
    wanted(spec).check(&format!("mirror of disk {}", spec.disk))?;
    if spec.to.is_some() && (spec.bitmap.is_some() || spec.incremental.is_some()) {
        return wrong(
            "a file is removed if the mirror fails, so no bitmap can tell what it lacks; give a disk as the target",
        );
    }
    if spec.bitmap.is_some() && spec.incremental.is_some() {
        return wrong("an incremental mirror restarts its bitmap by itself; leave out bitmap");
    }
    Ok(())
}

/// Checks that the disk can continue in the target.
fn check_like(source: &DiskEntry, target: &Target) -> Result<()> {
    let (now, next) = (source.spec(), &target.spec);
    if matches!(next.format(), Format::Null | Format::Ram) {
        return Err(Error::invalid(format!(
            "disk {} is in memory, and would be lost with the daemon; choose another target",
            next.name
        )));
    }
    if next.cache != now.cache {
        return Err(Error::invalid(format!(
            "disk {} has another cache mode than disk {}, which keeps its own; add it with the same (cache=)",
            next.name, now.name
        )));
    }
    if let Some(bitmap) =
        target.entry.as_ref().and_then(|entry| entry.watched.bitmap_infos().into_iter().next())
    {
        return Err(Error::invalid(format!(
            "disk {} has dirty bitmaps ({}), which would be lost; remove them first",
            next.name, bitmap.name
        )));
    }
    source.disk.check_continues_in(&target.next(&now), &target.disk)
}

/// Checks that guests of a disk find all their completed writes in the target if the daemon is
/// killed, as in the image that the disk has now.
fn check_survives(source: &DiskEntry, exports: &[Arc<Export>], target: &Target, job: &Job) -> Result<()> {
    if exports.is_empty() || !source.disk.survives_kill() || target.disk.survives_kill() {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{} may lose completed writes when the daemon is killed, and guests of disk {1} count on it that none is lost: use a \
         raw target, or a qcow2 image that can have a map journal ('qemu-img amend -f qcow2 -o compat=1.1 FILE' makes \
         one of version 2 so), or remove the exports of {1} first",
        job.target, source.name
    )))
}

/// Returns the target that a mirror asks for.
fn wanted(spec: &MirrorSpec) -> Wanted<'_> {
    Wanted {
        to: spec.to.as_deref(),
        disk: spec.target.as_deref(),
        format: spec.format,
        overwrite: spec.overwrite,
        backing: None,
        stays_open: true,
    }
}
