"""Tests commands that the daemon refuses.

None of them may disturb the load on vm1.
"""

import json
import os
import socket as sockets
import time

import pytest
import rig as r
from rig import message_of

# A refusal comes at once; one that takes this long hangs.
REFUSAL_S = r.WAIT_S


def export(disk, name="vm7", socket="again"):
    """The keys of an export of this disk."""
    return f"type=vhost-user-blk,name={name},disk={disk},socket={{dir}}/{socket}.sock"


def kernel(*more):
    return ("worker", "new", "--kind", "kernel", *more)


# A name, the command, and words of its error. {dir} is the folder of the test, {freed} a worker
# that was freed.
REFUSED = (
    ("attach to a worker id that is not there", ("attach", "vm0:0", "4711"), ("4711",)),
    ("attach to a freed worker", ("attach", "vm0:0", "{freed}"), ("{freed}",)),
    ("free a freed worker", ("worker", "free", "{freed}"), ("{freed}",)),
    ("free a worker that is not there", ("worker", "free", "4711"), ("4711",)),
    ("keys with a space between them", ("disk", "add", "name=x,file=y,", "readonly=on"), ("commas",)),
    ("free worker 0", ("worker", "free", "0"), ("always",)),
    ("attach a queue that is not there", ("attach", "vm0:9", "0"), ("vm0", "queue 9")),
    ("attach a queue of no export", ("attach", "vm9:0", "0"), ("vm9",)),
    ("a worker on a CPU that is not there", ("worker", "new", "--cpu", "9999"), ("9999",)),
    ("a nice value that is none", ("worker", "new", "--nice", "77"), ("77",)),
    ("resize to no multiple of 512", ("resize", "--shrink", "d1", "1000"), ("512",)),
    ("resize of no disk", ("resize", "d9", "1G"), ("d9",)),
    ("remove an export that is used", ("export", "remove", "vm1"), ("vm1",)),
    ("remove a disk that is exported", ("disk", "remove", "d1"), ("d1",)),
    ("an export name that is taken", ("export", "add", export("d0", name="vm0")), ("vm0",)),
    ("a socket that is served", ("export", "add", export("d2", socket="vm1")), ("vm1.sock",)),
    ("a second writer of a disk", ("export", "add", export("d0")), ("d0",)),
    ("the kernel engine for a disk that is no device", ("export", "add", export("d2") + ",engine=kernel"), ("d2", "block device")),
    ("the kernel engine and cache=unsafe", ("export", "add", export("d4") + ",engine=kernel"), ("d4", "unsafe")),
    ("a kernel worker for an export that vshunt serves", kernel("--export", "vm0"), ("vm0", "engine=kernel")),
    ("a kernel worker of no export", kernel(), ("export=NAME",)),
    ("a kernel worker that polls", kernel("--export", "vm0", "--poll-us", "5"), ("poll",)),
    ("a kernel worker of an export that is not there", kernel("--export", "vm9"), ("vm9",)),
    ("a user worker for one export", ("worker", "new", "--export", "vm0"), ("vm0", "kind=kernel")),
    ("the kernel engine without its module", ("export", "add", export("d3") + ",engine=kernel"), ("vhost-blk", "modprobe")),
    ("a disk name that is an option", ("disk", "add", "name=--help,format=null,size=1M"), ("--help", "letter")),
    ("a disk name that is a folder", ("disk", "add", "name=..,format=null,size=1M"), ("..", "letter")),
    ("an export name that is an option", ("export", "add", export("d2", name="-x")), ("-x", "letter")),
    ("a disk name that is taken", ("disk", "add", "name=d0,format=null,size=1M"), ("d0",)),
)


class Asked:
    """The daemon with more disks: d2, d3 and d4."""

    def __init__(self, served):
        self.rig, self.daemon = served.rig, served.daemon
        self.freed = self.daemon.worker_new()
        self.daemon.cli("worker", "free", self.freed)
        self.daemon.cli("disk", "add", "name=d2,format=null,size=1M")
        self.daemon.cli("disk", "add", f"name=d3,file={self.rig.image('d3.img', 1 << 20)}")
        self.daemon.cli("disk", "add", f"name=d4,format=raw,cache=unsafe,file={self.rig.image('d4.img', 1 << 20)}")

    def refuse(self, arguments, words):
        names = {"dir": self.rig.dir, "freed": self.freed}
        before = self.daemon.status()
        done = self.daemon.cli(*(a.format(**names) for a in arguments), check=False, timeout_s=REFUSAL_S)
        message_of(done, *(word.format(**names) for word in words))
        after = self.daemon.status()
        for what in ("disks", "exports"):
            r.require([x["name"] for x in before[what]] == [x["name"] for x in after[what]], f"{what} changed: {after[what]}")

    def connect(self):
        """A connection to the control socket."""
        s = sockets.socket(sockets.AF_UNIX)
        # With a time limit, connecting would fail at once while many others connect.
        s.connect(str(self.daemon.control))
        s.settimeout(r.WAIT_S)
        return s


@pytest.fixture(scope="module")
def asked(served):
    return Asked(served)


@pytest.mark.parametrize("arguments, words", [pytest.param(*case[1:], id=case[0]) for case in REFUSED])
def test_refused(asked, arguments, words):
    if "modprobe" in words and os.path.exists("/dev/vhost-blk"):
        raise r.Skipped("the module is loaded")
    asked.refuse(arguments, words)


def test_free_a_worker_that_has_queues(asked):
    busy = asked.daemon.worker_new()
    asked.daemon.cli("attach", "vm0:0", busy)
    asked.refuse(("worker", "free", str(busy)), ("queue",))
    asked.daemon.cli("attach", "vm0:0", "0")
    asked.daemon.cli("worker", "free", busy)


def test_attach_to_a_name_of_two_workers(asked):
    twins = [asked.daemon.worker_new("--name", "twin") for _ in range(2)]
    asked.refuse(("attach", "vm0:0", "twin"), ("several workers are named twin", "use an id"))
    for twin in twins:
        asked.daemon.cli("worker", "free", twin)


def test_engine_auto_says_why_it_is_not_the_kernel(asked):
    asked.daemon.cli("export", "add", export("d2").format(dir=asked.rig.dir) + ",engine=auto")
    made = next(e for e in asked.daemon.status()["exports"] if e["name"] == "vm7")
    r.require(made["engine"] == "user" and "d2" in made["engine-reason"], f"engine=auto says {made}")
    asked.daemon.cli("export", "remove", "vm7")


def test_garbage_on_the_control_socket(asked):
    for text in (b"\xff\xfe{{{", b"{" * 100000, b"[1,2]\n", b'{"execute": 7}\n', b'{"execute":"' + b"a" * (1 << 20)):
        with asked.connect() as s:
            s.recv(4096)
            try:
                s.sendall(text)
                s.shutdown(sockets.SHUT_WR)
                while s.recv(65536):
                    pass
            except OSError:
                pass
    asked.daemon.status()


def test_a_command_before_qmp_capabilities(asked):
    with asked.connect() as s:
        lines = s.makefile("rw")
        r.require("QMP" in json.loads(lines.readline()), "no greeting")
        lines.write('{"execute":"query-workers"}\n')
        lines.flush()
        r.require("error" in json.loads(lines.readline()), "answered before qmp_capabilities")


def test_no_answer_is_read(asked):
    """Half-closed clients that ask and never read count as clients, do not lock out others, and use little memory."""
    proc = f"/proc/{asked.daemon.child.pid}"

    def rss():
        return int(next(line for line in open(f"{proc}/status") if line.startswith("VmRSS")).split()[1])

    def writers():
        names = [comm.strip() for _, comm in r.threads(asked.daemon.child.pid, "comm")]
        return sum(name.startswith("ctl-") and name.endswith("-out") for name in names)

    before, clients = rss(), []
    try:
        # Twice as many as the limit, each as soon as it is admitted.
        while len(clients) < 130:
            s = asked.connect()
            if b'"QMP"' not in s.recv(4096):
                s.close()
                time.sleep(0.05)
                continue
            clients.append(s)
            s.sendall(b'{"execute":"qmp_capabilities"}' + b'{"execute":"query-commands"}' * 200)
            s.shutdown(sockets.SHUT_WR)
        r.wait_for("others are served", lambda: asked.daemon.cli("status", check=False).returncode == 0)
        r.require(writers() <= 64, f"{writers()} clients")
        # 64 clients with 1 MiB and one answer each, and what the allocator keeps.
        r.require(rss() - before < 256 << 10, f"{before} KiB, and then {rss()} KiB")
    finally:
        for s in clients:
            s.close()
    asked.daemon.status()


def test_half_a_command(asked):
    """Clients that sent half a command make room, and one that waits for events stays."""
    with asked.connect() as waits:
        lines = waits.makefile("rw")
        lines.readline()
        lines.write('{"execute":"qmp_capabilities"}\n')
        lines.flush()
        r.require("return" in json.loads(lines.readline()), "not negotiated")
        clients = []
        try:
            for _ in range(80):
                s = asked.connect()
                s.sendall(b'{"execute": "qm')
                clients.append(s)
            r.wait_for("others are served", lambda: asked.daemon.cli("status", check=False).returncode == 0)
        finally:
            for s in clients:
                s.close()
        lines.write('{"execute":"query-disks","id":7}\n')
        lines.flush()
        r.require(json.loads(lines.readline())["id"] == 7, "the client that waits was closed")


def test_another_exports_verified_load_was_unharmed(served):
    served.unharmed()
