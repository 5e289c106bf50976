//! The flags that `vshunt serve` and the other server programs share.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use vshunt_sandbox::Mode;
use vshunt_types::spec::{BalanceMode, DiskSpec, ExportSpec, NetSpec, SocketAccess, SocketMode, WorkerSpec};

use super::LogFormat;
use crate::keyval;
use crate::metrics::Address;
use crate::outcome::{Failure, Outcome};
use crate::values::{balance_mode, poll_us, spec};

/// The environment variable for the mode of the sandbox if no flag is given. It has priority over a
/// configuration file, so that a test suite can run all daemons with one setting.
const VARIABLE: &str = "VSHUNT_SANDBOX";

#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct LogArgs {
    /// Log more to stderr, with times: -v events, -vv also protocol messages and control commands
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

pub(crate) const SERVE: &str = concat!(
    "\
Serve disks and networks until a signal or `vshunt quit` ends it.

Disks, networks, exports and workers come from flags, from a configuration file, or later over the control \
socket. The daemon stays in the foreground. Unless -q is given, it prints one line on stderr that says \
what is served where. SIGTERM, SIGINT and SIGHUP end it cleanly, with status 0. A signal that was ignored at \
the start stays ignored. The limit of the size of files (ulimit -f) fails requests and does not end it.

A clean end waits for the requests in flight, because the memory of guests is in use. If a disk does not \
answer, the daemon warns, and waits for it until 60 seconds after the signal; for the target of a job that is \
cancelled 10 seconds. A second signal, more than one second after the first, ends the daemon at once. Its \
status is 4 then, as when something had not ended: sockets and mounts may be left, and the next daemon \
repeats the requests that front ends keep in an in-flight region.

Once the daemon has its sockets, it gives up the capabilities, system calls and paths that it does not need \
(--sandbox).

The control socket has mode 0600, unless --control-group or --control-mode is given. Its path is that of --control, otherwise of the configuration file, \
otherwise of VSHUNT_CONTROL, otherwise the default. With --no-control there is none. If another daemon \
answers there, that is an error. The socket of a daemon that has ended is replaced.

A list of keys is key=value,key=value. A comma inside a value is written `,,`. A boolean is \
on|off|yes|no|true|false. Sizes are bytes, or numbers with ",
    keyval::size_units!(),
    ", ",
    keyval::size_rule!(),
    "."
);

pub(crate) const SERVE_AFTER: &str = "\
Images:
  For each FILE there is a disk and a vhost-user-blk export. Both have the name
  of the file without its ending. If it is taken, -2, -3 and so on is added.
  The socket is NAME.sock in /run/vshunt, for users other than root in
  $XDG_RUNTIME_DIR/vshunt. The folder is made with mode 0700.
  The format is qcow2 or raw, as the file begins. A file that begins like
  another format is refused. So is a qcow2 image with a backing or data file
  and a name that does not end with .qcow2: a guest may have written that into
  a raw image. --disk and --export with format= serve such files.
  A file that cannot be written is served read-only, with a warning.
  Unless -q is given, the lines to paste for QEMU, libvirt and Cloud Hypervisor
  are printed on stdout when the sockets are ready.

Keys of --disk:
  name              Default: the file's name without its ending
  format            raw (default), qcow2, nbd (default if there is a uri), null
                    or ram
  file              of raw and qcow2: the image
  uri               of nbd: nbd://host:port/export, or
                    nbd+unix:///export?socket=/path; nbds for TLS. Of qcow2: the
                    same for an image on a server
  size              of null and ram
  readonly          on: writes are refused. Default: off
  direct            on: bypass the page cache; off; auto (default): where the
                    file system can
  cache             writeback (default), writethrough, or unsafe: flushes do
                    nothing
  locking           off: no locks on the image. Default: on
  cache-size        of qcow2: memory for the cluster map. Default: the whole
                    map, at most 32 MiB
  reconnect-delay   of nbd: seconds for which requests wait for a lost
                    connection. Default: 0, they fail
  open-timeout      of nbd: seconds for which the server is tried when the disk
                    is added. Default: 0, once

Keys of --net with type=tap:
  name              Default: the interface's name
  ifname            a tap or macvtap. An existing one is adopted and stays.
                    Otherwise a tap is made, and removed with the network
  fd                open descriptors instead, one for each queue: 7 or 7:8:9
  netns             network namespace of ifname: a name (`ip netns`) or a path
  queues            1 to 256. Default: as many as the export has
  steering          how the queue of a frame for the guest is chosen. auto
                    (default): by the kernel's flow table; hash: by the hash
                    that the kernel has; rss: by a hash over addresses and
                    ports; cpu: by the sending CPU
  address           MAC address of the interface itself, not the guest's
  owner, group      user and group that may open the interface, besides root
  persist           on: an interface that is made stays. Default: off

Keys of --net with type=switch:
  name              its exports are joined

Keys of --export, all types:
  type              one of the types below
  name              Default: the disk's or network's name
  workers           default: worker 0; per-queue; per-cpu: each worker has one
                    CPU, and does not poll unless poll-us is given; a number; or
                    auto: one at first, and as many as pay (not for mounts)
  poll-us           limit of adaptive polling of these workers

Keys of --export with type=vhost-user-blk, vhost-user-net, uplink or nbd:
  balance           auto: queues move to less busy workers; dry-run: what auto
                    would do is reported; off. Default: that of the daemon.
                    See `vshunt balance --help`

Keys of --export with type=vhost-user-blk, fuse or nbd:
  limits.iops, .iops-read, .iops-write, .bps, .bps-read, .bps-write
                    operations or bytes per second, all queues together
  limits.burst-iops=N:TIME and so on
                    that rate for some seconds after a rest
  limits.iops-size  a longer request counts as several operations
  limits.group      exports with this group share its limits

Keys of --export with type=vhost-user-blk:
  disk              name of the disk
  socket or fd      a path to listen on, or an inherited socket
  owner, group      of the socket, by name or number
  mode              of the socket: 0600, 0660, 0606 or 0666. Default: 0660 if
                    group is given, otherwise the umask decides
  queues            1 to 256. Default: 256, which no guest exceeds; a queue that
                    never starts costs nothing. With workers=per-cpu or the
                    kernel engine: one for each CPU
  readonly          on: writes of the guest are refused
  serial            that the guest sees, at most 20 bytes
  block-size        that the guest sees, 512 to 4096
  latency           service times: sampled (default): of one batch of requests
                    in eight; on: of all requests; off
  engine            user (default): workers of the daemon; kernel: needs the
                    module vhost_blk and a block device or raw file; auto
  memory-may-block  on: guest memory may be in files of any file system, not
                    only in memory (memfd, tmpfs, hugetlbfs). If that file
                    system does not answer, a worker waits with all its queues

Keys of --export with type=vhost-user-net:
  net               name of the tap or switch
  socket or fd, owner, group, mode, memory-may-block
                    as of vhost-user-blk
  queues            pairs of rings, 1 to 128. Default: one for each CPU, as each
                    pair takes a queue of the tap, or of the switch
  mac               address of the guest, if its front end asks for it
  mtu               longest IP packet. Default: the tap's; on a switch 1500
  engine            user (default); kernel: needs the module vhost_net and a
                    tap. Each pair has its own kernel worker: leave out workers,
                    or use per-cpu; auto
  limits.pps, .pps-rx, .pps-tx, .bps, .bps-rx, .bps-tx
                    packets or bytes per second, all queues together; rx: that
                    the guest receives, tx: that it sends
  limits.burst-pps=N:TIME and so on
                    that rate for some seconds after a rest
  limits.pps-size   a longer frame counts as several packets
  limits.group      exports with this group share its limits
  On a switch:
  mac-filter        on: only frames from mac leave the port. Default: on if mac
                    is given
  mac-limit         addresses that are learnt behind the port. Default: 256
  vlan=N            frames of this VLAN are untagged at the port
  trunk=N,,N-N      frames of these VLANs are tagged at the port
  isolated          on: no frames between isolated ports. Default: off
  reserved          on: frames to 01:80:c2:00:00:00 to 0f pass. Default: off

Keys of --export with type=uplink:
  net               name of the switch
  tap               name of the network of type=tap
  queues            of the tap. Default: one for each CPU
  mtu, mac-limit, vlan, trunk, isolated, reserved
                    as of vhost-user-net. Default of mac-limit: 4096

Keys of --export with type=fuse:
  disk              name of the disk
  mountpoint        the file to mount over. A missing one is made, and removed
  queues            of transport=dev. Default: one for each CPU
  writable          on: the file can be written. Default: off
  growable          on: writes beyond the end change the size. Default: off
  allow-other       on: other users may use the file; off; auto (default): on
                    where the system allows it
  transport         dev: /dev/fuse; io_uring; auto (default): io_uring where it
                    works
  passthrough       auto (default): the kernel itself reads and writes the image
                    where it can; off
  latency           as of vhost-user-blk

Keys of --export with type=nbd:
  disk              name of the disk
  listen            unix:PATH, ADDRESS:PORT, or PORT of 127.0.0.1. Without TLS,
                    every client that reaches a TCP port may use the disk
  tls-certificates  TLS, which clients then have to use: a folder with
                    server-cert.pem, server-key.pem, ca-cert.pem, and ca-crl.pem
                    if certificates were revoked
  tls-verify-peer   on (default): clients need a certificate that the authority
                    in ca-cert.pem has signed; off: they need none
  owner, group, mode
                    of a UNIX socket, as of vhost-user-blk
  queues            connections at a time, 1 to 256; each client has one or
                    more. Default: 16
  writable          on: clients may write. Default: off
  latency           as of vhost-user-blk

Keys of --worker:
  name              in lists
  cpu               as for taskset: 2-3,,6; or all
  nice              -20 to 19
  poll-us           limit of adaptive polling. Default: that of the daemon
  kind, export      kind=kernel: a worker of the kernel, for an export with
                    engine=kernel
  Worker 0 always exists.

Configuration file:
  The file has the same keys, in TOML. Flags add to it. Paths are relative to
  the working directory, as those of flags are.
    control = \"/run/vm.sock\"  # or false
    # also: control-owner, control-group, control-mode, metrics, pidfile,
    # poll-us, balance, log-format, sandbox, sandbox-workers, allow-path
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
    [[attach]]               # queues that start on another worker
    queues = \"vm0:0-1\"
    worker = 1               # or its name
    [first-worker]           # worker 0, which always exists
    nice = -5
  `vshunt config check FILE` checks a file, and `vshunt config show` prints
  what a daemon serves as one.

Socket activation:
  A socket that systemd passes (LISTEN_FDS) serves the export whose name or
  socket is its FileDescriptorName=, or whose socket it is bound to. A socket
  with the name `control`, or bound to the control path, is the control
  socket. A socket with the name `metrics` is for metrics.

Examples:
  vshunt serve disk.img
  vshunt serve --disk name=d0,file=disk.img \\
      --export type=vhost-user-blk,name=vm0,disk=d0,socket=/tmp/vm0.sock
  vshunt serve --net type=tap,name=n0,ifname=vs0 --export \\
      type=vhost-user-net,name=nic0,net=n0,socket=/tmp/n0.sock,workers=per-queue
  vshunt serve --net type=switch,name=s0 --net type=tap,name=n0,ifname=vs0 \\
      --export type=uplink,name=u0,net=s0,tap=n0,queues=2 \\
      --export type=vhost-user-net,name=nic0,net=s0,socket=/tmp/nic0.sock
  vshunt serve --config /etc/vshunt/vm.toml --pidfile /run/vm.pid --metrics 9150
  vshunt serve --disk name=d0,file=disk.img \\
      --export type=nbd,name=n0,disk=d0,listen=unix:/tmp/n0.nbd,writable=on
  vshunt serve --disk name=m,format=ram,size=1G --no-control \\
      --worker name=fast,cpu=2-3,nice=-5 \\
      --export type=vhost-user-blk,name=vm0,disk=m,socket=/tmp/vm0.sock";

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ServeArgs {
    /// Images to serve to VMMs, each with default settings: see Images below
    #[arg(value_name = "FILE")]
    pub(crate) images: Vec<PathBuf>,
    /// Refuse writes to the images
    #[arg(long, requires = "images")]
    pub(crate) read_only: bool,
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
    /// Limit of adaptive polling in microseconds, for workers without one of their own; 0: never
    /// poll
    #[arg(long, value_name = "N", value_parser = poll_us)]
    pub(crate) poll_us: Option<u32>,
    /// Move queues to less busy workers: off (default), auto, or dry-run, which only reports what
    /// it would do; for exports without the key balance
    #[arg(long, value_name = "MODE", value_parser = balance_mode)]
    pub(crate) balance: Option<BalanceMode>,
    /// Read disks, networks, exports and workers from a TOML file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Have no control socket
    #[arg(long, conflicts_with = "control")]
    pub(crate) no_control: bool,
    #[command(flatten)]
    pub(crate) control_access: ControlAccessArgs,
    /// Serve metrics for Prometheus over HTTP on PORT of 127.0.0.1, ADDRESS:PORT or unix:PATH
    ///
    /// There is no authentication: a client that reaches the socket can read the metrics. It cannot
    /// change anything. An address other than the loopback has to be written out.
    /// docs/reference/metrics.md lists the metrics.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<Address>,
    /// Write the process id to a file, once everything is served
    #[arg(long, value_name = "FILE")]
    pub(crate) pidfile: Option<PathBuf>,
    /// Format of the log: text, json (an object on each line) or journald (priorities of
    /// sd-daemon(3)) [default: journald if journald reads stderr, otherwise text]
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) log_format: Option<LogFormat>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

pub(crate) const MOUNT: &str = "\
Show the disk in an image as a file of the host, until Ctrl-C.

The contents of the image are mounted over FILE with FUSE. A missing FILE is made, and removed at the end. \
Without it, the file is NAME.raw in /run/vshunt, for users other than root in $XDG_RUNTIME_DIR/vshunt, where \
NAME is that of the image without its ending. The path of the file is printed on stdout when it is mounted.

The file can be written if the image can. Ctrl-C, a signal, `vshunt quit` or `umount FILE` ends the program. Stop \
the programs that use the file first (`umount` of a loop mount, for example): they get errors.

The format is found as by `vshunt serve FILE`. The control socket is that of `vshunt serve`. If another daemon \
answers there, this one has none unless --control is given.";

pub(crate) const MOUNT_AFTER: &str = "\
Examples:
  vshunt mount disk.qcow2
  vshunt mount disk.qcow2 /tmp/disk & sleep 1; fdisk -l /tmp/disk
  vshunt mount --read-only disk.img | (read file; fdisk -l $file)";

/// The arguments of `vshunt mount`.
#[derive(Clone, Debug, Args)]
pub(crate) struct MountArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// The file to mount over
    pub(crate) file: Option<PathBuf>,
    /// Refuse writes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Have no control socket
    #[arg(long, conflicts_with = "control")]
    pub(crate) no_control: bool,
    #[command(flatten)]
    pub(crate) control_access: ControlAccessArgs,
    /// Format of the log: text, json (an object on each line) or journald (priorities of
    /// sd-daemon(3)) [default: journald if journald reads stderr, otherwise text]
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) log_format: Option<LogFormat>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// Who may connect to the control socket. A process that may connect controls the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct ControlAccessArgs {
    /// User, by name or number, that owns the control socket
    #[arg(long, value_name = "USER")]
    pub(crate) control_owner: Option<String>,
    /// Group, by name or number, whose members may use the control socket
    #[arg(long, value_name = "GROUP")]
    pub(crate) control_group: Option<String>,
    /// Mode of the control socket: 0600, 0660, 0606 or 0666 [default: 0660 with --control-group,
    /// otherwise 0600]
    #[arg(long, value_name = "MODE")]
    pub(crate) control_mode: Option<SocketMode>,
}

impl ControlAccessArgs {
    /// Returns these settings. Missing ones come from the configuration file.
    pub(crate) fn with_defaults(self, file: SocketAccess) -> SocketAccess {
        SocketAccess {
            owner: self.control_owner.or(file.owner),
            group: self.control_group.or(file.group),
            mode: self.control_mode.or(file.mode),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct SandboxArgs {
    /// What happens on an access that is not allowed: on (it fails), log (allowed and logged by the
    /// kernel), off, kill (the daemon ends)
    ///
    /// Without it: $VSHUNT_SANDBOX, otherwise the setting of the configuration file, otherwise on.
    /// docs/sandbox.md lists the restrictions.
    #[arg(id = "sandbox", long = "sandbox", value_name = "MODE", value_parser = sandbox_mode())]
    pub(crate) mode: Option<Mode>,
    /// Filter the system calls of workers, too, which makes each call slower
    #[arg(id = "sandbox-workers", long = "sandbox-workers")]
    pub(crate) workers: bool,
    /// Let clients name files, sockets and mountpoints in this folder; may be repeated
    ///
    /// Clients have to pass descriptors of all other files that are not configured, as the commands
    /// of vshunt do. See docs/sandbox.md.
    #[arg(id = "allow-path", long = "allow-path", value_name = "FOLDER")]
    pub(crate) allow_paths: Vec<PathBuf>,
}

fn sandbox_mode() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(Mode::ALL.map(|(name, _)| name)).map(|name| name.parse().unwrap_or_default())
}

impl SandboxArgs {
    /// Returns these settings. Missing ones come from the environment and the configuration file.
    pub(crate) fn with_defaults(self, file: Self) -> Outcome<Self> {
        let variable = std::env::var(VARIABLE).ok().filter(|value| !value.is_empty());
        let of_environment = variable
            .map(|value| value.parse::<Mode>().map_err(|why| Failure::Usage(format!("{VARIABLE}: {why}"))))
            .transpose()?;
        let mode = self.mode.or(of_environment).or(file.mode);
        let workers = self.workers || file.workers;
        let allow_paths: Vec<_> = file.allow_paths.into_iter().chain(self.allow_paths).collect();
        let idle = match mode {
            Some(Mode::Off) if workers => Some("--sandbox-workers has no effect with --sandbox=off"),
            Some(Mode::Off | Mode::Log) if !allow_paths.is_empty() => {
                Some("--allow-path has no effect with --sandbox=off or log")
            }
            _ => None,
        };
        match idle {
            Some(why) => Err(Failure::Usage(format!("{why}; leave one of them out"))),
            None => Ok(Self { mode, workers, allow_paths }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(mode: Option<Mode>) -> SandboxArgs {
        SandboxArgs { mode, ..SandboxArgs::default() }
    }

    #[test]
    fn what_has_no_effect_is_refused() {
        let workers = SandboxArgs { workers: true, ..mode(Some(Mode::Off)) };
        assert!(matches!(workers.with_defaults(mode(None)), Err(Failure::Usage(_))));
        for of in [Mode::Off, Mode::Log] {
            let paths = SandboxArgs { allow_paths: vec!["/x".into()], ..mode(None) };
            let off = mode(Some(of));
            assert!(matches!(off.with_defaults(paths), Err(Failure::Usage(_))));
        }
    }

    #[test]
    fn flags_count_more_than_the_file() {
        let file = SandboxArgs { allow_paths: vec!["/a".into()], ..mode(Some(Mode::Off)) };
        let flags = SandboxArgs { allow_paths: vec!["/b".into()], ..mode(Some(Mode::On)) };
        let both = flags.with_defaults(file).unwrap();
        assert_eq!((both.mode, both.allow_paths), (Some(Mode::On), vec!["/a".into(), "/b".into()]));
    }
}
