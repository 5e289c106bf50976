"""Tests bad input on the command line: wrong files, sizes, numbers and names."""

import subprocess

import pytest
import rig as r
from rig import message_of

# A refusal comes at once; one that takes this long hangs.
REFUSAL_S = r.WAIT_S
EXPORT = "type=vhost-user-blk,name=vm0,disk=d0,socket={socket}"


class User:
    def __init__(self, rig):
        self.rig = rig
        self.image = rig.image("user.img", 64 << 20)
        self.empty = rig.image("empty.img", 0)
        self.missing = rig.dir / "missing.img"
        self.number = 0

    def serve(self, disk="name=d0,file={user.image}", export=EXPORT):
        """`vshunt serve` that is to be refused."""
        self.number += 1
        control = self.rig.dir / f"user{self.number}.ctl"
        socket = self.rig.dir / f"user{self.number}.sock"
        argv = [r.binary("vshunt"), "serve", "--disk", disk.format(user=self), "--export", export.format(socket=socket)]
        done = r.run([*argv, "--control", control], timeout_s=REFUSAL_S, check=False)
        for left in (control, socket):
            r.require(not left.exists(), f"{left.name} was left behind")
        return done

    def precious(self):
        """A file that must not change."""
        file = self.rig.dir / "precious.txt"
        file.write_text("precious")
        return file

    def holder(self):
        """A daemon that has the image open."""
        return r.Daemon(self.rig, "--disk", f"name=d0,file={self.image}", name="holder")


@pytest.fixture(scope="module")
def user(rig):
    return User(rig)


def test_the_sockets_path_is_a_file(user):
    file = user.precious()
    message_of(user.serve(export=f"type=vhost-user-blk,name=vm0,disk=d0,socket={file}"), file)
    r.require(file.read_text() == "precious", "the file was touched")


def test_the_control_sockets_path_is_a_file(user):
    file = user.precious()
    argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,file={user.image}", "--control", file]
    message_of(r.run(argv, timeout_s=REFUSAL_S, check=False), file)
    r.require(file.read_text() == "precious", "the file was touched")


def test_a_socket_path_longer_than_the_system_takes(user):
    path = user.rig.dir / ("x" * 120)
    message_of(user.serve(export=f"type=vhost-user-blk,name=vm0,disk=d0,socket={path}"), path.name[:40], "bytes")


@pytest.mark.parametrize("disk, words", (
    pytest.param("name=d0,file={user.missing}", ("{user.missing}",), id="a missing image"),
    pytest.param("name=d0,file={user.rig.dir}", ("{user.rig.dir}",), id="a folder as image"),
    pytest.param("name=d0", ("file",), id="no file named"),
    pytest.param("name=d0,file={user.empty}", ("disk d0 is empty", "growable=on"), id="an empty image"),
    pytest.param("name=d0,format=ram,size=1000", ("512",), id="such a size for ram"),
    pytest.param("name=d0,format=ram", ("size",), id="ram without a size"),
    pytest.param("name=d0,format=vdi,file={user.image}", ("vdi",), id="a format that is not there"),
    pytest.param("name=d0,file={user.image},colour=red", ("colour",), id="a key that is not there"),
))  # fmt: skip
def test_a_disk(user, disk, words):
    message_of(user.serve(disk), *(word.format(user=user) for word in words))


@pytest.mark.parametrize("keys, words", (
    *(pytest.param(f"queues={n}", ("queues", n), id=f"{n} queues") for n in (0, 257, 70000)),
    *(pytest.param(f"queues={n}", ("queues",), id=f"{n} queues") for n in ("-1", "many")),
    pytest.param("workers=0", ("workers",), id="workers=0"),
    pytest.param("block-size=1000", ("block",), id="a block size that is none"),
    pytest.param(f"serial={'s' * 21}", ("serial",), id="a serial of 21 bytes"),
))  # fmt: skip
def test_an_export(user, keys, words):
    message_of(user.serve(export=f"{EXPORT},{keys}"), *words)


def test_an_export_of_no_disk(user):
    message_of(user.serve(export=EXPORT.replace("disk=d0", "disk=d9")), "d9")


def test_an_image_in_use_by_another_vshunt(user):
    daemon = user.holder()
    message_of(user.serve(), user.image, "in use")
    r.require(daemon.child.running(), "the daemon that had the image ended")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_qemu_is_refused_an_image_that_vshunt_uses(user):
    qemu_io = r.tool("qemu-io", "qemu-utils")
    daemon = user.holder()
    done = r.run([qemu_io, "-f", "raw", "-c", "read 0 512", user.image], check=False)
    r.require("lock" in done.stdout + done.stderr, f"qemu-io opened it: {done.stdout}{done.stderr}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_vshunt_is_refused_an_image_that_qemu_uses(user):
    qemu_io = r.tool("qemu-io", "qemu-utils")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    holder = subprocess.Popen([qemu_io, "-f", "raw", str(user.image)], **pipes)
    try:
        holder.stdin.write(b"read 0 512\n")
        holder.stdin.flush()
        holder.stdout.readline()
        message_of(user.serve(), user.image, "in use")
    finally:
        holder.kill()
        holder.wait()


def test_no_daemon_answers(user):
    done = r.run([r.binary("vshunt"), "-c", user.rig.dir / "nobody.ctl", "status"], check=False)
    message_of(done, "nobody.ctl", code=(3,))
