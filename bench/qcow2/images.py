"""Images, and who serves them. All images are made by the peers' qemu-img: nobody serves what only he understands.

Paths are the same inside of the peers' chroot and outside. What must never happen: an image that outlives its case.
"""
import contextlib
import os
import shutil
import subprocess

from cases import Contestant, daemon, vshunt

CREATE_TIMEOUT_S = 120
CHUNK = os.urandom(4 << 20)
PEER, PEER_URING = "daemon", "daemon, io_uring"
RAW, RAW_EACH = "raw one worker", "raw per-queue"
OURS, EACH = "one worker", "per-queue"
LEGEND = (f"{PEER}: the storage daemon with aio=native, its fastest that does not end in the middle; {OURS}, {EACH}: vshunt; "
          "raw …: vshunt on a raw file beside it")


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


@contextlib.contextmanager
def written(img, folder, size):
    """-> (a qcow2 image with every cluster written, a raw file of the same bytes)."""
    with files(os.path.join(folder, "written.qcow2"), os.path.join(folder, "written.raw")) as (image, raw):
        with open(raw, "wb") as f:
            for _ in range(size // len(CHUNK)):
                f.write(CHUNK)
        qemu_img([*img, "convert", "-q", "-f", "raw", "-O", "qcow2", "-S", "0", raw, image])
        for path in (raw, image):
            with open(path, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield image, raw


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


def peer(tools, image, name=PEER, aio="native", cache=None):
    """`image()` is asked for the path before each start."""
    more = f",l2-cache-size={cache}" if cache else ""
    def argv(queues):
        return daemon(tools, f"driver=qcow2,file.driver=file,file.filename={image()},file.aio={aio},file.cache.direct=on,"
                             f"cache.direct=on{more}", queues)
    return Contestant(name, argv)


def ours(tools, image, name, workers, form="qcow2", cache=None):
    """`many`: as many workers as queues are something else only where there are several."""
    more = f",cache-size={cache}" if cache else ""
    def argv(queues):
        return vshunt(tools, f"file={image()},format={form},direct=on{more}", queues, workers)
    return Contestant(name, argv, many=workers == "per-queue")
