"""How long guests are held for a switch, what keeps a mirror from it, and jobs that are cancelled meanwhile."""

import itertools
import mmap
import os
import subprocess
import threading
import time

import mirror_model as m
import rig as r
from snapshot_model import BLOCK, MIB, Disk, bench, image, qemu_img


def test_a_mount_that_bypasses_the_daemon(rig, mounts):
    """The disk cannot be switched under it. The job stays ready, and is completed when the mount is gone."""
    disk = Disk(rig, image(rig, "pass", "raw"), "raw", name="pass", fuse=False, socket=True)
    load = bench(rig, disk, "pass-bench", "--range", "8M")
    new, mountpoint = rig.dir / "pass-new.raw", rig.dir / "pass.mnt"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    disk.cli("export", "add", f"type=fuse,name=f0,disk=d0,mountpoint={mountpoint}")
    (mount,) = (e["mount"] for e in disk.daemon.status()["exports"] if e["name"] == "f0")
    if not mount["passthrough"]:
        raise r.Skipped(f"no passthrough: {mount.get('passthrough-reason')}")
    r.message_of(disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S), "stays ready", "f0", "passthrough=off")
    there = m.job(disk, name)
    r.require(there["status"] == "ready" and "passthrough=off" in there["error"], f"listed as {there}")
    r.require(disk.shown() == ("raw", str(disk.path)), f"listed as {disk.shown()}")
    disk.cli("export", "remove", "f0")
    m.complete(disk, name)
    r.require("error" not in m.job(disk, name), f"it ended as {m.job(disk, name)}")
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()


def test_old_storage_that_hangs_at_the_switch(rig, mounts):
    """The job stays ready, and is completed when the storage answers. The image of the disk is a file of another daemon."""
    below = Disk(rig, image(rig, "below", "raw"), "raw", name="below")
    with open(below.file, "r+b", buffering=0) as f:
        f.write(os.urandom(8 << 20))
    disk = Disk(rig, below.file, "raw", name="old", fuse=False, socket=True)
    new = rig.dir / "old-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    below.daemon.child.suspend()
    done = disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "disk d0 took nothing for 15 s", "complete the job again")
    r.require(m.job(disk, name)["status"] == "ready", f"listed as {m.job(disk, name)}")
    below.daemon.child.resume()
    m.complete(disk, name)
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    disk.quit()
    below.quit()
    r.require(new.read_bytes() == below.path.read_bytes(), "the target is another")


class HangingDisk:
    """A disk whose image has data in its first 8 MiB. What is behind is in a backing image whose storage hangs while it is told
    to: a file of another daemon."""

    def __init__(self, rig, name):
        self.below = Disk(rig, image(rig, f"{name}-below", "raw"), "raw", name=f"{name}-below")
        self.path = rig.dir / f"{name}.qcow2"
        qemu_img("create", "-q", "-f", "qcow2", "-b", self.below.file, "-F", "raw", self.path)
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 5 0 8M", self.path])
        self.disk = Disk(rig, self.path, "qcow2", name=name)

    def begin_write(self):
        """Begins a write that does not end until the storage answers: it fills a part of a cluster."""
        self.below.daemon.child.suspend()
        self.write = threading.Thread(target=self._write, daemon=True)
        self.write.start()

    def _write(self):
        fd, block = os.open(self.disk.file, os.O_WRONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
        block.write(b"\x07" * BLOCK)
        os.pwritev(fd, [block], 20 * MIB)
        os.close(fd)

    def end_write(self):
        self.below.daemon.child.resume()
        self.write.join(r.WAIT_S)
        r.require(not self.write.is_alive(), "the write does not end")

    def quit(self):
        self.disk.quit()
        self.below.quit()


def test_one_request_that_hangs_does_not_hold_up_the_others(rig, mounts):
    """A mirror that is ready looks every 200 ms for what guests have written, for which it holds them for a moment."""
    hanging = HangingDisk(rig, "beside")
    disk = hanging.disk
    new = rig.dir / "beside-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    fd, block = os.open(disk.file, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
    hanging.begin_write()
    try:
        reads = itertools.count()

        def enough():
            at = next(reads)
            r.require(os.preadv(fd, [block], at * BLOCK) == BLOCK and block[0] == 5, "a read failed")
            return at == 400

        # If they were held up for 10 s of each 10.2 s, the limit would be over before.
        r.wait_for("400 reads", enough)
        r.require(hanging.write.is_alive(), "the write has ended")
    finally:
        os.close(fd)
        hanging.end_write()
    m.complete(disk, name)
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    hanging.quit()
    data = new.read_bytes()
    r.require(data[20 * MIB : 20 * MIB + BLOCK] == b"\x07" * BLOCK, "the target lacks the write")


def test_a_target_that_is_removed_while_guests_are_held(rig, mounts):
    """The disk does not continue in a file without a name."""
    hanging = HangingDisk(rig, "removed")
    disk, new = hanging.disk, rig.dir / "removed-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    hanging.begin_write()
    argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "complete", name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as completing:
        # It waits for the write by now, and would have found the file before.
        time.sleep(2)
        new.unlink()
        hanging.end_write()
        _, said = completing.communicate(timeout=m.QUIET_S)
    r.require(completing.returncode == 1 and "was removed or replaced" in said, f"it said {said!r}")
    r.require(disk.shown() == ("qcow2", str(hanging.path)), f"listed as {disk.shown()}")
    hanging.quit()


def test_an_export_that_is_added_to_a_disk_whose_target_loses_writes(rig):
    """Its guest counts on all completed writes, which a target without a journal may lose. The job stays ready."""
    disk = Disk(rig, image(rig, "safe", "raw"), "raw", name="safe", fuse=False)
    old = rig.dir / "old.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-o", "compat=0.10", old, "32M")
    disk.cli("disk", "add", f"name=far,format=qcow2,file={old}")
    name = m.start(disk, "--target", "far", "--speed", "max")
    m.ready(disk, name)
    disk.cli("export", "add", f"type=vhost-user-blk,name=e1,disk=d0,socket={disk.socket}")
    done = disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "disk far may lose completed writes", "remove the exports of d0")
    disk.cli("export", "remove", "e1")
    m.complete(disk, name)
    r.require(disk.shown() == ("qcow2", str(old)), f"listed as {disk.shown()}")
    disk.quit()
