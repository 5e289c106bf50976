//! The policy with simulated peers and simulated time.

use super::*;

const BOUND: Duration = Duration::from_micros(50);

/// Rests `n` times, `cycle` apart, with `batch` requests each. Every sleep ends as `woken` says.
fn rests(
    policy: &mut PollPolicy,
    now: &mut Instant,
    n: u32,
    batch: u64,
    cycle: Duration,
    woken: bool,
) -> Rest {
    let mut plan = Rest::Sleep;
    for _ in 0..n {
        policy.found(batch);
        *now += cycle;
        plan = policy.plan(*now, BOUND, true);
        policy.slept(*now, *now + cycle, woken, BOUND);
    }
    plan
}

#[test]
fn a_fast_sender_is_left_to_gather() {
    let (mut policy, mut now) = (PollPolicy::new(), Instant::now());
    let plan = rests(&mut policy, &mut now, 200, 2, Duration::from_micros(2), true);
    assert!(matches!(plan, Rest::Coalesce { requests: 20..=24, .. }), "{plan:?}");
}

#[test]
fn a_sender_that_waits_is_not_kept_waiting_for_long() {
    let (mut policy, mut now) = (PollPolicy::new(), Instant::now());
    let mut limits = 0;
    for _ in 0..100_000 {
        policy.found(1);
        now += Duration::from_micros(1);
        if matches!(policy.plan(now, BOUND, true), Rest::Coalesce { .. }) {
            limits += 1;
            policy.slept(now, now + COALESCE_LIMIT, false, BOUND);
            now += COALESCE_LIMIT;
        }
    }
    assert!(limits < 20, "{limits} sleeps in vain in a tenth of a second");
}

#[test]
fn a_slow_sender_is_polled_or_slept_for() {
    let (mut policy, mut now) = (PollPolicy::new(), Instant::now());
    let plan = rests(&mut policy, &mut now, 200, 1, Duration::from_micros(40), true);
    assert_eq!(plan, Rest::Poll(BOUND), "polling would have found it");
    policy.found(1);
    assert_eq!(policy.plan(now, Duration::ZERO, true), Rest::Sleep, "switched off");
    let plan = rests(&mut policy, &mut now, 200, 1, BOUND * 3, true);
    assert_eq!(plan, Rest::Sleep, "polling would have been in vain");
}

#[test]
fn with_requests_in_flight_nothing_gathers() {
    let (mut policy, mut now) = (PollPolicy::new(), Instant::now());
    rests(&mut policy, &mut now, 200, 2, Duration::from_micros(2), true);
    policy.found(2);
    assert!(!matches!(policy.plan(now + Duration::from_micros(2), BOUND, false), Rest::Coalesce { .. }));
}

#[test]
fn polling_in_vain_while_work_waits_for_our_cpu_ends() {
    let (mut policy, mut now) = (PollPolicy::new(), Instant::now());
    let mut spun = Duration::ZERO;
    for _ in 0..20_000 {
        policy.found(1);
        let start = now;
        now += Duration::from_micros(5);
        if let Rest::Poll(window) = policy.plan(start, BOUND, true) {
            now += window;
            spun += window;
            policy.polled(false, now, window, BOUND);
        }
        policy.slept(start, now, true, BOUND);
    }
    assert!(
        spun < Duration::from_millis(10),
        "{spun:?} of polling for nothing in {:?}",
        Duration::from_millis(100)
    );
}
