"""A vhost-user front end that breaks every rule, at random: one process of tests/neighbour.

    neighbour_attack.py SEED SECONDS SOCKET...     a network device's socket is written as net:PATH

It connects again and again until its time is over. Each connection draws what it does from a seed of its own, which is written to
stdout before it begins. The last line is a JSON object with counts of what was done.
"""

import array
import collections
import fcntl
import json
import os
import random
import select
import socket as sockets
import struct
import sys
import time

import neighbour_guest as g
import peer as p

RESET_OWNER, SET_LOG_FD, SET_VRING_ERR, SET_BACKEND_REQ_FD = 4, 7, 14, 21
GET_INFLIGHT_FD, RESET_DEVICE, GET_MAX_MEM_SLOTS, ADD_MEM_REG, REM_MEM_REG, SET_STATUS, GET_STATUS = 31, 34, 36, 37, 38, 39, 40

PF_ALL = sum(1 << bit for bit in (0, 1, 2, 3, 4, 5, 9, 12, 13, 15, 16))
F_INDIRECT, F_EVENT_IDX, F_LOG_ALL = 1 << 28, 1 << 29, 1 << 26

# How long an answer may take; the connection is given up then.
ANSWER_S = 2.0
# Connections that wait beside the one that is served, at most.
PILE = 24
# A full eventfd: one more is not taken.
FULL = 2**64 - 2


class Front(p.Peer):
    """One connection and all that it has."""

    def __init__(self, chance, socket, net, counts):
        super().__init__(socket, ANSWER_S)
        self.chance, self.net, self.counts = chance, net, counts
        self.memory, self.rings, self.regions = None, [], []
        self.others = []

    def __exit__(self, *_):
        for other in self.others:
            other.close()
        super().__exit__()

    def keep(self, fd):
        self.fds.append(fd)
        return fd

    def order(self, kind, payload=b"", fds=(), size=None):
        """As a sane front end, except that answers to what was sent before are thrown away."""
        self.discard()
        answer = super().order(kind, payload, fds, size)
        self.counts[answer] += 1
        return answer

    def discard(self):
        """Reads and drops all data that has arrived."""
        while select.select([self.socket], [], [], 0)[0] and self.socket.recv(65536):
            pass

    # What a sane front end does, nearly.

    def begin(self):
        """Features, memory and rings, so that requests can be made."""
        chance = self.chance
        offered = struct.unpack("<Q", self.request(p.GET_FEATURES))[0]
        protocol = struct.unpack("<Q", self.request(p.GET_PROTOCOL_FEATURES))[0]
        chosen = protocol & (PF_ALL if chance.random() < 0.8 else chance.getrandbits(64)) | p.PF_REPLY_ACK
        self.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", chosen))
        self.message(p.SET_OWNER)
        self.packed = bool(offered & p.F_RING_PACKED) and chance.random() < 0.5
        features = offered & (chance.getrandbits(64) | F_INDIRECT | p.F_PROTOCOL_FEATURES) | p.F_VERSION_1
        features &= ~(p.F_RING_PACKED | (F_LOG_ALL if chance.random() < 0.8 else 0))
        self.u64(p.SET_FEATURES, features | (p.F_RING_PACKED if self.packed else 0))
        self.inflight_first = chance.random() < 0.3
        if self.inflight_first:
            self.inflight()
        self.share()
        for index in range(chance.choice((1, 2, 2, 4)) if not self.net else chance.choice((2, 4, 5))):
            self.start(index)

    def share(self):
        """A memory table that can be used."""
        self.memory = g.Memory()
        self.keep(self.memory.fd)
        half = g.MEMORY // 2
        if self.chance.random() < 0.5:
            self.regions = [(p.GUEST, g.MEMORY, p.USER, 0)]
        else:
            self.regions = [(p.GUEST, half, p.USER, 0), (p.GUEST + half, half, p.USER + half, half)]
        for ring in self.rings:
            ring.memory = self.memory
        return self.table(self.regions, [self.memory.fd] * len(self.regions))

    def start(self, index):
        """A ring that runs, and a few requests in it."""
        chance = self.chance
        size = chance.choice((1, 2, 4, 16, 64, 256, 1024))
        ring = g.Ring(chance, self.memory, index, size, self.packed, self.net)
        self.rings = [other for other in self.rings if other.index != index] + [ring]
        self.order(p.SET_VRING_NUM, struct.pack("<II", index, size))
        self.order(p.SET_VRING_BASE, struct.pack("<II", index, 0x8000_8000 if self.packed else 0))
        at = p.USER + ring.at
        self.addresses(index, at, at + g.DEVICE, at + g.DRIVER)
        ring.kick = self.keep(os.eventfd(0, os.EFD_CLOEXEC | chance.choice((0, os.EFD_NONBLOCK, os.EFD_SEMAPHORE))))
        ring.call = self.call(ring)
        if ring.call is not None:
            self.order(p.SET_VRING_CALL, struct.pack("<Q", index), [ring.call])
        if chance.random() < 0.3:
            self.order(SET_VRING_ERR, struct.pack("<Q", index), [self.call(ring) or ring.kick])
        self.order(p.SET_VRING_KICK, struct.pack("<Q", index), [ring.kick])
        if self.order(p.SET_VRING_ENABLE, struct.pack("<II", index, 1)) == p.ACCEPTED:
            self.counts["rings"] += 1
        ring.requests()
        self.kick(ring)

    def call(self, ring):
        """A call descriptor: often a full one, which would block a writer."""
        kind = self.chance.randrange(6)
        if kind == 0:
            return None
        if kind == 1:
            return ring.kick
        if kind == 2:
            near, far = sockets.socketpair()
            self.others.append(far)
            return self.keep(near.detach())
        fd = self.keep(os.eventfd(0, os.EFD_CLOEXEC))
        if kind > 3:
            os.eventfd_write(fd, FULL)
        return fd

    def kick(self, ring, value=1):
        """Kick without waiting, whatever state the eventfd is in, and leave it blocking or not."""
        self.blocking(ring.kick, False)
        try:
            os.eventfd_write(ring.kick, value)
        except BlockingIOError:
            pass
        if self.chance.random() < 0.1:
            # The daemon is woken, and finds nothing to read.
            try:
                os.eventfd_read(ring.kick)
            except BlockingIOError:
                pass
        self.blocking(ring.kick, self.chance.random() < 0.5)

    @staticmethod
    def blocking(fd, on):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK if on else flags | os.O_NONBLOCK)

    # What the guest does.

    def use_rings(self):
        for ring in self.rings:
            ring.requests()
            self.kick(ring)
        self.counts["batches"] += len(self.rings)

    def spoil_rings(self):
        if self.rings:
            ring = self.chance.choice(self.rings)
            ring.garbage()
            self.kick(ring, self.chance.choice((1, 1, FULL)))

    def fill_calls(self):
        """Full call descriptors, blocking again, before requests complete."""
        for ring in self.rings:
            if ring.call in (None, ring.kick):
                continue
            try:
                self.blocking(ring.call, False)
                os.write(ring.call, struct.pack("<Q", FULL))
            except OSError:
                pass
            self.blocking(ring.call, True)
        self.use_rings()

    def cut_memory(self):
        """Memory is cut short while requests are under way."""
        if self.memory:
            self.use_rings()
            self.memory.cut(self.chance)
            self.counts["cut"] += 1
            if self.chance.random() < 0.5:
                self.use_rings()

    # What the VMM says.

    def new_memory(self):
        if self.memory:
            self.use_rings()
            self.share()

    def bad_table(self):
        """A memory table in which something is wrong."""
        chance = self.chance
        count = chance.choice((0, 1, 2, 8, 32, 33))
        fds = [self.any_fd() for _ in range(chance.choice((count, count, max(0, count - 1), min(count + 1, 40))))]
        odd = (0, 1, 4095, 4096, g.MEMORY, 1 << 40, 8 << 40, 2**63, 2**64 - 4096, 2**64 - 1)
        regions = [tuple(chance.choice((*odd, p.GUEST + k * g.MEMORY)) for _ in range(4)) for k in range(count)]
        self.table(regions, fds)

    def slots(self):
        """Regions are added and removed one by one."""
        chance = self.chance
        region = chance.choice((*self.regions, (p.GUEST + (1 << 30), 4096, p.USER + (1 << 30), 0), (0, 0, 0, 0)))
        kind = chance.choice((ADD_MEM_REG, REM_MEM_REG))
        fds = [self.memory.fd if self.memory and chance.random() < 0.7 else self.any_fd()] if chance.random() < 0.9 else []
        self.order(kind, struct.pack("<QQQQQ", 0, *region), fds)
        self.message(GET_MAX_MEM_SLOTS)

    def inflight(self):
        """The in-flight region: the daemon's own, spoilt, or another."""
        chance = self.chance
        queues, size = chance.choice((1, 2, 4, 1000)), chance.choice((1, 16, 256, 1024, 65535))
        if chance.random() < 0.5:
            self.discard()
            self.message(GET_INFLIGHT_FD, struct.pack("<QQHHI", 0, 0, queues, size, 0))
            data, fds, _, _ = sockets.recv_fds(self.socket, 4096, 4)
            for fd in fds:
                self.keep(fd)
            if not fds or len(data) < 28:
                return
            fd, (length, offset) = fds[0], struct.unpack_from("<QQ", data, 12)
        else:
            length, offset = chance.choice((0, 4096, 1 << 16, 1 << 20, 1 << 40, 2**64 - 1)), chance.choice((0, 64, 4096, 2**63))
            fd = self.any_fd()
        try:
            if chance.random() < 0.5:
                os.pwrite(fd, chance.randbytes(4096), chance.choice((0, 16, 64)))
        except OSError:
            pass
        self.order(p.SET_INFLIGHT_FD, struct.pack("<QQHHI", length, offset, queues, size, 0), [fd])
        try:
            if chance.random() < 0.3:
                os.ftruncate(fd, 0)
        except OSError:
            pass

    def dirty_log(self):
        chance = self.chance
        fd = self.keep(os.memfd_create("log"))
        os.ftruncate(fd, chance.choice((0, 4096, 1 << 20, 1 << 40)))
        size = chance.choice((0, 1, 4096, 1 << 16, 1 << 20, 1 << 30, 1 << 40))
        self.message(p.SET_LOG_BASE, struct.pack("<QQ", size, chance.choice((0, 0, 1, 4096, 2**63))), fds=[fd])
        self.message(SET_LOG_FD, fds=[self.any_fd()])
        if chance.random() < 0.5:
            os.ftruncate(fd, 0)

    def channel(self):
        """A back-end channel: sometimes the end of this connection, also in the queue of another socket."""
        kind = self.chance.randrange(4)
        if kind == 0:
            self.message(SET_BACKEND_REQ_FD, fds=[self.socket.fileno()])
            return
        near, far = sockets.socketpair()
        self.others += [near, far]
        if kind == 1:
            far.sendmsg([b"x"], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [self.socket.fileno()]))])
        self.order(SET_BACKEND_REQ_FD, fds=[near.fileno() if kind < 3 else self.any_fd()])

    def switch(self):
        """Rings are switched on, off, stopped, reset; what belongs to them is replaced."""
        chance = self.chance
        index = chance.choice((0, 0, 1, 1, 2, 3, 4, 5, 200))
        what = chance.randrange(8)
        if what == 0:
            self.order(p.SET_VRING_ENABLE, struct.pack("<II", index, chance.choice((0, 0, 1, 1, 2))))
        elif what == 1:
            self.message(p.GET_VRING_BASE, struct.pack("<II", index, 0))
        elif what == 2:
            self.order(chance.choice((RESET_DEVICE, RESET_OWNER)))
        elif what == 3:
            self.order(SET_STATUS, struct.pack("<Q", chance.choice((0, 1, 4, 7, 15, 128, 2**64 - 1))))
        elif what == 4:
            kind = chance.choice((p.SET_VRING_CALL, p.SET_VRING_KICK, SET_VRING_ERR))
            self.order(kind, struct.pack("<Q", index | chance.choice((0, 0, 256, 512))), [self.any_fd() for _ in range(chance.choice((0, 1, 1, 2)))])
        elif what == 5 and self.memory:
            self.message(p.GET_VRING_BASE, struct.pack("<II", index % 4, 0))
            self.start(index % 4)
        elif what == 6:
            self.message(p.GET_CONFIG, struct.pack("<III", chance.choice((0, 60, 256)), chance.choice((0, 8, 60, 256)), 0) + b"\0" * 60)
        else:
            size = chance.choice((1, 2, 8, 60))
            self.order(p.SET_CONFIG, struct.pack("<III", chance.choice((0, 32, 60)), size, 0) + chance.randbytes(size))

    def of_a_nic(self):
        chance = self.chance
        self.order(p.NET_SET_MTU, struct.pack("<Q", chance.choice((0, 68, 1500, 9000, 65535, 2**64 - 1))))
        self.order(p.SEND_RARP, chance.choice((b"\x52\x54\0\0\0\1\0\0", chance.randbytes(8))))

    def mutant(self):
        """A message of any kind with wrong flags, sizes, payload or descriptors."""
        chance = self.chance
        kind = chance.choice((*range(46), 4000, 2**32 - 1))
        noise = (chance.randbytes(8), chance.randbytes(chance.randrange(300)))
        payload = chance.choice((b"", b"\0" * 8, *noise, struct.pack("<II", 0, chance.getrandbits(32))))
        flags = chance.choice((p.VERSION, p.VERSION, p.VERSION | p.NEED_REPLY, p.VERSION | p.REPLY, 0, 2, chance.getrandbits(32)))
        size = chance.choice((None, None, None, len(payload) + 1, max(0, len(payload) - 1), 4096, 2**32 - 1))
        fds = [self.any_fd() for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 8, 33, 100)))]
        self.message(kind, payload, flags, size, fds)

    def garbage(self):
        self.send(self.chance.randbytes(self.chance.choice((1, 11, 12, 13, 500, 5000))), [self.any_fd()])

    def half(self):
        """A piece of a message, and a while without the rest; often the end."""
        chance = self.chance
        whole = struct.pack("<III", chance.choice((1, 2, 5, 8, 12, 32)), p.VERSION, 40) + bytes(40)
        self.send(whole[: chance.randrange(1, len(whole))], [self.any_fd() for _ in range(chance.choice((0, 1, 8)))])
        time.sleep(chance.choice((0, 0.01, 0.1)))
        raise p.Closed

    def flood(self):
        """Questions whose answers are not read."""
        for _ in range(self.chance.choice((10, 100, 2000))):
            self.message(self.chance.choice((p.GET_FEATURES, p.GET_QUEUE_NUM, p.GET_PROTOCOL_FEATURES, GET_STATUS)))

    def pile(self):
        """More connections to the same socket, which wait, with something in them."""
        for _ in range(self.chance.randrange(1, PILE)):
            other = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
            self.others.append(other)
            other.setblocking(False)
            try:
                other.connect(self.socket.getpeername())
                rights = (sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [self.any_fd()]))
                other.sendmsg([self.chance.randbytes(self.chance.randrange(1, 40))], [rights])
            except OSError:
                return
            if self.chance.random() < 0.5:
                other.close()

    def any_fd(self):
        """A descriptor of any kind, also of this connection."""
        kind = self.chance.randrange(8)
        if kind < 3:
            fd = self.keep(os.memfd_create("any"))
            os.ftruncate(fd, self.chance.choice((0, 1, 4096, g.MEMORY, 1 << 40)))
            return fd
        if kind == 3:
            return self.keep(os.open("/dev/null", os.O_RDWR))
        if kind == 4:
            reader, writer = os.pipe()
            self.keep(reader)
            return self.keep(writer)
        if kind == 5:
            return self.socket.fileno()
        if kind == 6 and self.memory:
            return self.memory.fd
        return self.keep(os.eventfd(self.chance.choice((0, 1, 2**32 - 1))))

    def wait(self):
        time.sleep(self.chance.choice((0.001, 0.01, 0.05)))

    def live(self):
        """Acts on this connection until it has done enough, or is ended."""
        weights = {
            self.use_rings: 12, self.spoil_rings: 6, self.fill_calls: 3, self.cut_memory: 1, self.new_memory: 1, self.bad_table: 1,
            self.slots: 2, self.inflight: 1, self.dirty_log: 1, self.channel: 1, self.switch: 8, self.of_a_nic: 1, self.mutant: 2,
            self.garbage: 0.3, self.half: 0.5, self.flood: 0.5, self.pile: 0.5, self.wait: 6, self.discard: 4,
        }
        # Without a beginning there is little to spoil.
        if self.chance.random() < 0.9:
            self.begin()
        for _ in range(self.chance.choice((1, 5, 20, 80))):
            action = self.chance.choices(list(weights), list(weights.values()))[0]
            self.counts[action.__name__] += 1
            action()


def main(seed, seconds, *paths):
    end = time.monotonic() + float(seconds)
    counts = collections.Counter()
    turn = 0
    while time.monotonic() < end:
        turn += 1
        own = f"{seed}/{turn}"
        chance = random.Random(own)
        kind, path = chance.choice([("net", a[4:]) if a.startswith("net:") else ("blk", a) for a in paths])
        print(f"{time.monotonic():.3f} {own} {kind} {path}", flush=True)
        counts["connections"] += 1
        try:
            with Front(chance, path, kind == "net", counts) as front:
                front.live()
        except (p.Closed, OSError, struct.error) as e:
            # Ended by the daemon, or by a descriptor that does not fit: both are what this is for.
            counts[f"ended: {type(e).__name__}"] += 1
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
