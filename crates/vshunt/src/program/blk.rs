//! `vshunt-blk`: a disk.

use std::path::PathBuf;

use clap::Parser;
use vshunt_daemon::Check;
use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec, Format};

use super::{Common, Program};
use crate::config::Setup;
use crate::outcome::{Failure, Outcome};
use crate::values::image_format;

const AFTER: &str = "\
End:
  The program stays in the foreground and ends on SIGTERM. With --fd it also
  ends when its peer disconnects. Exit status: 0 success, 1 failure, 2 usage.

Examples:
  vshunt-blk --socket-path=/tmp/vm0.sock --blk-file=disk.img --num-queues=4
  vshunt-blk --fd=3 --blk-file=disk.img --read-only";

/// Command line of `vshunt-blk`.
#[derive(Debug, Parser)]
#[command(name = "vshunt-blk", version, after_long_help = AFTER, max_term_width = 80)]
#[command(about = "A vhost-user block device backend: one file or block device, one socket")]
pub(super) struct BlkCli {
    /// File or block device to serve
    #[arg(long, value_name = "PATH", required = true)]
    blk_file: Option<PathBuf>,
    /// Format of the file, qcow2 or raw [default: raw]; a file that begins as a qcow2 image is
    /// refused as raw
    #[arg(long, value_parser = image_format())]
    format: Option<Format>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Virtqueues to offer [default: 256, which no guest exceeds]
    #[arg(long, value_name = "N")]
    num_queues: Option<u16>,
    #[command(flatten)]
    common: Common,
}

impl Program for BlkCli {
    const PROGRAM: &str = "vshunt-blk";
    const NAME: &str = "blk";
    const CAPABILITIES: &str = "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n";

    fn setup(self) -> Outcome<(Setup, Common)> {
        let disk = DiskSpec {
            name: Self::NAME.into(),
            file: self.blk_file,
            format: self.format,
            readonly: self.read_only,
            locking: true,
            ..Default::default()
        };
        let export = ExportSpec {
            kind: ExportKind::VhostUserBlk,
            name: Self::NAME.into(),
            disk: Self::NAME.into(),
            socket: self.common.socket_path.clone(),
            fd: self.common.fd,
            memory_may_block: self.common.memory_may_block.then_some(true),
            queues: self.num_queues,
            readonly: self.read_only,
            ..Default::default()
        };
        export.check().map_err(|e| Failure::Usage(e.to_string()))?;
        Ok((Setup { disks: vec![disk], exports: vec![export], ..Default::default() }, self.common))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        BlkCli::command().debug_assert();
    }

    #[test]
    fn what_the_convention_asks_for() {
        let cli = BlkCli::try_parse_from(["vshunt-blk", "--fd=3", "--blk-file=/d", "--read-only"]).unwrap();
        let (setup, _) = cli.setup().unwrap();
        assert_eq!((setup.exports[0].fd, setup.exports[0].readonly), (Some(3), true));
        assert!(setup.disks[0].readonly && setup.disks[0].locking);
        for bad in [&["--blk-file=/d"][..], &["--fd=3", "--socket-path=/s", "--blk-file=/d"], &["--fd=3"]] {
            assert!(BlkCli::try_parse_from(["vshunt-blk"].iter().chain(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn capabilities_are_json_of_the_schema() {
        let value: serde_json::Value = serde_json::from_str(BlkCli::CAPABILITIES).unwrap();
        assert_eq!(value, serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
        assert_eq!(BlkCli::CAPABILITIES.lines().count(), 1);
    }
}
