"""Requests for mirrors that are refused, each with one sentence; and QEMU's commands."""

import json
import os
import subprocess

import backup_model as b
import mirror_model as m
import nbd_servers as n
import pytest
import rig as r
from snapshot_model import Disk, image


def test_what_is_refused(rig):
    disk = Disk(rig, image(rig, "no", "qcow2"), "qcow2", name="no", fuse=False, socket=True)
    there = image(rig, "there", "raw")
    add = lambda keys: disk.cli("disk", "add", keys)  # noqa: E731
    add(f"name=small,format=raw,file={image(rig, 'small', 'raw', 16)}")
    add(f"name=unsafe,cache=unsafe,format=raw,file={image(rig, 'unsafe', 'raw')}")
    add(f"name=good,format=raw,file={image(rig, 'good', 'raw')}")
    disk.cli("bitmap", "add", "d0", "off", "--disabled")
    add("name=ram,format=ram,size=32M")
    add(f"name=ro,readonly=on,format=raw,file={image(rig, 'ro', 'raw')}")
    add(f"name=marked,format=qcow2,file={image(rig, 'marked', 'qcow2')}")
    disk.cli("bitmap", "add", "marked", "b0")
    for arguments, words, code in (
        (("nosuch", "--to", "x"), ("no disk nosuch",), 1),
        (("d0",), ("--to",), 2),
        (("d0", "--to", "x", "--target", "small"), ("--target",), 2),
        (("d0", "--to", there), (there.name, "there already", "--overwrite"), 1),
        (("d0", "--to", disk.path, "--overwrite"), (disk.path.name, "disk d0 itself"), 1),
        (("d0", "--target", "d0"), ("d0", "its own target"), 1),
        (("d0", "--target", "nosuch"), ("nosuch",), 1),
        (("d0", "--target", "small"), ("small", "16777216 bytes", "as large"), 1),
        (("d0", "--target", "unsafe"), ("unsafe", "cache"), 1),
        (("d0", "--target", "ram"), ("ram", "lost with the daemon"), 1),
        (("d0", "--target", "ro"), ("ro", "read-only"), 1),
        (("d0", "--target", "marked"), ("marked", "b0", "remove them"), 1),
        (("d0", "--to", "/nosuch/x"), ("/nosuch/x",), 1),
        (("d0", "--to", "x", "--bitmap", "b0"), ("give a disk as the target",), 1),
        (("d0", "--target", "good", "--incremental", "nosuch"), ("no bitmap nosuch",), 1),
        (("d0", "--target", "good", "--incremental", "off"), ("bitmap off", "does not record", "--bitmap off"), 1),
        (("d0", "--to", "x", "--format", "null"), ("null",), 2),
        (("ro", "--to", rig.dir / "x"), ("ro", "readonly=on"), 1),
    ):
        done = disk.cli("mirror", *arguments, check=False)
        r.require(done.returncode == code, f"{arguments}: exit status {done.returncode}: {done.stderr}")
        r.message_of(done, *words)
    for more, words in (
        ({}, "where to?"),
        ({"to": "/x", "target": "good"}, "choose one"),
        ({"target": "good", "format": "raw"}, "format is for a file that is made"),
        ({"to": "/x", "incremental": "off"}, "give a disk as the target"),
        ({"target": "good", "bitmap": "off", "incremental": "off"}, "leave out bitmap"),
    ):
        r.message_of(disk.cli("qmp", "mirror-start", json.dumps({"disk": "d0", **more}), check=False), words)
    r.require(disk.cli("job", "list").stdout.count("\n") == 1, "a job is left")
    # What was refused is free.
    for name in ("small", "unsafe", "ram", "ro", "marked"):
        disk.cli("disk", "remove", name)
    disk.quit()


def test_commands_that_come_too_early_or_to_other_jobs(rig):
    disk = Disk(rig, image(rig, "early", "raw"), "raw", name="early", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=d1,format=raw,file={image(rig, 'early-1', 'raw')}")
    backup = disk.cli("backup", "start", "d1", "--to", rig.dir / "early.backup", "--speed", "1").stdout.strip()
    name = m.start(disk, "--to", rig.dir / "early-new.raw", "--format", "raw", "--no-finalize", "--speed", "1")
    for arguments, words in (
        (("job", "complete", backup), ("completes by itself",)),
        (("job", "complete", backup, "--hold", "1s"), (backup, "is no mirror", "leave out --hold")),
        (("job", "finalize", backup), (backup, "finalizes by itself", "--no-finalize")),
        (("job", "finalize", name), (name, "is not pending")),
        (("job", "complete", name), (name, "is not ready", f"'job wait {name}'")),
        (("job", "complete", name, "--hold", "0s"), ("1 ms to 7 s",)),
        (("job", "complete", name, "--hold", "8s"), ("1 ms to 7 s",)),
        (("mirror", "d1", "--to", rig.dir / "x"), ("d1", backup)),
        (("stream", "d0"), (name,)),
    ):
        r.message_of(disk.cli(*arguments, check=False), *words)
    disk.cli("job", "speed", name, "max")
    waited = disk.cli("job", "wait", name, timeout_s=m.QUIET_S).stdout
    r.require(f"{name} is ready: " in waited and f"'vshunt job complete {name}'" in waited, f"it said {waited!r}")
    m.complete(disk, name)
    waited = disk.cli("job", "wait", name).stdout
    r.require(f"{name} is pending: " in waited and f"'vshunt job finalize {name}'" in waited, f"it said {waited!r}")
    disk.cli("job", "finalize", name, timeout_s=m.QUIET_S)
    disk.cli("job", "cancel", backup)
    disk.quit()


def test_disks_and_targets_that_do_not_fit(rig, mounts):
    """A mount whose users change the size; targets with larger blocks than guests know, and with less safety than they count on."""
    grows = r.Daemon(rig, "--disk", f"name=d0,format=raw,file={image(rig, 'grows', 'raw')}", name="grows")
    grows.cli("export", "add", f"type=fuse,name=f0,disk=d0,mountpoint={rig.dir / 'grows.mnt'},writable=on,growable=on,passthrough=off")
    r.message_of(grows.cli("mirror", "d0", "--to", rig.dir / "x", check=False), "f0", "growable=on", "remove it first")
    grows.cli("export", "remove", "f0")
    r.require(grows.child.stop() == 0, grows.child.tail())
    disk = Disk(rig, image(rig, "fits", "raw"), "raw", name="fits", fuse=False, socket=True)
    sizes = ("blocksize-minimum=4K", "blocksize-preferred=4K", "blocksize-maximum=1M")
    large = n.nbdkit(rig, "--filter=blocksize-policy", "memory", "32M", *sizes, name="large")
    disk.cli("disk", "add", f"name=large,uri={large.uri()}")
    r.message_of(disk.cli("mirror", "d0", "--target", "large", check=False), "blocks of 4096 bytes", "were told 512")
    kept = n.nbdkit(rig, "memory", "64M", name="kept")
    r.run([r.tool("qemu-img", "qemu-utils"), "create", "-q", "-f", "qcow2", kept.uri(), "32M"])
    disk.cli("disk", "add", f"name=kept,format=qcow2,uri={kept.uri()}")
    refused = disk.cli("mirror", "d0", "--target", "kept", check=False)
    r.message_of(refused, "disk kept", "may lose completed writes", "use a raw target", "remove the exports of d0")
    disk.cli("disk", "add", f"name=large2,uri={large.uri()},locking=off")
    r.message_of(disk.cli("mirror", "large2", "--target", "large", check=False), "large and large2", "in common")
    r.require(disk.cli("job", "list").stdout.count("\n") == 1, "a job is left")
    for name in ("large", "large2", "kept"):
        disk.cli("disk", "remove", name)
    disk.cli("resize", "d0", "33M")
    disk.quit()


def test_files_that_are_in_use(rig, marks):
    """A disk of this daemon has the file, or another process, or it cannot be as large: it keeps its contents, and is not marked."""
    here, link, there, held = image(rig, "used", "raw"), rig.dir / "link.raw", image(rig, "of-d1", "raw"), image(rig, "held", "raw")
    link.symlink_to(here)
    there.write_bytes(b"d1" * 1024)
    held.write_bytes(b"it" * 1024)
    disk = Disk(rig, here, "raw", name="used", fuse=False, socket=True)
    for keys in (f"name=same,format=raw,file={link},locking=off", f"name=d1,format=raw,file={there},locking=off", "name=wide,format=null,size=20T"):
        disk.cli("disk", "add", keys)
    other = r.Daemon(rig, "--disk", f"name=d0,format=raw,file={held}", name="other")
    for arguments, words in (
        (("mirror", "d0", "--target", "same"), ("same and d0", "in common")),
        (("backup", "start", "d0", "--target", "same"), ("same and d0", "in common")),
        (("mirror", "d0", "--to", there, "--overwrite"), (there.name, "of disk d1", "choose another name")),
        (("backup", "start", "d0", "--to", there, "--overwrite"), (there.name, "of disk d1", "choose another name")),
        (("mirror", "d0", "--to", held, "--overwrite"), (held.name, "in use by another process", "choose another target")),
        (("backup", "start", "d0", "--to", held, "--overwrite"), (held.name, "in use by another process", "choose another target")),
    ):
        done = disk.cli(*arguments, check=False)
        r.message_of(done, *words)
        r.require("locking=off" not in done.stderr, f"a remedy that cannot be followed: {done.stderr}")
    r.require(other.child.stop() == 0, other.child.tail())
    done = disk.cli("mirror", "wide", "--to", held, "--format", "raw", "--overwrite", check=False)
    # Some file systems have files of that size.
    if done.returncode:
        r.message_of(done, held.name, "too large", "has what it had")
        r.require(held.read_bytes() == b"it" * 1024 and os.listxattr(held) == [], f"marked as {os.listxattr(held)}")
    else:
        disk.cli("job", "cancel", "mirror0")
    r.require(there.read_bytes() == b"d1" * 1024 and os.listxattr(there) == [], f"marked as {os.listxattr(there)}")
    disk.quit()


@pytest.mark.parametrize("kind", ("backup", "commit", "mirror", "stream"))
def test_jobs_that_begin_together(rig, kind):
    """Each gets a name of its own."""
    number = 6
    paths = [image(rig, f"{kind}-{n}", "qcow2", 8) for n in range(number)]
    daemon = r.Daemon(rig, *(word for n, path in enumerate(paths) for word in ("--disk", f"name=d{n},format=qcow2,file={path}")), name=kind)
    if kind in ("commit", "stream"):
        for n in range(number):
            daemon.cli("snapshot", f"d{n}", "--to", rig.dir / f"{kind}-{n}-over.qcow2")
    start = {"backup": ("backup", "start"), "mirror": ("mirror",)}.get(kind, (kind,))
    to = lambda n: ("--to", rig.dir / f"{kind}-{n}-new.qcow2") if kind in ("backup", "mirror") else ()  # noqa: E731
    argv = [[r.binary("vshunt"), "-c", daemon.control, *start, f"d{n}", *to(n)] for n in range(number)]
    started = [subprocess.Popen([str(word) for word in one], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in argv]
    said = [one.communicate(timeout=r.WAIT_S) for one in started]
    r.require(sorted(out.strip() for out, _ in said) == [f"{kind}{n}" for n in range(number)], f"they said {said}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_qemus_commands(rig):
    disk = Disk(rig, image(rig, "qmp", "raw"), "raw", name="qmp", fuse=False, socket=True)
    qmp = b.Qmp(disk.daemon)
    far = [image(rig, f"qmp-{at}", "raw") for at in range(2)]
    for at, path in enumerate(far):
        disk.cli("disk", "add", f"name=far{at},format=raw,file={path}")
    start = {"device": "d0", "target": "far0", "sync": "full", "job-id": "j0"}
    for more, word in (
        ({"sync": "top"}, "'sync' is full"),
        ({"copy-mode": "now"}, "write-blocking"),
        ({"on-target-error": "stop"}, "on-target-error"),
    ):
        qmp.call("blockdev-mirror", error=word, **{**start, **more})
    qmp.call("blockdev-mirror", **start, auto_dismiss=False)
    r.wait_for("the event", lambda: qmp.call("query-version") and any(e["event"] == "BLOCK_JOB_READY" for e in qmp.events))
    (job,) = qmp.call("query-block-jobs")
    r.require(job["ready"] and job["type"] == "mirror" and job["status"] == "ready", f"listed as {job}")
    # Without force, a mirror that is ready completes where it is.
    qmp.call("block-job-cancel", device="j0")
    r.wait_for("it ends", lambda: m.job(disk, "j0")["status"] == "concluded")
    r.require(not m.job(disk, "j0")["cancelled"] and "error" not in m.job(disk, "j0"), f"it ended as {m.job(disk, 'j0')}")
    qmp.call("job-dismiss", id="j0")
    # With force it is given up. So is one that is not ready, with or without it.
    for force in (True, False):
        qmp.call("blockdev-mirror", **start, auto_dismiss=False, **({} if force else {"speed": 1}))
        if force:
            r.wait_for("it is ready", lambda: m.job(disk, "j0")["status"] == "ready")
        else:
            qmp.call("block-job-complete", error="is not ready", device="j0")
        qmp.call("block-job-cancel", device="j0", **({"force": True} if force else {}))
        r.wait_for("it ends", lambda: m.job(disk, "j0")["status"] == "concluded")
        r.require(m.job(disk, "j0")["cancelled"], f"it ended as {m.job(disk, 'j0')}")
        qmp.call("job-dismiss", id="j0")
    gone = lambda: [e["data"] for e in qmp.events if e["event"] == "BLOCK_JOB_CANCELLED"]  # noqa: E731
    r.wait_for("the events", lambda: qmp.call("query-version") and len(gone()) == 2)
    ready = next(e["data"] for e in qmp.events if e["event"] == "BLOCK_JOB_READY")
    r.require(set(ready) == {"type", "device", "len", "offset", "speed"}, f"the event has {ready}")
    qmp.call("blockdev-mirror", **{**start, "target": "far1"})
    r.wait_for("it is ready", lambda: m.job(disk, "j0")["status"] == "ready")
    qmp.call("block-job-complete", device="j0")
    r.wait_for("it ends", lambda: m.job(disk, "j0") is None)
    r.require(disk.shown() == ("raw", str(far[1])), f"listed as {disk.shown()}")
    # By the name that QEMU gives the command for all jobs.
    qmp.call("disk-add", name="far2", format="raw", file=str(image(rig, "qmp-2", "raw")))
    qmp.call("blockdev-mirror", **{**start, "target": "far2"})
    r.wait_for("it is ready", lambda: m.job(disk, "j0")["status"] == "ready")
    qmp.call("job-complete", id="j0")
    r.wait_for("it ends", lambda: m.job(disk, "j0") is None)
    r.require(disk.shown()[1].endswith("qmp-2.raw"), f"listed as {disk.shown()}")
    ended = lambda: [e["data"] for e in qmp.events if e["event"] == "BLOCK_JOB_COMPLETED"]  # noqa: E731
    # A job leaves the list before its end is told.
    r.wait_for("the events", lambda: qmp.call("query-version") and len(ended()) == 3)
    r.require(all("error" not in e and e["type"] == "mirror" for e in ended()), f"the events: {qmp.events}")
    disk.quit()
