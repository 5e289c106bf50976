//! `vshunt-net`: a network device.

use clap::Parser;
use vshunt_daemon::Check;
use vshunt_types::spec::{ExportKind, ExportSpec, Mac, NetKind, NetSpec, Steering, Workers};

use super::{Common, Program};
use crate::config::Setup;
use crate::outcome::{Failure, Outcome};

const AFTER: &str = "\
End:
  The program stays in the foreground and ends on SIGTERM. With --fd it also
  ends when its peer disconnects. Exit status: 0 success, 1 failure, 2 usage.

The command of the same name:
  `vshunt net` adds, sets, lists and removes networks of a running daemon: see
  vshunt-net-add(1), vshunt-net-set(1), vshunt-net-list(1), vshunt-net-remove(1).

Examples:
  vshunt-net --socket-path=/tmp/nic0.sock --ifname=vs0 --num-queues=4
  vshunt-net --fd=3 --tap-fd=4:5 --mac=52:54:00:12:34:56";

/// Command line of `vshunt-net`.
#[derive(Debug, Parser)]
#[command(name = "vshunt-net", version, after_long_help = AFTER, max_term_width = 80)]
#[command(about = "A vhost-user network device backend: one tap, one socket, a worker for each queue pair")]
pub(super) struct NetCli {
    /// The tap or macvtap; a missing tap is made, and removed at the end
    #[arg(long, value_name = "NAME", required_unless_present = "tap_fd", conflicts_with = "tap_fd")]
    ifname: Option<String>,
    /// Open file descriptors of the tap, one for each queue
    #[arg(long, value_name = "FDNUM[:FDNUM…]")]
    tap_fd: Option<String>,
    /// Network namespace of the interface: a name (`ip netns`) or a path
    #[arg(long, value_name = "NAME", conflicts_with = "tap_fd")]
    netns: Option<String>,
    /// How the queue of a frame for the guest is chosen: auto, hash, rss or cpu [default: auto]
    #[arg(long, value_name = "STEERING")]
    steering: Option<Steering>,
    /// Queue pairs to offer [default: one for each CPU, or as many as the tap has]
    #[arg(long, value_name = "N")]
    num_queues: Option<u16>,
    /// Ethernet address of the guest [default: chosen by the front end]
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,
    /// Bytes of the longest IP packet; the interface gets it, too [default: that of the interface]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
    #[command(flatten)]
    common: Common,
}

impl Program for NetCli {
    const PROGRAM: &str = "vshunt-net";
    const NAME: &str = "net";
    const CAPABILITIES: &str = "{\"type\":\"net\"}\n";

    fn setup(self) -> Outcome<(Setup, Common)> {
        let net = NetSpec {
            kind: NetKind::Tap,
            name: Self::NAME.into(),
            ifname: self.ifname,
            fd: self.tap_fd,
            netns: self.netns,
            queues: None,
            steering: self.steering,
            address: None,
            owner: None,
            group: None,
            persist: None,
        };
        let export = ExportSpec {
            kind: ExportKind::VhostUserNet,
            name: Self::NAME.into(),
            net: Some(Self::NAME.into()),
            socket: self.common.socket_path.clone(),
            fd: self.common.fd,
            memory_may_block: self.common.memory_may_block.then_some(true),
            queues: self.num_queues,
            workers: Workers::PerQueue,
            mac: self.mac,
            mtu: self.mtu,
            ..Default::default()
        };
        net.check().and_then(|()| export.check()).map_err(|e| Failure::Usage(e.to_string()))?;
        Ok((Setup { nets: vec![net], exports: vec![export], ..Default::default() }, self.common))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        NetCli::command().debug_assert();
    }

    #[test]
    fn what_is_asked_for() {
        let parse = |args: &[&str]| NetCli::try_parse_from(["vshunt-net"].iter().chain(args));
        let cli = parse(&["--fd=3", "--ifname=vs0", "--num-queues=4", "--mac=52:54:00:12:34:56"]).unwrap();
        let (setup, _) = cli.setup().unwrap();
        assert_eq!((setup.exports[0].queues, setup.nets[0].ifname.as_deref()), (Some(4), Some("vs0")));
        let (setup, _) = parse(&["--socket-path=/s", "--tap-fd=4:5"]).unwrap().setup().unwrap();
        assert_eq!((setup.nets[0].fd.as_deref(), setup.exports[0].fd), (Some("4:5"), None));
        for bad in [
            &["--ifname=vs0"][..],
            &["--fd=3", "--socket-path=/s", "--ifname=vs0"],
            &["--fd=3"],
            &["--fd=3", "--ifname=vs0", "--tap-fd=4"],
            &["--fd=3", "--ifname=vs0", "--mac=x"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&["--fd=3", "--ifname=vs0", "--num-queues=300"]).unwrap().setup().is_err());
    }

    #[test]
    fn capabilities_are_json_of_the_schema() {
        let value: serde_json::Value = serde_json::from_str(NetCli::CAPABILITIES).unwrap();
        assert_eq!(value, serde_json::json!({ "type": "net" }));
    }
}
