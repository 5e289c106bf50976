"""Images, and their servers. All images are made by the peers' qemu-img, so that no server has a format of its own.

Paths are the same inside of the peers' chroot and outside. What must never happen: an image that outlives its case.
"""
import contextlib
import os
import shutil
import struct
import subprocess

from cases import Contestant, daemon, vshunt

CREATE_TIMEOUT_S = 120
CHUNK = os.urandom(4 << 20)
# Of an entry of a table: where the cluster lies.
OFFSET = 0x00ff_ffff_ffff_fe00
PEER, PEER_URING = "daemon", "daemon, io_uring"
RAW, RAW_EACH = "raw one worker", "raw per-queue"
OURS, EACH = "one worker", "per-queue"
LEGEND = (f"{PEER}: the storage daemon with aio=native, its fastest that does not end in the middle; {OURS}, {EACH}: vshunt; "
          "raw …: vshunt on a raw disk, of the same file where every cluster was written")


def tool(tools):
    """qemu-img as the beginning of an argv, or None."""
    argv = [*tools.qsd[:-1], "qemu-img"]
    try:
        done = subprocess.run([*argv, "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return argv if done.returncode == 0 else None


def qemu_img(argv):
    """Raises OSError with what it said."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=CREATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"qemu-img took more than {CREATE_TIMEOUT_S} s") from None
    if done.returncode:
        raise OSError(f"qemu-img: {done.stderr.strip()}")


@contextlib.contextmanager
def files(*paths):
    """Removes them at the end."""
    try:
        yield paths
    finally:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        settle(os.path.dirname(paths[0]))


@contextlib.contextmanager
def written(img, folder, size):
    """-> a Written of a qcow2 image with every cluster written."""
    with files(os.path.join(folder, "written.qcow2"), os.path.join(folder, "written.raw")) as (image, raw):
        with open(raw, "wb") as f:
            for _ in range(size // len(CHUNK)):
                f.write(CHUNK)
        qemu_img([*img, "convert", "-q", "-f", "raw", "-O", "qcow2", "-S", "0", raw, image])
        os.unlink(raw)
        settle(folder)
        yield Written(image)


class Written:
    """The same file for all: `raw` is the image itself, served as a raw disk, for where on a device a file lies can be
    worth a factor of three. What such a run writes over the image's metadata is put back by `qcow2`."""

    def __init__(self, path):
        self.path = path
        self._sync()
        with open(path, "rb") as f:
            self.metadata = {at: self._at(f, at, n) for at, n in self._places(f)}
        self.spoilt = False

    @staticmethod
    def _at(f, at, n):
        f.seek(at)
        return f.read(n)

    def _places(self, f):
        """The header's cluster, the L1 and refcount tables, and all that these name: (offset, bytes)."""
        head = self._at(f, 0, 104)
        cluster = 1 << struct.unpack_from(">I", head, 20)[0]
        l1_size, l1_at, counts_at, counts_clusters = struct.unpack_from(">IQQI", head, 36)
        tables = [(l1_at, 8 * l1_size), (counts_at, counts_clusters * cluster)]
        named = [e & OFFSET for at, n in tables for (e,) in struct.iter_unpack(">Q", self._at(f, at, n))]
        return [(0, cluster), *tables, *((at, cluster) for at in named if at)]

    def _sync(self):
        """On the disk, and nothing of it in the page cache: that would cost direct writes more than they take."""
        with open(self.path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def qcow2(self):
        if self.spoilt:
            with open(self.path, "r+b") as f:
                for at, data in self.metadata.items():
                    f.seek(at)
                    f.write(data)
            self.spoilt = False
        self._sync()
        return self.path

    def raw(self):
        self.spoilt = True
        self._sync()
        return self.path


def settle(folder):
    """What was removed is given back to the device now (discards), not while the next one is measured."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Thin:
    """Fresh thin images, one at a time: `qcow2` and `raw` make a new one and say where it is."""

    def __init__(self, img, folder, size):
        self.template, self.path = (os.path.join(folder, n) for n in ("template.qcow2", "thin"))
        self.size = size
        qemu_img([*img, "create", "-q", "-f", "qcow2", self.template, str(size)])

    def qcow2(self):
        self.clear()
        shutil.copyfile(self.template, self.path)
        return self.path

    def raw(self):
        self.clear()
        with open(self.path, "wb") as f:
            f.truncate(self.size)
        return self.path

    def clear(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
            settle(os.path.dirname(self.path))


def peer(tools, image, name=PEER, aio="native"):
    """`image()` is asked for the path before each start."""
    def argv(queues):
        return daemon(tools, f"driver=qcow2,file.driver=file,file.filename={image()},file.aio={aio},file.cache.direct=on,"
                             "cache.direct=on", queues)
    return Contestant(name, argv)


def ours(tools, image, name, workers, form="qcow2", cache=None):
    """`many`: as many workers as queues are something else only where there are several."""
    more = f",cache-size={cache}" if cache else ""
    def argv(queues):
        return vshunt(tools, f"file={image()},format={form},direct=on{more}", queues, workers)
    return Contestant(name, argv, many=workers == "per-queue")
