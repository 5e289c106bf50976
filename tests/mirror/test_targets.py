"""Mirrors to devices."""

import os

import mirror_model as m
import pytest
import rig as r

SIZE_MIB = 32


@pytest.fixture
def here(rig, request):
    return m.zeroes(rig.dir / f"{request.node.name}.raw", SIZE_MIB)


def test_to_a_device(rig, here):
    """What the device had before is gone, also where the disk has zeroes. A device of another size is refused."""
    old, small = rig.dir / "device.raw", m.zeroes(rig.dir / "small-device.raw", SIZE_MIB // 2)
    old.write_bytes(os.urandom(SIZE_MIB << 20))
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    losetup = r.tool("losetup", "mount")
    loops = []
    try:
        for path in (old, small):
            made = r.run([losetup, "--find", "--show", path], check=False)
            if made.returncode:
                raise r.Skipped(f"no loop device: {made.stderr.strip()}")
            loops.append(made.stdout.strip())
        to = lambda loop: ("--to", loop, "--format", "raw", "--overwrite")  # noqa: E731
        r.message_of(served.cli("mirror", "d0", *to(loops[1]), check=False), loops[1], "as large")
        m.switched(served, *to(loops[0]))
        served.more()
        served.end()
    finally:
        for loop in loops:
            r.run([losetup, "-d", loop], check=False)
    # The load is in the first 16 MiB.
    r.require(not any(old.read_bytes()[16 << 20 :]), "old data of the device shows")
