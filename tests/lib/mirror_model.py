"""Helpers for the tests of mirrors."""

import json
import mmap
import os
import re
import threading
import time

import nbd_servers as n
import rig as r
from snapshot_model import BLOCK, MIB, Disk, image, qemu_img

QUIET_S = 120
# Machines that run tests are slow.
HOLD = ("--hold", "7s")
SWITCH = ("--switch", *HOLD)


def start(disk, *arguments, timeout_s=QUIET_S):
    """Starts a mirror. Returns the name of its job."""
    return disk.cli("mirror", "d0", *arguments, timeout_s=timeout_s).stdout.strip()


def job(disk, name):
    """What is known of a job, or None."""
    jobs = json.loads(disk.cli("job", "list", "--json").stdout)
    return next((job for job in jobs if job["id"] == name), None)


def in_use(disk):
    """The file or URI that disk d0 is in, as it is listed."""
    daemon = getattr(disk, "daemon", disk)
    return next(d.get("file") or d["uri"] for d in daemon.status()["disks"] if d["name"] == "d0")


def ready(disk, name):
    """Waits until a mirror can be completed."""

    def is_ready():
        there = job(disk, name)
        r.require(there and there["status"] != "concluded", f"the job ended: {there}")
        return there["status"] == "ready"

    r.wait_for(f"{name} is ready", is_ready, QUIET_S)


def complete(disk, name, *arguments):
    """Completes a mirror. On a busy machine, guests may write too fast for it, or their requests take too long, and it stays
    ready: then tries again."""
    for _ in range(5):
        done = disk.cli("job", "complete", name, *HOLD, *arguments, check=False, timeout_s=QUIET_S)
        if done.returncode == 0:
            where = "" if "--no-switch" in arguments else f"d0 continues in {in_use(disk)}; serve it by this name from now on\n"
            r.require(done.stdout in (where, f"{name} is pending; 'vshunt job finalize {name}' ends it\n"), f"it said {done.stdout!r}")
            return
        if "stays ready" not in done.stderr:
            break
    raise r.Failed(f"{name} is not completed: {done.stderr}")


def switched(disk, *arguments):
    """Mirrors a disk and switches it, by one command, or more if the job stays ready."""
    done = disk.cli("mirror", "d0", *arguments, *SWITCH, check=False, timeout_s=QUIET_S)
    if done.returncode == 0:
        where = f"d0 continues in {in_use(disk)}; serve it by this name from now on\n"
        r.require(done.stdout == where, f"it said {done.stdout!r}")
        return
    name = re.search(r"job (\S+) stays ready", done.stderr)
    r.require(name, f"d0 is not switched: {done.stderr}")
    complete(disk, name[1])


def ended(disk, name):
    """Waits until a job has ended. Returns what is known of it."""
    r.wait_for(f"{name} ends", lambda: job(disk, name)["status"] == "concluded", QUIET_S)
    return job(disk, name)


def small_folder(rig, name, size):
    """A file system of this size. The caller unmounts it."""
    folder = rig.dir / name
    folder.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])
    return folder


def zeroes(path, mib):
    """A raw file without data."""
    with open(path, "wb") as f:
        f.truncate(mib * MIB)
    return path


class Served:
    """A daemon with disk `d0`, which a verified load uses."""

    def __init__(self, rig, disk, written="16M"):
        self.daemon = r.Daemon(rig, "-v", "--disk", disk, "--export", n.export(rig))
        self.load = r.Child(rig, "load", n.load(rig, "--range", written, "--runtime", r.FOREVER))
        r.wait_for("requests", lambda: any(q["requests"] for q in self.daemon.status()["queues"]))

    def cli(self, *arguments, **more):
        return self.daemon.cli(*arguments, **more)

    def shown(self):
        (disk,) = (disk for disk in self.daemon.status()["disks"] if disk["name"] == "d0")
        return disk["format"]

    def more(self):
        """Requires that guests go on."""
        requests = lambda: sum(q["requests"] for q in self.daemon.status()["queues"] if q["export"] == "vm0")  # noqa: E731
        before = requests()
        r.wait_for("more requests", lambda: requests() > before + 50)

    def end(self):
        r.require(self.load.interrupt(120) == 0, f"the load failed: {self.load.tail()}")
        r.require(self.daemon.child.stop() == 0, f"vshunt ended with {self.daemon.child.process.returncode}: {self.daemon.child.tail()}")


class HangingDisk:
    """A mounted disk whose image has data in its first 8 MiB. What is behind is in a backing image whose storage hangs while it is
    told to: a file of another daemon."""

    def __init__(self, rig, name, path=None):
        """`path`: where the image is made."""
        self.below = Disk(rig, image(rig, f"{name}-below", "raw"), "raw", name=f"{name}-below")
        self.path = path or rig.dir / f"{name}.qcow2"
        qemu_img("create", "-q", "-f", "qcow2", "-b", self.below.file, "-F", "raw", self.path)
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 5 0 8M", self.path])
        self.disk = Disk(rig, self.path, "qcow2", name=name)

    def begin(self, what="write"):
        """Begins a request that does not end until the storage answers. A write fills a part of a cluster."""
        self.below.daemon.child.suspend()
        self.request = threading.Thread(target=self._request, args=(what,), daemon=True)
        self.request.start()
        # Until then the disk can be drained, and a job can end.
        r.wait_for("the request is in flight", lambda: any(q["in-flight"] for q in self.disk.daemon.status()["queues"] if q["export"] == "f0"))

    def _request(self, what):
        fd, block = os.open(self.disk.file, os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, BLOCK)
        block.write(b"\x07" * BLOCK)
        (os.pwritev if what == "write" else os.preadv)(fd, [block], 20 * MIB)
        os.close(fd)

    def wait_until_held(self):
        """Waits until the guests of the disk are held, for 10 s at most, because the request does not end: no read of what the image
        has ends either."""
        fd, ended = os.open(self.disk.file, os.O_RDONLY | os.O_DIRECT), [time.monotonic()]

        def read():
            block = mmap.mmap(-1, BLOCK)
            while self.request.is_alive():
                os.preadv(fd, [block], 0)
                ended[0] = time.monotonic()
                time.sleep(0.01)
            os.close(fd)

        def are_held():
            r.require(self.request.is_alive(), "the request has ended")
            return time.monotonic() - ended[0] > 2

        threading.Thread(target=read, daemon=True).start()
        r.wait_for("guests are held", are_held)

    def end(self):
        self.below.daemon.child.resume()
        self.request.join(r.WAIT_S)
        r.require(not self.request.is_alive(), "the request does not end")

    def quit(self):
        self.disk.quit()
        self.below.quit()
