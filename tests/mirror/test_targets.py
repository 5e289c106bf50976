"""Mirrors to devices, to targets that fill up, and what a new file takes over."""

import os
import subprocess

import mirror_model as m
import pytest
import rig as r
from snapshot_model import Disk, bench, image

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


def test_larger_blocks_than_guests_were_told(rig, here):
    """Guests could not use them."""
    disk = Disk(rig, here, "raw", name="blocks", fuse=False, socket=True)
    old = m.zeroes(rig.dir / "blocks-device.raw", SIZE_MIB)
    made = r.run([r.tool("losetup", "mount"), "--find", "--show", "--sector-size", "4096", old], check=False)
    if made.returncode:
        raise r.Skipped(f"no loop device: {made.stderr.strip()}")
    loop = made.stdout.strip()
    try:
        to_file = ("--to", loop, "--format", "raw", "--overwrite")
        r.message_of(disk.cli("mirror", "d0", *to_file, check=False), "blocks of 4096 bytes")
        disk.cli("disk", "add", f"name=far,format=raw,file={loop}")
        r.message_of(disk.cli("mirror", "d0", "--target", "far", check=False), "blocks of 4096 bytes")
        disk.cli("disk", "remove", "far")
    finally:
        r.run([r.tool("losetup", "mount"), "-d", loop], check=False)
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
