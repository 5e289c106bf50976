"""qcow2 disks over vhost-user-blk: vshunt beside QEMU's storage daemon, and beside vshunt's own raw. See ../README.md."""
