//! QMP messages as lines of text: requests, replies, error classes and events.
//!
//! Specified in QEMU's docs/interop/qmp-spec.rst. Messages end with CRLF and are ASCII.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use vshunt_sandbox as sandbox;
use vshunt_types::error::{Error, Kind};

/// The error classes of QMP that this server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    GenericError,
    CommandNotFound,
    DeviceNotFound,
}

/// The error of a command, as the client gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QmpError {
    pub(crate) class: Class,
    pub(crate) desc: String,
}

impl QmpError {
    pub(crate) fn generic(desc: impl Into<String>) -> Self {
        Self { class: Class::GenericError, desc: desc.into() }
    }

    /// Returns the reason, for the log.
    pub(crate) fn desc(&self) -> &str {
        &self.desc
    }

    pub(crate) fn command_not_found(desc: impl Into<String>) -> Self {
        Self { class: Class::CommandNotFound, desc: desc.into() }
    }
}

/// The remedy that is appended to an error if the sandbox may be the reason.
const REFUSED: &str = "; if its mode permits that, the sandbox does not: use 'vshunt disk add' and the like, which pass files; or \
     add-fd and /dev/fdset/N; or start the daemon with --allow-path=FOLDER (docs/sandbox.md)";

impl From<Error> for QmpError {
    fn from(e: Error) -> Self {
        let class = match e.kind() {
            Kind::NotFound => Class::DeviceNotFound,
            _ => Class::GenericError,
        };
        let remedy = match e.errno() {
            Some(libc::EACCES) if sandbox::bounds_paths() => REFUSED,
            _ => "",
        };
        Self { class, desc: format!("{e}{remedy}") }
    }
}

/// A request whose members have the right types.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) command: String,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) id: Option<Value>,
}

impl Request {
    /// Parses a request. The error comes with the id of the request if it could be read.
    pub(crate) fn parse(text: &str) -> Result<Self, (Option<Value>, QmpError)> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| (None, QmpError::generic(format!("JSON parse error, {e}"))))?;
        let Value::Object(mut members) = value else {
            return Err((None, QmpError::generic("QMP input must be a JSON object")));
        };
        let id = members.remove("id");
        let fail = |desc: String| Err((id.clone(), QmpError::generic(desc)));
        if members.contains_key("exec-oob") {
            return fail(
                "QMP input member 'exec-oob' is not possible: this server has no capability oob".into(),
            );
        }
        let command = match members.remove("execute") {
            Some(Value::String(command)) => command,
            Some(_) => return fail("QMP input member 'execute' must be a string".into()),
            None => return fail("QMP input lacks member 'execute'".into()),
        };
        let arguments = match members.remove("arguments") {
            Some(Value::Object(arguments)) => arguments,
            Some(_) => return fail("QMP input member 'arguments' must be an object".into()),
            None => Map::new(),
        };
        if let Some(extra) = members.keys().next() {
            return fail(format!("QMP input member '{extra}' is unexpected"));
        }
        Ok(Self { command, arguments, id })
    }
}

/// Returns the version for `query-version` and the greeting. Clients of QEMU look for the member
/// `qemu`.
pub(crate) fn version() -> Value {
    let part = |text: &str| text.parse::<u32>().unwrap_or(0);
    json!({
        "qemu": {
            "major": part(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": part(env!("CARGO_PKG_VERSION_MINOR")),
            "micro": part(env!("CARGO_PKG_VERSION_PATCH")),
        },
        "package": concat!("vshunt ", env!("CARGO_PKG_VERSION")),
    })
}

/// Returns the first line of a connection.
pub(crate) fn greeting() -> String {
    line(&json!({ "QMP": { "version": version(), "capabilities": [] } }))
}

/// Returns the answer to a request.
pub(crate) fn reply(id: Option<Value>, result: Result<Value, QmpError>) -> String {
    let mut members = Map::new();
    match result {
        Ok(value) => members.insert("return".into(), value),
        Err(e) => {
            members.insert("error".into(), json!({ "class": format!("{:?}", e.class), "desc": e.desc }))
        }
    };
    if let Some(id) = id {
        members.insert("id".into(), id);
    }
    line(&Value::Object(members))
}

/// Returns an asynchronous event with the current time.
pub(crate) fn event(name: &str, data: Value) -> String {
    let (seconds, microseconds) = match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(t) => (t.as_secs() as i64, i64::from(t.subsec_micros())),
        Err(_) => (-1, -1),
    };
    line(&json!({
        "event": name,
        "data": data,
        "timestamp": { "seconds": seconds, "microseconds": microseconds },
    }))
}

/// Returns a message as it is sent. Outside of strings JSON is ASCII, so only other characters are
/// escaped.
fn line(value: &Value) -> String {
    let text = value.to_string();
    let mut out = String::with_capacity(text.len() + 2);
    let mut units = [0; 2];
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out.push_str("\r\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_carry_the_id_when_there_is_one() {
        let cases = [
            ("{\"execute\": }", None, "JSON parse error, "),
            ("[1]", None, "QMP input must be a JSON object"),
            ("{\"id\": 3}", Some(json!(3)), "QMP input lacks member 'execute'"),
            (
                "{\"execute\": 1, \"id\": \"x\"}",
                Some(json!("x")),
                "QMP input member 'execute' must be a string",
            ),
            (
                "{\"execute\": \"a\", \"arguments\": []}",
                None,
                "QMP input member 'arguments' must be an object",
            ),
            (
                "{\"execute\": \"a\", \"foo\": 1, \"id\": null}",
                Some(Value::Null),
                "QMP input member 'foo' is unexpected",
            ),
            (
                "{\"exec-oob\": \"a\", \"id\": 1}",
                Some(json!(1)),
                "QMP input member 'exec-oob' is not possible",
            ),
        ];
        for (text, want_id, want) in cases {
            let (id, e) = Request::parse(text).unwrap_err();
            assert_eq!((id, e.class), (want_id, Class::GenericError), "{text}");
            assert!(e.desc.starts_with(want), "{text}: {}", e.desc);
        }
    }

    #[test]
    fn kinds_become_classes() {
        let class = |e: Error| QmpError::from(e).class;
        assert_eq!(class(Error::not_found("x")), Class::DeviceNotFound);
        assert_eq!(class(Error::busy("x")), Class::GenericError);
        assert_eq!(class(Error::invalid("x")), Class::GenericError);
    }

    #[test]
    fn lines_are_ascii_and_end_with_crlf() {
        let text = reply(Some(json!("é😀")), Err(QmpError::command_not_found("x")));
        assert!(
            text.is_ascii() && text.ends_with("}\r\n") && text.contains("\\u00e9\\ud83d\\ude00"),
            "{text}"
        );
        let back: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back, json!({"error": {"class": "CommandNotFound", "desc": "x"}, "id": "é😀"}));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_request_or_an_error(text in "[{}\\[\\]:,'\"execut idargmnsé0-9]{0,80}") {
            let _ = Request::parse(&text);
        }

        #[test]
        fn ids_and_strings_come_back(id in ".{0,20}", argument in ".{0,40}") {
            let text = json!({ "execute": "a", "arguments": { "b": argument }, "id": id }).to_string();
            let request = Request::parse(&text).unwrap();
            proptest::prop_assert_eq!(&request.arguments["b"], &json!(argument));
            let back: Value = serde_json::from_str(&reply(request.id, Ok(json!(argument)))).unwrap();
            proptest::prop_assert_eq!(back, json!({ "return": argument, "id": id }));
        }
    }

    #[test]
    fn an_event_has_its_time() {
        let e: Value = serde_json::from_str(&event("A", json!({"b": 1}))).unwrap();
        assert!(e["timestamp"]["seconds"].as_i64().unwrap() > 1_700_000_000);
        assert!((0..1_000_000).contains(&e["timestamp"]["microseconds"].as_i64().unwrap()));
    }
}
