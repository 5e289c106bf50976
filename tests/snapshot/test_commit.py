"""Tests commits of an overlay into the image below while the disk is in use."""

import json
import os
import shutil
import subprocess

import mirror_model as m
import pytest
import rig as r
from snapshot_model import BLOCK, MIB, Disk, Writer, bench, checked, flat, image, point_in_time


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_committed_under_load_mounted(rig, mounts, written, form):
    """An overlay is committed under load. The image below then has all writes and becomes the disk's
    image, and the old overlay is refused."""
    base = image(rig, f"commit-{form}", form)
    disk = Disk(rig, base, form, name=f"commit-{form}")
    writers = [Writer(disk.file, lane, 2) for lane in range(2)]
    overlay = rig.dir / f"commit-{form}-over.qcow2"
    for turn in range(2):
        written(writers)
        disk.snapshot(overlay)
        written(writers)
        if turn == 0:
            disk.cli("commit", "d0", "--wait", timeout_s=120)
        else:
            # The command of QEMU's clients. This job is dismissed automatically.
            disk.cli("qmp", "block-commit", json.dumps({"device": "d0", "job-id": "c1", "speed": 0}))
            r.wait_for("the commit is over", lambda: "c1" not in disk.cli("job", "list").stdout, 120)
        r.require(disk.shown() == (form, str(base)), f"listed as {disk.shown()}")
        written(writers, 50)
        done = disk.cli("disk", "add", f"name=old{turn},format=qcow2,file={overlay}", check=False)
        if "user.vshunt" in str(os.listxattr(overlay)):
            r.message_of(done, "committed", overlay.name, base.name)
        overlay.unlink()
    for writer in writers:
        writer.stop()
    disk.quit()
    if form == "qcow2":
        checked(base)
    point_in_time(flat(base, form, rig.dir / "flat.raw"), writers, [len(w.log) for w in writers])
    again = Disk(rig, base, form, name=f"committed-{form}")
    again.quit()


def test_committed_under_load_by_socket(rig, served):
    """Under verified load with discards and zeroes. The job's queue and the disk's queues move."""
    base = image(rig, "csock", "qcow2", 64)
    disk = Disk(rig, base, "qcow2", name="csock", fuse=False, socket=True)
    load = bench(rig, disk, "csock-bench", "--range", "48M")
    turns = 0
    for n in range(2):
        served(disk)
        overlay = rig.dir / f"csock-{n}.qcow2"
        disk.snapshot(overlay)
        served(disk)
        # At first so slow that it lasts for all moves, then fast while some more are made.
        job = disk.cli("commit", "d0", "--speed", "256K").stdout.strip()
        for turn in range(20):
            disk.daemon.attach(f"e0:{turns % 2}", (turns // 2) % 2)
            disk.cli("attach", "--timeout", f"{r.WAIT_S - 10:g}s", f"{job}:0", str(turns % 2), check=turn <= 10)
            turns += 1
            if turn == 10:
                disk.cli("job", "speed", job, "max")
        said = disk.cli("job", "wait", job, timeout_s=120).stdout
        r.require(said.endswith(f"\nd0 continues in {base}; serve it by this name from now on\n"), f"the wait said {said!r}")
        r.require(disk.shown() == ("qcow2", str(base)), f"listed as {disk.shown()}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    checked(base)


def test_a_wait_for_a_commit_that_is_over(rig):
    """It says where the disk continues, also if the commit has ended before, and not if the disk has been moved on since."""
    base = image(rig, "cover", "raw", 16)
    disk = Disk(rig, base, "raw", name="cover", fuse=False, socket=True)
    disk.snapshot(rig.dir / "cover-0.qcow2")
    job = disk.cli("commit", "d0").stdout.strip()
    there = m.ended(disk, job)
    r.require(there["continues-in"] == str(base), f"listed as {there}")
    said = disk.cli("job", "wait", job).stdout
    r.require(said.endswith(f"\nd0 continues in {base}; serve it by this name from now on\n"), f"the wait said {said!r}")
    disk.snapshot(rig.dir / "cover-1.qcow2")
    said = disk.cli("job", "wait", job).stdout
    r.require("continues" not in said and f"{job} is done" in said, f"the wait said {said!r}")
    disk.quit()


def test_a_commit_without_space(rig, mounts):
    """On a full file system a commit fails, and says what to do; with space it succeeds."""
    folder = rig.dir / "small"
    folder.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder])
    try:
        base = folder / "base.raw"
        with open(base, "wb") as f:
            f.truncate(32 << 20)
        disk = Disk(rig, base, "raw", name="cfull")
        overlay = rig.dir / "cfull-over.qcow2"
        said = disk.snapshot(overlay).stdout
        r.require(said == f"d0 continues in {overlay}; serve it by this name from now on\n", f"the snapshot said {said!r}")
        data = os.urandom(8 << 20)
        with open(disk.file, "r+b", buffering=0) as f:
            f.write(data)
        done = disk.cli("commit", "d0", "--wait", check=False, timeout_s=120)
        r.message_of(done, "No space left", f"disk d0 continues in its overlay: free space for {base}, and commit again")
        r.require(disk.shown() == ("qcow2", str(overlay)), f"listed as {disk.shown()}")
        r.run(["mount", "-o", "remount,size=64m", folder])
        said = disk.cli("commit", "d0", "--wait", timeout_s=120).stdout
        r.require(said.endswith(f"\nd0 continues in {base}; serve it by this name from now on\n"), f"the commit said {said!r}")
        r.require(disk.shown() == ("raw", str(base)), f"listed as {disk.shown()}")
        disk.quit()
        with open(base, "rb") as f:
            r.require(f.read(len(data)) == data, "the commit lost data")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def copying(disk, job):
    """Wait until a commit has copied something."""
    r.wait_for(f"{job} copies", lambda: any(j["current-progress"] for j in disk.daemon.status()["jobs"] if j["id"] == job))


def test_a_commit_that_is_cancelled_or_killed(rig, mounts, written):
    """After a cancelled, killed or refused commit the disk is in its overlay, with all writes."""
    base = image(rig, "cends", "qcow2")
    disk = Disk(rig, base, "qcow2", name="cends")
    r.message_of(disk.cli("commit", "d0", check=False), "has no backing image", base.name)
    writer = Writer(disk.file)
    written([writer])
    overlay = rig.dir / "cends-over.qcow2"
    disk.snapshot(overlay)
    written([writer])
    # Another reader of the image below would see it change.
    reader = r.Daemon(rig, "--disk", f"name=ro,format=qcow2,file={base},readonly=on", name="cends-reader")
    r.message_of(disk.cli("commit", "d0", check=False), base.name, "in use")
    r.require(reader.child.stop() == 0, reader.child.tail())
    job = disk.cli("commit", "d0", "--speed", "64K").stdout.strip()
    second = r.Daemon(rig, name="cends-second")
    added = second.cli("disk", "add", f"name=ro,format=qcow2,file={base},readonly=on", check=False)
    r.message_of(added, base.name, "in use")
    r.require(second.child.stop() == 0, second.child.tail())
    r.message_of(disk.cli("snapshot", "d0", "--to", rig.dir / "no.qcow2", check=False), job)
    r.message_of(disk.cli("resize", "d0", "64M", check=False), job)
    copying(disk, job)
    disk.cli("job", "cancel", job)
    r.require(disk.shown() == ("qcow2", str(overlay)), f"listed as {disk.shown()}")
    job = disk.cli("commit", "d0", "--speed", "1M").stdout.strip()
    copying(disk, job)
    writer.stop()
    disk.kill()
    again = Disk(rig, overlay, "qcow2", name="cends-again")
    shutil.copy(again.file, rig.dir / "flat.raw")
    point_in_time(rig.dir / "flat.raw", [writer], [len(writer.log)])
    again.cli("commit", "d0", "--speed", "max", "--wait", timeout_s=120)
    again.quit()
    checked(base)
    point_in_time(flat(base, "qcow2", rig.dir / "flat.raw"), [writer], [len(writer.log)])


def test_a_target_that_takes_nothing_at_the_end(rig, mounts):
    """Guests go on in the overlay after 15 s, and the next commit is complete. Two images are files of other daemons: the one that the
    commit writes, and one below it."""
    base = r.Daemon(rig, "--disk", f"name=d0,format=raw,file={m.zeroes(rig.dir / 'base.raw', 1)}", name="base")
    file = rig.dir / "base.mnt"
    base.cli("export", "add", f"type=fuse,name=f0,disk=d0,mountpoint={file},writable=on,growable=on,passthrough=off")
    hanging = m.HangingDisk(rig, "top", file)
    disk, overlay = hanging.disk, rig.dir / "top-over.qcow2"
    disk.snapshot(overlay)
    with open(disk.file, "r+b", buffering=0) as f:
        f.write(b"1" * MIB)
        os.fsync(f.fileno())
    disk.cli("commit", "d0", "--no-finalize", "--speed", "max", "--wait", timeout_s=m.QUIET_S)
    hanging.begin("read")
    argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "finalize", "commit0"]
    with subprocess.Popen([str(a) for a in argv], stderr=subprocess.PIPE, text=True) as finalizing:
        hanging.wait_until_held()
        base.child.suspend()
        hanging.end()
        # It ends while the target still hangs.
        with open(disk.file, "r+b", buffering=0) as f:
            f.write(b"2" * BLOCK)
        base.child.resume()
        _, said = finalizing.communicate(timeout=m.QUIET_S)
    r.require(finalizing.returncode == 1 and "took nothing for 15 s" in said, f"it said {said!r}")
    r.require(disk.shown() == ("qcow2", str(overlay)), f"listed as {disk.shown()}")
    disk.cli("commit", "d0", "--wait", timeout_s=m.QUIET_S)
    r.require(disk.shown() == ("qcow2", str(file)), f"listed as {disk.shown()}")
    with open(disk.file, "rb", buffering=0) as f:
        r.require(f.read(BLOCK) == b"2" * BLOCK and f.read(BLOCK) == b"1" * BLOCK, "the image lacks a write")
    disk.quit()
    base.cli("quit", "--force")
    r.require(base.child.wait() == 0, base.child.tail())
    hanging.below.quit()
