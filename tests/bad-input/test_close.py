"""Tests front ends that pass a descriptor whose close waits.

The descriptor is a file of a FUSE mount whose server never answers FLUSH, or a TCP socket that
lingers. It is left where no process receives it. Other exports, the next front end and the end of
the daemon must not wait for the close.
"""

import contextlib
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess

import peer as p
import pytest
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


NEEDS_FUSE = pytest.mark.skipif(not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="needs /dev/fuse and root")


class Closes:
    """A daemon with two exports of one worker, for one test."""

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
        """A FUSE server; what waits for it continues when this is over."""
        program = r.ROOT / "tests/lib/fuse_never_flushes"
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
        """Runs `act(descriptor)` in another process and returns its result.

        The process ends only when the server has.
        """
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

    @contextlib.contextmanager
    def lingering(self):
        """Makes sockets whose last close waits until this is over.

        Their data is not received until then.
        """
        with contextlib.ExitStack() as ends, socket.create_server(("127.0.0.1", 0)) as server:

            def make():
                s = socket.create_connection(server.getsockname())
                ends.enter_context(server.accept()[0])
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
                s.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        s.send(bytes(1 << 16))
                return s

            yield make

    def leave(self, connection, make, flags=0):
        """Sends a kick that brings a lingering socket, and keeps no descriptor of that.

        The daemon must be stopped. Otherwise it may close its copy first, and the last close, which
        waits, would be the one here.
        """
        with make() as s:
            try:
                connection.message(p.SET_VRING_KICK, struct.pack("<Q", 0), fds=[s.fileno()], sending=flags)
            except p.Closed:
                # Nobody else has it.
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                raise

    @contextlib.contextmanager
    def stopped(self, daemon):
        """The daemon does nothing meanwhile."""
        daemon.child.suspend()
        try:
            yield
        finally:
            daemon.child.resume()

    def still_works(self, daemon, serves=True):
        """Neither export waits, nor the removal of one, nor the daemon's end."""
        self.serves("good")
        if serves:
            self.serves("bad")
            daemon.cli("export", "remove", "bad")
        r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")


@pytest.fixture(scope="module")
def closes(served):
    """Beside the daemon with the verified load."""
    return Closes(served.rig)


def test_a_close_that_waits_of_what_was_sent_before_its_turn(closes):
    daemon = closes.daemon()
    with closes.lingering() as make:
        with p.Peer(closes.socket("bad")) as first, p.Peer(closes.socket("bad")) as c:
            r.require(first.handshake() == p.ACCEPTED, "a handshake was refused")
            with closes.stopped(daemon):
                closes.leave(c, make)
            r.require(c.closed(), "a connection that sends descriptors before its turn stays")
            r.require(first.memory() == p.ACCEPTED, "the connection that is served is not any more")
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "the next front end was refused")
        closes.still_works(daemon, serves=False)


def test_a_close_that_waits_of_what_was_sent_after_an_error(closes):
    daemon = closes.daemon()
    with closes.lingering() as make:
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "a handshake was refused")
            with closes.stopped(daemon):
                c.message(p.GET_FEATURES, size=1 << 20)
                closes.leave(c, make)
            r.require(c.closed(), "the connection of a malformed message stays")
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "the next front end was refused")
        daemon.cli("export", "remove", "bad")
        closes.still_works(daemon, serves=False)


def test_a_close_that_waits_of_what_nobody_has_accepted(closes):
    daemon = closes.daemon()
    with closes.lingering() as make, contextlib.ExitStack() as stack:
        remove = [r.binary("vshunt"), "-c", daemon.control, "export", "remove", "bad", "--force"]
        with closes.stopped(daemon):
            remover = stack.enter_context(subprocess.Popen(remove, stdout=subprocess.DEVNULL))
            connections = [stack.enter_context(p.Peer(closes.socket("bad"))) for _ in range(20)]
            for c, flags in zip(connections, itertools.cycle([0, socket.MSG_OOB])):
                closes.leave(c, make, flags)
        r.require(remover.wait(r.WAIT_S) == 0, "the export was not removed")
        r.require(all(c.closed() for c in connections), "a connection stays")
        closes.still_works(daemon, serves=False)


def test_a_close_that_waits_of_what_a_socket_has_in_its_queue(closes):
    daemon = closes.daemon()
    with closes.lingering() as make:
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "a handshake was refused")
            near, far = socket.socketpair()
            with near, far:
                with make() as s:
                    # The daemon gets it with the message below, so this close is not the last.
                    socket.send_fds(far, [b"x"], [s.fileno()])
                c.message(SET_BACKEND_REQ_FD, fds=[near.fileno()])
            r.require(c.closed(), "a connection whose descriptor cannot be had in time stays")
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "the next front end was refused")
        daemon.cli("export", "remove", "bad")
        closes.still_works(daemon, serves=False)


def test_closes_that_wait_more_than_an_export_keeps(closes):
    daemon = closes.daemon()
    with contextlib.ExitStack() as stack:
        with closes.lingering() as make:
            first = stack.enter_context(p.Peer(closes.socket("bad")))
            r.require(first.handshake() == p.ACCEPTED, "a handshake was refused")
            for _ in range(9):
                c = stack.enter_context(p.Peer(closes.socket("bad")))
                with closes.stopped(daemon):
                    closes.leave(c, make)
                r.require(c.closed(), "a connection that sends descriptors before its turn stays")
            # No other is taken, and the one that is served is.
            c = stack.enter_context(p.Peer(closes.socket("bad")))
            with closes.stopped(daemon):
                closes.leave(c, make)
            r.require(not c.closed(2), "one more connection was taken")
            r.require(first.memory() == p.ACCEPTED, "the connection that is served is not any more")
            closes.serves("good")
        r.require(c.closed(), "a connection stays after the others are closed")
        first.socket.close()
        closes.still_works(daemon)


def test_descriptors_while_the_user_has_too_many_in_flight(closes):
    """The kernel passes on no more descriptors of a user than a process may have. Afterwards all is well."""
    daemon = closes.daemon()
    closes.serves("bad")
    pid = daemon.child.process.pid
    most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (200, most))
    with contextlib.closing(os.fdopen(os.eventfd(0), "rb", buffering=0)) as event:
        near, far = socket.socketpair()
        with near, far:
            socket.send_fds(near, [b"x"], [event.fileno()] * 250)
            with p.Peer(closes.socket("bad")) as c:
                r.require(c.handshake() == p.ACCEPTED, "a handshake was refused")
                with contextlib.suppress(p.Closed):
                    r.require(c.memory() == p.REFUSED, "a table was accepted that could not be received")
    r.wait_for("the daemon has said why", lambda: "run VMMs as other users" in daemon.child.tail())
    closes.still_works(daemon)


def test_descriptors_after_the_processes_that_receive_them_were_killed(closes):
    daemon = closes.daemon()
    closes.serves("bad")
    killed = r.receivers(daemon.child.process.pid)
    r.require(killed, "there is no process that receives descriptors")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # A message that such a process has at its end is refused.
    r.wait_for("the processes have ended", lambda: not set(killed) & set(r.receivers(daemon.child.process.pid)))
    closes.still_works(daemon)


@NEEDS_FUSE
@pytest.mark.parametrize("kind, payload", messages().values(), ids=messages())
def test_a_descriptor_whose_close_waits(closes, kind, payload):
    """The session continues, others too, and the daemon ends."""
    daemon = closes.daemon()
    with closes.server():
        answer = closes.order(kind, payload)
        r.require(answer == (p.ACCEPTED if kind == SET_LOG_FD else p.REFUSED), f"the message was {answer}")
        closes.serves("good")
        # A front end that hands over no descriptor does not depend on the one before.
        with p.Peer(closes.socket("bad")) as c:
            r.require(c.handshake() == p.ACCEPTED, "the next front end was refused")
        r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")


@NEEDS_FUSE
def test_a_descriptor_whose_close_waits_before_its_turn(closes):
    def act(fd):
        with p.Peer(closes.socket("bad")) as c:
            c.message(p.SET_VRING_KICK, struct.pack("<Q", 0), fds=[fd])
            return c.closed()

    daemon = closes.daemon()
    with closes.server(), p.Peer(closes.socket("bad")) as first:
        r.require(first.handshake() == p.ACCEPTED, "a handshake was refused")
        r.require(closes.hand_over(act) == "True", "a connection that sends descriptors before its turn stays")
        r.require(first.memory() == p.ACCEPTED, "the connection that is served is not any more")
        r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")


@NEEDS_FUSE
def test_descriptors_whose_close_waits_one_after_the_other_then_kill_9(closes):
    daemon = closes.daemon()
    with closes.server():
        kick = messages()["a kick"]
        for _ in range(3):
            answer = closes.order(*kick)
            r.require(answer == p.REFUSED, f"the kick was {answer}")
        closes.serves("good")
        status = daemon.cli("status").stdout
        r.require("good" in status, f"status says {status}")
        daemon.child.process.send_signal(signal.SIGKILL)
        daemon.child.wait()
        # Its locks went with it.
        daemon = closes.daemon()
        closes.serves("good")
        closes.serves("bad")
        answer = closes.order(*kick)
        r.require(answer == p.REFUSED, f"the kick was {answer}")
    # The server's connection has ended, so what was open could be closed, and descriptors are
    # received again.
    closes.serves("bad")
    r.require(daemon.child.stop() == 0, f"the daemon ended badly: {daemon.child.tail()}")


def test_another_exports_verified_load_was_unharmed(served):
    served.unharmed()
