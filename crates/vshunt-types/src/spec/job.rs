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
    /// Brings what an overlay has into the image below.
    Commit,
}

/// How far a job came; the names are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobStatus {
    /// It copies.
    Running,
    /// It copies nothing ahead until it is resumed.
    Paused,
    /// It was cancelled or has failed, and cleans up.
    Aborting,
    /// All is copied; what it used is let go.
    Pending,
    /// It is over.
    Concluded,
}

/// A backup to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BackupSpec {
    /// The disk.
    pub disk: String,
    /// Name of the job; absent: `backup0` and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The file to be made. Exclusive with `target`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PathBuf>,
    /// A disk of the daemon to copy to, as large, without an export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Of the file: `qcow2` (if absent) or `raw`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Replace a file that is there.
    #[serde(default)]
    pub overwrite: bool,
    /// Write compressed clusters (qcow2).
    #[serde(default)]
    pub compress: bool,
    /// A bitmap that is begun at the backup's point in time, for the next incremental one; made if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Only what this bitmap says was written; it begins anew at the backup's point in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// Of an incremental backup: the qcow2 image of the backup before, which the new file stands on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<PathBuf>,
    /// Bytes a second to be copied at most (what guests overwrite comes on top); 0: as fast as it goes, whatever guests
    /// lose; absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
}

/// A job as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobInfo {
    /// Its name.
    pub id: String,
    /// What it does.
    #[serde(rename = "type")]
    pub kind: JobKind,
    /// The disk.
    pub disk: String,
    /// Where it copies to.
    pub target: String,
    /// How far it came.
    pub status: JobStatus,
    /// Bytes dealt with.
    #[serde(rename = "current-progress")]
    pub done_bytes: u64,
    /// Bytes to be dealt with.
    #[serde(rename = "total-progress")]
    pub total_bytes: u64,
    /// Bytes a second at most; 0: no limit; absent: guests keep most of their speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether it was cancelled.
    #[serde(default)]
    pub cancelled: bool,
}

/// A dirty bitmap to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BitmapSpec {
    /// The disk.
    pub disk: String,
    /// Unique on that disk.
    pub name: String,
    /// Bytes that a bit stands for, a power of two from 512 to 2 GiB; absent: 64 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<u64>,
    /// Whether it is kept in the image when the disk is closed; absent: where the image is qcow2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Whether writes are not recorded at first.
    #[serde(default)]
    pub disabled: bool,
}

/// A dirty bitmap as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Bytes that are dirty.
    pub count: u64,
    /// Whether writes are recorded.
    pub recording: bool,
    /// Whether it is kept in the image.
    pub persistent: bool,
    /// A job uses it.
    pub busy: bool,
}
