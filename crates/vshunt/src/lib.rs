//! vshunt: virtual disks served by many queues and many workers; any queue, any worker, at any time.
//!
//! The folders follow a request, and uses go one way:
//! `main → control → export → frontend → queue → backend → worker → sandbox`. `error` and `export::spec` are plain
//! data that all may use. See ARCHITECTURE.md.

pub mod backend;
pub mod control;
pub mod error;
pub mod export;
pub mod frontend;
pub mod queue;
pub mod sandbox;
pub mod worker;
