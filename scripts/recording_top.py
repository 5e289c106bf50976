"""Makes the picture of `vshunt top`: scripts/recording.

A daemon serves four disks in memory or without storage. Three of them are under load, and one of these has a limit. `vshunt top` runs
in a pseudo-terminal; after some intervals its screen is drawn.
"""

import codecs
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import recording_screen

COLUMNS, ROWS = 100, 24
WAIT_S = 60.0
# What `vshunt top` sends at the end of each picture: it hides the cursor.
PICTURE_END = "\x1b[?25l"
END_S = 10.0

# name, its keys, queues, more keys of the export; arguments of the load, or None for none
DISKS = (
    ("db", "format=ram,size=256M", 4, "", ("--rw", "randrw", "--rwmixread", "70", "--bs", "64k", "--iodepth", "16")),
    ("log", "format=null,size=4G", 1, "", ("--rw", "write", "--bs", "64k", "--iodepth", "1")),
    ("spare", "format=null,size=4G", 4, "", None),
    ("web", "format=null,size=4G", 2, ",limits.iops=5000", ("--rw", "randread", "--bs", "16k", "--iodepth", "4")),
)
# Queues, and the worker to which they go.
MOVES = (("db:2-3", "more"), ("web", "web"), ("log", "web"))


def daemon(programs):
    """The arguments of the daemon."""
    argv = [f"{programs}/vshunt", "serve", "--control", "vshunt.sock"]
    for name, disk, queues, keys, _ in DISKS:
        argv += ["--disk", f"name={name},{disk}"]
        argv += ["--export", f"type=vhost-user-blk,name={name},disk={name},socket={name}.sock,queues={queues}{keys}"]
    return argv


class Programs:
    """Programs that run beside each other in a folder; they end with it."""

    def __init__(self, folder, programs):
        self.folder, self.programs, self.children = folder, programs, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def start(self, argv, **more):
        with open(self.folder / "log", "ab") as log:
            child = subprocess.Popen(argv, cwd=self.folder, **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **more})
        self.children.append(child)
        return child

    def said(self):
        return (self.folder / "log").read_text(errors="replace")[-800:]

    def cli(self, *arguments):
        """`vshunt ARGUMENTS`; None if it fails."""
        argv = [f"{self.programs}/vshunt", "-c", "vshunt.sock", *arguments]
        done = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    def wait(self, what, condition):
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                sys.exit(f"recording: {what}: not within {WAIT_S:g} s: {self.said()}")
            time.sleep(0.05)


def screen(folder, programs, interval_s, intervals):
    """Runs everything in a folder. Returns the screen after so many intervals."""
    with Programs(folder, programs) as running:
        running.start(daemon(programs))
        running.wait("the daemon answers", lambda: running.cli("status") is not None)
        for worker in dict.fromkeys(worker for _, worker in MOVES):
            running.cli("worker", "new", "--name", worker)
        for name, _, queues, _, load in DISKS:
            if load:
                running.start([f"{programs}/vshunt-bench", "blk", "--socket", f"{name}.sock", "--queues", str(queues), *load,
                               "--runtime", "10m", "--quiet"])
        for queues, worker in MOVES:
            running.wait(f"{queues} moves", lambda: running.cli("attach", queues, worker) is not None)  # noqa: B023
        before = list(running.children)
        shown = top(running, interval_s, intervals)
        for child in before:
            if child.poll() is not None:
                sys.exit(f"recording: {' '.join(child.args)} ended with {child.returncode}: {running.said()}")
        return shown


def top(running, interval_s, intervals):
    """Runs `vshunt top` in a pseudo-terminal until it has drawn the rates of so many intervals."""
    ours, inner = os.openpty()
    try:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        argv = [f"{running.programs}/vshunt", "-c", "vshunt.sock", "top", "--interval", f"{round(interval_s * 1000)}ms"]
        child = running.start(argv, stdin=inner, stdout=inner, stderr=inner, env=env)
        shown, decoder = recording_screen.Screen(COLUMNS, ROWS), codecs.getincrementaldecoder("utf-8")()
        loaded = [f"{name}:{queue} " for name, _, queues, _, load in DISKS if load for queue in range(queues)]
        end, first, sent = time.monotonic() + WAIT_S, None, ""
        while True:
            if select.select([ours], [], [], 0.1)[0]:
                sent += decoder.decode(os.read(ours, 65536))
            elif child.poll() is not None or time.monotonic() > end:
                sys.exit("recording: vshunt top does not show all queues:\n" + "\n".join(shown.lines()))
            pictures, ends, sent = sent.rpartition(PICTURE_END)
            shown.feed(pictures + ends)
            lines = shown.lines()
            if ends and all(any(line.startswith(queue) for line in lines) for queue in loaded):
                # The rates of the first interval are there.
                first = first or time.monotonic()
                if time.monotonic() - first >= (intervals - 1) * interval_s:
                    break
        os.write(ours, b"q")
        # What it sends at its end is not part of the picture.
        while child.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        return shown
    finally:
        os.close(ours)
        os.close(inner)
