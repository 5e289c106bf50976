//! Tests the driver of network devices with a model of a device, and the tap and the peer end if
//! the kernel has taps.

#[path = "../../guest/tests/model/mod.rs"]
mod model;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use model::Model;
use vshunt_guest::driver::{feature, protocol};
use vshunt_guest::load::Silent;
use vshunt_guest::net::frame::Sizes;
use vshunt_guest::net::{self, Mode, NetDevice, NetPlan, Outcome, Peer};
use vshunt_guest::{Disk, Error, Kind, Options};

/// Returns plans with every kind of ring.
fn shapes() -> [NetPlan; 5] {
    let split = NetPlan { pairs: 2, queue_size: 64, verify: true, ..NetPlan::default() };
    let packed = NetPlan { packed: true, ..split.clone() };
    [
        NetPlan { indirect: false, event_idx: false, ..split.clone() },
        NetPlan { indirect: false, queue_size: 100, merge: false, ..packed.clone() },
        NetPlan { offloads: true, threads: 1, ..split.clone() },
        NetPlan { pairs: 1, merge: false, ..split },
        packed,
    ]
}

fn run(model: &Model, plan: &NetPlan) -> Result<Outcome, Error> {
    let mut device = NetDevice::connect(model.path(), plan)?;
    net::run(&mut device, plan, &mut Silent)
}

#[test]
fn a_disk_is_not_taken_for_a_nic_nor_the_reverse() {
    let disk = Model::start("net-on-disk", 2048);
    let error = NetDevice::connect(disk.path(), &NetPlan { merge: false, ..NetPlan::default() })
        .err()
        .expect("a disk answers");
    assert_eq!(
        (error.kind(), error.to_string()),
        (Kind::Usage, "the server is a disk: use vshunt-bench blk".to_owned())
    );
    let device = Model::start_net("disk-on-net");
    let error = Disk::connect(device.path(), Options::default()).err().expect("a device answers");
    assert_eq!(
        (error.kind(), error.to_string()),
        (Kind::Usage, "the server is a network device: use vshunt-bench net".to_owned())
    );
}

#[test]
fn a_source_sends_every_frame_once_in_order_and_whole() {
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = Model::start_net(&format!("source{i}"));
        let plan =
            NetPlan { mode: Mode::Source, frames: Some(20_001), sizes: Sizes::Range(60, 1514), ..shape };
        let outcome = run(&model, &plan).unwrap();
        let got = model.net().got.lock().unwrap().clone();
        assert_eq!((outcome.sent, got.frames), (20_001, 20_001), "shape {i}");
        assert_eq!((got.bytes, got.damaged, got.lost), (outcome.sent_bytes, 0, 0), "shape {i}");
        assert_eq!((got.late, got.twice, got.moved, got.other), (0, 0, 0, 0), "shape {i}");
        assert!(outcome.kicks > 0 && outcome.client_cpu > Duration::ZERO);
    }
}

#[test]
fn long_frames_are_sent_for_the_device_to_cut() {
    let model = Model::start_net("long");
    let sizes = Sizes::Range(60, 65_549);
    let plan = NetPlan { frames: Some(2000), offloads: true, sizes, ..shapes()[2].clone() };
    assert_eq!(run(&model, &plan).unwrap().sent, 2000);
    let got = model.net().got.lock().unwrap().clone();
    assert_eq!((got.frames, got.damaged), (2000, 0));
    drop(got);
    model.net().refuse.store(feature::NET_HOST_USO, Ordering::Release);
    assert!(run(&model, &plan).unwrap_err().to_string().contains("HOST_USO"));
}

#[test]
fn a_source_keeps_its_pace() {
    let model = Model::start_net("pace");
    let runtime = Some(Duration::from_millis(500));
    let outcome =
        run(&model, &NetPlan { rate: Some(4000.0), runtime, flows: 3, ..shapes()[4].clone() }).unwrap();
    // Never more than the rate allows. How much less depends on the machine.
    let most = outcome.elapsed.as_secs_f64() * 4000.0 + 1.0;
    assert!(outcome.sent > 0 && outcome.sent as f64 <= most, "{} of {most}", outcome.sent);
}

/// Runs until the model has no more frames to give, and a short time longer.
fn receive(model: &Model, plan: NetPlan, frames: i64) -> Result<Outcome, Error> {
    receive_until(model, plan, frames, || model.net().to_guest.load(Ordering::Acquire) <= 0)
}

/// Runs until `done`, and a short time longer.
fn receive_until(
    model: &Model,
    plan: NetPlan,
    frames: i64,
    done: impl Fn() -> bool + Sync,
) -> Result<Outcome, Error> {
    model.net().to_guest.store(frames, Ordering::Release);
    let (stop, over) = (Arc::<AtomicBool>::default(), AtomicBool::new(false));
    let plan = NetPlan { stop: Some(stop.clone()), ..plan };
    let mut device = NetDevice::connect(model.path(), &plan)?;
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            let over = || over.load(Ordering::Acquire) || std::time::Instant::now() > deadline;
            while !done() && !over() {
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Release);
        });
        let outcome = net::run(&mut device, &plan, &mut Silent);
        over.store(true, Ordering::Release);
        ended.join().unwrap();
        outcome
    })
}

#[test]
fn a_sink_takes_and_checks_every_frame() {
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = Model::start_net(&format!("sink{i}"));
        model.net().partial.store(shape.offloads, Ordering::Release);
        // Frames that fill several buffers, if that is negotiated.
        let longest = if shape.merge { 60_000 } else { 1514 };
        *model.net().sizes.lock().unwrap() = Some(Sizes::Range(60, longest));
        let (pairs, announce) = (u64::from(shape.pairs), i % 2 == 1);
        let outcome = receive(&model, NetPlan { mode: Mode::Sink, announce, ..shape }, 5000).unwrap();
        let announced = model.net().got.lock().unwrap().frames;
        assert_eq!(announced, if announce { pairs } else { 0 }, "shape {i}");
        let got = &outcome.received;
        assert_eq!((got.frames, got.lost, got.late, got.twice), (5000, 0, 0, 0), "shape {i}: {got:?}");
        assert_eq!((got.damaged, got.wrong_checksums, got.moved, got.other), (0, 0, 0, 0), "shape {i}");
        assert_eq!((outcome.wrong(), outcome.sent), (None, announced));
    }
}

#[test]
fn what_is_wrong_with_frames_is_counted() {
    for verify in [true, false] {
        let model = Model::start_net(&format!("wrong{verify}"));
        let net = model.net();
        for (counter, at) in [(&net.damage_in, 700), (&net.lose_in, 800), (&net.twice_in, 900)] {
            counter.store(at, Ordering::Release);
        }
        let plan = NetPlan { mode: Mode::Sink, verify, ..shapes()[0].clone() };
        let outcome = receive(&model, plan, 2000).unwrap();
        let got = &outcome.received;
        assert_eq!((got.frames, got.lost, got.twice), (2000, 1, 1), "{got:?}");
        assert_eq!(got.damaged, u64::from(verify));
        assert_eq!(got.first_wrong.is_some(), verify);
        assert!(outcome.wrong().is_some());
    }
}

#[test]
fn a_device_that_lies_ends_the_run() {
    let model = Model::start_net("lies");
    model.net().wrong_count_in.store(100, Ordering::Release);
    let error = receive(&model, NetPlan { mode: Mode::Sink, ..shapes()[0].clone() }, 1000).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    assert!(error.to_string().contains("said to fill 0 buffers"), "{error}");
}

#[test]
fn an_echo_sends_back_what_comes() {
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = Model::start_net(&format!("echo{i}"));
        model.net().partial.store(shape.offloads, Ordering::Release);
        let outcome = receive(&model, NetPlan { mode: Mode::Echo, ..shape }, 3000).unwrap();
        let got = model.net().got.lock().unwrap().clone();
        assert_eq!(outcome.received.frames, 3000, "shape {i}");
        assert_eq!(outcome.sent + outcome.no_room, 3000, "shape {i}");
        assert_eq!((got.frames, got.damaged, got.other), (outcome.sent, 0, 0), "shape {i}");
        assert_eq!((got.late, got.twice, got.moved), (0, 0, 0), "shape {i}");
    }
}

#[test]
fn the_server_dies_and_comes_back() {
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = Model::start_net(&format!("dies{i}"));
        if i == 0 {
            // The used index of a split ring shows which buffers were returned.
            model.behaviour().refuse_protocol.store(protocol::INFLIGHT_SHMFD, Ordering::Release);
        }
        let reconnect = Some(Duration::from_secs(60));
        let plan = NetPlan { frames: Some(30_000), reconnect, ..shape };
        model.behaviour().die_after.store(2500, Ordering::Release);
        model.behaviour().deaths_wanted.store(5, Ordering::Release);
        let outcome = run(&model, &plan).unwrap();
        let got = model.net().got.lock().unwrap().clone();
        assert_eq!((outcome.sent, outcome.reconnects), (30_000, 5), "shape {i}");
        // Frames that were taken and not completed are sent again. No frame is missing.
        assert_eq!((got.frames - got.twice - got.late, got.lost, got.damaged), (30_000, 0, 0), "shape {i}");
        let model = Model::start_net(&format!("dies-echo{i}"));
        model.behaviour().die_after.store(500, Ordering::Release);
        let plan = NetPlan { mode: Mode::Echo, frames: None, ..plan };
        let (given, deaths) = (&model.net().to_guest, &model.behaviour().deaths);
        // Until some frames have arrived after the death, too.
        let at_death = AtomicI64::new(i64::MIN);
        let done = || {
            let (left, then) = (given.load(Ordering::Acquire), at_death.load(Ordering::Acquire));
            if then == i64::MIN && deaths.load(Ordering::Acquire) == 1 {
                at_death.store(left, Ordering::Release);
            }
            then != i64::MIN && left < then - 2000
        };
        let outcome = receive_until(&model, plan, i64::MAX, done).unwrap();
        assert_eq!((outcome.reconnects, outcome.received.damaged), (1, 0), "shape {i}");
        assert!(outcome.received.frames > 1500, "shape {i}: {}", outcome.received.frames);
    }
}

#[test]
fn what_the_nic_does_not_have_is_a_clear_error() {
    let model = Model::start_net("lacks");
    let refused = |refuse: u64, plan: NetPlan| {
        model.net().refuse.store(refuse, Ordering::Release);
        let error = run(&model, &NetPlan { frames: Some(1), ..plan }).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage, "{error}");
        error.to_string()
    };
    assert!(refused(0, NetPlan { pairs: 3, ..NetPlan::default() }).contains("--queues 1 to 2"));
    assert!(refused(feature::NET_MQ, shapes()[0].clone()).contains("--queues 1 to 1"));
    assert!(refused(feature::NET_MRG_RXBUF, NetPlan::default()).contains("--no-mrg"));
    assert!(refused(feature::NET_CSUM, shapes()[2].clone()).contains("--offloads"));
    assert!(refused(0, NetPlan { queue_size: 100, ..NetPlan::default() }).contains("power of two"));
    assert!(refused(0, NetPlan { batch: 300, ..NetPlan::default() }).contains("--batch 300"));
    model.behaviour().refuse_protocol.store(protocol::INFLIGHT_SHMFD, Ordering::Release);
    let reconnect = Some(Duration::from_secs(1));
    assert!(refused(0, NetPlan { reconnect, ..shapes()[4].clone() }).contains("in-flight region"));
    assert!(refused(0, NetPlan { flows: 0, ..NetPlan::default() }).contains("--flows 0"));
}

#[test]
fn the_command_says_what_came_of_it() {
    let model = Model::start_net("command");
    let command = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vshunt-bench"));
        command.arg("net").arg("--socket").arg(model.path()).args(more);
        command.output().unwrap()
    };
    let common = ["--mode", "source", "--frames", "5000", "--queues", "2", "--quiet"];
    let done = command(&[&common[..], &["--json"]].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let json: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((&json["sent"]["frames"], &json["pairs"]), (&5000.into(), &2.into()), "{json}");
    assert_eq!((&json["sent"]["bytes"], &json["ring"]), (&320_000.into(), &"split".into()));
    assert!(json["server_cpu"]["ns_per_frame"].is_number() && json["peer"].is_null(), "{json}");
    let done = command(&common);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(text.contains("5000 frames") && text.contains("a frame to the server"), "{text}");
    model.net().damage_in.store(100, Ordering::Release);
    model.net().to_guest.store(1000, Ordering::Release);
    let done = command(&["--mode", "sink", "--verify", "--runtime", "1s", "--quiet"]);
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("1 damaged frames"), "{text}");
}

#[test]
fn a_tap_alone_is_measured() {
    if let Some(why) = no_tap() {
        eprintln!("skip a_tap_alone_is_measured: {why}");
        return;
    }
    let tap = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vshunt-bench"));
        command.args(["tap", "--runtime", "200ms"]).args(more).output().unwrap()
    };
    let done = tap(&["--queues", "1,2", "--json"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let json: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    for (row, what) in ["read", "write"].iter().enumerate() {
        let row = &json["rows"][row];
        assert_eq!(row["what"], *what);
        for figure in row["figures"].as_array().unwrap() {
            assert!(figure["kpps"].as_f64().unwrap() > 0.0 && figure["cpu_ns"].is_number(), "{json}");
        }
    }
    let done = tap(&["--queues", "300"]);
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.code() == Some(2) && text.contains("1 to 256"), "{text}");
}

#[test]
fn a_far_end_that_is_not_there_is_a_clear_error() {
    if let Some(why) = no_tap() {
        eprintln!("skip a_far_end_that_is_not_there_is_a_clear_error: {why}");
        return;
    }
    let model = Model::start_net("peer");
    let peer = Some(Peer { ifname: "vs-not-there".into(), senders: 1 });
    for mode in [Mode::Source, Mode::Sink] {
        let error = run(&model, &NetPlan { mode, peer: peer.clone(), frames: Some(1), ..NetPlan::default() });
        let text = error.unwrap_err().to_string();
        assert!(text.contains("vs-not-there") && text.contains("network namespace"), "{text}");
    }
}

/// Returns the reason why the kernel has no taps.
fn no_tap() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    let tun = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    tun.err().map(|_| "no /dev/net/tun")
}
