//! Queues that never started. Exports have up to 256 queues, of which guests start a few.

use std::collections::HashMap;

use super::QueueInfo;

impl QueueInfo {
    /// Removes the queues that never started, if an export has many of them. They would be most of
    /// a list.
    pub fn keep_started(queues: &mut Vec<Self>) {
        let mut idle: HashMap<&str, usize> = HashMap::new();
        for queue in queues.iter().filter(|queue| !queue.has_started()) {
            *idle.entry(&queue.export).or_default() += 1;
        }
        let many = |queue: &Self| idle.get(queue.export.as_str()).is_some_and(|n| *n > Self::IDLE_SHOWN);
        let kept: Vec<bool> = queues.iter().map(|queue| queue.has_started() || !many(queue)).collect();
        let mut kept = kept.into_iter();
        queues.retain(|_| kept.next().unwrap_or(true));
    }
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
        let shown = |count, started| {
            let mut queues = queues("e", count, started);
            QueueInfo::keep_started(&mut queues);
            queues.len()
        };
        assert_eq!([shown(256, 0), shown(256, 4), shown(8, 0), shown(12, 4), shown(13, 4)], [0, 4, 8, 12, 4]);
    }
}
