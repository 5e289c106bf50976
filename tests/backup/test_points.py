"""Tests that a backup has the contents of the disk at one point in time.

Guests write and queues move during the backup.
"""

import time

import backup_model as b
import pytest
import rig as r
from backup_model import MIB, load_argv

SIZE = b.BUSY_SIZE
THREADS = 4
# The writers' part of the disk; the rest stays as it is.
BUSY = 8 * MIB
LOAD_S = 3
LOAD_SIZE = 64 * MIB
# So slow that writers meet blocks that are not copied yet.
SPEED = "16M"

# What is backed up, how, and whether the writes are unaligned.
POINTS = (
    ("raw", "qcow2", False),
    ("raw", "raw", True),
    ("raw", "disk", False),
    ("memory", "qcow2", True),
    ("memory", "compressed", False),
    ("qcow2", "qcow2", False),
    ("qcow2", "compressed", True),
    ("qcow2", "disk", False),
    ("ram", "raw", False),
    ("ram", "qcow2", True),
)


def target(suite, name, to):
    """Path and format of a backup's target, and the arguments that name it."""
    if to == "disk":
        return b.create(suite.path(f"{name}.target"), SIZE), "qcow2", ["--target", "t0"]
    form = "raw" if to == "raw" else "qcow2"
    path = suite.path(f"{name}.backup")
    return path, form, ["--to", path, "--format", form, *(["--compress"] if to == "compressed" else [])]


@pytest.mark.parametrize("kind, to, unaligned", POINTS)
def test_point_in_time(suite, kind, to, unaligned):
    """The backup has the first N writes of each writer, and all that the writers do not touch."""
    name = f"point-{kind}-{to}"
    path, form, arguments = target(suite, name, to)
    more = ("--disk", f"name=t0,format=qcow2,file={path}") if to == "disk" else ()
    mount = b.source(suite, name, kind, SIZE, more=more, queues=3)
    still, writers = b.begin_point(mount, name, BUSY, THREADS, unaligned)
    before = list(writers.counts)
    mount.cli("backup", "start", "d0", *arguments, "--speed", SPEED)
    after = list(writers.counts)
    # Blocks that the job has not copied yet are written over.
    writers.wait_each(40)
    mount.cli("job", "wait", "backup0")
    b.end_point(suite, mount, path, form, still, writers, before, after)


@pytest.mark.parametrize("kind", ("raw", "qcow2"))
def test_verified_load_over_vhost_user_on_queues_that_move(suite, kind):
    """Verified load by four queues, which move, as the job's queue does. At the end a backup is
    served and verified."""
    name = f"load-{kind}"
    image = b.create(suite.path(f"{name}.qcow2"), LOAD_SIZE) if kind == "qcow2" else suite.image(f"{name}.img", LOAD_SIZE)
    socket, state = suite.path(f"{name}.sock"), suite.path(f"{name}.state")
    form = "qcow2" if kind == "qcow2" else "raw"
    daemon = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,format={form},file={image}"),
        *("--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={socket},queues=4,workers=per-queue"),
        name=name,
    )
    load = r.Child(suite.rig, f"{name}.load", load_argv(socket, "--runtime", r.FOREVER, "--state", state))
    r.wait_for("the load's first requests", lambda: sum(q["requests"] for q in daemon.status()["queues"]))
    moves = backups = job_moves = 0
    end = time.monotonic() + LOAD_S
    while load.running() and (time.monotonic() < end or moves <= 3 or not job_moves):
        if all(j["status"] == "concluded" for j in daemon.status()["jobs"]):
            daemon.cli("backup", "start", "d0", "--to", suite.path(f"{name}.{backups}"), "--job", f"j{backups}", "--speed", "32M")
            backups += 1
        own = [q for q in daemon.status()["queues"] if q["export"] == f"j{backups - 1}"]
        r.require(len(own) <= 1, f"the job's queues are {own}")
        daemon.attach(f"e0:{moves % 4}", (moves * 3 + 1) % 4)
        # It may have ended in between.
        if own and daemon.cli("attach", f"j{backups - 1}:0", str(moves % 4), check=False).returncode == 0:
            job_moves += 1
        moves += 1
        time.sleep(0.01)
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    for number in range(backups):
        daemon.cli("job", "wait", f"j{number}", timeout_s=120)
        b.checked(suite.path(f"{name}.{number}"))
    # Without writers, the backup equals the disk.
    last = suite.path(f"{name}.last")
    daemon.cli("backup", "start", "d0", "--to", last, "--wait", "--compress")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
    served = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,format=qcow2,file={last}"),
        *("--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={socket}"),
        name=f"{name}-restored",
    )
    r.run([r.binary("vshunt-bench"), "verify", "--socket", socket, "--state", state], timeout_s=120)
    r.require(served.child.stop() == 0, served.child.tail())
    suite.rig.say(f"{kind}: {backups} backups, {moves} moves, {job_moves} of a job's queue")
    for path in (image, last, *(suite.path(f"{name}.{n}") for n in range(backups))):
        path.unlink()
