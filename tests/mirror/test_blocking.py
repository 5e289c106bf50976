"""Mirrors whose guests wait for the target (`--copy-mode write-blocking`)."""

import os
import subprocess

import mirror_model as m
import pytest
import rig as r
from snapshot_model import Disk, bench, checked, image

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
    far = Disk(rig, image(rig, "hangs-far", "raw"), "raw", name="hangs-far")
    disk = Disk(rig, image(rig, "hangs", "raw"), "raw", name="hangs", fuse=False, socket=True)
    disk.cli("disk", "add", f"name=far,format=raw,file={far.file}")
    name = m.start(disk, "--target", "far", *MODE)
    ready(disk, name)
    load = bench(rig, disk, "hangs-bench", "--range", "8M")
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
