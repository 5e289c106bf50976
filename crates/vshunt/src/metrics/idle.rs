//! Queues that never started have no metrics, if an export has many of them.

use std::collections::BTreeSet;

use vshunt_types::spec::QueueInfo;

/// Leaves out the queues that never started, if an export has many of them. They would be most of
/// the text.
pub(super) fn shown(queues: Vec<QueueInfo>) -> Vec<QueueInfo> {
    let idle = |export: &str| queues.iter().filter(|q| q.export == export && !q.has_started()).count();
    let exports: BTreeSet<_> = queues.iter().map(|q| &q.export).collect();
    let many: BTreeSet<String> =
        exports.into_iter().filter(|export| idle(export) > QueueInfo::IDLE_SHOWN).cloned().collect();
    queues.into_iter().filter(|q| q.has_started() || !many.contains(&q.export)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(export: &str, count: u16, started: u16) -> Vec<QueueInfo> {
        let queue = |index| {
            serde_json::from_value(serde_json::json!({
                "export": export, "index": index, "worker": 0, "state": "stopped", "packed": false, "in-flight": 0,
                "size": if index < started { 128 } else { 0 }, "generation": 0, "requests": 0, "errors": 0,
                "read-bytes": 0, "write-bytes": 0, "kicks": 0, "notifications": 0,
            }))
            .unwrap()
        };
        (0..count).map(queue).collect()
    }

    #[test]
    fn only_many_of_them_are_left_out() {
        let shown = |count, started| shown(queues("e", count, started)).len();
        assert_eq!([shown(256, 0), shown(256, 4), shown(8, 0), shown(12, 4), shown(13, 4)], [0, 4, 8, 12, 4]);
    }
}
