"""Tests the state of a qcow2 disk whose daemon was killed: journal, counts, bitmaps, messages."""

import contextlib
import ctypes
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import rig as r

MIB = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Killed:
    """A daemon with one qcow2 disk as a file, killed when told."""

    def __init__(self, rig, path, name, keys=""):
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            raise r.Skipped("mounting needs root and /dev/fuse")
        self.path, self.file, self.keys = path, rig.dir / f"{name}.mnt", keys
        disk = f"name=d0,format=qcow2,file={path}{keys}"
        export = f"type=fuse,name=e0,disk=d0,mountpoint={self.file},writable=on"
        self.daemon = r.Daemon(rig, "--disk", disk, "--export", export, name=name)

    def write(self, at, data, flush=False):
        fd = os.open(self.file, os.O_RDWR)
        try:
            left, pos = memoryview(data), at
            while left:
                n = os.pwrite(fd, left, pos)
                left, pos = left[n:], pos + n
            if flush:
                os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def discarded(self, at, length, flush=True):
        """Within it a piece is discarded, with one flush after it; the end of it may flush once more."""
        fd = os.open(self.file, os.O_RDWR)
        try:
            # By the open file itself: each close is a flush.
            keep_and_punch = 3
            code = libc.fallocate(fd, keep_and_punch, at, length)
            r.require(code == 0, f"fallocate: {os.strerror(ctypes.get_errno())}")
            if flush:
                os.fsync(fd)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def read(self, at, length):
        with open(self.file, "rb", buffering=0) as f:
            f.seek(at)
            data = b""
            while len(data) < length and (more := f.read(length - len(data))):
                data += more
            return data

    def kill(self):
        self.daemon.child.kill()
        subprocess.run(["umount", "-l", str(self.file)], capture_output=True)
        # The kernel takes its io_uring, and with that its locks, apart a moment later.
        r.wait_for("the dead daemon's locks", lambda: "in use" not in image("info", self.path, check=False).stderr)

    def quit(self):
        self.daemon.cli("quit", "--force")
        code = self.daemon.child.wait()
        r.require(code == 0, f"the daemon ended with {code}: {self.daemon.child.tail()}")


def image(*arguments, check=True):
    return r.run([r.binary("vshunt"), "image", *arguments], check=check)


def journal_of(path):
    info = os.stat(path)
    return Path(f"/dev/shm/vshunt-map-{info.st_dev:x}-{info.st_ino:x}")


def create(path, options=""):
    image("create", "-q", "-f", "qcow2", *(["-o", options] if options else []), path, "64M")
    return path


def test_rolled_back_under_its_journal(rig):
    """An image that is restored in place under its journal has the data that was flushed then.

    The journal's changes are ignored.
    """
    path, copy = create(rig.dir / "rolled.qcow2"), rig.dir / "rolled.copy"
    disk = Killed(rig, path, "rolled")
    disk.write(0, b"a" * (8 * MIB), flush=True)
    # As a snapshot of the storage has it.
    shutil.copyfile(path, copy)
    # The first half goes elsewhere in the image: discarded, flushed, and written again.
    with disk.discarded(0, 4 * MIB):
        pass
    disk.write(16 * MIB, b"b" * (8 * MIB), flush=True)
    disk.write(0, b"c" * (4 * MIB))
    disk.kill()
    r.require(journal_of(path).exists(), "there is no journal")
    restore(copy, path)
    done = image("check", path, check=False)
    r.require(done.returncode == 3 and "rolled back" in done.stderr, f"check: {done.returncode} {done.stdout}{done.stderr}")
    disk = Killed(rig, path, "rolled-again")
    r.require("rolled back" in disk.daemon.child.output(), f"the daemon does not say so: {disk.daemon.child.tail()}")
    wrong = [n for n in range(8) if disk.read(n * MIB, MIB) != b"a" * MIB]
    r.require(not wrong, f"MiB {wrong} of 8 that were flushed are another")
    disk.quit()
    r.require(image("check", path, check=False).returncode == 0, "the image is not clean")


def restore(copy, path):
    """In place, as a restored backup is: the image's file stays the same one."""
    with open(copy, "rb") as old, open(path, "r+b") as f:
        f.truncate(0)
        shutil.copyfileobj(old, f)


@pytest.mark.parametrize("more", (False, True), ids=("to the last moment", "to any moment"))
@pytest.mark.parametrize("seed", range(3))
def test_rolled_back(rig, seed, more):
    """An overlay is restored to a random moment under its journal, with no flush between. `more`: clusters are written in between,
    and the journal is refused; else it is brought in. Each piece has what was flushed at that moment, or something newer."""
    rng, name = random.Random(seed), f"any-{seed}-{'more' if more else 'same'}"
    base, path, copy = rig.dir / f"{name}.base", rig.dir / f"{name}.qcow2", rig.dir / f"{name}.copy"
    base.write_bytes(b"base" * (16 * MIB))
    create(path, f"backing_file={base},backing_fmt=raw")
    disk = Killed(rig, path, name)
    piece, cluster = 4096, 64 << 10
    written = {n: [b"base" * (piece // 4)] for n in range(64 * MIB // piece)}
    fresh = rng.sample(range(64 * MIB // cluster), 64 * MIB // cluster)

    def write(clusters):
        for n in clusters:
            at = (n * cluster + rng.randrange(cluster // piece) * piece) // piece
            data = rng.randbytes(16) * (piece // 16)
            disk.write(at * piece, data)
            written[at].append(data)

    write(fresh.pop() for _ in range(rng.randrange(1, 60)))
    disk.write(0, written[0][-1], flush=True)
    may = {n: [values[-1]] for n, values in written.items()}
    write(fresh.pop() for _ in range(rng.randrange(60)))
    shutil.copyfile(path, copy)
    head = copy.read_bytes()[:4096]

    def changed():
        write([fresh.pop()])
        with open(path, "rb") as f:
            return f.read(4096) != head or not fresh

    if more:
        r.wait_for("another generation in the header", changed)
    disk.kill()
    restore(copy, path)
    done = image("check", path, check=False)
    r.require(("rolled back" in done.stderr) == more, f"check: {done.returncode} {done.stdout}{done.stderr}")
    disk = Killed(rig, path, f"{name}-again")
    for n, values in written.items():
        found = disk.read(n * piece, piece)
        right = may[n] + values[values.index(may[n][0]) :] if more else values[-1:]
        r.require(found in right, f"piece {n} has {found[:16]} of {[v[:16] for v in right]}")
    disk.quit()
    r.require(image("check", path, check=False).returncode == 0, "the image is not clean")


def map_journal(path, *options):
    """The journal of an image, as `image info` shows it, or None."""
    return json.loads(image("info", *options, "--output=json", path).stdout).get("map-journal")


@pytest.mark.parametrize("options", ("", "extended_l2=on", "data_file=DATA"), ids=("plain", "subclusters", "data file"))
def test_looked_at_after_a_kill(rig, options):
    """`check` and `convert` of a killed image see what its journal has, say so, and change nothing."""
    path, copy = create(rig.dir / "looked.qcow2", options.replace("DATA", f"{rig.dir}/looked.data")), rig.dir / "looked.raw"
    disk = Killed(rig, path, "looked")
    disk.write(0, b"a" * MIB, flush=True)
    disk.write(0, b"b" * 4096)
    disk.write(2 * MIB, b"c" * (3 * MIB))
    live = image("check", "-U", path, check=False)
    r.require("journal" not in live.stderr, f"a living daemon's image is said to be left: {live.stderr}")
    r.require(map_journal(path, "-U") == {"filename": str(journal_of(path)), "state": "in-use"}, "info of a living daemon's image")
    disk.kill()
    before = path.read_bytes()
    said = map_journal(path)
    pending = {"filename": str(journal_of(path)), "state": "pending", "changes": said.get("changes")}
    r.require(said == pending and said["changes"] > 0, f"info: {said}")
    text = image("info", path).stdout
    r.require(f"map journal: {journal_of(path)}: {said['changes']} changes" in text, f"info: {text}")
    done = image("check", path, check=False)
    r.require(done.returncode == 3, f"check ended with {done.returncode}: {done.stdout}{done.stderr}")
    r.require("in its journal" in done.stderr and "-r all" in done.stderr, f"check says {done.stderr!r}")
    done = image("check", "--output=json", path, check=False)
    found = json.loads(done.stdout)
    r.require(done.returncode == 3 and "corruptions" not in found, f"check: {found}")
    r.require(found.get("not-closed") is True and found.get("map-journal") == said, f"check: {found}")
    done = image("convert", "-O", "raw", path, copy, check=False)
    r.require(done.returncode == 0 and "from its journal" in done.stderr, f"convert: {done.returncode} {done.stderr}")
    expected = b"b" * 4096 + b"a" * (MIB - 4096) + bytes(MIB) + b"c" * (3 * MIB)
    r.require(copy.read_bytes()[: 5 * MIB] == expected, "the copy lacks what was completed")
    r.require(path.read_bytes() == before, "they changed the image")
    # Without its journal it lacks that, and both say so.
    journal, aside = journal_of(path), rig.dir / "journal"
    shutil.copyfile(journal, aside)
    journal.unlink()
    for command in (("check", path), ("convert", "-O", "raw", path, copy)):
        done = image(*command, check=False)
        r.require(done.returncode == 3 and "no journal" in done.stderr, f"{command[0]}: {done.returncode} {done.stderr}")
    said = map_journal(path)
    r.require((said["state"], said["filename"]) == ("lost", str(journal)) and "no journal" in said["why"], f"info: {said}")
    r.require(copy.read_bytes()[:MIB] == expected[:MIB] or copy.read_bytes()[:MIB] == b"a" * MIB, "what was flushed is another")
    shutil.copyfile(aside, journal)
    os.chmod(journal, 0o600)
    done = image("check", "-r", "leaks", path, check=False)
    r.require(done.returncode == 1 and "-r all" in done.stderr, f"check -r leaks: {done.returncode} {done.stderr}")
    r.require(path.read_bytes() == before, "check -r leaks changed the image")
    done = image("check", "-r", "all", path, check=False)
    r.require(done.returncode == 0 and "are applied from its journal" in done.stderr, f"check -r: {done.returncode} {done.stderr}")
    image("convert", "-O", "raw", path, copy)
    r.require(copy.read_bytes()[: 5 * MIB] == expected, "it was not brought in")
    r.require(not journal.exists(), "the journal is left behind")
    r.require(map_journal(path) is None, "info names a journal of an image that was closed")
    found = json.loads(image("check", "--output=json", path).stdout)
    r.require("not-closed" not in found and "map-journal" not in found, f"check: {found}")


@pytest.mark.parametrize("name, options, keys", (
    ("v2", "compat=0.10", ""),
    ("v2-writethrough", "compat=0.10", ",cache=writethrough"),
    ("writethrough", "", ",cache=writethrough"),
), ids=("v2", "v2-writethrough", "writethrough"))
def test_no_leaks_after_a_kill(rig, name, options, keys):
    """Clusters that a kill leaked are freed when the image is opened again.

    There may be no journal.
    """
    path = create(rig.dir / f"leaks-{name}.qcow2", options)
    disk = Killed(rig, path, f"leaks-{name}", keys)
    disk.write(0, b"a" * (4 * MIB), flush=True)
    disk.write(8 * MIB, b"b" * (4 * MIB), flush=True)
    # What one flush takes out of the map, the next one counts down.
    with disk.discarded(8 * MIB, 4 * MIB, flush="writethrough" not in keys):
        disk.kill()
    first = image("check", path, check=False)
    r.require(first.returncode == 3 and "leaked" in first.stdout, f"it has no leaks: {first.stdout}{first.stderr}")
    r.require("cleanly shut down: no" in image("info", path).stdout, "info does not say that it was not closed")
    if "compat=0.10" in options:
        # QEMU keeps what it does not know, and takes it for no fault.
        done = r.run([r.tool("qemu-img", "qemu-utils"), "check", path], check=False)
        r.require(done.returncode in (0, 3), f"qemu-img check: {done.returncode} {done.stdout}{done.stderr}")
    disk = Killed(rig, path, f"leaks-{name}-again", keys)
    said = disk.daemon.child.output()
    r.require("writethrough" not in keys or "lost" not in said, f"nothing is lost: {said}")
    # Killed at once: what it leaves is what it found.
    r.require(disk.read(0, 4 * MIB) == b"a" * (4 * MIB), "what was flushed is another")
    leaked = r.run([r.tool("qemu-img", "qemu-utils"), "check", "-U", "-f", "qcow2", path], check=False)
    r.require(leaked.returncode == 0, f"leaks stay: {leaked.stdout}{leaked.stderr}")
    disk.quit()
    r.require(image("check", path, check=False).returncode == 0, "the image is not clean")
    r.require("dirty" not in image("check", path).stdout, "it is marked as open")


def test_a_bitmap_outlives_a_kill(rig):
    """A dirty bitmap that was begun while the disk was served is there after a kill, and says that all was written."""
    path = create(rig.dir / "bitmap.qcow2")
    disk = Killed(rig, path, "bitmap")
    disk.write(0, b"a" * MIB)
    disk.daemon.cli("bitmap", "add", "d0", "b0")
    disk.daemon.cli("bitmap", "add", "d0", "memory", "--persistent", "false")
    disk.daemon.cli("backup", "start", "d0", "--to", rig.dir / "full.qcow2", "--bitmap", "b1", "--wait")
    disk.write(4 * MIB, b"b" * 4096)

    def listed():
        return {b["name"]: b["count"] for b in json.loads(disk.daemon.cli("bitmap", "list", "d0", "--json").stdout)}

    r.require(listed() == {"b0": 65536, "memory": 65536, "b1": 65536}, f"while it is served: {listed()}")
    disk.kill()
    disk = Killed(rig, path, "bitmap-again")
    r.require(listed() == {"b0": 64 * MIB, "b1": 64 * MIB}, f"after a kill: {listed()}")
    r.require(disk.read(0, MIB) == b"a" * MIB, "what was written is another")
    disk.daemon.cli("bitmap", "remove", "d0", "b0")
    disk.daemon.cli("bitmap", "clear", "d0", "b1")
    disk.write(0, b"c" * 4096)
    disk.quit()
    disk = Killed(rig, path, "bitmap-last")
    r.require(listed() == {"b1": 65536}, f"after it was closed: {listed()}")
    disk.quit()
    r.require(image("check", path, check=False).returncode == 0, "the image is not clean")


# A journal's file ends with the name of its image: 8 bytes that mark it, then when the image was
# missed first.
NAME_BYTES, NAME_MAGIC = 8192, b"VSJNNAM1"


def missed_at(journal):
    """When a sweep missed the image of a journal first, seconds since 1970; 0: never."""
    name = journal.read_bytes()[-NAME_BYTES:]
    r.require(name.startswith(NAME_MAGIC), f"{journal} does not name its image")
    return int.from_bytes(name[8:16], "little")


def missed_two_days_ago(journal):
    """Have a journal say so."""
    with open(journal, "r+b") as file:
        file.seek(-NAME_BYTES + 8, os.SEEK_END)
        file.write(int(time.time() - 2 * 24 * 3600).to_bytes(8, "little"))


def test_journals_of_images_that_are_gone(rig):
    """A daemon that starts removes the journal of an image that is gone since yesterday, and no other."""
    gone, kept = create(rig.dir / "gone.qcow2"), create(rig.dir / "kept.qcow2")
    for path in (gone, kept):
        disk = Killed(rig, path, f"sweep-{path.stem}")
        disk.write(0, b"a" * MIB)
        disk.kill()
    journals = [journal_of(path) for path in (gone, kept)]
    r.require(all(j.exists() for j in journals), f"{journals} are not there")
    live = create(rig.dir / "live.qcow2")
    disk = Killed(rig, live, "sweep-live")
    journals.append(journal_of(live))
    live.unlink()
    moved = kept.rename(rig.dir / "moved.qcow2")
    gone.unlink()
    try:
        first = r.Daemon(rig, name="sweeper-first")
        r.wait_for("the sweep", lambda: missed_at(journals[0]) > 0)
        r.require(journals[0].exists(), "the journal is removed on the first day")
        first.cli("quit")
        r.require(first.child.wait() == 0, first.child.tail())
        missed_two_days_ago(journals[0])
        other = r.Daemon(rig, name="sweeper")
        r.wait_for("the sweep", lambda: not journals[0].exists())
        r.require(journals[1].exists(), "the journal of an image that was moved is removed")
        r.require(journals[2].exists(), "the journal of a daemon that lives is removed")
        other.cli("quit")
        r.require(other.child.wait() == 0, other.child.tail())
    finally:
        disk.quit()
        for journal in journals:
            journal.unlink(missing_ok=True)
    r.require(moved.exists(), "the image is gone")
