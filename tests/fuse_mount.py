"""A FUSE mount under test: a mount namespace of its own, a guardian against hangs, and who serves the mount.

A FUSE server that dies or loops leaves its callers in the kernel, where even SIGKILL may not reach them. So the rig
goes on in a private mount namespace (`enter`), as the child of a guardian that aborts the connections of the
namespace's mounts when a test is over its time; the callers then get an error and the test fails. The guardian also
ends what a killed rig leaves behind and puts `enable_uring` back. It makes no call that a mount could keep.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import re
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

import rig as r

# Set in the environment of the rig inside of the namespace.
INSIDE = "VSHUNT_FUSE_RIG"
CONNECTIONS = Path("/sys/fs/fuse/connections")
ENABLE_URING = Path("/sys/module/fuse/parameters/enable_uring")

# What a test may take, where it says nothing else, and what it has after its connections were aborted.
LIMIT_S = 20.0
AFTER_ABORT_S = 5.0

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
PUNCH = PUNCH_HOLE | KEEP_SIZE

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.readahead.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_size_t]


def checked(code):
    """A C function's result, as Python has errors."""
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def fallocate(fd, mode, offset, length):
    checked(libc.fallocate(fd, mode, offset, length))


def refused(what, errnos, call):
    """`call` must fail with one of these errnos, given by name."""
    try:
        value = call()
    except OSError as e:
        seen = errno.errorcode.get(e.errno, str(e.errno))
        r.require(e.errno in {getattr(errno, name) for name in errnos}, f"{what}: {seen}, not {' or '.join(errnos)}")
        return seen
    raise r.Failed(f"{what}: succeeded ({value!r}), not {' or '.join(errnos)}")


class Opened:
    """An open file descriptor, for `with`."""

    def __init__(self, path, flags=os.O_RDWR):
        self.fd = os.open(path, flags)

    def __enter__(self):
        return self.fd

    def __exit__(self, *_):
        os.close(self.fd)


class Clock:
    """Memory shared with the guardian: when the present test is over its time, how often that was, what
    `enable_uring` was before the rig changed it."""

    FORMAT = "dQc"

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)

    def get(self):
        return struct.unpack_from(self.FORMAT, self.memory)

    def put(self, limit=None, aborts=None, uring=None):
        old = self.get()
        new = (old[0] if limit is None else limit, old[1] if aborts is None else aborts, uring or old[2])
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


def place(error):
    """Where a system call of a test failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name.startswith("fuse_") and f.filename != __file__]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


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
        limit, aborts, _ = clock.get()
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
        os.write(1, f"not ok fuse: the rig was ended by signal {-(code or 0)}\n".encode())
        return 1
    return code


def put_back(clock):
    """`enable_uring` as it was before the rig changed it."""
    was = clock.get()[2]
    if was in (b"Y", b"N"):
        ENABLE_URING.write_bytes(was)
        clock.put(uring=b"-")


class Uring:
    """`enable_uring` as the rig wants it, for `with`; put back afterwards. Two rigs take turns."""

    def __init__(self, clock, value):
        self.clock = clock
        self.value = value

    def __enter__(self):
        self.lock = open(ENABLE_URING, "rb")
        try:
            r.wait_for("another rig leaves enable_uring alone", self._locked, 240, 0.2)
            self.clock.put(uring=ENABLE_URING.read_bytes()[:1])
            ENABLE_URING.write_text(self.value)
        except OSError as e:
            raise r.Skipped(f"{ENABLE_URING} cannot be written: {e}") from e

    def _locked(self):
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def __exit__(self, *_):
        put_back(self.clock)
        self.lock.close()


class Suite:
    """What the modules of this rig share: results, the transport under test, and who serves."""

    def __init__(self, rig, clock, peer=None, only=None):
        self.rig = rig
        self.clock = clock
        self.peer = peer  # path of qemu-storage-daemon, where that serves
        self.peer_version = int(re.search(r"version (\d+)", r.run([peer, "--version"]).stdout)[1]) if peer else 0
        self.only = only
        self.transport = None
        self.memory = rig.memory_dir()
        self.loops = []

    def test(self, name, body, limit_s=LIMIT_S):
        """Run one test under the guardian's eye."""
        name = f"fuse {self.transport or 'any'}: {name}"
        if self.only and self.only not in name:
            return

        def guarded():
            self.clock.put(limit=time.monotonic() + limit_s, aborts=0)
            error = None
            try:
                body()
            except r.Failed as e:
                error = e
            except OSError as e:
                error = r.Failed(f"{e}, at {place(e)}")
            finally:
                aborts = self.clock.get()[1]
                self.clock.put(limit=0.0)
            if aborts:
                raise r.Failed(f"over its {limit_s:g} s: the connections were aborted" + (f" ({error})" if error else ""))
            if error:
                raise error

        failed, children, before = self.rig.failed, len(self.rig.children), {x[1] for x in fuse_mounts()}
        self.rig.test(name, guarded)
        if self.rig.failed > failed:  # what it started is nobody's
            for child in self.rig.children[children:]:
                child.kill()
            unmount({x[1] for x in fuse_mounts()} - before)

    def ours(self, what="vshunt's own"):
        """Leave a test out where the peer serves."""
        if self.peer:
            raise r.Skipped(f"{what}; the peer has nothing like it")

    def differs(self, how, before=None):
        """Leave out what the peer is known to do otherwise; `before`: what it did before that major version."""
        if self.peer and (before is None or self.peer_version < before):
            raise r.Skipped(f"the peer {how}")

    def image(self, name, size_bytes, memory=False):
        return self.rig.image(name, size_bytes, self.memory if memory else None)

    def end(self):
        """Whatever a failed test left: loop devices and mounts, before the daemons end."""
        for loop in self.loops:
            r.run(["losetup", "-d", loop], check=False)
        unmount(x[1] for x in reversed(fuse_mounts()))


class Fixture:
    """A mount that several tests share; made anew after one that failed."""

    def __init__(self, suite):
        self.suite = suite
        self._mount = None
        self.made = 0

    @property
    def mount(self):
        if self._mount is None:
            self.made += 1
            self._mount = self.make(f"{type(self).__name__.lower()}{self.made}-{self.suite.transport}")
        return self._mount

    def test(self, name, body):
        failed = self.suite.rig.failed
        self.suite.test(name, body)
        if self.suite.rig.failed > failed and self._mount:
            self._mount.child.kill()
            unmount([self._mount.path])
            self._mount = None


def serving(suite, name, **how):
    """One disk, served as one mounted file, by whom the suite is about."""
    return (PeerMount if suite.peer else Mount)(suite, name, **how)


class Mount:
    """`vshunt serve` with the disk d0 and its export f0 on `path`.

    image or disk: a raw image, or the keys of a --disk; extra: more keys of the export; queues: where the transport
    leaves the choice to us.
    """

    existed = False  # whether the mountpoint was there before the daemon, and so stays

    def __init__(
        self, suite, name, image=None, disk=None, path=None, writable=True, growable=False, direct=None,
        queues=2, workers="per-queue", passthrough="off", extra="", more=(), start=True,
    ):  # fmt: skip
        self.suite = suite
        self.name = name
        self.image = image
        self.path = Path(path or suite.rig.dir / f"{name}.mnt")
        disk = disk or f"file={image}"
        if direct is not None:
            disk += f",direct={direct}"
        transport = suite.transport or "dev"
        export = f"type=fuse,name=f0,disk=d0,mountpoint={self.path},transport={transport},passthrough={passthrough}"
        # The kernel wants a queue for each CPU with io_uring.
        export += ",workers=per-cpu" if transport == "io_uring" else f",queues={queues},workers={workers}"
        export += (",writable=on" if writable else "") + (",growable=on" if growable else "") + extra
        self.arguments = ["--disk", f"name=d0,{disk}", "--export", export, *more]
        self.daemon = None
        if start:
            self.start()

    def start(self):
        if self.daemon is None:
            self.daemon = r.Daemon(self.suite.rig, *self.arguments, name=self.name)
        else:
            self.daemon.start()
        r.wait_for(f"{self.path} is mounted", lambda: mounted(self.path), 10)

    @property
    def child(self):
        return self.daemon.child

    def cli(self, *arguments, **more):
        return self.daemon.cli(*arguments, **more)

    def export(self, name="f0"):
        """The export as `status --json` has it; None when it is gone."""
        return next((e for e in self.daemon.status()["exports"] if e["name"] == name), None)

    def queues(self, name="f0"):
        return [q for q in self.daemon.status()["queues"] if q["export"] == name]

    def stop(self):
        """SIGTERM: ends well, leaves neither mount nor file."""
        code = self.child.stop()
        r.require(code == 0, f"the daemon ended with {code}: {self.child.tail()}")
        r.require("panicked" not in self.child.output(), self.child.tail())
        r.require(not mounted(self.path), f"{self.path} is still mounted")
        r.require(self.path.exists() == self.existed, f"{self.path} {'is gone' if self.existed else 'was left behind'}")


class PeerMount(Mount):
    """The same by QEMU's storage daemon, to try the rig on."""

    existed = True  # it makes no mountpoint itself

    def __init__(
        self, suite, name, image=None, disk=None, path=None, writable=True, growable=False, direct=None, extra="", start=True, **_
    ):  # fmt: skip
        if image is None:
            raise r.Skipped("the peer has no such disk")
        self.suite = suite
        self.name = name
        self.image = image
        self.path = Path(path or suite.rig.dir / f"{name}.mnt")
        direct = {"on": "on", None: "on"}.get(direct, "off")
        self.arguments = [
            suite.peer,
            *("--blockdev", f"driver=file,node-name=f,filename={image},discard=unmap,cache.direct={direct}"),
            *("--blockdev", "driver=raw,node-name=d0,file=f,discard=unmap"),
            *("--export", f"type=fuse,id=f0,node-name=d0,mountpoint={self.path}"),
        ]
        for on, key in ((writable, ",writable=on"), (growable, ",growable=on")):
            self.arguments[-1] += key if on else ""
        self.arguments[-1] += extra
        self.process = None
        if start:
            self.start()

    def start(self):
        self.path.touch()
        self.process = r.Child(self.suite.rig, self.name, self.arguments)

        def ready():
            r.require(self.process.running(), f"the peer ended with {self.process.process.returncode}: {self.process.tail()}")
            return mounted(self.path)

        r.wait_for(f"{self.path} is mounted", ready, 10)

    @property
    def child(self):
        return self.process

    def cli(self, *_, **__):
        raise r.Skipped("the peer has no such commands")

    export = queues = cli


def fill(path, size_bytes, islands, seed):
    """An image with data at `islands`, (offset, length), and holes elsewhere; its content."""
    content = bytearray(size_bytes)
    with open(path, "r+b") as f:
        for number, (offset, length) in enumerate(islands):
            data = random.Random(seed + number).randbytes(length)
            content[offset : offset + length] = data
            f.seek(offset)
            f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return content


def same(path, content, what, chunk=1 << 20):
    """`path` must hold `content`; names the first byte that differs."""
    with open(path, "rb", buffering=0) as f:
        at = 0
        while data := f.read(chunk):
            want = content[at : at + len(data)]
            if data != want:
                first = next((n for n, (a, b) in enumerate(zip(data, want)) if a != b), len(want))
                raise r.Failed(f"{what}: byte {at + first} of {path.name} is {data[first]}, not {content[at + first : at + first + 1].hex() or 'there'}")
            at += len(data)
    r.require(at == len(content), f"{what}: {path.name} has {at} bytes, not {len(content)}")


def script(text, *arguments, timeout_s=15.0):
    """Python in a process of its own: for what could hang the rig with its lock held, as a page fault does."""
    return r.run([sys.executable, "-B", "-c", text, *arguments], timeout_s=timeout_s).stdout
