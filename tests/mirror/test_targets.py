"""Mirrors to devices and NBD servers, to targets that fill up or fail, and what a new file takes over."""

import json
import os
import subprocess

import mirror_model as m
import nbd_servers as n
import pytest
import rig as r
from snapshot_model import Disk, bench, image

SIZE_MIB = 32


@pytest.fixture
def here(rig, request):
    return m.zeroes(rig.dir / f"{request.node.name}.raw", SIZE_MIB)


def test_to_a_server_and_back(rig, here):
    far = m.zeroes(rig.dir / "far.raw", SIZE_MIB)
    server = n.nbdkit(rig, "file", far)
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    served.cli("disk", "add", f"name=far,uri={server.uri()},reconnect-delay=60")
    served.cli("mirror", "d0", "--target", "far", *m.SWITCH, timeout_s=m.QUIET_S)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    # Its settings came along.
    served.more()
    server.kill()
    r.wait_for("the loss is noticed", lambda: "is lost" in served.daemon.child.output())
    server.start()
    served.more()
    back = rig.dir / "back.qcow2"
    served.cli("mirror", "d0", "--to", back, *m.SWITCH, timeout_s=m.QUIET_S)
    r.require(served.shown() == "qcow2", f"listed as {served.shown()}")
    served.more()
    server.kill()
    served.more()
    served.end()
    qemu_img = r.tool("qemu-img", "qemu-utils")
    r.run([qemu_img, "check", "-f", "qcow2", back])


def test_to_a_device(rig, here):
    """What the device had before is gone, also where the disk has zeroes. A device of another size is refused."""
    old, small = rig.dir / "device.raw", m.zeroes(rig.dir / "small-device.raw", SIZE_MIB // 2)
    old.write_bytes(os.urandom(SIZE_MIB << 20))
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    with r.loop_device(old) as device, r.loop_device(small) as too_small:
        to = lambda loop: ("--to", loop, "--format", "raw", "--overwrite")  # noqa: E731
        r.message_of(served.cli("mirror", "d0", *to(too_small), check=False), too_small, "as large")
        m.switched(served, *to(device))
        served.more()
        served.end()
    # The load is in the first 16 MiB.
    r.require(not any(old.read_bytes()[16 << 20 :]), "old data of the device shows")


def test_larger_blocks_than_guests_were_told(rig, here):
    """Guests could not use them."""
    disk = Disk(rig, here, "raw", name="blocks", fuse=False, socket=True)
    old = m.zeroes(rig.dir / "blocks-device.raw", SIZE_MIB)
    with r.loop_device(old, "--sector-size", "4096") as loop:
        to_file = ("--to", loop, "--format", "raw", "--overwrite")
        r.message_of(disk.cli("mirror", "d0", *to_file, check=False), "blocks of 4096 bytes")
        disk.cli("disk", "add", f"name=far,format=raw,file={loop}")
        r.message_of(disk.cli("mirror", "d0", "--target", "far", check=False), "blocks of 4096 bytes")
        disk.cli("disk", "remove", "far")
    disk.quit()


@pytest.mark.parametrize("mode", ("background", "write-blocking"))
def test_a_disk_that_fills_up(rig, mode):
    """The job fails and says what to do, guests notice nothing, and the target is free and not marked."""
    folder = m.small_folder(rig, f"small-{mode}", "6m")
    try:
        far = m.zeroes(folder / "far.raw", SIZE_MIB)
        disk = Disk(rig, m.zeroes(rig.dir / f"fills-{mode}.raw", SIZE_MIB), "raw", name=f"fills-{mode}", fuse=False, socket=True)
        disk.cli("disk", "add", f"name=far,format=raw,file={far}")
        name = m.start(disk, "--target", "far", "--copy-mode", mode, "--speed", "max")
        m.ready(disk, name)
        load = bench(rig, disk, f"fills-{mode}-bench")
        there = m.ended(disk, name)
        r.require("No space left" in there["error"] and "disk d0 stays where it is" in there["error"], f"it ended as {there}")
        requests = lambda: sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0")  # noqa: E731
        before = requests()
        r.wait_for("more requests", lambda: requests() > before + 200)
        r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
        r.require(os.listxattr(far) == [], f"marked as {os.listxattr(far)}")
        disk.cli("disk", "remove", "far")
        disk.quit()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_what_a_new_file_takes_over(rig, marks):
    """The settings of the disk, and the owner and permissions of its image. What was left can be read."""
    path = image(rig, "settings", "raw")
    os.chown(path, 4321, 4322)
    path.chmod(0o640)
    disk = Disk(rig, path, "raw", name="settings", fuse=False, socket=True, keys=",cache=writethrough,direct=off,locking=off")
    listed = lambda: next(d for d in disk.daemon.status()["disks"] if d["name"] == "d0")  # noqa: E731
    before, new = listed(), rig.dir / "settings-new.raw"
    m.switched(disk, "--to", new, "--format", "raw")
    r.require(listed() == {**before, "file": str(new)}, f"listed as {listed()}, and was {before}")
    there = new.stat()
    r.require((there.st_uid, there.st_gid, there.st_mode & 0o7777) == (4321, 4322, 0o640), f"its owner and mode are {there}")
    far = image(rig, "settings-far", "raw")
    disk.cli("disk", "add", f"name=far,format=raw,cache=writethrough,file={far}")
    name = m.start(disk, "--target", "far", "--speed", "64K")
    r.require(os.listxattr(far) == ["user.vshunt.mirroring"], f"marked as {os.listxattr(far)}")
    disk.cli("job", "cancel", name)
    r.require(os.listxattr(far) == [], f"marked as {os.listxattr(far)}")
    os.setxattr(far, "user.vshunt.mirroring", b"/there")
    other = r.Daemon(rig, "--allow-path", rig.dir, name="settings-other")
    r.message_of(other.cli("disk", "add", f"name=d0,format=raw,file={path}", check=False), "was mirrored to", new.name)
    other.cli("disk", "add", f"name=d0,format=raw,file={path},readonly=on")
    r.message_of(other.cli("disk", "add", f"name=d1,format=raw,file={far},readonly=on", check=False), "incomplete copy of /there")
    r.require(other.child.stop() == 0, other.child.tail())
    disk.quit()


def test_a_server_that_is_killed(rig, here):
    """While it is copied to, and when the mirror is ready: the job fails, and guests go on."""
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    for speed in ("1M", "max"):
        server = n.nbdkit(rig, "memory", f"{SIZE_MIB}M", name=f"nbdkit-{speed}")
        served.cli("disk", "add", f"name=far{speed},uri={server.uri()}")
        name = m.start(served, "--target", f"far{speed}", "--speed", speed)
        if speed == "max":
            m.ready(served, name)
        server.kill()
        job = m.ended(served, name)
        r.require("cannot be written" in job["error"], f"it ended as {job}")
        served.more()
        r.require(served.shown() == "raw", f"listed as {served.shown()}")
        served.cli("disk", "remove", f"far{speed}")
    served.end()


def test_a_server_that_hangs_at_the_switch(rig, here):
    """Guests wait for 15 s, and go on where they were, before the server answers."""
    far, hangs, flushes, script = (rig.dir / f"hang{end}" for end in (".raw", "", "-flushes", ".sh"))
    m.zeroes(far, SIZE_MIB)
    # Two flushes come before guests have to wait.
    script.write_text(
        f"""#!/bin/sh
case "$1" in
get_size) echo {SIZE_MIB}M ;;
can_write|can_flush|can_zero) exit 0 ;;
pread) dd if={far} iflag=skip_bytes,count_bytes,fullblock skip="$4" count="$3" bs=64k status=none ;;
pwrite) dd of={far} oflag=seek_bytes conv=notrunc seek="$4" bs=64k status=none ;;
zero) dd if=/dev/zero of={far} iflag=count_bytes,fullblock oflag=seek_bytes conv=notrunc count="$3" seek="$4" bs=64k status=none ;;
flush) if test -e {hangs} && echo >> {flushes} && test $(wc -l < {flushes}) -gt 2; then sleep 25; fi ;;
*) exit 2 ;;
esac
"""
    )
    script.chmod(0o755)
    server = n.nbdkit(rig, "sh", script, name="hangs")
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written="2M")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--speed", "max")
    m.ready(served, name)
    hangs.touch()
    done = served.cli("job", "complete", name, *m.HOLD, check=False, timeout_s=100)
    r.message_of(done, "took nothing for 15 s", "guests' writes had to wait")
    served.more()
    r.require(served.shown() == "raw", f"listed as {served.shown()}")
    hangs.unlink()
    served.end()


def test_a_disk_leaves_a_server_that_hangs(rig):
    """The old server answers nothing at the switch. The disk continues in the target, and the daemon ends without the server."""
    here, new = rig.dir / "left.raw", rig.dir / "left-new.raw"
    here.write_bytes(os.urandom(SIZE_MIB << 20))
    server = n.nbdkit(rig, "file", here, name="left")
    daemon = r.Daemon(rig, "--disk", f"name=d0,uri={server.uri()}", "--export", n.export(rig), name="of-left")
    name = m.start(daemon, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(daemon, name)
    server.child.suspend()
    m.complete(daemon, name)
    (disk,) = daemon.status()["disks"]
    r.require(disk["file"] == str(new), f"listed as {disk}")
    r.run(n.load(rig, "--ios", 100))
    r.require(daemon.child.stop() == 0, f"vshunt ended: {daemon.child.tail()}")
    server.kill()
    with open(here, "rb") as a, open(new, "rb") as b:
        differ = sum(a.read(4096) != b.read(4096) for _ in range(SIZE_MIB << 8))
    r.require(differ <= 100, f"{differ} blocks differ")


def dirty(served, name):
    """Bytes that are dirty in a bitmap of the disk."""
    bitmaps = json.loads(served.cli("bitmap", "list", "d0", "--json").stdout)
    return next(bitmap["count"] for bitmap in bitmaps if bitmap["name"] == name)


def test_a_mirror_continues_where_it_failed(rig):
    """The server is killed after a part. The next mirror copies the rest, and one after a completed one what was written since."""
    size_mib = 1024
    here, far = m.zeroes(rig.dir / "resumed.raw", size_mib), m.zeroes(rig.dir / "resumed-far.raw", size_mib)
    with open(here, "r+b") as f:
        for mib in range(0, size_mib, 16):
            f.seek(mib << 20)
            f.write(os.urandom(1 << 16))
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    server = n.nbdkit(rig, "file", far, name="resumed")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--bitmap", "m0", "--speed", "200M")
    r.wait_for("a part is copied", lambda: (m.job(served, name) or {}).get("current-progress", 0) > 300 << 20, m.QUIET_S)
    r.message_of(served.cli("bitmap", "clear", "d0", "m0", check=False), name)
    server.kill()
    r.require("cannot be" in m.ended(served, name)["error"], f"it ended as {m.job(served, name)}")
    left = dirty(served, "m0")
    r.require(0 < left <= (size_mib - 256 + 17) << 20, f"{left >> 20} MiB are left")
    server.start()
    for _ in range(2):
        left = dirty(served, "m0")
        name = m.start(served, "--target", "far", "--incremental", "m0", "--speed", "max")
        m.ready(served, name)
        copied = m.job(served, name)["total-progress"]
        m.complete(served, name, "--no-switch")
        # The rounds after the first one copy what the load writes.
        r.require(copied < left + (300 << 20), f"{copied >> 20} MiB were copied of {left >> 20}")
        r.require(dirty(served, "m0") <= 17 << 20, "the bitmap was not restarted")
    served.cli("mirror", "d0", "--target", "far", "--incremental", "m0", *m.SWITCH, timeout_s=m.QUIET_S)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    served.end()
    # The load reads back what it wrote. The rest never changed.
    with open(here, "rb") as a, open(far, "rb") as b:
        for mib in range(16, size_mib, 16):
            for file in (a, b):
                file.seek(mib << 20)
            r.require(a.read(1 << 20) == b.read(1 << 20), f"MiB {mib} differs")
