//! Workers that do not run, and requests that do not complete. Each wait for them has a limit, and
//! leaves everything as it was.

use super::*;

/// A worker that does not run. It waits in the middle of a function that was called on it.
struct Stall {
    resume: Option<std::sync::mpsc::Sender<()>>,
    /// The thread that called the function. It holds the set until the function returns.
    caller: Option<std::thread::JoinHandle<()>>,
    set: Arc<QueueSet>,
}

impl Stall {
    fn new(workers: &Arc<Workers>, id: WorkerId) -> Self {
        let set = Arc::new(QueueSet::new("stall", workers, &[id]).unwrap());
        set.start(0, TestQueue::boxed(&TestRing::new(0)));
        let (resume, resumed) = std::sync::mpsc::channel();
        let (begun, begins) = std::sync::mpsc::channel();
        let theirs = set.clone();
        let caller = std::thread::spawn(move || {
            let visited = theirs.run_on(0, move |_| {
                begun.send(()).unwrap();
                let _ = resumed.recv();
            });
            drop(visited);
        });
        begins.recv().unwrap();
        Self { resume: Some(resume), caller: Some(caller), set }
    }

    fn end(&mut self) {
        self.resume = None;
        if let Some(caller) = self.caller.take() {
            caller.join().unwrap();
        }
        drop(self.set.stop(0));
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.end();
    }
}

fn drained_by() -> std::time::Instant {
    std::time::Instant::now() + DRAIN_LIMIT
}

/// Drains queues whose workers run, or that are in a mailbox. A busy machine may take longer for
/// that than [`DRAIN_LIMIT`].
fn drain<R>(set: &QueueSet, f: impl FnOnce() -> R) -> R {
    set.with_all_drained(std::time::Instant::now() + FAR, f).unwrap()
}

/// Waits until these workers are stalled. On a busy machine, others may look so for a while.
fn await_stalled(workers: &Workers, wanted: &[WorkerId]) {
    let limit = std::time::Instant::now() + FAR;
    loop {
        let stalled = workers.stalled();
        if stalled == wanted {
            return;
        }
        assert!(std::time::Instant::now() < limit, "stalled are {stalled:?}, and not {wanted:?}");
    }
}

#[test]
fn a_stalled_worker_keeps_nobody_waiting() {
    let workers = pool(0);
    let ids: Vec<_> = (0..2).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
    let [stalled, other] = ids[..] else { unreachable!() };
    let set = QueueSet::new("t", &workers, &[stalled, other, stalled]).unwrap();
    let lines: Vec<_> = (0..3).map(|_| TestRing::new(20)).collect();
    for i in 0..2 {
        set.start(i, TestQueue::boxed(&lines[usize::from(i)]));
    }
    await_stalled(&workers, &[]);
    let mut stall = Stall::new(&workers, stalled);
    await_stalled(&workers, &[stalled]);
    let start = std::time::Instant::now();
    // From the worker, to the worker, and all queues at once.
    let error = set.attach(0, other, Duration::from_millis(10)).unwrap_err();
    assert!(error.kind() == Kind::Busy && error.to_string().contains("(stalled)"), "{error}");
    let error = set.attach(1, stalled, FAR).unwrap_err();
    assert!(error.kind() == Kind::Busy && error.to_string().contains("stays on worker 2"), "{error}");
    let error = set.with_all_drained(drained_by(), || unreachable!()).unwrap_err();
    assert!(error.kind() == Kind::Busy && error.to_string().contains("(stalled)"), "{error}");
    assert_eq!((set.placement(0), set.placement(1)), ((stalled, 1), (other, 1)));
    lines[1].offer(20);
    lines[1].wait_done();
    assert_eq!(set.run_on(0, |_| {}).unwrap_err().kind(), Kind::Busy);
    // A queue that the worker has not taken can be withdrawn: a function is called with it, and it
    // is attached to another worker.
    set.start(2, TestQueue::boxed(&lines[2]));
    let (send, receive) = std::sync::mpsc::channel();
    assert!(set.run_on(2, move |_| send.send(()).unwrap()).unwrap());
    receive.recv().unwrap();
    attach(&set, 2, other);
    assert_eq!(set.placement(2), (other, 2));
    assert!(start.elapsed() < FAR);
    lines[2].offer(20);
    lines[2].wait_done();
    // The worker runs again. Its mailbox has all the messages, including those that were withdrawn.
    stall.end();
    lines[0].offer(20);
    lines[0].wait_done();
    await_stalled(&workers, &[]);
    attach(&set, 0, other);
    (0..3).for_each(|i| drop(set.stop(i)));
}

#[test]
fn a_stalled_worker_is_freed_when_it_runs_again() {
    let workers = pool(0);
    let id = workers.create(None, &Settings::default()).unwrap();
    let set = QueueSet::new("t", &workers, &[id]).unwrap();
    let mut stall = Stall::new(&workers, id);
    set.start(0, TestQueue::boxed(&TestRing::new(0)));
    attach(&set, 0, 0);
    assert_eq!(workers.free(id).unwrap_err().kind(), Kind::Busy, "the stalled queue");
    stall.end();
    drop(stall);
    workers.free(id).unwrap();
    drop(set.stop(0));
}

/// A command that fails leaves the worker as it was. The worker is listed, it works, and it can be
/// freed later.
#[test]
fn a_worker_that_is_stalled_while_it_is_freed_stays_listed() {
    let workers = pool(0);
    let id = workers.create(None, &Settings::default()).unwrap();
    let mut stall = Stall::new(&workers, id);
    // Makes the worker look as if it was busy with something other than this queue.
    workers.release(id);
    let errors = std::thread::scope(|scope| {
        [(); 2].map(|()| scope.spawn(|| workers.free(id).unwrap_err())).map(|free| free.join().unwrap())
    });
    // Of two commands at the same time, one is told that the other is running.
    let said = |e: &vshunt_types::error::Error, what| e.kind() == Kind::Busy && e.to_string().contains(what);
    assert!(errors.iter().any(|e| said(e, "(stalled), and stays")), "{errors:?}");
    assert!(errors.iter().all(|e| said(e, "(stalled), and stays") || said(e, "being freed")), "{errors:?}");
    assert_eq!(workers.states().last().map(|w| w.id), Some(id));
    drop(workers.reserve(id).unwrap());
    stall.end();
    await_stalled(&workers, &[]);
    drop(stall);
    let set = QueueSet::new("t", &workers, &[id]).unwrap();
    let line = TestRing::new(20);
    set.start(0, TestQueue::boxed(&line));
    line.offer(20);
    line.wait_done();
    drop(set.stop(0));
    drop(set);
    workers.free(id).unwrap();
    assert_eq!(workers.check(id).unwrap_err().kind(), Kind::NotFound);
}

/// The queues of one worker are waited for together. One after the other, their limits would add up
/// to more than [`FAR`].
#[test]
fn queues_that_are_drained_have_one_deadline() {
    const QUEUES: u16 = 64;
    assert!(DRAIN_LIMIT * QUEUES.into() > FAR * 2);
    let workers = pool(0);
    let id = workers.create(None, &Settings::default()).unwrap();
    let set = QueueSet::new("t", &workers, &[id; QUEUES as usize]).unwrap();
    let lines: Vec<_> = (0..QUEUES).map(|_| TestRing::new(20)).collect();
    for (i, line) in (0..).zip(&lines) {
        set.start(i, TestQueue::boxed(line));
    }
    let start = std::time::Instant::now();
    // The worker stops running while all queues are drained, so that none can be passed back to it.
    let mut stall = drain(&set, || Stall::new(&workers, id));
    // The queues wait in its mailbox. A drain takes them from there and puts them back.
    assert_eq!(drain(&set, || 7), 7);
    assert!(start.elapsed() < FAR);
    stall.end();
    for line in &lines {
        line.offer(20);
        line.wait_done();
    }
    drop(stall);
    (0..QUEUES).for_each(|i| drop(set.stop(i)));
}

#[test]
fn a_drain_that_does_not_end_leaves_all_queues_at_work() {
    let workers = pool(0);
    let set = QueueSet::new("t", &workers, &[0; 2]).unwrap();
    let lines: Vec<_> = (0..2).map(|_| TestRing::new(8)).collect();
    set.start(0, TestQueue::boxed(&lines[0]));
    set.start(1, TestQueue::held(&lines[1]));
    lines[1].offer(1);
    lines[1].wait_taken(1);
    // The other queue is drained before that, unless the machine does not run the worker meanwhile.
    let mut errors = (0..FAR.as_secs() / DRAIN_LIMIT.as_secs())
        .map(|_| set.with_all_drained(drained_by(), || unreachable!()).unwrap_err());
    let is_held =
        |e: &vshunt_types::error::Error| e.kind() == Kind::Busy && e.to_string().contains("queue t:1");
    assert!(errors.any(|e| is_held(&e)));
    lines[0].offer(8);
    lines[0].wait_done();
    lines[1].release();
    lines[1].offer(7);
    lines[1].wait_done();
    assert_eq!(drain(&set, || 7), 7);
    (0..2).for_each(|i| drop(set.stop(i)));
}

/// A stop waits for requests with the queue's slot locked. A command for that queue has a limit for
/// its wait.
#[test]
fn a_command_does_not_wait_for_a_stop() {
    let workers = pool(0);
    let other = workers.create(None, &Settings::default()).unwrap();
    let set = QueueSet::new("t", &workers, &[0]).unwrap();
    let line = TestRing::new(1);
    set.start(0, TestQueue::held(&line));
    line.offer(1);
    line.wait_taken(1);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| drop(set.stop(0)));
        while set.stats(0).state() == State::Running && set.attach(0, 0, Duration::ZERO).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = set.attach(0, other, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("being started, stopped or moved"), "{error}");
        line.release();
        stop.join().unwrap();
    });
    attach(&set, 0, other);
}

/// Drains of several exports have one deadline, so the second one does not wait as long again.
#[test]
fn a_deadline_that_is_over_is_not_waited_for() {
    let workers = pool(0);
    let sets: Vec<_> = (0..64).map(|_| QueueSet::new("t", &workers, &[0]).unwrap()).collect();
    assert!(DRAIN_LIMIT * 64 > FAR * 2);
    let lines: Vec<_> = sets.iter().map(|_| TestRing::new(1)).collect();
    for (set, line) in sets.iter().zip(&lines) {
        set.start(0, TestQueue::boxed(line));
    }
    let mut stall = Stall::new(&workers, 0);
    let start = std::time::Instant::now();
    let until = drained_by();
    for set in &sets {
        assert_eq!(set.with_all_drained(until, || unreachable!()).unwrap_err().kind(), Kind::Busy);
    }
    assert!(start.elapsed() < FAR);
    stall.end();
    for (set, line) in sets.iter().zip(&lines) {
        line.offer(1);
        line.wait_done();
        drop(set.stop(0));
    }
}

/// All workers that end do so within one limit, and the stalled ones stay.
#[test]
fn stalled_workers_are_waited_for_together() {
    const STALLED: u32 = 64;
    assert!(pool::END_LIMIT * STALLED > FAR * 2);
    let workers = pool(0);
    let stall = |_| {
        let id = workers.create(None, &Settings::default()).unwrap();
        let stall = Stall::new(&workers, id);
        // Makes each worker look as if it was busy with something other than this queue.
        workers.release(id);
        stall
    };
    let stalls: Vec<_> = (0..STALLED).map(stall).collect();
    let start = std::time::Instant::now();
    workers.end_all();
    assert!(start.elapsed() < FAR);
    assert_eq!(workers.states().len(), STALLED as usize, "worker 0 is gone");
    for mut stall in stalls {
        drop(workers.reserve(stall.set.placement(0).0).unwrap());
        stall.end();
    }
    workers.end_all();
    assert!(workers.states().is_empty());
}

/// All queues are asked to stop before one is waited for.
#[test]
fn queues_stop_together() {
    let workers = pool(0);
    let ids: Vec<_> = (0..2).map(|_| workers.create(None, &Settings::default()).unwrap()).collect();
    let set = QueueSet::new("t", &workers, &[ids[0], ids[1], 0]).unwrap();
    let lines = [TestRing::new(0), TestRing::new(0)];
    for i in 0..2 {
        set.start(i, TestQueue::boxed(&lines[usize::from(i)]));
    }
    let mut stall = Stall::new(&workers, ids[0]);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| set.stop_all());
        // The worker of the first queue does not run until the second queue has left its own
        // worker.
        let start = std::time::Instant::now();
        while !lines[1].left.load(Ordering::Acquire) && start.elapsed() < FAR {
            std::thread::sleep(Duration::from_millis(1));
        }
        let together = lines[1].left.load(Ordering::Acquire) && !stop.is_finished();
        stall.end();
        assert!(together);
        let stopped: Vec<_> = stop.join().unwrap().iter().map(|(index, _)| *index).collect();
        assert_eq!(stopped, [0, 1], "the third one did not run");
    });
    assert!((0..3).all(|i| set.stop(i).is_none()));
}
