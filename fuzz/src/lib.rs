//! The fuzz targets. Each function takes any bytes. It panics, or the address sanitizer reports an
//! error, if the code under test does something that it must not.
//!
//! The bytes are a list of operations of a driver or a front end. Most operations are nearly valid,
//! because random bytes seldom pass the first check.

mod blk_request;
mod bytes;
mod messages;
mod nbd_replies;
mod nbd_requests;
mod qcow2_image;
mod rings;

pub use blk_request::blk_request;
pub use messages::messages;
pub use nbd_replies::nbd_replies;
pub use nbd_requests::nbd_requests;
pub use qcow2_image::qcow2_image;
pub use rings::rings;

/// A target, which takes an input of any bytes.
pub type Run = fn(&[u8]);

/// Every target by name.
pub const TARGETS: &[(&str, Run)] = &[
    ("rings", rings),
    ("blk_request", blk_request),
    ("messages", messages),
    ("qcow2_image", qcow2_image),
    ("nbd_replies", nbd_replies),
    ("nbd_requests", nbd_requests),
];
