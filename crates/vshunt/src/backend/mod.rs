//! Backends: what is served. A disk is a block backend.

pub mod block;
