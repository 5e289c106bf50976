//! The daemon's log. It goes to stderr and is quiet by default. If journald reads stderr, lines
//! have its format.
//!
//! Front ends cannot fill the log. Each export has a session thread. [`LINES`] limits the lines
//! that each place in the code may write on such a thread. The next line that is written is
//! preceded by the number of lines that were left out. With -vv there is no limit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::time::Instant;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use vshunt_vhost_user::THREAD_PREFIX;
use vshunt_vhost_user::rate::Rate;

/// Lines of one kind and one export: burst, and lines per second after it.
const LINES: Rate = Rate::new(100, 10);

/// Starts logging. `verbose` is the number of `-v` flags; `quiet` logs errors only.
pub(crate) fn start(program: &'static str, verbose: u8, quiet: bool) {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::ERROR,
        (_, 0) => LevelFilter::WARN,
        (_, 1) => LevelFilter::INFO,
        (_, 2) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let journal = stderr_is_journal();
    let limited = level <= LevelFilter::INFO;
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| Output)
        .event_format(Lines { program, journal, limited })
        .try_init();
}

/// Standard error, without errors. A line that cannot be written (a full disk, a pipe whose reader
/// has ended) is dropped. Otherwise the library would report the error to stderr, too, fail again,
/// and panic.
struct Output;

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether stderr is the stream that JOURNAL_STREAM describes (systemd.exec(5)). The
/// variable alone is not enough: a shell under systemd passes it to programs whose stderr is a
/// terminal.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    rustix::fs::fstat(io::stderr()).is_ok_and(|s| stream == format!("{}:{}", s.st_dev, s.st_ino))
}

/// Formats a line as `vshunt: warning: message name=value`, or with a priority of sd-daemon(3)
/// before it.
struct Lines {
    program: &'static str,
    journal: bool,
    /// Whether the lines of session threads are limited.
    limited: bool,
}

impl Lines {
    /// Writes the beginning of a line.
    fn begin(&self, writer: &mut Writer<'_>, level: Level) -> fmt::Result {
        let (priority, word) = match level {
            Level::ERROR => (3, "error"),
            Level::WARN => (4, "warning"),
            Level::INFO => (6, "info"),
            Level::DEBUG => (7, "debug"),
            Level::TRACE => (7, "trace"),
        };
        match self.journal {
            true => write!(writer, "<{priority}>"),
            false => write!(writer, "{}: {word}: ", self.program),
        }
    }
}

/// The lines of one kind on this thread.
struct Kind {
    rate: Rate,
    left_out: u64,
}

thread_local! {
    /// The lines that this thread has written, by the place in the code (the name of an event is
    /// its file and line). Only session threads have entries.
    static WRITTEN: RefCell<HashMap<&'static str, Kind>> = RefCell::default();
}

/// Returns the number of lines left out before this one, or `None` if this line is left out.
fn passes(kind: &'static str, now: Instant) -> Option<u64> {
    WRITTEN.with_borrow_mut(|written| {
        let kind = written.entry(kind).or_insert(Kind { rate: LINES, left_out: 0 });
        if kind.rate.take(now) {
            return Some(std::mem::take(&mut kind.left_out));
        }
        kind.left_out += 1;
        None
    })
}

fn on_session_thread() -> bool {
    std::thread::current().name().is_some_and(|name| name.starts_with(THREAD_PREFIX))
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
        let level = *event.metadata().level();
        if self.limited && on_session_thread() {
            match passes(event.metadata().name(), Instant::now()) {
                None => return Ok(()),
                Some(0) => {}
                Some(n) => {
                    self.begin(&mut writer, level)?;
                    writeln!(writer, "{n} lines like the next one were left out")?;
                }
            }
        }
        self.begin(&mut writer, level)?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that a thread of this name writes if it logs one message 5,000 times and
    /// another one once.
    fn written(thread: &str, limited: bool) -> Vec<String> {
        let sink = Sink::default();
        let to = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .event_format(Lines { program: "p", journal: false, limited })
            .finish();
        let write = move || {
            tracing::subscriber::with_default(subscriber, || {
                (0..5000).for_each(|_| tracing::warn!("one"));
                tracing::warn!("another");
            });
        };
        std::thread::Builder::new().name(thread.to_owned()).spawn(write).unwrap().join().unwrap();
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_front_end_cannot_fill_the_log() {
        let lines = written("vu-x", true);
        let one = lines.iter().filter(|line| *line == "p: warning: one").count();
        assert!((100..5000).contains(&one), "{one}");
        assert_eq!(lines.last().unwrap(), "p: warning: another");
        for (thread, limited) in [("vu-x", false), ("ctl-1", true)] {
            assert_eq!(written(thread, limited).len(), 5001, "{thread}");
        }
    }

    #[test]
    fn the_next_line_says_how_many_were_left_out() {
        let (start, second) = (Instant::now(), std::time::Duration::from_secs(1));
        let at = |now| passes("a test", now);
        assert!((0..100).all(|_| at(start) == Some(0)));
        assert!((0..312).all(|_| at(start).is_none()));
        assert_eq!((at(start + second), at(start + second)), (Some(312), Some(0)));
    }
}
