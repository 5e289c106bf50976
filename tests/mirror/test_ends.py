"""Mirrors that are cancelled, fail, or whose daemon is killed."""

import collections
import contextlib
import os
import shutil
import subprocess
import time

import mirror_model as m
import nbd_servers
import pytest
import rig as r
from snapshot_model import Disk, Writer, image, point_in_time


def test_cancelled(rig, mounts):
    """At each time. The disk stays where it is, a file that was made is removed, and a device or disk can be used again."""
    disk = Disk(rig, image(rig, "cancel", "raw"), "raw", name="cancel")
    writer = Writer(disk.file)
    path = rig.dir / "cancel-new.qcow2"
    for speed, is_ready in (("64K", False), ("max", True)):
        name = m.start(disk, "--to", path, "--speed", speed)
        r.message_of(disk.cli("snapshot", "d0", "--to", rig.dir / "no.qcow2", check=False), name)
        r.message_of(disk.cli("resize", "d0", "64M", check=False), name)
        if is_ready:
            m.ready(disk, name)
            r.message_of(disk.cli("job", "pause", name, check=False), "is ready")
        else:
            r.message_of(disk.cli("job", "complete", name, check=False), "is not ready", f"job wait {name}")
        disk.cli("job", "cancel", name)
        r.require(not path.exists(), "the file is still there")
        r.require(disk.shown() == ("raw", str(disk.path)), f"listed as {disk.shown()}")
    disk.cli("disk", "add", "name=far,format=raw,file=" + str(image(rig, "cancel-far", "raw")))
    name = m.start(disk, "--target", "far", "--speed", "64K")
    r.message_of(disk.cli("disk", "remove", "far", check=False), name)
    disk.cli("job", "cancel", name)
    disk.cli("disk", "remove", "far")
    writer.stop()
    disk.quit()
    point_in_time(disk.path, [writer], [len(writer.log)])


def test_a_wait_for_a_mirror_that_is_over(rig):
    """It says where the disk continues, a file or a URI, and nothing of a copy or of a cancelled mirror."""
    server = nbd_servers.nbdkit(rig, "memory", "32M", name="waited-far")
    disk = Disk(rig, image(rig, "waited", "raw"), "raw", name="waited", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=far,uri={server.uri()}")

    def over(place, *arguments, end=("complete",)):
        name = m.start(disk, *arguments, "--speed", "max")
        m.ready(disk, name)
        disk.cli("job", *end, name, timeout_s=m.QUIET_S)
        there, done = m.ended(disk, name), disk.cli("job", "wait", name, check=False)
        r.require(there.get("continues-in") == place, f"listed as {there}")
        r.require(done.returncode == (1 if there["cancelled"] else 0), f"it ended with {done.returncode}: {done.stderr}")
        line = f"\nd0 continues in {place}; serve it by this name from now on\n"
        r.require(done.stdout.endswith(line) if place else "continues" not in done.stdout, f"the wait said {done.stdout!r}")

    over(None, "--to", rig.dir / "waited-0.raw", "--format", "raw", end=("complete", "--no-switch"))
    over(None, "--to", rig.dir / "waited-1.raw", "--format", "raw", end=("cancel",))
    path = rig.dir / "waited-2.qcow2"
    over(str(path), "--to", path)
    over(server.uri(), "--target", "far")
    disk.quit()


@pytest.mark.parametrize("phase", ("copying", "ready", "after"))
def test_kill_9(rig, mounts, marks, rand, phase):
    """The image that the disk was in when the daemon was killed has all writes."""
    disk = Disk(rig, image(rig, f"kill-{phase}", "raw"), "raw", name=f"kill-{phase}")
    writer = Writer(disk.file)
    path = rig.dir / f"kill-{phase}-new.raw"
    name = m.start(disk, "--to", path, "--format", "raw", "--speed", "1M" if phase == "copying" else "max")
    if phase != "copying":
        m.ready(disk, name)
    if phase == "after":
        m.complete(disk, name)
    least = writer.done() + 50 + rand.randrange(50)
    r.wait_for("writes", lambda: writer.done() > least)
    writer.stop()
    disk.kill()
    there, other = (path, disk.path) if phase == "after" else (disk.path, path)
    words = ("was mirrored to", "remove") if phase == "after" else ("incomplete copy", "--overwrite")
    refused = r.Daemon(rig, name=f"kill-{phase}-none")
    r.message_of(refused.cli("disk", "add", f"name=d0,format=raw,file={other}", check=False), other.name, there.name, *words)
    r.require(refused.child.stop() == 0, refused.child.tail())
    point_in_time(there, [writer], [len(writer.log)])
    again = Disk(rig, there, "raw", name=f"kill-{phase}-again")
    # What is left is in the way, until the user says that it may be replaced.
    r.message_of(again.cli("mirror", "d0", "--to", other, check=False), "there already", "--overwrite")
    m.switched(again, "--to", other, "--format", "raw", "--overwrite")
    shutil.copy(again.file, rig.dir / "flat.raw")
    again.quit()
    point_in_time(rig.dir / "flat.raw", [writer], [len(writer.log)])
    point_in_time(other, [writer], [len(writer.log)])


def marked(path, name):
    """Whether a file has this mark. It may be missing."""
    with contextlib.suppress(FileNotFoundError):
        return name in os.listxattr(path)
    return False


def test_kill_9_at_the_switch(rig, mounts, marks, rand, pytestconfig):
    """At any moment of a switch: each image that can be opened has all writes, at least one can, and two are equal. The daemon is
    killed some moments after the command, after the target is marked as complete, or after the old image is marked."""
    found = collections.Counter()
    for n in range(pytestconfig.getoption("--kills") or 6):
        disk = Disk(rig, image(rig, f"at-{n}", "raw", 8), "raw", name=f"at-{n}")
        writer = Writer(disk.file)
        path = rig.dir / f"at-{n}-new.raw"
        name = m.start(disk, "--to", path, "--format", "raw", "--speed", "max")
        m.ready(disk, name)
        begun, up_to_s = (
            (lambda: True, 0.1),
            (lambda p=path: not marked(p, "user.vshunt.mirroring"), 0.002),
            (lambda p=disk.path: marked(p, "user.vshunt.moved"), 0.02),
        )[n % 3]
        argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "complete", name, *m.HOLD]
        with subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as completing:
            while not begun() and completing.poll() is None:
                pass
            time.sleep(rand.random() * up_to_s)
            disk.kill()
            completing.wait(r.WAIT_S)
        # The write that was under way got an error.
        writer._stop.set()
        writer._thread.join(r.WAIT_S)
        done = max(len(writer.log) - 1, 0)
        opened = r.Daemon(rig, name=f"at-{n}-again")
        usable = [there for there in (disk.path, path) if not opened.cli("disk", "add", f"format=raw,file={there}", check=False).returncode]
        r.require(opened.child.stop() == 0, opened.child.tail())
        r.require(usable, "no image can be opened")
        for there in usable:
            point_in_time(there, [writer], [done])
        r.require(len(usable) < 2 or disk.path.read_bytes() == path.read_bytes(), "two images can be opened, and they differ")
        found["both" if len(usable) == 2 else "old" if usable == [disk.path] else "new"] += 1
    rig.say(f"images that could be opened after a kill: {dict(found)}")
    r.require(found["new"] + found["both"], f"no kill came after the target was complete: {found}")


def test_without_space(rig, mounts):
    """The job fails and says what to do; the disk stays where it is."""
    folder = m.small_folder(rig, "small", "4m")
    try:
        disk = Disk(rig, image(rig, "full", "raw"), "raw", name="full")
        with open(disk.file, "r+b", buffering=0) as f:
            f.write(os.urandom(8 << 20))
        done = disk.cli("mirror", "d0", "--to", folder / "new.raw", "--format", "raw", "--wait", check=False, timeout_s=m.QUIET_S)
        r.message_of(done, "No space left", "disk d0 stays where it is: free space there, or choose another target")
        r.require(not (folder / "new.raw").exists(), "the file is still there")
        r.require(disk.shown() == ("raw", str(disk.path)), f"listed as {disk.shown()}")
        disk.quit()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_file_that_is_replaced_is_marked_until_it_is_complete(rig, mounts, marks):
    """Also if the mirror fails, and if another mirror to it is refused."""
    disk = Disk(rig, image(rig, "over", "raw"), "raw", name="over")
    disk.cli("disk", "add", f"name=d1,format=raw,file={image(rig, 'over-d1', 'raw')}")
    path = image(rig, "over-new", "raw")
    name = m.start(disk, "--to", path, "--format", "raw", "--overwrite", "--speed", "64K")
    refused = disk.cli("mirror", "d1", "--to", path, "--format", "raw", "--overwrite", check=False)
    r.message_of(refused, path.name, "in use")
    r.require("user.vshunt.mirroring" in os.listxattr(path), "the mark is gone")
    r.message_of(disk.cli("export", "add", f"type=fuse,name=f1,disk=d1,mountpoint={path}", check=False), path.name, name)
    disk.cli("job", "cancel", name)
    r.message_of(disk.cli("disk", "add", f"name=d2,format=raw,file={path}", check=False), "incomplete copy", "--overwrite")
    m.switched(disk, "--to", path, "--format", "raw", "--overwrite")
    r.require(os.listxattr(path) == [], f"marked as {os.listxattr(path)}")
    r.require(os.listxattr(disk.path) == ["user.vshunt.moved"], f"the old image is marked as {os.listxattr(disk.path)}")
    disk.quit()


def test_a_target_that_was_replaced(rig, mounts):
    """Someone removes the file before the switch: the disk does not continue in a file without a name."""
    disk = Disk(rig, image(rig, "gone", "raw"), "raw", name="gone")
    path = rig.dir / "gone-new.raw"
    name = m.start(disk, "--to", path, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    path.unlink()
    path.write_bytes(b"another's")
    r.message_of(disk.cli("job", "complete", name, check=False), "was removed or replaced")
    r.require(path.read_bytes() == b"another's", "another's file was changed")
    r.require(disk.shown() == ("raw", str(disk.path)), f"listed as {disk.shown()}")
    disk.quit()


@pytest.mark.parametrize("end", ("cancel", "complete", "quit"))
def test_the_end_of_a_job_does_not_wait_for_a_queue_of_a_guest_on_its_worker(rig, end):
    """Any queue may be on any worker. The worker of the job stays, with that queue, and can be freed later."""
    path, socket = rig.dir / f"guest-{end}-new.raw", rig.dir / f"guest-{end}.sock"
    disk = f"name=d0,format=raw,file={image(rig, f'guest-{end}', 'raw')}"
    daemon = r.Daemon(rig, "--disk", disk, "--export", f"type=vhost-user-blk,name=v0,disk=d0,socket={socket},queues=2", name=f"guest-{end}")
    name = m.start(daemon, "--to", path, "--format", "raw")
    m.ready(daemon, name)
    worker = next(w["id"] for w in daemon.status()["workers"] if w["name"] == name)
    daemon.attach("v0:1", worker)
    began = time.monotonic()
    if end == "quit":
        r.require(daemon.child.stop() == 0, daemon.child.tail())
    elif end == "complete":
        m.complete(daemon, name)
    else:
        daemon.cli("job", "cancel", name)
    # It took 30 s, whatever the machine.
    r.require(time.monotonic() - began < 25, "the end has waited for the queue")
    if end == "quit":
        return
    queue = next(q for q in daemon.status()["queues"] if q["export"] == "v0" and q["index"] == 1)
    r.require(queue["worker"] == worker, f"{queue}")
    daemon.attach("v0:1", 0)
    # The job has freed it if it had not come to that.
    daemon.cli("worker", "free", str(worker), check=False)
    r.wait_for("the worker is gone", lambda: all(w["id"] != worker for w in daemon.status()["workers"]))
    r.require(daemon.child.stop() == 0, daemon.child.tail())
