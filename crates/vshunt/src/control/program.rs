//! `vshunt-blk`: the same engine under the command line that management software expects of a vhost-user backend.
//!
//! QEMU, docs/interop/vhost-user.rst, "Backend program conventions"; docs/interop/vhost-user.json for the
//! capabilities. It serves one disk over one socket, and has no control socket unless asked for one.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::Parser;

use super::cli::LogArgs;
use super::config::{Control, Setup};
use super::jobs::args::image_format;
use super::serve::{Manner, serve};
use super::{Failure, Outcome, clap_failure, print};
use crate::export::Check;
use crate::export::spec::{DiskSpec, ExportKind, ExportSpec, Format};

/// What `--print-capabilities` prints (VHostUserBackendCapabilities).
const CAPABILITIES: &str = "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n";

/// Name of the one disk and of its export.
const NAME: &str = "blk";

const AFTER: &str = "\
End:
  It stays in the foreground and ends on SIGTERM. With --fd it also ends when
  its peer does. Exit status: 0 done, 1 failed, 2 usage.

Examples:
  vshunt-blk --socket-path=/tmp/vm0.sock --blk-file=disk.img --num-queues=4
  vshunt-blk --fd=3 --blk-file=disk.img --read-only";

/// Command line of `vshunt-blk`.
#[derive(Debug, Parser)]
#[command(name = "vshunt-blk", version, after_long_help = AFTER, max_term_width = 100)]
#[command(about = "A vhost-user block device backend: one file or block device, one socket")]
pub(crate) struct BlkCli {
    /// Where to listen
    #[arg(long, value_name = "PATH", required_unless_present = "fd", conflicts_with = "fd")]
    socket_path: Option<PathBuf>,
    /// The vhost-user socket, as an open file descriptor
    #[arg(long, value_name = "FDNUM")]
    fd: Option<RawFd>,
    /// File or block device to serve
    #[arg(long, value_name = "PATH", required = true)]
    blk_file: Option<PathBuf>,
    /// Its format, qcow2 or raw: raw unless given, which a file that begins as qcow2 is not served as
    #[arg(long, value_parser = image_format())]
    format: Option<Format>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Virtqueues to offer [default: one for each CPU]
    #[arg(long, value_name = "N")]
    num_queues: Option<u16>,
    /// Print the capabilities as JSON and exit; all else is ignored
    #[arg(long)]
    print_capabilities: bool,
    /// Listen for `vshunt -c SOCKET …` too
    #[arg(short, long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    log: LogArgs,
}

pub(crate) fn main(args: &[OsString]) -> Outcome {
    // Before anything else looks at the arguments, since wrong ones are to be ignored too.
    if args.iter().skip(1).any(|a| a == "--print-capabilities") {
        return print(CAPABILITIES);
    }
    let cli = BlkCli::try_parse_from(args).or_else(clap_failure)?;
    let ends_with = cli.fd.map(|_| NAME.to_owned());
    let manner = Manner { program: "vshunt-blk", log: cli.log, ends_with };
    serve(setup(cli)?, &manner)
}

fn setup(cli: BlkCli) -> Outcome<Setup> {
    let disk = DiskSpec {
        name: NAME.into(),
        file: cli.blk_file,
        format: cli.format,
        readonly: cli.read_only,
        locking: true,
        ..Default::default()
    };
    let export = ExportSpec {
        kind: ExportKind::VhostUserBlk,
        name: NAME.into(),
        disk: NAME.into(),
        socket: cli.socket_path,
        fd: cli.fd,
        queues: cli.num_queues,
        readonly: cli.read_only,
        ..Default::default()
    };
    export.check().map_err(|e| Failure::Usage(e.to_string()))?;
    let control = cli.control.map_or(Control::Off, Control::At);
    Ok(Setup { control, disks: vec![disk], exports: vec![export], ..Default::default() })
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
        let setup = setup(cli).unwrap();
        assert_eq!((setup.exports[0].fd, setup.exports[0].readonly), (Some(3), true));
        assert!(setup.disks[0].readonly && setup.disks[0].locking);
        for bad in [&["--blk-file=/d"][..], &["--fd=3", "--socket-path=/s", "--blk-file=/d"], &["--fd=3"]] {
            assert!(BlkCli::try_parse_from(["vshunt-blk"].iter().chain(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn capabilities_are_json_of_the_schema() {
        let value: serde_json::Value = serde_json::from_str(CAPABILITIES).unwrap();
        assert_eq!(value, serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
        assert_eq!(CAPABILITIES.lines().count(), 1);
    }
}
