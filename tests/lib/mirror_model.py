"""Helpers for the tests of mirrors."""

import json
import re

import rig as r
from snapshot_model import MIB

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
            return
        if "stays ready" not in done.stderr:
            break
    raise r.Failed(f"{name} is not completed: {done.stderr}")


def switched(disk, *arguments):
    """Mirrors a disk and switches it, by one command, or more if the job stays ready."""
    done = disk.cli("mirror", "d0", *arguments, *SWITCH, check=False, timeout_s=QUIET_S)
    if done.returncode == 0:
        r.require(done.stdout.endswith("d0 continues in the target\n"), f"it said {done.stdout!r}")
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


def export(rig):
    """The value of --export for disk `d0`."""
    return f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir / 'vm0.sock'},queues=2,workers=2"


def load(rig, *arguments):
    """The arguments of verified load on that export."""
    argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / "vm0.sock", "--rw", "randrw", "--verify", "--bs", "4k"]
    return [*argv, "--queues", 2, "--iodepth", 16, "--stall", "120s", "--flush-every", 32, "--quiet", *arguments]


class Served:
    """A daemon with disk `d0`, which a verified load uses."""

    def __init__(self, rig, disk, written="16M"):
        self.daemon = r.Daemon(rig, "-v", "--disk", disk, "--export", export(rig))
        self.load = r.Child(rig, "load", load(rig, "--range", written, "--runtime", r.FOREVER))
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
