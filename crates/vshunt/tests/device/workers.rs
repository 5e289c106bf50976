//! Queues and workers, while verified load runs.

use std::sync::atomic::{AtomicBool, Ordering};

use vshunt_guest::driver::{Options, request, status};
use vshunt_types::error::Kind;
use vshunt_types::spec::{WorkerSpec, Workers};

use super::rig::{Backing, LOAD_BYTES, Machine, PATIENCE, Rig, Rng, attach, layouts, small};

#[test]
fn queues_move_under_full_load_by_several_threads() {
    const QUEUES: u16 = 4;
    for backing in [Backing::Ram, Backing::Direct] {
        let rig = Rig::new();
        rig.disk("d", backing, u64::from(QUEUES) * LOAD_BYTES, |_| {});
        rig.export("e", "d", QUEUES, |spec| spec.workers = Workers::Count(2));
        let extra = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
        for options in layouts() {
            let mut machine = Machine::connect(&rig.socket("e"), Options { queues: QUEUES, ..options });
            let load: Vec<_> = (0..QUEUES).map(|q| machine.load(q)).collect();
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let daemon = &rig.daemon;
                    scope.spawn(move || {
                        let mut rng = Rng::from(thread);
                        for _ in 0..60 {
                            let (q, w) =
                                (rng.below(QUEUES.into()) as u16, rng.below(u64::from(extra) + 1) as u32);
                            attach(daemon, "e", q, w);
                        }
                    });
                }
                // Rings stop and start meanwhile.
                for round in 0..10 {
                    let q = round % QUEUES;
                    machine.session.enable(q, false).unwrap();
                    machine.session.enable(q, true).unwrap();
                }
            });
            load.iter().for_each(|l| l.progress(100));
        }
        assert_eq!(rig.daemon.queues().iter().map(|q| q.errors).sum::<u64>(), 0);
    }
}

#[test]
fn a_worker_is_made_used_and_freed_over_and_over() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..small() });
    let load = [machine.load(0), machine.load(1)];
    let mut last = 0;
    for round in 0..20u16 {
        let id = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
        assert!(id > last, "an id is never used again");
        last = id;
        attach(&rig.daemon, "e", round % 2, id);
        assert_eq!(rig.queue("e", round % 2).worker, id);
        let busy = rig.daemon.worker_free(id).unwrap_err();
        assert_eq!(busy.kind(), Kind::Busy, "{busy}");
        load.iter().for_each(|l| l.progress(10));
        attach(&rig.daemon, "e", round % 2, 0);
        rig.daemon.worker_free(id).unwrap();
        assert_eq!(rig.daemon.worker_free(id).unwrap_err().kind(), Kind::NotFound);
        assert_eq!(rig.daemon.queue_attach("e", 0, id, PATIENCE).unwrap_err().kind(), Kind::NotFound);
        load.iter().for_each(|l| l.progress(10));
    }
}

#[test]
fn attach_to_what_is_not_there_changes_nothing() {
    let rig = Rig::ram(2 * LOAD_BYTES, 2);
    let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 2, ..small() });
    let load = [machine.load(0), machine.load(1)];
    for (export, queue, worker) in
        [("e", 0, 77), ("e", 2, 0), ("e", u16::MAX, 0), ("x", 0, 0), ("e", 1, u32::MAX)]
    {
        let e = rig.daemon.queue_attach(export, queue, worker, PATIENCE).unwrap_err();
        assert_eq!(e.kind(), Kind::NotFound, "{export}:{queue} to {worker}: {e}");
    }
    assert_eq!((rig.queue("e", 0).worker, rig.queue("e", 1).worker), (0, 0));
    load.iter().for_each(|l| l.progress(10));
}

#[test]
fn stopped_queues_move_too() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let id = rig.daemon.worker_new(WorkerSpec::default()).unwrap();
    attach(&rig.daemon, "e", 0, id);
    let mut client = rig.connect("e", small());
    client.write(0, &[1; 512]);
    let base = client.disk.stop_queue(0).unwrap();
    attach(&rig.daemon, "e", 0, 0);
    rig.daemon.worker_free(id).unwrap();
    client.disk.start_queue(0, base).unwrap();
    client.write(0, &[2; 512]);
}

#[test]
fn as_many_queues_as_can_be() {
    let rig = Rig::new();
    rig.disk("d", Backing::Ram, 1 << 30, |_| {});
    rig.export("e", "d", 256, |spec| spec.workers = Workers::Count(3));
    for packed in [false, true] {
        let options = Options {
            queues: 256,
            queue_size: 1024,
            packed,
            indirect_cap: 4,
            buffer_bytes: 4 << 20,
            ..small()
        };
        let mut client = rig.connect("e", options);
        for q in 0..256 {
            let reply = client.go(q, request::OUT, q.into(), &[q as u8; 512], 0);
            assert_eq!(reply.status, status::OK);
        }
        for q in 0..256u16 {
            assert_eq!(client.go(255 - q, request::IN, q.into(), &[], 512).data, [q as u8; 512]);
        }
    }
    assert_eq!(rig.daemon.workers().len(), 4);
    rig.daemon.export_remove("e", true).unwrap();
    assert_eq!(rig.daemon.workers().len(), 1, "the export's own workers went with it");
}

#[test]
fn a_worker_a_queue() {
    let rig = Rig::new();
    rig.disk("d", Backing::Tmpfs, 8 * LOAD_BYTES, |_| {});
    rig.export("e", "d", 8, |spec| spec.workers = Workers::PerQueue);
    let mut ids: Vec<_> = rig.daemon.queues().iter().map(|q| q.worker).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 8);
    for options in layouts() {
        let mut machine = Machine::connect(&rig.socket("e"), Options { queues: 8, ..options });
        let load: Vec<_> = (0..8).map(|q| machine.load(q)).collect();
        load.iter().for_each(|l| l.progress(100));
    }
}

#[test]
fn exports_come_and_go_beside_load() {
    let rig = Rig::ram(LOAD_BYTES, 1);
    let mut machine = Machine::connect(&rig.socket("e"), small());
    let load = machine.load(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let (workers, exports) = (rig.daemon.workers(), rig.daemon.exports());
                assert!(!workers.is_empty() && !exports.is_empty() && !rig.daemon.disks().is_empty());
            }
        });
        for round in 0..20 {
            rig.export("other", "d", 2, |spec| {
                spec.readonly = true;
                spec.workers = if round % 2 == 0 { Workers::Default } else { Workers::PerQueue };
            });
            let mut other = rig.connect("other", Options { queues: 2, ..small() });
            other.read(0, 512);
            assert_eq!(rig.daemon.export_remove("other", false).unwrap_err().kind(), Kind::Busy);
            rig.daemon.export_remove("other", true).unwrap();
            assert!(other.disk.is_gone() && !rig.socket("other").exists());
            load.progress(10);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(load.longest() < PATIENCE / 3);
}
