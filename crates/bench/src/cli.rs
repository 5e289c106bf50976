//! The command line of `vshunt-bench`. Exit codes: 0 ok, 1 failed, 2 usage, 3 cannot connect.

mod compare;
mod kernel;
mod net;
mod tap;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::report::{Live, Rings, Summary};
use crate::stop;
use crate::units::{parse_cpus, parse_size, parse_time};
use vshunt_guest::driver::{Disk, Options};
use vshunt_guest::error::Result;
use vshunt_guest::fail;
use vshunt_guest::load::{self, LoadPlan, Rw};
use vshunt_guest::verify::StateFile;

const EXAMPLES: &str = "\
Examples:
  vshunt-bench blk --socket /run/vm0.sock --rw randread --bs 4k --iodepth 128 --queues 4 --runtime 5s
  vshunt-bench blk --socket /run/vm0.sock --rw randrw --verify --ios 1000000 --state /tmp/vm0.state
  vshunt-bench blk --socket /run/vm0.sock --rw randwrite --verify --reconnect 30s --runtime 1m
  vshunt-bench verify --socket /run/vm0.sock --state /tmp/vm0.state
  vshunt-bench workers --jobs 1,2,4 --runtime 3s --plot workers.svg
  vshunt-bench net --socket /run/vm0.sock --mode sink --peer vs0 --runtime 5s
  vshunt-bench tap --queues 1,2

A TIME is a number with ms, s or m, such as 500ms, 10s or 2m; alone it is seconds. A SIZE is bytes, or a number with k, M or G.

Exit codes: 0 ok, 1 an I/O or verification error, 2 wrong usage, 3 cannot connect.";

/// Load generator for vhost-user-blk and vhost-user-net sockets and the kernel's vhost: a guest
/// driver without a guest
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Put load on a socket and measure it
    #[command(after_help = EXAMPLES)]
    Blk(Box<BlkArgs>),
    /// Read back and check everything that a run with --verify --state wrote
    Verify(Box<VerifyArgs>),
    /// Drive the kernel's /dev/vhost-blk by ioctls, as a VMM does
    #[command(after_help = kernel::EXAMPLES)]
    Kernel(Box<kernel::KernelArgs>),
    /// Compare one worker with many, next to the table that started this project
    #[command(after_help = compare::EXAMPLES)]
    Workers(compare::WorkersArgs),
    /// Compare depths: 1 to 128 requests in flight on a queue, on one queue and on several
    #[command(after_help = compare::EXAMPLES)]
    Depth(compare::DepthArgs),
    /// Drive a network device over vhost-user: send frames, receive them, or send them back
    #[command(after_help = net::EXAMPLES)]
    Net(Box<net::NetArgs>),
    /// Measure a tap alone: frames out of 1 to 4 queues and into them, next to the table that
    /// started this project
    #[command(after_help = tap::EXAMPLES)]
    Tap(tap::TapArgs),
    /// Write the man pages into a directory
    #[command(hide = true)]
    Man { directory: PathBuf },
}

/// Returns a parser for the access patterns by name.
fn rw_values() -> impl TypedValueParser<Value = Rw> {
    PossibleValuesParser::new(Rw::ALL.map(Rw::name)).map(|name| {
        let named = Rw::ALL.into_iter().find(|rw| rw.name() == name);
        named.expect("the parser accepts the names of the patterns only")
    })
}

/// A list of CPUs. clap would take a bare `Vec` as several values.
#[derive(Clone, Debug, PartialEq)]
struct Cpus(Vec<usize>);

fn cpus(text: &str) -> std::result::Result<Cpus, String> {
    parse_cpus(text).map(Cpus)
}

/// A vhost-user server, and the features that are used.
#[derive(Args)]
struct Connection {
    /// The server's vhost-user socket
    #[arg(long, short)]
    socket: PathBuf,
    #[command(flatten)]
    shape: Shape,
    /// Use packed rings instead of split ones
    #[arg(long)]
    packed: bool,
    /// The server's process, for its CPU time [default: the process that listens on the socket]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// If the server dies, wait this long for a new one, and continue
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    reconnect: Option<Duration>,
}

/// Queues and load threads, for any transport.
#[derive(Args)]
struct Shape {
    /// Number of queues to set up
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    queues: u16,
    /// Descriptors of each queue
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u16).range(3..=32768))]
    queue_size: u16,
    /// Requests kept in flight on each queue
    #[arg(long, alias = "depth", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    iodepth: u16,
    /// Load threads, to which queues are assigned round robin [default: one for each queue]
    #[arg(long)]
    threads: Option<usize>,
    /// Do not use indirect descriptors
    #[arg(long)]
    no_indirect: bool,
    /// Do not use the event index, which causes more notifications in both directions
    #[arg(long)]
    no_event_idx: bool,
    /// Poll for completions this many microseconds before sleeping on the eventfd
    #[arg(long, default_value_t = 0, alias = "poll-us", value_name = "MICROSECONDS")]
    spin_us: u64,
    /// CPUs for the load threads, round robin, such as 0,2-3
    #[arg(long, value_parser = cpus, value_name = "CPUS")]
    pin: Option<Cpus>,
    #[command(flatten)]
    manner: Manner,
}

/// Time limits of a run, and its output.
#[derive(Args)]
struct Manner {
    /// A request that is not completed within this time, while the server is there, is an error
    #[arg(long, value_parser = parse_time, default_value = "30s", value_name = "TIME")]
    stall: Duration,
    /// Time limit of the server's answers
    #[arg(long, value_parser = parse_time, default_value = "10s", value_name = "TIME")]
    timeout: Duration,
    /// Time between live figures on stderr; with `net --mode echo` they count both directions
    #[arg(long, value_parser = parse_time, default_value = "1s", value_name = "TIME")]
    interval: Duration,
    /// Show no live figures
    #[arg(long, short)]
    quiet: bool,
    /// Print the result as JSON on stdout
    #[arg(long)]
    json: bool,
}

impl Manner {
    fn interval(&self) -> Duration {
        match self.quiet {
            true => Duration::from_secs(1 << 30),
            false => self.interval.max(Duration::from_millis(50)),
        }
    }
}

/// The load.
#[derive(Args)]
struct Work {
    /// Access pattern
    #[arg(long, value_parser = rw_values(), default_value = "randread", value_parser = rw_values())]
    rw: Rw,
    /// Percentage of reads in the mixed patterns
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: u8,
    /// Bytes of each request, a multiple of 512
    #[arg(long, default_value = "4k", value_parser = parse_size, value_name = "SIZE")]
    bs: u64,
    /// Time to make requests, such as 10s, 500ms or 2m; a bare number is seconds [default: 5s, if
    /// neither --ios nor --size is given]. The run waits for requests in flight. Ctrl-C (SIGINT)
    /// ends the run, too; a second one ends the program
    #[arg(long, alias = "time", value_parser = parse_time, value_name = "TIME")]
    runtime: Option<Duration>,
    /// Number of requests, over all queues
    #[arg(long, conflicts_with = "size", value_name = "N")]
    ios: Option<u64>,
    /// Bytes to read or write, over all queues
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// First byte of the disk to use
    #[arg(long, default_value = "0", value_parser = parse_size, value_name = "SIZE")]
    offset: u64,
    /// Bytes of the disk to use from there [default: all]
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    range: Option<u64>,
    /// Stamp written data, check data that is read, and read all of it back at the end
    #[arg(long)]
    verify: bool,
    /// File for the state of what was written, for `vshunt-bench verify`
    #[arg(long, requires = "verify", value_name = "FILE")]
    state: Option<PathBuf>,
    /// Seed of all random numbers, and of the stamps of --verify
    #[arg(long, default_value_t = 1)]
    seed: u32,
    /// Flush after this number of writes of a queue
    #[arg(long, default_value_t = 0, value_name = "N")]
    flush_every: u32,
}

#[derive(Args)]
struct BlkArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    work: Work,
}

#[derive(Args)]
struct VerifyArgs {
    #[command(flatten)]
    connection: Connection,
    /// The file that `blk --verify --state` wrote
    #[arg(long, value_name = "FILE")]
    state: PathBuf,
}

/// Writes a page for each command: vshunt-bench.1, vshunt-bench-blk.1, …
fn write_man(directory: &Path) -> Result<()> {
    let command = Cli::command().name("vshunt-bench").disable_help_subcommand(true);
    clap_mangen::generate_to(command, directory)
        .map_err(|e| fail!(System, "cannot write man pages to {}: {e}", directory.display()))
}

/// Runs the program.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Blk(args) => blk(*args),
        Command::Verify(args) => verify(*args),
        Command::Kernel(args) => kernel::run(&args),
        Command::Workers(args) => compare::workers(args),
        Command::Depth(args) => compare::depth(args),
        Command::Net(args) => net::run(&args),
        Command::Tap(args) => tap::run(&args),
        Command::Man { directory } => write_man(&directory),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vshunt-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

impl Shape {
    /// Returns the options of a device for `plan`.
    fn options(&self, plan: &LoadPlan) -> Options {
        Options {
            queues: self.queues,
            queue_size: self.queue_size,
            indirect: !self.no_indirect,
            event_idx: !self.no_event_idx,
            // Header, data, status, or more if they are split at random.
            indirect_cap: plan.shuffle.max(3),
            // One more page each, for alignment.
            buffer_bytes: u64::from(self.queues) * (plan.buffer_bytes() + 8192),
            timeout: self.manner.timeout,
            ..Options::default()
        }
    }

    fn plan(&self, block: u64) -> Result<LoadPlan> {
        let block = u32::try_from(block).ok().filter(|&b| b > 0 && b <= 64 << 20);
        Ok(LoadPlan {
            block: block.ok_or_else(|| fail!(Usage, "--bs must be 512 to 64M"))?,
            iodepth: self.iodepth,
            threads: self.threads.unwrap_or(usize::from(self.queues)),
            spin: Duration::from_micros(self.spin_us),
            pin: self.pin.clone().map(|cpus| cpus.0).unwrap_or_default(),
            interval: self.manner.interval(),
            stall: self.manner.stall,
            ..LoadPlan::default()
        })
    }
}

impl Connection {
    fn options(&self, plan: &LoadPlan) -> Options {
        Options { packed: self.packed, ..self.shape.options(plan) }
    }

    fn plan(&self, plan: LoadPlan) -> LoadPlan {
        LoadPlan { server_pid: self.server_pid, reconnect: self.reconnect, ..plan }
    }
}

impl Work {
    fn plan(&self, shape: &Shape) -> Result<LoadPlan> {
        let ios = self.ios.or(self.size.map(|size| size.div_ceil(self.bs.max(1))));
        Ok(LoadPlan {
            rw: self.rw,
            read_percent: self.rwmixread,
            runtime: self.runtime.or(ios.is_none().then_some(Duration::from_secs(5))),
            ios,
            offset: self.offset,
            range: self.range,
            verify: self.verify,
            state: self.state.clone(),
            seed: self.seed,
            flush_every: self.flush_every,
            ..shape.plan(self.bs)?
        })
    }
}

fn rings(disk: &mut Disk, packed: bool) -> Rings {
    let features = disk.transport().features();
    let has = |bit: u64| features & bit != 0;
    Rings {
        queues: disk.queue_count(),
        packed,
        indirect: has(vshunt_guest::driver::feature::INDIRECT_DESC),
        event_idx: has(vshunt_guest::driver::feature::EVENT_IDX),
    }
}

fn blk(args: BlkArgs) -> Result<()> {
    let connection = &args.connection;
    let plan = connection.plan(args.work.plan(&connection.shape)?);
    let mut disk = Disk::connect(&connection.socket, connection.options(&plan))?;
    let plan = LoadPlan { stop: Some(stop::by_interrupt()?), ..plan };
    let mut live = Live::new();
    let result = load::run(&mut disk, &plan, &mut live);
    live.finish();
    show(&plan, rings(&mut disk, connection.packed), &result?, connection.shape.manner.json)
}

fn verify(args: VerifyArgs) -> Result<()> {
    let connection = &args.connection;
    let state = StateFile::load(&args.state)?;
    let shape = connection.shape.plan(u64::from(state.block))?;
    let plan = LoadPlan { rw: Rw::Read, ..connection.plan(shape) };
    let mut disk = Disk::connect(&connection.socket, connection.options(&plan))?;
    let mut live = Live::new();
    let result = load::verify(&mut disk, &plan, state, &mut live);
    live.finish();
    let blocks = result?.verified_blocks.unwrap_or(0);
    if connection.shape.manner.json {
        println!("{}", serde_json::json!({ "verified_blocks": blocks }));
    } else {
        println!("verified: {blocks} blocks read back, all as written");
    }
    Ok(())
}

fn show(plan: &LoadPlan, rings: Rings, outcome: &load::Outcome, json: bool) -> Result<()> {
    let summary = Summary::new(plan, rings, outcome);
    if json {
        let text = serde_json::to_string_pretty(&summary);
        println!("{}", text.map_err(|e| fail!(System, "cannot write the result as JSON: {e}"))?);
    } else {
        print!("{}", summary.table());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_full_line_is_understood() {
        let line = "vshunt-bench blk --socket s --rw randrw --rwmixread 70 --bs 8k --iodepth 64 --queues 2 --threads 1 \
                    --ios 1000 --verify --packed --spin-us 20 --pin 0-1 --reconnect 30 --interval 500ms";
        let Command::Blk(args) = Cli::parse_from(line.split_ascii_whitespace()).command else {
            panic!("blk")
        };
        assert_eq!((args.work.bs, args.work.rwmixread, args.work.ios), (8192, 70, Some(1000)));
        assert_eq!(args.connection.shape.pin, Some(Cpus(vec![0, 1])));
        assert_eq!(args.connection.reconnect, Some(Duration::from_secs(30)));
        assert!(Cli::try_parse_from("vshunt-bench blk --socket s --ios 1 --size 4k".split(' ')).is_err());
    }
}
