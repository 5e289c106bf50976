//! The requests of users and the answers to them: plain data that all other crates share, with the
//! error of commands, locks and conversions of numbers. The crate
//! does no I/O.
//!
//! A disk as QMP, a configuration file or a test describes it:
//!
//! ```
//! use vshunt_types::spec::{DiskSpec, Format};
//!
//! let disk = DiskSpec { name: "d0".into(), format: Some(Format::Ram), size: Some(1 << 20), ..Default::default() };
//! assert!(disk.file.is_none());
//! ```

pub mod convert;
pub mod error;
pub mod spec;
pub mod sync;
pub mod units;
