"""Memory and virtqueues of a guest with random, invalid contents.

For tests/lib/neighbour_attack.py.

All contents come from a `random.Random`. Memory is written by pwrite(), not through a mapping:
the attacker truncates its files and must not get SIGBUS itself.
"""

import os
import struct

import peer as p

NEXT, WRITE, INDIRECT = 1, 2, 4
PACKED_AVAIL, PACKED_USED = 1 << 7, 1 << 15

# Bytes of guest memory at most, of one ring's place, and where buffers begin.
MEMORY = 2 << 20
PLACE = 0x8000
DATA = 0x60000
# Offsets of a ring's driver and device areas in its place.
DRIVER, DEVICE = 0x5000, 0x6000

BLK_TYPES = (0, 0, 0, 1, 1, 1, 4, 8, 11, 13, 77, 0xFFFF_FFFF)
# Sectors of the attacked disks: most requests are to reach them.
SECTORS = 16 << 11


def address(chance):
    """A guest address: mostly one of a buffer."""
    kind = chance.random()
    if kind < 0.75:
        return p.GUEST + chance.randrange(DATA, MEMORY - 4096)
    if kind < 0.85:
        return p.GUEST + chance.randrange(0, DATA)
    if kind < 0.95:
        return p.GUEST + MEMORY - chance.choice((0, 1, 15, 512, 4095))
    return chance.choice((0, 0x1000, 1 << 40, 2**63, 2**64 - 1, 2**64 - 4096, chance.getrandbits(64)))


def length(chance):
    """A descriptor's length."""
    return chance.choice((0, 1, 12, 16, 17, 512, 512, 1024, 4096, 4096, 4096, 65536, 1 << 20, 2**31, 2**32 - 1, chance.getrandbits(32)))


class Memory:
    """A region of guest memory in a memfd."""

    def __init__(self, size=MEMORY):
        self.fd = os.memfd_create("guest")
        os.ftruncate(self.fd, size)

    def put(self, at, data):
        """Write there. The file grows again where it was cut short, which is what the attacker wants."""
        os.pwrite(self.fd, data, at)

    def cut(self, chance):
        """Cut it short, or grow it again."""
        os.ftruncate(self.fd, chance.choice((0, 0, 1, 4096, DATA, MEMORY // 2, MEMORY, 2 * MEMORY)))


class Ring:
    """One virtqueue. `net`: of a network device, whose even rings receive."""

    def __init__(self, chance, memory, index, size, packed, net):
        self.chance, self.memory, self.index, self.size = chance, memory, index, size
        self.packed, self.net = packed, net
        self.at = index * PLACE
        # The next free place of the ring; where a packed one has come round, its wrap counter
        # changes.
        self.offered, self.wrap = 0, True
        self.kick = self.call = None

    def requests(self):
        """Make some requests available: sane ones, and ones with a fault or more."""
        for _ in range(self.chance.choice((1, 1, 2, 4, 16))):
            chain = self.request()
            for _ in range(self.chance.choice((0, 0, 0, 1, 1, 2))):
                self.spoil(chain)
            chain = self.indirect(chain)
            (self.add_packed if self.packed else self.add_split)(chain)
        if not self.packed:
            self.publish(self.offered)

    def request(self):
        """A request as a driver makes it: a list of [address, length, flags]."""
        chance, base = self.chance, self.chance.randrange(DATA, MEMORY - (256 << 10), 512)
        at = p.GUEST + base
        if self.net and self.index % 2 == 0:
            return [[at, chance.choice((12, 64, 1526, 4096, 65562)), WRITE]]
        if self.net:
            head = struct.pack("<BBHHHHH", *self.net_header(), 1)
            source, target = (chance.choice((b"\xff" * 6, b"\x52\x54\0\0\0\1", chance.randbytes(6))) for _ in range(2))
            self.memory.put(base, head[:12] + target + source + chance.choice((b"\x08\0\x45\0", b"\x81\0\0\1", chance.randbytes(4))))
            return [[at, 12, 0], [at + 12, chance.choice((14, 60, 1514, 9000, 65535)), 0]]
        kind = chance.choice(BLK_TYPES)
        self.memory.put(base, struct.pack("<IIQ", kind, 0, chance.choice((0, 8, SECTORS - 8, chance.randrange(SECTORS), 2**64 - 1))))
        if kind in (11, 13):
            sectors, flags = chance.choice((0, 8, 1024, 2**32 - 1)), chance.choice((0, 0, 1, 2))
            self.memory.put(base + 512, struct.pack("<QII", chance.randrange(SECTORS), sectors, flags))
        to_us = WRITE if kind in (0, 8) else 0
        pieces = [[at + 512 + 4096 * k, chance.choice((512, 4096)), to_us] for k in range(chance.choice((1, 1, 2, 8, 40)))]
        pieces = {4: [], 8: [[at + 512, 20, WRITE]], 11: [[at + 512, 16, 0]], 13: [[at + 512, 16, 0]]}.get(kind, pieces)
        return [[at, 16, 0], *pieces, [at + 256, 1, WRITE]]

    def net_header(self):
        """Of a virtio-net header all but the last field."""
        chance = self.chance
        if chance.random() < 0.5:
            return 0, 0, 0, 0, 0, 0
        return (chance.choice((0, 1, 2, 255)), chance.choice((0, 1, 3, 4, 5, 0x81, 255)), chance.choice((0, 54, 66, 65535)),
                chance.choice((0, 1, 100, 1448, 65535)), chance.choice((0, 14, 34, 65535)), chance.choice((0, 6, 16, 65535)))

    def spoil(self, chain):
        """Break one thing of a chain."""
        chance, piece = self.chance, self.chance.choice(chain)
        what = chance.randrange(5)
        if what == 0:
            piece[0] = address(chance)
        elif what == 1:
            piece[1] = length(chance)
        elif what == 2:
            piece[2] = chance.choice((0, WRITE, INDIRECT, WRITE | INDIRECT, 0xFFF8, chance.getrandbits(16)))
        elif what == 3:
            chain.insert(chance.randrange(len(chain) + 1), [address(chance), length(chance), chance.choice((0, WRITE))])
        elif len(chain) > 1:
            chain.remove(piece)

    def indirect(self, chain):
        """Sometimes the same chain by an indirect table, whose last entry sometimes leads to its first."""
        chance = self.chance
        if chance.random() < 0.6:
            return chain
        table = chance.randrange(DATA, MEMORY - 16 * len(chain) - 16, 16)
        for k, (at, size, flags) in enumerate(chain):
            following = k + 1 if k + 1 < len(chain) else 0
            more = NEXT if following or chance.random() < 0.05 else 0
            last = (chance.getrandbits(16), flags) if self.packed else (flags | more, following)
            self.memory.put(table + 16 * k, struct.pack("<QIHH", at, size, *last))
        size = 16 * len(chain) + chance.choice((0, 0, 0, 1, 16, -16, 1 << 20))
        return [[p.GUEST + table, max(0, size), INDIRECT | chance.choice((0, 0, 0, WRITE, NEXT))]]

    def add_split(self, chain):
        """Descriptors at places drawn by chance, which may be those of requests under way."""
        chance = self.chance
        first = chance.randrange(self.size)
        for k, (at, size, flags) in enumerate(chain):
            here, following = (first + k) % self.size, (first + k + 1) % self.size
            if k + 1 < len(chain):
                flags |= NEXT
            elif chance.random() < 0.05:
                flags, following = flags | NEXT, chance.choice((first, here, self.size, 65535))
            self.describe(here, at, size, flags & 0xFFFF, following)
        head = first if chance.random() < 0.95 else chance.choice((self.size, 65535, chance.randrange(65536)))
        self.memory.put(self.at + DRIVER + 4 + 2 * (self.offered % self.size), struct.pack("<H", head))
        self.offered = (self.offered + 1) & 0xFFFF

    def add_packed(self, chain):
        chance, number = self.chance, self.chance.randrange(65536 if self.chance.random() < 0.1 else self.size)
        for k, (at, size, flags) in enumerate(chain):
            flags |= NEXT if k + 1 < len(chain) else 0
            flags |= (PACKED_AVAIL if self.wrap else PACKED_USED) if chance.random() < 0.98 else chance.getrandbits(16)
            self.describe(self.offered, at, size, number, flags & 0xFFFF)
            self.offered += 1
            if self.offered == self.size:
                self.offered, self.wrap = 0, not self.wrap

    def describe(self, index, at, size, third, fourth):
        self.memory.put(self.at + 16 * index, struct.pack("<QIHH", at, size, third, fourth))

    def publish(self, index):
        """Show a split ring's available index; sometimes ask for notifications in another way."""
        self.memory.put(self.at + DRIVER + 2, struct.pack("<H", index & 0xFFFF))
        if self.chance.random() < 0.1:
            self.memory.put(self.at + DRIVER, struct.pack("<H", self.chance.choice((0, 1, 0xFFFF))))

    def garbage(self):
        """Overwrite something of the ring: an index that jumps, or bytes drawn by chance."""
        chance = self.chance
        what = chance.randrange(4)
        if what == 0:
            self.offered = (self.offered + chance.choice((1, self.size, self.size + 1, 32768, 65535))) & 0xFFFF
            self.publish(self.offered)
        elif what == 1:
            self.memory.put(self.at + chance.randrange(0, PLACE - 256), chance.randbytes(chance.randrange(1, 256)))
        elif what == 2:
            self.memory.put(self.at + chance.choice((DRIVER, DEVICE)), chance.randbytes(chance.randrange(1, 64)))
        else:
            for index in range(min(self.size, 64)):
                after = chance.choice((0, 1, 2, 3, 4, 7, index, chance.getrandbits(16)))
                self.describe(index, address(chance), length(chance), chance.getrandbits(16), after)
        # A packed ring starts at another index.
        if self.packed:
            self.offered, self.wrap = chance.randrange(self.size), chance.random() < 0.5
