"""A vhost-user-blk front end that starts queues and then keeps still: what the idle and memory cases need.

It is a guest's driver of the smallest kind, in the standard library: split rings, one kick and one call
eventfd a queue, no event index, no indirect descriptors. Every queue really runs: `touch` reads through each
of its descriptors, so that whatever a server makes on first use is made.

vhost-user: QEMU's docs/interop/vhost-user.rst; rings: virtio 1.3, section 2.7; requests: section 5.2.6.
"""
import mmap
import os
import select
import socket
import struct
import time

GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL = 8, 9, 10, 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE = 15, 16, 17, 18

F_MQ, F_PROTOCOL_FEATURES, F_VERSION_1 = 1 << 12, 1 << 30, 1 << 32
PROTOCOL_F_MQ = 1 << 0
VERSION, REPLY = 1, 4
DESC_NEXT, DESC_WRITE = 1, 2

PAGE = 4096
# Where guest memory begins in the guest's addresses; not 0, as in no guest.
GUEST_BASE = 1 << 30


class FrontEnd:
    """Connected and set up with `queues` queues of `size` descriptors (a power of two); a context manager."""

    def __init__(self, path, queues, size=256, timeout_s=10):
        self.queues, self.size = queues, size
        self._timeout_s = timeout_s
        self._fds = []
        # In a queue's part: descriptors, the available ring, the used ring, each on a page of its
        # own.
        self._avail_at = -(-16 * size // PAGE) * PAGE
        self._used_at = self._avail_at + -(-(6 + 2 * size) // PAGE) * PAGE
        self._stride = self._used_at + -(-(6 + 8 * size) // PAGE) * PAGE
        # Ahead of the queues: a read request's header, the status bytes, the data that all reads
        # share.
        self._header_at, self._status_at, self._data_at, self._rings_at = 0, PAGE, 2 * PAGE, 3 * PAGE
        self._bytes = self._rings_at + queues * self._stride
        memory_fd = self._own(os.memfd_create("guest"))
        os.ftruncate(memory_fd, self._bytes)
        self._memory = mmap.mmap(memory_fd, self._bytes)
        # The front end's own address, for the memory table; any that is consistent will do.
        self._user_base = 1 << 40
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
            self._negotiate(memory_fd)
            self._kicks, self._calls = zip(*(self._start(q) for q in range(queues)))
            self._ask(GET_FEATURES)  # everything before it has been dealt with
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def touch(self):
        """As many 4k reads on every queue as it has room for, at once; each must succeed."""
        reads = self.size // 3
        self._memory[self._header_at:self._header_at + 16] = struct.pack("<IIQ", 0, 0, 0)
        for q in range(self.queues):
            at = self._rings_at + q * self._stride
            for i in range(reads):
                self._memory[at + 48 * i:at + 48 * i + 48] = b"".join((
                    self._desc(self._header_at, 16, DESC_NEXT, 3 * i + 1),
                    self._desc(self._data_at, PAGE, DESC_NEXT | DESC_WRITE, 3 * i + 2),
                    self._desc(self._status_at + i, 1, DESC_WRITE, 0)))
            avail = at + self._avail_at
            struct.pack_into(f"<{reads}H", self._memory, avail + 4, *range(0, 3 * reads, 3))
        for q in range(self.queues):
            self._memory[self._status_at:self._status_at + reads] = b"\xff" * reads
            at = self._rings_at + q * self._stride
            struct.pack_into("<H", self._memory, at + self._avail_at + 2, reads)
            os.write(self._kicks[q], struct.pack("=Q", 1))
            deadline = time.monotonic() + self._timeout_s
            while struct.unpack_from("<H", self._memory, at + self._used_at + 2)[0] != reads:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"queue {q} does not answer its reads")
                if select.select([self._calls[q]], [], [], 0.1)[0]:
                    os.read(self._calls[q], 8)
            if any(self._memory[self._status_at:self._status_at + reads]):
                raise OSError(f"queue {q}: a read failed")

    def _desc(self, at, length, flags, following):
        return struct.pack("<QIHH", GUEST_BASE + at, length, flags, following)

    def _own(self, fd):
        self._fds.append(fd)
        return fd

    def _negotiate(self, memory_fd):
        self._tell(SET_OWNER)
        features = self._ask(GET_FEATURES)
        need = F_VERSION_1 | F_PROTOCOL_FEATURES | (F_MQ if self.queues > 1 else 0)
        if features & need != need:
            raise OSError(f"the server offers features {features:#x}, needed are {need:#x}")
        if not self._ask(GET_PROTOCOL_FEATURES) & PROTOCOL_F_MQ:
            raise OSError("the server does not offer several queues")
        self._tell(SET_PROTOCOL_FEATURES, struct.pack("<Q", PROTOCOL_F_MQ))
        if (most := self._ask(GET_QUEUE_NUM)) < self.queues:
            raise OSError(f"the server has {most} queues, wanted are {self.queues}")
        self._tell(SET_FEATURES, struct.pack("<Q", need))
        region = struct.pack("<QQQQ", GUEST_BASE, self._bytes, self._user_base, 0)
        self._tell(SET_MEM_TABLE, struct.pack("<II", 1, 0) + region, [memory_fd])

    def _start(self, q):
        at = self._user_base + self._rings_at + q * self._stride
        kick, call = (self._own(os.eventfd(0)) for _ in range(2))
        self._tell(SET_VRING_NUM, struct.pack("<II", q, self.size))
        self._tell(SET_VRING_BASE, struct.pack("<II", q, 0))
        self._tell(SET_VRING_ADDR, struct.pack("<IIQQQQ", q, 0, at, at + self._used_at, at + self._avail_at, 0))
        self._tell(SET_VRING_CALL, struct.pack("<Q", q), [call])
        self._tell(SET_VRING_KICK, struct.pack("<Q", q), [kick])
        self._tell(SET_VRING_ENABLE, struct.pack("<II", q, 1))
        return kick, call

    def _tell(self, request, payload=b"", fds=()):
        message = struct.pack("<III", request, VERSION, len(payload)) + payload
        if fds:
            socket.send_fds(self._socket, [message], fds)
        else:
            self._socket.sendall(message)

    def _ask(self, request):
        self._tell(request)
        got, flags, size = struct.unpack("<III", self._exactly(12))
        payload = self._exactly(size)
        if got != request or not flags & REPLY or size != 8:
            raise OSError(f"request {request} was answered with {got}, {size} bytes")
        return struct.unpack("<Q", payload)[0]

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise OSError("the server closed the connection")
            data += part
        return data
