"""Tests streams: the overlay of a disk in use gets what is below it, and then stands alone."""

import json
import os
import random
import subprocess
import time

import pytest
import rig as r
from snapshot_model import BLOCK, MIB, Disk, Writer, bench, checked, digest, flat, image, point_in_time, qemu_img, write_synced

# How often the daemon is killed.
KILLS = 6


def alone(path):
    """The image names no backing file. One read tells: `qemu-img` reads an extension of the header at a time, and fails if a daemon writes
    the header meanwhile."""
    with open(path, "rb", buffering=0) as f:
        header = f.read(16)
    r.require(header[:4] == b"QFI\xfb", f"{path} begins with {header[:4]!r}")
    return header[8:16] == bytes(8)


def backing_chain(rig, name, form="qcow2"):
    """A base with data and a middle overlay with some, of which each lacks a part. Returns the middle one and the base."""
    base, middle = image(rig, f"{name}-base", form), rig.dir / f"{name}-middle.qcow2"
    fill(base, form, range(0, 20), seed=1)
    r.run([r.binary("vshunt"), "image", "create", "-f", "qcow2", "-b", base, "-F", form, middle])
    fill(middle, "qcow2", range(12, 26, 2), seed=2)
    return middle, base


def fill(path, form, mebibytes, seed):
    rng = random.Random(seed)
    for at in mebibytes:
        pattern = rng.randrange(1, 256)
        r.run(["qemu-io", "-f", form, "-c", f"write -P {pattern} {at}M {rng.randrange(4, 1024)}k", path])


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_streamed_under_load_mounted(rig, mounts, form):
    """A chain is pulled into the overlay while it is written. Then the images below may be destroyed."""
    base = image(rig, f"stream-{form}", form)
    disk = Disk(rig, base, form, name=f"stream-{form}")
    middle, overlay = (rig.dir / f"stream-{form}-{name}.qcow2" for name in ("middle", "over"))
    writers = [Writer(disk.file, lane, 2) for lane in range(2)]
    for to in (middle, overlay):
        time.sleep(0.4)
        disk.snapshot(to)
    time.sleep(0.1)
    if form == "raw":
        said = disk.cli("stream", "d0", "--wait", timeout_s=120).stdout
        r.require("stream0" in said and "32 MiB" in said and said.count("\n") == 1, f"it said {said!r}")
    else:
        # The command of QEMU's clients. This job is dismissed automatically.
        disk.cli("qmp", "block-stream", json.dumps({"device": "d0", "job-id": "s1", "speed": 0}))
        r.wait_for("the stream is over", lambda: "s1" not in disk.cli("job", "list").stdout, 120)
    r.require(disk.shown() == ("qcow2", str(overlay)), f"listed as {disk.shown()}")
    r.require("user.vshunt.overlay" not in os.listxattr(middle), "the image below is still marked")
    for path in (middle, base):
        path.write_bytes(b"gone")
    time.sleep(0.3)
    for writer in writers:
        writer.stop()
    r.message_of(disk.cli("stream", "d0", check=False), overlay.name, "has no backing image")
    disk.quit()
    r.require(alone(overlay), "it still names a backing file")
    checked(overlay)
    point_in_time(flat(overlay, "qcow2", rig.dir / "flat.raw"), writers, [len(w.log) for w in writers])


def test_a_sparse_image_below_stays_small(rig, mounts):
    """Holes and zeroes of a raw image take no space in the overlay. A guest that fills it from the start changes nothing."""
    base, overlay = rig.dir / "sparse.raw", rig.dir / "sparse-over.qcow2"
    with open(base, "wb") as f:
        f.truncate(512 * MIB)
        f.seek(300 * MIB)
        f.write(os.urandom(MIB) + bytes(4 * MIB))
    disk = Disk(rig, base, "raw", name="sparse")
    disk.snapshot(overlay)
    job = disk.cli("stream", "d0", "--speed", "200M").stdout.strip()
    with open(disk.file, "r+b", buffering=0) as f:
        # Each write is into the start of the rest that nobody has written.
        while disk.cli("job", "list", "--json").stdout.find("concluded") < 0:
            f.write(b"y" * (64 << 10))
        wrote = f.tell()
    disk.cli("job", "wait", job, timeout_s=60)
    disk.quit()
    r.require(alone(overlay), "it still names a backing file")
    checked(overlay)
    used = overlay.stat().st_blocks * 512
    r.require(used < wrote + 24 * MIB, f"{used} bytes in use, of which {wrote} are the guest's")


def test_the_contents_stay_the_same(rig, mounts):
    """Byte by byte, with discards and zeroes in the overlay, and a backing file that is shorter."""
    middle, base = backing_chain(rig, "same")
    overlay = rig.dir / "same-over.qcow2"
    r.run([r.binary("vshunt"), "image", "create", "-f", "qcow2", "-b", middle, "-F", "qcow2", overlay, str((40 << 20) + 1536)])
    for what in ("write -P 7 1M 100k", "write -z 3M 2M", "discard 6M 1M", "write -P 9 39M 64k"):
        r.run(["qemu-io", "-f", "qcow2", "-c", what, overlay])
    before = digest(flat(overlay, "qcow2", rig.dir / "before.raw"))
    disk = Disk(rig, overlay, "qcow2", name="same")
    disk.cli("stream", "d0", "--wait", timeout_s=120)
    disk.quit()
    r.require(alone(overlay), "it still names a backing file")
    checked(overlay)
    # Only what the images below had was copied: 20 + 14 MiB at most, of which the overlay has
    # hidden some.
    r.require(overlay.stat().st_blocks * 512 < 36 << 20, f"{overlay.stat().st_blocks * 512} bytes in use")
    base.unlink()
    middle.unlink()
    r.require(digest(flat(overlay, "qcow2", rig.dir / "after.raw")) == before, "the disk has other contents")


def test_streamed_under_load_by_socket(rig):
    """Under verified load with discards and zeroes. The job's queue and the disk's queues move."""
    base = image(rig, "ssock", "qcow2", 64)
    disk = Disk(rig, base, "qcow2", name="ssock", fuse=False, socket=True)
    load = bench(rig, disk, "ssock-bench", "--range", "48M")
    turns = moved = 0
    for n in range(3):
        time.sleep(0.4)
        overlay = rig.dir / f"ssock-{n}.qcow2"
        disk.snapshot(overlay)
        job = disk.cli("stream", "d0", "--speed", "256K").stdout.strip()
        r.message_of(disk.cli("snapshot", "d0", "--to", rig.dir / "no.qcow2", check=False), "in use by job", job)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            disk.daemon.attach(f"e0:{turns % 2}", (turns // 2) % 2)
            moved += disk.cli("attach", f"{job}:0", str(turns % 2), check=False).returncode == 0
            turns += 1
        disk.cli("job", "speed", job, "max")
        disk.cli("job", "wait", job, timeout_s=120)
    r.require(moved, "the queue of the job never moved")
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    disk.quit()
    r.require(alone(overlay), "it still names a backing file")
    checked(overlay)


def test_without_space_cancelled_and_refused(rig, mounts):
    middle, _ = backing_chain(rig, "sends")
    folder = rig.dir / "small"
    folder.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder])
    try:
        disk = Disk(rig, middle, "qcow2", name="sends")
        overlay = folder / "over.qcow2"
        disk.snapshot(overlay)
        done = disk.cli("stream", "d0", "--wait", check=False, timeout_s=120)
        r.message_of(done, "No space left", f"disk d0 keeps its backing image: free space for {overlay}")
        r.run(["mount", "-o", "remount,size=128m", folder])
        job = disk.cli("stream", "d0", "--speed", "64K").stdout.strip()
        disk.cli("job", "cancel", job)
        r.require(disk.cli("job", "wait", job, check=False, timeout_s=60).returncode != 0, "it was not cancelled")
        disk.cli("snapshot", "d0", "--internal", "s1")
        r.message_of(disk.cli("stream", "d0", check=False), "internal snapshots", "--delete")
        disk.cli("snapshot", "d0", "--delete", "s1")
        refused = disk.cli("qmp", "block-stream", json.dumps({"device": "d0", "base": str(middle)}), check=False)
        r.message_of(refused, "leave 'base'")
        before = digest(disk.file)
        disk.cli("stream", "d0", "--wait", timeout_s=120)
        r.require(digest(disk.file) == before, "the disk has other contents")
        disk.quit()
        checked(overlay)
        r.require(alone(overlay), "it still names a backing file")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_killed_at_any_moment(rig, mounts, rand, request):
    """`kill -9` at random points of a stream: the next daemon has all writes. In the end a stream completes."""
    base, synced, ended = image(rig, "skill", "raw"), {}, 0
    with open(base, "r+b", buffering=0) as f:
        for block in range(0, 32 * MIB // BLOCK, 3):
            os.pwrite(f.fileno(), bytes([block % 255 + 1]) * BLOCK, block * BLOCK)
            synced[block] = block % 255 + 1

    def check(disk, of):
        with open(disk.file, "rb", buffering=0) as f:
            for block, value in synced.items():
                got = os.pread(f.fileno(), BLOCK, block * BLOCK)
                r.require(got == bytes([value]) * BLOCK, f"{of}: block {block} is {got[:2]!r}, not {value}")

    disk = Disk(rig, base, "raw", name="skill")
    overlay = rig.dir / "skill-over.qcow2"
    disk.snapshot(overlay)
    disk.quit()
    for turn in range(request.config.getoption("--kills") or KILLS):
        disk = Disk(rig, overlay, "qcow2", name=f"skill-{turn}")
        check(disk, f"turn {turn}")
        if alone(overlay):
            # Another chain: the disk so far is below.
            ended += 1
            below, overlay = overlay, rig.dir / f"skill-over-{turn}.qcow2"
            disk.snapshot(overlay)
            r.require(below.exists(), "the image below is gone")
        at_the_end = turn % 2
        disk.cli("stream", "d0", "--speed", "max" if at_the_end else rand.choice(("max", "60M")))
        write_synced(disk.file, rand, synced)
        if at_the_end:
            r.wait_for("it is over", lambda o=overlay: alone(o), every_s=0)
        else:
            time.sleep(rand.random() * rand.choice((0.02, 0.1, 0.4)))
        disk.kill()
    disk = Disk(rig, overlay, "qcow2", name="skill-last")
    check(disk, "at the end")
    if not alone(overlay):
        disk.cli("stream", "d0", "--wait", timeout_s=120)
    check(disk, "after the stream")
    disk.quit()
    base.unlink()
    r.require(alone(overlay), "it still names a backing file")
    checked(overlay)
    r.require(ended, "no stream was over when the daemon was killed")


def test_an_overlay_of_version_2(rig, mounts):
    """It has no clusters of zeroes: what reads as zeroes hides data of the images below until the stream ends, and after it."""
    base = image(rig, "two-base", "qcow2")
    fill(base, "qcow2", range(0, 20), seed=1)
    middle, overlay = rig.dir / "two-middle.qcow2", rig.dir / "two.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", middle)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -z 4M 8M", middle])
    qemu_img("create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", middle, "-F", "qcow2", overlay)
    expected = bytearray(flat(overlay, "qcow2", rig.dir / "two-before.raw").read_bytes())
    expected[:BLOCK] = b"1" * BLOCK
    disk = Disk(rig, overlay, "qcow2", name="two")
    with open(disk.file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), b"1" * BLOCK, 0)
        os.pwrite(f.fileno(), b"2" * BLOCK, 6 * MIB)
        os.fsync(f.fileno())
        os.pwrite(f.fileno(), bytes(BLOCK), 6 * MIB)
    disk.cli("stream", "d0", "--wait", timeout_s=120)
    disk.quit()
    r.require(alone(overlay), "it still names a backing file")
    for path in (middle, base):
        path.unlink()
    checked(overlay)
    info = json.loads(qemu_img("info", "--output=json", overlay).stdout)
    r.require(info["format-specific"]["data"]["compat"] == "0.10", f"it is {info}")
    r.require(flat(overlay, "qcow2", rig.dir / "two-after.raw").read_bytes() == expected, "the contents differ")


def test_streamed_after_a_commit_that_was_cancelled(rig, marks):
    """The image below has neither a snapshot nor a disk then, and is not opened for writing."""
    base = image(rig, "mixed", "qcow2")
    disk = Disk(rig, base, "qcow2", name="mixed", fuse=False, socket=True)
    overlay = rig.dir / "mixed-over.qcow2"
    disk.snapshot(overlay)
    write = [r.binary("vshunt-bench"), "blk", "--socket", disk.socket, "--rw", "write", "--bs", "64k", "--quiet", "--range", "8M", "--ios", "128"]
    r.run(write)
    job = disk.cli("commit", "d0", "--speed", "64K").stdout.strip()
    disk.cli("job", "cancel", job)
    disk.cli("stream", "d0", "--wait", timeout_s=120)
    r.require({"user.vshunt.overlay", "user.vshunt.committing"} <= set(os.listxattr(base)), f"marked as {os.listxattr(base)}")
    other = r.Daemon(rig, "--allow-path", rig.dir, name="mixed-other")
    for _ in range(2):
        r.message_of(other.cli("disk", "add", f"name=d0,format=qcow2,file={base}", check=False), base.name, "a commit to it", "remove")
    other.cli("disk", "add", f"name=d0,format=qcow2,file={base},readonly=on")
    r.require(other.child.stop() == 0, other.child.tail())
    disk.quit()
