"""The servers: QEMU's storage daemon with 1, 2 and 4 iothreads, vshunt as `vshunt mount` makes a mount and with each transport
and layout of workers, and the floors: of /dev/fuse with 1, 2 and 4 threads, of io_uring with threads pinned and free.

Everything that names an option of either program stands here. `disk` is a Disk, `place` where to mount.
"""
import os
from collections.abc import Callable
from dataclasses import dataclass

DAEMONS = {1: "daemon 1", 2: "daemon 2", 4: "daemon 4"}
FLOORS = {1: "floor 1", 2: "floor 2", 4: "floor 4"}
FLOORS_RING = {"pinned": "floor pinned", "free": "floor free"}
DEFAULT, DEV_1, DEV_2, DEV_4, PINNED, FREE = "default", "dev 1", "dev 2", "dev 4", "ring pinned", "ring free"
PASSTHROUGH, HOST = "passthrough", "host fio"
# What stands behind `type=fuse,...` of each; None: a mount without keys. The io_uring transport has
# a queue for each CPU that there could be.
LAYOUTS = {
    DEFAULT: None,
    DEV_1: "transport=dev,queues=1,workers=per-queue",
    DEV_2: "transport=dev,queues=2,workers=per-queue",
    DEV_4: "transport=dev,queues=4,workers=per-queue",
    PINNED: "transport=io_uring,queues={cpus},workers=per-cpu",
    FREE: "transport=io_uring,queues={cpus},workers=per-queue",
    PASSTHROUGH: "transport=dev,queues=1,growable=on,passthrough=auto",
}
RINGS = (PINNED, FREE)
# The floor that a layout is held against: the same transport, as many threads as it has queues,
# placed alike.
FLOOR_OF = {DEV_1: FLOORS[1], DEV_2: FLOORS[2], DEV_4: FLOORS[4], PINNED: FLOORS_RING["pinned"], FREE: FLOORS_RING["free"]}
# For whom the kernel has to allow FUSE over io_uring.
OVER_URING = (*RINGS, *FLOORS_RING.values())
LEGEND = ("daemon N: storage daemon with N iothreads; default: vshunt without keys, as `vshunt mount` makes it; dev N: vshunt on "
          "/dev/fuse, N queues, a worker each; ring: vshunt over io_uring, a queue a CPU, workers pinned to theirs or free")
FLOOR_LEGEND = ("floors only answer: floor N, bench/fuse/floor.c, N threads on /dev/fuse; floor pinned and free, "
                "bench/fuse/floor_uring.c, over io_uring, placed as ring pinned and free")


@dataclass(frozen=True)
class Disk:
    """What is served: a file (its path, and how the storage daemon shall do I/O on it), or nothing but a size."""
    size: int
    path: str | None = None
    aio: str = "native"


@dataclass(frozen=True)
class Contestant:
    """argv(disk, place) is a server's; None: fio runs on the file itself."""
    name: str
    argv: Callable | None


def _daemon(tools, iothreads):
    def argv(disk, place):
        if disk.path:
            node = (f"driver=raw,cache.direct=on,file.driver=file,file.filename={disk.path},file.aio={disk.aio},"
                    "file.cache.direct=on")
        else:
            node = f"driver=null-co,size={disk.size},read-zeroes=off"
        threads = [a for n in range(iothreads) for a in ("--object", f"iothread,id=t{n}")]
        queues = ",".join(f"iothread.{n}=t{n}" for n in range(iothreads))
        return [*tools.qsd, *threads, "--blockdev", f"node-name=d,{node}", "--export",
                f"fuse,id=e,node-name=d,mountpoint={place.inside},writable=on,{queues}"]
    return argv


def _vshunt(tools, layout):
    def argv(disk, place):
        what = f"file={disk.path}" if disk.path else f"format=null,size={disk.size}"
        export = f"type=fuse,name=e,disk=d,mountpoint={place.outside},writable=on"
        if layout:
            export += "," + layout.replace("{cpus}", str(cpus_possible()))
            if "passthrough" not in layout:
                export += ",passthrough=off"
        return [tools.vshunt, "serve", "--disk", f"name=d,{what}", "--export", export, "--control", place.control]
    return argv


def _floor(program, *how):
    def argv(disk, place):
        return [program, place.outside, str(disk.size), *how]
    return argv


def cpus_possible():
    with open("/sys/devices/system/cpu/possible") as f:
        return int(f.read().strip().rpartition("-")[2].rpartition(",")[2]) + 1


class Field:
    """The servers that can take part here. `stand_in` (--aa): the storage daemon runs in our place, too."""

    def __init__(self, tools, stand_in, rings):
        self.tools, self.stand_in, self.rings = tools, stand_in, rings

    def daemons(self, *iothreads):
        return [Contestant(DAEMONS[n], _daemon(self.tools, n)) for n in iothreads] if self.tools.qsd else []

    def ours(self, *names):
        return [Contestant(n, self._argv(n)) for n in names if n not in RINGS or self.rings or self.stand_in]

    def floors(self, program):
        """`program`: floor.c compiled, or None."""
        return [Contestant(name, _floor(program, str(n))) for n, name in FLOORS.items()] if program else []

    def floors_ring(self, program):
        """`program`: floor_uring.c compiled, or None."""
        cpus = str(cpus_possible())
        return [Contestant(name, _floor(program, cpus, how)) for how, name in FLOORS_RING.items()] if program else []

    def host(self):
        return [Contestant(HOST, None)]

    def _argv(self, name):
        if not self.stand_in:
            return _vshunt(self.tools, LAYOUTS[name])
        threads = {DEV_2: 2, DEV_4: 4}.get(name, min(4, os.cpu_count()) if name in RINGS else 1)
        return _daemon(self.tools, threads)
