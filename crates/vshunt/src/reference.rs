//! The pages of docs/reference, and the dashboard. They are generated from the tables in code: the
//! command line, the table of commands with the structs of their arguments and answers, the
//! metrics, and the keys of the configuration file.
//!
//! `make reference` writes the pages. Without it the test compares them.

mod dashboard;
mod source;

use std::fmt::Write as _;
use std::path::Path;

use clap::{ArgAction, Command};
use serde_json::{Map, Value, json};

use self::source::{Member, Source};
use crate::qmp::{self, COMMANDS, events, tests as qmp_tests};
use crate::{cli, keyval, metrics, program};

/// The files with the structs, and the prefixes of their names in the table of commands.
const FILES: &[(&str, &str)] = &[
    ("crates/vshunt-types/src/spec.rs", ""),
    ("crates/vshunt-types/src/spec/balance.rs", ""),
    ("crates/vshunt-types/src/spec/job.rs", ""),
    ("crates/vshunt-types/src/spec/limits.rs", ""),
    ("crates/vshunt-types/src/spec/latency.rs", ""),
    ("crates/vshunt-types/src/spec/net.rs", ""),
    ("crates/vshunt-types/src/spec/port.rs", ""),
    ("crates/sandbox/src/lib.rs", ""),
    ("crates/vshunt/src/config.rs", "config::"),
    ("crates/vshunt/src/config/file.rs", "config::"),
    ("crates/vshunt/src/qmp/context.rs", "context::"),
    ("crates/vshunt/src/qmp/commands/blockstats.rs", "blockstats::"),
    ("crates/vshunt/src/qmp/commands/fdset.rs", "fdset::"),
    ("crates/vshunt/src/qmp/commands/jobs.rs", "jobs::"),
    ("crates/vshunt/src/qmp/commands/native.rs", "native::"),
    ("crates/vshunt/src/qmp/commands/qemu.rs", "qemu::"),
    ("crates/vshunt/src/qmp/commands/snapshot.rs", "snapshot::"),
    ("crates/vshunt/src/qmp/commands/transaction.rs", "transaction::"),
    ("crates/vshunt/src/qmp/commands/throttle.rs", "throttle::"),
];

/// The objects in lists and in `status --json`, in the order of the page.
const OBJECTS: &[&str] = &[
    "DiskInfo",
    "ConnectionsInfo",
    "BitmapInfo",
    "NetInfo",
    "NetCounters",
    "NetAddress",
    "ExportInfo",
    "LimitsSpec",
    "BalanceInfo",
    "BalanceDecision",
    "ResizeDecision",
    "MountInfo",
    "PortInfo",
    "QueueInfo",
    "NetQueueCounters",
    "LatencyInfo",
    "LatencyFigures",
    "WorkerInfo",
    "JobInfo",
    "SandboxInfo",
];

const MADE: &str = "<!-- Made from the tables in code by `make reference`. Do not edit. -->\n\n";

/// The remedy if a page differs from the code.
const REMEDY: &str = "run `make reference`, and commit docs/reference and packaging/grafana";

fn root() -> &'static Path {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent);
    crates.expect("the crate is in the workspace")
}

fn source() -> Source {
    let mut source = Source::default();
    for (path, prefix) in FILES {
        source.add(root(), path, prefix);
    }
    source
}

/// Returns the text of a cell of a table, with `|` escaped.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Replaces the names of pages in a text (`see backup.md`) by links.
fn linked(text: &str) -> String {
    let mut text = text.to_owned();
    for page in [
        "backup.md",
        "snapshots.md",
        "sandbox.md",
        "control.md",
        "reference/metrics.md",
        "guide/limits.md",
        "guide/workers.md",
    ] {
        let from = text.replace(&format!("docs/{page}"), page);
        text = from.replace(page, &format!("[{page}](../{page})"));
    }
    text
}

fn table(out: &mut String, members: &[Member], with_optional: bool) {
    let (head, rule) = if with_optional { (" required |", " --- |") } else { ("", "") };
    let _ = write!(out, "| member | type |{head} meaning |\n| --- | --- |{rule} --- |\n");
    for m in members {
        let optional = match (with_optional, m.optional) {
            (false, _) => "",
            (true, true) => " |",
            (true, false) => " yes |",
        };
        let _ = writeln!(out, "| `{}` | {} |{optional} {} |", m.name, cell(&m.kind), cell(&linked(&m.about)));
    }
    out.push('\n');
}

/// Returns the members that a command takes: those of one struct, or of several (`A+B`).
fn arguments(source: &Source, takes: &str) -> Vec<Member> {
    takes.split('+').flat_map(|name| source.members(name)).collect()
}

fn qmp() -> String {
    let source = source();
    let mut out = String::from("# QMP commands and events\n\n");
    out.push_str(MADE);
    out.push_str(
        "[The control protocol](../control.md) explains how commands are sent, and the errors. A member that is not listed is \
         refused. Sizes are in bytes.\n\n## Commands\n\n| command | meaning |\n| --- | --- |\n",
    );
    for c in COMMANDS {
        let _ = writeln!(out, "| [`{0}`](#{0}) | {1} |", c.name, cell(&linked(c.about)));
    }
    for c in COMMANDS {
        let _ = write!(out, "\n### {}\n\n{}\n\n", c.name, linked(c.about));
        match keys_of(c.takes) {
            Some((what, anchor)) => {
                let _ = write!(out, "Arguments: the [keys of {what}](config.md#{anchor}).\n\n");
            }
            None => match arguments(&source, c.takes) {
                members if members.is_empty() => out.push_str("No arguments.\n\n"),
                members => table(&mut out, &members, true),
            },
        }
        let returns = match c.returns {
            "" => "an empty object".to_owned(),
            list if list.starts_with('[') => {
                let name = list.trim_matches(['[', ']']);
                format!("a list of [{name}](#{})", name.to_lowercase())
            }
            name if OBJECTS.contains(&name) => format!("[{name}](#{})", name.to_lowercase()),
            text => text.to_owned(),
        };
        let _ = writeln!(out, "Returns: {returns}.");
    }
    out.push_str("\n## Objects\n\n`vshunt status --json` shows the same objects as the commands.\n");
    for name in OBJECTS {
        let _ = write!(out, "\n### {name}\n\n{}\n\n", source.about(name));
        table(&mut out, &source.members(name), false);
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out.push_str("\n### Drop reasons\n\nEach member of `drops` counts the frames that were dropped for this reason.\n\n");
    out.push_str("| member | the frame was dropped because |\n| --- | --- |\n");
    for (name, meaning) in drop_reasons() {
        let _ = writeln!(out, "| `{name}` | {} |", cell(&meaning));
    }
    out.push_str("\n## Events\n\n| event | data | meaning |\n| --- | --- | --- |\n");
    for event in events::EVENTS {
        let members: Vec<_> = event.members.iter().map(|m| format!("`{m}`")).collect();
        let _ = writeln!(out, "| `{}` | {} | {} |", event.name, members.join(", "), cell(event.about));
    }
    out
}

/// Returns the place in config.md that describes the keys of a struct, if there is one.
fn keys_of(takes: &str) -> Option<(&'static str, &'static str)> {
    match takes {
        "DiskSpec" => Some(("a disk", "disk")),
        "NetSpec" => Some(("a network", "net")),
        "ExportSpec" => Some(("an export", "export")),
        "WorkerSpec" => Some(("a worker", "worker")),
        _ => None,
    }
}

/// Returns the drop reasons. The list in spec/drops.rs is the argument of a macro, so it is read
/// line by line.
fn drop_reasons() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root().join("crates/vshunt-types/src/spec/drops.rs")).unwrap();
    let list = text.lines().skip_while(|line| *line != "reasons! {").skip(1).take_while(|line| *line != "}");
    let (mut reasons, mut meaning) = (Vec::new(), String::new());
    for line in list {
        match line.trim().strip_prefix("/// ") {
            Some(text) if meaning.is_empty() => meaning = text.to_owned(),
            Some(text) => meaning = format!("{meaning} {text}"),
            None => {
                let name = line.split('"').nth(1).expect("a name").to_owned();
                reasons.push((name, std::mem::take(&mut meaning)));
            }
        }
    }
    reasons
}

fn config() -> String {
    let source = source();
    let mut out = String::from("# Configuration\n\n");
    out.push_str(MADE);
    let _ = write!(
        out,
        "`vshunt serve --config FILE` reads a TOML file. Disks, networks, exports and workers have the same keys in the file, in \
         flags (`--disk name=d0,file=disk.img`) and in QMP (`disk-add`). Flags add to the file; a flag for a single setting \
         replaces the setting of the file. Paths are relative to the working directory.\n\n\
         Sizes are numbers of bytes; the file and flags also take {}, {}. In flags a list is \
         `key=value,key=value`, a comma inside a value is written `,,`, and a boolean is `on` or `off`. A list of CPUs is written \
         `0-3,6` or `all` in the file and in flags.\n\n\
         [packaging/vshunt.toml](../../packaging/vshunt.toml) is an example.\n\n## Settings\n\n",
        keyval::size_units!(),
        keyval::size_rule!(),
    );
    let settings: Vec<_> = source.members("config::File");
    table(&mut out, &settings, false);
    for (heading, name) in [
        ("disk", "DiskSpec"),
        ("net", "NetSpec"),
        ("export", "ExportSpec"),
        ("LimitsSpec", "LimitsSpec"),
        ("worker", "WorkerSpec"),
    ] {
        let _ = write!(out, "## {heading}\n\n{}\n\n", source.about(name));
        table(&mut out, &source.members(name), true);
    }
    let _ = write!(out, "## attach\n\n{}\n\n", source.about("config::AttachSpec"));
    table(&mut out, &source.members("config::AttachSpec"), true);
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn metrics_page() -> String {
    let mut out = String::from("# Metrics\n\n");
    out.push_str(MADE);
    out.push_str(
        "[Operations](../guide/operations.md#metrics) explains how metrics are served, and has examples. A metric of something \
         that does not exist is absent. With `engine=kernel` the queues of a network device have no counters.\n\n\
         | metric | type | labels | meaning |\n| --- | --- | --- | --- |\n",
    );
    for row in metrics::families::tests::rows() {
        let _ = writeln!(out, "| {} |", row.map(|text| cell(&text)).join(" | "));
    }
    out
}

fn flags() -> String {
    let mut out = String::from("# Commands and flags\n\n");
    out.push_str(MADE);
    out.push_str("The same text is in `--help` and in the man pages.\n");
    for command in std::iter::once(cli::command()).chain(program::commands()) {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        flags_of(&mut out, &command, true);
    }
    out
}

fn flags_of(out: &mut String, command: &Command, is_root: bool) {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let text =
        |styled: Option<&clap::builder::StyledStr>| styled.map(ToString::to_string).unwrap_or_default();
    let _ = write!(out, "\n## {name}\n\n");
    let about = match text(command.get_long_about()) {
        long if long.is_empty() => text(command.get_about()),
        long => long,
    };
    let (first, rest) = about.split_once("\n\n").unwrap_or((&about, ""));
    let end = if first.ends_with('.') { "" } else { "." };
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    let _ = write!(out, "{}{end}\n\n```text\n{usage}\n```\n", linked(first));
    if !rest.is_empty() {
        let _ = write!(out, "\n{}\n", linked(rest));
    }
    let shown = |a: &&clap::Arg| !a.is_hide_set() && (is_root || !a.is_global_set());
    let shown = |a: &&clap::Arg| shown(a) && !matches!(a.get_id().as_str(), "help" | "version");
    if command.get_arguments().any(|a| shown(&a)) {
        out.push_str("\n| argument | meaning |\n| --- | --- |\n");
        for arg in command.get_arguments().filter(shown) {
            let help = text(arg.get_long_help().or(arg.get_help())).replace("\n\n", ". ");
            let mut help = help.trim_end_matches('.').to_owned() + ".";
            let values: Vec<_> =
                arg.get_possible_values().iter().map(|v| format!("`{}`", v.get_name())).collect();
            if !values.is_empty() && arg.get_action().takes_values() {
                let _ = write!(help, " Values: {}.", values.join(", "));
            }
            let default: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
            if !default.is_empty() && arg.get_action().takes_values() {
                let _ = write!(help, " Default: `{}`.", default.join(" "));
            }
            let _ = writeln!(out, "| {} | {} |", cell(&argument(arg)), cell(&linked(&help)));
        }
    }
    let after = text(command.get_after_long_help());
    if !after.is_empty() {
        let _ = write!(out, "\n```text\n{}\n```\n", after.trim_end());
    }
    for child in command.get_subcommands() {
        flags_of(out, child, false);
    }
}

/// Returns a flag as `-c`, `--control` `SOCKET`, or the name of an argument without a flag.
fn argument(arg: &clap::Arg) -> String {
    let values: Vec<_> = arg.get_value_names().unwrap_or_default().iter().map(|v| v.as_str()).collect();
    let values = values.join(" ");
    let short = arg.get_short().map(|c| format!("-{c}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    match (short, long) {
        (None, None) => format!("`{values}`"),
        (short, long) => {
            let names: Vec<_> = short.into_iter().chain(long).collect();
            let names = names.join("`, `");
            if takes { format!("`{names} {values}`") } else { format!("`{names}`") }
        }
    }
}

#[test]
fn the_pages_say_what_the_code_does() {
    let write = std::env::var_os("VSHUNT_REFERENCE").is_some_and(|v| v == "write");
    for (name, page) in [
        ("docs/reference/flags.md", flags()),
        ("docs/reference/qmp.md", qmp()),
        ("docs/reference/metrics.md", metrics_page()),
        ("docs/reference/config.md", config()),
        ("packaging/grafana/vshunt.json", dashboard::dashboard(&metrics::families::tests::rows())),
    ] {
        let path = root().join(name);
        if write {
            std::fs::write(&path, &page).unwrap();
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = there.lines().zip(page.lines()).find(|(a, b)| a != b);
        assert!(there == page, "{name} differs from the code; {REMEDY}: {differs:?}");
    }
}

/// A command reads the struct that the table names: the error of serde lists its members.
#[test]
fn the_table_names_the_structs_that_are_read() {
    let source = source();
    let (context, _stopped) = qmp_tests::context();
    for c in COMMANDS {
        let mut members = Map::from_iter([("@".to_owned(), Value::Null)]);
        if c.name == "worker-set" {
            members.insert("id".into(), json!(77));
        }
        let error = qmp::run(&context, c.name, members, None).unwrap_err().desc;
        let mut want: Vec<String> = arguments(&source, c.takes).into_iter().map(|m| m.name).collect();
        want.retain(|name| c.name != "worker-set" || name != "id");
        want.sort();
        let listed = error.split_once("expected ").map_or("", |(_, list)| list);
        let mut got: Vec<String> = listed.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        got.sort();
        assert_eq!(got, want, "{}: the table says that it reads {}; it says: {error}", c.name, c.takes);
    }
}

/// `vshunt qmp --help` names each member of the struct of a command, except those that have no
/// effect there.
#[test]
fn the_help_names_each_argument() {
    let (source, mut missing) = (source(), Vec::new());
    for c in COMMANDS {
        let words: Vec<_> =
            c.arguments.split(|x: char| !x.is_alphanumeric() && x != '-' && x != '_').collect();
        for m in arguments(&source, c.takes) {
            let about = &m.about;
            let has_no_effect = ["Only", "Refused", "Accepted"].iter().any(|word| about.starts_with(word))
                || about.contains("Not over the control socket")
                // What a worker is does not change.
                || (c.name == "worker-set" && ["kind", "export"].contains(&m.name.as_str()));
            // "of each rate NAME_max, NAME_max_length"
            let rate = m.name.trim_end_matches("_length").strip_suffix("_max");
            let is_named = words.contains(&m.name.as_str())
                || rate.is_some_and(|rate| words.contains(&rate) && words.contains(&"NAME_max_length"));
            let may_be_left_out = m.optional && has_no_effect;
            if !is_named && !may_be_left_out {
                missing.push(format!("{} of {}", m.name, c.name));
            }
        }
    }
    assert!(missing.is_empty(), "vshunt qmp --help does not name {missing:?}");
}

/// `vshunt serve --help` names each key of a flag's list.
#[test]
fn the_help_names_each_key() {
    let (source, mut command) = (source(), cli::command());
    let serve = command.find_subcommand_mut("serve").expect("a subcommand");
    let help = serve.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let keys = help.split("Configuration file:").next().unwrap_or_default();
    let words: Vec<_> = keys.split(|c: char| !c.is_alphanumeric() && c != '-').collect();
    for name in ["DiskSpec", "NetSpec", "ExportSpec", "WorkerSpec"] {
        for m in source.members(name) {
            assert!(
                words.contains(&m.name.as_str()),
                "vshunt serve --help does not name {} of {name}",
                m.name
            );
        }
    }
}

/// Each member and each command has a meaning.
#[test]
fn nothing_is_left_unsaid() {
    let source = source();
    for c in COMMANDS {
        assert!(c.about.ends_with('.'), "{}", c.name);
        for m in arguments(&source, c.takes) {
            assert!(m.about.ends_with('.'), "{} of {}: {:?}", m.name, c.takes, m.about);
        }
    }
    for m in OBJECTS.iter().flat_map(|name| source.members(name)) {
        assert!(m.about.ends_with('.'), "{}: {:?}", m.name, m.about);
    }
}
