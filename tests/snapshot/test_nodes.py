"""Tests overlays as nodes of QMP, and bitmaps that stay with the disk."""

import json
import os

import rig as r
from snapshot_model import BLOCK, MIB, Disk, Writer, checked, image, qemu_img


def test_an_overlay_as_a_node(rig, mounts):
    """QEMU's two steps: an overlay is added as a node, and becomes the disk's image later."""
    base = image(rig, "node", "qcow2")
    disk = Disk(rig, base, "qcow2", name="node")
    over = rig.dir / "node-over.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", over)

    def qmp(command, arguments, *words):
        done = disk.cli("qmp", command, json.dumps(arguments), check=not words)
        return r.message_of(done, *words) if words else json.loads(done.stdout)

    def add(name, file, **more):
        return {"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": str(file)}, "backing": None} | more

    def names():
        return sorted(n["node-name"] for n in qmp("query-named-block-nodes", {}))

    step = {"node": "d0", "overlay": "n1"}
    qmp("blockdev-snapshot", step, "n1 is not there", "blockdev-add")
    qmp("blockdev-add", add("n1", over, backing="d0"), "'backing'", "blockdev-snapshot")
    qmp("blockdev-add", {"driver": "file", "node-name": "n1", "filename": str(over), "backing": None}, "qcow2 only")
    qmp("blockdev-add", add("n1", rig.dir / "gone.qcow2"), "cannot open", "gone.qcow2")
    qmp("blockdev-add", add("d0", over), "disk d0 already")
    qmp("blockdev-add", add("n1", over, **{"read-only": True}))
    r.require(names() == ["d0", "n1"], f"{names()}")
    qmp("blockdev-add", add("n1", over), "overlay n1 already")
    qmp("blockdev-snapshot", step, "read-only")
    qmp("blockdev-del", {"node-name": "n1"})
    for unlike, what in (({"cache": {"no-flush": True}}, "cache"), ({"cache-size": 65536}, "cache-size"), ({"locking": "off"}, "locking")):
        qmp("blockdev-add", add("n1", over, **unlike))
        qmp("blockdev-snapshot", step, f"another {what} than disk d0")
        qmp("blockdev-del", {"node-name": "n1"})
    r.require(names() == ["d0"], f"{names()}")
    qmp("blockdev-add", add("n1", over))
    mount = {"type": "fuse", "id": "f1", "node-name": "n1", "mountpoint": str(rig.dir / "n1.mnt")}
    qmp("block-export-add", mount, "blockdev-snapshot", "no disk yet")
    # An overlay without a backing file is a disk.
    alone = image(rig, "alone", "qcow2")
    qmp("blockdev-add", add("n2", alone))
    qmp("blockdev-snapshot", step | {"overlay": "n2"}, "disk by itself")
    qmp("blockdev-snapshot", step | {"node": "n2"}, "does not stand on", alone)
    writer = Writer(disk.file)
    r.wait_for("it writes", lambda: len(writer.log) > 50)
    qmp("blockdev-snapshot", step)
    written = len(writer.log)
    r.wait_for("it continues", lambda: len(writer.log) > written + 50)
    writer.stop()
    r.require(disk.shown_as("d0") == ("qcow2", str(over)), f"listed as {disk.shown_as('d0')}")
    r.require(names() == ["d0", "n2"], f"{names()}")
    disk.quit()
    checked(base)
    checked(over)


def test_bitmaps(rig, mounts):
    """Persistent bitmaps stay with the disk, and miss no write, through all of it."""
    base, over = image(rig, "bits", "qcow2"), rig.dir / "bits-over.qcow2"
    disk = Disk(rig, base, "qcow2", name="bits")
    disk.cli("bitmap", "add", "d0", "b0")
    with open(disk.file, "r+b", buffering=0) as f:

        def write(at):
            os.pwrite(f.fileno(), b"x" * BLOCK, at)

        write(0)
        disk.cli("snapshot", "d0", "--internal", "s")
        write(MIB)
        disk.cli("resize", "d0", "40M")
        disk.snapshot(over)
        write(2 * MIB)
    disk.quit()
    for path in (base, over):
        checked(path)
        (there,) = json.loads(qemu_img("info", "--output=json", path).stdout)["format-specific"]["data"]["bitmaps"]
        # The bitmap below does not have the later writes, and is marked as in use.
        r.require(there["name"] == "b0" and ("in-use" in there["flags"]) == (path == base), f"{path.name} has {there}")
    again = Disk(rig, over, "qcow2", name="bits-again", fuse=False)
    (shown,) = json.loads(again.cli("bitmap", "list", "d0", "--json").stdout)
    again.quit()
    # Three blocks, and the range by which the disk grew.
    r.require(shown["count"] == 3 * 65536 + 8 * MIB, f"it is {shown}")
    # Killed right after another snapshot, it is inconsistent in the new overlay.
    last = rig.dir / "bits-last.qcow2"
    disk = Disk(rig, over, "qcow2", name="bits-killed", fuse=False)
    disk.snapshot(last)
    disk.kill()
    again = Disk(rig, last, "qcow2", name="bits-last", fuse=False)
    (shown,) = json.loads(again.cli("bitmap", "list", "d0", "--json").stdout)
    again.quit()
    r.require(shown["count"] == 40 * MIB, f"it is {shown}")
