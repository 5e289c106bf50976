//! A group, its members, and the place where queues find the member of their export.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use vshunt_types::sync::Locked;

use super::bucket::{Account, Bucket, COST_MAX};
use super::{Direction, RETRY_TICKS, RateSet, Rates, TURN_TICKS, Ticks};

/// Bytes of a request that counts as small.
const USUAL_BYTES: u64 = 4096;
/// No queue owns the next share.
const NOBODY: u32 = u32::MAX;

/// The three buckets of operations, or of bytes.
#[derive(Debug, Default)]
struct Buckets {
    total: Option<Bucket>,
    read: Option<Bucket>,
    write: Option<Bucket>,
}

impl Buckets {
    fn new(rates: &RateSet, usual_units: u64, is_shared: bool) -> Self {
        let bucket = |rate| Bucket::new(rate, usual_units, is_shared);
        Self { total: rates.total.map(bucket), read: rates.read.map(bucket), write: rates.write.map(bucket) }
    }
}

/// What a member has bought from [`Buckets`].
#[derive(Debug, Default)]
struct Accounts {
    total: Account,
    read: Account,
    write: Account,
}

/// Limits that one export has, or several share. It does not change: other limits are another
/// group.
#[derive(Debug)]
pub struct LimitGroup {
    operations: Buckets,
    bytes: Buckets,
    operation_bytes: u64,
    is_shared: bool,
}

impl LimitGroup {
    /// Makes a group whose buckets are empty. `is_shared`: it has more than one member.
    pub fn new(rates: &Rates, is_shared: bool) -> Arc<Self> {
        Arc::new(Self {
            operations: Buckets::new(&rates.operations, 1, is_shared),
            bytes: Buckets::new(&rates.bytes, USUAL_BYTES, is_shared),
            operation_bytes: rates.operation_bytes,
            is_shared,
        })
    }

    /// Returns what a request costs in a bucket of operations.
    #[inline]
    fn operation_cost(&self, bucket: &Bucket, bytes: u64) -> Ticks {
        let cost = bucket.cost(1);
        if self.operation_bytes == 0 || bytes <= self.operation_bytes {
            return cost;
        }
        let cost = u128::from(cost) * u128::from(bytes) / u128::from(self.operation_bytes);
        u64::try_from(cost).unwrap_or(COST_MAX).min(COST_MAX)
    }
}

/// An export in a group. All of its queues, on any workers, use it at the same time.
#[derive(Debug)]
pub struct LimitMember {
    group: Arc<LimitGroup>,
    operations: Accounts,
    bytes: Accounts,
    waiters: Box<[Waiter]>,
    /// The queue that owns the next share, or [`NOBODY`].
    owner: AtomicU32,
}

/// The state of one queue, which other queues read.
#[derive(Debug, Default)]
struct Waiter {
    /// Since when it waits; 0: it does not.
    since: AtomicU64,
    /// When it asks again.
    due: AtomicU64,
}

impl Waiter {
    fn is_waiting(&self) -> bool {
        self.since.load(Acquire) != 0
    }

    /// Returns whether it had time enough to ask again, and did not.
    fn is_late(&self, now: Ticks) -> bool {
        self.due.load(Relaxed).saturating_add(TURN_TICKS) < now
    }

    /// Returns whether it is about to ask again. Another queue would take what it waits for.
    fn is_due(&self, now: Ticks) -> bool {
        self.is_waiting() && self.due.load(Relaxed) <= now && !self.is_late(now)
    }
}

impl LimitMember {
    /// Makes a member of `queues` queues. A queue pair of a network counts as two.
    pub fn new(group: Arc<LimitGroup>, queues: u16) -> Arc<Self> {
        Arc::new(Self {
            group,
            operations: Accounts::default(),
            bytes: Accounts::default(),
            waiters: (0..queues).map(|_| Waiter::default()).collect(),
            owner: AtomicU32::new(NOBODY),
        })
    }

    /// Calls `f` with each account that a request of a direction uses, its bucket, and the cost of
    /// `bytes`. No direction: of both.
    #[inline]
    fn each(&self, direction: Option<Direction>, bytes: u64, mut f: impl FnMut(&Account, &Bucket, Ticks)) {
        let group = &*self.group;
        for (buckets, accounts, in_bytes) in
            [(&group.operations, &self.operations, false), (&group.bytes, &self.bytes, true)]
        {
            let mut one = |bucket: &Option<Bucket>, account: &Account| {
                if let Some(bucket) = bucket {
                    let cost =
                        if in_bytes { bucket.cost(bytes) } else { group.operation_cost(bucket, bytes) };
                    f(account, bucket, cost);
                }
            };
            one(&buckets.total, &accounts.total);
            if direction != Some(Direction::Write) {
                one(&buckets.read, &accounts.read);
            }
            if direction != Some(Direction::Read) {
                one(&buckets.write, &accounts.write);
            }
        }
    }

    /// Asks whether a queue may start a request now. It does not pay for it.
    ///
    /// # Errors
    /// The time at which the queue should ask again.
    #[inline]
    pub(super) fn ask(&self, queue: u16, direction: Option<Direction>, now: Ticks) -> Result<(), Ticks> {
        if !self.may_try(queue, now) {
            return Err(self.wait(queue, now, now + RETRY_TICKS));
        }
        let (mut until, is_shared) = (now, self.group.is_shared);
        self.each(direction, 0, |account, bucket, _| {
            until = until.max(account.ready(bucket, is_shared, now));
        });
        if until > now {
            return Err(self.wait(queue, now, until));
        }
        if let Some(waiter) = self.waiters.get(usize::from(queue))
            && waiter.is_waiting()
        {
            waiter.since.store(0, Release);
            // If it was its turn, that has ended.
            let _ = self.owner.compare_exchange(u32::from(queue), NOBODY, AcqRel, Relaxed);
        }
        Ok(())
    }

    /// Pays for a request that starts.
    #[inline]
    pub(super) fn charge(&self, direction: Direction, bytes: u64) {
        self.each(Some(direction), bytes, |account, _, cost| account.charge(cost));
    }

    /// Takes back what was paid for a request of `bytes` that did not start.
    pub(super) fn refund(&self, direction: Direction, bytes: u64) {
        self.each(Some(direction), bytes, |account, _, cost| account.refund(cost));
    }

    /// Returns whether it is not the turn of another queue.
    #[inline]
    fn may_try(&self, queue: u16, now: Ticks) -> bool {
        let owner = self.owner.load(Acquire);
        owner == NOBODY
            || owner == u32::from(queue)
            || self.waiters.get(owner as usize).is_none_or(|owner| !owner.is_due(now))
    }

    /// Notes that a queue waits until `until`, and gives the next share to the queue that waits
    /// longest. Returns `until`.
    #[cold]
    fn wait(&self, queue: u16, now: Ticks, until: Ticks) -> Ticks {
        let Some(waiter) = self.waiters.get(usize::from(queue)) else { return until };
        waiter.due.store(until, Relaxed);
        if !waiter.is_waiting() {
            waiter.since.store(now, Release);
        }
        let owner = self.owner.load(Acquire);
        if let Some(owner) = self.waiters.get(owner as usize).filter(|owner| owner.is_waiting()) {
            if !owner.is_late(now) {
                return until;
            }
            // Its worker does not run, or it is between two workers. The others go first then.
            owner.since.store(now, Relaxed);
        }
        let times = self.waiters.iter().map(|waiter| waiter.since.load(Relaxed)).enumerate();
        let oldest = times.filter(|&(_, since)| since != 0).min_by_key(|&(_, since)| since);
        let next = oldest.and_then(|(at, _)| u32::try_from(at).ok()).unwrap_or(NOBODY);
        // If another queue was faster, its choice is as good.
        let _ = self.owner.compare_exchange(owner, next, AcqRel, Relaxed);
        until
    }

    /// Notes that a queue does not wait any more.
    pub(super) fn forget(&self, queue: u16) {
        if let Some(waiter) = self.waiters.get(usize::from(queue)) {
            waiter.since.store(0, Release);
        }
    }
}

/// Where the queues of an export find its limits. They exist as long as the export.
#[derive(Debug, Default)]
pub struct LimitCell {
    /// Changes with each [`set`](Self::set).
    generation: AtomicU32,
    /// Guards the limits. Held for a copy of the pointer only, after a change.
    member: Mutex<Option<Arc<LimitMember>>>,
}

impl LimitCell {
    /// Sets the limits; `None` lifts them. Queues that wait learn of it within 100 ms.
    pub fn set(&self, member: Option<Arc<LimitMember>>) {
        *self.member.locked() = member;
        self.generation.fetch_add(1, Release);
    }

    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    pub(super) fn member(&self) -> Option<Arc<LimitMember>> {
        self.member.locked().clone()
    }
}
