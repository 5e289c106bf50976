"""What requests cost: what moves no data costs no bytes.

There are no times here: `limited-us` of a queue is above 0 once one of its requests had to wait.
"""

import json

import nbd_client as c
import nbd_exports as e
import pytest
import rig as r

GIB = 1 << 30
LIMITS = {"limits.bps": "20M"}


def waited(daemon, export="n0"):
    """For how long queues of the export have waited, in microseconds."""
    return sum(q["limited-us"] for q in daemon.status()["queues"] if q["export"] == export)


def free_requests(client, size):
    """What moves no data, in as many bytes as would take minutes; with what is refused."""
    for _ in range(8):
        for kind, flags in ((c.TRIM, 0), (c.ZERO, 0), (c.ZERO, c.NO_HOLE)):
            error, _ = client.call(kind, 0, 2 * GIB, flags)
            r.require(error == 0, f"request {kind} with flags {flags}: error {error}")
    for _ in range(64):
        error, _ = client.call(c.READ, size - 4096, 32 << 20)
        r.require(error != 0, "a read beyond the end succeeds")
        error, _ = client.call(c.ZERO, size - 4096, 2 * GIB)
        r.require(error != 0, "zeroes beyond the end are written")
    error, _ = client.call(c.FLUSH)
    r.require(error == 0, f"flush: error {error}")


@pytest.mark.parametrize("kind", ["ram", "null", "memory", "buffered", "qcow2"])
def test_what_moves_no_data_costs_no_bytes(rig, kind):
    size = 3 * GIB
    daemon = e.serve(rig, e.disk_of(rig, kind, f"free-{kind}", size), name=f"free-{kind}", **LIMITS)
    with c.Client(daemon.at, "n0") as first, c.Client(daemon.at, "n0") as second:
        free_requests(first, size)
        second.read(0, 4096)
        r.require(waited(daemon) == 0, f"queues waited for {waited(daemon)} us")
        # What is read does count: after the first one the next would wait for weeks.
        daemon.cli("limit", "n0", "--bps", "1")
        reads = {second.ask(c.READ, 0, 4 << 20): 4 << 20 for _ in range(3)}
        r.wait_for("a read waits", lambda: any(q["limited"] for q in daemon.status()["queues"]))
        daemon.cli("limit", "n0", "--off")
        for _ in reads:
            r.require(second.reply(reads)[1] == 0, "a read fails")
    e.ends_well(daemon)


def test_zeroes_that_are_written_cost_their_length(rig):
    """What a server does with them is not known."""
    server = e.serve(rig, e.disk_of(rig, "ram"), name="below")
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=nbd,uri={e.uri(server)}",
                      "--export", e.export(rig, "n1", **{"limits.bps": "100K"}), name="above")  # fmt: skip
    with c.Client(rig.dir / "n1.nbd", "n1") as client:
        error, _ = client.call(c.ZERO, 0, e.SIZE)
        r.require(error == 0, f"zeroes: error {error}")
        reads = {client.ask(c.READ, 0, 4096): 4096 for _ in range(3)}
        r.wait_for("a request waits", lambda: any(q["limited"] for q in daemon.status()["queues"]))
        (export,) = daemon.status()["exports"]
        most, queues = export["limited-ms-max"], len(daemon.status()["queues"])
        request = e.SIZE / (100 << 10) * 1000
        r.require(int(request * queues) <= most <= (request + 115) * queues, f"the longest wait is {most} ms")
        r.require(f"{most // 1000}s" in daemon.cli("status").stdout, daemon.cli("status").stdout)
        daemon.cli("limit", "n1", "--off")
        for _ in reads:
            r.require(client.reply(reads)[1] == 0, "a read fails")
    r.require("limited-ms-max" not in json.dumps(daemon.status()), "there is a longest wait without limits")


def test_the_longest_wait(rig):
    """Of a disk: one request of 64 MiB, and 0.114 s, for each queue and each member of the group. Of a network: a frame, for two rings a pair."""
    blk = "type=vhost-user-blk,disk={0},name={0},socket={1}/{0}.sock,queues=4,limits.bps=67108864,limits.group=g"
    daemon = r.Daemon(
        rig, "--disk", "name=d0,format=ram,size=1M", "--disk", "name=d1,format=ram,size=1M", "--net", "type=switch,name=s0",
        "--export", blk.format("d0", rig.dir), "--export", blk.format("d1", rig.dir),
        "--export", f"type=vhost-user-net,name=net0,net=s0,socket={rig.dir}/net0.sock,queues=3,limits.bps=655500", name="longest",
    )  # fmt: skip
    most = {export["name"]: export["limited-ms-max"] for export in daemon.status()["exports"]}
    r.require(most["d0"] == most["d1"] and abs(most["d0"] - 8912) <= 8, f"the longest waits are {most}")
    # A frame has some bytes more than 65535.
    r.require(abs(most["net0"] - 1284) <= 8, f"the longest waits are {most}")
    table = daemon.cli("status").stdout
    r.require("8.9s" in table and "1.3s" in table, table)
