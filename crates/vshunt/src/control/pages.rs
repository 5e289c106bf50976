//! Man pages and shell completions, made from the command line's own table.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::cli::Cli;
use super::program::BlkCli;
use super::{Failure, Outcome, api};

/// Writes one page for each command: vshunt.1, vshunt-serve.1, vshunt-worker-new.1, … and vshunt-blk.1.
pub(crate) fn write_man(directory: &Path) -> Outcome {
    let failed = |e: std::io::Error| {
        Failure::Failed(format!("cannot write man pages to {}: {e}", directory.display()))
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    for command in [Cli::command(), BlkCli::command()] {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        write_pages(&command, directory).map_err(failed)?;
    }
    Ok(())
}

fn write_pages(command: &Command, directory: &Path) -> std::io::Result<()> {
    for child in command.get_subcommands() {
        write_pages(child, directory)?;
    }
    let source = concat!("vshunt ", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone()).source(source).manual("vshunt manual").generate_to(directory).map(drop)
}

/// The completions of `vshunt` for `shell`.
pub(crate) fn completions(shell: Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vshunt", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// What `vshunt qmp --help` adds: every command with its arguments.
pub(crate) fn qmp_help() -> String {
    let mut text = String::from("Commands and their arguments; those in brackets may be left out:\n");
    for command in api::COMMANDS {
        let _ = writeln!(text, "  {} {}", command.name, command.arguments);
    }
    text.push_str(
        "\nExamples:\n  vshunt qmp query-queues\n  \
         vshunt qmp queue-attach '{\"export\": \"vm0\", \"index\": 3, \"worker\": 2}'",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_for_every_command() {
        let dir = tempfile::tempdir().unwrap();
        write_man(dir.path()).unwrap();
        for name in
            ["vshunt", "vshunt-serve", "vshunt-worker", "vshunt-worker-new", "vshunt-qmp", "vshunt-blk"]
        {
            let text = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(text.contains(".TH "), "{name}");
        }
        let main = std::fs::read_to_string(dir.path().join("vshunt.1")).unwrap();
        assert!(main.contains("no daemon answers"));
        assert!(!dir.path().join("vshunt-help.1").exists());
    }

    #[test]
    fn completions_name_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(completions(shell).contains("attach"), "{shell}");
        }
    }
}
