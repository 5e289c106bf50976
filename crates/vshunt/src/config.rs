//! The configuration of a daemon: the configuration file, and the flags that are added to it.

pub(crate) mod args;
pub(crate) mod check;
pub(crate) mod file;
pub(crate) mod images;
mod told;

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::Value;
use vshunt_types::spec::{BalanceMode, DiskSpec, ExportSpec, NetSpec, SocketAccess, WorkerSpec};

use self::args::{MountArgs, SandboxArgs, ServeArgs};
use self::file::{AttachSpec, Places};
use self::told::Told;
use crate::metrics::Address;
use crate::outcome::{Failure, Outcome};
use crate::run_folder;

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
    /// Whether queues of exports follow load that do not say it themselves.
    pub(crate) balance: Option<BalanceMode>,
    pub(crate) disks: Vec<DiskSpec>,
    pub(crate) nets: Vec<NetSpec>,
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) exports: Vec<ExportSpec>,
    /// Settings of worker 0.
    pub(crate) first_worker: Option<WorkerSpec>,
    /// Queues that start on a certain worker.
    pub(crate) attach: Vec<AttachSpec>,
    /// Where in a file they come from.
    pub(crate) places: Places,
    pub(crate) sandbox: SandboxArgs,
    /// The names of the exports that were made for images given without keys.
    pub(crate) images: Vec<String>,
    /// Messages for the log, about defaults that may surprise.
    pub(crate) notes: Vec<String>,
    /// The format of the log, if it is given.
    pub(crate) log_format: Option<LogFormat>,
}

/// Merges the configuration file and the flags. Lists are joined, those of the file first. For
/// single settings, the flag has priority.
pub(crate) fn setup(control: Option<PathBuf>, args: ServeArgs) -> Outcome<Setup> {
    let (mut setup, mut wrong) = match &args.config {
        Some(path) => read(path)?,
        None => (Setup::default(), Told::default()),
    };
    setup.disks.extend(args.disks);
    setup.nets.extend(args.nets);
    setup.workers.extend(args.workers);
    setup.exports.extend(args.exports);
    setup.metrics = args.metrics.or(setup.metrics);
    setup.pidfile = args.pidfile.or(setup.pidfile);
    setup.poll_us = args.poll_us.or(setup.poll_us);
    setup.balance = args.balance.or(setup.balance);
    setup.control = match (control, args.no_control) {
        (_, true) => Control::Off,
        (Some(path), _) => Control::At(path),
        (None, false) => setup.control,
    };
    setup.log_format = args.log_format.or(setup.log_format);
    setup.control_access = args.control_access.with_defaults(setup.control_access);
    setup.sandbox = args.sandbox.with_defaults(setup.sandbox)?;
    check::problems(&setup, &mut wrong);
    wrong.end()?;
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
    let mut setup = Setup {
        control,
        sandbox,
        control_access: args.control_access.with_defaults(SocketAccess::default()),
        log_format: args.log_format,
        ..Setup::default()
    };
    check_control_access(&setup)?;
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

/// Reads a configuration file. Returns also all that is wrong in it. A pipe is read only if the
/// process has inherited it, as the shell passes it for `<(COMMAND)`: opening any other waits for a
/// writer.
///
/// # Errors
/// Usage: it cannot be read.
fn read(path: &Path) -> Outcome<(Setup, Told)> {
    let shown = path.display();
    let cannot = |e| Failure::Usage(format!("cannot read configuration {shown}: {e}"));
    let mut text = String::new();
    let mut options = std::fs::OpenOptions::new();
    let inherited = ["/dev/stdin", "/dev/fd", "/proc/self/fd"].iter().any(|folder| path.starts_with(folder));
    if !inherited {
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    let file = options.read(true).open(path).map_err(cannot)?;
    if !inherited && !file.metadata().map_err(cannot)?.is_file() {
        return Err(Failure::Usage(format!(
            "{} is no file; a configuration is a file, or /dev/stdin",
            path.display()
        )));
    }
    file.take(file::FILE_MAX + 1).read_to_string(&mut text).map_err(cannot)?;
    if text.len() as u64 > file::FILE_MAX {
        let most = file::FILE_MAX >> 20;
        return Err(Failure::Usage(format!("{shown}: a configuration has at most {most} MiB")));
    }
    Ok(file::parse(path, &text))
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
    use super::*;

    const FILE: &str = r#"
        control = "/run/c"
        metrics = "127.0.0.1:9150"
        poll-us = 7
        [[disk]]
        name = "d0"
        format = "ram"
        size = "1M"
        [[disk]]
        name = "d1"
        file = "/a"
        [[export]]
        type = "vhost-user-blk"
        name = "vm0"
        disk = "d0"
        socket = "/s"
    "#;

    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        for path in [path.as_path(), Path::new("/dev/zero"), dir.path()] {
            let Err(Failure::Usage(why)) = read(path) else { panic!("{}", path.display()) };
            assert!(why.contains("is no file; a configuration is a file, or /dev/stdin"), "{why}");
        }
    }

    #[test]
    fn flags_add_and_win() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        std::fs::write(&path, FILE).unwrap();
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
