//! The subcommand `tap`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Cpus, cpus};
use crate::tap;
use crate::units::parse_time;
use vshunt_guest::error::Result;
use vshunt_guest::fail;
use vshunt_guest::link;
use vshunt_guest::net::frame::{LEN_MIN, LEN_PLAIN, check_flows};

pub(super) const EXAMPLES: &str = "\
Examples:
  vshunt-bench tap
  vshunt-bench tap --queues 1,2 --mode write --runtime 5s
  vshunt-bench tap --queues 1,2,3,4 --mode read --senders 4 --pin 0-7 --json

As root. The tap is made in a network namespace of this command's own and goes with it.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TapMode {
    /// Frames out of the tap's queues
    Read,
    /// Frames into the tap's queues
    Write,
    /// First out of, then into the queues
    Both,
}

#[derive(Args)]
pub(super) struct TapArgs {
    /// Numbers of queues to compare, with one thread for each queue
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4")]
    queues: Vec<u16>,
    /// Bytes of a frame, without the checksum of 4 bytes that the hardware adds
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Direction of the frames
    #[arg(long, value_enum, default_value = "both")]
    mode: TapMode,
    /// Number of flows of all senders
    #[arg(long, default_value_t = 64)]
    flows: u16,
    /// Threads that send to the tap [default: the CPUs that the most queues leave free, at least 1]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..), value_name = "N")]
    senders: Option<u16>,
    /// Length of each measurement, such as 2s or 500ms; a bare number is seconds
    #[arg(long, alias = "time", value_parser = parse_time, default_value = "2s", value_name = "TIME")]
    runtime: Duration,
    /// CPUs for the threads, round robin, such as 0,2-3: first those of the queues, then the
    /// senders
    #[arg(long, value_parser = cpus, value_name = "CPUS")]
    pin: Option<Cpus>,
    /// Print the table as JSON on stdout
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand. Called before any thread is started.
pub(super) fn run(args: &TapArgs) -> Result<()> {
    check_flows(args.flows)?;
    if !(LEN_MIN..=LEN_PLAIN).contains(&args.size) {
        return Err(fail!(Usage, "--size {}: {LEN_MIN} to {LEN_PLAIN}", args.size));
    }
    link::own_namespace()?;
    let table = tap::measure(&tap::Request {
        queues: args.queues.clone(),
        read: args.mode != TapMode::Write,
        write: args.mode != TapMode::Read,
        size: args.size,
        flows: args.flows,
        senders: args.senders,
        runtime: args.runtime,
        pin: args.pin.clone().map(|cpus| cpus.0).unwrap_or_default(),
    })?;
    if args.json {
        println!("{table:#}", table = table.json());
    } else {
        print!("{}", table.text());
    }
    Ok(())
}
