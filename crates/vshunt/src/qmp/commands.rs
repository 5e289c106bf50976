//! The commands of the control socket: their arguments, and what each does. `table` lists all of
//! them.
//!
//! A command runs on the reader thread of the client that sent it, and blocks that client only. The
//! commands of QEMU's storage daemon are in `qemu`, `jobs` and `snapshot`; `native` and `config`
//! have commands that QEMU does not have. Those take the types of `vshunt_types::spec` as they are.
//!
//! The reference (docs/reference/qmp.md) shows the doc comments of the structs that arguments are
//! read into.

mod blockstats;
mod config;
pub(super) mod fdset;
mod jobs;
mod native;
mod nbd_server;
mod qemu;
mod snapshot;
mod table;
mod throttle;
mod transaction;

use std::os::fd::OwnedFd;

use serde_json::{Map, Value};
use vshunt_sandbox as sandbox;

pub(crate) use self::table::COMMANDS;
use super::context::{Answer, Arguments, Context};
use super::message::QmpError;

/// Runs the command called `name`. `fd` is the descriptor that was sent with it; only `add-fd`
/// takes one.
pub(crate) fn run(context: &Context, name: &str, members: Map<String, Value>, fd: Option<OwnedFd>) -> Answer {
    let Some(command) = COMMANDS.iter().find(|c| c.name == name) else {
        return Err(QmpError::command_not_found(format!("The command {name} has not been found")));
    };
    let arguments = Arguments::new(command.name, members, fd);
    let answer = sandbox::as_command(|| (command.run)(context, arguments))
        .unwrap_or_else(|e| Err(QmpError::generic(format!("the command cannot be run: {e}"))));
    context.fdsets.prune(&context.daemon);
    answer
}

#[cfg(test)]
pub(crate) mod tests;
