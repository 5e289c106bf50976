//! Tests the driver with a model of a back end: requests, load, verification, the server's death,
//! the dirty log.

mod model;

use std::sync::atomic::Ordering;
use std::time::Duration;

use model::Model;
use vshunt_guest::driver::{Code, DriverSeg, PAGE, Wire, feature, protocol, request};
use vshunt_guest::load::{self, LoadPlan, Rw, Silent};
use vshunt_guest::{Disk, Kind, Options};

const SECTORS: u64 = 16 << 11; // 16 MiB

fn shapes() -> [Options; 4] {
    let split = Options { queues: 2, queue_size: 64, ..Options::default() };
    let packed = Options { packed: true, ..split.clone() };
    [
        Options { indirect: false, event_idx: false, ..split.clone() },
        Options { indirect: false, queue_size: 100, ..packed.clone() },
        split,
        packed,
    ]
}

fn plan() -> LoadPlan {
    LoadPlan {
        rw: Rw::Randrw,
        iodepth: 16,
        ios: Some(60_000),
        verify: true,
        flush_every: 50,
        ..LoadPlan::default()
    }
}

#[test]
fn requests_one_by_one() {
    let model = Model::start("one", SECTORS);
    for (i, options) in shapes().into_iter().enumerate() {
        let mut disk = Disk::connect(model.path(), options).unwrap();
        assert_eq!(disk.capacity(), SECTORS);
        let sent: Vec<u8> = (0..700 * 512).map(|n| (n / 512 + i * 7) as u8).collect();
        disk.write(0, 5, &sent).unwrap();
        disk.flush(1).unwrap();
        let mut back = vec![0; sent.len()];
        disk.read(1, 5, &mut back).unwrap();
        assert!(back == sent, "shape {i}");
    }
}

#[test]
fn a_chain_of_any_layout() {
    let model = Model::start("layout", SECTORS);
    let mut disk = Disk::connect(model.path(), Options::default()).unwrap();
    disk.write(0, 0, &[7; 1024]).unwrap();
    let area = disk.memory().alloc(4096, PAGE).unwrap();
    area.write(0, &u128::from(request::IN).to_le_bytes());
    let at = |offset: u64, len, writable| DriverSeg { addr: area.guest() + offset, len, writable };
    // The header in three pieces, data in two, the status with the last of them.
    let segs = [at(0, 3, false), at(3, 9, false), at(12, 4, false), at(100, 1, true), at(512, 512, true)];
    for indirect in [false, true] {
        area.part(512, 512).fill(0);
        let cookie = disk.submit(0, &segs, indirect).unwrap();
        let completion = disk.wait_for(0, Some(cookie)).unwrap();
        assert_eq!(completion.len, 513);
        assert_eq!(area.part(100, 1).to_vec(), [7]);
        assert_eq!(area.part(512, 511).to_vec(), [7; 511]);
        assert_eq!(area.part(1023, 1).to_vec(), [0]);
    }
}

#[test]
fn verified_load() {
    let model = Model::start("load", SECTORS);
    for (threads, options) in [1, 2, 1, 2].into_iter().zip(shapes()) {
        let mut disk = Disk::connect(model.path(), options).unwrap();
        let outcome = load::run(&mut disk, &LoadPlan { threads, ..plan() }, &mut Silent).unwrap();
        assert_eq!(outcome.ios(), 60_000);
        assert!(outcome.verified_blocks.unwrap() > 3000);
        assert!(outcome.flushes.ios > 300 && outcome.reads.quantile_ns(0.5) > 0);
    }
}

#[test]
fn verified_load_cut_at_will() {
    let model = Model::start("cut", SECTORS);
    for options in shapes() {
        let options = Options { indirect_cap: 24, ..options };
        let mut disk = Disk::connect(model.path(), options).unwrap();
        let plan = LoadPlan { shuffle: 24, buffers: 100, ios: Some(20_000), ..plan() };
        let outcome = load::run(&mut disk, &plan, &mut Silent).unwrap();
        assert_eq!(outcome.ios(), 20_000);
        assert!(outcome.verified_blocks.unwrap() > 2000);
    }
    // The checks also work for split requests. This needs another disk, because a lost write may be
    // equal to the previous contents.
    let model = Model::start("cut-lost", SECTORS);
    model.behaviour().lose_write_in.store(1500, Ordering::Release);
    let mut disk = Disk::connect(model.path(), shapes()[2].clone()).unwrap();
    let plan = LoadPlan { rw: Rw::Write, ios: Some(3000), shuffle: 3, ..plan() };
    assert_eq!(load::run(&mut disk, &plan, &mut Silent).unwrap_err().kind(), Kind::Verify);
}

#[test]
fn a_lost_write_is_found() {
    let model = Model::start("lost", SECTORS);
    model.behaviour().lose_write_in.store(1500, Ordering::Release);
    let mut disk = Disk::connect(model.path(), shapes()[2].clone()).unwrap();
    // Each block is written once, so that nothing overwrites the lost write.
    let plan = LoadPlan { rw: Rw::Write, ios: Some(3000), ..plan() };
    let error = load::run(&mut disk, &plan, &mut Silent).unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (Kind::Verify, 1));
    assert!(error.to_string().contains("expected generation"), "{error}");
}

#[test]
fn a_request_completed_twice_is_found() {
    for (i, options) in shapes().into_iter().enumerate().filter(|(_, o)| !o.packed) {
        let model = Model::start(&format!("twice{i}"), SECTORS);
        model.behaviour().twice_in.store(5000, Ordering::Release);
        // The model cannot complete twice with in-flight tracking.
        model.behaviour().refuse_protocol.store(protocol::INFLIGHT_SHMFD, Ordering::Release);
        let mut disk = Disk::connect(model.path(), options).unwrap();
        let error = load::run(&mut disk, &plan(), &mut Silent).unwrap_err();
        assert!(error.to_string().contains("completed a request twice"), "{error}");
    }
}

#[test]
fn the_server_dies_twenty_times() {
    for (i, options) in shapes().into_iter().enumerate() {
        for stale_packed_base in [false, true] {
            let model = Model::start(&format!("dies{i}{stale_packed_base}"), SECTORS);
            let mut disk = Disk::connect(model.path(), options.clone()).unwrap();
            let reconnect = Some(Duration::from_secs(60));
            let plan = LoadPlan { reconnect, stale_packed_base, ios: Some(100_000), ..plan() };
            model.behaviour().die_after.store(2500, Ordering::Release);
            model.behaviour().deaths_wanted.store(20, Ordering::Release);
            let outcome = load::run(&mut disk, &plan, &mut Silent).unwrap();
            assert_eq!((outcome.ios(), outcome.reconnects), (100_000, 20), "shape {i}");
        }
    }
}

#[test]
fn without_reconnect_a_death_ends_the_run() {
    let model = Model::start("death", SECTORS);
    let mut disk = Disk::connect(model.path(), shapes()[2].clone()).unwrap();
    model.behaviour().die_after.store(5000, Ordering::Release);
    let error = load::run(&mut disk, &plan(), &mut Silent).unwrap_err();
    assert_eq!(error.kind(), Kind::Lost);
    assert!(error.to_string().contains("--reconnect"), "{error}");
}

#[test]
fn one_by_one_across_a_death() {
    let model = Model::start("oneby", SECTORS);
    for options in shapes() {
        let mut disk = Disk::connect(model.path(), options).unwrap();
        disk.write(0, 8, &[3; 512]).unwrap();
        let deaths = model.behaviour().deaths.load(Ordering::Acquire);
        model.behaviour().die_after.store(1, Ordering::Release);
        let area = disk.memory().alloc(4096, PAGE).unwrap();
        area.write(0, &(u128::from(request::IN) | 8 << 64).to_le_bytes());
        let segs = [(0, 16, false), (512, 512, true), (1024, 1, true)];
        let segs = segs.map(|(at, len, writable)| DriverSeg { addr: area.guest() + at, len, writable });
        let cookie = disk.submit(0, &segs, false).unwrap();
        assert_eq!(disk.wait(0).unwrap_err().kind(), Kind::Lost);
        assert!(model.behaviour().deaths.load(Ordering::Acquire) > deaths && disk.is_gone());
        disk.reconnect(Duration::from_secs(60)).unwrap();
        assert_eq!(disk.wait(0).unwrap().cookie, cookie);
        assert_eq!(area.part(512, 512).to_vec(), [3; 512]);
        disk.write(0, 8, &[4; 512]).unwrap();
    }
}

#[test]
fn a_queue_stops_and_starts() {
    let model = Model::start("stop", SECTORS);
    for options in shapes().into_iter() {
        let mut disk = Disk::connect(model.path(), Options { queues: 1, ..options }).unwrap();
        for round in 0..5 {
            disk.write(0, round, &[round as u8; 512]).unwrap();
            let base = disk.stop_queue(0).unwrap();
            disk.start_queue(0, base).unwrap();
        }
        let mut back = [0; 512];
        disk.read(0, 4, &mut back).unwrap();
        assert_eq!(back, [4; 512]);
    }
}

#[test]
fn the_dirty_log_is_checked() {
    let model = Model::start("log", SECTORS);
    for options in shapes() {
        let mut disk = Disk::connect(model.path(), options).unwrap();
        disk.start_logging().unwrap();
        let mut buffer = vec![0; 9 * 4096];
        disk.read(0, 0, &mut buffer).unwrap();
        assert_eq!(disk.missed_pages(), []);
        assert!(disk.log().unwrap().marked().len() >= 10);
        model.behaviour().forget_to_log.store(true, Ordering::Release);
        disk.log().unwrap().clear();
        disk.start_logging().unwrap();
        disk.read(0, 0, &mut buffer).unwrap();
        let missed = disk.missed_pages();
        assert!(missed.iter().any(|m| m.what == "data") && missed.len() >= 10, "{missed:?}");
        model.behaviour().forget_to_log.store(false, Ordering::Release);
        disk.stop_logging().unwrap();
    }
}

#[test]
fn a_change_of_size_is_told() {
    let model = Model::start("size", SECTORS);
    let mut disk = Disk::connect(model.path(), Options::default()).unwrap();
    assert_eq!(disk.wait_config_change(Duration::from_millis(10)).unwrap(), None);
    model.shared.sectors.store(SECTORS * 2, Ordering::Release);
    model.behaviour().announce.store(true, Ordering::Release);
    let config = disk.wait_config_change(Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!((config.capacity, disk.capacity()), (SECTORS * 2, SECTORS * 2));
}

#[test]
fn fewer_features_will_do() {
    let model = Model::start("fewer", SECTORS);
    let not_config = protocol::SUPPORTED & !(protocol::CONFIG | protocol::MQ);
    let options = Options { refuse_protocol: not_config, ..shapes()[0].clone() };
    let mut disk = Disk::connect(model.path(), options).unwrap();
    assert_eq!(disk.session().protocol(), protocol::CONFIG | protocol::MQ);
    disk.write(1, 0, &[1; 512]).unwrap();
    let no_inflight = disk.reconnect(Duration::ZERO).unwrap_err();
    assert_eq!(no_inflight.kind(), Kind::Usage);
    assert_eq!(disk.session().features() & feature::EVENT_IDX, 0);
}

#[test]
fn a_server_that_hangs_ends_the_run_soon_after_its_time() {
    let model = Model::start("hang", SECTORS);
    let mut disk = Disk::connect(model.path(), shapes()[2].clone()).unwrap();
    let linger = Duration::from_millis(1500);
    let plan =
        LoadPlan { ios: None, runtime: Some(Duration::from_millis(500)), linger, verify: false, ..plan() };
    struct Notes(Vec<String>);
    impl load::Progress for Notes {
        fn phase(&mut self, _: &str, _: Option<Duration>, _: Option<u64>) {}
        fn tick(&mut self, _: &load::Tick) {}
        fn note(&mut self, text: &str) {
            self.0.push(text.to_owned());
        }
    }
    let mut notes = Notes(Vec::new());
    model.behaviour().hang.store(true, Ordering::Release);
    let error = load::run(&mut disk, &plan, &mut notes).unwrap_err();
    // Which of its limits ended it: a stall within the time has 30 s.
    assert!(error.to_string().contains("no completion for 1.5s with "), "{error}");
    assert_eq!(error.kind(), Kind::Io);
    assert!(matches!(&notes.0[..], [note] if note.contains("waiting for ")), "{:?}", notes.0);
    model.behaviour().hang.store(false, Ordering::Release);
}

#[test]
fn a_control_socket_is_told_from_a_vhost_user_one() {
    use std::io::Write;
    let path = std::env::temp_dir().join(format!("vshunt-bench-{}-control.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").unwrap();
    });
    let error = Disk::connect(&path, Options::default()).err().unwrap();
    server.join().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!((error.kind(), error.exit_code()), (Kind::Connect, 3));
    let text = error.to_string();
    assert!(text.contains("control socket") && text.contains("vshunt -c CONTROL status"), "{text}");
    // A server that closes the connection before the first message is recognized, too.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    (&theirs).write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").unwrap();
    drop(theirs);
    let mut wire = Wire::from_stream(ours, Duration::from_secs(10));
    let text = wire.ask(Code::GetFeatures, &[], &[]).unwrap_err().to_string();
    assert!(text.contains("control socket"), "{text}");
}
