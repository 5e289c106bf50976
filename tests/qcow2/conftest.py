"""qcow2 disks against QEMU's tools: images of either are the other's, under load, after kill -9, with bad images.

VSHUNT_SEED is where the random programs start (default: from the clock). `--every`: every kind of image that qemu-img
makes, for some 20 minutes, instead of a few drawn at random. `--seconds`: how long each test under load lasts (4).
"""

import os
import time

import pytest


@pytest.fixture(scope="module")
def seed(rig):
    number = int(os.environ.get("VSHUNT_SEED") or time.time())
    rig.say(f"VSHUNT_SEED={number}")
    return number
