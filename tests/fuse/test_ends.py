"""Tests the end of a mount: removed, unmounted, with its daemon, after kill -9.

Processes that use the file never wait for a mount that has ended.

Run as a program (`writer …`), this file writes with O_DSYNC and notes which writes completed.
"""

import contextlib
import os
import random
import re
import signal
import struct
import sys
import time
from pathlib import Path

import as_user
import fuse_fio
import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
KILLS = 5

# The writer's part of the image; fio has what lies behind it, and dd reads all of it, which takes
# it half a minute.
BLOCK = 4096
SLOTS = 512
IMAGE_SIZE = SLOTS * BLOCK + fuse_fio.FIO_JOBS * fuse_fio.FIO_REGION + 512 * MIB


def block(slot, turn):
    return struct.pack("<QQ", slot, turn) * (BLOCK // 16)


def writer(path, turn):
    """Blocks with O_DSYNC until an error, each noted on stdout before and after."""
    fd = os.open(path, os.O_RDWR | os.O_DSYNC)
    chance, turn = random.Random(int(turn)), int(turn)
    while True:
        slot = chance.randrange(SLOTS)
        turn += 1
        os.write(1, b"begin %d %d\n" % (slot, turn))
        try:
            count = os.pwrite(fd, block(slot, turn), slot * BLOCK)
        except OSError as e:
            os.write(1, f"error {e.strerror}\n".encode())
            sys.exit(3)
        if count != BLOCK:
            os.write(1, b"error: short\n")
            sys.exit(4)
        os.write(1, b"end %d %d\n" % (slot, turn))


class Callers:
    """A writer, fio and dd on a mount, to be cut off."""

    def __init__(self, suite, name, path, turn):
        # fio opens its file again and again. By its path it could get the file below a mount that
        # has just gone, and would go on writing there; through this descriptor it gets the mount's,
        # or an error.
        self.held = os.open(path, os.O_RDONLY)
        held = f"/proc/{os.getpid()}/fd/{self.held}"
        self.writer = r.Child(suite.rig, f"{name}-writer", [sys.executable, "-B", __file__, "writer", path, turn])
        self.fio = r.Child(suite.rig, f"{name}-fio", fuse_fio.fio_argv(held, 120, SLOTS * BLOCK))
        self.all = (self.writer, self.fio)
        self.suite, self.name, self.path = suite, name, path

    def busy(self):
        r.wait_for("the writer's first blocks", lambda: self.writer.output().count("end") > 20)
        r.wait_for("fio's jobs", lambda: self.opened(self.fio) >= fuse_fio.FIO_JOBS or not self.fio.running())
        # It reads the file once, so it starts when the others are ready.
        dd = ["dd", f"if={self.path}", "of=/dev/null", "bs=512", "iflag=direct"]
        self.all = (*self.all, r.Child(self.suite.rig, f"{self.name}-dd", dd))
        time.sleep(0.1)
        ended = [f"{c.name}: {c.tail(4)}" for c in self.all if not c.running()]
        r.require(not ended, f"ended by themselves: {ended}")

    def opened(self, child):
        """How often a caller has it open."""
        return list(r.open_files(child.pid)).count(str(self.path))

    def cut_off(self, what):
        """Checks that users of the file get errors, and do not wait for a mount that is gone."""
        with contextlib.suppress(OSError):  # what its FLUSH gets
            os.close(self.held)
        for child in self.all:
            code = child.wait()
            r.require(code != 0, f"{child.name} saw no error of {what}")
        r.require(self.writer.process.returncode == 3, f"the writer: {self.writer.tail(2)}")

    def log(self):
        """(slot: last completed turn), (slot: turn that was under way), the last turn."""
        completed, begun, last = {}, {}, 0
        for line in self.writer.output().splitlines():
            words = line.split()
            if words[0] == "begin":
                begun = {int(words[1]): int(words[2])}
                last = int(words[2])
            elif words[0] == "end":
                completed[int(words[1])] = int(words[2])
                begun = {}
        return completed, begun, last


def whole(image, completed, begun):
    """Checks that every completed block is there.

    A block that was being written may be old, new or partly written.
    """
    with m.Opened(image, os.O_RDONLY) as fd:
        for slot, turn in completed.items():
            if slot in begun:
                continue
            seen = os.pread(fd, BLOCK, slot * BLOCK)
            r.require(seen == block(slot, turn), f"block {slot}: turn {turn} was completed, {struct.unpack('<QQ', seen[:16])} is there")


def test_kill_9_with_i_o_under_way_mountpoint_taken_over(suite):
    """kill -9 with I/O under way; the next daemon takes the mountpoint over."""
    suite.differs("mixes up writes that come together", before=11)
    name = f"kill-{suite.transport}"
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", IMAGE_SIZE))
    completed, turn = {}, 0
    chance = random.Random(61)
    for kill in range(KILLS):
        callers = Callers(suite, f"{name}-{kill}", mount.path, turn)
        callers.busy()
        time.sleep(chance.uniform(0.0, 0.3))
        mount.child.kill()
        callers.cut_off("a killed daemon")
        done, begun, turn = callers.log()
        completed.update(done)
        whole(mount.image, completed, begun)
        for slot in begun:
            completed.pop(slot, None)
        if suite.peer:  # it cannot take over
            r.run(["umount", mount.path])
            mount.start()
            continue
        m.refused("stat of a killed daemon's mount", ["ENOTCONN", "ECONNABORTED"], lambda: os.stat(mount.path))
        said = len(mount.child.output())
        mount.start()
        text = mount.child.output()[said:]
        r.require(str(mount.path) in text, f"taking the mountpoint over, the daemon says {text!r}")
        r.require(m.mounted(mount.path) == 1, f"{m.mounted(mount.path)} mounts lie on the mountpoint")
        whole(mount.path, completed, begun)
    code = mount.child.stop()
    r.require(code == 0, f"the daemon ended with {code}: {mount.child.tail()}")
    r.require(not m.mounted(mount.path), "it is still mounted")
    whole(mount.image, completed, {})


def test_kill_9_then_another_image_on_the_mountpoint(suite):
    """A daemon with another image takes over the unused mountpoint of a killed daemon."""
    suite.ours()
    name = f"left-{suite.transport}"
    first = m.Mount(suite, name, image=suite.image(f"{name}.img", MIB))
    first.child.kill()
    second = m.Mount(suite, f"{name}-2", image=suite.image(f"{name}-2.img", 2 * MIB), path=first.path)
    r.require(first.path.stat().st_size == 2 * MIB, "the old mount shows")
    code = second.child.stop()
    r.require(code == 0 and not m.mounted(first.path), f"the end: {code}, {m.fuse_mounts()}")


def terminated(suite, how):
    """The daemon is told to end with I/O under way: callers get errors, it ends well and leaves nothing."""
    if how == "quit":
        suite.ours()
    suite.differs("mixes up writes that come together", before=11)
    name = f"{how}-{suite.transport}"
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", IMAGE_SIZE))
    callers = Callers(suite, name, mount.path, 0)
    callers.busy()
    if how == "quit":
        mount.cli("quit", "--force")
    else:
        mount.child.process.terminate()
    code = mount.child.wait()
    r.require(code == 0, f"the daemon ended with {code}: {mount.child.tail()}")
    callers.cut_off("a daemon that ended")
    r.require(not m.mounted(mount.path), "it is still mounted")
    r.require(mount.path.exists() == mount.existed, f"{mount.path} was left behind")
    completed, begun, _ = callers.log()
    whole(mount.image, completed, begun)


def test_export_remove_busy_while_open_force_cuts_off(suite):
    """export remove: refused while somebody has it open, --force cuts them off; otherwise at once."""
    suite.ours()
    name = f"remove-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", IMAGE_SIZE))
    keys = mount.arguments[3]
    with m.Opened(mount.path) as fd:
        r.message_of(mount.cli("export", "remove", "f0", check=False), "f0", code=(1,))
        done = mount.cli("export", "remove", "f0", check=False)
        r.require(re.search("busy|in use|open", done.stderr, re.I), f"it does not say that somebody has it open: {done.stderr}")
        r.require(os.pwrite(fd, b"still here", 4000) == 10 and os.pread(fd, 10, 4000) == b"still here", "it is served no more")
        r.require(mount.export() is not None and m.mounted(mount.path) == 1, "it is gone all the same")
    r.wait_for("it can be removed when it was closed", lambda: mount.cli("export", "remove", "f0", check=False).returncode == 0)
    gone(mount)
    r.require("somebody else" not in mount.child.output(), f"it does not know its own umount: {mount.child.tail()}")
    mount.cli("export", "add", keys)
    callers = Callers(suite, name, mount.path, 0)
    callers.busy()
    mount.cli("export", "remove", "f0", "--force")
    callers.cut_off("a removed export")
    gone(mount)
    # The disk is free again, the daemon well.
    mount.cli("export", "add", keys)
    with m.Opened(mount.path) as fd:
        os.pwrite(fd, b"again", 0)
    completed, begun, _ = callers.log()
    mount.stop()
    completed.pop(0, None)
    completed.pop(4000 // BLOCK, None)
    whole(mount.image, completed, begun)


def gone(mount):
    r.require(mount.export() is None, "the export is still listed")
    r.require(not m.mounted(mount.path), f"{mount.path} is still mounted")
    r.require(not mount.path.exists(), f"{mount.path} was left behind")
    r.require(mount.child.running(), f"the daemon ended: {mount.child.tail()}")


def unmounted(suite, lazily):
    """An administrator's umount; with -l it counts when the last one has closed the file."""
    name = f"umount{'-l' if lazily else ''}-{suite.transport}"
    mount = m.serving(suite, name, image=suite.image(f"{name}.img", MIB))
    if lazily:
        with m.Opened(mount.path) as fd:
            r.run(["umount", "-l", mount.path])
            r.require(os.pwrite(fd, b"lazy", 0) == 4 and os.pread(fd, 4, 0) == b"lazy", "the open file is served no more")
    else:
        mount.path.read_bytes()
        with m.Opened(mount.path):
            done = r.run(["umount", mount.path], check=False)
            r.require(done.returncode != 0 and "busy" in done.stderr, f"umount of an open file: {done.stderr}")
        r.run(["umount", mount.path])
    if suite.peer:
        mount.child.stop()
        return
    r.wait_for("the daemon notices", lambda: mount.export() is None)
    r.wait_for("the mountpoint is removed", lambda: not mount.path.exists())
    gone(mount)
    cpu = cpu_time(mount.child.pid)
    time.sleep(0.5)
    r.require(cpu_time(mount.child.pid) - cpu < 0.2, "the daemon is busy with the mount that is gone")
    mount.cli("export", "add", mount.arguments[3])
    m.same(mount.path, mount.image.read_bytes(), "mounted again")
    mount.stop()


def test_quit_asks_before_it_takes_an_open_file_a_signal_comes_thrice(suite):
    """quit does not take an open file from its users, unless told to; a signal told twice is one."""
    suite.ours()
    name = f"asked-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", MIB))
    r.wait_for("nobody has it open", lambda: mount.export()["mount"]["open-files"] == 0)
    with m.Opened(mount.path) as fd:
        r.require(mount.export()["mount"]["open-files"] == 1, "status does not count the open file")
        r.message_of(mount.cli("quit", check=False), "f0", "--force", code=(1,))
        r.require(os.pwrite(fd, b"still here", 0) == 10, "it is served no more")
    r.wait_for("it is closed", lambda: mount.export()["mount"]["open-files"] == 0)
    for _ in range(3):
        os.kill(mount.child.pid, signal.SIGTERM)
    r.require(mount.child.wait() == 0, f"it ended with {mount.child.wait(1)}")
    r.require(not mount.path.exists() and not m.mounted(mount.path), f"{mount.path} was left behind")


def test_umount_l_by_an_administrator_file_open_at_the_end(suite):
    """umount -l, and the daemon ends with the file still open: its user gets errors, and neither hangs."""
    suite.ours()
    name = f"umount-l-end-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", MIB))
    fd = os.open(mount.path, os.O_RDWR)
    r.run(["umount", "-l", mount.path])
    mount.stop()
    gone = ["ENOTCONN", "ECONNABORTED", "EIO"]
    m.refused("a read", gone, lambda: os.pread(fd, 4, 0))
    with contextlib.suppress(OSError):  # an error of FLUSH, if the kernel still sends one
        os.close(fd)


def cpu_time(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_connection_aborted_by_an_administrator(suite):
    """The connection is aborted from outside: callers get errors, the daemon continues without the export or says why."""
    suite.ours()
    name = f"abort-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", MIB))
    m.abort([x[0] for x in m.fuse_mounts() if x[1] == str(mount.path)])
    r.wait_for("the daemon notices", lambda: mount.export() is None)
    gone(mount)
    r.require(mount.child.stop() == 0, mount.child.tail())


def test_a_mountpoint_that_was_there_stays_as_it_was(suite):
    """A mountpoint that existed before keeps its contents.

    Also if its path needs quoting, and if it is the image itself.
    """
    suite.ours()
    name = f"existing-{suite.transport}"
    path = suite.rig.dir / f"{name} with space.mnt"
    path.write_text("what was here")
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", MIB), path=path)
    r.require(path.stat().st_size == MIB, "the image does not show")
    mount.existed = True
    mount.stop()
    r.require(path.read_text() == "what was here", "the file under the mount was changed")


@pytest.mark.transports("any")
def test_mounted_over_what_another_disk_stands_on_and_the_reverse(suite):
    """A mount over the image of another disk is refused.

    So is a disk on a mount of the same daemon.
    """
    suite.ours()
    qemu_img = r.tool("qemu-img", "qemu-utils")
    folder = suite.rig.dir
    base, over, path, upper = folder / "below.img", folder / "over.qcow2", folder / "ram.mnt", folder / "upper.qcow2"
    suite.image(base.name, MIB)
    r.run([qemu_img, "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", over])
    disks = ("--disk", f"name=d0,format=qcow2,file={over}", "--disk", "name=r,format=ram,size=1M")
    daemon = r.Daemon(suite.rig, *disks, name="over-others")
    export = "type=fuse,name=f0,disk=r,transport=dev,mountpoint="
    r.message_of(daemon.cli("export", "add", f"{export}{base}", check=False), base, "disk d0", code=(1, 2))
    daemon.cli("export", "add", f"{export}{path}")
    r.run([qemu_img, "create", "-q", "-f", "qcow2", "-b", path, "-F", "raw", upper])
    said = daemon.cli("disk", "add", f"name=u,format=qcow2,readonly=on,file={upper}", check=False)
    r.message_of(said, "export f0", code=(1, 2))
    r.require(daemon.child.stop() == 0, daemon.child.tail())


@pytest.mark.transports("any")
def test_without_root_by_fusermount3(suite):
    """Without root: fusermount3 mounts and unmounts."""
    as_user.fusermount3()
    with as_user.folder(suite.rig, "user") as folder, m.device_for_all(suite.rig.dir):
        without_root(suite, folder)


def without_root(suite, folder):
    """The server of the suite and its user in `folder`, both as the user whose folder it is."""
    image = suite.rig.image("user.img", MIB, folder)
    path = folder / "user.mnt"
    path.touch()
    for thing in (image, path):
        os.chown(thing, as_user.NOBODY, as_user.NOBODY)
    user = as_user.words()
    if suite.peer:
        argv = [*user, *m.PeerMount(suite, "user", image=image, path=path, start=False).arguments]
        child = r.Child(suite.rig, "user", argv)
    else:
        export = f"type=fuse,name=f0,disk=d0,mountpoint={path},writable=on,queues=2,transport=dev"
        argv = [*user, as_user.program(folder), "serve", "--disk", f"name=d0,file={image}", "--export", export]
        child = r.Child(suite.rig, "user", [*argv, "--control", folder / "user.ctl"])
    r.wait_for("it is mounted", lambda: m.mounted(path) or not child.running())
    r.require(child.running(), f"the daemon ended with {child.process.returncode}: {child.tail()}")
    text = 'printf user | dd of="$0" bs=4 seek=175 conv=notrunc && dd if="$0" bs=4 skip=175 count=1'
    done = r.run([*user, "sh", "-c", text, path], check=False)
    r.require(done.stdout.strip() == "user", f"its user: {done.stdout}{done.stderr}")
    code = child.stop()
    r.require(code == 0, f"the daemon ended with {code}: {child.tail()}")
    r.require(not m.mounted(path), "it is still mounted")
    r.require(path.exists(), "the mountpoint that was there is gone")
    with m.Opened(image, os.O_RDONLY) as fd:
        r.require(os.pread(fd, 4, 700) == b"user", "the write is not in the image")
    if not suite.peer:
        made = folder / "made.mnt"
        export = f"type=fuse,name=f0,disk=d0,mountpoint={made},allow-other=on,transport=dev"
        done = r.run([*argv[:-1], export, "--control", folder / "other.ctl"], check=False)
        ours = re.search("^vshunt.*allow.*$", done.stderr, re.MULTILINE)  # fusermount3 speaks for itself, too
        r.require(done.returncode == 1 and ours, f"allow-other=on: {done.returncode} {done.stderr}")
        r.require(not made.exists() and not m.mounted(made), f"{made} was left behind")


@pytest.mark.transports("any")
def test_allow_other(suite):
    """allow-other: whether users but the daemon's own may so much as look."""
    with as_user.folder(suite.rig, "others") as folder:
        for value in ("on", "off"):
            name = f"others-{value}"
            image = suite.image(f"{name}.img", MIB)
            mount = m.serving(suite, name, image=image, path=folder / f"{name}.mnt", extra=f",allow-other={value}")
            done = r.run([*as_user.words(), "stat", mount.path], check=False)
            r.require(done.returncode == (value == "off"), f"allow-other={value}: {done.returncode} {done.stdout}{done.stderr}")
            mount.path.read_bytes()
            mount.stop()


def test_sigterm_with_i_o_under_way(suite):
    terminated(suite, 'term')


def test_quit_with_i_o_under_way(suite):
    terminated(suite, 'quit')


def test_umount_by_an_administrator(suite):
    unmounted(suite, False)


def test_umount_l_by_an_administrator_file_open(suite):
    unmounted(suite, True)


if __name__ == "__main__" and sys.argv[1:2] == ["writer"]:
    writer(*sys.argv[2:4])
