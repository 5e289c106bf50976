"""The base of the black-box tests: private folders, and programs that end with the test.

It needs only Python's standard library: the programs in bench/ use it, too. The fixtures are in
tests/conftest.py.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

# What a daemon may not do ends it, so that a test fails which needs more than the sandbox leaves.
os.environ.setdefault("VSHUNT_SANDBOX", "kill")

ROOT = Path(__file__).resolve().parents[2]

# Nothing that a rig waits for takes this long, on a machine ten times as slow as ours neither; what
# does, hangs.
WAIT_S = 90.0


# A load's time, for one that is to run until it is told to end (Child.interrupt).
FOREVER = "1h"


class Failed(Exception):
    """The observed result, in place of the expected one."""


class Late(Failed):
    """Something did not happen in time. In tests of the marks `timed` and `paced`, a busy machine may be the reason."""


class Skipped(unittest.SkipTest):
    """The missing precondition of a test. pytest reports a skip."""


def require(condition, message):
    """Fail the test with `message` unless `condition`."""
    if not condition:
        raise Failed(message)


def wait_for(what, condition, timeout_s=WAIT_S, every_s=0.02):
    """Wait until `condition()` is true and return its value; `what` names it in the error."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Late(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)


def binary(name):
    """The path of a program of vshunt, in the folder VSHUNT_BIN. scripts/pytest sets it."""
    path = Path(os.environ.get("VSHUNT_BIN") or target_dir() / "tests").absolute() / name
    if not os.access(path, os.X_OK):
        build = "cargo build --profile tests --workspace --locked"
        raise Failed(f"{path} is missing: run `{build}` first, or set VSHUNT_BIN to the folder that has it")
    return str(path)


def target_dir():
    """The build folder of cargo."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()


def test_binary(name):
    """Path of a test program of the workspace, built by cargo."""
    # With the whole workspace's features, as `cargo test --workspace` has built it before.
    argv = [os.environ.get("CARGO", "cargo"), "test", "--workspace", "--test", name, "--no-run", "--locked"]
    built = subprocess.run([*argv, "--message-format=json"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if built.returncode != 0:
        raise Failed(f"{' '.join(argv)}: {built.stderr[-2000:]}")
    messages = (json.loads(line) for line in built.stdout.splitlines())
    return next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == name)


def tool(name, package):
    """The path of a program of the system. The test is left out if it is missing."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")
    if not path:
        raise Skipped(f"{name} is missing (Debian package {package})")
    return path


@contextlib.contextmanager
def loop_device(path, *options):
    """A block device with the contents of a file. `options`: more ones of losetup."""
    losetup = tool("losetup", "mount")
    made = run([losetup, *options, "--find", "--show", path], check=False)
    if made.returncode:
        raise Skipped(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        run([losetup, "--detach", device], check=False)


def run(argv, timeout_s=WAIT_S, check=True, **more):
    """Run a program to its end; stdout and stderr are captured as text. `check`: its failure is the test's."""
    try:
        done = subprocess.run(
            [str(a) for a in argv], capture_output=True, text=True, errors="replace", timeout=timeout_s, **more
        )
    except subprocess.TimeoutExpired as e:
        raise Late(f"`{' '.join(map(str, argv))}` did not end within {timeout_s:g} s") from e
    return succeeded(argv, done) if check else done


def succeeded(argv, done):
    """Fails the test if a program that has ended failed."""
    if done.returncode != 0:
        raise Failed(
            f"`{' '.join(map(str, argv))}` ended with {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}".strip()
        )
    return done


def whole_lines(path):
    """The text of a file that another process may be writing, up to its last newline: the line after that may be incomplete."""
    text = path.read_text(errors="replace")
    return text[: text.rfind("\n") + 1]


def thread_ids(pid):
    """The ids of a process's threads. A listing during which one ends may lack others: it is made again (findings/task-listing.sh)."""
    for _ in range(10_000):
        # The number of threads (proc(5), /proc/pid/stat, field 20).
        least = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[17])
        listed = os.listdir(f"/proc/{pid}/task")
        if len(listed) >= least:
            return [int(tid) for tid in listed]
    raise Failed(f"threads of process {pid} end all the time, and cannot be listed")


def threads(pid, *files):
    """The threads of a process: the folder of each in /proc, and the texts of these files in it. One that ends meanwhile is left out."""
    for task in (Path(f"/proc/{pid}/task/{tid}") for tid in thread_ids(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            texts = [(task / name).read_text(errors="replace") for name in files]
            yield task, *texts


def open_files(pid):
    """What the descriptors of a process refer to. One that is closed meanwhile is left out."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


def receivers(pid):
    """The processes that receive descriptors for this daemon."""

    def children(parent, name):
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                number, rest = status.read_text().split(" (", 1)
            except OSError:
                continue  # it has ended
            comm, rest = rest.rsplit(") ", 1)
            state, of = rest.split()[:2]
            if comm == name and int(of) == parent and state != "Z":
                found.append(int(number))
        return found

    return [receiver for spawner in children(pid, "vshunt-spawner") for receiver in children(spawner, "vshunt-receiver")]


def message_of(done, *words, code=(1, 2)):
    """The error of a vshunt program that failed: one sentence on stderr with these words in it."""
    text = done.stderr.strip()
    require(done.returncode in code, f"ended with {done.returncode}: {done.stdout}{text}")
    require(text.startswith("vshunt"), f"not our own error: {text!r}")
    require("panicked" not in text, text)
    require(len(text.splitlines()) <= 3, f"an error of {len(text.splitlines())} lines: {text!r}")
    for word in words:
        require(str(word).lower() in text.lower(), f"the error does not say {str(word)!r}: {text!r}")


class Child:
    """A program running beside the rig, its output in a file; killed by pid when the rig ends."""

    def __init__(self, rig, name, argv, **more):
        self.name = name
        self.log = rig.dir / f"{name}.log"
        with open(self.log, "ab") as log:
            more.setdefault("stdout", log)
            more.setdefault("stderr", log)
            more.setdefault("stdin", subprocess.DEVNULL)
            self.process = subprocess.Popen([str(a) for a in argv], **more)
        rig.children.append(self)

    @property
    def pid(self):
        return self.process.pid

    def running(self):
        return self.process.poll() is None

    def output(self):
        """The output of the program so far, without a last line that is not complete."""
        return whole_lines(self.log)

    def unfinished(self):
        """The output of the program so far, which may end within a line: for prompts and messages."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s=WAIT_S):
        """Its exit code; the test fails when it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as e:
            raise Late(f"{self.name} did not end within {timeout_s:g} s: {self.tail()}") from e

    def tail(self, lines=12):
        """The end of its output, for error messages."""
        return "\n".join(self.unfinished().splitlines()[-lines:])

    def suspend(self):
        """Stops it with SIGSTOP, and waits until all its threads have stopped: one thread gets the signal, and stops the others later."""
        self.process.send_signal(signal.SIGSTOP)
        wait_for(f"all threads of {self.name} stop", lambda: os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED) != (0, 0))

    def resume(self):
        """Lets it run again (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """SIGKILL, and wait."""
        if self.running():
            self.resume()
            self.process.kill()
        self.process.wait()

    def interrupt(self, timeout_s=WAIT_S):
        """SIGINT, which must not be what ended it already; its exit code. vshunt-bench takes it for the end of its time."""
        require(self.running(), f"{self.name} ended by itself with {self.process.returncode}: {self.tail()}")
        self.process.send_signal(signal.SIGINT)
        return self.wait(timeout_s)

    def stop(self, timeout_s=WAIT_S):
        """SIGTERM; its exit code."""
        if self.running():
            self.process.terminate()
        return self.wait(timeout_s)


class Daemon:
    """`vshunt serve` with its control socket."""

    def __init__(self, rig, *arguments, name="vshunt"):
        self.rig = rig
        self.name = name
        self.control = rig.dir / f"{name}.ctl"
        self.arguments = [binary("vshunt"), "serve", *arguments, "--control", self.control]
        self.child = None
        self.start()

    def start(self):
        """Start it, also again after a kill, and wait until it answers."""
        self.child = Child(self.rig, self.name, self.arguments)

        def ready():
            if not self.child.running():
                raise Failed(f"{self.name} ended with {self.child.process.returncode}: {self.child.tail()}")
            return self.control.exists() and self.cli("status", "--json", check=False).returncode == 0

        wait_for(f"{self.name} answers on its control socket", ready)

    def cli(self, *arguments, check=True, timeout_s=WAIT_S):
        """`vshunt -c CONTROL …`"""
        argv = [binary("vshunt"), "-c", self.control, *arguments]
        if not check or arguments[0] != "attach":
            return run(argv, check=check, timeout_s=timeout_s)
        # A busy machine may not run a worker for a second. The attach is then refused, and tried
        # again.
        end = time.monotonic() + WAIT_S
        while True:
            done = run(argv, check=False, timeout_s=timeout_s)
            again = done.returncode != 0 and "(stalled)" in done.stderr and time.monotonic() < end
            if not again:
                return succeeded(argv, done)

    def attach(self, queues, worker):
        """Moves queues that serve a disk, which may take longer for requests in flight than `attach` waits by default."""
        self.cli("attach", "--timeout", f"{WAIT_S - 10:g}s", queues, str(worker))

    def status(self):
        """The result of `status --json`."""
        return json.loads(self.cli("status", "--json").stdout)

    def worker_new(self, *arguments):
        """The id of a new worker."""
        text = self.cli("worker", "new", *arguments).stdout
        require(text.strip().isdigit(), f"`worker new` printed {text!r}, not an id alone on a line")
        return int(text)


class Rig:
    """A private folder, and the programs that run in it."""

    def __init__(self, name, signals=True):
        """`signals`: a signal that would kill the program ends its children, too."""
        self.name = name
        self.children = []
        # Counted by programs that are not tests. The folder is then kept.
        self.failed = 0
        self.dir = Path(tempfile.mkdtemp(prefix=f"vshunt-{name}."))
        self.memory = []
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda n, _: sys.exit(128 + n))

    def image(self, name="disk.img", size_bytes=1 << 30, folder=None):
        """A new sparse image."""
        path = (folder or self.dir) / name
        with open(path, "wb") as f:
            f.truncate(size_bytes)
        return path

    def memory_dir(self):
        """A folder in memory (or on disk if there is none), removed with the rig."""
        shm = Path("/dev/shm")
        if not os.access(shm, os.W_OK):
            return self.dir
        path = Path(tempfile.mkdtemp(prefix=f"vshunt-{self.name}.", dir=shm))
        self.memory.append(path)
        return path

    @staticmethod
    def line(text):
        print(text, flush=True)

    def say(self, text):
        """A line about progress or a measured value; `make test` shows it."""
        self.line(f"# {text}")

    def end(self, keep=False):
        """Kill the programs that still run, and remove the folder; `keep`: not, because a test failed."""
        for child in reversed(self.children):
            child.kill()
        folders = list(self.memory)
        if self.failed or keep:
            self.line(f"# the logs are in {self.dir}")
        else:
            folders.append(self.dir)
        for folder in folders:
            remove(folder)
        sys.stdout.flush()


def remove(folder):
    """Removes a folder, what is mounted in it, and what vshunt keeps elsewhere of its images."""
    below = f"{folder}/".encode()
    with open("/proc/self/mountinfo", "rb") as f:
        points = [re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in f]
    for point in reversed(points):
        if point.startswith(below):
            subprocess.run(["umount", "-l", point], stderr=subprocess.DEVNULL, check=False)
    for where, _, files in os.walk(folder):
        for name in files:
            # The map journal of an image whose daemon was killed (docs/formats/journal.md).
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(where, name))
                os.unlink(f"/dev/shm/vshunt-map-{stat.st_dev:x}-{stat.st_ino:x}")
    shutil.rmtree(folder, ignore_errors=True)


def one_line(error):
    """An error's text in one line, so that a result stays one."""
    return " | ".join(str(error).split("\n"))


class Repeating:
    """Calls `body` repeatedly on a separate thread until it is stopped; keeps its first error."""

    def __init__(self, body):
        self.error = None
        self.turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, args=(body,), daemon=True)
        self._thread.start()

    def _loop(self, body):
        while not self._stop.is_set():
            try:
                body()
            except Exception as e:
                self.error = e
                return
            self.turns += 1

    def stop(self):
        self._stop.set()
        self._thread.join()
        if self.error:
            raise self.error


class Ticker:
    """Spreads `turns` over `seconds`, whatever each takes by itself."""

    def __init__(self, turns, seconds):
        self.start = time.monotonic()
        self.each = seconds / turns
        self.turn = 0

    def wait(self):
        self.turn += 1
        time.sleep(max(0.0, self.start + self.turn * self.each - time.monotonic()))
