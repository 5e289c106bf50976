//! `query-config`: what runs, as a configuration file that starts the same again.
//!
//! Called on the thread of a client. A thing that the file cannot express is a comment in it.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use toml::Value;
use vshunt_daemon::{DEFAULT_POLL_US, Daemon};
use vshunt_types::spec::{
    BalanceMode, DiskInfo, DiskSpec, Engine, ExportInfo, Format, NetInfo, NetKind, NetSpec, QueueInfo,
    SocketMode, WorkerInfo, WorkerKind, WorkerSpec, Workers,
};

use crate::config::{Control, LogFormat, Setup, control_path};
use crate::metrics::Address;
use crate::qmp::context::{Answer, Arguments, Context, Nothing, Startup};

/// The worker that always exists.
const FIRST: u32 = 0;

pub(super) fn query_config(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(json!({ "toml": text(&context.daemon, &context.startup) }))
}

/// Returns the whole file.
fn text(daemon: &Daemon, startup: &Startup) -> String {
    let mut page =
        Page(String::from("# What this vshunt serves. `vshunt serve --config FILE` serves the same.\n"));
    let workers = Listed::new(daemon, startup);
    settings(&mut page, startup, daemon.balance_mode());
    if let Some(spec) = workers.first() {
        page.section("[first-worker]", &spec);
    }
    // Disks and networks that the file cannot have, with their kind.
    let mut missing = BTreeSet::new();
    for disk in daemon.disks() {
        let bitmaps: Vec<_> = disk.bitmaps.iter().map(|bitmap| bitmap.name.as_str()).collect();
        if !bitmaps.is_empty() {
            page.comment(&format!("Disk {} has dirty bitmaps: {}.", disk.spec.name, bitmaps.join(", ")));
        }
        if disk.spec.format() == Format::Frozen {
            page.comment(&format!("Disk {} is of a backup, and cannot be in a file.", disk.spec.name));
            missing.insert(format!("disk {}", disk.spec.name));
            continue;
        }
        let spec = disk_spec(disk);
        let usable = page.takes(&format!("The file of disk {}", spec.name), spec.file.as_deref());
        if !usable {
            missing.insert(format!("disk {}", spec.name));
        }
        page.section_if(usable, "[[disk]]", &spec);
    }
    for job in daemon.jobs() {
        page.comment(&format!("Job {} of disk {} cannot be in a file.", job.id, job.disk));
    }
    for NetInfo { spec, .. } in daemon.nets() {
        if let Some(fd) = &spec.fd {
            page.comment(&format!(
                "Network {} has descriptors that were passed to the daemon ({fd}).",
                spec.name
            ));
            missing.insert(format!("net {}", spec.name));
        }
        page.section_if(spec.fd.is_none(), "[[net]]", &net_spec(spec));
    }
    for (_, spec) in &workers.listed {
        page.section("[[worker]]", spec);
    }
    workers.comments(&mut page);
    let mut queues = daemon.queues();
    // Where queues are that follow load is not to be kept.
    queues.retain(|queue| daemon.queue_stays(&queue.export, queue.index));
    for export in daemon.exports() {
        let served = export_section(&mut page, &export, &missing);
        if served {
            placement(&mut page, &export, &queues, &workers);
        }
    }
    page.0
}

/// The text of the file so far.
struct Page(String);

impl Page {
    /// Adds a comment on a line of its own.
    fn comment(&mut self, text: &str) {
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let _ = write!(self.0, "\n# {text}\n");
    }

    /// Returns whether the file can have a path. Otherwise adds a comment that says so.
    fn takes(&mut self, what: &str, path: Option<&Path>) -> bool {
        let Some(path) = path.filter(|path| path.to_str().is_none()) else { return true };
        self.comment(&format!(
            "{what}, {}, is not UTF-8 and cannot be in a file: rename it.",
            path.display()
        ));
        false
    }

    fn section(&mut self, head: &str, keys: &impl Serialize) {
        self.section_if(true, head, keys);
    }

    /// Adds a section. `usable`: otherwise it is a comment.
    fn section_if(&mut self, usable: bool, head: &str, keys: &impl Serialize) {
        let text = match toml::to_string(keys) {
            Ok(keys) => format!("{head}\n{keys}"),
            Err(e) => return self.comment(&format!("{head} cannot be written: {e}")),
        };
        let before = if usable { "" } else { "# " };
        self.0.push('\n');
        let name = head.trim_matches(['[', ']']);
        text.lines().enumerate().for_each(|(at, line)| match line.strip_prefix('[') {
            // A table in the section: limits.
            Some(table) if at > 0 => _ = writeln!(self.0, "{before}[{name}.{table}"),
            _ => _ = writeln!(self.0, "{before}{line}"),
        });
    }
}

/// The settings before all sections.
#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control_owner: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control_mode: Option<SocketMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pidfile: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    poll_us: Option<u32>,
    #[serde(skip_serializing_if = "is_off")]
    balance: BalanceMode,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<vshunt_sandbox::Mode>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    sandbox_workers: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allow_path: Vec<PathBuf>,
}

fn is_off(mode: &BalanceMode) -> bool {
    *mode == BalanceMode::Off
}

fn settings(page: &mut Page, startup: &Startup, balance: BalanceMode) {
    let setup = &startup.setup;
    let path = match &setup.control {
        Control::At(path) => Some(path.clone()),
        Control::Default | Control::IfFree => control_path(None),
        Control::Off => None,
    };
    let control = path.filter(|_| !startup.control_passed).map(|path| absolute(&path));
    let control =
        control.filter(|path| page.takes("The control socket", Some(path))).map(|path| text_of(&path));
    let off = (setup.control == Control::Off).then_some(Value::Boolean(false));
    let metrics =
        setup.metrics.clone().filter(|_| !startup.metrics_passed).and_then(|address| match address {
            Address::Tcp(address) => Some(address.to_string()),
            Address::Unix(path) => {
                let path = absolute(&path);
                page.takes("The socket for metrics", Some(&path)).then(|| format!("unix:{}", path.display()))
            }
        });
    let mut named =
        |what: &str, path: &Path| Some(absolute(path)).filter(|path| page.takes(what, Some(path)));
    let pidfile = setup.pidfile.as_deref().and_then(|path| named("The pidfile", path));
    let allow_path =
        setup.sandbox.allow_paths.iter().filter_map(|path| named("The folder of allow-path", path));
    let allow_path = allow_path.collect();
    for (passed, what) in
        [(startup.control_passed, "control socket"), (startup.metrics_passed, "socket for metrics")]
    {
        if passed {
            page.comment(&format!("The {what} was passed to the daemon by the service manager."));
        }
    }
    let settings = Settings {
        control: control.or(off),
        control_owner: setup.control_access.owner.clone(),
        control_group: setup.control_access.group.clone(),
        control_mode: setup.control_access.mode,
        metrics,
        pidfile,
        poll_us: setup.poll_us,
        balance,
        log_format: setup.log_format,
        sandbox: setup.sandbox.mode,
        sandbox_workers: setup.sandbox.workers,
        allow_path,
    };
    page.0.push_str(&toml::to_string(&settings).unwrap_or_default());
}

fn text_of(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

/// Returns the path from the root. The file may be used in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn disk_spec(DiskInfo { spec, size_bytes, .. }: DiskInfo) -> DiskSpec {
    let of_memory = matches!(spec.format(), Format::Ram | Format::Null);
    DiskSpec {
        file: spec.file.as_deref().map(absolute),
        // It may have been resized since.
        size: if of_memory { Some(size_bytes) } else { spec.size },
        ..spec
    }
}

fn net_spec(spec: NetSpec) -> NetSpec {
    let netns = spec.netns.map(|name| match name.contains('/') {
        true => absolute(Path::new(&name)).display().to_string(),
        false => name,
    });
    // The daemon fills in what is the default.
    let steering = spec.steering.filter(|_| spec.kind == NetKind::Tap);
    NetSpec { netns, steering, ..spec }
}

/// Adds an export. `missing`: disks and networks that the file cannot have. Returns whether the
/// export is usable.
fn export_section(page: &mut Page, export: &ExportInfo, missing: &BTreeSet<String>) -> bool {
    let name = &export.spec.name;
    if export.removing {
        page.comment(&format!("Export {name} is being removed."));
        return false;
    }
    if export.spec.fd.is_some() {
        page.comment(&format!(
            "The socket of export {name} was passed to the daemon; give it a path as `socket`."
        ));
    }
    let mut spec = export.spec.clone();
    let Ok(()) = spec.map_paths(|path| Ok::<_, Infallible>(absolute(&path)));
    let place = spec.socket_path().or(spec.mountpoint.as_deref());
    let placed = page.takes(&format!("The path of export {name}"), place)
        && page.takes(&format!("The certificates of export {name}"), spec.tls_certificates.as_deref());
    let nets = spec.net.iter().chain(&spec.tap).map(|net| format!("net {net}"));
    let mut backends = nets.chain([format!("disk {}", spec.disk)]);
    let usable = placed && spec.fd.is_none() && !backends.any(|backend| missing.contains(&backend));
    page.section_if(usable, "[[export]]", &spec);
    usable
}

/// Queues that start on a worker.
#[derive(Serialize)]
struct Attach {
    queues: String,
    worker: Value,
}

/// Adds the queues of an export that are not where they are after a start.
fn placement(page: &mut Page, export: &ExportInfo, queues: &[QueueInfo], workers: &Listed) {
    let name = &export.spec.name;
    if export.engine == Engine::Kernel {
        page.comment(&format!("The kernel serves export {name}; where its queues are cannot be in a file."));
        return;
    }
    let own = workers.own_of(name);
    let mut rest = queues.iter().filter(|queue| &queue.export == name).peekable();
    while let Some(first) = rest.next() {
        if first.worker == usual(export, own, first.index) {
            continue;
        }
        let mut last = first.index;
        let next = |last: u16, queue: &QueueInfo| {
            queue.index == last + 1
                && queue.worker == first.worker
                && queue.worker != usual(export, own, queue.index)
        };
        while let Some(queue) = rest.next_if(|queue| next(last, queue)) {
            last = queue.index;
        }
        let named = if last == first.index {
            format!("{name}:{last}")
        } else {
            format!("{name}:{}-{last}", first.index)
        };
        match workers.reference(first.worker) {
            Some(worker) => page.section("[[attach]]", &Attach { queues: named, worker }),
            None => page.comment(&format!("{named}: worker {} cannot be in a file.", first.worker)),
        }
    }
}

/// Returns the worker that a queue has after a start.
fn usual(export: &ExportInfo, own: &[u32], index: u16) -> u32 {
    let queues = export.queue_list.len();
    // A control queue, behind the queues that `queues` counts, starts on worker 0.
    let control = export.spec.queues.is_some_and(|n| usize::from(n) < queues && index >= n);
    match own.len() {
        n if n > 0 && !control && export.spec.workers == Workers::Auto => own[0],
        n if n > 0 && !control && export.spec.workers != Workers::Default => own[usize::from(index) % n],
        _ => FIRST,
    }
}

/// The workers, and how a file names them.
struct Listed<'a> {
    startup: &'a Startup,
    all: Vec<WorkerInfo>,
    /// The ids of the workers that each export made, in order.
    own: Vec<(String, Vec<u32>)>,
    /// The exports that make more workers than one while those pay. A file can name the first one.
    auto: BTreeSet<String>,
    /// The workers that the file lists. After a start their ids are 1, 2 and so on.
    listed: Vec<(u32, WorkerSpec)>,
}

impl<'a> Listed<'a> {
    fn new(daemon: &Daemon, startup: &'a Startup) -> Self {
        let (all, own) = (daemon.workers(), daemon.own_workers());
        let jobs: BTreeSet<String> = daemon.jobs().into_iter().map(|job| job.id).collect();
        let auto = daemon.exports().into_iter().filter(|e| e.spec.workers == Workers::Auto);
        let auto = auto.map(|e| e.spec.name).collect();
        let mut out = Self { startup, all, own, auto, listed: Vec::new() };
        let made = |worker: &&WorkerInfo| {
            let of_export = out.own.iter().any(|(_, ids)| ids.contains(&worker.id));
            worker.id != FIRST
                && worker.kind == WorkerKind::User
                && !of_export
                && !jobs.contains(&worker.name)
        };
        let listed = out.all.iter().filter(made).map(|worker| (worker.id, out.spec(worker))).collect();
        out.listed = listed;
        out
    }

    /// Returns the settings of a worker that are not the default.
    fn spec(&self, worker: &WorkerInfo) -> WorkerSpec {
        let default_poll = self.startup.setup.poll_us.unwrap_or(DEFAULT_POLL_US);
        WorkerSpec {
            name: Some(worker.name.clone()).filter(|name| *name != format!("worker-{}", worker.id)),
            cpu: Some(worker.cpu.clone()).filter(|cpus| *cpus != self.startup.cpus),
            nice: Some(worker.nice).filter(|nice| *nice != self.startup.nice),
            poll_us: Some(worker.poll_us).filter(|poll_us| *poll_us != default_poll),
            ..WorkerSpec::default()
        }
    }

    /// Returns the settings of worker 0, if they are not the default.
    fn first(&self) -> Option<WorkerSpec> {
        let first = self.all.iter().find(|worker| worker.id == FIRST)?;
        Some(self.spec(first)).filter(|spec| *spec != WorkerSpec::default())
    }

    fn own_of(&self, export: &str) -> &[u32] {
        self.own.iter().find(|(name, _)| name == export).map_or(&[], |(_, ids)| ids.as_slice())
    }

    /// Returns how a file names a worker. None: it cannot.
    fn reference(&self, id: u32) -> Option<Value> {
        if id == FIRST {
            return Some(Value::Integer(0));
        }
        if let Some(at) = self.listed.iter().position(|(listed, _)| *listed == id) {
            let name = self.listed[at].1.name.as_ref();
            let unique = |name: &&String| self.all.iter().filter(|worker| worker.name == **name).count() == 1;
            return Some(match name.filter(unique) {
                Some(name) => Value::String(name.clone()),
                None => Value::Integer(at as i64 + 1),
            });
        }
        let of_export = |(name, ids): &(String, Vec<u32>)| {
            let at = ids.iter().position(|own| *own == id);
            at.filter(|at| self.is_made_at_start(name, *at)).map(|at| Value::String(format!("{name}/{at}")))
        };
        self.own.iter().find_map(of_export)
    }

    fn is_made_at_start(&self, export: &str, at: usize) -> bool {
        at == 0 || !self.auto.contains(export)
    }

    /// Adds what cannot be said about workers that exports made.
    fn comments(&self, page: &mut Page) {
        for (export, ids) in &self.own {
            for (at, id) in ids.iter().enumerate().filter(|(at, _)| self.is_made_at_start(export, *at)) {
                match self.all.iter().find(|worker| worker.id == *id) {
                    None => page.comment(&format!("Worker {export}/{at} was freed; it is made again.")),
                    Some(worker)
                        if worker.name != format!("{export}/{at}") || worker.nice != self.startup.nice =>
                    {
                        let changed =
                            toml::to_string(&self.spec(worker)).unwrap_or_default().replace('\n', " ");
                        page.comment(&format!(
                            "Worker {export}/{at} was changed; it is made without: {changed}"
                        ));
                    }
                    Some(_) => {}
                }
            }
        }
        for worker in self.all.iter().filter(|worker| worker.kind == WorkerKind::Kernel) {
            page.comment(&format!("Worker {} is one of the kernel; it cannot be in a file.", worker.name));
        }
    }
}

impl Startup {
    /// Returns what is known about the start, before anything is served.
    pub(crate) fn new(setup: &Setup, control_passed: bool, metrics_passed: bool) -> Self {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap_or_default();
        let setup = Setup {
            disks: Vec::new(),
            nets: Vec::new(),
            workers: Vec::new(),
            exports: Vec::new(),
            attach: Vec::new(),
            ..setup.clone()
        };
        Self {
            setup,
            control_passed,
            metrics_passed,
            cpus: (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).collect(),
            nice: rustix::process::getpriority_process(None).unwrap_or(0),
        }
    }
}
