"""Mirrors whose guests wait for the target (`--copy-mode write-blocking`)."""

import os
import subprocess
import time

import mirror_model as m
import nbd_servers as n
import pytest
import rig as r
from snapshot_model import Disk, bench, checked, image, pauses

SIZE_MIB = 32
MODE = ("--copy-mode", "write-blocking", "--speed", "max")


@pytest.fixture
def here(rig, request):
    """A raw file with data everywhere."""
    path = rig.dir / f"{request.node.name}.raw"
    path.write_bytes(os.urandom(SIZE_MIB << 20))
    return path


def ready(disk, name):
    """Waits until a mirror can be completed, and requires that guests wait for its target."""
    m.ready(disk, name)
    r.require(m.job(disk, name)["copy-mode"] == "write-blocking", f"listed as {m.job(disk, name)}")


def mode(served, name):
    return m.job(served, name)["copy-mode"]


def followed(rig, here, *plugin, name, written="24M"):
    """A daemon under load whose guests wait for disk `far` on this NBD server, and the name of the job."""
    server = n.nbdkit(rig, *plugin, name=name)
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written=written)
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    job = m.start(served, "--target", "far", *MODE)
    m.ready(served, job)
    return server, served, job


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_the_target_has_what_is_complete(rig, form):
    """When a guest's writes are complete, the target has them, although the job is not completed. (A qcow2 target can be read when
    it is.)"""
    disk = Disk(rig, image(rig, f"has-{form}", "raw", 24), "raw", name=f"has-{form}", fuse=False, socket=True)
    new = rig.dir / f"has-{form}-new.{form}"
    image(rig, new.stem, form, 24)
    disk.cli("disk", "add", f"name=far,format={form},file={new}")
    name = m.start(disk, "--target", "far", *MODE)
    ready(disk, name)
    for at in range(8):
        load = ["blk", "--socket", disk.socket, "--rw", "randwrite", "--bs", ("4k", "64k")[at % 2], "--quiet", "--range", "8M", "--ios", "200"]
        r.run([r.binary("vshunt-bench"), *load])
        if form == "raw":
            r.require(new.read_bytes() == disk.path.read_bytes(), f"run {at}: the target lacks a complete write")
    m.complete(disk, name)
    r.require(disk.shown() == (form, str(new)), f"listed as {disk.shown()}")
    disk.quit()
    compared = r.run([r.tool("qemu-img", "qemu-utils"), "compare", "-f", "raw", "-F", form, disk.path, new])
    r.require("identical" in compared.stdout, f"it said {compared.stdout}")


def test_guests_that_would_outrun_the_target(rig, here):
    """They write as fast as the target takes it, so the disk is switched at once."""
    server, served, name = followed(rig, here, "--filter=rate", "memory", f"{SIZE_MIB}M", "rate=400M", "burstiness=0.05", name="slow")
    r.require(mode(served, name) == "write-blocking", f"listed as {m.job(served, name)}")
    r.message_of(served.cli("job", "pause", name, check=False), "is ready")
    served.cli("job", "complete", name, timeout_s=m.QUIET_S)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    r.require(pauses(served), "no pause is logged")
    served.end()


@pytest.mark.parametrize("ring", ("split", "packed"))
def test_switched_many_times(rig, ring):
    """Between files under a verified load, while its queues move; and ended with a copy that is complete."""
    disk = Disk(rig, image(rig, f"turn-{ring}", "raw", 24), "raw", name=f"turn-{ring}", fuse=False, socket=True)
    load = bench(rig, disk, f"turn-{ring}-bench", "--range", "16M", *(["--packed"] if ring == "packed" else []))
    old = disk.path
    for at in range(6):
        form = ("qcow2", "raw")[at % 2]
        path = rig.dir / f"turn-{ring}-{at}.{form}"
        name = m.start(disk, "--to", path, "--format", form, *MODE)
        ready(disk, name)
        disk.daemon.attach(f"e0:{at % 2}", (at // 2) % 2)
        if at == 3:
            m.complete(disk, name, "--no-switch")
            r.require(disk.shown()[1] == str(old), f"listed as {disk.shown()}")
            continue
        m.complete(disk, name)
        r.require(disk.shown() == (form, str(path)), f"listed as {disk.shown()}")
        old = path
        r.require(load.running(), f"the load ended: {load.tail()}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    if old.suffix == ".qcow2":
        checked(old)


def test_cancelled(rig, here):
    """Guests go on, and the target is free."""
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written="24M")
    served.cli("disk", "add", f"name=far,format=raw,file={image(rig, 'cancelled', 'raw', SIZE_MIB)}")
    for is_ready in (True, False):
        name = m.start(served, "--target", "far", *MODE[:2], "--speed", "max" if is_ready else "1M")
        if is_ready:
            ready(served, name)
        served.cli("job", "cancel", name)
        r.require(m.job(served, name)["cancelled"], f"it ended as {m.job(served, name)}")
        served.more()
    served.cli("disk", "remove", "far")
    served.end()


def test_a_target_that_goes(rig, here):
    """The job fails, and guests go on without an error."""
    server, served, name = followed(rig, here, "memory", f"{SIZE_MIB}M", name="goes")
    server.child.kill()
    there = m.ended(served, name)
    r.require("far" in there["error"], f"it ended as {there}")
    served.more()
    r.require(served.shown() == "raw", f"listed as {served.shown()}")
    served.end()


@pytest.mark.parametrize("when", ("ready", "moving"))
def test_a_target_that_hangs(rig, here, when):
    """Guests wait for 15 s, also if the queue of the job is to move. Then they go on without the target, and the job continues
    in rounds and can be completed."""
    server, served, name = followed(rig, here, "memory", f"{SIZE_MIB}M", name=f"hangs-{when}", written="8M")
    server.child.suspend()
    begin = time.monotonic()
    command = ["attach", "--timeout", "50s", f"{name}:0", "0"] if when == "moving" else ["status"]
    argv = [r.binary("vshunt"), "-c", served.daemon.control, *command]
    other = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        served.more()
        took = time.monotonic() - begin
        r.require(8 < took < 15 + r.WAIT_S, f"guests went on after {took} s")
        r.wait_for("it says so", lambda: mode(served, name) == "background", 60)
        r.require("took nothing for 15 s" in served.daemon.child.output(), f"the log: {served.daemon.child.tail()}")
    finally:
        server.child.resume()
        other.wait(m.QUIET_S)
    m.complete(served, name)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    served.end()


def test_a_target_that_hangs_while_the_job_is_completed(rig, here):
    """The flush of the target fails after 10 s, and so does the job. Guests go on, and the disk is where it was."""
    server, served, name = followed(rig, here, "memory", f"{SIZE_MIB}M", name="hangs", written="8M")
    server.child.suspend()
    try:
        served.cli("qmp", "job-complete", f'{{ "id": "{name}" }}')
        r.wait_for("it fails", lambda: m.job(served, name)["status"] == "aborting", 60)
        served.more()
    finally:
        server.child.resume()
    there = m.ended(served, name)
    r.require("cannot be made stable" in there["error"], f"it ended as {there}")
    r.require(served.shown() == "raw", f"listed as {served.shown()}")
    served.end()


def test_ready_while_guests_write_without_end(rig, here):
    """A slow target, and more writes at a time than it takes: the job becomes ready, and is completed."""
    server, served, name = followed(rig, here, "--filter=delay", "memory", f"{SIZE_MIB}M", "wdelay=5ms", name="late")
    served.cli("job", "complete", name, timeout_s=m.QUIET_S)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    served.end()


def test_no_worker_is_left(rig, here):
    """Jobs that end while somebody looks at them free their workers."""
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written="8M")
    served.cli("disk", "add", f"name=far,format=raw,file={image(rig, 'workers', 'raw', SIZE_MIB)}")
    before = len(served.daemon.status()["workers"])
    for _ in range(8):
        name = m.start(served, "--target", "far", *MODE)
        ready(served, name)
        served.cli("job", "cancel", name)
    r.wait_for("the workers are free", lambda: len(served.daemon.status()["workers"]) == before)
    served.end()


def test_a_target_that_hangs_after_the_command(rig, mounts):
    """Guests go on without it, and the list and the log say so while it hangs. The target is a file of another daemon."""
    far = Disk(rig, image(rig, "of-afar", "raw"), "raw", name="of-afar")
    disk = Disk(rig, image(rig, "afar", "raw"), "raw", name="afar", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=far,format=raw,file={far.file}")
    name = m.start(disk, "--target", "far", *MODE)
    ready(disk, name)
    load = bench(rig, disk, "afar-bench", "--range", "8M")
    requests = lambda: sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0")  # noqa: E731
    r.wait_for("requests", lambda: requests() > 100)
    far.daemon.child.suspend()
    argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "complete", name]
    with subprocess.Popen([str(word) for word in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as completing:
        r.wait_for("the mode changes", lambda: m.job(disk, name)["copy-mode"] == "background", m.QUIET_S)
        r.require("do not wait for it any more" in disk.daemon.child.output(), f"the log: {disk.daemon.child.tail()}")
        before = requests()
        r.wait_for("more requests", lambda: requests() > before + 100)
        far.daemon.child.resume()
        completing.wait(m.QUIET_S)
    # It may have ended, stayed ready, or failed because the target was late.
    if m.job(disk, name)["status"] == "ready":
        disk.cli("job", "cancel", name)
    r.require(load.interrupt(120) == 0, f"the load failed: {load.tail()}")
    disk.quit()
    far.quit()


def test_cancelled_while_the_target_hangs(rig, here):
    """Guests go on and the disk is free soon; the target is free when it answers."""
    server, served, name = followed(rig, here, "memory", f"{SIZE_MIB}M", name="stuck", written="8M")
    server.child.suspend()
    served.cli("qmp", "job-cancel", f'{{ "id": "{name}" }}')
    served.more()
    free = lambda: all("job" not in disk for disk in served.daemon.status()["disks"] if disk["name"] == "d0")  # noqa: E731
    r.wait_for("the disk is free", free)
    served.cli("snapshot", "d0", "--to", rig.dir / "stuck.qcow2")
    r.message_of(served.cli("disk", "remove", "far", check=False), "far", name)
    server.child.resume()
    r.require(m.ended(served, name)["cancelled"], f"it ended as {m.job(served, name)}")
    served.cli("disk", "remove", "far")
    served.end()
