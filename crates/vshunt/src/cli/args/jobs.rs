//! Flags of jobs, backups and dirty bitmaps.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use vshunt_types::spec::{CopyMode, Format};

use super::snapshot::disk_and_file;
use super::{ListArgs, parse_duration};
use crate::values::{bytes, copy_mode, image_format};

pub(crate) const BACKUP_AFTER: &str = "\
Examples:
  vshunt backup start d0 --to full.qcow2 --bitmap b0 --wait
  vshunt backup start d0 --to monday.qcow2 --incremental b0 --backing full.qcow2
  vshunt backup start d0 --to d0.raw --format raw --speed 100M
  vshunt backup start d0 --to d0.qcow2 --and d1=d1.qcow2 --bitmap b0 --wait
  vshunt job wait backup0
  vshunt backup start d0 --pull p0 --fleece /var/tmp/d0.fleece --bitmap b0
  vshunt job complete backup0

docs/backup.md explains full and incremental backups, and how to restore them.";

pub(crate) const COMMIT_AFTER: &str = "\
Guests continue meanwhile. They wait for a moment when the disk is switched.
The overlay stays, marked as committed: remove it. A commit that fails or is
cancelled leaves the disk in its overlay.

Examples:
  vshunt snapshot d0 --to overlay.qcow2
  vshunt commit d0 --wait";

pub(crate) const STREAM_AFTER: &str = "\
Guests continue meanwhile. At the end they wait for a moment, when the name of
the image below is removed from the overlay. A stream that fails or is cancelled
leaves the disk as it is, and the next one copies only the rest.

Examples:
  vshunt snapshot d0 --to overlay.qcow2
  vshunt stream d0 --wait";

pub(crate) const MIRROR_AFTER: &str = "\
The disk keeps its name, its exports and its guests. While the job copies and
when it is ready, the disk stays where it is; 'job complete' switches it to the
target, and guests wait for a moment. 'job complete --no-switch' ends the job
with a complete copy instead; 'job cancel' gives the target up.

Examples:
  vshunt mirror d0 --to /new/d0.qcow2 --wait
  vshunt job complete mirror0
  vshunt mirror d0 --to /dev/vg0/d0 --format raw --overwrite --switch
  vshunt disk add name=far,uri=nbd://storage/d0
  vshunt mirror d0 --target far --switch
  vshunt mirror d0 --target far --copy-mode write-blocking --wait
  vshunt mirror d0 --target far --bitmap m0 --wait
  vshunt mirror d0 --target far --incremental m0 --wait

docs/mirror.md explains what is where if something fails.";

#[derive(Debug, Args)]
pub(crate) struct MirrorArgs {
    /// Name of the disk
    pub(crate) disk: String,
    /// The file, or a device with --overwrite; it is complete when the job has ended
    #[arg(long, value_name = "FILE", required_unless_present = "target")]
    pub(crate) to: Option<PathBuf>,
    /// Copy to this disk of the daemon, which has the same size and no export; when the job
    /// completes, its image becomes that of the first disk, and its name is free
    #[arg(long, value_name = "DISK", conflicts_with_all = ["to", "format", "overwrite"])]
    pub(crate) target: Option<String>,
    /// Format of the file [default: qcow2]
    #[arg(long, value_parser = image_format())]
    pub(crate) format: Option<Format>,
    /// With --target: record in this dirty bitmap what the target lacks if the mirror fails, and
    /// later writes if not; an existing one is cleared, a missing one is made
    #[arg(long, value_name = "NAME", requires = "target", conflicts_with = "incremental")]
    pub(crate) bitmap: Option<String>,
    /// With --target: copy only the blocks that are dirty in this bitmap, which an earlier mirror
    /// to the same target has started (--bitmap)
    #[arg(long, value_name = "BITMAP", requires = "target")]
    pub(crate) incremental: Option<String>,
    /// Replace an existing file at once: what it has is lost even if the mirror fails
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// How guests' writes are copied once the disk is copied. background: some moments later;
    /// write-blocking: a write is complete only when the target has it, so the job can be completed
    /// however fast guests write [default: background]
    #[arg(long, value_name = "MODE", value_parser = copy_mode())]
    pub(crate) copy_mode: Option<CopyMode>,
    #[command(flatten)]
    pub(crate) flags: JobFlags,
    /// Wait until the job is ready; fails if the mirror fails
    #[arg(long)]
    pub(crate) wait: bool,
    /// Wait until the job is ready, and switch the disk to the target
    #[arg(long, conflicts_with = "no_finalize")]
    pub(crate) switch: bool,
    /// With --switch: as for 'job complete'
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "switch")]
    pub(crate) hold: Option<Duration>,
}

/// A job on the overlay of a disk: a commit or a stream.
#[derive(Debug, Args)]
pub(crate) struct OverlayJobArgs {
    /// Name of the disk
    pub(crate) disk: String,
    #[command(flatten)]
    pub(crate) flags: JobFlags,
    /// Wait until the job has ended; fails if the job fails
    #[arg(long)]
    pub(crate) wait: bool,
}

/// Flags of each command that starts a job.
#[derive(Debug, Args)]
pub(crate) struct JobFlags {
    /// Speed limit in bytes per second, for example 100M; max: no limit; shared: guests keep most
    /// of their speed, which is the default
    #[arg(long, value_parser = speed)]
    speed: Option<Speed>,
    /// When all is copied, wait for 'vshunt job finalize' before the last step
    #[arg(long)]
    pub(crate) no_finalize: bool,
    /// Name of the job [default: what it does and a number, for example backup0]
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
}

impl JobFlags {
    /// Returns the speed limit as QMP encodes it.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.speed.and_then(Speed::limit)
    }

    /// Returns whether the job ends by itself, if that was said.
    pub(crate) fn auto_finalize(&self) -> Option<bool> {
        self.no_finalize.then_some(false)
    }
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
    #[arg(long, value_name = "FILE", required_unless_present_any = ["target", "pull"])]
    pub(crate) to: Option<PathBuf>,
    /// Back up this disk, too, to FILE, at the same point in time; may be repeated. For incremental
    /// backups of several disks use 'vshunt qmp transaction'
    #[arg(
        long = "and",
        value_name = "DISK=FILE",
        requires = "to",
        conflicts_with_all = ["incremental", "fleece", "job"],
        value_parser = disk_and_file
    )]
    pub(crate) others: Vec<(String, PathBuf)>,
    /// Copy to this disk of the daemon, which has the same size and no export
    #[arg(long, value_name = "DISK", conflicts_with_all = ["to", "format", "overwrite", "backing"])]
    pub(crate) target: Option<String>,
    /// Copy nothing: make a read-only disk of this name, which shows the disk as it is now until
    /// the job is completed or cancelled; export it to the program that copies it
    #[arg(
        long,
        value_name = "NAME",
        requires = "fleece",
        conflicts_with_all = ["to", "target", "format", "compress", "backing", "speed", "overwrite", "no_finalize", "wait"]
    )]
    pub(crate) pull: Option<String>,
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
    /// previous backup; the bitmap is reset. With --pull, its blocks are offered to NBD clients
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
    /// Replace an existing file
    #[arg(long)]
    pub(crate) overwrite: bool,
    #[command(flatten)]
    pub(crate) flags: JobFlags,
    /// Wait until the job has ended; fails if the backup fails
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// List jobs; ended jobs stay in the list until they are dismissed
    List(ListArgs),
    /// Wait until jobs have ended or wait for a command: mirrors that are ready, jobs that were
    /// started with --no-finalize; fails if one of them failed
    Wait {
        /// Names of the jobs
        #[arg(required = true)]
        jobs: Vec<String>,
    },
    /// End a job before it is complete; a file that it made is removed, the bitmap of a backup
    /// restored, and the disk of a mirror stays where it is
    Cancel {
        /// Name of the job
        job: String,
        /// Also if exports serve the disk of a pull backup: their reads fail from then on
        #[arg(long)]
        force: bool,
    },
    /// Complete a mirror that is ready: its disk continues in the target. Or a pull backup whose
    /// disk was copied: its bitmap is reset for the next one; fails if the fleecing file cannot be
    /// trusted
    Complete {
        /// Name of the job
        job: String,
        /// The disk of a mirror stays where it is, and the target is a copy of it as it is now
        #[arg(long)]
        no_switch: bool,
        /// For how long the guests of a mirror may be held for what they have written last, at most
        /// 7s; if they write too much for that, the job stays ready [default: 300ms]
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        hold: Option<Duration>,
    },
    /// Finalize a job that was started with --no-finalize and has copied all (status: pending)
    Finalize {
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
