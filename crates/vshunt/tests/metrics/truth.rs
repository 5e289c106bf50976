//! What metrics say is what `status` says, while all of it changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use vshunt_guest::Disk;
use vshunt_guest::driver::Options;
use vshunt_guest::load::{self, LoadPlan, Progress, Rw, Tick};

use crate::common::{Daemon, wait_for};
use crate::openmetrics::Scrape;
use crate::{RAM, scrape};

const EXPORT: &str = "type=vhost-user-blk,name=vm0,disk=d0,socket=vm0.sock,queues=2";

/// A queue's counters: in metrics, and in the lists.
const COUNTERS: [(&str, &str); 7] = [
    ("vshunt_queue_requests_total", "requests"),
    ("vshunt_queue_errors_total", "errors"),
    ("vshunt_queue_read_bytes_total", "read-bytes"),
    ("vshunt_queue_write_bytes_total", "write-bytes"),
    ("vshunt_queue_kicks_total", "kicks"),
    ("vshunt_queue_notifications_total", "notifications"),
    ("vshunt_queue_starts_total", "generation"),
];

struct Count(Arc<AtomicU64>);

impl Progress for Count {
    fn phase(&mut self, _: &str, _: Option<Duration>, _: Option<u64>) {}
    fn tick(&mut self, tick: &Tick) {
        self.0.store(tick.ios, Ordering::Relaxed);
    }
    fn note(&mut self, _: &str) {}
}

/// A queue's counter in a list.
fn told(status: &Value, index: usize, key: &str) -> f64 {
    status["queues"][index][key].as_u64().unwrap() as f64
}

fn counted(scrape: &Scrape, name: &str, index: usize) -> f64 {
    scrape
        .value(name, &[("export", "vm0"), ("queue", &index.to_string())])
        .unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn a_scrape_says_what_status_says_while_io_runs() {
    let daemon = Daemon::start(&[RAM[0], RAM[1], "--export", EXPORT, "--metrics", "unix:m.sock"]);
    let socket = daemon.path().join("m.sock");
    let status = || daemon.json(&["status", "--json"]);
    let options = Options { queues: 2, ..Options::default() };
    let mut disk = Disk::connect(daemon.path().join("vm0.sock"), options).unwrap();
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let plan = LoadPlan {
        rw: Rw::Randrw,
        stop: Some(stop.clone()),
        interval: Duration::from_millis(10),
        ..LoadPlan::default()
    };
    let mut progress = Count(count.clone());
    let load = std::thread::spawn(move || {
        load::run(&mut disk, &plan, &mut progress).unwrap();
        disk
    });
    wait_for("requests", || count.load(Ordering::Relaxed) > 100);

    let first = scrape(&socket);
    let worker = daemon.ok(&["worker", "new", "--name", "fast"]);
    let worker = worker.trim_end();
    for round in 0..6 {
        let done = count.load(Ordering::Relaxed);
        wait_for("more requests", || count.load(Ordering::Relaxed) > done);
        daemon.ok(&["attach", "vm0:1", if round % 2 == 0 { worker } else { "0" }]);
        let (before, now, after) = (status(), scrape(&socket), status());
        for index in 0..2 {
            for (name, key) in COUNTERS {
                let (low, value, high) =
                    (told(&before, index, key), counted(&now, name, index), told(&after, index, key));
                assert!(low <= value && value <= high, "{name} of queue {index}: {low} {value} {high}");
                assert!(counted(&first, name, index) <= value, "{name} of queue {index} went back");
            }
            assert_eq!(counted(&now, "vshunt_queue_worker", index), told(&after, index, "worker"));
            let state = |state| ("state", state);
            let of = ("export", "vm0");
            let index = index.to_string();
            let is = |word| now.value("vshunt_queue_state", &[of, ("queue", &index), state(word)]).unwrap();
            assert_eq!((is("running"), is("stopped"), is("broken")), (1.0, 0.0, 0.0));
        }
        // A queue that has moved is the same series.
        assert_eq!(now.series("vshunt_queue_"), first.series("vshunt_queue_"));
        for series in first.series("vshunt_worker_") {
            assert!(now.series("vshunt_worker_").contains(&series), "{series:?}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    let disk = load.join().unwrap();

    // At rest they are the same. A worker that was preempted after its last notification counts it
    // when it runs again.
    wait_for("the same counters", || {
        let (now, after) = (scrape(&socket), status());
        let is_same =
            |index| COUNTERS.iter().all(|(name, key)| counted(&now, name, index) == told(&after, index, key));
        (0..2).all(is_same)
    });
    let (now, after) = (scrape(&socket), status());
    for index in 0..2 {
        for (name, key) in COUNTERS {
            assert_eq!(counted(&now, name, index), told(&after, index, key), "{name} of queue {index}");
        }
    }
    assert!(counted(&now, "vshunt_queue_requests_total", 1) > 0.0);
    let value = |name, label, of| now.value(name, &[(label, of)]).unwrap();
    for (index, id) in ["0", worker].into_iter().enumerate() {
        let told = |key: &str| after["workers"][index][key].as_u64().unwrap();
        assert!(value("vshunt_worker_requests_total", "worker", id) <= told("requests") as f64);
        assert!(value("vshunt_worker_cpu_seconds_total", "worker", id) <= told("cpu-time-us") as f64 / 1e6);
        for phase in ["busy", "polling", "sleeping"] {
            let of = [("worker", id), ("phase", phase)];
            let counted = now.value("vshunt_worker_time_seconds_total", &of).unwrap();
            assert!(counted <= told(&format!("{phase}-us")) as f64 / 1e6, "{phase}: {counted}");
        }
        assert_eq!(
            value("vshunt_worker_queues", "worker", id),
            after["workers"][index]["queues"].as_array().unwrap().len() as f64
        );
    }
    let info = [("worker", worker), ("name", "fast"), ("kind", "user"), ("export", "")];
    assert_eq!(now.value("vshunt_worker_info", &info), Some(1.0));
    assert_eq!(value("vshunt_disk_size_bytes", "disk", "d0"), 16.0 * 1024.0 * 1024.0);
    assert_eq!(value("vshunt_export_connected", "export", "vm0"), 1.0);
    assert_eq!(now.value("vshunt_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), Some(1.0));
    drop(disk);
    wait_for("the end of the connection", || {
        scrape(&socket).value("vshunt_export_connected", &[("export", "vm0")]) == Some(0.0)
    });
    // The removal reports the bytes of all queues.
    let queues = after["queues"].as_array().unwrap();
    let of = |key: &str| queues.iter().map(|queue| queue[key].as_u64().unwrap()).sum::<u64>();
    let line = daemon.ok(&["export", "remove", "vm0"]);
    let bytes = format!(" ({} bytes) in ", of("read-bytes") + of("write-bytes"));
    assert!(line.starts_with("vm0 moved ") && line.contains(&bytes) && line.ends_with("/s\n"), "{line}");
}

#[test]
fn exports_and_workers_come_and_go_under_scrapes() {
    let daemon = Daemon::start(&[RAM[0], RAM[1], "--metrics", "unix:m.sock"]);
    let socket = daemon.path().join("m.sock");
    let (stop, scrapes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let scrapers: Vec<_> = (0..2)
        .map(|_| {
            let (socket, stop, scrapes) = (socket.clone(), stop.clone(), scrapes.clone());
            std::thread::spawn(move || {
                let mut with = 0;
                while !stop.load(Ordering::Relaxed) {
                    let now = scrape(&socket);
                    // A list is taken at one time: of a queue all is there, or nothing.
                    let queues = now.labels("vshunt_queue_requests_total", "queue");
                    assert!(queues.is_empty() || queues.len() == 3, "{queues:?}");
                    assert_eq!(queues, now.labels("vshunt_queue_state", "queue"));
                    with += usize::from(!queues.is_empty());
                    scrapes.fetch_add(1, Ordering::Relaxed);
                }
                with
            })
        })
        .collect();
    let export = "type=vhost-user-blk,name=e,disk=d0,socket=e.sock,queues=3,workers=per-queue";
    for _ in 0..10 {
        daemon.ok(&["export", "add", export]);
        let disk = Disk::connect(daemon.path().join("e.sock"), Options::default()).unwrap();
        let done = scrapes.load(Ordering::Relaxed);
        wait_for("scrapes", || scrapes.load(Ordering::Relaxed) > done + 2);
        daemon.ok(&["export", "remove", "e", "--force"]);
        drop(disk);
    }
    stop.store(true, Ordering::Relaxed);
    for scraper in scrapers {
        assert!(scraper.join().unwrap() > 0);
    }
    assert!(scrape(&socket).series("vshunt_export_").is_empty());
}
