"""Mirrors of disks in use: under load, to files, disks and servers, failures, kill -9."""

import pytest


@pytest.fixture
def mounts(guarded):
    """For tests that mount a disk: left out where that is impossible, and ended when one hangs."""
    guarded(180)
