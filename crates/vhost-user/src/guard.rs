//! Protects the daemon from a front end that truncates the memory which it shares.
//!
//! A shared file may be truncated after it was mapped. An access to a page beyond its new end
//! raises SIGBUS on the accessing thread, and would end every export. The handler here finds the
//! [`watch`]ed mapping that contains the address. It replaces the whole mapping by zero pages with
//! one `mmap`, and shuts down the connection of the front end. The session thread then stops the
//! rings. A SIGBUS at any other address ends the process.
//!
//! The handler runs on any thread and interrupts any code, so it uses only atomics and system
//! calls.
//!
//! What must never happen: the handler maps anything outside of the watched mapping that contains
//! the address.
//!
//! # The limit of mappings
//!
//! The kernel refuses a new mapping when the process has more than `vm.max_map_count`. The
//! replacement must work then, too. It needs no additional mapping: `super::memory` surrounds each
//! watched mapping with reserved address space, so that it is one mapping to the kernel (VMA),
//! which never merges with a neighbour. `MAP_FIXED` of exactly that range neither splits nor adds a
//! mapping. The kernel still refuses at the limit plus one, which a process can reach. Then the
//! handler unmaps one of [`SPARES`] spare mappings and tries again.

use std::io;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicUsize, Ordering, fence};

use rustix::fs::MemfdFlags;

/// Mappings that can be watched at the same time. Each uses at most two of the 65,530 mappings of a
/// process: itself, and the reserved address space after it.
pub(super) const WATCHED_MAX: usize = 16384;
const _: () = assert!(WATCHED_MAX * 2 < 65_530 * 3 / 4);

/// Mappings that exist only to be unmapped when the process has reached its limit.
const SPARES: usize = 32;
/// Pages of address space for the spare mappings. Every second page is one: neighbours with
/// different protection do not merge.
const SPARE_PAGES: usize = 2 * SPARES + 1;

/// Bytes of a page that is not a huge page.
const PAGE: usize = 4096;
/// Bytes of the file of zeroes. Every user address of every architecture is an offset in it.
const ZEROES_BYTES: u64 = 1 << 56;

/// Faults that are accepted in a mapping after its replacement. Each thread may have one, since its
/// signal may arrive after the replacement. More faults mean that the kernel has no page for the
/// replacement (the limit of vm.overcommit_memory=2). Then the thread would fault forever.
const LATE_MAX: u32 = 4096;

/// States of a watched mapping.
const INTACT: u8 = 0;
const BEING_REPLACED: u8 = 1;
const REPLACED: u8 = 2;
const STUCK: u8 = 3;

/// A watched mapping. The thread that changes `start` from 0 owns the other fields until it is 0
/// again.
struct Range {
    /// A sequence counter, incremented before and after each change of `start` and `len`. While it
    /// is odd, they do not match.
    version: AtomicU32,
    /// Address of the first byte. 0: the slot is free. [`TAKEN`]: it is being filled in.
    start: AtomicUsize,
    len: AtomicUsize,
    /// Socket of the front end, which the owner of the watch keeps open; -1: none.
    socket: AtomicI32,
    state: AtomicU8,
    /// Faults since the replacement.
    late: AtomicU32,
}

const TAKEN: usize = 1;

static RANGES: [Range; WATCHED_MAX] = [const {
    Range {
        version: AtomicU32::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        socket: AtomicI32::new(-1),
        state: AtomicU8::new(INTACT),
        late: AtomicU32::new(0),
    }
}; WATCHED_MAX];
/// Number of slots that were ever used. The handler searches no others.
static USED: AtomicUsize = AtomicUsize::new(0);
static INSTALLED: OnceLock<io::Result<()>> = OnceLock::new();
/// Descriptor of a sparse file of zeroes that replaces mappings. Each mapping uses the part at the
/// offset of its own address. -1: there is no file, and anonymous memory replaces mappings.
/// Anonymous memory counts against RLIMIT_DATA and, with vm.overcommit_memory=2, at once against
/// the limit of the system. Pages of the file count only when they are written.
static ZEROES: AtomicI32 = AtomicI32::new(-1);
/// Address of the spare mappings; 0: there are none.
static SPARES_AT: AtomicUsize = AtomicUsize::new(0);
static SPARES_USED: AtomicUsize = AtomicUsize::new(0);

/// Watches a mapping as long as it lives. It must be dropped before the mapping is unmapped.
pub(super) struct RangeWatch(&'static Range);

impl RangeWatch {
    /// Returns whether the mapping was replaced.
    pub(super) fn lost(&self) -> bool {
        self.0.state.load(Ordering::Acquire) != INTACT
    }
}

impl Drop for RangeWatch {
    fn drop(&mut self) {
        let range = self.0;
        let (start, len) = (range.start.load(Ordering::Relaxed), range.len.load(Ordering::Relaxed));
        let lost = self.lost();
        range.set(0, 0);
        let zeroes = ZEROES.load(Ordering::Acquire);
        if lost && zeroes >= 0 {
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // Frees the pages that were written there.
            // SAFETY: the file belongs to this module. This part of it is not used any more: the
            // mapping is about to be unmapped, and no other mapping has its address until then.
            unsafe { libc::fallocate(zeroes, hole, file_offset(start), file_offset(len)) };
        }
    }
}

impl Range {
    /// Sets the mapping that the slot watches. Only the owner of the slot calls this. The version
    /// tells readers of the change.
    fn set(&self, start: usize, len: usize) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.len.store(len, Ordering::Relaxed);
        self.start.store(if start == 0 { TAKEN } else { start }, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
        if start == 0 {
            self.start.store(0, Ordering::Release);
        }
    }

    /// Returns the address of the first byte and the length, if the slot watches a mapping and does
    /// not change meanwhile.
    fn get(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let same = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (same && start > TAKEN).then_some((start, len))
    }
}

/// Watches `len` bytes at `start`, which are one mapping between reserved address space. When the
/// mapping is replaced, `socket` is shut down (-1: none).
///
/// # Errors
/// The table is full, or the handler cannot be installed.
///
/// # Safety
/// Until the watch is dropped, the range must stay mapped, nothing else may change the mapping, and
/// the socket must stay open. Every access of this process to the range must tolerate zeroes at any
/// time.
pub(super) unsafe fn watch(start: *mut u8, len: usize, socket: RawFd) -> io::Result<RangeWatch> {
    if let Err(e) = INSTALLED.get_or_init(install) {
        return Err(io::Error::new(e.kind(), format!("shared memory cannot be guarded: {e}")));
    }
    for (i, range) in RANGES.iter().enumerate() {
        if range.start.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            range.state.store(INTACT, Ordering::Relaxed);
            range.late.store(0, Ordering::Relaxed);
            range.socket.store(socket, Ordering::Relaxed);
            range.set(start.addr(), len);
            USED.fetch_max(i + 1, Ordering::Release);
            return Ok(RangeWatch(range));
        }
    }
    Err(io::Error::other(format!("vshunt watches {WATCHED_MAX} mappings of shared memory, and no more")))
}

/// Installs the handler, and reserves what it needs.
fn install() -> io::Result<()> {
    if let Some(file) = zeroes() {
        ZEROES.store(file, Ordering::Release);
    }
    reserve_spares()?;
    // SAFETY: a sigaction of zeroes is valid: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    // The stack of the thread may be nearly used up. Rust gives each thread an alternate stack.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO requires, and calls only functions that
    // are async-signal-safe.
    match unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the file of zeroes, which stays open as long as the process runs. None if the system or
/// RLIMIT_FSIZE does not allow it.
fn zeroes() -> Option<RawFd> {
    // A file that is larger than the limit would raise SIGXFSZ.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < ZEROES_BYTES) {
        return None;
    }
    let file = rustix::fs::memfd_create("vshunt-zeroes", MemfdFlags::CLOEXEC).ok()?;
    rustix::fs::ftruncate(&file, ZEROES_BYTES).ok()?;
    Some(file.into_raw_fd())
}

/// Makes the spare mappings. Every second page is readable, so that neighbours do not merge. No
/// page is ever used.
fn reserve_spares() -> io::Result<()> {
    let (flags, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, libc::PROT_NONE);
    // SAFETY: a new mapping at an address that the kernel chooses does not change existing memory.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), SPARE_PAGES * PAGE, none, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    for i in 0..SPARES {
        let page = at.map_addr(|at| at + (2 * i + 1) * PAGE);
        // SAFETY: `page` is a page of the mapping made just now, which holds nothing: `2 * i + 1`
        // is less than SPARE_PAGES.
        unsafe { libc::mprotect(page, PAGE, libc::PROT_READ) };
    }
    SPARES_AT.store(at.addr(), Ordering::Release);
    Ok(())
}

/// Unmaps one spare mapping, so that the process has one mapping less. Returns false if there are
/// none left.
fn give_spare() -> bool {
    let (at, i) = (SPARES_AT.load(Ordering::Acquire), SPARES_USED.fetch_add(1, Ordering::Relaxed));
    if at == 0 || i >= SPARES {
        return false;
    }
    let page = std::ptr::without_provenance_mut(at + (2 * i + 1) * PAGE);
    // SAFETY: the page is spare page `i` of `reserve_spares`. The counter gives each page to one
    // caller only, and it is never used.
    unsafe { libc::munmap(page, PAGE) == 0 }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler that was installed with SA_SIGINFO
    // (`install`).
    let info = unsafe { &*info };
    // SAFETY: the siginfo of a SIGBUS has an address.
    let addr = unsafe { info.si_addr() }.addr();
    // SAFETY: returns this thread's errno, which is always there.
    let errno_at = unsafe { libc::__errno_location() };
    // SAFETY: `errno_at` is valid for as long as this thread runs, and no other thread uses it.
    let errno = unsafe { *errno_at };
    if !handle(addr, info.si_code) {
        // The interrupted instruction is executed again, and its SIGBUS ends the process.
        // SAFETY: the default action is always valid, and `signal` may be called by a signal
        // handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: `errno_at` is this thread's errno. The interrupted code must find the value that it
    // had.
    unsafe { *errno_at = errno };
}

/// Replaces the watched mapping that contains `addr`, or waits until another thread has replaced
/// it. Returns false if no watched mapping contains the address, or if the mapping cannot be
/// replaced.
fn handle(addr: usize, code: libc::c_int) -> bool {
    let used = USED.load(Ordering::Acquire);
    // The watch of a mapping that this thread was using does not change before the thread
    // continues.
    let held = |range: &&Range| range.get().is_some_and(|(start, len)| addr.wrapping_sub(start) < len);
    let Some(range) = RANGES.iter().take(used).find(held) else { return false };
    let Some((start, len)) = range.get() else { return false };
    match range.state.compare_exchange(INTACT, BEING_REPLACED, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let done = replace(start, len);
            range.state.store(if done { REPLACED } else { STUCK }, Ordering::Release);
            let socket = range.socket.load(Ordering::Relaxed);
            if socket >= 0 {
                // SAFETY: the owner of the watch keeps the socket open, and `shutdown` is
                // async-signal-safe.
                unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
            }
            done
        }
        // The hardware lost a page of this process. A replacement does not help.
        Err(REPLACED) if code == libc::BUS_MCEERR_AR => false,
        Err(REPLACED) => may_repeat(&range.late),
        Err(_) => loop {
            match range.state.load(Ordering::Acquire) {
                // SAFETY: a system call without arguments.
                BEING_REPLACED => unsafe { libc::sched_yield() },
                state => break state == REPLACED,
            };
        },
    }
}

/// Counts a fault in a mapping that was replaced. Returns false after so many faults that the
/// system must have no memory for its pages.
fn may_repeat(late: &AtomicU32) -> bool {
    // The counter saturates: the first fault beyond the limit ends the process.
    if late.fetch_add(1, Ordering::Relaxed) < LATE_MAX {
        return true;
    }
    late.store(LATE_MAX, Ordering::Relaxed);
    say(b"vshunt: a front end cut its memory short, and the system has no memory for the pages that replace it: the daemon ends\n");
    false
}

/// Puts zero pages in place of a watched mapping: one `mmap` of exactly that range.
///
/// Returns false if the kernel refuses it. The kernel refuses it if the process has too many
/// mappings, which the spare mappings remedy, or if it has no memory for its own structures, which
/// has no remedy.
fn replace(start: usize, len: usize) -> bool {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let fixed = libc::MAP_FIXED | libc::MAP_NORESERVE;
    let file = ZEROES.load(Ordering::Acquire);
    let (flags, offset) =
        if file >= 0 { (libc::MAP_SHARED, start) } else { (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0) };
    loop {
        let at = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is exactly one watched mapping, and every access to it tolerates zeroes
        // (see `watch`).
        let got = unsafe { libc::mmap(at, len, prot, flags | fixed, file, file_offset(offset)) };
        if got != libc::MAP_FAILED {
            return true;
        }
        if !give_spare() {
            break;
        }
    }
    say(b"vshunt: a front end cut its memory short, and the kernel has no memory to replace it: the daemon ends\n");
    false
}

/// Returns an address or a length as an offset in the file of zeroes. It is at most `ZEROES_BYTES`.
fn file_offset(number: usize) -> libc::off_t {
    libc::off_t::try_from(number).unwrap_or(libc::off_t::MAX)
}

/// Writes a line to standard error. May be called by a signal handler.
fn say(line: &'static [u8]) {
    // SAFETY: `line` is valid for its length, and `write` is async-signal-safe.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

#[cfg(test)]
mod tests;
