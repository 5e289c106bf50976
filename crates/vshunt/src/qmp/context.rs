//! What a command is given and what it returns: the daemon, its arguments, its answer.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use vshunt_daemon::Daemon;

use super::fdset::Fdsets;
use super::message::QmpError;

/// Why the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A signal, by number.
    Signal(i32),
    /// The command `quit`.
    Quit,
    /// The one export of `vshunt-blk --fd` has lost its peer.
    PeerGone,
}

/// What a command may act on.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) stop: Sender<Stop>,
    /// Descriptors that clients passed.
    pub(crate) fdsets: Arc<Fdsets>,
}

/// The arguments of a command under way.
pub(crate) struct Arguments {
    command: &'static str,
    members: Map<String, Value>,
    /// The descriptor that came with `add-fd`.
    fd: Option<OwnedFd>,
}

impl Arguments {
    pub(super) fn new(command: &'static str, members: Map<String, Value>, fd: Option<OwnedFd>) -> Self {
        Self { command, members, fd }
    }

    /// Takes the descriptor that came with the command.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// All members as `T`; a member that `T` does not know is an error.
    pub(crate) fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        let Self { command, members, .. } = self;
        serde_json::from_value(Value::Object(members))
            .map_err(|e| QmpError::generic(format!("arguments of '{command}': {e}")))
    }

    /// Takes one member out, for commands whose other members are a spec.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, QmpError> {
        let command = self.command;
        let value = self
            .members
            .remove(name)
            .ok_or_else(|| QmpError::generic(format!("arguments of '{command}': missing field `{name}`")))?;
        serde_json::from_value(value)
            .map_err(|e| QmpError::generic(format!("arguments of '{command}': `{name}`: {e}")))
    }
}

/// What a command returns.
pub(super) type Answer = Result<Value, QmpError>;

/// The answer of a command that returns nothing.
pub(crate) fn done<T>(_: T) -> Value {
    json!({})
}

/// No arguments.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}
