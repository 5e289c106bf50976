"""Tests kill -9 at random points of a snapshot, and of a commit."""

import os
import subprocess
import time

import rig as r
from snapshot_model import BLOCK, Disk, checked, image, write_synced

# How often the daemon is killed.
SNAPSHOTS, COMMITS = 10, 8


def test_kill_9_of_a_snapshot(rig, mounts, marks, rand):
    """After kill -9 at random points of a snapshot the disk is complete, by one of its two names."""
    path, form = image(rig, "killed", "raw"), "raw"
    synced, refusals = {}, 0
    for turn in range(SNAPSHOTS):
        disk = Disk(rig, path, form, name=f"killed{turn}")
        with open(disk.file, "r+b", buffering=0) as f:
            for block, value in synced.items():
                got = os.pread(f.fileno(), BLOCK, block * BLOCK)
                r.require(got == bytes([value]) * BLOCK, f"turn {turn}: block {block} is {got[:2]!r}, not {value}")
        write_synced(disk.file, rand, synced)
        to = rig.dir / f"killed-{turn}.qcow2"
        command = [r.binary("vshunt"), "-c", disk.daemon.control, "snapshot", "d0", "--to", to]
        cli = subprocess.Popen([str(a) for a in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        r.wait_for("the overlay is begun", lambda c=cli, t=to: t.exists() or c.poll() is not None, every_s=0.001)
        time.sleep(rand.random() * rand.choice((0.005, 0.05, 0.5)))
        disk.kill()
        cli.wait(r.WAIT_S)
        # The old name first, as a user would. It is refused only if the overlay has all writes.
        argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,format={form},file={path}", "--control", rig.dir / f"try{turn}.ctl"]
        child = r.Child(rig, f"try{turn}", argv)
        r.wait_for("it serves or ends", lambda c=child: not c.running() or "serving" in c.output())
        if child.running():
            r.require(child.stop() == 0, child.tail())
            to.unlink(missing_ok=True)
        else:
            r.require(to.name in child.output() and "overlay" in child.output(), child.tail())
            refusals += 1
            path, form = to, "qcow2"
        if form == "qcow2":
            checked(path, leaks=True)
    disk = Disk(rig, path, form, name="killed-last")
    with open(disk.file, "rb", buffering=0) as f:
        for block, value in synced.items():
            got = os.pread(f.fileno(), BLOCK, block * BLOCK)
            r.require(got == bytes([value]) * BLOCK, f"at the end block {block} is {got[:2]!r}, not {value}")
    disk.quit()
    if form == "qcow2":
        checked(path, leaks=True)
    rig.say(f"{refusals} of {SNAPSHOTS} came after the switch")


def test_kill_9_of_a_commit(rig, mounts, marks, rand):
    """After kill -9 at random points of a commit the disk has all writes, by one of its two names."""
    base, synced, switched = image(rig, "ckill", "raw"), {}, 0
    path, form = base, "raw"
    for turn in range(COMMITS):
        disk = Disk(rig, path, form, name=f"ckill{turn}")
        if form == "raw":
            overlay = rig.dir / f"ckill-{turn}.qcow2"
            disk.snapshot(overlay)
        write_synced(disk.file, rand, synced)
        disk.cli("commit", "d0", "--speed", "max")
        time.sleep(rand.random() * rand.choice((0.02, 0.1, 0.4)))
        disk.kill()
        # The overlay first. It is refused only if the image below has all writes.
        argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,format=qcow2,file={overlay}", "--control", rig.dir / f"ctry{turn}.ctl"]
        child = r.Child(rig, f"ctry{turn}", argv)
        r.wait_for("it serves or ends", lambda c=child: not c.running() or "serving" in c.output())
        if child.running():
            r.require(child.stop() == 0, child.tail())
            path, form = overlay, "qcow2"
            checked(path, leaks=True)
        else:
            r.require("committed" in child.output(), child.tail())
            switched += 1
            path, form = base, "raw"
        disk = Disk(rig, path, form, name=f"clook{turn}")
        with open(disk.file, "rb", buffering=0) as f:
            for block, value in synced.items():
                got = os.pread(f.fileno(), BLOCK, block * BLOCK)
                r.require(got == bytes([value]) * BLOCK, f"turn {turn}: block {block} is {got[:2]!r}, not {value}")
        disk.quit()
    rig.say(f"{switched} of {COMMITS} came after the switch")
