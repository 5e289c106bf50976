//! The subcommand `net`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Cpus, Manner, cpus};
use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;
use vshunt_guest::net::frame::Sizes;
use vshunt_guest::net::{self, Mode, NetDevice, Peer, Plan};

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
    /// Take frames, keep the receive rings full
    Sink,
    /// Send back what comes, addresses exchanged
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
    /// What the guest does
    #[arg(long, value_enum)]
    mode: NetMode,
    /// Queue pairs to set up
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Descriptors a ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u16).range(2..=32768))]
    queue_size: u16,
    /// Bytes of a frame: a number, `imix` (7 of 64, 4 of 594, 1 of 1514), or a range such as 60-1514
    #[arg(long, default_value = "64", value_parser = sizes)]
    size: Sizes,
    /// Flows, dealt to the queue pairs in turn
    #[arg(long, default_value_t = 16)]
    flows: u16,
    /// Frames a second of the source or of the peer end, over all flows, such as 50000, 200k or 1.5M [default: as many as can be]
    #[arg(long, value_parser = rate, value_name = "RATE")]
    rate: Option<f64>,
    /// Frames, or receive buffers, that the server is told of at once
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// A receive buffer for each frame, large enough for the longest one
    #[arg(long)]
    no_mrg: bool,
    /// Leave checksums to the device, and frames longer than 1514 bytes (UDP segments)
    #[arg(long)]
    offloads: bool,
    /// Packed rings instead of split ones
    #[arg(long)]
    packed: bool,
    /// Do not use indirect descriptors
    #[arg(long)]
    no_indirect: bool,
    /// Do not use the event index: notify and be notified more often
    #[arg(long)]
    no_event_idx: bool,
    /// Check every byte and checksum of what is received; a source has header and frame apart now and then
    #[arg(long)]
    verify: bool,
    /// A sink first sends a frame on each pair, from the address that sources send to: a switch knows where it is then
    #[arg(long)]
    announce: bool,
    /// How long, such as 10s, 500ms or 2m; a number alone is seconds [default: 5s, if no --frames is given]. Ctrl-C is the
    /// end of it, too
    #[arg(long, alias = "time", value_parser = parse_time, value_name = "TIME")]
    runtime: Option<Duration>,
    /// Frames that the source sends in all
    #[arg(long, value_name = "N")]
    frames: Option<u64>,
    /// Load threads; queue pairs are dealt to them in turn [default: one a pair]
    #[arg(long)]
    threads: Option<usize>,
    /// Look for completions this many microseconds before sleeping on the eventfd
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    spin_us: u64,
    /// CPUs for the threads, in turn, such as 0,2-3; those of the peer end come last
    #[arg(long, value_parser = cpus, value_name = "CPUS")]
    pin: Option<Cpus>,
    /// Play the host's end of this interface, the tap behind the server
    #[arg(long, value_name = "IFNAME")]
    peer: Option<String>,
    /// Threads of the peer end that send
    #[arg(long, default_value_t = 1, requires = "peer", value_name = "N")]
    senders: u16,
    /// The server's process, for its CPU time [default: who listens on the socket]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// If the server dies, wait this long for it to come back, and go on
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    reconnect: Option<Duration>,
    #[command(flatten)]
    manner: Manner,
}

impl NetArgs {
    fn plan(&self) -> Result<Plan> {
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
            return Err(fail!(Usage, "--rate is for who sends: --mode source, or --peer"));
        }
        Ok(Plan {
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
            ..Plan::default()
        })
    }
}

pub(super) fn run(args: &NetArgs) -> Result<()> {
    let plan = args.plan()?;
    net::frame::check_flows(plan.flows)?;
    let mut device = NetDevice::connect(&args.socket, &plan)?;
    let plan = Plan { stop: Some(stop::by_interrupt()?), ..plan };
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
