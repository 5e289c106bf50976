//! The NBD protocol, as clients and servers speak it: addresses, handshake, requests and replies.
//!
//! The crate opens no socket and has no thread. For a client, [`Uri`] says where a server is.
//! [`negotiate`] does the handshake on a stream that the caller has connected. Then
//! [`Command::encode`] makes the header of a request, and a [`Receiver`] takes the bytes that the
//! server sends. The side of a server is in [`server`].
//!
//! The peer is not trusted: each length, cookie and type that it sends is checked here, and what
//! does not fit is a [`Violation`], after which the connection cannot be used.
//!
//! The source is the protocol's specification, `doc/proto.md` and `doc/uri.md` of the NBD project.
//! "proto" in docstrings means the former. Extended headers are an extension of it.

#![deny(
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]
#![cfg_attr(
    test,
    allow(clippy::indexing_slicing, clippy::cast_possible_truncation, reason = "a failed test may panic")
)]

mod command;
mod covered;
mod handshake;
mod receiver;
mod reply;
pub mod server;
mod uri;
mod wire;

pub use command::{Command, CommandKind, DISCONNECT, REQUEST_BYTES_MAX, command_flag};
pub use covered::Covered;
pub use handshake::{
    BlockSizes, Greeted, HandshakeError, Headers, Settings, greet, negotiate, transmission_flag,
};
pub use receiver::{Direct, Expected, Receiver, Requests, Wanted};
pub use reply::{HEADER_BYTES_MAX, Violation};
pub use uri::{PORT, Server, Tls, Uri, UriError};

/// Longest string of the protocol, bytes (proto, "Conventions").
pub const STRING_BYTES_MAX: usize = 4096;

/// The state flags of `base:allocation` (proto, "Metadata contexts").
pub mod allocation {
    /// The range is a hole: its contents may be lost if it is not written.
    pub const HOLE: u64 = 1;
    /// The range reads as zeroes.
    pub const ZERO: u64 = 2;
}
