//! The daemon without its command line: disks, networks, exports, workers and jobs, by name.
//!
//! It opens what a command names, and connects the parts: a front end of `vshunt-vhost-user` or `vshunt-fuse`, queues on workers
//! or in the kernel, and a disk or a network. No request comes here.
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
