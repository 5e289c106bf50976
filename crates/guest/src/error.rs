//! Errors: one sentence with the remedy, and the exit code for scripts.

use std::fmt;
use std::io;

/// The kind of error, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is invalid or does not fit the device.
    Usage,
    /// The socket cannot be reached, or the process that listens there does not speak vhost-user.
    Connect,
    /// The server closed the connection, or answered a message with an error.
    Lost,
    /// A request failed, was completed twice, or was never completed.
    Io,
    /// The data that was read is not the data that was written.
    Verify,
    /// An error of this process: memory, files, processes.
    System,
}

/// An error: its kind, one sentence for the user, and the error of the system call if there was
/// one.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<io::Error>,
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error of `kind` with `message`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// Makes an error of `kind` with `message`, caused by `source`.
    pub fn with(kind: Kind, message: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { kind, message: message.into(), source: Some(source.into()) }
    }

    /// Returns the kind of error.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the exit code of the process: 1 verification or I/O error, 2 usage, 3 cannot
    /// connect.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Usage => 2,
            Kind::Connect => 3,
            Kind::Lost | Kind::Io | Kind::Verify | Kind::System => 1,
        }
    }

    /// Returns the same error as another kind. A refusal is `Connect` during the setup, and `Lost`
    /// later.
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

/// Makes an [`Error`] of a kind, with a formatted message.
#[macro_export]
macro_rules! fail {
    ($kind:ident, $($arg:tt)*) => { $crate::error::Error::new($crate::error::Kind::$kind, format!($($arg)*)) };
}
pub use fail;
