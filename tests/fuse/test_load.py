"""Tests a mounted disk under load: a file system on a loop device, QEMU's tools, fio.

Queues move while fio runs.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fuse_mount as m
import rig as r
from fuse_fio import FIO_JOBS, FIO_REGION, fio_argv

MIB = 1 << 20
DISK_SIZE = 96 * MIB

FIO_S = 10
# How often fio may run until enough was done beside it: once, but on a slow machine.
FIO_TURNS = 10


def checked_fs(path):
    done = r.run([r.tool("e2fsck", "e2fsprogs"), "-f", "-n", path], check=False)
    r.require(done.returncode == 0, f"e2fsck -fn {path.name} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr}")


class Loop:
    """A loop device over `path`, mounted on `folder`, for `with`."""

    def __init__(self, suite, path, folder, direct=False):
        self.suite = suite
        self.folder = folder
        folder.mkdir(exist_ok=True)
        losetup = r.tool("losetup", "mount")
        done = r.run([losetup, "-f"], check=False)
        if done.returncode != 0:
            raise r.Skipped(f"no loop device is free: {done.stderr.strip()}")
        done = r.run([losetup, "-f", "--show", f"--direct-io={'on' if direct else 'off'}", path])
        self.device = done.stdout.strip()
        suite.loops.append(self.device)
        seen = Path(f"/sys/block/{Path(self.device).name}/loop/dio").read_text().strip()
        if direct and seen != "1":
            self.detach()
            raise r.Failed(f"losetup --direct-io=on: the kernel keeps to buffered I/O on {path.name}")
        r.run(["mount", "-t", "ext4", self.device, folder])

    def detach(self):
        r.run(["losetup", "-d", self.device])
        self.suite.loops.remove(self.device)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        r.run(["umount", self.folder] if kind is None else ["umount", "-l", self.folder], check=kind is None)
        self.detach()


def file_system(suite, direct):
    """mkfs, fsck, write through a loop device, fsck; then the image by itself."""
    mkfs = r.tool("mkfs.ext4", "e2fsprogs")
    if direct:
        suite.differs("mixes up writes that come together", before=11)
    name = f"fs-{'direct' if direct else 'buffered'}-{suite.transport}"
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", DISK_SIZE))
    r.run([mkfs, "-q", "-F", mount.path])
    checked_fs(mount.path)
    folder = suite.rig.dir / f"{name}.dir"
    data = random.Random(21).randbytes(16 * MIB)
    with Loop(suite, mount.path, folder, direct):
        (folder / "big").write_bytes(data)
        for number in range(300):
            (folder / f"small{number}").write_bytes(data[number : number + 37 * number])
        r.run(["sync", "-f", folder])
        for number in range(0, 300, 3):
            (folder / f"small{number}").unlink()
        with open(folder / "big", "r+b") as f:
            f.seek(MIB + 5)
            f.write(b"changed")
            os.fsync(f.fileno())
        shutil.copyfile(folder / "big", folder / "copy")
        done = r.run([r.tool("fstrim", "util-linux"), folder], check=False)
        r.require(done.returncode == 0 or "not supported" in done.stderr, f"fstrim: {done.stderr}")
    checked_fs(mount.path)
    data = data[: MIB + 5] + b"changed" + data[MIB + 12 :]

    def holds():
        for big in ("big", "copy"):
            m.same(folder / big, data, "the file system")
        for number in (1, 100, 299):
            m.same(folder / f"small{number}", data[number : number + 37 * number], "the file system")
        r.require(not (folder / "small3").exists(), "a removed file is there")

    with Loop(suite, mount.path, folder, direct):
        holds()
    mount.stop()
    checked_fs(mount.image)
    with Loop(suite, mount.image, folder):
        holds()
    mount.image.unlink()


def test_qemu_img_compare_and_convert_qemu_io(suite):
    """compare, and convert in both directions."""
    tool = r.tool("qemu-img", "qemu-utils")
    name = f"img-{suite.transport}"
    image = suite.image(f"{name}.img", 24 * MIB)
    content = m.fill(image, 24 * MIB, ((0, 3 * MIB), (10 * MIB, 65536)), 31)
    mount = m.serving(suite, name, image=image)
    # The image is locked by who serves it.
    r.run([tool, "compare", "-U", "-f", "raw", "-F", "raw", mount.path, image])
    plain, qcow2 = suite.rig.dir / "plain.img", suite.rig.dir / "copy.qcow2"
    r.run([tool, "convert", "-f", "raw", "-O", "raw", mount.path, plain])
    m.same(plain, content, "converted from the mount")
    r.run([tool, "convert", "-f", "raw", "-O", "qcow2", mount.path, qcow2])
    r.run([tool, "compare", "-f", "raw", "-F", "qcow2", mount.path, qcow2])
    other = suite.image("other.img", 24 * MIB)
    content = m.fill(other, 24 * MIB, ((MIB + 512, 5 * MIB), (20 * MIB, 4 * MIB)), 32)
    for cache in ("writeback", "none") if not suite.peer or suite.peer_version >= 11 else ("writeback",):
        r.run([tool, "convert", "-n", "-t", cache, "-f", "raw", "-O", "raw", other, mount.path])
        m.same(mount.path, content, f"converted to the mount, cache={cache}")
        r.run([tool, "compare", "-T", cache, "-f", "raw", "-F", "raw", mount.path, other])
    qemu_io = r.tool("qemu-io", "qemu-utils")
    commands = ("write -P 7 1000 5000", "aio_write -P 8 64k 128k", "aio_flush", "read -P 7 1000 5000", "read -P 8 64k 128k", "flush")
    done = r.run([qemu_io, "-f", "raw", "-t", "none", *(x for c in commands for x in ("-c", c)), mount.path])
    r.require("fail" not in done.stdout, f"qemu-io: {done.stdout}")
    mount.stop()


def test_qemu_img_convert_and_create_growable(suite):
    """convert without -n: it makes a new target, with the size that it needs."""
    tool = r.tool("qemu-img", "qemu-utils")
    suite.differs("overlooks O_TRUNC", before=11)
    name = f"img-grow-{suite.transport}"
    other = suite.image("source.img", 3 * MIB)
    content = m.fill(other, 3 * MIB, ((512, MIB),), 33)
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", 9 * MIB), growable=True)
    r.run([tool, "convert", "-f", "raw", "-O", "raw", other, mount.path])
    m.same(mount.path, content, "converted to the mount")
    r.run([tool, "convert", "-f", "raw", "-O", "qcow2", other, mount.path])
    r.run([tool, "check", "-f", "qcow2", mount.path])
    r.run([tool, "compare", "-f", "raw", "-F", "qcow2", other, mount.path])
    r.run([tool, "resize", "-f", "qcow2", mount.path, "6M"])
    r.run([tool, "create", "-q", "-f", "raw", mount.path, "5M"])
    r.require(mount.path.stat().st_size == 5 * MIB, "qemu-img create made another size")
    mount.stop()
    r.require(mount.image.stat().st_size == 5 * MIB, "the image has another size")


def test_fsx(suite):
    """The file system exerciser finds no error.

    It runs if the machine has it; Debian has no package.
    """
    tool = shutil.which("fsx")
    if not tool:
        raise r.Skipped("fsx is missing (no Debian package has it; xfstests does)")
    name = f"fsx-{suite.transport}"
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", MIB), growable=True)
    os.truncate(mount.path, 0)
    # Sizes are multiples of 512: so are fsx's.
    r.run([tool, "-N", "2000", "-S", "1", "-w", "512", "-r", "512", "-t", "512", "-l", "262144", mount.path])
    mount.stop()


class Moves:
    """Queues moved between workers, workers made and freed, while fio writes and verifies."""

    def __init__(self, suite, mount, seed):
        self.mount = mount
        self.chance = random.Random(seed)
        self.at = {q["index"]: q["worker"] for q in mount.queues()}
        self.workers = sorted(set(self.at.values()) | {0})
        self.moved = self.refused = self.freed = 0
        self.why = ""

    def turn(self):
        queue = self.chance.choice(list(self.at))
        if self.chance.random() < 0.1 and len(self.workers) < 8:
            self.workers.append(self.mount.daemon.worker_new())
        others = [w for w in self.workers if w != self.at[queue]]
        if not others:
            self.workers.append(self.mount.daemon.worker_new())
            return
        to = self.chance.choice(others)
        # As r.Daemon.attach: requests in flight may take longer than `attach` waits by default.
        done = self.mount.cli("attach", "--timeout", f"{r.WAIT_S - 10:g}s", f"f0:{queue}", str(to), check=False)
        if done.returncode == 0:
            self.at[queue] = to
            self.moved += 1
        elif "has not run for a second" in done.stderr:
            # A machine that is busy elsewhere. The queue stays where it is, and its load continues.
            r.message_of(done, "stays on worker", code=(1,))
        else:
            self.why = done.stderr.strip()
            r.message_of(done, "f0", code=(1,))
            r.require(len(self.why.split()) >= 6, f"a move was refused without a reason: {self.why!r}")
            self.refused += 1
        if self.chance.random() < 0.1:
            for empty in [w for w in self.workers if w != 0 and w not in self.at.values()][:1]:
                self.mount.cli("worker", "free", str(empty))
                self.workers.remove(empty)
                self.freed += 1


@contextlib.contextmanager
def beside_fio(suite, mount, turn, name, seconds):
    """fio for so long, with other data each turn, which must find no error; yields what says whether it has most of its time still before it."""

    def requests():
        return sum(q["requests"] for q in mount.queues())

    before = 0 if suite.peer else requests()
    load = r.Child(suite.rig, f"{name}.fio{turn}", fio_argv(mount.path, seconds, seed=7 + turn))
    if not suite.peer:
        r.wait_for("fio's first requests", lambda: requests() > before or not load.running())
    end = time.monotonic() + seconds * 0.85
    yield lambda: time.monotonic() < end and load.running()
    code = load.wait(seconds + r.WAIT_S)
    errors = re.findall(r"^.*(?:verify|err=\s*[1-9]).*$", load.output(), re.MULTILINE)
    r.require(code == 0 and not errors, f"fio ended with {code}: " + "\n".join(errors[:4] or [load.tail()]))


def fio(suite, memory, seconds):
    suite.differs("mixes up writes that come together", before=11)
    name = f"fio-{'memory' if memory else 'disk'}-{suite.transport}"
    image = suite.image(f"{name}.img", FIO_JOBS * FIO_REGION, memory)
    mount = m.serving(suite, name, image=image, queues=4)
    moves = None if suite.peer else Moves(suite, mount, 41)
    least = 20
    for turn in range(FIO_TURNS):
        with beside_fio(suite, mount, turn, name, seconds) as going_on:
            while moves and going_on():
                moves.turn()
                time.sleep(0.03)
        if not moves or moves.moved + moves.refused > least:
            break
    if moves:
        seen = {q["index"]: q["worker"] for q in mount.queues()}
        r.require(seen == moves.at, f"status says that queues are at {seen}, not {moves.at}")
        suite.rig.say(f"{suite.transport}: {moves.moved} moves, {moves.refused} refused, {moves.freed} workers freed {moves.why}")
        r.require(moves.moved + moves.refused > least, f"only {moves.moved + moves.refused} moves")
        r.require(moves.refused == 0, f"{moves.refused} moves were refused: {moves.why}")
    if moves:
        broken = [q for q in mount.queues() if q["errors"]]
        r.require(not broken, f"requests failed: {broken}")
    mount.stop()


# One read, 128k from the place of that number, when told to.
READER = """import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
sys.stdin.readline()
sys.exit(len(os.pread(fd, 131072, int(sys.argv[2]) * 131072)) != 131072)"""


def test_interrupt_callers_killed_while_the_backend_has_their_requests(suite):
    """Callers killed while their requests are with the backend: the kernel sends INTERRUPT for each. The requests go on, and
    their slots serve others afterwards."""
    suite.ours()
    name = f"interrupt-{suite.transport}"
    image = suite.image(f"{name}.img", 8 * MIB)
    content = m.fill(image, 8 * MIB, ((0, 8 * MIB),), 61)
    # A backend that can be held up: the image is itself a file that another daemon serves, and that
    # one is stopped.
    below = r.Daemon(
        suite.rig, "--disk", f"name=b,file={image}", "--export",
        f"type=fuse,name=g0,disk=b,mountpoint={suite.rig.dir / name}.below,transport=dev,passthrough=off", name=f"{name}-below",
    )  # fmt: skip
    mount = m.serving(suite, name, disk=f"file={suite.rig.dir / name}.below,readonly=on", writable=False)
    callers = [
        subprocess.Popen(
            [sys.executable, "-B", "-c", READER, mount.path, str(n)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for n in range(24)
    ]
    for caller in callers:
        r.require(caller.stdout.readline() == b"open\n", "a caller cannot open the file")
    below.child.suspend()
    try:
        for caller in callers:
            caller.stdin.write(b"go\n")
            caller.stdin.flush()
        r.wait_for("requests are under way", lambda: sum(q["in-flight"] for q in mount.queues()) >= 24)
        for caller in callers[::2]:
            caller.kill()
        for caller in callers[1::4]:
            caller.send_signal(signal.SIGINT)
        time.sleep(0.3)
        seen = sum(q["in-flight"] for q in mount.queues())
        r.require(seen >= 24, f"{24 - seen} requests were given up while the backend had their buffers")
    finally:
        below.child.resume()
    codes = [caller.wait(r.WAIT_S) for caller in callers]
    r.require(all(code == -signal.SIGKILL for code in codes[::2]), f"killed callers ended with {codes[::2]}")
    r.require(all(code == 0 for code in codes[3::4]), f"callers that nobody killed ended with {codes[3::4]}")
    r.wait_for("nothing is under way", lambda: sum(q["in-flight"] for q in mount.queues()) == 0)
    m.same(mount.path, content, "the mount")
    mount.stop()
    r.require(below.child.stop() == 0, below.child.tail())


def test_fio_verifies_while_the_disk_is_resized(suite):
    """The disk grows and shrinks beyond fio's regions, whose I/O continues and stays right."""
    suite.ours()
    name = f"fio-resize-{suite.transport}"
    least = FIO_JOBS * FIO_REGION
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", least), queues=4)
    turns, size = 0, least
    for again in range(FIO_TURNS):
        with m.Opened(mount.path) as fd, beside_fio(suite, mount, again, name, FIO_S // 2) as going_on:
            while going_on():
                size = least if size > least else 2 * least + turns * 512
                mount.cli("resize", "--shrink", "d0", str(size))
                r.require(os.fstat(fd).st_size == size == mount.image.stat().st_size, f"turn {turns}: not {size} bytes")
                if size > least:
                    r.require(os.pread(fd, MIB, size - MIB) == bytes(MIB), f"turn {turns}: what was cut off came back")
                    r.require(os.pwrite(fd, b"c" * MIB, size - MIB) == MIB, "a short write")
                turns += 1
        if turns > 4:
            break
    r.require(turns > 4, f"only {turns} resizes")
    mount.stop()
    r.require(mount.image.stat().st_size == size, "the image has another size")


def test_many_callers_some_killed(suite):
    """Many small callers run at once, and each reads its own bytes.

    A caller that is killed disturbs no other.
    """
    name = f"many-{suite.transport}"
    suite.differs("mixes up writes that come together", before=11)
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", 16 * MIB), queues=4)
    text = "for n in $(seq 20); do dd if={0} of={1} bs=4k count=64 seek=$(({2} * 64)) conv=notrunc oflag=direct 2>&1 || exit 1; done"
    source = [suite.rig.dir / f"many.{n}" for n in range(4)]
    for number, path in enumerate(source):
        path.write_bytes(random.Random(number).randbytes(64 * 4096))
    writers = [
        r.Child(suite.rig, f"{name}.{n}", ["sh", "-c", text.format(source[n], mount.path, n)]) for n in range(4)
    ]
    victims = 0
    while any(w.running() for w in writers) and victims < 30:
        victim = subprocess.Popen(["dd", f"if={mount.path}", "of=/dev/null", "bs=1M", "iflag=direct"], stderr=subprocess.DEVNULL)
        time.sleep(0.01)
        victim.kill()
        victim.wait(r.WAIT_S)
        victims += 1
    for writer in writers:
        code = writer.wait()
        r.require(code == 0, f"{writer.name} ended with {code}: {writer.tail(3)}")
    with m.Opened(mount.path, os.O_RDONLY) as fd:
        for number, path in enumerate(source):
            r.require(os.pread(fd, 64 * 4096, number * 64 * 4096) == path.read_bytes(), f"writer {number}'s bytes are others")
    mount.stop()


def test_ext4_on_a_loop_device_buffered(suite):
    file_system(suite, False)


def test_ext4_on_a_loop_device_direct_io_on(suite):
    file_system(suite, True)


def test_fio_verifies_while_queues_move_image_on_a_disk(suite):
    fio(suite, False, FIO_S)


def test_fio_verifies_while_queues_move_image_in_memory(suite):
    fio(suite, True, FIO_S // 2)
