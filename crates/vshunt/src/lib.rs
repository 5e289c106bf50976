//! The `vshunt` program: its command line, QMP server, metrics and configuration.
//!
//! What it serves is in crate `vshunt-daemon`. See ARCHITECTURE.md.
//!
//! A client of the QMP server, as the command line uses it:
//!
//! ```no_run
//! use std::path::Path;
//! use vshunt::control::client::Client;
//!
//! let mut client = Client::connect(Path::new("/run/vshunt.sock"))?;
//! println!("{}", client.execute("query-block-exports", serde_json::Map::new())?);
//! # Ok::<(), vshunt::control::client::ClientError>(())
//! ```

pub mod control;
