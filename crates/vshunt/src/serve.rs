//! Start and end of the daemon. Runs on the main thread.
//!
//! Steps of the start:
//!
//! | step | action |
//! | --- | --- |
//! | 1 | block signals, raise the limit of open files, fork the receivers of descriptors |
//! | 2 | take inherited sockets |
//! | 3 | bind the control socket and the socket for metrics |
//! | 4 | remove mounts of a killed daemon, start the sandbox |
//! | 5 | make the daemon and bind its events |
//! | 6 | add disks, networks, workers and exports, write the pidfile |
//! | 7 | accept control clients and scrapers |
//! | 8 | notify the service manager |
//!
//! Steps of the end:
//!
//! | step | action |
//! | --- | --- |
//! | 1 | notify the service manager and the clients; scrapers get no more answers |
//! | 2 | remove exports and workers |
//! | 3 | remove the sockets and the pidfile |
//! | 4 | close the connections |
//!
//! When a client sees the end of its connection, all resources are released. An error during the
//! start releases what was set up before it.

mod activation;
mod confine;
mod ending;
pub(crate) mod log;
pub(crate) mod paste;
pub(crate) mod signals;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use vshunt_daemon::{ATTACH_TIMEOUT, DEFAULT_POLL_US, Daemon, Event, Options, check_one_place};
use vshunt_sandbox as sandbox;
use vshunt_tap as tap;
use vshunt_types::error::{Error, Kind, Result};
use vshunt_vhost_user as vhost_user;

use self::activation::Inherited;
use crate::config::args::LogArgs;
use crate::config::file::AttachSpec;
use crate::config::{Control, Setup, control_path};
use crate::keyval;
use crate::metrics::Metrics;
use crate::outcome::{Failure, Outcome, print};
use crate::qmp::{Context, ControlSocket, Server, Startup, Stop, events};

/// The worker that always exists.
const FIRST_WORKER: u32 = 0;

/// The remedy if a socket or file whose path follows from the name of an image is in use.
const OTHER_PLACE: &str = "give the image another name, or --disk file=IMAGE and --export with socket=PATH";

/// What differs between `vshunt serve`, `vshunt-blk` and `vshunt-net`.
pub(crate) struct ServeOptions {
    /// The name of the program in messages.
    pub(crate) program: &'static str,
    pub(crate) log: LogArgs,
    /// The daemon ends when this export has been deleted, because its only connection has ended.
    pub(crate) ends_with: Option<String>,
    /// Returns the remedy for images without keys if another daemon answers at the default control
    /// socket: the end of the error, and further lines.
    pub(crate) if_running: fn(&Setup) -> (String, Vec<String>),
}

/// Serves `setup` until a signal, `quit` or the end of the export [`ServeOptions::ends_with`].
pub(crate) fn serve(setup: Setup, options: &ServeOptions) -> Outcome {
    // First, because the number of a descriptor that was not passed could soon belong to a file
    // that the daemon opens.
    check_fds(&setup)?;
    let blocked = signals::block()?;
    signals::ignore_terminal();
    log::start(options.program, options.log, setup.log_format)?;
    setup.notes.iter().for_each(|note| tracing::warn!("{note}"));
    let ready = paste::text(&setup, options.log.quiet);
    let (stop, stopped) = channel();
    raise_file_limit();
    // Before other threads exist, because a forked process would not have them. Also before the
    // sockets are bound: if the daemon were killed before the new process has closed its copies of
    // them, its successor would find them in use.
    let _receivers = vhost_user::start_receivers(setup.sandbox.mode.unwrap_or_default())?;
    let mut inherited = activation::take()?;
    let sockets = Sockets::bind(&setup, &mut inherited, options)?;
    // The sandbox opens images and mountpoints by their paths. A dead mount would hide them.
    let mountpoints = setup.exports.iter().filter_map(|export| export.mountpoint.as_deref());
    let watch = signals::watch(&blocked)?;
    Daemon::take_over(mountpoints, &setup.disks)?;
    let plan = confine::plan(&setup, sockets.control.is_some());
    drop(watch);
    // Threads that start later inherit the restrictions of this one.
    sandbox::start(plan)?;
    signals::forward(blocked, stop.clone(), signals::Process::Daemon)?;
    let mut serving = Serving::set_up(setup, inherited, sockets, options, stop)?;
    print_aside(ready);
    serving.announce(options);
    let reason = wait(&stopped);
    tracing::info!(?reason, "ending");
    serving.take_down(reason);
    Ok(())
}

/// How long the lines for users may take. Normally they are written at once.
const PRINT_TIME: Duration = Duration::from_secs(1);

/// Prints the lines for users on a thread of its own. A reader of stdout that reads nothing, or has
/// ended, is no reason to serve nothing, to ignore signals, or to end. The thread ends with the
/// process at the latest.
fn print_aside(text: String) {
    let (printed, is_printed) = channel();
    let run = move || {
        let _ = print(&text);
        let _ = printed.send(());
    };
    if let Err(e) = std::thread::Builder::new().name("stdout".into()).spawn(run) {
        tracing::warn!("cannot start the thread that writes to stdout: {e}");
    } else if is_printed.recv_timeout(PRINT_TIME) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!("nothing reads stdout, so the lines to paste are not shown yet; -q leaves them out");
    }
}

/// Raises the limit of open files to the hard limit. The soft limit is low only for programs that
/// use select(2).
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum
        && let Err(e) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }
}

fn check_fds(setup: &Setup) -> Outcome {
    let exports: Vec<_> = setup.exports.iter().filter_map(|e| e.fd).collect();
    exports.iter().try_for_each(|fd| activation::check_fd(*fd))?;
    let mut seen = exports;
    if let Some(twice) = twice(&seen) {
        return Err(Failure::Usage(format!("fd {twice} is given to two exports; each needs its own")));
    }
    for fds in setup.nets.iter().filter_map(|net| net.fd.as_deref()) {
        let fds = tap::parse_fds(fds)?;
        fds.iter().try_for_each(|fd| activation::check_open(*fd))?;
        seen.extend(fds);
    }
    match twice(&seen) {
        Some(fd) => {
            Err(Failure::Usage(format!("fd {fd} is given twice; each network and export needs its own")))
        }
        None => Ok(()),
    }
}

/// Returns a number that occurs twice, if there is one.
fn twice(fds: &[i32]) -> Option<i32> {
    fds.iter().enumerate().find(|(at, fd)| fds[..*at].contains(fd)).map(|(_, fd)| *fd)
}

fn wait(stopped: &Receiver<Stop>) -> Stop {
    // The signal thread keeps a sender until the process ends.
    stopped.recv().unwrap_or(Stop::Quit)
}

/// The sockets that clients connect to. They are bound before the sandbox starts, because a port
/// below 1024 needs a capability.
struct Sockets {
    control: Option<ControlSocket>,
    metrics: Option<Metrics>,
    /// The service manager passed the socket for metrics.
    metrics_passed: bool,
}

impl Sockets {
    fn bind(setup: &Setup, inherited: &mut Vec<Inherited>, options: &ServeOptions) -> Outcome<Self> {
        let control = control_socket(setup, inherited, options)?;
        let passed = activation::take_metrics(inherited);
        let metrics_passed = passed.is_some();
        let metrics = match (passed, &setup.metrics) {
            (Some(fd), _) => Some(Metrics::inherited(fd)?),
            (None, Some(address)) => Some(Metrics::bind(address)?),
            (None, None) => None,
        };
        Ok(Self { control, metrics, metrics_passed })
    }
}

struct Serving {
    daemon: Arc<Daemon>,
    server: Server,
    control: Option<ControlSocket>,
    metrics: Option<Metrics>,
    pidfile: Option<Pidfile>,
    down: bool,
}

impl Serving {
    fn set_up(
        mut setup: Setup,
        mut inherited: Vec<Inherited>,
        Sockets { control, metrics, metrics_passed }: Sockets,
        options: &ServeOptions,
        stop: Sender<Stop>,
    ) -> Outcome<Self> {
        activation::give_to_exports(&mut inherited, &mut setup.exports);
        for export in &setup.exports {
            check_one_place(export).map_err(|e| Failure::Usage(e.to_string()))?;
        }
        let daemon = Daemon::new(Options { poll_us: setup.poll_us.unwrap_or(DEFAULT_POLL_US) })?;
        ending::know(&daemon);
        let startup =
            Startup::new(&setup, control.as_ref().is_some_and(ControlSocket::is_inherited), metrics_passed);
        let context = Context {
            daemon: Arc::clone(&daemon),
            stop: stop.clone(),
            fdsets: Arc::default(),
            startup: Arc::new(startup),
        };
        let server = Server::new(context)?;
        bind_events(&daemon, &server, stop, options.ends_with.clone());
        let mut serving = Self { daemon, server, control, metrics, pidfile: None, down: false };
        serving.daemon.balance_set(None, setup.balance)?;
        serving.fill(setup)?;
        if let Some(control) = &serving.control {
            let listener = control.listener().map_err(|e| Error::io("cannot use the control socket", e))?;
            serving.server.listen(listener)?;
        }
        if let Some(metrics) = &mut serving.metrics {
            metrics.start(Arc::clone(&serving.daemon))?;
        }
        Ok(serving)
    }

    fn fill(&mut self, setup: Setup) -> Result<()> {
        for disk in setup.disks {
            self.daemon.disk_add(disk)?;
        }
        self.daemon.sweep_journals();
        for net in setup.nets {
            self.daemon.net_add(net)?;
        }
        // A worker of kind `kernel` belongs to an export. The others are made first, so that lists
        // show them in the order given.
        let (of_exports, workers): (Vec<_>, Vec<_>) =
            setup.workers.into_iter().partition(|w| w.export.is_some());
        for worker in workers {
            self.daemon.worker_new(worker)?;
        }
        for export in setup.exports {
            let of_image = setup.images.contains(&export.name);
            self.daemon.export_add(export).map_err(|e| match e.kind() {
                // The user has not chosen the path.
                Kind::Busy if of_image => Error::busy(format!("{e}: {OTHER_PLACE}")),
                _ => e,
            })?;
        }
        for worker in of_exports {
            self.daemon.worker_new(worker)?;
        }
        if let Some(first) = setup.first_worker {
            self.daemon.worker_set(FIRST_WORKER, first)?;
        }
        setup.attach.iter().try_for_each(|attach| self.attach(attach))?;
        self.pidfile = setup.pidfile.map(Pidfile::write).transpose()?;
        Ok(())
    }

    /// Moves queues to the worker that the configuration names.
    fn attach(&self, AttachSpec { queues, worker }: &AttachSpec) -> Result<()> {
        let workers = self.daemon.workers();
        let mut named = workers.iter().filter(|w| w.name == *worker).map(|w| w.id);
        let id = match (keyval::whole(worker), named.next(), named.next()) {
            (Some(id), ..) => id,
            (None, Some(id), None) => id,
            (None, None, _) => return Err(Error::not_found(format!("there is no worker {worker}"))),
            _ => {
                return Err(Error::invalid(format!(
                    "several workers are named {worker}; give one another name"
                )));
            }
        };
        let all = self.daemon.queues();
        let is_meant = |index: &u16| queues.indices.as_ref().is_none_or(|indices| indices.contains(index));
        let found = all.iter().filter(|queue| queue.export == queues.export).map(|queue| queue.index);
        let found: Vec<u16> = found.filter(is_meant).collect();
        if let Some(missing) =
            queues.indices.clone().and_then(|mut wanted| wanted.find(|i| !found.contains(i)))
        {
            return Err(Error::not_found(format!("export {} has no queue {missing}", queues.export)));
        }
        found
            .into_iter()
            .try_for_each(|index| self.daemon.queue_attach(&queues.export, index, id, ATTACH_TIMEOUT))
    }

    /// Reports to the service manager and on stderr that the daemon is ready, and where it serves.
    /// If it serves nothing, the message names the missing commands.
    fn announce(&self, options: &ServeOptions) {
        let exports: Vec<String> = self.daemon.exports().iter().map(where_served).collect();
        let mut text = match exports.is_empty() {
            true => "serving nothing yet".to_owned(),
            false => format!("serving {}", exports.join(", ")),
        };
        if let Some(control) = &self.control {
            text.push_str(&format!(", control on {}", control.shown()));
        }
        if let Some(metrics) = &self.metrics {
            text.push_str(&format!(", metrics on {}", metrics.shown()));
        }
        if exports.is_empty() {
            text.push_str("; `vshunt disk add` and `vshunt export add` give it something");
        }
        notify(&[NotifyState::Ready, NotifyState::Status(&text)]);
        if !options.log.quiet {
            log::notice(options.program, &text);
        }
    }

    fn take_down(&mut self, reason: Stop) {
        self.down = true;
        ending::begin();
        notify(&[NotifyState::Stopping, NotifyState::Status("ending")]);
        self.server.broadcast(events::shutdown_line(reason));
        if let Some(metrics) = &self.metrics {
            metrics.close();
        }
        let left = self.daemon.shutdown();
        // Waits for a scrape in progress, so that no thread uses a disk any more.
        self.metrics = None;
        if let Some(control) = &mut self.control {
            control.remove();
        }
        self.pidfile = None;
        self.server.stop();
        if !left.is_empty() {
            // Their workers and disks wait for storage that does not answer.
            ending::without(&left);
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.down {
            ending::begin();
            self.daemon.shutdown();
        }
    }
}

fn where_served(export: &vshunt_types::spec::ExportInfo) -> String {
    let name = &export.spec.name;
    match export.spec.place() {
        Some(place) => format!("{name} on {place}"),
        None => name.clone(),
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(states) {
        tracing::debug!("cannot tell the service manager: {e}");
    }
}

fn bind_events(daemon: &Daemon, server: &Server, stop: Sender<Stop>, ends_with: Option<String>) {
    let server = server.clone();
    daemon.on_event(Box::new(move |event| {
        server.broadcast(events::line(event));
        if let Event::ExportDeleted { name } = event
            && ends_with.as_ref() == Some(name)
        {
            let _ = stop.send(Stop::PeerGone);
        }
    }));
}

fn control_socket(
    setup: &Setup,
    inherited: &mut Vec<Inherited>,
    options: &ServeOptions,
) -> Outcome<Option<ControlSocket>> {
    let path = match &setup.control {
        Control::Off => return Ok(None),
        Control::At(path) => Some(path.clone()),
        Control::Default | Control::IfFree => control_path(None),
    };
    if let Some(fd) = activation::take_control(inherited, path.as_deref()) {
        if let Some(key) = setup.control_access.first_key() {
            return Err(Failure::Usage(format!(
                "the control socket is passed to the daemon, so --control-{key} has no effect; leave it out, and let \
                 its maker set it (systemd: SocketUser=, SocketGroup=, SocketMode=)"
            )));
        }
        return Ok(Some(ControlSocket::inherited(fd)));
    }
    match path.as_deref().map(|path| ControlSocket::bind(path, &setup.control_access)) {
        Some(Ok(socket)) => Ok(Some(socket)),
        Some(Err(e)) if e.kind() == Kind::Busy && setup.control == Control::IfFree => {
            tracing::warn!("no control socket: {e}");
            Ok(None)
        }
        Some(Err(e)) if e.kind() == Kind::Busy && setup.control == Control::Default => {
            let (more, commands) = (options.if_running)(setup);
            let lines = std::iter::once(format!("{e}{more}")).chain(commands).collect();
            Err(Failure::Lines(Failure::Failed(String::new()).code(), lines))
        }
        Some(Err(e)) => Err(e.into()),
        None if setup.control == Control::IfFree => Ok(None),
        None => Err(Failure::Usage(
            "no place for the control socket (XDG_RUNTIME_DIR is not set, or relative); \
             give --control SOCKET or --no-control"
                .into(),
        )),
    }
}

/// A pidfile that is removed when the daemon ends. Errands write and remove it, so that no thread
/// needs the permission to change its folder.
struct Pidfile(PathBuf);

impl Pidfile {
    fn write(path: PathBuf) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot write pidfile {}", path.display()), e);
        sandbox::errand(|| write_pid(&path)).and_then(|written| written).map_err(failed)?;
        Ok(Self(path))
    }
}

fn write_pid(path: &std::path::Path) -> std::io::Result<()> {
    std::fs::write(path, format!("{}\n", std::process::id()))
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        let _ = sandbox::errand(|| std::fs::remove_file(&self.0));
    }
}
