"""Snapshots and commits of disks in use, and resizes of qcow2 disks.

Under load, after kill -9, and those that are refused.
"""

import os

import pytest
import rig as r
import snapshot_model


@pytest.fixture
def mounts(guarded):
    """For tests that mount a disk: left out where that is impossible, and ended when one hangs."""
    guarded(120)


@pytest.fixture
def marks(rig):
    """For tests of marked images: marks are extended attributes."""
    probe = rig.dir / "probe"
    probe.touch()
    try:
        os.setxattr(probe, snapshot_model.OVERLAY, b"x")
    except OSError as e:
        raise r.Skipped(f"the file system of {rig.dir} has no extended attributes ({e})") from e
    finally:
        probe.unlink()
