//! The daemon without its command line: disks, networks, exports, workers and jobs, by name.
//!
//! It opens the files and devices that a command names, and connects the parts: a front end of
//! `vshunt-vhost-user` or `vshunt-fuse`, queues on workers or in the kernel, and a disk or a
//! network. It handles no requests.
//!
//! ```no_run
//! use vshunt_daemon::{Daemon, Options};
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
//!
//! Control sockets and the command line call only [`Daemon`]. Each module uses only modules below
//! it in this table.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `daemon` | [`Daemon`]: its commands, those of each kind in a file of its own |
//! | `registry` | disks, networks, exports and jobs, each by its name |
//! | `drained` | work on a disk while nothing is in flight |
//! | `disk_entry`, `watched` | a disk of the daemon, with its dirty bitmaps and its job |
//! | `export` | one export: what it opens, how it starts, its queues and its front end |
//! | `balance` | which exports' queues follow load, and what was decided |
//! | `job`, `net` | one job, one network |
//! | `service_totals` | the service time of all operations of an export |
//! | `check` | what is wrong with a request by itself |
//! | `event` | what listeners are told |

#![allow(clippy::disallowed_methods, reason = "control threads may make threads like themselves")]

mod balance;
mod check;
mod daemon;
mod disk_entry;
mod drained;
mod event;
mod export;
mod job;
mod limits;
mod net;
mod registry;
mod service_totals;
#[cfg(test)]
mod tests;
mod watched;

pub use check::{Check, MAX_PAIRS, MAX_QUEUES, check_disk_size, check_limits, check_one_place, is_key_of};
pub use daemon::{
    ATTACH_TIMEOUT, Daemon, END_LIMIT, HOLD, HOLD_MAX, Options, OverlayMode, PointAction, SnapshotWish,
    ToConvert,
};
pub use event::Event;
pub use export::{Moved, check_certificates};
pub use service_totals::ServiceTotals;
pub use vshunt_engine::DEFAULT_POLL_US;
