//! The sandbox: the capabilities, paths, system calls and io_uring operations that threads of the
//! daemon may use.
//!
//! The program calls [`start`] once, on the main thread, before it makes other threads. [`spawn`]
//! makes the threads that guests, users of mounts or scrapers talk to, and confines each of them by
//! its [`ThreadKind`]. All other threads inherit the confinement of the thread that makes them,
//! which is that of control threads. If [`start`] was not called (tests, `vshunt image`), nothing
//! is restricted.
//!
//! One thread keeps its rights: the launcher. It makes threads, and runs what a control thread may
//! not do ([`errand`]): mounting, unmounting, running fusermount3, entering a network namespace. If
//! a client names the mountpoint or the namespace, [`check_place`] first checks that its path is
//! configured or allowed.
//!
//! A control client may pass descriptors of files that are not configured. Its commands then run on
//! threads that may open these files, too ([`as_command`]).
//!
//! docs/sandbox.md says what this protects from and what it does not: threads share memory.
//!
//! ```
//! use std::thread::Builder;
//! use vshunt_sandbox::{ThreadKind, spawn};
//!
//! // Without `start` the thread is like any other.
//! let thread = spawn(ThreadKind::Worker, Builder::new().name("worker-1".into()), || 6 * 7)?;
//! assert_eq!(thread.join().unwrap(), 42);
//! # Ok::<(), std::io::Error>(())
//! ```

mod capabilities;
mod filter;
mod granted;
mod landlock;
mod launcher;
mod places;
mod table;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub use granted::{as_command, reopen, set_granted};
use landlock::Ruleset;
pub use landlock::{Granted, version as landlock_version};
pub use launcher::{detach, errand, spawn};
pub use places::check_place;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
pub use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
pub use table::{URING_FLAGS, URING_OPERATIONS, URING_REGISTRATIONS};
use vshunt_types::error::{Error, Result};

/// What happens when a thread does something that it may not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The call fails with EPERM or EACCES. The first refusal of each system call is logged.
    #[default]
    On,
    /// The call is allowed. The kernel logs system calls (SECCOMP_RET_LOG). Paths and capabilities
    /// are not restricted.
    Log,
    /// Nothing is restricted.
    Off,
    /// For tests: as `On`, also for workers, and a refused system call ends the daemon with
    /// SIGABRT.
    Kill,
}

impl Mode {
    /// All modes with their names.
    pub const ALL: [(&str, Self); 4] =
        [("on", Self::On), ("log", Self::Log), ("off", Self::Off), ("kill", Self::Kill)];

    /// The name of the mode.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }

    fn restricts(self) -> bool {
        matches!(self, Self::On | Self::Kill)
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, mode)| *mode).ok_or_else(|| format!("`{text}` is not one of on, log, off, kill"))
    }
}

/// What a thread serves. This decides what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// The operator: the main thread, control clients, jobs, and the threads that these make.
    Control,
    /// The front end of one disk.
    Session,
    /// The front end of one network device.
    NetSession,
    /// The users of one mount.
    Mount,
    /// Scrapers of metrics.
    Metrics,
    /// Queues of guests.
    Worker,
    /// Servers of disks: it connects to them.
    Remote,
    /// NBD clients, until their handshake is complete, and TLS with them.
    NbdServer,
}

impl ThreadKind {
    const ALL: [Self; 8] = [
        Self::Control,
        Self::Session,
        Self::NetSession,
        Self::Mount,
        Self::Metrics,
        Self::Worker,
        Self::Remote,
        Self::NbdServer,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Session => "session",
            Self::NetSession => "net-session",
            Self::Mount => "mount",
            Self::Metrics => "metrics",
            Self::Worker => "worker",
            Self::Remote => "remote",
            Self::NbdServer => "nbd-server",
        }
    }

    /// The capabilities of the process that the thread keeps.
    fn capabilities(self) -> CapabilitySet {
        match self {
            // Only the launcher opens the name spaces of other processes.
            Self::Control => CapabilitySet::all().difference(CapabilitySet::SYS_PTRACE),
            Self::Session => CapabilitySet::IPC_LOCK,
            // A guest's commands change the offloads, the steering and the queues of its tap.
            Self::NetSession => CapabilitySet::NET_ADMIN | CapabilitySet::BPF | CapabilitySet::IPC_LOCK,
            // It changes attributes of images that another user owns, and makes io_urings.
            Self::Mount => {
                CapabilitySet::DAC_OVERRIDE
                    | CapabilitySet::FOWNER
                    | CapabilitySet::SYS_ADMIN
                    | CapabilitySet::IPC_LOCK
            }
            // Until its io_uring is made: without these, the io_uring counts against
            // RLIMIT_MEMLOCK, and kernel.io_uring_disabled=1 refuses it.
            Self::Worker => CapabilitySet::IPC_LOCK | CapabilitySet::SYS_ADMIN,
            // The sockets of servers may belong to other users.
            Self::Remote => CapabilitySet::DAC_OVERRIDE,
            Self::Metrics | Self::NbdServer => CapabilitySet::empty(),
        }
    }
}

/// What [`start`] sets up.
#[derive(Debug)]
pub struct SandboxConfig {
    /// What happens when a thread does something that it may not.
    pub mode: Mode,
    /// Whether workers have a filter of system calls, too. It makes each system call slower.
    pub workers: bool,
    /// Capabilities that the daemon needs. It gives up all others.
    pub capabilities: CapabilitySet,
    /// What all threads except the launcher may open.
    pub paths: Vec<Rule>,
    /// Whether fusermount3 may be needed. It is a set-user-id program, so the launcher then has no
    /// `no_new_privs`.
    pub set_user_id: bool,
}

/// A path that may be used, including everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A folder or a file. If it is missing, the rule has no effect.
    pub path: PathBuf,
    /// What may be done there.
    pub access: Access,
}

/// What may be done at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading files and listing folders.
    Read,
    /// Everything that the daemon does with files.
    Write,
    /// Making sockets, removing files, listing the folder; not opening files.
    Sockets,
    /// Errands make, remove and cover mountpoints there. Other threads neither open nor make files
    /// there.
    Mounts,
}

impl Access {
    /// Whether an errand may act there for a client. `change`: it makes a file, or mounts over one.
    fn is_place(self, change: bool) -> bool {
        match self {
            Self::Write => true,
            Self::Read => !change,
            Self::Mounts => change,
            Self::Sockets => false,
        }
    }
}

/// The restrictions that are in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SandboxInfo {
    /// What happens on an access that is not allowed: `on`, `log`, `off` or `kill`.
    pub mode: Mode,
    /// The capabilities of control threads, without `CAP_`.
    pub capabilities: Vec<String>,
    /// The kinds of threads whose system calls are filtered.
    pub filtered: Vec<String>,
    /// Which threads Landlock restricts: `process`, all but the launcher; `missing`, the kernel has
    /// no Landlock; `off`.
    pub landlock: String,
    /// Whether the launcher can run the set-user-id program fusermount3.
    pub set_user_id: bool,
    /// System calls that were refused.
    pub refused: u64,
}

struct Running {
    mode: Mode,
    capabilities: CapabilitySet,
    set_user_id: bool,
    /// One for each of [`ThreadKind::ALL`]. None: no filter.
    filters: [Option<filter::Program>; 8],
    /// The paths that all threads may open.
    process: Option<Ruleset>,
    /// The rules that `process` was made of, if paths are restricted.
    rules: Option<Vec<Rule>>,
    /// Where errands may act for clients, if paths are restricted.
    places: Option<places::Places>,
    /// Files of which clients have passed descriptors.
    granted: granted::Grants,
    /// The paths that threads that serve guests may open.
    guests: Option<Ruleset>,
    launcher: launcher::Launcher,
}

impl Running {
    fn install(&self, kind: ThreadKind) -> io::Result<()> {
        self.filters[kind as usize].as_ref().map_or(Ok(()), filter::Program::install)
    }
}

/// The most open files that the process may have: systemd's default for a service.
const OPEN_FILES_MAX: u64 = 524_288;

static RUNNING: OnceLock<Running> = OnceLock::new();
/// System calls refused so far.
static REFUSED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The calling thread's kind, for messages.
    static KIND: Cell<ThreadKind> = const { Cell::new(ThreadKind::Control) };
}

/// Confines the calling thread, which must be the only one, and all later threads.
///
/// # Errors
/// The launcher cannot be made, or the kernel refuses a restriction that it supports. A kernel
/// without Landlock is no error.
pub fn start(config: SandboxConfig) -> Result<()> {
    if config.mode == Mode::Off {
        return Ok(());
    }
    let cannot = |e: io::Error| {
        Error::io(
            "cannot set up the sandbox (--sandbox=off does without it, and docs/sandbox.md has more)",
            e,
        )
    };
    if config.mode.restricts() {
        hide().map_err(cannot)?;
        limit().map_err(cannot)?;
    }
    filter::handle_violations(config.mode).map_err(cannot)?;
    let filtered = |kind| kind != ThreadKind::Worker || config.workers || config.mode == Mode::Kill;
    let filters = ThreadKind::ALL.map(|kind| filtered(kind).then(|| filter::Program::new(kind, config.mode)));
    let (mut process, mut guests) = (None, None);
    if config.mode.restricts() {
        process = Ruleset::new(&config.paths, &[]).map_err(cannot)?;
        guests = Ruleset::pinned(&table::guest_paths()).map_err(cannot)?;
    }
    let rules = config.mode.restricts().then_some(config.paths);
    let launcher = launcher::Launcher::start(config.mode, config.capabilities, config.set_user_id)?;
    let running = Running {
        mode: config.mode,
        capabilities: config.capabilities,
        set_user_id: config.set_user_id,
        filters,
        process,
        places: rules.as_deref().map(places::Places::new),
        rules,
        granted: granted::Grants::default(),
        guests,
        launcher,
    };
    if RUNNING.set(running).is_err() {
        return Err(Error::invalid("the sandbox was started twice"));
    }
    enter(ThreadKind::Control).map_err(cannot)
}

/// Keeps other processes of the same user out of this process's memory, and its memory out of core
/// files.
fn hide() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(())
}

/// Confines a process that forks the receiver processes and was itself forked before the daemon had
/// threads. It keeps no capability.
///
/// # Errors
/// The system's.
pub fn confine_spawner(mode: Mode) -> io::Result<()> {
    if mode == Mode::Off {
        return Ok(());
    }
    rustix::thread::set_no_new_privs(true)?;
    if mode.restricts() {
        hide()?;
        capabilities::keep(CapabilitySet::empty())?;
    }
    Ok(())
}

/// Confines a process that receives descriptors from front ends. It opens nothing, and makes only
/// the system calls that receiving needs. Its parent was confined by [`confine_spawner`].
///
/// # Errors
/// The system's.
pub fn confine_receiver(mode: Mode) -> io::Result<()> {
    if mode.restricts()
        && let Some(nothing) = Ruleset::new(&[], &[])?
    {
        nothing.enter()?;
    }
    match mode {
        Mode::Off => Ok(()),
        _ => filter::Program::of_receiver(mode).install(),
    }
}

/// Limits the resources of the process: no message queues, no real-time priority, and at most
/// [`OPEN_FILES_MAX`] open files. The filters let no thread raise a limit again.
fn limit() -> io::Result<()> {
    for resource in [Resource::Msgqueue, Resource::Rtprio] {
        setrlimit(resource, Rlimit { current: Some(0), maximum: Some(0) })?;
    }
    let files = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let below = |limit: Option<u64>| Some(limit.map_or(OPEN_FILES_MAX, |limit| limit.min(OPEN_FILES_MAX)));
    setrlimit(Resource::Nofile, Rlimit { current: below(files.current), maximum: below(files.maximum) })?;
    Ok(())
}

/// Confines the calling thread. This cannot be undone.
fn enter(kind: ThreadKind) -> io::Result<()> {
    let Some(running) = RUNNING.get() else { return Ok(()) };
    // Rulesets add up, and a thread inherits those of the thread that made it.
    let ruleset = match kind {
        ThreadKind::Control => running.process.as_ref(),
        _ => running.guests.as_ref(),
    };
    enter_under(running, kind, ruleset)
}

/// Confines the calling thread to the files of `ruleset`. This cannot be undone.
fn enter_under(running: &Running, kind: ThreadKind, ruleset: Option<&Ruleset>) -> io::Result<()> {
    KIND.set(kind);
    rustix::thread::set_no_new_privs(true)?;
    if running.mode.restricts() {
        ruleset.map_or(Ok(()), Ruleset::enter)?;
        capabilities::keep(running.capabilities & kind.capabilities())?;
    }
    match kind {
        ThreadKind::Worker => Ok(()),
        _ => running.install(kind),
    }
}

/// Last step of a worker's confinement, after it has made its io_uring: it makes no other one, and
/// keeps no capability.
///
/// # Errors
/// The system's.
pub fn ring_is_made() -> io::Result<()> {
    let Some(running) = RUNNING.get() else { return Ok(()) };
    if running.mode.restricts() {
        capabilities::keep(CapabilitySet::empty())?;
    }
    running.install(ThreadKind::Worker)
}

/// Whether io_urings must refuse operations that the daemon does not use.
pub fn restricts_rings() -> bool {
    RUNNING.get().is_some_and(|running| running.mode.restricts())
}

/// Whether control threads may open only what is configured, allowed or granted.
pub fn bounds_paths() -> bool {
    RUNNING.get().is_some_and(|running| running.process.is_some())
}

/// Number of system calls refused so far.
pub fn refused() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// The restrictions in force.
pub fn info() -> SandboxInfo {
    let Some(running) = RUNNING.get() else {
        return SandboxInfo {
            mode: Mode::Off,
            capabilities: capabilities::names(capabilities::own()),
            filtered: Vec::new(),
            landlock: "off".into(),
            set_user_id: true,
            refused: 0,
        };
    };
    let filtered = ThreadKind::ALL.iter().zip(&running.filters).filter(|(_, filter)| filter.is_some());
    let landlock = match running.process {
        Some(_) => "process",
        None if running.mode == Mode::Log => "off",
        None => "missing",
    };
    SandboxInfo {
        mode: running.mode,
        capabilities: capabilities::names(capabilities::own()),
        filtered: filtered.map(|(kind, _)| kind.name().to_owned()).collect(),
        landlock: landlock.into(),
        set_user_id: running.set_user_id,
        refused: refused(),
    }
}
