//! Requests to the daemon over the control socket, and the output of lists.

use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::args::ListArgs;
use super::client::Client;
use crate::config::control_path;
use crate::outcome::{Failure, Outcome, print};

pub(super) fn connect(control: Option<&PathBuf>) -> Outcome<Client> {
    let path = control_path(control).ok_or_else(|| {
        Failure::Usage("which daemon? give -c SOCKET, or set VSHUNT_CONTROL or XDG_RUNTIME_DIR".into())
    })?;
    let is_default = control.is_none() && std::env::var_os("VSHUNT_CONTROL").is_none_or(|v| v.is_empty());
    // Commands pass descriptors of files to the daemon. At the default place another user could
    // listen, if the folder is open to all.
    Ok(if is_default { Client::connect_to_own(&path)? } else { Client::connect(&path)? })
}

pub(super) fn call<T: DeserializeOwned>(client: &mut Client, command: &str, arguments: Value) -> Outcome<T> {
    let Value::Object(arguments) = arguments else {
        return Err(Failure::Failed(format!("arguments of {command} are no object")));
    };
    let value = client.execute(command, arguments)?;
    serde_json::from_value(value).map_err(|e| {
        Failure::Failed(format!(
            "the daemon's answer to {command} is not understood ({e}); is it another version?"
        ))
    })
}

/// Asks for exports or queues without the queues that never started.
pub(super) fn started<T: DeserializeOwned>(client: &mut Client, command: &str) -> Outcome<T> {
    narrowed(client, command, json!({ "started-only": true }))
}

/// Asks for a part of a list. An earlier daemon, from before an upgrade of this program, does not
/// know these arguments and lists all.
pub(super) fn narrowed<T: DeserializeOwned>(
    client: &mut Client,
    command: &str,
    arguments: Value,
) -> Outcome<T> {
    match call(client, command, arguments) {
        Err(Failure::Failed(why)) if why.contains("unknown field `") => call(client, command, json!({})),
        answer => answer,
    }
}

pub(super) fn send(client: &mut Client, command: &str, arguments: Value) -> Outcome {
    call::<Value>(client, command, arguments).map(drop)
}

pub(super) fn to_value(spec: &impl Serialize) -> Outcome<Value> {
    serde_json::to_value(spec).map_err(|e| Failure::Usage(format!("cannot be written as JSON: {e}")))
}

pub(super) fn print_json(value: &Value) -> Outcome {
    print(&format!("{value:#}\n"))
}

pub(super) fn query(client: &mut Client, command: &str) -> Outcome<Value> {
    call(client, command, json!({}))
}

/// Prints one list, as JSON or as the table that `table` makes of it.
pub(super) fn list<T: DeserializeOwned>(
    client: &mut Client,
    command: &str,
    args: ListArgs,
    table: fn(&[T]) -> String,
) -> Outcome {
    match args.json {
        true => print_json(&query(client, command)?),
        false => print(&table(&call::<Vec<T>>(client, command, json!({}))?)),
    }
}

/// Returns the absolute path, because the daemon may have another working directory.
///
/// # Errors
/// Usage: it is not UTF-8, as all text on the control socket.
pub(super) fn absolute(path: Option<PathBuf>) -> Outcome<Option<PathBuf>> {
    let absolute = |p: PathBuf| {
        let whole = std::path::absolute(&p).map_err(|e| Failure::Usage(format!("{}: {e}", p.display())))?;
        match whole.to_str() {
            Some(_) => Ok(whole),
            None => Err(Failure::Usage(format!(
                "{} is not UTF-8, and the control socket takes only UTF-8; rename it, or name it by a link to it",
                whole.display()
            ))),
        }
    };
    path.map(absolute).transpose()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_path_that_the_daemon_would_read_otherwise_is_not_sent() {
        let path = |bytes| Some(PathBuf::from(OsStr::from_bytes(bytes)));
        assert_eq!(absolute(path(b"/a\xc3\xa9")).unwrap(), path(b"/a\xc3\xa9"));
        let Err(Failure::Usage(why)) = absolute(path(b"/a\xff")) else { panic!("taken") };
        assert!(why.starts_with("/a\u{fffd} is not UTF-8"), "{why}");
    }
}
