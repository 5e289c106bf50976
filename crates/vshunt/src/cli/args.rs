//! The command line. Help, man pages and completions are generated from this table of flags.

pub(crate) mod balance;
pub(crate) mod config;
mod examples;
pub(crate) mod jobs;
pub(crate) mod latency;
pub(crate) mod limit;
mod qmp_help;
pub(crate) mod snapshot;
pub(crate) mod status;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use vshunt_types::spec::{DiskSpec, ExportSpec, NetSpec, Steering, WorkerKind, WorkerSpec};

use crate::config::args::{LogArgs, MOUNT, MOUNT_AFTER, MountArgs, SERVE, SERVE_AFTER, ServeArgs};
use crate::values::{
    Cpus, QueueNames, SizeChange, boxed_export, cpus, disk_size_change, nice, parse_queues, poll_us, spec,
    worker_name,
};
use crate::{doctor, image, keyval};

const ABOUT: &str =
    "Virtual disks and networks served by many queues and many workers: any queue, any worker, at any time";

const AFTER: &str = "\
Exit status:
  0  success
  1  failure: the command was tried, and the daemon or the system refused it,
     or it failed. The message gives the reason
  2  usage: the command line or the configuration file is wrong in itself, or
     a file that it names to be served or read as configuration is missing.
     Nothing was tried
  3  no daemon answers on the control socket
  `vshunt image check`, `compare`, `convert` and `dd` have codes of their own:
  see their --help

Environment:
  VSHUNT_CONTROL  the control socket, if -c/--control is not given
  VSHUNT_SANDBOX  on, log, off or kill, if --sandbox is not given

Examples:
  vshunt serve disk.img
  vshunt status
  vshunt attach disk:3 $(vshunt worker new --cpu 2)
  vshunt mount disk.qcow2 /tmp/disk
  vshunt serve --disk name=d0,file=disk.img \\
      --export type=vhost-user-blk,name=vm0,disk=d0,socket=/tmp/vm0.sock";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "vshunt", version, about = ABOUT, after_long_help = AFTER, max_term_width = 80)]
#[command(arg_required_else_help = true)]
pub(crate) struct Cli {
    /// Control socket of the daemon
    ///
    /// Without it: $VSHUNT_CONTROL, otherwise /run/vshunt.sock for root and
    /// $XDG_RUNTIME_DIR/vshunt.sock for other users, where /run/user/UID stands in for a missing
    /// variable.
    #[arg(short, long, global = true, value_name = "SOCKET")]
    pub(crate) control: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve disks and networks until a signal or `vshunt quit` ends it
    #[command(long_about = SERVE, after_long_help = SERVE_AFTER)]
    Serve(Box<ServeArgs>),
    /// Show the disk in an image as a file of the host
    #[command(long_about = MOUNT, after_long_help = MOUNT_AFTER)]
    Mount(Box<MountArgs>),
    /// Show disks, networks, exports, queues and workers
    #[command(after_long_help = status::AFTER)]
    Status(status::StatusArgs),
    /// Show rates of exports, queues and workers, and move queues by keys
    #[command(after_long_help = TOP_AFTER)]
    Top(TopArgs),
    /// Check a configuration file, or print one of what runs
    #[command(subcommand, after_long_help = examples::CONFIG)]
    Config(config::ConfigCommand),
    /// Make, list, change and free workers
    #[command(subcommand, after_long_help = examples::WORKER)]
    Worker(WorkerCommand),
    /// Move queues to a worker while I/O runs
    ///
    /// Prints where the queues are now. The queues move one after the other. If one of them does
    /// not come to rest in time, it stays, and those after it are not moved.
    #[command(
        after_long_help = "Examples:\n  vshunt attach vm0:3 2\n  vshunt attach vm0:0-3 fast --timeout \
                                 500ms\n  vshunt attach vm0 0"
    )]
    Attach(AttachArgs),
    /// Have queues follow load: move them to less busy workers
    #[command(after_long_help = balance::AFTER)]
    Balance(balance::BalanceArgs),
    /// Show how long requests took, or reset that
    #[command(after_long_help = latency::AFTER)]
    Latency(latency::LatencyArgs),
    /// Limit the operations, packets and bytes per second of an export
    #[command(after_long_help = limit::AFTER)]
    Limit(Box<limit::LimitArgs>),
    /// Add, remove and list disks
    #[command(subcommand, after_long_help = examples::DISK)]
    Disk(DiskCommand),
    /// Add, remove and list networks
    #[command(subcommand, after_long_help = examples::NET)]
    Net(NetCommand),
    /// Add, remove and list exports
    #[command(subcommand, after_long_help = examples::EXPORT)]
    Export(ExportCommand),
    /// Create, describe, check and change images that no program uses
    #[command(after_long_help = image::AFTER)]
    Image(image::ImageArgs),
    /// Back up disks that are in use
    #[command(subcommand, after_long_help = examples::BACKUP)]
    Backup(jobs::BackupCommand),
    /// List, wait for, limit and end jobs
    #[command(subcommand, after_long_help = examples::JOB)]
    Job(jobs::JobCommand),
    /// Make, change and list dirty bitmaps: the blocks that were written since a backup
    #[command(subcommand, after_long_help = examples::BITMAP)]
    Bitmap(jobs::BitmapCommand),
    /// Change the size of a disk; its guests are told
    ///
    /// After a disk has shrunk, requests of a guest beyond the new end fail, and the data there is
    /// lost.
    #[command(
        after_long_help = "Examples:\n  vshunt resize d0 2G\n  vshunt resize d0 +64M\n  vshunt resize --shrink d0 512M"
    )]
    Resize {
        /// Name of the disk
        disk: String,
        #[arg(value_name = "[+|-]SIZE", value_parser = disk_size_change, allow_hyphen_values = true,
            help = concat!("New size in bytes, or with ", keyval::size_units!(), " (", keyval::size_rule!(),
                "); with + or - a change of the size"))]
        size: SizeChange,
        /// Allow a smaller size: the data beyond it is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Take a snapshot of a disk in use, or delete one
    #[command(after_long_help = snapshot::AFTER)]
    Snapshot(snapshot::SnapshotArgs),
    /// Copy the overlay of a disk into the image below, where the disk continues; prints the name
    /// of the job
    #[command(after_long_help = jobs::COMMIT_AFTER)]
    Commit(jobs::OverlayJobArgs),
    /// Copy to the overlay of a disk what is below it, until it needs nothing there; prints the
    /// name of the job
    #[command(after_long_help = jobs::STREAM_AFTER)]
    Stream(jobs::OverlayJobArgs),
    /// Copy a disk in use to another place, where it then continues; prints the name of the job
    #[command(after_long_help = jobs::MIRROR_AFTER)]
    Mirror(jobs::MirrorArgs),
    /// End the daemon; returns when everything is released
    ///
    /// It refuses while front ends (VMMs) are connected or mounted files are open, and names them.
    /// SIGTERM ends the daemon without that question, as a service manager expects it.
    Quit {
        /// End even if front ends are connected or mounted files are open. A guest whose VMM
        /// reconnects waits for the next daemon; users of files get errors
        #[arg(long)]
        force: bool,
    },
    /// Send a command of the control protocol (QMP), and print the answer as JSON
    #[command(after_long_help = qmp_help::qmp_help())]
    Qmp {
        /// Name of the command
        command: String,
        /// Arguments of the command, a JSON object
        #[arg(value_name = "ARGUMENTS")]
        arguments: Option<String>,
    },
    /// Check what vshunt needs on this host, and name the remedy for what is missing
    #[command(after_long_help = doctor::AFTER)]
    Doctor(ListArgs),
    /// Write the man pages into a directory
    Man {
        /// The directory; a missing one is made
        directory: PathBuf,
    },
    /// Print the completions for a shell
    #[command(after_long_help = "Examples:\n  vshunt completions bash >/etc/bash_completion.d/vshunt")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two samples, for example 500ms or 2s
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub(crate) interval: Duration,
    /// Print the tables of one interval, and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Print a line of JSON for each interval; with --once, one line
    #[arg(long)]
    pub(crate) json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        time if (INTERVAL_MIN..=INTERVAL_MAX).contains(&time) => Ok(time),
        _ => Err("an interval is 100ms to 60m".into()),
    }
}

/// Limits of the time between two samples of `top`. Each sample asks the daemon for all queues.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(3600);

const TOP_AFTER: &str = "\
Keys:
  Tab          next table; the selected row is in the table with the bold title
  arrows, j k  select a row
  m            move the selected queue, or all queues of the selected export, to
               a worker
  s, r         sort by name, requests or bytes (workers: busy); reverse
  /            show only names that contain a text; Esc shows all again
  space        pause
  ?            list the keys
  q, Ctrl-C    quit

Columns:
  REQ/s      requests completed per second; of a network: frames
  READ/s, WRITTEN/s  bytes that the guest read and wrote per second
  ERR/s      requests that completed with an error, per second
  IN-FLIGHT  requests that are taken and not completed, at this moment
  BUSY%      share of its time in which the worker handled requests. The bar
             shows it as |, and the share of polling as :
  POLL%      share in which it looked for requests; it slept in the rest
  CPU%       share of one CPU that the worker used. It includes polling
  NOTE       hot: the worker is busy for 90 % of its time or more; stalled: it
             has work and has not run for one second; kernel: a worker of the
             kernel
  SLEEPS/s   how often the worker waited for requests

Queues that no guest has started are left out. A message below tells which queues
moved to another worker. If the daemon ends, top waits for the next one. NO_COLOR
or TERM=dumb in the environment: no colours.

On a narrow terminal, long lists and names are cut (…), and some columns are left
out. --once cuts nothing if stdout is no terminal.

Examples:
  vshunt top
  vshunt top --once
  vshunt top --json --interval 5s | jq .workers";

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Make a worker; prints its id
    #[command(
        after_long_help = "Examples:\n  vshunt worker new --cpu 2\n  id=$(vshunt worker new --name fast)\n  \
            vshunt worker new --kind kernel --export vm0"
    )]
    New(NewWorkerArgs),
    /// List workers
    List(ListArgs),
    /// Free a worker that has no queues; worker 0 stays
    Free {
        /// Id or name of the worker
        worker: String,
    },
    /// Change a worker; settings that are not given stay as they are
    #[command(
        after_long_help = "Examples:\n  vshunt worker set 2 --cpu 4-5 --poll-us 0\n  vshunt worker set 2 --cpu all"
    )]
    Set {
        /// Id or name of the worker
        worker: String,
        #[command(flatten)]
        change: WorkerArgs,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct NewWorkerArgs {
    /// What runs the worker: a thread of the daemon (user), or the kernel, for an export with
    /// engine=kernel
    #[arg(long, default_value = "user", value_parser = worker_kind())]
    kind: WorkerKind,
    /// For --kind kernel: the export whose queues the worker can have
    #[arg(long, value_name = "NAME")]
    export: Option<String>,
    #[command(flatten)]
    settings: WorkerArgs,
}

fn worker_kind() -> impl TypedValueParser<Value = WorkerKind> {
    PossibleValuesParser::new(["user", "kernel"]).map(|kind| match kind.as_str() {
        "kernel" => WorkerKind::Kernel,
        _ => WorkerKind::User,
    })
}

fn steering() -> impl TypedValueParser<Value = Steering> {
    PossibleValuesParser::new(Steering::ALL.map(|(word, _)| word))
        .map(|word| word.parse().unwrap_or_default())
}

impl NewWorkerArgs {
    pub(crate) fn into_spec(self) -> WorkerSpec {
        let kind = Some(self.kind).filter(|kind| *kind != WorkerKind::default());
        WorkerSpec { kind, export: self.export, ..self.settings.into_spec() }
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct WorkerArgs {
    /// CPUs that the worker may run on, for example 2, 0-3 or 0-1,6; all: all CPUs of the daemon
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    cpu: Option<Cpus>,
    /// Nice value, -20 to 19
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = nice)]
    nice: Option<i32>,
    /// Limit of adaptive polling in microseconds; 0: never poll
    #[arg(long, value_name = "N", value_parser = poll_us)]
    poll_us: Option<u32>,
    /// Name in lists; the thread keeps the name that the worker was made with
    #[arg(long, value_parser = worker_name)]
    name: Option<String>,
}

impl WorkerArgs {
    pub(crate) fn into_spec(self) -> WorkerSpec {
        let cpu = self.cpu.map(|c| c.0);
        WorkerSpec { name: self.name, cpu, nice: self.nice, poll_us: self.poll_us, ..WorkerSpec::default() }
    }
}

#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The queues: EXPORT:INDEX, EXPORT:FIRST-LAST, or EXPORT for all of its queues
    #[arg(value_parser = parse_queues)]
    pub(crate) queues: QueueNames,
    /// Id or name of the worker
    pub(crate) worker: String,
    /// How long the requests in flight of a queue may take; after that the queue stays where it was
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no time; write for example 10s, 500ms or 2m");
    let unit = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..unit].parse().map_err(|_| bad())?;
    let factor_ms = match &text[unit..] {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        _ => return Err(bad()),
    };
    number.checked_mul(factor_ms).map(Duration::from_millis).ok_or_else(bad)
}

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Add a disk
    #[command(after_long_help = "Keys:\n  Those of `vshunt serve --disk`.\n\nExamples:\n  \
        vshunt disk add name=d1,file=disk.img,readonly=on")]
    Add {
        /// The disk
        #[arg(value_name = "KEY=VALUE,…", value_parser = spec::<DiskSpec>)]
        disk: DiskSpec,
    },
    /// Remove a disk that is not exported
    Remove {
        /// Name of the disk
        name: String,
    },
    /// List disks
    List(ListArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetCommand {
    /// Add a network
    #[command(after_long_help = "Keys:\n  Those of `vshunt serve --net`.\n\nExamples:\n  \
        vshunt net add type=tap,name=n1,ifname=vs1\n  \
        vshunt net add type=tap,name=n2,ifname=vs2,netns=red,steering=rss")]
    Add {
        /// The network
        #[arg(value_name = "KEY=VALUE,…", value_parser = spec::<NetSpec>)]
        net: NetSpec,
    },
    /// Change a network, also while it is in use
    #[command(after_long_help = "Examples:\n  vshunt net set n1 --steering rss")]
    Set {
        /// Name of the network
        name: String,
        /// How the queue of a frame for the guest is chosen
        #[arg(long, value_name = "STEERING", value_parser = steering())]
        steering: Steering,
    },
    /// Remove a network that is not exported
    Remove {
        /// Name of the network
        name: String,
    },
    /// List networks
    List(ListArgs),
    /// List the Ethernet addresses that a switch knows, and their ports
    #[command(after_long_help = ADDRESSES_AFTER)]
    Addresses {
        /// Name of the network, a switch
        name: String,
        #[command(flatten)]
        list: ListArgs,
    },
}

const ADDRESSES_AFTER: &str = "\
Columns:
  VLAN    the VLAN in which it was learnt; -: no VLANs, or all VLANs of the port
  PORT    the export of the port
  ORIGIN  configured: the mac of the export; host: an address of the interface of
          an uplink, or of its bridge; learnt: a frame came from it
  AGE     seconds since it sent a frame; it is forgotten after 300

Examples:
  vshunt net addresses s0
  vshunt net addresses s0 --json";

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Export a disk or a network
    ///
    /// Without `type`, a disk is exported by vhost-user-blk and a network by vhost-user-net.
    /// Without `socket`, it is NAME.sock in /run/vshunt, for users other than root in
    /// $XDG_RUNTIME_DIR/vshunt, and its path is printed.
    #[command(after_long_help = "Keys:\n  Those of `vshunt serve --export`.\n\nExamples:\n  \
        vshunt export add disk=d1\n  \
        vshunt export add type=vhost-user-blk,name=vm1,disk=d1,socket=/tmp/vm1.sock")]
    Add {
        /// The export
        #[arg(value_name = "KEY=VALUE,…", value_parser = boxed_export)]
        export: Box<ExportSpec>,
    },
    /// Remove an export
    Remove {
        /// Name of the export
        name: String,
        /// Remove it even if a front end is connected or the mounted file is open
        #[arg(long)]
        force: bool,
    },
    /// List exports
    List(ListArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn negative_and_listed_values() {
        let cli = Cli::try_parse_from(["vshunt", "worker", "new", "--nice", "-5", "--cpu", "0-1,3"]).unwrap();
        let Command::Worker(WorkerCommand::New(args)) = cli.command else { panic!("{:?}", cli.command) };
        let spec = args.into_spec();
        assert_eq!((spec.nice, spec.cpu), (Some(-5), Some(vec![0, 1, 3])));
    }

    #[test]
    fn queues_and_times() {
        let queues = |export: &str, indices| Ok(QueueNames { export: export.into(), indices });
        assert_eq!(parse_queues("a:b:3"), queues("a:b", Some(3..=3)));
        assert_eq!(parse_queues("vm0:0-3"), queues("vm0", Some(0..=3)));
        assert_eq!((parse_queues("vm0"), parse_queues("vm0:*")), (queues("vm0", None), queues("vm0", None)));
        for text in ["", ":1", "vm0:", "vm0:x", "vm0:-1", "vm0:65536", "vm0:3-2", "vm0:1-", ":*"] {
            assert!(parse_queues(text).is_err(), "{text}");
        }
        for (text, ms) in [("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("3", 3_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "1h", "-1s", "1.5s", "99999999999999999999m", "999999999999999999m"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
