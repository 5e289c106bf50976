//! `vshunt-blk` and `vshunt-net`: the same engine under the command lines that management software
//! expects of vhost-user backends.
//!
//! QEMU, docs/interop/vhost-user.rst, "Backend program conventions"; docs/interop/vhost-user.json
//! for the capabilities. Each serves one device over one socket, and has no control socket unless
//! asked for one.

mod blk;
mod net;

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory, Parser};

use crate::config::args::{LogArgs, SandboxArgs};
use crate::config::{Control, Setup};
use crate::metrics::Address;
use crate::outcome::{Outcome, clap_failure, print};
use crate::serve::{Manner, serve};

/// What all of them are told.
#[derive(Debug, Args)]
struct Common {
    /// Path of the socket
    #[arg(long, value_name = "PATH", required_unless_present = "fd", conflicts_with = "fd")]
    socket_path: Option<PathBuf>,
    /// The vhost-user socket, as an open file descriptor
    #[arg(long, value_name = "FDNUM")]
    fd: Option<RawFd>,
    /// Accept guest memory in files of any file system, not only in memory; if that file system
    /// does not answer, workers wait
    #[arg(long)]
    memory_may_block: bool,
    /// Print the capabilities as JSON and exit; all other arguments are ignored
    #[arg(long)]
    print_capabilities: bool,
    /// Listen for `vshunt -c SOCKET …`, too
    #[arg(short, long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Serve metrics for Prometheus on PORT of 127.0.0.1, ADDRESS:PORT or unix:PATH, without
    /// authentication
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<Address>,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// One of the programs.
trait Program: Parser {
    /// What it is called.
    const PROGRAM: &str;
    /// Name of its one backend and export.
    const NAME: &str;
    /// What `--print-capabilities` prints (VHostUserBackendCapabilities).
    const CAPABILITIES: &str;

    /// What is to be served, but for the control socket; and what it was told like all others.
    fn setup(self) -> Outcome<(Setup, Common)>;
}

type Main = fn(&[OsString]) -> Outcome;

/// The program of that name, if it is one of these.
pub(crate) fn named(name: &str) -> Option<(&'static str, Main)> {
    let programs: [(_, Main); 2] =
        [(blk::BlkCli::PROGRAM, run::<blk::BlkCli>), (net::NetCli::PROGRAM, run::<net::NetCli>)];
    programs.into_iter().find(|(program, _)| name.starts_with(program))
}

/// Their command lines, for man pages.
pub(crate) fn commands() -> [Command; 2] {
    [blk::BlkCli::command(), net::NetCli::command()]
}

fn run<P: Program>(args: &[OsString]) -> Outcome {
    // Before anything else looks at the arguments, since wrong ones are to be ignored too.
    if args.iter().skip(1).any(|a| a == "--print-capabilities") {
        return print(P::CAPABILITIES);
    }
    let (mut setup, common) = P::try_parse_from(args).or_else(clap_failure)?.setup()?;
    setup.control = common.control.map_or(Control::Off, Control::At);
    setup.metrics = common.metrics;
    setup.sandbox = common.sandbox.over(SandboxArgs::default())?;
    let ends_with = common.fd.map(|_| P::NAME.to_owned());
    serve(setup, &Manner { program: P::PROGRAM, log: common.log, ends_with })
}
