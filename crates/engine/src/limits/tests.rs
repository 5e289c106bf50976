//! Tests in simulated time: members and queues ask when a real worker would.

use std::sync::Arc;

use super::*;

fn rate(average: u64) -> Option<Rate> {
    Some(Rate { average, ..Rate::default() })
}

fn operations(total: Option<Rate>) -> Rates {
    Rates { operations: RateSet { total, ..RateSet::default() }, ..Rates::default() }
}

fn bytes(total: Option<Rate>) -> Rates {
    Rates { bytes: RateSet { total, ..RateSet::default() }, ..Rates::default() }
}

/// One queue with requests without end.
struct Source<'a> {
    member: &'a LimitMember,
    queue: u16,
    bytes: u64,
    direction: Direction,
    /// Requests that it starts before it waits for their completion.
    depth: u32,
    /// How long they take.
    latency: Ticks,
    /// How late it wakes.
    lateness: Ticks,
    wakes_at: Ticks,
    /// Whether requests that may not start are dropped, and the next one comes after `latency`.
    drops: bool,
    requests: u64,
    longest_wait: Ticks,
    asked_at: Ticks,
}

impl<'a> Source<'a> {
    fn new(member: &'a LimitMember, queue: u16) -> Self {
        Self {
            member,
            queue,
            bytes: 4096,
            direction: Direction::Read,
            depth: 1024,
            latency: TICKS_PER_MS / 20,
            lateness: TICKS_PER_MS / 20,
            wakes_at: TICKS_PER_S,
            drops: false,
            requests: 0,
            longest_wait: 0,
            asked_at: TICKS_PER_S,
        }
    }

    fn run(&mut self, now: Ticks) {
        for _ in 0..self.depth {
            match self.member.ask(self.queue, self.direction, now) {
                Ok(()) => {
                    self.member.charge(self.direction, self.bytes);
                    self.longest_wait = self.longest_wait.max(now - self.asked_at);
                    self.asked_at = now;
                    self.requests += 1;
                }
                Err(until) => {
                    assert!(until > now, "a queue that may not start waits");
                    if self.drops {
                        break;
                    }
                    self.wakes_at =
                        until.min(now + TIMER_TICKS_MAX).max(now + TIMER_TICKS_MIN) + self.lateness;
                    return;
                }
            }
        }
        self.wakes_at = now + self.latency;
    }
}

/// Runs sources for a number of milliseconds of simulated time.
fn run(sources: &mut [Source<'_>], ms: u64) {
    let end = TICKS_PER_S + ms * TICKS_PER_MS;
    while let Some(next) = sources.iter_mut().min_by_key(|source| source.wakes_at) {
        if next.wakes_at > end {
            break;
        }
        let now = next.wakes_at;
        next.run(now);
    }
}

fn close(found: u64, wanted: u64, percent: u64) {
    assert!(found.abs_diff(wanted) * 100 <= wanted * percent, "{found} instead of {wanted}");
}

#[test]
fn a_rate_is_kept_at_one_and_at_four_queues() {
    for average in [1, 10, 100, 5000, 77_777, 3_000_000] {
        for queues in [1, 4] {
            let group = LimitGroup::new(&operations(rate(average)), false);
            let member = LimitMember::new(group, queues);
            let mut sources: Vec<_> = (0..queues).map(|queue| Source::new(&member, queue)).collect();
            // The slack of 50 ms is in the result.
            let seconds = if average > 1_000_000 { 2 } else { 10 };
            run(&mut sources, seconds * 1000);
            let requests = sources.iter().map(|s| s.requests).sum::<u64>();
            if average < 100 {
                assert!(
                    requests.abs_diff(average * seconds) <= 1 + u64::from(queues),
                    "{average}: {requests}"
                );
            } else {
                close(requests, average * seconds + average / 20, 1);
            }
        }
    }
}

#[test]
fn bytes_are_limited_whatever_the_size_of_requests() {
    for size in [512, 4096, 1 << 20, 64 << 20] {
        let group = LimitGroup::new(&bytes(rate(200_000_000)), false);
        let member = LimitMember::new(group, 1);
        let mut sources = [Source { bytes: size, ..Source::new(&member, 0) }];
        run(&mut sources, 20_000);
        let moved = sources[0].requests * size;
        assert!(moved.abs_diff(4_000_000_000) <= 40_000_000 + size, "{size}: {moved}");
    }
}

#[test]
fn every_rate_of_a_request_holds_it_back() {
    let rates = Rates {
        operations: RateSet { total: rate(10_000), read: rate(2000), write: None },
        bytes: RateSet { total: None, read: None, write: rate(4096 * 500) },
        operation_bytes: 0,
    };
    let member = LimitMember::new(LimitGroup::new(&rates, false), 2);
    let mut sources =
        [Source::new(&member, 0), Source { direction: Direction::Write, ..Source::new(&member, 1) }];
    run(&mut sources, 10_000);
    close(sources[0].requests, 20_000, 1);
    close(sources[1].requests, 5000, 1);
}

#[test]
fn a_long_request_counts_as_several() {
    let rates = Rates { operation_bytes: 4096, ..operations(rate(1000)) };
    let member = LimitMember::new(LimitGroup::new(&rates, false), 1);
    let mut sources = [Source { bytes: 16 << 10, ..Source::new(&member, 0) }];
    run(&mut sources, 10_000);
    close(sources[0].requests, 2500, 1);
}

#[test]
fn a_burst_lasts_as_long_as_its_bucket() {
    let burst = Rate { average: 1000, burst: 5000, burst_seconds: 2 };
    let member = LimitMember::new(LimitGroup::new(&operations(Some(burst)), false), 1);
    let mut sources = [Source::new(&member, 0)];
    // The bucket has room for 5000 x 2, and leaks 1000 a second: full after 2.5 s at 5000.
    run(&mut sources, 2000);
    close(sources[0].requests, 10_000, 3);
    run(&mut sources, 10_000);
    close(sources[0].requests, 10_000 + 10 * 1000, 2);
}

#[test]
fn a_burst_of_one_second_comes_at_once() {
    let burst = Rate { average: 1000, burst: 5000, burst_seconds: 1 };
    let member = LimitMember::new(LimitGroup::new(&operations(Some(burst)), false), 1);
    let mut sources = [Source::new(&member, 0)];
    run(&mut sources, 100);
    close(sources[0].requests, 5100, 2);
}

#[test]
fn members_share_alike_whatever_their_queues_and_sizes() {
    for rates in [operations(rate(400)), operations(rate(20_000)), operations(rate(200_000))] {
        let group = LimitGroup::new(&rates, true);
        let (one, four) = (LimitMember::new(group.clone(), 1), LimitMember::new(group, 4));
        let mut sources: Vec<_> = (0..4).map(|queue| Source::new(&four, queue)).collect();
        sources.push(Source { lateness: TICKS_PER_MS / 4, ..Source::new(&one, 0) });
        run(&mut sources, 10_000);
        let four = sources[..4].iter().map(|s| s.requests).sum::<u64>();
        close(sources[4].requests, four, 8);
        let all = rates.operations.total.unwrap().average * 10;
        close(four + sources[4].requests, all, 2);
    }
    let group = LimitGroup::new(&bytes(rate(100_000_000)), true);
    let (small, large) = (LimitMember::new(group.clone(), 1), LimitMember::new(group, 1));
    let mut sources = [
        Source { bytes: 4096, ..Source::new(&small, 0) },
        Source { bytes: 8 << 20, ..Source::new(&large, 0) },
    ];
    run(&mut sources, 30_000);
    close(sources[0].requests * 4096, sources[1].requests * (8 << 20), 8);
}

#[test]
fn a_member_that_wants_little_gets_it_and_the_rest_is_used() {
    let group = LimitGroup::new(&operations(rate(10_000)), true);
    let members: Vec<_> = (0..3).map(|_| LimitMember::new(group.clone(), 1)).collect();
    let mut sources: Vec<_> = members.iter().map(|member| Source::new(member, 0)).collect();
    // One request each millisecond, if it does not wait.
    (sources[0].depth, sources[0].latency) = (1, TICKS_PER_MS);
    run(&mut sources, 10_000);
    let light = sources[0].requests;
    assert!(light >= 3_000, "{light} of 10000 at most");
    close(sources[1].requests, sources[2].requests, 8);
    close(sources.iter().map(|s| s.requests).sum(), 100_000, 2);
}

#[test]
fn no_queue_of_a_member_starves() {
    for average in [10, 100, 1000, 20_000] {
        let member = LimitMember::new(LimitGroup::new(&operations(rate(average)), false), 16);
        let mut sources: Vec<_> = (0..16).map(|queue| Source::new(&member, queue)).collect();
        run(&mut sources, 20_000);
        let fewest = sources.iter().map(|s| s.requests).min().unwrap();
        assert!(fewest >= (average * 20 / 16 / 4).min(200), "{average}: {fewest}");
        let longest = sources.iter().map(|s| s.longest_wait).max().unwrap() / TICKS_PER_MS;
        assert!(longest <= 200 + 3 * 16 * 1000 / average, "{average}: {longest} ms");
    }
}

#[test]
fn a_queue_that_does_not_return_delays_the_others_for_a_short_time() {
    let member = LimitMember::new(LimitGroup::new(&operations(rate(1000)), false), 2);
    let mut sources = [Source::new(&member, 0), Source::new(&member, 1)];
    run(&mut sources, 1000);
    sources[0].wakes_at = Ticks::MAX;
    sources[1].requests = 0;
    let before = sources[1].wakes_at - TICKS_PER_S;
    run(&mut sources, 5000);
    let seconds = 5000 - before / TICKS_PER_MS;
    close(sources[1].requests, seconds, 5);
}

#[test]
fn a_member_that_is_read_limited_writes_while_it_waits() {
    let rates = Rates { operations: RateSet { read: rate(2), ..RateSet::default() }, ..Rates::default() };
    let member = LimitMember::new(LimitGroup::new(&rates, false), 2);
    let writer = Source { direction: Direction::Write, depth: 2, ..Source::new(&member, 1) };
    let mut sources = [Source::new(&member, 0), writer];
    run(&mut sources, 5000);
    assert!(sources[0].requests <= 11);
    assert!(sources[1].requests > 100_000, "{}", sources[1].requests);
}

#[test]
fn the_largest_and_the_smallest_rates_do_not_overflow() {
    let most = Rate { average: u64::MAX, burst: u64::MAX, burst_seconds: u64::MAX };
    let least = Rate { average: 1, burst: u64::MAX, burst_seconds: u64::MAX };
    for rate in [most, least, Rate { average: 1, burst: 1, burst_seconds: u64::MAX }] {
        let both = RateSet { total: Some(rate), read: Some(rate), write: Some(rate) };
        let rates = Rates { operations: both, bytes: both, operation_bytes: 1 };
        let member = LimitMember::new(LimitGroup::new(&rates, true), 1);
        let mut sources = [Source { bytes: u64::MAX, ..Source::new(&member, 0) }];
        run(&mut sources, 10);
        assert!(sources[0].requests >= 1);
    }
    let member = LimitMember::new(LimitGroup::new(&bytes(rate(1)), true), 1);
    let mut sources = [Source { bytes: u64::MAX, ..Source::new(&member, 0) }];
    run(&mut sources, 60_000);
    assert_eq!(sources[0].requests, 1, "the next one waits for 19 hours");
}

#[test]
fn threads_that_ask_together_keep_the_rate() {
    let member = LimitMember::new(LimitGroup::new(&operations(rate(1_000_000)), false), 4);
    let end = now() + 10 * TICKS_PER_S;
    let threads: Vec<_> = (0..4)
        .map(|queue| {
            let member = member.clone();
            std::thread::spawn(move || {
                // The time is the number of steps, so that the machine's load does not matter.
                let mut time = end - 10 * TICKS_PER_S;
                let mut source = Source::new(&member, queue);
                source.wakes_at = time;
                while time < end {
                    source.run(time);
                    time = source.wakes_at;
                    std::thread::yield_now();
                }
                source.requests
            })
        })
        .collect();
    let requests = threads.into_iter().map(|t| t.join().unwrap()).sum::<u64>();
    assert!(requests <= 10_200_000, "{requests}");
}

#[test]
fn a_member_whose_requests_come_late_gets_its_part() {
    let group = LimitGroup::new(&operations(rate(4000)), true);
    let (few, many) = (LimitMember::new(group.clone(), 1), LimitMember::new(group, 1));
    // As many in flight as a share has. They take 2 ms.
    let late = Source { depth: 16, latency: 2 * TICKS_PER_MS, ..Source::new(&few, 0) };
    let mut sources = [late, Source::new(&many, 0)];
    run(&mut sources, 10_000);
    close(sources[0].requests, sources[1].requests, 5);
}

#[test]
fn what_was_paid_for_nothing_is_returned() {
    let rates = Rates {
        operations: RateSet { read: rate(20_000), ..RateSet::default() },
        bytes: RateSet { total: rate(100_000_000), ..RateSet::default() },
        operation_bytes: 0,
    };
    // Either limit holds back one of the two sizes.
    for (bytes, wanted) in [(1500, 200_000), (20_000, 50_000)] {
        let member = LimitMember::new(LimitGroup::new(&rates, false), 2);
        let (mut now, mut moved) = (TICKS_PER_S, 0);
        while now < 11 * TICKS_PER_S {
            // It expects requests of another size. Every other one does not exist.
            let expected = 21_500 - bytes;
            let read = Direction::Read;
            let paid = (0..16).take_while(|_| {
                let may = member.ask(0, read, now).is_ok();
                if may {
                    member.charge(Direction::Read, expected);
                }
                may
            });
            for nth in 0..paid.count() {
                member.refund(Direction::Read, expected);
                if nth % 2 == 0 {
                    member.charge(Direction::Read, bytes);
                    moved += 1;
                }
            }
            now += TICKS_PER_MS / 20;
        }
        close(moved, wanted, 2);
    }
}

#[test]
fn a_queue_that_drops_and_one_that_waits_take_turns() {
    for average in [1000, 20_000] {
        let member = LimitMember::new(LimitGroup::new(&operations(rate(average)), false), 2);
        let every = TICKS_PER_S / 200_000;
        let drops = Source { drops: true, depth: 1, latency: every, ..Source::new(&member, 0) };
        let mut sources = [drops, Source::new(&member, 1)];
        run(&mut sources, 10_000);
        close(sources.iter().map(|s| s.requests).sum(), average * 10, 2);
        for source in &sources {
            assert!(
                source.requests >= average * 10 / 4,
                "{average}: {} of {}",
                source.requests,
                average * 10
            );
        }
        // The one that waits is not held up once no more requests come to be dropped.
        sources[0].wakes_at = Ticks::MAX;
        let (begin, before) = (sources[1].wakes_at, sources[1].requests);
        run(&mut sources, 15_000);
        let ms = (16 * TICKS_PER_S - begin) / TICKS_PER_MS;
        close(sources[1].requests - before, average * ms / 1000, 5);
    }
}

/// Requests of one queue from the start on, while `each` may change the member each 100 ms.
fn churned(
    mut member: Arc<LimitMember>,
    ms: u64,
    mut each: impl FnMut(&Arc<LimitMember>, Ticks) -> Arc<LimitMember>,
) -> u64 {
    let (mut requests, mut wakes_at) = (0, TICKS_PER_S);
    for step in (0..ms).step_by(100) {
        member = each(&member, TICKS_PER_S + step * TICKS_PER_MS);
        let mut source = Source { wakes_at, ..Source::new(&member, 0) };
        run(std::slice::from_mut(&mut source), step + 100);
        requests += source.requests;
        wakes_at = source.wakes_at;
    }
    requests
}

/// Sets other rates of a group of one member, which is returned.
fn changed(
    group: &mut Arc<LimitGroup>,
    member: &Arc<LimitMember>,
    rates: &Rates,
    now: Ticks,
) -> Arc<LimitMember> {
    let (new, mut members) = group.changed_at(rates, std::slice::from_ref(member), now);
    *group = new;
    members.pop().unwrap()
}

#[test]
fn members_that_come_and_go_and_rates_that_change_give_no_burst() {
    let burst = |average| operations(Some(Rate { average, burst: 2000, burst_seconds: 2 }));
    // The bucket has room for 2000 x 2.
    let wanted = 4000 + 10 * 100;
    let group = LimitGroup::new(&burst(100), false);
    let mut is_shared = false;
    let requests = churned(LimitMember::new(group.clone(), 1), 10_000, |member, _| {
        is_shared = !is_shared;
        group.set_shared(is_shared);
        member.clone()
    });
    close(requests, wanted, 3);
    // 90 and 110 by turns.
    let (mut group, mut average) = (LimitGroup::new(&burst(90), false), 90);
    let requests = churned(LimitMember::new(group.clone(), 1), 10_000, |member, now| {
        average = 200 - average;
        changed(&mut group, member, &burst(average), now)
    });
    close(requests, wanted, 3);
    // Without a burst, and with debts: each request is one of a second.
    let mut group = LimitGroup::new(&bytes(rate(4000)), false);
    let mut size = 4000;
    let requests = churned(LimitMember::new(group.clone(), 1), 20_000, |member, now| {
        size = 8100 - size;
        changed(&mut group, member, &bytes(rate(size)), now)
    });
    assert!(requests.abs_diff(20) <= 2, "{requests}");
}

#[test]
fn other_rates_hold_at_once() {
    let plain = |average| Rate { average, ..Rate::default() };
    let full = Rate { average: 10, burst: 5000, burst_seconds: 2 };
    for (before, after, wanted) in [
        // What is in the bucket is more than the new one has room for.
        (full, plain(100), 10 * 100),
        // The new one has room for 10000 more.
        (full, Rate { average: 10, burst: 10_000, burst_seconds: 2 }, 10_000 + 10 * 10),
        (plain(1), plain(50_000), 10 * 50_000),
        // What was bought in advance is 1000 times as much there.
        (plain(1_000_000), plain(1000), 10 * 1000),
        (plain(1000), plain(1_000_000), 10 * 1_000_000),
    ] {
        for is_shared in [false, true] {
            let mut group = LimitGroup::new(&operations(Some(before)), is_shared);
            let member = LimitMember::new(group.clone(), 1);
            run(&mut [Source::new(&member, 0)], 3000);
            let now = TICKS_PER_S + 3000 * TICKS_PER_MS;
            let member = changed(&mut group, &member, &operations(Some(after)), now);
            let mut sources = [Source { wakes_at: now, ..Source::new(&member, 0) }];
            run(&mut sources, 3100);
            let soon = wanted / 10 + after.burst * 2;
            assert!(sources[0].requests <= soon, "{before:?} {after:?}: {}", sources[0].requests);
            run(&mut sources, 13_000);
            close(sources[0].requests, wanted, 3);
        }
    }
}

#[test]
fn a_debt_is_the_same_number_of_bytes_after_a_change() {
    let now = TICKS_PER_S + 1000 * TICKS_PER_MS;
    for is_shared in [false, true] {
        let mut group = LimitGroup::new(&bytes(rate(1000)), is_shared);
        let member = LimitMember::new(group.clone(), 1);
        let mut sources = [Source { bytes: 1_000_000, ..Source::new(&member, 0) }];
        run(&mut sources, 1000);
        assert_eq!(sources[0].requests, 1);
        let faster = changed(&mut group, &member, &bytes(rate(100_000)), now);
        let mut sources = [Source { wakes_at: now, ..Source::new(&faster, 0) }];
        // 10 s for the debt.
        run(&mut sources, 10_000);
        let early = sources[0].requests;
        assert!(early <= 2, "{early}");
        run(&mut sources, 16_000);
        close(sources[0].requests - early, 5 * 100_000 / 4096, 15);
    }
    // The extremes do not overflow.
    for (before, after) in [(1, u64::MAX), (u64::MAX, 1), (1, 2)] {
        let mut group = LimitGroup::new(&bytes(rate(before)), true);
        let member = LimitMember::new(group.clone(), 1);
        run(&mut [Source { bytes: u64::MAX, ..Source::new(&member, 0) }], 10);
        let member = changed(&mut group, &member, &bytes(rate(after)), now);
        run(&mut [Source { bytes: u64::MAX, wakes_at: now, ..Source::new(&member, 0) }], 1010);
    }
}

#[test]
fn no_first_request_waits_longer_than_the_bound() {
    let burst = Rate { average: 50_000_000, burst: 200_000_000, burst_seconds: 2 };
    let both = Rates { operation_bytes: 65536, ..operations(rate(500)) };
    for rates in [operations(rate(3)), bytes(rate(20_000_000)), bytes(Some(burst)), both] {
        for members in [1, 3] {
            let group = LimitGroup::new(&rates, members > 1);
            let all: Vec<_> = (0..members).map(|_| LimitMember::new(group.clone(), 4)).collect();
            let mut sources = Vec::new();
            for (nth, member) in all.iter().enumerate() {
                for queue in 0..4 {
                    // Small and long requests of both directions, on queues of all kinds.
                    let bytes = if (usize::from(queue) + nth).is_multiple_of(2) { 64 << 20 } else { 4096 };
                    let direction = if queue < 2 { Direction::Read } else { Direction::Write };
                    sources.push(Source { bytes, direction, depth: 3, ..Source::new(member, queue) });
                }
            }
            run(&mut sources, 600_000);
            let bound = rates.longest_wait(64 << 20, 4, members).as_nanos();
            for source in &sources {
                let waiting = TICKS_PER_S + 600_000 * TICKS_PER_MS - source.asked_at;
                let waited = u128::from(source.longest_wait.max(waiting) / TICKS_PER_NS);
                assert!(
                    source.requests > 0 && waited <= bound,
                    "{waited} of {bound} ns: {rates:?}, {members}"
                );
            }
        }
    }
}
