"""A FUSE mount under test: its server, and checks for the FUSE tests."""

import contextlib
import ctypes
import errno
import mmap
import os
import random
import re
import struct
import sys
from pathlib import Path

import rig as r
from fuse_guard import ENABLE_URING, Uring, abort, fuse_mounts, mounted, unmount  # noqa: F401 -- used as names of this module

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
PUNCH = PUNCH_HOLE | KEEP_SIZE

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.readahead.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_size_t]

# Both mappings of a file must show what is in it, and what is written to it afterwards.
MMAP = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
want = os.pread(fd, 65536, 0)
for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
    try:
        m = mmap.mmap(fd, 65536, flags, mmap.PROT_READ)
    except OSError as e:
        sys.exit(f"mmap with flags {flags}: {e}")
    if m[:] != want:
        sys.exit(f"a mapping with flags {flags} shows something else than read does")
os.pwrite(fd, b"written later", 5000)
if m[5000:5013] != b"written later":
    sys.exit("the shared mapping does not show a later write")
os.pwrite(fd, want[5000:5013], 5000)
"""


def checked(code):
    """A C function's result, as Python has errors."""
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def fallocate(fd, mode, offset, length):
    checked(libc.fallocate(fd, mode, offset, length))


IO_SETUP, IO_DESTROY, IO_SUBMIT, IO_GETEVENTS = (0, 1, 2, 4) if os.uname().machine == "aarch64" else (206, 207, 209, 208)


def write_async(fd, data, offset, meanwhile=lambda: None):
    """One write by the kernel's AIO (linux/aio_abi.h), which must be whole; `meanwhile` is called while it is under way."""
    with mmap.mmap(-1, len(data)) as buffer:
        buffer[:] = data
        held = ctypes.c_char.from_buffer(buffer)
        block = struct.pack("<QIIHhIQQqQII", 0, 0, 0, 1, 0, fd, ctypes.addressof(held), len(data), offset, 0, 0, 0)
        block = ctypes.create_string_buffer(block, 64)
        blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        context, event = ctypes.c_ulong(0), (ctypes.c_int64 * 4)()
        checked(libc.syscall(IO_SETUP, 1, ctypes.byref(context)))
        checked(libc.syscall(IO_SUBMIT, context, 1, blocks))
        meanwhile()
        checked(libc.syscall(IO_GETEVENTS, context, 1, 1, event, None))
        checked(libc.syscall(IO_DESTROY, context))
        del held
        r.require(event[2] == len(data), f"an asynchronous write of {len(data)} bytes ended with {event[2]}")


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


@contextlib.contextmanager
def device_for_all(folder):
    """A /dev/fuse that every user may open, in the mount namespace of the tests."""
    device = folder / "fuse"
    r.run(["cp", "-a", "/dev/fuse", device])
    device.chmod(0o666)
    r.run(["mount", "--bind", device, "/dev/fuse"])
    try:
        # /tmp is mounted with nodev on many machines, which the mount took over.
        r.run(["mount", "-o", "remount,bind,dev", "/dev/fuse"])
        yield
    finally:
        r.run(["umount", "/dev/fuse"], check=False)


class Suite:
    """The transport under test and the server, for the FUSE tests of a file."""

    def __init__(self, rig, clock, peer=None, transport=None):
        self.rig = rig
        self.clock = clock
        self.peer = peer  # path of qemu-storage-daemon, where that serves
        self.peer_version = int(re.search(r"version (\d+)", r.run([peer, "--version"]).stdout)[1]) if peer else 0
        self.transport = transport
        self.memory = rig.memory_dir()
        self.loops = []

    def ours(self, what="vshunt's own"):
        """Leaves a test out if the peer serves."""
        if self.peer:
            raise r.Skipped(f"{what}; the peer has nothing like it")

    def differs(self, how, before=None):
        """Leaves out a known difference of the peer.

        `before`: only for versions below this major version.
        """
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
    """A mount that several tests share; made again after one that failed."""

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

    def drop(self):
        """After a test that failed: the next one gets a new mount."""
        if self._mount:
            self._mount.child.kill()
            unmount([self._mount.path])
            self._mount = None


def serving(suite, name, **how):
    """One disk, served as one mounted file by the server of the suite."""
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
        r.wait_for(f"{self.path} is mounted", lambda: mounted(self.path))

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

        r.wait_for(f"{self.path} is mounted", ready)

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
                wanted = content[at + first : at + first + 1].hex() or "there"
                raise r.Failed(f"{what}: byte {at + first} of {path.name} is {data[first]:02x}, not {wanted}")
            at += len(data)
    r.require(at == len(content), f"{what}: {path.name} has {at} bytes, not {len(content)}")


def script(text, *arguments, timeout_s=r.WAIT_S):
    """Runs Python code in another process.

    It could hang the rig with its lock held, as a page fault does.
    """
    return r.run([sys.executable, "-B", "-c", text, *arguments], timeout_s=timeout_s).stdout
