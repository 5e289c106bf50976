//! The tables of queues.

use vshunt_types::spec::{Engine, ExportInfo, ExportKind, QueueInfo};

use super::{idle, size, table};

/// Returns the table of the queues of `exports` and of jobs. None if there are no queues.
pub(crate) fn queues(queues: &[QueueInfo], exports: &[ExportInfo]) -> Option<String> {
    if queues.is_empty() && exports.iter().all(|export| export.queues_left_out == 0) {
        return None;
    }
    let controls: Vec<_> = exports.iter().filter(|export| has_control(export)).collect();
    let name = |queue: &QueueInfo| match controls.iter().any(|export| is_control(queue, export)) {
        true => format!("{}:{} control", queue.export, queue.index),
        false => format!("{}:{}", queue.export, queue.index),
    };
    let (queues, stopped) = idle::split(queues, exports);
    let mut text = table(
        ["QUEUE", ">WORKER", "STATE", ">SIZE", ">IN-FLIGHT", ">REQUESTS", ">ERRORS", ">READ", ">WRITTEN"],
        queues.iter().map(|q| {
            [
                name(q),
                q.worker.to_string(),
                q.state.clone(),
                q.size.to_string(),
                q.in_flight.to_string(),
                q.requests.to_string(),
                q.errors.to_string(),
                size(q.read_bytes),
                size(q.write_bytes),
            ]
        }),
    );
    if queues.is_empty() {
        text.clear();
    }
    stopped.iter().for_each(|line| text.extend([line, "\n"]));
    Some(text)
}

/// Whether the last queue of an export is the control queue of a network device.
fn has_control(export: &ExportInfo) -> bool {
    export.spec.kind == ExportKind::VhostUserNet && export.engine == Engine::User
}

/// Whether a queue is the control queue of this export. It is the last one, and counts no frames.
fn is_control(queue: &QueueInfo, export: &ExportInfo) -> bool {
    queue.export == export.spec.name && queue.net.is_none()
}

/// Returns the table of the frames that network queues dropped, with the reasons. None if no frame
/// was dropped.
pub(crate) fn drops(queues: &[QueueInfo]) -> Option<String> {
    let rows: Vec<_> = queues
        .iter()
        .flat_map(|q| q.net.iter().flat_map(|n| n.drops.each()).map(move |(why, count)| (q, why, count)))
        .filter(|(.., count)| *count > 0)
        .map(|(q, why, count)| [format!("{}:{}", q.export, q.index), why.to_owned(), count.to_string()])
        .collect();
    (!rows.is_empty()).then(|| table(["QUEUE", "DROPPED", ">FRAMES"], rows.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(export: &str, index: u16, net: bool) -> QueueInfo {
        let mut queue = serde_json::json!({
            "export": export, "index": index, "worker": 0, "state": "running", "size": 64, "packed": false,
            "in-flight": 0, "generation": 0, "requests": 0, "errors": 0, "read-bytes": 0, "write-bytes": 0,
            "kicks": 0, "notifications": 0,
        });
        if net {
            queue["net"] = serde_json::to_value(vshunt_types::spec::NetQueueCounters::default()).unwrap();
        }
        serde_json::from_value(queue).unwrap()
    }

    fn export(name: &str, kind: &str, engine: &str) -> ExportInfo {
        serde_json::from_value(serde_json::json!({ "type": kind, "name": name, "engine": engine,
            "connected": true, "removing": false, "features": [], "queue-list": [] }))
        .unwrap()
    }

    #[test]
    fn the_control_queue_of_a_network_device_is_named() {
        let exports = [
            export("c0", "vhost-user-net", "user"),
            export("k0", "vhost-user-net", "kernel"),
            export("d0", "vhost-user-blk", "user"),
        ];
        let all = [
            queue("c0", 0, true),
            queue("c0", 1, false),
            queue("k0", 0, false),
            queue("d0", 0, false),
            queue("c0x", 1, false),
        ];
        let text = queues(&all, &exports).unwrap();
        let names: Vec<_> = text.lines().skip(1).map(|line| line.split("  ").next().unwrap()).collect();
        assert_eq!(names, ["c0:0", "c0:1 control", "k0:0", "d0:0", "c0x:1"], "{text}");
    }

    #[test]
    fn queues_that_the_daemon_left_out_are_named() {
        let mut some = ExportInfo { queues_left_out: 252, ..export("d0", "vhost-user-blk", "user") };
        some.queue_list = vec![queue("d0", 0, false)];
        let all = ExportInfo { queues_left_out: 256, ..export("d1", "vhost-user-blk", "user") };
        let text = queues(&some.queue_list.clone(), &[some, all]).unwrap();
        assert!(text.ends_with("d0: queues 1-252 stopped\nd1: queues 0-255 stopped\n"), "{text}");
    }

    #[test]
    fn a_table_of_stopped_queues_has_no_titles() {
        let all = ExportInfo { queues_left_out: 16, ..export("d1", "vhost-user-blk", "user") };
        assert_eq!(queues(&[], &[all]).unwrap(), "d1: queues 0-15 stopped\n");
    }

    #[test]
    fn without_queues_there_is_no_table() {
        assert_eq!(queues(&[], &[]), None);
    }
}
