"""Tests each shape of a network device: number of pairs, kind of ring, workers.

net_guest runs all of its cases on each shape.
"""

import os

import net_rig as n
import pytest
import rig as r

pytestmark = pytest.mark.usefixtures("net_guest")

KINDS = {"split": [], "packed": ["packed"], "plain": ["plain"], "packed-plain": ["packed", "plain"]}
WORKERS = ("per-queue", "1", "per-cpu")
# How queues are distributed over workers does not depend on the kind of rings. So each way is tried
# with split rings only.
SHAPES = [
    (pairs, kind, workers)
    for pairs in (1, 2, 4)
    for kind in KINDS
    for workers in (WORKERS if kind == "split" else WORKERS[:1])
]


def guest(daemon, pairs, kind, seed):
    done = r.run([n.net_guest(), daemon.socket, "vs0", pairs, seed, "user", *KINDS[kind]], timeout_s=300, check=False)
    bad = [line for line in done.stdout.splitlines() if line.startswith("not ok")]
    r.require(done.returncode == 0 and not bad, f"{' | '.join(bad)} {done.stderr[-400:]} {daemon.child.tail()}")
    states = {index: q["state"] for index, q in daemon.queues().items()}
    r.require("broken" not in states.values(), f"{states}")


def test_tap_of_one_queue(rig):
    """The tap exists before the daemon, and stays."""
    n.ip("tuntap", "add", "dev", "vs0", "mode", "tap", "vnet_hdr")
    n.ip("link", "set", "vs0", "up")
    try:
        with n.Net(rig, "single", pairs=1) as daemon:
            guest(daemon, 1, "split", 99)
            r.require(daemon.child.stop() == 0, daemon.child.tail())
        r.require(os.path.exists("/sys/class/net/vs0"), "the tap is gone")
    finally:
        n.ip("link", "del", "vs0")


@pytest.mark.parametrize("pairs, kind, workers", SHAPES)
def test_shape(rig, pairs, kind, workers):
    seed = SHAPES.index((pairs, kind, workers)) + 1
    with n.Net(rig, f"shape{seed}", pairs=pairs, workers=workers) as daemon:
        guest(daemon, pairs, kind, seed)
        daemon.end()
