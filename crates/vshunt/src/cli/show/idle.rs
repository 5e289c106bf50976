//! Short forms for many queues: those that never started are counted, and runs of queues are
//! written as a range.

use vshunt_types::spec::QueueInfo;

use crate::outcome::one_line;

/// Returns the queues that a table lists, and a line for each export whose other queues never
/// started. `queues` are grouped by export.
pub(super) fn split(queues: &[QueueInfo]) -> (Vec<&QueueInfo>, Vec<String>) {
    let (mut listed, mut lines) = (Vec::new(), Vec::new());
    for of_export in queues.chunk_by(|a, b| a.export == b.export) {
        let (started, idle): (Vec<_>, Vec<_>) = of_export.iter().partition(|queue| queue.has_started());
        if idle.len() <= QueueInfo::IDLE_SHOWN {
            listed.extend(of_export);
            continue;
        }
        let export = idle.first().map_or("", |queue| queue.export.as_str());
        lines.push(line(export, idle.len(), started.is_empty()));
        listed.extend(started);
    }
    (listed, lines)
}

/// Returns the line for queues of an export that never started. `all`: it has no others.
pub(super) fn line(export: &str, count: usize, all: bool) -> String {
    one_line(&format!("{export}: {count}{}, not started", if all { "" } else { " more" })).into_owned()
}

/// Joins names of queues, `EXPORT:INDEX`. Three and more in a row are written `EXPORT:FIRST-LAST`.
pub(crate) fn ranges(names: &[String]) -> String {
    let indices: Vec<Option<(&str, u32)>> = names.iter().map(|name| index(name)).collect();
    let follows = |a: usize| match (indices.get(a), indices.get(a + 1)) {
        (Some(Some((export, n))), Some(Some((next, m)))) => export == next && n.checked_add(1) == Some(*m),
        _ => false,
    };
    let (mut out, mut first) = (Vec::new(), 0);
    while first < names.len() {
        let mut last = first;
        while follows(last) {
            last += 1;
        }
        match indices[last] {
            Some((_, index)) if last > first + 1 => out.push(format!("{}-{index}", names[first])),
            _ => out.extend_from_slice(&names[first..=last]),
        }
        first = last + 1;
    }
    out.join(",")
}

/// Splits the name of a queue. None for the queue of a job, which has no index.
fn index(name: &str) -> Option<(&str, u32)> {
    let (export, index) = name.rsplit_once(':')?;
    Some((export, index.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(export: &str, index: u16, size: u16) -> QueueInfo {
        serde_json::from_value(serde_json::json!({
            "export": export, "index": index, "worker": 0, "state": "stopped", "size": size, "packed": false,
            "in-flight": 0, "generation": 0, "requests": 0, "errors": 0, "read-bytes": 0, "write-bytes": 0,
            "kicks": 0, "notifications": 0,
        }))
        .unwrap()
    }

    #[test]
    fn many_queues_that_never_started_are_one_line() {
        let mut queues: Vec<_> = (0..256).map(|i| queue("vm0", i, if i < 4 { 128 } else { 0 })).collect();
        queues.extend((0..20).map(|i| queue("vm1", i, 0)));
        queues.extend((0..8).map(|i| queue("vm2", i, 0)));
        let (listed, lines) = split(&queues);
        assert_eq!(listed.len(), 4 + 8);
        assert_eq!(lines, ["vm0: 252 more, not started", "vm1: 20, not started"]);
    }

    #[test]
    fn queues_in_a_row_are_a_range() {
        let names = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let cases = [
            ("a:0", "a:0"),
            ("a:0,a:1", "a:0,a:1"),
            ("a:0,a:1,a:2,b:3,b:5,b:6,b:7", "a:0-2,b:3,b:5-7"),
            ("a:b:1,a:b:2,a:b:3,job", "a:b:1-3,job"),
            ("a:4294967295,a:0", "a:4294967295,a:0"),
        ];
        for (text, want) in cases {
            assert_eq!(ranges(&names(text)), want);
        }
        assert_eq!(ranges(&[]), "");
    }
}
