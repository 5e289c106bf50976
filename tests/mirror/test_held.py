"""How long guests are held for a switch, what keeps a mirror from it, and jobs that are cancelled meanwhile."""

import itertools
import mmap
import os
import subprocess
import time

import backup_model as b
import mirror_model as m
import nbd_servers as n
import pytest
import rig as r
from snapshot_model import BLOCK, MIB, Disk, bench, image, pauses, qemu_img

SIZE_MIB = 32


@pytest.fixture
def here(rig, request):
    """A raw file with data everywhere."""
    path = rig.dir / f"{request.node.name}.raw"
    path.write_bytes(os.urandom(SIZE_MIB << 20))
    return path


def claimed(served):
    """The job that uses the disk."""
    (disk,) = (disk for disk in served.daemon.status()["disks"] if disk["name"] == "d0")
    return disk.get("job")


def test_guests_that_outrun_the_target(rig, here):
    """They are not held for long: the job stays ready, and says what helps. It is completed when they may be held for longer."""
    server = n.nbdkit(rig, "--filter=rate", "memory", f"{SIZE_MIB}M", "rate=400M", "burstiness=0.05", name="slow")
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written="24M")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--speed", "max")
    m.ready(served, name)
    done = served.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "write faster than disk far takes it", "300 ms", "vshunt limit", "--hold")
    there = m.job(served, name)
    r.require(there["status"] == "ready" and "write faster" in there["error"], f"listed as {there}")
    r.require(served.shown() == "raw", f"listed as {served.shown()}")
    served.more()
    r.message_of(served.cli("job", "complete", name, "--hold", "8s", check=False), "7 s")
    m.complete(served, name)
    r.require(served.shown() == "nbd", f"listed as {served.shown()}")
    held = pauses(served)
    r.require(held and max(held) < 15000, f"guests were held for {held} ms")
    served.end()


def test_cancelled_while_it_is_completed(rig, here):
    """The job ends, also while it tries to complete, and both commands say that."""
    server = n.nbdkit(rig, "--filter=rate", "memory", f"{SIZE_MIB}M", "rate=400M", "burstiness=0.05", name="slower")
    served = m.Served(rig, f"name=d0,format=raw,file={here}", written="24M")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--speed", "max")
    m.ready(served, name)
    argv = [r.binary("vshunt"), "-c", served.daemon.control, "job", "complete", name]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as completing:
        # It tries for 4 s at least.
        time.sleep(0.5)
        r.wait_for("it is being completed", lambda: "completed already" in served.cli("job", "complete", name, check=False).stderr)
        served.cli("job", "cancel", name)
        r.require("was cancelled" in completing.communicate(timeout=r.WAIT_S)[1] and completing.returncode == 1, "it was completed")
    r.require(served.shown() == "raw" and m.job(served, name)["cancelled"], f"it ended as {m.job(served, name)}")
    served.more()
    served.cli("disk", "remove", "far")
    served.end()


@pytest.mark.parametrize("phase", ("copying", "ready"))
def test_cancelled_while_the_target_hangs(rig, here, phase):
    """The disk is free at once. The target is free when it answers, and the end of the daemon waits for that, and says so."""
    server = n.nbdkit(rig, "memory", f"{SIZE_MIB}M", name=f"hangs-{phase}")
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--speed", "8M" if phase == "copying" else "max")
    if phase == "ready":
        m.ready(served, name)
    server.child.suspend()
    hang = lambda: any(q["export"] == name and q["in-flight"] for q in served.daemon.status()["queues"])  # noqa: E731
    r.wait_for("requests that hang", hang)
    served.more()
    served.cli("qmp", "job-cancel", f'{{ "id": "{name}" }}')
    r.wait_for("the disk is free", lambda: claimed(served) is None)
    r.require(m.job(served, name)["status"] == "aborting", f"listed as {m.job(served, name)}")
    served.cli("snapshot", "d0", "--to", rig.dir / f"hangs-{phase}.qcow2")
    served.more()
    r.message_of(served.cli("disk", "remove", "far", check=False), "far", name)
    if phase == "copying":
        server.child.resume()
        there = m.ended(served, name)
        r.require(there["cancelled"] and "error" not in there, f"it ended as {there}")
        served.cli("disk", "remove", "far")
        served.end()
        return
    r.require(served.load.interrupt(120) == 0, f"the load failed: {served.load.tail()}")
    served.daemon.child.process.terminate()
    r.wait_for("it says what it waits for", lambda: f"the daemon ends when job {name} does, which waits for disk far" in served.daemon.child.output())
    server.child.resume()
    r.require(served.daemon.child.wait() == 0, f"vshunt ended: {served.daemon.child.tail()}")


def test_a_failure_is_reported_although_the_job_is_cancelled(rig, here):
    """One write fails, and others hang: the disk is free, and the error of the job stays."""
    script = rig.dir / "fails.sh"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
get_size) echo {SIZE_MIB}M ;;
can_write|can_flush) exit 0 ;;
pwrite) cat > /dev/null; if test "$4" = 0; then echo 'EIO no' >&2; exit 1; fi; sleep 0.4 ;;
pread) dd if=/dev/zero iflag=count_bytes,fullblock count="$3" bs=64k status=none ;;
flush) exit 0 ;;
*) exit 2 ;;
esac
"""
    )
    script.chmod(0o755)
    server = n.nbdkit(rig, "sh", script, name="fails")
    served = m.Served(rig, f"name=d0,format=raw,file={here}")
    served.cli("disk", "add", f"name=far,uri={server.uri()}")
    name = m.start(served, "--target", "far", "--speed", "max")
    r.wait_for("it fails", lambda: m.job(served, name)["status"] in ("aborting", "concluded"))
    r.wait_for("the disk is free", lambda: claimed(served) is None)
    served.cli("job", "cancel", name)
    there = m.job(served, name)
    r.require("cannot be written" in there["error"] and not there["cancelled"], f"it ended as {there}")
    served.more()
    served.end()


def test_a_mount_that_bypasses_the_daemon(rig, mounts):
    """The disk cannot be switched under it. The job stays ready, and is completed when the mount is gone."""
    disk = Disk(rig, image(rig, "pass", "raw"), "raw", name="pass", fuse=False, socket=True)
    load = bench(rig, disk, "pass-bench", "--range", "8M")
    new, mountpoint = rig.dir / "pass-new.raw", rig.dir / "pass.mnt"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    disk.cli("export", "add", f"type=fuse,name=f0,disk=d0,mountpoint={mountpoint}")
    (mount,) = (e["mount"] for e in disk.daemon.status()["exports"] if e["name"] == "f0")
    if not mount["passthrough"]:
        raise r.Skipped(f"no passthrough: {mount.get('passthrough-reason')}")
    r.message_of(disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S), "stays ready", "f0", "passthrough=off")
    there = m.job(disk, name)
    r.require(there["status"] == "ready" and "passthrough=off" in there["error"], f"listed as {there}")
    r.require(disk.shown() == ("raw", str(disk.path)), f"listed as {disk.shown()}")
    disk.cli("export", "remove", "f0")
    m.complete(disk, name)
    r.require("error" not in m.job(disk, name), f"it ended as {m.job(disk, name)}")
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()


@pytest.mark.parametrize("how", ("it answers", "a copy meanwhile"))
def test_old_storage_that_hangs_at_the_switch(rig, mounts, marks, how):
    """The job stays ready. It is completed when the storage answers, or ends with a complete copy before. The image of the disk is a
    file of another daemon."""
    tag = how.replace(" ", "-")
    below = Disk(rig, image(rig, f"below-{tag}", "raw"), "raw", name=f"below-{tag}")
    with open(below.file, "r+b", buffering=0) as f:
        f.write(os.urandom(8 << 20))
    disk = Disk(rig, below.file, "raw", name=f"old-{tag}", fuse=False, socket=True)
    new = rig.dir / f"old-{tag}-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    below.daemon.child.suspend()
    done = disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "disk d0 took nothing for 15 s", "complete the job again", f"'vshunt job complete {name} --no-switch'")
    r.require(m.job(disk, name)["status"] == "ready", f"listed as {m.job(disk, name)}")
    if how == "it answers":
        below.daemon.child.resume()
        m.complete(disk, name)
        r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    else:
        m.complete(disk, name, "--no-switch")
        r.require(os.listxattr(new) == [], f"marked as {os.listxattr(new)}")
        disk.cli("disk", "add", f"name=d1,format=raw,file={new}")
        disk.cli("disk", "remove", "d1")
        below.daemon.child.resume()
    disk.quit()
    below.quit()
    r.require(new.read_bytes() == below.path.read_bytes(), "the target is another")


def test_one_request_that_hangs_does_not_hold_up_the_others(rig, mounts):
    """A mirror that is ready looks every 200 ms for what guests have written, for which it holds them for a moment."""
    hanging = m.HangingDisk(rig, "beside")
    disk = hanging.disk
    new = rig.dir / "beside-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    fd, block = os.open(disk.file, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
    hanging.begin()
    try:
        reads = itertools.count()

        def enough():
            at = next(reads)
            r.require(os.preadv(fd, [block], at * BLOCK) == BLOCK and block[0] == 5, "a read failed")
            return at == 400

        # If they were held up for 10 s of each 10.2 s, the limit would be over before.
        r.wait_for("400 reads", enough)
        r.require(hanging.request.is_alive(), "the write has ended")
    finally:
        os.close(fd)
        hanging.end()
    m.complete(disk, name)
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    hanging.quit()
    data = new.read_bytes()
    r.require(data[20 * MIB : 20 * MIB + BLOCK] == b"\x07" * BLOCK, "the target lacks the write")


def test_a_target_that_is_removed_while_guests_are_held(rig, mounts):
    """The disk does not continue in a file without a name."""
    hanging = m.HangingDisk(rig, "removed")
    disk, new = hanging.disk, rig.dir / "removed-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    hanging.begin()
    argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "complete", name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as completing:
        # It would have found the file before.
        hanging.wait_until_held()
        new.unlink()
        hanging.end()
        _, said = completing.communicate(timeout=m.QUIET_S)
    r.require(completing.returncode == 1 and "was removed or replaced" in said, f"it said {said!r}")
    r.require(disk.shown() == ("qcow2", str(hanging.path)), f"listed as {disk.shown()}")
    hanging.quit()


def test_an_export_that_is_added_to_a_disk_whose_target_loses_writes(rig):
    """Its guest counts on all completed writes, which a target without a journal may lose. The job stays ready."""
    disk = Disk(rig, image(rig, "safe", "raw"), "raw", name="safe", fuse=False)
    old = rig.dir / "old.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-o", "compat=0.10", old, "32M")
    disk.cli("disk", "add", f"name=far,format=qcow2,file={old}")
    name = m.start(disk, "--target", "far", "--speed", "max")
    m.ready(disk, name)
    disk.cli("export", "add", f"type=vhost-user-blk,name=e1,disk=d0,socket={disk.socket}")
    done = disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "disk far may lose completed writes", "compat=1.1", "remove the exports of d0")
    # Both remedies.
    disk.cli("job", "cancel", name)
    disk.cli("disk", "remove", "far")
    qemu_img("amend", "-f", "qcow2", "-o", "compat=1.1", old)
    disk.cli("disk", "add", f"name=far,format=qcow2,file={old}")
    name = m.start(disk, "--target", "far", "--speed", "max")
    m.ready(disk, name)
    disk.cli("job", "cancel", name)
    disk.cli("disk", "remove", "far")
    qemu_img("amend", "-f", "qcow2", "-o", "compat=0.10", old)
    disk.cli("disk", "add", f"name=far,format=qcow2,file={old}")
    r.message_of(disk.cli("mirror", "d0", "--target", "far", check=False), "disk far may lose completed writes")
    disk.cli("export", "remove", "e1")
    name = m.start(disk, "--target", "far", "--speed", "max")
    m.ready(disk, name)
    m.complete(disk, name)
    r.require(disk.shown() == ("qcow2", str(old)), f"listed as {disk.shown()}")
    disk.quit()


def test_guests_that_write_too_fast(rig):
    """The job stays ready and says why, also by an event. It is completed when their writes are limited, as it says."""
    disk = Disk(rig, image(rig, "outrun", "raw", 64), "raw", name="outrun", fuse=False, socket=True)
    load = bench(rig, disk, "outrun-bench")
    qmp = b.Qmp(disk.daemon)
    # On a busy machine the load may not run in that millisecond: then the mirror is made once more.
    for turn in range(10):
        name = m.start(disk, "--to", rig.dir / f"outrun-{turn}.raw", "--format", "raw", "--speed", "max")
        m.ready(disk, name)
        done = disk.cli("job", "complete", name, "--hold", "1ms", check=False, timeout_s=m.QUIET_S)
        if done.returncode != 0:
            break
    r.message_of(done, "stays ready", "guests of disk d0 write faster", "may be held for 1 ms", "vshunt limit", "--hold")
    told = lambda e: e["event"] == "BLOCK_JOB_READY" and "write faster" in e["data"].get("error", "")  # noqa: E731
    r.wait_for("the event", lambda: qmp.call("query-version") and any(told(e) for e in qmp.events))
    disk.cli("limit", "e0", "--iops-write", "50")
    m.complete(disk, name)
    disk.cli("limit", "e0", "--off")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()


@pytest.mark.parametrize("what", ("write", "read"))
def test_a_target_that_hangs_while_guests_are_held(rig, mounts, what):
    """If it lacks a write, guests go on after twice the time that was allowed, and the job waits for it. If it has all, and does not
    make it stable, they go on after 15 s, and the job fails. The target is a file of another daemon."""
    hanging = m.HangingDisk(rig, f"held-{what}")
    disk, far = hanging.disk, Disk(rig, image(rig, f"held-{what}-far", "raw"), "raw", name=f"held-{what}-far")
    disk.cli("disk", "add", f"name=far,format=raw,file={far.file}")
    name = m.start(disk, "--target", "far", "--speed", "max")
    m.ready(disk, name)
    hanging.begin(what)
    argv = [r.binary("vshunt"), "-c", disk.daemon.control, "job", "complete", name, "--hold", "2s"]
    with subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as completing:
        hanging.wait_until_held()
        far.daemon.child.suspend()
        hanging.end()
        with open(disk.file, "r+b", buffering=0) as f:
            f.write(b"x" * BLOCK)
            os.fsync(f.fileno())
        if what == "write":
            r.require(m.job(disk, name)["status"] == "ready", f"listed as {m.job(disk, name)}")
            disk.cli("qmp", "job-cancel", f'{{ "id": "{name}" }}')
            # The disk is free, although the target hangs.
            r.wait_for("the disk is free", lambda: disk.cli("snapshot", "d0", "--to", rig.dir / "held-over.qcow2", check=False).returncode == 0)
            r.require(m.job(disk, name)["status"] == "aborting", f"listed as {m.job(disk, name)}")
        far.daemon.child.resume()
        _, said = completing.communicate(timeout=m.QUIET_S)
    words = "was cancelled" if what == "write" else "took nothing for 15 s"
    r.require(completing.returncode == 1 and words in said, f"it said {said!r}")
    r.require(max(pauses(disk)) < 60000, f"guests were held for {pauses(disk)} ms")
    m.ended(disk, name)
    disk.cli("disk", "remove", "far")
    hanging.quit()
    far.quit()


def test_guests_that_cannot_be_held(rig, mounts):
    """One of their requests hangs for 10 s. The job stays ready, and is completed when the request has ended."""
    hanging = m.HangingDisk(rig, "unheld")
    disk, new = hanging.disk, rig.dir / "unheld-new.raw"
    name = m.start(disk, "--to", new, "--format", "raw", "--speed", "max")
    m.ready(disk, name)
    hanging.begin("read")
    done = disk.cli("job", "complete", name, check=False, timeout_s=m.QUIET_S)
    r.message_of(done, "stays ready", "requests in flight", "try again when they have ended")
    hanging.end()
    m.complete(disk, name)
    r.require(disk.shown() == ("raw", str(new)), f"listed as {disk.shown()}")
    hanging.quit()
