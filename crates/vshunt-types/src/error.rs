//! The one error of the control side: what was wrong with which thing, and what to do about it.
//!
//! The data path does not use it: there an error is an errno on a request.

use std::fmt;
use std::io;

/// A result of the control side.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What class of failure it was; control turns it into a QMP class and an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A named thing is not there.
    NotFound,
    /// A thing of that name is there already.
    Exists,
    /// The thing is in use, or did not come to rest in time (EBUSY).
    Busy,
    /// An argument is out of range or contradicts another.
    Invalid,
    /// A limit of ours or of the system is reached.
    Limit,
    /// The system refused: the message carries its reason.
    Io,
    /// Not possible with this disk, export or kernel.
    Unsupported,
}

/// An error for a user: one sentence that names the thing and, where there is one, the remedy.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<io::Error>,
}

impl Error {
    /// An error of `kind` with a whole sentence.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// A refusal of the system while doing `what` (e.g. "cannot open disk.img").
    pub fn io(what: impl fmt::Display, source: io::Error) -> Self {
        Self { kind: Kind::Io, message: format!("{what}: {source}"), source: Some(source) }
    }

    /// The same, with what it happened to before it: `why: message`.
    #[must_use]
    pub fn context(mut self, why: impl fmt::Display) -> Self {
        self.message = format!("{why}: {}", self.message);
        self
    }

    /// The class of the failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The errno of the system's refusal, if it was one.
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
    /// A [`Kind::NotFound`].
    not_found => NotFound;
    /// A [`Kind::Exists`].
    exists => Exists;
    /// A [`Kind::Busy`].
    busy => Busy;
    /// A [`Kind::Invalid`].
    invalid => Invalid;
    /// A [`Kind::Limit`].
    limit => Limit;
    /// A [`Kind::Unsupported`].
    unsupported => Unsupported;
}
