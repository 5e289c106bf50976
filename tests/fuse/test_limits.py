"""Tests mounts under limits of the system.

These are a limit of the address space, no io_uring for users, and fusectl that is mounted later.
"""

import contextlib
import os
import re
import resource

import as_user
import fuse_guard
import fuse_mount as m
import pytest
import rig as r

MIB = 1 << 20
# Buffers for requests of 1 MiB, and some more: 64 of a ring queue, 128 of a channel.
RING_QUEUE_BYTES, CHANNEL_BYTES = 65 * MIB, 129 * MIB


@pytest.mark.transports("io_uring")
def test_little_address_space(suite):
    """A daemon whose address space is limited: `auto` chooses dev, says why, and serves."""
    suite.ours()
    with contextlib.ExitStack() as stack:
        # Else each thread of libc's takes as much address space for its own as it can get, and none
        # is left for a stack.
        stack.callback(os.environ.pop, "MALLOC_ARENA_MAX", None)
        os.environ["MALLOC_ARENA_MAX"] = "1"
        limited(suite)


def limited(suite):
    probe = r.Daemon(suite.rig, "--disk", "name=d0,format=null,size=1M", name="limit-probe")
    text = open(f"/proc/{probe.child.pid}/status", encoding="ascii").read()
    used = int(re.search(r"VmSize:\s*(\d+) kB", text)[1]) << 10
    r.require(probe.child.stop() == 0, probe.child.tail())
    path = suite.rig.dir / "limited.mnt"
    export = f"type=fuse,name=f0,disk=d0,mountpoint={path},writable=on,transport=auto"
    disk = "name=d0,format=ram,size=1M"
    # Enough for one channel and all else, and not for a ring queue for each CPU besides.
    limit = used + CHANNEL_BYTES + RING_QUEUE_BYTES * 3 // 4
    before = resource.getrlimit(resource.RLIMIT_AS)
    for bound, transport in ((limit, "dev"), (None, "io_uring")):
        name = f"limited-{transport}"
        with contextlib.ExitStack() as stack:
            if bound:
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, before)
                resource.setrlimit(resource.RLIMIT_AS, (bound, before[1]))
            child = r.Child(suite.rig, name, [r.binary("vshunt"), "-v", "serve", "--disk", disk, "--export", export,
                                              "--control", suite.rig.dir / f"{name}.ctl"])
        r.wait_for("it is mounted", lambda c=child: m.mounted(path) or not c.running())
        r.require(child.running(), f"the daemon ended with {child.process.returncode}: {child.tail()}")
        with m.Opened(path) as fd:
            os.pwrite(fd, b"limited", 700)
            r.require(os.pread(fd, 7, 700) == b"limited", "it does not serve")
        r.require(child.stop() == 0, child.tail())
        said = "auto chose dev" in child.output() and "address space" in child.output()
        r.require(said == (transport == "dev"), f"the log: {child.tail()}")


@contextlib.contextmanager
def as_nobody(suite, name):
    """A folder, an image in it, and a program that runs others as a user that may use FUSE."""
    as_user.fusermount3()
    with as_user.folder(suite.rig, name) as folder, m.device_for_all(folder):
        image = suite.rig.image("user.img", MIB, folder)
        os.chown(image, as_user.NOBODY, as_user.NOBODY)
        yield folder, image, as_user.words()


def test_fusectl_is_mounted_after_the_daemons_start(suite):
    """Without root, confined to its paths: the connection of a mount in use ends by fusectl, though that was mounted later."""
    suite.ours()
    with as_nobody(suite, f"later-{suite.transport}") as (folder, image, user):
        path, control = folder / "f.mnt", folder / "c.sock"
        export = f"type=fuse,name=f0,disk=d0,mountpoint={path},writable=on,transport={suite.transport}"
        argv = [*user, as_user.program(folder), "serve", "--sandbox=kill", "--allow-path", folder, "--disk", f"name=d0,file={image}"]
        fusectl = fuse_guard.CONNECTIONS
        # One that another mount hides cannot be reached, and does not matter.
        while os.path.ismount(fusectl):
            r.run(["umount", fusectl])
        try:
            child = r.Child(suite.rig, f"later-{suite.transport}", [*argv, "--export", export, "--control", control])
            r.wait_for("it is mounted", lambda: m.mounted(path) or not child.running())
        finally:
            r.run(["mount", "-t", "fusectl", "none", fusectl])
        r.require(child.running(), f"the daemon ended with {child.process.returncode}: {child.tail()}")
        holder = r.Child(suite.rig, f"later-user-{suite.transport}", [*user, "sh", "-c", 'exec 3<"$0"; echo open; exec sleep 1000', path])
        r.wait_for("its user has it open", lambda: "open" in holder.output())
        code = child.stop()
        r.require(code == 0, f"the daemon ended with {code}: {child.tail()}")
        r.require("cannot end its connection" not in child.output(), child.tail())
        r.require("taken from its users" in child.output(), f"it was not in use: {child.tail()}")
        holder.kill()
        r.require(not m.mounted(path), "it is still mounted")


@pytest.mark.serial  # daemons of other users that other tests start would fail meanwhile
@pytest.mark.transports("any")
def test_io_uring_is_switched_off_for_users(suite):
    """kernel.io_uring_disabled=1, which is put back: root's daemon serves, another user's says what to change."""
    suite.ours()
    with fuse_guard.UringDisabled(suite.clock, "1"):
        path, socket = suite.rig.dir / "disabled.mnt", suite.rig.dir / "disabled.sock"
        disks = ("--disk", "name=d0,format=ram,size=1M", "--disk", "name=d1,format=ram,size=1M")
        exports = (f"type=fuse,name=f0,disk=d0,mountpoint={path},writable=on", f"type=vhost-user-blk,name=e0,disk=d1,socket={socket}")
        daemon = r.Daemon(suite.rig, *disks, *(word for export in exports for word in ("--export", export)), name="disabled")
        worker = daemon.worker_new()
        daemon.cli("attach", "f0:0", str(worker))
        with m.Opened(path) as fd:
            os.pwrite(fd, b"served", 0)
            r.require(os.pread(fd, 6, 0) == b"served", "the mount is not served")
        r.run([r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "write", "--size", "1M", "--bs", "64k", "--verify", "--quiet"])
        r.require(daemon.child.stop() == 0, daemon.child.tail())
        with as_user.folder(suite.rig, "disabled") as folder:
            argv = [*as_user.words(), as_user.program(folder), "serve", "--disk", "name=d0,format=null,size=1M", "--control", folder / "c.sock"]
            r.message_of(r.run(argv, check=False), "io_uring", "kernel.io_uring_disabled")
