//! Flags of `vshunt limit`.

use clap::Args;
use vshunt_types::spec::{Burst, LimitsSpec};

use crate::keyval;
use crate::values::bytes;

pub(super) const AFTER: &str = "\
What is limited:
  Of a disk: reads, writes, discards and write-zeroes of the export, on all of
  its queues together. Discards and write-zeroes count as writes, and cost the
  bytes that the storage may have to write: none if it frees or marks ranges.
  Flushes, and the metadata of a mount, are not limited.
  Of a network: the frames of the export, on all of its queues together. rx are
  those that the guest receives, tx those that it sends. A frame counts as one
  packet, and its bytes from the Ethernet header on. Frames from the guest wait
  in its ring, and frames from a tap in the tap. Frames from a switch to the
  guest are dropped, and counted as `limited`.
  A rate may be exceeded for 50 ms, unless a burst is given. The flags replace
  the limits that the export has. Without flags they are printed.

Groups:
  Exports of a group share its limits, each the same part of them if it wants
  so much. The limits are those that were given last with the name of the group.
  An export without limits of its own joins a group that exists: --group alone.
  A group is of disks or of networks.

Examples:
  vshunt limit vm0 --iops 5000 --bps 200M
  vshunt limit vm0 --iops 5000 --burst-iops 20000:10s
  vshunt limit vm1 --bps-write 50M --group tenant7
  vshunt limit vm2 --group tenant7
  vshunt limit net0 --pps 100000 --bps-rx 125M
  vshunt limit vm0
  vshunt limit vm0 --off";

#[derive(Clone, Debug, Args)]
pub(crate) struct LimitArgs {
    /// Name of the export
    pub(crate) export: String,
    /// Lift its limits
    #[arg(long)]
    pub(crate) off: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "off")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
}

#[derive(Clone, Debug, Args)]
#[group(id = "limits", multiple = true, conflicts_with_all = ["off", "json"])]
pub(crate) struct LimitFlags {
    /// Of a disk: operations per second
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    iops: Option<u64>,
    /// Of a disk: reads per second
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    iops_read: Option<u64>,
    /// Of a disk: writes per second
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    iops_write: Option<u64>,
    /// Of a network: packets per second, received and sent
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    pps: Option<u64>,
    /// Of a network: packets per second that the guest receives
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    pps_rx: Option<u64>,
    /// Of a network: packets per second that the guest sends
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    pps_tx: Option<u64>,
    /// Bytes (not bits) per second, for example 200M
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    bps: Option<u64>,
    /// Of a disk: bytes read per second
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    bps_read: Option<u64>,
    /// Of a disk: bytes written per second
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    bps_write: Option<u64>,
    /// Of a network: bytes per second that the guest receives
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    bps_rx: Option<u64>,
    /// Of a network: bytes per second that the guest sends
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    bps_tx: Option<u64>,
    /// Operations per second for some seconds after a rest, for example 20000:10s
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_iops: Option<Burst>,
    /// The same for reads
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_iops_read: Option<Burst>,
    /// The same for writes
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_iops_write: Option<Burst>,
    /// Packets per second for some seconds after a rest, for example 500000:2s
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_pps: Option<Burst>,
    /// The same for packets that the guest receives
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_pps_rx: Option<Burst>,
    /// The same for packets that the guest sends
    #[arg(long, value_name = "N[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_pps_tx: Option<Burst>,
    /// Bytes per second for some seconds after a rest, for example 400M:10s
    #[arg(long, value_name = "SIZE[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_bps: Option<Burst>,
    /// The same for reads
    #[arg(long, value_name = "SIZE[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_bps_read: Option<Burst>,
    /// The same for writes
    #[arg(long, value_name = "SIZE[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_bps_write: Option<Burst>,
    /// The same for bytes that the guest receives
    #[arg(long, value_name = "SIZE[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_bps_rx: Option<Burst>,
    /// The same for bytes that the guest sends
    #[arg(long, value_name = "SIZE[:TIME]", value_parser = burst, allow_hyphen_values = true)]
    burst_bps_tx: Option<Burst>,
    /// Of a disk: count a longer request as several operations of this size
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    iops_size: Option<u64>,
    /// Of a network: count a longer frame as several packets of this size
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_hyphen_values = true)]
    pps_size: Option<u64>,
    /// Share the limits with the exports of this group
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
}

fn count(text: &str) -> Result<u64, String> {
    keyval::whole(text).ok_or_else(|| format!("`{text}` is not a whole number in range"))
}

fn burst(text: &str) -> Result<Burst, String> {
    text.parse()
}

impl LimitFlags {
    /// Returns the limits that were given. None: no flag was given.
    pub(crate) fn into_spec(self) -> Option<LimitsSpec> {
        let spec = LimitsSpec {
            iops: self.iops,
            iops_read: self.iops_read,
            iops_write: self.iops_write,
            pps: self.pps,
            pps_rx: self.pps_rx,
            pps_tx: self.pps_tx,
            bps: self.bps,
            bps_read: self.bps_read,
            bps_write: self.bps_write,
            bps_rx: self.bps_rx,
            bps_tx: self.bps_tx,
            burst_iops: self.burst_iops,
            burst_iops_read: self.burst_iops_read,
            burst_iops_write: self.burst_iops_write,
            burst_pps: self.burst_pps,
            burst_pps_rx: self.burst_pps_rx,
            burst_pps_tx: self.burst_pps_tx,
            burst_bps: self.burst_bps,
            burst_bps_read: self.burst_bps_read,
            burst_bps_write: self.burst_bps_write,
            burst_bps_rx: self.burst_bps_rx,
            burst_bps_tx: self.burst_bps_tx,
            iops_size: self.iops_size,
            pps_size: self.pps_size,
            group: self.group,
        };
        (spec != LimitsSpec::default()).then_some(spec)
    }
}
