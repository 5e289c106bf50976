//! The end of `vshunt qmp --help`, made from the table of commands.

use std::fmt::Write as _;

use crate::qmp::COMMANDS;

/// Widest line of a list in a page: an indented one fits a terminal of 80.
const COLUMNS: usize = 70;

/// What `vshunt qmp --help` adds: every command with its arguments and what it does.
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

/// Adds words to a line that begins with `first`; lines after it begin with `indent`.
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
