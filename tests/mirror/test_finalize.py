"""Jobs that wait for `job-finalize` when they have copied all (`--no-finalize`, `auto-finalize` false)."""

import backup_model as b
import mirror_model as m
import pytest
import rig as r
from snapshot_model import Disk, bench, checked, image


def pending(disk, name):
    r.wait_for(f"{name} is pending", lambda: m.job(disk, name)["status"] == "pending", m.QUIET_S)


@pytest.mark.parametrize("kind", ("backup", "commit", "mirror", "stream"))
def test_each_kind(rig, kind):
    """It is pending until the command comes, while guests write; then it ends as others do."""
    base = image(rig, f"each-{kind}", "qcow2", 24)
    disk = Disk(rig, base, "qcow2", name=f"each-{kind}", fuse=False, socket=True)
    over, new = rig.dir / f"each-{kind}-over.qcow2", rig.dir / f"each-{kind}-new.qcow2"
    load = bench(rig, disk, f"each-{kind}-bench", "--range", "16M")
    disk.snapshot(over)
    start = {"backup": ("backup", "start", "d0", "--to", new), "mirror": ("mirror", "d0", "--to", new)}
    said = disk.cli(*start.get(kind, (kind, "d0")), "--no-finalize", "--speed", "max", "--wait", timeout_s=m.QUIET_S).stdout
    name = f"{kind}0"
    if kind == "mirror":
        r.message_of(disk.cli("job", "finalize", name, check=False), "is ready", "completed first")
        said = disk.cli("job", "complete", name, "--hold", "7s", timeout_s=m.QUIET_S).stdout
    r.require("is pending" in said and f"vshunt job finalize {name}" in said, f"it said {said!r}")
    pending(disk, name)
    for _ in range(2):
        requests = lambda: sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0")  # noqa: E731
        before = requests()
        r.wait_for("requests", lambda: requests() > before + 100)
    r.require(m.job(disk, name)["status"] == "pending", f"listed as {m.job(disk, name)}")
    r.require(disk.shown()[1] == str(over), f"listed as {disk.shown()}")
    for _ in range(5):
        done = disk.cli("job", "finalize", name, check=False, timeout_s=m.QUIET_S)
        # On a busy machine, guests may write too fast for a mirror.
        if kind != "mirror" or "stays ready" not in done.stderr:
            break
        m.complete(disk, name)
    r.require(done.returncode == 0, f"it is not finalized: {done.stderr}")
    there = m.job(disk, name)
    r.require(there["status"] == "concluded" and "error" not in there, f"it ended as {there}")
    where = {"commit": base, "mirror": new}.get(kind, over)
    r.require(disk.shown()[1] == str(where), f"listed as {disk.shown()}")
    moved = f"d0 continues in {where}; serve it by this name from now on\n" if where != over else ""
    r.require(done.stdout == moved, f"it said {done.stdout!r}")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    checked(where)
    if kind == "backup":
        checked(new)


@pytest.mark.parametrize("kind", ("backup", "commit", "mirror", "stream"))
def test_cancelled_while_pending(rig, kind):
    """The disk stays where it is, and the job is over."""
    disk = Disk(rig, image(rig, f"off-{kind}", "qcow2", 24), "qcow2", name=f"off-{kind}", fuse=False, socket=True)
    over, new = rig.dir / f"off-{kind}-over.qcow2", rig.dir / f"off-{kind}-new.qcow2"
    disk.snapshot(over)
    start = {"backup": ("backup", "start", "d0", "--to", new), "mirror": ("mirror", "d0", "--to", new)}
    disk.cli(*start.get(kind, (kind, "d0")), "--no-finalize", "--speed", "max", "--wait", timeout_s=m.QUIET_S)
    name = f"{kind}0"
    if kind == "mirror":
        disk.cli("job", "complete", name, timeout_s=m.QUIET_S)
    pending(disk, name)
    disk.cli("job", "cancel", name)
    r.require(m.job(disk, name)["cancelled"], f"it ended as {m.job(disk, name)}")
    r.require(disk.shown()[1] == str(over) and not new.exists(), f"listed as {disk.shown()}")
    r.message_of(disk.cli("job", "finalize", name, check=False), "is over")
    disk.quit()


def test_a_daemon_that_ends_while_a_job_is_pending(rig):
    """It ends at once, and the disk is where it was. Before that, the job is refused what it cannot do any more."""
    path = image(rig, "ends", "qcow2", 24)
    disk = Disk(rig, path, "qcow2", name="ends", fuse=False, socket=True)
    load = bench(rig, disk, "ends-bench", "--range", "16M")
    new = rig.dir / "ends-new.qcow2"
    disk.cli("mirror", "d0", "--to", new, "--no-finalize", "--speed", "max", "--wait", timeout_s=m.QUIET_S)
    disk.cli("job", "complete", "mirror0", "--hold", "7s", timeout_s=m.QUIET_S)
    pending(disk, "mirror0")
    for command, words in (("pause", "waits to be finalized"), ("complete", "waits to be finalized"), ("dismiss", "is not over")):
        r.message_of(disk.cli("job", command, "mirror0", check=False), words)
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    r.require(not new.exists(), "the target is still there")
    checked(path)


def test_qemus_commands(rig):
    disk = Disk(rig, image(rig, "qmp", "raw"), "raw", name="qmp", fuse=False, socket=True)
    qmp = b.Qmp(disk.daemon)
    disk.cli("disk", "add", f"name=far,format=raw,file={image(rig, 'qmp-far', 'raw')}")
    qmp.call("blockdev-mirror", device="d0", target="far", sync="full", **{"job-id": "j0", "auto-finalize": False})
    r.wait_for("it is ready", lambda: m.job(disk, "j0")["status"] == "ready")
    qmp.call("job-finalize", error="completed first", id="j0")
    qmp.call("job-complete", id="j0")
    pending(disk, "j0")
    (job,) = qmp.call("query-block-jobs")
    r.require(job["status"] == "pending" and not job["auto-finalize"] and job["auto-dismiss"], f"listed as {job}")
    qmp.call("job-complete", error="waits to be finalized", id="j0")
    qmp.call("job-finalize", id="j0")
    r.wait_for("it ends", lambda: m.job(disk, "j0") is None)
    told = lambda: [e["data"] for e in qmp.events if e["event"] == "BLOCK_JOB_PENDING"]  # noqa: E731
    r.wait_for("the event", lambda: qmp.call("query-version") and told())
    r.require(told() == [{"type": "mirror", "id": "j0"}], f"the events: {qmp.events}")
    disk.cli("disk", "add", f"name=d1,format=raw,file={image(rig, 'qmp-1', 'raw')}")
    disk.snapshot(rig.dir / "qmp-over.qcow2")
    for command, more in (("blockdev-backup", {"target": "d1", "sync": "full"}), ("block-stream", {}), ("block-commit", {})):
        if command == "block-commit":
            disk.snapshot(rig.dir / "qmp-over2.qcow2")
        name = command[-6:]
        qmp.call(command, device="d0", **more, **{"job-id": name, "auto-finalize": False})
        pending(disk, name)
        qmp.call("block-job-finalize", id=name)
        r.wait_for(f"{command} ends", lambda name=name: m.job(disk, name) is None)
    qmp.call("blockdev-backup", device="d0", target="d1", sync="full", **{"job-id": "j1", "auto-dismiss": False})
    r.wait_for("it ends", lambda: m.job(disk, "j1")["status"] == "concluded")
    qmp.call("job-finalize", error="is over", id="j1")
    disk.quit()
