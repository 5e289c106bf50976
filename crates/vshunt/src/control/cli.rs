//! The command line: every flag, its help, its man page and its completion come from this table.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, Parser, Subcommand};
use vshunt_sandbox::Mode;
use vshunt_types::spec::{DiskSpec, ExportSpec, NetSpec, Steering, WorkerKind, WorkerSpec};

use super::metrics::Address;
use super::values::{Cpus, boxed_export, cpus, disk_size, nice, poll_us, spec, worker_name};

/// Where the daemon listens when nothing is said, for root.
const SOCKET_OF_ROOT: &str = "/run/vshunt.sock";

const ABOUT: &str =
    "Virtual disks and networks served by many queues and many workers: any queue, any worker, at any time";

const AFTER: &str = "\
Exit status:
  0  done
  1  failed: it was tried, and refused or went wrong; the message says why
  2  usage: the command line or the configuration file is wrong by itself,
     whatever is there; nothing was tried
  3  no daemon answers on the control socket
  `vshunt image check` and `convert` have codes of their own: see their --help

Environment:
  VSHUNT_CONTROL  the control socket, where -c/--control is not given
  VSHUNT_SANDBOX  on, log, off or kill, where --sandbox is not given

Examples:
  vshunt serve --disk name=d0,file=disk.img \\
      --export type=vhost-user-blk,name=vm0,disk=d0,socket=/tmp/vm0.sock
  vshunt status
  vshunt attach vm0:3 $(vshunt worker new --cpu 2)";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "vshunt", version, about = ABOUT, after_long_help = AFTER, max_term_width = 100)]
#[command(arg_required_else_help = true)]
pub(crate) struct Cli {
    /// Control socket of the daemon
    ///
    /// Without it: $VSHUNT_CONTROL, else /run/vshunt.sock for root, else $XDG_RUNTIME_DIR/vshunt.sock.
    #[arg(short, long, global = true, value_name = "SOCKET")]
    pub(crate) control: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct LogArgs {
    /// Log more to stderr: -v what happens, -vv details
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve disks and networks until a signal or `vshunt quit` ends it
    #[command(long_about = SERVE, after_long_help = SERVE_AFTER)]
    Serve(Box<ServeArgs>),
    /// Show disks, networks, exports, queues and workers
    #[command(after_long_help = STATUS_AFTER)]
    Status(ListArgs),
    /// Make, list, change and free workers
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Move a queue to a worker, while its I/O runs
    #[command(
        after_long_help = "Examples:\n  vshunt attach vm0:3 2\n  vshunt attach vm0:3 fast --timeout 500ms"
    )]
    Attach(AttachArgs),
    /// Add, remove and list disks
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Add, remove and list networks
    #[command(subcommand)]
    Net(NetCommand),
    /// Add, remove and list exports
    #[command(subcommand)]
    Export(ExportCommand),
    /// Make, describe, check and change images that nobody uses
    #[command(after_long_help = super::image::AFTER)]
    Image(super::image::ImageArgs),
    /// Back up disks that are in use
    #[command(subcommand)]
    Backup(super::jobs::args::BackupCommand),
    /// List, wait for, slow down and end jobs
    #[command(subcommand)]
    Job(super::jobs::args::JobCommand),
    /// Make, change and list dirty bitmaps: what was written since a backup
    #[command(subcommand)]
    Bitmap(super::jobs::args::BitmapCommand),
    /// Change the size of a disk; its guests are told
    ///
    /// A guest's requests beyond a new, nearer end fail; what lay there is gone.
    #[command(after_long_help = "Examples:\n  vshunt resize d0 2G\n  vshunt resize --shrink d0 512M")]
    Resize {
        /// Name of the disk
        disk: String,
        /// New size in bytes, or with K, M, G or T
        #[arg(value_parser = disk_size)]
        size: u64,
        /// Allow a size below the present one: what lies beyond is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Take a snapshot of a disk in use, or delete one
    #[command(after_long_help = super::snapshot::AFTER)]
    Snapshot(super::snapshot::SnapshotArgs),
    /// Bring what a disk's overlay has into the image below, where the disk goes on; prints the job's name
    #[command(after_long_help = super::jobs::args::COMMIT_AFTER)]
    Commit(super::jobs::args::CommitArgs),
    /// End the daemon; returns when it has let go of everything
    Quit {
        /// Even while mounted files are open, whose users lose them
        #[arg(long)]
        force: bool,
    },
    /// Send a command of the control protocol (QMP) and print what it returns as JSON
    #[command(after_long_help = super::pages::qmp_help())]
    Qmp {
        /// Name of the command
        command: String,
        /// Its arguments, a JSON object
        #[arg(value_name = "ARGUMENTS")]
        arguments: Option<String>,
    },
    /// Write the man pages into a directory
    Man {
        /// Where to; made if it is not there
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

const STATUS_AFTER: &str = "\
Columns of disks:
  MODE   ro or rw; direct: past the page cache (O_DIRECT); writethrough or
         unsafe: its cache, if that is not writeback
  PATH   how requests reach it: ring, by the worker's io_uring; inline, a file
         in memory, copied at once; memory, format ram; none, format null

Columns of networks, which are shown where there are any:
  QUEUES      of the interface that are open; of a switch the queue pairs of
              all its ports
  FROM-GUEST  frames that the guest sent, as the kernel counts the interface's;
              TO-GUEST: frames for it; DROPPED: those that were not taken

Columns of exports:
  BACKEND  the disk or network that it serves
  MODE   ro or rw, for its user
  STATE  connected: a front-end (a VMM) is there; waiting: none is; mounted;
         joined: an uplink, whose tap is a port of its switch; blocked: one that
         makes a loop with another one
         removing: it goes when its last requests end
  ENGINE user: requests are served by workers of this process; kernel: by the
         kernel (/dev/vhost-blk or /dev/vhost-net) and its workers; of a mount
         how they come to us: dev (channels of /dev/fuse), io_uring (a queue for
         each CPU, and a channel for what does not go by these); passthrough:
         the kernel reads and writes the image, only the rest comes to us.
         CHOSEN BECAUSE: why engine=auto is not kernel, or transport=auto not
         io_uring

Columns of ports, which are shown where there is a switch:
  VLANS     none; 5: untagged; 1-9t: tagged
  OPTIONS   mac-filter: only frames from the export's mac leave it; isolated: no
            frames to other isolated ports; reserved: 01:80:c2:00:00:00 to 0f pass
  MTU       the longest IP packet that passes
  LEARNT    addresses that were learnt behind it, of so many at most
  STATE     forwarding; blocked: an uplink that makes a loop with another one

Columns of queues (of a card: pairs of a receive and a transmit ring, of which
the kernel tells no counters with engine=kernel, and then the control queue; of an
uplink: the tap's, as if the tap were a guest of the switch):
  WORKER     the worker that it is attached to
  STATE      stopped: its guest does not use it; running; broken: its guest
             misused it, and it stands until the guest resets it, or an
             uplink's tap is gone
  SIZE       descriptors of the ring; 0 before its first start; of a mount how
             many requests can be under way
  IN-FLIGHT  requests taken and not completed; those of memory are completed as
             they are taken
  REQUESTS, ERRORS, READ, WRITTEN  since the export was added

Columns of workers:
  KIND     user: a thread of this process (stalled: it has something to do and
           has not run for a second); kernel: one of the kernel's, for the
           queues of one export
  CPU      where it may run
  POLL-US  for how long it may poll before it sleeps, in microseconds
  QUEUES   those attached to it, EXPORT:INDEX

The last line says what the sandbox restricts; see docs/sandbox.md.

With --json there is more; docs/control.md explains it.";

const SERVE: &str = "\
Serve disks and networks until a signal or `vshunt quit` ends it.

Disks, networks, exports and workers come from flags, from a configuration file, or later over the control
socket. The daemon stays in the foreground and says in one line on stderr what it serves where,
unless -q is given. SIGTERM, SIGINT and SIGHUP end it cleanly, with status 0; a signal that was ignored
at its start stays ignored.

A clean end waits for requests in flight, since guests' memory is in use. If a disk does not answer, it
waits for that disk, and warns. A second signal, more than a second after the first, ends the daemon at
once, with status 1: sockets and mounts may be left, and the next daemon does the requests again that
front ends keep in an in-flight region.

Once it has its sockets it gives up what it does not need: capabilities, system calls, paths (--sandbox).

The control socket has mode 0600. Its place is that of --control, else of the configuration file,
else of VSHUNT_CONTROL, else the default; --no-control has none. A daemon that answers there already
is an error; the socket of one that is gone is replaced.

A list is key=value,key=value; a comma inside a value is written `,,`. Booleans are
on|off|yes|no|true|false. Sizes take K, M, G and T, powers of 1024.

Disk keys: name, file, format=raw|qcow2|null|ram, size, readonly=on|off, direct=auto|on|off,
cache=writeback|writethrough|unsafe, locking=on|off, and of qcow2 cache-size.

Network keys: type=tap|switch, name. A switch joins the exports that use it. Of a tap: ifname or fd, netns, queues,
steering=auto|hash|rss|cpu, address, owner, group, persist=on|off. An interface called ifname, in the network namespace netns (a name as of `ip netns`, or a
path), is adopted (a tap, multi_queue for more queues than one, or a macvtap) and stays; else a tap is made,
set up, and removed with the network, unless it is to persist. fd: open descriptors of one, a queue each: 7 or
7:8:9. steering: which queue a frame comes to: by the kernel's flow table, a hash that it has already, a hash
over addresses and ports, or the sending CPU. owner and group: who else may open it. address: the interface's
own MAC; the guest's is the export's mac.

Export keys: type, name, queues, workers=default|per-queue|per-cpu|N, poll-us; per-cpu keeps
each worker on one CPU, where it does not poll unless poll-us is given. Of vhost-user besides:
memory-may-block=on|off: guests' memory may be in files of any file system, not only in memory (memfd, tmpfs, hugetlbfs);
where that file system does not answer, all queues of a worker wait.
 of type=vhost-user-blk: disk, socket or fd, readonly=on|off, serial, block-size,
  engine=user|kernel|auto: who serves it; kernel needs the module vhost_blk and a block device or raw file.
 of type=vhost-user-net: net, socket or fd, mac, mtu, engine=user|kernel|auto; queues are pairs of rings. kernel
  needs the module vhost_net and a tap; each pair has a kernel worker of its own then: leave out workers, or
  give per-cpu.
 of type=uplink: net (a switch), tap (a network of type=tap, which becomes a port of it), mtu.
 of both on a switch: mac-limit, vlan=N, trunk=N,,N-N, isolated=on|off, reserved=on|off; of type=vhost-user-net
  mac-filter=on|off: whether only frames from mac leave the port, on where mac is given. vlan: its frames are
  untagged at the port; trunk: their frames are tagged. isolated: no frames between isolated ports. mac-limit:
  addresses that are learnt behind it (256, an uplink 4096). reserved: 01:80:c2:00:00:00 to 0f pass.
 of type=fuse: disk, mountpoint, writable=on|off, growable=on|off, allow-other=auto|on|off,
  transport=auto|dev|io_uring, passthrough=auto|off.

Worker keys: name, cpu (as for taskset: 2-3,,6; or all), nice, poll-us. Worker 0 is there always.
 kind=kernel,export=NAME: a worker of the kernel, for an export with engine=kernel.";

const SERVE_AFTER: &str = "\
Configuration file:
  The same keys in TOML; flags add to it. Paths are relative to the working
  directory, as those of flags are.
    control = \"/run/vm.sock\"  # or false; metrics, pidfile, poll-us, sandbox,
                              # sandbox-workers and allow-path go here too
    [[disk]]
    name = \"d0\"
    file = \"/var/lib/vm/d0.img\"
    [[net]]
    type = \"tap\"
    name = \"n0\"
    ifname = \"vs0\"
    [[worker]]
    cpu = \"2-3\"
    [[export]]
    type = \"vhost-user-blk\"
    name = \"vm0\"
    disk = \"d0\"
    socket = \"/run/vm0.sock\"
    workers = \"per-queue\"

Socket activation:
  A socket that systemd passes (LISTEN_FDS) serves the export whose name or
  socket is its FileDescriptorName=, or whose socket it is bound to. One that
  is named `control`, or bound to the control path, is the control socket;
  one that is named `metrics` is for metrics.

Examples:
  vshunt serve --disk name=d0,file=disk.img \\
      --export type=vhost-user-blk,name=vm0,disk=d0,socket=/tmp/vm0.sock
  vshunt serve --net type=tap,name=n0,ifname=vs0 \\
      --export type=vhost-user-net,name=c0,net=n0,socket=/tmp/c0.sock,queues=2,workers=per-queue
  vshunt serve --net type=switch,name=s0 --net type=tap,name=n0,ifname=vs0 \\
      --export type=uplink,name=u0,net=s0,tap=n0,queues=2 \\
      --export type=vhost-user-net,name=c0,net=s0,socket=/tmp/c0.sock
  vshunt serve --config /etc/vshunt/vm.toml --pidfile /run/vm.pid --metrics 9150
  vshunt serve --disk name=m,format=ram,size=1G --no-control \\
      --worker name=fast,cpu=2-3,nice=-5 \\
      --export type=vhost-user-blk,name=vm0,disk=m,socket=/tmp/vm0.sock";

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ServeArgs {
    /// A disk; may be repeated
    #[arg(long = "disk", value_name = "KEY=VALUE,…", value_parser = spec::<DiskSpec>)]
    pub(crate) disks: Vec<DiskSpec>,
    /// A network; may be repeated
    #[arg(long = "net", value_name = "KEY=VALUE,…", value_parser = spec::<NetSpec>)]
    pub(crate) nets: Vec<NetSpec>,
    /// An export of a disk or a network; may be repeated
    #[arg(long = "export", value_name = "KEY=VALUE,…", value_parser = spec::<ExportSpec>)]
    pub(crate) exports: Vec<ExportSpec>,
    /// A worker besides worker 0; may be repeated
    #[arg(long = "worker", value_name = "KEY=VALUE,…", value_parser = spec::<WorkerSpec>)]
    pub(crate) workers: Vec<WorkerSpec>,
    /// Bound of adaptive polling of workers that name none, in microseconds; 0 never polls
    #[arg(long, value_name = "N", value_parser = poll_us)]
    pub(crate) poll_us: Option<u32>,
    /// Read disks, networks, exports and workers from a TOML file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Have no control socket
    #[arg(long, conflicts_with = "control")]
    pub(crate) no_control: bool,
    /// Serve metrics for Prometheus over HTTP at PORT of 127.0.0.1, ADDRESS:PORT or unix:PATH
    ///
    /// Whoever reaches that place may read them: there is no authentication. They change nothing. An address other than
    /// the loopback's is taken only as it is written out. docs/control.md has them all.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<Address>,
    /// Write the process id to a file, once everything is served
    #[arg(long, value_name = "FILE")]
    pub(crate) pidfile: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct SandboxArgs {
    /// What the daemon may do besides serving: on, log (allow, and have the kernel log it), off, kill (end at once)
    ///
    /// Without it: $VSHUNT_SANDBOX, else the configuration file's, else on. docs/sandbox.md says what is restricted.
    #[arg(id = "sandbox", long = "sandbox", value_name = "MODE", value_parser = sandbox_mode())]
    pub(crate) mode: Option<Mode>,
    /// Filter the system calls of workers, too, which makes each of them slower
    #[arg(id = "sandbox-workers", long = "sandbox-workers")]
    pub(crate) workers: bool,
    /// Let clients name files, sockets and mountpoints in this folder; may be repeated
    ///
    /// Clients have to pass all other files that are not configured, as the commands of vshunt do. docs/sandbox.md
    /// says more.
    #[arg(id = "allow-path", long = "allow-path", value_name = "FOLDER")]
    pub(crate) allow_paths: Vec<PathBuf>,
}

fn sandbox_mode() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(Mode::ALL.map(|(name, _)| name)).map(|name| name.parse().unwrap_or_default())
}

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
        /// Its id or name
        worker: String,
    },
    /// Change a worker; what is not given stays
    #[command(
        after_long_help = "Examples:\n  vshunt worker set 2 --cpu 4-5 --poll-us 0\n  vshunt worker set 2 --cpu all"
    )]
    Set {
        /// Its id or name
        worker: String,
        #[command(flatten)]
        change: WorkerArgs,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct NewWorkerArgs {
    /// Who runs it: this process (user), or the kernel, for an export with engine=kernel
    #[arg(long, default_value = "user", value_parser = worker_kind())]
    kind: WorkerKind,
    /// The export whose queues a worker of the kernel can have
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
    /// CPUs it may run on, for example 2, 0-3 or 0-1,6; all: every one that the daemon may use
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    cpu: Option<Cpus>,
    /// Nice value, -20 to 19
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = nice)]
    nice: Option<i32>,
    /// Bound of adaptive polling in microseconds; 0 never polls
    #[arg(long, value_name = "N", value_parser = poll_us)]
    poll_us: Option<u32>,
    /// Name in lists; its thread has the one that it was made with
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
    /// The queue, EXPORT:INDEX
    #[arg(value_parser = parse_queue)]
    pub(crate) queue: QueueName,
    /// Id or name of the worker
    pub(crate) worker: String,
    /// How long in-flight requests may take to finish; after it the queue stays where it was
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

/// A queue as users name it: `vm0:3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueName {
    pub(crate) export: String,
    pub(crate) index: u16,
}

fn parse_queue(text: &str) -> Result<QueueName, String> {
    let parts = text.rsplit_once(':').and_then(|(export, index)| Some((export, index.parse().ok()?)));
    match parts {
        Some((export, index)) if !export.is_empty() => Ok(QueueName { export: export.to_owned(), index }),
        _ => Err(format!("`{text}` is no queue; write EXPORT:INDEX, for example vm0:3")),
    }
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
    /// Change a network, also while it is used
    #[command(after_long_help = "Examples:\n  vshunt net set n1 --steering rss")]
    Set {
        /// Name of the network
        name: String,
        /// Which queue a frame comes to
        #[arg(long, value_name = "WAY", value_parser = steering())]
        steering: Steering,
    },
    /// Remove a network that is not exported
    Remove {
        /// Name of the network
        name: String,
    },
    /// List networks
    List(ListArgs),
    /// List the Ethernet addresses that a switch knows, and the ports they are behind
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
  VLAN    in which it was learnt; -: without VLANs, or all VLANs of the port
  PORT    the export behind which it is
  ORIGIN  configured: the export's mac; host: of an uplink's interface, or of the
          bridge that this is a port of; learnt: a frame from it came in there
  AGE     seconds since it sent a frame; it is forgotten after 300

Examples:
  vshunt net addresses s0
  vshunt net addresses s0 --json";

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Export a disk or a network
    #[command(after_long_help = "Keys:\n  Those of `vshunt serve --export`.\n\nExamples:\n  \
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
        /// Disconnect its front-end, if one is connected
        #[arg(long)]
        force: bool,
    },
    /// List exports
    List(ListArgs),
}

/// The control socket: `given`, else the environment's, else the user's default.
pub(crate) fn control_path(given: Option<&PathBuf>) -> Option<PathBuf> {
    let from = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    given.cloned().or_else(|| from("VSHUNT_CONTROL")).or_else(|| {
        if rustix::process::geteuid().is_root() {
            return Some(PathBuf::from(SOCKET_OF_ROOT));
        }
        from("XDG_RUNTIME_DIR").map(|d| d.join("vshunt.sock"))
    })
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
        assert_eq!(parse_queue("a:b:3"), Ok(QueueName { export: "a:b".into(), index: 3 }));
        for text in ["vm0", ":1", "vm0:", "vm0:x", "vm0:70000"] {
            assert!(parse_queue(text).is_err(), "{text}");
        }
        for (text, ms) in [("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("3", 3_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "1h", "-1s", "1.5s", "99999999999999999999m", "999999999999999999m"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
