//! One rate: the bucket that members share, and a member's credit.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI64, AtomicU64};

use super::{RETRY_TICKS, Rate, SHARE_TICKS, SHARED_SHARE_TICKS, SLACK_MS, TICKS_PER_S, Ticks};

/// Binary digits behind the point of the cost of one unit.
const FRACTION_BITS: u32 = 24;
/// The most that one request costs, 19 hours. Sums of costs stay far below 64 bits then.
pub(super) const COST_MAX: Ticks = 1 << 52;
/// The most that a bucket may be ahead, two years.
const AHEAD_MAX: Ticks = 1 << 62;
/// Shares that are bought at once if there is room for more than one.
const SHARES_AT_ONCE: u32 = 32;

/// The time at which a leaky bucket is empty. It is full if that time is `ahead` in the future.
#[derive(Debug)]
struct Leak {
    empty_at: AtomicU64,
    ahead: Ticks,
}

impl Leak {
    fn new(ahead: Ticks) -> Self {
        Self { empty_at: AtomicU64::new(0), ahead: ahead.min(AHEAD_MAX) }
    }

    /// Adds `amount`. Returns when it fits.
    fn add(&self, amount: Ticks, now: Ticks) -> Ticks {
        let mut old = self.empty_at.load(Relaxed);
        loop {
            let start = old.max(now);
            let new = start.saturating_add(amount);
            match self.empty_at.compare_exchange_weak(old, new, AcqRel, Relaxed) {
                Ok(_) => return start.saturating_sub(self.ahead),
                Err(seen) => old = seen,
            }
        }
    }

    /// Returns how far it is ahead.
    fn level(&self, now: Ticks) -> Ticks {
        self.empty_at.load(Acquire).saturating_sub(now)
    }

    fn set_level(&self, level: Ticks, now: Ticks) {
        self.empty_at.store(now.saturating_add(level), Release);
    }
}

/// The bucket of one rate, with the semantics of QEMU's throttling.
#[derive(Debug)]
pub(super) struct Bucket {
    /// Ticks that a unit costs, times 2^[`FRACTION_BITS`].
    unit_cost: u64,
    /// What a small request costs. A share is at least that.
    usual_cost: Ticks,
    /// Leaks at the average rate.
    average: Leak,
    /// Leaks at the rate of the burst. With it: what a tick of the average costs there, times 2^32.
    burst: Option<(Leak, u64)>,
}

impl Bucket {
    /// Makes an empty bucket. `usual_units`: units of a small request.
    pub(super) fn new(rate: Rate, usual_units: u64) -> Self {
        let average = rate.average.max(1);
        let unit_cost = (u128::from(TICKS_PER_S) << FRACTION_BITS) / u128::from(average);
        let mut bucket = Self {
            unit_cost: u64::try_from(unit_cost).unwrap_or(u64::MAX),
            usual_cost: 0,
            average: Leak::new(0),
            burst: None,
        };
        bucket.usual_cost = bucket.cost(usual_units);
        let slack = TICKS_PER_S / 1000 * SLACK_MS;
        if rate.burst == 0 {
            bucket.average = Leak::new(slack);
        } else {
            let seconds = rate.burst_seconds.max(1);
            let units = u128::from(rate.burst) * u128::from(seconds);
            let ahead = units.saturating_mul(u128::from(bucket.unit_cost)) >> FRACTION_BITS;
            bucket.average = Leak::new(u64::try_from(ahead).unwrap_or(AHEAD_MAX));
            if seconds > 1 {
                let ratio = (u128::from(average) << 32) / u128::from(rate.burst.max(average));
                bucket.burst = Some((Leak::new(slack), u64::try_from(ratio).unwrap_or(1 << 32)));
            }
        }
        bucket
    }

    /// Returns what `units` cost.
    #[inline]
    pub(super) fn cost(&self, units: u64) -> Ticks {
        let ticks = (u128::from(units) * u128::from(self.unit_cost)) >> FRACTION_BITS;
        u64::try_from(ticks).unwrap_or(COST_MAX).min(COST_MAX)
    }

    /// Returns what a member buys at a time. `is_shared`: there is more than one member.
    fn share(&self, is_shared: bool) -> Ticks {
        let share = if is_shared { SHARED_SHARE_TICKS } else { SHARE_TICKS };
        share.max(self.usual_cost)
    }

    /// Takes over the level of the bucket that it replaces: the units that were used, as far as
    /// they fit. `unused`: what members have bought there and do not take with them.
    ///
    /// A bucket is fuller than it may be when a request was larger than the room in it. That debt
    /// stays the same number of units. But what a share alone adds never lasts longer than before,
    /// because a share is short only at its own rate.
    pub(super) fn take_level(&self, old: &Self, unused: Ticks, is_shared: bool, now: Ticks) {
        let used = old.average.level(now).saturating_sub(unused);
        let within = self.converted(used.min(old.average.ahead), old).min(self.average.ahead);
        let beyond = used.saturating_sub(old.average.ahead);
        let of_share = beyond.min(old.share(is_shared));
        let beyond = self.converted(of_share, old).min(of_share) + self.converted(beyond - of_share, old);
        self.average.set_level(within.saturating_add(beyond), now);
        if let (Some((new, _)), Some((old, _))) = (&self.burst, &old.burst) {
            new.set_level(old.level(now).min(new.ahead), now);
        }
    }

    /// Returns what those units cost here that cost `ticks` in the bucket `old`.
    fn converted(&self, ticks: Ticks, old: &Self) -> Ticks {
        let units = u128::from(ticks) * u128::from(self.unit_cost);
        let ticks = units.checked_div(u128::from(old.unit_cost)).unwrap_or(0);
        u64::try_from(ticks).unwrap_or(AHEAD_MAX).min(AHEAD_MAX)
    }

    /// Sells `amount` of its time. Returns when the buyer may use it.
    fn sell(&self, amount: Ticks, now: Ticks) -> Ticks {
        let ready = self.average.add(amount, now);
        match &self.burst {
            None => ready,
            Some((leak, ratio)) => {
                let amount = (u128::from(amount) * u128::from(*ratio)) >> 32;
                ready.max(leak.add(u64::try_from(amount).unwrap_or(AHEAD_MAX), now))
            }
        }
    }
}

/// What a member has bought from a bucket.
///
/// A member that shares the bucket buys its next share when it begins to use one, and so has its
/// place in the order while its requests are on their way. Otherwise a member whose requests come a
/// little later than those of others would get less.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Ticks that may be used. Negative: a request was larger than the credit.
    credit: AtomicI64,
    /// Ticks that were bought in addition, and may be used from `ready_at` on.
    bought: AtomicI64,
    ready_at: AtomicU64,
}

impl Account {
    /// Makes the account for a bucket that replaces `old`: with the same debt in units.
    pub(super) fn carried(&self, bucket: &Bucket, old: &Bucket) -> Self {
        let debt = self.credit.load(Acquire).min(0).unsigned_abs();
        let credit = -bucket.converted(debt, old).min(COST_MAX).cast_signed();
        Self { credit: AtomicI64::new(credit), ..Self::default() }
    }

    /// Returns how much was bought and not used.
    pub(super) fn unused(&self) -> Ticks {
        let at_least_zero = |ticks: &AtomicI64| ticks.load(Acquire).max(0).unsigned_abs();
        at_least_zero(&self.credit).saturating_add(at_least_zero(&self.bought))
    }

    /// Returns when a request may pass, `now` if at once. Buys a share if there is no credit.
    ///
    /// Two workers may buy at the same time. The member then has one share more, and uses it.
    #[inline]
    pub(super) fn ready(&self, bucket: &Bucket, is_shared: bool, now: Ticks) -> Ticks {
        if self.credit.load(Acquire) > 0 { now } else { self.refill(bucket, is_shared, now) }
    }

    #[cold]
    fn refill(&self, bucket: &Bucket, is_shared: bool, now: Ticks) -> Ticks {
        let share = bucket.share(is_shared);
        for nth in 0..SHARES_AT_ONCE {
            let mut credit = self.credit.load(Acquire);
            if self.bought.load(Acquire) > 0 {
                let ready_at = self.ready_at.load(Acquire);
                if ready_at > now {
                    return ready_at;
                }
                let bought = self.bought.swap(0, AcqRel);
                credit = self.credit.fetch_add(bought, AcqRel) + bought;
                if credit > 0 && is_shared {
                    self.buy(bucket, share, now);
                }
            }
            if credit > 0 {
                return now;
            }
            // A debt is paid at once if no other member waits for that. Otherwise it is paid in
            // parts between which the others have their turn.
            let need = credit.unsigned_abs().saturating_add(share);
            let amount = if is_shared { need.min(share.saturating_mul(1 << nth)) } else { need };
            self.buy(bucket, amount, now);
        }
        now + RETRY_TICKS
    }

    fn buy(&self, bucket: &Bucket, amount: Ticks, now: Ticks) {
        // A worker that sees what was bought must see when it may be used.
        self.ready_at.fetch_max(bucket.sell(amount, now), Release);
        self.bought.fetch_add(amount.cast_signed(), AcqRel);
    }

    /// Uses `cost` of the credit.
    #[inline]
    pub(super) fn charge(&self, cost: Ticks) {
        self.credit.fetch_sub(cost.cast_signed(), AcqRel);
    }

    /// Returns `cost` of what was used.
    #[inline]
    pub(super) fn refund(&self, cost: Ticks) {
        self.credit.fetch_add(cost.cast_signed(), AcqRel);
    }
}
