"""A front end that gives as many descriptors as it can: other front ends and the control socket still work."""

import os
import resource
import struct

import peer as p
import pytest
import rig as r

SET_VRING_ERR = 14
LIMIT = 400
# 1/8 of the limit is for others than rings. Front ends with more than a few leave twice that.
LEFT_BY_GREEDY, LEFT_BY_ALL = LIMIT // 4, LIMIT // 8


@pytest.fixture(scope="module")
def daemon(rig):
    """A daemon with few descriptors and three exports."""
    argv = []
    for name in ("one", "two", "three"):
        argv += ["--disk", f"name={name},format=ram,size=64M"]
        argv += ["--export", f"type=vhost-user-blk,name={name},disk={name},socket={rig.dir / name}"]
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, old[1]))
    daemon = r.Daemon(rig, *argv)
    resource.setrlimit(resource.RLIMIT_NOFILE, old)
    if os.geteuid() == 0:
        # The daemon has raised its limit to the hard one, which root may lower again.
        resource.prlimit(daemon.child.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        return daemon
    raise r.Skipped("only root can limit the descriptors of a daemon that runs")


def greedy(front, event):
    """Gives kick, call and error descriptors of all rings. The number that were taken."""
    r.require(front.handshake() == p.ACCEPTED, "a handshake was refused")
    taken = 0
    for index in range(256):
        for kind in (p.SET_VRING_KICK, p.SET_VRING_CALL, SET_VRING_ERR):
            taken += front.order(kind, struct.pack("<Q", index), [event]) == p.ACCEPTED
    return taken


def test_one_takes_all_that_it_gets_and_others_are_served(daemon):
    event = os.eventfd(0)
    with p.Peer(daemon.rig.dir / "one") as one, p.Peer(daemon.rig.dir / "two") as two, p.Peer(daemon.rig.dir / "three") as three:
        taken = greedy(one, event)
        r.require(100 < taken < LIMIT - LEFT_BY_GREEDY, f"{taken} descriptors were taken")
        r.wait_for("the log says why", lambda: "raise the limit of open files" in daemon.child.output())
        # A second one gets a few more, which are not those that others need.
        more = greedy(two, event)
        r.require(0 < more < LEFT_BY_GREEDY - LEFT_BY_ALL, f"{more} more descriptors were taken")
        r.require(three.serve() == 0, "a read failed")
        daemon.cli("disk", "add", "name=more,format=null,size=1M")
        with p.Peer(daemon.rig.dir / "three") as waiting:
            three.socket.close()
            r.require(waiting.serve() == 0, "a read failed")
    os.close(event)


def test_what_it_had_is_free_when_it_has_left(daemon):
    event = os.eventfd(0)
    with p.Peer(daemon.rig.dir / "one") as one:
        r.require(greedy(one, event) > 100, "its descriptors are still missing")
    os.close(event)
    r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")
