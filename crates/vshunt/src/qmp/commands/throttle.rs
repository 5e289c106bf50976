//! `block_set_io_throttle` of QEMU.

use serde::Deserialize;
use vshunt_types::spec::{Burst, LimitsSpec};

use crate::qmp::context::{Answer, Arguments, Context, done};
use crate::qmp::message::QmpError;

/// Its arguments for the help.
pub(crate) const ARGUMENTS: &str = "id|device [bps bps_rd bps_wr iops iops_rd iops_wr iops_size group; and of each rate NAME_max, \
     NAME_max_length]";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IoThrottle {
    /// The name of the export. One of `id` and `device` is given.
    id: Option<String>,
    /// Another name of `id`.
    device: Option<String>,
    /// Bytes per second.
    #[serde(default)]
    bps: u64,
    /// Bytes read per second.
    #[serde(default)]
    bps_rd: u64,
    /// Bytes written per second.
    #[serde(default)]
    bps_wr: u64,
    /// Operations per second.
    #[serde(default)]
    iops: u64,
    /// Reads per second.
    #[serde(default)]
    iops_rd: u64,
    /// Writes per second.
    #[serde(default)]
    iops_wr: u64,
    /// The burst of `bps`.
    #[serde(default)]
    bps_max: u64,
    /// The burst of `bps_rd`.
    #[serde(default)]
    bps_rd_max: u64,
    /// The burst of `bps_wr`.
    #[serde(default)]
    bps_wr_max: u64,
    /// The burst of `iops`.
    #[serde(default)]
    iops_max: u64,
    /// The burst of `iops_rd`.
    #[serde(default)]
    iops_rd_max: u64,
    /// The burst of `iops_wr`.
    #[serde(default)]
    iops_wr_max: u64,
    /// How long `bps_max` may last, in seconds. Absent: 1.
    bps_max_length: Option<u64>,
    /// How long `bps_rd_max` may last, in seconds. Absent: 1.
    bps_rd_max_length: Option<u64>,
    /// How long `bps_wr_max` may last, in seconds. Absent: 1.
    bps_wr_max_length: Option<u64>,
    /// How long `iops_max` may last, in seconds. Absent: 1.
    iops_max_length: Option<u64>,
    /// How long `iops_rd_max` may last, in seconds. Absent: 1.
    iops_rd_max_length: Option<u64>,
    /// How long `iops_wr_max` may last, in seconds. Absent: 1.
    iops_wr_max_length: Option<u64>,
    /// A longer request counts as several operations of this number of bytes.
    #[serde(default)]
    iops_size: u64,
    /// The name of the group.
    group: Option<String>,
}

pub(super) fn block_set_io_throttle(context: &Context, arguments: Arguments) -> Answer {
    let asked: IoThrottle = arguments.read()?;
    let name = match (&asked.id, &asked.device) {
        (Some(name), None) | (None, Some(name)) => name.clone(),
        _ => return Err(QmpError::generic("give the name of the export as 'id' or as 'device', not both")),
    };
    let limits = asked.limits()?;
    let limits = (!limits.is_empty()).then_some(limits);
    Ok(done(context.daemon.export_limit(&name, limits.as_ref())?))
}

impl IoThrottle {
    fn limits(self) -> Result<LimitsSpec, QmpError> {
        let some = |value: u64| (value != 0).then_some(value);
        let burst = |name: &str, rate: u64, seconds: Option<u64>| match (rate, seconds) {
            (0, Some(_)) => Err(QmpError::generic(format!("'{name}_max_length' needs '{name}_max'"))),
            (0, None) => Ok(None),
            (rate, seconds) => Ok(Some(Burst { rate, seconds: seconds.unwrap_or(1) })),
        };
        Ok(LimitsSpec {
            iops: some(self.iops),
            iops_read: some(self.iops_rd),
            iops_write: some(self.iops_wr),
            bps: some(self.bps),
            bps_read: some(self.bps_rd),
            bps_write: some(self.bps_wr),
            burst_iops: burst("iops", self.iops_max, self.iops_max_length)?,
            burst_iops_read: burst("iops_rd", self.iops_rd_max, self.iops_rd_max_length)?,
            burst_iops_write: burst("iops_wr", self.iops_wr_max, self.iops_wr_max_length)?,
            burst_bps: burst("bps", self.bps_max, self.bps_max_length)?,
            burst_bps_read: burst("bps_rd", self.bps_rd_max, self.bps_rd_max_length)?,
            burst_bps_write: burst("bps_wr", self.bps_wr_max, self.bps_wr_max_length)?,
            iops_size: some(self.iops_size),
            group: self.group,
            ..LimitsSpec::default()
        })
    }
}
