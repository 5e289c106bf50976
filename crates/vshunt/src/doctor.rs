//! `vshunt doctor`: checks what vshunt needs on this host, and says what is missing and what that
//! means.
//!
//! Only the command line calls it, on the main thread. Each check tries what the daemon would do,
//! where that is possible, and undoes it. What must never happen: a change of the host, a module
//! that is loaded because its device is opened, a wait without a limit.
//!
//! | module | what it checks |
//! | --- | --- |
//! | `devices` | device files: FUSE, taps, the kernel engine, KVM |
//! | `place` | the folder for sockets, and the daemon on the control socket |
//! | `system` | the kernel, io_uring, Landlock, limits, CPUs |

mod devices;
mod place;
mod system;

use std::fmt::Write as _;
use std::path::PathBuf;

use serde::Serialize;

use crate::outcome::{Failure, Outcome, print};

/// The longest line of the report, if no word is longer.
const WIDTH: usize = 80;
/// Spaces before all lines of a finding but the first. The words of [`Status`] are shorter.
const INDENT: usize = 9;

/// The text after the flags in the help.
pub(crate) const AFTER: &str = "\
Each check prints one of:
  ok       vshunt can use it
  warning  vshunt can use it, but not as well as possible
  missing  vshunt cannot use it
then what was found, what this means here, and the remedy. It changes nothing
on the host, and loads no module.

Exit status:
  0  disks over vhost-user work on this host
  1  they do not: a check that has `required` in --json is missing

Keys of --json:
  works     whether disks over vhost-user work
  checks    the list of checks; each has these keys:
  check     name of the check
  status    ok, warning or missing
  required  whether disks over vhost-user need it
  found     what was found
  meaning   what this means for vshunt on this host
  remedy    what to do; null if nothing is to be done

Examples:
  vshunt doctor
  sudo -u libvirt-qemu vshunt doctor
  vshunt doctor --json | jq -r '.checks[] | select(.status != \"ok\") | .check'";

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// vshunt can use it.
    Ok,
    /// vshunt can use it, but not as well as possible.
    Warning,
    /// vshunt cannot use it.
    Missing,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Missing => "missing",
        }
    }
}

/// The result of one check. `--json` prints it with these names.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    status: Status,
    /// Whether disks over vhost-user need it.
    required: bool,
    found: String,
    meaning: String,
    remedy: Option<String>,
}

impl Finding {
    fn new(
        check: &'static str,
        status: Status,
        found: impl Into<String>,
        meaning: impl Into<String>,
    ) -> Self {
        let (found, meaning) = (found.into(), meaning.into());
        Self { check, status, required: false, found, meaning, remedy: None }
    }

    fn ok(check: &'static str, found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self::new(check, Status::Ok, found, meaning)
    }

    fn warning(check: &'static str, found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self::new(check, Status::Warning, found, meaning)
    }

    fn missing(check: &'static str, found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self::new(check, Status::Missing, found, meaning)
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    fn required(self) -> Self {
        Self { required: true, ..self }
    }
}

/// The whole report, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    works: bool,
    checks: Vec<Finding>,
}

/// Runs all checks and prints the report. `control` is the control socket that the user gave.
///
/// # Errors
/// A check is missing that disks over vhost-user need.
pub(crate) fn run(control: Option<&PathBuf>, json: bool) -> Outcome {
    let checks: Vec<_> =
        system::checks().into_iter().chain(devices::checks()).chain(place::checks(control)).collect();
    let lacking = lacking(&checks);
    let report = Report { works: lacking.is_empty(), checks };
    if json {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|e| Failure::Failed(format!("cannot write the report as JSON: {e}")))?;
        print(&format!("{text}\n"))?;
    } else {
        print(&text(&report))?;
    }
    match lacking.is_empty() {
        true => Ok(()),
        false => Err(Failure::Failed(format!(
            "disks over vhost-user do not work on this host; see the checks and their remedies: {}",
            lacking.join(", ")
        ))),
    }
}

/// Returns the checks without which no disk can be served over vhost-user.
fn lacking(checks: &[Finding]) -> Vec<&'static str> {
    let lacks = |finding: &&Finding| finding.required && finding.status == Status::Missing;
    checks.iter().filter(lacks).map(|finding| finding.check).collect()
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for finding in &report.checks {
        let mut lines = wrapped(&format!("{}: {}", finding.check, finding.found));
        lines.extend(wrapped(&finding.meaning));
        if let Some(remedy) = &finding.remedy {
            // Not wrapped, so that a command can be copied.
            lines.extend(format!("Remedy: {remedy}").split("; ").map(str::to_owned));
        }
        for (at, line) in lines.iter().enumerate() {
            let word = if at == 0 { finding.status.word() } else { "" };
            let _ = writeln!(out, "{word:INDENT$}{line}");
        }
    }
    if report.works {
        out.push_str("\nDisks over vhost-user work on this host.\n");
    }
    out
}

/// Breaks a text at its spaces into lines that are short enough.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if INDENT + line.chars().count() + 1 + word.chars().count() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_required_check_that_is_missing_says_that_nothing_works() {
        let one = |finding: Finding| lacking(&[finding]);
        assert!(one(Finding::missing("tun", "f", "m")).is_empty());
        assert!(one(Finding::warning("io_uring", "f", "m").required()).is_empty());
        assert_eq!(one(Finding::missing("io_uring", "f", "m").required()), ["io_uring"]);
    }

    #[test]
    fn the_report_is_wrapped_and_keeps_words_whole() {
        let word = "x".repeat(200);
        let finding = Finding::warning("fuse", "a ".repeat(100), "m").remedy(format!("as root: a {word}; b"));
        let text = text(&Report { works: true, checks: vec![finding] });
        assert!(text.starts_with("warning  fuse: a a a"));
        assert!(text.contains(&format!("\n         Remedy: as root: a {word}\n         b\n")), "{text}");
        assert!(text.lines().all(|line| line.len() <= WIDTH || line.contains(&word)), "{text}");
        assert!(text.ends_with("\n\nDisks over vhost-user work on this host.\n"));
    }

    #[test]
    fn the_help_names_each_key_of_the_json() {
        let report = Report { works: true, checks: vec![Finding::ok("c", "f", "m")] };
        let value = serde_json::to_value(&report).unwrap();
        let keys = value.as_object().unwrap().keys().chain(value["checks"][0].as_object().unwrap().keys());
        for key in keys {
            assert!(AFTER.contains(&format!("\n  {key:10}")), "{key}");
        }
    }

    #[test]
    fn the_checks_of_this_host_have_names_of_their_own_and_say_something() {
        let control = PathBuf::from("/nonexistent/c.sock");
        let checks: Vec<_> = system::checks()
            .into_iter()
            .chain(devices::checks())
            .chain(place::checks(Some(&control)))
            .collect();
        let mut names: Vec<_> = checks.iter().map(|finding| finding.check).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len());
        for finding in &checks {
            assert!(!finding.found.is_empty() && !finding.meaning.is_empty(), "{finding:?}");
            assert!(finding.status == Status::Ok || finding.remedy.is_some(), "{finding:?}");
        }
    }
}
