"""A vhost-user front end of raw bytes, for messages that no correct front end sends.

It needs only Python's standard library.
"""

import array
import mmap
import os
import select
import socket
import struct
import time

GET_FEATURES, SET_FEATURES, SET_OWNER = 1, 2, 3
SET_MEM_TABLE, SET_LOG_BASE = 5, 6
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL = 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE = 15, 16, 17, 18
SEND_RARP, NET_SET_MTU = 19, 20
GET_CONFIG, SET_CONFIG, SET_INFLIGHT_FD = 24, 25, 32

VERSION, REPLY, NEED_REPLY = 1, 4, 8

F_PROTOCOL_FEATURES, F_VERSION_1, F_RING_PACKED = 1 << 30, 1 << 32, 1 << 34
PF_MQ, PF_REPLY_ACK, PF_CONFIG = 1 << 0, 1 << 3, 1 << 9

MEMORY = 1 << 20
# Where the rings lie in that memory: descriptors, available, used.
DESC, AVAIL, USED = 0x1000, 0x2000, 0x3000
DATA = 0x10000
USER = 0x7F00_0000_0000
GUEST = 0x4000_0000

REFUSED, ACCEPTED = "refused", "accepted"


class Closed(Exception):
    """The back-end ended the connection."""


class Peer:
    """One connection. `request` answers with the reply's payload, `order` with whether a request was refused."""

    def __init__(self, path, timeout_s=90.0):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self.fds = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        for fd in self.fds:
            os.close(fd)

    def send(self, data, fds=(), flags=0):
        """Bytes as they are."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], rights, flags)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise Closed from e

    def message(self, kind, payload=b"", flags=VERSION, size=None, fds=(), sending=0):
        """A message; `size` lies about the payload's length if given. `sending`: flags of sendmsg(2)."""
        self.send(struct.pack("<III", kind, flags, len(payload) if size is None else size) + payload, fds, sending)

    def receive(self, length):
        data = b""
        while len(data) < length:
            try:
                more = self.socket.recv(length - len(data))
            except ConnectionResetError as e:
                raise Closed from e
            if not more:
                raise Closed
            data += more
        return data

    def reply(self):
        _, _, size = struct.unpack("<III", self.receive(12))
        return self.receive(size)

    def request(self, kind, payload=b"", fds=()):
        """A message that has its own answer."""
        self.message(kind, payload, fds=fds)
        return self.reply()

    def order(self, kind, payload=b"", fds=(), size=None):
        """A message that is acknowledged; REFUSED also when the back-end hangs up."""
        try:
            self.message(kind, payload, VERSION | NEED_REPLY, size, fds)
            return ACCEPTED if struct.unpack("<Q", self.reply()[:8])[0] == 0 else REFUSED
        except Closed:
            return REFUSED

    def closed(self, within_s=90.0):
        """Whether the back-end hangs up."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            ready, _, _ = select.select([self.socket], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                break
            try:
                if not self.socket.recv(4096):
                    return True
            except OSError:
                return True
        return False

    def u64(self, kind, value):
        return self.order(kind, struct.pack("<Q", value))

    def handshake(self, features=0):
        """Up to the acknowledged features, with REPLY_ACK."""
        self.offered = struct.unpack("<Q", self.request(GET_FEATURES))[0]
        protocol = struct.unpack("<Q", self.request(GET_PROTOCOL_FEATURES))[0]
        self.message(SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol & (PF_MQ | PF_REPLY_ACK | PF_CONFIG)))
        self.message(SET_OWNER)
        return self.u64(SET_FEATURES, F_PROTOCOL_FEATURES | F_VERSION_1 | features)

    def memory(self):
        """One region of guest memory, shared."""
        fd = os.memfd_create("guest")
        self.fds.append(fd)
        os.ftruncate(fd, MEMORY)
        self.ram = mmap.mmap(fd, MEMORY)
        return self.table([(GUEST, MEMORY, USER, 0)], [fd])

    def table(self, regions, fds):
        payload = struct.pack("<II", len(regions), 0) + b"".join(struct.pack("<QQQQ", *r) for r in regions)
        return self.order(SET_MEM_TABLE, payload, fds)

    def addresses(self, index, desc=USER + DESC, used=USER + USED, avail=USER + AVAIL):
        return self.order(SET_VRING_ADDR, struct.pack("<IIQQQQ", index, 0, desc, used, avail, 0))

    def eventfd(self, kind, index):
        fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.fds.append(fd)
        self.order(kind, struct.pack("<Q", index), [fd])
        return fd

    def ring(self, index=0, size=16):
        """A split ring, enabled; its kick and call."""
        self.order(SET_VRING_NUM, struct.pack("<II", index, size))
        self.order(SET_VRING_BASE, struct.pack("<II", index, 0))
        self.addresses(index)
        call = self.eventfd(SET_VRING_CALL, index)
        kick = self.eventfd(SET_VRING_KICK, index)
        self.order(SET_VRING_ENABLE, struct.pack("<II", index, 1))
        return kick, call

    def describe(self, index, address, length, flags=0, following=0):
        """Writes one descriptor."""
        self.ram[DESC + 16 * index : DESC + 16 * index + 16] = struct.pack("<QIHH", address, length, flags, following)

    def describe_read(self):
        """Writes the descriptors 0 to 2: a read of one sector, with header, data and status."""
        self.describe(0, GUEST + DATA, 16, 1, 1)
        self.describe(1, GUEST + DATA + 4096, 512, 3, 2)
        self.describe(2, GUEST + DATA + 8192, 1, 2, 0)
        self.ram[DATA + 8192] = 0xFF

    def offer(self, head, kick, position=0, index=None):
        """Makes a chain available and kicks."""
        self.ram[AVAIL + 4 + 2 * position : AVAIL + 6 + 2 * position] = struct.pack("<H", head)
        self.ram[AVAIL + 2 : AVAIL + 4] = struct.pack("<H", position + 1 if index is None else index)
        os.eventfd_write(kick, 1)

    def serve(self):
        """A whole start and a read. -> the status of the read"""
        for what, answer in (("handshake", self.handshake()), ("memory table", self.memory())):
            if answer != ACCEPTED:
                raise Closed(f"a sane {what} was refused")
        kick, _ = self.ring()
        self.describe_read()
        self.offer(0, kick)
        deadline = time.monotonic() + 90
        while self.used() != 1:
            if time.monotonic() > deadline:
                raise Closed("a sane request is not done within 90 s")
            time.sleep(0.02)
        return self.ram[DATA + 8192]

    def used(self):
        """The used index."""
        return struct.unpack("<H", self.ram[USED + 2 : USED + 4])[0]
