"""Tests tolerate what others run on the machine, and leave it as it is.

A namespace is filled with what a machine with systemd and libvirt has: fusectl, another program's
FUSE mount, taps and bridges, and a process named vshunt. Then other groups run in it.
"""

import ctypes
import fcntl
import os
import re
import select
import shutil
import struct
from pathlib import Path

import fuse_guard
import namespaces
import pytest
import rig as r

TUNSETIFF, TUNSETPERSIST = 0x4004_54CA, 0x4004_54CB
IFF_TAP, IFF_NO_PI = 2, 0x1000

# The last one is the name of the tests' own tap.
TAPS = ("tap0", "vnet0", "vs0")
BRIDGES = ("virbr0", "br0")


class Foreign:
    """What others run in a mount and network namespace of the tests' process."""

    def __init__(self, rig):
        if not os.path.exists("/dev/fuse"):
            raise r.Skipped("this kernel has no /dev/fuse")
        if not os.path.exists("/dev/net/tun"):
            raise r.Skipped("/dev/net/tun is missing: modprobe tun")
        # Mounts of the machine came along as copies, which would keep them alive.
        fuse_guard.unmount(m[1] for m in reversed(fuse_guard.fuse_mounts()))
        r.run(["mount", "-t", "fusectl", "none", fuse_guard.CONNECTIONS])
        # No server answers: a process that asks it for anything hangs.
        self.point = rig.dir / "foreign"
        self.point.mkdir()
        self.session = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.session},rootmode=40000,user_id=0,group_id=0".encode()
        if namespaces.libc.mount(b"other", bytes(self.point), b"fuse.other", 0, options) != 0:
            raise r.Failed(f"mount: {os.strerror(ctypes.get_errno())}")
        # As /tmp is in Debian 13.
        self.tmp = rig.dir / "tmp"
        self.tmp.mkdir()
        r.run(["mount", "-t", "tmpfs", "-o", "nosuid,nodev,mode=1777", "tmp", self.tmp])
        os.chmod(rig.dir, 0o755)
        self.env = {**os.environ, "TMPDIR": str(self.tmp)}
        for name in TAPS:
            make_tap(name)
        ip = r.tool("ip", "iproute2")
        for name in BRIDGES:
            r.run([ip, "link", "add", name, "type", "bridge"])
        program = rig.dir / "vshunt"
        shutil.copy(os.path.realpath(r.tool("sleep", "coreutils")), program)
        self.process = r.Child(rig, "foreign-vshunt", [program, "10000"])

    def check(self):
        """Fails if one of them is gone."""
        r.require(self.process.running(), "the process named vshunt was ended")
        links = {path.name for path in Path("/sys/class/net").iterdir()}
        r.require(links >= {*TAPS, *BRIDGES}, f"interfaces are gone: {links}")
        mounts = fuse_guard.mounts()
        r.require(any(m[1] == str(fuse_guard.CONNECTIONS) and m[3] == "fusectl" for m in mounts), "fusectl was unmounted")
        left = [m[1] for m in fuse_guard.fuse_mounts()]
        r.require(left == [str(self.point)], f"FUSE mounts are now {left}")
        poll = select.poll()
        poll.register(self.session, select.POLLIN)
        events = poll.poll(0)
        r.require(events == [(self.session, select.POLLIN)], f"the foreign connection was aborted: {events}")

    def end(self):
        fuse_guard.unmount([self.point, self.tmp])
        os.close(self.session)
        self.process.kill()


def make_tap(name):
    """A tap that stays without a program that has it open."""
    with open("/dev/net/tun", "r+b", buffering=0) as tun:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        fcntl.ioctl(tun, TUNSETPERSIST, 1)


@pytest.fixture(scope="module")
def foreign(rig):
    with namespaces.OwnNetwork():
        made = Foreign(rig)
        yield made
        made.end()


@pytest.mark.parametrize("selection", [
    ("tests/fuse/test_limits.py", "-k", "dev or any"),
    ("tests/net/test_loops.py",),
    ("tests/tour/test_tour.py", "-k", "make_run or readme or network"),
], ids=lambda selection: selection[0].split("/")[1])
def test_black_box_tests(foreign, selection):
    """Groups that look at mounts, interfaces and processes."""
    done = r.run([r.ROOT / "scripts/pytest", "--lines", "-q", *selection], timeout_s=600, check=False, cwd="/", env=foreign.env)
    r.require(done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-1000:]}")
    r.require(re.search(r"^ok ", done.stdout, re.MULTILINE), f"no test ran: {done.stdout[-600:]}")
    foreign.check()
