"""Tests dirty bitmaps that are stored in the image.

They are read after a restart, after a crash, and by QEMU's tools.
"""

import json
import os

import backup_model as b
import fuse_mount as m
import qcow2_deflate
import rig as r
from backup_model import MIB, SIZE, Disk


def flags(path):
    """The bitmaps that QEMU sees in an image: name to flags."""
    info = json.loads(b.qemu_img("info", "--output=json", path).stdout)
    return {x["name"]: x["flags"] for x in info["format-specific"]["data"].get("bitmaps", [])}


def test_bitmaps_kept_over_restarts(suite):
    """A chain continues with the next daemon. Bitmaps that are not persistent are gone, and
    disabled ones stay disabled."""
    disk = Disk(suite, "kept", "qcow2")
    mount = disk.mount
    below = suite.path("kept.0")
    disk.backup("--to", below, "--bitmap", "b0")
    disk.cli("bitmap", "add", "d0", "off", "--disabled")
    disk.cli("bitmap", "add", "d0", "gone", "--persistent", "false")
    for turn in range(3):
        disk.change()
        before = b.bitmap(mount.daemon)
        mount.stop()
        b.checked(mount.image)
        seen = flags(mount.image)
        r.require(seen == {"b0": ["auto"], "off": []}, f"QEMU sees the bitmaps {seen}")
        mount.start()
        after = b.bitmap(mount.daemon)
        r.require(after == before and after["count"] > 0, f"a bitmap was {before}, after a restart it is {after}")
        off = b.bitmap(mount.daemon, "off")
        r.require(not off["recording"] and b.bitmap(mount.daemon, "gone") is None, f"a disabled bitmap is {off}")
        disk.change()
        path = suite.path(f"kept.{turn + 1}")
        disk.backup("--to", path, "--incremental", "b0", "--backing", below, "--job", f"j{turn}")
        b.equal(b.contents(suite, path, "qcow2"), bytes(disk.data), f"the backup after restart {turn + 1}")
        below = path
    mount.stop()


def test_bitmaps_after_kill_9(suite):
    """After kill -9 everything counts as dirty, so that nothing is missed."""
    disk = Disk(suite, "crashed", "qcow2")
    mount = disk.mount
    below = suite.path("crashed.0")
    disk.backup("--to", below, "--bitmap", "b0")
    disk.change()
    mount.stop()
    for turn in range(3):
        mount.start()
        disk.change()
        if turn == 1:
            # In the middle of the next.
            slow = ("--speed", "64K", "--job", "slow")
            disk.cli("backup", "start", "d0", "--to", suite.path("crashed.cut"), "--incremental", "b0", "--backing", below, *slow)
        with m.Opened(mount.path) as fd:
            os.fsync(fd)
        mount.child.kill()
        b.checked(mount.image, leaks=True)
        mount.start()
        seen = b.bitmap(mount.daemon)
        r.require(seen and seen["count"] == SIZE and seen["recording"], f"after a crash the bitmap is {seen}")
        b.equal(b.contents(suite, mount.path, "raw"), bytes(disk.data), "the disk after a crash")
        path = suite.path(f"crashed.{turn + 1}")
        disk.backup("--to", path, "--incremental", "b0", "--backing", below, "--job", f"j{turn}")
        b.equal(b.contents(suite, path, "qcow2"), bytes(disk.data), "the backup after a crash")
        r.require(b.bitmap(mount.daemon)["count"] == 0, "an inconsistent bitmap does not restart")
        below = path
        mount.stop()
        b.checked(mount.image)


def test_a_bitmap_with_a_gap(suite):
    """A bitmap that was disabled for a while is refused for an incremental backup, until a full
    backup resets it."""
    disk = Disk(suite, "gap", "qcow2")
    mount = disk.mount
    full = suite.path("gap.full")
    disk.backup("--to", full, "--bitmap", "b0")
    disk.cli("bitmap", "disable", "d0", "b0")
    disk.change()
    disk.cli("bitmap", "enable", "d0", "b0")
    asked = ("--incremental", "b0", "--backing", full)
    r.message_of(disk.backup("--to", suite.path("gap.1"), *asked, check=False), "b0", "full backup")
    # Over a restart it is inconsistent: everything is copied.
    mount.stop()
    mount.start()
    disk.change()
    path = suite.path("gap.2")
    disk.backup("--to", path, *asked)
    b.equal(b.contents(suite, path, "qcow2"), bytes(disk.data), "the backup after a gap")
    again = suite.path("gap.3")
    disk.cli("bitmap", "disable", "d0", "b0")
    disk.backup("--to", again, "--bitmap", "b0")
    disk.change()
    last = suite.path("gap.4")
    disk.backup("--to", last, "--incremental", "b0", "--backing", again)
    b.equal(b.contents(suite, last, "qcow2"), bytes(disk.data), "the backup after it restarted")
    mount.stop()


def test_a_bitmap_that_qemu_made(suite):
    """A bitmap that QEMU's tools made is kept up here."""
    disk = Disk(suite, "theirs", "qcow2")
    disk.mount.stop()
    b.qemu_img("bitmap", "--add", "-g", "4096", disk.mount.image, "q0")
    full = suite.path("theirs.full")
    b.qemu_img("convert", "-O", "qcow2", disk.mount.image, full)
    disk.mount.start()
    disk.write(9 * MIB + 100, b"x" * 100)
    seen = b.bitmap(disk.mount.daemon, "q0")
    r.require((seen["count"], seen["granularity"]) == (4096, 4096), f"after one write it is {seen}")
    path = suite.path("theirs.inc")
    disk.backup("--to", path, "--incremental", "q0", "--backing", full)
    b.equal(b.contents(suite, path, "qcow2"), bytes(disk.data), "the incremental backup")
    disk.cli("bitmap", "remove", "d0", "q0")
    disk.mount.stop()
    r.require(flags(disk.mount.image) == {}, "a removed bitmap is in the image")
    b.checked(disk.mount.image)


def test_compressed_backups_have_the_window_of_qemu(suite):
    """Programs that open deflate clusters with a window of 4 KiB read a backup, as they read QEMU's images."""
    plain = qcow2_deflate.far_repetitions(4 * MIB)
    source = suite.path("window.raw")
    source.write_bytes(plain)
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,format=raw,file={source}", name="window")
    kept = suite.path("window.qcow2")
    daemon.cli("backup", "start", "d0", "--to", kept, "--compress", "--wait")
    r.require(qcow2_deflate.check(kept, plain) == len(plain) >> 16, "not each cluster is compressed")
    b.equal(b.contents(suite, kept, "qcow2"), plain, "the compressed backup")
    daemon.cli("quit")
    r.require(daemon.child.wait(60) == 0, daemon.child.tail())
