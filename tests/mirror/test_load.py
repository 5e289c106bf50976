"""Mirrors with a switch under verified load."""

import itertools
import json

import mirror_model as m
import pytest
import rig as r
from snapshot_model import Disk, Writer, bench, checked, flat, image, point_in_time

# `make soak` runs more.
SWITCHES = 12


@pytest.mark.parametrize("ring", ("split", "packed"))
def test_switched_many_times_by_socket(rig, pytestconfig, ring):
    """Raw and qcow2 files and disks of the daemon in turn, while all queues move. No write is lost, and what the disk leaves
    is closed."""
    disk = Disk(rig, image(rig, f"many-{ring}", "raw", 24), "raw", name=f"many-{ring}", fuse=False, socket=True)
    load = bench(rig, disk, f"many-{ring}-bench", "--range", "16M", *(["--packed"] if ring == "packed" else []))
    old, turns = disk.path, itertools.count()
    for n in range(pytestconfig.getoption("--kills") or SWITCHES):
        form = ("qcow2", "raw")[n % 2]
        path = rig.dir / f"many-{ring}-{n}.{form}"
        if n % 3 == 2:
            image(rig, path.stem, form, 24)
            disk.cli("disk", "add", f"name=next,format={form},file={path}")
            name = m.start(disk, "--target", "next", "--speed", "max")
        else:
            name = m.start(disk, "--to", path, "--format", form, "--speed", "max")
        m.ready(disk, name)
        turn = next(turns)
        disk.daemon.attach(f"e0:{turn % 2}", (turn // 2) % 2)
        m.complete(disk, name)
        r.require(disk.shown() == (form, str(path)), f"listed as {disk.shown()}")
        r.require("next" not in disk.cli("disk", "list").stdout, "the target is still a disk of its own")
        # Nobody has a lock of it.
        r.run([r.tool("qemu-img", "qemu-utils"), "info", old])
        if old.suffix == ".qcow2":
            checked(old)
        old.unlink()
        old = path
        r.require(load.running(), f"the load ended: {load.tail()}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    left = [at for at in r.open_files(disk.daemon.child.pid) if "many-" in at and "deleted" in at]
    r.require(not left, f"files that the disk has left are open: {left}")
    disk.quit()
    if old.suffix == ".qcow2":
        checked(old)


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_switched_while_mounted(rig, mounts, form):
    """A file of a mount keeps all writes, and has those of the moment when a mirror ends without a switch."""
    disk = Disk(rig, image(rig, f"file-{form}", form), form, name=f"file-{form}")
    writers = [Writer(disk.file, lane, 2) for lane in range(2)]
    copy, new = rig.dir / f"file-{form}-copy.qcow2", rig.dir / f"file-{form}-new.raw"
    name = m.start(disk, "--to", copy, "--wait", "--job", "m")
    r.require("m is ready:" in name and "vshunt job complete m" in name, f"it said {name!r}")
    before = [w.done() for w in writers]
    m.complete(disk, "m", "--no-switch")
    r.require(disk.shown()[1] == str(disk.path), f"listed as {disk.shown()}")
    checked(copy)
    point_in_time(flat(copy, "qcow2", rig.dir / "flat.raw"), writers, before)
    m.switched(disk, "--to", new, "--format", "raw")
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    for writer in writers:
        writer.stop()
    disk.quit()
    point_in_time(new, writers, [len(w.log) for w in writers])


def test_an_overlay_is_mirrored_whole(rig, mounts):
    """The target of an overlay needs no backing image, and snapshots of the disk go on from it."""
    base = image(rig, "whole", "qcow2")
    disk = Disk(rig, base, "qcow2", name="whole")
    writer = Writer(disk.file)
    r.wait_for("writes", lambda: writer.done() > 100)
    disk.snapshot(rig.dir / "whole-over.qcow2")
    new, over = rig.dir / "whole-new.qcow2", rig.dir / "whole-over2.qcow2"
    m.switched(disk, "--to", new)
    info = json.loads(r.run([r.tool("qemu-img", "qemu-utils"), "info", "-U", "--output=json", new]).stdout)
    r.require("backing-filename" not in info, f"it has a backing image: {info}")
    disk.snapshot(over)
    disk.cli("commit", "d0", "--wait", timeout_s=m.QUIET_S)
    r.require(disk.shown() == ("qcow2", str(new)), f"listed as {disk.shown()}")
    writer.stop()
    disk.quit()
    checked(new)
    point_in_time(flat(new, "qcow2", rig.dir / "flat.raw"), [writer], [len(writer.log)])


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_guests_resume_in_the_target_after_kill_9(rig, form):
    """The daemon is killed after the switch, and started with the target. The guest's requests in flight are carried out there."""
    old, new = image(rig, f"resume-{form}", "raw"), rig.dir / f"resume-{form}-new.{form}"
    disk = Disk(rig, old, "raw", name=f"resume-{form}", fuse=False, socket=True)
    load = bench(rig, disk, f"resume-{form}-bench", "--range", "16M", "--reconnect", "60s", "--stall", "60s")
    requests = lambda: sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0")  # noqa: E731
    name = m.start(disk, "--to", new, "--format", form, "--speed", "max")
    m.ready(disk, name)
    m.complete(disk, name)
    before = requests()
    r.wait_for("requests in the target", lambda: requests() > before + 200)
    disk.daemon.child.kill()
    at = disk.daemon.arguments.index(f"name=d0,format=raw,file={old}")
    disk.daemon.arguments[at] = f"name=d0,format={form},file={new}"
    disk.daemon.start()
    r.wait_for("requests after the kill", lambda: requests() > 200)
    r.require(load.interrupt(120) == 0, f"the load failed: {load.tail()}")
    disk.quit()
    if form == "qcow2":
        checked(new)


def test_bitmaps_and_permissions(rig, marks):
    """A qcow2 target stores the bitmaps of the disk, and says what was written before and after the switch. Another one cannot,
    and the log says that. A new file has the permissions of the old image."""
    path = image(rig, "bitmaps", "qcow2")
    path.chmod(0o664)
    disk = Disk(rig, path, "qcow2", name="bitmaps", fuse=False, socket=True)
    disk.cli("bitmap", "add", "d0", "b0")
    new = rig.dir / "bitmaps-new.qcow2"
    write = [r.binary("vshunt-bench"), "blk", "--socket", disk.socket, "--rw", "write", "--bs", "64k", "--quiet", "--range", "1M", "--ios", "16"]
    r.run(write)
    m.switched(disk, "--to", new)
    r.run([*write, "--offset", "8M"])
    r.require("cannot store dirty bitmaps" not in disk.daemon.child.output(), "the log says that it cannot store them")
    r.require(new.stat().st_mode & 0o7777 == 0o664, f"its mode is {new.stat().st_mode:o}")
    disk.quit()
    checked(new)
    again = Disk(rig, new, "qcow2", name="bitmaps-again", fuse=False, socket=True)
    (bitmap,) = json.loads(again.cli("bitmap", "list", "d0", "--json").stdout)
    r.require(bitmap["name"] == "b0" and bitmap["recording"] and bitmap["count"] == 2 << 20, f"listed as {bitmap}")
    m.switched(again, "--to", rig.dir / "bitmaps.raw", "--format", "raw")
    r.require("cannot store dirty bitmaps" in again.daemon.child.output(), f"the log: {again.daemon.child.tail()}")
    again.quit()


def test_a_load_that_the_job_cannot_follow(rig):
    """Guests write everywhere faster than the speed of the job. It becomes ready, and can be completed."""
    disk = Disk(rig, image(rig, "fast", "raw", 64), "raw", name="fast", fuse=False, socket=True)
    load = bench(rig, disk, "fast-bench")
    name = m.start(disk, "--to", rig.dir / "fast-new.raw", "--format", "raw", "--speed", "32M")
    m.ready(disk, name)
    m.complete(disk, name)
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
