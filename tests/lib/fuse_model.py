"""Random operations on the mounted file and on a plain file, and writers of one sector.

Run as a program (`neighbour …`), this file is one of those writers.
"""

import os
import random
import sys
import time
from pathlib import Path

import fuse_mount as m
import rig as r

SECTOR = 512
MIB = 1 << 20
STEPS = 1500
SEEDS = (1, 2)
WALK_SIZE = 4 * MIB

NEIGHBOURS = 4
NEIGHBOUR_SIZE = 256 * 1024
NEIGHBOUR_S = 2.0


def length_of(chance):
    """Mostly around sectors and pages, now and then long."""
    kind = chance.random()
    if kind < 0.3:
        return chance.randrange(1, 700)
    if kind < 0.5:
        return SECTOR * chance.randrange(1, 17) + chance.choice((-1, 0, 0, 0, 1))
    if kind < 0.8:
        return chance.randrange(1, 20000)
    if kind < 0.9:
        return 4096 * chance.randrange(1, 9)
    return chance.randrange(1, 300000)


class Walk:
    """One random sequence, done to the mount and to the model, a plain file."""

    def __init__(self, mount, model, size, growable, seed, peer, in_kernel=False):
        self.chance = random.Random(seed)
        self.peer = peer
        self.growable = growable
        self.in_kernel = in_kernel  # passthrough: sizes are not rounded, O_DIRECT is as the image's file system has it
        self.size = size
        self.path = mount
        self.model_path = model
        model.write_bytes(mount.read_bytes())
        self.model = os.open(model, os.O_RDWR)
        self.fds = []
        self.done = []
        self.reopen()

    def reopen(self):
        for fd in self.fds:
            os.close(fd)
        direct = 0 if self.peer or self.in_kernel else os.O_DIRECT
        self.fds = [os.open(self.path, os.O_RDWR | more) for more in (0, 0, os.O_DSYNC, direct)]

    def close(self):
        for fd in (*self.fds, self.model):
            os.close(fd)

    def place(self):
        """A random place, often near the last one or at the end."""
        kind = self.chance.random()
        end = self.size + (self.size // 8 if self.growable else 3000)
        if kind < 0.2 and self.done:
            return max(0, self.done[-1][1] + self.chance.randrange(-600, 600))
        if kind < 0.3:
            return max(0, self.size - self.chance.randrange(0, 9000))
        if kind < 0.5:
            return self.chance.randrange(0, end // SECTOR + 1) * SECTOR
        return self.chance.randrange(0, end + 1)

    def clip(self, offset, length):
        return max(0, min(length, self.size - offset))

    def grown(self, end):
        """The model's size after something reached to `end`."""
        if end > self.size:
            self.size = -(-end // SECTOR) * SECTOR
        os.ftruncate(self.model, self.size)

    def run(self, steps):
        actions = (
            (self.read, 34), (self.write, 34), (self.punch, 6), (self.zero, 8), (self.allocate, 2), (self.truncate, 4),
            (self.sync, 4), (self.vector, 3), (self.reopen_one, 2), (self.sizes, 3),
        )  # fmt: skip
        names, weights = zip(*actions)
        try:
            for step in range(steps):
                action = self.chance.choices(names, weights)[0]
                self.fd = self.chance.choice(self.fds)
                self.step = step
                try:
                    action()
                except OSError as e:
                    self.fail(f"{action.__name__}: {e}")
                if step % 500 == 499:
                    self.whole()
            self.whole()
        finally:
            self.close()

    def odd(self, end):
        """Whether growing to `end` is to be left out."""
        return self.in_kernel and end > self.size and end % SECTOR

    def did(self, what, offset, length):
        self.done = [*self.done[-9:], (what, offset, length)]

    def fail(self, message):
        raise r.Failed(f"step {self.step}: {message}; before it: {self.done}")

    def read(self):
        offset, length = self.place(), length_of(self.chance)
        seen, want = os.pread(self.fd, length, offset), os.pread(self.model, length, offset)
        if seen != want:
            at = next((n for n, (a, b) in enumerate(zip(seen, want)) if a != b), min(len(seen), len(want)))
            self.fail(f"{length} bytes at {offset}: {len(seen)} came of {len(want)}, other ones from byte {offset + at}")
        self.did("read", offset, length)

    def write(self):
        offset, length = self.place(), length_of(self.chance)
        self.store(offset, [self.chance.randbytes(length)])

    def vector(self):
        parts = [self.chance.randbytes(self.chance.randrange(1, 1500)) for _ in range(self.chance.randrange(2, 40))]
        self.store(self.place(), parts)

    def store(self, offset, parts):
        data = b"".join(parts)
        if not self.growable:
            fits = self.clip(offset, len(data))
            if fits == 0:
                if not self.peer:
                    what = f"step {self.step}: a write at {offset} of {self.size}"
                    m.refused(what, ["ENOSPC"], lambda: os.pwritev(self.fd, parts, offset))
                return
            data = data[:fits]
        if self.odd(offset + len(data)):
            return
        self.did("write", offset, len(data))
        count = os.pwritev(self.fd, parts, offset)
        if count != len(data):
            self.fail(f"{count} bytes were written, not {len(data)}")
        os.pwrite(self.model, data, offset)
        self.grown(offset + len(data))

    def punch(self):
        offset, length = self.place(), length_of(self.chance)
        if self.peer:  # it leaves what is no whole block
            offset, length = offset // 4096 * 4096, -(-length // 4096) * 4096
        length = self.clip(offset, length)
        if length:
            self.did("punch", offset, length)
            m.fallocate(self.fd, m.PUNCH, offset, length)
            m.fallocate(self.model, m.PUNCH, offset, length)

    def zero(self):
        offset, length = self.place(), length_of(self.chance)
        if not self.growable:
            length = self.clip(offset, length)
        mode = m.ZERO_RANGE | self.chance.choice((0, m.KEEP_SIZE))
        if self.peer:
            mode = m.ZERO_RANGE | m.KEEP_SIZE
            length = self.clip(offset, length)
        if not length or self.odd(offset + length):
            return
        self.did("zero" if mode & m.KEEP_SIZE else "zero-grow", offset, length)
        m.fallocate(self.fd, mode, offset, length)
        self.grown(offset + length if not mode & m.KEEP_SIZE else 0)
        os.pwrite(self.model, bytes(self.clip(offset, length)), offset)  # not every file system zeroes ranges

    def allocate(self):
        offset, length = self.place(), length_of(self.chance)
        if not self.growable:
            length = self.clip(offset, length)
        if length and not self.peer and not self.odd(offset + length):
            self.did("allocate", offset, length)
            m.fallocate(self.fd, 0, offset, length)
            self.grown(offset + length)

    def truncate(self):
        if not self.growable:
            return
        size = self.chance.randrange(0, 2 * WALK_SIZE)
        if self.peer or self.in_kernel or self.chance.random() < 0.5:
            size = size // SECTOR * SECTOR
        self.did("truncate", size, 0)
        os.ftruncate(self.fd, size)
        os.ftruncate(self.model, size)
        self.size = size
        self.grown(-(-size // SECTOR) * SECTOR)

    def sync(self):
        self.chance.choice((os.fsync, os.fdatasync))(self.fd)

    def reopen_one(self):
        number = self.fds.index(self.fd)
        os.close(self.fd)
        self.fds[number] = os.open(self.path, os.O_RDWR)

    def sizes(self):
        for seen in (os.fstat(self.fd).st_size, os.lseek(self.fd, 0, os.SEEK_END)):
            if seen != self.size:
                self.fail(f"the size is {seen}, not {self.size}")

    def whole(self):
        os.fsync(self.fds[0])
        m.same(self.path, self.model_path.read_bytes(), f"after step {self.step} (the last: {self.done})")


def neighbour(path, number, seed):
    """Writes, zeroes and punches on its own byte ranges, which share sectors with those of others; each is read back
    at once and all in the end."""
    number = int(number)
    cuts, chance = ranges(int(seed))
    mine = [c for n, c in enumerate(cuts) if n % NEIGHBOURS == number]
    chance = random.Random(f"{seed}-{number}")
    held = {}
    fds = [os.open(path, os.O_RDWR), os.open(path, os.O_RDWR | os.O_DIRECT)]
    end, turns = time.monotonic() + NEIGHBOUR_S, 0
    while time.monotonic() < end or len(held) < len(mine):
        begin, length = mine[turns % len(mine)] if len(held) < len(mine) else chance.choice(mine)
        turns += 1
        fd = chance.choice(fds)
        kind = chance.random()
        if begin in held:
            seen = os.pread(fd, length, begin)
            r.require(seen == held[begin], f"turn {turns}: the {length} bytes at {begin} were lost")
        if begin in held and kind < 0.1:
            m.fallocate(fd, m.ZERO_RANGE | m.KEEP_SIZE, begin, length)
            held[begin] = bytes(length)
        elif begin in held and kind < 0.2 and "whole-holes" not in sys.argv:
            m.fallocate(fd, m.PUNCH, begin, length)
            held[begin] = bytes(length)
        else:
            data = chance.randbytes(length)
            r.require(os.pwrite(fd, data, begin) == length, "a short write")
            held[begin] = data
        seen = os.pread(fd, length, begin)
        r.require(seen == held[begin], f"turn {turns}: {length} bytes at {begin} are not what was just written")
    for begin, data in held.items():
        r.require(os.pread(fds[0], len(data), begin) == data, f"the {len(data)} bytes at {begin} were lost")
    print(turns)


def ranges(seed):
    """The whole file, cut into ranges of 1 to 1500 bytes: (begin, length)."""
    chance = random.Random(seed)
    cuts, at = [], 0
    while at < NEIGHBOUR_SIZE:
        length = min(chance.randrange(1, 1500), NEIGHBOUR_SIZE - at)
        cuts.append((at, length))
        at += length
    return cuts, chance


class Case:
    """An image somewhere, served one way."""

    def __init__(self, suite, name, memory=False, disk=None, **how):
        self.suite = suite
        self.name = f"{name}-{suite.transport}"
        self.memory = memory
        self.disk = disk
        self.how = how

    def serving(self, size, **more):
        how = {**self.how, **more}
        if self.disk:
            return m.serving(self.suite, self.name, disk=self.disk.format(size=size), **how)
        return m.serving(self.suite, self.name, image=self.suite.image(f"{self.name}.img", size, self.memory), **how)

    def walk(self, growable=False):
        if growable:
            self.suite.differs("grows in steps of its own", before=11)
        mount = self.serving(WALK_SIZE, growable=growable)
        for seed in SEEDS:
            size = mount.path.stat().st_size
            walk = Walk(mount.path, self.suite.memory / "model", size, growable, seed, bool(self.suite.peer))
            walk.run(STEPS)
        mount.stop()
        if mount.image:
            m.same(mount.image, (self.suite.memory / "model").read_bytes(), "the image afterwards")

    def neighbours(self):
        self.suite.differs("mixes up writes that come together", before=11)
        mount = self.serving(NEIGHBOUR_SIZE, queues=NEIGHBOURS)
        # The peer's holes leave what is no whole block.
        more = ("whole-holes",) if self.suite.peer else ()
        writers = [
            r.Child(self.suite.rig, f"{self.name}-writer{n}", [sys.executable, "-B", __file__, "neighbour", mount.path, n, 7, *more])
            for n in range(NEIGHBOURS)
        ]
        for writer in writers:
            code = writer.wait()
            r.require(code == 0, f"{writer.name} ended with {code}: {writer.tail(3)}")
        turns = sum(int(w.output()) for w in writers)
        r.require(turns > 100, f"only {turns} writes were made")
        mount.stop()


if __name__ == "__main__" and sys.argv[1:2] == ["neighbour"]:
    try:
        neighbour(Path(sys.argv[2]), *sys.argv[3:5])
    except (r.Failed, OSError) as e:
        sys.exit(f"writer {sys.argv[3]}: {e}")
