"""The times of a mounted file, from which tools tell whether a disk has changed.

Each kind of disk is written through the mount, or by a guest. A raw image is the model: its file has the times.
"""

import os
import time

import fuse_mount as m
import nbd_exports
import nbd_servers
import pytest
import rig as r

MIB = 1 << 20
SIZE = 2 * MIB
OLD = 1_000_000_000_000_000_007  # 2001, nanoseconds
ANCIENT = -1_000_000_000_000_000_007  # 1938
CLOCK_REALTIME_COARSE = 5  # linux/time.h
KINDS = ("raw", "qcow2", "overlay", "data-file", "ram", "null", "nbd", "device")
VSHUNT_IMAGE = (r.binary("vshunt"), "image")


MMAP_WRITE = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(fd, 65536)
m[100:200] = b"m" * 100
m.close()
os.fsync(fd)
"""


class Disks:
    """Makes the --disk of each kind, without its name."""

    def __init__(self, suite, name):
        self.suite, self.name = suite, f"{name}-{suite.transport}"

    def of(self, kind):
        return getattr(self, "_" + kind.replace("-", "_"))()

    @property
    def image(self):
        return self.suite.rig.dir / f"{self.name}.image"

    def _raw(self):
        self.suite.image(self.image.name, SIZE)
        return f"format=raw,file={self.image}"

    def _qcow2(self, *options):
        r.run([*VSHUNT_IMAGE, "create", "-q", "-f", "qcow2", *options, self.image, str(SIZE)])
        return f"format=qcow2,file={self.image}"

    def _overlay(self):
        return self._qcow2("-b", self.suite.image(f"{self.name}.base", SIZE), "-F", "raw")

    def _data_file(self):
        return self._qcow2("-o", f"data_file={self.image}.data,data_file_raw=on")

    def _ram(self):
        return f"format=ram,size={SIZE}"

    def _null(self):
        return f"format=null,size={SIZE}"

    def _nbd(self):
        return f"format=nbd,uri={nbd_servers.nbdkit(self.suite.rig, 'memory', SIZE, name=self.name).uri()}"

    def _device(self):
        self._raw()
        loop = r.run([r.tool("losetup", "mount"), "--show", "-f", self.image]).stdout.strip()
        self.suite.loops.append(loop)
        return f"format=raw,file={loop}"


def clock_passes():
    """Waits until what file systems take as the time is later than now. Otherwise a file that is written next could seem older."""
    now = time.time_ns()
    r.wait_for("the clock ticks", lambda: time.clock_gettime_ns(CLOCK_REALTIME_COARSE) > now)


def times(path):
    seen = os.stat(path)
    return seen.st_mtime_ns, seen.st_ctime_ns


def changes(path, what, change):
    """Checks that a change makes the times those of now, and that they then stay."""
    os.utime(path, ns=(ANCIENT, OLD))
    before = os.stat(path)
    r.require((before.st_atime_ns, before.st_mtime_ns) == (ANCIENT, OLD), f"{what}: utimensat set {before}")
    clock_passes()
    change()
    mtime, ctime = times(path)
    r.require(mtime > OLD and ctime > before.st_ctime_ns and max(mtime, ctime) <= time.time_ns(), f"{what}: {mtime}, {ctime} after {before}")
    with m.Opened(path, os.O_RDONLY) as fd:
        os.pread(fd, 4096, 0)
        os.fsync(fd)
    r.require(times(path) == (mtime, ctime), f"{what}: the times are {times(path)} later, not {mtime}, {ctime}")


def write(path, data, offset=0):
    with m.Opened(path, os.O_WRONLY) as fd:
        r.require(os.pwrite(fd, data, offset) == len(data), "a short write")


def fallocate(path, mode):
    with m.Opened(path) as fd:
        m.fallocate(fd, mode, 0, 65536)


@pytest.mark.parametrize("kind", KINDS)
def test_times_follow_changes_and_are_set(suite, kind):
    suite.ours()
    growable = kind not in ("overlay", "data-file", "nbd", "device")
    mount = m.Mount(suite, f"times-{kind}", disk=Disks(suite, f"times-{kind}").of(kind), growable=growable)
    path = mount.path
    changes(path, "write", lambda: write(path, b"w" * 4096))
    changes(path, "3 bytes", lambda: write(path, b"www", 1001))
    changes(path, "punch", lambda: fallocate(path, m.PUNCH))
    changes(path, "zeroes", lambda: fallocate(path, m.ZERO_RANGE | m.KEEP_SIZE))
    changes(path, "mapping", lambda: m.script(MMAP_WRITE, path))
    changes(path, "touch", lambda: r.run(["touch", path]))
    if growable:
        changes(path, "longer", lambda: os.truncate(path, SIZE + 4096))
        changes(path, "shorter", lambda: os.truncate(path, SIZE))
    elif kind not in ("nbd", "device"):
        changes(path, "resize", lambda: mount.cli("resize", "d0", str(SIZE + MIB)))
    before = os.stat(path)
    clock_passes()
    os.chmod(path, 0o640)
    after = os.stat(path)
    r.require(after.st_mtime_ns == before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns, f"chmod: {before}, then {after}")
    mount.stop()


@pytest.mark.parametrize("kind", ("raw", "qcow2", "ram"))
def test_tools_copy_what_has_changed_and_nothing_else(suite, kind):
    suite.ours()
    mount = m.Mount(suite, f"tools-{kind}", disk=Disks(suite, f"tools-{kind}").of(kind))
    folder = suite.rig.dir / f"tools-{kind}-{suite.transport}"
    folder.mkdir()
    path, copy, built = mount.path, folder / mount.path.name, folder / "built"
    makefile = folder / "Makefile"
    makefile.write_text(f"{built}: {path}\n\tcp $< $@\n")
    make = [r.tool("make", "make"), "-s", "-f", makefile]

    def is_built():
        return r.run([*make, "-q"], check=False).returncode == 0

    def rsync(*arguments):
        """The files that are transferred. By default rsync compares seconds only."""
        return r.run([r.tool("rsync", "rsync"), "--modify-window=-1", "--out-format=%n", *arguments]).stdout.split()

    for turn in range(3):
        clock_passes()
        data = bytes([turn + 1]) * 100_000
        write(path, data, 777 * turn)
        if turn:
            r.require(not is_built(), f"make sees no change in turn {turn}")
        os.stat(path)
        clock_passes()
        r.run(make)
        r.require(is_built(), f"make sees a change after turn {turn}")
        r.require(rsync("-t", path, folder) == [path.name], f"rsync sees no change in turn {turn}")
        r.require(copy.read_bytes() == path.read_bytes() and times(copy)[0] == times(path)[0], "the copy is another")
        r.require(rsync("-t", path, folder) == [], "rsync sees a change")
        clock_passes()
        write(path, b"again", 9)
        r.require(rsync("-t", path, folder) == [path.name], f"rsync sees no later change in turn {turn}")
        r.require(copy.read_bytes() == path.read_bytes(), "the copy is another")
        clock_passes()
        write(path, b"later", 5)
        r.run(["cp", "-u", path, copy])
        r.require(copy.read_bytes() == path.read_bytes(), f"cp -u sees no change in turn {turn}")
    # To the mount.
    source = folder / "source"
    source.write_bytes(os.urandom(SIZE))
    os.utime(source, ns=(OLD, OLD))
    r.run(["cp", "-p", source, path])
    r.require(times(path)[0] == OLD and path.read_bytes() == source.read_bytes(), f"cp -p made {os.stat(path)}")
    r.require(rsync("--inplace", "-t", source, path) == [], "rsync sees a change after cp -p")
    source.write_bytes(os.urandom(SIZE))
    r.require(rsync("--inplace", "-t", source, path) == [source.name], "rsync sees no change")
    r.require(times(path)[0] == times(source)[0] and path.read_bytes() == source.read_bytes(), "rsync --inplace made something else")
    r.require(rsync("--inplace", "-t", source, path) == [], "rsync sees a change after rsync")
    r.run(["touch", "-r", makefile, path])
    r.require(times(path)[0] == times(makefile)[0], "touch -r set another time")
    mount.stop()


@pytest.mark.transports("any")
@pytest.mark.parametrize("by", ("vhost-user", "nbd"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_guests_writes_show_in_a_read_only_mount(suite, kind, by):
    suite.ours()
    name = f"guest-{by}-{kind}"
    socket = suite.rig.dir / f"{name}.sock"
    export = f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues=1"
    if by == "nbd":
        export = nbd_exports.export(suite.rig, listen=f"unix:{socket}")
    mount = m.Mount(suite, name, disk=Disks(suite, name).of(kind), writable=False, more=("--export", export))

    def guest(rw):
        if by == "nbd":
            command = {"read": "read 0 64k", "write": "write -P 7 0 64k"}[rw]
            r.run([r.tool("qemu-io", "qemu-utils"), "-f", "raw", "-c", command, f"nbd+unix:///n0?socket={socket}"])
            return
        r.run([r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", rw, "--size", "64k", "--bs", "4k", "--quiet"])

    for turn in range(3):
        before = times(mount.path)
        guest("read")
        r.require(times(mount.path) == before, f"a guest that reads changes the times from {before} to {times(mount.path)}")
        clock_passes()
        guest("write")
        after = times(mount.path)
        r.require(after[0] > before[0] and after[1] > before[1], f"turn {turn}: {before}, {after} after a write")
    mount.stop()


@pytest.mark.transports("any")
def test_times_begin_with_those_of_the_image_and_survive_a_snapshot(suite):
    suite.ours()
    for kind in ("raw", "qcow2", "data-file"):
        disks = Disks(suite, f"start-{kind}")
        disk = disks.of(kind)
        if kind == "data-file":
            os.utime(disks.image, ns=(OLD, OLD - 10**9))
            os.utime(f"{disks.image}.data", ns=(OLD, OLD))
        else:
            os.utime(disks.image, ns=(OLD, OLD))
        mount = m.Mount(suite, disks.name, disk=disk)
        r.require(times(mount.path)[0] == OLD, f"{kind}: the time is {times(mount.path)}")
        if kind != "data-file":
            mount.cli("snapshot", "d0", "--to", f"{disks.image}.over")
            r.require(times(mount.path)[0] == OLD, f"{kind}: the time is {times(mount.path)} after a snapshot")
        changes(mount.path, f"{kind}, write", lambda path=mount.path: write(path, b"over"))
        mount.stop()
