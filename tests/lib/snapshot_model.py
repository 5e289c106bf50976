"""Helpers for the tests of snapshots: images, a daemon with one disk, numbered writes."""

import contextlib
import hashlib
import os
import random
import re
import subprocess
import threading
import time

import rig as r

MIB = 1 << 20
BLOCK = 4096
OVERLAY = "user.vshunt.overlay"


def qemu_img(*arguments, check=True, timeout_s=120):
    return r.run([r.tool("qemu-img", "qemu-utils"), *arguments], check=check, timeout_s=timeout_s)


def checked(path, leaks=False):
    """`qemu-img check` finds nothing, or leaks at worst."""
    # A killed daemon's io_uring holds the locks until it is taken apart.
    end = time.monotonic() + r.WAIT_S
    while True:
        done = qemu_img("check", "-f", "qcow2", path, check=False)
        if "lock" not in done.stderr or time.monotonic() > end:
            break
        time.sleep(0.05)
    r.require(done.returncode in ((0, 3) if leaks else (0,)), f"qemu-img check: {done.stdout}{done.stderr}")


def flat(path, form, to):
    """The contents of an image, in a raw file."""
    qemu_img("convert", "-f", form, "-O", "raw", path, to)
    return to


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def image(rig, name, form, size=32):
    """A new image, of zeroes. Tests of a file share a folder: a name belongs to one of them."""
    path = rig.dir / f"{name}.{form}"
    r.require(not path.exists(), f"{path.name} is another test's")
    qemu_img("create", "-q", "-f", form, path, size * MIB)
    return path


def write_synced(path, rand, synced, count=20):
    """Writes to random blocks of a disk, flushes, and takes note of what each block has."""
    with open(path, "r+b", buffering=0) as f:
        for _ in range(count):
            block, value = rand.randrange(32 * MIB // BLOCK), rand.randrange(1, 256)
            os.pwrite(f.fileno(), bytes([value]) * BLOCK, block * BLOCK)
            synced[block] = value
        os.fsync(f.fileno())


class Disk:
    """A daemon with one disk: over a socket, as a file, or both."""

    def __init__(self, rig, path, form, *, name, fuse=True, socket=False, keys="", queues=2):
        self.rig, self.name, self.path = rig, name, path
        self.file, self.socket = rig.dir / f"{name}.mnt", rig.dir / f"{name}.sock"
        arguments = ["-v", "--disk", f"name=d0,format={form},file={path}{keys}"]
        if socket:
            arguments += ["--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={self.socket},queues={queues},workers=per-queue"]
        if fuse:
            # One disk has one writer.
            writable = "off" if socket else "on"
            mount = f"type=fuse,name=f0,disk=d0,mountpoint={self.file},writable={writable},passthrough=off,queues=2"
            arguments += ["--export", mount]
        self.daemon = r.Daemon(rig, *arguments, name=name)

    def cli(self, *arguments, **more):
        return self.daemon.cli(*arguments, **more)

    def snapshot(self, to, **more):
        return self.cli("snapshot", "d0", "--to", to, **more)

    def shown(self):
        """Format and file of the disk, as they are listed."""
        return self.shown_as("d0")

    def shown_as(self, name):
        (disk,) = (d for d in self.daemon.status()["disks"] if d["name"] == name)
        return disk["format"], disk["file"]

    def quit(self):
        self.cli("quit", "--force")
        code = self.daemon.child.wait()
        r.require(code == 0, f"the daemon ended with {code}: {self.daemon.child.tail()}")

    def kill(self):
        self.daemon.child.kill()
        subprocess.run(["umount", "-l", str(self.file)], capture_output=True, check=False)


class Writer:
    """Writes numbered blocks to a file, one after the other, so that a point in time is a number.
    A copy of the disk at that time has all writes up to the number and none after it."""

    def __init__(self, path, lane=0, lanes=1, seed=0, first=1):
        self.fd = os.open(path, os.O_RDWR)
        self.size = os.fstat(self.fd).st_size // BLOCK
        self.lane, self.lanes, self.rng = lane, lanes, random.Random(seed + lane)
        # Where each write went, by number.
        self.log, self.first, self.errors = [], first, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            while not self._stop.is_set():
                number = self.first + len(self.log)
                block = self.rng.randrange(self.size // self.lanes) * self.lanes + self.lane
                self.log.append(block)
                os.pwrite(self.fd, bytes_of(number), block * BLOCK)
                if number % 97 == 0:
                    os.fsync(self.fd)
                if number % 13 == 0:
                    back = self.log[self.rng.randrange(len(self.log))]
                    got = number_of(os.pread(self.fd, BLOCK, back * BLOCK))
                    want = max(i for i, b in enumerate(self.log) if b == back) + self.first
                    r.require(got == want, f"block {back} has write {got}, not {want}")
        except (OSError, r.Failed) as e:
            self.errors.append(e)

    def done(self):
        """Writes that are over, at least."""
        return max(len(self.log) - 1, 0)

    def stop(self):
        self._stop.set()
        self._thread.join(r.WAIT_S)
        r.require(not self._thread.is_alive(), "a write does not end")
        with contextlib.suppress(OSError):
            os.close(self.fd)
        if self.errors:
            raise r.Failed(f"the guest saw an error: {self.errors[0]}")

    def state(self, after):
        """The expected blocks of this lane after this number of writes."""
        blocks = {}
        for i, block in enumerate(self.log[:after]):
            blocks[block] = self.first + i
        return blocks


def bytes_of(number):
    return number.to_bytes(8, "big") * (BLOCK // 8)


def number_of(block):
    first = block[:8]
    r.require(block == first * (BLOCK // 8), f"a torn block: {block[:16]!r}…{block[-16:]!r}")
    return int.from_bytes(first, "big")


def point_in_time(path, writers, least):
    """Requires that a raw file is one point in time of each writer, no earlier than `least`. Returns
    these points."""
    found, data = [], path.read_bytes()
    for writer, at_least in zip(writers, least):
        lane = range(writer.lane, len(data) // BLOCK, writer.lanes)
        there = {b: n for b in lane if (n := number_of(data[b * BLOCK : (b + 1) * BLOCK]))}
        after = max(there.values(), default=writer.first - 1) - writer.first + 1
        r.require(after >= at_least, f"{after} writes are there, and {at_least} were over before")
        want = writer.state(after)
        wrong = {b: (there.get(b, 0), want.get(b, 0)) for b in lane if there.get(b, 0) != want.get(b, 0)}
        r.require(not wrong, f"not what it was after {after} writes: {dict(list(wrong.items())[:4])}")
        found.append(after)
    return found


def pauses(disk):
    """For how long guests were held, in ms, as the daemon says."""
    text = disk.daemon.child.output()
    units = {"ns": 1e-6, "µs": 1e-3, "ms": 1, "s": 1e3}
    return [float(n) * units[u] for n, u in re.findall(r"held for ([0-9.]+)(ns|µs|ms|s)\b", text)]


def bench(rig, disk, name, *more):
    """Verified load, until it is interrupted."""
    argv = [r.binary("vshunt-bench"), "blk", "--socket", disk.socket, "--rw", "randrw", "--verify", "--queues", "2"]
    argv += ["--iodepth", "16", "--bs", "16k", "--flush-every", "50", "--runtime", r.FOREVER, "--quiet", *more]
    load = r.Child(rig, name, argv)
    r.wait_for("the load's first requests", lambda: sum(q["requests"] for q in disk.daemon.status()["queues"] if q["export"] == "e0"))
    return load


class Pair:
    """A daemon with two mounted disks. A thread writes a number to a block of the first one, waits, and writes the
    same number to the second one: the second is never ahead."""

    def __init__(self, rig, name, size=8):
        self.rig = rig
        self.paths = [image(rig, f"{name}-{n}", "qcow2", size) for n in range(2)]
        self.files = [rig.dir / f"{name}-{n}.mnt" for n in range(2)]
        arguments = ["-v"]
        for n, (path, file) in enumerate(zip(self.paths, self.files)):
            arguments += ["--disk", f"name=d{n},format=qcow2,file={path}"]
            mount = f"type=fuse,name=f{n},disk=d{n},mountpoint={file},writable=on,passthrough=off"
            arguments += ["--export", mount]
        self.daemon = r.Daemon(rig, *arguments, name=name)
        self.blocks = size * MIB // BLOCK
        self.number, self.error = 0, None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            fds = [os.open(file, os.O_RDWR) for file in self.files]
            while not self._stop.is_set():
                number = self.number + 1
                for fd in fds:
                    os.pwrite(fd, bytes_of(number), number % self.blocks * BLOCK)
                self.number = number
            for fd in fds:
                os.close(fd)
        except OSError as e:
            self.error = e

    def stop(self):
        self._stop.set()
        self._thread.join(r.WAIT_S)
        r.require(not self._thread.is_alive() and self.error is None, f"the writer: {self.error}")

    def shown(self):
        return [disk["file"] for disk in self.daemon.status()["disks"]]
