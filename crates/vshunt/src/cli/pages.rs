//! Man pages and shell completions, generated from the table of flags.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::args::Cli;
use crate::outcome::{Failure, Outcome};
use crate::program;

/// Writes one page for each command: vshunt.1, vshunt-serve.1, vshunt-worker-new.1, …, vshunt-blk.1
/// and vshunt-net.1.
pub(crate) fn write_man(directory: &Path) -> Outcome {
    let failed = |e: std::io::Error| {
        Failure::Failed(format!("cannot write man pages to {}: {e}", directory.display()))
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    for command in std::iter::once(Cli::command()).chain(program::commands()) {
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
    let man = Man::new(command.clone()).source(source).manual("vshunt manual");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|a| !a.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(text) = command.get_after_long_help() {
        page.extend_from_slice(sections(&text.to_string()).as_bytes());
    }
    std::fs::write(directory.join(man.get_filename()), page)
}

/// Returns the text after the options as sections of a page. A line `Heading:` without indent
/// starts a section, whose line breaks are kept. Text before the first one is the section NOTES: it
/// would belong to the last option otherwise.
fn sections(text: &str) -> String {
    let heading_of =
        |line: &'_ str| line.strip_suffix(':').filter(|h| !h.starts_with(' ')).map(str::to_owned);
    let mut out = String::new();
    if text.lines().next().is_some_and(|line| heading_of(line).is_none()) {
        out.push_str(".SH NOTES\n");
    }
    for line in text.lines() {
        let heading = heading_of(line);
        let line = match heading {
            Some(heading) => format!(".fi\n.SH {}\n.nf", heading.to_uppercase()),
            None => {
                let text = line.replace('\\', "\\e").replace('-', "\\-");
                // troff reads a line that starts with one of these as a request, and drops it.
                if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
            }
        };
        let _ = writeln!(out, "{line}");
    }
    out.push_str(".fi\n");
    out
}

/// Returns the completions of `vshunt` for `shell`.
pub(crate) fn completions(shell: Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vshunt", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_for_every_command() {
        let dir = tempfile::tempdir().unwrap();
        write_man(dir.path()).unwrap();
        for name in [
            "vshunt",
            "vshunt-serve",
            "vshunt-worker",
            "vshunt-worker-new",
            "vshunt-qmp",
            "vshunt-blk",
            "vshunt-net",
        ] {
            let text = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(text.contains(".TH "), "{name}");
        }
        let main = std::fs::read_to_string(dir.path().join("vshunt.1")).unwrap();
        assert!(main.contains(".SH EXIT STATUS") && main.contains("no daemon answers"));
        assert!(!main.contains(".SH EXTRA"));
        assert!(!dir.path().join("vshunt-help.1").exists());
    }

    #[test]
    fn a_line_that_starts_like_a_request_is_text() {
        let page = sections("Notes:\n'vshunt image' lists them.\n.x\nExamples:\n  vshunt status\n");
        assert_eq!(
            page,
            ".fi\n.SH NOTES\n.nf\n\\&'vshunt image' lists them.\n\\&.x\n.fi\n.SH EXAMPLES\n.nf\n  vshunt status\n.fi\n"
        );
    }

    #[test]
    fn text_after_the_options_is_a_section() {
        assert_eq!(
            sections("Guests continue.\n\nExamples:\n  vshunt status\n"),
            ".SH NOTES\nGuests continue.\n\n.fi\n.SH EXAMPLES\n.nf\n  vshunt status\n.fi\n"
        );
        let dir = tempfile::tempdir().unwrap();
        write_man(dir.path()).unwrap();
        for page in std::fs::read_dir(dir.path()).unwrap() {
            let page = page.unwrap().path();
            let text = std::fs::read_to_string(&page).unwrap();
            // The last argument has its own text, and at most one paragraph more.
            let last = text.rsplit(".TP\n").next().unwrap();
            let glued = last.split(".SH").next().unwrap().lines().filter(|line| line.is_empty()).count();
            assert!(glued <= 1, "{}: {last}", page.display());
        }
    }

    /// The help and the guide name all commands with exit codes of their own.
    #[test]
    fn commands_with_exit_codes_of_their_own_are_named() {
        let command = Cli::command();
        let guide = include_str!("../../../../docs/guide/operations.md");
        let own = "have codes of their own";
        let help = command.get_after_long_help().unwrap().to_string();
        let sentence = help.split(own).next().unwrap().lines().last().unwrap().to_owned();
        let guide = guide.lines().find(|line| line.contains("[codes of their own]")).unwrap();
        let image = command.find_subcommand("image").unwrap();
        let mut count = 0;
        for child in image.get_subcommands() {
            let after = child.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            if after.contains("Exit status:\n") {
                count += 1;
                let name = child.get_name();
                assert!(sentence.contains(&format!("{name}`")), "{name}: {sentence}");
                assert!(guide.contains(&format!("{name}`")), "{name}: {guide}");
            }
        }
        assert_eq!(count, 4);
    }

    /// clap does not wrap the line "Usage:", which may be longer.
    #[test]
    fn help_has_80_columns_at_most() {
        fn check(command: &mut Command, seen: &mut usize) {
            *seen += 1;
            for text in [command.render_help(), command.render_long_help()].map(|text| text.to_string()) {
                for line in text.lines().filter(|line| !line.starts_with("Usage: ")) {
                    assert!(line.chars().count() <= 80, "{}: {line}", command.get_name());
                }
            }
            command.get_subcommands_mut().for_each(|child| check(child, seen));
        }
        let mut seen = 0;
        for mut command in std::iter::once(Cli::command()).chain(program::commands()) {
            command.build();
            check(&mut command, &mut seen);
        }
        assert!(seen > 60, "{seen}");
    }

    #[test]
    fn completions_name_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(completions(shell).contains("attach"), "{shell}");
        }
    }
}
