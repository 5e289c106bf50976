//! The subcommand `net`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Cpus, Manner, cpus};
use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;
use vshunt_guest::net::frame::Sizes;
use vshunt_guest::net::{self, Mode, NetDevice, NetPlan, Peer};

use crate::net_report::Summary;
use crate::report::Live;
use crate::stop;
use crate::units::parse_time;

pub(super) const EXAMPLES: &str = "\
Examples:
  vshunt-bench net --socket /run/vm0.sock --mode source --size 64 --queues 2 --runtime 5s
  vshunt-bench net --socket /run/vm0.sock --mode sink --queues 2 --verify --peer vs0 --size 60-1514
  vshunt-bench net --socket /run/vm0.sock --mode source --peer vs0 --size 1500 --batch 64 --json
  vshunt-bench net --socket /run/vm0.sock --mode echo --peer vs0 --rate 100000 --reconnect 30s --runtime 1m

With --peer, the command plays the host's end of the tap behind the server, too: it sends to the guest that is a sink or
an echo, and counts what comes from a source or an echo. As root, in the tap's network namespace (ip netns exec NAME).
What comes is counted by the interface's counters; with --verify by a packet socket that looks at each frame, for which the
server's CPU pays, too.

A frame's size is without the 4 bytes of checksum that hardware adds.

Exit codes: 0 ok, 1 a lie of the server or wrong frames, 2 wrong usage, 3 cannot connect.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NetMode {
    /// Send frames of many flows
    Source,
    /// Receive frames, and keep the receive rings full
    Sink,
    /// Send back received frames with their addresses exchanged
    Echo,
}

fn sizes(text: &str) -> std::result::Result<Sizes, String> {
    Sizes::parse(text)
}

fn rate(text: &str) -> std::result::Result<f64, String> {
    let (number, scale) = match text.strip_suffix(['k', 'M']) {
        Some(number) if text.ends_with('k') => (number, 1e3),
        Some(number) => (number, 1e6),
        None => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(rate) if rate * scale >= 1.0 && rate.is_finite() => Ok(rate * scale),
        _ => Err(format!("{text:?} is no rate: frames a second, such as 50000, 200k or 1.5M")),
    }
}

#[derive(Args)]
pub(super) struct NetArgs {
    /// The server's vhost-user socket
    #[arg(long, short)]
    socket: PathBuf,
    /// Role of the guest
    #[arg(long, value_enum)]
    mode: NetMode,
    /// Number of queue pairs to set up
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Descriptors of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u16).range(2..=32768))]
    queue_size: u16,
    /// Bytes of a frame: a number, `imix` (7 of 64, 4 of 594, 1 of 1514), or a range such as
    /// 60-1514
    #[arg(long, default_value = "64", value_parser = sizes)]
    size: Sizes,
    /// Number of flows, assigned to the queue pairs round robin
    #[arg(long, default_value_t = 16)]
    flows: u16,
    /// Frames per second of the source or of the peer end, over all flows, such as 50000, 200k or
    /// 1.5M [default: as many as possible]
    #[arg(long, value_parser = rate, value_name = "RATE")]
    rate: Option<f64>,
    /// Frames, or receive buffers, that are published together
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Use one receive buffer for each frame, large enough for the longest one
    #[arg(long)]
    no_mrg: bool,
    /// Let the device compute checksums, and cut frames longer than 1514 bytes (UDP segments)
    #[arg(long)]
    offloads: bool,
    /// Use packed rings instead of split ones
    #[arg(long)]
    packed: bool,
    /// Do not use indirect descriptors
    #[arg(long)]
    no_indirect: bool,
    /// Do not use the event index, which causes more notifications in both directions
    #[arg(long)]
    no_event_idx: bool,
    /// Check every byte and checksum of received frames; a source sometimes puts header and frame
    /// into separate buffers
    #[arg(long)]
    verify: bool,
    /// A sink first sends a frame on each pair, from the address to which sources send, so that a
    /// switch learns it
    #[arg(long)]
    announce: bool,
    /// Length of the run, such as 10s, 500ms or 2m; a bare number is seconds [default: 5s, if no
    /// --frames is given]. Ctrl-C ends the run, too
    #[arg(long, alias = "time", value_parser = parse_time, value_name = "TIME")]
    runtime: Option<Duration>,
    /// Number of frames that the source sends
    #[arg(long, value_name = "N")]
    frames: Option<u64>,
    /// Load threads, to which queue pairs are assigned round robin [default: one for each pair]
    #[arg(long)]
    threads: Option<usize>,
    /// Poll for completions this many microseconds before sleeping on the eventfd
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    spin_us: u64,
    /// CPUs for the threads, round robin, such as 0,2-3; those of the peer end come last
    #[arg(long, value_parser = cpus, value_name = "CPUS")]
    pin: Option<Cpus>,
    /// Act as the host's end of this interface, the tap behind the server
    #[arg(long, value_name = "IFNAME")]
    peer: Option<String>,
    /// Number of sending threads of the peer end
    #[arg(long, default_value_t = 1, requires = "peer", value_name = "N")]
    senders: u16,
    /// The server's process, for its CPU time [default: the process that listens on the socket]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// If the server dies, wait this long for a new one, and continue
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    reconnect: Option<Duration>,
    #[command(flatten)]
    manner: Manner,
}

impl NetArgs {
    fn plan(&self) -> Result<NetPlan> {
        let mode = match self.mode {
            NetMode::Source => Mode::Source,
            NetMode::Sink => Mode::Sink,
            NetMode::Echo => Mode::Echo,
        };
        if self.frames.is_some() && mode != Mode::Source {
            return Err(fail!(Usage, "--frames is what a source sends: give --runtime"));
        }
        if self.announce && mode != Mode::Sink {
            return Err(fail!(Usage, "--announce is for --mode sink: others send anyway"));
        }
        if self.rate.is_some() && mode != Mode::Source && self.peer.is_none() {
            return Err(fail!(Usage, "--rate needs a sender: give --mode source or --peer, or leave it out"));
        }
        Ok(NetPlan {
            mode,
            pairs: self.queues,
            queue_size: self.queue_size,
            sizes: self.size,
            flows: self.flows,
            rate: self.rate,
            batch: self.batch,
            merge: !self.no_mrg,
            offloads: self.offloads,
            packed: self.packed,
            indirect: !self.no_indirect,
            event_idx: !self.no_event_idx,
            verify: self.verify,
            announce: self.announce,
            threads: self.threads.unwrap_or(usize::from(self.queues)),
            runtime: self.runtime.or(self.frames.is_none().then_some(Duration::from_secs(5))),
            frames: self.frames,
            spin: Duration::from_micros(self.spin_us),
            pin: self.pin.clone().map(|cpus| cpus.0).unwrap_or_default(),
            interval: self.manner.interval(),
            server_pid: self.server_pid,
            reconnect: self.reconnect,
            stall: self.manner.stall,
            timeout: self.manner.timeout,
            peer: self.peer.clone().map(|ifname| Peer { ifname, senders: self.senders }),
            ..NetPlan::default()
        })
    }
}

pub(super) fn run(args: &NetArgs) -> Result<()> {
    let plan = args.plan()?;
    net::frame::check_flows(plan.flows)?;
    let mut device = NetDevice::connect(&args.socket, &plan)?;
    let plan = NetPlan { stop: Some(stop::by_interrupt()?), ..plan };
    let mut live = Live::of_frames();
    let result = net::run(&mut device, &plan, &mut live);
    live.finish();
    let outcome = result?;
    let summary = Summary::new(&device, &plan, &outcome);
    if args.manner.json {
        let text = serde_json::to_string_pretty(&summary);
        println!("{}", text.map_err(|e| fail!(System, "cannot write the result as JSON: {e}"))?);
    } else {
        print!("{}", summary.table());
    }
    match outcome.wrong() {
        Some(why) if plan.verify => Err(Error::new(Kind::Verify, why)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn args(line: &str) -> NetArgs {
        match Cli::parse_from(line.split_ascii_whitespace()).command {
            Command::Net(args) => *args,
            _ => panic!("net"),
        }
    }

    #[test]
    fn a_full_line_is_understood() {
        let line = "vshunt-bench net --socket s --mode echo --queues 2 --size 60-1514 --flows 64 --rate 1.5M --batch 8 \
                    --no-mrg --offloads --packed --runtime 2s --pin 0-1 --peer vs0 --senders 2 --reconnect 30 --verify";
        let plan = args(line).plan().unwrap();
        assert_eq!((plan.mode, plan.pairs, plan.sizes), (Mode::Echo, 2, Sizes::Range(60, 1514)));
        assert_eq!((plan.rate, plan.batch, plan.merge), (Some(1.5e6), 8, false));
        assert_eq!(plan.peer.unwrap().senders, 2);
        assert_eq!(plan.reconnect, Some(Duration::from_secs(30)));
        for wrong in ["--mode sink --frames 5", "--mode sink --rate 5", "--mode echo --announce"] {
            assert!(args(&format!("vshunt-bench net --socket s {wrong}")).plan().is_err(), "{wrong}");
        }
        for wrong in
            ["--mode none", "--mode sink --size 10", "--mode source --rate 0", "--mode sink --senders 2"]
        {
            let line = format!("vshunt-bench net --socket s {wrong}");
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{wrong}");
        }
    }
}
