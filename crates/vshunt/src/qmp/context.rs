//! What a command gets and returns: the daemon, its arguments, its answer.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use vshunt_daemon::Daemon;

use super::fdset::Fdsets;
use super::message::QmpError;
use crate::config::Setup;

/// Why the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A signal with this number.
    Signal(i32),
    /// The command `quit`.
    Quit,
    /// The peer of the only export of `vshunt-blk --fd` has disconnected.
    PeerGone,
}

/// The objects that a command can use.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) stop: Sender<Stop>,
    /// The descriptors that clients passed.
    pub(crate) fdsets: Arc<Fdsets>,
    /// What the daemon was started with.
    pub(crate) startup: Arc<Startup>,
}

/// What is known about the start of a daemon, for `query-config`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Startup {
    /// The settings, without disks, networks, workers and exports.
    pub(crate) setup: Setup,
    /// The service manager passed the control socket.
    pub(crate) control_passed: bool,
    /// The service manager passed the socket for metrics.
    pub(crate) metrics_passed: bool,
    /// The CPUs of the daemon, which are those of a worker by default.
    pub(crate) cpus: Vec<usize>,
    /// The nice value of the daemon.
    pub(crate) nice: i32,
}

/// The arguments of a running command.
pub(crate) struct Arguments {
    command: &'static str,
    members: Map<String, Value>,
    /// The descriptor that was sent with `add-fd`.
    fd: Option<OwnedFd>,
}

impl Arguments {
    pub(super) fn new(command: &'static str, members: Map<String, Value>, fd: Option<OwnedFd>) -> Self {
        Self { command, members, fd }
    }

    /// Takes the descriptor that was sent with the command.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// Parses all members as `T`. An unknown member is an error.
    pub(crate) fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        let Self { command, members, .. } = self;
        serde_json::from_value(Value::Object(members))
            .map_err(|e| QmpError::generic(format!("arguments of '{command}': {e}")))
    }

    /// Removes one member, for commands whose other members are a specification.
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

/// The result of a command.
pub(super) type Answer = Result<Value, QmpError>;

/// Returns the answer of a command without a result.
pub(crate) fn done<T>(_: T) -> Value {
    json!({})
}

/// No arguments.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}
