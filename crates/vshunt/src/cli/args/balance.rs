//! Flags of `vshunt balance`.

use clap::Args;
use vshunt_types::spec::BalanceMode;

use crate::values::balance_mode;

pub(super) const AFTER: &str = "\
Modes:
  off      queues stay where they are
  auto     a queue moves to a less busy worker when the time that requests will
           wait less in the next second exceeds the measured cost of the move
  dry-run  what auto would do is reported, in events, the log and `status`
  default  with --export: the mode of the daemon (auto with workers=auto)

Which queues move:
  Those of disks and networks for VMMs and of uplinks, with engine=user, between
  the workers that were made for their export (workers=). An export without
  workers of its own uses worker 0 and those of `worker new`. The CPUs of
  workers stay as they are. A queue that `attach` or [[attach]] moved stays
  until balance is set again.

Exports with workers=auto:
  Workers are made and freed, too. Their default is auto, whatever the mode of
  the daemon is; with off their number stays.

Without a mode, the modes and the last decisions are printed.

Examples:
  vshunt balance auto
  vshunt balance dry-run --export vm0
  vshunt balance off";

#[derive(Clone, Debug, Args)]
pub(crate) struct BalanceArgs {
    /// off, auto or dry-run; with --export also default
    #[arg(value_name = "MODE", value_parser = mode)]
    pub(crate) mode: Option<Mode>,
    /// Set the mode of this export; otherwise that of all exports without one of their own
    #[arg(long, value_name = "NAME")]
    pub(crate) export: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with = "mode")]
    pub(crate) json: bool,
}

/// A mode, or that of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode(pub(crate) Option<BalanceMode>);

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "default" => Ok(Mode(None)),
        _ => balance_mode(text).map(|mode| Mode(Some(mode))).map_err(|why| format!("{why}, default")),
    }
}
