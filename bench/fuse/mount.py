"""Mounts: a mount namespace of our own, a server that serves one file through FUSE, and the way out of one that hangs.

Called by fuse/cases.py, one server at a time. What must never happen: the bench itself accesses the mounted file (a
process that does so waits for the server, in a sleep that no signal ends; only children with a limit do it), a mount
that other processes see, a mount or a module's setting that outlasts the bench.
"""
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time

from server import LIBC, STOP_TIMEOUT_S, Server, StartError, child_setup

CLONE_NEWNS = 0x0002_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
FUSECTL = "/sys/fs/fuse/connections"
ENABLE_URING = "/sys/module/fuse/parameters/enable_uring"
ANSWER_TIMEOUT_S = 5
LOCK_TIMEOUT_S = 60
_private = False


def private_namespace():
    """Gives this process, and the children that it starts from now on, mounts of their own. Raises OSError where that is not allowed."""
    global _private
    if _private:
        return
    _call("unshare", CLONE_NEWNS)
    _call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    if not os.path.isdir(FUSECTL):
        raise OSError("no FUSE in this kernel (the module is not loaded?)")
    if not any(kind == "fusectl" for _, kind, _ in mounts()):
        _call("mount", b"fusectl", FUSECTL.encode(), b"fusectl", ctypes.c_ulong(0), None)
    _private = True


def _call(name, *args):
    ctypes.set_errno(0)
    if getattr(LIBC, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mounts():
    """(where, type, minor of the device number) of each mount; for FUSE the minor names the connection."""
    with open("/proc/self/mountinfo") as f:
        for line in f:
            fields, _, rest = line.partition(" - ")
            a = fields.split()
            yield a[4].replace("\\040", " "), rest.split()[0], int(a[2].split(":")[1])


def uring_problem():
    """None where FUSE over io_uring is on or can be switched on, else why it cannot."""
    try:
        os.close(os.open(ENABLE_URING, os.O_RDWR))
    except OSError as e:
        return f"FUSE over io_uring cannot be switched on here: {e}"
    return None


@contextlib.contextmanager
def uring_enabled(yes):
    """FUSE over io_uring is allowed meanwhile, and then as it was. The parameter is the machine's: a process that changes it
    holds its flock, as the tests do; else one would put back what another had set. Raises OSError."""
    if not yes:
        yield
        return
    with open(ENABLE_URING, "r+") as f:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(f"{ENABLE_URING} is held by another program") from None
                time.sleep(0.05)
        before = f.read().strip()
        _write(ENABLE_URING, "Y")
        try:
            yield
        finally:
            _write(ENABLE_URING, before)


def _write(path, text):
    with open(path, "w") as f:
        f.write(text)


def bounded(argv):
    """-> stdout of a child, or None where it failed or did not end in ANSWER_TIMEOUT_S."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, preexec_fn=child_setup())
    try:
        out = process.communicate(timeout=ANSWER_TIMEOUT_S)[0]
        return out if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        # Not waited for: a process that waits for a dead FUSE server cannot be killed before the
        # connection is aborted.
        process.kill()
        return None


class Place:
    """Where a server mounts. `outside`: as the host sees it. `inside`: as programs in the peers' chroot see it. fio runs
    there, whichever server runs. One file; no mount has to be propagated from the one to the other."""

    def __init__(self, root, work):
        self.inside = os.path.join(work, "disk")
        self.outside = (root.rstrip("/") if root else "") + self.inside
        self.control = f"{self.inside}.control"
        self.log = f"{self.inside}.log"


class MountServer(Server):
    """A server whose readiness is a mount that answers."""

    def __init__(self, name, argv, place):
        self.connection = None
        super().__init__(name, argv, place.outside, place.log)
        self.control = place.control

    def _prepare(self):
        self._clear()
        open(self.sock, "x").close()

    def _ready(self):
        self.connection = next((minor for where, _, minor in mounts() if where == self.sock), None)
        if self.connection is None:
            return False
        size = bounded(["stat", "-c", "%s", self.sock])
        if size is None:
            self.abort()
            raise StartError(f"{self.name} mounted, but did not answer: {self.said()}")
        return int(size) > 0

    def abort(self):
        """Frees the processes that wait for this server: each gets an error. The server is of no use then."""
        if self.connection is not None:
            bounded(["sh", "-c", f"echo 1 >{FUSECTL}/{self.connection}/abort"])

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.killed = True
                self.abort()
        super().stop()

    def _clear(self):
        deadline = time.monotonic() + 1
        while any(where == self.sock for where, _, _ in mounts()) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                _call("umount2", os.fsencode(self.sock), MNT_DETACH | UMOUNT_NOFOLLOW)
        with contextlib.suppress(OSError):
            os.unlink(self.sock)
