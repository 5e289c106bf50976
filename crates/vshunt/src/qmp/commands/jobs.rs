//! Commands for jobs and dirty bitmaps, with the names and arguments of QEMU where QEMU has the
//! command.
//!
//! Arguments of QEMU that are not supported are refused with their names.

use serde::Deserialize;
use serde_json::{Value, json};
use vshunt_daemon::Daemon;
use vshunt_types::spec::{BackupSpec, BitmapSpec, JobInfo, JobStatus};

use crate::qmp::context::{Answer, Arguments, Context, Nothing, done};
use crate::qmp::message::QmpError;

pub(crate) const BLOCKDEV_BACKUP: &str =
    "device target sync: full|incremental|bitmap [job-id bitmap bitmap-mode: on-success speed auto-dismiss]";

fn refuse<T>(why: &str) -> Result<T, QmpError> {
    Err(QmpError::generic(why))
}

pub(crate) fn backup_start(context: &Context, arguments: Arguments) -> Answer {
    let mut spec: BackupSpec = arguments.read()?;
    spec.to = spec.to.map(|to| context.fdsets.resolve(to, true)).transpose()?;
    spec.backing = spec.backing.map(|backing| context.fdsets.resolve(backing, false)).transpose()?;
    spec.fleece = spec.fleece.map(|file| context.fdsets.resolve(file, true)).transpose()?;
    Ok(json!({ "job": context.daemon.backup_start(&spec, false)? }))
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Sync {
    Full,
    Incremental,
    Bitmap,
    Top,
    None,
}

#[derive(PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum BitmapMode {
    OnSuccess,
    Never,
    Always,
}

#[derive(PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OnError {
    Report,
    Ignore,
    Enospc,
    Stop,
    Auto,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockdevBackup {
    /// The name of the job. Absent: `backup0`, `backup1` and so on.
    job_id: Option<String>,
    /// The name of the disk.
    device: String,
    /// The name of the disk to copy to. It has the same size and no export.
    target: String,
    /// `full` copies everything. `incremental` and `bitmap` copy what is dirty in `bitmap`. Other
    /// values are refused.
    sync: Sync,
    /// The dirty bitmap, for `incremental` and `bitmap`.
    bitmap: Option<String>,
    /// Only `on-success` is accepted, and `bitmap` requires it: the bitmap is reset if the backup
    /// succeeds.
    bitmap_mode: Option<BitmapMode>,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
    /// Only false is accepted: use `backup-start` with `to`.
    compress: Option<bool>,
    /// Only true is accepted.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
    /// Only `report` and `auto` are accepted.
    on_source_error: Option<OnError>,
    /// Only `report` and `auto` are accepted.
    on_target_error: Option<OnError>,
}

pub(crate) fn blockdev_backup(context: &Context, arguments: Arguments) -> Answer {
    let a: BlockdevBackup = arguments.read()?;
    if a.compress == Some(true) {
        return refuse("'compress' is of a file that is made: use backup-start with 'to'");
    }
    if a.auto_finalize == Some(false) {
        return refuse("a backup finalizes by itself; leave 'auto-finalize' out");
    }
    let errors = [&a.on_source_error, &a.on_target_error];
    if errors.into_iter().flatten().any(|e| !matches!(e, OnError::Report | OnError::Auto)) {
        return refuse(
            "a failure ends the backup and is reported, guests go on; leave 'on-source-error' and \
             'on-target-error' out",
        );
    }
    let incremental = match a.sync {
        Sync::Full if a.bitmap.is_some() => {
            return refuse("a full backup that begins a bitmap is made by backup-start with 'bitmap'");
        }
        Sync::Full => None,
        Sync::Incremental | Sync::Bitmap if a.bitmap.is_none() => return refuse("'bitmap' is missing"),
        Sync::Bitmap if a.bitmap_mode.is_none() => return refuse("'bitmap-mode' is missing"),
        Sync::Incremental | Sync::Bitmap => a.bitmap,
        Sync::Top | Sync::None => return refuse("'sync' is full, incremental or bitmap"),
    };
    if !matches!(a.bitmap_mode, None | Some(BitmapMode::OnSuccess)) {
        return refuse("the bitmap restarts if the backup succeeds; set 'bitmap-mode' to on-success");
    }
    let spec = BackupSpec {
        disk: a.device,
        target: Some(a.target),
        job: a.job_id,
        incremental,
        speed: a.speed,
        ..BackupSpec::default()
    };
    context.daemon.backup_start(&spec, a.auto_dismiss.unwrap_or(true))?;
    Ok(json!({}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CommitStart {
    /// The name of the disk.
    disk: String,
    /// The name of the job. Absent: `commit0`, `commit1` and so on.
    job: Option<String>,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
}

pub(crate) fn commit_start(context: &Context, arguments: Arguments) -> Answer {
    let CommitStart { disk, job, speed } = arguments.read()?;
    Ok(json!({ "job": context.daemon.commit_start(&disk, job.as_deref(), speed, false)? }))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockCommit {
    /// The name of the job. Absent: `commit0`, `commit1` and so on.
    job_id: Option<String>,
    /// The name of the disk.
    device: String,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
    /// Only true is accepted.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
}

/// Commits the active overlay into its backing image. The job completes by itself.
pub(crate) fn block_commit(context: &Context, arguments: Arguments) -> Answer {
    let a: BlockCommit = arguments.read()?;
    if a.auto_finalize == Some(false) {
        return refuse("a commit finalizes by itself; leave 'auto-finalize' out");
    }
    context.daemon.commit_start(&a.device, a.job_id.as_deref(), a.speed, a.auto_dismiss.unwrap_or(true))?;
    Ok(json!({}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Id {
    /// The name of the job.
    id: String,
}

/// Runs a command that changes a job, named by `id`.
pub(crate) fn by_id(
    context: &Context,
    arguments: Arguments,
    f: impl FnOnce(&Daemon, &str) -> vshunt_types::error::Result<()>,
) -> Answer {
    Ok(done(f(&context.daemon, &arguments.read::<Id>()?.id)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    /// The name of the job.
    device: String,
    /// Accepted without effect: it concerns jobs that wait to be completed, and there are none.
    #[serde(rename = "force")]
    _force: Option<bool>,
}

/// Runs a command that changes a job, named by `device`.
pub(crate) fn by_device(
    context: &Context,
    arguments: Arguments,
    f: impl FnOnce(&Daemon, &str) -> vshunt_types::error::Result<()>,
) -> Answer {
    let Device { device, .. } = arguments.read()?;
    Ok(done(f(&context.daemon, &device)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceSpeed {
    /// The name of the job.
    device: String,
    /// The speed limit in bytes per second. 0: no limit.
    speed: u64,
}

pub(crate) fn block_job_set_speed(context: &Context, arguments: Arguments) -> Answer {
    let DeviceSpeed { device, speed } = arguments.read()?;
    Ok(done(context.daemon.job_set_speed(&device, Some(speed))?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JobSpeed {
    /// The name of the job.
    id: String,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
}

pub(crate) fn job_set_speed(context: &Context, arguments: Arguments) -> Answer {
    let JobSpeed { id, speed } = arguments.read()?;
    Ok(done(context.daemon.job_set_speed(&id, speed)?))
}

/// Returns the members of QEMU's BlockJobInfo.
fn block_job(job: JobInfo) -> Value {
    json!({
        "type": job.kind,
        "device": job.id,
        "len": job.total_bytes,
        "offset": job.done_bytes,
        "busy": job.status == JobStatus::Running,
        "paused": job.status == JobStatus::Paused,
        "speed": job.speed.unwrap_or(0),
        "io-status": "ok",
        "ready": false,
        "status": job.status,
        "auto-finalize": true,
        "auto-dismiss": false,
    })
}

pub(crate) fn query_block_jobs(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(context.daemon.jobs().into_iter().map(block_job).collect())
}

pub(crate) fn bitmap_add(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.bitmap_add(&arguments.read()?)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewBitmap {
    /// The name of the disk.
    node: String,
    /// The name of the bitmap, unique on the disk.
    name: String,
    /// Bytes for each bit, a power of two from 512 to 2 GiB. Absent: 64 KiB.
    granularity: Option<u64>,
    /// Whether the bitmap is stored in the image when the disk is closed.
    #[serde(default)]
    persistent: bool,
    /// Whether the bitmap records no writes until it is enabled.
    #[serde(default)]
    disabled: bool,
}

pub(crate) fn block_dirty_bitmap_add(context: &Context, arguments: Arguments) -> Answer {
    let NewBitmap { node, name, granularity, persistent, disabled } = arguments.read()?;
    // The default of QEMU is false for all formats.
    let spec = BitmapSpec { disk: node, name, granularity, persistent: Some(persistent), disabled };
    Ok(done(context.daemon.bitmap_add(&spec)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BitmapName {
    /// The name of the disk.
    node: String,
    /// The name of the bitmap.
    name: String,
}

pub(crate) fn with_bitmap(
    context: &Context,
    arguments: Arguments,
    f: impl FnOnce(&Daemon, &str, &str) -> vshunt_types::error::Result<()>,
) -> Answer {
    let BitmapName { node, name } = arguments.read()?;
    Ok(done(f(&context.daemon, &node, &name)?))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Source {
    Name(String),
    Node(BitmapName),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Merge {
    /// The name of the disk.
    node: String,
    /// The bitmap that changes.
    target: String,
    /// The other bitmaps: names, or objects with `node` (the same disk) and `name`.
    bitmaps: Vec<Source>,
}

pub(crate) fn block_dirty_bitmap_merge(context: &Context, arguments: Arguments) -> Answer {
    let Merge { node, target, bitmaps } = arguments.read()?;
    let mut names = Vec::new();
    for source in bitmaps {
        names.push(match source {
            Source::Name(name) => name,
            Source::Node(b) if b.node == node => b.name,
            Source::Node(b) => {
                return Err(QmpError::generic(format!(
                    "bitmap {} is of node {}; only those of {node} can be added to {target}",
                    b.name, b.node
                )));
            }
        });
    }
    Ok(done(context.daemon.bitmap_merge(&node, &target, &names)?))
}
