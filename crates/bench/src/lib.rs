//! A guest driver without a guest, and what is built on it: load, verification, comparison tables.
//!
//! Tests of the server use [`driver::Disk`]; the binary `vshunt-bench` is [`cli`] over [`load`] and [`workers`].
//! [`kernel`] drives the kernel's vhost devices the same way, [`net`] network cards; [`tap`] measures taps alone. Nothing in here knows the server's code: it speaks
//! vhost-user, vhost's ioctls and virtio-blk from their specifications, and the ring code of the `virtio` crate's driver
//! side.
//!
//! ```no_run
//! use vshunt_bench::{Disk, Options};
//!
//! // The server has to listen on this socket.
//! let disk = Disk::connect("/run/vm.sock", Options::default())?;
//! # Ok::<(), vshunt_bench::Error>(())
//! ```

pub mod cli;
pub mod driver;
pub mod error;
pub mod kernel;
pub mod link;
pub mod load;
pub mod net;
pub mod report;
pub mod rng;
pub mod stats;
mod stop;
pub mod tap;
pub mod units;
pub mod verify;
pub mod workers;

pub use driver::{Disk, Options};
pub use error::{Error, Kind, Result};
