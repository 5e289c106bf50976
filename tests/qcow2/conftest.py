"""qcow2 disks against QEMU's tools: images of either are the other's, under load, after kill -9, with bad images.

VSHUNT_SEED is where the random programs start (1). `--every`: every kind of image that qemu-img
makes, for some 20 minutes, instead of a few drawn at random. `--seconds`: how long each test under load lasts (4).
"""

import pytest
from images import Both
from seeds import SEED


@pytest.fixture(scope="module")
def seed():
    return SEED


@pytest.fixture(scope="module")
def both(rig):
    """Both programs, in a folder that the tests of a file share."""
    return Both(rig)
