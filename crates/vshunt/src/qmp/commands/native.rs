//! Commands that QEMU does not have.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use vshunt_daemon::ATTACH_TIMEOUT;
use vshunt_types::spec::{
    BalanceMode, DiskSpec, ExportSpec, LatencyInfo, LimitsSpec, NetSpec, QueueInfo, Steering, WorkerSpec,
};

use super::qemu;
use crate::qmp::context::{Answer, Arguments, Context, Nothing, Stop, done};
use crate::qmp::message::QmpError;

/// The largest time limit of an attach, because it blocks the thread of the client.
const ATTACH_TIMEOUT_MS_MAX: u64 = 3_600_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    /// The name of the disk or network.
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetSet {
    /// The name of the network.
    name: String,
    /// How the kernel chooses the queue of a frame for the guest.
    steering: Steering,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportRemove {
    /// The name of the export.
    name: String,
    /// Remove it even if a front end is connected or the mounted file is open.
    #[serde(default)]
    force: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportLatencyReset {
    /// The name of the export.
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportLimit {
    /// The name of the export.
    name: String,
    /// The limits, in place of those that the export has. Absent: its limits are lifted.
    limits: Option<LimitsSpec>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BalanceSet {
    /// The name of the export. Absent: the daemon, for all exports without a mode of their own.
    export: Option<String>,
    /// The mode. Absent: that of the daemon, for an export.
    mode: Option<BalanceMode>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerId {
    /// The id of the worker.
    id: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QueueAttach {
    /// The name of the export.
    export: String,
    /// The index of the queue within the export.
    index: u16,
    /// The index of the last queue, if several are moved, one after the other. Those before one
    /// that fails stay where they were moved. Absent: `index`.
    last: Option<u16>,
    /// The id of the worker.
    worker: u32,
    /// How long the requests in flight of a queue may take, in milliseconds, at most 3,600,000.
    /// Absent: 10,000.
    timeout_ms: Option<u64>,
}

pub(super) fn list<T: Serialize>(arguments: Arguments, get: impl FnOnce() -> Vec<T>) -> Answer {
    arguments.read::<Nothing>()?;
    written(get())
}

fn written(answer: impl Serialize) -> Answer {
    serde_json::to_value(answer).map_err(|e| QmpError::generic(format!("cannot write the answer: {e}")))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QueryExports {
    /// Leave out the queues that never started, if an export has more than 8 of them.
    #[serde(default)]
    started_only: bool,
    /// With the bins of service times.
    #[serde(default)]
    histograms: bool,
}

pub(super) fn query_exports(context: &Context, arguments: Arguments) -> Answer {
    let QueryExports { started_only, histograms } = arguments.read()?;
    let mut exports = context.daemon.exports();
    for export in exports.iter_mut().filter(|_| !histograms) {
        export.service_times.iter_mut().for_each(LatencyInfo::without_bins);
        without_bins(&mut export.queue_list);
    }
    for export in exports.iter_mut().filter(|_| started_only) {
        let all = export.queue_list.len();
        QueueInfo::keep_started(&mut export.queue_list);
        export.queues_left_out = u32::try_from(all - export.queue_list.len()).unwrap_or(u32::MAX);
    }
    written(exports)
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QueryQueues {
    /// List the queues of this export or job only.
    export: Option<String>,
    /// Leave out the queues that never started, if an export has more than 8 of them.
    #[serde(default)]
    started_only: bool,
    /// With the bins of service times.
    #[serde(default)]
    histograms: bool,
}

fn without_bins(queues: &mut [QueueInfo]) {
    queues.iter_mut().filter_map(|queue| queue.service_times.as_mut()).for_each(LatencyInfo::without_bins);
}

pub(super) fn query_queues(context: &Context, arguments: Arguments) -> Answer {
    let QueryQueues { export, started_only, histograms } = arguments.read()?;
    let mut queues = context.daemon.queues();
    queues.retain(|queue| export.as_ref().is_none_or(|export| *export == queue.export));
    if started_only {
        QueueInfo::keep_started(&mut queues);
    }
    if !histograms {
        without_bins(&mut queues);
    }
    written(queues)
}

pub(super) fn sandbox(arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    written(vshunt_sandbox::info())
}

pub(super) fn disk_add(context: &Context, arguments: Arguments) -> Answer {
    let disk: DiskSpec = arguments.read()?;
    let file = disk.file.map(|file| context.fdsets.resolve(file, !disk.readonly)).transpose()?;
    Ok(done(context.daemon.disk_add(DiskSpec { file, ..disk })?))
}

pub(super) fn disk_remove(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.disk_remove(&arguments.read::<Named>()?.name)?))
}

/// The error for a file descriptor number of a network.
const NO_TAP_FD: &str = "a file descriptor cannot be named over the control socket; \
     give an interface's ifname, or pass fd=N to `vshunt serve --net`";

pub(super) fn net_add(context: &Context, arguments: Arguments) -> Answer {
    let spec: NetSpec = arguments.read()?;
    if spec.fd.is_some() {
        return Err(QmpError::generic(NO_TAP_FD));
    }
    Ok(done(context.daemon.net_add(spec)?))
}

pub(super) fn net_remove(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.net_remove(&arguments.read::<Named>()?.name)?))
}

pub(super) fn net_set(context: &Context, arguments: Arguments) -> Answer {
    let NetSet { name, steering } = arguments.read()?;
    Ok(done(context.daemon.net_set(&name, steering)?))
}

pub(super) fn query_net_addresses(context: &Context, arguments: Arguments) -> Answer {
    let addresses = context.daemon.net_addresses(&arguments.read::<Named>()?.name)?;
    written(addresses)
}

pub(super) fn export_add(context: &Context, arguments: Arguments) -> Answer {
    let spec: ExportSpec = arguments.read()?;
    if spec.fd.is_some() {
        return Err(QmpError::generic(qemu::NO_FD));
    }
    Ok(done(context.daemon.export_add(spec)?))
}

pub(super) fn export_latency_reset(context: &Context, arguments: Arguments) -> Answer {
    let ExportLatencyReset { name } = arguments.read()?;
    Ok(done(context.daemon.export_latency_reset(&name)?))
}

pub(super) fn export_limit(context: &Context, arguments: Arguments) -> Answer {
    let ExportLimit { name, limits } = arguments.read()?;
    Ok(done(context.daemon.export_limit(&name, limits.as_ref())?))
}

pub(super) fn balance_set(context: &Context, arguments: Arguments) -> Answer {
    let BalanceSet { export, mode } = arguments.read()?;
    if export.is_none() && mode.is_none() {
        return Err(QmpError::generic("give the mode of the daemon: off, auto or dry-run"));
    }
    Ok(done(context.daemon.balance_set(export.as_deref(), mode)?))
}

pub(super) fn query_balance(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(json!({ "mode": context.daemon.balance_mode() }))
}

pub(super) fn export_remove(context: &Context, arguments: Arguments) -> Answer {
    let ExportRemove { name, force } = arguments.read()?;
    let (disconnected, moved) = context.daemon.export_take_down(&name, force)?;
    Ok(json!({
        "disconnected": disconnected,
        "read-bytes": moved.read_bytes,
        "write-bytes": moved.write_bytes,
        "seconds": moved.lasted.as_secs_f64(),
    }))
}

pub(super) fn worker_new(context: &Context, arguments: Arguments) -> Answer {
    let id = context.daemon.worker_new(arguments.read::<WorkerSpec>()?)?;
    Ok(json!({ "id": id }))
}

pub(super) fn worker_set(context: &Context, mut arguments: Arguments) -> Answer {
    let id = arguments.take("id")?;
    Ok(done(context.daemon.worker_set(id, arguments.read()?)?))
}

pub(super) fn worker_free(context: &Context, arguments: Arguments) -> Answer {
    Ok(done(context.daemon.worker_free(arguments.read::<WorkerId>()?.id)?))
}

pub(super) fn queue_attach(context: &Context, arguments: Arguments) -> Answer {
    let QueueAttach { export, index, last, worker, timeout_ms } = arguments.read()?;
    let last = last.unwrap_or(index);
    if last < index {
        return Err(QmpError::generic(format!("last is {last}, which is before index, {index}")));
    }
    let timeout_ms = timeout_ms.unwrap_or(ATTACH_TIMEOUT.as_millis() as u64);
    if timeout_ms > ATTACH_TIMEOUT_MS_MAX {
        return Err(QmpError::generic(format!("timeout-ms is at most {ATTACH_TIMEOUT_MS_MAX}")));
    }
    let timeout = Duration::from_millis(timeout_ms);
    let mut moved = None;
    let result = (index..=last).try_for_each(|queue| {
        context.daemon.queue_attach(&export, queue, worker, timeout).inspect(|()| moved = Some(queue))
    });
    match moved {
        Some(queue) if queue == index => tracing::info!("queue {export}:{index} is on worker {worker}"),
        Some(queue) => tracing::info!("queues {export}:{index}-{queue} are on worker {worker}"),
        None => {}
    }
    Ok(done(result?))
}

pub(super) fn quit(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    // The receiver is missing only if the daemon is ending already.
    let _ = context.stop.send(Stop::Quit);
    Ok(json!({}))
}
