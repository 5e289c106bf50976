//! Short forms for many queues: stopped ones share a line, and runs of queues are written as a
//! range.

use std::collections::HashSet;

use vshunt_types::spec::{ExportInfo, QueueInfo};

use crate::outcome::one_line;

/// Returns the queues that a table lists, and a line for each owner with several stopped queues.
/// `queues` are grouped by owner. A stopped queue that has completed requests is listed.
pub(super) fn split<'a>(
    queues: &'a [QueueInfo],
    exports: &[ExportInfo],
) -> (Vec<&'a QueueInfo>, Vec<String>) {
    let (mut listed, mut lines) = (Vec::new(), Vec::new());
    for of_owner in queues.chunk_by(|a, b| a.export == b.export) {
        let owner = of_owner.first().map_or("", |queue| queue.export.as_str());
        let (stopped, others): (Vec<_>, Vec<_>) = of_owner.iter().partition(|queue| has_nothing(queue));
        let mut indices: Vec<u16> = stopped.iter().map(|queue| queue.index).collect();
        indices.extend(exports.iter().filter(|export| export.spec.name == owner).flat_map(left_out));
        if indices.len() < 2 {
            listed.extend(of_owner);
            continue;
        }
        lines.push(line(owner, indices));
        listed.extend(others);
    }
    let is_there = |export: &&ExportInfo| queues.iter().any(|queue| queue.export == export.spec.name);
    for export in exports.iter().filter(|export| export.queues_left_out > 0 && !is_there(export)) {
        lines.push(line(&export.spec.name, left_out(export)));
    }
    (listed, lines)
}

fn has_nothing(queue: &QueueInfo) -> bool {
    queue.state == "stopped" && queue.requests == 0 && queue.errors == 0
}

/// Returns the indices of the queues that the daemon left out of an export's list.
fn left_out(export: &ExportInfo) -> Vec<u16> {
    let told: HashSet<u16> = export.queue_list.iter().map(|queue| queue.index).collect();
    let all = told.len() + export.queues_left_out as usize;
    (0..=u16::MAX).take(all).filter(|index| !told.contains(index)).collect()
}

fn line(owner: &str, mut indices: Vec<u16>) -> String {
    indices.sort_unstable();
    let names: Vec<_> = indices.iter().map(|index| format!(":{index}")).collect();
    let plural = if names.len() == 1 { "" } else { "s" };
    let all = ranges(&names).replace(':', "");
    one_line(&format!("{owner}: queue{plural} {all} stopped")).into_owned()
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

    fn queue(export: &str, index: u16, state: &str) -> QueueInfo {
        serde_json::from_value(serde_json::json!({
            "export": export, "index": index, "worker": 0, "state": state, "size": 64, "packed": false,
            "in-flight": 0, "generation": 0, "requests": 0, "errors": 0, "read-bytes": 0, "write-bytes": 0,
            "kicks": 0, "notifications": 0,
        }))
        .unwrap()
    }

    #[test]
    fn stopped_queues_are_one_line() {
        let mut queues: Vec<_> =
            (0..8).map(|i| queue("vm0", i, if i == 3 { "running" } else { "stopped" })).collect();
        queues[5].requests = 7;
        queues.extend((0..2).map(|i| queue("vm1", i, "stopped")));
        queues.push(queue("vm2", 0, "stopped"));
        let (listed, lines) = split(&queues, &[]);
        let listed: Vec<_> = listed.iter().map(|q| format!("{}:{}", q.export, q.index)).collect();
        assert_eq!(listed, ["vm0:3", "vm0:5", "vm2:0"]);
        assert_eq!(lines, ["vm0: queues 0-2,4,6,7 stopped", "vm1: queues 0,1 stopped"]);
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
