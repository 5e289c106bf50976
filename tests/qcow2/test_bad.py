"""Tests bad and hostile qcow2 images: each is refused in time, with the reason."""

import errno
import json
import os

import rig as r
from qcow2_disks import MIB, Disk, checked, create, mounts, qemu_img


def test_bad_images(rig):
    """Images that vshunt cannot serve are refused, with the reason and the remedy."""
    cases = []
    cases.append((rig.image("raw.img", MIB), "not a qcow2 image"))
    for method in (1, 2):
        # AES of old, LUKS.
        path = create(rig.dir / f"crypt{method}.qcow2", "", 1)
        with open(path, "r+b") as f:
            f.seek(32)
            f.write(method.to_bytes(4, "big"))
        cases.append((path, "encrypted"))
    for bit, word in ((1, "corrupt"), (9, "not known")):
        path = create(rig.dir / f"bit{bit}.qcow2")
        with open(path, "r+b") as f:
            f.seek(72)
            f.write((1 << bit).to_bytes(8, "big"))
        cases.append((path, word))
    base = rig.image("base.raw", MIB)
    gone = create(rig.dir / "gone.qcow2", "", None, ["-b", base, "-F", "raw"])
    no_format = create(rig.dir / "no-format.qcow2", "", 1)
    qemu_img("rebase", "-u", "-b", base, "-F", "raw", no_format)
    data = no_format.read_bytes()
    at = data.index(bytes.fromhex("e2792aca"))
    with open(no_format, "r+b") as f:
        f.seek(at)
        f.write((0x12345678).to_bytes(4, "big"))
    cases.append((no_format, "rebase"))
    base.rename(rig.dir / "elsewhere.raw")
    cases.append((gone, "base.raw"))
    short = create(rig.dir / "short.qcow2")
    with open(short, "r+b") as f:
        f.truncate(100)
    cases.append((short, "header"))
    for path, word in cases:
        argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,format=qcow2,file={path}", "--control", rig.dir / "no.ctl"]
        r.message_of(r.run(argv, check=False), word, path.name)
    unsaid(rig)


def unsaid(rig):
    """A qcow2 image is served as raw only with format=raw, and as qcow2 only with format=qcow2."""
    path = create(rig.dir / "unsaid.qcow2", "", 8)
    os.truncate(path, 256 << 10)
    disk = f"name=d0,file={path}"
    argv = [r.binary("vshunt"), "serve", "--disk", disk, "--control", rig.dir / "no.ctl"]
    r.message_of(r.run(argv, check=False), "begins as a qcow2 image", path.name, "format=qcow2")
    daemon = r.Daemon(rig, name="unsaid")
    r.message_of(daemon.cli("disk", "add", disk, check=False), "begins as a qcow2 image", path.name)
    for form, size in (("raw", path.stat().st_size), ("qcow2", 8 * MIB)):
        daemon.cli("disk", "add", f"{disk},format={form}")
        (shown,) = daemon.status()["disks"]
        r.require((shown["format"], shown["size-bytes"]) == (form, size), f"it is {shown}")
        daemon.cli("disk", "remove", "d0")
    # A version that nobody knows is named, whether the image's size is one of a disk or not.
    later = rig.dir / "later.qcow2"
    for size in (256 << 10, (256 << 10) - 100):
        data = bytearray(path.read_bytes().ljust(256 << 10, b"\0")[:size])
        data[4:8] = b"\0\0\0\x07"
        later.write_bytes(data)
        r.message_of(daemon.cli("disk", "add", f"name=d1,file={later}", check=False), later.name, "version 7", "format=raw")
        r.message_of(daemon.cli("disk", "add", f"name=d1,file={later},format=qcow2", check=False), later.name, "version 7")
    daemon.cli("quit")
    blk = rig.dir / "vshunt-blk"
    blk.symlink_to(r.binary("vshunt"))
    argv = [blk, f"--socket-path={rig.dir / 'blk.sock'}", f"--blk-file={path}"]
    r.message_of(r.run(argv, check=False), "--format=qcow2", path.name)
    child = r.Child(rig, "vshunt-blk", [*argv, "--format=qcow2", "--num-queues=1"])
    r.wait_for("it serves", lambda: (rig.dir / "blk.sock").exists() or not child.running())
    r.require(child.running() and child.stop() == 0, child.tail())


def test_hostile_images(rig):
    """Entries that lead to metadata: the request fails, nothing is written over, the image is marked and the log says why."""
    mounts()
    path = create(rig.dir / "hostile.qcow2", "", 64)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 7 0 1M", path])
    good = path.read_bytes()

    def number(at):
        return int.from_bytes(good[at : at + 8], "big")

    offset = 0x00FF_FFFF_FFFF_FE00
    l1, counts = number(40), number(48)
    l2, block = number(l1) & offset, number(counts)
    for what, place in (("L1 table", l1), ("refcount table", counts), ("refcount block", block), ("L2 table", l2)):
        with open(path, "r+b") as f:
            f.write(good)
            f.seek(l2)
            f.write((1 << 63 | place).to_bytes(8, "big"))
        before = path.read_bytes()
        disk = Disk(rig, path, name=f"hostile-{what.replace(' ', '-')}")
        with open(disk.file, "r+b", buffering=0) as f:
            for _ in range(2):
                try:
                    f.write(b"x" * 65536)
                    raise r.Failed(f"an entry that leads to the {what} was written by")
                except OSError as e:
                    r.require(e.errno == errno.EIO, f"the write failed with {e}")
        r.wait_for("the log's line", lambda: what in disk.daemon.child.tail() and "corrupt" in disk.daemon.child.tail())
        # What is elsewhere can be read, and stays readable.
        for change in (("resize", "d0", "80M"), ("snapshot", "d0", "--internal", "s")):
            r.message_of(disk.daemon.cli(*change, check=False), "corrupt", "check -r all", code=(1,))
        with open(disk.file, "rb", buffering=0) as f:
            f.seek(40 * MIB)
            r.require(f.read(512) == bytes(512), "another place cannot be read")
        disk.quit()
        after = path.read_bytes()
        for name, at in (("L1 table", l1), ("refcount table", counts), ("refcount block", block), ("L2 table", l2)):
            r.require(after[at : at + 4096] == before[at : at + 4096], f"the {name} is another")
        info = json.loads(qemu_img("info", "--output=json", path).stdout)
        r.require(info["format-specific"]["data"]["corrupt"], "the image is not marked")
        r.run([r.binary("vshunt"), "image", "check", "-r", "all", path])
        checked(path)
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "read -P 7 64k 960k", path])
