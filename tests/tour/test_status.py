"""`vshunt status`: of some names, again and again, and with stopped queues on one line."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios

import pytest
import rig as r

LISTS = {"disks", "nets", "exports", "jobs", "queues", "sandbox", "workers"}


@pytest.fixture(scope="module")
def daemon(rig):
    daemon = r.Daemon(
        rig,
        "--disk=name=d0,format=null,size=1G", "--disk=name=d1,format=null,size=1G",
        f"--export=type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/vm0.sock,queues=8",
        f"--export=type=vhost-user-blk,name=vm1,disk=d1,socket={rig.dir}/vm1.sock",
    )
    yield daemon
    daemon.child.stop()


def watch(daemon, *more, **how):
    argv = [r.binary("vshunt"), "-c", daemon.control, "status", "--watch=100ms", *more]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def test_names(rig, daemon):
    text = daemon.cli("status", "vm0").stdout
    r.require("vm0" in text and "\nd0 " in f"\n{text}", text)
    r.require(not any(line.startswith(("vm1", "d1", "sandbox")) for line in text.splitlines()), text)
    of_disk = daemon.cli("status", "d1").stdout
    r.require("\nvm1 " in of_disk and "vm0 " not in of_disk, of_disk)
    done = daemon.cli("status", "vm0", "nobody", check=False)
    r.message_of(done, "no export, disk, network or job nobody", "vshunt status")
    r.require(done.returncode == 1, f"{done.returncode}")


def test_json_of_names_has_the_same_form(rig, daemon):
    whole, part = daemon.status(), json.loads(daemon.cli("status", "--json", "vm0").stdout)
    r.require(set(whole) == set(part) == LISTS, f"{set(whole)} and {set(part)}")
    r.require(part["sandbox"] == whole["sandbox"], "the sandbox differs")
    r.require(part["exports"] == [e for e in whole["exports"] if e["name"] == "vm0"], f"{part['exports']}")
    r.require(part["queues"] == [q for q in whole["queues"] if q["export"] == "vm0"] and len(part["queues"]) == 8, f"{part['queues']}")
    r.require([d["name"] for d in part["disks"]] == ["d0"], f"{part['disks']}")
    r.require(len(whole["queues"]) == 8 + 256, f"{len(whole['queues'])} queues")


def test_stopped_queues_share_a_line(rig, daemon):
    text = daemon.cli("status").stdout
    r.require("\nvm0: queues 0-7 stopped\nvm1: queues 0-255 stopped\n" in text, text)
    argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / "vm0.sock", "--rw", "randread", "--ios", "100", "--quiet"]
    load = r.Child(rig, "load", argv)
    r.require(load.wait() == 0, load.tail())
    text = daemon.cli("status").stdout
    rows = [line.split()[:3] for line in text.splitlines() if line.startswith("vm0:")]
    r.require(rows[0][0] == "vm0:0" and rows[1] == ["vm0:", "queues", "1-7"] and len(rows) == 2, text)


def test_watch_prints_blocks_into_a_pipe_until_it_closes(rig, daemon):
    with watch(daemon, "vm0") as process:
        titles = 0
        while titles < 3:
            line = process.stdout.readline()
            r.require("\x1b" not in line, f"an escape sequence: {line!r}")
            titles += line.startswith("DISK ")
        process.stdout.close()
        code = process.wait(r.WAIT_S)
        r.require((code, process.stderr.read()) == (0, ""), f"it ends with {code}")
    with watch(daemon, "--json", "vm1") as process:
        decoder, text, seen = json.JSONDecoder(), "", 0
        while seen < 2:
            text += process.stdout.readline()
            try:
                value, end = decoder.raw_decode(text.lstrip())
            except json.JSONDecodeError:
                continue
            r.require(set(value) == LISTS, f"{set(value)}")
            text, seen = text.lstrip()[end:], seen + 1
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        r.require(process.wait(r.WAIT_S) == 0, f"after SIGINT: {process.returncode}")


@pytest.mark.parametrize(("rows", "columns"), [(10, 60), (0, 0)], ids=("small", "unknown"))
def test_watch_draws_on_a_terminal_and_ends_by_a_key(rig, daemon, rows, columns):
    fd, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before = termios.tcgetattr(inner)

    def own_terminal():
        os.setsid()
        fcntl.ioctl(inner, termios.TIOCSCTTY, 0)

    argv = [r.binary("vshunt"), "-c", daemon.control, "status", "-w=100ms"]
    process = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, preexec_fn=own_terminal)
    seen = b""
    while seen.count(b"\x1b[H") < 3:
        seen += os.read(fd, 1 << 16)
    r.require(not rows or b"more lines; give a NAME" in seen, f"{seen}")
    screen = seen.split(b"\x1b[H")[1].replace(b"\x1b[K", b"").replace(b"\x1b[J", b"").decode().split("\r\n")
    # A terminal of unknown size is taken to have 24 rows of 80 characters.
    widest = max(map(len, screen))
    r.require(len(screen) == 10 and widest <= 60 if rows else 10 < len(screen) <= 24 and 60 < widest <= 80, f"{screen}")
    os.write(fd, b"\x03")
    code = process.wait(r.WAIT_S)
    after = termios.tcgetattr(inner)
    os.close(fd)
    os.close(inner)
    r.require(code == 0 and after == before, f"it ends with {code}")


def test_watch_shows_the_shares_of_the_interval(rig, daemon):
    with watch(daemon, "vm0") as process:
        blocks = []
        while len(blocks) < 2:
            line = process.stdout.readline()
            if line.startswith("WORKER "):
                titles, row = line.split(), process.stdout.readline().split()
                blocks.append({key: float(value.rstrip("%")) for key, value in zip(titles, row) if value.endswith("%")})
        process.terminate()
        process.stdout.read()
        r.require(process.wait(r.WAIT_S) == 0, f"after SIGTERM: {process.returncode}")
    for block in blocks:
        r.require(set(block) == {"BUSY", "POLLING", "SLEEPING"} and 99.7 < sum(block.values()) < 100.3, f"{block}")


def test_a_wrong_interval_is_refused(rig, daemon):
    done = daemon.cli("status", "--watch=1ms", check=False)
    r.require(done.returncode == 2 and "100ms to 60m" in done.stderr, f"{done.returncode}: {done.stderr}")


def test_watch_tells_the_end_of_the_daemon(rig, daemon):
    with watch(daemon) as process:
        process.stdout.readline()
        daemon.child.kill()
        process.stdout.read()
        r.require(process.wait(r.WAIT_S) != 0 and process.stderr.read().startswith("vshunt: "), f"{process.returncode}")
    daemon.start()
