//! The pace of made-up other sides; time is made up too.

use super::*;

const BOUND: Duration = Duration::from_micros(50);

/// Rests `n` times, `cycle` apart with `batch` requests each; every sleep ends as `woken` says.
fn rests(pace: &mut Pace, now: &mut Instant, n: u32, batch: u64, cycle: Duration, woken: bool) -> Plan {
    let mut plan = Plan::Sleep;
    for _ in 0..n {
        pace.found(batch);
        *now += cycle;
        plan = pace.plan(*now, BOUND, true);
        pace.slept(*now, *now + cycle, woken, BOUND);
    }
    plan
}

#[test]
fn a_fast_sender_is_left_to_gather() {
    let (mut pace, mut now) = (Pace::new(), Instant::now());
    let plan = rests(&mut pace, &mut now, 200, 2, Duration::from_micros(2), true);
    assert!(matches!(plan, Plan::Gather { requests: 20..=24, .. }), "{plan:?}");
}

#[test]
fn a_sender_that_waits_is_not_kept_waiting_for_long() {
    let (mut pace, mut now) = (Pace::new(), Instant::now());
    let mut limits = 0;
    for _ in 0..100_000 {
        pace.found(1);
        now += Duration::from_micros(1);
        if matches!(pace.plan(now, BOUND, true), Plan::Gather { .. }) {
            limits += 1;
            pace.slept(now, now + GATHER_LIMIT, false, BOUND);
            now += GATHER_LIMIT;
        }
    }
    assert!(limits < 20, "{limits} sleeps in vain in a tenth of a second");
}

#[test]
fn a_slow_sender_is_polled_or_slept_for() {
    let (mut pace, mut now) = (Pace::new(), Instant::now());
    let plan = rests(&mut pace, &mut now, 200, 1, Duration::from_micros(40), true);
    assert_eq!(plan, Plan::Poll(BOUND), "polling would have found it");
    pace.found(1);
    assert_eq!(pace.plan(now, Duration::ZERO, true), Plan::Sleep, "switched off");
    let plan = rests(&mut pace, &mut now, 200, 1, BOUND * 3, true);
    assert_eq!(plan, Plan::Sleep, "polling would have been in vain");
}

#[test]
fn with_requests_in_flight_nothing_gathers() {
    let (mut pace, mut now) = (Pace::new(), Instant::now());
    rests(&mut pace, &mut now, 200, 2, Duration::from_micros(2), true);
    pace.found(2);
    assert!(!matches!(pace.plan(now + Duration::from_micros(2), BOUND, false), Plan::Gather { .. }));
}

#[test]
fn polling_in_vain_while_work_waits_for_our_cpu_ends() {
    let (mut pace, mut now) = (Pace::new(), Instant::now());
    let mut spun = Duration::ZERO;
    for _ in 0..20_000 {
        pace.found(1);
        let start = now;
        now += Duration::from_micros(5);
        if let Plan::Poll(window) = pace.plan(start, BOUND, true) {
            now += window;
            spun += window;
            pace.polled(false, now, window, BOUND);
        }
        pace.slept(start, now, true, BOUND);
    }
    assert!(
        spun < Duration::from_millis(10),
        "{spun:?} of polling for nothing in {:?}",
        Duration::from_millis(100)
    );
}
