"""A mount namespace of the rig's own, and a guardian against hangs.

A FUSE server that dies or loops leaves its callers in the kernel, where even SIGKILL may not reach them. So the rig
goes on in a private mount namespace (`enter`), as the child of a guardian that aborts the connections of the
namespace's mounts when a test is over its time; the callers then get an error and the test fails. The guardian also
ends what a killed rig leaves behind and puts `enable_uring` and `kernel.io_uring_disabled` back. It makes no call that a mount
could keep.
"""

import ctypes
import fcntl
import mmap
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path

import rig as r

# Set in the environment of the rig inside of the namespace.
INSIDE = "VSHUNT_FUSE_RIG"
CONNECTIONS = Path("/sys/fs/fuse/connections")
ENABLE_URING = Path("/sys/module/fuse/parameters/enable_uring")
URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")

# What a test has after its connections were aborted.
AFTER_ABORT_S = 30.0

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

libc = ctypes.CDLL(None, use_errno=True)


class Clock:
    """Memory shared with the guardian: when the present test is over its time, how often that was, what
    `enable_uring` and `io_uring_disabled` were before the rig changed them."""

    FORMAT = "dQcc"

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)

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
    """Away with them, whoever uses them and whether or not anybody answers."""
    for path in paths:
        r.run(["umount", "-l", path], check=False)


def abort(connections):
    """End these connections; callers get ECONNABORTED, the server ENODEV."""
    for number in connections:
        try:
            (CONNECTIONS / str(number) / "abort").write_text("1")
        except OSError:
            pass  # gone


def enter():
    """Go on in a private mount namespace, below a guardian; the clock that it looks at. Skipped where that cannot be."""
    if os.geteuid() != 0:
        raise r.Skipped("not root: no mount namespace, no /dev/fuse")
    if not os.path.exists("/dev/fuse"):
        raise r.Skipped("this kernel has no /dev/fuse")
    if INSIDE not in os.environ:
        argv = [r.tool("unshare", "util-linux"), "-m", "--propagation", "private"]
        done = r.run([*argv, "true"], check=False)
        if done.returncode != 0:
            raise r.Skipped(f"no mount namespace: {done.stderr.strip()}")
        sys.stdout.flush()
        os.execve(argv[0], [*argv, sys.executable, "-B", *sys.argv], {**os.environ, INSIDE: "1"})
    # Other people's mounts came along as copies, which would keep them alive.
    unmount(x[1] for x in reversed(fuse_mounts()))
    if not any(m[1] == str(CONNECTIONS) for m in mounts()):
        r.run(["mount", "-t", "fusectl", "none", CONNECTIONS])
    clock = Clock()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rig = os.fork()
    if rig == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return clock
    os._exit(guard(rig, clock))


def guard(rig, clock):
    """Watch over the process `rig` until it ends; its exit code."""
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(time.monotonic()))
    connections, times, code, told = set(), 0, None, False
    while code is None:
        connections |= {m[0] for m in fuse_mounts()}
        now = time.monotonic()
        limit, aborts, *_ = clock.get()
        if limit and now > limit:
            abort(connections)
            times = times + 1 if aborts else 1
            clock.put(limit=now + AFTER_ABORT_S, aborts=aborts + 1)
        if times > 2 or asked and now > asked[0] + 10:
            os.write(1, b"# the rig hangs, also after its connections were aborted\n")
            os.kill(rig, signal.SIGKILL)
            times, asked = 0, []
        elif asked and not told and now > asked[0] + 0.5:  # the signal may have gone to the whole group
            told = True
            abort(connections)
            os.kill(rig, signal.SIGTERM)
        time.sleep(0.05)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == rig:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            break
    put_back(clock)
    abort(connections & {m[0] for m in fuse_mounts()})
    for _ in range(100):  # what a killed rig left; its children's children come up as theirs end
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not left:
            break
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
    if code is None or code < 0:
        os.write(1, f"not ok {Path(sys.argv[0]).name}: the rig was ended by signal {-(code or 0)}\n".encode())
        return 1
    return code


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
