//! The daemon's events as QMP events.

use serde_json::{Value, json};
use vshunt_daemon::Event;
use vshunt_types::spec::JobInfo;

use super::context::Stop;
use super::message;

/// Returns the name and the data of an event. `BLOCK_EXPORT_DELETED` is an event of QEMU; QEMU does
/// not have the others.
fn name_and_data(event: &Event) -> (&'static str, Value) {
    match event {
        Event::ExportConnected { name } => ("EXPORT_CONNECTED", json!({ "name": name })),
        Event::ExportDisconnected { name } => ("EXPORT_DISCONNECTED", json!({ "name": name })),
        Event::ExportDeleted { name } => ("BLOCK_EXPORT_DELETED", json!({ "id": name })),
        Event::QueueAttached { export, index, worker } => {
            ("QUEUE_ATTACHED", json!({ "export": export, "index": index, "worker": worker }))
        }
        Event::QueueBalanced { export, index, from, worker, outcome, reason } => (
            "QUEUE_BALANCED",
            json!({ "export": export, "index": index, "from": from, "worker": worker, "outcome": outcome.name(),
                "reason": reason }),
        ),
        Event::WorkersBalanced { export, decision } => (
            "WORKERS_BALANCED",
            json!({ "export": export, "workers": decision.workers, "worker": decision.worker,
                "outcome": decision.outcome.name(), "reason": decision.reason }),
        ),
        Event::QueueBroken { export, index, reason } => {
            ("QUEUE_BROKEN", json!({ "export": export, "index": index, "reason": reason }))
        }
        Event::WorkerNew { id } => ("WORKER_CREATED", json!({ "id": id })),
        Event::WorkerFreed { id } => ("WORKER_FREED", json!({ "id": id })),
        Event::JobStatus { id, status } => ("JOB_STATUS_CHANGE", json!({ "id": id, "status": status })),
        Event::JobReady(job) => ("BLOCK_JOB_READY", with_error(job)),
        Event::JobPending(job) => ("BLOCK_JOB_PENDING", json!({ "type": job.kind, "id": job.id })),
        Event::JobEnded(job) => job_ended(job),
        Event::DiskLost { name, reason } => ("DISK_LOST", json!({ "name": name, "reason": reason })),
        Event::DiskResized { name, size_bytes } => {
            ("DISK_RESIZED", json!({ "name": name, "size-bytes": size_bytes }))
        }
    }
}

/// Returns QEMU's event for the end of a job, with its members. A cancelled job has not failed.
fn job_ended(job: &JobInfo) -> (&'static str, Value) {
    (if job.cancelled { "BLOCK_JOB_CANCELLED" } else { "BLOCK_JOB_COMPLETED" }, with_error(job))
}

fn with_error(job: &JobInfo) -> Value {
    let mut data = of_job(job);
    if let Some(why) = &job.error {
        data["error"] = why.clone().into();
    }
    data
}

fn of_job(job: &JobInfo) -> Value {
    json!({
        "type": job.kind,
        "device": job.id,
        "len": job.total_bytes,
        "offset": job.done_bytes,
        "speed": job.speed.unwrap_or(0),
    })
}

/// Returns the line for an event of the daemon, and logs it.
pub(crate) fn line(event: &Event) -> String {
    let (name, data) = name_and_data(event);
    match event {
        // `queue-attach` writes one line for all of its queues.
        Event::QueueAttached { .. } => tracing::debug!("{name} {data}"),
        _ => tracing::info!("{name} {data}"),
    }
    message::event(name, data)
}

/// Returns QEMU's event SHUTDOWN. It is sent once, before anything is released.
pub(crate) fn shutdown_line(stop: Stop) -> String {
    let reason = match stop {
        Stop::Signal(_) => "host-signal",
        Stop::Quit => "host-qmp-quit",
        Stop::PeerGone => "guest-shutdown",
    };
    message::event("SHUTDOWN", json!({ "guest": stop == Stop::PeerGone, "reason": reason }))
}

/// The description of an event for docs/reference/qmp.md.
#[cfg(test)]
pub(crate) struct Described {
    pub(crate) name: &'static str,
    /// The members of its data.
    pub(crate) members: &'static [&'static str],
    pub(crate) about: &'static str,
}

#[cfg(test)]
const fn described(name: &'static str, members: &'static [&'static str], about: &'static str) -> Described {
    Described { name, members, about }
}

/// All events, sorted by name.
#[cfg(test)]
pub(crate) const EVENTS: &[Described] = &[
    described("BLOCK_EXPORT_DELETED", &["id"], "An export was removed (QEMU)."),
    described(
        "BLOCK_JOB_CANCELLED",
        &["type", "device", "len", "offset", "speed", "error"],
        "A job was cancelled (QEMU). `error` is absent.",
    ),
    described(
        "BLOCK_JOB_COMPLETED",
        &["type", "device", "len", "offset", "speed", "error"],
        "A job has ended (QEMU). `error`: why it failed; absent if it did not.",
    ),
    described(
        "BLOCK_JOB_PENDING",
        &["type", "id"],
        "A job has copied all, and waits for `job-finalize` (QEMU).",
    ),
    described(
        "BLOCK_JOB_READY",
        &["type", "device", "len", "offset", "speed", "error"],
        "A mirror has copied all, and can be completed (QEMU). With `error`: it was not completed, for this reason, and stays \
         ready.",
    ),
    described(
        "DISK_LOST",
        &["name", "reason"],
        "A disk cannot be used any more: it showed another one for a backup, and that has failed. `reason`: a text. See \
         [pull backups](../backup.md#pull-backups).",
    ),
    described("DISK_RESIZED", &["name", "size-bytes"], "A disk has a new size."),
    described(
        "EXPORT_CONNECTED",
        &["name"],
        "A front end has connected. The rate is limited: see [events](../control.md#events).",
    ),
    described("EXPORT_DISCONNECTED", &["name"], "A front end has disconnected. The rate is limited."),
    described("JOB_STATUS_CHANGE", &["id", "status"], "A job has a new status (QEMU)."),
    described("QUEUE_ATTACHED", &["export", "index", "worker"], "A queue was moved to a worker."),
    described(
        "QUEUE_BALANCED",
        &["export", "index", "from", "worker", "outcome", "reason"],
        "It was decided that a queue should be on another worker (`balance`). `outcome`: `moved`, `failed` or `dry-run`. \
         `reason`: a text. See [queues that follow load](../guide/workers.md).",
    ),
    described(
        "QUEUE_BROKEN",
        &["export", "index", "reason"],
        "The guest misused a ring, which stops until the guest resets it; or the tap of a network device or uplink is \
         missing. The rate is limited.",
    ),
    described(
        "SHUTDOWN",
        &["guest", "reason"],
        "The daemon ends (QEMU). `reason`: `host-signal`, `host-qmp-quit`, or `guest-shutdown` for `--fd` of a back-end \
         program whose peer has left.",
    ),
    described(
        "WORKERS_BALANCED",
        &["export", "workers", "worker", "outcome", "reason"],
        "It was decided that an export with `workers=auto` should have so many workers. `worker`: the one that was made \
         or freed, or null. `outcome`: `done`, `failed` or `dry-run`. See [workers that follow \
         load](../guide/workers.md).",
    ),
    described("WORKER_CREATED", &["id"], "A worker was made."),
    described("WORKER_FREED", &["id"], "A worker was freed."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_event() {
        let info = |cancelled: bool, error: &str| {
            json!({
                "id": "j", "type": "backup", "disk": "d", "target": "t", "status": "concluded", "current-progress": 1,
                "total-progress": 2, "cancelled": cancelled, "error": error,
            })
        };
        let job =
            |cancelled, error| serde_json::from_value::<JobInfo>(info(cancelled, error)).map(Event::JobEnded);
        let name = || "e".to_owned();
        let events = [
            Event::ExportConnected { name: name() },
            Event::ExportDisconnected { name: name() },
            Event::ExportDeleted { name: name() },
            Event::QueueAttached { export: name(), index: 0, worker: 1 },
            Event::QueueBalanced {
                export: name(),
                index: 0,
                from: 0,
                worker: 1,
                outcome: vshunt_types::spec::BalanceOutcome::Moved,
                reason: name(),
            },
            Event::WorkersBalanced {
                export: name(),
                decision: vshunt_types::spec::ResizeDecision {
                    workers: 2,
                    worker: Some(1),
                    outcome: vshunt_types::spec::ResizeOutcome::Done,
                    reason: name(),
                    age_s: 0,
                },
            },
            Event::QueueBroken { export: name(), index: 0, reason: name() },
            Event::WorkerNew { id: 1 },
            Event::WorkerFreed { id: 1 },
            Event::JobStatus { id: name(), status: vshunt_types::spec::JobStatus::Running },
            Event::JobPending(serde_json::from_value(info(false, "x")).unwrap()),
            Event::JobReady(serde_json::from_value(info(false, "x")).unwrap()),
            job(true, "x").unwrap(),
            job(false, "x").unwrap(),
            Event::DiskLost { name: name(), reason: name() },
            Event::DiskResized { name: name(), size_bytes: 1 },
        ];
        let mut seen: Vec<_> = events
            .iter()
            .map(name_and_data)
            .map(|(name, data)| {
                let known = EVENTS
                    .iter()
                    .find(|e| e.name == name)
                    .unwrap_or_else(|| panic!("{name} is not in the table"));
                let mut members: Vec<_> = data.as_object().unwrap().keys().map(String::as_str).collect();
                let mut want = known.members.to_vec();
                members.sort_unstable();
                want.sort_unstable();
                assert_eq!(members, want, "{name}");
                name
            })
            .collect();
        seen.push("SHUTDOWN");
        seen.sort_unstable();
        assert_eq!(seen, EVENTS.iter().map(|e| e.name).collect::<Vec<_>>());
    }
}
