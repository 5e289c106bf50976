"""The front end of vhost-user-net in Python, with split rings: the test chooses each descriptor.

It sends and receives bytes. net_frames makes and reads the frames and their virtio-net headers.
"""

import mmap
import os
import select
import struct
import time

import peer as p
import rig as r

# Feature bits (Virtio 1.3, 5.1.3).
CSUM, GUEST_CSUM, CTRL_GUEST_OFFLOADS = 1 << 0, 1 << 1, 1 << 2
GUEST_TSO4, GUEST_TSO6, HOST_TSO4, HOST_TSO6 = 1 << 7, 1 << 8, 1 << 11, 1 << 12
MRG_RXBUF, CTRL_VQ, MQ = 1 << 15, 1 << 17, 1 << 22
INDIRECT = 1 << 28
GUEST_USO4, GUEST_USO6, HOST_USO = 1 << 54, 1 << 55, 1 << 56

NEXT, WRITE, INDIRECT_FLAG = 1, 2, 4

# Bytes of guest memory, of a ring's place, of a ring's data.
MEMORY = 64 << 20
PLACE = 0x8000
DATA, DATA_EACH = 0x100000, 12 << 20
HEADER = 12


class Ring:
    """A split ring and the memory that its buffers come from, round and round."""

    def __init__(self, peer, index, size):
        self.peer, self.index, self.size = peer, index, size
        self.at = index * PLACE
        self.desc, self.avail, self.used_at = self.at, self.at + 0x5000, self.at + 0x6000
        self.free = list(range(size))
        self.chains = {}
        self.offered = self.taken = 0
        self.start = self.place = DATA + index * DATA_EACH

    def begin(self):
        """Tells the back-end all about it, and enables it."""
        peer, index = self.peer, self.index
        peer.order(p.SET_VRING_NUM, struct.pack("<II", index, self.size))
        peer.order(p.SET_VRING_BASE, struct.pack("<II", index, 0))
        peer.addresses(index, p.USER + self.desc, p.USER + self.used_at, p.USER + self.avail)
        self.call = peer.eventfd(p.SET_VRING_CALL, index)
        self.err = peer.eventfd(p.SET_VRING_CALL + 1, index)
        self.kick = peer.eventfd(p.SET_VRING_KICK, index)
        peer.order(p.SET_VRING_ENABLE, struct.pack("<II", index, 1))

    def room(self, length):
        """Guest memory for `length` bytes: an offset."""
        if self.place + length > self.start + DATA_EACH:
            self.place = self.start
        at = self.place
        self.place += length
        return at

    def add(self, segs, last=0):
        """Makes a chain of (offset, length, flags) available, `last` or-ed to the last one's flags; nobody is told yet."""
        r.require(len(segs) <= len(self.free), f"{len(segs)} descriptors, and {len(self.free)} are free")
        ids = [self.free.pop(0) for _ in segs]
        for k, (at, length, flags) in enumerate(segs):
            more = NEXT if k + 1 < len(segs) else last
            following = ids[k + 1] if k + 1 < len(segs) else ids[0]
            self.describe(ids[k], p.GUEST + at, length, flags | more, following)
        self.chains[ids[0]] = (segs, ids)
        self.make_available(ids[0])
        return ids[0]

    def describe(self, number, address, length, flags, following=0):
        """One descriptor, as it is."""
        struct.pack_into("<QIHH", self.peer.ram, self.desc + 16 * number, address, length, flags, following)

    def make_available(self, head):
        struct.pack_into("<H", self.peer.ram, self.avail + 4 + 2 * (self.offered % self.size), head)
        self.offered = (self.offered + 1) & 0xFFFF

    def publish(self):
        """Makes the added chains visible, and kicks."""
        struct.pack_into("<H", self.peer.ram, self.avail + 2, self.offered)
        os.eventfd_write(self.kick, 1)

    def has_used(self):
        return struct.unpack_from("<H", self.peer.ram, self.used_at + 2)[0] != self.taken

    def pop(self, wait_s=0.0):
        """The next used chain: what was added, and bytes written. None: not in time."""
        end = time.monotonic() + wait_s
        while not self.has_used():
            left = end - time.monotonic()
            if left <= 0:
                return None
            if select.select([self.call], [], [], min(left, 0.1))[0]:
                os.eventfd_read(self.call)
        head, length = struct.unpack_from("<II", self.peer.ram, self.used_at + 4 + 8 * (self.taken % self.size))
        self.taken = (self.taken + 1) & 0xFFFF
        r.require(head in self.chains, f"ring {self.index}: head {head} is used, which was not available")
        segs, ids = self.chains.pop(head)
        self.free += ids
        return segs, length

    def broken(self):
        """Whether the back-end has signalled an error."""
        return bool(select.select([self.err], [], [], r.WAIT_S)[0])


class Nic(p.Peer):
    """A NIC of some pairs. Rings 2k receive, 2k + 1 send; with CTRL_VQ the one behind them is for control."""

    def __init__(self, socket, features=MRG_RXBUF, pairs=1, size=256):
        super().__init__(socket)
        self.features = features
        self.merge = bool(features & MRG_RXBUF)
        r.require(self.handshake(features) == p.ACCEPTED, f"features {features:#x} are refused")
        r.require(not features & ~self.offered, f"{features & ~self.offered:#x} is not offered")
        fd = os.memfd_create("guest")
        self.fds.append(fd)
        os.ftruncate(fd, MEMORY)
        self.ram = mmap.mmap(fd, MEMORY)
        self.table([(p.GUEST, MEMORY, p.USER, 0)], [fd])
        self.rings = [Ring(self, index, size) for index in range(2 * pairs + bool(features & CTRL_VQ))]
        for ring in self.rings:
            ring.begin()

    def command(self, *said, answer=1, wait_s=r.WAIT_S):
        """A command of such pieces, and so much room for its answer: that, and how many bytes were written."""
        ring = self.rings[-1]
        segs = []
        for piece in said:
            at = ring.room(len(piece))
            self.ram[at : at + len(piece)] = piece
            segs.append((at, len(piece), 0))
        at = ring.room(answer)
        self.ram[at : at + answer] = b"\xee" * answer
        ring.add([*segs, (at, answer, WRITE)])
        ring.publish()
        done = ring.pop(wait_s)
        r.require(done is not None, f"the command {said} is not answered")
        return self.ram[at], done[1]

    def give(self, *pieces, pair=0):
        """A receive buffer of such pieces, in bytes; `publish` shows it."""
        ring = self.rings[2 * pair]
        at = ring.room(sum(pieces))
        self.ram[at : at + sum(pieces)] = b"\xa5" * sum(pieces)
        segs = []
        for piece in pieces:
            segs.append((at, piece, WRITE))
            at += piece
        ring.add(segs)

    def fill(self, count, *pieces, pair=0):
        """So many receive buffers, published."""
        for _ in range(count):
            self.give(*pieces, pair=pair)
        self.rings[2 * pair].publish()

    def take(self, pair=0, wait_s=r.WAIT_S):
        """The next frame: header, bytes, how many buffers it filled. None: not in time."""
        ring = self.rings[2 * pair]
        first = ring.pop(wait_s)
        if first is None:
            return None
        data = self.bytes_of(*first)
        count = struct.unpack_from("<H", data, 10)[0] if self.merge else 1
        r.require(1 <= count <= ring.size, f"a frame of {count} buffers")
        for k in range(1, count):
            more = ring.pop(r.WAIT_S)
            r.require(more is not None, f"{k} of {count} buffers of a frame came")
            data += self.bytes_of(*more)
        return data[:HEADER], data[HEADER:], count

    def bytes_of(self, segs, length):
        r.require(length <= sum(s[1] for s in segs), f"{length} bytes in {segs}")
        # Pieces of a buffer lie one behind the other.
        at = segs[0][0]
        return bytes(self.ram[at : at + length])

    def transmit(self, frame, header=bytes(HEADER), pair=0, cuts=(), wait_s=r.WAIT_S):
        """A frame, cut into descriptors at these places (of header and frame together). Waits until it is done."""
        ring = self.rings[2 * pair + 1]
        data = header + frame
        at = ring.room(len(data))
        self.ram[at : at + len(data)] = data
        places = [0, *cuts, len(data)]
        ring.add([(at + a, b - a, 0) for a, b in zip(places, places[1:])])
        ring.publish()
        r.require(ring.pop(wait_s) is not None, f"a frame of {len(frame)} bytes does not come back")
