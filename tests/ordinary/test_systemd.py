"""Groups of tests in a booted Debian with systemd, which mounts fusectl and runs services of its own."""

import os
import re
import shlex
from pathlib import Path

import pytest
import rig as r
from debian_root import Root, devices

SUITE = "bookworm"
PACKAGES = ("python3-minimal", "python3-pytest", "python3-pytest-timeout", "python3-pytest-xdist", "fuse3", "iproute2", "qemu-utils")
# systemd-nspawn refuses these system calls unless told.
CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")


@pytest.fixture(scope="module")
def booted(rig):
    """A booted root with the checkout in /checkout, read-only, and the programs in /programs."""
    programs = Path(r.binary("vshunt")).parent
    r.binary("vshunt-bench")
    with Root(rig, SUITE) as root:
        for command in (["update"], ["-y", "--no-install-recommends", "install", *PACKAGES]):
            done = root.outside("apt-get", "-q", *command, check=False)
            if done.returncode:
                raise r.Skipped(f"apt-get cannot install {', '.join(PACKAGES)} in a root of {SUITE}: {r.one_line(done.stderr[-300:])}")
        for place in ("checkout", "programs"):
            (root.path / place).mkdir()
        binds = [f"--bind-ro={str(source).replace(':', chr(92) + ':')}:{place}" for source, place in ((r.ROOT, "/checkout"), (programs, "/programs"))]
        root.boot(*binds, *devices(), f"--system-call-filter={' '.join(CALLS)}", whole_sys=True)
        runs = root.inside("/programs/vshunt", "--version", check=False)
        if runs.returncode:
            raise r.Skipped(f"the programs do not run in {SUITE}: {r.one_line(runs.stderr)}")
        yield root


def test_fusectl_is_mounted(booted):
    """By systemd: otherwise these tests would show nothing."""
    booted.shell("grep -q ' /sys/fs/fuse/connections .* fusectl ' /proc/self/mountinfo")


@pytest.mark.parametrize("selection", [
    ("tests/fuse/test_limits.py", "tests/fuse/test_ends.py", "-k", "dev or any"),
    ("tests/tour", "-k", "make_run or readme or network or install"),
    ("tests/bad-input/test_commands.py",),
], ids=lambda selection: selection[0].split("/")[1])
def test_black_box_tests(booted, selection):
    env = {"VSHUNT_BIN": "/programs", "VSHUNT_CACHE": "/var/cache/vshunt", "VSHUNT_SEED": os.environ.get("VSHUNT_SEED", "1")}
    # By which conftest.py knows that other tests run beside these.
    env["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    words = ["env", *(f"{k}={v}" for k, v in env.items()), "/checkout/scripts/pytest", "--lines", "-q", *selection]
    done = booted.inside(*words, check=False, timeout_s=300)
    print(done.stdout)
    r.require(done.returncode == 0, f"`{shlex.join(words)}` ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    r.require(re.search(r"^ok ", done.stdout, re.MULTILINE), f"no test ran: {done.stdout[-600:]}")
