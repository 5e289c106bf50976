//! Jobs and dirty bitmaps.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Format;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobKind {
    /// Copies a disk as it is at one point in time.
    Backup,
    /// Copies an overlay into the image below it.
    Commit,
    /// Copies to an overlay what is below it, until it needs nothing there.
    Stream,
    /// Copies a disk to another place while it is written, until the disk continues there.
    Mirror,
}

/// The state of a job, with QEMU's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobStatus {
    /// It copies.
    Running,
    /// It copies nothing ahead until it is resumed.
    Paused,
    /// All is copied, and what guests write is copied too, until a command ends the job.
    Ready,
    /// It was cancelled or has failed, and cleans up.
    Aborting,
    /// Everything is copied, and is being made stable.
    Pending,
    /// It has ended.
    Concluded,
}

/// A backup to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BackupSpec {
    /// The name of the disk.
    pub disk: String,
    /// The name of the job. Absent: `backup0`, `backup1` and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The file that is made. Exclusive with `target`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PathBuf>,
    /// The disk of the daemon that is copied to. It has the same size and no export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The name of a new read-only disk, which shows `disk` as it is at the point in time until the
    /// job is completed or cancelled. Nothing is copied. Exclusive with `to` and `target`; needs
    /// `fleece`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// The format of the file: `qcow2` or `raw`. Absent: `qcow2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Whether an existing file is replaced.
    #[serde(default)]
    pub overwrite: bool,
    /// Whether compressed clusters are written (qcow2).
    #[serde(default)]
    pub compress: bool,
    /// The dirty bitmap that starts at the point in time of the backup, for the next incremental
    /// one. It is made if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// The dirty bitmap that says which blocks are copied. It is reset at the point in time of the
    /// backup. With `pull`, the new disk has this bitmap, with the blocks that are to be copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// With `incremental`: the qcow2 image of the previous backup, which becomes the backing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<PathBuf>,
    /// The fleecing file: what guests overwrite waits there for the copy, so that guests do not
    /// wait for the target. It is made for the job, may be as large as the disk, and has no name
    /// while the job runs. A file with this name is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece: Option<PathBuf>,
    /// The speed limit in bytes per second; what guests overwrite is not limited. 0: no limit.
    /// Absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_finalize: Option<bool>,
}

/// A commit of the overlay of a disk to the image below it, or a stream: the overlay gets what is
/// below it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct OverlayJobSpec {
    /// The name of the disk.
    pub disk: String,
    /// The name of the job. Absent: `commit0` or `stream0`, and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_finalize: Option<bool>,
}

/// How a mirror copies what guests write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMode {
    /// In rounds, while guests go on.
    #[default]
    Background,
    /// At once: a write is complete only when the target has it.
    WriteBlocking,
}

/// A mirror to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MirrorSpec {
    /// The name of the disk.
    pub disk: String,
    /// The name of the job. Absent: `mirror0`, `mirror1` and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The file that is made. Exclusive with `target`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PathBuf>,
    /// The disk of the daemon that is copied to. It has the same size and no export. When the job
    /// completes, it is removed: the first disk has its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The format of the file: `qcow2` or `raw`. Absent: `qcow2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Whether an existing file is replaced, at once.
    #[serde(default)]
    pub overwrite: bool,
    /// With `target`: the dirty bitmap that the job restarts, which is made if it is missing. If
    /// the job fails, it says what the target lacks. If the job completes, it records later writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// With `target`: the dirty bitmap that says which blocks the target lacks; only these are
    /// copied. It is used as `bitmap` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// How it copies what guests write once it has copied the disk. Absent: `background`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_mode: Option<CopyMode>,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Whether it ends by itself, without `job-finalize`. Absent: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_finalize: Option<bool>,
}

/// The default of members that older daemons do not tell.
fn yes() -> bool {
    true
}

/// A job in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobInfo {
    /// The name.
    pub id: String,
    /// What it does.
    #[serde(rename = "type")]
    pub kind: JobKind,
    /// The name of the disk.
    pub disk: String,
    /// Where it copies to.
    pub target: String,
    /// The state.
    pub status: JobStatus,
    /// Bytes that are done.
    #[serde(rename = "current-progress")]
    pub done_bytes: u64,
    /// Bytes to be done in all.
    #[serde(rename = "total-progress")]
    pub total_bytes: u64,
    /// The speed limit in bytes per second. 0: no limit. Absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// The fleecing file, which has no name while the job runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece: Option<PathBuf>,
    /// The disk that a pull backup serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Bytes in the fleecing file now. Absent if there is none, or the job is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleece_bytes: Option<u64>,
    /// Why it failed. Of a mirror that is ready: why the latest command to complete it was not
    /// carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How a mirror copies what guests write now. It becomes `background` if the target takes
    /// nothing for 15 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_mode: Option<CopyMode>,
    /// Whether it ends by itself. If not, it is `pending` until `job-finalize`.
    #[serde(default = "yes")]
    pub auto_finalize: bool,
    /// Whether it leaves the list when it has ended.
    #[serde(default)]
    pub auto_dismiss: bool,
    /// Whether it was cancelled.
    #[serde(default)]
    pub cancelled: bool,
    /// The storage whose requests a job that was cancelled, and has not ended, waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The file or URI that its disk continues in, if it has moved the disk: it is to be served by
    /// this name from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues_in: Option<String>,
}

/// A dirty bitmap that is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BitmapSpec {
    /// The name of the disk.
    pub disk: String,
    /// The name, unique on the disk.
    pub name: String,
    /// Bytes for each bit, a power of two from 512 to 2 GiB. Absent: 64 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<u64>,
    /// Whether the bitmap is stored in the image when the disk is closed. Absent: true for qcow2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Whether the bitmap records no writes until it is enabled.
    #[serde(default)]
    pub disabled: bool,
}

/// A dirty bitmap in its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapInfo {
    /// The name.
    pub name: String,
    /// Bytes for each bit.
    pub granularity: u64,
    /// Bytes that are dirty.
    pub count: u64,
    /// Whether it records writes.
    pub recording: bool,
    /// Whether it is stored in the image.
    pub persistent: bool,
    /// Whether a job uses it.
    pub busy: bool,
}
