"""Helpers for the tests of backups.

They are images, a disk with its contents, threads that write while a backup begins, and QMP
events.
"""

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time

import fuse_mount as m
import rig as r

MIB = 1 << 20
BLOCK = 4096
# Bytes of a Disk.
SIZE = 16 * MIB
# Bytes of a disk of `busy`.
BUSY_SIZE = 24 * MIB


class Suite(m.Suite):
    """The folder for the images of a test file, and the guardian's clock."""

    def path(self, name):
        return self.rig.dir / name


def qemu_img(*arguments, check=True):
    return r.run([r.tool("qemu-img", "qemu-utils"), *arguments], check=check, timeout_s=120)


def create(path, size_bytes):
    """An empty qcow2 image."""
    qemu_img("create", "-q", "-f", "qcow2", path, str(size_bytes))
    return path


def checked(path, leaks=False):
    """`qemu-img check` finds nothing, or leaks at worst."""

    def look():
        done = qemu_img("check", "-f", "qcow2", path, check=False)
        # A killed daemon's io_uring holds the locks until it is taken apart.
        return done if "lock" not in done.stderr else None

    done = r.wait_for(f"the lock of {path.name} goes", look)
    r.require(done.returncode in ((0, 3) if leaks else (0,)), f"qemu-img check: {done.stdout}{done.stderr}")


def contents(suite, path, form):
    """All bytes of an image, as QEMU reads it."""
    if form == "raw":
        return path.read_bytes()
    flat = suite.path("flat.raw")
    qemu_img("convert", "-f", form, "-O", "raw", path, flat)
    data = flat.read_bytes()
    flat.unlink()
    return data


def equal(got, want, what):
    """Two byte strings; names the first block that differs."""
    r.require(len(got) == len(want), f"{what}: {len(got)} bytes, not {len(want)}")
    if got == want:
        return
    wrong = [at for at in range(0, len(want), BLOCK) if got[at : at + BLOCK] != want[at : at + BLOCK]]
    raise r.Failed(f"{what}: {len(wrong)} blocks differ, the first at byte {wrong[0]}")


def source(suite, name, kind, size_bytes, **more):
    """A mounted disk d0 of 'raw', 'memory' (raw, in memory), 'qcow2' or 'ram'; its image is
    `.image`, None for ram."""
    if kind == "ram":
        return m.Mount(suite, name, disk=f"format=ram,size={size_bytes}", **more)
    if kind == "qcow2":
        image = create(suite.path(f"{name}.qcow2"), size_bytes)
        mount = m.Mount(suite, name, disk=f"format=qcow2,file={image}", **more)
        mount.image = image
        return mount
    return m.Mount(suite, name, image=suite.image(f"{name}.img", size_bytes, kind == "memory"), **more)


def put(path, offset, data):
    """Writes all of it, past the page cache."""
    with m.Opened(path, os.O_RDWR | os.O_DIRECT) as fd:
        while data:
            n = os.pwrite(fd, data[: 8 * MIB], offset)
            offset, data = offset + n, data[n:]


def job(daemon, name="backup0"):
    """A job as `status --json` has it; None when there is none."""
    return next((j for j in daemon.status()["jobs"] if j["id"] == name), None)


def bitmap(daemon, name="b0"):
    """A bitmap of d0 as `bitmap list --json` has it."""
    listed = json.loads(daemon.cli("bitmap", "list", "d0", "--json").stdout)
    return next((b for b in listed if b["name"] == name), None)


class Disk:
    """A mounted disk and its contents."""

    def __init__(self, suite, name, kind, **more):
        self.suite = suite
        self.rng = random.Random(name)
        self.mount = source(suite, name, kind, SIZE, **more)
        self.cli = self.mount.cli
        self.data = bytearray(SIZE)
        self.write(MIB, self.rng.randbytes(6 * MIB))

    def write(self, offset, data):
        put(self.mount.path, offset, data)
        self.data[offset : offset + len(data)] = data

    def change(self):
        """Writes, zeroes and discards here and there."""
        for number in range(12):
            offset = self.rng.randrange(SIZE - MIB)
            length = self.rng.choice((1, 700, 4096, 70000, 300000))
            if number % 3:
                self.write(offset, self.rng.randbytes(length))
                continue
            offset, length = offset & ~4095, self.rng.randrange(1, 256) * 4096
            with m.Opened(self.mount.path) as fd:
                m.fallocate(fd, m.PUNCH if number % 2 else m.ZERO_RANGE, offset, length)
            self.data[offset : offset + length] = bytes(length)

    def backup(self, *arguments, check=True):
        return self.cli("backup", "start", "d0", *arguments, "--wait", check=check)


def small(suite):
    """A folder with room for 2 MiB."""
    folder = suite.path("small")
    if not folder.exists():
        folder.mkdir()
        done = r.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False)
        if done.returncode != 0:
            folder.rmdir()
            raise r.Skipped(f"no tmpfs can be mounted: {done.stderr.strip()}")
    return folder


class Writers:
    """Threads that each write records to places of their own in a known order, one after the other.

    Record i of a thread goes to its place order[i % len(order)], and repeats the thread's number
    and i + 1. An image then shows how many writes of each thread it has, and if one is missing.
    """

    def __init__(self, path, threads, places, length=BLOCK, offset=0, step=BLOCK, seed=1):
        self.path, self.length, self.offset, self.step = path, length, offset, step
        self.counts = [0] * threads
        self.errors = []
        self.stopping, self.holding = threading.Event(), threading.Event()
        self.orders = []
        all_places = list(range(threads * places))
        random.Random(seed).shuffle(all_places)
        for n in range(threads):
            self.orders.append(all_places[n * places : (n + 1) * places])
        self.threads = [threading.Thread(target=self.write, args=(n,), daemon=True) for n in range(threads)]
        for thread in self.threads:
            thread.start()

    def record(self, thread, number):
        return (struct.pack("<IQ", thread + 1, number) * (self.length // 12 + 1))[: self.length]

    def at(self, place):
        return place * self.step + self.offset

    def write(self, thread):
        order = self.orders[thread]
        try:
            with m.Opened(self.path, os.O_RDWR | os.O_DIRECT) as fd:
                while not self.stopping.is_set():
                    if self.holding.is_set():
                        self.stopping.wait(0.01)
                        continue
                    number = self.counts[thread]
                    data = self.record(thread, number + 1)
                    n = os.pwrite(fd, data, self.at(order[number % len(order)]))
                    r.require(n == len(data), f"a write of {n} bytes")
                    self.counts[thread] = number + 1
        except (OSError, r.Failed) as e:
            self.errors.append(e)

    def wait_each(self, more):
        """Until each has done so many more writes."""
        start = list(self.counts)
        r.wait_for(
            f"each writer's next {more} writes",
            lambda: self.errors or all(c >= s + more for c, s in zip(self.counts, start)),
        )
        self.check()

    @contextlib.contextmanager
    def held(self):
        """They begin no write meanwhile."""
        self.holding.set()
        try:
            yield
        finally:
            self.holding.clear()

    def check(self):
        r.require(not self.errors, f"a write failed while a backup ran: {self.errors[:1]}")

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(r.WAIT_S)
        self.check()

    def expect(self, data, before, after):
        """`data` has the first N writes of each thread, before <= N <= after. Returns these N."""
        numbers = []
        for thread, order in enumerate(self.orders):
            found = {}
            for place in order:
                have = data[self.at(place) : self.at(place) + self.length]
                owner, number = struct.unpack_from("<IQ", have)
                r.require(owner in (0, thread + 1), f"place {place} has a record of writer {owner - 1}, not {thread}")
                want = self.record(thread, number) if owner else bytes(self.length)
                r.require(have == want, f"place {place} of writer {thread} is torn")
                found[place] = number
            last = max(found.values())
            least, most = before[thread], after[thread] + 1
            r.require(least <= last <= most, f"writer {thread}: {last} writes are in the backup, not {least} to {most}")
            for index, place in enumerate(order):
                # The last of its writes to that place among the first `last`.
                turns = (last - index - 1) // len(order)
                want = turns * len(order) + index + 1 if last > index else 0
                r.require(found[place] == want, f"writer {thread}: {last} writes are there, but place {place} is of write {found[place]}, not {want}")
            numbers.append(last)
        return numbers


def begin_point(mount, name, busy, threads, unaligned):
    """Writers of the first `busy` bytes of a mounted disk of BUSY_SIZE, which are at work; the end of the disk is empty. -> (the bytes between,
    which nobody writes, the writers)."""
    still = random.Random(name).randbytes(BUSY_SIZE - busy - 4 * MIB)
    put(mount.path, busy, still)
    # Unaligned: less than a block and over the end of one. Two blocks are read and written back.
    shape = {"length": 1000, "offset": 3700, "step": 2 * BLOCK} if unaligned else {}
    places = busy // threads // shape.get("step", BLOCK) // 2
    writers = Writers(mount.path, threads, places, seed=len(name), **shape)
    writers.wait_each(30)
    return still, writers


def end_point(suite, mount, path, form, still, writers, before, after):
    """No request has failed, and the backup at `path` has the first writes of each writer: `before` to `after` of them. It is
    removed."""
    writers.stop()
    broken = [q for q in mount.queues() if q["errors"]]
    r.require(not broken, f"requests failed: {broken}")
    mount.stop()
    if form == "qcow2":
        checked(path)
    data = contents(suite, path, form)
    busy = BUSY_SIZE - 4 * MIB - len(still)
    equal(data[busy:], still + bytes(4 * MIB), "what nobody wrote")
    writers.expect(data, before, after)
    path.unlink()


def part(path):
    """The name of a backup's file until the backup is complete."""
    return path.with_name(path.name + ".part")


def busy(suite, name, kind, **more):
    """A mounted disk full of data, and writers on it."""
    mount = source(suite, name, kind, BUSY_SIZE, **more)
    put(mount.path, 0, random.Random(name).randbytes(BUSY_SIZE))
    return mount, Writers(mount.path, 2, 512)


def open_files(daemon, path):
    """How many descriptors of the daemon are of a file that had this path."""
    return list(r.open_files(daemon.child.pid)).count(f"{path} (deleted)")


def gone(daemon, path):
    """The fleecing file has no name, and the daemon closes it soon."""
    r.require(not path.exists(), f"{path} has its name still")
    r.wait_for(f"{path.name} is closed", lambda: not open_files(daemon, path))


def ended(mount, name, *words):
    """The job failed, and says so. On a slow disk it takes a while to get as far as that."""
    r.message_of(mount.cli("job", "wait", name, check=False, timeout_s=300), f"job {name} failed", *words, code=(1,))
    shown = job(mount.daemon, name)
    r.require(shown["status"] == "concluded" and shown["error"] and not shown["cancelled"], f"it is shown as {shown}")
    r.require("failed" in mount.cli("job", "list").stdout, "`job list` does not show that it failed")


def gone_on(mount, writers):
    """Writers go on without an error."""
    writers.wait_each(20)
    broken = [q for q in mount.queues() if q["errors"]]
    r.require(not broken, f"requests failed: {broken}")


def load_argv(socket, *more):
    return [
        *(r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "randrw", "--verify", "--queues", "4", "--iodepth", "16"),
        *("--bs", "16k", "--flush-every", "50", "--quiet", *more),
    ]


class Qmp:
    """A client that keeps the events that it is told."""

    def __init__(self, daemon):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(r.WAIT_S)
        self.socket.connect(str(daemon.control))
        self.lines = self.socket.makefile("r")
        self.events = []
        r.require("QMP" in json.loads(self.lines.readline()), "no greeting")
        self.call("qmp_capabilities")

    def call(self, command, **arguments):
        """Returns the result of a command. With `error=WORD` it must fail with this word."""
        error = arguments.pop("error", None)
        arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = json.loads(self.lines.readline())
            if "event" in answer:
                self.events.append(answer)
            elif error:
                text = answer.get("error", {}).get("desc", "")
                r.require(error in text, f"{command} {arguments}: {answer}, not an error about {error}")
                return text
            else:
                r.require("return" in answer, f"{command} {arguments}: {answer.get('error')}")
                return answer["return"]

    def until(self, name, who):
        """The event of that name about that job or disk; those before it are kept."""
        end = time.monotonic() + r.WAIT_S
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event["event"] == name and who in map(event["data"].get, ("id", "device", "name")):
                    return event
            seen = len(self.events)
            r.require(time.monotonic() < end, f"no event {name} of {who}; there were {self.events}")
            self.events.append(json.loads(self.lines.readline()))

    def story(self, who):
        """The states and the end of one job, in order."""
        of = [e for e in self.events if who in (e["data"].get("id"), e["data"].get("device"))]
        return [e["data"].get("status", e["event"]) for e in of]
