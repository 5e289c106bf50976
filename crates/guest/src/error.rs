//! What can go wrong, as one sentence with its remedy, and the exit code that says so to a script.

use std::fmt;
use std::io;

/// What sort of failure this is; decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for makes no sense or does not fit the device.
    Usage,
    /// The socket cannot be reached, or who listens there does not speak vhost-user-blk.
    Connect,
    /// The server went away, or answered a message with an error.
    Lost,
    /// A request failed, was completed twice, or never.
    Io,
    /// Data read back is not what was written.
    Verify,
    /// Something on this side: memory, files, processes.
    System,
}

/// An error: its kind, one sentence for the user, and the cause where a system call was it.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<io::Error>,
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with `message`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error of `kind` with `message`, caused by `source`.
    pub fn with(kind: Kind, message: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { kind, message: message.into(), source: Some(source.into()) }
    }

    /// The kind of failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Process exit code: 1 verification or I/O error, 2 usage, 3 cannot connect.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Usage => 2,
            Kind::Connect => 3,
            Kind::Lost | Kind::Io | Kind::Verify | Kind::System => 1,
        }
    }

    /// The same error as another kind (a refusal while connecting is `Connect`, later it is `Lost`).
    #[must_use]
    pub fn into_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// An [`Error`] of a kind, with a formatted message.
#[macro_export]
macro_rules! fail {
    ($kind:ident, $($arg:tt)*) => { $crate::error::Error::new($crate::error::Kind::$kind, format!($($arg)*)) };
}
pub use fail;
