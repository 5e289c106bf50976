//! The daemon's log. It goes to stderr and is quiet by default. If journald reads stderr, lines
//! have its format.
//!
//! Front ends cannot fill the log. Each export has a session thread. [`LINES`] limits the lines
//! that each place in the code may write on such a thread. The next line that is written is
//! preceded by the number of lines that were left out. With -vv there is no limit.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `style` | the formats of a line |
//! | `output` | stderr, which blocks no thread |
//! | `filter` | `-v`, `-q` and `RUST_LOG` |
//!
//! The native protocol of journald is not used. Its socket blocks a sender while journald is busy,
//! and long lines would need system calls that workers may not make. Priorities on stderr need
//! neither, and journald understands them by default.

mod filter;
mod output;
mod style;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::time::Instant;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;
use vshunt_vhost_user::THREAD_PREFIX;
use vshunt_vhost_user::rate::Rate;

use self::style::{Content, Fields, Style};
use crate::config::LogFormat;
use crate::config::args::LogArgs;
use crate::outcome::{Outcome, one_line};

/// Lines of one kind and one export: burst, and lines per second after it.
const LINES: Rate = Rate::new(100, 10);

/// The style of this process. Not set in programs that serve nothing.
static STYLE: OnceLock<Style> = OnceLock::new();

/// Starts logging. Without `format`, it depends on stderr: journald's if journald reads it,
/// otherwise text.
///
/// # Errors
/// RUST_LOG cannot be understood.
pub(crate) fn start(program: &'static str, args: LogArgs, format: Option<LogFormat>) -> Outcome {
    let filter::Filter { targets, level, unknown } = filter::wanted(args, std::env::var("RUST_LOG").ok())?;
    let usual = if stderr_is_journal() { LogFormat::Journald } else { LogFormat::Text };
    let style = Style { program, format: format.unwrap_or(usual), stamped: level >= LevelFilter::INFO };
    let style = *STYLE.get_or_init(|| style);
    output::start(|missing| {
        let text = format!("{missing} lines are missing here: stderr was full, or nothing read it");
        STYLE.get().map_or_else(String::new, |style| style.line(Level::WARN, Content::of(text)))
    });
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| output::Output)
        .event_format(Lines { style, limited: level <= LevelFilter::INFO });
    let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
    for target in unknown {
        tracing::warn!(
            "RUST_LOG: `{target}` is neither a level nor a module of this program, so it has no effect; levels are off, \
             error, warn, info, debug and trace, modules for example vshunt_vhost_user"
        );
    }
    Ok(())
}

/// Writes a line for people that is no event, whatever the level is: what is served.
pub(crate) fn notice(program: &'static str, text: &str) {
    let _ = output::Output.write(style_of(program).plain("notice", 5, &one_line(text)).as_bytes());
}

/// Writes the reason why the program ends, in the format of its log. May wait: nothing is served.
pub(crate) fn failure(program: &'static str, text: &str) {
    let _ = io::stderr().write_all(style_of(program).plain("error", 3, text).as_bytes());
}

fn style_of(program: &'static str) -> Style {
    let plain = || Style { program, format: LogFormat::Text, stamped: false };
    STYLE.get().copied().unwrap_or_else(plain)
}

/// Returns whether stderr is the stream that JOURNAL_STREAM describes (systemd.exec(5)). The
/// variable alone is not enough: a shell under systemd passes it to programs whose stderr is a
/// terminal.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    rustix::fs::fstat(io::stderr()).is_ok_and(|s| stream == format!("{}:{}", s.st_dev, s.st_ino))
}

/// Formats events in a style.
struct Lines {
    style: Style,
    /// Whether the lines of session threads are limited.
    limited: bool,
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
        let mut left_out = None;
        if self.limited && on_session_thread() {
            match passes(event.metadata().name(), Instant::now()) {
                None => return Ok(()),
                Some(n) => left_out = Some(n).filter(|n| *n > 0),
            }
        }
        let content = match self.style.format {
            LogFormat::Json => {
                let mut fields = Fields::default();
                event.record(&mut fields);
                Content { target: Some(event.metadata().target().to_owned()), ..fields.0 }
            }
            LogFormat::Text | LogFormat::Journald => {
                let mut text = String::new();
                context.format_fields(Writer::new(&mut text), event)?;
                Content::of(text)
            }
        };
        writer.write_str(&self.style.line(*event.metadata().level(), Content { left_out, ..content }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
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
    fn written(thread: &str, limited: bool, format: LogFormat) -> Vec<String> {
        let sink = Sink::default();
        let to = sink.clone();
        let style = Style { program: "p", format, stamped: false };
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .event_format(Lines { style, limited })
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
        let lines = written("vu-x", true, LogFormat::Text);
        let one = lines.iter().filter(|line| *line == "p: warning: one").count();
        assert!((100..5000).contains(&one), "{one}");
        assert_eq!(lines.last().unwrap(), "p: warning: another");
        for (thread, limited) in [("vu-x", false), ("ctl-1", true)] {
            assert_eq!(written(thread, limited, LogFormat::Text).len(), 5001, "{thread}");
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

    #[test]
    fn fields_are_members_of_a_json_line() {
        let lines = written("ctl-1", true, LogFormat::Json);
        let value: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((&value["message"], &value["level"]), (&"one".into(), &"warning".into()));
        assert!(value["target"].as_str().unwrap().contains("log::tests"), "{value}");
        let sink = Sink::default();
        let to = sink.clone();
        let style = Style { program: "p", format: LogFormat::Json, stamped: false };
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .event_format(Lines { style, limited: true })
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(id = 7, ok = true, name = "n", why = ?Some(1), "made {}", 2);
        });
        let value: serde_json::Value = serde_json::from_slice(&sink.0.lock().unwrap()).unwrap();
        let fields = serde_json::json!({ "id": 7, "ok": true, "name": "n", "why": "Some(1)" });
        assert_eq!((&value["message"], &value["fields"]), (&"made 2".into(), &fields));
    }

    #[test]
    fn a_front_end_cannot_fill_the_log_in_json() {
        let lines = written("vu-x", true, LogFormat::Json);
        assert!((101..5000).contains(&lines.len()), "{}", lines.len());
    }
}
