"""Backups of several disks at one point in time."""

import json
import subprocess
import time

import mirror_model as m
import pytest
import rig as r
from snapshot_model import BLOCK, Pair, checked, flat, image, number_of, qemu_img


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


def test_pull_backups_of_two_disks(rig, mounts):
    """The frozen disks show one point in time, as long as the jobs run."""
    pair = Pair(rig, "pulls")
    r.wait_for("writes", lambda: pair.number > 100)
    data = lambda n: {"disk": f"d{n}", "pull": f"p{n}", "fleece": str(rig.dir / f"pulls-{n}.fleece")}  # noqa: E731
    actions = [{"type": "backup-start", "data": data(n)} for n in range(2)]
    pair.daemon.cli("qmp", "transaction", json.dumps({"actions": actions}))
    r.require([job["id"] for job in jobs(pair.daemon)] == ["backup0", "backup1"], f"listed as {jobs(pair.daemon)}")
    number = pair.number
    r.wait_for("more writes", lambda: pair.number > number + 100)
    for n in range(2):
        pair.daemon.cli("export", "add", f"type=fuse,name=v{n},disk=p{n},mountpoint={rig.dir / f'pulls-{n}.view'}")
    first, second = (latest((rig.dir / f"pulls-{n}.view").read_bytes()) for n in range(2))
    r.require(first in (second, second + 1) and first <= number + 1, f"d0 has {first}, and d1 has {second} of {number}")
    for n in range(2):
        pair.daemon.cli("export", "remove", f"v{n}")
        pair.daemon.cli("job", "complete", f"backup{n}")
    pair.stop()
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


def test_each_failure_is_told(rig):
    """Jobs that were waited for are gone, so their command tells the end of each."""
    paths = [image(rig, f"told-{n}", "raw", 64) for n in range(2)]
    for path in paths:
        path.write_bytes(b"\x05" * (64 << 20))
    daemon = r.Daemon(rig, *(word for n, path in enumerate(paths) for word in ("--disk", f"name=d{n},format=raw,file={path}")), name="told")
    to = [rig.dir / f"told-{n}.copy" for n in range(2)]
    argv = [r.binary("vshunt"), "-c", daemon.control, "backup", "start", "d0", "--to", to[0], "--and", f"d1={to[1]}", "--speed", "64k", "--wait"]
    with subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as waiting:
        r.wait_for("both jobs run", lambda: len(jobs(daemon)) == 2)
        names = [job["id"] for job in jobs(daemon)]
        for name in names:
            daemon.cli("qmp", "job-cancel", json.dumps({"id": name}))
        _, said = waiting.communicate(timeout=r.WAIT_S)
    r.require(waiting.returncode == 1, f"it ended with {waiting.returncode}: {said}")
    r.require(all(f"job {name} was cancelled" in said for name in names), f"it said {said!r}")
    r.require(jobs(daemon) == [] and not any(path.exists() for path in to), f"left: {jobs(daemon)}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_incremental_ones_begin_together(rig):
    """By one transaction. What cannot be done leaves the bitmaps with what they had; a clear leaves nothing. Of two backups, one that
    is cancelled does not end the other."""
    paths = [image(rig, f"inc-{n}", "qcow2", 16) for n in range(2)]
    words = []
    for n, path in enumerate(paths):
        export = f"type=vhost-user-blk,name=e{n},disk=d{n},socket={rig.dir / f'inc-{n}.sock'}"
        words += ["--disk", f"name=d{n},format=qcow2,file={path}", "--export", export]
    daemon = r.Daemon(rig, *words, name="inc")

    def write(seed):
        for n in range(2):
            argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / f"inc-{n}.sock", "--rw", "randwrite", "--bs", "64k"]
            r.run([*argv, "--range", "8M", "--ios", "40", "--seed", seed, "--quiet"])

    def counts():
        return [b["count"] for b in json.loads(daemon.cli("bitmap", "list", "--json").stdout)]

    def transaction(*actions, check=True):
        return daemon.cli("qmp", "transaction", json.dumps({"actions": actions}), check=check)

    bitmap = lambda kind, n: {"type": f"block-dirty-bitmap-{kind}", "data": {"node": f"d{n}", "name": "b0"}}  # noqa: E731
    full, later = ([rig.dir / f"inc-{n}-{kind}.qcow2" for n in range(2)] for kind in ("full", "later"))
    start = lambda n, **more: {"type": "backup-start", "data": {"disk": f"d{n}", "to": str(later[n]), **more}}  # noqa: E731
    write(1)
    daemon.cli("backup", "start", "d0", "--to", full[0], "--and", f"d1={full[1]}", "--bitmap", "b0", "--wait", timeout_s=m.QUIET_S)
    r.require(counts() == [0, 0], f"counts of {counts()}")
    write(2)
    dirty = counts()
    r.require(all(dirty), f"counts of {dirty}")
    for actions in ((bitmap("clear", 0), bitmap("add", 1)), (start(0, bitmap="b0"), bitmap("add", 1))):
        r.message_of(transaction(*actions, check=False), "b0 already")
        r.require(counts() == dirty and not later[0].exists(), f"counts of {counts()}, not {dirty}")
    started = json.loads(transaction(*(start(n, incremental="b0", backing=str(full[n])) for n in range(2))).stdout)
    daemon.cli("job", "wait", *started["jobs"], timeout_s=m.QUIET_S)
    r.require(counts() == [0, 0], f"counts of {counts()}")
    again = [rig.dir / f"inc-{n}-again.qcow2" for n in range(2)]
    daemon.cli("backup", "start", "d1", "--to", again[1], "--and", f"d0={again[0]}", "--wait", timeout_s=m.QUIET_S)
    for n in range(2):
        checked(later[n])
        qemu_img("compare", "-f", "qcow2", "-F", "qcow2", later[n], again[n])
    write(3)
    r.require(all(counts()), f"counts of {counts()}")
    transaction(bitmap("clear", 0), bitmap("clear", 1))
    r.require(counts() == [0, 0], f"counts of {counts()}")
    both = ("backup", "start", "d0", "--to", rig.dir / "inc-0.ended", "--and", f"d1={rig.dir / 'inc-1.whole'}")
    one, two = daemon.cli(*both, "--speed", "64K").stdout.split()
    daemon.cli("job", "cancel", one)
    daemon.cli("job", "speed", two, "max")
    daemon.cli("job", "wait", two, timeout_s=m.QUIET_S)
    r.require((rig.dir / "inc-1.whole").exists() and not (rig.dir / "inc-0.ended").exists(), "not the files of the jobs")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
