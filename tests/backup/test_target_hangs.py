"""Jobs whose target does not answer, and the end of the daemon while something does not answer.

The storage is that of another vshunt, which is stopped with SIGSTOP: an NBD server, or a file of a mount. Images whose storage answers
are closed in good order all the same.
"""

import json
import pathlib

import backup_model as b
import pytest
import rig as r
from fuse_guard import mounted

SIZE_MIB = 64
# The exit status of a daemon that ended although something had not.
UNENDED = 4


def storage(rig, kind, name):
    """Another daemon that has a disk on storage of that kind, and the keys of that disk."""
    image = rig.image(f"{name}.img", SIZE_MIB << 20)
    at = rig.dir / name
    export = f"type=nbd,name=n0,disk=t,writable=on,listen=unix:{at}"
    if kind == "mount":
        export = f"type=fuse,name=n0,disk=t,writable=on,mountpoint={at}"
    server = r.Daemon(rig, "--disk", f"name=t,file={image}", "--export", export, name=f"far-{name}")
    if kind == "mount":
        r.wait_for(f"{at} is mounted", lambda: mounted(at))
        return server, f"file={at}"
    return server, f"format=nbd,uri=nbd+unix:///n0?socket={at}"


def thin(rig, name, *more):
    """A qcow2 image with data everywhere."""
    raw = rig.image(f"{name}.raw", SIZE_MIB << 20)
    raw.write_bytes(bytes([7]) * (SIZE_MIB << 20))
    made = rig.dir / f"{name}.qcow2"
    b.qemu_img("convert", "-f", "raw", "-O", "qcow2", *more, raw, made)
    raw.unlink()
    return made


def closed(path):
    """An image that was closed in good order: nothing is to be repaired, and its bitmap says what changed."""
    b.checked(path)
    info = json.loads(b.qemu_img("info", "--output=json", path).stdout)["format-specific"]["data"]
    flags = {bitmap["name"]: bitmap["flags"] for bitmap in info.get("bitmaps", [])}
    r.require(flags == {"b0": ["auto"]}, f"{path.name} has the bitmaps {flags}")


@pytest.fixture
def hung(rig):
    """Makes a daemon with a job whose storage then stops to answer, and another disk, that of d1. Returns both daemons and the images."""
    made = []

    def make(kind, name, job="backup"):
        server, keys = storage(rig, kind, name)
        made.append(server)
        # Its own blocks are all that a commit copies.
        below = ("-B", rig.dir / name, "-F", "raw") if job == "commit" else ()
        images = [thin(rig, f"{name}-d0", *below), thin(rig, f"{name}-d1")]
        disks = [f"name=d{i},format=qcow2,file={image}" for i, image in enumerate(images)]
        if job != "commit":
            disks.append(f"name=far,{keys}")
        daemon = r.Daemon(rig, *(word for disk in disks for word in ("--disk", disk)), name=name)
        for disk in ("d0", "d1"):
            daemon.cli("bitmap", "add", disk, "b0")
        verb = {"commit": ("commit", "d0"), "mirror": ("mirror", "d0", "--target", "far"), "backup": ("backup", "start", "d0", "--target", "far")}
        daemon.cli(*verb[job], "--job", "j0", "--speed", "4M")
        r.wait_for("it copies", lambda: found(daemon)["current-progress"] > 0)
        # No request is half done then: a process does not end while a mount has one of its
        # requests.
        daemon.cli("job", "pause", "j0")
        r.wait_for("its requests have ended", lambda: not in_flight(daemon))
        server.child.suspend()
        daemon.cli("job", "resume", "j0")
        r.wait_for("a write to the target hangs", lambda: in_flight(daemon, more_read=True))
        return server, daemon, images

    yield make
    for server in made:
        server.child.resume()


def in_flight(daemon, more_read=False):
    """Whether the job has requests in flight. `more_read`: and has read more than it has written, all of which is data."""
    (queue,) = (queue for queue in daemon.status()["queues"] if queue["export"] == "j0")
    return queue["in-flight"] and (not more_read or queue["read-bytes"] > queue["write-bytes"])


def found(daemon):
    (job,) = json.loads(daemon.cli("qmp", "query-jobs").stdout)
    return job


def ends_without_it(daemon, *told):
    """The daemon is told to end, and does although something does not answer; its log."""
    daemon.child.process.terminate()
    code = daemon.child.wait()
    log = daemon.child.output()
    r.require(code == UNENDED, f"the daemon ended with {code}: {log}")
    missing = [text for text in told if text not in log]
    r.require(not missing, f"the log lacks {missing}: {log}")


@pytest.mark.root
@pytest.mark.parametrize("kind", ["nbd", "mount"])
def test_a_cancelled_job_says_what_it_waits_for_and_the_daemon_ends_without_it(hung, kind):
    _, daemon, images = hung(kind, f"cancelled-{kind}")
    refused = daemon.cli("job", "cancel", "j0", check=False)
    r.require(refused.returncode == 1, f"job cancel ended with {refused.returncode}: {refused.stderr}")
    r.message_of(refused, "j0", "disk far does not answer")
    r.require("disk far" in found(daemon)["waits-for"], f"the job is {found(daemon)}")
    table = daemon.cli("job", "list").stdout
    r.require("cancelling" in table and "waits for disk far" in table, table)
    # Its disk is free.
    again = daemon.cli("backup", "start", "d0", "--to", f"{images[0]}.backup", "--wait")
    r.require(again.returncode == 0, again.stderr)
    ends_without_it(daemon, "job j0", "disk far", "ended without job j0")
    for image in images:
        closed(image)


@pytest.mark.root
@pytest.mark.parametrize("job", ["backup", "mirror", "commit"])
def test_an_end_while_a_job_waits_for_its_target_closes_the_other_images(hung, job):
    """The job is not cancelled before."""
    kind = "mount" if job == "commit" else "nbd"
    server, daemon, images = hung(kind, f"ends-{job}", job)
    ends_without_it(daemon, "job j0")
    # The image that a commit writes is below that of the disk.
    server.child.resume()
    for image in images:
        closed(image)


@pytest.mark.root
@pytest.mark.slow
def test_an_end_while_a_target_is_made_stable(rig):
    """The flush of a backup that has copied all does not end. It fails, and its disk is closed in good order."""
    server, keys = storage(rig, "mount", "stable")
    image = thin(rig, "stable-d0")
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=qcow2,file={image}", "--disk", f"name=far,{keys}", name="stable")
    daemon.cli("bitmap", "add", "d0", "b0")
    daemon.cli("backup", "start", "d0", "--target", "far", "--job", "j0", "--no-finalize")
    r.wait_for("it is pending", lambda: found(daemon)["status"] == "pending")
    server.child.suspend()
    try:
        daemon.cli("qmp", "job-finalize", '{"id": "j0"}')
        r.message_of(daemon.cli("job", "cancel", "j0", check=False), "j0", "about to end")
        ends_without_it(daemon, "disk far is not on stable storage")
        closed(image)
    finally:
        server.child.resume()


@pytest.mark.root
def test_a_cancelled_job_ends_when_its_target_answers(rig, hung):
    server, daemon, _ = hung("nbd", "answers")
    daemon.cli("job", "cancel", "j0", check=False)
    server.child.resume()
    r.run([r.binary("vshunt"), "-c", daemon.control, "job", "wait", "j0"], check=False)
    r.require(found(daemon)["status"] == "concluded" and "waits-for" not in found(daemon), f"the job is {found(daemon)}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


@pytest.mark.root
@pytest.mark.slow
def test_an_end_that_waits_for_a_disk_has_a_limit(rig):
    """A request of a client does not end. The daemon ends before systemd kills it, and closes the images that answer."""
    far, keys = storage(rig, "mount", "hangs")
    image = thin(rig, "answers")
    guest = r.Daemon(rig, "--disk", f"name=d0,{keys},direct=off", "--disk", f"name=d1,format=qcow2,file={image}", "--export",
                     f"type=nbd,name=n0,disk=d0,listen=unix:{rig.dir}/guest.nbd", name="guest")  # fmt: skip
    guest.cli("bitmap", "add", "d1", "b0")
    far.child.suspend()
    argv = ["qemu-img", "dd", "-f", "raw", "-O", "raw", "bs=1M", "count=1", f"if=nbd+unix:///n0?socket={rig.dir}/guest.nbd",
            f"of={rig.dir}/copy"]  # fmt: skip
    reader = r.Child(rig, "reader", argv)
    r.wait_for("a read hangs", lambda: any(q["in-flight"] for q in guest.status()["queues"]))
    try:
        ends_without_it(guest, "was told to end 60 s ago and still waits for export n0")
        closed(image)
    finally:
        far.child.resume()
        reader.kill()


@pytest.mark.root
@pytest.mark.slow
def test_an_end_while_an_image_is_looked_for_has_a_limit(rig):
    """The daemon serves nothing yet: the header of its image cannot be read, to see which files it needs."""
    far, keys = storage(rig, "mount", "early")
    far.child.suspend()
    try:
        argv = [r.binary("vshunt"), "serve", "--control", rig.dir / "early.sock", "--disk", f"name=d0,format=qcow2,{keys}"]
        daemon = r.Child(rig, "vshunt-early", argv)
        r.wait_for("it waits for the image", lambda: "starting" in threads(daemon))
        daemon.process.terminate()
        code = daemon.wait()
        r.require(code == UNENDED and "do not answer" in daemon.output(), f"the daemon ended with {code}: {daemon.output()}")
    finally:
        far.child.resume()


def threads(child):
    """The names of a program's threads."""
    return {path.read_text().strip() for path in pathlib.Path(f"/proc/{child.process.pid}/task").glob("*/comm")}
