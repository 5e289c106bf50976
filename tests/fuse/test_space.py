"""The allocated space of a mounted file: `du`, `df`, `cp` and `tar -S` work with it as with a sparse file."""

import os

import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
SIZE = 256 * MIB
# Metadata of an image, and what it allocates ahead.
MORE = 8 * MIB


class Chain:
    """A qcow2 image of one kind, with data at 8 MiB."""

    def __init__(self, suite, kind):
        self.folder = suite.rig.dir / f"space-{kind}-{suite.transport}"
        self.folder.mkdir()
        self.files = []
        below = []
        if kind in ("overlay", "long"):
            below = ["-b", self._made("base.qcow2"), "-F", "qcow2"]
            self.fill(self.files[0])
        for number in range(20 if kind == "long" else 0):
            below = ["-b", self._made(f"{number}.qcow2", *below), "-F", "qcow2"]
        if kind == "data-file":
            self.files.append(self.folder / "data")
            below = ["-o", f"data_file={self.files[0]}"]
        self.image = self._made("image.qcow2", *below)
        self.disk = f"format=qcow2,file={self.image}"
        self.fill(self.image)

    def _made(self, name, *options):
        path = self.folder / name
        r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", *options, path, str(SIZE)])
        self.files.append(path)
        return path

    def fill(self, path):
        data = self.folder / "fill"
        data.write_bytes(os.urandom(8 * MIB))
        r.run([r.tool("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", f"write -s {data} 8M 8M", path])

    def blocks(self):
        return sum(path.stat().st_blocks for path in self.files)


@pytest.mark.parametrize("kind", ("alone", "overlay", "long", "data-file"))
def test_blocks_are_those_of_the_chain_and_follow_writes(suite, kind):
    suite.ours()
    chain = Chain(suite, kind)
    mount = m.Mount(suite, f"space-{kind}", disk=chain.disk)
    path = mount.path

    def allocated():
        with m.Opened(path) as fd:
            os.fsync(fd)
        seen, files = os.stat(path).st_blocks, chain.blocks()
        r.require(seen == files, f"{seen} blocks, and the files have {files}")
        return seen * 512

    before = allocated()
    layers = 2 if kind in ("overlay", "long") else 1
    r.require(layers * 8 * MIB <= before <= layers * 8 * MIB + len(chain.files) * MORE, f"{before} bytes are allocated")
    with m.Opened(path) as fd:
        os.pwrite(fd, os.urandom(16 * MIB), 64 * MIB)
        written = allocated()
        r.require(16 * MIB <= written - before <= 16 * MIB + MORE, f"16 MiB made {before} bytes {written}")
        m.fallocate(fd, m.PUNCH, 64 * MIB, 16 * MIB)
        r.require(allocated() <= written - 16 * MIB + MORE, f"a hole of 16 MiB made {written} bytes {allocated()}")
    mount.cli("snapshot", "d0", "--to", chain.folder / "over.qcow2")
    chain.files.append(chain.folder / "over.qcow2")
    allocated()
    mount.stop()


@pytest.mark.transports("any")
def test_tools_see_a_sparse_file(suite):
    suite.ours()
    chain = Chain(suite, "tools")
    mount = m.Mount(suite, "space-tools", disk=chain.disk)
    path, copy, archive = mount.path, chain.folder / "copy", chain.folder / "archive.tar"
    os.sync()
    r.require(int(r.run(["du", "-B1", path]).stdout.split()[0]) == os.stat(path).st_blocks * 512, "du differs from stat")
    r.run(["cp", path, copy])
    r.run(["tar", "-C", path.parent, "-Scf", archive, path.name])
    for made in (copy, archive):
        r.require(made.stat().st_blocks * 512 < 8 * MIB + MORE, f"{made.name} takes {made.stat().st_blocks * 512} bytes")
    (chain.folder / "out").mkdir()
    r.run(["tar", "-C", chain.folder / "out", "-xf", archive])
    for made in (copy, chain.folder / "out" / path.name):
        r.run(["cmp", path, made])
    told = r.run(["df", "-B1", "--output=size,used,avail,pcent", path]).stdout.splitlines()[1].split()
    size, used, free = (int(n) for n in told[:3])
    r.require(size == SIZE and 8 * MIB <= used <= 8 * MIB + MORE, f"df says {told}")
    room = os.statvfs(chain.folder)
    r.require(free <= min(SIZE - used, room.f_blocks * room.f_frsize) and told[3] != "100%", f"df says {told}")
    mount.stop()


@pytest.mark.transports("any")
def test_the_same_blocks_as_in_qemus_storage_daemon(suite):
    suite.ours()
    chain = Chain(suite, "peer")
    os.sync()
    mount = m.Mount(suite, "space-peer", disk=chain.disk, writable=False)
    ours = os.stat(mount.path).st_blocks
    mount.stop()
    path = chain.folder / "qsd"
    path.touch()
    export = f"type=fuse,id=e,node-name=d,mountpoint={path}"
    blockdev = f"driver=qcow2,node-name=d,read-only=on,file.driver=file,file.filename={chain.image}"
    peer = r.Child(suite.rig, "qsd", [r.tool("qemu-storage-daemon", "qemu-system-common"), "--blockdev", blockdev, "--export", export])
    r.wait_for("QEMU serves it", lambda: m.mounted(path))
    theirs = os.stat(path).st_blocks
    peer.stop()
    r.require(abs(ours - theirs) * 512 <= MIB, f"{ours} blocks, and {theirs} in QEMU")


@pytest.mark.transports("any")
@pytest.mark.parametrize("disk", (f"format=ram,size={SIZE}", f"format=null,size={SIZE}"))
def test_a_disk_whose_space_is_not_known_counts_as_full(suite, disk):
    """Tools take a file without blocks for one of zeroes only, and one with too few for a sparse one."""
    suite.ours()
    mount = m.Mount(suite, f"space-{disk[7:10]}", disk=disk)
    r.require(os.stat(mount.path).st_blocks == SIZE // 512, f"{os.stat(mount.path)}")
    mount.stop()
