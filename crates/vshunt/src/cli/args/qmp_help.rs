//! The end of `vshunt qmp --help`, generated from the table of commands.

use std::fmt::Write as _;

use crate::qmp::COMMANDS;

/// The width of a list in a man page: with its indent, a line fits a terminal of 80 columns.
const COLUMNS: usize = 70;

/// Returns the end of `vshunt qmp --help`: all commands with their arguments and descriptions.
pub(crate) fn qmp_help() -> String {
    let mut text = String::from("Commands:\n  Arguments in brackets are optional.\n");
    for command in COMMANDS {
        wrap(&mut text, &format!("  {}", command.name), "      ", command.arguments);
        wrap(&mut text, "     ", "     ", command.about);
    }
    text.push_str(
        "\ndocs/reference/qmp.md lists all arguments and answers.\n\nExamples:\n  vshunt qmp query-queues\n  \
         vshunt qmp queue-attach '{\"export\": \"vm0\", \"index\": 3, \"worker\": 2}'",
    );
    text
}

/// Adds `words`, wrapped. The first line begins with `first`, all others with `indent`.
fn wrap(text: &mut String, first: &str, indent: &str, words: &str) {
    let mut line = first.to_owned();
    for word in words.split_whitespace() {
        if line.len() + 1 + word.len() > COLUMNS {
            let _ = writeln!(text, "{line}");
            line = indent.to_owned();
        }
        let _ = write!(line, " {word}");
    }
    let _ = writeln!(text, "{line}");
}
