"""Snapshots and commits of disks in use, and resizes of qcow2 disks.

Under load, after kill -9, and those that are refused.
"""

import pytest
import rig as r


@pytest.fixture
def mounts(guarded):
    """For tests that mount a disk: left out where that is impossible, and ended when one hangs."""
    guarded(120)


@pytest.fixture(scope="session")
def written():
    """Wait until each of these writers has written that many blocks more."""

    def wait(writers, count=200):
        before = [writer.done() for writer in writers]
        r.wait_for("blocks are written", lambda: all(w.errors or w.done() >= b + count for w, b in zip(writers, before)))

    return wait


@pytest.fixture(scope="session")
def served():
    """Wait until a disk's export has completed that many requests more."""

    def wait(disk, count=1000):
        def requests():
            return sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0")

        before = requests()
        r.wait_for("requests complete", lambda: requests() >= before + count)

    return wait
