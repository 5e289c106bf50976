"""Tests mounts that are refused.

The error names the thing, and nothing is left behind. These tests run on vshunt only, not on the
peer.
"""

import os

import as_user
import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
REFUSAL_S = r.WAIT_S


class Refusals:
    def __init__(self, suite):
        self.suite = suite
        self.number = 0
        self._image = None

    @property
    def image(self):
        if self._image is None:
            self._image = self.suite.image("errors.img", MIB)
        return self._image

    def path(self, name="new.mnt"):
        return self.suite.rig.dir / name

    def serve(self, *words, mountpoint=None, keys="", disk=None, export=None, more=(), around=(), existed=False, control=None, program=None):
        """`vshunt serve`, to be refused with these words; `around`: a program that runs it."""
        self.suite.ours()
        self.number += 1
        path = mountpoint or self.path()
        control = control or self.suite.rig.dir / f"errors{self.number}.ctl"
        export = export or f"type=fuse,name=f0,disk=d0,mountpoint={path}{keys}"
        argv = [program or r.binary("vshunt"), "serve", "--disk", disk or f"name=d0,file={self.image}", "--export", export, *more]
        before = sorted(m.fuse_mounts())
        done = r.run([*around, *argv, "--control", control], timeout_s=REFUSAL_S, check=False)
        r.message_of(done, *words)
        r.require(sorted(m.fuse_mounts()) == before, f"mounts were left: {m.fuse_mounts()}")
        r.require(existed or not os.path.lexists(path), f"{path} was left behind")
        r.require(not control.exists(), f"{control.name} was left behind")

    def readonly(self):
        self.serve("d0", "read-only", disk=f"name=d0,file={self.image},readonly=on", keys=",writable=on")

    def directory(self):
        path = self.path("folder")
        path.mkdir(exist_ok=True)
        self.serve(path, mountpoint=path, existed=True)
        r.require(path.is_dir() and not os.listdir(path), "the directory was touched")

    def fifo(self):
        path = self.path("fifo")
        os.mkfifo(path)
        self.serve(path, mountpoint=path, existed=True)

    def busy(self):
        self.suite.ours()
        mount = m.Mount(self.suite, "busy", image=self.suite.image("busy.img", MIB))
        self.serve(mount.path, mountpoint=mount.path, existed=True)
        r.require(m.mounted(mount.path) == 1, f"{m.mounted(mount.path)} mounts lie there")
        r.require(mount.path.stat().st_size == MIB, "the first daemon serves it no more")
        mount.stop()

    def twice(self):
        other = self.suite.image("twice.img", MIB)
        more = ["--disk", f"name=d1,file={other}", "--export", f"type=fuse,name=f1,disk=d1,mountpoint={self.path()}"]
        self.serve(self.path(), more=more)

    def second(self):
        """All or nothing: exports that came to be before the error are undone."""
        other = self.suite.image("second.img", MIB)
        more = ["--disk", f"name=d1,file={other}", "--export", f"type=fuse,name=f1,disk=d1,mountpoint={self.path('nowhere')}/f.mnt"]
        self.serve("nowhere", more=more)

    def no_uring(self):
        if not m.ENABLE_URING.exists():
            raise r.Skipped("this kernel's FUSE has no io_uring")
        with m.Uring(self.suite.clock, "N"):
            self.serve("enable_uring", keys=",transport=io_uring")

    def device(self, change):
        """Runs in its own namespace with a changed /dev."""
        script = (
            "set -e; dev=$(mktemp -d); mount -t tmpfs dev \"$dev\"; cp -a /dev/null /dev/zero /dev/urandom /dev/fuse \"$dev\"; "
            f"{change}; mount --move \"$dev\" /dev; rmdir \"$dev\"; exec \"$@\""
        )
        self.serve("/dev/fuse", around=["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh"])

    def forbidden(self):
        """Runs as a user that may not open the device node."""
        self.suite.ours()
        with as_user.folder(self.suite.rig, "nobody") as folder:
            image = self.suite.rig.image("nobody.img", MIB, folder)
            os.chown(image, as_user.NOBODY, as_user.NOBODY)
            around = as_user.with_device("/dev/fuse", 0o600, as_user.words())
            keys = {"disk": f"name=d0,file={image}", "mountpoint": folder / "f.mnt", "control": folder / "errors.ctl"}
            self.serve("/dev/fuse", around=around, program=as_user.program(folder), **keys)

    def running(self):
        """The daemon and its other export go on."""
        self.suite.ours()
        mount = m.Mount(self.suite, "goes-on", image=self.suite.image("goes-on.img", MIB), more=["--disk", f"name=d1,file={self.image}"])
        folder = self.path("folder-2")
        folder.mkdir()
        before = m.fuse_mounts()
        for words, keys in (
            ((folder,), f"name=f1,disk=d1,mountpoint={folder}"),
            ((mount.path,), f"name=f1,disk=d1,mountpoint={mount.path}"),
            (("f0",), f"name=f0,disk=d1,mountpoint={self.path()}"),
            (("d9",), f"name=f1,disk=d9,mountpoint={self.path()}"),
            (("nowhere",), f"name=f1,disk=d1,mountpoint={self.path('nowhere')}/f.mnt"),
            (("queues",), f"name=f1,disk=d1,mountpoint={self.path()},queues=0"),
        ):
            r.message_of(mount.cli("export", "add", f"type=fuse,{keys}", check=False, timeout_s=REFUSAL_S), *words)
            r.require([e["name"] for e in mount.daemon.status()["exports"]] == ["f0"], "an export came to be")
            r.require(m.fuse_mounts() == before and not self.path().exists(), f"something was left: {m.fuse_mounts()}")
        # It would wait for itself, and killed it could not end.
        r.message_of(mount.cli("disk", "add", f"name=d2,file={mount.path}", check=False, timeout_s=REFUSAL_S), "f0", "d0")
        r.require([d["name"] for d in mount.daemon.status()["disks"]] == ["d0", "d1"], "the refused disk is there")
        # The disk is free for one that is right.
        mount.cli("export", "add", f"type=fuse,name=f1,disk=d1,mountpoint={self.path()},writable=on")
        with m.Opened(self.path()) as fd:
            os.pwrite(fd, b"x", 0)
        mount.stop()
        r.require(not self.path().exists(), "the second mountpoint was left behind")


pytestmark = pytest.mark.transports("any")


@pytest.fixture(scope="module")
def refusals(suite):
    return Refusals(suite)


def test_refused_the_mountpoint_is_a_directory(refusals):
    refusals.directory()


def test_refused_the_parent_of_the_mountpoint_is_missing(refusals):
    refusals.serve("nowhere", mountpoint=refusals.path("nowhere") / "f.mnt")


def test_refused_the_parent_of_the_mountpoint_is_a_file(refusals):
    refusals.serve("errors.img", mountpoint=refusals.image / "f.mnt")


def test_refused_the_mountpoint_is_a_fifo(refusals):
    refusals.fifo()


def test_refused_the_name_of_the_mountpoint_is_too_long(refusals):
    refusals.serve("x" * 40, mountpoint=refusals.path("x" * 300))


def test_refused_a_mountpoint_that_is_served_already(refusals):
    refusals.busy()


def test_refused_two_exports_on_one_mountpoint(refusals):
    refusals.twice()


def test_refused_no_mountpoint(refusals):
    refusals.serve("mountpoint", export="type=fuse,name=f0,disk=d0")


def test_refused_a_read_only_disk_writable_on(refusals):
    refusals.readonly()


def test_refused_growable_without_writable(refusals):
    refusals.serve("growable", "writable", keys=",growable=on")


@pytest.mark.parametrize("queues", (0, 257, 70000, "many"))
def test_refused_queues(refusals, queues):
    refusals.serve("queues", queues if queues != "many" else "queues", keys=f",queues={queues}")


@pytest.mark.parametrize("key, value", (
    ("colour", "red"), ("transport", "pigeon"), ("passthrough", "perhaps"), ("allow-other", "some"), ("workers", "per-moon"),
    ("workers", "0"), ("writable", "maybe"), ("socket", "/tmp/no.sock"),
))  # fmt: skip
def test_refused_key(refusals, key, value):
    refusals.serve(key, keys=f",{key}={value}")


def test_refused_a_mountpoint_for_vhost_user_blk(refusals):
    vhost = f"type=vhost-user-blk,name=v,disk=d0,socket={refusals.path('v.sock')},mountpoint={refusals.path()}"
    refusals.serve("mountpoint", export=vhost)


def test_refused_transport_io_uring_with_enable_uring_n(refusals):
    refusals.no_uring()


def test_refused_dev_fuse_is_missing(refusals):
    refusals.device('rm "$dev/fuse"')


def test_refused_dev_fuse_is_an_empty_file(refusals):
    refusals.device('rm "$dev/fuse"; : >"$dev/fuse"')


def test_refused_dev_fuse_is_another_device(refusals):
    refusals.device('rm "$dev/fuse"; cp -a /dev/zero "$dev/fuse"')


def test_refused_dev_fuse_may_not_be_opened(refusals):
    refusals.forbidden()


def test_refused_a_second_export_that_cannot_be_takes_the_first_with_it(refusals):
    refusals.second()


def test_refused_what_a_running_daemon_is_asked_for(refusals):
    refusals.running()
