"""Limits of a mount: how much of its users' load gets through, with requests counted by themselves."""

import json
import os
import sys
import time

import fuse_mount as m
import pytest
import rig as r
from rates import close, during, needs_cpu

# Reads or writes of 4 KiB past the page cache by a number of threads, until a time is over; prints
# how many, and how long.
LOAD = """
import json, mmap, os, random, sys, threading, time
path, tasks, seconds, write, size = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "write", int(sys.argv[5])
done, failed = [0] * tasks, []
# Before the first request: a thread that opens it late could open the file below an ended mount.
files = [os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT) for _ in range(tasks)]
start = time.monotonic()
def run(task):
    fd = files[task]
    buffer = mmap.mmap(-1, size)
    rand = random.Random(task)
    try:
        while time.monotonic() - start < seconds:
            at = rand.randrange((16 << 20) // size) * size
            (os.pwritev if write else os.preadv)(fd, [buffer], at)
            done[task] += 1
    except OSError as e:
        failed.append(e.errno)
threads = [threading.Thread(target=run, args=(task,)) for task in range(tasks)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({"done": done, "seconds": time.monotonic() - start, "failed": failed}))
"""
DISK = "format=ram,size=16M"


def load(mount, tasks, seconds, how="read", size=4096):
    return json.loads(m.script(LOAD, mount.path, tasks, seconds, how, size))


def rate(found):
    r.require(not found["failed"], f"errors {found['failed']}")
    return during(sum(found["done"]), found["seconds"])


@pytest.mark.timed
@pytest.mark.parametrize("tasks", [1, 4])
def test_a_rate_is_kept(suite, tasks):
    suite.ours()
    mount = m.Mount(suite, f"rate{tasks}-{suite.transport}", disk=DISK, extra=",limits.iops=1500")
    found = load(mount, tasks, 5)
    close(f"reads of {tasks} tasks", rate(found), 1500)
    r.require(min(found["done"]) > 0, f"a task got nothing: {found['done']}")
    mount.cli("limit", "f0", "--bps-write", "16M")
    close("writes of 64k", rate(load(mount, tasks, 5, "write", 64 << 10)), 256)
    needs_cpu(sum(q["limited-us"] for q in mount.queues()) > 100_000, "status does not show the wait")
    mount.stop()


@pytest.mark.timed
def test_limits_change_while_queues_move(suite):
    suite.ours()
    mount = m.Mount(suite, f"moved-{suite.transport}", disk=DISK, extra=",limits.iops=1000")
    worker = [mount.daemon.worker_new(), 0]

    def move():
        worker.reverse()
        mount.cli("attach", "f0", str(worker[0]))
        time.sleep(0.1)

    moving = r.Repeating(move)
    found = load(mount, 4, 5)
    moving.stop()
    close("while the queues move", rate(found), 1000)
    mount.cli("limit", "f0", "--off")
    r.wait_for("the limits are lifted", lambda: rate(load(mount, 4, 1)).per_second() > 2000)
    mount.stop()


def test_a_flush_passes_and_the_mount_ends_while_it_waits(suite):
    suite.ours()
    mount = m.Mount(suite, f"ends-{suite.transport}", disk=DISK, extra=",limits.iops=200")
    text = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nfor at in range(100): os.pwrite(fd, b'x', at * 512); os.fsync(fd)"
    m.script(text, mount.path)
    mount.cli("limit", "f0", "--bps", "1")
    argv = [sys.executable, "-B", "-c", LOAD, mount.path, "4", "60", "write", "4096"]
    child = r.Child(suite.rig, f"waits-{suite.transport}", argv)
    # The writes above waited for the limit, too, but wait no longer.
    r.wait_for("it waits", lambda: any(q["limited"] for q in mount.queues()))
    mount.stop()
    child.wait()


# Everything that fallocate(2) does without data, and what is refused; then a read.
FREE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
fallocate = libc.fallocate
fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
for _ in range(20):
    assert fallocate(fd, 3, 0, size) == 0, "punch a hole"
    assert fallocate(fd, 1, 0, size) == 0, "allocate"
    assert fallocate(fd, 16, 0, 1 << 60) < 0, "zeroes beyond the end"
assert os.pread(fd, 4096, 0) == bytes(4096)
"""


def test_freeing_space_costs_no_bytes(suite):
    """In bytes, it would be 600 s at this rate."""
    suite.ours()
    mount = m.Mount(suite, f"free-{suite.transport}", disk=DISK, extra=",limits.bps=1M")
    m.script(FREE, mount.path)
    mount.stop()


# Tasks that each read or write one block, at offsets of their own.
TASKS = """
import os, sys, threading
threading.excepthook = lambda e: (sys.__excepthook__(*e[:3]), sys.stderr.flush(), os._exit(1))
fd, how = os.open(sys.argv[1], os.O_RDWR), sys.argv[2]
def run(at):
    if how == "write":
        os.pwrite(fd, bytes([1 + at]) * 4096, at * 4096)
    else:
        assert os.pread(fd, 4096, at * 4096) == bytes(4096)
threads = [threading.Thread(target=run, args=(at,)) for at in range(int(sys.argv[3]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
# What moves no data. While a write waits, so do calls that need the lock of its inode.
METADATA = """
import os, stat, sys
path, how = sys.argv[1:]
size = os.stat(path).st_size
assert os.path.basename(path) in os.listdir(os.path.dirname(path))
fd = os.open(path, os.O_RDWR)
assert os.fstat(fd).st_size == size and os.statvfs(path).f_bsize > 0
if how == "read":
    os.fchmod(fd, 0o640)
    os.fsync(fd)
    assert os.lseek(fd, 0, os.SEEK_HOLE) <= size
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
os.close(fd)
"""


@pytest.mark.parametrize("how", ["read", "write"])
def test_metadata_passes_data_that_waits(suite, how):
    """The first request passes, and the others wait for hours."""
    suite.ours()
    mount = m.Mount(suite, f"meta-{how}-{suite.transport}", disk=DISK, extra=",limits.bps=1")
    # A request of 1 MiB at 1 byte in a second, and a late timer, for each queue.
    most, queues = mount.export()["limited-ms-max"], len(mount.queues())
    r.require((1 << 20) * 1000 * queues <= most <= ((1 << 20) * 1000 + 115) * queues, f"the longest wait is {most} ms")
    tasks = 16
    argv = [sys.executable, "-B", "-c", TASKS, mount.path, how, str(tasks)]
    child = r.Child(suite.rig, f"tasks-{how}-{suite.transport}", argv)
    r.wait_for("requests wait", lambda: any(q["limited"] for q in mount.queues()))
    m.script(METADATA, mount.path, how)
    # Those that wait move with their queues.
    worker = mount.daemon.worker_new()
    mount.cli("attach", "f0", str(worker))
    r.wait_for("requests wait on the other worker", lambda: any(q["limited"] and q["worker"] == worker for q in mount.queues()))
    m.script(METADATA, mount.path, how)
    r.require(child.running(), f"no request waits: {child.tail()}")
    mount.cli("limit", "f0", "--off")
    r.require(child.wait() == 0, child.tail())
    if how == "write":
        found = mount.path.read_bytes()[: tasks * 4096]
        r.require(found == b"".join(bytes([1 + at]) * 4096 for at in range(tasks)), "what waited is not what was written")
    mount.stop()


READS = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nprint('reads', flush=True)\nwhile True: os.pread(fd, 4096, 0)"
WRITES = READS.replace("pread(fd, 4096, 0)", "pwrite(fd, bytes(4096), 0)").replace("reads", "writes")


@pytest.mark.transports("dev")
@pytest.mark.parametrize("text", [READS, WRITES], ids=["read", "write"])
def test_a_task_that_waits_can_be_killed(suite, text):
    """Whichever queue has its request, and whichever is told of the signal. Tasks wait for hours."""
    suite.ours()
    name = f"killed-{'write' if text is WRITES else 'read'}"
    mount = m.Mount(suite, name, disk=DISK, queues=4, extra=",limits.bps=1")
    children = [r.Child(suite.rig, f"{name}{n}", [sys.executable, "-B", "-c", text, mount.path]) for n in range(8)]
    for child in children:
        r.wait_for("it asks", lambda child=child: "s\n" in child.output())
    r.wait_for("a request waits", lambda: any(q["limited"] for q in mount.queues()))
    for child in children[:6]:
        child.kill()
    r.require(all(child.running() for child in children[6:]), "a task ends that has no signal")
    m.script(METADATA, mount.path, "write")
    # The slots are free again, and others still wait.
    r.require(any(q["limited"] for q in mount.queues()), f"no request waits: {mount.queues()}")
    mount.cli("limit", "f0", "--off")
    before = sum(q["reads"] + q["writes"] for q in mount.queues())
    r.wait_for("the others go on", lambda: sum(q["reads"] + q["writes"] for q in mount.queues()) > before)
    for child in children[6:]:
        child.kill()
    mount.stop()


@pytest.mark.transports("dev")
def test_zeroes_beyond_the_end_cost_nothing_if_the_file_cannot_grow(suite):
    """In bytes it would be a day: such an image cannot mark zeroes."""
    suite.ours()
    base, image = suite.image("zeroes-fail.base", 1 << 20), suite.rig.dir / "zeroes-fail.qcow2"
    r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", base, "-F", "raw", image])
    mount = m.Mount(suite, "zeroes-fail", disk=f"format=qcow2,file={image}", growable=True, extra=",limits.bps=1")
    with m.Opened(mount.path) as fd:
        for _ in range(4):
            m.refused("zeroes up to 4 EiB", ["EFBIG"], lambda fd=fd: m.fallocate(fd, m.ZERO_RANGE, 0, 1 << 62))
        r.require(sum(q["limited-us"] for q in mount.queues()) == 0, f"queues waited: {mount.queues()}")
        m.fallocate(fd, m.ZERO_RANGE, 0, 4 << 20)
        r.require(os.fstat(fd).st_size == 4 << 20, f"the file has {os.fstat(fd).st_size} bytes")
    # The first read waits for what was zeroed.
    read = "import os, sys\nassert os.pread(os.open(sys.argv[1], os.O_RDWR), 4096, 0) == bytes(4096)"
    child = r.Child(suite.rig, "zeroes-fail-read", [sys.executable, "-B", "-c", read, mount.path])
    r.wait_for("what was zeroed counts", lambda: any(q["limited"] for q in mount.queues()))
    mount.cli("limit", "f0", "--off")
    r.require(child.wait() == 0, child.tail())
    mount.stop()


def test_zeroes_that_move_no_data_cost_no_bytes(suite):
    """A raw file marks them. In bytes it would be an hour at this rate."""
    suite.ours()
    image = suite.image(f"zeroes-{suite.transport}.img", 1 << 30)
    mount = m.Mount(suite, f"zeroes-{suite.transport}", image=image, extra=",limits.bps=1M")
    with m.Opened(mount.path) as fd:
        for mode in (m.PUNCH, m.ZERO_RANGE, m.PUNCH, m.ZERO_RANGE):
            m.fallocate(fd, mode, 0, 1 << 30)
    mount.path.stat()
    r.require(sum(q["limited-us"] for q in mount.queues()) == 0, f"queues waited: {mount.queues()}")
    mount.stop()


@pytest.mark.transports("dev")
def test_a_mount_with_passthrough_has_no_limits(suite):
    suite.ours()
    image = suite.image("through.img", 16 << 20, memory=False)
    mount = m.Mount(suite, "through", image=image, writable=False, passthrough="auto")
    if mount.export()["mount"]["passthrough"]:
        r.message_of(mount.cli("limit", "f0", "--iops", "5", check=False), "passthrough=off")
    mount.stop()
    mount = m.Mount(suite, "limited", image=image, writable=False, passthrough="auto", extra=",limits.iops=500")
    r.require(not mount.export()["mount"]["passthrough"], "the kernel would not keep the limits")
    r.require("limits" in mount.export()["mount"]["passthrough-reason"], mount.export())
    mount.stop()
