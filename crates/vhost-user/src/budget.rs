//! How much address space one front end may have mapped, and all of them together.
//!
//! A front end says what is mapped: sizes, offsets, how many regions. Without limits it could use up the daemon's address space, or
//! the kernel's limit of mappings, for everybody. Called by session threads; mappings are dropped by any thread.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use virtio::mem::MAX_REGIONS;

use super::guard::WATCHED_MAX;

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Address space of one front end, bytes.
const BYTES_MAX: u64 = 4 * TIB;
/// Address space of all front ends, bytes: half of what a process has on x86-64.
const TOTAL_BYTES_MAX: u64 = 64 * TIB;
/// Mappings of one front end: two whole memory tables, since a new one is mapped while the old one is used, and the regions
/// for requests in flight and for dirty pages.
const MAPPINGS_MAX: usize = 2 * MAX_REGIONS + 6;
/// Mappings of all front ends, where the one that asks has more than [`SMALL_MAPPINGS`] or [`SMALL_BYTES`]: see [`check`].
const TOTAL_MAPPINGS_MAX: usize = WATCHED_MAX / 2;
/// What a front end gets when others have used up the total, so that greedy ones do not keep small ones out.
const SMALL_BYTES: u64 = 64 * GIB;
const SMALL_MAPPINGS: usize = 64;
/// The totals up to which they get it.
const RESERVE_BYTES_MAX: u64 = 96 * TIB;
const RESERVE_MAPPINGS_MAX: usize = WATCHED_MAX;

const _: () = assert!(SMALL_BYTES <= BYTES_MAX && SMALL_MAPPINGS <= MAPPINGS_MAX);

/// Mapped for all front ends.
static TOTAL_BYTES: AtomicU64 = AtomicU64::new(0);
static TOTAL_MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// What one connection may map, and has mapped.
pub(super) struct Budget {
    may_block: bool,
    /// The connection, to be shut down when memory is cut short.
    socket: Option<OwnedFd>,
    bytes: AtomicU64,
    mappings: AtomicUsize,
    /// Whether a mapping that is gone by now was cut short.
    lost: AtomicBool,
}

impl Budget {
    /// For the front end behind `socket`. `may_block`: its memory may lie in files whose file system makes an access wait.
    pub(super) fn new(socket: Option<OwnedFd>, may_block: bool) -> Arc<Self> {
        let (bytes, mappings, lost) = Default::default();
        Arc::new(Self { may_block, socket, bytes, mappings, lost })
    }

    /// Whether shared memory may be any file (`memory-may-block=on`).
    pub(super) fn may_block(&self) -> bool {
        self.may_block
    }

    /// The connection's descriptor, or -1.
    pub(super) fn socket(&self) -> RawFd {
        self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Notes that a mapping which is about to go was cut short.
    pub(super) fn note_loss(&self) {
        self.lost.store(true, Relaxed);
    }

    /// Whether a mapping that is gone was cut short.
    pub(super) fn lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Address space that it has, bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Takes room for one more mapping, of that many bytes of address space.
    ///
    /// # Errors
    /// Which limit stands against it, and what to do.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> io::Result<Share> {
        // Anything more than is refused anyway, so that sums stay numbers.
        let bytes = bytes.min(BYTES_MAX + 1);
        // First taken, then checked: two that come at the same time may both be refused, but never both be accepted.
        let share = Share { budget: self.clone(), bytes };
        let own = (self.bytes.fetch_add(bytes, Relaxed) + bytes, self.mappings.fetch_add(1, Relaxed) + 1);
        let all = (TOTAL_BYTES.fetch_add(bytes, Relaxed) + bytes, TOTAL_MAPPINGS.fetch_add(1, Relaxed) + 1);
        // An error gives it all back: `share` is dropped.
        check(own, all).map(|()| share).map_err(|why| io::Error::new(io::ErrorKind::QuotaExceeded, why))
    }
}

/// Checks what a front end and what all of them would have: bytes, mappings.
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

/// Room for one mapping, given back when dropped.
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
