//! A guest without a virtual machine: the driver's side of vhost-user and of the kernel's vhost,
//! load, and verification.
//!
//! [`driver`] connects, negotiates and drives virtqueues; tests of servers use its [`Disk`].
//! [`load`] keeps many requests in flight on many queues, and [`verify`] checks what is read.
//! [`kernel`] drives the kernel's vhost devices. [`net`] drives network devices, with [`link`] for
//! the host's end. The crate implements vhost-user, virtio-blk and virtio-net from their
//! specifications. Of the server's crates it uses two: `virtio` for the driver's side of rings,
//! guest memory and the layouts of vhost, and `vhost-kernel` for the ioctls.
//!
//! ```no_run
//! use vshunt_guest::{Disk, Options};
//!
//! let disk = Disk::connect("/run/vm0.sock", Options::default())?;
//! println!("{} sectors on {} queues", disk.capacity(), disk.queue_count());
//! # Ok::<(), vshunt_guest::Error>(())
//! ```

pub mod driver;
pub mod error;
pub mod kernel;
pub mod link;
pub mod load;
pub mod net;
pub mod rng;
pub mod stats;
pub mod verify;

pub use driver::{Disk, Options};
pub use error::{Error, Kind, Result};
