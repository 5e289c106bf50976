"""Tests chains of overlays, internal snapshots and resizes under load."""

import json
import random
import shutil
import time

import pytest
import rig as r
from snapshot_model import MIB, Disk, Writer, bench, checked, digest, flat, image, pauses, point_in_time, qemu_img


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_a_chain_of_three_under_load_mounted(rig, mounts, written, form):
    """Chains of three under load through a mount: each layer is one point in time, in order."""
    base = image(rig, f"load-{form}", form)
    disk = Disk(rig, base, form, name=f"load-{form}")
    writers = [Writer(disk.file, lane, 2) for lane in range(2)]
    chain, least = [base], []
    for n in range(3):
        written(writers)
        least.append([w.done() for w in writers])
        to = rig.dir / f"load-{form}-{n}.qcow2"
        disk.snapshot(to)
        chain.append(to)
        r.require(disk.shown() == ("qcow2", str(to)), f"listed as {disk.shown()}")
    written(writers)
    for writer in writers:
        writer.stop()
    disk.quit()
    held = pauses(disk)
    r.require(len(held) == 3, f"{len(held)} pauses in the log, not 3")
    rig.say(f"held for {max(held):.1f} ms at most")
    before = [0, 0]
    for layer, (path, at_least) in enumerate(zip(chain, [*least, [len(w.log) for w in writers]])):
        kind = form if layer == 0 else "qcow2"
        if kind == "qcow2":
            checked(path)
        now = point_in_time(flat(path, kind, rig.dir / "flat.raw"), writers, at_least)
        r.require(all(a <= b for a, b in zip(before, now)), f"layer {layer} is of {now}, the one below of {before}")
        before = now
    # It can be opened again.
    again = Disk(rig, chain[-1], "qcow2", name=f"again-{form}")
    shutil.copy(again.file, rig.dir / "flat.raw")
    point_in_time(rig.dir / "flat.raw", writers, [len(w.log) for w in writers])
    again.quit()


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_a_chain_of_three_under_load_by_socket(rig, mounts, served, form):
    """Under verified load over a socket, with a reader's mount beside it, while queues move. The
    images below do not change."""
    base = image(rig, f"sock-{form}", form, 64)
    disk = Disk(rig, base, form, name=f"sock-{form}", socket=True)
    load = bench(rig, disk, f"bench-{form}")
    below, path, turns = [], base, 0
    for n in range(3):
        for _ in range(8):
            disk.daemon.attach(f"e0:{turns % 2}", (turns // 2) % 2)
            turns += 1
        served(disk)
        to = rig.dir / f"sock-{form}-{n}.qcow2"
        disk.snapshot(to)
        below.append((path, digest(path)))
        path = to
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    for lower, was in below:
        r.require(digest(lower) == was, f"{lower.name} was written after it was below")
    disk.quit()
    for lower in [p for p, _ in below if p.suffix == ".qcow2"] + [path]:
        checked(lower)


def test_internal_snapshots_under_load(rig, mounts, written):
    """Internal snapshots under load are points in time; one is applied, one deleted."""
    path = image(rig, "internal", "qcow2")
    disk = Disk(rig, path, "qcow2", name="internal")
    writers, least = [Writer(disk.file, lane, 2) for lane in range(2)], []
    for n in range(3):
        written(writers)
        least.append([w.done() for w in writers])
        disk.cli("snapshot", "d0", "--internal", f"s{n}")
    r.message_of(disk.cli("snapshot", "d0", "--internal", "s1", check=False), "already", "s1")
    disk.cli("snapshot", "d0", "--delete", "s1")
    r.message_of(disk.cli("snapshot", "d0", "--delete", "s1", check=False), "no snapshot", "s1")
    written(writers)
    for writer in writers:
        writer.stop()
    disk.quit()
    rig.say(f"held for {max(pauses(disk)):.1f} ms at most")
    checked(path)
    for n in (0, 2):
        raw = rig.dir / "flat.raw"
        qemu_img("convert", "-f", "qcow2", "-O", "raw", "-l", f"snapshot.name=s{n}", path, raw)
        point_in_time(raw, writers, least[n])
    point_in_time(flat(path, "qcow2", rig.dir / "flat.raw"), writers, [len(w.log) for w in writers])
    qemu_img("snapshot", "-a", "s0", path)
    checked(path)
    first = point_in_time(flat(path, "qcow2", rig.dir / "flat.raw"), writers, least[0])
    r.require(all(a < len(w.log) for a, w in zip(first, writers)), "the applied snapshot has the latest writes")
    disk = Disk(rig, path, "qcow2", name="internal-again")
    gone = json.loads(disk.cli("qmp", "blockdev-snapshot-delete-internal-sync", '{"device": "d0", "name": "s0"}').stdout)
    r.require(gone["name"] == "s0" and gone["date-sec"] > 1_700_000_000, f"it says {gone}")
    disk.quit()
    checked(path)


@pytest.mark.parametrize("backed", (False, True), ids=("alone", "with an image below"))
def test_resized_under_load(rig, backed):
    """Grows and shrinks under load. Guests keep the data in the range that both sizes have."""
    name = "resize-backed" if backed else "resize"
    if backed:
        base = image(rig, "resize-base", "raw", 48)
        base.write_bytes(random.Random(1).randbytes(48 * MIB))
        path = rig.dir / f"{name}.qcow2"
        qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", path, 64 * MIB)
    else:
        path = image(rig, name, "qcow2", 64)
    disk = Disk(rig, path, "qcow2", name=name, fuse=False, socket=True)
    load = bench(rig, disk, f"bench-{name}", "--range", "48M")
    turns, end = 0, time.monotonic() + 3
    while load.running() and (time.monotonic() < end or turns < 2):
        for size in (128, 96, 1024, 64):
            grows = size in (128, 1024)
            disk.cli("resize", "d0", f"{size}M", *([] if grows else ["--shrink"]))
        turns += 1
        time.sleep(0.1)
    r.require(load.interrupt() == 0, f"the load failed: {load.tail()}")
    rig.say(f"{turns * 4} resizes, held for {max(pauses(disk)):.1f} ms at most")
    disk.cli("resize", "d0", "80M")
    r.require("80M" in disk.cli("status").stdout, "status does not show the size")
    r.message_of(disk.cli("resize", "d0", "1000", check=False), "512")
    disk.quit()
    checked(path)
    size = json.loads(qemu_img("info", "--output=json", path).stdout)["virtual-size"]
    r.require(size == 80 * MIB, f"the image's disk has {size} bytes")
    if backed:
        # The range that was added reads as zeroes.
        raw = flat(path, "qcow2", rig.dir / "flat.raw").read_bytes()
        r.require(not any(raw[64 * MIB :]), "what the disk grew by is not zeroes")
