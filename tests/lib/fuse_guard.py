"""A mount namespace for FUSE mounts, and a guardian process against hangs.

A FUSE server that dies or loops leaves its callers in the kernel, where even SIGKILL may not
reach them. So tests of FUSE run in a mount namespace of their process. A guardian is a separate
process in that namespace. It aborts the connections of the namespace's mounts when a test exceeds
its time. The callers then get an error, and the test fails.

The guardian also restores `enable_uring` and `kernel.io_uring_disabled` when the tests' process
is killed. It makes no call that a mount could block. The fixtures `clock` and `guarded` of
tests/conftest.py use it.
"""

import fcntl
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import rig as r

CONNECTIONS = Path("/sys/fs/fuse/connections")
ENABLE_URING = Path("/sys/module/fuse/parameters/enable_uring")
URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")

# What a test has after its connections were aborted.
AFTER_ABORT_S = 30.0


class Clock:
    """Memory shared with the guardian: when the present test is over its time, how often that was, what
    `enable_uring` and `io_uring_disabled` were before the rig changed them."""

    FORMAT = "dQcc"

    def __init__(self, fd):
        self.memory = mmap.mmap(fd, 4096)

    def get(self):
        return struct.unpack_from(self.FORMAT, self.memory)

    def put(self, limit=None, aborts=None, uring=None, disabled=None):
        old = self.get()
        new = (old[0] if limit is None else limit, old[1] if aborts is None else aborts, uring or old[2], disabled or old[3])
        struct.pack_into(self.FORMAT, self.memory, 0, *new)


def mounts():
    """Mounts of this namespace: (device's minor number, mount point, options, type)."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        fields = left.split()
        options = f"{fields[5]},{right.split()[2]}"
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        found.append((int(fields[2].split(":")[1]), point, options, right.split()[0]))
    return found


def fuse_mounts():
    return [m for m in mounts() if m[3].split(".")[0] in ("fuse", "fuseblk")]


def mounted(path):
    """How many FUSE mounts lie on `path`."""
    return sum(m[1] == str(path) for m in fuse_mounts())


def unmount(paths):
    """Removes them, also those in use and those whose server does not answer."""
    for path in paths:
        r.run(["umount", "-l", path], check=False)


def abort(connections):
    """End these connections; callers get ECONNABORTED, the server ENODEV."""
    for number in connections:
        try:
            (CONNECTIONS / str(number) / "abort").write_text("1")
        except OSError:
            pass  # gone


class Guardian:
    """Enters a private mount namespace and starts the guardian, which watches `clock`."""

    def __init__(self):
        if not os.path.exists("/dev/fuse"):
            raise r.Skipped("this kernel has no /dev/fuse")
        namespaces.unshare(namespaces.CLONE_NEWNS)
        # Other people's mounts came along as copies, which would keep them alive.
        unmount(x[1] for x in reversed(fuse_mounts()))
        if not any(m[1] == str(CONNECTIONS) for m in mounts()):
            r.run(["mount", "-t", "fusectl", "none", CONNECTIONS])
        fd = os.memfd_create("clock", 0)
        os.ftruncate(fd, 4096)
        self.clock = Clock(fd)
        argv = [sys.executable, "-B", __file__, str(fd), str(os.getpid())]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[fd], start_new_session=True)
        os.close(fd)

    def end(self):
        """Ends the guardian, which puts settings back and aborts the connections that are left."""
        self.process.stdin.close()
        self.process.wait(60)


def guard(clock, tests):
    """Watches over the process `tests` until that ends, or closes stdin."""
    ended = select.poll()
    ended.register(os.pidfd_open(tests), select.POLLIN)
    ended.register(sys.stdin.fileno(), select.POLLIN)
    connections, times = set(), 0
    while not ended.poll(50):
        connections |= {m[0] for m in fuse_mounts()}
        now = time.monotonic()
        limit, aborts, *_ = clock.get()
        if limit and now > limit:
            abort(connections)
            times = times + 1 if aborts else 1
            clock.put(limit=now + AFTER_ABORT_S, aborts=aborts + 1)
        if times > 2:
            os.write(2, b"# the tests hang, also after their connections were aborted\n")
            os.kill(tests, signal.SIGKILL)
            times = 0
    put_back(clock)
    abort(connections & {m[0] for m in fuse_mounts()})


def put_back(clock, *names):
    """The settings that the rig changed, or these of them, as they were before."""
    _, _, uring, disabled = clock.get()
    for name, path, was, values in (("uring", ENABLE_URING, uring, b"YN"), ("disabled", URING_DISABLED, disabled, b"012")):
        if was in values and name in (names or (name,)):
            try:
                path.write_bytes(was)
            except OSError as e:
                os.write(1, f"# {path} stays as it is: {e}\n".encode())
            clock.put(**{name: b"-"})


class Setting:
    """A setting of the kernel as the rig wants it, for `with`; put back afterwards. Two rigs take turns."""

    def __init__(self, clock, path, name, value):
        self.clock = clock
        self.path = path
        self.name = name
        self.value = value

    def __enter__(self):
        try:
            self.lock = open(self.path, "rb")
            r.wait_for(f"another rig leaves {self.path.name} alone", self._locked, 600, 0.2)
            self.clock.put(**{self.name: self.path.read_bytes()[:1]})
            self.path.write_text(self.value)
        except OSError as e:
            raise r.Skipped(f"{self.path} cannot be written: {e}") from e

    def _locked(self):
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def __exit__(self, *_):
        put_back(self.clock, self.name)
        self.lock.close()


def Uring(clock, value):
    """`enable_uring` of the kernel's fuse module, Y or N."""
    return Setting(clock, ENABLE_URING, "uring", value)


def UringDisabled(clock, value):
    """`kernel.io_uring_disabled`: 0 for none, 1 for processes without CAP_SYS_ADMIN, 2 for all."""
    return Setting(clock, URING_DISABLED, "disabled", value)


if __name__ == "__main__":
    guard(Clock(int(sys.argv[1])), int(sys.argv[2]))
