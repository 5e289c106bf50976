//! Commands for jobs and dirty bitmaps, with the names and arguments of QEMU where QEMU has the
//! command.
//!
//! Arguments of QEMU that are not supported are refused with their names.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use vshunt_daemon::Daemon;
use vshunt_types::spec::{BackupSpec, BitmapSpec, CopyMode, JobInfo, JobStatus, MirrorSpec, OverlayJobSpec};

use crate::qmp::context::{Answer, Arguments, Context, Nothing, done};
use crate::qmp::message::QmpError;

pub(crate) const BLOCKDEV_BACKUP: &str = "device target sync: full|incremental|bitmap [job-id bitmap bitmap-mode: on-success speed auto-finalize auto-dismiss]";

pub(crate) const BLOCKDEV_MIRROR: &str =
    "device target sync: full [job-id speed copy-mode auto-finalize auto-dismiss]";

fn refuse<T>(why: &str) -> Result<T, QmpError> {
    Err(QmpError::generic(why))
}

/// Returns a backup whose files are those of fd sets where it names these.
pub(super) fn with_files(context: &Context, mut spec: BackupSpec) -> Result<BackupSpec, QmpError> {
    spec.to = spec.to.map(|to| context.fdsets.resolve(to, true)).transpose()?;
    spec.backing = spec.backing.map(|backing| context.fdsets.resolve(backing, false)).transpose()?;
    spec.fleece = spec.fleece.map(|file| context.fdsets.resolve(file, true)).transpose()?;
    Ok(spec)
}

pub(crate) fn backup_start(context: &Context, arguments: Arguments) -> Answer {
    let spec = with_files(context, arguments.read()?)?;
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

/// Refuses what a job does not do after an error. `kind`: what the job makes. `members`: the
/// members of the command that say it, for the message.
fn check_on_error(errors: &[&Option<OnError>], kind: &str, members: &str) -> Result<(), QmpError> {
    match errors.iter().copied().flatten().all(|e| matches!(e, OnError::Report | OnError::Auto)) {
        true => Ok(()),
        false => Err(QmpError::generic(format!(
            "a failure ends the {kind} and is reported, guests go on; leave {members} out"
        ))),
    }
}

/// The members of QEMU's commands for errors of a copy.
const ON_ERRORS: &str = "'on-source-error' and 'on-target-error'";

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct BlockdevBackup {
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
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
    /// Only `report` and `auto` are accepted.
    on_source_error: Option<OnError>,
    /// Only `report` and `auto` are accepted.
    on_target_error: Option<OnError>,
}

impl BlockdevBackup {
    /// Returns the backup, and whether its job leaves the list when it ends.
    pub(super) fn spec(self) -> Result<(BackupSpec, bool), QmpError> {
        let a = self;
        if a.compress == Some(true) {
            return refuse("'compress' is of a file that is made: use backup-start with 'to'");
        }
        check_on_error(&[&a.on_source_error, &a.on_target_error], "backup", ON_ERRORS)?;
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
            auto_finalize: a.auto_finalize,
            ..BackupSpec::default()
        };
        Ok((spec, a.auto_dismiss.unwrap_or(true)))
    }
}

pub(crate) fn blockdev_backup(context: &Context, arguments: Arguments) -> Answer {
    let (spec, auto_dismiss) = arguments.read::<BlockdevBackup>()?.spec()?;
    context.daemon.backup_start(&spec, auto_dismiss)?;
    Ok(json!({}))
}

pub(crate) fn commit_start(context: &Context, arguments: Arguments) -> Answer {
    let spec: OverlayJobSpec = arguments.read()?;
    Ok(json!({ "job": context.daemon.commit_start(&spec, false)? }))
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
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
}

/// Commits the active overlay into its backing image. The job completes by itself.
pub(crate) fn block_commit(context: &Context, arguments: Arguments) -> Answer {
    let a: BlockCommit = arguments.read()?;
    let spec =
        OverlayJobSpec { disk: a.device, job: a.job_id, speed: a.speed, auto_finalize: a.auto_finalize };
    context.daemon.commit_start(&spec, a.auto_dismiss.unwrap_or(true))?;
    Ok(json!({}))
}

pub(crate) fn stream_start(context: &Context, arguments: Arguments) -> Answer {
    let spec: OverlayJobSpec = arguments.read()?;
    Ok(json!({ "job": context.daemon.stream_start(&spec, false)? }))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockStream {
    /// The name of the job. Absent: `stream0`, `stream1` and so on.
    job_id: Option<String>,
    /// The name of the disk.
    device: String,
    /// Refused: a stream copies from all images below.
    base: Option<String>,
    /// Refused, as `base`.
    base_node: Option<String>,
    /// Refused, as `base`.
    bottom: Option<String>,
    /// Refused: no image is below afterwards.
    backing_file: Option<String>,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
    /// Only `report` and `auto` are accepted.
    on_error: Option<OnError>,
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
}

/// Copies to the active overlay what is below it. The job completes by itself.
pub(crate) fn block_stream(context: &Context, arguments: Arguments) -> Answer {
    let a: BlockStream = arguments.read()?;
    if [&a.base, &a.base_node, &a.bottom, &a.backing_file].into_iter().any(Option::is_some) {
        return refuse(
            "a stream copies from all images below, and none is below afterwards; leave 'base', 'base-node', 'bottom' and \
             'backing-file' out",
        );
    }
    check_on_error(&[&a.on_error], "stream", "'on-error'")?;
    let spec =
        OverlayJobSpec { disk: a.device, job: a.job_id, speed: a.speed, auto_finalize: a.auto_finalize };
    context.daemon.stream_start(&spec, a.auto_dismiss.unwrap_or(true))?;
    Ok(json!({}))
}

pub(crate) fn mirror_start(context: &Context, arguments: Arguments) -> Answer {
    let mut spec: MirrorSpec = arguments.read()?;
    spec.to = spec.to.map(|to| context.fdsets.resolve(to, true)).transpose()?;
    Ok(json!({ "job": context.daemon.mirror_start(&spec, false)? }))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockdevMirror {
    /// The name of the job. Absent: `mirror0`, `mirror1` and so on.
    job_id: Option<String>,
    /// The name of the disk.
    device: String,
    /// The name of the disk to copy to. It has the same size and no export. It is removed when the
    /// job completes: the first disk has its image.
    target: String,
    /// Only `full` is accepted.
    sync: Sync,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    speed: Option<u64>,
    /// How it copies what guests write once it has copied the disk. Absent: `background`.
    copy_mode: Option<CopyMode>,
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    auto_finalize: Option<bool>,
    /// Whether the job leaves the list when it ends. Absent: true.
    auto_dismiss: Option<bool>,
    /// Only `report` and `auto` are accepted.
    on_source_error: Option<OnError>,
    /// Only `report` and `auto` are accepted.
    on_target_error: Option<OnError>,
}

pub(crate) fn blockdev_mirror(context: &Context, arguments: Arguments) -> Answer {
    let a: BlockdevMirror = arguments.read()?;
    check_on_error(&[&a.on_source_error, &a.on_target_error], "mirror", ON_ERRORS)?;
    if !matches!(a.sync, Sync::Full) {
        return refuse("a mirror copies all of the disk: 'sync' is full");
    }
    let spec = MirrorSpec {
        disk: a.device,
        target: Some(a.target),
        job: a.job_id,
        copy_mode: a.copy_mode,
        speed: a.speed,
        auto_finalize: a.auto_finalize,
        ..MirrorSpec::default()
    };
    context.daemon.mirror_start(&spec, a.auto_dismiss.unwrap_or(true))?;
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
}

/// Runs a command that changes a job, named by `device`.
pub(crate) fn by_device(
    context: &Context,
    arguments: Arguments,
    f: impl FnOnce(&Daemon, &str) -> vshunt_types::error::Result<()>,
) -> Answer {
    let Device { device } = arguments.read()?;
    Ok(done(f(&context.daemon, &device)?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockJobCancel {
    /// The name of the job.
    device: String,
    /// Whether a mirror that is ready is given up, too, and a pull backup whose disk has exports.
    /// If not, the mirror completes, and its disk stays where it is: the target is a copy of the
    /// disk as it is now.
    #[serde(default)]
    force: bool,
}

pub(crate) fn block_job_cancel(context: &Context, arguments: Arguments) -> Answer {
    let BlockJobCancel { device, force } = arguments.read()?;
    let daemon = &context.daemon;
    Ok(done(if force { daemon.job_cancel(&device, true) } else { daemon.job_cancel_softly(&device) }?))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct JobComplete {
    /// The name of the job.
    id: String,
    /// Whether the disk of a mirror continues in the target. If not, the target is a copy of the
    /// disk as it is now. Absent: true.
    switch: Option<bool>,
    /// For how long guests may be held for what they have written last, 1 to 7000 ms. If they write
    /// too much for that, a mirror stays ready. Absent: 300.
    hold_ms: Option<u64>,
}

pub(crate) fn job_complete(context: &Context, arguments: Arguments) -> Answer {
    let JobComplete { id, switch, hold_ms } = arguments.read()?;
    let hold = hold_ms.map(Duration::from_millis);
    Ok(done(context.daemon.job_complete(&id, switch.unwrap_or(true), hold)?))
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
        "ready": job.status == JobStatus::Ready,
        "status": job.status,
        "auto-finalize": job.auto_finalize,
        "auto-dismiss": job.auto_dismiss,
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
pub(super) struct NewBitmap {
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

impl NewBitmap {
    pub(super) fn spec(self) -> BitmapSpec {
        let Self { node, name, granularity, persistent, disabled } = self;
        // The default of QEMU is false for all formats.
        BitmapSpec { disk: node, name, granularity, persistent: Some(persistent), disabled }
    }
}

pub(crate) fn block_dirty_bitmap_add(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.bitmap_add(&arguments.read::<NewBitmap>()?.spec())?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BitmapName {
    /// The name of the disk.
    pub(super) node: String,
    /// The name of the bitmap.
    pub(super) name: String,
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
