//! The progress of a long operation: a bar on stderr, if that is a terminal.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use qcow2::check::Findings;

pub(crate) struct Bar(Option<ProgressBar>);

impl Bar {
    pub(crate) fn new(what: &str, quiet: bool) -> Self {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{prefix} {bar:40} {percent:>3} %");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(what.to_owned());
            bar
        });
        Self(bar)
    }

    pub(crate) fn set(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Findings for Bar {
    fn found(&mut self, text: &str) {
        match &self.0 {
            Some(bar) => bar.println(text),
            None => {
                let _ = writeln!(io::stderr(), "{text}");
            }
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        self.set(done, total);
    }
}
