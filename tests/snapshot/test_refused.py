"""Tests snapshots that are refused, and images that are refused after a snapshot."""

import json
import os
import subprocess

import rig as r
from snapshot_model import MIB, OVERLAY, Disk, checked, digest, image, qemu_img


def test_the_old_name_is_refused(rig, marks):
    """The image below an overlay is not opened for writing by its name, unless the overlay is gone."""
    base, over = image(rig, "old", "raw"), rig.dir / "new.qcow2"
    disk = Disk(rig, base, "raw", name="old", fuse=False)
    disk.snapshot(over)
    r.require(os.getxattr(base, OVERLAY).decode() == str(over), "not marked")
    disk.quit()

    served = []

    def serve(path, keys=""):
        served.append(path)
        argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,file={path}{keys}", "--control", rig.dir / "no.ctl"]
        child = r.Child(rig, f"serve-old{len(served)}", argv)
        r.wait_for("it serves or ends", lambda: not child.running() or "control on" in child.output())
        return child

    argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,file={base}", "--control", rig.dir / "no.ctl"]
    r.message_of(r.run(argv, check=False), over, "setfattr", "readonly=on")
    r.message_of(r.run([r.binary("vshunt"), "image", "resize", "-f", "raw", base, "64M"], check=False), over, "setfattr")
    child = serve(base, ",readonly=on")
    r.require(child.running(), f"not even for reading: {child.tail()}")
    child.stop()
    r.run([r.binary("vshunt"), "image", "info", "-f", "raw", base])
    # An overlay that stands on another image, and none at all.
    aside = rig.dir / "aside.qcow2"
    over.rename(aside)
    image(rig, "new", "qcow2")
    child = serve(base)
    r.require(child.running() and "unmarked" in child.output(), f"not unmarked: {child.tail()}")
    child.stop()
    r.require(OVERLAY not in os.listxattr(base), "still marked")
    os.setxattr(base, OVERLAY, str(rig.dir / "gone.qcow2").encode())
    child = serve(base)
    r.require(child.running() and OVERLAY not in os.listxattr(base), f"not unmarked: {child.tail()}")
    child.stop()
    # An overlay on a file system that does not seem to be mounted now.
    empty = rig.dir / "not-mounted"
    empty.mkdir()
    for over in (empty / "over.qcow2", rig.dir / "no-folder" / "over.qcow2"):
        os.setxattr(base, OVERLAY, str(over).encode())
        r.message_of(r.run(argv, check=False), over, "setfattr", code=(1,))
        r.require(OVERLAY in os.listxattr(base), f"unmarked: {over}")
    os.removexattr(base, OVERLAY)


def test_what_is_refused(rig, mounts):
    """Snapshots that cannot be: the disk continues, and nothing is left behind."""
    base = image(rig, "refuse", "raw")
    disk = Disk(rig, base, "raw", name="refuse", socket=True)
    there = image(rig, "there", "qcow2", 32)
    was = digest(there)
    r.message_of(disk.snapshot(there, check=False), "already", there)
    r.message_of(disk.snapshot(there, check=False), "--existing")
    r.message_of(disk.cli("snapshot", "d0", "--to", there, "--existing", check=False), "does not stand on", there)
    r.require(digest(there) == was, "it was changed")
    r.message_of(disk.snapshot(rig.dir / "no" / "folder.qcow2", check=False), "cannot make")
    r.message_of(disk.cli("snapshot", "d0", "--internal", "s", check=False), "no qcow2 image")
    r.message_of(disk.cli("snapshot", "d0", check=False), "--to", code=(2,))
    r.message_of(disk.cli("snapshot", "nobody", "--to", "x.qcow2", check=False), "no disk nobody")
    qmp = {"device": "d0", "snapshot-file": str(rig.dir / "q.qcow2")}
    for more, word in (({"format": "qed"}, "format"), ({"snapshot-node-name": "n"}, "snapshot-node-name"), ({"node-name": "d0"}, "one of")):
        r.message_of(disk.cli("qmp", "blockdev-snapshot-sync", json.dumps(qmp | more), check=False), word)
    small = rig.dir / "small"
    small.mkdir()
    r.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small])
    try:
        r.message_of(disk.snapshot(small / "full.qcow2", check=False), "space", "full.qcow2")
        r.require(not list(small.iterdir()), "something is left behind")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
    r.require(disk.shown() == ("raw", str(base)), f"listed as {disk.shown()}")
    r.require(OVERLAY not in os.listxattr(base), "marked")
    # An overlay that QEMU made.
    mine = rig.dir / "mine.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", mine)
    disk.cli("qmp", "blockdev-snapshot-sync", json.dumps({"node-name": "d0", "snapshot-file": str(mine), "mode": "existing"}))
    r.require(disk.shown() == ("qcow2", str(mine)), f"listed as {disk.shown()}")
    disk.quit()
    checked(mine)
    for keys, words in ((f"file={base},readonly=on", ("readonly=on",)), ("format=ram,size=1M", ("no image",))):
        daemon = r.Daemon(rig, "--disk", f"name=d0,{keys}", name=f"no-{words[0].split('=')[0].replace(' ', '-')}")
        r.message_of(daemon.cli("snapshot", "d0", "--to", rig.dir / "never.qcow2", check=False), *words)
        r.require(not (rig.dir / "never.qcow2").exists(), "something is left behind")
        daemon.cli("quit")


def test_beside_a_job(rig):
    """No snapshot is taken while a job copies from the image."""
    base = image(rig, "busy", "raw")
    base.write_bytes(os.urandom(32 * MIB))
    disk = Disk(rig, base, "raw", name="busy", fuse=False)
    job = disk.cli("backup", "start", "d0", "--to", rig.dir / "backup.qcow2", "--speed", "64K").stdout.strip()
    r.message_of(disk.snapshot(rig.dir / "busy.qcow2", check=False), job, "cancel")
    r.require(not (rig.dir / "busy.qcow2").exists(), "something is left behind")
    disk.cli("job", "cancel", job)
    disk.snapshot(rig.dir / "busy.qcow2")
    disk.quit()


def test_passthrough_is_refused(rig, mounts):
    """With passthrough the kernel uses the image itself, so no snapshot is taken."""
    base, file = image(rig, "through", "raw"), rig.dir / "through.mnt"
    daemon = r.Daemon(rig, "--disk", f"name=d0,file={base}", "--export", f"type=fuse,name=f0,disk=d0,mountpoint={file}", name="through")
    (export,) = daemon.status()["exports"]
    try:
        if not export["mount"]["passthrough"]:
            raise r.Skipped(f"no passthrough here: {export['mount'].get('passthrough-reason')}")
        r.message_of(daemon.cli("snapshot", "d0", "--to", rig.dir / "t.qcow2", check=False), "passthrough=off", "f0")
    finally:
        daemon.cli("quit")
