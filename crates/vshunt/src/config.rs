//! The configuration of a daemon: the configuration file, and the flags that are added to it.

pub(crate) mod args;
mod images;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};
use vshunt_daemon::Check;
use vshunt_sandbox::Mode;
use vshunt_types::error::Error;
use vshunt_types::spec::{
    DiskSpec, ExportSpec, NetSpec, SocketAccess, SocketMode, WorkerSpec, text_or_number,
};

use self::args::{MountArgs, SandboxArgs, ServeArgs};
use crate::metrics::Address;
use crate::outcome::{Failure, Outcome};
use crate::values::Spec;
use crate::{keyval, run_folder};

/// The default name of the control socket, in the folder of [`run_folder::parent`].
const SOCKET: &str = "vshunt.sock";

/// The setting of the control socket. In a file: a path, or false.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub(crate) enum Control {
    /// Not set: the default path.
    #[default]
    Default,
    /// Not set, and not needed: the default path, if no other daemon answers there.
    IfFree,
    /// This path.
    At(PathBuf),
    /// No control socket.
    Off,
}

impl TryFrom<Value> for Control {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match value {
            Value::String(path) => Ok(Self::At(path.into())),
            Value::Boolean(false) => Ok(Self::Off),
            _ => Err("control: give the path of a socket, or false for none"),
        }
    }
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// Lines for people: `vshunt: warning: message name=value`. With -v, they begin with the time.
    Text,
    /// A JSON object on each line.
    Json,
    /// Lines with a priority of sd-daemon(3) before them, for journald, which adds the time.
    Journald,
}

/// The whole configuration of `vshunt serve`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) control: Control,
    /// Who may connect to the control socket.
    pub(crate) control_access: SocketAccess,
    /// The address of the HTTP server for metrics, if there is one.
    pub(crate) metrics: Option<Address>,
    pub(crate) pidfile: Option<PathBuf>,
    pub(crate) poll_us: Option<u32>,
    pub(crate) disks: Vec<DiskSpec>,
    pub(crate) nets: Vec<NetSpec>,
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) exports: Vec<ExportSpec>,
    pub(crate) sandbox: SandboxArgs,
    /// The names of the exports that were made for images given without keys.
    pub(crate) images: Vec<String>,
    /// Messages for the log, about defaults that may surprise.
    pub(crate) notes: Vec<String>,
    /// The format of the log, if it is given.
    pub(crate) log_format: Option<LogFormat>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    /// The path of the control socket, or false for none. Absent: the default path.
    #[serde(default)]
    control: Control,
    /// The user, by name or number, that owns the control socket. Absent: that of the daemon.
    #[serde(default, deserialize_with = "text_or_number")]
    control_owner: Option<String>,
    /// The group, by name or number, whose members may use the control socket.
    #[serde(default, deserialize_with = "text_or_number")]
    control_group: Option<String>,
    /// The mode of the control socket, as a string: `0600`, `0660`, `0606` or `0666`. Absent:
    /// `0660` if `control-group` is given, otherwise `0600`.
    control_mode: Option<SocketMode>,
    /// Where metrics are served: `PORT`, `ADDRESS:PORT` or `unix:PATH`, as a string. Absent:
    /// nowhere.
    metrics: Option<Address>,
    /// The file that gets the process id, once everything is served.
    pidfile: Option<PathBuf>,
    /// The polling limit of workers that have none of their own, in microseconds. 0: never poll.
    /// Absent: 50.
    poll_us: Option<u32>,
    /// The format of the log: `text`, `json` or `journald`. Absent: `journald` if journald reads
    /// stderr, otherwise `text`.
    log_format: Option<LogFormat>,
    /// What happens on an access that the sandbox does not allow: `on`, `log`, `off` or `kill`.
    /// Absent: `on`.
    sandbox: Option<Mode>,
    /// Whether the system calls of workers are filtered, too.
    #[serde(default)]
    sandbox_workers: bool,
    /// Folders in which clients may name files, sockets and mountpoints.
    #[serde(default)]
    allow_path: Vec<PathBuf>,
    /// The disks; one `[[disk]]` for each.
    #[serde(default)]
    disk: Vec<Table>,
    /// The networks; one `[[net]]` for each.
    #[serde(default)]
    net: Vec<Table>,
    /// The workers besides worker 0; one `[[worker]]` for each.
    #[serde(default)]
    worker: Vec<Table>,
    /// The exports; one `[[export]]` for each.
    #[serde(default)]
    export: Vec<Table>,
}

/// Merges the configuration file and the flags. Lists are joined, those of the file first. For
/// single settings, the flag has priority.
pub(crate) fn setup(control: Option<PathBuf>, args: ServeArgs) -> Outcome<Setup> {
    let mut setup = match &args.config {
        Some(path) => read(path)?,
        None => Setup::default(),
    };
    setup.disks.extend(args.disks);
    setup.nets.extend(args.nets);
    setup.workers.extend(args.workers);
    setup.exports.extend(args.exports);
    setup.metrics = args.metrics.or(setup.metrics);
    setup.pidfile = args.pidfile.or(setup.pidfile);
    setup.poll_us = args.poll_us.or(setup.poll_us);
    setup.control = match (control, args.no_control) {
        (_, true) => Control::Off,
        (Some(path), _) => Control::At(path),
        (None, false) => setup.control,
    };
    setup.log_format = args.log_format.or(setup.log_format);
    setup.control_access = args.control_access.with_defaults(setup.control_access);
    setup.sandbox = args.sandbox.with_defaults(setup.sandbox)?;
    check(&setup)?;
    images::serve(&mut setup, &args.images, args.read_only)?;
    if setup.control == Control::Off && setup.exports.is_empty() {
        return Err(Failure::Usage("nothing to do: no --export, and no control socket to add one".into()));
    }
    Ok(setup)
}

/// Returns the configuration of `vshunt mount`.
pub(crate) fn mount(control: Option<PathBuf>, args: MountArgs) -> Outcome<Setup> {
    let control = match (control, args.no_control) {
        (_, true) => Control::Off,
        (Some(path), _) => Control::At(path),
        (None, false) => Control::IfFree,
    };
    let sandbox = args.sandbox.with_defaults(SandboxArgs::default())?;
    let mut setup = Setup { control, sandbox, ..Setup::default() };
    images::mount(&mut setup, &args.image, args.file, args.read_only)?;
    Ok(setup)
}

/// Checks that the owner, the group and the mode of the control socket have an effect.
pub(crate) fn check_control_access(setup: &Setup) -> Outcome {
    match setup.control_access.first_key().filter(|_| setup.control == Control::Off) {
        Some(key) => Err(Failure::Usage(format!(
            "--control-{key} is given, and there is no control socket; leave it out, or give --control"
        ))),
        None => Ok(()),
    }
}

/// Checks the whole configuration.
fn check(setup: &Setup) -> Outcome {
    let wrong = |why: String| Err(Failure::Usage(why));
    if let Err(e) = (WorkerSpec { poll_us: setup.poll_us, ..WorkerSpec::default() }).check() {
        return wrong(e.to_string());
    }
    check_control_access(setup)?;
    let disks: Vec<&str> = setup.disks.iter().map(|d| d.name.as_str()).collect();
    let nets: Vec<&str> = setup.nets.iter().map(|n| n.name.as_str()).collect();
    let exports: Vec<&str> = setup.exports.iter().map(|e| e.name.as_str()).collect();
    for (kind, names) in [("disk", &disks), ("net", &nets), ("export", &exports)] {
        if let Some((_, name)) = names.iter().enumerate().find(|&(at, name)| names[..at].contains(name)) {
            return wrong(format!("there are two of {kind} {name}; give one another name"));
        }
    }
    for export in &setup.exports {
        let name = &export.name;
        if let Some(net) = export.net.iter().chain(&export.tap).find(|net| !nets.contains(&net.as_str())) {
            return wrong(format!("export {name} is of network {net}, which is not there; add --net"));
        }
        match &export.net {
            None if !disks.contains(&export.disk.as_str()) => {
                let disk = &export.disk;
                return wrong(format!("export {name} is of disk {disk}, which is not there; add --disk"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn read(path: &Path) -> Outcome<Setup> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::io(format!("cannot read configuration {}", path.display()), e))?;
    parse(&text).map_err(|why| Failure::Usage(format!("{}: {}", path.display(), why.trim_end())))
}

fn parse(text: &str) -> Result<Setup, String> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
    Ok(Setup {
        control: file.control,
        control_access: SocketAccess {
            owner: file.control_owner,
            group: file.control_group,
            mode: file.control_mode,
        },
        metrics: file.metrics,
        pidfile: file.pidfile,
        poll_us: file.poll_us,
        disks: tables("disk", file.disk)?,
        nets: tables("net", file.net)?,
        workers: tables("worker", file.worker)?,
        exports: tables("export", file.export)?,
        log_format: file.log_format,
        sandbox: SandboxArgs {
            mode: file.sandbox,
            workers: file.sandbox_workers,
            allow_paths: file.allow_path,
        },
        images: Vec::new(),
        notes: Vec::new(),
    })
}

fn tables<T: Spec>(kind: &str, tables: Vec<Table>) -> Result<Vec<T>, String> {
    let mut out = Vec::with_capacity(tables.len());
    for (at, mut table) in tables.into_iter().enumerate() {
        let text = |key: &str| table.get(key)?.as_str().map(str::to_owned);
        if !table.contains_key("name")
            && let Some(name) = T::default_name(&text)
        {
            table.insert("name".to_owned(), name.into());
        }
        let name = match table.get("name").and_then(Value::as_str) {
            Some(name) => format!("{kind} {name}"),
            None => format!("{kind} number {}", at + 1),
        };
        parse_text_values(&mut table).map_err(|why| format!("{name}: {why}"))?;
        let item = T::deserialize(table).map_err(|e| format!("{name}: {}", e.message()))?;
        item.check().map_err(|e| e.to_string())?;
        out.push(item);
    }
    Ok(out)
}

/// Replaces sizes and CPU lists that are written as text, as in flags, by their values.
fn parse_text_values(table: &mut Table) -> Result<(), String> {
    for (key, value) in table.iter_mut() {
        let Value::String(text) = value else { continue };
        let in_key = |why: keyval::KeyvalError| format!("{key}: {why}");
        match key.as_str() {
            "size" | "block-size" | "cache-size" => {
                let size = keyval::parse_size(text).map_err(in_key)?;
                let size = i64::try_from(size).map_err(|_| format!("{key}: `{text}` is too large"))?;
                *value = Value::Integer(size);
            }
            "cpu" => {
                let cpus = keyval::parse_cpus(text).map_err(in_key)?;
                *value = cpus.into_iter().map(|c| c as i64).collect::<Vec<_>>().into();
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the path of the control socket: `given`, otherwise that of the environment, otherwise
/// the user's default.
pub(crate) fn control_path(given: Option<&PathBuf>) -> Option<PathBuf> {
    let from = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    given
        .cloned()
        .or_else(|| from("VSHUNT_CONTROL"))
        .or_else(|| run_folder::parent().map(|folder| folder.join(SOCKET)))
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::{Format, Workers};

    use super::*;

    const WHOLE: &str = r#"
        control = "/run/c"
        metrics = "127.0.0.1:9150"
        pidfile = "/run/p"
        poll-us = 7
        sandbox = "on"
        sandbox-workers = true
        allow-path = ["/images"]
        [[disk]]
        name = "d0"
        format = "ram"
        size = "1.5G"
        [[disk]]
        name = "d1"
        file = "/a"
        readonly = true
        [[net]]
        type = "tap"
        name = "n0"
        ifname = "vs0"
        queues = 2
        [[worker]]
        cpu = "2-3"
        nice = -5
        [[worker]]
        cpu = [4]
        [[export]]
        type = "vhost-user-blk"
        name = "vm0"
        disk = "d0"
        socket = "/s"
        workers = "per-queue"
        [[export]]
        type = "vhost-user-blk"
        name = "vm1"
        disk = "d0"
        socket = "/t"
        workers = 3
        block-size = 4096
        [[export]]
        type = "vhost-user-net"
        name = "c0"
        net = "n0"
        socket = "/n"
        mac = "52:54:00:12:34:56"
    "#;

    #[test]
    fn it_says_what_flags_say() {
        let setup = parse(WHOLE).unwrap();
        assert_eq!(setup.control, Control::At("/run/c".into()));
        assert_eq!(setup.metrics, Some("9150".parse().unwrap()));
        assert_eq!((setup.pidfile, setup.poll_us), (Some("/run/p".into()), Some(7)));
        let sandbox =
            SandboxArgs { mode: Some(Mode::On), workers: true, allow_paths: vec!["/images".into()] };
        assert_eq!(setup.sandbox, sandbox);
        let flag = |text| keyval::parse::<DiskSpec>(text).unwrap();
        assert_eq!(setup.disks, [flag("name=d0,format=ram,size=1.5G"), flag("name=d1,file=/a,readonly=on")]);
        let flag = |text| keyval::parse::<WorkerSpec>(text).unwrap();
        assert_eq!(setup.workers, [flag("cpu=2-3,nice=-5"), flag("cpu=4")]);
        assert_eq!(
            (setup.exports[0].workers, setup.exports[1].workers),
            (Workers::PerQueue, Workers::Count(3))
        );
        assert_eq!(setup.disks[0].format(), Format::Ram);
        assert_eq!(setup.nets, [keyval::parse::<NetSpec>("type=tap,name=n0,ifname=vs0,queues=2").unwrap()]);
        let nic = "type=vhost-user-net,name=c0,net=n0,socket=/n,mac=52:54:00:12:34:56";
        assert_eq!(setup.exports[2], keyval::parse::<ExportSpec>(nic).unwrap());
    }

    #[test]
    fn descriptors_and_users_are_numbers_or_words() {
        for (fd, owner) in [("7", "1000"), ("\"7:8\"", "\"kvm\"")] {
            let file =
                format!("[[net]]\ntype = \"tap\"\nname = \"n\"\nfd = {fd}\nowner = {owner}\npersist = true");
            let flag = format!("type=tap,name=n,fd={fd},owner={owner},persist=on").replace('"', "");
            assert_eq!(parse(&file).unwrap().nets, [keyval::parse::<NetSpec>(&flag).unwrap()]);
        }
    }

    #[test]
    fn names_are_those_of_flags_without_a_name() {
        let file = "[[disk]]\nfile = \"/images/a b.img\"\n[[export]]\ntype = \"vhost-user-blk\"\n\
                    disk = \"ab\"\nsocket = \"/s\"";
        let setup = parse(file).unwrap();
        assert_eq!((setup.disks[0].name.as_str(), setup.exports[0].name.as_str()), ("ab", "ab"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("[[disk]]\nname = \"d\"\nfil = 1", "disk d: unknown field `fil`"),
            ("[[disk]]\nformat = \"ram\"", "disk number 1: missing field `name`"),
            ("[[disk]]\nname = \"d\"\nsize = \"1X\"", "disk d: size: `1X` is not a size"),
            ("[[worker]]\ncpu = \"x\"", "worker number 1: cpu: `x`"),
            ("[[export]]\nname = \"e\"\ndisk = \"d\"", "export e: missing field `type`"),
            ("[[net]]\nname = \"n\"\nifname = \"a\"", "net n: missing field `type`"),
            (
                "[[net]]\ntype = \"tap\"\nname = \"n\"\nifname = \"a b\"",
                "network n: no interface can be called",
            ),
            ("[[net]]\ntype = \"tap\"\nname = \"n\"", "network n: give ifname=NAME"),
            ("[[net]]\ntype = \"tap\"\nname = \"n\"\nfd = true", "net n: invalid type: boolean `true`"),
            ("metrics = \":9150\"", "names no address; write 127.0.0.1:9150"),
            ("metrics = 9150", "expected a string"),
            ("control = true", "control: give the path"),
            ("sandbox = \"x\"", "unknown variant `x`"),
            ("disks = 1", "unknown field `disks`"),
            ("[[disk", "TOML parse error"),
        ];
        for (text, want) in cases {
            let why = parse(text).unwrap_err();
            assert!(why.contains(want), "{text}: {why}");
        }
    }

    #[test]
    fn flags_add_and_win() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        std::fs::write(&path, WHOLE).unwrap();
        let args = ServeArgs {
            config: Some(path),
            disks: vec![DiskSpec { name: "d2".into(), ..Default::default() }],
            metrics: Some("unix:/m".parse().unwrap()),
            poll_us: Some(0),
            ..Default::default()
        };
        let setup = setup(Some("/c".into()), args.clone()).unwrap();
        assert_eq!(setup.disks.len(), 3);
        assert_eq!(setup.metrics, Some(Address::Unix("/m".into())));
        assert_eq!((setup.poll_us, setup.control), (Some(0), Control::At("/c".into())));
        let off = ServeArgs { no_control: true, ..args };
        assert_eq!(super::setup(None, off).unwrap().control, Control::Off);
        let nothing = ServeArgs { no_control: true, ..Default::default() };
        assert!(matches!(super::setup(None, nothing), Err(Failure::Usage(_))));
    }
}
