"""Tests scripts/fresh, which runs the tests as on a new machine, with a stand-in for `make`; and scripts/machine."""

import os
import signal
from pathlib import Path

import pytest
import rig as r

# What it says of its surroundings. Bit 2 of the mask of ignored signals is SIGINT.
MAKE = """#!/bin/sh
echo "make $*, in $(basename "$PWD"), $([ -e Makefile ] && echo 'a checkout')"
echo "input $(readlink /proc/self/fd/0)"
echo "device $(stat -c '%a %u' /dev/fuse)"
echo "shared memory has $(ls -A /dev/shm | wc -l) files"
echo "folders $TMPDIR $CARGO_TARGET_DIR $XDG_CACHE_HOME"
ignored=0x$(sed -n 's/^SigIgn:[[:space:]]*//p' /proc/self/status)
echo "interrupts are $([ $((ignored & 2)) = 0 ] && echo obeyed || echo ignored)"
[ "$STAND_IN" != waits ] || { trap 'echo ended; exit 7' TERM; echo waits; while :; do sleep 0.1; done; }
exit "$STAND_IN"
"""

MACHINE = ("system", "machine", "user", "fuse", "kvm", "fusectl", "temporary", "build", "cache", "systemd", "left", "mounts", "rust", "python")


@pytest.fixture
def fresh(rig, request):
    """Starts it; the stand-in ends with the code that is given, or waits."""
    place = rig.dir / request.node.name
    place.mkdir()
    make = place / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    folder = place / "runs"
    folder.mkdir()

    def start(does, *arguments):
        env = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "TMPDIR": str(folder), "STAND_IN": str(does)}
        return r.Child(rig, f"fresh-{does}", [r.ROOT / "scripts/fresh", *arguments], env=env)

    start.folder = folder
    return start


pytestmark = pytest.mark.root


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no /dev/fuse")
def test_what_a_run_finds(fresh):
    before = os.stat("/dev/fuse").st_mode
    child = fresh(0, "ONLY=lint")
    r.require(child.wait(120) == 0, child.tail())
    said = child.output().splitlines()
    (folders,) = [line.split()[1:] for line in said if line.startswith("folders ")]
    r.require(all(Path(at).is_relative_to(fresh.folder) for at in folders) and len(set(folders)) == 3, f"{folders}")
    wanted = ("make test ONLY=lint, in checkout, a checkout", "input /dev/null", "device 600 0", "shared memory has 0 files", "interrupts are obeyed")
    for line in wanted:
        r.require(line in said, f"it does not say {line!r}: {child.tail(30)}")
    r.require(list(fresh.folder.iterdir()) == [], "its folder is left")
    r.require(os.stat("/dev/fuse").st_mode == before, "the machine's device was changed")


def test_a_failed_run_keeps_its_folder(fresh):
    child = fresh(5)
    r.require(child.wait(120) == 5, child.tail())
    (kept,) = fresh.folder.iterdir()
    r.require(child.output().splitlines()[-1] == f"fresh: the folder is kept: {kept}", child.tail())


def test_a_signal_ends_the_run_at_once(fresh):
    child = fresh("waits")
    r.wait_for("the tests run", lambda: "\nwaits\n" in child.output() or not child.running(), 120)
    child.process.send_signal(signal.SIGTERM)
    r.require(child.wait() == 130, child.tail())
    r.require("\nended\n" in child.output(), f"the tests go on: {child.tail()}")


def test_what_there_is_on_this_machine():
    lines = r.run([r.ROOT / "scripts/machine"]).stdout.splitlines()
    said = {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
    r.require(len(said) == len(lines) and all(said.get(name) for name in MACHINE), f"{lines}")
