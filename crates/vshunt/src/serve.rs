//! The daemon's life: set up, serve, take down. Runs on the main thread.
//!
//! Set-up: 1 block signals, raise the limit of open files, 2 take inherited sockets, 3 hold the
//! control socket and the one for metrics, 4 take away mounts that a killed daemon left, start the
//! sandbox, 5 make the daemon and bind its events, 6 disks, networks, workers, exports, 7 accept
//! control clients and scrapers, 8 pidfile, tell the service manager. The end: 1 tell the service
//! manager and clients, scrapers get no more answers, 2 remove exports and workers, 3 remove the
//! sockets and the pidfile, 4 close connections. A client that sees its connection end finds
//! nothing left. An error in set-up takes down what was set up before it.

mod activation;
mod confine;
mod log;
mod signals;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use vshunt_daemon::{DEFAULT_POLL_US, Daemon, Event, Options, check_one_place};
use vshunt_sandbox as sandbox;
use vshunt_tap as tap;
use vshunt_types::error::{Error, Result};
use vshunt_vhost_user as vhost_user;

use self::activation::Inherited;
use crate::config::args::LogArgs;
use crate::config::{Control, Setup, control_path};
use crate::metrics::Metrics;
use crate::outcome::{Failure, Outcome};
use crate::qmp::{Context, ControlSocket, Server, Stop, events};

/// What differs between `vshunt serve`, `vshunt-blk` and `vshunt-net`.
pub(crate) struct Manner {
    /// Name in messages.
    pub(crate) program: &'static str,
    pub(crate) log: LogArgs,
    /// End when this export has been deleted: its one connection has.
    pub(crate) ends_with: Option<String>,
}

/// Serves `setup` until told to stop.
pub(crate) fn serve(setup: Setup, manner: &Manner) -> Outcome {
    // First of all: a descriptor that was not passed could be one of our own a moment later.
    check_fds(&setup)?;
    let blocked = signals::block()?;
    log::start(manner.program, manner.log.verbose, manner.log.quiet);
    let (stop, stopped) = channel();
    raise_file_limit();
    // Before there are other threads, which a forked process would not have. And before the sockets
    // are bound: if the daemon were killed before the new process has closed its copies of them, its
    // successor would find them in use.
    vhost_user::start_receivers(setup.sandbox.mode.unwrap_or_default())?;
    let mut inherited = activation::take()?;
    let sockets = Sockets::bind(&setup, &mut inherited)?;
    // The sandbox looks at images and mountpoints by their names. A dead mount would hide them.
    let mountpoints = setup.exports.iter().filter_map(|export| export.mountpoint.as_deref());
    Daemon::take_over(mountpoints, &setup.disks)?;
    // Other threads inherit what this one may do.
    sandbox::start(confine::plan(&setup, sockets.control.is_some()))?;
    signals::forward(blocked, stop.clone())?;
    let mut serving = Serving::set_up(setup, inherited, sockets, manner, stop)?;
    serving.announce(manner);
    let reason = wait(&stopped);
    tracing::info!(?reason, "ending");
    serving.take_down(reason);
    Ok(())
}

/// Takes as many open files as we may have: the soft limit is low for the sake of programs that use
/// select(2).
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

/// A number that is there twice.
fn twice(fds: &[i32]) -> Option<i32> {
    fds.iter().enumerate().find(|(at, fd)| fds[..*at].contains(fd)).map(|(_, fd)| *fd)
}

fn wait(stopped: &Receiver<Stop>) -> Stop {
    // A sender lives in the signal thread for as long as the process does.
    stopped.recv().unwrap_or(Stop::Quit)
}

/// Where clients come from: held before anything is restricted, since a port below 1024 needs a
/// capability.
struct Sockets {
    control: Option<ControlSocket>,
    metrics: Option<Metrics>,
}

impl Sockets {
    fn bind(setup: &Setup, inherited: &mut Vec<Inherited>) -> Outcome<Self> {
        let control = control_socket(&setup.control, inherited)?;
        let metrics = match (activation::take_metrics(inherited), &setup.metrics) {
            (Some(fd), _) => Some(Metrics::inherited(fd)?),
            (None, Some(address)) => Some(Metrics::bind(address)?),
            (None, None) => None,
        };
        Ok(Self { control, metrics })
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
        Sockets { control, metrics }: Sockets,
        manner: &Manner,
        stop: Sender<Stop>,
    ) -> Outcome<Self> {
        activation::give_to_exports(&mut inherited, &mut setup.exports);
        for export in &setup.exports {
            check_one_place(export).map_err(|e| Failure::Usage(e.to_string()))?;
        }
        let daemon = Daemon::new(Options { poll_us: setup.poll_us.unwrap_or(DEFAULT_POLL_US) })?;
        let context = Context { daemon: Arc::clone(&daemon), stop: stop.clone(), fdsets: Arc::default() };
        let server = Server::new(context)?;
        bind_events(&daemon, &server, stop, manner.ends_with.clone());
        let mut serving = Self { daemon, server, control, metrics, pidfile: None, down: false };
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
        // A worker of the kernel is of an export; the others are there first, for lists to show
        // them in the order given.
        let (of_exports, workers): (Vec<_>, Vec<_>) =
            setup.workers.into_iter().partition(|w| w.export.is_some());
        for worker in workers {
            self.daemon.worker_new(worker)?;
        }
        for export in setup.exports {
            self.daemon.export_add(export)?;
        }
        for worker in of_exports {
            self.daemon.worker_new(worker)?;
        }
        self.pidfile = setup.pidfile.map(Pidfile::write).transpose()?;
        Ok(())
    }

    /// Tells the service manager and whoever reads stderr that all is up, and where; or what is
    /// missing.
    fn announce(&self, manner: &Manner) {
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
        if !manner.log.quiet {
            let _ = writeln!(std::io::stderr(), "{}: {text}", manner.program);
        }
    }

    fn take_down(&mut self, reason: Stop) {
        self.down = true;
        notify(&[NotifyState::Stopping, NotifyState::Status("ending")]);
        self.server.broadcast(events::shutdown_line(reason));
        if let Some(metrics) = &self.metrics {
            metrics.close();
        }
        self.daemon.shutdown();
        // Waits for a look at the daemon that is under way, so that nobody has a disk open any
        // more.
        self.metrics = None;
        if let Some(control) = &mut self.control {
            control.remove();
        }
        self.pidfile = None;
        self.server.stop();
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.down {
            self.daemon.shutdown();
        }
    }
}

fn where_served(export: &vshunt_types::spec::ExportInfo) -> String {
    let spec = &export.spec;
    match (spec.socket.as_ref().or(spec.mountpoint.as_ref()), spec.fd) {
        (Some(path), _) => format!("{} on {}", spec.name, path.display()),
        (None, Some(fd)) => format!("{} on fd {fd}", spec.name),
        (None, None) => spec.name.clone(),
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

fn control_socket(wanted: &Control, inherited: &mut Vec<Inherited>) -> Outcome<Option<ControlSocket>> {
    let path = match wanted {
        Control::Off => return Ok(None),
        Control::At(path) => Some(path.clone()),
        Control::Default => control_path(None),
    };
    if let Some(fd) = activation::take_control(inherited, path.as_deref()) {
        return Ok(Some(ControlSocket::inherited(fd)));
    }
    match path {
        Some(path) => Ok(Some(ControlSocket::bind(&path)?)),
        None => Err(Failure::Usage(
            "no place for the control socket (XDG_RUNTIME_DIR is not set); \
             give --control SOCKET or --no-control"
                .into(),
        )),
    }
}

/// A pidfile that goes with the daemon. Errands write and remove it, so that no thread may change
/// its folder.
struct Pidfile(PathBuf);

impl Pidfile {
    fn write(path: PathBuf) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot write pidfile {}", path.display()), e);
        sandbox::errand(|| write_pid(&path)).and_then(|written| written).map_err(failed)?;
        Ok(Self(path))
    }
}

fn write_pid(path: &Path) -> std::io::Result<()> {
    std::fs::write(path, format!("{}\n", std::process::id()))
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        let _ = sandbox::errand(|| std::fs::remove_file(&self.0));
    }
}
