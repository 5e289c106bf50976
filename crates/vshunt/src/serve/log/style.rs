//! The format of a line of the log.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::Level;
use tracing::field::{Field, Visit};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::output::LINE_MAX;
use crate::config::LogFormat;
use crate::outcome::one_line;

/// The message of a line, and what else it says.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// The message, with `name=value` for each field if the format is not JSON.
    pub(super) message: String,
    /// For JSON: the fields of the event.
    pub(super) fields: Map<String, Value>,
    /// For JSON: the module that wrote the line.
    pub(super) target: Option<String>,
    /// Similar lines that were left out before this one.
    pub(super) left_out: Option<u64>,
}

impl Content {
    pub(super) fn of(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }
}

/// A line as JSON. Members keep this order.
#[derive(Serialize)]
struct Object<'a> {
    time: String,
    level: &'a str,
    program: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Map::is_empty")]
    fields: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    /// How many lines like this one were left out before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
    /// The line was longer than the limit, so fields are missing and the message is cut.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

/// Characters of a message that stay if a JSON line is too long. Each takes 6 bytes at most.
const MESSAGE_CHARS: usize = 512;

/// The format, and what is the same in all lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) program: &'static str,
    pub(super) format: LogFormat,
    /// Whether text begins with the time.
    pub(super) stamped: bool,
}

impl Style {
    /// Returns a whole line, or two if lines were left out before it.
    pub(super) fn line(&self, level: Level, content: Content) -> String {
        let (priority, word) = match level {
            Level::ERROR => (3, "error"),
            Level::WARN => (4, "warning"),
            Level::INFO => (6, "info"),
            Level::DEBUG => (7, "debug"),
            Level::TRACE => (7, "trace"),
        };
        let mut before = String::new();
        if let (Some(n), false) = (content.left_out, self.format == LogFormat::Json) {
            before = self.line(level, Content::of(format!("{n} lines like the next one were left out")));
        }
        let text = |start: &str| format!("{before}{start}{}\n", one_line(&content.message));
        match self.format {
            LogFormat::Json => self.object(word, content),
            LogFormat::Journald => text(&format!("<{priority}>")),
            LogFormat::Text => text(&format!("{}{}: {word}: ", self.stamp(), self.program)),
        }
    }

    /// Returns a line that has no level, such as the one that says what is served. Priority 5 is
    /// `notice`.
    pub(super) fn plain(&self, level: &str, priority: u8, message: &str) -> String {
        match self.format {
            LogFormat::Json => self.object(level, Content::of(message)),
            LogFormat::Journald => format!("<{priority}>{}\n", one_line(message)),
            LogFormat::Text => format!("{}{}: {message}\n", self.stamp(), self.program),
        }
    }

    fn stamp(&self) -> String {
        if self.stamped { format!("{} ", now()) } else { String::new() }
    }

    fn object(&self, level: &str, content: Content) -> String {
        let Content { message, fields, target, left_out } = content;
        let time = now();
        let object = Object {
            time,
            level,
            program: self.program,
            message: &message,
            fields,
            target,
            left_out,
            truncated: false,
        };
        let line = to_line(&object);
        if line.len() <= LINE_MAX {
            return line;
        }
        let message: String = message.chars().take(MESSAGE_CHARS).collect();
        to_line(&Object { message: &message, fields: Map::new(), truncated: true, ..object })
    }
}

fn to_line(object: &Object<'_>) -> String {
    serde_json::to_string(object).unwrap_or_default() + "\n"
}

/// Returns the time in UTC as RFC 3339 has it, with microseconds.
fn now() -> String {
    let mut text = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// Collects the fields of an event for JSON.
#[derive(Default)]
pub(super) struct Fields(pub(super) Content);

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.0.message = message,
            (name, value) => _ = self.0.fields.insert(name.to_owned(), value),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn style(format: LogFormat, stamped: bool) -> Style {
        Style { program: "p", format, stamped }
    }

    /// Checks a time such as 2026-11-25T17:00:00.123456Z.
    fn is_stamp(text: &str) -> bool {
        let shape = |c: char| if c.is_ascii_digit() { '0' } else { c };
        text.chars().map(shape).collect::<String>() == "0000-00-00T00:00:00.000000Z"
    }

    #[test]
    fn text_has_the_time_if_asked() {
        let plain = style(LogFormat::Text, false).line(Level::WARN, Content::of("m"));
        assert_eq!(plain, "p: warning: m\n");
        let stamped = style(LogFormat::Text, true).line(Level::INFO, Content::of("m"));
        let (stamp, rest) = stamped.split_once(' ').unwrap();
        assert!(is_stamp(stamp) && rest == "p: info: m\n", "{stamped}");
        assert_eq!(style(LogFormat::Text, false).plain("notice", 5, "m"), "p: m\n");
    }

    #[test]
    fn journald_gets_priorities() {
        let style = style(LogFormat::Journald, true);
        assert_eq!(style.line(Level::ERROR, Content::of("m")), "<3>m\n");
        assert_eq!(style.line(Level::TRACE, Content::of("m")), "<7>m\n");
        assert_eq!(style.plain("notice", 5, "m"), "<5>m\n");
    }

    #[test]
    fn json_is_an_object_on_one_line() {
        let content = Content { left_out: Some(3), target: Some("t".into()), ..Content::of("a\n\"b\"") };
        let line = style(LogFormat::Json, false).line(Level::WARN, content);
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!([&value["level"], &value["program"], &value["target"]], ["warning", "p", "t"]);
        assert_eq!((&value["message"], &value["left_out"]), (&"a\n\"b\"".into(), &3.into()));
        assert!(is_stamp(value["time"].as_str().unwrap()));
        assert!(value.get("truncated").is_none() && value.get("fields").is_none());
    }

    #[test]
    fn a_long_json_line_is_cut_and_says_so() {
        for character in ["x", "\u{1}", "é", "\""] {
            let mut content = Content::of(character.repeat(10_000));
            content.fields.insert("f".into(), "y".repeat(9_000).into());
            let line = style(LogFormat::Json, false).line(Level::WARN, content);
            assert!(line.len() <= LINE_MAX, "{}", line.len());
            let value: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(value["truncated"], true);
            assert_eq!(value["message"].as_str().unwrap(), character.repeat(MESSAGE_CHARS));
        }
    }

    #[test]
    fn what_others_choose_begins_no_line() {
        let forged = Content::of("name\n<0>panic\u{1b}[2J");
        let line = style(LogFormat::Journald, false).line(Level::WARN, forged);
        assert_eq!(line, "<4>name\\n<0>panic\\u{1b}[2J\n");
    }
}
