//! `block_set_io_throttle` of QEMU, and `query-block`, which shows what it sets.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use vshunt_types::spec::{Burst, LimitKind, LimitsSpec};

use super::qemu::block_device_info;
use crate::qmp::context::{Answer, Arguments, Context, Nothing, done};
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

/// Lists the exports of disks as QEMU lists its devices. Limits are those of the export, so
/// `query-named-block-nodes`, whose nodes are disks, does not have them: neither does QEMU's.
pub(super) fn query_block(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    let disks = context.daemon.disks();
    let exports = context.daemon.exports();
    let of_disks = exports.iter().filter(|e| e.spec.net.is_none());
    Ok(of_disks
        .map(|e| {
            let name = &e.spec.name;
            let mut info = json!({
                "device": name, "qdev": name, "type": "unknown", "removable": false, "locked": false,
            });
            // A disk that was removed meanwhile is a medium that is not inserted.
            if let Some(disk) = disks.iter().find(|d| d.spec.name == e.spec.disk) {
                let mut inserted = block_device_info(disk);
                inserted["ro"] = (disk.spec.readonly || e.spec.readonly).into();
                if let Some(members) = inserted.as_object_mut() {
                    members.extend(shown(e.spec.limits.as_ref()));
                }
                info["inserted"] = inserted;
            }
            info
        })
        .collect())
}

/// Returns the members of QEMU's BlockDeviceInfo that tell limits. The six rates are always there,
/// the others only if they are set.
fn shown(limits: Option<&LimitsSpec>) -> Map<String, Value> {
    let none = LimitsSpec::default();
    let limits = limits.unwrap_or(&none);
    let mut members = Map::new();
    let of_disks =
        |(key, ..): &(&str, Option<u64>, Option<Burst>)| LimitKind::of(key) != Some(LimitKind::Network);
    for (key, rate, burst) in limits.rates().into_iter().filter(of_disks) {
        let name = key.replace("-read", "_rd").replace("-write", "_wr");
        members.insert(name.clone(), rate.unwrap_or(0).into());
        if let Some(Burst { rate, seconds }) = burst {
            members.insert(format!("{name}_max"), rate.into());
            members.insert(format!("{name}_max_length"), seconds.into());
        }
    }
    if let Some(size) = limits.iops_size {
        members.insert("iops_size".to_owned(), size.into());
    }
    if let Some(group) = &limits.group {
        members.insert("group".to_owned(), group.as_str().into());
    }
    members
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
