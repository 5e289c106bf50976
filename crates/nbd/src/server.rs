//! The side of a server: the handshake as a state machine, the headers of requests, and replies.
//!
//! A server passes what a client sends to a [`Negotiation`], and sends what that answers. After
//! the handshake, [`Request::parse`] reads the headers of requests, [`Request::check`] compares
//! them with the export, and [`Reply`] makes the headers of replies.
//!
//! The client is not trusted. Each length that it sends has a bound here: options of
//! [`OPTION_BYTES_MAX`], a limited number of options, and answers that wait until the client has
//! taken the ones before.

mod negotiation;
mod reply;
mod request;

pub use negotiation::{Agreed, Negotiation, OPTION_BYTES_MAX, Offer, Progress};
pub use reply::{ExtentRun, Reply, STATUS_EXTENTS_MAX, add_status, status_bytes};
pub use request::{Request, Rules, Work, errno};

/// Name of the context with the dirty blocks of a bitmap, without the name of the bitmap.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// Name of the context that says where data is (proto, "Metadata contexts").
pub const ALLOCATION: &str = "base:allocation";
/// Name of the context that says which layer of a chain of images has the data: 1 for the image
/// itself, 2 for its backing image, and so on; 0 for none (QEMU, `docs/interop/nbd.txt`).
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// The state flag of [`DIRTY_BITMAP`]: the block was written.
pub const DIRTY: u64 = 1;
