//! The subcommands `workers` and `depth`, which start servers of their own and print tables.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::rw_values;
use crate::plot::{Plot, Target, command_line};
use crate::units::parse_time;
use crate::workers::Conditions;
use crate::{depth, workers};
use vshunt_guest::error::Result;
use vshunt_guest::load::Rw;

pub(super) const EXAMPLES: &str = "\
Examples:
  vshunt-bench workers --jobs 1,2,4 --runtime 3s --plot workers.svg
  vshunt-bench depth --queues 1,2 --formats null --plot depth.svg";

#[derive(Args)]
pub(super) struct WorkersArgs {
    /// Numbers of queues to compare, each queue with its own thread
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,12,16")]
    jobs: Vec<u16>,
    /// Access pattern
    #[arg(long, value_parser = rw_values(), default_value = "randrw")]
    rw: Rw,
    /// Length of each measurement, such as 3s or 500ms; a bare number is seconds
    #[arg(long, value_parser = parse_time, default_value = "3s", value_name = "TIME")]
    runtime: Duration,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
pub(super) struct DepthArgs {
    /// Numbers of requests in flight on each queue to compare
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128")]
    depths: Vec<u16>,
    /// Numbers of queues to compare, each queue with its own thread; several queues are served by
    /// one worker, and by one for each
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    queues: Vec<u16>,
    /// Access pattern
    #[arg(long, value_parser = rw_values(), default_value = "randread")]
    rw: Rw,
    /// Length of each measurement, such as 3s or 500ms; a bare number is seconds
    #[arg(long, value_parser = parse_time, default_value = "1s", value_name = "TIME")]
    runtime: Duration,
    #[command(flatten)]
    common: Common,
}

/// Servers and output of a comparison.
#[derive(Args)]
struct Common {
    /// The vshunt program [default: in the folder of this program, then in PATH]
    #[arg(long, value_name = "PATH")]
    vshunt: Option<PathBuf>,
    /// Backends to compare
    #[arg(long, value_delimiter = ',', default_value = "null,ram")]
    formats: Vec<String>,
    /// Measure each figure this number of times, and take the median
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), value_name = "N")]
    reps: u16,
    /// Print the table as JSON on stdout
    #[arg(long)]
    json: bool,
    /// Draw the table's IOPS as a picture, an SVG file; it names the machine and this command line
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

impl Common {
    /// Returns the file of --plot, after a check that it can be written.
    fn target(&self) -> Result<Option<Target>> {
        self.plot.as_deref().map(Target::new).transpose()
    }

    fn conditions(&self, rw: Rw, runtime: Duration) -> Conditions {
        let (vshunt, formats) = (self.vshunt.clone(), self.formats.clone());
        Conditions { vshunt, formats, rw, runtime, reps: self.reps }
    }

    fn print(&self, json: impl FnOnce() -> serde_json::Value, text: impl FnOnce() -> String) {
        if self.json {
            println!("{:#}", json());
        } else {
            print!("{}", text());
        }
    }
}

fn draw(target: Option<Target>, plot: impl FnOnce(&str) -> Plot) -> Result<()> {
    target.map_or(Ok(()), |target| target.write(&plot(&command_line())))
}

pub(super) fn workers(args: WorkersArgs) -> Result<()> {
    let target = args.common.target()?;
    let table = workers::compare(&workers::Request {
        jobs: args.jobs,
        conditions: args.common.conditions(args.rw, args.runtime),
    })?;
    args.common.print(|| table.json(), || table.text());
    draw(target, |command| table.plot(command))
}

pub(super) fn depth(args: DepthArgs) -> Result<()> {
    let target = args.common.target()?;
    let table = depth::compare(&depth::Request {
        depths: args.depths,
        queues: args.queues,
        conditions: args.common.conditions(args.rw, args.runtime),
    })?;
    args.common.print(|| table.json(), || table.text());
    draw(target, |command| table.plot(command))
}
