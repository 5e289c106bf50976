//! Filters of system calls (seccomp(2)): made from the table, installed by each thread when it begins.

use std::cell::Cell;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{KIND, Mode, REFUSED, ThreadKind, table};

/// AUDIT_ARCH_* of linux/audit.h: system calls of another architecture have other numbers.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Numbers that a message can be given once for; larger ones are counted only.
const NUMBERS: usize = 512;

/// A filter that can be installed.
pub(super) struct Program {
    code: Vec<libc::sock_filter>,
}

impl Program {
    /// The filter of threads of this kind.
    pub(super) fn new(kind: ThreadKind, mode: Mode) -> Self {
        // The handler of SIGSYS logs what is refused, then answers EPERM or ends the process.
        Self::of(&table::allowed(kind), mode, libc::SECCOMP_RET_TRAP)
    }

    /// The filter of a process that receives descriptors: what is refused ends it.
    pub(super) fn of_receiver(mode: Mode) -> Self {
        Self::of(table::RECEIVER, mode, libc::SECCOMP_RET_KILL_PROCESS)
    }

    /// A filter that allows system calls of these numbers. `refuse`: what becomes of others, where the mode refuses them.
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
        // No arguments are looked at: the kernel then keeps each answer in a bitmap and does not run the program.
        for number in allowed {
            code.extend([op(equal, 0, 1, *number), end(libc::SECCOMP_RET_ALLOW)]);
        }
        code.push(end(refuse));
        Self { code }
    }

    /// Puts the calling thread under the filter. Needs `no_new_privs`.
    pub(super) fn install(&self) -> io::Result<()> {
        let len = u16::try_from(self.code.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len, filter: self.code.as_ptr().cast_mut() };
        let set = libc::SECCOMP_SET_MODE_FILTER;
        let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
        // SAFETY: the kernel copies `len` instructions, which live over the call, and writes nothing.
        let rc = unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

thread_local! {
    /// Whether the calling thread is in the handler: a violation of its own is answered without a message.
    static HANDLING: Cell<bool> = const { Cell::new(false) };
}

/// Numbers of which a message was written, a bit each.
static SAID: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// Catches SIGSYS, which a refused system call raises on its thread.
pub(super) fn handle_violations(mode: Mode) -> io::Result<()> {
    let handler = match mode {
        Mode::On => refuse as extern "C" fn(_, _, _),
        Mode::Kill => end,
        Mode::Log | Mode::Off => return Ok(()),
    };
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all bytes zero is a valid sigaction: no flags, no signals, and the handler is set before it is used.
    let action = unsafe {
        let action = action.assume_init_mut();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_NODEFER;
        action
    };
    // SAFETY: the handler makes system calls on its own stack alone, touches atomics and constant-initialised thread
    // locals, and leaves errno to the interrupted call's result.
    match unsafe { libc::sigaction(libc::SIGSYS, action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn refuse(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    REFUSED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the kernel passes a ucontext_t with SA_SIGINFO; it is this thread's alone until the handler returns.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let number = number(context);
    let bit = 1u64 << (number % 64);
    let first = SAID.get(number / 64).is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0);
    if first && !HANDLING.replace(true) {
        say(number, b"answered EPERM");
        HANDLING.set(false);
    }
    set_result(context, -i64::from(libc::EPERM));
}

extern "C" fn end(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as in `refuse`.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    say(number(context), b"ending at once");
    // SAFETY: may be called in a handler.
    unsafe { libc::abort() }
}

/// Writes one line to stderr. It allocates nothing and takes no lock: the thread may hold any.
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
    // SAFETY: the line lives over the call.
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
