"""Tests front ends that pass their own end of a connection to the daemon.

The descriptor is in data that the daemon has not read. The daemon must not keep such a connection
open: its export would be busy for ever.
"""

import array
import contextlib
import os
import select
import socket as sockets
import struct
import time

import peer as p
import pytest
import rig as r

SET_LOG_FD, SET_VRING_KICK = 7, 12
# As many connections as the daemon lets wait for their turn at one export.
WAITING_MAX = 4


def rights(*ends):
    """Ancillary data that hands over these sockets."""
    return [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [end.fileno() for end in ends]))]


def header(kind, size):
    return struct.pack("<III", kind, p.VERSION, size)


def unfinished():
    """Pieces of messages, by name: each is a list of (bytes, own ends that come with them, flags)."""
    features, table, kick = header(p.SET_FEATURES, 8), header(p.SET_MEM_TABLE, 40), header(SET_VRING_KICK, 8)
    return {
        "a byte": [(features[:1], 1, 0)],
        "an urgent byte": [(b"x", 1, sockets.MSG_OOB)],
        "half a header": [(features[:8], 1, 0)],
        "half a header with forty": [(kick[:8], 40, 0)],
        "a header": [(features, 1, 0)],
        "the header of a table": [(table, 1, 0)],
        "half a payload": [(features + b"\0\0\0", 1, 0)],
        "half a table": [(table + b"\0" * 20, 2, 0)],
        "a message, then half of one": [(header(p.GET_FEATURES, 0), 0, 0), (kick + b"\0", 1, 0)],
        "a header, its own end with the payload": [(kick, 0, 0), (b"\0\0\0", 1, 0)],
        "forty with a whole message": [(kick + b"\0" * 8, 40, 0)],
    }


class Ends:
    """Exports that a test makes."""

    def __init__(self, served):
        self.rig, self.daemon = served.rig, served.daemon
        self.made = []

    def export(self, name):
        """A new export of a null disk; its socket."""
        socket = self.rig.dir / f"{name}.sock"
        self.daemon.cli("disk", "add", f"name={name},format=null,size=1M")
        self.daemon.cli("export", "add", f"type=vhost-user-blk,name={name},disk={name},socket={socket}")
        self.made.append(name)
        return socket

    def connected(self, name):
        return next(e for e in self.daemon.status()["exports"] if e["name"] == name)["connected"]

    def descriptors(self):
        """Open files of the daemon, without the socket that it has for each process that receives descriptors. None without root:
        the daemon hides them from other programs of its user."""
        if os.geteuid() != 0:
            return None
        return len(os.listdir(f"/proc/{self.daemon.child.pid}/fd")) - len(r.receivers(self.daemon.child.pid))

    def all_removable(self):
        """Wait until no front end is left at the exports that were made, and remove them as a user does."""
        for name in self.made:
            r.wait_for(f"{name} is free", lambda name=name: not self.connected(name))
            self.daemon.cli("export", "remove", name)
            self.daemon.cli("disk", "remove", name)
        self.made.clear()

    def remove_by_force(self):
        """Removes what a failed test has left."""
        for name in self.made:
            self.daemon.cli("export", "remove", "--force", name, check=False)
            self.daemon.cli("disk", "remove", name, check=False)
        self.made.clear()


@pytest.fixture
def ends(request, served):
    """Afterwards the exports can be removed, and the daemon has no more descriptors than before."""
    made, failed = Ends(served), request.session.testsfailed
    before = made.descriptors()
    yield made
    try:
        if request.session.testsfailed == failed:
            made.all_removable()
    finally:
        made.remove_by_force()
    if before is not None:
        r.wait_for("the daemon has no more descriptors than before", lambda: made.descriptors() <= before)


def test_its_own_end_with_a_message_that_it_never_finishes_then_it_leaves(ends):
    """All of them at once, since each takes the time that a message may take."""
    with p.Peer(ends.export("idle")) as idle:
        idle.handshake()
        for number, pieces in enumerate(unfinished().values()):
            with p.Peer(ends.export(f"end{number}")) as front:
                front.handshake()
                for data, count, flags in pieces:
                    front.socket.sendmsg([data], rights(*[front.socket] * count) if count else [], flags)
        for name in ends.made[1:]:
            r.wait_for(f"the front end of {name} is gone", lambda name=name: not ends.connected(name))
        r.require(len(idle.request(p.GET_FEATURES)) == 8, "a front end that says nothing is no longer served")


def test_two_connections_with_each_others_end_in_half_a_message(ends):
    """Each connection has the other's end in half a message."""
    ends = [p.Peer(ends.export(f"end{number}")) for number in range(2)]
    # Before any is handed over: the daemon sends nothing more to an end that it has received.
    for end in ends:
        end.handshake()
    for one, other in (ends, ends[::-1]):
        one.socket.sendmsg([b"\1\0"], rights(other.socket))
    for end in ends:
        end.socket.close()


def test_its_own_end_in_a_connection_that_waits_to_be_accepted_then_it_leaves(ends):
    """The end of the connection that is served is in one that waits, behind as many as may wait."""
    socket = ends.export("busy")
    for flags in (0, sockets.MSG_OOB):
        for idle in (0, 1, WAITING_MAX, WAITING_MAX + 1):
            others = []
            with p.Peer(socket) as served:
                served.handshake()
                for _ in range(idle + 1):
                    others.append(sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM))
                    others[-1].connect(str(socket))
                try:
                    others[-1].sendmsg([b"x"], rights(served.socket, *others), flags)
                except BrokenPipeError:
                    r.require(idle >= WAITING_MAX, "a connection was closed that may wait")
                for other in others:
                    other.close()
            r.wait_for(f"the export is free of a front end and {idle} others", lambda: not ends.connected("busy"))
    with p.Peer(socket) as sane:
        r.require(sane.handshake() == p.ACCEPTED, "a sane front end is refused")


def test_its_own_end_behind_questions_whose_answers_it_does_not_read(ends):
    """The daemon is made to wait for room for its answers, and the own end comes behind the questions."""
    socket = ends.export("deaf")

    def ask(front, most):
        """Sends questions until none is received for some time. Returns their number."""
        asked = 0
        front.socket.setblocking(False)
        while asked < most and select.select([], [front.socket], [], 0.5)[1]:
            with contextlib.suppress(BlockingIOError):
                while asked < most:
                    front.socket.sendmsg([header(p.GET_FEATURES, 0)])
                    asked += 1
        return asked

    with p.Peer(socket) as front:
        front.handshake()
        both_queues = ask(front, 1 << 20)
    with p.Peer(socket) as front:
        front.handshake()
        # More than it has room for to answer, and less than there is room for in all.
        ask(front, both_queues * 3 // 4)
        time.sleep(0.5)
        front.socket.sendmsg([header(SET_LOG_FD, 0)], rights(front.socket))


def test_a_front_end_that_comes_early_waits_for_its_turn(ends):
    """A front end that comes while another is served is served when that one leaves."""
    socket = ends.export("two")
    with p.Peer(socket) as second:
        with p.Peer(socket) as third:
            second.handshake()
            third.message(p.GET_FEATURES)
            r.require(len(second.request(p.GET_FEATURES)) == 8, "the first one is not served any more")
            second.socket.close()
            r.require(len(third.reply()) == 8, "the one that waited gets no answer")


def test_another_exports_verified_load_was_unharmed(served):
    served.unharmed()
