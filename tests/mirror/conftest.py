"""Mirrors of disks in use: under load, to files and disks, failures, kill -9."""

import os

import pytest
import rig as r


@pytest.fixture
def mounts(guarded):
    """For tests that mount a disk: left out where that is impossible, and ended when one hangs."""
    guarded(180)


@pytest.fixture
def marks(rig):
    """For tests of marked images: marks are extended attributes."""
    probe = rig.dir / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.vshunt.moved", b"x")
    except OSError as e:
        raise r.Skipped(f"the file system of {rig.dir} has no extended attributes ({e})") from e
    finally:
        probe.unlink()
