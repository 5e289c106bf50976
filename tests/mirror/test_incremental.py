"""Mirrors that bring a target up to date: dirty bitmaps say what it lacks."""

import json

import mirror_model as m
import rig as r
from snapshot_model import MIB, Disk, image


def write(disk, seed):
    """4 MiB somewhere in the first 16 MiB."""
    argv = [r.binary("vshunt-bench"), "blk", "--socket", disk.socket, "--rw", "randwrite", "--bs", "64k", "--range", "16M", "--ios", "64"]
    r.run([*argv, "--seed", seed, "--quiet"])


def count(disk):
    """Bytes that are dirty in bitmap m0."""
    return next(b["count"] for b in json.loads(disk.cli("bitmap", "list", "d0", "--json").stdout) if b["name"] == "m0")


def test_one_that_was_cancelled_continues(rig):
    """The next one to the same disk copies what is missing; later ones copy what was written since."""
    disk = Disk(rig, image(rig, "inc", "raw", 64), "raw", name="inc", fuse=False, socket=True)
    far = image(rig, "inc-far", "raw", 64)
    disk.cli("disk", "add", f"name=far,format=raw,file={far}")
    write(disk, 1)
    name = m.start(disk, "--target", "far", "--bitmap", "m0", "--speed", "8M")
    r.wait_for("some is copied", lambda: m.job(disk, name)["current-progress"] > 4 * MIB)
    disk.cli("job", "cancel", name)
    write(disk, 2)
    name = m.start(disk, "--target", "far", "--incremental", "m0", "--speed", "max")
    m.ready(disk, name)
    m.complete(disk, name, "--no-switch")
    r.require(far.read_bytes() == disk.path.read_bytes(), "the copy differs")
    r.require(count(disk) == 0, f"{count(disk)} bytes are dirty")
    write(disk, 3)
    dirty = count(disk)
    r.require(0 < dirty <= 4 * MIB, f"{dirty} bytes are dirty")
    name = m.start(disk, "--target", "far", "--incremental", "m0", "--speed", "max")
    m.ready(disk, name)
    r.require(m.job(disk, name)["total-progress"] == dirty, f"it copies {m.job(disk, name)}, and {dirty} bytes were dirty")
    m.complete(disk, name)
    r.require(disk.shown() == ("raw", str(far)), f"listed as {disk.shown()}")
    write(disk, 4)
    r.require(count(disk) > 0, "nothing is recorded after the switch")
    disk.quit()


def test_parts_are_stable(rig):
    """What is copied counts in parts of 256 MiB: the rest is dirty after a cancel."""
    paths = [m.zeroes(rig.dir / f"parts-{n}.raw", 768) for n in range(2)]
    disk = Disk(rig, paths[0], "raw", name="parts", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=far,format=raw,file={paths[1]}")
    name = m.start(disk, "--target", "far", "--bitmap", "m0", "--speed", "200M")
    r.wait_for("a part is copied", lambda: m.job(disk, name)["current-progress"] > 300 * MIB)
    disk.cli("job", "cancel", name)
    r.require(count(disk) in (512 * MIB, 256 * MIB, 0), f"{count(disk)} bytes are dirty")
    left = count(disk)
    name = m.start(disk, "--target", "far", "--incremental", "m0", "--speed", "max")
    m.ready(disk, name)
    r.require(m.job(disk, name)["total-progress"] == left, f"it copies {m.job(disk, name)}, and {left} bytes were dirty")
    disk.cli("job", "cancel", name)
    disk.quit()


def test_a_bitmap_with_a_gap(rig):
    """It does not say what changed, and is restarted as the message says."""
    disk = Disk(rig, image(rig, "gap", "raw"), "raw", name="gap", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=far,format=raw,file={image(rig, 'gap-far', 'raw')}")
    disk.cli("bitmap", "add", "d0", "m0", "--disabled")
    refused = disk.cli("mirror", "d0", "--target", "far", "--incremental", "m0", check=False)
    r.message_of(refused, "m0 does not record", "full mirror (--bitmap m0)")
    for how in ("--bitmap", "--incremental"):
        name = m.start(disk, "--target", "far", how, "m0", "--speed", "max")
        m.ready(disk, name)
        m.complete(disk, name, "--no-switch")
    disk.quit()
