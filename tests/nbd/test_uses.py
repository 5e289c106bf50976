"""Uses of a disk on a server other than load: a mount, with its holes, and a backup."""

import errno
import os
import random

import fuse_mount as m
import nbd_servers as n
import pytest
import rig as r

MIB = 1 << 20
AT, LENGTH = 8 * MIB, MIB


@pytest.mark.root
@pytest.mark.parametrize("clients", (4, 1), ids=("several", "one"))
def test_a_mount_shows_the_holes_of_the_server_and_makes_some(suite, clients):
    """Trim, WriteZeroes and block status, as a program sees them and as the server's image has them."""
    image = suite.image(f"holes-{clients}.img", n.SIZE)
    server = n.qemu_nbd(suite.rig, image, "--detect-zeroes=off", clients=clients, name=f"holes-{clients}")
    mount = m.Mount(suite, f"of-holes-{clients}", disk=f"uri={server.uri('disk')}")
    want = bytearray(n.SIZE)
    fd = os.open(mount.path, os.O_RDWR)
    try:
        want[AT : AT + LENGTH] = random.Random(1).randbytes(LENGTH)
        r.require(os.pwrite(fd, want[AT : AT + LENGTH], AT) == LENGTH, "a short write")
        os.fsync(fd)
        found = os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, AT, os.SEEK_HOLE)
        r.require(found == (AT, AT + LENGTH), f"data and hole are at {found}")
        full = os.stat(image).st_blocks
        m.fallocate(fd, m.ZERO_RANGE | m.KEEP_SIZE, AT, MIB // 4)
        want[AT : AT + MIB // 4] = bytes(MIB // 4)
        os.fsync(fd)
        r.require(os.stat(image).st_blocks > full - MIB // 4 // 512, "zeroes took their place from the image")
        m.fallocate(fd, m.PUNCH, AT + MIB // 2, MIB // 4)
        want[AT + MIB // 2 : AT + MIB // 4 * 3] = bytes(MIB // 4)
        os.fsync(fd)
        left = os.stat(image).st_blocks
        r.require(left <= full - MIB // 4 // 512, f"a hole left {left} blocks of {full}")
        r.require(os.pread(fd, LENGTH, AT) == want[AT : AT + LENGTH], "it reads as something else")
    finally:
        os.close(fd)
    mount.stop()
    server.kill()
    r.require(image.read_bytes() == want, "the server's image has something else")


@pytest.mark.root
def test_a_mount_has_errors_after_the_delay_and_works_again(suite):
    """The same open file: each read fails while the server is away, and none afterwards."""
    image = suite.image("errors.img", n.SIZE)
    data = random.Random(3).randbytes(4096)
    with open(image, "r+b") as file:
        file.write(data)
    server = n.nbdkit(suite.rig, "file", image, name="errors")
    mount = m.Mount(suite, "of-errors", disk=f"uri={server.uri()},reconnect-delay=1")
    with m.Opened(mount.path, os.O_RDONLY | os.O_DIRECT) as fd:
        r.require(os.pread(fd, 4096, 0) == data, "it reads as something else")
        server.kill()
        for _ in range(3):
            with pytest.raises(OSError) as e:
                os.pread(fd, 4096, 0)
            r.require(e.value.errno == errno.EIO, f"{e.value}")
        server.start()

        def reads():
            try:
                return os.pread(fd, 4096, 0) == data
            except OSError:
                return False

        r.wait_for("it can be read again", reads)
    mount.stop()
    server.kill()


def test_a_backup_has_the_bytes_of_the_server(suite):
    image = suite.image("whole.img", n.SIZE)
    data = random.Random(2).randbytes(4 * MIB)
    with open(image, "r+b") as file:
        for at in (0, 20 * MIB, n.SIZE - len(data)):
            file.seek(at)
            file.write(data)
    server = n.nbdkit(suite.rig, "file", image, name="whole")
    daemon = n.serve(suite.rig, (server, "any"), name="of-whole")
    path = suite.path("whole.backup")
    daemon.cli("backup", "start", "d0", "--to", path, "--format", "raw", "--wait")
    r.require(path.read_bytes() == image.read_bytes(), "the backup differs")
    r.require(path.stat().st_blocks < n.SIZE // 512 // 2, "the holes of the server take room in the backup")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
    server.kill()
