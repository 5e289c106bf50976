//! The daemon's log: to stderr, quiet unless asked, in the form that journald knows when it is the reader.

use std::fmt;
use std::io;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Starts logging. `verbose` counts `-v`; `quiet` leaves errors only.
pub(crate) fn start(program: &'static str, verbose: u8, quiet: bool) {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::ERROR,
        (_, 0) => LevelFilter::WARN,
        (_, 1) => LevelFilter::INFO,
        (_, 2) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let journal = stderr_is_journal();
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .event_format(Lines { program, journal })
        .try_init();
}

/// Whether stderr is the stream that JOURNAL_STREAM describes (systemd.exec(5)). The variable alone does not say so:
/// a shell under systemd hands it on to programs whose stderr is a terminal.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    rustix::fs::fstat(io::stderr()).is_ok_and(|s| stream == format!("{}:{}", s.st_dev, s.st_ino))
}

/// `vshunt: warning: what happened name=value`, or with sd-daemon(3)'s priority before it.
struct Lines {
    program: &'static str,
    journal: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let (priority, word) = match *event.metadata().level() {
            Level::ERROR => (3, "error"),
            Level::WARN => (4, "warning"),
            Level::INFO => (6, "info"),
            Level::DEBUG => (7, "debug"),
            Level::TRACE => (7, "trace"),
        };
        match self.journal {
            true => write!(writer, "<{priority}>")?,
            false => write!(writer, "{}: {word}: ", self.program)?,
        }
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
