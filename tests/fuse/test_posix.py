"""Tests that the mounted file behaves as POSIX says, with standard tools and system calls.

The export is writable and does not grow. `Fixed.truth` is the expected contents of the file.
"""

import array
import errno
import fcntl
import os
import random
import socket
import stat
import struct

import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
SIZE = 32 * MIB
ISLANDS = ((0, 4 * MIB), (8 * MIB + 4096, MIB), (16 * MIB, 4096), (SIZE - 65536, 65536))

MMAP_WRITE = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(fd, 65536)
m[100:200] = b"m" * 100
m[40000:40010] = b"n" * 10
m.flush()
m.close()
os.fsync(fd)
"""


def segments(path):
    """The positions of data, by SEEK_DATA and SEEK_HOLE."""
    found, at = [], 0
    with m.Opened(path, os.O_RDONLY) as fd:
        while True:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as e:
                r.require(e.errno == errno.ENXIO, f"SEEK_DATA from {at}: {e}")
                return found
            at = os.lseek(fd, data, os.SEEK_HOLE)
            r.require(at > data, f"SEEK_HOLE from {data} is {at}")
            found.append((data, at))


class Fixed(m.Fixture):
    """The writable export that does not grow."""

    chance = random.Random(11)

    def make(self, name):
        image = self.suite.image(f"{name}.img", SIZE)
        self.truth = m.fill(image, SIZE, ISLANDS, 1)
        return m.serving(self.suite, name, image=image)

    def open(self, flags=os.O_RDWR):
        return m.Opened(self.mount.path, flags)

    def wrote(self, offset, data):
        self.truth[offset : offset + len(data)] = data

    def whole(self):
        """cmp: mount, image and truth are one."""
        r.run(["sync", self.mount.path])
        m.same(self.mount.path, self.truth, "the mount")
        m.same(self.mount.image, self.truth, "the image")
        r.run(["cmp", self.mount.path, self.mount.image])

    def stat(self):
        seen, image = os.stat(self.mount.path), os.stat(self.mount.image)
        r.require(stat.S_ISREG(seen.st_mode), f"it is no regular file: {seen.st_mode:o}")
        r.require(seen.st_mode & 0o600 == 0o600, f"the mode is {seen.st_mode:o}")
        r.require(seen.st_size == SIZE, f"it has {seen.st_size} bytes, not {SIZE}")
        blocks = (seen.st_blocks, image.st_blocks)
        r.require(abs(blocks[0] - blocks[1]) <= 256, f"blocks of mount and image: {blocks}")
        r.require(seen.st_nlink == 1, f"{seen.st_nlink} links")
        r.require(seen.st_blksize >= 512 or self.suite.peer, f"block size {seen.st_blksize}")
        r.require(f" {SIZE} " in r.run(["stat", self.mount.path]).stdout, "stat(1) sees another size")
        # Asking for the birth time is a request of its own (STATX), with all the rest in its
        # answer.
        told = r.run(["stat", "-c", "%w %s %b %a %u", self.mount.path]).stdout.split()
        want = ["-", str(SIZE), str(seen.st_blocks), f"{seen.st_mode & 0o777:o}", str(seen.st_uid)]
        r.require(told == want or self.suite.peer, f"with the birth time stat says {told}, not {want}")

    def dd_read(self, bs, count, skip, more=()):
        out = self.suite.rig.dir / "dd.out"
        r.run(["dd", f"if={self.mount.path}", f"of={out}", f"bs={bs}", f"count={count}", f"skip={skip}", *more])
        m.same(out, self.truth[bs * skip : bs * (skip + count)], f"dd bs={bs}")

    def dd_write(self, bs, count, seek, more=()):
        data = self.chance.randbytes(bs * count)
        source = self.suite.rig.dir / "dd.in"
        source.write_bytes(data)
        out = self.mount.path
        r.run(["dd", f"if={source}", f"of={out}", f"bs={bs}", f"count={count}", f"seek={seek}", "conv=notrunc", *more])
        self.wrote(bs * seek, data)
        # The neighbours of what was written too.
        begin, end = max(0, bs * seek - 5000), bs * (seek + count) + 5000
        with self.open(os.O_RDONLY) as fd:
            r.require(os.pread(fd, end - begin, begin) == self.truth[begin:end], "it reads back something else")

    def vectors(self):
        with self.open(os.O_RDWR | os.O_DIRECT) as fd:
            for length, offset, shift in ((4096, 0, 1), (513, 1000, 7), (100, 5 * MIB, 511), (70001, 12345, 3), (512, 512, 8)):
                data = self.chance.randbytes(length)
                room = memoryview(bytearray(length + shift))[shift:]
                room[:] = data
                r.require(os.pwritev(fd, [room], offset) == length, "a short write")
                self.wrote(offset, data)
                room[:] = bytes(length)
                r.require(os.preadv(fd, [room], offset) == length and room == data, f"{length} bytes at {offset}")
        lengths = [self.chance.randrange(1, 700) for _ in range(200)]
        parts = [self.chance.randbytes(n) for n in lengths]
        with self.open() as fd:
            r.require(os.pwritev(fd, parts, 777) == sum(lengths), "a short vector write")
            self.wrote(777, b"".join(parts))
            rooms = [bytearray(n) for n in lengths]
            r.require(os.preadv(fd, rooms, 777) == sum(lengths) and rooms == parts, "the vectors came back otherwise")

    def huge(self):
        data = self.chance.randbytes(8 * MIB)
        with self.open() as fd:
            r.require(os.pwrite(fd, data, MIB + 1) == len(data), "a short write")
            self.wrote(MIB + 1, data)
            r.require(os.pread(fd, len(data), MIB + 1) == data, "it reads back something else")

    def append(self):
        self.suite.differs("writes nothing at the end and says so")
        with self.open(os.O_WRONLY | os.O_APPEND) as fd:
            m.refused("appending", ["ENOSPC"], lambda: os.write(fd, b"x" * 100))
        r.require(self.mount.path.stat().st_size == SIZE, "the size changed")

    def synchronous(self):
        for number, flag in enumerate((os.O_DSYNC, os.O_SYNC)):
            with self.open(os.O_RDWR | flag) as fd:
                data = self.chance.randbytes(1000)
                r.require(os.pwrite(fd, data, 3 * MIB + 5000 * number) == 1000, "a short write")
                self.wrote(3 * MIB + 5000 * number, data)
        with self.open() as fd:
            r.require(os.pwritev(fd, [b"d" * 600], 3 * MIB + 20000, os.RWF_DSYNC) == 600, "a short write")
            self.wrote(3 * MIB + 20000, b"d" * 600)

    def fsync(self):
        r.run(["sync", self.mount.path])
        r.run(["sync", "--data", self.mount.path])
        with self.open() as fd:
            os.pwrite(fd, b"f" * 100, 60000)
            self.wrote(60000, b"f" * 100)
            os.fsync(fd)
            os.fdatasync(fd)
        with self.open(os.O_RDONLY) as fd:
            os.fsync(fd)

    def the_end(self):
        with self.open() as fd:
            r.require(os.pread(fd, 100, SIZE) == b"" and os.pread(fd, 100, SIZE + 12345) == b"", "bytes beyond the end")
            r.require(len(os.pread(fd, 1000, SIZE - 300)) == 300, "a read across the end is not cut there")
            for length, before in ((1000, 300), (8192, 4096), (2 * MIB, MIB)):
                data = self.chance.randbytes(length)
                count = os.pwrite(fd, data, SIZE - before)
                r.require(count == before, f"a write of {length} bytes {before} before the end wrote {count}")
                self.wrote(SIZE - before, data[:before])
            self.suite.differs("writes nothing at the end, and at 7.2 fails otherwise beyond it")
            for offset in (SIZE, SIZE + 1, SIZE + 4096, 1 << 50):
                m.refused(f"writing at {offset}", ["ENOSPC"], lambda o=offset: os.pwrite(fd, b"x" * 512, o))
        r.require(self.mount.path.stat().st_size == SIZE, "the size changed")

    def truncate(self):
        os.truncate(self.mount.path, SIZE)
        self.suite.differs("grows and shrinks, also without growable")
        for size in (512, SIZE - 1, SIZE - 4096, SIZE + 1, SIZE + MIB):
            m.refused(f"truncate to {size}", ["EPERM"], lambda s=size: os.truncate(self.mount.path, s))
        r.require(r.run(["truncate", "-s", SIZE + 512, self.mount.path], check=False).returncode == 1, "truncate(1) succeeded")
        with self.open() as fd:
            m.refused("ftruncate to 0", ["EPERM"], lambda: os.ftruncate(fd, 0))
        # By name the kernel asks for it as for open(O_TRUNC): it is done, and the size stays.
        os.truncate(self.mount.path, 0)
        os.close(os.open(self.mount.path, os.O_WRONLY | os.O_TRUNC))
        r.require(self.mount.path.stat().st_size == SIZE, "the size changed")

    def zeroes(self, *flags):
        """Zeroes whole blocks. The space of a punched hole is freed."""
        before = os.stat(self.mount.image).st_blocks
        begin = {"-p": 1, "-z": 2}[flags[0]] * MIB + len(flags) * 131072
        r.run([r.tool("fallocate", "util-linux"), *flags, "-o", begin, "-l", 65536, self.mount.path])
        self.wrote(begin, bytes(65536))
        with self.open(os.O_RDONLY) as fd:
            r.require(os.pread(fd, 75536, begin - 5000) == self.truth[begin - 5000 : begin + 70536], "not zeroes there, or elsewhere too")
        if flags[0] == "-p":
            given = before - os.stat(self.mount.image).st_blocks
            r.require(given >= 120, f"a hole of 128 blocks gave back {given}")

    def crumbs(self):
        """Holes and zeroes that begin and end within sectors."""
        self.suite.differs("leaves the ends of holes that are no whole block as they are")
        with self.open() as fd:
            for mode in (m.PUNCH, m.ZERO_RANGE | m.KEEP_SIZE, m.ZERO_RANGE):
                for start, length in ((100, 50), (4000, 700), (8191, 9000), (65536 + 511, 2)):
                    offset = 3 * MIB + start
                    self.dirty(fd, offset - 600, length + 1200)
                    m.fallocate(fd, mode, offset, length)
                    self.wrote(offset, bytes(length))
                    begin, end = offset - 600, offset + length + 600
                    r.require(os.pread(fd, end - begin, begin) == self.truth[begin:end], f"mode {mode}, {length} bytes at {offset}")

    def dirty(self, fd, offset, length):
        data = self.chance.randbytes(length)
        os.pwrite(fd, data, offset)
        self.wrote(offset, data)

    def allocate(self):
        self.suite.differs("does not support plain fallocate within the file")
        before = os.stat(self.mount.image).st_blocks
        r.run(["fallocate", "-o", 0, "-l", MIB, self.mount.path])
        r.run(["fallocate", "-o", 12 * MIB, "-l", MIB, self.mount.path])
        r.run(["fallocate", "--keep-size", "-o", 13 * MIB, "-l", 65536, self.mount.path])
        r.require(os.stat(self.mount.image).st_blocks > before, "nothing was allocated")
        self.whole()

    def allocate_beyond(self):
        self.suite.differs("grows, also without growable")
        with self.open() as fd:
            for mode, offset in ((0, SIZE), (0, SIZE - 4096), (m.ZERO_RANGE, SIZE - 4096), (m.ZERO_RANGE, SIZE + 8192)):
                m.refused(f"fallocate mode {mode} at {offset}", ["ENOSPC"], lambda a=mode, o=offset: m.fallocate(fd, a, o, 8192))
            # A hole has no size to keep.
            try:
                m.fallocate(fd, m.PUNCH, SIZE - 4096, 8192)
                self.wrote(SIZE - 4096, bytes(4096))
            except OSError as e:
                r.require(e.errno == errno.ENOSPC, f"a hole across the end: {e}")
        r.require(self.mount.path.stat().st_size == SIZE, "the size changed")
        self.whole()

    def seek(self):
        r.run(["sync", self.mount.path])
        ours, image = segments(self.mount.path), segments(self.mount.image)
        r.require(len(image) >= 3, f"the image has too few holes for a test: {image}")
        r.require(ours == image, f"the mount has data at {ours}, the image at {image}")
        with self.open(os.O_RDONLY) as fd:
            r.require(os.lseek(fd, -100, os.SEEK_END) == SIZE - 100, "SEEK_END is elsewhere")
            m.refused("SEEK_DATA from the end", ["ENXIO"], lambda: os.lseek(fd, SIZE, os.SEEK_DATA))
            self.suite.differs("finds a hole at the end")
            m.refused("SEEK_HOLE from the end", ["ENXIO"], lambda: os.lseek(fd, SIZE, os.SEEK_HOLE))

    def statvfs(self):
        seen = os.statvfs(self.mount.path)
        r.require(seen.f_bsize >= 512, f"block size {seen.f_bsize}")
        r.run(["df", self.mount.path])

    def attributes(self):
        """Checks that an unsupported change is refused, and that a successful one is visible."""
        path = self.mount.path
        errors = {errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.EROFS, errno.ENOSYS}
        before = path.stat()
        owner = (before.st_uid, before.st_gid)
        for what, change, shows in (
            ("chmod", lambda: os.chmod(path, 0o640), lambda s: s.st_mode & 0o777 == 0o640),
            ("chown", lambda: os.chown(path, 65534, 65534), lambda s: (s.st_uid, s.st_gid) == (65534, 65534)),
            ("chown back", lambda: os.chown(path, *owner), lambda s: (s.st_uid, s.st_gid) == owner),
            ("chmod back", lambda: os.chmod(path, before.st_mode & 0o777), lambda s: s.st_mode == before.st_mode),
        ):
            try:
                change()
            except OSError as e:
                r.require(e.errno in errors, f"{what}: {e}")
            else:
                r.require(shows(path.stat()), f"{what} succeeded and stat does not show it: {path.stat()}")
        try:
            os.utime(path, (1000, 2000))
        except OSError as e:
            r.require(e.errno in errors, f"utime: {e}")
        r.require(path.stat().st_size == SIZE, "the size changed")

    def copy_range(self):
        length = 300001
        with self.open() as fd, self.open() as second:
            done = 0
            while done < length:
                count = os.copy_file_range(fd, second, length - done, 1000 + done, 20 * MIB + 1 + done)
                r.require(count > 0, f"it stops after {done} bytes")
                done += count
        self.wrote(20 * MIB + 1, self.truth[1000 : 1000 + length])
        with self.open(os.O_RDONLY) as fd:
            begin = 20 * MIB - 1000
            r.require(os.pread(fd, length + 2000, begin) == self.truth[begin : begin + length + 2000], "the copy is another")
        out = self.suite.rig.dir / "cp.out"
        r.run(["cp", "--sparse=always", self.mount.path, out])
        m.same(out, self.truth, "cp")
        out.unlink()

    def sendfile(self):
        out = self.suite.rig.dir / "sendfile"
        with self.open() as fd, m.Opened(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as plain:
            r.require(os.sendfile(plain, fd, 513, 100000) == 100000, "a short sendfile from the mount")
            r.require(os.pread(plain, 100000, 0) == self.truth[513:100513], "sendfile sent something else")
            os.lseek(fd, 10 * MIB + 3, os.SEEK_SET)
            r.require(os.sendfile(fd, plain, 7, 50000) == 50000, "a short sendfile to the mount")
            self.wrote(10 * MIB + 3, self.truth[520:50520])
            a, b = socket.socketpair()
            with a, b:
                r.require(os.sendfile(a.fileno(), fd, 10 * MIB + 3, 5000) == 5000, "a short sendfile to a socket")
                r.require(b.recv(5000, socket.MSG_WAITALL) == self.truth[520:5520], "the socket got something else")
        with self.open(os.O_RDONLY) as fd:
            r.require(os.pread(fd, 50000, 10 * MIB + 3) == self.truth[520:50520], "sendfile wrote something else")

    def mmap_write(self):
        self.suite.differs("mixes up writes that come together", before=11)
        m.script(MMAP_WRITE, self.mount.path)
        self.wrote(100, b"m" * 100)
        self.wrote(40000, b"n" * 10)
        r.run(["sync", self.mount.path])
        with m.Opened(self.mount.image, os.O_RDONLY) as fd:
            r.require(os.pread(fd, 65536, 0) == self.truth[:65536], "what a mapping wrote is not in the image")

    def advice(self):
        with self.open(os.O_RDONLY) as fd:
            for advice in (os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
                os.posix_fadvise(fd, 0, 4 * MIB, advice)
            try:
                m.checked(m.libc.readahead(fd, 0, MIB))
            except OSError as e:
                r.require(e.errno == errno.EINVAL, f"readahead: {e}")
            r.require(os.pread(fd, MIB, 0) == self.truth[:MIB], "it reads something else afterwards")

    def ioctl(self):
        with self.open() as fd:
            numbers = {"0x1234": 0x1234, "FS_IOC_GETFLAGS": 0x80086601, "BLKDISCARD": 0x1277}
            if not self.suite.peer:
                size = r.run(["blockdev", "--getsize64", self.mount.path]).stdout.strip()
                r.require(size == str(SIZE), f"blockdev --getsize64: {size}")
            for name, number in numbers.items():
                m.refused(f"ioctl {name}", ["ENOTTY"], lambda n=number: fcntl.ioctl(fd, n, bytearray(16)))
            waiting = array.array("i", [0])
            try:
                fcntl.ioctl(fd, 0x541B, waiting)  # FIONREAD, which the kernel itself knows of files
            except OSError as e:
                r.require(e.errno == errno.ENOTTY, f"FIONREAD: {e}")
        done = r.run([r.tool("blockdev", "util-linux"), "--getsize64", self.mount.path], check=False)
        r.require(done.returncode == 0 or "Inappropriate ioctl" in done.stderr, f"blockdev: {done.stderr}")

    def xattr(self):
        path = self.mount.path
        for what, call, errnos in (
            ("getxattr", lambda: os.getxattr(path, "user.colour"), ["ENODATA", "EOPNOTSUPP"]),
            ("getxattr security", lambda: os.getxattr(path, "security.capability"), ["ENODATA", "EOPNOTSUPP"]),
            ("setxattr", lambda: os.setxattr(path, "user.colour", b"red"), ["EOPNOTSUPP", "EPERM"]),
            ("removexattr", lambda: os.removexattr(path, "user.colour"), ["ENODATA", "EOPNOTSUPP", "EPERM"]),
        ):
            m.refused(what, errnos, call)
        try:
            r.require(os.listxattr(path) == [], "it lists attributes")
        except OSError as e:
            r.require(e.errno == errno.EOPNOTSUPP, f"listxattr: {e}")

    def locks(self):
        with self.open() as fd, self.open() as second:
            fcntl.flock(fd, fcntl.LOCK_EX)
            m.refused("a second flock", ["EAGAIN"], lambda: fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB))
            fcntl.flock(fd, fcntl.LOCK_UN)
            span = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 100, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, span)
            m.refused("a second range lock", ["EAGAIN"], lambda: fcntl.fcntl(second, fcntl.F_OFD_SETLK, span))

    def reopen(self):
        folder = f"/proc/{self.mount.child.pid}/fd"
        before = len(os.listdir(folder))
        for turn in range(500):
            with self.open(os.O_RDWR if turn % 2 else os.O_RDONLY) as fd:
                os.pread(fd, 1, turn)
        r.wait_for("the server closes what its callers closed", lambda: len(os.listdir(folder)) <= before + 2)


@pytest.fixture(scope="module")
def _fixed(suite):
    return Fixed(suite)


@pytest.fixture
def fixed(_fixed, fresh_after_failure):
    fresh_after_failure(_fixed)
    return _fixed


def test_stat_size_kind_mode_blocks(fixed):
    fixed.stat()


@pytest.mark.parametrize("bs, count, skip", ((1, 3000, 4095), (100, 500, 7), (513, 900, 3), (4096, 256, 0), (MIB, 32, 0)))
def test_dd_reads(fixed, bs, count, skip):
    fixed.dd_read(bs, count, skip)


@pytest.mark.parametrize("bs", (512, 4096, MIB))
def test_dd_reads_iflag_direct(fixed, bs):
    fixed.dd_read(bs, 16, 2, ("iflag=direct",))


@pytest.mark.parametrize("bs, count, seek", ((1, 1500, 4 * MIB - 100), (100, 700, 41), (513, 800, 11), (4096, 64, 900), (MIB, 3, 9)))
def test_dd_writes_conv_notrunc(fixed, bs, count, seek):
    fixed.dd_write(bs, count, seek)


def test_dd_writes_oflag_direct(fixed):
    fixed.dd_write(4096, 300, 1500, ("oflag=direct",))


def test_dd_writes_oflag_dsync(fixed):
    fixed.dd_write(513, 20, 5000, ("oflag=dsync",))


def test_whole_after_dd_cmp(fixed):
    fixed.whole()


def test_buffers_at_odd_addresses_vectors_of_odd_lengths(fixed):
    fixed.vectors()


def test_one_read_and_one_write_of_8_mib(fixed):
    fixed.huge()


def test_o_append_without_growable_enospc(fixed):
    fixed.append()


def test_o_dsync_o_sync_and_rwf_dsync(fixed):
    fixed.synchronous()


def test_sync_fsync_fdatasync(fixed):
    fixed.fsync()


def test_write_across_the_end_is_short_at_and_beyond_it_enospc(fixed):
    fixed.the_end()


def test_truncate_to_another_size_eperm_to_the_same_done(fixed):
    fixed.truncate()


def test_fallocate_punch_hole(fixed):
    fixed.zeroes("-p")


def test_fallocate_zero_range(fixed):
    fixed.zeroes("-z", "--keep-size")


def test_fallocate_zero_range_size_free_to_change(fixed):
    fixed.zeroes("-z")


def test_fallocate_of_less_than_sectors(fixed):
    fixed.crumbs()


def test_fallocate_keeps_content(fixed):
    fixed.allocate()


def test_fallocate_beyond_the_end_enospc(fixed):
    fixed.allocate_beyond()


def test_seek_data_and_seek_hole_as_the_image_has_them(fixed):
    fixed.seek()


def test_statvfs(fixed):
    fixed.statvfs()


def test_chmod_chown_and_touch_done_or_refused(fixed):
    fixed.attributes()


def test_copy_file_range(fixed):
    fixed.copy_range()


def test_sendfile_both_ways_splice(fixed):
    fixed.sendfile()


def test_mmap_for_reading_private_and_shared(fixed):
    m.script(m.MMAP, fixed.mount.path)


def test_mmap_for_writing(fixed):
    fixed.mmap_write()


def test_readahead_and_posix_fadvise(fixed):
    fixed.advice()


def test_unknown_ioctls_enotty(fixed):
    fixed.ioctl()


def test_extended_attributes_none(fixed):
    fixed.xattr()


def test_locks(fixed):
    fixed.locks()


def test_open_and_close_500_times_nothing_stays_open(fixed):
    fixed.reopen()


def test_whole_in_the_end_cmp(fixed):
    fixed.whole()


def test_end_sigterm_leaves_neither_mount_nor_file(fixed):
    fixed.mount.stop()
