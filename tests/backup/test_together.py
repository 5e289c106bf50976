"""Backups of several disks at one point in time."""

import json
import time

import mirror_model as m
import pytest
import rig as r
from snapshot_model import BLOCK, Pair, flat, image, number_of


@pytest.fixture
def mounts(guarded):
    """For tests that mount a disk: left out where that is impossible, and ended when one hangs."""
    guarded(180)


def latest(data):
    """The highest number that a disk has."""
    return max(number_of(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def jobs(daemon):
    return json.loads(daemon.cli("job", "list", "--json").stdout)


def test_one_point_in_time(rig, mounts):
    """Under load: the copies have the same number, or the first one is ahead by one."""
    pair = Pair(rig, "points")
    for turn in range(6):
        time.sleep(0.1)
        before = pair.number
        to = [rig.dir / f"points-{n}-{turn}.qcow2" for n in range(2)]
        pair.daemon.cli("backup", "start", "d1", "--to", to[1], "--and", f"d0={to[0]}", "--wait", timeout_s=m.QUIET_S)
        after = pair.number
        first, second = (latest(flat(path, "qcow2", rig.dir / "flat.raw").read_bytes()) for path in to)
        r.require(first in (second, second + 1), f"turn {turn}: d0 has {first}, and d1 has {second}")
        r.require(before <= second and first <= after + 1, f"turn {turn}: {before} {first} {second} {after}")
    pair.stop()
    r.require(jobs(pair.daemon) == [], f"left: {jobs(pair.daemon)}")
    r.require(pair.daemon.child.stop() == 0, pair.daemon.child.tail())


def test_all_or_nothing(rig):
    """What is impossible for one disk leaves all as they are: no job, no file, no bitmap."""
    paths = [image(rig, f"none-{n}", "qcow2", 8) for n in range(3)]
    daemon = r.Daemon(rig, *(word for n, path in enumerate(paths[:2]) for word in ("--disk", f"name=d{n},format=qcow2,file={path}")), name="none")
    daemon.cli("bitmap", "add", "d0", "kept")
    before = daemon.cli("bitmap", "list", "--json").stdout
    to = [rig.dir / f"none-{n}-copy.qcow2" for n in range(2)]
    call = lambda *actions: daemon.cli("qmp", "transaction", json.dumps({"actions": actions}), check=False)  # noqa: E731
    start = lambda n, **more: {"type": "backup-start", "data": {"disk": f"d{n}", "to": str(to[n]), **more}}  # noqa: E731
    bitmap = lambda kind, n, name: {"type": f"block-dirty-bitmap-{kind}", "data": {"node": f"d{n}", "name": name}}  # noqa: E731
    snapshot = {"type": "blockdev-snapshot-sync", "data": {"device": "d1", "snapshot-file": str(rig.dir / "none.qcow2"), "format": "qcow2"}}
    for actions, words in (
        ((start(0), start(1, format="null")), ("disk d1", "qcow2 or raw")),
        ((start(0, bitmap="new"), start(1, incremental="nosuch", backing=str(paths[2]))), ("nosuch",)),
        ((start(0), start(0)), ("d0", "two backups")),
        ((start(0), bitmap("clear", 1, "nosuch")), ("nosuch",)),
        ((bitmap("clear", 0, "kept"), bitmap("add", 0, "other"), bitmap("add", 0, "kept")), ("kept already",)),
        ((start(0), snapshot), ("either snapshots",)),
        ((start(0), {"type": "block-commit", "data": {}}), ("block-commit",)),
        ((start(0), {"type": "blockdev-backup", "data": {"device": "d1", "target": "d0", "sync": "full"}}), ("d0",)),
        ((), ("empty",)),
    ):
        r.message_of(call(*actions), *words)
        r.require(jobs(daemon) == [] and not any(path.exists() for path in to), f"{actions}: left {jobs(daemon)}")
        r.require(daemon.cli("bitmap", "list", "--json").stdout == before, f"{actions}: {daemon.cli('bitmap', 'list').stdout}")
    r.message_of(daemon.cli("backup", "start", "d0", "--to", to[0], "--and", f"d1={to[0]}", check=False), to[0].name)
    r.require(jobs(daemon) == [] and not to[0].exists(), f"left {jobs(daemon)}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_qemus_actions(rig):
    """A full backup and the bitmap of the next one begin together, for two disks."""
    paths = [image(rig, f"acts-{n}", "raw", 8) for n in range(4)]
    daemon = r.Daemon(rig, *(word for n, path in enumerate(paths) for word in ("--disk", f"name=d{n},format=raw,file={path}")), name="acts")
    actions = []
    for n in range(2):
        actions.append({"type": "block-dirty-bitmap-add", "data": {"node": f"d{n}", "name": "b0"}})
        actions.append({"type": "blockdev-backup", "data": {"device": f"d{n}", "target": f"d{n + 2}", "sync": "full", "job-id": f"j{n}"}})
    mode = {"properties": {"completion-mode": "grouped"}}
    r.message_of(daemon.cli("qmp", "transaction", json.dumps({"actions": actions, **mode}), check=False), "completion-mode")
    daemon.cli("qmp", "transaction", json.dumps({"actions": actions}))
    r.wait_for("they end", lambda: jobs(daemon) == [])
    listed = json.loads(daemon.cli("bitmap", "list", "--json").stdout)
    r.require([(b["disk"], b["name"], b["count"]) for b in listed] == [("d0", "b0", 0), ("d1", "b0", 0)], f"listed as {listed}")
    clear = [{"type": "block-dirty-bitmap-clear", "data": {"node": f"d{n}", "name": "b0"}} for n in range(2)]
    daemon.cli("qmp", "transaction", json.dumps({"actions": clear}))
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_bitmaps_that_begin_together(rig):
    """All are in the image from then on: after kill -9 they are there, in use. Too many, and twice the same, are refused at once."""
    path = image(rig, "begin", "qcow2", 8)
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=qcow2,file={path}", name="begin")
    add = lambda name: {"type": "block-dirty-bitmap-add", "data": {"node": "d0", "name": name, "persistent": True}}  # noqa: E731
    call = lambda actions: daemon.cli("qmp", "transaction", json.dumps({"actions": actions}), check=False)  # noqa: E731
    r.message_of(call([add(f"b{n}") for n in range(65)]), "d0", "64 bitmaps")
    r.message_of(call([add("twice"), add("twice")]), "twice")
    r.require(json.loads(daemon.cli("bitmap", "list", "--json").stdout) == [], "bitmaps are left")
    backup = {"type": "backup-start", "data": {"disk": "d0", "to": str(rig.dir / "begin-copy.qcow2"), "bitmap": "full"}}
    r.require(call([add("b0"), add("b1"), backup]).returncode == 0, "it is refused")
    daemon.child.kill()
    info = json.loads(r.run([r.tool("qemu-img", "qemu-utils"), "info", "-U", "--output=json", path]).stdout)
    there = {b["name"]: "in-use" in b["flags"] for b in info["format-specific"]["data"].get("bitmaps", [])}
    r.require(there == {"b0": True, "b1": True, "full": True}, f"the image has {there}")
