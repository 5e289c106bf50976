"""Tests backup jobs that end early.

The causes are a failed target, `cancel`, the end of the export or of the daemon, and kill -9.
"""

import contextlib
import os
import random
import time

import backup_model as b
import fuse_mount as m
import pytest
import rig as r
from backup_model import MIB, busy, ended, gone_on, part, small

SIZE = b.BUSY_SIZE
KILLS = 8
# So slow that a job of these disks is there until it is ended.
SLOW = ("--speed", "256K")


@pytest.mark.parametrize("kind", ("raw", "qcow2"))
def test_no_space_in_the_target(suite, kind):
    """No room in the target ends the job, and nothing else."""
    mount, writers = busy(suite, f"full-{kind}", kind)
    folder = small(suite)
    for number, form in enumerate(("qcow2", "raw")):
        path = folder / f"full.{form}"
        mount.cli("backup", "start", "d0", "--to", path, "--format", form, "--bitmap", "b0")
        ended(mount, f"backup{number}", path, "No space left")
        r.require(not path.exists() and not part(path).exists(), f"{path} is no backup, and there")
        gone_on(mount, writers)
    # The daemon may close the file a moment later.
    r.wait_for("the room is given back", lambda: os.statvfs(folder).f_bfree > 400)
    # The disk is free for another.
    path = suite.path(f"full-{kind}.good")
    mount.cli("backup", "start", "d0", "--to", path, "--wait")
    b.checked(path)
    writers.stop()
    mount.stop()


def hurry(mount, job):
    """Lets a slow job copy as fast as it can. It may have failed already."""
    mount.cli("job", "speed", job, "max", check=False)


def test_the_target_is_removed_or_replaced(suite):
    """When another process removes or replaces the unfinished file, the job fails, and the
    replacement stays."""
    mount, writers = busy(suite, "removed", "raw")
    for number, replaced in enumerate((False, True)):
        path = suite.path(f"removed.{number}")
        mount.cli("backup", "start", "d0", "--to", path, *SLOW)
        r.require(not path.exists(), "a file that is not whole has the name of a backup")
        part(path).unlink()
        if replaced:
            part(path).write_bytes(b"another's")
        hurry(mount, f"backup{number}")
        ended(mount, f"backup{number}", part(path), "removed")
        r.require(part(path).exists() == replaced and not path.exists(), "another's file was taken for ours")
        gone_on(mount, writers)
    # Another gets the name meanwhile: both stay.
    path = suite.path("removed.taken")
    mount.cli("backup", "start", "d0", "--to", path, "--job", "taken", *SLOW)
    path.write_bytes(b"another's")
    hurry(mount, "taken")
    ended(mount, "taken", path, "come to be", part(path), "whole")
    r.require(path.read_bytes() == b"another's", "another's file was replaced")
    b.checked(part(path))
    refused = mount.cli("backup", "start", "d0", "--to", suite.path("removed.1"), check=False)
    r.message_of(refused, "removed.1.part is there", "may be replaced", code=(1,))
    # A file that is to be replaced stays until the backup is complete, and stays if it fails.
    mount.cli("backup", "start", "d0", "--to", path, "--overwrite", *SLOW, "--job", "cut")
    mount.cli("job", "cancel", "cut")
    r.message_of(mount.cli("job", "wait", "cut", check=False), "cancelled", code=(1,))
    r.require(path.read_bytes() == b"another's" and not part(path).exists(), "a backup that was cancelled replaced another file")
    path.chmod(0o640)
    mount.cli("backup", "start", "d0", "--to", path, "--overwrite", "--wait")
    b.checked(path)
    r.require(path.stat().st_mode & 0o777 == 0o640, "others may read more than they might before")
    writers.stop()
    mount.stop()


def test_a_target_that_hangs(suite):
    """A target completes no request: writes wait for room until the job is given up."""
    size = 48 * MIB
    # The target is a file that another daemon serves, and that daemon is stopped (SIGSTOP).
    below = m.Mount(suite, "hangs-below", image=suite.image("hangs.img", size))
    mount = b.source(suite, "hangs", "ram", size, more=("--disk", f"name=t0,file={below.path}"))
    mount.cli("backup", "start", "d0", "--target", "t0", "--speed", "1M")
    mount.cli("job", "pause", "backup0")
    data = random.Random(7).randbytes(40 * MIB)
    below.child.suspend()
    try:
        # More than the job keeps in memory.
        b.put(mount.path, 0, data)
        b.equal(b.contents(suite, mount.path, "raw")[: len(data)], data, "the disk")
    finally:
        below.child.resume()
    ended(mount, "backup0", "disk t0", "took nothing", "had to wait")
    mount.stop()
    below.stop()


def test_cancel_pause_speed_dismiss(suite):
    """Cancel, pause, resume, speed, dismiss; commands that are refused while the job runs."""
    mount, writers = busy(suite, "commands", "qcow2", more=("--disk", f"name=t0,format=ram,size={SIZE}", "--disk", f"name=d1,format=ram,size={SIZE}"))
    cli, daemon = mount.cli, mount.daemon
    path = suite.path("commands.backup")
    name = cli("backup", "start", "d0", "--target", "t0", *SLOW).stdout
    r.require(name == "backup0\n", f"`backup start` printed {name!r}")
    for arguments, words in (
        (("backup", "start", "d0", "--to", path), ("d0", "job backup0", "cancel")),
        (("backup", "start", "d1", "--target", "t0"), ("t0", "job backup0")),
        (("backup", "start", "t0", "--to", path), ("t0", "job backup0")),
        (("backup", "start", "d1", "--to", path, "--job", "backup0"), ("backup0", "already")),
        (("resize", "d0", "48M"), ("d0", "job backup0")),
        (("resize", "t0", "48M"), ("t0", "job backup0")),
        (("disk", "remove", "t0"), ("t0", "job backup0")),
        (("job", "dismiss", "backup0"), ("backup0", "cancel")),
        (("export", "add", f"type=vhost-user-blk,name=e1,disk=t0,socket={suite.path('e1.sock')}"), ("t0", "job backup0")),
        (("export", "add", f"type=vhost-user-blk,name=backup0,disk=d1,socket={suite.path('e1.sock')}"), ("backup0",)),
    ):
        r.message_of(cli(*arguments, check=False), *words, code=(1,))
    r.require(not path.exists(), "a refused backup made a file")
    # A paused job copies only blocks that are written over. Without writers it copies nothing.
    writers.stop()
    cli("job", "pause", "backup0")
    r.require(b.job(daemon)["status"] == "paused", "a paused job is not shown so")
    r.wait_for("nothing under way", lambda: not any(q["in-flight"] for q in daemon.status()["queues"] if q["export"] == "backup0"))
    done = b.job(daemon)["current-progress"]
    cli("job", "speed", "backup0", "max")
    time.sleep(0.5)
    r.require(b.job(daemon)["current-progress"] == done, "a paused job continues")
    cli("job", "resume", "backup0")
    cli("job", "wait", "backup0")
    shown = b.job(daemon)
    r.require(shown["current-progress"] == shown["total-progress"] == SIZE, f"at its end it is {shown}")
    cli("job", "dismiss", "backup0")
    r.require(b.job(daemon) is None, "a dismissed job is there")
    # It copies no faster than `--speed`, apart from a chunk at the beginning and at the end.
    start = time.monotonic()
    cli("backup", "start", "d0", "--to", path, "--speed", "4M", "--job", "slow")
    time.sleep(1.5)
    r.wait_for("it has copied something", lambda: b.job(daemon, "slow")["current-progress"])
    done, passed = b.job(daemon, "slow")["current-progress"], time.monotonic() - start
    r.require(done <= 4 * MIB * passed + 4 * MIB, f"{done} bytes after {passed:.1f} s at 4 MiB/s")
    cli("job", "cancel", "slow")
    r.require(not path.exists(), "a cancelled backup's file is there")
    r.message_of(cli("job", "wait", "slow", check=False), "slow was cancelled", code=(1,))
    r.require("cancelled" in cli("job", "list").stdout, "`job list` does not show what was cancelled")
    mount.stop()


def test_the_export_goes_while_a_job_runs(suite):
    """The export is removed while a job runs. The job completes with the disk as it was at its
    start, and the disk cannot be removed before."""
    mount, writers = busy(suite, "goes", "raw")
    path = suite.path("goes.backup")
    # Before the writers' errors.
    writers.stop()
    was = b.contents(suite, mount.path, "raw")
    mount.cli("backup", "start", "d0", "--to", path, *SLOW)
    b.put(mount.path, SIZE - MIB, bytes(MIB))
    mount.cli("export", "remove", "f0")
    r.message_of(mount.cli("disk", "remove", "d0", check=False), "d0", "job backup0", code=(1,))
    again = f"type=fuse,name=f1,disk=d0,mountpoint={mount.path},writable=on"
    mount.cli("export", "add", again)
    b.put(mount.path, SIZE - 2 * MIB, bytes(MIB))
    hurry(mount, "backup0")
    mount.cli("job", "wait", "backup0")
    b.equal(b.contents(suite, path, "qcow2"), was, "the backup")
    mount.cli("export", "remove", "f1")
    mount.cli("disk", "remove", "d0")
    mount.stop()


@pytest.mark.parametrize("how", ("quit", "SIGTERM"))
def test_the_daemon_ends_while_a_job_runs(suite, how):
    """`quit` or SIGTERM while a job runs and guests' writes wait: the daemon ends soon, and leaves
    no backup."""
    mount, writers = busy(suite, f"goes-{how}", "qcow2")
    path = suite.path(f"goes-{how}.backup")
    mount.cli("backup", "start", "d0", "--to", path, *SLOW)
    gone_on(mount, writers)
    writers.stop()
    if how == "quit":
        mount.cli("quit", "--force")
    else:
        mount.child.process.terminate()
    code = mount.child.wait(r.WAIT_S)
    r.require(code == 0, f"the daemon ended with {code}: {mount.child.tail()}")
    r.require(not path.exists() and not part(path).exists(), "a backup that was cut short is there")
    b.checked(mount.image)


@pytest.mark.parametrize("kind", ("raw", "qcow2"))
def test_kill_9_in_the_middle_of_backups(suite, kind, rand):
    """After kill -9 in the middle of backups the disk has all synced writes, and the next daemon
    serves it."""
    name = f"killed-{kind}"
    mount = b.source(suite, name, kind, SIZE)
    b.put(mount.path, 0, rand.randbytes(SIZE))
    path = suite.path(f"{name}.backup")
    fd = os.open(mount.path, os.O_RDWR)
    os.fsync(fd)
    synced = {}
    for kill in range(KILLS):
        more = ("--compress",) if kill % 2 else ()
        mount.cli("backup", "start", "d0", "--to", path, "--overwrite", "--speed", "16M", "--bitmap", "b0", *more)
        end = time.monotonic() + rand.uniform(0.0, 0.8)
        written = {}
        while time.monotonic() < end:
            block, value = rand.randrange(SIZE // b.BLOCK), rand.randrange(1, 256)
            os.pwrite(fd, bytes([value]) * b.BLOCK, block * b.BLOCK)
            written[block] = value
            synced.pop(block, None)
            if rand.random() < 0.1:
                os.fsync(fd)
                synced.update(written)
                written = {}
        mount.child.kill()
        with contextlib.suppress(OSError):
            os.close(fd)
        if kind == "qcow2":
            b.checked(mount.image, leaks=True)
        if path.exists():
            b.checked(path)
        mount.start()
        fd = os.open(mount.path, os.O_RDWR)
        for block, value in synced.items():
            got = os.pread(fd, b.BLOCK, block * b.BLOCK)
            r.require(got == bytes([value]) * b.BLOCK, f"kill {kill + 1}: block {block} is {got[:4]!r}, not {value}")
    os.close(fd)
    was = b.contents(suite, mount.path, "raw")
    mount.cli("backup", "start", "d0", "--to", path, "--overwrite", "--wait")
    b.equal(b.contents(suite, path, "qcow2"), was, "the backup after the kills")
    mount.stop()
