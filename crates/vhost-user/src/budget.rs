//! Limits of the address space, the mappings and the descriptors of one front end, and of all front
//! ends together.
//!
//! A front end chooses sizes, offsets and the numbers of regions and rings. Without limits it could
//! use up the address space of the daemon, the kernel's limit of mappings, or its descriptors, for
//! all exports. Called by session threads. Any thread may drop a mapping.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use rustix::process::{Resource, getrlimit};
use virtio::mem::MAX_REGIONS;

use super::guard::WATCHED_MAX;

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Address space of one front end at most, bytes.
const BYTES_MAX: u64 = 4 * TIB;
/// Address space of all front ends at most, bytes: half of the address space of a process on
/// x86-64.
const TOTAL_BYTES_MAX: u64 = 64 * TIB;
/// Mappings of one front end at most: two memory tables, since a new one is mapped while the old
/// one is in use, and the in-flight region and the dirty log.
const MAPPINGS_MAX: usize = 2 * MAX_REGIONS + 6;
/// Mappings of all front ends at most, for a front end that has more than [`SMALL_MAPPINGS`] or
/// [`SMALL_BYTES`]: see [`check`].
const TOTAL_MAPPINGS_MAX: usize = WATCHED_MAX / 2;
/// Address space that a front end still gets when others have used up the total. So large front
/// ends do not exclude small ones.
const SMALL_BYTES: u64 = 64 * GIB;
const SMALL_MAPPINGS: usize = 64;
/// The totals up to which small front ends still get memory.
const RESERVE_BYTES_MAX: u64 = 96 * TIB;
const RESERVE_MAPPINGS_MAX: usize = WATCHED_MAX;

/// Descriptors of rings that a front end still gets when others have used up their part: those of
/// eight rings, and some to spare.
const SMALL_DESCRIPTORS: usize = 32;
/// The part of the descriptors that no ring gets: clients, connections and disks need them. Front
/// ends with more than [`SMALL_DESCRIPTORS`] leave the double of it. It is 1/8 of the limit.
const RESERVE_SHARE: u64 = 8;

const _: () = assert!(SMALL_BYTES <= BYTES_MAX && SMALL_MAPPINGS <= MAPPINGS_MAX);

/// What is mapped for all front ends.
static TOTAL_BYTES: AtomicU64 = AtomicU64::new(0);
static TOTAL_MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// The limits of one connection, and what it has mapped.
pub(super) struct Budget {
    may_block: bool,
    /// The connection, which is shut down when shared memory is truncated.
    socket: Option<OwnedFd>,
    bytes: AtomicU64,
    mappings: AtomicUsize,
    /// Whether a mapping that was dropped since had been truncated.
    lost: AtomicBool,
}

impl Budget {
    /// Makes the budget of the front end behind `socket`. `may_block`: its memory may lie in files
    /// whose file system delays accesses.
    pub(super) fn new(socket: Option<OwnedFd>, may_block: bool) -> Arc<Self> {
        let (bytes, mappings, lost) = Default::default();
        Arc::new(Self { may_block, socket, bytes, mappings, lost })
    }

    /// Returns whether shared memory may be any file (`memory-may-block=on`).
    pub(super) fn may_block(&self) -> bool {
        self.may_block
    }

    /// Returns the descriptor of the connection, or -1.
    pub(super) fn socket(&self) -> RawFd {
        self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Notes that a mapping which is being dropped was truncated.
    pub(super) fn note_loss(&self) {
        self.lost.store(true, Relaxed);
    }

    /// Returns whether a mapping that was dropped had been truncated.
    pub(super) fn lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Returns the address space in use, bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Takes room for one more mapping of `bytes` of address space.
    ///
    /// # Errors
    /// The limit that is exceeded, and the remedy.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> io::Result<Share> {
        // Larger sizes are refused anyway. The limit keeps the sums from overflowing.
        let bytes = bytes.min(BYTES_MAX + 1);
        // Room is taken first and checked then. Two front ends at the same time may both be
        // refused, but the limit holds.
        let share = Share { budget: self.clone(), bytes };
        let own = (self.bytes.fetch_add(bytes, Relaxed) + bytes, self.mappings.fetch_add(1, Relaxed) + 1);
        let all = (TOTAL_BYTES.fetch_add(bytes, Relaxed) + bytes, TOTAL_MAPPINGS.fetch_add(1, Relaxed) + 1);
        // On an error `share` is dropped, which gives the room back.
        check(own, all).map(|()| share).map_err(|why| io::Error::new(io::ErrorKind::QuotaExceeded, why))
    }
}

/// Checks the bytes and mappings that a front end, and all of them together, would have.
///
/// # Errors
/// The limit that is exceeded, and the remedy.
fn check(own: (u64, usize), all: (u64, usize)) -> Result<(), String> {
    if own.0 > BYTES_MAX {
        return Err(format!(
            "the front end asks for more than {} GiB of address space, which is the limit for one: give the guest less memory",
            BYTES_MAX / GIB
        ));
    }
    if own.1 > MAPPINGS_MAX {
        return Err(format!(
            "the front end shares {} pieces of memory, and {MAPPINGS_MAX} is the limit for one: give the guest fewer and \
             larger regions",
            own.1
        ));
    }
    let small = own.0 <= SMALL_BYTES && own.1 <= SMALL_MAPPINGS;
    let (bytes, mappings) =
        if small { (RESERVE_BYTES_MAX, RESERVE_MAPPINGS_MAX) } else { (TOTAL_BYTES_MAX, TOTAL_MAPPINGS_MAX) };
    if all.0 > bytes || all.1 > mappings {
        return Err(format!(
            "all front ends together would have {} GiB in {} mappings, and {} GiB in {mappings} is the limit for one that has \
             as much as this: give guests less memory in fewer regions, or serve some of them by another daemon",
            all.0.div_ceil(GIB),
            all.1,
            bytes / GIB
        ));
    }
    Ok(())
}

/// Checks that the process has descriptors left for others if a front end that has given `own`
/// descriptors of its rings gives this one, too.
///
/// The system takes the lowest free number for a descriptor. So the number is about how many there
/// are, of whatever kind.
///
/// # Errors
/// The limit, and the remedy.
pub(super) fn check_descriptors(own: usize, new: &impl AsRawFd) -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    check_number(own, new.as_raw_fd().unsigned_abs().into(), limit)
}

fn check_number(own: usize, number: u64, limit: u64) -> Result<(), String> {
    let parts = if own < SMALL_DESCRIPTORS { 1 } else { 2 };
    let most = limit - limit / RESERVE_SHARE * parts;
    if number < most {
        return Ok(());
    }
    Err(format!(
        "the front end has given {own} descriptors for its rings, and this process, which may have {limit}, keeps the last \
         {} for others: raise the limit of open files (ulimit -n, LimitNOFILE=), or give the guest fewer queues",
        limit - most
    ))
}

/// Room for one mapping. It is given back when this is dropped.
pub(super) struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Share {
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Relaxed);
        self.budget.mappings.fetch_sub(1, Relaxed);
        TOTAL_BYTES.fetch_sub(self.bytes, Relaxed);
        TOTAL_MAPPINGS.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_front_ends_leave_room_for_small_ones() {
        let all = (TOTAL_BYTES_MAX, TOTAL_MAPPINGS_MAX);
        assert_eq!(check((BYTES_MAX, MAPPINGS_MAX), all), Ok(()));
        let words = |own, all| check(own, all).unwrap_err();
        assert!(words((BYTES_MAX + 1, 1), (0, 0)).contains("more than 4096 GiB"));
        assert!(words((1, MAPPINGS_MAX + 1), (0, 0)).contains("fewer and larger"));
        for over in [(all.0 + 1, 0), (0, all.1 + 1)] {
            assert!(words((SMALL_BYTES + 1, 1), over).contains("another daemon"), "{over:?}");
            assert!(words((1, SMALL_MAPPINGS + 1), over).contains("another daemon"), "{over:?}");
            assert_eq!(check((SMALL_BYTES, SMALL_MAPPINGS), over), Ok(()));
        }
        assert!(check((1, 1), (RESERVE_BYTES_MAX + 1, 1)).is_err());
        assert!(check((1, 1), (1, RESERVE_MAPPINGS_MAX + 1)).is_err());
    }

    #[test]
    fn many_descriptors_leave_some_for_others() {
        for limit in [200, 1024, 1 << 20, u64::MAX] {
            let (small, large) = (limit - limit / 8, limit - limit / 8 * 2);
            let fits = |own, number| check_number(own, number, limit).is_ok();
            assert!(fits(0, small - 1) && !fits(0, small) && fits(SMALL_DESCRIPTORS - 1, small - 1));
            assert!(fits(1000, large - 1) && !fits(SMALL_DESCRIPTORS, large) && fits(0, large), "{limit}");
        }
        let why = check_number(99, 1000, 1024).unwrap_err();
        assert!(why.contains("has given 99 descriptors") && why.contains("keeps the last 256"), "{why}");
        check_descriptors(0, &std::io::stdin()).unwrap();
    }

    #[test]
    fn what_is_refused_is_not_counted() {
        let budget = Budget::new(None, false);
        let first = budget.take(BYTES_MAX - 1).unwrap();
        assert!(budget.take(2).is_err());
        assert!(budget.take(u64::MAX).is_err());
        let second = budget.take(1).unwrap();
        drop(first);
        let third = budget.take(BYTES_MAX - 1).unwrap();
        drop((second, third));
        assert_eq!((budget.bytes.load(Relaxed), budget.mappings.load(Relaxed)), (0, 0));
    }
}
