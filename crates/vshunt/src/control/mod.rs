//! The control side: command line, configuration file, QMP server and client, signals, service manager.
//!
//! Called by `main`; calls crate `vshunt-daemon` and nothing below it. It never sees a request. The command line is sugar: what a
//! subcommand does, it does over the socket, so any other client can do it.

mod activation;
mod api;
mod cli;
pub mod client;
mod config;
mod confine;
mod events;
mod fdset;
pub mod framing;
mod image;
mod jobs;
mod keyval;
mod log;
mod message;
mod metrics;
mod pages;
mod passing;
mod program;
mod qemu;
#[cfg(test)]
mod reference;
mod run;
mod serve;
mod server;
mod show;
mod signals;
mod snapshot;
mod socket;
mod values;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use client::ClientError;
use vshunt_sandbox as sandbox;
use vshunt_types::error::Error;

/// How a program ends that did not succeed; the exit code, and the sentence for stderr.
#[derive(Debug)]
enum Failure {
    /// Exit code 1.
    Failed(String),
    /// Exit code 2: the command line or the configuration file is wrong.
    Usage(String),
    /// Exit code 3: no daemon answers.
    Unreachable(String),
    /// Whoever read our output has gone: nothing to say, and nobody to say it to.
    OutputClosed,
    /// Everything is said already; this exit code.
    Status(u8),
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::OutputClosed => 0,
            Self::Status(code) => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) | Self::Usage(why) | Self::Unreachable(why) => f.write_str(why),
            Self::OutputClosed | Self::Status(_) => Ok(()),
        }
    }
}

/// Appended at the start of a daemon where the sandbox may be the reason.
const REFUSED: &str =
    "; if its mode permits that, the sandbox does not: add --allow-path=FOLDER (docs/sandbox.md)";

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let remedy = match e.errno() {
            Some(libc::EACCES) if sandbox::bounds_paths() => REFUSED,
            _ => "",
        };
        Self::Failed(format!("{e}{remedy}"))
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        match e {
            ClientError::Unreachable { .. } => Self::Unreachable(e.to_string()),
            _ => Self::Failed(e.to_string()),
        }
    }
}

type Outcome<T = ()> = Result<T, Failure>;

/// The program: `vshunt`, or `vshunt-blk` or `vshunt-net` if that is what it was started as.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let name = args.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default().to_string_lossy();
    let (name, outcome) = match program::named(&name) {
        Some((name, main)) => (name, main(&args)),
        None => ("vshunt", parse_cli(&args).and_then(run::run)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            if !text.is_empty() {
                let _ = writeln!(io::stderr(), "{name}: {}", text.trim_end());
            }
            ExitCode::from(failure.code())
        }
    }
}

fn parse_cli(args: &[OsString]) -> Outcome<cli::Cli> {
    cli::Cli::try_parse_from(args).or_else(clap_failure)
}

/// Help and version are successes that clap reports as errors; the rest is usage.
fn clap_failure<T>(e: clap::Error) -> Outcome<T> {
    if !e.use_stderr() {
        return Err(print(&e.render().to_string()).err().unwrap_or(Failure::OutputClosed));
    }
    let text = e.render().to_string();
    // The usage and the hint at --help that clap adds bury the sentence that matters.
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|t| text.find(t)).min();
    let text = &text[..end.unwrap_or(text.len())];
    let word = text.strip_prefix("unexpected argument '").and_then(|rest| rest.split('\'').next());
    Err(Failure::Usage(match word {
        Some(key) if key.contains('=') && !key.starts_with('-') => {
            format!("{text}; the keys of an option are joined by commas, without spaces")
        }
        _ => text.to_owned(),
    }))
}

/// Writes an answer to stdout.
fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        Err(e) => Err(Failure::Failed(format!("cannot write to stdout: {e}"))),
    }
}
