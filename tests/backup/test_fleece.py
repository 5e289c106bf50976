"""Tests backups with a fleecing file, which keeps what guests overwrite until it is copied."""

import json
import os
import random
import time

import backup_model as b
import fuse_mount as m
import pytest
import rig as r
from backup_model import MIB, busy, ended, gone, gone_on, load_argv, open_files, part, small

SIZE = b.BUSY_SIZE
LOAD_SIZE = 64 * MIB
# So slow that a job of these disks is there until it is ended.
SLOW = ("--speed", "256K")
BUSY = 8 * MIB
THREADS = 4


# What is backed up, how, whether the writes are unaligned, and whether the fleecing file is in
# memory.
POINTS = (
    ("raw", "qcow2", False, True),
    ("raw", "raw", True, False),
    ("memory", "compressed", True, True),
    ("qcow2", "qcow2", False, False),
    ("ram", "raw", False, False),
)


@pytest.mark.parametrize("kind, to, unaligned, in_memory", POINTS)
def test_point_in_time(suite, kind, to, unaligned, in_memory):
    """The backup has the first N writes of each writer, and all that the writers do not touch. At
    first nothing else is copied, so that the fleecing file has what the writers overwrite."""
    name = f"fleece-{kind}-{to}"
    path = suite.path(f"{name}.backup")
    fleece = (suite.memory if in_memory else suite.rig.dir) / f"{name}.fleece"
    form = "raw" if to == "raw" else "qcow2"
    mount = b.source(suite, name, kind, SIZE, queues=3)
    still, writers = b.begin_point(mount, name, BUSY, THREADS, unaligned)
    before = list(writers.counts)
    more = ("--compress",) if to == "compressed" else ()
    mount.cli("backup", "start", "d0", "--to", path, "--format", form, "--fleece", fleece, "--speed", "64K", *more)
    after = list(writers.counts)
    mount.cli("job", "pause", "backup0")
    writers.wait_each(60)
    shown = b.job(mount.daemon)
    r.require(shown["fleece"] == str(fleece) and shown["fleece-bytes"] > 0, f"nothing was kept: {shown}")
    r.require(shown["fleece-bytes"] <= SIZE, f"more than the disk is kept: {shown}")
    mount.cli("job", "speed", "backup0", "16M")
    mount.cli("job", "resume", "backup0")
    writers.wait_each(40)
    mount.cli("job", "wait", "backup0")
    gone(mount.daemon, fleece)
    b.end_point(suite, mount, path, form, still, writers, before, after)


def test_a_point_under_verified_load(suite):
    """Verified load by four queues which move, as the job's queue does. The first half of the load
    ends before the backup, so the backup has exactly that half."""
    name = "fleece-load"
    image, socket = suite.image(f"{name}.img", LOAD_SIZE), suite.path(f"{name}.sock")
    state = suite.path(f"{name}.state")
    daemon = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,file={image}"),
        *("--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={socket},queues=4,workers=per-queue"),
        name=name,
    )
    first = r.Child(suite.rig, f"{name}.first", load_argv(socket, "--runtime", "2s", "--state", state))
    r.require(first.wait(r.WAIT_S) == 0, f"the load failed: {first.tail()}")
    path, fleece = suite.path(f"{name}.backup"), suite.memory / f"{name}.fleece"
    daemon.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, "--job", "j0", *SLOW)
    second = r.Child(suite.rig, f"{name}.second", load_argv(socket, "--runtime", r.FOREVER, "--seed", "2"))
    moves = job_moves = peak = 0
    is_slow = True
    while (job := b.job(daemon, "j0"))["status"] != "concluded":
        r.require(second.running(), f"the load ended: {second.tail()}")
        peak = max(peak, job.get("fleece-bytes", 0))
        daemon.attach(f"e0:{moves % 4}", (moves * 3 + 1) % 4)
        # It may have ended in between.
        job_moves += daemon.cli("attach", "j0:0", str(moves % 4), check=False).returncode == 0
        moves += 1
        if is_slow and peak and job_moves:
            daemon.cli("job", "speed", "j0", "8M")
            is_slow = False
    daemon.cli("job", "wait", "j0")
    r.require(second.interrupt() == 0, f"the load failed: {second.tail()}")
    r.require(peak and job_moves, f"{peak} bytes were kept, the job's queue moved {job_moves} times")
    gone(daemon, fleece)
    r.require(daemon.child.stop() == 0, daemon.child.tail())
    b.checked(path)
    served = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,format=qcow2,file={path}"),
        *("--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={socket}"),
        name=f"{name}-restored",
    )
    r.run([r.binary("vshunt-bench"), "verify", "--socket", socket, "--state", state], timeout_s=120)
    r.require(served.child.stop() == 0, served.child.tail())
    suite.rig.say(f"{peak // MIB} MiB were kept, {moves} moves, {job_moves} of the job's queue")


def test_incremental_backups(suite):
    """A chain of incremental backups, each with a fleecing file that is written to meanwhile."""
    disk = b.Disk(suite, "fleece-chain", "qcow2")
    paths = [suite.path(f"fleece-chain.{n}") for n in range(4)]
    fleece = suite.path("fleece-chain.fleece")
    was = []
    for number, path in enumerate(paths):
        more = ("--incremental", "b0", "--backing", paths[number - 1]) if number else ("--bitmap", "b0")
        was.append(bytes(disk.data))
        disk.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, *more, "--job", f"j{number}", *SLOW)
        disk.cli("job", "pause", f"j{number}")
        disk.change()
        if number == 0:
            r.require(b.job(disk.mount.daemon, "j0")["fleece-bytes"] > 0, "nothing was kept")
        disk.cli("job", "speed", f"j{number}", "max")
        disk.cli("job", "resume", f"j{number}")
        disk.cli("job", "wait", f"j{number}")
    for path, data in zip(paths, was):
        b.checked(path)
        b.equal(b.contents(suite, path, "qcow2"), data, path.name)
    gone(disk.mount.daemon, fleece)
    disk.mount.stop()


def test_no_space_for_the_fleecing_file(suite):
    """No room in the fleecing file ends the job with one sentence. Guests notice nothing, and
    nothing is left behind."""
    mount, writers = busy(suite, "fleece-full", "raw")
    folder = small(suite)
    room = os.statvfs(folder).f_bfree
    path, fleece = suite.path("fleece-full.backup"), folder / "fleece"
    # On a slow disk the writers need minutes to fill the file. The job must not end before.
    mount.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, "--bitmap", "b0", "--speed", "16K")
    ended(mount, "backup0", fleece, "No space left", "--fleece")
    text = b.job(mount.daemon)["error"]
    r.require("target" not in text and text.count(";") == 1, f"it says: {text}")
    r.require(not path.exists() and not part(path).exists(), "a backup that failed is there")
    gone_on(mount, writers)
    gone(mount.daemon, fleece)
    r.wait_for("the room is given back", lambda: os.statvfs(folder).f_bfree >= room)
    mount.cli("backup", "start", "d0", "--to", path, "--wait")
    b.checked(path)
    writers.stop()
    mount.stop()


def test_cancel_and_quit(suite):
    """After cancel, and after the end of the daemon, there is neither a backup nor a fleecing
    file. What is copied is freed in the file."""
    mount, writers = busy(suite, "fleece-ends", "qcow2")
    path, fleece = suite.path("fleece-ends.backup"), suite.memory / "fleece-ends"
    mount.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, *SLOW)
    r.wait_for("something is kept", lambda: b.job(mount.daemon)["fleece-bytes"])
    r.require(not fleece.exists() and open_files(mount.daemon, fleece), "the fleecing file has a name")
    mount.cli("job", "cancel", "backup0")
    r.message_of(mount.cli("job", "wait", "backup0", check=False), "cancelled", code=(1,))
    gone_on(mount, writers)
    gone(mount.daemon, fleece)
    r.require(not path.exists() and not part(path).exists(), "a cancelled backup is there")
    mount.cli("job", "dismiss", "backup0")
    # The same name serves again. Without writers the file becomes empty before the job ends.
    mount.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, "--job", "j1", *SLOW)
    mount.cli("job", "pause", "j1")
    gone_on(mount, writers)
    writers.stop()
    kept = b.job(mount.daemon, "j1")["fleece-bytes"]
    r.require(kept and b.job(mount.daemon, "j1")["current-progress"] < SIZE, "nothing is kept")
    mount.cli("job", "speed", "j1", "8M")
    mount.cli("job", "resume", "j1")
    r.wait_for("all that was kept is copied", lambda: not b.job(mount.daemon, "j1").get("fleece-bytes"))
    mount.cli("job", "cancel", "j1")
    mount.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, "--job", "j2", *SLOW)
    mount.cli("quit", "--force")
    code = mount.child.wait(r.WAIT_S)
    r.require(code == 0, f"the daemon ended with {code}: {mount.child.tail()}")
    r.require(not any(p.exists() for p in (path, part(path), fleece)), "something is left behind")
    b.checked(mount.image)


def test_kill_9(suite, rand):
    """After kill -9 no fleecing file is left, the disk has all synced writes, and the same command
    works again."""
    mount = b.source(suite, "fleece-kill", "raw", SIZE)
    b.put(mount.path, 0, rand.randbytes(SIZE))
    path, fleece = suite.path("fleece-kill.backup"), suite.path("fleece-kill.fleece")
    for _ in range(4):
        mount.cli("backup", "start", "d0", "--to", path, "--overwrite", "--fleece", fleece, "--speed", "16M")
        with m.Opened(mount.path) as fd:
            written = {}
            end = time.monotonic() + rand.uniform(0.0, 0.6)
            while time.monotonic() < end or not written:
                block, value = rand.randrange(SIZE // b.BLOCK), rand.randrange(1, 256)
                os.pwrite(fd, bytes([value]) * b.BLOCK, block * b.BLOCK)
                written[block] = value
            os.fsync(fd)
        mount.child.kill()
        r.require(not fleece.exists(), "a fleecing file is left behind")
        mount.start()
        with m.Opened(mount.path) as fd:
            for block, value in written.items():
                r.require(os.pread(fd, b.BLOCK, block * b.BLOCK) == bytes([value]) * b.BLOCK, f"block {block} is lost")
    was = b.contents(suite, mount.path, "raw")
    mount.cli("backup", "start", "d0", "--to", path, "--overwrite", "--fleece", fleece, "--wait")
    b.equal(b.contents(suite, path, "qcow2"), was, "the backup after the kills")
    mount.stop()


def test_two_jobs_at_once(suite):
    """Two disks are backed up at once, each with its fleecing file in the same folder."""
    mounts = [busy(suite, f"fleece-two{n}", "raw") for n in range(2)]
    more = []
    for number, (mount, writers) in enumerate(mounts):
        writers.stop()
        was = b.contents(suite, mount.path, "raw")
        more.append((mount, was, suite.path(f"fleece-two{number}.backup"), suite.memory / f"fleece-two{number}"))
    for mount, _, path, fleece in more:
        mount.cli("backup", "start", "d0", "--to", path, "--fleece", fleece, "--speed", "16M")
        mount.cli("disk", "add", f"name=d1,format=ram,size={MIB}")
        mount.cli("backup", "start", "d1", "--to", f"{path}.d1", "--fleece", fleece, "--job", "other", "--wait")
    for number, (mount, _, _, _) in enumerate(more):
        b.put(mount.path, 4 * MIB, random.Random(number).randbytes(8 * MIB))
    for mount, was, path, fleece in more:
        mount.cli("job", "wait", "backup0")
        b.equal(b.contents(suite, path, "qcow2"), was, path.name)
        gone(mount.daemon, fleece)
        mount.stop()


def test_paths_that_are_refused(suite):
    """A file that exists, a folder, a path that leads nowhere: nothing is touched or left."""
    image = suite.image("fleece-refused.img", MIB)
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,file={image}", name="fleece-refused")
    folder = suite.path("fleece-refused.d")
    folder.mkdir()
    here, to = folder / "here", folder / "to"
    here.write_bytes(b"not yours")
    (folder / "link").symlink_to(here)
    for fleece, words in (
        (here, (here, "already", "--fleece", "another name")),
        (folder, (folder, "already")),
        (folder / "link", ("link", "already")),
        (folder / "no" / "fleece", (folder / "no" / "fleece", "No such file")),
    ):
        for more in ((), ("--overwrite",)):
            done = daemon.cli("backup", "start", "d0", "--to", to, "--fleece", fleece, *more, check=False)
            r.message_of(done, *words, code=(1,))
    # The target is refused after the fleecing file was made.
    fleece = folder / "fleece"
    done = daemon.cli("backup", "start", "d0", "--to", here, "--fleece", fleece, check=False)
    r.message_of(done, here, "already", code=(1,))
    left = sorted(p.name for p in folder.iterdir())
    r.require(left == ["here", "link"] and here.read_bytes() == b"not yours", f"left behind is {left}")
    r.require(daemon.status()["jobs"] == [] and not open_files(daemon, fleece), "a refused backup has a job or a file")
    arguments = {"disk": "d0", "to": str(to), "fleece": str(fleece), "job": "j0"}
    daemon.cli("qmp", "backup-start", json.dumps(arguments))
    daemon.cli("job", "wait", "j0")
    gone(daemon, fleece)
    r.require(daemon.child.stop() == 0, daemon.child.tail())
