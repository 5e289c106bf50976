"""Tests where the file of an image ends: never inside a cluster that is in use.

QEMU takes what is missing for zeroes. Other programs fail, or read wrong data.
"""

import contextlib
import json
import os
from pathlib import Path

import fuse_mount as m
import nbd_exports as e
import pytest
import rig as r
from qcow2_disks import MIB, checked, mounts

SIZE = 8 * MIB
CLUSTERS = ("512", "64k", "2M")
PLACES = ("disk", "memory", "ext2")


@pytest.fixture(scope="module")
def ext2(rig):
    """A folder on a file system that allocates no space ahead."""
    mounts()
    image, folder = rig.image("ext2.img", 256 * MIB), rig.dir / "ext2"
    folder.mkdir()
    r.run([r.tool("mkfs.ext2", "e2fsprogs"), "-q", "-F", "-b", "4096", image])
    done = r.run(["mount", "-o", "loop", image, folder], check=False)
    if done.returncode:
        raise r.Skipped(f"no loop device: {done.stderr.strip()}")
    try:
        with open(folder / "probe", "wb") as f, contextlib.suppress(OSError):
            m.fallocate(f.fileno(), 0, 0, 4096)
            raise r.Skipped("this kernel allocates space ahead on ext2")
        yield folder
    finally:
        r.run(["umount", "-l", folder])


@pytest.fixture(params=PLACES)
def place(request, rig, both, memory):
    """Both programs in a folder on each kind of file system."""
    home = both.dir
    both.dir = {"disk": lambda: home, "memory": lambda: Path(memory), "ext2": lambda: request.getfixturevalue("ext2")}[request.param]()
    yield both
    both.dir = home


def has_its_last_cluster(both, name, of):
    """The file has all of its last cluster."""
    found = json.loads(both.theirs("check", "-U", "--output=json", name, check=False).stdout)
    cluster = json.loads(both.theirs("info", "-U", "--output=json", name).stdout)["cluster-size"]
    size = os.path.getsize(both.dir / name)
    r.require(size >= found["image-end-offset"], f"{of}: {size} bytes, and the last cluster ends at {found['image-end-offset']}")
    r.require(size % cluster == 0, f"{of}: {size} bytes are no clusters of {cluster}")


def write(both, uri, *commands):
    """A client writes, and its disk is flushed."""
    done = r.run([both.qemu_io, "-f", "raw", *(x for c in (*commands, "flush") for x in ("-c", c)), uri], cwd=both.dir)
    r.require("failed" not in done.stdout, done.stdout)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_served(place, cluster):
    """After a flush, after kill -9, and closed; also over a base, and where the last cluster was cut before."""
    (place.dir / "base.raw").write_bytes(bytes(n % 251 + 1 for n in range(SIZE // 2)))
    options = f"cluster_size={cluster}"
    for turn, more in enumerate(([str(SIZE)], ["-b", "base.raw", "-F", "raw", str(SIZE)])):
        place.theirs("create", "-q", "-f", "qcow2", "-o", options, "d.qcow2", *more)
        disk = f"format=qcow2,file={place.dir / 'd.qcow2'}"
        daemon = e.serve(place.rig, disk, name=f"{place.dir.name[:8]}-{cluster}-{turn}")
        for n, (offset, length) in enumerate(((5 * MIB + 512, 512), (512, 4096), (3 * MIB, 70144), (SIZE - 512, 512))):
            write(place, e.uri(daemon), f"write -P {n + 1} {offset} {length}")
            has_its_last_cluster(place, "d.qcow2", f"flush {n}")
        write(place, e.uri(daemon), f"discard 3M {MIB}", f"write -z 5M {MIB}")
        has_its_last_cluster(place, "d.qcow2", "after a discard")
        (place.dir / "b.qcow2").unlink(missing_ok=True)
        daemon.cli("backup", "start", "d0", "--to", place.dir / "b.qcow2", "--wait")
        has_its_last_cluster(place, "b.qcow2", "a backup")
        daemon.child.kill()
        has_its_last_cluster(place, "d.qcow2", "killed")
        daemon.start()
        write(place, e.uri(daemon), "write -P 9 4M 512")
        e.ends_well(daemon)
        checked(place.dir / "d.qcow2")
        has_its_last_cluster(place, "d.qcow2", "closed")
        end = json.loads(place.theirs("check", "--output=json", "d.qcow2").stdout)["image-end-offset"]
        os.truncate(place.dir / "d.qcow2", end - 512 if cluster == "512" else end - 1024)
        if cluster == "512":
            continue  # a whole cluster would be missing
        daemon.start()
        e.ends_well(daemon)
        has_its_last_cluster(place, "d.qcow2", "closed, after it was cut")
        checked(place.dir / "d.qcow2")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_commands(place, cluster):
    """Each command that writes an image leaves whole clusters, also of one that was cut."""
    data = bytearray(SIZE)
    data[5 * MIB + 512 : 5 * MIB + 1024] = b"\x11" * 512
    data[SIZE - 512 :] = b"\x22" * 512
    (place.dir / "from.raw").write_bytes(data)
    (place.dir / "base.raw").write_bytes(b"\x33" * MIB)
    options = f"cluster_size={cluster}"
    image, of = "c.qcow2", f"clusters of {cluster}"
    for arguments in (
        ("convert", "-f", "raw", "-O", "qcow2", "-o", options, "from.raw", image),
        ("snapshot", "-c", "s", image),
        ("bitmap", "--add", image, "b"),
        ("bitmap", "--remove", image, "b"),
        ("snapshot", "-a", "s", image),
        ("amend", "-o", "compat=1.1,lazy_refcounts=on", image),
        ("snapshot", "-d", "s", image),
        ("resize", image, "+64M"),
        ("dd", "-f", "raw", "-O", "qcow2", "if=from.raw", f"of={image}", "bs=1M"),
        ("convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "from.raw", image),
        ("create", "-q", "-f", "qcow2", "-o", options, "-b", "base.raw", "-F", "raw", image, str(SIZE)),
        ("rebase", "-f", "qcow2", "-b", "", image),
        ("check", "-r", "all", image),
    ):
        place.ours(*arguments)
        has_its_last_cluster(place, image, f"{of}: {arguments}")
        place.clean(image, f"{of}: {arguments}")
    if cluster == "512":
        return
    for arguments in (("snapshot", "-c", "s"), ("bitmap", "--add"), ("resize", "--shrink")):
        place.ours("convert", "-f", "raw", "-O", "qcow2", "-o", options, "from.raw", image)
        os.truncate(place.dir / image, os.path.getsize(place.dir / image) - 1024)
        more = {"bitmap": ["b"], "resize": ["6M"]}.get(arguments[0], [])
        place.ours(*arguments, image, *more)
        has_its_last_cluster(place, image, f"{of}: {arguments}, after it was cut")
