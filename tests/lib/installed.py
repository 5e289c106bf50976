"""What the tests of installed packages share."""

# What a user of the unit vshunt@web.service writes, and a load for its socket.
CONFIG = """\
[[disk]]
name = "d0"
file = "/var/lib/vshunt/d0.qcow2"
format = "qcow2"

[[export]]
type = "vhost-user-blk"
name = "vm0"
disk = "d0"
socket = "/run/vshunt/web/vm0.sock"
queues = 4
workers = "per-queue"
"""
BENCH = "vshunt-bench blk --socket {} --rw randrw --verify --ios 2000 --queues 2 --quiet"
