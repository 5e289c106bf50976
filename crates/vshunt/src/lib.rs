//! The `vshunt` program: its command line, QMP server, metrics and configuration.
//!
//! What it serves is in crate `vshunt-daemon`. See ARCHITECTURE.md.

pub mod control;
