//! The table of commands. docs/reference/qmp.md is generated from it and from the structs that it
//! names.

use serde_json::json;
use vshunt_daemon::Daemon;

use super::{blockstats, config, fdset, jobs, native, qemu, snapshot, throttle, transaction};
use crate::qmp::context::{Answer, Arguments, Context, Nothing};
use crate::qmp::message;

/// One command.
pub(crate) struct Command {
    /// Its name in the protocol.
    pub(crate) name: &'static str,
    /// Its arguments in short form, for the help. `[x]` is optional.
    pub(crate) arguments: &'static str,
    /// What it does, in one or two sentences.
    pub(crate) about: &'static str,
    /// The struct that its arguments are read into, for docs/reference/qmp.md: `Spec` of crate
    /// `vshunt-types`, or `file::Struct` of this module.
    #[cfg_attr(not(test), expect(dead_code, reason = "read by the generator of the reference"))]
    pub(crate) takes: &'static str,
    /// What it returns, for docs/reference/qmp.md. `[T]` is a list of objects that the struct `T`
    /// describes. Empty: an object without members.
    #[cfg_attr(not(test), expect(dead_code, reason = "read by the generator of the reference"))]
    pub(crate) returns: &'static str,
    pub(super) run: fn(&Context, Arguments) -> Answer,
}

/// Makes an entry for a command without arguments.
const fn command(name: &'static str, about: &'static str, run: fn(&Context, Arguments) -> Answer) -> Command {
    Command { name, arguments: "", about, takes: "context::Nothing", returns: "", run }
}

impl Command {
    /// Adds arguments: the short form, and the struct that they are read into.
    const fn takes(self, arguments: &'static str, takes: &'static str) -> Self {
        Self { arguments, takes, ..self }
    }

    const fn returns(self, returns: &'static str) -> Self {
        Self { returns, ..self }
    }
}

/// Every command after negotiation.
pub(crate) const COMMANDS: &[Command] = &[
    command(
        fdset::ADD_FD,
        "Adds the descriptor that comes with the command (SCM_RIGHTS) to an fd set. The daemon may then open its file, or the \
         files in its folder. See sandbox.md for the differences from QEMU.",
        fdset::add_fd,
    )
    .takes("[fdset-id opaque], with one descriptor (SCM_RIGHTS)", "fdset::AddFd")
    .returns("`fdset-id`: the set; `fd`: the number of the descriptor in the daemon"),
    command(
        "backup-start",
        "Starts a job that copies a disk as it is at one point in time. The point lies before the answer. See backup.md.",
        jobs::backup_start,
    )
    .takes(
        "disk to|target|pull [format overwrite compress bitmap incremental backing fleece speed auto-finalize job]",
        "BackupSpec",
    )
    .returns("`job`: the name of the job"),
    command(
        "balance-set",
        "Sets whether queues follow load, at any time: for an export, or for all without a mode of their own. Queues that \
         commands attached may be moved again. See guide/workers.md.",
        native::balance_set,
    )
    .takes("[export] [mode]", "native::BalanceSet"),
    command("bitmap-add", "Adds a dirty bitmap to a disk.", jobs::bitmap_add)
        .takes("disk name [granularity persistent disabled]", "BitmapSpec"),
    command(
        "block-commit",
        "Starts a job that copies the overlay of a disk into the image below it. The job completes by itself. See snapshots.md.",
        jobs::block_commit,
    )
    .takes("device [job-id speed auto-finalize auto-dismiss]", "jobs::BlockCommit"),
    command("block-dirty-bitmap-add", "Adds a dirty bitmap to a disk, with QEMU's defaults.", jobs::block_dirty_bitmap_add)
        .takes("node name [granularity persistent disabled]", "jobs::NewBitmap"),
    command("block-dirty-bitmap-clear", "Marks all blocks of a dirty bitmap as clean.", |c, a| {
        jobs::with_bitmap(c, a, Daemon::bitmap_clear)
    })
    .takes("node name", "jobs::BitmapName"),
    command("block-dirty-bitmap-disable", "Stops recording writes in a dirty bitmap.", |c, a| {
        jobs::with_bitmap(c, a, |d, disk, name| d.bitmap_record(disk, name, false))
    })
    .takes("node name", "jobs::BitmapName"),
    command("block-dirty-bitmap-enable", "Starts recording writes in a dirty bitmap again.", |c, a| {
        jobs::with_bitmap(c, a, |d, disk, name| d.bitmap_record(disk, name, true))
    })
    .takes("node name", "jobs::BitmapName"),
    command(
        "block-dirty-bitmap-merge",
        "Marks in one dirty bitmap all blocks that are dirty in others of the same disk.",
        jobs::block_dirty_bitmap_merge,
    )
    .takes("node target bitmaps", "jobs::Merge"),
    command("block-dirty-bitmap-remove", "Removes a dirty bitmap.", |c, a| {
        jobs::with_bitmap(c, a, Daemon::bitmap_remove)
    })
    .takes("node name", "jobs::BitmapName"),
    command("block-export-add", "Exports a disk, with QEMU's names and defaults.", qemu::block_export_add)
        .takes(qemu::BLOCK_EXPORT_ADD, "qemu::BlockExport"),
    command("block-export-del", "Removes an export.", qemu::block_export_del)
        .takes("id [mode: safe|hard]", "qemu::BlockExportDel"),
    command(
        "block-job-cancel",
        "Ends a job before it is complete. A mirror that is ready completes without `force`, and its disk stays where it is.",
        jobs::block_job_cancel,
    )
    .takes("device [force]", "jobs::BlockJobCancel"),
    command("block-job-complete", "Completes a mirror that is ready, or a pull backup whose disk was copied.", |c, a| {
        jobs::by_device(c, a, |daemon, id| daemon.job_complete(id, true, None))
    })
    .takes("device", "jobs::Device"),
    command("block-job-dismiss", "Removes a job that has ended from the list.", |c, a| {
        jobs::by_id(c, a, Daemon::job_dismiss)
    })
    .takes("id", "jobs::Id"),
    command("block-job-finalize", "Finalizes a job, as `job-finalize`.", |c, a| jobs::by_id(c, a, Daemon::job_finalize))
        .takes("id", "jobs::Id"),
    command("block-job-pause", "Pauses a job.", |c, a| jobs::by_device(c, a, Daemon::job_pause))
        .takes("device", "jobs::Device"),
    command("block-job-resume", "Resumes a paused job.", |c, a| jobs::by_device(c, a, Daemon::job_resume))
        .takes("device", "jobs::Device"),
    command("block-job-set-speed", "Changes the speed limit of a job.", jobs::block_job_set_speed)
        .takes("device speed", "jobs::DeviceSpeed"),
    command(
        "block-stream",
        "Starts a job that copies to the overlay of a disk all that is below it, so that it stands alone. The job completes by \
         itself. See snapshots.md.",
        jobs::block_stream,
    )
    .takes("device [job-id speed on-error auto-finalize auto-dismiss]", "jobs::BlockStream"),
    command("block_resize", "Changes the size of a disk. Its guests are told.", qemu::block_resize)
        .takes("node-name size", "qemu::Resize"),
    command(
        "block_set_io_throttle",
        "Sets the limits of an export, with QEMU's names. A member that is 0 or absent is no limit. If none is left, the \
         limits are lifted. See guide/limits.md.",
        throttle::block_set_io_throttle,
    )
    .takes(throttle::ARGUMENTS, "throttle::IoThrottle"),
    command(
        "blockdev-add",
        "Adds a disk, with QEMU's names and defaults. `raw` or `qcow2` over a node for the file is one disk.",
        qemu::blockdev_add,
    )
    .takes(qemu::BLOCKDEV_ADD, "qemu::Node"),
    command(
        "blockdev-backup",
        "Starts a job that copies a disk to another disk of the daemon. See backup.md.",
        jobs::blockdev_backup,
    )
    .takes(jobs::BLOCKDEV_BACKUP, "jobs::BlockdevBackup"),
    command("blockdev-del", "Removes a disk that is not exported.", qemu::blockdev_del)
        .takes("node-name", "qemu::NodeName"),
    command(
        "blockdev-mirror",
        "Starts a job that copies a disk to another disk of the daemon, in whose image it continues when the job is \
         completed. See mirror.md.",
        jobs::blockdev_mirror,
    )
    .takes(jobs::BLOCKDEV_MIRROR, "jobs::BlockdevMirror"),
    command(
        "blockdev-snapshot",
        "Puts an overlay onto a disk. The disk keeps its name. See snapshots.md.",
        snapshot::snapshot_onto,
    )
    .takes("node overlay", "snapshot::Snapshot"),
    command(
        "blockdev-snapshot-delete-internal-sync",
        "Deletes an internal snapshot of a qcow2 image.",
        snapshot::delete_internal_sync,
    )
    .takes("device id|name", "snapshot::Delete")
    .returns("the deleted snapshot: `id`, `name`, `vm-state-size`, `date-sec`, `date-nsec`, `vm-clock-sec`, `vm-clock-nsec`"),
    command("blockdev-snapshot-internal-sync", "Takes a snapshot inside a qcow2 image.", snapshot::internal_sync)
        .takes("device name", "snapshot::Internal"),
    command(
        "blockdev-snapshot-sync",
        "Takes a snapshot: the disk continues in a new overlay. See snapshots.md.",
        snapshot::snapshot_sync,
    )
    .takes(snapshot::SNAPSHOT_SYNC, "snapshot::SnapshotSync"),
    command(
        "commit-start",
        "Starts the same job as `block-commit`. The job stays in the list until it is dismissed.",
        jobs::commit_start,
    )
    .takes("disk [job speed auto-finalize]", "OverlayJobSpec")
    .returns("`job`: the name of the job"),
    command("disk-add", "Adds a disk.", native::disk_add)
        .takes("name [format file uri size readonly direct cache locking cache-size reconnect-delay open-timeout]", "DiskSpec"),
    command("disk-remove", "Removes a disk that is not exported.", native::disk_remove).takes("name", "native::Named"),
    command(
        "export-add",
        "Exports a disk or a network. The keys that belong to other types are refused.",
        native::export_add,
    )
    .takes(
        "type name disk|net [socket|mountpoint|listen tls-certificates tls-verify-peer owner group mode tap queues workers readonly serial block-size poll-us engine latency mac mtu \
         mac-filter mac-limit vlan trunk isolated reserved memory-may-block writable growable allow-other transport \
         passthrough limits balance]",
        "ExportSpec",
    ),
    command(
        "export-latency-reset",
        "Resets the service times of an export: in `query-exports`, `query-queues` and the histograms of \
         `query-blockstats`. Metrics and sums of times go on.",
        native::export_latency_reset,
    )
    .takes("name", "native::ExportLatencyReset"),
    command(
        "export-limit",
        "Sets the limits of an export, at any time. They replace those that it has, and take effect within 100 ms. See \
         guide/limits.md.",
        native::export_limit,
    )
    .takes("name [limits]", "native::ExportLimit"),
    command(
        "export-remove",
        "Removes an export, and returns when it is removed. Another removal of the same export at the same time is an error.",
        native::export_remove,
    )
    .takes("name [force]", "native::ExportRemove")
    .returns(
        "`disconnected`: whether a front end lost its device. `read-bytes` and `write-bytes`: what its user read and wrote \
         through queues of the daemon. `seconds`: how long it was there",
    ),
    command("job-cancel", "Ends a job before it is complete. The file of a backup is removed.", |c, a| {
        jobs::by_id(c, a, |daemon, id| daemon.job_cancel(id, false))
    })
    .takes("id", "jobs::Id"),
    command(
        "job-complete",
        "Completes a mirror that is ready: the disk continues in the target. A mirror that cannot be completed stays ready, \
         with an `error`. Or completes a pull backup whose disk was copied: its bitmap is reset.",
        jobs::job_complete,
    )
    .takes("id [switch hold-ms]", "jobs::JobComplete"),
    command("job-dismiss", "Removes a job that has ended from the list.", |c, a| {
        jobs::by_id(c, a, Daemon::job_dismiss)
    })
    .takes("id", "jobs::Id"),
    command(
        "job-finalize",
        "Finalizes a job that was started with `auto-finalize` false and is `pending`: it has copied all. Until then, it can be \
         cancelled.",
        |c, a| jobs::by_id(c, a, Daemon::job_finalize),
    )
    .takes("id", "jobs::Id"),
    command("job-pause", "Pauses a job. A paused backup still copies what guests overwrite.", |c, a| {
        jobs::by_id(c, a, Daemon::job_pause)
    })
    .takes("id", "jobs::Id"),
    command("job-resume", "Resumes a paused job.", |c, a| jobs::by_id(c, a, Daemon::job_resume))
        .takes("id", "jobs::Id"),
    command("job-set-speed", "Changes the speed limit of a job.", jobs::job_set_speed)
        .takes("id [speed]", "jobs::JobSpeed"),
    command(
        "mirror-start",
        "Starts a job that copies a disk to a new file, or to another disk, where it continues when the job is completed. \
         See mirror.md.",
        jobs::mirror_start,
    )
    .takes("disk to|target [job format overwrite bitmap incremental copy-mode speed auto-finalize]", "MirrorSpec")
    .returns("`job`: the name of the job"),
    command(
        "net-add",
        "Adds a network. If the interface exists, it is adopted and stays. Otherwise a tap is made, and removed with the network.",
        native::net_add,
    )
    .takes("type name [ifname netns queues steering address owner group persist]", "NetSpec"),
    command("net-remove", "Removes a network that no export uses.", native::net_remove).takes("name", "native::Named"),
    command(
        "net-set",
        "Changes the steering of a tap, at any time. A flow may change its queue.",
        native::net_set,
    )
    .takes("name steering", "native::NetSet"),
    command("query-balance", "Shows the mode of exports that have none of their own. `query-exports` has that of each.", |c, a| {
        native::query_balance(c, a)
    })
    .returns("`mode`: `off`, `auto` or `dry-run`"),
    command(
        "query-block",
        "Lists the exports of disks, with members of QEMU's BlockInfo: `inserted` has the disk and the limits, with the names \
         of `block_set_io_throttle`.",
        throttle::query_block,
    )
    .returns(
        "a list of objects: `device`, `qdev`, `type`, `removable`, `locked`, and `inserted`: the members of \
         `query-named-block-nodes`, `bps`, `bps_rd`, `bps_wr`, `iops`, `iops_rd`, `iops_wr` (0: no limit), and where they are set \
         `NAME_max` and `NAME_max_length` of each rate, `iops_size` and `group`",
    ),
    command("query-block-exports", "Lists the exports of disks.", qemu::query_block_exports)
        .returns("a list of objects: `id`, `type`, `node-name`, `shutting-down`"),
    command("query-block-jobs", "Lists the jobs, with the members of QEMU's BlockJobInfo.", jobs::query_block_jobs)
        .returns(
            "a list of objects: `type`, `device`, `len`, `offset`, `busy`, `paused`, `speed`, `io-status`, `ready`, \
             `status`, `auto-finalize`, `auto-dismiss`",
        ),
    command(
        "query-blockstats",
        "Shows what each export of a disk has done, with members of QEMU's BlockStats. Operations count when they complete, \
         also with an error. If service times are sampled, `*_total_time_ns` is the estimate for all operations, and the bins of \
         `*_latency_histogram` count the sample.",
        blockstats::query_blockstats,
    )
    .takes("[query-nodes]", "blockstats::BlockStats")
    .returns(
        "a list of objects: `device`, `qdev`, `node-name`, and `stats`: `rd_bytes`, `wr_bytes`, `rd_operations`, \
         `wr_operations`, `flush_operations`, `rd_total_time_ns`, `wr_total_time_ns`, `flush_total_time_ns`, \
         `account_failed`, `timed_stats`, and where something was measured `rd_latency_histogram`, \
         `wr_latency_histogram`, `flush_latency_histogram`, each with `boundaries` in nanoseconds and `bins`",
    ),
    command("query-commands", "Lists the commands.", query_commands).returns("a list of objects: `name`"),
    command(
        "query-config",
        "Shows what is served as a configuration file that starts the same again. What it cannot express is a comment.",
        config::query_config,
    )
    .returns("`toml`: the text of the file"),
    command("query-disks", "Lists the disks.", |c, a| native::list(a, || c.daemon.disks())).returns("[DiskInfo]"),
    command("query-exports", "Lists the exports.", native::query_exports)
        .takes("[started-only, histograms]", "native::QueryExports")
        .returns("[ExportInfo]"),
    command("query-fdsets", "Lists the fd sets.", fdset::query_fdsets)
        .returns("a list of objects: `fdset-id`, and `fds`, a list of `fd` and `opaque`"),
    command("query-jobs", "Lists the jobs.", |c, a| native::list(a, || c.daemon.jobs())).returns("[JobInfo]"),
    command("query-named-block-nodes", "Lists the disks, with members of QEMU's BlockDeviceInfo.", qemu::query_named_block_nodes)
        .takes("[flat]", "qemu::Flat")
        .returns(
            "a list of objects: `node-name`, `drv`, `ro`, `file`, `cache`, `encrypted`, `detect_zeroes`, \
             `backing_file_depth`, `write_threshold`, `image`",
        ),
    command(
        "query-net-addresses",
        "Lists the addresses whose ports a switch knows: at most 8,192 learnt ones, and those that are configured.",
        native::query_net_addresses,
    )
    .takes("name", "native::Named")
    .returns("[NetAddress]"),
    command("query-nets", "Lists the networks.", |c, a| native::list(a, || c.daemon.nets())).returns("[NetInfo]"),
    command("query-queues", "Lists the queues of exports and jobs.", native::query_queues)
        .takes("[export, started-only, histograms]", "native::QueryQueues")
        .returns("[QueueInfo]"),
    command("query-sandbox", "Shows the restrictions that are in force. See sandbox.md.", |_, a| native::sandbox(a))
        .returns("SandboxInfo"),
    command("query-version", "Shows the version.", |_, a| a.read::<Nothing>().map(|_| message::version()))
        .returns("`qemu`: the version of vshunt as `major`, `minor`, `micro`; `package`: a text"),
    command("query-workers", "Lists the workers.", |c, a| native::list(a, || c.daemon.workers())).returns("[WorkerInfo]"),
    command(
        "queue-attach",
        "Moves a queue, or several, to a worker, and returns when it is there. If the requests in flight do not complete in time, the \
         command fails and the queue stays where it was. A queue of the kernel engine does not wait for requests; the \
         command fails if a queue of the same export is stopping and waits for its disk that long.",
        native::queue_attach,
    )
    .takes("export index [last] worker [timeout-ms]", "native::QueueAttach"),
    command("quit", "Ends the daemon. The answer comes before the end.", native::quit),
    command("remove-fd", "Removes descriptors from an fd set.", fdset::remove_fd).takes("fdset-id [fd]", "fdset::RemoveFd"),
    command(
        "stream-start",
        "Starts the same job as `block-stream`. The job stays in the list until it is dismissed.",
        jobs::stream_start,
    )
    .takes("disk [job speed auto-finalize]", "OverlayJobSpec")
    .returns("`job`: the name of the job"),
    command(
        "transaction",
        "Does all actions at one point in time, or none. They are snapshots of disks, or backups and changes of dirty \
         bitmaps. See snapshots.md and backup.md.",
        transaction::transaction,
    )
    .takes(transaction::ACTIONS, "transaction::Transaction")
    .returns("`jobs`: the names of the jobs of the backups; absent without backups"),
    command(
        "worker-free",
        "Ends a worker. Fails for worker 0, for a worker that has queues, and for one that is stalled for 10 s. A worker \
         that could not be freed is unchanged.",
        native::worker_free,
    )
    .takes("id", "native::WorkerId"),
    command("worker-new", "Makes a worker.", native::worker_new)
        .takes("[name cpu nice poll-us kind export]", "WorkerSpec")
        .returns("`id`: the id of the worker"),
    command(
        "worker-set",
        "Changes a worker. Members that are absent stay as they are. Either all changes take effect or none.",
        native::worker_set,
    )
    .takes("id [name cpu nice poll-us]", "native::WorkerId+WorkerSpec"),
];

fn query_commands(_: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(COMMANDS.iter().map(|c| json!({ "name": c.name })).collect())
}
