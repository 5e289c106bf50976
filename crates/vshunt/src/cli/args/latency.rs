//! Flags of `vshunt latency`.

use clap::Args;

pub(super) const AFTER: &str = "\
The columns are those of the same table of `vshunt status`. `vshunt top` shows
the figures of an interval.

After --reset, this command, status and the histograms of query-blockstats tell
of later requests only. Metrics and the sums of times of query-blockstats go on.

Examples:
  vshunt latency vm0
  vshunt latency vm0 --reset; sleep 60; vshunt latency vm0
  vshunt latency vm0 --json | jq '.[0].\"service-times\".read.bins'";

#[derive(Clone, Debug, Args)]
pub(crate) struct LatencyArgs {
    /// Names of exports [default: all that are measured]
    #[arg(value_name = "EXPORT")]
    pub(crate) exports: Vec<String>,
    /// Reset their service times
    #[arg(long)]
    pub(crate) reset: bool,
    /// Print JSON, with all bins of the histograms
    #[arg(long, conflicts_with = "reset")]
    pub(crate) json: bool,
}
