//! Jobs and dirty bitmaps on the command line.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vshunt_types::spec::{
    BackupSpec, BitmapInfo, BitmapSpec, DiskInfo, Format, JobInfo, JobStatus, MirrorSpec, OverlayJobSpec,
};

use super::args::jobs::{BackupArgs, BackupCommand, BitmapCommand, JobCommand, MirrorArgs, OverlayJobArgs};
use super::call::{absolute, call, list, send, to_value};
use super::client::Client;
use super::passing::{self, Wanted};
use super::show;
use crate::image::{Bar, summary};
use crate::outcome::{Failure, Outcome, one_line, print, print_line};

/// The interval between two queries of a job that the command waits for.
const JOB_QUERY_INTERVAL: Duration = Duration::from_millis(100);
/// How long a job that was cancelled may take to end before the command fails.
const CANCEL_TIME: Duration = Duration::from_secs(10);

pub(crate) fn backup(client: &mut Client, command: BackupCommand, quiet: bool) -> Outcome {
    let BackupCommand::Start(mut args) = command;
    let wait = args.wait;
    let others = std::mem::take(&mut args.others);
    let first = spec(*args)?;
    let mut specs = vec![first];
    for (disk, file) in others {
        specs.push(BackupSpec { disk, to: absolute(Some(file))?, ..specs[0].clone() });
    }
    let wanted = specs.iter().flat_map(files).collect();
    let (command, arguments) = match &*specs {
        [one] => ("backup-start", to_value(one)?),
        all => {
            let action = |spec| Ok(json!({ "type": "backup-start", "data": to_value(spec)? }));
            ("transaction", json!({ "actions": all.iter().map(action).collect::<Outcome<Vec<_>>>()? }))
        }
    };
    let started: Value =
        passing::with(client, |_| Ok(wanted), &[], |client| call(client, command, arguments))?;
    let ids: Vec<_> = match &started["jobs"] {
        Value::Array(ids) => ids.iter().filter_map(Value::as_str).collect(),
        _ => started["job"].as_str().into_iter().collect(),
    };
    match wait {
        true => {
            let results = ids.iter().map(|id| wait_and_dismiss(client, id, quiet));
            all_of(results.filter_map(Outcome::err).collect())
        }
        false => ids.into_iter().try_for_each(print_line),
    }
}

/// Returns the outcome of several jobs, of which these have failed. A job is gone when its outcome
/// is known, so each failure is told.
fn all_of(mut failures: Vec<Failure>) -> Outcome {
    if failures.len() < 2 {
        return failures.pop().map_or(Ok(()), Err);
    }
    let code = failures.iter().map(Failure::code).max().unwrap_or(1);
    Err(Failure::Lines(code, failures.iter().map(ToString::to_string).collect()))
}

/// Starts a job on the overlay of a disk, with that command: a commit or a stream.
pub(crate) fn overlay_job(client: &mut Client, command: &str, args: OverlayJobArgs, quiet: bool) -> Outcome {
    let OverlayJobArgs { disk, flags, wait } = args;
    let before = place(client, &disk)?;
    let (speed, auto_finalize) = (flags.limit(), flags.auto_finalize());
    let spec = OverlayJobSpec { disk, job: flags.job, speed, auto_finalize };
    let value = to_value(&spec)?;
    let started: Value = passing::with(
        client,
        |client| passing::of_disk(client, &spec.disk),
        &[],
        |client| call(client, command, value),
    )?;
    let id = started["job"].as_str().unwrap_or_default().to_owned();
    if !wait {
        return print_line(&id);
    }
    wait_and_dismiss(client, &id, quiet)?;
    tell_moved(client, &id, &spec.disk, before, quiet)
}

pub(crate) fn mirror(client: &mut Client, args: MirrorArgs, quiet: bool) -> Outcome {
    let (wait, switch) = (args.wait || args.switch, args.switch);
    let spec = MirrorSpec {
        speed: args.flags.limit(),
        auto_finalize: args.flags.auto_finalize(),
        disk: args.disk,
        job: args.flags.job,
        to: absolute(args.to)?,
        target: args.target,
        format: args.format,
        overwrite: args.overwrite,
        bitmap: args.bitmap,
        incremental: args.incremental,
        copy_mode: args.copy_mode,
    };
    let files = spec.to.iter().flat_map(|to| target_file(to)).collect();
    // The disk may have to open the file again when it has it.
    let made: Vec<Wanted> = spec.to.iter().flat_map(|to| Wanted::file(to, true)).collect();
    let value = to_value(&spec)?;
    let before = place(client, &spec.disk)?;
    let started: Value =
        passing::with(client, |_| Ok(files), &made, |client| call(client, "mirror-start", value))?;
    let id = started["job"].as_str().unwrap_or_default().to_owned();
    if !wait {
        return print_line(&id);
    }
    if !switch {
        return wait_for(client, &id, Some(0), quiet);
    }
    // What it says when it is ready, this command does.
    wait_quietly(client, &id, Some(0), quiet)?;
    complete(client, &id, true, args.hold)?;
    // Another client may have dismissed it, or the daemon has ended.
    let _ = send(client, "job-dismiss", json!({ "id": id }));
    tell_moved(client, &id, &spec.disk, before, quiet)
}

/// Returns the file or URI that a disk is in. None: it has none, or there is no such disk.
fn place(client: &mut Client, disk: &str) -> Outcome<Option<String>> {
    let disks: Vec<DiskInfo> = call(client, "query-disks", json!({}))?;
    let image = disks.into_iter().find(|there| there.spec.name == disk).map(|there| there.spec.image());
    Ok(image.filter(|image| !image.is_empty()))
}

/// Prints where a disk is if a job has moved it. `before`: its [`place`] when the command began,
/// which was after the move if the job had ended by then.
fn tell_moved(client: &mut Client, id: &str, disk: &str, before: Option<String>, quiet: bool) -> Outcome {
    if quiet {
        return Ok(());
    }
    // The job has done its work, also if the daemon has ended since then. It may be dismissed, and
    // the disk may have been moved on.
    let told = jobs(client).ok().and_then(|jobs| jobs.into_iter().find(|job| job.id == id)?.continues_in);
    let now = place(client, disk).ok().flatten();
    match &now {
        Some(image) if now == told || now != before => print_line(&continues_in(disk, image)),
        _ => Ok(()),
    }
}

/// Does what ends a job, and prints where its disk is if that has moved it.
fn may_move<T>(
    client: &mut Client,
    id: &str,
    quiet: bool,
    end: impl FnOnce(&mut Client) -> Outcome<T>,
) -> Outcome<T> {
    let disk = jobs(client)?.into_iter().find(|job| job.id == id).map(|job| job.disk).unwrap_or_default();
    let before = place(client, &disk)?;
    let ended = end(client)?;
    tell_moved(client, id, &disk, before, quiet)?;
    Ok(ended)
}

/// Returns the line for a disk that continues in another file.
pub(super) fn continues_in(disk: &str, image: &str) -> String {
    format!("{disk} continues in {image}; serve it by this name from now on")
}

/// Returns the files that the daemon needs for a file that a job makes: the folder, or a device.
fn target_file(to: &Path) -> Vec<Wanted> {
    if passing::is_served_by_vshunt(to) {
        return Vec::new();
    }
    match std::fs::metadata(to) {
        Ok(meta) if !meta.is_file() => Wanted::file(to, true),
        _ => Wanted::folder_of(to),
    }
}

/// Returns the files that the daemon needs for a backup. A target file is made or replaced in its
/// folder; a target device is written.
fn files(spec: &BackupSpec) -> Vec<Wanted> {
    let to = spec.to.iter().flat_map(|to| target_file(to));
    let backing = spec.backing.iter().flat_map(|file| Wanted::image(file, Format::Qcow2, false, false));
    let fleece = spec.fleece.iter().flat_map(|file| Wanted::folder_of(file));
    to.chain(backing).chain(fleece).collect()
}

fn spec(args: BackupArgs) -> Outcome<BackupSpec> {
    if let Some(path) = args.to.as_ref().filter(|_| args.overwrite && args.backing.is_some())
        && args.backing.as_ref() == Some(path)
    {
        return Err(Failure::Usage(
            "a backup cannot replace its own backing image; choose another --to".into(),
        ));
    }
    let format = args.to.is_some().then(|| args.format.unwrap_or(Format::Qcow2));
    Ok(BackupSpec {
        speed: args.flags.limit(),
        auto_finalize: args.flags.auto_finalize(),
        disk: args.disk,
        job: args.flags.job,
        to: absolute(args.to)?,
        target: args.target,
        pull: args.pull,
        format: format.or(args.format),
        overwrite: args.overwrite,
        compress: args.compress,
        bitmap: args.bitmap,
        incremental: args.incremental,
        backing: absolute(args.backing)?,
        fleece: absolute(args.fleece)?,
    })
}

pub(crate) fn job(client: &mut Client, command: JobCommand, quiet: bool) -> Outcome {
    match command {
        JobCommand::List(args) => list(client, "query-jobs", args, show::jobs),
        JobCommand::Wait { jobs } => jobs
            .iter()
            .try_for_each(|id| may_move(client, id, quiet, |client| wait_for(client, id, None, quiet))),
        JobCommand::Cancel { job, force } => {
            match force {
                false => send(client, "job-cancel", json!({ "id": job }))?,
                true => send(client, "block-job-cancel", json!({ "device": job, "force": true }))?,
            };
            await_cancelled(client, &job)
        }
        JobCommand::Complete { job, no_switch, hold } => {
            match may_move(client, &job, quiet, |client| complete(client, &job, !no_switch, hold))? {
                End::Pending if !quiet => print(&finalize(&one_line(&job))),
                _ => Ok(()),
            }
        }
        JobCommand::Finalize { job } => may_move(client, &job, quiet, |client| {
            send(client, "job-finalize", json!({ "id": job }))?;
            wait_for_result(client, &job, false).map(|_| ())
        }),
        JobCommand::Pause { job } => send(client, "job-pause", json!({ "id": job })),
        JobCommand::Resume { job } => send(client, "job-resume", json!({ "id": job })),
        JobCommand::Speed { job, speed } => {
            send(client, "job-set-speed", json!({ "id": job, "speed": speed.limit() }))
        }
        JobCommand::Dismiss { jobs: named } => {
            let over = |j: &JobInfo| j.status == JobStatus::Concluded;
            let names = match named.is_empty() {
                true => jobs(client)?.into_iter().filter(over).map(|j| j.id).collect(),
                false => named,
            };
            names.iter().try_for_each(|id| send(client, "job-dismiss", json!({ "id": id })))
        }
    }
}

/// Waits until a job that was cancelled has ended, so that its target can be used again.
///
/// # Errors
/// The storage of the job does not answer.
fn await_cancelled(client: &mut Client, id: &str) -> Outcome {
    let until = Instant::now() + CANCEL_TIME;
    loop {
        let found = jobs(client)?.into_iter().find(|job| job.id == id);
        match found.filter(|job| job.status != JobStatus::Concluded) {
            None => return Ok(()),
            Some(job) if Instant::now() >= until => {
                let storage = job.waits_for.unwrap_or(job.target);
                return Err(Failure::Failed(format!(
                    "job {id} is cancelled, and ends when its last requests do: {storage} does not answer; `vshunt job list` shows \
                     it, and `vshunt job wait {id}` waits for its end"
                )));
            }
            Some(_) => std::thread::sleep(JOB_QUERY_INTERVAL),
        }
    }
}

/// How a job that was told to end is now.
enum End {
    Over,
    /// It waits to be finalized.
    Pending,
}

/// Completes a job, and waits until it has ended or is pending.
fn complete(client: &mut Client, id: &str, switch: bool, hold: Option<Duration>) -> Outcome<End> {
    let mut arguments = json!({ "id": id });
    if !switch {
        arguments["switch"] = false.into();
    }
    if let Some(hold) = hold {
        arguments["hold-ms"] = u64::try_from(hold.as_millis()).unwrap_or(u64::MAX).into();
    }
    send(client, "job-complete", arguments)?;
    wait_for_result(client, id, true)
}

/// Waits until a job that was told to end has ended, or to complete (`completes`) and waits to be
/// finalized. Fails with its error, also if a mirror stays
/// ready. A job that is gone was dismissed by itself.
fn wait_for_result(client: &mut Client, id: &str, completes: bool) -> Outcome<End> {
    loop {
        match jobs(client)?.into_iter().find(|job| job.id == id) {
            None => return Ok(End::Over),
            Some(JobInfo { status: JobStatus::Concluded, error, cancelled, .. }) => {
                return match error {
                    Some(why) => Err(Failure::Failed(format!("job {id} failed: {why}"))),
                    None if cancelled => Err(Failure::Failed(format!("job {id} was cancelled"))),
                    None => Ok(End::Over),
                };
            }
            Some(JobInfo { status: JobStatus::Pending, auto_finalize: false, .. }) if completes => {
                return Ok(End::Pending);
            }
            Some(JobInfo { status: JobStatus::Ready, error: Some(why), .. }) => {
                return Err(Failure::Failed(format!("job {id} stays ready: {why}")));
            }
            Some(_) => std::thread::sleep(JOB_QUERY_INTERVAL),
        }
    }
}

fn jobs(client: &mut Client) -> Outcome<Vec<JobInfo>> {
    call(client, "query-jobs", json!({}))
}

/// Waits until a job has ended, and dismisses it, because the user has seen its result. Or until it
/// waits to be finalized.
fn wait_and_dismiss(client: &mut Client, id: &str, quiet: bool) -> Outcome {
    let result = wait_for(client, id, Some(0), quiet);
    // It may have to be finalized, another client may have dismissed it, or the daemon has ended.
    let _ = send(client, "job-dismiss", json!({ "id": id }));
    result
}

/// Waits until a job has ended, or a mirror is ready. Prints what was copied during the wait, and
/// the rate. `before`: the bytes that were done when the wait began, if that is known. Fails with
/// the job's error if the job failed.
fn wait_for(client: &mut Client, id: &str, before: Option<u64>, quiet: bool) -> Outcome {
    let said = wait_quietly(client, id, before, quiet)?;
    if quiet { Ok(()) } else { print(&said) }
}

/// Does what [`wait_for`] does, and returns the line instead of printing it.
fn wait_quietly(client: &mut Client, id: &str, mut before: Option<u64>, quiet: bool) -> Outcome<String> {
    let (mut bar, start) = (Bar::bytes(id, quiet, false), Instant::now());
    loop {
        let jobs = jobs(client)?;
        let Some(job) = jobs.iter().find(|j| j.id == id) else {
            return Err(Failure::Failed(format!("there is no job {id}; see `vshunt job list`")));
        };
        let before = *before.get_or_insert(job.done_bytes);
        bar.set(job.done_bytes, job.total_bytes.max(1));
        let line: fn(&str, u64, u64, Duration) -> String = match job.status {
            JobStatus::Ready => ready,
            JobStatus::Pending if !job.auto_finalize => pending,
            JobStatus::Concluded => match (&job.error, job.cancelled) {
                (Some(why), _) => return Err(Failure::Failed(format!("job {id} failed: {why}"))),
                (None, true) => return Err(Failure::Failed(format!("job {id} was cancelled"))),
                (None, false) => ended,
            },
            _ => {
                std::thread::sleep(JOB_QUERY_INTERVAL);
                continue;
            }
        };
        drop(bar);
        return Ok(line(&one_line(id), before, job.done_bytes, start.elapsed()));
    }
}

/// Returns the line for a mirror that is ready.
fn ready(id: &str, before: u64, done: u64, waited: Duration) -> String {
    let copied = done.saturating_sub(before);
    let text = summary(&format!("{id} is ready:"), copied, waited);
    format!("{}; 'vshunt job complete {id}' switches its disk\n", text.trim_end())
}

/// Returns the line for a job that waits to be finalized.
fn pending(id: &str, before: u64, done: u64, waited: Duration) -> String {
    let text = summary(&format!("{id} is pending:"), done.saturating_sub(before), waited);
    format!("{}; 'vshunt job finalize {id}' ends it\n", text.trim_end())
}

/// Returns the line for a mirror that is completed and waits to be finalized.
fn finalize(id: &str) -> String {
    format!("{id} is pending; 'vshunt job finalize {id}' ends it\n")
}

/// Returns the line for a job that is done. `before`: the bytes that were done when the wait began.
fn ended(id: &str, before: u64, done: u64, waited: Duration) -> String {
    match done.saturating_sub(before) {
        // It had ended before, so its time is not known.
        0 if done > 0 => format!("{id} is done: {done} bytes\n"),
        copied if before > 0 => summary(&format!("{id} is done: {done} bytes, the last"), copied, waited),
        copied => summary(&format!("{id} is done:"), copied, waited),
    }
}

pub(crate) fn bitmap(client: &mut Client, command: BitmapCommand) -> Outcome {
    let named = |disk: String, name: String| json!({ "node": disk, "name": name });
    match command {
        BitmapCommand::Add { disk, name, granularity, persistent, disabled } => {
            let spec = BitmapSpec { disk, name, granularity, persistent, disabled };
            send(client, "bitmap-add", to_value(&spec)?)
        }
        BitmapCommand::Remove { disk, name } => send(client, "block-dirty-bitmap-remove", named(disk, name)),
        BitmapCommand::Clear { disk, name } => send(client, "block-dirty-bitmap-clear", named(disk, name)),
        BitmapCommand::Enable { disk, name } => send(client, "block-dirty-bitmap-enable", named(disk, name)),
        BitmapCommand::Disable { disk, name } => {
            send(client, "block-dirty-bitmap-disable", named(disk, name))
        }
        BitmapCommand::Merge { disk, into, from } => {
            let arguments = json!({ "node": disk, "target": into, "bitmaps": from });
            send(client, "block-dirty-bitmap-merge", arguments)
        }
        BitmapCommand::List { disk, json } => {
            let disks: Vec<DiskInfo> = call(client, "query-disks", json!({}))?;
            let wanted = disks.iter().filter(|d| disk.as_ref().is_none_or(|name| *name == d.spec.name));
            let found: Vec<(&str, &BitmapInfo)> =
                wanted.flat_map(|d| d.bitmaps.iter().map(|b| (d.spec.name.as_str(), b))).collect();
            if let Some(name) = disk.as_ref().filter(|n| disks.iter().all(|d| d.spec.name != **n)) {
                return Err(Failure::Failed(format!("there is no disk {name}; see `vshunt disk list`")));
            }
            match json {
                true => {
                    let with = |(disk, bitmap): &(&str, &BitmapInfo)| -> Outcome<Value> {
                        let mut value = to_value(bitmap)?;
                        value["disk"] = (*disk).into();
                        Ok(value)
                    };
                    let all: Vec<Value> = found.iter().map(with).collect::<Outcome<_>>()?;
                    print(&format!("{:#}\n", Value::Array(all)))
                }
                false => print(&show::bitmaps(&found)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_job_has_bytes_time_and_rate() {
        let second = Duration::from_secs(1);
        assert_eq!(ended("j", 0, 3 << 20, second), "j is done: 3 MiB (3145728 bytes) in 1.000 s, 3 MiB/s\n");
        let late = ended("j", 1 << 20, 3 << 20, second);
        assert_eq!(late, "j is done: 3145728 bytes, the last 2 MiB (2097152 bytes) in 1.000 s, 2 MiB/s\n");
        assert_eq!(ended("j", 3 << 20, 3 << 20, second), "j is done: 3145728 bytes\n");
        assert_eq!(ended("j", 0, 0, second), "j is done: 0 B (0 bytes) in 1.000 s, 0 B/s\n");
        // A number that shrinks is no reason to panic.
        assert_eq!(ended("j", 9, 8, second), "j is done: 8 bytes\n");
    }
}
