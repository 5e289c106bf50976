"""Makes the picture of `vshunt top`: scripts/recording.

A daemon serves four disks in memory or without storage. Three of them are under load, and one of these has a limit. `vshunt top` runs
in a pseudo-terminal; after some intervals its screen is drawn.
"""

import codecs
import fcntl
import os
import select
import struct
import sys
import termios
import time
from pathlib import Path

import recording_screen

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/lib"))
import rig as r  # noqa: E402

COLUMNS, ROWS = 100, 24
# What `vshunt top` sends at the end of each picture: it hides the cursor.
PICTURE_END = "\x1b[?25l"

# name, its keys, queues, more keys of the export; arguments of the load, or None for none
DISKS = (
    ("db", "format=ram,size=256M", 4, "", ("--rw", "randrw", "--rwmixread", "70", "--bs", "64k", "--iodepth", "16")),
    ("log", "format=null,size=4G", 1, "", ("--rw", "write", "--bs", "64k", "--iodepth", "1")),
    ("spare", "format=null,size=4G", 4, "", None),
    ("web", "format=null,size=4G", 2, ",limits.iops=5000", ("--rw", "randread", "--bs", "16k", "--iodepth", "4")),
)
# Queues, and the worker to which they go.
MOVES = (("db:2-3", "more"), ("web", "web"), ("log", "web"))


def screen(interval_s, intervals):
    """Runs everything in a folder of its own. Returns the screen after so many intervals."""
    rig = r.Rig("recording")
    try:
        arguments = []
        for name, disk, queues, keys, _ in DISKS:
            socket = rig.dir / f"{name}.sock"
            arguments += ["--disk", f"name={name},{disk}"]
            arguments += ["--export", f"type=vhost-user-blk,name={name},disk={name},socket={socket},queues={queues}{keys}"]
        daemon = r.Daemon(rig, *arguments)
        for worker in dict.fromkeys(worker for _, worker in MOVES):
            daemon.cli("worker", "new", "--name", worker)
        for name, _, queues, _, load in DISKS:
            if load:
                argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / f"{name}.sock", "--queues", queues, *load]
                r.Child(rig, name, [*argv, "--runtime", "10m", "--quiet"])
        for queues, worker in MOVES:
            daemon.attach(queues, worker)
        beside = list(rig.children)
        shown = top(daemon, interval_s, intervals)
        ended = [f"{child.name}: {child.tail()}" for child in beside if not child.running()]
        r.require(not ended, f"ended by themselves: {ended}")
        return shown
    except r.Failed as e:
        sys.exit(f"recording: {e}")
    finally:
        rig.end()


def top(daemon, interval_s, intervals):
    """Runs `vshunt top` in a pseudo-terminal until it has drawn the rates of so many intervals."""
    ours, inner = os.openpty()
    try:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        argv = [r.binary("vshunt"), "-c", daemon.control, "top", "--interval", f"{round(interval_s * 1000)}ms"]
        child = r.Child(daemon.rig, "top", argv, stdin=inner, stdout=inner, stderr=inner, env=env)
        shown, decoder = recording_screen.Screen(COLUMNS, ROWS), codecs.getincrementaldecoder("utf-8")()
        loaded = [f"{name}:{queue} " for name, _, queues, _, load in DISKS if load for queue in range(queues)]
        end, first, sent = time.monotonic() + r.WAIT_S, None, ""
        while True:
            if time.monotonic() > end or not child.running():
                raise r.Failed("vshunt top does not show all queues:\n" + "\n".join(shown.lines()))
            if select.select([ours], [], [], 0.1)[0]:
                sent += decoder.decode(os.read(ours, 65536))
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
        while child.running() and time.monotonic() < end:
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        return shown
    finally:
        os.close(ours)
        os.close(inner)
