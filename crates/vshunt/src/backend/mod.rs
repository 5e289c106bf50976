//! Backends: what is served.

pub mod block;
pub mod net;
