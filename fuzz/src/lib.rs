//! What the fuzz targets do with their bytes. Each function takes any bytes at all and panics, or trips the address
//! sanitizer, where our code did something that it must not.
//!
//! The bytes are a list of operations of a driver or front-end, most of them nearly right: random bytes alone would
//! hardly ever get past the first check.

mod blk_request;
mod bytes;
mod messages;
mod qcow2_image;
mod rings;

pub use blk_request::blk_request;
pub use messages::messages;
pub use qcow2_image::qcow2_image;
pub use rings::rings;

/// What a target is run with: an input of any bytes.
pub type Run = fn(&[u8]);

/// Every target by name.
pub const TARGETS: &[(&str, Run)] =
    &[("rings", rings), ("blk_request", blk_request), ("messages", messages), ("qcow2_image", qcow2_image)];
