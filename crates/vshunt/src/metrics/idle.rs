//! Queues that never started have no metrics, if an export has many of them.

use std::collections::HashMap;

use vshunt_types::spec::QueueInfo;

/// Leaves out the queues that never started, if an export has many of them. They would be most of
/// the text.
pub(super) fn shown(queues: Vec<QueueInfo>) -> Vec<QueueInfo> {
    let mut idle: HashMap<String, usize> = HashMap::new();
    for queue in queues.iter().filter(|queue| !queue.has_started()) {
        *idle.entry(queue.export.clone()).or_default() += 1;
    }
    idle.retain(|_, count| *count > QueueInfo::IDLE_SHOWN);
    queues.into_iter().filter(|q| q.has_started() || !idle.contains_key(&q.export)).collect()
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
