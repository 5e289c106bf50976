//! `query-blockstats`: what exports and disks have done, in the shape of QEMU's BlockStats.
//!
//! QEMU counts an operation by its kind when it completes, and sums service times. Members that do
//! not exist here are absent: positions, merges, failures and invalid requests by kind.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use vshunt_daemon::ServiceTotals;
use vshunt_types::spec::{ExportInfo, LatencyFigures, LatencyInfo, QueueInfo};

use crate::qmp::context::{Answer, Arguments, Context};

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BlockStats {
    /// List the disks, each with the sum of its exports. Absent or false: list the exports of
    /// disks.
    #[serde(default)]
    query_nodes: bool,
}

pub(super) fn query_blockstats(context: &Context, arguments: Arguments) -> Answer {
    let BlockStats { query_nodes } = arguments.read()?;
    let exports: Vec<_> = context
        .daemon
        .exports()
        .into_iter()
        .filter(|e| e.spec.net.is_none())
        .map(|e| (context.daemon.service_totals(&e), e))
        .collect();
    let of_disk = |disk: &str| exports.iter().filter(|(_, e)| e.spec.disk == disk).collect::<Vec<_>>();
    Ok(match query_nodes {
        false => exports
            .iter()
            .map(|one| {
                let (export, disk) = (&one.1.spec.name, &one.1.spec.disk);
                json!({ "device": export, "qdev": export, "node-name": disk, "stats": stats(&[one]) })
            })
            .collect(),
        true => context
            .daemon
            .disks()
            .iter()
            .map(
                |d| json!({ "device": "", "node-name": d.spec.name, "stats": stats(&of_disk(&d.spec.name)) }),
            )
            .collect(),
    })
}

/// Returns QEMU's BlockDeviceStats of exports together.
fn stats(exports: &[&(ServiceTotals, ExportInfo)]) -> Value {
    let sum = |of: fn(&QueueInfo) -> u64| -> u64 {
        exports.iter().flat_map(|(_, e)| &e.queue_list).map(of).fold(0, u64::saturating_add)
    };
    let total = |of: fn(&ServiceTotals) -> u64| -> u64 {
        exports.iter().map(|(totals, _)| of(totals)).fold(0, u64::saturating_add)
    };
    let mut stats = Map::new();
    for (key, value) in [
        ("rd_bytes", sum(|q| q.read_bytes)),
        ("wr_bytes", sum(|q| q.write_bytes)),
        ("rd_operations", sum(|q| q.reads)),
        ("wr_operations", sum(|q| q.writes)),
        ("flush_operations", sum(|q| q.flushes)),
        // The sums are of all operations; the histograms start at the last reset.
        ("rd_total_time_ns", total(|t| t.read_ns)),
        ("wr_total_time_ns", total(|t| t.write_ns)),
        ("flush_total_time_ns", total(|t| t.flush_ns)),
    ] {
        stats.insert(key.to_owned(), value.into());
    }
    let latency =
        LatencyInfo::sum(exports.iter().filter_map(|(_, e)| e.service_times.as_ref())).unwrap_or_default();
    for (kind, figures) in [("rd", &latency.read), ("wr", &latency.write), ("flush", &latency.flush)] {
        if let Some(figures) = figures {
            stats.insert(format!("{kind}_latency_histogram"), histogram(figures));
        }
    }
    stats.extend([("account_failed".to_owned(), true.into()), ("timed_stats".to_owned(), json!([]))]);
    Value::Object(stats)
}

/// Returns QEMU's BlockLatencyHistogramInfo: one bin more than boundaries.
fn histogram(figures: &LatencyFigures) -> Value {
    let bins = figures.by_power();
    let boundaries = bins.iter().map(|(limit, _)| *limit).filter(|limit| *limit != u64::MAX);
    json!({ "boundaries": boundaries.collect::<Vec<_>>(), "bins": bins.iter().map(|(_, n)| *n).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(queues: Value) -> ExportInfo {
        let mut value = json!({ "type": "vhost-user-blk", "name": "e0", "disk": "d0", "engine": "user",
            "connected": true, "features": [], "queue-list": queues });
        value["service-times"] = queues[0]["service-times"].clone();
        serde_json::from_value(value).unwrap()
    }

    fn queue() -> Value {
        let figures = LatencyFigures::new(vec![(1000, 1), (4000, 1)], 4000, 3900);
        json!({ "export": "e0", "index": 0, "worker": 0, "state": "running", "size": 64, "packed": false,
            "in-flight": 0, "generation": 1, "requests": 24, "reads": 20, "writes": 3, "flushes": 1, "errors": 0,
            "read-bytes": 80, "write-bytes": 12, "kicks": 0, "notifications": 0,
            "service-times": { "mode": "sampled", "read": figures } })
    }

    #[test]
    fn exports_of_a_disk_are_added() {
        let totals = ServiceTotals { read_ns: 40_000, ..ServiceTotals::default() };
        let one = (totals, export(json!([queue()])));
        let stats = stats(&[&one, &one]);
        assert_eq!(
            (&stats["rd_operations"], &stats["rd_total_time_ns"], &stats["wr_total_time_ns"]),
            (&json!(40), &json!(80_000), &json!(0))
        );
        let histogram = &stats["rd_latency_histogram"];
        assert_eq!(histogram["boundaries"][2], 4000);
        assert_eq!(histogram["bins"].as_array().unwrap().len(), 28);
        assert_eq!((&histogram["bins"][0], &histogram["bins"][2]), (&json!(2), &json!(2)));
        assert!(stats.get("wr_latency_histogram").is_none());
    }

    #[test]
    fn a_disk_without_exports_has_done_nothing() {
        let stats = stats(&[]);
        assert_eq!((&stats["rd_bytes"], &stats["flush_operations"]), (&json!(0), &json!(0)));
    }
}
