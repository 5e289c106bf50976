"""Every shape of a card: pairs, kinds of rings, workers. All of net_guest's cases on each."""

import os

import net_rig as n
import rig as r

KINDS = {"split": [], "packed": ["packed"], "plain": ["plain"], "packed, plain": ["packed", "plain"]}
WORKERS = ("per-queue", "1", "per-cpu")


def shape(rig, pairs, kind, workers, seed):
    with n.Net(rig, f"shape{seed}", pairs=pairs, workers=workers) as daemon:
        all_cases(daemon, pairs, kind, seed)


def single(rig):
    """A tap of one queue that was there before, and stays."""
    n.ip("tuntap", "add", "dev", "vs0", "mode", "tap", "vnet_hdr")
    n.ip("link", "set", "vs0", "up")
    try:
        with n.Net(rig, "single", pairs=1) as daemon:
            guest(daemon, 1, "split", 99)
            r.require(daemon.child.stop() == 0, daemon.child.tail())
        r.require(os.path.exists("/sys/class/net/vs0"), "the tap is gone")
    finally:
        n.ip("link", "del", "vs0")


def all_cases(daemon, pairs, kind, seed):
    guest(daemon, pairs, kind, seed)
    daemon.end()


def guest(daemon, pairs, kind, seed):
    done = r.run([n.net_guest(), daemon.socket, "vs0", pairs, seed, "user", *KINDS[kind]], timeout_s=300, check=False)
    bad = [line for line in done.stdout.splitlines() if line.startswith("not ok")]
    r.require(done.returncode == 0 and not bad, f"{' | '.join(bad)} {done.stderr[-400:]} {daemon.child.tail()}")
    states = {index: q["state"] for index, q in daemon.queues().items()}
    r.require("broken" not in states.values(), f"{states}")


def tests(rig):
    rig.test("net: a tap of one queue", lambda: single(rig))
    seed = 0
    for pairs in (1, 2, 4):
        for kind in KINDS:
            # How the queues are dealt out to workers says nothing of the rings: each way once with each number of pairs.
            for workers in WORKERS if kind == "split" else WORKERS[:1]:
                seed += 1
                name = f"net: {pairs} pairs, {kind}, workers={workers}"
                rig.test(name, lambda a=(pairs, kind, workers, seed): shape(rig, *a))
