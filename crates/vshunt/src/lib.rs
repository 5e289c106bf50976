//! The `vshunt` program: its command line, QMP server, metrics and configuration.
//!
//! Crate `vshunt-daemon` serves the disks and networks. No code of this crate handles a request.
//! See ARCHITECTURE.md. A module uses only modules below it in this table.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `cli` | `vshunt`: arguments, commands, output. A command is sent over the control socket, so any other client can do the same |
//! | `program` | `vshunt-blk` and `vshunt-net`: the same server under other command lines |
//! | `serve` | `vshunt serve`: start and end of the daemon, signals, sandbox, service manager |
//! | `qmp` | the server of the control socket, and its commands |
//! | `doctor` | `vshunt doctor`: checks what vshunt needs on this host |
//! | `config` | what a daemon is started with: flags of `serve` and the configuration file |
//! | `metrics` | the HTTP server for Prometheus |
//! | `image` | `vshunt image`: commands on images that no program uses |
//! | `values`, `keyval` | values of flags, and lists of keys and values |
//! | `run_folder` | the folder for sockets and mounted files without a given path |
//! | `outcome` | how a command ends |
//!
//! A client of the QMP server, as the command line uses it:
//!
//! ```no_run
//! use std::path::Path;
//! use vshunt::client::Client;
//!
//! let mut client = Client::connect(Path::new("/run/vshunt.sock"))?;
//! println!("{}", client.execute("query-block-exports", serde_json::Map::new())?);
//! # Ok::<(), vshunt::client::ClientError>(())
//! ```

mod cli;
mod config;
mod doctor;
mod foreign;
mod image;
mod keyval;
mod metrics;
mod outcome;
mod program;
mod qmp;
#[cfg(test)]
mod reference;
mod run_folder;
mod serve;
mod values;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

pub use cli::client;

/// Runs `vshunt`, or `vshunt-blk` or `vshunt-net` if the program was started under that name.
pub fn main() -> ExitCode {
    serve::signals::ignore_file_limit();
    let args: Vec<OsString> = std::env::args_os().collect();
    let name = args.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default().to_string_lossy();
    let (name, outcome) = match program::named(&name) {
        Some((name, main)) => (name, main(&args)),
        None => ("vshunt", cli::run(&args)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            if !text.is_empty() {
                serve::log::failure(name, text.trim_end());
            }
            ExitCode::from(failure.code())
        }
    }
}
