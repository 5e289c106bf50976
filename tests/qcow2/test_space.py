"""Tests qcow2 disks on a full file system, and discards that free space."""

import os
import random
import subprocess

import pytest
import rig as r
import snapshot_model
from qcow2_disks import MIB, Disk, checked, create, falloc, file_name, mounts, same


def test_no_space_left(rig):
    """On a full file system only the writer gets errors.

    The disk continues when there is space again.
    """
    mounts()
    folder = rig.dir / "small"
    folder.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder])
    try:
        path = create(folder / "full.qcow2", "", 64)
        disk = Disk(rig, path, name="full")
        with open(disk.file, "r+b", buffering=0) as f:
            good, failed = 0, None
            for i in range(64):
                f.seek(i * MIB)
                try:
                    f.write(b"x" * MIB)
                    good += 1
                except OSError as e:
                    failed = e
                    break
            r.require(failed is not None and good >= 4, f"{good} MiB went into 8")
            f.seek(0)
            r.require(f.read(MIB) == b"x" * MIB, "what was written is not there")
            r.run(["mount", "-o", "remount,size=128m", folder])
            f.seek(good * MIB)
            f.write(b"y" * MIB)
            os.fsync(f.fileno())
        disk.quit()
        checked(path, leaks=True)
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", f"read -P {ord('y')} {good * MIB} 1M", path])
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_failed_requests_are_logged(rig, form):
    """One line says which image, where, and what to do. It does not come again for each request."""
    mounts()
    folder = rig.dir / f"logged-{form}"
    folder.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder])
    try:
        path = folder / f"full.{form}"
        r.run([r.tool("qemu-img", "qemu-utils"), "create", "-q", "-f", form, path, 16 * MIB])
        disk = snapshot_model.Disk(rig, path, form, name=f"logged-{form}")
        errors = []
        with open(disk.file, "r+b", buffering=0) as f:
            for i in range(16):
                f.seek(i * MIB)
                try:
                    f.write(b"x" * MIB)
                except OSError as e:
                    errors.append(e)
        r.require(len(errors) > 10, f"{len(errors)} of 16 writes failed")
        r.wait_for("the log has it", lambda: "No space left" in disk.daemon.child.output())
        disk.quit()
        lines = [line for line in disk.daemon.child.output().splitlines() if " at byte " in line]
        r.require(len(lines) == 1, f"{len(lines)} lines: {lines}")
        for words in (f"{path}: a write at byte ", "free space for the file"):
            r.require(words in lines[0], f"{words!r} is not in {lines[0]}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_no_space_left_on_ext4(rig):
    """On a disk with a file system an image takes space ahead; it is full only when there is none for a cluster."""
    mounts()
    folder, disk_file = rig.dir / "last", rig.dir / "last.ext4"
    folder.mkdir()
    with open(disk_file, "wb") as f:
        f.truncate(48 * MIB)
    r.run([r.tool("mkfs.ext4", "e2fsprogs"), "-q", "-F", "-m", "0", "-O", "^has_journal", disk_file])
    done = r.run(["mount", "-o", "loop", disk_file, folder], check=False)
    if done.returncode:
        raise r.Skipped(f"no loop device: {done.stderr.strip()}")
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(b"b" * (4 * MIB))
        os.sync()
        # So large that a reserve is 4 MiB.
        path = create(folder / "full.qcow2", "", 4096)
        disk = Disk(rig, path, name="last")
        cluster = 64 << 10
        with open(disk.file, "r+b", buffering=0) as f:

            def put(n):
                f.seek(n * cluster)
                f.write(bytes([n % 255 + 1]) * cluster)

            good, failed = 0, None
            try:
                while good < 1000:
                    put(good)
                    good += 1
            except OSError as e:
                failed = e
            stat = os.statvfs(folder)
            left = stat.f_bavail * stat.f_frsize
            r.require(failed is not None, f"{good} clusters went into 48 MiB")
            # A cluster, and what of the file system's blocks is not in one piece.
            r.require(left < 4 * cluster, f"after {good} clusters {left} bytes were left and refused: {failed}")
            ballast.unlink()
            for n in range(good, good + 32):
                put(n)
            os.fsync(f.fileno())
            for n in range(good + 32):
                f.seek(n * cluster)
                r.require(f.read(cluster) == bytes([n % 255 + 1]) * cluster, f"cluster {n} is another")
        disk.quit()
        checked(path, leaks=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_discards_give_space_back(rig):
    """Discarded data takes no space, and its space is used again."""
    mounts()
    path = create(rig.dir / "back.qcow2", "", 64)
    disk = Disk(rig, path, name="back")
    with open(disk.file, "r+b", buffering=0) as f:

        def put():
            f.seek(0)
            for _ in range(32):
                f.write(os.urandom(MIB))
            os.fsync(f.fileno())

        def discard():
            # The flush after it gives the space back.
            fd = f.fileno()
            r.run([r.tool("fallocate", "util-linux"), "--punch-hole", "-o", 0, "-l", 32 * MIB, f"/proc/self/fd/{fd}"], pass_fds=[fd])
            os.fsync(fd)

        put()
        full = os.stat(path).st_blocks * 512
        discard()
        empty = os.stat(path).st_blocks * 512
        r.require(empty < full / 4, f"{full} bytes of space before, {empty} after the discard")
        for _ in range(3):
            put()
            discard()
        r.require(os.stat(path).st_size < 80 * MIB, f"the file grew to {os.stat(path).st_size}")
    disk.quit()
    checked(path)


def data_file_gives_back(rig, name, options, seed):
    """Discarded data takes no space in an external data file.

    Data that is written there again stays.
    """
    mounts()
    rng = random.Random(seed)
    path = create(rig.dir / file_name(f"data-{name}"), options, 32)
    data, plain = f"{path}.data", rig.image(f"{name}.raw", 32 * MIB)
    disk = Disk(rig, path, name=file_name(name))

    def space():
        return os.stat(data).st_blocks * 512

    with open(disk.file, "r+b", buffering=0) as ours, open(plain, "r+b", buffering=0) as theirs:
        for _ in range(3):
            written = rng.randbytes(32 * MIB)
            for f in (ours, theirs):
                f.seek(0)
                left = memoryview(written)
                while left:
                    left = left[f.write(left) :]
            os.fsync(ours.fileno())
            full = space()
            r.require(full >= 24 * MIB, f"{full} bytes of space for 32 MiB of data")
            falloc(ours, theirs, "--punch-hole", 0, 24 * MIB)
            # Some of it is written again, before and after the flush that gives the space back.
            for n in range(16):
                if n == 8:
                    os.fsync(ours.fileno())
                at, bytes_ = rng.randrange(24 * MIB // 4096) * 4096, rng.randbytes(4096)
                for f in (ours, theirs):
                    f.seek(at)
                    f.write(bytes_)
            os.fsync(ours.fileno())
            left_over = space()
            r.require(left_over < full / 2, f"{full} bytes of space before, {left_over} after the discard")
    disk.quit()
    checked(path)
    same(path, "qcow2", plain, "raw")
    if "raw" in options:
        same(data, "raw", plain, "raw")


@pytest.mark.parametrize(
    "name, options", (("data file", "data_file=DATA"), ("raw data file", "data_file=DATA,data_file_raw=on")), ids=("data file", "raw data file")
)
def test_discards_give_space_back_of_data_files(rig, seed, name, options):
    data_file_gives_back(rig, name, options, seed)
