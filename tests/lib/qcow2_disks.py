"""qcow2 disks, and QEMU's tools for them, for the tests in tests/qcow2."""

import hashlib
import os
import random
import re
import time

import rig as r

MIB = 1 << 20
# As many kinds of images as differ in how they are read: name, options of qemu-img create, size in
# MiB.
KINDS = (
    ("plain", "", 64),
    ("v2", "compat=0.10", 64),
    # More than the refcount table that it begins with can count.
    ("512-byte clusters", "cluster_size=512", 24),
    ("4k clusters", "cluster_size=4k", 32),
    ("2M clusters", "cluster_size=2M", 256),
    ("1-bit counts", "refcount_bits=1", 64),
    ("64-bit counts", "refcount_bits=64,cluster_size=4k", 32),
    ("subclusters", "extended_l2=on", 64),
    ("large subclusters", "extended_l2=on,cluster_size=2M", 256),
    ("lazy counts", "lazy_refcounts=on", 64),
    ("preallocated map", "preallocation=metadata", 64),
    ("preallocated", "preallocation=falloc,cluster_size=16k", 32),
    ("zstd", "compression_type=zstd", 64),
    ("data file", "data_file=DATA", 64),
    ("raw data file", "data_file=DATA,data_file_raw=on", 64),
    ("odd size", "", 33.0009765625),
)


def qemu_img(*arguments, check=True, timeout_s=120):
    return r.run([r.tool("qemu-img", "qemu-utils"), *arguments], check=check, timeout_s=timeout_s)


def create(path, options="", size=64, more=()):
    options = options.replace("DATA", f"{path}.data")
    opts = ["-o", options] if options else []
    qemu_img("create", "-q", "-f", "qcow2", *opts, *more, path, *([str(int(size * MIB))] if size else []))
    return path


def fill(path, seed, size_mib):
    """Writes, zeroes and discards here and there, by QEMU."""
    rng, commands = random.Random(seed), []
    sectors = int(size_mib * MIB) // 512
    for n in range(40):
        first = rng.randrange(sectors)
        count = min(rng.choice((1, 7, 128, 1000)), sectors - first)
        verb = rng.choice((f"write -P {n + 1}", f"write -P {n + 1}", "write -z", "write -z -u", "discard"))
        commands += ["-c", f"{verb} {first * 512} {count * 512}"]
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", *commands, path], timeout_s=120)


def checked(path, leaks=False):
    """`qemu-img check` finds nothing, or leaks at worst."""
    # A killed daemon's io_uring holds the locks until it is taken apart.
    end = time.monotonic() + r.WAIT_S
    while True:
        done = qemu_img("check", "-f", "qcow2", path, check=False)
        if "lock" not in done.stderr or time.monotonic() > end:
            break
        time.sleep(0.05)
    r.require(done.returncode in ((0, 3) if leaks else (0,)), f"qemu-img check: {done.stdout}{done.stderr}")


def file_name(name):
    return re.sub("[^a-z0-9]+", "-", name.lower()) + ".qcow2"


class Disk:
    """A daemon with one qcow2 disk, as a file and over a socket."""

    def __init__(self, rig, path, *, fuse=True, readonly=False, queues=2, keys="", name="q"):
        self.rig, self.path = rig, path
        self.file = rig.dir / f"{name}.mnt"
        self.socket = rig.dir / f"{name}.sock"
        disk = f"name=d0,format=qcow2,file={path}{',readonly=on' if readonly else ''}{keys}"
        if fuse:
            writable = "off" if readonly else "on"
            export = f"type=fuse,name=e0,disk=d0,mountpoint={self.file},queues={queues},writable={writable}"
        else:
            export = f"type=vhost-user-blk,name=e0,disk=d0,socket={self.socket},queues={queues}"
        self.daemon = r.Daemon(rig, "--disk", disk, "--export", f"{export},workers=per-queue", name=name)

    def quit(self):
        self.daemon.cli("quit", "--force")
        code = self.daemon.child.wait()
        r.require(code == 0, f"the daemon ended with {code}: {self.daemon.child.tail()}")


def mounts():
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise r.Skipped("mounting needs root and /dev/fuse")


def same(a, a_format, b, b_format, **more):
    done = qemu_img("compare", "-f", a_format, "-F", b_format, a, b, check=False, **more)
    r.require(done.returncode == 0, f"{a} and {b} differ: {done.stdout}{done.stderr}")


def program(rig, name, options, size, seed, steps=120, backing=None, path=None, keys=""):
    """vshunt runs a random program on the image, and the system runs it on a plain file.

    Both are equal at each stop.
    """
    mounts()
    rng = random.Random(seed)
    more = ["-b", backing[0], "-F", backing[1]] if backing else []
    path = path or create(rig.dir / file_name(name), options, size, more)
    plain = rig.dir / "plain.raw"
    qemu_img("convert", "-f", "qcow2", "-O", "raw", path, plain)
    total = os.path.getsize(plain)
    below = hashlib.sha256(backing[0].read_bytes()).hexdigest() if backing else None
    for _ in range(3):
        disk = Disk(rig, path, keys=keys)
        with open(disk.file, "r+b", buffering=0) as ours, open(plain, "r+b", buffering=0) as theirs:
            for _ in range(steps // 3):
                one_step(rng, total, ours, theirs)
        disk.quit()
        checked(path)
        same(path, "qcow2", plain, "raw")
    if backing:
        r.require(hashlib.sha256(backing[0].read_bytes()).hexdigest() == below, "the image below was changed")


def one_step(rng, total, ours, theirs):
    first = rng.randrange(total)
    length = min(rng.choice((1, 511, 512, 4096, 65536, 300000, 2 * MIB)), total - first)
    if rng.random() < 0.7:
        first, length = first // 512 * 512, -(-length // 512) * 512
        length = min(length, total - first)
    what = rng.randrange(10)
    if what < 5:
        data = bytes([rng.randrange(1, 256)]) * length
        for f in (ours, theirs):
            f.seek(first)
            left = memoryview(data)
            while left:
                left = left[f.write(left) :]
    elif what < 7:
        falloc(ours, theirs, "--punch-hole" if what == 5 else "--zero-range", first, length)
    elif what == 7:
        os.fsync(ours.fileno())
    else:
        read = []
        for f in (ours, theirs):
            f.seek(first)
            data = b""
            while len(data) < length and (more := f.read(length - len(data))):
                data += more
            read.append(data)
        r.require(read[0] == read[1], f"{length} bytes at {first} are not what was written")


def falloc(ours, theirs, how, first, length):
    for f in (ours, theirs):
        keep = ["--keep-size"] if how == "--zero-range" else []
        fd = f.fileno()
        r.run([r.tool("fallocate", "util-linux"), how, *keep, "-o", first, "-l", length, f"/proc/self/fd/{fd}"], pass_fds=[fd])
