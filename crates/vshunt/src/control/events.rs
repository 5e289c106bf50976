//! The daemon's events as clients see them.

use serde_json::{Value, json};
use vshunt_daemon::export::Event;
use vshunt_types::spec::JobInfo;

use super::api::Stop;
use super::message;

/// Name and data of an event. `BLOCK_EXPORT_DELETED` is QEMU's; the others are ours.
fn name_and_data(event: &Event) -> (&'static str, Value) {
    match event {
        Event::ExportConnected { name } => ("EXPORT_CONNECTED", json!({ "name": name })),
        Event::ExportDisconnected { name } => ("EXPORT_DISCONNECTED", json!({ "name": name })),
        Event::ExportDeleted { name } => ("BLOCK_EXPORT_DELETED", json!({ "id": name })),
        Event::QueueAttached { export, index, worker } => {
            ("QUEUE_ATTACHED", json!({ "export": export, "index": index, "worker": worker }))
        }
        Event::QueueBroken { export, index, reason } => {
            ("QUEUE_BROKEN", json!({ "export": export, "index": index, "reason": reason }))
        }
        Event::WorkerNew { id } => ("WORKER_CREATED", json!({ "id": id })),
        Event::WorkerFreed { id } => ("WORKER_FREED", json!({ "id": id })),
        Event::JobStatus { id, status } => ("JOB_STATUS_CHANGE", json!({ "id": id, "status": status })),
        Event::JobEnded(job) => job_ended(job),
        Event::DiskResized { name, size_bytes } => {
            ("DISK_RESIZED", json!({ "name": name, "size-bytes": size_bytes }))
        }
    }
}

/// QEMU's, with its members; a job that was cancelled has not failed.
fn job_ended(job: &JobInfo) -> (&'static str, Value) {
    let mut data = json!({
        "type": job.kind,
        "device": job.id,
        "len": job.total_bytes,
        "offset": job.done_bytes,
        "speed": job.speed.unwrap_or(0),
    });
    if let Some(why) = &job.error {
        data["error"] = why.clone().into();
    }
    (if job.cancelled { "BLOCK_JOB_CANCELLED" } else { "BLOCK_JOB_COMPLETED" }, data)
}

/// The line for an event of the daemon; what clients are told is logged too.
pub(crate) fn line(event: &Event) -> String {
    let (name, data) = name_and_data(event);
    tracing::info!("{name} {data}");
    message::event(name, data)
}

/// QEMU's SHUTDOWN: sent once, before anything is taken down.
pub(crate) fn shutdown_line(stop: Stop) -> String {
    let reason = match stop {
        Stop::Signal(_) => "host-signal",
        Stop::Quit => "host-qmp-quit",
        Stop::PeerGone => "guest-shutdown",
    };
    message::event("SHUTDOWN", json!({ "guest": stop == Stop::PeerGone, "reason": reason }))
}
