//! The table of the sandbox: what each kind of thread may do.
//!
//! A system call that is missing here is logged as "a session thread made system call 101"
//! (`ausyscall 101` names it), and ends the daemon with `--sandbox=kill`. Add it to the smallest
//! group that needs it, with the reason.

use std::path::PathBuf;

use io_uring::opcode;

use super::{Access, Rule, ThreadKind};

/// Lists system calls by their names in libc, as numbers.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name as u32),*] };
}

/// All threads: memory, threads, time, and I/O on descriptors that are open already.
const ALL: &[u32] = calls! {
    // The calls of data paths come first: a kernel without the bitmap of actions runs the filter in
    // this order.
    SYS_io_uring_enter SYS_preadv2 SYS_pwritev2 SYS_readv SYS_writev SYS_read SYS_write SYS_futex
    SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_fdatasync SYS_fsync SYS_fallocate
    SYS_io_uring_register SYS_close SYS_dup SYS_dup3 SYS_fcntl SYS_ioctl SYS_lseek SYS_fstat SYS_fstatfs SYS_ppoll
    SYS_eventfd2 SYS_mmap SYS_munmap SYS_mprotect SYS_mremap SYS_madvise SYS_brk SYS_membarrier
    SYS_clone SYS_set_robust_list SYS_set_tid_address SYS_rseq SYS_exit SYS_exit_group SYS_sched_yield
    SYS_sched_getaffinity SYS_getcpu SYS_gettid SYS_getpid SYS_tgkill SYS_restart_syscall
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigtimedwait SYS_sigaltstack SYS_prctl
    SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_getrandom SYS_getrusage
    // Memory allocation reads /proc/sys/vm/overcommit_memory. Landlock decides which files can be
    // opened.
    SYS_openat SYS_readlinkat SYS_newfstatat SYS_statx SYS_getcwd SYS_uname SYS_prlimit64
    // A thread whose queue has ended examines the socket.
    SYS_getsockopt SYS_getsockname SYS_getpeername SYS_shutdown
    // A call descriptor can be a socket (User-mode Linux).
    SYS_sendto
};

/// Calls that only x86-64 has. Other architectures have the newer calls only.
#[cfg(target_arch = "x86_64")]
const ALL_OLD: &[u32] =
    calls! { SYS_poll SYS_readlink SYS_stat SYS_lstat SYS_open SYS_dup2 SYS_time SYS_arch_prctl };
#[cfg(not(target_arch = "x86_64"))]
const ALL_OLD: &[u32] = &[];

/// The call by which musl sends a signal to a thread. glibc uses tgkill(2), whose arguments are
/// checked. Those of tkill(2) cannot be.
#[cfg(target_env = "musl")]
const ALL_LIBC: &[u32] = calls! { SYS_tkill };
#[cfg(not(target_env = "musl"))]
const ALL_LIBC: &[u32] = &[];

/// I/O on sockets that are open, and pairs of connected sockets.
const SOCKETS: &[u32] = calls! {
    SYS_recvmsg SYS_sendmsg SYS_recvfrom SYS_accept4 SYS_accept SYS_setsockopt SYS_socketpair
};

/// The session of a front end: io_urings, guest memory, settings of the kernel's workers.
const SESSION: &[u32] = calls! {
    SYS_io_uring_setup SYS_memfd_create SYS_ftruncate SYS_statfs SYS_pipe2 SYS_getdents64 SYS_faccessat SYS_faccessat2
    SYS_sched_setaffinity SYS_sched_setscheduler SYS_getpriority SYS_setpriority
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_fadvise64
};

/// The session of a network device has these, too: settings of taps by sockets, and programs for
/// their steering.
const NET_SESSION: &[u32] = calls! { SYS_socket SYS_bind SYS_connect SYS_bpf SYS_kcmp };

/// The blocking thread of a mount: attributes and sizes of images, holes, io_urings of its own.
const MOUNT: &[u32] = calls! {
    SYS_io_uring_setup SYS_ftruncate SYS_utimensat SYS_statfs SYS_getuid SYS_geteuid SYS_getgid SYS_getegid
    SYS_memfd_create SYS_pipe2 SYS_getdents64 SYS_faccessat SYS_faccessat2 SYS_fadvise64
    SYS_getpriority SYS_setpriority SYS_sched_setaffinity SYS_sched_setscheduler
};

/// The metrics thread: it reads settings of workers.
const METRICS: &[u32] = calls! { SYS_getpriority SYS_getdents64 SYS_getuid SYS_geteuid };

/// The thread that connects to the server of a disk. It opens no file.
const REMOTE: &[u32] = calls! { SYS_socket SYS_connect };

/// The threads of an NBD server: connections, TLS, and the map of an image. They open no file and
/// make no socket but pairs of connected ones.
const NBD_SERVER: &[u32] = calls! { SYS_accept4 SYS_recvfrom SYS_setsockopt SYS_socketpair };

/// Control threads: files and sockets. Left out are calls that make or signal processes (fork,
/// execve, kill, wait4, pidfd_*), and those that change what the process is or reach into others
/// (mount, setns, unshare, setuid and the like, ptrace, process_vm_*, keyctl, perf_event_open,
/// userfaultfd, init_module, kexec, reboot, swapon, personality, chroot). An errand does those of
/// them that are needed.
const CONTROL: &[u32] = calls! {
    SYS_io_uring_setup SYS_openat2 SYS_unlinkat SYS_renameat SYS_renameat2
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_utimensat SYS_truncate SYS_ftruncate SYS_faccessat SYS_faccessat2
    SYS_getdents64 SYS_statfs SYS_flock SYS_copy_file_range SYS_fadvise64 SYS_memfd_create SYS_pipe2
    SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_setxattr SYS_fsetxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr
    SYS_socket SYS_bind SYS_listen SYS_connect SYS_bpf SYS_kcmp
    SYS_getpriority SYS_setpriority SYS_sched_setaffinity SYS_sched_setscheduler SYS_sched_getscheduler
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_capget SYS_get_robust_list
    // A journal names its image by its handle.
    SYS_name_to_handle_at
    // The C library asks for the addresses of a host by several messages at once.
    SYS_sendmmsg
};

#[cfg(target_arch = "x86_64")]
const CONTROL_OLD: &[u32] = calls! { SYS_unlink SYS_rename SYS_chmod SYS_access SYS_pipe SYS_getrlimit };
#[cfg(not(target_arch = "x86_64"))]
const CONTROL_OLD: &[u32] = &[];

/// A process that receives descriptors: it examines them, passes some on, and closes them.
pub(super) const RECEIVER: &[u32] = calls! {
    SYS_recvmsg SYS_sendmsg SYS_close SYS_shutdown SYS_fcntl SYS_getsockopt SYS_readlinkat
    SYS_mmap SYS_munmap SYS_mremap SYS_madvise SYS_brk SYS_futex SYS_rt_sigreturn SYS_restart_syscall SYS_exit_group
};

/// Calls that fail with ENOSYS, so that the C library makes the older call. The arguments of
/// clone3(2) are in memory, which a filter cannot read.
pub(super) const ABSENT: &[u32] = calls! { SYS_clone3 };

/// A condition on an argument of an allowed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// The lower half of this argument is one of these values. The kernel ignores the upper half
    /// there.
    OneOf(u32, Vec<u32>),
    /// This argument is a null pointer.
    Null(u32),
}

/// The flags with which glibc makes a thread. musl adds CLONE_DETACHED, which has no effect. No new
/// name space, no signal at the end, and the parts of the process are shared.
const THREAD: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as u32;

/// PR_SET_VMA of linux/prctl.h: names of memory areas.
const PR_SET_VMA: u32 = 0x5356_4d41;

/// The condition on the arguments of a call. None: any arguments are allowed.
pub(super) fn check(number: u32) -> Option<Check> {
    Some(match libc::c_long::from(number) {
        libc::SYS_clone => Check::OneOf(0, vec![THREAD, THREAD | libc::CLONE_DETACHED as u32]),
        // Reads a limit only.
        libc::SYS_prlimit64 => Check::Null(2),
        // Names a thread or a memory area.
        libc::SYS_prctl => {
            Check::OneOf(0, vec![libc::PR_SET_NAME as u32, libc::PR_GET_NAME as u32, PR_SET_VMA])
        }
        // Signals a thread of this process only.
        libc::SYS_tgkill => Check::OneOf(0, vec![std::process::id()]),
        _ => return None,
    })
}

/// Numbers of the system calls that threads of this kind may make.
pub(super) fn allowed(kind: ThreadKind) -> Vec<u32> {
    let groups: &[&[u32]] = match kind {
        ThreadKind::Control => &[SOCKETS, CONTROL, CONTROL_OLD],
        ThreadKind::Session => &[SOCKETS, SESSION],
        ThreadKind::NetSession => &[SOCKETS, SESSION, NET_SESSION],
        ThreadKind::Mount => &[SOCKETS, MOUNT],
        ThreadKind::Metrics => &[SOCKETS, METRICS],
        ThreadKind::Worker => &[],
        ThreadKind::Remote => &[SOCKETS, REMOTE],
        ThreadKind::NbdServer => &[NBD_SERVER],
    };
    [ALL, ALL_OLD, ALL_LIBC, &groups.concat()].concat()
}

/// The paths that threads that serve guests may open: the kernel's files about this process, about
/// memory policy, CPUs and modules, and the vhost devices.
pub(super) fn guest_paths() -> Vec<Rule> {
    let rule = |(path, access): (&str, Access)| Rule { path: PathBuf::from(path), access };
    [
        ("/proc/self", Access::Read),
        ("/proc/sys/vm/overcommit_memory", Access::Read),
        ("/sys/devices/system/cpu", Access::Read),
        ("/sys/module", Access::Read),
        ("/dev/vhost-net", Access::Write),
        ("/dev/vhost-blk", Access::Write),
    ]
    .map(rule)
    .into()
}

/// Operations that io_urings accept; all others complete with EACCES. A filter of system calls does
/// not see them.
pub const URING_OPERATIONS: [u8; 20] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::SyncFileRange::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::Timeout::CODE,
    opcode::TimeoutRemove::CODE,
    opcode::AsyncCancel::CODE,
    opcode::MsgRingData::CODE,
    opcode::UringCmd16::CODE,
    // Connections to servers of disks, and those of NBD clients.
    opcode::SendMsg::CODE,
    opcode::RecvMsg::CODE,
    opcode::Recv::CODE,
];

/// Registrations that an io_uring accepts after it was made (IORING_REGISTER_* of
/// linux/io_uring.h): files, the number of threads of io-wq, cancelling.
pub const URING_REGISTRATIONS: [u8; 6] = [2, 3, 6, 14, 19, 24];

/// Flags of operations: IOSQE_FIXED_FILE, IO_DRAIN, IO_LINK, IO_HARDLINK, ASYNC, CQE_SKIP_SUCCESS.
pub const URING_FLAGS: u8 = 1 | 2 | 4 | 8 | 16 | 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_may_change_what_the_process_is_or_reach_into_others() {
        let never = calls! {
            SYS_execve SYS_execveat SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_mount SYS_umount2
            SYS_pivot_root SYS_chroot SYS_setns SYS_unshare SYS_setuid SYS_setgid SYS_setresuid SYS_setresgid SYS_setgroups
            SYS_init_module SYS_finit_module SYS_kexec_load SYS_perf_event_open SYS_keyctl SYS_add_key SYS_userfaultfd
            SYS_personality SYS_reboot SYS_swapon SYS_open_by_handle_at SYS_seccomp
            SYS_clone3 SYS_wait4 SYS_waitid SYS_kill SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_pidfd_open
            SYS_pidfd_send_signal SYS_pidfd_getfd SYS_setrlimit SYS_capset
        };
        for kind in ThreadKind::ALL {
            let allowed = allowed(kind);
            assert!(!never.iter().any(|number| allowed.contains(number)), "{kind:?}");
        }
    }

    #[test]
    fn sessions_of_disks_have_no_calls_for_networks() {
        let disk = allowed(ThreadKind::Session);
        assert!(!disk.iter().any(|number| NET_SESSION.contains(number)));
        let net = allowed(ThreadKind::NetSession);
        assert!(disk.iter().chain(NET_SESSION).all(|number| net.contains(number)));
    }

    #[test]
    fn workers_may_do_least_and_make_no_rings() {
        let worker = allowed(ThreadKind::Worker);
        assert!(!worker.contains(&(libc::SYS_io_uring_setup as u32)));
        for kind in ThreadKind::ALL {
            assert!(worker.iter().all(|number| allowed(kind).contains(number)), "{kind:?}");
        }
    }
}
