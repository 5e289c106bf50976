"""Disks on NBD servers: load, uses of such disks, servers that end, hang or lie."""

import backup_model as b
import pytest


@pytest.fixture
def suite(rig, clock, guarded):
    """For tests that mount a disk or back it up."""
    made = b.Suite(rig, clock)
    yield made
    made.end()
