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

    def screen(self):
        """What it shows, without spaces. It may be part of a screen on a slow machine."""
        drawn = len(self.read())
        # Only changed cells are drawn. After a change of its size the whole screen is drawn again,
        # without spaces.
        self.lines = 49 - self.lines
        self.resize(self.inner, self.lines)
        self.process.send_signal(signal.SIGWINCH)
        r.wait_for("it draws", lambda: len(self.read()) > drawn or self.process.poll() is not None)
        return SEQUENCE.sub(b"", self.read()[drawn:]).replace(b" ", b"")

    def shows(self, text, timeout_s=r.WAIT_S):
        wanted = text.replace(" ", "").encode()
        r.wait_for(f"the terminal shows {text!r}", lambda: wanted in self.screen(), timeout_s, every_s=0.2)

    def close(self):
        os.close(self.fd)
        os.close(self.inner)

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
        self.close()
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


@pytest.fixture
def crowded(rig):
    """A daemon with one worker that has all queues of two loaded disks."""
    arguments, counts = [], {"vm0": 4, "vm1": 3}
    for name, queues in counts.items():
        arguments += [f"--disk=name={name},format=null,size=1G",
                      f"--export=type=vhost-user-blk,name={name},disk={name},socket={rig.dir}/{name}.sock,queues={queues}"]
    daemon = r.Daemon(rig, *arguments)
    loads = []
    for name, queues in counts.items():
        argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / f"{name}.sock", "--rw", "randread", "--bs", "4k", "--iodepth", "1"]
        loads.append(r.Child(rig, name, [*argv, "--queues", str(queues), "--runtime", "120s", "--quiet"]))
    r.wait_for("all queues are loaded", lambda: sum(q["requests"] > 0 for q in daemon.status()["queues"]) == 7)
    yield daemon
    for load in loads:
        load.kill()
    daemon.child.stop()


def test_names_bars_and_keys_fit_80_columns(rig, crowded):
    terminal = top(rig, crowded)
    # The bar has ten characters, and the share follows it.
    bar = re.compile(rb"0worker-0\S*?[|:.]{10}\d+\.\d")
    r.wait_for("the bar is shown", lambda: bar.search(terminal.screen()), every_s=0.2)
    terminal.shows("vm0:0-3")
    terminal.shows("/ filter  space pause  ? help  q quit")
    terminal.keys("q")
    r.require(terminal.ends() == 0, "it ends with an error")


def test_once_fits_80_columns(rig, crowded):
    long = [line for line in crowded.cli("top", "--once", "--interval", "200ms").stdout.splitlines() if len(line) > 80]
    r.require(not long, f"{long}")
    crowded.worker_new("--name", "worker-of-the-database-with-a-long-name")
    crowded.cli("attach", "vm1", "worker-of-the-database-with-a-long-name")
    argv = [r.binary("vshunt"), "-c", str(crowded.control), "top", "--once", "--interval", "200ms"]
    on_terminal = Terminal(rig, *argv)
    r.wait_for("it ends", lambda: on_terminal.read() is not None and on_terminal.process.poll() is not None)
    lines = on_terminal.read().decode().splitlines()
    on_terminal.close()
    r.require(lines and all(len(line) <= 80 for line in lines), f"{lines}")
    r.require(any(re.search(r" worker-of-\S*…\S*name ", line) for line in lines), f"nothing is cut: {lines}")
    # A script gets whole names.
    text = crowded.cli("top", "--once", "--interval", "200ms").stdout
    r.require("worker-of-the-database-with-a-long-name" in text and "…" not in text, text)


def test_keys_sort_reverse_filter_and_pause(rig, crowded):
    terminal = top(rig, crowded)
    terminal.shows("by name;")
    terminal.keys("s")
    terminal.shows("by requests;")
    terminal.keys("r")
    terminal.shows("by requests, reversed;")
    terminal.keys("srss")
    terminal.shows("by requests;")
    terminal.keys("/vm1\r")
    terminal.shows("filter vm1; by requests;")
    # Whatever is shown now: the queues of vm0 are not.
    r.require(b"vm0:1" not in terminal.screen(), f"vm0 is shown: {terminal.screen()}")
    terminal.keys(" ")
    terminal.shows("vshunt top: paused; filter vm1;")
    shown = [terminal.screen()]
    r.wait_for("a whole screen", lambda: shown.append(terminal.screen()) or shown[-1] == shown[-2])
    # Three intervals.
    time.sleep(0.6)
    r.wait_for("the same figures", lambda: terminal.screen() == shown[-1])
    terminal.keys(" ")
    terminal.shows("vshunt top: filter vm1;")
    terminal.keys("q")
    r.require(terminal.ends() == 0, "it ends with an error")


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


def test_it_ends_with_its_terminal(rig, loaded):
    terminal = top(rig, loaded)
    terminal.close()
    try:
        terminal.process.wait(r.WAIT_S)
    except subprocess.TimeoutExpired:
        terminal.process.kill()
        terminal.process.wait()
        raise r.Failed("it continues after its terminal was closed") from None


def test_a_key_that_arrives_in_part_holds_nothing_up(rig, loaded):
    for part in (b"\x1b[", b"\xc3", b"\x1b[200~"):
        terminal = top(rig, loaded)
        os.write(terminal.fd, part)
        terminal.shows("vm0:1")
        terminal.process.send_signal(signal.SIGTERM)
        r.require(terminal.ends() == 0, f"SIGTERM after {part!r}")


def test_it_stops_and_continues(rig, loaded):
    terminal = top(rig, loaded)
    terminal.keys("\x1a")

    def state():
        with open(f"/proc/{terminal.process.pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0]

    r.wait_for("^Z stops it", lambda: state() == "T")
    r.require(MAIN_SCREEN in terminal.read(), "the shell would be on the screen of top")
    r.require(termios.tcgetattr(terminal.inner) == terminal.before, "the terminal of the shell is raw")
    terminal.process.send_signal(signal.SIGCONT)
    terminal.shows("vm0:1")
    terminal.keys("q")
    r.require(terminal.ends() == 0, "q after fg")
