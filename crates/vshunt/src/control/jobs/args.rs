//! Their flags.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use vshunt_types::spec::Format;

use crate::control::cli::ListArgs;
use crate::control::values::bytes;

pub(crate) const BACKUP_AFTER: &str = "\
Examples:
  vshunt backup start d0 --to full.qcow2 --bitmap b0 --wait
  vshunt backup start d0 --to monday.qcow2 --incremental b0 --backing full.qcow2
  vshunt backup start d0 --to d0.raw --format raw --speed 100M
  vshunt job wait backup0

docs/backup.md explains full and incremental backups, and how to restore them.";

pub(crate) const COMMIT_AFTER: &str = "\
Guests go on meanwhile; they wait for a moment when the disk is switched over.
The overlay is left behind, marked as committed: remove it. A commit that fails
or is cancelled leaves the disk in its overlay.

Examples:
  vshunt snapshot d0 --to overlay.qcow2
  vshunt commit d0 --wait";

#[derive(Debug, Args)]
pub(crate) struct CommitArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// Bytes a second, for example 100M; max: as fast as it goes; shared: guests keep most of their speed, as without it
    #[arg(long, value_parser = speed)]
    pub(crate) speed: Option<Speed>,
    /// Name of the job: commit0 and so on unless given
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
    /// Wait until it is over; fails if the commit does
    #[arg(long)]
    pub(crate) wait: bool,
}

/// How fast a job goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speed {
    /// Bytes a second.
    Bytes(u64),
    /// As fast as it goes.
    Max,
    /// Guests keep most of theirs.
    Shared,
}

impl Speed {
    /// As the protocol has it.
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

/// Formats of images, as flags name them.
pub(crate) fn image_format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"]).map(|f| if f == "raw" { Format::Raw } else { Format::Qcow2 })
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Copy a disk as it is now to a file, while it goes on being written; prints the job's name
    #[command(after_long_help = BACKUP_AFTER)]
    Start(Box<BackupArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// The file to be made; it is called FILE.part until it is whole
    #[arg(long, value_name = "FILE", required_unless_present = "target")]
    pub(crate) to: Option<PathBuf>,
    /// Copy to this disk of the daemon, which is as large and has no export
    #[arg(long, value_name = "DISK", conflicts_with_all = ["to", "format", "overwrite", "backing"])]
    pub(crate) target: Option<String>,
    /// Format of the file: qcow2 unless given
    #[arg(long, value_parser = image_format())]
    pub(crate) format: Option<Format>,
    /// Write compressed clusters (qcow2)
    #[arg(long)]
    pub(crate) compress: bool,
    /// Begin this dirty bitmap at the same point in time, for the next incremental backup: cleared if there is one,
    /// made if there is none
    #[arg(long, value_name = "NAME", conflicts_with = "incremental")]
    pub(crate) bitmap: Option<String>,
    /// Copy only what this dirty bitmap says was written since the backup before; it begins anew
    #[arg(long, value_name = "BITMAP")]
    pub(crate) incremental: Option<String>,
    /// The backup before, which an incremental one stands on (qcow2)
    #[arg(long, value_name = "FILE", requires = "incremental")]
    pub(crate) backing: Option<PathBuf>,
    /// Bytes a second, for example 100M; max: as fast as it goes; shared: guests keep most of their speed, as without it
    #[arg(long, value_parser = speed)]
    pub(crate) speed: Option<Speed>,
    /// Replace a file that is there
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Name of the job: backup0 and so on unless given
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
    /// Wait until it is over; fails if the backup does
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// List jobs, those that are over until they are dismissed
    List(ListArgs),
    /// Wait until jobs are over; fails if one of them did
    Wait {
        /// Names of the jobs
        #[arg(required = true)]
        jobs: Vec<String>,
    },
    /// End a job before its time; a backup's file is removed
    Cancel {
        /// Name of the job
        job: String,
    },
    /// Have a job copy nothing but what guests overwrite
    Pause {
        /// Name of the job
        job: String,
    },
    /// Have a paused job go on
    Resume {
        /// Name of the job
        job: String,
    },
    /// Change how fast a job goes
    Speed {
        /// Name of the job
        job: String,
        /// Bytes a second, for example 100M; max: as fast as it goes; shared: guests keep most of their speed
        #[arg(value_parser = speed)]
        speed: Speed,
    },
    /// Forget jobs that are over
    Dismiss {
        /// Names of the jobs; without one all that are over
        jobs: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum BitmapCommand {
    /// Begin a dirty bitmap: it takes note of what is written from now on
    Add {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
        /// Bytes that a bit stands for, 512 to 2G, a power of two: 64K unless given
        #[arg(long, value_parser = bytes)]
        granularity: Option<u64>,
        /// Whether it is kept in the image when the disk is closed: yes for qcow2 unless given
        #[arg(long, value_name = "BOOL")]
        persistent: Option<bool>,
        /// Take note of nothing until it is enabled
        #[arg(long)]
        disabled: bool,
    },
    /// End a dirty bitmap
    Remove {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Have everything count as clean
    Clear {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Take note of writes
    ///
    /// What was written before is not in it: it says what to back up after the next full backup that begins it anew.
    Enable {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Take no note of writes
    Disable {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Add what is dirty in others to a bitmap
    Merge {
        /// Name of the disk
        disk: String,
        /// The bitmap that changes
        into: String,
        /// The others
        #[arg(required = true)]
        from: Vec<String>,
    },
    /// List dirty bitmaps
    List {
        /// Of this disk alone
        disk: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}
