//! `vshunt`: arguments, commands and output.
//!
//! `args` has the flags, `run` the implementation of each subcommand, `call` the requests to the
//! daemon, `show` the tables, and `usage` the text for a missing subcommand.

mod args;
mod attach;
mod balance;
mod call;
pub mod client;
mod jobs;
mod latency;
mod limit;
mod other_names;
mod pages;
mod passing;
mod quit;
mod run;
mod running;
mod show;
mod snapshot;
mod status;
mod top;
mod usage;

use std::ffi::OsString;

use clap::Parser;

use crate::outcome::Outcome;

/// Runs the program with these arguments. The first one is its name.
pub(crate) fn run(args: &[OsString]) -> Outcome {
    args::Cli::try_parse_from(args).or_else(|e| usage::failure(e, args)).and_then(run::run)
}

/// Returns the command line, for the reference.
#[cfg(test)]
pub(crate) fn command() -> clap::Command {
    <args::Cli as clap::CommandFactory>::command()
}
