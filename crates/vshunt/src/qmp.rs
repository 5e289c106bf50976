//! The server of the control socket: QMP, with the commands of QEMU's storage daemon and those of
//! vshunt.
//!
//! `server` accepts clients and reads and writes their messages (`framing`, `message`), and runs a
//! command of `commands` with a `context`. `fdset` has the descriptors that clients passed.
//! `socket` makes the file of the socket.

mod commands;
mod context;
pub(crate) mod events;
mod fdset;
mod framing;
mod message;
mod server;
mod socket;

pub(crate) use commands::COMMANDS;
#[cfg(test)]
pub(crate) use commands::{run, tests};
pub(crate) use context::{Context, Startup, Stop};
pub(crate) use server::Server;
pub(crate) use socket::ControlSocket;
