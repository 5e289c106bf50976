//! Keeps a front-end that takes its memory away from taking the daemon with it.
//!
//! A shared file may be cut short after it was mapped; touching a page past its new end raises SIGBUS on whichever
//! worker does so, and would end every export. The handler here looks up the address among the mappings that are
//! [`watch`]ed and puts zero pages in its place: the guest that lost its memory reads nonsense and breaks its own rings,
//! nobody else notices. A SIGBUS anywhere else ends the process, as it should.
//!
//! The handler runs on any thread, in the middle of anything: it touches atomics and makes system calls, no more.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that can be watched at a time: some exports with as many regions as the protocol has.
const WATCHED_MAX: usize = 8192;
/// Sizes in which a page can be replaced: normal, and huge ones, which can only be replaced whole.
const PAGE_SIZES: [usize; 3] = [4 << 10, 2 << 20, 1 << 30];

/// A watched range; `start` 0: free, [`TAKEN`]: being filled in.
struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

const TAKEN: usize = 1;

static RANGES: [Range; WATCHED_MAX] =
    [const { Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) } };
        WATCHED_MAX];
/// Ranges ever used, so that the handler need not look at all.
static USED: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();

/// Watches a mapping for as long as it lives; dropped before the mapping goes.
pub(super) struct Watch(usize);

impl Watch {
    /// Whether a page of it had to be replaced.
    pub(super) fn lost(&self) -> bool {
        RANGES[self.0].lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        RANGES[self.0].start.store(0, Ordering::Release);
    }
}

/// Watches `len` bytes at `start`. The error says that too many are watched.
pub(super) fn watch(start: *mut u8, len: usize) -> io::Result<Watch> {
    INSTALL.call_once(install);
    for (i, range) in RANGES.iter().enumerate() {
        if range.start.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            range.len.store(len, Ordering::Relaxed);
            range.lost.store(false, Ordering::Relaxed);
            USED.fetch_max(i + 1, Ordering::Release);
            range.start.store(start.addr(), Ordering::Release);
            return Ok(Watch(i));
        }
    }
    Err(io::Error::other("more regions of memory are mapped than vshunt can watch"))
}

fn install() {
    // SAFETY: all zeroes is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and keeps to what signal handlers may do.
    unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo; for SIGBUS it has an address.
    let addr = unsafe { (*info).si_addr() }.addr();
    // SAFETY: errno is this thread's.
    let errno = unsafe { *libc::__errno_location() };
    if !replace(addr) {
        // Not ours: the instruction is repeated and ends the process.
        // SAFETY: as `install`.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: as above; whoever was interrupted finds its errno again.
    unsafe { *libc::__errno_location() = errno };
}

/// Puts zero pages where `addr` is. False if it lies in no watched range.
fn replace(addr: usize) -> bool {
    for range in &RANGES[..USED.load(Ordering::Acquire)] {
        let start = range.start.load(Ordering::Acquire);
        let len = range.len.load(Ordering::Relaxed);
        if start <= TAKEN || addr < start || addr - start >= len {
            continue;
        }
        range.lost.store(true, Ordering::Relaxed);
        return PAGE_SIZES.iter().any(|&size| {
            let page = addr & !(size - 1);
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            // SAFETY: the page holds `addr`, so it belongs to the watched mapping, whose own page size it does not
            // exceed (smaller ones fail on huge pages); what was mapped there is beyond its file's end.
            let got = unsafe { libc::mmap(std::ptr::without_provenance_mut(page), size, prot, flags, -1, 0) };
            got != libc::MAP_FAILED
        });
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::memory::{Mapping, shared_file};

    #[test]
    fn a_file_that_is_cut_short_reads_as_zeroes() {
        let file =
            std::fs::File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 20).unwrap();
        let map = Mapping::new(&file, 1 << 20).unwrap();
        // SAFETY: inside of the mapping.
        unsafe { map.at(8192).write_volatile(7) };
        assert!(!map.lost());
        file.set_len(4096).unwrap();
        // SAFETY: inside of the mapping; past the file's end the guard answers.
        let (lost, kept) = unsafe {
            map.at(0).write_volatile(9);
            (map.at(8192).read_volatile(), map.at(0).read_volatile())
        };
        assert_eq!((lost, kept), (0, 9));
        // SAFETY: as above.
        unsafe { map.at(1 << 19).write_volatile(1) };
        assert!(map.lost());
        let other = Mapping::new(&shared_file("other", 4096).unwrap(), 4096).unwrap();
        assert!(!other.lost());
    }
}
