"""Tests exports that grow, and read-only exports."""

import mmap
import os
import random

import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20


class Growing(m.Fixture):
    """The export that is writable and growable; sizes are multiples of 512."""

    START = MIB

    def make(self, name):
        image = self.suite.image(f"{name}.img", self.START)
        self.first = bytes(m.fill(image, self.START, ((0, self.START),), 2))
        return m.serving(self.suite, name, image=image, growable=True)

    def begin(self):
        """The first size and content again."""
        with m.Opened(self.mount.path) as fd:
            os.ftruncate(fd, self.START)
            os.pwrite(fd, self.first, 0)

    def holds(self, content, what):
        size = self.mount.path.stat().st_size
        r.require(size == len(content), f"{what}: it has {size} bytes, not {len(content)}")
        m.same(self.mount.path, content, what)
        r.run(["sync", self.mount.path])
        m.same(self.mount.image, content, what)

    def truncate(self):
        self.begin()
        os.truncate(self.mount.path, 3 * MIB)
        self.holds(self.first + bytes(2 * MIB), "grown")
        os.truncate(self.mount.path, MIB // 2)
        self.holds(self.first[: MIB // 2], "shrunk")
        r.run(["truncate", "-s", "1M", self.mount.path])
        self.holds(self.first[: MIB // 2] + bytes(MIB // 2), "grown again: what was cut off must not come back")
        os.truncate(self.mount.path, 0)
        self.holds(b"", "empty")

    def write(self):
        self.begin()
        with m.Opened(self.mount.path) as fd:
            r.require(os.pwrite(fd, b"a" * 8192, MIB - 4096) == 8192, "a write across the end is short")
            self.holds(self.first[: MIB - 4096] + b"a" * 8192, "written across the end")
            r.require(os.pwrite(fd, b"b" * 1024, 2 * MIB) == 1024, "a write beyond the end is short")
            r.require(os.fstat(fd).st_size == 2 * MIB + 1024, f"the open file has {os.fstat(fd).st_size} bytes")
        self.holds(self.first[: MIB - 4096] + b"a" * 8192 + bytes(MIB - 4096) + b"b" * 1024, "written beyond the end")

    def write_in_pieces(self):
        """The kernel sends all its requests at once: the room for one must not cut off another."""
        for turn in range(10):
            self.begin()
            with m.Opened(self.mount.path, os.O_RDWR | os.O_DIRECT) as fd:
                os.ftruncate(fd, 0)
                m.write_async(fd, bytes([65 + turn]) * (8 * MIB), 0)
            self.holds(bytes([65 + turn]) * (8 * MIB), "written in pieces")

    def cut_under_load(self):
        """The image ends where the file ends, in any order of requests.

        No late write makes it longer.
        """
        with m.Opened(self.mount.path, os.O_RDWR | os.O_DIRECT) as fd:
            for turn in range(200):
                os.ftruncate(fd, 4 * MIB)
                m.write_async(fd, b"w" * MIB, 3 * MIB, lambda: os.ftruncate(fd, MIB + turn))
                sizes = os.fstat(fd).st_size, self.mount.image.stat().st_size
                r.require(sizes[0] == sizes[1], f"turn {turn}: the file has {sizes[0]} bytes, the image {sizes[1]}")
                os.ftruncate(fd, MIB)
                os.ftruncate(fd, 4 * MIB)
                rest = self.mount.path.read_bytes()[MIB:]
                r.require(rest == bytes(3 * MIB), f"turn {turn}: what was cut off came back")

    def append(self):
        self.begin()
        with m.Opened(self.mount.path, os.O_WRONLY | os.O_APPEND) as fd:
            for turn in range(4):
                r.require(os.write(fd, bytes([65 + turn]) * 512) == 512, "a short append")
        self.holds(self.first + b"".join(bytes([65 + n]) * 512 for n in range(4)), "appended")
        self.suite.differs("overlooks O_TRUNC", before=11)
        with m.Opened(self.mount.path, os.O_WRONLY | os.O_TRUNC) as fd:
            os.write(fd, b"t" * 1536)
        self.holds(b"t" * 1536, "O_TRUNC")

    def allocate(self):
        self.begin()
        with m.Opened(self.mount.path) as fd:
            m.fallocate(fd, 0, MIB, MIB)
            self.holds(self.first + bytes(MIB), "allocated")
            m.fallocate(fd, m.ZERO_RANGE, 2 * MIB - 4096, 8192)
            self.holds(self.first + bytes(MIB + 4096), "zeroed beyond the end")
            self.suite.differs("does not support KEEP_SIZE alone")
            m.fallocate(fd, m.KEEP_SIZE, 4 * MIB, MIB)
            m.fallocate(fd, m.ZERO_RANGE | m.KEEP_SIZE, 2 * MIB, MIB)
            m.fallocate(fd, m.PUNCH, 2 * MIB, MIB)
            self.holds(self.first + bytes(MIB + 4096), "size kept")

    def rounded(self):
        self.suite.differs("rounds otherwise: what it makes of such sizes is its raw driver's")
        self.begin()
        os.truncate(self.mount.path, MIB + 1)
        self.holds(self.first + bytes(512), "truncated to an odd size")
        with m.Opened(self.mount.path) as fd:
            r.require(os.pwrite(fd, b"o" * 100, 2 * MIB + 50) == 100, "a short write")
        self.holds(self.first + bytes(MIB) + bytes(50) + b"o" * 100 + bytes(362), "written to an odd end")

    def copied(self):
        """Runs the operations that tools perform on an existing ordinary file."""
        self.suite.differs("overlooks O_TRUNC", before=11)
        data = random.Random(9).randbytes(700 * 1024)
        source = self.suite.rig.dir / "copied"
        source.write_bytes(data)
        r.run(["cp", source, self.mount.path])
        self.holds(data, "cp")
        r.run(["dd", f"if={source}", f"of={self.mount.path}", "bs=100k", "count=3"])
        self.holds(data[:307200], "dd")


class ReadOnly(m.Fixture):
    """The export as it is without `writable`."""

    def make(self, name):
        image = self.suite.image(f"{name}.img", MIB)
        self.content = m.fill(image, MIB, ((0, MIB // 2),), 3)
        return m.serving(self.suite, name, image=image, writable=False)

    def refuses(self):
        path = self.mount.path
        no = ["EROFS", "EACCES", "EPERM"]
        self.suite.differs("refuses writing, not opening for it", before=11)
        m.refused("O_RDWR", no, lambda: os.close(os.open(path, os.O_RDWR)))
        m.refused("O_WRONLY", no, lambda: os.close(os.open(path, os.O_WRONLY)))
        m.refused("truncate", no, lambda: os.truncate(path, 0))
        with m.Opened(path, os.O_RDONLY) as fd:
            m.refused("fallocate", no + ["EBADF"], lambda: m.fallocate(fd, m.PUNCH, 0, 4096))
            m.refused("a shared mapping for writing", ["EACCES", "EROFS"], lambda: mmap.mmap(fd, 4096))
        m.same(self.mount.image, self.content, "the image")

    def says(self):
        self.suite.differs("mounts read-write and checks itself", before=11)
        options = next(x[2] for x in m.fuse_mounts() if x[1] == str(self.mount.path)).split(",")
        r.require("ro" in options, f"the mount's options are {options}")
        r.require(os.stat(self.mount.path).st_mode & 0o222 == 0, "the mode has write permission")


@pytest.fixture(scope="module")
def _growable(suite):
    return Growing(suite)


@pytest.fixture
def growable(_growable, fresh_after_failure):
    fresh_after_failure(_growable)
    return _growable


@pytest.fixture(scope="module")
def _read_only(suite):
    return ReadOnly(suite)


@pytest.fixture
def read_only(_read_only, fresh_after_failure):
    fresh_after_failure(_read_only)
    return _read_only


def test_growable_truncate_grows_and_shrinks(growable):
    growable.truncate()


def test_growable_writes_beyond_the_end(growable):
    growable.write()


def test_growable_one_asynchronous_write_of_many_requests_beyond_the_end(growable):
    growable.write_in_pieces()


def test_growable_cut_while_writes_are_under_way(growable):
    growable.cut_under_load()


def test_growable_o_append_o_trunc(growable):
    growable.append()


def test_growable_fallocate_beyond_the_end(growable):
    growable.allocate()


def test_growable_sizes_are_rounded_up_to_512(growable):
    growable.rounded()


def test_growable_cp_and_dd_without_notrunc(growable):
    growable.copied()


def test_growable_end(growable):
    growable.mount.stop()


def test_read_only_every_change_is_refused(read_only):
    read_only.refuses()


def test_read_only_the_mount_says_so(read_only):
    read_only.says()


def test_read_only_reads(read_only):
    m.same(read_only.mount.path, read_only.content, "read-only")


def test_read_only_end(read_only):
    read_only.mount.stop()
