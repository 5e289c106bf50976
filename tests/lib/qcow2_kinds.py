"""Tests every kind of image that qemu-img makes. For tests/qcow2.

The kinds are: cluster size by width of counts, subclusters, lazy counts, data file, compression
and backing images. QEMU fills each image, vshunt reads and writes it, and QEMU checks it.
"""

import ctypes
import itertools
import os
import random

import rig as r

MIB = 1 << 20
# Kinds that are drawn where not all are asked for.
SAMPLE = 30
# fallocate(2).
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16

LIBC = ctypes.CDLL(None, use_errno=True)


def every():
    """All kinds: options of qemu-img create, how clusters are compressed, what is below."""
    sizes, widths, on_off = [1 << s for s in range(9, 22)], [1 << w for w in range(7)], ("off", "on")
    for below in ("", "raw", "qcow2"):
        for size in sizes:
            yield {"compat": "0.10", "cluster_size": size}, "zlib", below
        for size, width, sub, lazy, data in itertools.product(sizes, widths, on_off, on_off, ("", "plain", "raw")):
            # What the format does not have: subclusters of less than a sector; a raw data file over
            # another image.
            if sub == "on" and size < 32 * 512 or data == "raw" and below:
                continue
            options = {"cluster_size": size, "refcount_bits": width, "extended_l2": sub, "lazy_refcounts": lazy}
            if data:
                options["data_file"] = "DATA"
                options["data_file_raw"] = "on" if data == "raw" else "off"
            # Nor are clusters compressed in a data file.
            for packed in ("",) if data else ("", "zlib", "zstd"):
                yield options | ({"compression_type": packed} if packed else {}), packed, below


def falloc(fd, mode, first, length):
    done = LIBC.fallocate(fd, mode, ctypes.c_long(first), ctypes.c_long(length))
    r.require(done == 0, f"fallocate({mode}, {first}, {length}): {os.strerror(ctypes.get_errno())}")


class Kinds:
    """Images of all kinds through one daemon."""

    def __init__(self, rig, seed):
        self.rig, self.seed = rig, seed
        self.low = rig.dir / "kinds-low.raw"
        self.low.write_bytes(random.Random(seed).randbytes(3 * MIB))
        self.middle = rig.dir / "kinds-middle.qcow2"
        self.img("create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-b", self.low, "-F", "raw", self.middle, str(3 * MIB))
        self.io(self.middle, *self.fill(random.Random(seed), 3 * MIB))
        self.daemon = r.Daemon(rig, name="kinds")
        self.file = rig.dir / "kinds.mnt"

    @staticmethod
    def img(*arguments, check=True):
        return r.run([r.tool("qemu-img", "qemu-utils"), *arguments], check=check, timeout_s=120)

    @staticmethod
    def io(file, *commands):
        argv = [r.tool("qemu-io", "qemu-utils"), "-f", "qcow2"]
        r.run([*argv, *(word for c in commands for word in ("-c", c)), file], timeout_s=120)

    @staticmethod
    def fill(rng, size):
        sectors = size // 512
        for n in range(16):
            first = rng.randrange(sectors)
            count = min(rng.choice((1, 7, 128, 1000)), sectors - first)
            verb = rng.choice((f"write -P {n + 1}", f"write -P {n + 1}", f"write -P {n + 1}", "write -z", "write -z -u", "discard"))
            yield f"{verb} {first * 512} {count * 512}"

    def one(self, kind):
        options, packed, below = kind
        shown = ",".join(f"{k}={v}" for k, v in options.items()) + (f" over {below}" if below else "")
        try:
            self.check(random.Random(f"{self.seed} {shown}"), options, packed, below)
        except Exception as e:
            raise r.Failed(f"{shown}: {e}") from e

    def check(self, rng, options, packed, below):
        cluster = options["cluster_size"]
        size = max(2 * MIB, 3 * cluster) + 512 * rng.randrange(2) * 3
        path, data, plain = (self.rig.dir / f"kind.{end}" for end in ("qcow2", "data", "raw"))
        for old in (path, data, plain):
            old.unlink(missing_ok=True)
        said = ",".join(f"{k}={data if v == 'DATA' else v}" for k, v in options.items())
        image = {"": (), "raw": ("-b", self.low, "-F", "raw"), "qcow2": ("-b", self.middle, "-F", "qcow2")}[below]
        self.img("create", "-q", "-f", "qcow2", "-o", said, *image, path, str(size))
        if packed:
            # Each once: QEMU packs no cluster that has its place.
            self.io(path, *(f"write -c -P {n % 255 + 1} {n * cluster} {cluster}" for n in rng.sample(range(size // cluster), 2)))
        self.io(path, *self.fill(rng, size))
        self.img("convert", "-f", "qcow2", "-O", "raw", path, plain)
        self.daemon.cli("disk", "add", f"name=k,format=qcow2,file={path}")
        self.daemon.cli("export", "add", f"type=fuse,name=k,disk=k,mountpoint={self.file},writable=on,transport=dev")
        with open(self.file, "r+b", buffering=0) as ours, open(plain, "r+b", buffering=0) as theirs:
            self.same(ours, theirs, size, "read")
            for _ in range(12):
                first = rng.randrange(size // 512) * 512
                length = min(rng.choice((512, 4096, 65536, 300032)), size - first)
                if rng.random() < 0.7:
                    value = bytes([rng.randrange(1, 256)]) * length
                    os.pwrite(ours.fileno(), value, first)
                    os.pwrite(theirs.fileno(), value, first)
                else:
                    how = rng.choice((PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE | KEEP_SIZE))
                    falloc(ours.fileno(), how, first, length)
                    # Not every file system has both.
                    os.pwrite(theirs.fileno(), bytes(length), first)
            self.same(ours, theirs, size, "read after it was written")
        self.daemon.cli("export", "remove", "k", "--force")
        self.daemon.cli("disk", "remove", "k")
        done = self.img("check", "-f", "qcow2", path, check=False)
        r.require(done.returncode == 0, f"qemu-img check: {done.stdout}{done.stderr}")
        done = self.img("compare", "-f", "qcow2", "-F", "raw", path, plain, check=False)
        r.require(done.returncode == 0, f"QEMU reads something else: {done.stdout}{done.stderr}")

    @staticmethod
    def same(ours, theirs, size, how):
        for at in range(0, size, MIB):
            n = min(MIB, size - at)
            a, b = (os.pread(f.fileno(), n, at) for f in (ours, theirs))
            if a != b:
                differs = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y) if len(a) == len(b) else min(len(a), len(b))
                raise r.Failed(f"byte {at + differs} is not as it should be, {how}")

    def end(self):
        self.daemon.cli("quit")
        r.require(self.daemon.child.wait(60) == 0, self.daemon.child.tail())


def kinds(rig, seed, all_of_them):
    """Images of kinds drawn at random, or of every kind."""
    there = list(every())
    chosen = there if all_of_them else random.Random(seed).sample(there, SAMPLE)
    run = Kinds(rig, seed)
    for n, kind in enumerate(chosen):
        run.one(kind)
        if n % 200 == 199:
            rig.say(f"{n + 1} of {len(chosen)} kinds")
    run.end()
    rig.say(f"{len(chosen)} kinds of {len(there)}")
