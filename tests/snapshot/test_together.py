"""Tests snapshots of several disks at one point in time."""

import collections
import json
import os
import subprocess
import time

import rig as r
from snapshot_model import BLOCK, OVERLAY, Pair, flat, number_of


def latest(rig, path):
    """The highest number that an image has."""
    data = flat(path, "qcow2", rig.dir / "flat.raw").read_bytes()
    return max(number_of(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def test_one_point_in_time(rig, mounts):
    """Snapshots under load: the images below have the same number, or the first one is ahead by one."""
    pair = Pair(rig, "together")
    seen = [0]
    for turn in range(6):
        r.wait_for("the writer continues", lambda: pair.number > seen[-1] + 1 or pair.error)
        before, below = pair.number, pair.shown()
        to = [rig.dir / f"together-{n}-{turn}.qcow2" for n in range(2)]
        said = pair.daemon.cli("snapshot", "d1", "--to", to[1], "--and", f"d0={to[0]}").stdout
        after = pair.number
        lines = [f"d{n} continues in {to[n]}; serve it by this name from now on" for n in (1, 0)]
        r.require(said.splitlines() == lines, f"it said {said!r}")
        r.require(pair.shown() == [str(path) for path in to], f"listed as {pair.shown()}")
        first, second = (latest(rig, path) for path in below)
        r.require(first in (second, second + 1), f"turn {turn}: d0 has {first}, and d1 has {second}")
        r.require(before <= second and first <= after + 1, f"turn {turn}: {before} {first} {second} {after}")
        seen.append(first)
    pair.stop()
    r.require(sorted(set(seen)) == seen, f"no progress: {seen}")
    for n in range(2):
        pair.daemon.cli("commit", f"d{n}", "--wait", timeout_s=120)
    pair.daemon.cli("quit", "--force")
    r.require(pair.daemon.child.wait() == 0, pair.daemon.child.tail())
    r.require("disk d0, d1: drained" in pair.daemon.child.output(), "the pause is not logged")


def test_all_or_none(rig, mounts):
    """If one disk cannot, the others stay where they are, and no file is left."""
    pair = Pair(rig, "none")
    there, first, second = (rig.dir / f"none-{name}.qcow2" for name in ("there", "first", "second"))
    there.write_bytes(b"mine")
    cases = {
        "is there already": ("d0", "--to", first, "--and", f"d1={there}"),
        "no disk d7": ("d0", "--to", first, "--and", f"d7={second}"),
        "named twice": ("d0", "--to", first, "--and", f"d0={second}"),
        "for example d1=": ("d0", "--to", first, "--and", "d1"),
    }
    for words, arguments in cases.items():
        r.message_of(pair.daemon.cli("snapshot", *arguments, check=False), words)
        r.require(pair.shown() == [str(path) for path in pair.paths], f"{words}: listed as {pair.shown()}")
        r.require(not first.exists() and not second.exists(), f"{words}: a file is left")
    r.require(there.read_bytes() == b"mine", "an existing file was changed")
    for n, path in enumerate((first, second)):
        r.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", pair.paths[n], "-F", "qcow2", path])

    def action(kind, **data):
        return {"type": kind, "data": data}

    refused = {
        "no action block-commit": [action("block-commit", device="d0")],
        "missing field `target`": [action("blockdev-backup", device="d0")],
        "is empty": [],
        "snapshot-file": [action("blockdev-snapshot-sync", device="d0")],
    }
    for words, actions in refused.items():
        r.message_of(pair.daemon.cli("qmp", "transaction", json.dumps({"actions": actions}), check=False), words)
    both = [action("blockdev-snapshot-sync", device=f"d{n}", mode="existing", **{"snapshot-file": str(p)}) for n, p in ((0, first), (1, second))]
    pair.daemon.cli("qmp", "transaction", json.dumps({"actions": both}))
    r.require(pair.shown() == [str(first), str(second)], f"listed as {pair.shown()}")
    pair.stop()
    pair.daemon.cli("quit", "--force")
    r.require(pair.daemon.child.wait() == 0, pair.daemon.child.tail())


def is_below(path):
    """Whether an image is marked as being below an overlay."""
    return OVERLAY in os.listxattr(path)


def test_kill_9(rig, mounts, marks, rand):
    """Each disk is in its old image or in its overlay, by the name that is not refused, and has all writes: those of the first disk
    that the second one has, too."""
    found = collections.Counter()
    for turn in range(6):
        pair = Pair(rig, f"killed-{turn}")
        r.wait_for("writes", lambda p=pair: p.number > 50 or p.error)
        to = [rig.dir / f"killed-{turn}-{n}-over.qcow2" for n in range(2)]
        argv = [r.binary("vshunt"), "-c", pair.daemon.control, "snapshot", "d0", "--to", to[0], "--and", f"d1={to[1]}"]
        with subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as snapping:
            while not is_below(pair.paths[turn % 2]) and snapping.poll() is None:
                pass
            time.sleep(rand.random() * rand.choice((0.001, 0.01)))
            done = pair.number
            pair.daemon.child.kill()
            snapping.wait(r.WAIT_S)
        for file in pair.files:
            subprocess.run(["umount", "-l", str(file)], capture_output=True, check=False)
        pair._stop.set()
        pair._thread.join(r.WAIT_S)
        opened, numbers, where = r.Daemon(rig, name=f"killed-{turn}-again"), [], ""
        for n in range(2):
            add = lambda path, n=n, d=opened: d.cli("disk", "add", f"name=d{n},format=qcow2,file={path}", check=False)  # noqa: E731
            old = add(pair.paths[n])
            where += "old " if old.returncode == 0 else "overlay "
            if old.returncode:
                r.message_of(old, "overlay", to[n].name)
                r.require(add(to[n]).returncode == 0, f"d{n} can be opened by neither name")
            file = rig.dir / f"killed-{turn}-{n}.seen"
            opened.cli("export", "add", f"type=fuse,name=f{n},disk=d{n},mountpoint={file},passthrough=off")
            data = file.read_bytes()
            numbers.append(max(number_of(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)))
        found[where.strip()] += 1
        first, second = numbers
        r.require(first in (second, second + 1) and second >= done, f"d0 has {first}, d1 has {second}, and {done} were done")
        opened.cli("quit", "--force")
        r.require(opened.child.wait() == 0, opened.child.tail())
    rig.say(f"where the disks were after a kill: {dict(found)}")
    r.require(any("overlay" in where for where in found), f"no kill came after a switch: {found}")
