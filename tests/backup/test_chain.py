"""Tests chains of incremental backups that use dirty bitmaps, also over QMP."""

import json
import os

import backup_model as b
import pytest
import rig as r
from backup_model import MIB, SIZE, Disk, small


@pytest.mark.parametrize("kind", ("raw", "qcow2", "ram"))
def test_full_and_three_incremental_backups(suite, kind):
    """Full, three rounds of incremental ones, each of which is the disk as it was."""
    name = f"chain-{kind}"
    disk = Disk(suite, name, kind)
    paths = [suite.path(f"{name}.{n}") for n in range(4)]
    disk.backup("--to", paths[0], "--bitmap", "b0")
    r.require(b.bitmap(disk.mount.daemon)["count"] == 0, "the bitmap does not restart")
    was = [bytes(disk.data)]
    for below, path in zip(paths, paths[1:]):
        disk.change()
        r.require(b.bitmap(disk.mount.daemon)["count"] > 0, "the bitmap has not seen a write")
        # The names of files below are the user's as they were given, from wherever that was.
        disk.backup("--to", path, "--incremental", "b0", "--backing", os.path.relpath(below))
        was.append(bytes(disk.data))
    disk.change()
    for path, data in zip(paths, was):
        b.checked(path)
        b.equal(b.contents(suite, path, "qcow2"), data, path.name)
    sizes = [path.stat().st_blocks * 512 for path in paths]
    r.require(all(size < sizes[0] for size in sizes[1:]), f"what is incremental is as large as what is full: {sizes}")
    disk.mount.stop()


def test_an_incremental_backup_onto_the_disk_with_the_one_before(suite):
    """An incremental backup onto the disk that holds the one before."""
    target = b.create(suite.path("onto.target"), SIZE)
    disk = Disk(suite, "onto", "raw", more=("--disk", f"name=t0,format=qcow2,file={target}"))
    disk.backup("--target", "t0", "--bitmap", "b0")
    for _ in range(2):
        disk.change()
        disk.backup("--target", "t0", "--incremental", "b0")
    was = bytes(disk.data)
    disk.change()
    disk.mount.stop()
    b.checked(target)
    b.equal(b.contents(suite, target, "qcow2"), was, "the disk that was copied to")


@pytest.mark.parametrize("kind", ("raw", "qcow2"))
def test_nothing_is_missed_after_backups_that_failed(suite, kind):
    """After a cancelled and after a failed backup the bitmap has all blocks that were dirty before,
    and those written meanwhile."""
    name = f"missed-{kind}"
    disk = Disk(suite, name, kind)
    full, nothing, last = (suite.path(f"{name}.{n}") for n in ("full", "nothing", "last"))
    disk.backup("--to", full, "--bitmap", "b0")
    disk.change()
    for how in ("cancelled", "failed"):
        dirty = b.bitmap(disk.mount.daemon)["count"]
        if how == "cancelled":
            where, more = nothing, ("--speed", "64K")
        else:
            where, more = small(suite) / name, ("--job", "fails")
            # More than the target takes.
            disk.write(8 * MIB, disk.rng.randbytes(3 * MIB))
        done = disk.cli("backup", "start", "d0", "--to", where, "--incremental", "b0", "--backing", full, *more)
        job = done.stdout.strip()
        # Writes over dirty and over clean blocks while the job runs.
        disk.change()
        if how == "cancelled":
            busy = b.bitmap(disk.mount.daemon)
            r.require(busy["busy"], f"the bitmap of a job is {busy}")
            for command in (("clear",), ("remove",), ("disable",)):
                r.message_of(disk.cli("bitmap", *command, "d0", "b0", check=False), "b0", "in use by job", job, code=(1,))
            disk.cli("bitmap", "add", "d0", "other")
            r.message_of(disk.cli("bitmap", "merge", "d0", "other", "b0", check=False), "b0", "in use by job", job, code=(1,))
            disk.cli("bitmap", "remove", "d0", "other")
            disk.cli("job", "cancel", job)
        r.message_of(disk.cli("job", "wait", job, check=False), job, how if how == "failed" else "cancelled", code=(1,))
        r.require(not where.exists(), f"{where} is no backup, and there")
        seen = b.bitmap(disk.mount.daemon)
        r.require(seen["count"] >= dirty and not seen["busy"], f"{dirty} bytes were dirty; after a {how} backup it is {seen}")
    disk.backup("--to", last, "--incremental", "b0", "--backing", full, "--job", "last")
    b.equal(b.contents(suite, last, "qcow2"), bytes(disk.data), "the backup after those that failed")
    # One that was to begin a bitmap and failed leaves none.
    disk.cli("backup", "start", "d0", "--to", nothing, "--bitmap", "b1", "--speed", "64K", "--job", "n0")
    disk.cli("job", "cancel", "n0")
    r.require(b.bitmap(disk.mount.daemon, "b1") is None, "a bitmap of a cancelled backup stays")
    disk.mount.stop()


def test_bitmaps_merge_disable_clear_resize(suite):
    """Merged, disabled, cleared, of their own granularity; the disk's size may change."""
    disk = Disk(suite, "bitmaps", "raw")
    cli, daemon = disk.cli, disk.mount.daemon
    cli("bitmap", "add", "d0", "fine", "--granularity", "4K")
    cli("bitmap", "add", "d0", "off", "--disabled")
    disk.write(5 * MIB, b"x" * 4096)
    r.require(b.bitmap(daemon, "fine")["count"] == 4096, f"one block was written: {b.bitmap(daemon, 'fine')}")
    r.require(b.bitmap(daemon, "off")["count"] == 0, "a disabled bitmap recorded a write")
    cli("bitmap", "enable", "d0", "off")
    disk.write(9 * MIB, b"y" * 100)
    cli("bitmap", "disable", "d0", "fine")
    disk.write(11 * MIB, b"z" * 100)
    seen = [b.bitmap(daemon, n)["count"] for n in ("fine", "off")]
    r.require(seen == [8192, 2 * 65536], f"dirty are {seen} bytes")
    cli("bitmap", "merge", "d0", "fine", "off")
    r.require(b.bitmap(daemon, "fine")["count"] == 4096 + 2 * 65536, f"merged it is {b.bitmap(daemon, 'fine')}")
    cli("bitmap", "clear", "d0", "off")
    cli("resize", "d0", str(SIZE + MIB))
    grown = b.bitmap(daemon, "off")["count"]
    r.require(grown == MIB, f"the disk grew by 1 MiB, of which {grown} bytes are dirty")
    for name in ("fine", "off"):
        cli("bitmap", "remove", "d0", name)
    r.require("fine" not in cli("bitmap", "list").stdout, "a removed bitmap is listed")
    disk.mount.stop()


STATES = ("running", "pending", "concluded")


def test_by_qmp_and_its_events(suite):
    """With the commands of QEMU's storage daemon: targets, jobs, bitmaps, events."""
    disk = Disk(suite, "qmp", "raw")
    qmp = b.Qmp(disk.mount.daemon)
    for number in range(2):
        file = {"driver": "file", "filename": str(b.create(suite.path(f"qmp.{number}"), SIZE))}
        qmp.call("blockdev-add", driver="qcow2", node_name=f"t{number}", file=file)
    qmp.call("block-dirty-bitmap-add", node="d0", name="b0", granularity=65536)
    qmp.call("blockdev-backup", job_id="full", device="d0", target="t0", sync="full", auto_dismiss=False)
    event = qmp.until("BLOCK_JOB_COMPLETED", "full")["data"]
    r.require((event["type"], event["len"], event["offset"]) == ("backup", SIZE, SIZE), f"the event is {event}")
    story = qmp.story("full")
    r.require(story == [*STATES, "BLOCK_JOB_COMPLETED"], f"a full backup's story is {story}")
    (listed,) = qmp.call("query-block-jobs")
    r.require((listed["device"], listed["status"], listed["len"]) == ("full", "concluded", SIZE), f"it is {listed}")
    qmp.call("job-dismiss", id="full")
    r.require(qmp.call("query-jobs") == [], "a dismissed job is listed")
    was = [bytes(disk.data)]
    # t1 gets the contents of t0. The bitmap says where the disk differs.
    qmp.call("blockdev-backup", job_id="again", device="d0", target="t1", sync="full")
    qmp.until("BLOCK_JOB_COMPLETED", "again")
    r.require(qmp.call("query-jobs") == [], "a job that dismisses itself is listed")
    qmp.call("block-dirty-bitmap-clear", node="d0", name="b0")
    disk.change()
    qmp.call("blockdev-backup", job_id="inc", device="d0", target="t1", sync="incremental", bitmap="b0", speed=1 << 30)
    end = qmp.until("BLOCK_JOB_COMPLETED", "inc")["data"]
    r.require("error" not in end and 0 < end["len"] < SIZE, f"the event is {end}")
    was.append(bytes(disk.data))
    disk.change()
    # Cancelled, by QEMU's other names.
    qmp.call("blockdev-backup", job_id="slow", device="d0", target="t0", sync="full", speed=65536)
    qmp.call("block-job-pause", device="slow")
    r.require(qmp.call("query-block-jobs")[0]["paused"], "a paused job is not shown so")
    qmp.call("block-job-resume", device="slow")
    qmp.call("block-job-set-speed", device="slow", speed=100000)
    r.require(qmp.call("query-block-jobs")[0]["speed"] == 100000, "another speed is shown")
    qmp.call("blockdev-del", node_name="t0", error="in use by job slow")
    qmp.call("block-job-cancel", device="slow")
    qmp.until("BLOCK_JOB_CANCELLED", "slow")
    story = qmp.story("slow")
    r.require(story == ["running", "paused", "running", "aborting", "concluded", "BLOCK_JOB_CANCELLED"], f"its story is {story}")
    for name in ("block-dirty-bitmap-disable", "block-dirty-bitmap-enable"):
        qmp.call(name, node="d0", name="b0")
    qmp.call("block-dirty-bitmap-add", node="d0", name="b1")
    qmp.call("block-dirty-bitmap-merge", node="d0", target="b1", bitmaps=["b0", {"node": "d0", "name": "b0"}])
    nodes = {x["name"]: x["count"] for x in json.loads(disk.cli("bitmap", "list", "--json").stdout)}
    r.require(nodes["b1"] >= nodes["b0"] > 0, f"dirty are {nodes}")
    qmp.call("block-dirty-bitmap-remove", node="d0", name="b1")
    refused_by_qmp(qmp)
    qmp.call("blockdev-del", node_name="t1")
    b.equal(b.contents(suite, suite.path("qmp.1"), "qcow2"), was[1], "the incremental backup")
    disk.mount.stop()


def refused_by_qmp(qmp):
    """Arguments that only QEMU has are refused by name."""
    for more, word in (
        ({"sync": "top"}, "sync"),
        ({"sync": "incremental"}, "bitmap"),
        ({"sync": "bitmap", "bitmap": "b0"}, "bitmap-mode"),
        ({"sync": "bitmap", "bitmap": "b0", "bitmap_mode": "never"}, "bitmap-mode"),
        ({"sync": "full", "bitmap": "b0"}, "bitmap"),
        ({"sync": "full", "compress": True}, "compress"),
        ({"sync": "full", "on_target_error": "stop"}, "on-target-error"),
        ({"sync": "full", "filter_node_name": "f"}, "filter-node-name"),
        ({"sync": "full", "job_id": "a b"}, "job name"),
    ):
        qmp.call("blockdev-backup", device="d0", target="t1", error=word, **more)
    qmp.call("blockdev-backup", device="d0", target="none", sync="full", error="none")
    qmp.call("job-cancel", id="none", error="there is no job none")
    qmp.call("block-dirty-bitmap-clear", node="d0", name="none", error="has no bitmap none")
