//! Flags of jobs, backups and dirty bitmaps.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use vshunt_types::spec::Format;

use super::ListArgs;
use crate::values::{bytes, image_format};

pub(crate) const BACKUP_AFTER: &str = "\
Examples:
  vshunt backup start d0 --to full.qcow2 --bitmap b0 --wait
  vshunt backup start d0 --to monday.qcow2 --incremental b0 --backing full.qcow2
  vshunt backup start d0 --to d0.raw --format raw --speed 100M
  vshunt job wait backup0

docs/backup.md explains full and incremental backups, and how to restore them.";

pub(crate) const COMMIT_AFTER: &str = "\
Guests continue meanwhile. They wait for a moment when the disk is switched.
The overlay stays, marked as committed: remove it. A commit that fails or is
cancelled leaves the disk in its overlay.

Examples:
  vshunt snapshot d0 --to overlay.qcow2
  vshunt commit d0 --wait";

#[derive(Debug, Args)]
pub(crate) struct CommitArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// Speed limit in bytes per second, for example 100M; max: no limit; shared: guests keep most
    /// of their speed, which is the default
    #[arg(long, value_parser = speed)]
    pub(crate) speed: Option<Speed>,
    /// Name of the job [default: commit0, commit1 and so on]
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
    /// Wait until the job has ended; fails if the commit fails
    #[arg(long)]
    pub(crate) wait: bool,
}

/// The speed limit of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speed {
    /// Bytes per second.
    Bytes(u64),
    /// No limit.
    Max,
    /// Guests keep most of their speed.
    Shared,
}

impl Speed {
    /// Returns the limit as QMP encodes it.
    pub(crate) fn limit(self) -> Option<u64> {
        match self {
            Self::Bytes(n) => Some(n),
            Self::Max => Some(0),
            Self::Shared => None,
        }
    }
}

fn speed(text: &str) -> Result<Speed, String> {
    match text {
        "max" => Ok(Speed::Max),
        "shared" => Ok(Speed::Shared),
        _ => {
            let bytes = bytes(text).map_err(|_| {
                format!("`{text}` is no speed; write for example 100M (bytes a second), max or shared")
            })?;
            if bytes == 0 {
                Err("at a speed of 0 it would never end: pause the job, cancel it, or give max for no limit"
                    .into())
            } else {
                Ok(Speed::Bytes(bytes))
            }
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Copy a disk as it is now to a file, while it is in use; prints the name of the job
    #[command(after_long_help = BACKUP_AFTER)]
    Start(Box<BackupArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// The file; it is called FILE.part until it is complete
    #[arg(long, value_name = "FILE", required_unless_present = "target")]
    pub(crate) to: Option<PathBuf>,
    /// Copy to this disk of the daemon, which has the same size and no export
    #[arg(long, value_name = "DISK", conflicts_with_all = ["to", "format", "overwrite", "backing"])]
    pub(crate) target: Option<String>,
    /// Format of the file [default: qcow2]
    #[arg(long, value_parser = image_format())]
    pub(crate) format: Option<Format>,
    /// Write compressed clusters (qcow2)
    #[arg(long)]
    pub(crate) compress: bool,
    /// Start this dirty bitmap at the same point in time, for the next incremental backup: an
    /// existing one is cleared, a missing one is made
    #[arg(long, value_name = "NAME", conflicts_with = "incremental")]
    pub(crate) bitmap: Option<String>,
    /// Copy only the blocks that are dirty in this bitmap: those that were written since the
    /// previous backup; the bitmap is reset
    #[arg(long, value_name = "BITMAP")]
    pub(crate) incremental: Option<String>,
    /// The previous backup, which becomes the backing file of an incremental one (qcow2)
    #[arg(long, value_name = "FILE", requires = "incremental")]
    pub(crate) backing: Option<PathBuf>,
    /// Keep what guests overwrite in this new file until it is copied, so that guests do not wait
    /// for the target; it belongs on fast storage, has no name while the job runs, and may become
    /// as large as the disk
    #[arg(long, value_name = "FILE")]
    pub(crate) fleece: Option<PathBuf>,
    /// Speed limit in bytes per second, for example 100M; max: no limit; shared: guests keep most
    /// of their speed, which is the default
    #[arg(long, value_parser = speed)]
    pub(crate) speed: Option<Speed>,
    /// Replace an existing file
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Name of the job [default: backup0, backup1 and so on]
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
    /// Wait until the job has ended; fails if the backup fails
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// List jobs; ended jobs stay in the list until they are dismissed
    List(ListArgs),
    /// Wait until jobs have ended; fails if one of them failed
    Wait {
        /// Names of the jobs
        #[arg(required = true)]
        jobs: Vec<String>,
    },
    /// End a job before it is complete; the file of a backup is removed
    Cancel {
        /// Name of the job
        job: String,
    },
    /// Pause a job: it copies only what guests overwrite
    Pause {
        /// Name of the job
        job: String,
    },
    /// Resume a paused job
    Resume {
        /// Name of the job
        job: String,
    },
    /// Change the speed limit of a job
    Speed {
        /// Name of the job
        job: String,
        /// Speed limit in bytes per second, for example 100M; max: no limit; shared: guests keep
        /// most of their speed
        #[arg(value_parser = speed)]
        speed: Speed,
    },
    /// Remove ended jobs from the list
    Dismiss {
        /// Names of the jobs [default: all that have ended]
        jobs: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum BitmapCommand {
    /// Add a dirty bitmap, which records the writes from now on
    Add {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
        /// Bytes for each bit, a power of two from 512 to 2G [default: 64K]
        #[arg(long, value_parser = bytes)]
        granularity: Option<u64>,
        /// Whether it is stored in the image when the disk is closed [default: true for qcow2]
        #[arg(long, value_name = "BOOL")]
        persistent: Option<bool>,
        /// Record no writes until it is enabled
        #[arg(long)]
        disabled: bool,
    },
    /// Remove a dirty bitmap
    Remove {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Mark everything as clean
    Clear {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Record writes
    ///
    /// Earlier writes are not in the bitmap. It is useful for incremental backups after the next
    /// full backup that restarts it.
    Enable {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Record no writes
    Disable {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Mark in a bitmap what is dirty in others
    Merge {
        /// Name of the disk
        disk: String,
        /// The bitmap that changes
        into: String,
        /// The other bitmaps
        #[arg(required = true)]
        from: Vec<String>,
    },
    /// List dirty bitmaps
    List {
        /// Only those of this disk
        disk: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}
