//! What can go wrong with an image.

use std::io;

/// Why an image cannot be used, or an operation on it failed. The texts name what is wrong; whose image it is says the
/// caller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a qcow2 image at all.
    #[error("not a qcow2 image")]
    NotQcow2,
    /// A field or table that no correct image has.
    #[error("the image is corrupt: {0}")]
    Corrupt(String),
    /// A correct image that needs what we do not have.
    #[error("{0}")]
    Unsupported(String),
    /// A disk ends here, within a cluster that the image below shows through. That cluster has to be the disk's own before the
    /// rest of it can be hidden.
    #[error(
        "the disk ends within a cluster that the image below shows through, at {0}; write to its last sector first"
    )]
    LastClusterBelow(u64),
    /// A wish that no image can fulfil.
    #[error("{0}")]
    Invalid(String),
    /// The storage failed.
    #[error("{what}: {source}")]
    Io {
        /// What was read or written.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// As everywhere.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err` on the storage's errors.
    pub fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    pub(crate) fn corrupt(why: impl Into<String>) -> Self {
        Self::Corrupt(why.into())
    }

    pub(crate) fn unsupported(why: impl Into<String>) -> Self {
        Self::Unsupported(why.into())
    }

    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}
