"""Tests that vshunt and QEMU read each other's qcow2 images, also after random writes."""

import errno
import json
import os
import random
import re

import pytest
import rig as r
from qcow2_disks import KINDS, MIB, Disk, checked, create, file_name, fill, mounts, program, qemu_img, same
from qcow2_kinds import kinds


def reads_right(rig, name, options, size, seed):
    """An image that QEMU made and filled reads here as there."""
    mounts()
    path = create(rig.dir / file_name(name), options, size)
    fill(path, seed, size)
    if not re.search("data_file|preallocation", options):
        # As compressed clusters, some of which are written over.
        packed = rig.dir / f"packed-{file_name(name)}"
        qemu_img("convert", "-c", "-O", "qcow2", *(["-o", options] if options else []), path, packed)
        path = packed
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 77 100k 300k", "-c", "discard 1M 1M", path])
    flat = rig.dir / "flat.raw"
    qemu_img("convert", "-f", "qcow2", "-O", "raw", path, flat)
    runs = json.loads(qemu_img("map", "-f", "qcow2", "--output=json", path).stdout)
    disk = Disk(rig, path, readonly=True)
    try:
        same(disk.file, "raw", flat, "raw")
        holes_agree(disk.file, runs, sparse=not re.search("data_file|preallocation", options))
    finally:
        disk.quit()


def holes_agree(file, runs, sparse):
    """No data by qemu-img map is a hole by lseek in the mounted file, and most holes are. qemu-img looks for holes in the image's
    own file, too, so that it knows of more: within clusters, and of those that were only preallocated."""
    theirs = []
    for run in (run for run in runs if not run["zero"]):
        begin, end = run["start"], run["start"] + run["length"]
        if theirs and theirs[-1][1] == begin:
            begin = theirs.pop()[0]
        theirs.append((begin, end))
    ours, at = [], 0
    with open(file, "rb") as f:
        while True:
            try:
                begin = os.lseek(f.fileno(), at, os.SEEK_DATA)
            except OSError as e:
                r.require(e.errno == errno.ENXIO, f"SEEK_DATA from {at}: {e}")
                break
            at = os.lseek(f.fileno(), begin, os.SEEK_HOLE)
            ours.append((begin, at))
    missed = [run for run in theirs if not any(a <= run[0] and run[1] <= b for a, b in ours)]
    r.require(not missed, f"data at {missed} is said to be a hole: {ours}")
    holes = os.stat(file).st_size - sum(end - begin for begin, end in ours)
    r.require(not sparse or 2 * holes >= sum(run["length"] for run in runs if run["zero"]), f"{holes} bytes of holes: {ours}, of {theirs}")


def snapshots(rig, name, options, seed):
    """Writes to an image with internal snapshots do not change the snapshots."""
    mounts()
    path = create(rig.dir / f"snap-{file_name(name)}", options, 32)
    contents = []
    for n in range(3):
        fill(path, seed + n, 32)
        flat = rig.dir / f"snap{n}.raw"
        qemu_img("convert", "-f", "qcow2", "-O", "raw", path, flat)
        contents.append(flat)
        qemu_img("snapshot", "-c", f"s{n}", path)
    program(rig, name, options, 32, seed, path=path)
    for n, flat in enumerate(contents):
        then = rig.dir / "then.raw"
        qemu_img("convert", "-f", "qcow2", "-O", "raw", "-l", f"snapshot.name=s{n}", path, then)
        same(then, "raw", flat, "raw")
        qemu_img("snapshot", "-d", f"s{n}", path)
        checked(path)


KIND_IDS = [name for name, _, _ in KINDS]


@pytest.mark.parametrize("name, options, size", KINDS, ids=KIND_IDS)
def test_qemus_image(rig, seed, name, options, size):
    reads_right(rig, f"read-{name}", options, size, seed)


@pytest.mark.parametrize("name, options, size", KINDS, ids=KIND_IDS)
def test_random_program(rig, seed, name, options, size):
    program(rig, f"program-{name}", options, size, seed)


@pytest.mark.timeout(0)  # --every takes 20 minutes
def test_kinds_of_all_sorts(rig, seed, request):
    mounts()
    kinds(rig, seed, request.config.getoption("--every"))


def test_random_program_a_map_that_does_not_fit(rig, seed):
    program(rig, "program-small", "cluster_size=512", 24, seed, keys=",cache-size=16K")


@pytest.fixture(scope="module")
def base(rig, seed):
    """A raw image to lie below others."""
    path = rig.dir / "low.raw"
    path.write_bytes(random.Random(seed).randbytes(20 * MIB))
    return path


@pytest.fixture(scope="module")
def middle(rig, seed, base):
    """An image over `base`."""
    path = create(rig.dir / "middle.qcow2", "cluster_size=4k", 24, ["-b", base, "-F", "raw"])
    fill(path, seed, 24)
    return path


OVER = pytest.mark.parametrize(
    "name, options", (("", ""), (", v2", "compat=0.10"), (", subclusters", "extended_l2=on"), (", 4k", "cluster_size=4k")),
    ids=("plain", "v2", "subclusters", "4k"),
)  # fmt: skip


@OVER
def test_random_program_over_a_raw_image(rig, seed, base, name, options):
    program(rig, f"on-raw{name}", options, 32, seed, backing=(base, "raw"))


@OVER
def test_random_program_over_two_images(rig, seed, middle, name, options):
    program(rig, f"on-two{name}", options, 32, seed, backing=(middle, "qcow2"))


@pytest.mark.parametrize("name, options", (("plain", ""), ("v2", "compat=0.10"), ("subclusters", "extended_l2=on"), ("4k", "cluster_size=4k")),
                         ids=lambda x: x or "-")
def test_internal_snapshots(rig, seed, name, options):
    snapshots(rig, f"snapshots-{name}", options, seed)
