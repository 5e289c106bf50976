//! Runs the subcommands. `serve` runs here; the others send commands over the control socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};
use vshunt_daemon::check_one_place;
use vshunt_types::spec::{DiskInfo, DiskSpec, ExportInfo, ExportKind, ExportSpec, NetAddress};

use super::args::config::ConfigCommand;
use super::args::{Cli, Command, DiskCommand, ExportCommand, ListArgs, NetCommand, WorkerCommand};
use super::attach::{move_queues, worker_id};
use super::call::{absolute, call, connect, list, print_json, send, started, to_value};
use super::client::Client;
use super::passing::{self, Wanted};
use super::{balance, jobs, latency, limit, pages, quit, running, show, snapshot, status, top};
use crate::image::{self, summary};
use crate::outcome::{Failure, Outcome, one_line, print, print_line};
use crate::serve::{ServeOptions, serve};
use crate::values::SizeChange;
use crate::{config, doctor, run_folder};

pub(super) fn run(cli: Cli) -> Outcome {
    let control = cli.control;
    let connect = || connect(control.as_ref());
    match cli.command {
        Command::Serve(args) => {
            let options = ServeOptions {
                program: "vshunt",
                log: cli.log,
                ends_with: None,
                if_running: running::remedy,
            };
            serve(config::setup(control, *args)?, &options)
        }
        Command::Mount(args) => {
            let setup = config::mount(control, *args)?;
            let ends_with = setup.images.first().cloned();
            let if_running = |_: &config::Setup| Default::default();
            serve(setup, &ServeOptions { program: "vshunt", log: cli.log, ends_with, if_running })
        }
        Command::Status(args) => status::run(control, args),
        Command::Top(args) => top::run(control, &args),
        Command::Config(ConfigCommand::Check { file }) => config::check::file(&file),
        Command::Config(ConfigCommand::Show) => config_show(&mut connect()?),
        Command::Worker(command) => worker(&mut connect()?, command),
        Command::Attach(args) => print_line(&move_queues(&mut connect()?, args)?),
        Command::Balance(args) => balance::run(&mut connect()?, args),
        Command::Latency(args) => latency::run(&mut connect()?, args),
        Command::Limit(args) => limit::run(&mut connect()?, *args),
        Command::Disk(command) => disk(&mut connect()?, command),
        Command::Net(command) => net(&mut connect()?, command),
        Command::Export(command) => export(&mut connect()?, command, cli.log.quiet),
        Command::Image(args) => image::run(args.command, cli.log.quiet),
        Command::Backup(command) => jobs::backup(&mut connect()?, command, cli.log.quiet),
        Command::Job(command) => jobs::job(&mut connect()?, command, cli.log.quiet),
        Command::Bitmap(command) => jobs::bitmap(&mut connect()?, command),
        Command::Resize { disk, size, shrink } => resize(&mut connect()?, &disk, size, shrink),
        Command::Commit(args) => jobs::overlay_job(&mut connect()?, "commit-start", args, cli.log.quiet),
        Command::Stream(args) => jobs::overlay_job(&mut connect()?, "stream-start", args, cli.log.quiet),
        Command::Mirror(args) => jobs::mirror(&mut connect()?, args, cli.log.quiet),
        Command::Snapshot(args) => snapshot::run(&mut connect()?, args, cli.log.quiet),
        Command::Quit { force } => quit::run(connect()?, force),
        Command::Qmp { command, arguments } => {
            let arguments = parse_arguments(arguments.as_deref())?;
            print_json(&connect()?.execute(&command, arguments)?)
        }
        Command::Doctor(ListArgs { json }) => doctor::run(control.as_ref(), json),
        Command::Man { directory } => pages::write_man(&directory),
        Command::Completions { shell } => print(&pages::completions(shell)),
    }
}

/// Resizes a disk. A smaller size requires a flag, so that a typing error does not destroy data.
fn resize(client: &mut Client, disk: &str, change: SizeChange, shrink: bool) -> Outcome {
    let disks: Vec<DiskInfo> = call(client, "query-disks", json!({}))?;
    let old = disks.iter().find(|d| d.spec.name == disk).map(|info| info.size_bytes);
    let Some(old) = old else {
        return Err(Failure::Failed(format!("there is no disk {disk}; see `vshunt disk list`")));
    };
    let Some(size) = change.of(old) else {
        return Err(Failure::Failed(format!("{disk} has {old} bytes, which cannot be changed by that much")));
    };
    if size < old && !shrink {
        return Err(Failure::Failed(format!(
            "this would cut {disk} from {old} to {size} bytes and lose what lies beyond; give --shrink if you mean it"
        )));
    }
    send(client, "block_resize", json!({ "node-name": disk, "size": size }))
}

fn parse_arguments(text: Option<&str>) -> Outcome<Map<String, Value>> {
    match text.map(serde_json::from_str) {
        None => Ok(Map::new()),
        Some(Ok(Value::Object(map))) => Ok(map),
        Some(Ok(_)) => Err(Failure::Usage("ARGUMENTS is not a JSON object".into())),
        Some(Err(e)) => Err(Failure::Usage(format!("ARGUMENTS is not JSON: {e}"))),
    }
}

fn config_show(client: &mut Client) -> Outcome {
    let value: Value = call(client, "query-config", json!({}))?;
    print(value["toml"].as_str().unwrap_or_default())
}

fn worker(client: &mut Client, command: WorkerCommand) -> Outcome {
    match command {
        WorkerCommand::New(args) => {
            let made: Value = call(client, "worker-new", to_value(&args.into_spec())?)?;
            print_line(&made["id"].to_string())
        }
        WorkerCommand::List(args) => list(client, "query-workers", args, show::workers),
        WorkerCommand::Free { worker } => {
            let id = worker_id(client, &worker)?;
            send(client, "worker-free", json!({ "id": id }))
        }
        WorkerCommand::Set { worker, change } => {
            let mut arguments = to_value(&change.into_spec())?;
            if arguments.as_object().is_some_and(Map::is_empty) {
                return Err(Failure::Usage(
                    "nothing to change; give --cpu, --nice, --poll-us or --name".into(),
                ));
            }
            arguments["id"] = worker_id(client, &worker)?.into();
            send(client, "worker-set", arguments)
        }
    }
}

fn disk(client: &mut Client, command: DiskCommand) -> Outcome {
    match command {
        DiskCommand::Add { disk } => {
            let disk = DiskSpec { file: absolute(disk.file)?, ..disk };
            let value = to_value(&disk)?;
            passing::with(client, |_| Ok(Wanted::disk(&disk)), &[], |client| send(client, "disk-add", value))
        }
        DiskCommand::Remove { name } => send(client, "disk-remove", json!({ "name": name })),
        DiskCommand::List(args) => list(client, "query-disks", args, show::disks),
    }
}

fn net(client: &mut Client, command: NetCommand) -> Outcome {
    match command {
        NetCommand::Add { net } => {
            let value = to_value(&net)?;
            let path = net.netns.as_ref().filter(|name| name.contains('/'));
            let wanted = path.map_or_else(Vec::new, |path| Wanted::file(Path::new(path), false));
            passing::with(client, |_| Ok(wanted), &[], |client| send(client, "net-add", value))
        }
        NetCommand::Set { name, steering } => {
            send(client, "net-set", json!({ "name": name, "steering": steering }))
        }
        NetCommand::Remove { name } => send(client, "net-remove", json!({ "name": name })),
        NetCommand::List(args) => list(client, "query-nets", args, show::nets),
        NetCommand::Addresses { name, list: ListArgs { json } } => {
            let value: Value = call(client, "query-net-addresses", json!({ "name": name }))?;
            if json {
                return print_json(&value);
            }
            let addresses: Vec<NetAddress> = serde_json::from_value(value)
                .map_err(|e| Failure::Failed(format!("the daemon's answer is not understood: {e}")))?;
            print(&show::addresses(&addresses))
        }
    }
}

/// Returns the socket for an export without a place, as `vshunt serve FILE` chooses it. None: the
/// export has a place, or has no socket.
fn default_socket(export: &ExportSpec) -> Outcome<Option<PathBuf>> {
    let is_vhost_user = matches!(export.kind, ExportKind::VhostUserBlk | ExportKind::VhostUserNet);
    if !is_vhost_user || export.socket.is_some() || export.fd.is_some() {
        return Ok(None);
    }
    Ok(Some(run_folder::make("give socket=PATH")?.join(format!("{}.sock", export.name))))
}

fn export(client: &mut Client, command: ExportCommand, quiet: bool) -> Outcome {
    match command {
        ExportCommand::Add { mut export } => {
            let made = default_socket(&export)?;
            export.socket = export.socket.or(made.clone());
            check_one_place(&export).map_err(|e| Failure::Usage(e.to_string()))?;
            export.map_paths(|path| absolute(Some(path)).map(Option::unwrap_or_default))?;
            let value = to_value(&export)?;
            let places = [export.socket_path(), export.mountpoint.as_deref()].into_iter().flatten();
            let certificates = export.tls_certificates.iter();
            let certificates = certificates.flat_map(|folder| Wanted::file(folder, false));
            let wanted = places.flat_map(Wanted::folder_of).chain(certificates).collect();
            passing::with(client, |_| Ok(wanted), &[], |client| send(client, "export-add", value))?;
            // The path is the answer of the command; a script may need it.
            made.map_or(Ok(()), |socket| print(&format!("{}\n", socket.display())))
        }
        ExportCommand::Remove { name, force } => {
            let told: Value = call(client, "export-remove", json!({ "name": name, "force": force }))?;
            if told["disconnected"] == true {
                print_line(&format!("{name} is removed; its clients were disconnected"))?;
            }
            let number = |key: &str| told[key].as_u64().unwrap_or_default();
            let bytes = number("read-bytes").saturating_add(number("write-bytes"));
            // Zero says nothing: an earlier daemon reports no bytes, and with passthrough there are
            // none.
            if bytes > 0 && !quiet {
                let lasted = Duration::try_from_secs_f64(told["seconds"].as_f64().unwrap_or_default());
                print(&summary(&format!("{} moved", one_line(&name)), bytes, lasted.unwrap_or_default()))?;
            }
            Ok(())
        }
        ExportCommand::List(ListArgs { json: false }) => {
            print(&show::exports(&started::<Vec<ExportInfo>>(client, "query-exports")?))
        }
        ExportCommand::List(args) => list(client, "query-exports", args, show::exports),
    }
}
