use std::collections::HashSet;

use serde_json::{Value, json};

use super::*;

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn a_queue(export: &str, more: Value) -> QueueInfo {
    let mut queue = json!({
        "export": export, "index": 0, "worker": 2, "state": "running", "size": 256, "packed": false, "in-flight": 3,
        "generation": 4, "requests": u64::MAX, "errors": 6, "read-bytes": 7, "write-bytes": 8, "kicks": 9,
        "notifications": 10,
    });
    queue.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    read(queue)
}

/// Returns a snapshot with one object of each kind.
fn whole() -> Snapshot {
    let bitmap = json!({
        "name": "b0", "granularity": 65536, "count": 131072, "recording": true, "persistent": true, "busy": false,
    });
    let counted = NetQueueCounters { to_guest_packets: 11, ..Default::default() };
    let net = json!({ "type": "vhost-user-net", "name": "c0", "net": "n0", "engine": "user", "connected": false,
        "features": [], "queue-list": [] });
    let mut kernel = net.clone();
    let port = json!({ "number": 1, "state": "blocked", "mac-filter": true, "addresses": 14, "mac-limit": 256, "mtu": 1500,
        "loops": 15 });
    let mut net = net;
    net["port"] = port;
    net["balancing"] = json!({ "mode": "auto", "moves": 2, "decisions": 3 });
    (kernel["name"], kernel["engine"]) = ("k0".into(), "kernel".into());
    Snapshot {
        disks: vec![read(json!({
            "name": "d0", "format": "qcow2", "size-bytes": 1 << 20, "direct-in-use": true, "path": "ring",
            "exports": ["f0"], "bitmaps": [bitmap],
        }))],
        nets: vec![
            read(json!({
                "type": "tap", "name": "n0", "ifname": "vs0", "steering": "rss", "made": true, "multi-queue": true,
                "open-queues": 2, "mtu": 1500, "exports": ["c0"], "counters": NetCounters::default(),
            })),
            read(
                json!({ "type": "switch", "name": "s0", "made": false, "multi-queue": true, "open-queues": 0,
                "addresses": 3, "exports": [] }),
            ),
        ],
        exports: vec![
            read(json!({
                "type": "fuse", "name": "f0", "disk": "d0", "engine": "user", "connected": true, "features": [],
                "queue-list": [], "service-times": { "mode": "on", "read": vshunt_types::spec::LatencyFigures::new(
                    vec![(1125, 3), (2250, 2), (u64::MAX, 1)], 90_000_000_000, 80_000_000_000) },
                "mount": { "transport": "dev", "passthrough": false, "allow-other": true, "open-files": 5 },
            })),
            read(net),
            read(kernel),
        ],
        jobs: vec![read(json!({
            "id": "j0", "type": "backup", "disk": "d0", "target": "t", "status": "paused", "current-progress": 1,
            "total-progress": 2,
        }))],
        queues: vec![
            a_queue("f0", json!({})),
            a_queue("c0", json!({ "net": counted })),
            a_queue("k0", json!({ "state": "stopped" })),
        ],
        workers: vec![read(json!({
            "id": 2, "name": "a \"b\"\\\n", "kind": "user", "tid": 1, "cpu": [0], "nice": 0, "poll-us": 50,
            "queues": ["f0:0", "c0:0"], "cpu-time-us": 1_500_000, "busy-us": 1_250_000,
            "polling-us": 250_000, "sleeping-us": 8_500_000, "sleeps": 12, "requests": 13, "stalled": true,
        }))],
        refused: 16,
    }
}

impl Family {
    /// Returns the name as users see it.
    fn shown(&self) -> String {
        let unit = self.unit.as_ref().map_or(String::new(), |u| format!("_{}", u.as_str()));
        let suffix = match self.kind {
            MetricType::Counter => "_total",
            _ => "",
        };
        format!("{PREFIX}_{}{unit}{suffix}", self.name)
    }
}

/// Returns the rows of docs/reference/metrics.md: name, type, labels, meaning.
pub(crate) fn rows() -> Vec<[String; 4]> {
    let snapshot = whole();
    let row = |family: &Family| {
        let samples = family.of.samples(&snapshot);
        let first = samples.first().unwrap_or_else(|| panic!("no {}", family.shown()));
        let labels: Vec<String> = first.labels.iter().map(|(key, _)| format!("`{key}`")).collect();
        let kind = family.kind.as_str().to_owned();
        [format!("`{}`", family.shown()), kind, labels.join(", "), family.help.to_owned()]
    };
    FAMILIES.iter().map(row).collect()
}

#[test]
fn what_a_scrape_shows() {
    let text = text(whole());
    let lines: HashSet<&str> = text.lines().collect();
    for line in [
        concat!("vshunt_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        "vshunt_sandbox_refused_calls_total 16",
        "# TYPE vshunt_queue_requests counter",
        "vshunt_queue_requests_total{export=\"f0\",queue=\"0\"} 18446744073709551615",
        "# UNIT vshunt_queue_read_bytes bytes",
        "vshunt_queue_read_bytes_total{export=\"c0\",queue=\"0\"} 7",
        "vshunt_queue_in_flight_requests{export=\"f0\",queue=\"0\"} 3",
        "vshunt_queue_state{export=\"f0\",queue=\"0\",state=\"running\"} 1",
        "vshunt_queue_state{export=\"f0\",queue=\"0\",state=\"stopped\"} 0",
        "vshunt_queue_to_guest_packets_total{export=\"c0\",queue=\"0\"} 11",
        "vshunt_queue_dropped_packets_total{export=\"c0\",queue=\"0\",reason=\"no-buffers\"} 0",
        "vshunt_worker_cpu_seconds_total{worker=\"2\"} 1.5",
        "vshunt_worker_time_seconds_total{worker=\"2\",phase=\"busy\"} 1.25",
        "vshunt_worker_time_seconds_total{worker=\"2\",phase=\"polling\"} 0.25",
        "vshunt_worker_time_seconds_total{worker=\"2\",phase=\"sleeping\"} 8.5",
        "vshunt_worker_poll_limit_seconds{worker=\"2\"} 0.00005",
        "vshunt_worker_stalled{worker=\"2\"} 1",
        "vshunt_worker_info{worker=\"2\",name=\"a \\\"b\\\"\\\\\\n\",kind=\"user\",export=\"\"} 1",
        "vshunt_net_mtu_bytes{net=\"n0\"} 1500",
        "vshunt_net_addresses{net=\"s0\"} 3",
        "vshunt_export_open_files{export=\"f0\"} 5",
        "# TYPE vshunt_export_latency_seconds histogram",
        "vshunt_export_latency_seconds_bucket{le=\"0.000001\",export=\"f0\",operation=\"read\"} 0",
        "vshunt_export_latency_seconds_bucket{le=\"0.000002\",export=\"f0\",operation=\"read\"} 3",
        "vshunt_export_latency_seconds_bucket{le=\"67.108864\",export=\"f0\",operation=\"read\"} 5",
        "vshunt_export_latency_seconds_bucket{le=\"+Inf\",export=\"f0\",operation=\"read\"} 6",
        "vshunt_export_latency_seconds_count{export=\"f0\",operation=\"read\"} 6",
        "vshunt_export_latency_seconds_sum{export=\"f0\",operation=\"read\"} 90.0",
        "vshunt_export_latency_seconds_count{export=\"f0\",operation=\"flush\"} 0",
        "vshunt_export_addresses{export=\"c0\"} 14",
        "vshunt_export_blocked{export=\"c0\"} 1",
        "vshunt_export_loops_total{export=\"c0\"} 15",
        "vshunt_export_balance_moves_total{export=\"c0\"} 2",
        "vshunt_export_balance_decisions_total{export=\"c0\"} 3",
        "vshunt_export_info{export=\"k0\",type=\"vhost-user-net\",disk=\"\",net=\"n0\",tap=\"\",engine=\"kernel\"} 1",
        "vshunt_bitmap_dirty_bytes{disk=\"d0\",bitmap=\"b0\"} 131072",
        "vshunt_job_state{job=\"j0\",state=\"paused\"} 1",
        "# EOF",
    ] {
        assert!(lines.contains(line), "{line}\n{text}");
    }
    // A value that is not counted is absent, not 0.
    assert!(!text.contains("vshunt_queue_requests_total{export=\"k0\""), "{text}");
    assert!(lines.contains("vshunt_queue_worker{export=\"k0\",queue=\"0\"} 2"), "{text}");
}

#[test]
fn what_is_not_there_has_no_metric() {
    let text = text(Snapshot::default());
    assert_eq!(text.lines().filter(|l| l.starts_with("# TYPE")).count(), 2, "{text}");
}

#[test]
fn the_words_for_states_are_all_there_are() {
    // A new status does not compile here before it is in the list above.
    for status in JOB_STATUSES {
        match status {
            JobStatus::Running
            | JobStatus::Paused
            | JobStatus::Ready
            | JobStatus::Aborting
            | JobStatus::Pending
            | JobStatus::Concluded => assert_ne!(word(status), ""),
        }
    }
}
