"""Tests commands while a disk is mounted: status, resize, two exports of a disk, passthrough."""

import contextlib
import json
import os
import random
import struct
import time

import fuse_model
import fuse_mount as m
import peer as p
import pytest
import rig as r

MIB = 1 << 20


def told(export, key):
    """The value of a key of the mount, as `status` shows it."""
    return export["mount"][key]


def passthrough(export):
    """Whether passthrough is on, and the reason if it is not."""
    return told(export, "passthrough"), export["mount"].get("passthrough-reason", "")


def test_status(suite):
    """The fields that scripts look at, and counters that grow with use."""
    suite.ours()
    name = f"status-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", 4 * MIB), passthrough="auto")
    export = mount.export()
    r.require(export["type"] == "fuse" and export["disk"] == "d0", f"type or disk: {export}")
    r.require(export["mountpoint"] == str(mount.path), f"mountpoint: {export}")
    r.require(told(export, "transport") == suite.transport, f"transport: {export}")
    on, reason = passthrough(export)
    r.require(not on and len(reason.split()) >= 2, f"passthrough of an export that does not grow: on={on}, reason {reason!r}")
    disk = next(d for d in mount.daemon.status()["disks"] if d["name"] == "d0")
    r.require("f0" in disk["exports"], f"the disk does not name its export: {disk}")
    counts = ("requests", "read-bytes", "write-bytes")

    def sums():
        return {key: sum(q[key] for q in mount.queues()) for key in counts}

    before = sums()
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, bytes(MIB), 0)
        os.pread(fd, 2 * MIB, 0)
    after = sums()
    grown = {key: after[key] - before[key] for key in counts}
    r.require(grown["write-bytes"] == MIB, f"1 MiB was written, the queues count {grown}")
    r.require(2 * MIB <= grown["read-bytes"] <= 3 * MIB, f"2 MiB were read, the queues count {grown}")
    r.require(grown["requests"] >= 2, f"the queues count {grown}")
    queues = mount.queues()
    r.require(queues == export["queue-list"] or len(queues) == len(export["queue-list"]), "the two lists of queues differ")
    r.require([q["index"] for q in queues] == list(range(len(queues))), f"indices: {queues}")
    if suite.transport == "dev":
        r.require(len(queues) == 2 and len({q["worker"] for q in queues}) == 2, f"queues=2,workers=per-queue made {queues}")
    workers = {w["id"]: w for w in mount.daemon.status()["workers"]}
    for q in queues:
        r.require(f"f0:{q['index']}" in workers[q["worker"]]["queues"], f"worker {q['worker']} does not name its queue")
    text = mount.cli("status").stdout
    for word in ("fuse", "f0", "d0", str(mount.path)):
        r.require(word in text, f"status does not show {word!r}: {text}")
    answer = json.loads(mount.cli("qmp", "query-block-exports").stdout)
    r.require(any(e.get("id") == "f0" and e.get("type") == "fuse" for e in answer), f"query-block-exports: {answer}")
    mount.stop()


def test_resize_while_mounted(suite):
    """The new size shows at once, also in files that were open."""
    suite.ours()
    name = f"resize-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", 4 * MIB))
    data = random.Random(51).randbytes(4 * MIB)
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, data, 0)
        for size in (8 * MIB, 64 * MIB + 512):
            old = os.fstat(fd).st_size
            mount.cli("resize", "d0", str(size))
            for seen in (mount.path.stat().st_size, os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END)):
                r.require(seen == size, f"resized to {size}, stat says {seen}")
            r.require(os.pread(fd, MIB, old) == bytes(min(MIB, size - old)), "the new part is not zeroes")
            r.require(os.pwrite(fd, b"new" * 100, size - 300) == 300, "a write in the new part is short")
            r.require(os.pread(fd, 1000, size - 300) == b"new" * 100, "the new part reads back otherwise")
        done = mount.cli("resize", "d0", str(MIB), check=False)
        r.require(done.returncode != 0 and "shrink" in done.stderr, f"shrinking without --shrink: {done.stderr}")
        mount.cli("resize", "--shrink", "d0", str(MIB))
        r.require(mount.path.stat().st_size == MIB == os.fstat(fd).st_size, "the smaller size does not show")
        r.require(os.pread(fd, 2 * MIB, 0) == data[:MIB], "the rest is another")
        r.require(os.pread(fd, 4096, MIB) == b"", "bytes beyond the new end")
        m.refused("a write beyond the new end", ["ENOSPC"], lambda: os.pwrite(fd, b"x", 2 * MIB))
    mount.stop()
    r.require(mount.image.stat().st_size == MIB, "the image has another size")


def sector(socket, number):
    """512 bytes, read over vhost-user."""
    with p.Peer(socket) as c:
        r.require(c.handshake() == p.ACCEPTED and c.memory() == p.ACCEPTED, "vhost-user: the handshake was refused")
        kick, _ = c.ring()
        c.ram[p.DATA : p.DATA + 16] = struct.pack("<IIQ", 0, 0, number)
        c.describe(0, p.GUEST + p.DATA, 16, 1, 1)
        c.describe(1, p.GUEST + p.DATA + 4096, 512, 3, 2)
        c.describe(2, p.GUEST + p.DATA + 8192, 1, 2, 0)
        c.ram[p.DATA + 8192] = 0xFF
        c.offer(0, kick)
        r.wait_for("the vhost-user request is done", lambda: c.used() == 1)
        r.require(c.ram[p.DATA + 8192] == 0, f"the vhost-user request ended with status {c.ram[p.DATA + 8192]}")
        return bytes(c.ram[p.DATA + 4096 : p.DATA + 4096 + 512])


@pytest.mark.transports("any")
def test_one_disk_vhost_user_blk_and_fuse_both_writable_refused(suite):
    """A disk has one writer, whatever the exports' kinds and their order."""
    suite.ours()
    socket, path = suite.rig.dir / "two.sock", suite.rig.dir / "two.mnt"
    vhost = f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket}"
    fuse = f"type=fuse,name=f1,disk=d0,mountpoint={path},writable=on"
    mount = m.Mount(suite, "two-a", image=suite.image("two-a.img", MIB))
    for export, left in ((vhost, socket), (fuse, path)):
        r.message_of(mount.cli("export", "add", export, check=False), "d0")
        r.require(not left.exists() and not m.mounted(left), f"{left} was left behind")
    r.require([e["name"] for e in mount.daemon.status()["exports"]] == ["f0"], "the refused export is listed")
    mount.path.read_bytes()
    mount.stop()
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,file={suite.image('two-b.img', MIB)}", "--export", vhost, name="two-b")
    r.message_of(daemon.cli("export", "add", fuse, check=False), "d0")
    r.require(not path.exists() and not m.mounted(path), f"{path} was left behind")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


@pytest.mark.transports("any")
def test_one_read_only_disk_vhost_user_blk_and_two_mounts(suite):
    """A read-only disk over vhost-user-blk and two mounts: the same bytes everywhere."""
    suite.ours()
    image = suite.image("readers.img", MIB)
    content = m.fill(image, MIB, ((0, MIB),), 52)
    socket, path = suite.rig.dir / "readers.sock", suite.rig.dir / "readers-2.mnt"
    more = ["--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues=1"]
    mount = m.Mount(suite, "readers", disk=f"file={image},readonly=on", writable=False, more=more)
    mount.cli("export", "add", f"type=fuse,name=f1,disk=d0,mountpoint={path}")
    for number in (0, 1, 1000, MIB // 512 - 1):
        r.require(sector(socket, number) == content[number * 512 : number * 512 + 512], f"vhost-user: sector {number} is another")
    m.same(mount.path, content, "the first mount")
    m.same(path, content, "the second mount")
    mount.cli("export", "remove", "f1")
    r.require(not path.exists(), f"{path} was left behind")
    m.same(mount.path, content, "the first mount, after the second went")
    mount.stop()


@pytest.mark.transports("any")
def test_an_image_that_another_daemon_serves_which_is_held_up(suite):
    """The image is a file of another daemon, which is stopped.

    A process that asks for attributes waits, and the worker does not.
    """
    suite.ours()
    below = m.Mount(suite, "waits-below", image=suite.image("waits-below.img", MIB))
    path = suite.rig.dir / "waits-other.mnt"
    more = ["--disk", f"name=d1,file={suite.image('waits-other.img', MIB)}", "--export", f"type=fuse,name=f1,disk=d1,mountpoint={path}"]
    mount = m.Mount(suite, "waits", disk=f"file={below.path}", workers="default", more=more)
    size = ["stat", "-c", "%s", mount.path]
    r.require(r.run(size).stdout.strip() == str(MIB), "its size is another")
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, b"above", 1000)
        os.utime(mount.path, (1000, 2000))
        r.require(os.fstat(fd).st_mtime == 2000, "the time was not set")
    below.child.suspend()
    try:
        askers = [r.Child(suite.rig, f"waits-{n}", argv) for n, argv in enumerate((size, ["stat", "-c", "%w", mount.path]))]
        time.sleep(0.3)
        for turn in range(5):
            r.run(["dd", f"if={path}", "of=/dev/null", "bs=4k", "count=1", f"skip={turn}", "iflag=direct"])
        ended = [a.tail() for a in askers if not a.running()]
        r.require(not ended, f"they were answered, though nobody can have done so: {ended}")
    finally:
        below.child.resume()
    r.require([a.wait() for a in askers] == [0, 0], "they did not get their answers")
    mount.stop()
    below.stop()


@pytest.mark.transports("any")
def test_vhost_user_blk_writes_a_read_only_mount_sees_it(suite):
    """A guest's disk, over vhost-user-blk, and the same read-only as a file: what one writes the other sees."""
    suite.ours()
    image = suite.image("guest.img", MIB)
    socket, path = suite.rig.dir / "guest.sock", suite.rig.dir / "guest.mnt"
    daemon = r.Daemon(
        suite.rig, "--disk", f"name=d0,file={image}", "--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues=1",
        "--export", f"type=fuse,name=f0,disk=d0,mountpoint={path}", name="guest",
    )  # fmt: skip
    m.refused("O_RDWR", ["EROFS", "EACCES", "EPERM"], lambda: os.close(os.open(path, os.O_RDWR)))
    r.run([r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "write", "--size", "1M", "--bs", "64k", "--verify", "--quiet"])
    content = image.read_bytes()
    r.require(content.count(0) < MIB // 2, "the load wrote nothing")
    m.same(path, content, "the mount")
    for number in (0, 77, MIB // 512 - 1):
        r.require(sector(socket, number) == content[number * 512 : number * 512 + 512], f"vhost-user: sector {number} is another")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


@pytest.mark.transports("any")
def test_passthrough_in_the_kernel_and_right(suite):
    """Passthrough: reads and writes go past the daemon, and are right."""
    suite.ours()
    image = suite.image("pass.img", 4 * MIB)
    content = m.fill(image, 4 * MIB, ((0, 4 * MIB),), 53)
    mount = m.Mount(suite, "pass", image=image, growable=True, passthrough="auto")
    on, reason = passthrough(mount.export())
    r.require(on, f"it is off: {reason}")

    def bytes_seen():
        return sum(q["read-bytes"] + q["write-bytes"] for q in mount.queues())

    before = bytes_seen()
    data = random.Random(54).randbytes(MIB)
    with m.Opened(mount.path) as fd:
        r.require(os.pread(fd, 4 * MIB, 0) == content, "it reads something else")
        for offset in (0, MIB + 100):
            os.pwrite(fd, data, offset)
            content[offset : offset + MIB] = data
        os.fsync(fd)
        r.require(os.pwrite(fd, data, 6 * MIB) == MIB, "a short write beyond the end")
        content += bytes(2 * MIB) + data
        r.require(os.fstat(fd).st_size == 7 * MIB == mount.path.stat().st_size, f"the size is {os.fstat(fd).st_size}")
        r.require(os.pread(fd, 100, 7 * MIB) == b"", "bytes beyond the end")
        os.ftruncate(fd, 5 * MIB)
        del content[5 * MIB :]
        m.fallocate(fd, m.PUNCH, 4096, 8192)
        content[4096:12288] = bytes(8192)
        # What only the kernel knows to be there: an end that it has moved by itself.
        os.pwrite(fd, data, 7 * MIB)
        content += bytes(2 * MIB) + data
        m.fallocate(fd, 0, 0, 6 * MIB)
        m.fallocate(fd, m.PUNCH, 7 * MIB, 8192)
        content[7 * MIB : 7 * MIB + 8192] = bytes(8192)
    r.run(["dd", "if=/dev/zero", f"of={mount.path}", "bs=4096", "seek=16", "count=4", "oflag=direct", "conv=notrunc"])
    content[65536:81920] = bytes(16384)
    m.same(mount.path, content, "the mount")
    m.same(image, content, "the image")
    r.require(bytes_seen() == before, f"{bytes_seen() - before} bytes went through the daemon")
    m.script(m.MMAP, mount.path)
    mount.stop()
    m.same(image, content, "the image afterwards")


@pytest.mark.transports("any")
def test_passthrough_resized_after_the_kernel_made_it_longer(suite):
    """The kernel has made the image longer by itself; then a command gives it a size."""
    suite.ours()
    image = suite.image("pass-resize.img", MIB)
    mount = m.Mount(suite, "pass-resize", image=image, growable=True, passthrough="auto")
    r.require(passthrough(mount.export())[0], "passthrough is off")

    def sizes():
        return os.fstat(fd).st_size, image.stat().st_size, mount.daemon.status()["disks"][0]["size-bytes"]

    with m.Opened(mount.path) as fd:
        os.pwrite(fd, b"k" * MIB, 7 * MIB)
        done = mount.cli("resize", "d0", str(4 * MIB), check=False)
        r.require(done.returncode != 0 and "shrink" in done.stderr, f"a shorter end than the kernel's: {done.stderr!r}")
        r.require(sizes() == (8 * MIB,) * 3, f"a refused resize: {sizes()}")
        mount.cli("resize", "d0", str(9 * MIB))
        r.require(sizes() == (9 * MIB,) * 3, f"resized to 9 MiB: {sizes()}")
        r.require(os.pread(fd, 2 * MIB, 7 * MIB) == b"k" * MIB + bytes(MIB), "it reads something else")
        mount.cli("resize", "--shrink", "d0", str(2 * MIB))
        r.require(sizes() == (2 * MIB,) * 3, f"shrunk to 2 MiB: {sizes()}")
        os.pwrite(fd, b"l", 3 * MIB)
        r.require(os.pread(fd, 2 * MIB, 2 * MIB) == bytes(MIB) + b"l", "what was cut off came back")
    mount.stop()


@pytest.mark.transports("any")
def test_passthrough_an_odd_end(suite):
    """An odd end that the kernel wrote by itself: the image can be served again."""
    suite.ours()
    image = suite.image("odd-end.img", MIB)
    mount = m.Mount(suite, "odd-end", image=image, growable=True, passthrough="auto")
    with m.Opened(mount.path) as fd:
        r.require(os.pwrite(fd, b"o" * 100, MIB + 50) == 100, "a short write")
        r.require(os.pread(fd, 100, MIB + 50) == b"o" * 100, "it reads back otherwise")
    mount.stop()
    again = m.Mount(suite, "odd-end-2", image=image, growable=True, passthrough="auto")
    with m.Opened(again.path, os.O_RDONLY) as fd:
        r.require(os.pread(fd, 150, MIB) == bytes(50) + b"o" * 100, "the next daemon reads something else")
    again.stop()


@pytest.mark.transports("any")
def test_passthrough_nobody_else_writes_while_the_file_is_open_still(suite):
    """After the unmount, a process that has the file open uses it through the kernel.

    Until it closes the file, no other program may write the image.
    """
    suite.ours()
    image = suite.image("pass-after.img", 2 * MIB)
    mount = m.Mount(suite, "pass-after", image=image, growable=True, passthrough="auto")
    r.require(passthrough(mount.export())[0], "passthrough is off")
    keys = mount.arguments[3]
    reader = f"type=vhost-user-blk,name=v0,disk=d0,socket={suite.rig.dir}/pass-after.sock,readonly=on"
    fd = os.open(mount.path, os.O_RDWR)
    os.pwrite(fd, b"before", MIB)  # the first write asks the daemon for attributes
    mount.cli("export", "remove", "f0", "--force")
    r.require(os.pwrite(fd, b"after", MIB) == 5, "a short write")
    with m.Opened(image, os.O_RDONLY) as other:
        r.require(os.pread(other, 5, MIB) == b"after", "the kernel does not go on")
    for command in (
        ("export", "add", keys),
        ("export", "add", reader.replace(",readonly=on", "")),
        ("snapshot", "d0", "--to", str(suite.rig.dir / "pass-after.qcow2")),
        ("backup", "start", "d0", "--to", str(suite.rig.dir / "pass-after.backup")),
        ("bitmap", "add", "d0", "b0"),
    ):
        r.message_of(mount.cli(*command, check=False), "d0", "former mount", code=(1,))
    mount.cli("export", "add", reader)
    mount.cli("export", "remove", "v0")
    # Nor has another daemon the image.
    mount.cli("disk", "remove", "d0")
    said = mount.cli("disk", "add", f"name=d1,file={image}", check=False)
    r.message_of(said, "pass-after.img", "in use", code=(1,))
    with contextlib.suppress(OSError):  # an error of FLUSH, if the kernel still sends one
        os.close(fd)
    disk = mount.arguments[1]
    mount.cli("disk", "add", disk)
    mount.cli("export", "add", keys)
    with m.Opened(mount.path) as fd:
        r.require(os.pread(fd, 5, MIB) == b"after", "what was written is gone")
        os.pwrite(fd, b"again", MIB)
    mount.stop()


@pytest.mark.transports("any")
def test_passthrough_random_operations(suite):
    """Random operations; sizes that are no multiples of 512 are the kernel's own, and left out."""
    suite.ours()
    mount = m.Mount(suite, "pass-walk", image=suite.image("pass-walk.img", fuse_model.WALK_SIZE), growable=True, passthrough="auto")
    r.require(passthrough(mount.export())[0], "passthrough is off")
    walk = fuse_model.Walk(mount.path, suite.memory / "model", fuse_model.WALK_SIZE, True, 5, False, in_kernel=True)
    walk.run(fuse_model.STEPS)
    mount.stop()


@pytest.mark.transports("any")
def test_passthrough_off_with_a_reason(suite):
    """If passthrough is not possible, status gives the reason, and everything else works."""
    suite.ours()
    for number, (what, how) in enumerate((
        ("growable is off", {"image": suite.image("off.img", MIB)}),
        ("the disk is memory", {"disk": "format=ram,size=1M", "growable": False}),
        ("it was switched off", {"image": suite.image("off-2.img", MIB), "growable": True, "passthrough": "off"}),
    )):  # fmt: skip
        mount = m.Mount(suite, f"off-{number}", **{"passthrough": "auto", **how})
        on, reason = passthrough(mount.export())
        r.require(not on, f"{what}, and it is on")
        if number < 2:
            r.require(len(reason.split()) >= 2, f"{what}: the reason given is {reason!r}")
        with m.Opened(mount.path) as fd:
            os.pwrite(fd, b"here", 1000)
            r.require(os.pread(fd, 4, 1000) == b"here", "it reads something else")
        mount.stop()


@pytest.mark.transports("any")
def test_defaults(suite):
    """Nothing but what has to be said: read-only, and the transport that the kernel has."""
    suite.ours()
    image = suite.image("defaults.img", MIB)
    content = m.fill(image, MIB, ((0, MIB),), 55)
    path = suite.rig.dir / "defaults.mnt"
    for number, enabled in enumerate(("N", "Y") if m.ENABLE_URING.exists() else ("N",)):
        with m.Uring(suite.clock, enabled):
            export = f"type=fuse,name=f0,disk=d0,mountpoint={path}"
            daemon = r.Daemon(suite.rig, "--disk", f"name=d0,file={image}", "--export", export, name=f"defaults-{number}")
            m.same(path, content, "the mount")
            seen = told(daemon.status()["exports"][0], "transport")
            r.require(seen in (("dev",) if enabled == "N" else ("dev", "io_uring")), f"enable_uring is {enabled}, the transport {seen}")
            m.refused("O_RDWR", ["EROFS", "EACCES", "EPERM"], lambda: os.close(os.open(path, os.O_RDWR)))
            r.require(daemon.child.stop() == 0, daemon.child.tail())
            r.require(not path.exists(), f"{path} was left behind")
