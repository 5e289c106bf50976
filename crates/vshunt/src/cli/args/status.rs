//! The command line of `vshunt status`.

use std::time::Duration;

use clap::Args;

use super::interval;

#[derive(Clone, Debug, Args)]
pub(crate) struct StatusArgs {
    /// Exports, disks, networks or jobs to show [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Show it again and again, each second or as often as given, until Ctrl-C
    ///
    /// On a terminal the tables are drawn over those before; longer ones are cut. Otherwise they
    /// follow each other.
    #[arg(short, long, value_name = "TIME", num_args = 0..=1, require_equals = true,
        default_missing_value = "1s", value_parser = interval)]
    pub(crate) watch: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) const AFTER: &str = "\
Tables without rows are left out. With NAME: these exports, disks, networks and
jobs, what they use or what uses them, and the workers of their queues.

Columns of disks:
  MODE  ro or rw; direct: the page cache is bypassed (O_DIRECT); writethrough
        or unsafe: the cache mode, if it is not writeback
  PATH  how requests reach the disk. ring: by the worker's io_uring; inline: a
        file in memory, copied at once; memory: format ram; none: format null

Columns of networks, which are shown if there are any:
  QUEUES      open queues of the interface; of a switch the queue pairs of all
              ports
  FROM-GUEST  frames that the guest sent, as the kernel counts them
  TO-GUEST    frames for the guest
  DROPPED     frames that were dropped

Columns of exports:
  BACKEND  the disk or network
  MODE     ro or rw, for the user of the export
  STATE    connected: a front end (a VMM) or an NBD client is connected;
           leaving: it has ended, and its requests have not; waiting: none is
           connected; mounted;
           joined: an uplink whose tap is a port of its switch; blocked: an
           uplink that makes a loop with another one; removing: the export
           ends with its last requests
  ENGINE   user: workers of the daemon serve the requests; kernel: the kernel
           does (/dev/vhost-blk or /dev/vhost-net). Of a mount: dev (channels
           of /dev/fuse), io_uring (a queue for each CPU), or passthrough (the
           kernel reads and writes the image)
  CHOSEN BECAUSE  why engine=auto is not kernel, or transport=auto not io_uring

Columns of ports, which are shown if there is a switch:
  VLANS    none; 5: untagged; 1-9t: tagged
  OPTIONS  mac-filter: only frames from the mac of the export leave the port;
           isolated: no frames to other isolated ports; reserved: frames to
           01:80:c2:00:00:00 to 0f pass
  MTU      the longest IP packet that passes
  LEARNT   addresses that were learnt behind the port, and their limit
  STATE    forwarding; blocked: an uplink that makes a loop with another one

Columns of limits, which are shown if there are any:
  GROUP    the group that shares the limits
  LIMITS   operations (iops) and bytes (bps) per second; +N:Ts is a burst of N
           for T seconds
  LIMITED  how long the queues of the export waited, added up
  WAIT-MAX the longest time for which the limits can hold back the first
           request of a queue

Columns of balance, which are shown for exports whose queues follow load:
  BALANCE   auto, dry-run or off
  MOVES     queues that were moved since the export was added
  STAY      queues that stay because they were attached by hand
  LAST      the last decision: the queue, its worker and the one that it should
            be on, how long ago, and why; with workers=auto also the last one
            about the number of workers

Columns of queues:
  WORKER     the worker that the queue is attached to
  STATE      stopped: the guest does not use it; running; broken: the guest
             misused it, and it stops until the guest resets it, or the tap of
             an uplink is missing
  SIZE       descriptors of the ring; 0 before the first start; of a mount the
             number of requests that can be in flight
  IN-FLIGHT  requests that are taken and not completed. Requests of a disk in
             memory complete as they are taken
  REQUESTS, ERRORS, READ, WRITTEN  since the export was added
  A network device has a queue for each pair of a receive and a transmit ring,
  then the control queue, which is marked `control`. With engine=kernel the
  kernel reports no counters.
  The queues of an uplink are those of its tap, counted as if the tap were a
  guest of the switch.
  Stopped queues of an export that have completed no request share a line below
  the table. --json lists them.

Columns of service times of disks and mounts, from take to completion:
  LATENCY OF  kind of requests. sampled: one batch of requests in eight is
              measured (latency= of an export)
  REQUESTS    requests that were measured since the export was added
  P50, P99    half, and 99 %, of them took at most so long; at most 12.5 % too
              large
  MAX         the longest

Columns of workers:
  KIND     user: a thread of the daemon; stalled: it has work and has not run
           for one second; kernel: a worker of the kernel, for one export
  CPU      the CPUs that it may run on
  POLL-US  how long it may poll before it sleeps, in microseconds
  BUSY, POLLING, SLEEPING  shares of its time: it handled requests, looked for
           requests, or waited for a wake-up. Since the worker was made; with
           --watch since the tables before
  QUEUES   the attached queues, EXPORT:INDEX or EXPORT:FIRST-LAST

The last line shows what the sandbox restricts: see docs/sandbox.md.

--json shows more: see docs/reference/qmp.md, \"Objects\".

Examples:
  vshunt status vm0
  vshunt status --watch=5s vm0 vm1
  vshunt status --json vm0 | jq .queues";
