//! The error of the control side: what was wrong with which thing, and what to do about it.
//!
//! The data path does not use it. There, an error is an errno on a request.

use std::fmt;
use std::io;

/// A result of the control side.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of a failure. Control turns it into a QMP class and an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// There is no thing of that name.
    NotFound,
    /// There is already a thing of that name.
    Exists,
    /// The thing is in use, or was not at rest in time (EBUSY).
    Busy,
    /// An argument is out of range or contradicts another.
    Invalid,
    /// A limit of the program or of the system is reached.
    Limit,
    /// The system refused. The message contains its reason.
    Io,
    /// Not possible with this disk, export or kernel.
    Unsupported,
}

/// An error for a user: one sentence that names the thing and, if there is one, the remedy.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<io::Error>,
}

impl Error {
    /// Makes an error of `kind` with a whole sentence.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// Makes an error from the system's refusal of `what` (e.g. "cannot open disk.img").
    pub fn io(what: impl fmt::Display, source: io::Error) -> Self {
        Self { kind: Kind::Io, message: format!("{what}: {source}"), source: Some(source) }
    }

    /// Puts the circumstances before the message: `why: message`.
    #[must_use]
    pub fn context(mut self, why: impl fmt::Display) -> Self {
        self.message = format!("{why}: {}", self.message);
        self
    }

    /// Puts what to do behind the message: `message; remedy`.
    #[must_use]
    pub fn remedy(mut self, remedy: impl fmt::Display) -> Self {
        self.message = format!("{}; {remedy}", self.message);
        self
    }

    /// Returns the class of the failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the errno of the system's refusal, if there was one.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(io::Error::raw_os_error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

macro_rules! ctor {
    ($($(#[$doc:meta])* $name:ident => $kind:ident;)*) => {
        impl Error { $($(#[$doc])* pub fn $name(message: impl Into<String>) -> Self { Self::new(Kind::$kind, message) })* }
    };
}
ctor! {
    /// Makes a [`Kind::NotFound`].
    not_found => NotFound;
    /// Makes a [`Kind::Exists`].
    exists => Exists;
    /// Makes a [`Kind::Busy`].
    busy => Busy;
    /// Makes a [`Kind::Invalid`].
    invalid => Invalid;
    /// Makes a [`Kind::Limit`].
    limit => Limit;
    /// Makes a [`Kind::Unsupported`].
    unsupported => Unsupported;
}
