//! The daemon without its command line: disks, networks, exports and jobs, and the front ends and queues that serve them.
//!
//! The folders follow a request, and uses go one way: `export → frontend → queue`.
//!
//! ```no_run
//! use vshunt_daemon::export::{Daemon, Options};
//! use vshunt_types::spec::{DiskSpec, ExportSpec, Format};
//!
//! let daemon = Daemon::new(Options::default())?;
//! daemon.disk_add(DiskSpec { name: "d".into(), format: Some(Format::Ram), size: Some(1 << 20), ..Default::default() })?;
//! daemon.export_add(ExportSpec {
//!     name: "vm".into(),
//!     disk: "d".into(),
//!     socket: Some("/run/vm.sock".into()),
//!     ..Default::default()
//! })?;
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

#[allow(clippy::disallowed_methods, reason = "control threads may make threads like themselves")]
pub mod export;
pub mod frontend;
pub mod queue;
