//! Filters of system calls (seccomp(2)). They are made from the table, and each thread installs its
//! own when it starts.

use std::cell::Cell;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::sync::atomic::{AtomicU64, Ordering};

use super::table::{self, Check};
use super::{KIND, Mode, REFUSED, ThreadKind};

/// AUDIT_ARCH_* of linux/audit.h: system calls of another architecture have other numbers.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// System call numbers below this one are logged once each. Larger ones are only counted.
const NUMBERS: usize = 512;

/// A filter that can be installed.
pub(super) struct Program {
    code: Vec<libc::sock_filter>,
}

impl Program {
    /// The filter of threads of this kind.
    pub(super) fn new(kind: ThreadKind, mode: Mode) -> Self {
        // The handler of SIGSYS logs the refused call, and then returns EPERM or ends the process.
        Self::of(&table::allowed(kind), mode, libc::SECCOMP_RET_TRAP)
    }

    /// The filter of a process that receives descriptors. A refused call ends that process.
    pub(super) fn of_receiver(mode: Mode) -> Self {
        Self::of(table::RECEIVER, mode, libc::SECCOMP_RET_KILL_PROCESS)
    }

    /// A filter that allows system calls of these numbers. `refuse`: the action for all others, if
    /// the mode refuses them.
    fn of(allowed: &[u32], mode: Mode, refuse: u32) -> Self {
        let refuse = if mode == Mode::Log { libc::SECCOMP_RET_LOG } else { refuse };
        let other = if mode == Mode::Log { libc::SECCOMP_RET_LOG } else { libc::SECCOMP_RET_KILL_PROCESS };
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let end = |action| op((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, action);
        let mut code = vec![
            op(load, 0, 0, offset_of!(libc::seccomp_data, arch) as u32),
            op(equal, 1, 0, ARCHITECTURE),
            end(other),
            op(load, 0, 0, offset_of!(libc::seccomp_data, nr) as u32),
        ];
        // For a call whose arguments the program does not read, the kernel caches the action in a
        // bitmap, and does not run the program. No arguments of calls on the data path are checked.
        for number in allowed {
            let body = match table::check(*number) {
                None => vec![end(libc::SECCOMP_RET_ALLOW)],
                Some(check) => checked(&check, refuse),
            };
            code.push(op(equal, 0, body.len() as u8, *number));
            code.extend(body);
        }
        // No trap here: the C library blocks all signals while it makes a thread, and then a trap
        // would end the process.
        let absent = match mode {
            Mode::Log => libc::SECCOMP_RET_ALLOW,
            Mode::On | Mode::Kill | Mode::Off => libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        };
        for number in table::ABSENT {
            code.extend([op(equal, 0, 1, *number), end(absent)]);
        }
        code.push(end(refuse));
        Self { code }
    }

    /// Installs the filter for the calling thread, which must have `no_new_privs`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn install(&self) -> io::Result<()> {
        let len = u16::try_from(self.code.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len, filter: self.code.as_ptr().cast_mut() };
        let set = libc::SECCOMP_SET_MODE_FILTER;
        let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
        // SAFETY: the kernel copies `len` instructions, which `self` owns during the call, and
        // writes nothing.
        let rc = unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Instructions for a call that is allowed with some arguments only.
fn checked(check: &Check, refuse: u32) -> Vec<libc::sock_filter> {
    let load = |argument: u32, half: u32| {
        let at = offset_of!(libc::seccomp_data, args) as u32 + argument * 8 + half * 4;
        op((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, at)
    };
    let equal = |jt, jf, k| op((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k);
    let end = |action| op((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, action);
    match check {
        Check::OneOf(argument, values) => {
            let mut code = vec![load(*argument, 0)];
            for value in values {
                code.extend([equal(0, 1, *value), end(libc::SECCOMP_RET_ALLOW)]);
            }
            code.push(end(refuse));
            code
        }
        Check::Null(argument) => vec![
            load(*argument, 0),
            equal(0, 3, 0),
            load(*argument, 1),
            equal(0, 1, 0),
            end(libc::SECCOMP_RET_ALLOW),
            end(refuse),
        ],
    }
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

thread_local! {
    /// Whether the calling thread is in the handler. A violation by the handler itself is not
    /// logged.
    static HANDLING: Cell<bool> = const { Cell::new(false) };
}

/// Numbers that are logged already, one bit each.
static LOGGED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// Installs the handler of SIGSYS, which a refused system call raises on its thread.
///
/// # Errors
/// The system's.
pub(super) fn handle_violations(mode: Mode) -> io::Result<()> {
    let handler = match mode {
        Mode::On => refuse as extern "C" fn(_, _, _),
        Mode::Kill => end,
        Mode::Log | Mode::Off => return Ok(()),
    };
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a sigaction of zeroes is valid: no flags, no blocked signals, the default handler.
    let action = unsafe { action.assume_init_mut() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_NODEFER;
    // SAFETY: `action` is valid during the call. The handler is async-signal-safe: it makes system
    // calls with memory on its stack, and uses atomics and thread locals with constant initial
    // values.
    match unsafe { libc::sigaction(libc::SIGSYS, action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn refuse(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    REFUSED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: with SA_SIGINFO the kernel passes a ucontext_t, which only this thread uses until the
    // handler returns.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let number = number(context);
    let bit = 1u64 << (number % 64);
    let first = LOGGED.get(number / 64).is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0);
    if first && !HANDLING.replace(true) {
        say(number, b"answered EPERM");
        HANDLING.set(false);
    }
    set_result(context, -i64::from(libc::EPERM));
}

extern "C" fn end(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a ucontext_t, which only this thread uses until the
    // handler returns.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    say(number(context), b"ending at once");
    // SAFETY: abort is async-signal-safe.
    unsafe { libc::abort() }
}

/// Writes one line to stderr. Allocates nothing and takes no lock, because the interrupted thread
/// may hold any lock.
fn say(number: usize, what: &[u8]) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let kind = KIND.get().name().as_bytes();
    let parts: [&[u8]; 7] = [
        b"vshunt: sandbox: a ",
        kind,
        b" thread made system call ",
        &digits[at..],
        b", which it may not: ",
        what,
        b"; please report it, --sandbox=off does without\n",
    ];
    let mut line = [0; 192];
    let mut len = 0;
    for part in parts {
        let room = part.len().min(line.len() - len);
        line[len..len + room].copy_from_slice(&part[..room]);
        len += room;
    }
    // SAFETY: `line` has at least `len` bytes and lives until the call returns.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len) };
}

#[cfg(target_arch = "x86_64")]
fn number(context: &libc::ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] as usize
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

#[cfg(target_arch = "aarch64")]
fn number(context: &libc::ucontext_t) -> usize {
    context.uc_mcontext.regs[8] as usize
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.regs[0] = result as u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> Option<i32> {
        io::Error::last_os_error().raw_os_error()
    }

    /// Checks the kernel's answers under the filter of `kind`. A child that exists against
    /// expectation ends at once.
    fn answers(kind: ThreadKind) {
        // SAFETY: the flags ask for a copy of this process, as fork does.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            // SAFETY: _exit takes no memory.
            unsafe { libc::_exit(0) };
        }
        assert_eq!((child, errno()), (-1, Some(libc::EPERM)), "{kind:?}");
        // SAFETY: the kernel has no such call here, and reads nothing.
        let rc = unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
        assert_eq!((rc, errno()), (-1, Some(libc::ENOSYS)), "{kind:?}");
        let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
        let (old, none) = (&raw mut limit, std::ptr::null_mut::<libc::rlimit64>());
        // SAFETY: the kernel writes one limit to `old`, which lives over the call.
        let rc = unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, none, old) };
        assert_eq!(rc, 0, "{kind:?}");
        // SAFETY: the kernel reads one limit, the one that is in force.
        let rc = unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, old, none) };
        assert_eq!((rc, errno()), (-1, Some(libc::EPERM)), "{kind:?}");
        // SAFETY: no memory. It asks for the state that the process has.
        let rc = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
        assert_eq!((rc, errno()), (-1, Some(libc::EPERM)), "{kind:?}");
        // SAFETY: signal 0 is no signal.
        let rc = unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
        assert_eq!((rc, errno()), (-1, Some(libc::EPERM)), "{kind:?}");
        // SAFETY: the call takes and returns numbers only.
        let own = unsafe { libc::gettid() };
        // SAFETY: signal 0 is no signal; the target is the calling thread.
        let rc = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), own, 0) };
        assert_eq!(rc, 0, "{kind:?}");
        assert_eq!(std::thread::Builder::new().name("made".into()).spawn(|| 7).unwrap().join().unwrap(), 7);
    }

    #[test]
    fn threads_are_made_and_processes_are_not() {
        handle_violations(Mode::On).unwrap();
        for kind in ThreadKind::ALL {
            let run = move || {
                rustix::thread::set_no_new_privs(true).unwrap();
                Program::new(kind, Mode::On).install().unwrap();
                answers(kind);
            };
            std::thread::spawn(run).join().unwrap();
        }
    }
}
