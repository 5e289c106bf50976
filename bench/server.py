"""A server under test: started afresh, waited for until its socket listens, ended by its pid; and what
/proc says of its CPU time and memory.

Called by cases.py, resident.py and fuse/, one server at a time. What must never happen: a server that outlives
the bench (it dies with us: PR_SET_PDEATHSIG), a process ended by its name, a wait without a bound.
"""
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "lib"))
import rig as r  # noqa: E402

TICK_HZ = os.sysconf("SC_CLK_TCK")
START_TIMEOUT_S = 20
STOP_TIMEOUT_S = 15
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec nothing is imported.
LIBC = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """A server that did not come up; the text says what it said."""


def child_setup(cpus=None):
    """For preexec_fn: die with the parent, run on `cpus` (None: where the kernel likes), and leave no core file, which is
    as large as the guest's memory."""
    def setup():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if cpus:
            os.sched_setaffinity(0, cpus)
    return setup


def end(process, log=None):
    """SIGTERM, then SIGKILL, to one process that we started. -> whether SIGTERM was enough."""
    if process.poll() is not None:
        return True
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # in an uninterruptible sleep: say so, go on
        if log is not None:
            log.append(f"process {process.pid} does not die of SIGKILL")
    return False


def listens(path, pid="self"):
    """Whether a UNIX socket of this path is listening in the network namespace of `pid` (a connection to see would be a
    front end)."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/unix") as f:
        for line in f:
            a = line.split()
            if len(a) > 7 and a[7] == path and a[3] == "00010000":
                return True
    return False


class Server:
    """argv with {sock} in it somewhere; a context manager. fuse/mount.py's mounts a file instead of listening."""

    def __init__(self, name, argv, sock, log_path, cpus=None):
        self.name, self.sock, self.log_path = name, sock, log_path
        self.control = f"{sock}.control"
        self.killed = False
        self._prepare()
        self._log = open(log_path, "w")
        self.process = subprocess.Popen([a.replace("{sock}", sock) for a in argv], stdin=subprocess.DEVNULL,
                                        stdout=self._log, stderr=self._log, preexec_fn=child_setup(cpus))
        self.pid = self.process.pid
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._ready():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise StartError(f"{name} did not start: {self.said()}")
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise

    def _prepare(self):
        """Before the start: where it shall be is free."""
        self._clear()

    def _ready(self):
        """Whether a client can be sent to it."""
        return listens(self.sock, self.pid)

    def _clear(self):
        """What it left behind, or one before it did."""
        if os.path.exists(self.sock):
            os.unlink(self.sock)

    def said(self):
        """The end of what it wrote."""
        with open(self.log_path, errors="replace") as f:
            text = f.read()[-400:].strip()
        return text or ("nothing" if self.process.poll() is None else f"exit status {self.process.returncode}")

    def died(self):
        """None while it runs, else a sentence."""
        code = self.process.poll()
        return None if code is None else f"{self.name} ended with status {code}: {self.said()}"

    def stop(self):
        self.killed |= not end(self.process)
        self._log.close()
        self._clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def cpu_s(self):
        """CPU seconds of all its threads so far, those that ended included (clock ticks)."""
        try:
            with open(f"/proc/{self.pid}/stat") as f:
                a = f.read().rsplit(")", 1)[1].split()
            return (int(a[11]) + int(a[12])) / TICK_HZ
        except OSError:
            return 0.0

    def cpu_fine_s(self):
        """CPU seconds of its living threads, to the nanosecond (schedstat; None where the kernel has none)."""
        total = 0
        try:
            for t in r.thread_ids(self.pid):
                with open(f"/proc/{self.pid}/task/{t}/schedstat") as f:
                    total += int(f.read().split()[0])
        except OSError:
            return None
        return total / 1e9

    def wakeups(self):
        """Voluntary context switches of its living threads."""
        total = 0
        for t in r.thread_ids(self.pid):
            try:
                with open(f"/proc/{self.pid}/task/{t}/status") as f:
                    total += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", f.read(), re.M)[1])
            except OSError:
                pass
        return total

    def memory_kib(self):
        """VmRSS and its parts, KiB; RssShmem is the guest's memory (and tmpfs mappings)."""
        with open(f"/proc/{self.pid}/status") as f:
            text = f.read()
        return {k: int(v) for k, v in re.findall(r"^(VmRSS|RssAnon|RssFile|RssShmem|Threads):\s+(\d+)", text, re.M)}

    def autopsy(self, path, more=()):
        """Where each thread of it (and of the processes `more`) stands, into a file: for a hang."""
        with open(path, "w") as out:
            for pid in (self.pid, *more):
                tasks = f"/proc/{pid}/task"
                for t in sorted(os.listdir(tasks)) if os.path.isdir(tasks) else ():
                    out.write(f"== process {pid} thread {t}\n")
                    for what in ("comm", "wchan", "syscall", "stack", "schedstat"):
                        try:
                            with open(f"{tasks}/{t}/{what}") as f:
                                out.write(f"{what}: {f.read().strip()}\n")
                        except OSError as e:
                            out.write(f"{what}: {e}\n")
            out.write(f"== what {self.name} said\n{self.said()}\n")
        return path
