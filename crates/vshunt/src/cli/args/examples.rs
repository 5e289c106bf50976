//! Examples in the help of commands that have subcommands.

pub(super) const CONFIG: &str = "\
Examples:
  vshunt config check /etc/vshunt/vm.toml
  vshunt config show >vm.toml
  vshunt serve --config vm.toml";

pub(super) const WORKER: &str = "\
Examples:
  vshunt worker list
  vshunt worker new --name fast --cpu 2-3
  vshunt worker free fast";

pub(super) const DISK: &str = "\
Examples:
  vshunt disk add file=disk.qcow2,format=qcow2
  vshunt disk list
  vshunt disk remove disk";

pub(super) const NET: &str = "\
Examples:
  vshunt net add type=tap,name=n0,ifname=vs0
  vshunt net list
  vshunt net remove n0";

pub(super) const EXPORT: &str = "\
Examples:
  vshunt export add type=vhost-user-blk,name=vm1,disk=d1,socket=/tmp/vm1.sock
  vshunt export list
  vshunt export remove vm1";

pub(super) const BACKUP: &str = "\
Examples:
  vshunt backup start d0 --to full.qcow2 --bitmap b0 --wait
  vshunt backup start d0 --to monday.qcow2 --incremental b0 --backing full.qcow2
  vshunt job list";

pub(super) const JOB: &str = "\
Examples:
  vshunt job list
  vshunt job wait backup0
  vshunt job cancel backup0";

pub(super) const BITMAP: &str = "\
Examples:
  vshunt bitmap add d0 b0
  vshunt bitmap list d0
  vshunt bitmap remove d0 b0";
