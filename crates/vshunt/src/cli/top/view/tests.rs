use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

/// The queue 1 has slow requests, one in fifty.
pub(in super::super) fn queue(export: &str, index: u16, worker: u32, requests: u64) -> QueueInfo {
    let slow = if index == 1 { requests / 50 } else { 0 };
    let bins: Vec<_> =
        [(24_000, requests - slow), (1_000_000, slow)].into_iter().filter(|b| b.1 > 0).collect();
    let read = vshunt_types::spec::LatencyFigures::new(bins, requests, 1_500_000);
    serde_json::from_value(json!({
        "export": export, "index": index, "worker": worker, "state": "running", "size": 64, "packed": false,
        "in-flight": 2, "generation": 1, "requests": requests, "errors": 0, "read-bytes": requests * 4096,
        "write-bytes": 0, "kicks": 0, "notifications": 0, "service-times": { "mode": "on", "read": read },
    }))
    .unwrap()
}

/// A worker that was busy for `busy_us` of 2 s, and polled for a quarter of that, if it could.
pub(in super::super) fn worker(id: u32, busy_us: u64, queues: &[&str]) -> WorkerInfo {
    let polling_us = (busy_us / 4).min(2_000_000 - busy_us);
    serde_json::from_value(json!({
        "id": id, "name": format!("worker-{id}"), "kind": "user", "tid": 1, "cpu": [0, 1], "nice": 0, "poll-us": 50,
        "queues": queues, "cpu-time-us": busy_us + polling_us, "busy-us": busy_us, "polling-us": polling_us,
        "sleeping-us": 2_000_000 - busy_us - polling_us, "sleeps": 0, "requests": 0,
    }))
    .unwrap()
}

pub(in super::super) fn sample(at: Instant, queues: Vec<QueueInfo>, workers: Vec<WorkerInfo>) -> Sample {
    let mut names: Vec<_> = queues.iter().map(|q| q.export.clone()).collect();
    names.dedup();
    let export = |name: &String| {
        serde_json::from_value(
            json!({ "type": "vhost-user-blk", "name": name, "disk": "d0", "engine": "user",
            "connected": true, "features": [], "queue-list": [] }),
        )
        .unwrap()
    };
    Sample { at, exports: names.iter().map(export).collect(), queues, workers }
}

/// Two samples, two seconds apart: vm0:1 does 500 requests per second, vm1:0 100.
pub(in super::super) fn samples() -> (Sample, Sample) {
    let at = Instant::now();
    let queues = |a, b| vec![queue("vm0", 0, 0, 7), queue("vm0", 1, 1, a), queue("vm1", 0, 0, b)];
    let before = sample(at, queues(0, 0), vec![worker(0, 0, &["vm0:0", "vm1:0"]), worker(1, 0, &["vm0:1"])]);
    let now = sample(
        at + Duration::from_secs(2),
        queues(1000, 200),
        vec![worker(0, 800_000, &["vm0:0", "vm1:0"]), worker(1, 1_900_000, &["vm0:1"])],
    );
    (before, now)
}

#[test]
fn rates_are_per_second_and_exports_are_sums() {
    let (before, now) = samples();
    let view = View::between(&before, &now);
    let requests: Vec<_> = view.queues.iter().map(|q| (q.name(), q.rates.requests)).collect();
    assert_eq!(requests, [("vm0:0".into(), 0.0), ("vm0:1".into(), 500.0), ("vm1:0".into(), 100.0)]);
    assert_eq!(view.exports[0].rates.requests, 500.0);
    assert_eq!(view.exports[0].rates.read, 500.0 * 4096.0);
    assert_eq!(view.exports[0].in_flight, 4);
    let shares = view.workers.iter().map(|w| (w.busy_percent, w.polling_percent, w.cpu_percent, w.hot));
    assert_eq!(shares.collect::<Vec<_>>(), [(40.0, 10.0, 50.0, false), (95.0, 5.0, 100.0, true)]);
}

#[test]
fn shares_of_a_worker_are_of_its_own_time() {
    let (mut before, mut now) = samples();
    // Its times grow by a second, while answers that are late make two seconds of it.
    (before.workers[0].busy_us, before.workers[0].polling_us, before.workers[0].sleeping_us) = (10, 0, 1_000);
    (now.workers[0].busy_us, now.workers[0].polling_us, now.workers[0].sleeping_us) =
        (700_010, 100_000, 201_000);
    let view = View::between(&before, &now);
    let w = &view.workers[0];
    assert_eq!((w.busy_percent, w.polling_percent, w.sleeping_percent), (70.0, 10.0, 20.0));
    assert_eq!(view.seconds, 2.0);
}

#[test]
fn the_first_sample_and_new_rows_have_no_rates() {
    let (before, now) = samples();
    let view = View::between(&now, &now);
    assert!(view.queues.iter().all(|q| q.rates == Rates::default()), "{view:?}");
    let empty = Sample { queues: Vec::new(), workers: Vec::new(), exports: Vec::new(), ..before };
    let view = View::between(&empty, &now);
    assert!(view.queues.iter().all(|q| q.rates == Rates::default()), "{view:?}");
    assert!(view.workers.iter().all(|w| w.cpu_percent == 0.0), "{view:?}");
}

#[test]
fn a_counter_that_begins_again_is_no_negative_rate() {
    assert_eq!(rate(1000, 10, 2.0), 5.0);
    assert_eq!(rate(1000, 3000, 2.0), 1000.0);
    assert_eq!(rate(1000, 3000, 0.0), 0.0);
}

#[test]
fn queues_that_never_started_are_left_out() {
    let (before, mut now) = samples();
    now.queues[0].size = 0;
    now.queues[0].state = "stopped".into();
    assert_eq!(View::between(&before, &now).queues.len(), 2);
}

#[test]
fn rows_are_sorted_and_filtered() {
    let (before, now) = samples();
    let names = |view: &View| view.queues.iter().map(QueueRow::name).collect::<Vec<_>>();
    let mut view = View::between(&before, &now);
    view.sort(Order::Requests, false);
    assert_eq!(names(&view), ["vm0:1", "vm1:0", "vm0:0"]);
    view.sort(Order::Bytes, true);
    assert_eq!(names(&view), ["vm0:0", "vm1:0", "vm0:1"]);
    assert_eq!(view.workers[0].id, 0);
    view.filter("vm1");
    assert_eq!(names(&view), ["vm1:0"]);
    assert_eq!((view.exports.len(), view.workers.len()), (1, 1));
}

#[test]
fn moves_are_told_by_worker() {
    let (before, mut now) = samples();
    assert!(moves(&before, &now).is_empty());
    now.queues[0].worker = 1;
    now.queues[2].worker = 1;
    assert_eq!(moves(&before, &now), ["moved to worker 1: vm0:0,vm1:0"]);
}

#[test]
fn queues_that_wait_for_limits_are_marked() {
    let (before, mut now) = samples();
    // Both directions of a queue pair waited all the time.
    now.queues[0].limited_us = 3_900_000;
    // 0.5 % of the time, and not now.
    now.queues[1].limited_us = 10_000;
    let view = View::between(&before, &now);
    let limited =
        |view: &View| view.queues.iter().map(|q| (q.limited, q.limited_percent)).collect::<Vec<_>>();
    assert_eq!(limited(&view), [(true, 100.0), (false, 0.5), (false, 0.0)]);
    let exports: Vec<_> = view.exports.iter().map(|e| (e.limited, e.limited_percent)).collect();
    assert_eq!(exports, [(true, 100.0), (false, 0.0)]);
    now.queues[1].limited = true;
    assert_eq!(limited(&View::between(&before, &now))[1], (true, 0.5));
    let text = super::super::text::tables(&view, None);
    let row = text.lines().find(|line| line.starts_with("vm0:0 "));
    assert_eq!(row.and_then(|row| row.split_whitespace().nth(2)), Some("limited"), "{text}");
}

#[test]
fn decisions_of_balance_are_told_once_with_their_reasons() {
    let (mut before, mut now) = samples();
    assert!(decisions(&before, &now).is_empty());
    let balancing = |decisions: u64, age_s: u64| {
        serde_json::from_value(json!({ "mode": "auto", "moves": decisions, "decisions": decisions,
            "last": { "index": 1, "from": 0, "worker": 1, "outcome": "moved", "reason": "a reason", "age-s": age_s },
            "resized": { "workers": 2, "worker": 1, "outcome": "done", "reason": "another", "age-s": age_s } }))
        .unwrap()
    };
    now.exports[0].balancing = Some(balancing(1, 0));
    let told = ["moved: vm0:1 to worker 1: a reason", "done: vm0 has 2 workers: another"];
    assert_eq!(decisions(&before, &now), told);
    before.exports[0].balancing = Some(balancing(1, 0));
    now.exports[0].balancing = Some(balancing(1, 2));
    assert!(decisions(&before, &now).is_empty());
    now.exports[0].balancing = Some(balancing(2, 0));
    assert_eq!(decisions(&before, &now), told[..1]);
    let text = super::super::text::tables(&View::between(&before, &now), None);
    assert!(text.contains("BALANCE") && text.contains("a reason"), "{text}");
}
