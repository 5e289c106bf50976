"""The kernel module on a stock kernel: what it refuses, serves and survives.

The VMs run under TCG, one after the other, and take some seconds each to boot. kernel_vm.py builds
them, and kernel_jobs.py has what they do. vshunt with engine=kernel is tested by tests/kernel-relay
and tests/kernel-net.
"""

import os

import kernel_vm as k
import pytest
import rig as r


@pytest.fixture(scope="session")
def folder():
    """The folder of the stock kernel."""
    sources = os.environ.get("VSHUNT_KMOD", r.ROOT / "kmod/vhost_blk")
    r.require(os.path.exists(f"{sources}/Kbuild"), f"{sources} is missing")
    return k.kernel("fetch")


@pytest.fixture(scope="session")
def modules(folder):
    """The kernel's modules, and ours, which is built."""
    made = k.Modules(folder)
    made.add_ours()
    return made
