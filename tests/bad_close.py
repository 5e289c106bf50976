"""Front ends that hand over a descriptor whose close waits: of a file of a FUSE mount whose server never answers FLUSH. For
tests/bad-input.

Neither other exports, nor the export's next front end, nor `kill -9` of the daemon may wait for it.
"""

import contextlib
import os
import signal
import struct
import subprocess
from pathlib import Path

import peer as p
import rig as r

SET_LOG_FD, SET_BACKEND_REQ_FD, ADD_MEM_REG = 7, 21, 37


def messages():
    """Messages that bring one descriptor, by name: code and payload."""
    return {
        "a kick": (p.SET_VRING_KICK, struct.pack("<Q", 0)),
        "a call": (p.SET_VRING_CALL, struct.pack("<Q", 0)),
        "guest memory": (p.SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, p.GUEST, p.MEMORY, p.USER, 0)),
        "a channel": (SET_BACKEND_REQ_FD, b""),
        "a log's eventfd": (SET_LOG_FD, b""),
        "a question that takes none": (p.GET_FEATURES, b""),
        "an unknown message": (4711, b""),
    }


class Closes:
    """The tests; each has a daemon of its own with two exports of one worker."""

    def __init__(self, rig):
        self.rig = rig
        self.image = rig.image("close.img", 1 << 20)
        self.path = rig.image("close.mnt", 0)

    def daemon(self):
        arguments = ["--disk", f"name=d,file={self.image}"]
        for name in ("bad", "good"):
            arguments += ["--disk", f"name={name},format=null,size=1M"]
            arguments += ["--export", f"type=vhost-user-blk,name={name},disk={name},socket={self.socket(name)}"]
        return r.Daemon(self.rig, *arguments, name="close")

    def socket(self, name):
        return self.rig.dir / f"close-{name}.sock"

    def serves(self, name):
        """The export serves a sane front end."""
        with p.Peer(self.socket(name)) as c:
            r.require(c.handshake() == p.ACCEPTED, f"a handshake with {name} was refused")
            r.require(c.memory() == p.ACCEPTED, f"a memory table was refused by {name}")

    @contextlib.contextmanager
    def server(self):
        """A FUSE server; what waits for it goes on when this is over."""
        program = Path(__file__).parent / "fuse_never_flushes"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([program, self.path], **pipes, text=True) as server:
            self.senders = []
            try:
                r.require(server.stdout.readline() == "ready\n", "the FUSE server did not start")
                self.server_input = server.stdin.fileno()
                yield
            finally:
                server.stdin.close()
                server.wait(r.WAIT_S)
                for pid in self.senders:
                    os.waitpid(pid, 0)

    def hand_over(self, act):
        """What `act(descriptor)` returns, in a process of its own: it ends only when the server has."""
        results, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            answer = b"failed"
            try:
                # The server ends when nobody has this any more.
                os.close(self.server_input)
                answer = str(act(os.open(self.path, os.O_RDWR))).encode()
            finally:
                os.write(end, answer)
                os._exit(0)
        self.senders.append(pid)
        os.close(end)
        with open(results, "rb", buffering=0) as pipe:
            return pipe.read(100).decode()

    def order(self, kind, payload):
        """Hands it over to the bad export in a message of that kind; whether it was refused."""

        def act(fd):
            with p.Peer(self.socket("bad")) as c:
                c.handshake()
                return c.order(kind, payload, [fd])

        return self.hand_over(act)

    def tests(self):
        if not os.path.exists("/dev/fuse") or os.geteuid():
            return r.Rig.line("skip bad message: a descriptor whose close waits: needs /dev/fuse and root")
        for name, (kind, payload) in messages().items():
            self.rig.test(f"bad message: a descriptor whose close waits, with {name}", lambda k=kind, b=payload: self.one(k, b))
        self.rig.test("bad message: a descriptor whose close waits, before its turn", self.before_its_turn)
        self.rig.test("bad message: descriptors whose close waits, one after the other, then kill -9", self.killed)

    def one(self, kind, payload):
        """The session goes on, others too, and the daemon ends."""
        daemon = self.daemon()
        with self.server():
            answer = self.order(kind, payload)
            r.require(answer == (p.ACCEPTED if kind == SET_LOG_FD else p.REFUSED), f"the message was {answer}")
            self.serves("good")
            # A front end that hands over no descriptor does not depend on the one before.
            with p.Peer(self.socket("bad")) as c:
                r.require(c.handshake() == p.ACCEPTED, "the next front end was refused")
            r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")

    def before_its_turn(self):
        def act(fd):
            with p.Peer(self.socket("bad")) as c:
                c.message(p.SET_VRING_KICK, struct.pack("<Q", 0), fds=[fd])
                return c.closed()

        daemon = self.daemon()
        with self.server(), p.Peer(self.socket("bad")) as first:
            r.require(first.handshake() == p.ACCEPTED, "a handshake was refused")
            r.require(self.hand_over(act) == "True", "a connection that sends descriptors before its turn stays")
            r.require(first.memory() == p.ACCEPTED, "the connection that is served is not any more")
            r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")

    def killed(self):
        daemon = self.daemon()
        with self.server():
            kick = messages()["a kick"]
            for _ in range(3):
                answer = self.order(*kick)
                r.require(answer == p.REFUSED, f"the kick was {answer}")
            self.serves("good")
            status = daemon.cli("status").stdout
            r.require("good" in status, f"status says {status}")
            daemon.child.process.send_signal(signal.SIGKILL)
            daemon.child.process.wait(10)
            # Its locks went with it.
            daemon = self.daemon()
            self.serves("good")
            self.serves("bad")
            answer = self.order(*kick)
            r.require(answer == p.REFUSED, f"the kick was {answer}")
        # The server's connection has ended, so what was open could be closed, and descriptors are received again.
        self.serves("bad")
        r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")
