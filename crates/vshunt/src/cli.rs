//! `vshunt`: arguments, commands and output.
//!
//! `args` has the flags, `run` the implementation of each subcommand, `call` the requests to the
//! daemon, and `show` the tables.

mod args;
mod call;
pub mod client;
mod jobs;
mod pages;
mod passing;
mod run;
mod show;
mod snapshot;

use std::ffi::OsString;

use clap::Parser;

use crate::outcome::{Outcome, clap_failure};

/// Runs the program with these arguments. The first one is its name.
pub(crate) fn run(args: &[OsString]) -> Outcome {
    args::Cli::try_parse_from(args).or_else(clap_failure).and_then(run::run)
}

/// Returns the command line, for the reference.
#[cfg(test)]
pub(crate) fn command() -> clap::Command {
    <args::Cli as clap::CommandFactory>::command()
}
