//! The progress of a long operation: a bar on stderr if that is a terminal, or lines if the user
//! wants them.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use qcow2::check::Findings;

use super::units;
use crate::outcome::one_line;

/// The least time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

pub(crate) struct Bar(Shown);

enum Shown {
    Nothing,
    Bar(ProgressBar),
    Lines(Lines),
}

impl Bar {
    pub(crate) fn new(what: &str, quiet: bool) -> Self {
        match !quiet && io::stderr().is_terminal() {
            true => Self(Shown::Bar(bar(what, "{prefix} {bar:40} {percent:>3} %"))),
            false => Self(Shown::Nothing),
        }
    }

    /// Shows bytes, with the rate and the time that is left. `wanted`: the user asked for it, so
    /// that there are lines if stderr is not a terminal.
    pub(crate) fn bytes(what: &str, quiet: bool, wanted: bool) -> Self {
        const TEMPLATE: &str = "{prefix} {bar:25} {percent:>3} % {binary_bytes} of {binary_total_bytes}, \
                                {binary_bytes_per_sec}, {eta} left";
        Self(match (quiet, io::stderr().is_terminal()) {
            (true, _) => Shown::Nothing,
            (_, true) => Shown::Bar(bar(what, TEMPLATE)),
            (_, false) if wanted => Shown::Lines(Lines::new(what)),
            _ => Shown::Nothing,
        })
    }

    pub(crate) fn set(&mut self, done: u64, total: u64) {
        match &mut self.0 {
            Shown::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            Shown::Lines(lines) => lines.set(done, total),
            Shown::Nothing => {}
        }
    }
}

fn bar(what: &str, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(one_line(what).into_owned());
    bar
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Findings for Bar {
    fn found(&mut self, text: &str) {
        match &self.0 {
            Shown::Bar(bar) => bar.println(one_line(text)),
            _ => drop(writeln!(io::stderr(), "{}", one_line(text))),
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        self.set(done, total);
    }
}

/// Progress as lines on stderr.
struct Lines {
    what: String,
    start: Instant,
    last: Option<Instant>,
    done: Option<u64>,
}

impl Lines {
    fn new(what: &str) -> Self {
        Self { what: one_line(what).into_owned(), start: Instant::now(), last: None, done: None }
    }

    fn set(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        let due = self.last.is_none_or(|last| now - last >= LINE_EVERY) || done == total;
        if due && self.done != Some(done) {
            (self.last, self.done) = (Some(now), Some(done));
            let _ = writeln!(io::stderr(), "{}", line(&self.what, done, total, now - self.start));
        }
    }
}

/// Returns the line for `done` of `total` bytes after this time.
fn line(what: &str, done: u64, total: u64, spent: Duration) -> String {
    let percent = done as f64 * 100.0 / total.max(1) as f64;
    let rate = rate(done, spent);
    let left = match rate {
        0 => "unknown time".to_owned(),
        rate => {
            let s = total.saturating_sub(done).div_ceil(rate);
            format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
        }
    };
    let (done, total, rate) = (units::size(done), units::size(total), units::size(rate));
    format!("{what}: {percent:.1} %, {done} of {total}, {rate}/s, {left} left")
}

/// Returns bytes a second.
fn rate(bytes: u64, spent: Duration) -> u64 {
    // A microsecond at least, so that a division by 0 is impossible.
    let us = spent.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / us).unwrap_or(u64::MAX)
}

/// Returns the line at the end of an operation: bytes, seconds, rate.
pub(crate) fn summary(what: &str, bytes: u64, spent: Duration) -> String {
    format!(
        "{what} {} ({bytes} bytes) in {:.3} s, {}/s\n",
        units::size(bytes),
        spent.as_secs_f64(),
        units::size(rate(bytes, spent))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_bytes_rate_and_time() {
        let text = line("converting", 1 << 30, 4 << 30, Duration::from_secs(2));
        assert_eq!(text, "converting: 25.0 %, 1 GiB of 4 GiB, 512 MiB/s, 0:00:06 left");
        let text = line("converting", 0, 4 << 30, Duration::ZERO);
        assert_eq!(text, "converting: 0.0 %, 0 B of 4 GiB, 0 B/s, unknown time left");
        let text = summary("Copied", 5 << 20, Duration::from_millis(500));
        assert_eq!(text, "Copied 5 MiB (5242880 bytes) in 0.500 s, 10 MiB/s\n");
        assert_eq!(rate(u64::MAX, Duration::ZERO), u64::MAX);
    }
}
