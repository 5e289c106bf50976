"""Backups of disks in use: the point in time, incremental chains, failures, jobs, kill -9.

They need root.
"""

import backup_model as b
import pytest


@pytest.fixture(scope="module")
def suite(rig, clock):
    made = b.Suite(rig, clock)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _guarded(guarded):
    """All of them can hang. On a disk of 150 operations a second the longest takes 200 s."""
    guarded(420)
