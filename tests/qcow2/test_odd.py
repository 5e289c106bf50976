"""Tests images whose length or size is no multiple of 512, in every role and by every command, beside qemu-img."""

import contextlib
import json
import struct

import nbd_exports as e
import pytest
import rig as r
from qcow2_disks import MIB, checked, mounts

# Lengths of the raw files: less than a sector, around a page, a cluster and more, and within one.
LENGTHS = (1, 513, 4095, 65535, 65537, 3000001)
# Where a qcow2 header has the size of the disk (64 bits, big-endian).
SIZE_AT = 24
# The size of the disks over a raw file that are longer.
LONG = 4 * MIB
DIRECT = ("auto", "on", "off")


def rounded_up(length):
    return -(-length // 512) * 512


def raw(both, name, length):
    """A raw file of that length, without zeroes. Returns what the disk in it reads as."""
    data = bytes(n % 251 + 1 for n in range(length))
    (both.dir / name).write_bytes(data)
    return data + bytes(rounded_up(length) - length)


def roles(both, length):
    """Images with a raw file of that length in every role: name, format, and what the disk reads as."""
    disk = raw(both, "odd.raw", length)
    for name, below, form, *size in (
        ("one.qcow2", "odd.raw", "raw"),
        ("two.qcow2", "one.qcow2", "qcow2"),
        ("long.qcow2", "odd.raw", "raw", str(LONG)),
    ):
        both.theirs("create", "-q", "-f", "qcow2", "-b", below, "-F", form, name, *size)
    options = "data_file=data.raw,data_file_raw=on"
    both.theirs("create", "-q", "-f", "qcow2", "-o", options, "data.qcow2", str(len(disk)))
    raw(both, "data.raw", length)
    long = disk + bytes(LONG - len(disk))
    images = [(name, "qcow2", disk) for name in ("data.qcow2", "one.qcow2", "two.qcow2")]
    return [("odd.raw", "raw", disk), *images, ("long.qcow2", "qcow2", long)]


def same_result(both, of, *arguments, output="json"):
    """Both programs end with the same code and print the same."""
    results = []
    for run in (both.ours, both.theirs):
        done = run(*arguments, check=False)
        results.append((done.returncode, json.loads(done.stdout) if output == "json" and done.returncode == 0 else done.stdout))
    for _, said in results:
        for entry in said if isinstance(said, list) else ():
            entry.pop("compressed", None)  # newer ones have it
    r.require(results[0] == results[1], f"{of}: {arguments}: {results[0]} is not {results[1]}")
    return results[0]


def same_commands(both, name, form, disk, of):
    """The commands that read an image do as those of qemu-img, byte for byte."""
    copy, there = both.dir / "copy", both.dir / "there.raw"
    there.write_bytes(disk)
    for command in (
        ("convert", "-f", form, "-O", "raw", name, copy),
        ("dd", "-f", form, "-O", "raw", "bs=4096", f"if={name}", f"of={copy}"),
        ("dd", "-f", form, "-O", "raw", "bs=1000", f"if={name}", f"of={copy}"),
    ):
        for run in (both.ours, both.theirs):
            copy.unlink(missing_ok=True)
            run(*command)
            r.require(copy.read_bytes() == disk, f"{of}: {run.__name__}: {command}: other bytes")
    for more in ([], ["-c"]):
        both.ours("convert", "-f", form, "-O", "qcow2", *more, name, copy)
        both.theirs("compare", "-f", "qcow2", "-F", "raw", copy, there)
        copy.unlink()
    for target in ("raw", "qcow2"):
        same_result(both, of, "measure", "--output=json", "-f", form, "-O", target, name)
    if disk:  # QEMU shows a part of no bytes of an empty one
        same_result(both, of, "map", "--output=json", "-f", form, name)
    sizes = [json.loads(run("info", "--output=json", "-f", form, name).stdout)["virtual-size"] for run in (both.ours, both.theirs)]
    r.require(sizes == [len(disk)] * 2, f"{of}: the size is {sizes}, not {len(disk)}")
    r.require(same_result(both, of, "compare", "-f", form, "-F", "raw", name, there, output="text")[0] == 0, f"{of}: it differs")
    if len(disk) > 0:
        there.write_bytes(disk[:-1] + b"\xff")
        r.require(both.ours("compare", "-f", form, "-F", "raw", name, there, check=False).returncode == 1, f"{of}: it is equal")


@pytest.mark.parametrize("length", LENGTHS)
def test_commands_read_raw_files_of_any_length(both, length):
    for name, form, disk in roles(both, length):
        same_commands(both, name, form, disk, f"{name}, {length} bytes")


@pytest.mark.parametrize("length", LENGTHS)
def test_overlays_are_made_and_rebased_over_any_length(both, length):
    images = roles(both, length)
    for run in (both.ours, both.theirs):
        run("create", "-q", "-f", "qcow2", "-b", "odd.raw", "-F", "raw", "new.qcow2")
        size = json.loads(both.theirs("info", "--output=json", "new.qcow2").stdout)["virtual-size"]
        r.require(size == rounded_up(length), f"{run.__name__}: an overlay of {size} bytes over {length}")
    for to in (["-b", ""], ["-b", "odd.raw", "-F", "raw"], ["-b", "other.raw", "-F", "raw"]):
        for name, form, disk in images:
            if form == "raw" or name == "data.qcow2":
                continue
            (both.dir / "other.raw").write_bytes(b"\xee" * max(1, length - 300))
            (both.dir / "moved.qcow2").write_bytes((both.dir / name).read_bytes())
            both.ours("rebase", "-f", "qcow2", *to, "moved.qcow2")
            both.theirs("convert", "-O", "raw", "moved.qcow2", "moved.raw")
            r.require((both.dir / "moved.raw").read_bytes() == disk, f"{name} over {length} bytes, rebased to {to}, differs")


@pytest.mark.parametrize("size", (1, 511, 513, 1000, 65537, 131071, 3000001))
@pytest.mark.parametrize("cluster", ("512", "64k"))
def test_qcow2_disks_of_any_size_are_rounded_as_by_qemu(both, size, cluster):
    """The header says how long the disk is. Other programs write any number there."""
    up = -(-size // 65536) * 65536
    data = bytes(n % 251 + 1 for n in range(up))
    (both.dir / "full.raw").write_bytes(data)
    both.theirs("convert", "-f", "raw", "-O", "qcow2", "-o", f"cluster_size={cluster}", "full.raw", "odd.qcow2")
    with open(both.dir / "odd.qcow2", "r+b") as f:
        f.seek(SIZE_AT)
        f.write(struct.pack(">Q", size))
    disk = data[: size // 512 * 512]
    of = f"a qcow2 disk of {size} bytes"
    same_commands(both, "odd.qcow2", "qcow2", disk, of)
    both.same_check("odd.qcow2", of)
    both.same_info("odd.qcow2", of)
    both.theirs("create", "-q", "-f", "qcow2", "-b", "odd.qcow2", "-F", "qcow2", "over.qcow2", "4M")
    same_commands(both, "over.qcow2", "qcow2", disk + bytes(LONG - len(disk)), f"over {of}")
    if not disk:
        return
    daemon = e.serve(both.rig, f"format=qcow2,file={both.dir / 'odd.qcow2'}", name=f"size-{size}-{cluster}")
    both.theirs("convert", "-f", "raw", "-O", "raw", e.uri(daemon), "served.raw")
    r.require((both.dir / "served.raw").read_bytes() == disk, f"{of}: the served disk differs")
    last = len(disk) - 512
    write_sector(both, e.uri(daemon), last)
    e.ends_well(daemon)
    checked(both.dir / "odd.qcow2", leaks=True)
    both.theirs("convert", "-O", "raw", "odd.qcow2", "written.raw")
    r.require((both.dir / "written.raw").read_bytes() == disk[:last] + b"\xaa" * 512, f"{of}: the written disk differs")


def write_sector(both, uri, offset):
    """A client writes a sector."""
    done = r.run([both.qemu_io, "-f", "raw", "-c", f"write -P 0xaa {offset} 512", "-c", "flush", uri], cwd=both.dir)
    r.require("failed" not in done.stdout, done.stdout)


@contextlib.contextmanager
def long_blocks(rig):
    """A folder on a file system that takes O_DIRECT in units of 4096 bytes."""
    mounts()
    mkfs = r.tool("mkfs.ext4", "e2fsprogs")
    image, folder = rig.image("blocks.img", 256 * MIB), rig.dir / "blocks"
    folder.mkdir()
    with r.loop_device(image, "--sector-size", "4096") as device:
        r.run([mkfs, "-q", "-b", "4096", device])
        done = r.run(["mount", device, folder], check=False)
        if done.returncode:
            raise r.Skipped(f"no file system on {device}: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            r.run(["umount", "-l", folder])


def served(both, direct, of):
    """A raw file of odd length in every role, served, mounted, written, backed up and committed to."""
    mounts()
    length = 70001
    for role in range(len(roles(both, length))):
        # The last one was written to.
        name, form, disk = roles(both, length)[role]
        at = both.dir / name
        mountpoint = both.dir / "mnt"
        tag = f"{of}-{direct}-{name}".replace(".", "-")
        of_this = f"{tag}, {length} bytes"
        keys = f"format={form},file={at}" + (f",direct={direct}" if direct else "")
        more = ["--export", f"type=fuse,name=f0,disk=d0,mountpoint={mountpoint}"]
        daemon = e.serve(both.rig, keys, *more, name=tag)
        r.require(mountpoint.read_bytes() == disk, f"{of_this}: the mounted file differs")
        both.theirs("convert", "-f", "raw", "-O", "raw", e.uri(daemon), "served.raw")
        r.require((both.dir / "served.raw").read_bytes() == disk, f"{of_this}: the served disk differs")
        backup = both.dir / "backup.raw"
        daemon.cli("backup", "start", "d0", "--to", backup, "--format", "raw", "--wait")
        r.require(backup.read_bytes() == disk, f"{of_this}: the backup differs")
        backup.unlink()
        last = rounded_up(length) - 512
        write_sector(both, e.uri(daemon), last)
        disk = disk[:last] + b"\xaa" * 512 + disk[last + 512 :]
        if name == "odd.raw":
            # Over the file, and back into it.
            (both.dir / "over.qcow2").unlink(missing_ok=True)
            daemon.cli("snapshot", "d0", "--to", both.dir / "over.qcow2")
            write_sector(both, e.uri(daemon), 0)
            disk = b"\xaa" * 512 + disk[512:]
            both.theirs("convert", "-f", "raw", "-O", "raw", e.uri(daemon), "served.raw")
            r.require((both.dir / "served.raw").read_bytes() == disk, f"{of_this}: the overlay differs")
            daemon.cli("commit", "d0", "--wait")
        both.theirs("convert", "-f", "raw", "-O", "raw", e.uri(daemon), "served.raw")
        r.require((both.dir / "served.raw").read_bytes() == disk, f"{of_this}: the written disk differs")
        e.ends_well(daemon)
        both.theirs("convert", "-f", form, "-O", "raw", name, "closed.raw")
        r.require((both.dir / "closed.raw").read_bytes() == disk, f"{of_this}: the closed image differs")
        file = {"odd.raw": "odd.raw", "data.qcow2": "data.raw"}.get(name)
        if file:
            r.require((both.dir / file).stat().st_size == rounded_up(length), f"{of_this}: {file} is longer than the disk")
        else:
            r.require((both.dir / "odd.raw").stat().st_size == length, f"{of_this}: the file below was changed")
            checked(at)


@pytest.mark.parametrize("direct", DIRECT)
def test_served_with_each_direct(both, direct):
    served(both, direct, "disk")


def test_served_on_long_blocks(rig, both):
    home = both.dir
    with long_blocks(rig) as folder:
        both.dir = folder
        try:
            for direct in DIRECT:
                served(both, direct, "blocks")
            for name, form, disk in roles(both, 4095):
                same_commands(both, name, form, disk, f"{name} on long blocks")
        finally:
            both.dir = home


def test_served_in_memory(rig, both, memory):
    home, both.dir = both.dir, memory
    try:
        served(both, "auto", "memory")
    finally:
        both.dir = home
