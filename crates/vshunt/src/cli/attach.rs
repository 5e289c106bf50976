//! Moves queues to workers by their names, for `vshunt attach` and the keys of `vshunt top`.

use serde_json::json;
use vshunt_types::spec::{QueueInfo, WorkerInfo};

use super::args::AttachArgs;
use super::call::{call, narrowed, send};
use super::client::Client;
use crate::keyval;
use crate::outcome::{Failure, Outcome};
use crate::values::QueueNames;

/// Returns the id that `text` is, or the id of the only worker of that name.
pub(super) fn worker_id(client: &mut Client, text: &str) -> Outcome<u32> {
    if let Some(id) = keyval::whole(text) {
        return Ok(id);
    }
    let workers: Vec<WorkerInfo> = call(client, "query-workers", json!({}))?;
    let mut named = workers.iter().filter(|w| w.name == text);
    match (named.next(), named.next()) {
        (Some(worker), None) => Ok(worker.id),
        (None, _) => Err(Failure::Failed(format!("there is no worker {text}; see `vshunt worker list`"))),
        _ => Err(Failure::Failed(format!("several workers are named {text}; use an id"))),
    }
}

/// Moves queues, and returns a sentence that says where they are now.
pub(super) fn move_queues(client: &mut Client, args: AttachArgs) -> Outcome<String> {
    let worker = worker_id(client, &args.worker)?;
    let QueueNames { export, indices } = args.queues;
    let indices = match indices {
        Some(indices) => indices,
        None => {
            let queues: Vec<QueueInfo> = narrowed(client, "query-queues", json!({ "export": export }))?;
            let last = queues.iter().filter(|queue| queue.export == export).map(|queue| queue.index).max();
            0..=last.ok_or_else(|| {
                Failure::Failed(format!("there is no export {export}; see `vshunt export list`"))
            })?
        }
    };
    let named = match (indices.start(), indices.end()) {
        (first, last) if first == last => format!("{export}:{first} is"),
        (first, last) => format!("{export}:{first}-{last} are"),
    };
    let arguments = json!({
        "export": export,
        "index": indices.start(),
        "last": indices.end(),
        "worker": worker,
        "timeout-ms": u64::try_from(args.timeout.as_millis()).unwrap_or(u64::MAX),
    });
    send(client, "queue-attach", arguments)?;
    Ok(format!("{named} on worker {worker}"))
}
