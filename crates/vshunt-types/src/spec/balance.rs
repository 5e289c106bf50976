//! How queues follow load: the setting, and what was decided.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether queues are moved to less busy workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    /// No.
    #[default]
    Off,
    /// Yes, when the predicted gain exceeds the measured cost of a move.
    Auto,
    /// What `auto` would do is reported and not done.
    DryRun,
}

impl BalanceMode {
    /// All modes with their names.
    pub const ALL: [(&str, Self); 3] = [("off", Self::Off), ("auto", Self::Auto), ("dry-run", Self::DryRun)];

    /// Returns the name of the mode.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }
}

impl fmt::Display for BalanceMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What was done about a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceOutcome {
    /// The queue was moved.
    Moved,
    /// The queue did not come to rest in time, or its worker is gone. It stays where it was.
    Failed,
    /// Nothing, because the mode is `dry-run`.
    DryRun,
}

impl BalanceOutcome {
    /// Returns the name of the outcome.
    pub fn name(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Failed => "failed",
            Self::DryRun => "dry-run",
        }
    }
}

/// What was done about a decision on the number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResizeOutcome {
    /// A worker was made or freed.
    Done,
    /// No worker could be made, or it could not be freed.
    Failed,
    /// Nothing, because the mode is `dry-run`.
    DryRun,
}

impl ResizeOutcome {
    /// Returns the name of the outcome.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::DryRun => "dry-run",
        }
    }
}

/// A decision about a queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BalanceDecision {
    /// The index of the queue.
    pub index: u16,
    /// The id of its worker.
    pub from: u32,
    /// The id of the worker that it should be on.
    pub worker: u32,
    /// What was done: `moved`, `failed` or `dry-run`.
    pub outcome: BalanceOutcome,
    /// Why.
    pub reason: String,
    /// How long ago, in seconds.
    pub age_s: u64,
}

/// A decision about the number of workers of an export with `workers=auto`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ResizeDecision {
    /// The number of workers that there should be.
    pub workers: u32,
    /// The id of the worker that was made or freed. Absent: none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// What was done: `done`, `failed` or `dry-run`.
    pub outcome: ResizeOutcome,
    /// Why.
    pub reason: String,
    /// How long ago, in seconds.
    pub age_s: u64,
}

/// How the queues of an export follow load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BalanceInfo {
    /// The mode that is in force: that of the export, or else that of the daemon.
    pub mode: BalanceMode,
    /// How many moves were made since the export was added.
    pub moves: u64,
    /// How many decisions were made, with those that failed and those of dry runs.
    pub decisions: u64,
    /// The indices of queues that stay because a command or the configuration attached them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached: Vec<u16>,
    /// The last decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<BalanceDecision>,
    /// With `workers=auto`: the last decision about the number of workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<ResizeDecision>,
}
