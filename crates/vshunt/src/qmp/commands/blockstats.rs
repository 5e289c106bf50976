//! `query-blockstats`: what exports and disks have done, in the shape of QEMU's BlockStats.
//!
//! QEMU counts an operation by its kind when it completes, and sums service times. Members that do
//! not exist here are absent: positions, merges, failures and invalid requests by kind.

use serde::Deserialize;
use serde_json::{Map, Value, json};
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
    let exports = context.daemon.exports();
    let of_disks = || exports.iter().filter(|e| e.spec.net.is_none());
    let of_disk = |disk: &str| of_disks().filter(|e| e.spec.disk == disk).collect::<Vec<_>>();
    Ok(match query_nodes {
        false => of_disks()
            .map(|e| {
                let (export, disk) = (&e.spec.name, &e.spec.disk);
                json!({ "device": export, "qdev": export, "node-name": disk, "stats": stats(&[e]) })
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
fn stats(exports: &[&ExportInfo]) -> Value {
    let sum = |of: fn(&QueueInfo) -> u64| -> u64 {
        exports.iter().flat_map(|e| &e.queue_list).map(of).fold(0, u64::saturating_add)
    };
    let latency = LatencyInfo::sum(exports.iter().filter_map(|e| e.service_times.as_ref()));
    let mut stats = Map::new();
    for (key, value) in [
        ("rd_bytes", sum(|q| q.read_bytes)),
        ("wr_bytes", sum(|q| q.write_bytes)),
        ("rd_operations", sum(|q| q.reads)),
        ("wr_operations", sum(|q| q.writes)),
        ("flush_operations", sum(|q| q.flushes)),
    ] {
        stats.insert(key.to_owned(), value.into());
    }
    // The sums are of all operations; the histograms start at the last reset.
    let all = latency.clone().map(LatencyInfo::without_reset);
    let kinds = |latency: &'_ Option<LatencyInfo>| {
        latency.clone().unwrap_or_default().each().map(|(_, f)| f.cloned())
    };
    for ((all, lately), (kind, operations)) in kinds(&all).into_iter().zip(kinds(&latency)).zip([
        ("rd", sum(|q| q.reads)),
        ("wr", sum(|q| q.writes)),
        ("flush", sum(|q| q.flushes)),
    ]) {
        stats.insert(format!("{kind}_total_time_ns"), total_ns(all.as_ref(), operations).into());
        if let Some(figures) = &lately {
            stats.insert(format!("{kind}_latency_histogram"), histogram(figures));
        }
    }
    stats.extend([("account_failed".to_owned(), true.into()), ("timed_stats".to_owned(), json!([]))]);
    Value::Object(stats)
}

/// Returns the service time of all operations. Of a sample it is an estimate: the mean of the
/// sample for each operation.
fn total_ns(figures: Option<&LatencyFigures>, operations: u64) -> u64 {
    let Some(figures) = figures.filter(|f| f.count > 0) else { return 0 };
    let estimate = u128::from(figures.total_ns) * u128::from(operations) / u128::from(figures.count);
    u64::try_from(estimate).unwrap_or(u64::MAX)
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
    fn a_sample_gives_an_estimate_of_the_whole_time() {
        let one = export(json!([queue()]));
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
