"""Follows the remedies in messages about chains of images: each works, and none loses data."""

import contextlib
import ctypes
import os
import re
import struct

import mirror_model as m
import pytest
import rig as r
from snapshot_model import MIB, Disk, digest, flat, qemu_img

VSHUNT = r.binary("vshunt")
# The most backing images of an image (crates/block/src/qcow2/open.rs, CHAIN_MAX).
CHAIN_MAX = 256


def vshunt(*arguments, check=True, **more):
    return r.run([VSHUNT, *arguments], check=check, **more)


def filled(path, form, byte, mib=4):
    """A new image full of one byte."""
    qemu_img("create", "-q", "-f", form, path, mib * MIB)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", form, "-c", f"write -q -P {byte} 0 {mib}M", path])
    return path


def over(path, below, form):
    """A new overlay."""
    qemu_img("create", "-q", "-f", "qcow2", "-b", below, "-F", form, path)
    return path


def said_by_all(rig, path, *words):
    """What serving, converting and comparing an image say: each has these words, and nothing that makes a new file."""
    commands = (
        ("serve", "--disk", f"name=d0,format=qcow2,file={path}", "--control", rig.dir / "no.sock"),
        ("image", "convert", "-O", "raw", path, rig.dir / "no.raw"),
        ("image", "compare", path, path),
    )
    all_said = []
    for argv in commands:
        done = vshunt(*argv, check=False)
        r.message_of(done, *words, code=(1, 2, 3))
        r.require("truncate" not in done.stderr and "image create" not in done.stderr, done.stderr)
        all_said.append(done.stderr)
    return all_said


def follow(said, **instead):
    """Runs the command that a message names, with these words in place of its capital ones."""
    command = re.search(r"(?:vshunt image (?:rebase|amend|convert)|qemu-img convert) .*?(?=['\n]|$)", said)
    r.require(command, f"no command in {said}")
    words = command[0].split()
    words = [re.sub("|".join(instead) or "$^", lambda m: str(instead[m[0]]), word) for word in words]
    program = {"vshunt": VSHUNT, "qemu-img": r.tool("qemu-img", "qemu-utils")}[words[0]]
    return r.run([program, *words[1:]])


@pytest.mark.parametrize("form", ("raw", "qcow2"))
@pytest.mark.parametrize("depth", (1, 2))
def test_a_backing_image_that_was_moved(rig, form, depth):
    """No message says how to make an empty one in its place; the one that is said names it at its new place."""
    dir = rig.dir / f"moved-{form}-{depth}"
    dir.mkdir()
    (dir / "elsewhere").mkdir()
    path, below = filled(dir / f"base.{form}", form, 7), form
    base = path
    for n in range(depth):
        path, below = over(dir / f"over{n}.qcow2", path, below), "qcow2"
    before = digest(flat(path, "qcow2", dir / "before.raw"))
    moved = base.rename(dir / "elsewhere" / base.name)
    said = said_by_all(rig, path, f"there is no image {base}", "put it back", dir / "over0.qcow2")
    for command in (("info", "--backing-chain", path), ("map", path), ("measure", "-O", "qcow2", path), ("resize", dir / "over0.qcow2", "8M")):
        shown = vshunt("image", *command, check=False)
        r.message_of(shown, base, "put it back", f"-F {form} {dir}/over0.qcow2")
    follow(said[0], FILE=moved)
    vshunt("image", "convert", "-q", "-O", "raw", path, dir / "after.raw")
    r.require(digest(dir / "after.raw") == before, "the disk is another one")


def test_a_missing_backing_image_whose_format_is_not_named(rig):
    """The remedy names none, either."""
    base = filled(rig.dir / "unnamed.raw", "raw", 7)
    path = over(rig.dir / "unnamed.qcow2", base, "raw")
    header = path.read_bytes()
    # The header extension with the format (qcow2 specification, "Header extensions") becomes one
    # that nobody knows.
    at = header.index(b"\xe2\x79\x2a\xca")
    path.write_bytes(header[:at] + b"\x12\x34\x56\x78" + header[at + 4 :])
    moved = base.rename(rig.dir / "unnamed-moved.raw")
    said = vshunt("image", "info", "--backing-chain", path, check=False)
    r.message_of(said, base, "put it back", f"-F FORMAT {path}")
    follow(said.stderr, FILE=moved, FORMAT="raw")
    r.require(flat(path, "qcow2", rig.dir / "unnamed-after.raw").read_bytes() == moved.read_bytes(), "the disk is another one")


def test_a_data_file_that_was_moved(rig):
    path, data = rig.dir / "data.qcow2", rig.dir / "guest.raw"
    qemu_img("create", "-q", "-f", "qcow2", "-o", f"data_file={data}", path, 4 * MIB)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -q -P 9 0 4M", path])
    before = digest(flat(path, "qcow2", rig.dir / "data-before.raw"))
    moved = data.rename(rig.dir / "guest-moved.raw")
    said = vshunt("serve", "--disk", f"name=d0,format=qcow2,file={path}", "--control", rig.dir / "no.sock", check=False)
    r.message_of(said, f"there is no image {data}", "put it back")
    r.require("truncate" not in said.stderr, said.stderr)
    for command in (("map", path), ("measure", "-O", "qcow2", path), ("resize", path, "8M"), ("compare", path, path)):
        r.message_of(vshunt("image", *command, check=False), data, "put it back", "data_file=FILE", path, code=(1, 2))
    follow(said.stderr, FILE=moved)
    vshunt("image", "convert", "-q", "-O", "raw", path, rig.dir / "data-after.raw")
    r.require(digest(rig.dir / "data-after.raw") == before, "the disk is another one")


def test_an_image_of_its_own_that_is_missing(rig):
    """Only here a new one is offered, of the right format."""
    for name, keys, command in (("new.img", "format=raw", "truncate"), ("new.qcow2", "format=qcow2", "vshunt")):
        path = rig.dir / name
        daemon = r.Daemon(rig, name=f"missing-{name}")
        said = daemon.cli("disk", "add", f"name=d0,{keys},file={path}", check=False)
        r.message_of(said, f"there is no image {path}", "empty one of 10 GiB")
        words = re.search(rf"{command} .*(?= would make)", said.stderr)[0].split()
        r.run([VSHUNT if words[0] == "vshunt" else words[0], *words[1:]])
        daemon.cli("disk", "add", f"name=d0,{keys},file={path}")
        daemon.child.stop()


def test_a_device_that_is_missing(rig):
    """No file is to be made among the devices."""
    said = vshunt("serve", "/dev/vshunt-none", "--control", rig.dir / "no.sock", check=False)
    r.message_of(said, "there is no device /dev/vshunt-none")
    r.require("truncate" not in said.stderr, said.stderr)


def test_an_image_whose_disk_is_empty(rig):
    """A guest gets none."""
    for form in ("raw", "qcow2"):
        path = rig.dir / f"empty.{form}"
        qemu_img("create", "-q", "-f", form, path, 0)
        daemon = r.Daemon(rig, "--disk", f"name=d0,format={form},file={path}", name=f"empty-{form}")
        export = f"type=vhost-user-blk,name=e0,disk=d0,socket={rig.dir}/empty-{form}.sock"
        said = daemon.cli("export", "add", export, check=False)
        r.message_of(said, "is empty", "vshunt resize d0 10G")
        daemon.cli("resize", "d0", "10G")
        daemon.cli("export", "add", export)
        r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_images_that_are_below_themselves(rig):
    """Of one, two and three images: named as such, and put right by the command that is named."""
    dir = rig.dir / "loops"
    dir.mkdir()
    base = filled(dir / "base.raw", "raw", 3)
    for count in (1, 2, 3):
        paths = [over(dir / f"loop{count}-{n}.qcow2", base, "raw") for n in range(count)]
        for n, path in enumerate(paths):
            qemu_img("rebase", "-u", "-b", paths[(n + 1) % count], "-F", "qcow2", path)
        said = said_by_all(rig, paths[0], paths[0].name, "which is below itself")
        shown = vshunt("image", "info", "--backing-chain", paths[0], check=False)
        r.message_of(shown, "which is below itself")
        follow(said[0], FILE=base, FORMAT="raw")
        vshunt("image", "convert", "-q", "-O", "raw", paths[0], dir / "out.raw")
        r.require(digest(dir / "out.raw") == digest(base), "the disk is another one")


@pytest.fixture(scope="module")
def chain(rig):
    """Images of which each stands on the one before: the last one has as many below it as are read."""
    dir = rig.dir / "chain"
    dir.mkdir()
    paths = [filled(dir / "0.qcow2", "qcow2", 5, 1)]
    # An image without data differs from the next one in the name of the one below only.
    for n in range(1, CHAIN_MAX + 2):
        qemu_img("create", "-q", "-u", "-f", "qcow2", "-b", paths[-1], "-F", "qcow2", dir / f"{n}.qcow2", MIB)
        paths.append(dir / f"{n}.qcow2")
    return paths


def test_as_many_backing_images_as_are_read(rig, chain):
    """They are read, and none is put above them; the remedy of each command works."""
    last, dir = chain[CHAIN_MAX], chain[0].parent
    vshunt("image", "convert", "-q", "-O", "raw", last, dir / "all.raw")
    r.require(digest(dir / "all.raw") == digest(flat(chain[0], "qcow2", dir / "first.raw")), "the disk is another one")
    new, lone = dir / "new.qcow2", filled(dir / "lone.qcow2", "qcow2", 6, 1)
    r.message_of(vshunt("image", "rebase", "-b", last, "-F", "qcow2", chain[0], check=False), "stands on", last.name)
    refused = [
        vshunt("image", *argv, check=False)
        for argv in (("create", "-f", "qcow2", "-b", last, "-F", "qcow2", new), ("rebase", "-b", last, "-F", "qcow2", lone))
    ]
    r.require(not new.exists(), "an image is left behind that nothing reads")
    for said in refused:
        r.message_of(said, f"{CHAIN_MAX} backing images", last.name)
        (dir / "copy.qcow2").unlink(missing_ok=True)
        follow(said.stderr, COPY=dir / "copy.qcow2")
    vshunt("image", "create", "-q", "-f", "qcow2", "-b", dir / "copy.qcow2", "-F", "qcow2", new)
    vshunt("image", "rebase", "-b", dir / "copy.qcow2", "-F", "qcow2", lone)


def test_more_backing_images_than_are_read(rig, chain):
    """Made by another program: the remedy makes one image of them."""
    dir = chain[0].parent
    wanted = digest(flat(chain[0], "qcow2", dir / "first.raw"))
    for said in said_by_all(rig, chain[-1], f"more than {CHAIN_MAX} backing images"):
        (dir / "one.qcow2").unlink(missing_ok=True)
        follow(said, COPY=dir / "one.qcow2")
        r.require(digest(flat(dir / "one.qcow2", "qcow2", dir / "one.raw")) == wanted, "the disk is another one")
        r.require("backing-filename" not in vshunt("image", "info", "--output=json", dir / "one.qcow2").stdout, "it has one below it")


def test_a_snapshot_of_a_disk_with_as_many_as_are_read(rig, mounts, chain):
    """Refused with the command that makes room, which the guest does not notice."""
    disk = Disk(rig, chain[CHAIN_MAX], "qcow2", name="full")
    said = disk.snapshot(rig.dir / "too-much.qcow2", check=False)
    r.message_of(said, f"{CHAIN_MAX} backing images", "vshunt commit d0", "vshunt stream d0")
    r.require(not (rig.dir / "too-much.qcow2").exists(), "an overlay is left behind")
    disk.cli("commit", "d0", "--wait", timeout_s=120)
    disk.snapshot(rig.dir / "fits.qcow2")
    r.message_of(disk.snapshot(rig.dir / "too-much.qcow2", check=False), f"{CHAIN_MAX} backing images")
    disk.cli("stream", "d0", "--wait", timeout_s=120)
    disk.snapshot(rig.dir / "fits-again.qcow2")
    with open(disk.file, "rb") as f:
        r.require(f.read() == b"\x05" * MIB, "the disk is another one")
    disk.quit()


@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_a_commit_of_an_overlay_that_has_grown(rig, mounts, form):
    """The image below grows, and what the guest wrote behind its old end is there."""
    base = filled(rig.dir / f"grown-base.{form}", form, 1)
    disk = Disk(rig, base, form, name=f"grown-{form}")
    disk.snapshot(rig.dir / f"grown-{form}-over.qcow2")
    disk.cli("resize", "d0", "9M")
    with open(disk.file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), b"\x02" * MIB, 7 * MIB)
        os.fsync(f.fileno())
    disk.cli("commit", "d0", "--wait", timeout_s=120)
    r.require(disk.shown() == (form, str(base)), f"listed as {disk.shown()}")
    disk.quit()
    wanted = b"\x01" * 4 * MIB + bytes(3 * MIB) + b"\x02" * MIB + bytes(MIB)
    r.require(flat(base, form, rig.dir / "grown.raw").read_bytes() == wanted, "the image below has other contents")


def test_a_commit_to_a_device_that_is_too_small(rig, mounts):
    """Refused before anything is copied."""
    file = filled(rig.dir / "small-device.raw", "raw", 1)
    with r.loop_device(file) as device:
        disk = Disk(rig, device, "raw", name="small")
        disk.snapshot(rig.dir / "small-over.qcow2")
        disk.cli("resize", "d0", "9M")
        with open(disk.file, "r+b", buffering=0) as f:
            os.pwrite(f.fileno(), b"\x02" * MIB, 0)
        r.message_of(disk.cli("commit", "d0", check=False), device, "9437184", "cannot become as long", "vshunt mirror d0")
        r.require(not disk.daemon.status()["jobs"], "there is a job")
        with open(device, "rb") as f:
            r.require(f.read(MIB) == b"\x01" * MIB, "something was copied")
        wanted = b"\x02" * MIB + b"\x01" * 3 * MIB + bytes(5 * MIB)
        first = rig.dir / "small-first.qcow2"
        job = m.start(disk, "--to", first)
        m.ready(disk, job)
        m.complete(disk, job, "--no-switch")
        r.require(flat(first, "qcow2", rig.dir / "small-first.raw").read_bytes() == wanted, "the copy is another")
        # The device becomes longer, and is not zero there.
        with open(file, "ab") as f:
            f.write(b"\x77" * 5 * MIB)
        r.run([r.tool("losetup", "mount"), "--set-capacity", device])
        r.message_of(disk.cli("commit", "d0", check=False), "behind the old end", "vshunt mirror d0")
        copy = rig.dir / "small-copy.qcow2"
        disk.cli("mirror", "d0", "--to", copy, "--switch", "--wait", timeout_s=60)
        with open(disk.file, "rb") as f:
            r.require(f.read() == wanted, "the disk is another one")
        disk.quit()


def test_a_commit_to_an_image_that_hides_a_longer_one(rig, mounts):
    """To make it longer would move tables that the overlay reads: refused, and what is named instead works."""
    bottom, base, path = (rig.dir / f"hides-{n}.qcow2" for n in ("bottom", "base", "over"))
    filled(bottom, "qcow2", 0xAA, 16)
    qemu_img("create", "-q", "-f", "qcow2", "-b", bottom, "-F", "qcow2", base, 4 * MIB)
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -q -P 0xb2 2M 64k", base])
    over(path, base, "qcow2")
    disk = Disk(rig, path, "qcow2", name="hides")
    disk.cli("resize", "d0", "8M")
    with open(disk.file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), b"\x02" * 65536, 0)
        os.fsync(f.fileno())
    r.message_of(disk.cli("commit", "d0", check=False), base, "end the daemon and use 'qemu-img commit'")
    wanted = b"\x02" * 65536 + b"\xaa" * (2 * MIB - 65536) + b"\xb2" * 65536 + b"\xaa" * (2 * MIB - 65536) + bytes(4 * MIB)
    with open(disk.file, "rb") as f:
        r.require(f.read() == wanted, "the disk is another one")
    disk.quit()
    qemu_img("commit", "-q", path)
    r.require(flat(base, "qcow2", rig.dir / "hides.raw").read_bytes() == wanted, "the image below has other contents")


def test_a_commit_to_a_longer_image(rig, mounts):
    """Refused; what the message says leaves the longer disk, with what the guest wrote."""
    base = filled(rig.dir / "longer-base.qcow2", "qcow2", 1)
    path = rig.dir / "longer-over.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", path, 2 * MIB)
    disk = Disk(rig, path, "qcow2", name="longer")
    with open(disk.file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), b"\x02" * MIB, 0)
        os.fsync(f.fileno())
    r.message_of(disk.cli("commit", "d0", check=False), "end the daemon and use 'qemu-img commit'")
    disk.quit()
    qemu_img("commit", "-q", path)
    wanted = b"\x02" * MIB + b"\x01" * 3 * MIB
    r.require(flat(base, "qcow2", rig.dir / "longer.raw").read_bytes() == wanted, "the image below has other contents")


def without_io_uring():
    """Makes io_uring_setup fail with EPERM from now on, as the seccomp profiles of containers do (seccomp(2))."""
    ld, jeq, ret = 0x20, 0x15, 0x06
    # The number of the call is at 0 of struct seccomp_data; io_uring_setup is 425 on every
    # architecture.
    steps = ((ld, 0, 0, 0), (jeq, 0, 1, 425), (ret, 0, 0, 0x00050001), (ret, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_seccomp, pr_set_no_new_privs, filter_mode = 22, 38, 2
    if libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) or libc.prctl(pr_set_seccomp, filter_mode, program):
        raise OSError(ctypes.get_errno(), "prctl")


def test_io_uring_that_a_filter_forbids(rig):
    """The message names the filter, not a sysctl that permits it already."""
    argv = ("serve", "--disk", "name=d0,format=null,size=1M", "--control", rig.dir / "no-ring.sock")
    said = vshunt(*argv, check=False, preexec_fn=without_io_uring)
    r.message_of(said, "seccomp")
    with contextlib.suppress(FileNotFoundError), open("/proc/sys/kernel/io_uring_disabled") as f:
        if f.read().strip() == "0":
            r.require("sysctl" not in said.stderr, said.stderr)
