"""Tests that refused backups, jobs and bitmaps give an error with the thing and the remedy."""

import json

import backup_model as b
import rig as r
from backup_model import MIB

SIZE = 4 * MIB


def refused(daemon, arguments, words, code):
    """A command fails with that exit code, and an error that has these words."""
    try:
        r.message_of(daemon.cli(*arguments, check=False), *words, code=(code,))
    except r.Failed as e:
        raise r.Failed(f"{' '.join(map(str, arguments))}: {e}") from e


def test_what_cannot_be_backed_up_and_why(suite):
    """Each way to ask for a backup that cannot be; nothing is left behind."""
    folder = suite.path("errors")
    folder.mkdir()
    here = folder / "here"
    here.write_bytes(b"not yours")
    before = b.create(folder / "before.qcow2", SIZE)
    above = suite.path("above.qcow2")
    b.qemu_img("create", "-q", "-f", "qcow2", "-b", before, "-F", "qcow2", above)
    image = suite.image("errors.img", SIZE)
    low = suite.image("low.img", SIZE)
    high = suite.path("high.qcow2")
    b.qemu_img("create", "-q", "-f", "qcow2", "-b", low, "-F", "raw", high)
    disks = [
        f"name=d0,file={image}",
        f"name=high,format=qcow2,file={high}",
        f"name=used,file={suite.image('used.img', SIZE)}",
        f"name=ro,file={suite.image('ro.img', SIZE)},readonly=on",
        f"name=large,format=ram,size={2 * SIZE}",
        f"name=grows,file={suite.image('grows.img', SIZE)}",
        f"name=t0,format=ram,size={SIZE}",
    ]
    exports = [f"type=vhost-user-blk,name=e1,disk=used,socket={suite.path('errors.sock')}"]
    growable = f"type=fuse,name=f1,disk=grows,mountpoint={suite.path('grows.mnt')},writable=on,growable=on"
    arguments = [x for d in disks for x in ("--disk", d)] + [x for e in (*exports, growable) for x in ("--export", e)]
    daemon = r.Daemon(suite.rig, *arguments, name="errors")
    daemon.cli("bitmap", "add", "d0", "b0")
    daemon.cli("bitmap", "add", "d0", "off", "--disabled")
    new = folder / "new"
    inc = ("--incremental", "b0")
    # Arguments after `backup start`, words of the error, exit code.
    cases = (
        ((), ("disk",), 2),
        (("d0",), ("--to",), 2),
        (("d0", "--to", new, "--target", "t0"), ("--to", "--target"), 2),
        (("d0", "--target", "t0", "--format", "raw"), ("--format",), 2),
        (("d0", "--target", "t0", "--overwrite"), ("--overwrite",), 2),
        (("d0", "--target", "t0", "--backing", before, *inc), ("--backing",), 2),
        (("d0", "--to", new, "--bitmap", "b0", *inc), ("--bitmap", "--incremental"), 2),
        (("d0", "--to", new, "--backing", before), ("--incremental",), 2),
        (("d0", "--to", new, "--format", "vmdk"), ("vmdk", "qcow2"), 2),
        (("d0", "--to", new, "--speed", "fast"), ("fast", "100M", "max", "shared"), 2),
        (("d0", "--to", new, "--speed", "0"), ("0", "pause", "cancel"), 2),
        (("d0", "--to", before, "--overwrite", "--backing", before, *inc), ("its own backing image", "--to"), 2),
        (("none", "--to", new), ("disk none",), 1),
        (("d0", "--to", new, "--job", ""), ("job", "name"), 1),
        (("d0", "--to", new, "--job", "a:b"), ("job name", "a:b", "letters"), 1),
        (("d0", "--to", new, "--job", "7"), ("7", "letter"), 1),
        (("d0", "--to", new, "--job", "e1"), ("e1", "already", "another name"), 1),
        (("d0", "--to", here), (here, "already", "another name"), 1),
        (("d0", "--to", folder / "no" / "new"), (folder / "no" / "new", "No such file"), 1),
        (("d0", "--to", folder), (folder, "already"), 1),
        (("d0", "--to", folder, "--overwrite"), (folder, "directory"), 1),
        (("d0", "--to", image, "--overwrite"), (image, "disk d0 itself"), 1),
        (("high", "--to", low, "--overwrite", "--format", "raw"), (low, "disk high itself"), 1),
        (("d0", "--to", new, "--compress", "--format", "raw"), ("d0", "qcow2", "leave out compress"), 1),
        (("d0", "--target", "t0", "--compress"), ("d0", "leave out compress"), 1),
        (("d0", "--to", new, *inc), ("d0", "backing", "target"), 1),
        (("d0", "--to", new, "--format", "raw", "--backing", before, *inc), ("d0", "qcow2"), 1),
        (("d0", "--to", new, "--backing", folder / "none", *inc), (folder / "none", "No such file"), 1),
        (("d0", "--to", new, "--backing", here, *inc), (here, "qcow2"), 1),
        (("d0", "--to", folder / ".." / folder.name / before.name, "--overwrite", "--backing", before, *inc), (before, "as its backing image"), 1),
        (("d0", "--to", before, "--overwrite", "--backing", above, *inc), (before, "in use"), 1),
        (("d0", "--to", new, "--incremental", "none", "--backing", before), ("d0", "none", "bitmap list"), 1),
        (("d0", "--to", new, "--incremental", "off", "--backing", before), ("off", "full backup"), 1),
        (("d0", "--target", "none"), ("disk none",), 1),
        (("d0", "--target", "d0"), ("d0", "its own target"), 1),
        (("d0", "--target", "used"), ("used", "export e1", "remove"), 1),
        (("d0", "--target", "ro"), ("ro", "read-only"), 1),
        (("d0", "--target", "large"), ("large", str(2 * SIZE), str(SIZE)), 1),
        (("grows", "--to", new), ("grows", "f1", "growable"), 1),
        (("d0", "--to", new, "--bitmap", "x" * 2000), ("1023",), 1),
    )
    for arguments, words, code in cases:
        refused(daemon, ("backup", "start", *arguments), words, code)
    left = sorted(p.name for p in folder.iterdir())
    r.require(left == ["before.qcow2", "here"] and here.read_bytes() == b"not yours", f"left behind is {left}")
    b.checked(before)
    r.require(daemon.status()["jobs"] == [], f"there are jobs: {daemon.status()['jobs']}")
    by_protocol(daemon)
    # With `--overwrite` the file is replaced.
    daemon.cli("backup", "start", "d0", "--to", here, "--overwrite", "--wait")
    b.checked(here)
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def by_protocol(daemon):
    """Errors of the daemon for arguments that the command line does not let through."""
    for more, word in (
        ({}, "where to"),
        ({"to": "/x", "target": "t0"}, "choose one"),
        ({"target": "t0", "overwrite": True}, "overwrite is for a file"),
        ({"to": "/x", "format": "ram"}, "qcow2 or raw"),
        ({"to": "/x", "bitmap": "b0", "incremental": "b0"}, "leave out bitmap"),
        ({"to": "/x", "backing": "/y"}, "backing is of an incremental"),
        ({"to": "/x", "job": "a\0b"}, "job name"),
    ):
        refused(daemon, ("qmp", "backup-start", json.dumps({"disk": "d0", **more})), (word,), 1)


def test_jobs_and_bitmaps_that_cannot_be_and_why(suite):
    """Of jobs and bitmaps that are not there, are there already, or cannot be changed."""
    daemon = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,file={suite.image('names.img', SIZE)}"),
        *("--disk", f"name=ro,file={suite.image('names-ro.img', SIZE)},readonly=on"),
        name="names",
    )
    daemon.cli("bitmap", "add", "d0", "b0")
    daemon.cli("backup", "start", "d0", "--to", suite.path("names.done"), "--job", "over")
    daemon.cli("job", "wait", "over")
    cases = [((("job", verb, "none")), ("no job none", "job list"), 1) for verb in ("cancel", "pause", "resume", "dismiss", "wait")]
    cases += [(("job", verb, "over"), ("job over is over",), 1) for verb in ("cancel", "pause", "resume")]
    cases += [
        (("job", "speed", "none", "1M"), ("no job none", "job list"), 1),
        (("job", "speed", "over", "1M"), ("job over is over",), 1),
        (("job", "speed", "over", "quick"), ("quick", "100M"), 2),
        (("job", "wait"), ("jobs",), 2),
        (("bitmap", "add", "none", "b1"), ("disk none",), 1),
        (("bitmap", "add", "d0", "b0"), ("d0", "b0", "already"), 1),
        (("bitmap", "add", "d0", ""), ("name",), 1),
        (("bitmap", "add", "d0", "b1", "--granularity", "3000"), ("3000", "power of two"), 1),
        (("bitmap", "add", "d0", "b1", "--granularity", "256"), ("256", "512"), 1),
        (("bitmap", "add", "d0", "b1", "--persistent", "true"), ("d0", "qcow2", "leave out persistent"), 1),
        (("bitmap", "add", "ro", "b1"), ("ro", "read-only"), 1),
        (("bitmap", "merge", "d0", "b0", "none"), ("none", "bitmap list"), 1),
        (("bitmap", "list", "none"), ("disk none", "disk list"), 1),
    ]
    cases += [(("bitmap", verb, "d0", "none"), ("none", "bitmap list"), 1) for verb in ("remove", "clear", "enable", "disable")]
    for arguments, words, code in cases:
        refused(daemon, arguments, words, code)
    r.require(daemon.child.stop() == 0, daemon.child.tail())
