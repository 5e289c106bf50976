//! How a command ends: an error with an exit code and a message for stderr, and the output on
//! stdout.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use vshunt_sandbox as sandbox;
use vshunt_types::error::Error;

/// Why a command did not succeed: the exit code and the message for stderr.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Exit code 1.
    Failed(String),
    /// Exit code 2: the command line or the configuration file is wrong.
    Usage(String),
    /// Exit code 3: no daemon answers.
    Unreachable(String),
    /// Several lines, with this exit code. Texts of the other kinds are one line each.
    Lines(u8, Vec<String>),
    /// The reader of stdout has closed it. There is nothing to print, and the exit code is 0.
    OutputClosed,
    /// The messages are printed already. The exit code is this one.
    Status(u8),
}

impl Failure {
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::OutputClosed => 0,
            Self::Status(code) | Self::Lines(code, _) => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) | Self::Usage(why) | Self::Unreachable(why) => f.write_str(&one_line(why)),
            Self::Lines(_, lines) => {
                let lines: Vec<_> = lines.iter().map(|line| one_line(line)).collect();
                f.write_str(&lines.join("\n"))
            }
            Self::OutputClosed | Self::Status(_) => Ok(()),
        }
    }
}

/// The remedy that is appended to an error at the start of a daemon if the sandbox may be the
/// reason.
const REFUSED: &str =
    "; if its mode permits that, the sandbox does not: add --allow-path=FOLDER (docs/sandbox.md)";

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let remedy = match e.errno() {
            Some(libc::EACCES) if sandbox::bounds_paths() => REFUSED,
            _ => "",
        };
        Self::Failed(format!("{e}{remedy}"))
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Converts an error of clap. Help and version are successes that clap reports as errors; all
/// others are usage errors.
pub(crate) fn clap_failure<T>(e: clap::Error) -> Outcome<T> {
    if !e.use_stderr() {
        return Err(print(&e.render().to_string()).err().unwrap_or(Failure::OutputClosed));
    }
    let text = e.render().to_string();
    // Clap appends the usage and a hint at --help. They hide the message.
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|t| text.find(t)).min();
    let text = &text[..end.unwrap_or(text.len())];
    let word = text.strip_prefix("unexpected argument '").and_then(|rest| rest.split('\'').next());
    let remedy = match word {
        Some(key) if key.contains('=') && !key.starts_with('-') => {
            "; the keys of an option are joined by commas, without spaces"
        }
        _ => "",
    };
    let lines = format!("{text}{remedy}").lines().map(str::to_owned).collect();
    Err(Failure::Lines(Failure::Usage(String::new()).code(), lines))
}

/// Writes a warning of a command to stderr.
pub(crate) fn warn(text: &str) {
    note(&format!("warning: {text}"));
}

/// Writes a line of a command to stderr.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "vshunt: {}", one_line(text));
}

/// Returns the text with control characters escaped: a name that others chose must not reach a
/// terminal as a command, nor begin a new line.
pub(crate) fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_invisible)
}

/// Returns the text with control characters escaped, except ends of lines and tabs.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_invisible(c) && c != '\n' && c != '\t')
}

/// Returns whether a terminal obeys a character in place of showing it: control characters, and
/// those that end lines, have no width, or change the direction of the text around them.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

fn escaped(text: &str, which: fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(which) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match which(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Writes an answer of one line to stdout.
pub(crate) fn print_line(text: &str) -> Outcome {
    print(&format!("{}\n", one_line(text)))
}

/// Writes an answer to stdout. Names in it have to be [`one_line`] each.
pub(crate) fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    match out.write_all(printable(text).as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        Err(e) => Err(Failure::Failed(format!("cannot write to stdout: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable("a\x1b[2K\rb\n\tc"), "a\\u{1b}[2K\\rb\n\tc");
        assert_eq!(one_line("a\nb"), "a\\nb");
        assert_eq!(one_line("gpj.\u{202e}2\u{2028}"), "gpj.\\u{202e}2\\u{2028}");
        assert_eq!(Failure::Failed("x\x1b[31m".into()).to_string(), "x\\u{1b}[31m");
        assert!(matches!(one_line("plain é"), Cow::Borrowed(_)));
        assert_eq!(Failure::Usage("a\nvshunt: forged".into()).to_string(), "a\\nvshunt: forged");
        assert_eq!(Failure::Lines(2, vec!["a\nb".into(), "c".into()]).to_string(), "a\\nb\nc");
    }
}
