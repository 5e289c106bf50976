//! `vshunt-blk` and `vshunt-net`: the same server with the command lines that management software
//! expects from vhost-user backends.
//!
//! Specified in QEMU's docs/interop/vhost-user.rst, "Backend program conventions", and for the
//! capabilities in docs/interop/vhost-user.json. Each program serves one device on one socket. It
//! has a control socket only if `--control` is given.

mod blk;
mod net;

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory, Parser};

use vshunt_types::spec::SocketAccess;

use crate::config::args::{ControlAccessArgs, LogArgs, SandboxArgs};
use crate::config::{Control, LogFormat, Setup, check_control_access};
use crate::metrics::Address;
use crate::outcome::{Outcome, clap_failure, print};
use crate::serve::{ServeOptions, serve};

/// Flags that both programs have.
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
    #[command(flatten)]
    control_access: ControlAccessArgs,
    /// Serve metrics for Prometheus on PORT of 127.0.0.1, ADDRESS:PORT or unix:PATH, without
    /// authentication
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<Address>,
    /// Format of the log: text, json or journald [default: journald if journald reads stderr,
    /// otherwise text]
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    log_format: Option<LogFormat>,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// One of the programs.
trait Program: Parser {
    /// The name of the program.
    const PROGRAM: &str;
    /// The name of its disk or network and of its export.
    const NAME: &str;
    /// The output of `--print-capabilities` (VHostUserBackendCapabilities).
    const CAPABILITIES: &str;

    /// Returns the setup without the control socket, and the common flags.
    fn setup(self) -> Outcome<(Setup, Common)>;
}

type Main = fn(&[OsString]) -> Outcome;

/// Returns the program whose name `name` begins with, if there is one.
pub(crate) fn named(name: &str) -> Option<(&'static str, Main)> {
    let programs: [(_, Main); 2] =
        [(blk::BlkCli::PROGRAM, run::<blk::BlkCli>), (net::NetCli::PROGRAM, run::<net::NetCli>)];
    programs.into_iter().find(|(program, _)| name.starts_with(program))
}

/// Returns the command lines of both programs, for the man pages.
pub(crate) fn commands() -> [Command; 2] {
    [blk::BlkCli::command(), net::NetCli::command()]
}

fn run<P: Program>(args: &[OsString]) -> Outcome {
    // First, because all other arguments are ignored, including invalid ones.
    if args.iter().skip(1).any(|a| a == "--print-capabilities") {
        return print(P::CAPABILITIES);
    }
    let (mut setup, common) = P::try_parse_from(args).or_else(clap_failure)?.setup()?;
    setup.control = common.control.map_or(Control::Off, Control::At);
    setup.control_access = common.control_access.with_defaults(SocketAccess::default());
    check_control_access(&setup)?;
    setup.log_format = common.log_format;
    setup.metrics = common.metrics;
    setup.sandbox = common.sandbox.with_defaults(SandboxArgs::default())?;
    let ends_with = common.fd.map(|_| P::NAME.to_owned());
    serve(
        setup,
        &ServeOptions { program: P::PROGRAM, log: common.log, ends_with, if_running: |_| Default::default() },
    )
}
