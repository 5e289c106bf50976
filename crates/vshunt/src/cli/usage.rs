//! What `vshunt`, `vshunt worker` and other commands without the subcommand that they need print:
//! the subcommands, and the first examples of their help.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};

use super::args::Cli;
use super::other_names;
use crate::image::absent;
use crate::outcome::{Failure, Outcome, clap_failure};

/// Examples at most.
const EXAMPLES: usize = 3;

/// The end of a help text that has examples.
const HEADING: &str = "Examples:\n";

/// Converts an error of clap, and prints the usage if a subcommand is missing.
pub(super) fn failure<T>(e: clap::Error, args: &[OsString]) -> Outcome<T> {
    let missing = [ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, ErrorKind::MissingSubcommand];
    if let Some(why) = absent(&e, args).or_else(|| other_name(&e, args)) {
        return Err(Failure::Usage(why));
    }
    if !missing.contains(&e.kind()) {
        return clap_failure(e);
    }
    let mut command = Cli::command();
    command.build();
    let text = usage(named(command, args));
    // The exit code says the same if stderr is closed.
    let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
    Err(Failure::Status(Failure::Usage(String::new()).code()))
}

/// Returns the message for an option or a command of qemu-img that `vshunt image` does not have.
fn absent(e: &clap::Error, args: &[OsString]) -> Option<String> {
    let mut words = args.iter().filter_map(|arg| arg.to_str()).skip_while(|word| *word != "image").skip(1);
    let command = words.find(|word| !word.starts_with('-'))?;
    let text = |kind| match e.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match e.kind() {
        ErrorKind::UnknownArgument => {
            let name = text(ContextKind::InvalidArg)?;
            absent::option(command, name).map(|why| format!("image {command} has no {name}: {why}"))
        }
        ErrorKind::InvalidSubcommand => {
            let name = text(ContextKind::InvalidSubcommand)?;
            absent::command(name).map(|why| format!("there is no command image {name}: {why}"))
        }
        _ => None,
    }
}

/// Returns the message for a command that has another name in vshunt.
fn other_name(e: &clap::Error, args: &[OsString]) -> Option<String> {
    let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(name))) =
        (e.kind(), e.get(ContextKind::InvalidSubcommand))
    else {
        return None;
    };
    let mut command = Cli::command();
    command.build();
    let before: Vec<_> = args.iter().take_while(|arg| *arg != name.as_str()).cloned().collect();
    let at = named(command, &before);
    let group = at.get_bin_name().and_then(|all| all.strip_prefix("vshunt ")).unwrap_or_default();
    let space = if group.is_empty() { "" } else { " " };
    other_names::remedy(group, name).map(|why| format!("there is no command {group}{space}{name}: {why}"))
}

/// Returns the last command that the arguments name. Words that are no command are values of
/// options.
fn named(command: Command, args: &[OsString]) -> Command {
    let words = args.iter().skip(1).filter_map(|arg| arg.to_str());
    words.fold(command, |at, word| at.find_subcommand(word).cloned().unwrap_or(at))
}

/// Returns the usage of a command: its subcommands, and its first examples.
fn usage(mut command: Command) -> String {
    let mut text = format!("{}\n\nCommands:\n", command.render_usage());
    let children: Vec<_> = command
        .get_subcommands()
        .filter(|child| !child.is_hide_set() && child.get_name() != "help")
        .collect();
    let width = children.iter().map(|child| child.get_name().len()).max().unwrap_or(0);
    for child in children {
        let about = child.get_about().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "  {:<width$}  {about}", child.get_name());
    }
    let help = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    if let Some((_, examples)) = help.as_deref().and_then(|help| help.split_once(HEADING)) {
        let _ = write!(text, "\n{HEADING}{}", first(examples));
    }
    let name = command.get_bin_name().unwrap_or("vshunt").to_owned();
    let _ = writeln!(text, "\n{name} --help has more.");
    text
}

/// Returns the first examples, each with the lines that continue it.
fn first(examples: &str) -> String {
    let mut text = String::new();
    let (mut count, mut continues) = (0, false);
    for line in examples.lines() {
        count += usize::from(!continues);
        if count > EXAMPLES || line.is_empty() {
            break;
        }
        continues = line.ends_with('\\');
        let _ = writeln!(text, "{line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn of(words: &str) -> String {
        let args: Vec<OsString> = words.split(' ').map(Into::into).collect();
        let mut command = Cli::command();
        command.build();
        usage(named(command, &args))
    }

    #[test]
    fn each_command_with_subcommands_has_three_examples() {
        let mut command = Cli::command();
        command.build();
        let groups = command.get_subcommands().filter(|child| child.has_subcommands());
        let names: Vec<_> = groups.map(|child| child.get_name().to_owned()).filter(|n| n != "help").collect();
        assert!(names.len() > 6, "{names:?}");
        for words in std::iter::once("vshunt".to_owned()).chain(names.iter().map(|n| format!("vshunt {n}"))) {
            let text = of(&words);
            let (_, examples) = text.split_once(HEADING).unwrap_or_else(|| panic!("{words}: {text}"));
            assert_eq!(examples.matches("  vshunt ").count(), EXAMPLES, "{text}");
            assert!(text.starts_with(&format!("Usage: {words} ")), "{text}");
            assert!(text.ends_with(&format!("\n{words} --help has more.\n")), "{text}");
        }
    }

    /// Returns the message for a command line that is refused.
    fn said(words: &str) -> String {
        let args: Vec<OsString> = words.split(' ').map(Into::into).collect();
        let failure = failure::<()>(Cli::try_parse_from(&args).unwrap_err(), &args).unwrap_err();
        assert_eq!(failure.code(), 2, "{words}");
        failure.to_string()
    }

    #[test]
    fn options_of_qemu_img_that_are_absent_have_a_reason() {
        for (words, want) in [
            ("convert -m 8 a b", "image convert has no -m: vshunt chooses"),
            ("convert -B x a b", "image convert has no -B: "),
            ("convert --salvage a b", "has no --salvage: "),
            ("convert -t none a b", "has no -t: "),
            ("info --image-opts a", "image info has no --image-opts: "),
            ("resize -U a 1G", "image resize has no -U: "),
            ("commit a", "there is no command image commit: "),
            ("info --nonsense a", "unexpected argument '--nonsense'"),
        ] {
            let said = said(&format!("vshunt image {words}"));
            assert!(said.contains(want), "{words}: {said}");
        }
        // A table that names an option which there is would never be seen.
        let mut command = Cli::command();
        command.build();
        for child in command.find_subcommand("image").unwrap().get_subcommands() {
            for argument in child.get_arguments().filter(|argument| !argument.is_positional()) {
                let short = argument.get_short().map(|short| format!("-{short}"));
                let long = argument.get_long().map(|long| format!("--{long}"));
                for name in [short, long].into_iter().flatten() {
                    assert_eq!(absent::option(child.get_name(), &name), None, "{} {name}", child.get_name());
                }
            }
        }
    }

    #[test]
    fn commands_that_have_another_name_here_are_named() {
        for (words, want) in [
            ("stop", "there is no command stop: `vshunt quit` ends the daemon"),
            ("-c /s stop", "there is no command stop: `vshunt quit`"),
            ("umount /mnt", "no command umount: umount MOUNTPOINT"),
            ("delete d0", "no command delete: say of what: `vshunt disk remove`"),
            ("validate vm.toml", "no command validate: `vshunt config check`"),
            ("disk delete d0", "no command disk delete: it is called remove"),
            ("worker remove 1", "no command worker remove: it is called free"),
            // Spelled alike.
            ("statsu", "a similar subcommand exists: 'status'"),
        ] {
            let said = said(&format!("vshunt {words}"));
            assert!(said.contains(want), "{words}: {said}");
        }
    }

    #[test]
    fn values_of_options_are_no_commands() {
        assert!(of("vshunt -c /s worker").starts_with("Usage: vshunt worker "));
        assert!(of("vshunt --control=/s -v").starts_with("Usage: vshunt "));
        assert!(of("vshunt worker").contains("\n  free  Free a worker"));
    }
}
