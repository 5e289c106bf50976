"""`vshunt top`: the tables, the lines of JSON, and the keys on a real terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest
import rig as r

# What restores a terminal: the main screen, and the cursor.
MAIN_SCREEN, CURSOR = b"\x1b[?1049l", b"\x1b[?25h"

# Control sequences of a terminal.
SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def loaded(rig):
    """A daemon with a loaded disk of two queues."""
    socket = rig.dir / "vm0.sock"
    daemon = r.Daemon(
        rig,
        "--disk=name=d0,format=null,size=1G",
        "--disk=name=d1,format=null,size=1G",
        f"--export=type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues=4",
        f"--export=type=vhost-user-blk,name=idle0,disk=d1,socket={rig.dir}/idle0.sock,queues=4",
    )
    argv = [r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "randread", "--bs", "4k", "--iodepth", "1"]
    load = r.Child(rig, "load", [*argv, "--queues", "2", "--runtime", "120s", "--quiet"])
    r.wait_for("the disk is loaded", lambda: sum(q["requests"] for q in daemon.status()["queues"]) > 100)
    yield daemon
    load.kill()
    daemon.child.stop()


class Terminal:
    """A program on a terminal of 80 columns and 24 lines."""

    def __init__(self, rig, *argv, env=None):
        self.rig = rig
        self.fd, inner = pty.openpty()
        self.inner = inner
        self.before, self.lines = termios.tcgetattr(inner), 24
        self.resize(inner, self.lines)
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self.process = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, env=environment)
        self.seen = b""

    @staticmethod
    def resize(fd, lines):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))

    def read(self):
        """Everything that it has drawn so far."""
        while select.select([self.fd], [], [], 0.05)[0]:
            self.seen += os.read(self.fd, 1 << 16)
        return self.seen

    def keys(self, text):
        os.write(self.fd, text.encode())

    def shows(self, text, timeout_s=r.WAIT_S):
        def is_shown():
            # Only changed cells are drawn. After a change of its size the whole screen is drawn
            # again, without spaces.
            self.lines = 49 - self.lines
            self.resize(self.inner, self.lines)
            self.process.send_signal(signal.SIGWINCH)
            return text.replace(" ", "").encode() in SEQUENCE.sub(b"", self.read()).replace(b" ", b"")

        r.wait_for(f"the terminal shows {text!r}", is_shown, timeout_s, every_s=0.2)

    def ends(self):
        """Its exit code; the terminal has to be as before."""
        deadline = time.monotonic() + r.WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        code = self.process.poll()
        if code is None:
            self.process.kill()
            self.process.wait()
        seen = self.read()
        after = termios.tcgetattr(self.inner)
        os.close(self.fd)
        os.close(self.inner)
        r.require(code is not None, "it does not end")
        r.require(MAIN_SCREEN in seen and CURSOR in seen, f"the screen is not restored: {seen[-200:]}")
        r.require(after == self.before, "the modes of the terminal are not restored")
        return code


def top(rig, daemon, **more):
    terminal = Terminal(rig, r.binary("vshunt"), "-c", str(daemon.control), "top", "--interval", "200ms", **more)
    terminal.shows("vm0:1")
    return terminal


def test_once_and_json(rig, loaded):
    # On a busy machine, there may be an interval without requests of a queue.
    def has_a_rate():
        text = loaded.cli("top", "--once", "--interval", "500ms").stdout
        r.require("\x1b" not in text, f"escape sequences: {text!r}")
        row = re.search(r"^vm0:0 +0 +running +\d+ +([\d.]+k?) ", text, re.MULTILINE)
        r.require(row, f"vm0:0 is not shown: {text}")
        r.require("idle0:" not in text.split("WORKER", 1)[0], f"queues that never started are listed: {text}")
        return row[1] != "0"

    def has_rates():
        view = json.loads(loaded.cli("top", "--once", "--json").stdout)
        rates = {q["index"]: q["requests-per-s"] for q in view["queues"]}
        exports = {e["name"]: e["requests-per-s"] for e in view["exports"]}
        r.require(set(rates) == {0, 1} and abs(exports["vm0"] - sum(rates.values())) < 1e-6, f"{exports} and {rates}")
        r.require(exports["idle0"] == 0, f"{exports}")
        return all(rates.values())

    r.wait_for("top shows a rate", has_a_rate)
    r.wait_for("top shows rates as JSON", has_rates)


def test_json_lasts_until_its_reader_ends(rig, loaded):
    argv = [r.binary("vshunt"), "-c", loaded.control, "top", "--json", "--interval", "100ms"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            json.loads(process.stdout.readline())
        process.stdout.close()
        code = process.wait(r.WAIT_S)
        r.require((code, process.stderr.read()) == (0, ""), f"it ends with {code}")


def test_a_queue_moves_by_keys(rig, loaded):
    worker = loaded.worker_new("--name", "fast")
    terminal = top(rig, loaded)
    terminal.keys("m")
    terminal.shows("move vm0:0 to worker")
    terminal.keys("fast\r")
    terminal.shows(f"to worker {worker}")
    r.wait_for("vm0:0 is moved", lambda: {q["index"]: q["worker"] for q in loaded.status()["queues"] if q["export"] == "vm0"}[0] == worker)
    terminal.keys("?")
    terminal.shows("Any key closes this")
    terminal.keys("qq")
    r.require(terminal.ends() == 0, "it ends with an error")


def test_a_wrong_worker_is_told(rig, loaded):
    terminal = top(rig, loaded)
    terminal.keys("mnobody\r")
    terminal.shows("there is no worker nobody")
    terminal.keys("\x03")
    r.require(terminal.ends() == 0, "it ends with an error")


def test_the_daemon_may_be_restarted(rig, loaded):
    terminal = top(rig, loaded)
    loaded.child.kill()
    terminal.shows("trying again")
    loaded.start()
    terminal.seen = b""
    terminal.shows("Tab table")
    terminal.keys("q")
    r.require(terminal.ends() == 0, "it ends with an error")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(rig, loaded, number):
    terminal = top(rig, loaded)
    terminal.process.send_signal(number)
    r.require(terminal.ends() == 0, "it ends with an error")


def test_no_colour(rig, loaded):
    terminal = top(rig, loaded, env={"NO_COLOR": "1"})
    terminal.keys("q")
    terminal.ends()
    colours = re.search(rb"\x1b\[(?:\d+;)*(?:3[0-7]|38;\d)[;m]", terminal.seen)
    r.require(not colours, f"a colour: {colours}")
    terminal = top(rig, loaded)
    terminal.keys("q")
    terminal.ends()
    r.require(re.search(rb"\x1b\[(?:\d+;)*(?:3[0-7]|38;\d)", terminal.seen), "no colour without NO_COLOR")


def test_without_a_terminal(rig, loaded):
    done = loaded.cli("top", check=False)
    r.require(done.returncode == 2 and "--once" in done.stderr, f"{done.returncode}: {done.stderr}")
    r.require(done.stdout == "", f"it printed {done.stdout!r}")
    done = loaded.cli("top", "--once", "--interval", "1ms", check=False)
    r.require(done.returncode == 2 and "100ms to 60m" in done.stderr, f"{done.returncode}: {done.stderr}")
