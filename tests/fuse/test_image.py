"""Tests images that end within a sector, and a mount over the image itself."""

import os
import random
import tempfile
from pathlib import Path

import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
SECTOR = 512


def rounded(size):
    return -(-size // SECTOR) * SECTOR


def test_images_that_end_within_a_sector(suite):
    """A file that ends within a sector is served up to the sector's end, which reads as zeroes."""
    for direct in ("on", "off"):
        for size in (1, 1000, MIB + 1, MIB - 511):
            name = f"odd-{size}-{direct}-{suite.transport}"
            image = suite.image(f"{name}.img", size)
            content = bytes(m.fill(image, size, ((0, size),), size)).ljust(rounded(size), b"\0")
            if direct == "on" and suite.peer:
                continue
            mount = m.serving(suite, name, image=image, direct=direct)
            r.require(mount.path.stat().st_size == rounded(size), f"{size} bytes are shown as {mount.path.stat().st_size}")
            m.same(mount.path, content, f"{size} bytes")
            r.require(image.stat().st_size == size, "to be read made the image longer")
            with m.Opened(mount.path) as fd:
                # A write before the end of the file, and one across it: what the sector has besides
                # stays.
                os.pwrite(fd, b"x", 0)
                r.require(os.pwrite(fd, b"yz", rounded(size) - 2) == 2, "a short write")
                os.fsync(fd)
            content = bytearray(content)
            content[0:1], content[-2:] = b"x", b"yz"
            m.same(mount.path, content, f"{size} bytes, written")
            mount.stop()
            m.same(image, content, "the image, now of whole sectors")


def test_growable_an_image_that_ends_within_a_sector(suite):
    """The same for a growable mount, which continues behind the sector."""
    name = f"odd-growable-{suite.transport}"
    image = suite.image(f"{name}.img", 700)
    content = bytes(m.fill(image, 700, ((0, 700),), 5)).ljust(1024, b"\0")
    mount = m.serving(suite, name, image=image, growable=True)
    with m.Opened(mount.path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"a" * 600)
    want = (content + b"a" * 600).ljust(2048, b"\0")
    m.same(mount.path, want, "appended")
    mount.stop()
    m.same(image, want, "the image")


def test_growable_an_empty_image(suite):
    """A growable mount of an empty file, and one that is emptied; a fresh qcow2 image as its contents."""
    name = f"empty-{suite.transport}"
    image = suite.image(f"{name}.img", 0)
    mount = m.serving(suite, name, image=image, growable=True)
    r.require(mount.path.stat().st_size == 0 and mount.path.read_bytes() == b"", "an empty file is not empty")
    data = random.Random(8).randbytes(3000)
    mount.path.write_bytes(data)
    m.same(mount.path, data.ljust(3072, b"\0"), "written from nothing")
    os.truncate(mount.path, 0)
    r.require((mount.path.stat().st_size, image.stat().st_size) == (0, 0), "truncated to 0 it is not empty")
    with m.Opened(mount.path) as fd:
        r.require(os.pread(fd, 100, 0) == b"", "an empty file has bytes")
        r.require(os.pwrite(fd, b"e", 4096) == 1, "a short write")
    m.same(mount.path, (bytes(4096) + b"e").ljust(4608, b"\0"), "grown from nothing")
    r.run(["sh", "-c", 'exec >"$0"', mount.path])
    r.require((mount.path.stat().st_size, image.stat().st_size) == (0, 0), "emptied by a shell it is not empty")
    tool = r.tool("qemu-img", "qemu-utils")
    r.run([tool, "create", "-q", "-f", "qcow2", mount.path, "8M"])
    r.run([tool, "check", "-q", "-f", "qcow2", mount.path])
    mount.stop()
    again = m.serving(suite, f"{name}-2", disk=f"file={image},format=raw", growable=True)
    r.run([tool, "check", "-q", "-f", "qcow2", again.path])
    again.stop()


@pytest.mark.transports("any")
def test_an_empty_image_refused_where_nobody_can_make_it_longer(suite):
    """An empty image is refused by exports that cannot grow."""
    suite.ours()
    image = suite.image("empty-refused.img", 0)
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,file={image}", name="empty-refused")
    folder = suite.rig.dir
    for keys in (
        f"type=vhost-user-blk,socket={folder}/empty.sock",
        f"type=fuse,mountpoint={folder}/empty.mnt",
        f"type=fuse,mountpoint={folder}/empty.mnt,writable=on",
    ):
        done = daemon.cli("export", "add", f"name=e0,disk=d0,{keys}", check=False)
        r.message_of(done, "disk d0 is empty", "growable=on", code=(1, 2))
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_o_trunc_without_growable_the_size_stays(suite):
    """A mount that does not grow keeps its size when it is opened with O_TRUNC, as a block device does."""
    suite.differs("overlooks O_TRUNC, or cuts the image", before=None)
    name = f"trunc-{suite.transport}"
    image = suite.image(f"{name}.img", MIB)
    content = bytearray(m.fill(image, MIB, ((0, MIB),), 6))
    mount = m.serving(suite, name, image=image)

    def holds(what):
        r.require(mount.path.stat().st_size == MIB, f"{what}: the size is {mount.path.stat().st_size}")
        m.same(mount.path, content, what)

    os.close(os.open(mount.path, os.O_RDWR | os.O_TRUNC))
    holds("O_TRUNC")
    r.run(["sh", "-c", 'printf shell >"$0"', mount.path])
    content[:5] = b"shell"
    holds("> of a shell")
    source = suite.rig.dir / f"{name}.source"
    source.write_bytes(random.Random(7).randbytes(300_000))
    r.run(["cp", source, mount.path])
    content[:300_000] = source.read_bytes()
    holds("cp")
    r.run(["dd", f"if={source}", f"of={mount.path}", "bs=64k", "count=1"])
    with m.Opened(mount.path) as fd:
        m.refused("ftruncate", ["EPERM"], lambda: os.ftruncate(fd, 0))
    holds("dd")
    mount.stop()
    m.same(image, content, "the image")


@pytest.mark.transports("any")
def test_passthrough_killed_after_an_odd_write(suite):
    """Passthrough leaves an image of any length when the daemon is killed: the next one serves it."""
    suite.ours()
    image = suite.image("killed-odd.img", MIB)
    content = m.fill(image, MIB, ((0, MIB),), 9)
    mount = m.Mount(suite, "killed-odd", image=image, growable=True, passthrough="auto")
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, b"k", MIB)
    mount.child.kill()
    r.require(image.stat().st_size == MIB + 1, f"the kernel did not write: {image.stat().st_size} bytes")
    mount.start()
    m.same(mount.path, content + b"k", "by the next daemon")
    mount.stop()
    m.same(image, (content + b"k").ljust(MIB + SECTOR, b"\0"), "the image afterwards")


@pytest.mark.transports("any")
def test_mounted_over_the_image_itself(suite):
    """Mounted over the image, as QEMU's storage daemon is often used; the image outlives a daemon that is killed."""
    name = f"itself-{suite.transport}"
    image = suite.image(f"{name}.img", MIB)
    content = m.fill(image, MIB, ((0, MIB),), 71)
    mount = m.serving(suite, name, image=image, path=image)
    mount.existed = True
    with m.Opened(image) as fd:
        os.pwrite(fd, b"over itself", 1000)
        content[1000:1011] = b"over itself"
    m.same(image, content, "the mount")
    if not suite.peer:
        for turn in range(3):
            mount.child.kill()
            m.refused("a mount without its daemon", ["ENOTCONN", "ECONNABORTED"], image.read_bytes)
            # The same command again: the dead mount goes, and the image below is served.
            mount.start()
            m.same(image, content, "by the next daemon")
            with m.Opened(image) as fd:
                os.pwrite(fd, bytes([turn]) * 100, turn * 10_000)
                content[turn * 10_000 : turn * 10_000 + 100] = bytes([turn]) * 100
    mount.stop()
    m.same(image, content, "the image afterwards")


@pytest.mark.transports("any")
def test_a_qcow2_image_mounted_over_itself(suite):
    """A qcow2 image under its own contents: what would open the image by its name is refused, with the mount's name."""
    suite.ours()
    tool = r.tool("qemu-img", "qemu-utils")
    folder, image = suite.rig.dir, suite.rig.dir / "itself.qcow2"
    r.run([tool, "create", "-q", "-f", "qcow2", image, "4M"])
    mount = m.Mount(suite, "itself-qcow2", disk=f"file={image},format=qcow2", path=image)
    mount.existed = True
    content = random.Random(72).randbytes(MIB)
    with m.Opened(image) as fd:
        os.pwrite(fd, content, MIB)
    want = bytes(MIB) + content + bytes(2 * MIB)
    m.same(image, want, "the mount")
    for command in (
        ("resize", "d0", "8M"),
        ("snapshot", "d0", "--to", f"{folder}/itself.over"),
        ("snapshot", "d0", "--internal", "s0"),
    ):
        r.message_of(mount.cli(*command, check=False), "export f0", image, "another mountpoint", code=(1, 2))
    for disk in (f"name=d1,file={image},readonly=on,format=raw", f"name=d1,file={image},format=qcow2"):
        r.message_of(mount.cli("disk", "add", disk, check=False), "export f0", code=(1, 2))
    # By descriptors: it needs no name.
    mount.cli("backup", "start", "d0", "--to", folder / "itself.backup", "--format", "raw", "--wait", timeout_s=r.WAIT_S)
    m.same(folder / "itself.backup", want, "a backup")
    mount.child.kill()
    mount.start()
    m.same(image, want, "by the next daemon")
    mount.stop()
    r.run([tool, "check", "-q", image])
    r.run([tool, "compare", "-f", "qcow2", "-F", "raw", image, folder / "itself.backup"])


@pytest.mark.transports("any")
def test_an_image_with_one_below_it_elsewhere_mounted_over_itself_after_a_kill(suite):
    """The image below is in another folder: the next daemon finds it although a dead mount hides the image that names it."""
    suite.ours()
    tool = r.tool("qemu-img", "qemu-utils")
    image = suite.rig.dir / "based.qcow2"
    with tempfile.TemporaryDirectory(prefix="vshunt-below.") as below:
        base = Path(below) / "base.img"
        content = random.Random(73).randbytes(MIB)
        base.write_bytes(content)
        r.run([tool, "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", image])
        mount = m.Mount(suite, "itself-based", disk=f"file={image},format=qcow2", path=image)
        mount.existed = True
        m.same(image, content, "the mount")
        mount.child.kill()
        mount.start()
        m.same(image, content, "by the next daemon")
        mount.stop()


def test_growable_a_qcow2_disk(suite):
    """Users change the size of a qcow2 disk: against a plain file, over kills, with a longer image below."""
    suite.ours()
    tool = r.tool("qemu-img", "qemu-utils")
    base = suite.image("growing.base", 2 * MIB)
    m.fill(base, 2 * MIB, ((0, 2 * MIB),), 21)
    kinds = (
        ("plain", ("cluster_size=64k",), ()),
        ("small", ("cluster_size=512",), ()),
        ("over", ("cluster_size=64k",), ("-b", base, "-F", "raw")),
        ("extended", ("extended_l2=on",), ("-b", base, "-F", "raw")),
        ("old", ("compat=0.10",), ()),
    )
    for kind, options, below in kinds:
        name = f"growing-{kind}-{suite.transport}"
        image, start = suite.rig.dir / f"{name}.qcow2", 300_032
        r.run([tool, "create", "-q", "-f", "qcow2", "-o", ",".join(options), *below, image, start])
        model = bytearray(base.read_bytes()[:start] if below else bytes(start))
        mount = m.Mount(suite, name, disk=f"file={image},format=qcow2", growable=True)
        chance = random.Random(name)
        for step in range(40):
            size, what = len(model), chance.randrange(10)
            with m.Opened(mount.path) as fd:
                if what < 5:  # appended, across the end, or behind it
                    at = max(0, size + SECTOR * chance.randrange(-40, 200 if what == 0 else 1))
                    data = chance.randbytes(chance.choice((1, 512, 4096, 5000, 200_000)))
                    r.require(os.pwrite(fd, data, at) == len(data), f"{name}, step {step}: a short write")
                    model.extend(bytes(max(0, at + len(data) - size)))
                    model[at : at + len(data)] = data
                elif what < 8:
                    new = chance.choice((0, chance.randrange(size + 1), size + chance.randrange(MIB)))
                    os.ftruncate(fd, new)
                    model = model[:new].ljust(new, b"\0")
                elif what == 8 and size:
                    at = chance.randrange(size)
                    length = chance.randrange(1, size - at + 1)
                    m.fallocate(fd, m.PUNCH, at, length)
                    model[at : at + length] = bytes(length)
                else:
                    os.fsync(fd)
            model = model.ljust(rounded(len(model)), b"\0")
            r.require(mount.path.stat().st_size == len(model), f"{name}, step {step}: {mount.path.stat().st_size} bytes, not {len(model)}")
            if step in (15, 30):
                if kind != "old":  # version 2 has no journal: what was not flushed is lost with the daemon
                    mount.child.kill()
                else:
                    mount.child.stop()
                mount.start()
            if step % 5 == 0:
                m.same(mount.path, model, f"{name}, step {step}")
        m.same(mount.path, model, name)
        mount.stop()
        r.run([tool, "check", "-q", image])
        (suite.rig.dir / f"{name}.model").write_bytes(model)
        if model:
            r.run([tool, "compare", "-f", "qcow2", "-F", "raw", image, suite.rig.dir / f"{name}.model"])


@pytest.mark.transports("any")
def test_growable_a_qcow2_disk_beside_other_commands(suite):
    """Other commands beside a growable qcow2 disk, and what cannot grow."""
    suite.ours()
    tool = r.tool("qemu-img", "qemu-utils")
    folder = suite.rig.dir
    image = folder / "growing-ends.qcow2"
    r.run([tool, "create", "-q", "-f", "qcow2", "-o", "cluster_size=512", image, "1M"])
    mount = m.Mount(suite, "growing-ends", disk=f"file={image},format=qcow2", growable=True)
    data = random.Random(22).randbytes(MIB)
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, data, MIB)
        m.refused("far behind the end", ["EFBIG"], lambda: os.pwrite(fd, b"x", 1 << 40))
    mount.cli("resize", "d0", "3M")
    r.require(mount.path.stat().st_size == 3 * MIB, "resized by a command it has another size")
    mount.cli("resize", "--shrink", "d0", "1280K")
    mount.cli("snapshot", "d0", "--internal", "s0")
    with m.Opened(mount.path) as fd:
        os.ftruncate(fd, 2 * MIB)
        os.pwrite(fd, b"end", 2 * MIB)
    want = bytes(MIB) + data[: MIB // 4] + bytes(3 * MIB // 4) + b"end".ljust(SECTOR, b"\0")
    m.same(mount.path, want, "grown again")
    mount.stop()
    r.run([tool, "check", "-q", image])
    # The image's data lies elsewhere.
    other = folder / "growing-data.qcow2"
    r.run([tool, "create", "-q", "-f", "qcow2", "-o", f"data_file={folder}/growing.data", other, "1M"])
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,file={other},format=qcow2", name="growing-data")
    export = f"name=f0,type=fuse,disk=d0,mountpoint={folder}/growing-data.mnt,writable=on,growable=on"
    r.message_of(daemon.cli("export", "add", export, check=False), other, "data file", code=(1, 2))
    daemon.cli("resize", "d0", "2M")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


@pytest.mark.transports("any")
def test_growable_what_is_refused_leaves_a_qcow2_image_as_it_was(suite):
    """A refused export, or a refused size, leaves a qcow2 image byte for byte as it was, while it is served and afterwards."""
    suite.ours()
    tool = r.tool("qemu-img", "qemu-utils")
    folder = suite.rig.dir
    below, image, old = (folder / f"refused-{name}.qcow2" for name in ("below", "over", "old"))
    r.run([tool, "create", "-q", "-f", "qcow2", below, "1M"])
    r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "write -P 7 0 1M", below])
    # Their last cluster shows what is below, which is longer.
    def over(name, compat):
        options = ["-o", f"compat={compat}", "-b", below, "-F", "qcow2"]
        return r.run([tool, "create", "-q", "-f", "qcow2", *options, name, 300_032])

    over(image, "1.1")
    over(old, "0.10")
    r.run([tool, "snapshot", "-c", "s0", old])
    at_rest = {path: path.read_bytes() for path in (image, old)}
    (folder / "taken.img").write_bytes(bytes(MIB))
    daemon = r.Daemon(
        suite.rig, "--disk", f"name=d0,file={image},format=qcow2", "--disk", f"name=d1,file={old},format=qcow2",
        "--disk", "name=d2,format=ram,size=1M", "--export", f"type=vhost-user-blk,name=taken,disk=d2,socket={folder}/taken.sock",
        name="refused",
    )  # fmt: skip
    served = {path: path.read_bytes() for path in (image, old)}

    def refused(path, why, *arguments):
        r.message_of(daemon.cli(*arguments, check=False), "", why, code=(1, 2))
        r.require(path.read_bytes() == served[path], f"{arguments} was refused ({why}) and has changed the image")

    def export(disk, keys, path, why):
        refused(path, why, "export", "add", f"type=fuse,disk={disk},writable=on,growable=on,{keys}")

    export("d0", f"name=f0,mountpoint={folder}", image, "is a folder")
    export("d0", f"name=f0,mountpoint={folder}/missing/f0.mnt", image, "missing")
    export("d0", f"name=taken,mountpoint={folder}/f0.mnt", image, "already")
    export("d0", f"name=f0,mountpoint={folder}/f0.mnt,queues=1,workers=5000", image, "")
    daemon.cli("export", "add", f"type=vhost-user-blk,name=writer,disk=d0,socket={folder}/writer.sock")
    export("d0", f"name=f0,mountpoint={folder}/f0.mnt", image, "writer")
    daemon.cli("export", "remove", "writer")
    # These are found with the image closed, which is opened again then.
    export_old = f"type=fuse,disk=d1,writable=on,growable=on,name=f1,mountpoint={folder}/f1.mnt"
    r.message_of(daemon.cli("export", "add", export_old, check=False), "", "version 2", code=(1, 2))
    r.message_of(daemon.cli("resize", "d1", "2M", check=False), "", "version 2", code=(1, 2))
    for disk in ("d0", "d1"):
        daemon.cli("disk", "remove", disk)
    for path, data in at_rest.items():
        # The close completes the last cluster, with zeroes.
        found, more = path.read_bytes()[: len(data)], path.read_bytes()[len(data) :]
        r.require(found == data and len(more) < 65536 and not any(more), f"{path} is not what it was before it was served")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
