"""Tests served qcow2 disks: under load, after kill -9, with bitmaps, locks, and over QMP."""

import contextlib
import json
import os
import random
import subprocess
import time

import pytest
import rig as r
from qcow2_disks import MIB, Disk, checked, create, file_name, mounts, qemu_img

# How long a test under load lasts; `--seconds` changes it.
LOAD_S = 4.0


def under_load(rig, name, options, size, seconds):
    """Verified load by four queues, which move meanwhile; then the image is clean and has no leaks."""
    path = create(rig.dir / f"load-{file_name(name)}", options, size)
    disk = Disk(rig, path, fuse=False, queues=4)
    argv = [r.binary("vshunt-bench"), "blk", "--socket", disk.socket, "--rw", "randrw", "--verify", "--queues", "4"]
    argv += ["--iodepth", "16", "--bs", "16k", "--flush-every", "50", "--runtime", r.FOREVER, "--quiet"]
    load = r.Child(rig, f"load-{file_name(name)}", argv)
    r.wait_for("the load's first requests", lambda: sum(q["requests"] for q in disk.daemon.status()["queues"]))
    turns, end = 0, time.monotonic() + seconds
    while load.running() and (time.monotonic() < end or turns <= 20):
        disk.daemon.attach(f"e0:{turns % 4}", (turns * 3 + 1) % 4)
        turns += 1
        time.sleep(0.01)
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    checked(path)


def test_kill_9(rig, seed, rounds=6):
    """After kill -9 under load, synced data is there, and nothing is corrupt."""
    mounts()
    rng = random.Random(seed)
    path = create(rig.dir / "killed.qcow2", "cluster_size=4k", 64)
    synced = {}
    for turn in range(rounds):
        disk = Disk(rig, path, name=f"kill{turn}")
        fd = os.open(disk.file, os.O_RDWR)
        for block, value in synced.items():
            got = os.pread(fd, 4096, block * 65536)
            r.require(got == bytes([value]) * 4096, f"block {block} is {got[:4]!r}, not {value}")
        end = time.monotonic() + 0.3 + rng.random() / 2
        written = {}
        while time.monotonic() < end:
            block, value = rng.randrange(1024), rng.randrange(1, 256)
            os.pwrite(fd, bytes([value]) * 4096, block * 65536)
            written[block] = value
            synced.pop(block, None)
            if rng.random() < 0.1:
                os.fsync(fd)
                synced.update(written)
                written = {}
        disk.daemon.child.kill()
        with contextlib.suppress(OSError):
            os.close(fd)
        subprocess.run(["umount", "-l", str(disk.file)], capture_output=True)
        checked(path, leaks=True)
    r.run([r.binary("vshunt"), "image", "check", "-r", "all", path])
    checked(path)


def dirty_ranges(rig, path, bitmap):
    """The ranges that a bitmap marks as written, as QEMU reads them."""
    socket = rig.dir / "nbd.sock"
    child = r.Child(rig, "qemu-nbd", [r.tool("qemu-nbd", "qemu-utils"), "-r", "-k", socket, "-B", bitmap, "-f", "qcow2", path])
    r.wait_for("qemu-nbd", lambda: socket.exists() or not child.running())
    r.require(child.running(), f"qemu-nbd: {child.tail()}")
    options = f"driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
    done = qemu_img("map", "--output=json", "--image-opts", options)
    child.stop()
    socket.unlink(missing_ok=True)
    # With that option data=false says dirty (docs/tools/qemu-nbd, x-dirty-bitmap).
    return [(x["start"], x["length"]) for x in json.loads(done.stdout) if not x["data"]]


def test_bitmaps_of_a_served_image(rig):
    """Bitmaps of QEMU's are in use while we write the image; those that track nothing are the same afterwards."""
    path = create(rig.dir / "bitmaps.qcow2")
    for name, more in (("tracks", []), ("kept", ["--disable"])):
        qemu_img("bitmap", "--add", path, name)
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 5 1M 3M", path])
        if more:
            qemu_img("bitmap", *more, path, name)
    before = {name: dirty_ranges(rig, path, name) for name in ("tracks", "kept")}
    r.require(before["kept"] == [(1 * MIB, 3 * MIB)], f"QEMU tracked {before}")

    def flags():
        info = json.loads(qemu_img("info", "-U", "--output=json", path).stdout)
        return {b["name"]: set(b["flags"]) for b in info["format-specific"]["data"]["bitmaps"]}

    disk = Disk(rig, path, fuse=False)
    r.require(all("in-use" in f for f in flags().values()), f"while it is served: {flags()}")
    disk.quit()
    checked(path)
    # Who tracks writes stores what it knows; nobody did is in use still, and no write can be
    # missed.
    r.require(flags()["kept"] == set() and "auto" in flags()["tracks"], f"afterwards: {flags()}")
    r.require(dirty_ranges(rig, path, "kept") == before["kept"], "a bitmap that tracks nothing is another now")
    readonly = Disk(rig, path, fuse=False, readonly=True, name="read")
    readonly.quit()
    checked(path)


def test_not_closed(rig):
    """An image whose last user died with lazy reference counts is repaired when it is opened."""
    path = create(rig.dir / "lazy.qcow2", "lazy_refcounts=on")
    io = [r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 9 1M 3M", "-c", "flush", "-c", "abort", path]
    r.run(io, check=False)
    with open(path, "rb") as f:
        f.seek(79)
        r.require(f.read(1) == b"\1", "QEMU left the image clean")
    disk = Disk(rig, path, fuse=False, name="lazy")
    disk.quit()
    checked(path)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "read -P 9 1M 3M", path])


def test_blockdev_add(rig):
    """As QEMU's storage daemon is asked for it."""
    path = create(rig.dir / "qmp.qcow2", "", 3)
    # The daemon opens files that clients name in folders that are allowed.
    daemon = r.Daemon(rig, "--allow-path", rig.dir, name="qmp")
    node = {"driver": "qcow2", "node-name": "q0", "file": {"driver": "file", "filename": str(path)}, "cache-size": 65536}
    daemon.cli("qmp", "blockdev-add", json.dumps(node))
    (disk,) = json.loads(daemon.cli("status", "--json").stdout)["disks"]
    r.require((disk["format"], disk["cache-size"]) == ("qcow2", 65536), f"it is {disk}")
    r.require("3M" in daemon.cli("status").stdout, "status does not show its size")
    daemon.cli("qmp", "blockdev-del", json.dumps({"node-name": "q0"}))
    daemon.cli("quit")
    r.require(daemon.child.wait() == 0, daemon.child.tail())
    checked(path)


def test_locks(rig):
    path = create(rig.dir / "locked.qcow2")
    disk = Disk(rig, path, fuse=False, name="lock")
    done = qemu_img("check", path, check=False)
    r.require("lock" in done.stderr, f"QEMU is not kept out: {done.stdout}{done.stderr}")
    again = [r.binary("vshunt"), "serve", "--disk", f"name=d0,format=qcow2,file={path}", "--control", rig.dir / "no.ctl"]
    r.message_of(r.run(again, check=False), "in use", path.name)
    disk.quit()
    checked(path)


@pytest.mark.parametrize(
    "name, options, size", (("plain", "", 256), ("4k clusters", "cluster_size=4k", 64), ("subclusters", "extended_l2=on", 128)),
    ids=("plain", "4k clusters", "subclusters"),
)  # fmt: skip
def test_load_on_queues_that_move(request, rig, name, options, size):
    under_load(rig, name, options, size, request.config.getoption("--seconds") or LOAD_S)
