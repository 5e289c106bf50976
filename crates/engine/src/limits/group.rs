//! A group, its members, and the place where queues find the member of their export.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use vshunt_types::sync::Locked;

use super::bucket::{Account, Bucket, COST_MAX};
use super::{Direction, RETRY_TICKS, RateSet, Rates, TURN_TICKS, Ticks, now};

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
    fn new(rates: &RateSet, usual_units: u64) -> Self {
        let bucket = |rate| Bucket::new(rate, usual_units);
        Self { total: rates.total.map(bucket), read: rates.read.map(bucket), write: rates.write.map(bucket) }
    }

    fn each(&self) -> [&Option<Bucket>; 3] {
        [&self.total, &self.read, &self.write]
    }
}

/// What a member has bought from [`Buckets`].
#[derive(Debug, Default)]
struct Accounts {
    total: Account,
    read: Account,
    write: Account,
}

impl Accounts {
    fn each(&self) -> [&Account; 3] {
        [&self.total, &self.read, &self.write]
    }

    /// Makes the accounts for buckets that replace `old`. A limit that is new begins without debt.
    fn carried(&self, buckets: &Buckets, old: &Buckets) -> Self {
        let carried = |account: &Account, new: &Option<Bucket>, old: &Option<Bucket>| match (new, old) {
            (Some(new), Some(old)) => account.carried(new, old),
            _ => Account::default(),
        };
        Self {
            total: carried(&self.total, &buckets.total, &old.total),
            read: carried(&self.read, &buckets.read, &old.read),
            write: carried(&self.write, &buckets.write, &old.write),
        }
    }
}

/// Limits that one export has, or several share. Its rates do not change: [`changed`] makes the
/// group that replaces it.
///
/// [`changed`]: Self::changed
#[derive(Debug)]
pub struct LimitGroup {
    operations: Buckets,
    bytes: Buckets,
    operation_bytes: u64,
    /// Whether it has more than one member.
    is_shared: AtomicBool,
}

impl LimitGroup {
    /// Makes a group whose buckets are empty. `is_shared`: it has more than one member.
    pub fn new(rates: &Rates, is_shared: bool) -> Arc<Self> {
        Arc::new(Self {
            operations: Buckets::new(&rates.operations, 1),
            bytes: Buckets::new(&rates.bytes, USUAL_BYTES),
            operation_bytes: rates.operation_bytes,
            is_shared: AtomicBool::new(is_shared),
        })
    }

    /// Says whether it has more than one member. The levels of its buckets stay.
    pub fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Relaxed);
    }

    /// Makes the group that replaces this one, with other rates, and gives it to its members, whose
    /// cells are `cells`. What was used stays in a bucket, as far as it fits. A rate that this
    /// group does not have begins with an empty bucket.
    ///
    /// What queues take meanwhile, until they see the change, is not counted: some requests at
    /// most.
    pub fn changed<'a>(
        &self,
        rates: &Rates,
        cells: impl IntoIterator<Item = &'a Arc<LimitCell>>,
    ) -> Arc<Self> {
        let (cells, members): (Vec<_>, Vec<_>) =
            cells.into_iter().filter_map(|cell| Some((cell, cell.member()?))).unzip();
        let (group, members) = self.changed_at(rates, &members, now());
        for (cell, member) in cells.into_iter().zip(members) {
            cell.set(Some(member));
        }
        group
    }

    /// Returns the group that replaces this one, and the members that replace `members`.
    pub(super) fn changed_at(
        &self,
        rates: &Rates,
        members: &[Arc<LimitMember>],
        now: Ticks,
    ) -> (Arc<Self>, Vec<Arc<LimitMember>>) {
        let is_shared = self.is_shared.load(Relaxed);
        let group = Self::new(rates, is_shared);
        let take = |new: &Buckets, old: &Buckets, of: fn(&LimitMember) -> &Accounts| {
            for (nth, (new, old)) in new.each().into_iter().zip(old.each()).enumerate() {
                if let (Some(new), Some(old)) = (new, old) {
                    let unused =
                        members.iter().filter_map(|member| of(member).each().get(nth).map(|a| a.unused()));
                    new.take_level(old, unused.fold(0, Ticks::saturating_add), is_shared, now);
                }
            }
        };
        take(&group.operations, &self.operations, |member| &member.operations);
        take(&group.bytes, &self.bytes, |member| &member.bytes);
        let members = members.iter().map(|member| member.carried(&group)).collect();
        (group, members)
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
        Arc::new(Self::unshared(group, queues))
    }

    fn unshared(group: Arc<LimitGroup>, queues: u16) -> Self {
        Self {
            group,
            operations: Accounts::default(),
            bytes: Accounts::default(),
            waiters: (0..queues).map(|_| Waiter::default()).collect(),
            owner: AtomicU32::new(NOBODY),
        }
    }

    /// Makes the member that replaces this one, in a group that replaces its group.
    fn carried(&self, group: &Arc<LimitGroup>) -> Arc<Self> {
        let queues = u16::try_from(self.waiters.len()).unwrap_or(u16::MAX);
        let operations = self.operations.carried(&group.operations, &self.group.operations);
        let bytes = self.bytes.carried(&group.bytes, &self.group.bytes);
        Arc::new(Self { operations, bytes, ..Self::unshared(group.clone(), queues) })
    }

    /// Calls `f` with each account that a request of a direction uses, its bucket, and the cost of
    /// `bytes`.
    #[inline]
    fn each(&self, direction: Direction, bytes: u64, mut f: impl FnMut(&Account, &Bucket, Ticks)) {
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
            if direction == Direction::Read {
                one(&buckets.read, &accounts.read);
            }
            if direction == Direction::Write {
                one(&buckets.write, &accounts.write);
            }
        }
    }

    /// Asks whether a queue may start a request now. It does not pay for it.
    ///
    /// # Errors
    /// The time at which the queue should ask again.
    #[inline]
    pub(super) fn ask(&self, queue: u16, direction: Direction, now: Ticks) -> Result<(), Ticks> {
        if !self.may_try(queue, now) {
            return Err(self.wait(queue, now, now + RETRY_TICKS));
        }
        let (mut until, is_shared) = (now, self.group.is_shared.load(Relaxed));
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
        self.each(direction, bytes, |account, _, cost| account.charge(cost));
    }

    /// Takes back what was paid for a request of `bytes` that did not start.
    pub(super) fn refund(&self, direction: Direction, bytes: u64) {
        self.each(direction, bytes, |account, _, cost| account.refund(cost));
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
