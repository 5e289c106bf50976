//! The subcommand `kernel`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Shape, Work, rings};
use vshunt_guest::driver::{KernelOptions, Workers};
use vshunt_guest::error::Result;
use vshunt_guest::fail;
use vshunt_guest::kernel::{self, hostile, net};

use crate::kernel_table as table;
use crate::report::{Live, Summary};
use crate::units::{parse_time, show_rate};
use vshunt_guest::load::LoadPlan;

/// Most bytes of buffers that a queue uses in turn for the check of the dirty log.
const LOG_BUFFERS_BYTES: u64 = 8 << 20;

pub(super) const EXAMPLES: &str = "\
Examples:
  vshunt-bench kernel --backend /dev/ram0 --rw randrw --verify --layout random --queues 4 --workers per-queue --time 5s
  vshunt-bench kernel --backend /dev/ram0 --check 200 --layout random
  vshunt-bench kernel --backend /dev/ram0 --queues 4 --attach-every 5ms --log-every 50ms --rw randrw --verify
  vshunt-bench kernel --backend /dev/ram0 --hostile 10000 --seed 7
  vshunt-bench kernel --net --queues 4 --ios 100000
  vshunt-bench kernel --tables --backend /dev/nullb0,/dev/ram0 --time 2s

The backend is written to. Needs the module vhost_blk, and permission on /dev/vhost-blk.

Exit codes: 0 ok, 1 an I/O or verification error, 2 wrong usage, 3 no such device.";

/// The layout of requests in descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Layout {
    /// Header, data, status: one descriptor each.
    Plain,
    /// Split at random: header and status share descriptors with data or not, data starts anywhere,
    /// indirect or not.
    Random,
}

#[derive(Args)]
pub(super) struct KernelArgs {
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    work: Work,
    /// The kernel's device [default: /dev/vhost-blk, with --net /dev/vhost-net]
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// The block device to serve; with --tables several, separated by commas
    #[arg(long, required_unless_present = "net", value_delimiter = ',', value_name = "PATH")]
    backend: Vec<PathBuf>,
    /// Make the device read-only
    #[arg(long)]
    read_only: bool,
    /// The expected answer to GET_ID
    #[arg(long, default_value = "vshunt-bench")]
    serial: String,
    /// Workers: `one`, `per-queue`, or a number of workers to which queues are assigned round robin
    #[arg(long, default_value = "one", value_parser = workers)]
    workers: Workers,
    /// Interval at which queues move between workers under load, and workers are created and freed
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    attach_every: Option<Duration>,
    /// Interval at which queues are stopped and started again under load, and the backend is
    /// removed and set again
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    restart_every: Option<Duration>,
    /// Interval at which the dirty log is switched on and off under load, with a check that it has
    /// all writes
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    log_every: Option<Duration>,
    /// Layout of requests in descriptors
    #[arg(long, value_enum, default_value = "plain")]
    layout: Layout,
    /// Most descriptors of a request, with --layout random
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u16).range(3..=1024), value_name = "N")]
    segments: u16,
    /// First make this number of rounds of every request type, valid and invalid; without
    /// --runtime, --ios or --size nothing else
    #[arg(long, default_value_t = 0, value_name = "ROUNDS")]
    check: u32,
    /// Instead of a load: send this number of malformed chains
    #[arg(long, value_name = "N", conflicts_with_all = ["check", "attach_every", "restart_every", "log_every", "tables"])]
    hostile: Option<u64>,
    /// With --hostile: first make chains from the files of this folder, a fuzzer's corpus, then
    /// from the seed
    #[arg(long, value_name = "FOLDER", requires = "hostile")]
    corpus: Option<PathBuf>,
    /// Instead of a load: compare one worker with several, 1 to 8 queues, next to the tables that
    /// started this project
    #[arg(long, conflicts_with_all = ["check", "attach_every", "restart_every", "log_every"])]
    tables: bool,
    /// Instead of a load: send frames through /dev/vhost-net and a tap, in both directions, each
    /// one checked; --queues pairs, --ios frames in each direction
    #[arg(long, conflicts_with_all = ["backend", "check", "attach_every", "restart_every", "log_every", "tables", "hostile"])]
    net: bool,
    /// Name of the tap, with --net; it is made, and removed at the end
    #[arg(long, default_value = "vsbench0", value_name = "NAME")]
    tap: String,
    /// Numbers of queues to compare, with --tables
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    jobs: Vec<u16>,
}

fn workers(text: &str) -> std::result::Result<Workers, String> {
    match text {
        "one" => Ok(Workers::One),
        "per-queue" => Ok(Workers::PerQueue),
        number => match number.parse() {
            Ok(count) if count > 0 => Ok(Workers::Count(count)),
            _ => Err(format!("{number:?} is not `one`, `per-queue` or a number of workers")),
        },
    }
}

impl KernelArgs {
    fn plan(&self) -> Result<LoadPlan> {
        let plan = self.work.plan(&self.shape)?;
        let shuffle = if self.layout == Layout::Random { self.segments } else { 0 };
        let buffers = match self.log_every {
            Some(_) => (LOG_BUFFERS_BYTES / u64::from(plan.block)).clamp(4, 1024) as u16,
            None => 0,
        };
        Ok(LoadPlan {
            shuffle,
            buffers: buffers.max(plan.iodepth.saturating_mul(4) * u16::from(buffers > 0)),
            ..plan
        })
    }

    fn device(&self, default: &str) -> PathBuf {
        self.device.clone().unwrap_or_else(|| default.into())
    }

    fn kernel(&self) -> Result<KernelOptions> {
        let [backend] = &self.backend[..] else {
            return Err(fail!(Usage, "several backends are for --tables"));
        };
        Ok(KernelOptions {
            device: self.device("/dev/vhost-blk"),
            backend: backend.clone(),
            read_only: self.read_only,
            serial: self.serial.clone(),
            workers: self.workers,
        })
    }
}

/// Returns all files of a folder and its subfolders, sorted by name and concatenated.
fn read_corpus(folder: &Path) -> Result<Vec<u8>> {
    let failed = |path: &Path, e| fail!(Io, "cannot read {}: {e}", path.display());
    let entries = std::fs::read_dir(folder).map_err(|e| failed(folder, e))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut bytes = Vec::new();
    for path in paths {
        bytes.extend(match path.is_dir() {
            true => read_corpus(&path)?,
            false => std::fs::read(&path).map_err(|e| failed(&path, e))?,
        });
    }
    Ok(bytes)
}

pub(super) fn run(args: &KernelArgs) -> Result<()> {
    if args.tables {
        return tables(args);
    }
    if args.net {
        return net(args);
    }
    let (plan, kernel) = (args.plan()?, args.kernel()?);
    let options = args.shape.options(&plan);
    if let Some(chains) = args.hostile {
        let corpus = args.corpus.as_deref().map_or(Ok(vec![]), read_corpus)?;
        let plan = hostile::HostilePlan {
            chains,
            seed: args.work.seed,
            corpus,
            patience: args.shape.manner.timeout,
        };
        let counts = kernel::run_hostile(&kernel, options, &plan)?;
        let value = serde_json::json!({ "hostile": counts });
        return print(args, &value, || {
            format!(
                "hostile: {} chains of {} bytes of a corpus and seed {}: {} OK, {} failed, {} unsupported, {} without status, {} unanswered as the ring broke, \
                 {} settled; {} sound requests between them answered, {} rings set up again\n",
                counts.chains,
                counts.corpus_bytes,
                plan.seed,
                counts.ok,
                counts.io_error,
                counts.unsupported,
                counts.no_status,
                counts.broken,
                counts.settled,
                counts.probes,
                counts.restarts
            )
        });
    }
    let has_end = args.work.runtime.is_some() || plan.ios.is_some();
    let request = kernel::Request {
        kernel,
        options,
        load: (args.check == 0 || has_end).then(|| plan.clone()),
        check: args.check,
        shuffle: plan.shuffle,
        seed: args.work.seed,
        attach_every: args.attach_every,
        restart_every: args.restart_every,
        log_every: args.log_every,
    };
    let mut live = Live::new();
    let result = kernel::run(&request, &mut live);
    live.finish();
    let (mut disk, outcome, report) = result?;
    let rings = rings(&mut disk, false);
    let summary = outcome.map(|outcome| Summary::new(&plan, rings, &outcome));
    let mut value = serde_json::to_value(&summary).unwrap_or_default();
    if value.is_null() {
        value = serde_json::json!({});
    }
    value["kernel"] = serde_json::to_value(&report).unwrap_or_default();
    print(args, &value, || summary.map(|s| s.table()).unwrap_or_default() + &report.text())
}

fn net(args: &KernelArgs) -> Result<()> {
    let plan = net::VhostNetPlan {
        device: args.device("/dev/vhost-net"),
        tap: args.tap.clone(),
        pairs: args.shape.queues,
        queue_size: args.shape.queue_size,
        frames: args.work.ios.unwrap_or(10_000),
        seed: args.work.seed,
        patience: args.shape.manner.timeout,
    };
    let report = net::run(&plan)?;
    print(args, &serde_json::json!({ "net": report }), || {
        format!(
            "vhost-net: {} queue pairs, {} frames out and {} in, all whole and once; {} and {} frames/s in windows\n",
            report.pairs,
            report.sent,
            report.received,
            show_rate(report.sent_per_s),
            show_rate(report.received_per_s)
        )
    })
}

fn tables(args: &KernelArgs) -> Result<()> {
    let kernel = KernelOptions {
        device: args.device("/dev/vhost-blk"),
        backend: PathBuf::new(),
        read_only: false,
        serial: args.serial.clone(),
        workers: Workers::One,
    };
    let request = table::Request {
        kernel,
        backends: args.backend.clone(),
        jobs: args.jobs.clone(),
        runtime: args.work.runtime.unwrap_or(Duration::from_secs(3)),
    };
    let tables = table::measure(&request)?;
    print(args, &tables.json(), || tables.text())
}

fn print(args: &KernelArgs, value: &serde_json::Value, text: impl FnOnce() -> String) -> Result<()> {
    if args.shape.manner.json {
        println!("{value:#}");
    } else {
        print!("{}", text());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    #[test]
    fn a_full_line_is_understood() {
        let line = "vshunt-bench kernel --backend /dev/ram0 --depth 8 --time 2s --workers 3 --attach-every 5ms \
                    --log-every 50ms --layout random";
        let Command::Kernel(args) = Cli::parse_from(line.split_ascii_whitespace()).command else {
            panic!("kernel")
        };
        let plan = args.plan().unwrap();
        assert_eq!((plan.iodepth, plan.shuffle, plan.buffers), (8, 24, 1024));
        assert_eq!(args.kernel().unwrap().workers, Workers::Count(3));
        assert_eq!(args.shape.options(&plan).indirect_cap, 24);
        for wrong in ["kernel", "kernel --backend a --workers 0", "kernel --backend a --hostile 1 --check 1"]
        {
            assert!(Cli::try_parse_from(format!("vshunt-bench {wrong}").split(' ')).is_err(), "{wrong}");
        }
        assert!(workers("many").is_err());
    }
}
