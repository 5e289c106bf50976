//! Errors about images.

use std::io;

/// Why an image cannot be used, or an operation on it failed. The text says what is wrong; the
/// caller adds the image's name.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a qcow2 image at all.
    #[error("not a qcow2 image")]
    NotQcow2,
    /// A field or table that no correct image has.
    #[error("the image is corrupt: {0}")]
    Corrupt(String),
    /// A header that no correct image has. No check repairs it.
    #[error("the image is corrupt: {0}")]
    Header(String),
    /// A valid image that needs an unsupported feature.
    #[error("{0}")]
    Unsupported(String),
    /// The disk ends within a cluster that shows the backing file's contents. That cluster has to
    /// be allocated before the rest of it can be hidden.
    #[error(
        "the disk ends within a cluster that the image below shows through, at {0}; write to its last sector first"
    )]
    LastClusterBelow(u64),
    /// A request that no image can fulfil.
    #[error("{0}")]
    Invalid(String),
    /// The storage failed.
    #[error("{what}: {source}")]
    Io {
        /// The thing that was read or written.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns a function that wraps the storage's errors, for `map_err`.
    pub fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    pub(crate) fn corrupt(why: impl Into<String>) -> Self {
        Self::Corrupt(why.into())
    }

    /// Returns the error of a header that is parsed.
    pub(crate) fn of_header(self) -> Self {
        match self {
            Self::Corrupt(why) => Self::Header(why),
            e => e,
        }
    }

    pub(crate) fn unsupported(why: impl Into<String>) -> Self {
        Self::Unsupported(why.into())
    }

    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}
