"""Tests pull backups: a frozen disk is read by other programs, while guests write to its source."""

import contextlib
import json
import os
import subprocess

import backup_model as b
import fuse_mount as m
import nbd_client as c
import nbd_exports as e
import pytest
import rig as r
from backup_model import MIB, busy, ended, gone, gone_on, load_argv, small

LIBNBD = "libnbd-bin"
LOAD_SIZE = 64 * MIB
DIRTY = "qemu:dirty-bitmap:"


def pull(daemon, *arguments, disk="d0", name="p0", check=True):
    """Starts a pull backup of d0, which p0 shows."""
    return daemon.cli("backup", "start", disk, "--pull", name, *arguments, check=check)


def serve(suite, daemon, name, of="p0", export="n0", *more):
    """An NBD export of a disk. -> its socket."""
    socket = suite.path(f"{name}.{export}.nbd")
    keys = ",".join(("type=nbd", f"name={export}", f"disk={of}", f"listen=unix:{socket}", *more))
    daemon.cli("export", "add", keys)
    return socket


def uri(socket, export="n0"):
    return f"nbd+unix:///{export}?socket={socket}"


def nbdcopy(socket, to, export="n0"):
    return [r.tool("nbdcopy", LIBNBD), "--connections=4", "--requests=16", uri(socket, export), to]


def convert(socket, to):
    return [r.tool("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "raw", uri(socket), to]


def copied(suite, socket, name="pulled"):
    """All bytes of the export n0."""
    path = suite.path(name)
    r.run(nbdcopy(socket, path), timeout_s=120)
    data = path.read_bytes()
    path.unlink()
    return data


def copied_with_moves(suite, daemon, socket, name):
    """All bytes of the export n0, read into a pipe that is emptied after each move of the reader's queue: it has not all before the last."""
    argv = [r.tool("nbdcopy", LIBNBD), uri(socket), "-"]
    reader = r.Child(suite.rig, f"{name}.piped", argv, stdout=subprocess.PIPE)
    data = bytearray()
    with reader.process.stdout as pipe:
        for _ in range(4):
            data += pipe.read(LOAD_SIZE // 8)
            (queue,) = e.running(daemon)
            worker = (queue["worker"] + 1) % 4
            daemon.attach(f"n0:{queue['index']}", worker)
            (moved,) = e.running(daemon)
            r.require((moved["index"], moved["worker"]) == (queue["index"], worker), f"{moved} was to be on {worker}")
        data += pipe.read()
    r.require(reader.wait(r.WAIT_S) == 0, f"nbdcopy: {reader.tail()}")
    return bytes(data)


def disks(daemon):
    return [d["name"] for d in daemon.status()["disks"]]


def fleeced(daemon, job="backup0"):
    return b.job(daemon, job).get("fleece-bytes", 0)


@pytest.mark.parametrize("kind", ("raw", "memory", "qcow2", "ram", "nbd"))
def test_a_pull_under_verified_load(suite, kind):
    """nbdcopy and qemu-img read the frozen disk while verified load writes by four queues. The queues of the guest and those of
    the clients move. Both copies are what the disk was at the start."""
    name = f"pull-load-{kind}"
    socket, state = suite.path(f"{name}.sock"), suite.path(f"{name}.state")
    server = None
    if kind == "nbd":
        server = e.serve(suite.rig, f"format=ram,size={LOAD_SIZE}", name=f"{name}.server")
        disk = f"uri={e.uri(server)}"
    elif kind == "ram":
        disk = f"format=ram,size={LOAD_SIZE}"
    elif kind == "qcow2":
        disk = f"format=qcow2,file={b.create(suite.path(f'{name}.qcow2'), LOAD_SIZE)}"
    else:
        disk = f"file={suite.image(f'{name}.img', LOAD_SIZE, kind == 'memory')}"
    daemon = r.Daemon(
        suite.rig,
        *("--disk", f"name=d0,{disk}"),
        *("--export", f"type=vhost-user-blk,name=e0,disk=d0,socket={socket},queues=4,workers=per-queue"),
        name=name,
    )
    first = r.Child(suite.rig, f"{name}.first", load_argv(socket, "--runtime", "2s", "--state", state))
    r.require(first.wait(r.WAIT_S) == 0, f"the load failed: {first.tail()}")
    live, before = serve(suite, daemon, name, "d0", "live"), suite.path(f"{name}.before")
    r.run(nbdcopy(live, before, "live"), timeout_s=120)
    pull(daemon, "--fleece", suite.memory / f"{name}.fleece")
    second = r.Child(suite.rig, f"{name}.second", load_argv(socket, "--runtime", r.FOREVER, "--seed", "2"))
    at = serve(suite, daemon, name, "p0", "n0", "queues=4")
    moves = 0
    for number, command in enumerate((nbdcopy, convert, nbdcopy)):
        if number:
            r.wait_for("much is overwritten", lambda least=8 * number * MIB: fleeced(daemon) >= least)
        copy = suite.path(f"{name}.copy")
        reader = r.Child(suite.rig, f"{name}.reader{number}", command(at, copy))
        while reader.running():
            r.require(second.running(), f"the load ended: {second.tail()}")
            daemon.attach(f"e0:{moves % 4}", (moves * 3 + 1) % 4)
            daemon.cli("attach", f"n0:{moves % 4}", str((moves + 2) % 4), check=False)
            moves += 1
        r.require(reader.wait(r.WAIT_S) == 0, f"{command.__name__}: {reader.tail()}")
        b.equal(copy.read_bytes(), before.read_bytes(), f"copy {number} by {command.__name__}")
        copy.unlink()
    # Those copies may have taken less time than a command does.
    b.equal(copied_with_moves(suite, daemon, at, name), before.read_bytes(), "the copy of a reader whose queue moves")
    # A VMM, too, can have the frozen disk. It has all of the first load.
    vhost = suite.path(f"{name}.frozen")
    daemon.cli("export", "add", f"type=vhost-user-blk,name=v0,disk=p0,socket={vhost},readonly=on,workers=1")
    r.run([r.binary("vshunt-bench"), "verify", "--socket", vhost, "--state", state], timeout_s=120)
    r.require(second.running(), f"the load ended: {second.tail()}")
    kept = fleeced(daemon)
    r.message_of(daemon.cli("job", "complete", "backup0", check=False), "n0", "v0", code=(1,))
    daemon.cli("export", "remove", "v0", "--force")
    r.require(kept, "nothing was kept")
    daemon.cli("export", "remove", "n0")
    daemon.cli("job", "complete", "backup0")
    r.require(disks(daemon) == ["d0"], f"the disks are {disks(daemon)}")
    r.require(second.interrupt() == 0, f"the load failed: {second.tail()}")
    # The disk is not what it was.
    after = suite.path(f"{name}.after")
    r.run(nbdcopy(live, after, "live"), timeout_s=120)
    r.require(after.read_bytes() != before.read_bytes(), "nothing was written meanwhile")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
    if server:
        e.ends_well(server)
    suite.rig.say(f"{kept // MIB} MiB were kept, {moves} moves")


@pytest.mark.parametrize("kind", ("raw", "qcow2", "ram"))
def test_writes_zeroes_and_discards(suite, kind):
    """The guest writes, discards and clears while the disk is frozen. A mount, too, shows what it was."""
    disk = b.Disk(suite, f"pull-changes-{kind}", kind)
    daemon = disk.mount
    was = bytes(disk.data)
    pull(disk.mount, "--fleece", suite.path(f"pull-changes-{kind}.fleece"))
    at = serve(suite, daemon, f"pull-changes-{kind}")
    mounted = suite.path(f"pull-changes-{kind}.p0.mnt")
    disk.cli("export", "add", f"type=fuse,name=f1,disk=p0,mountpoint={mounted}")
    for _ in range(4):
        b.equal(copied(suite, at), was, "the frozen disk")
        disk.change()
    with m.Opened(disk.mount.path) as fd:
        m.fallocate(fd, m.PUNCH, 0, b.SIZE)
    disk.data[:] = bytes(b.SIZE)
    b.equal(copied(suite, at), was, "the frozen disk after a discard of everything")
    b.equal(mounted.read_bytes(), was, "the mount of the frozen disk")
    for export in ("n0", "f1"):
        disk.cli("export", "remove", export)
    disk.cli("job", "complete", "backup0")
    b.equal(b.contents(suite, disk.mount.path, "raw"), bytes(disk.data), "the disk")
    disk.mount.stop()


@pytest.mark.parametrize("kind", ("raw", "memory", "qcow2"))
def test_the_map(suite, kind):
    """`base:allocation` has the holes of the disk at the start. What was written since counts as data."""
    mount = b.source(suite, f"pull-map-{kind}", kind, b.SIZE)
    b.put(mount.path, 4 * MIB, b"x" * MIB)
    pull(mount, "--fleece", suite.path(f"pull-map-{kind}.fleece"))
    at = serve(suite, mount, f"pull-map-{kind}")

    def holes(client):
        at, found = 0, []
        while at < b.SIZE:
            error, replies = client.call(c.STATUS, at, b.SIZE - at)
            r.require(error == 0, f"the state ends with {error}")
            for length, flags in replies[0][1]:
                found += [(at, at + length)] if flags else []
                at += length
        joined = found[:1]
        for start, end in found[1:]:
            joined = [*joined[:-1], (joined[-1][0], end)] if joined[-1][1] == start else [*joined, (start, end)]
        return joined

    with c.Client(at, "n0", "structured", (c.ALLOCATION,)) as client:
        r.require(holes(client) == [(0, 4 * MIB), (5 * MIB, b.SIZE)], f"the holes are {holes(client)}")
        with m.Opened(mount.path) as fd:
            m.fallocate(fd, m.PUNCH, 4 * MIB, MIB)
        b.put(mount.path, 8 * MIB, b"y" * MIB)
        want = [(0, 4 * MIB), (5 * MIB, 8 * MIB), (9 * MIB, b.SIZE)]
        r.require(holes(client) == want, f"the holes are {holes(client)}, not {want}")
        r.require(client.read(4 * MIB, MIB) == b"x" * MIB and client.read(8 * MIB, MIB) == bytes(MIB), "it has changed")
        client.ask(c.DISC)
    mount.cli("export", "remove", "n0", "--force")
    mount.cli("job", "complete", "backup0")
    mount.stop()


def dirty_extents(client, context, size):
    """The dirty ranges of a disk, from the server."""
    at, found = 0, []
    while at < size:
        error, replies = client.call(c.STATUS, at, size - at)
        r.require(error == 0 and replies[0][0] == client.contexts[context], f"{error} {replies}")
        for length, flags in replies[0][1]:
            if flags & 1:
                found.append((at, length))
            at += length
    return found


def update(socket, copy):
    """Reads the dirty ranges of b0 into a copy. -> the bytes that were read."""
    with c.Client(socket, "n0", "structured", (DIRTY + "b0",)) as client:
        extents = dirty_extents(client, DIRTY + "b0", len(copy))
        for at, length in extents:
            for start in range(at, at + length, MIB):
                size = min(MIB, at + length - start)
                copy[start : start + size] = client.read(start, size)
        client.ask(c.DISC)
    return sum(length for _, length in extents)


@pytest.mark.parametrize("kind", ("raw", "qcow2"))
def test_incremental_pulls(suite, kind):
    """A full pull begins a bitmap. Each later one offers the blocks that changed since the one before, also if one was cancelled."""
    name = f"pull-chain-{kind}"
    disk, fleece = b.Disk(suite, name, kind), suite.path(f"{name}.fleece")
    was = bytes(disk.data)
    pull(disk.mount, "--fleece", fleece, "--bitmap", "b0")
    disk.change()
    at = serve(suite, disk.mount, name)
    copy = bytearray(copied(suite, at))
    b.equal(copy, was, "the full backup")
    disk.cli("export", "remove", "n0")
    disk.cli("job", "complete", "backup0")
    disk.cli("job", "dismiss")
    for number in range(4):
        disk.change()
        was = bytes(disk.data)
        pull(disk.mount, "--fleece", fleece, "--incremental", "b0")
        disk.change()
        shown = json.loads(disk.cli("bitmap", "list", "p0", "--json").stdout)
        r.require([x["name"] for x in shown] == ["b0"] and shown[0]["count"] > 0, f"p0 has the bitmaps {shown}")
        at = serve(suite, disk.mount, name)
        with c.Client(at, "n0", "structured", (DIRTY + "b0", c.ALLOCATION)) as client:
            r.require(len(client.contexts) == 2, f"the contexts are {client.contexts}")
        if number == 1:
            # What a cancelled one would have had is part of the next one.
            disk.cli("export", "remove", "n0")
            disk.cli("job", "cancel", "backup0")
            r.require(b.bitmap(disk.mount)["count"] >= shown[0]["count"], "the bitmap lost blocks")
        else:
            read = update(at, copy)
            r.require(0 < read < b.SIZE, f"{read} bytes were dirty")
            b.equal(copy, was, f"incremental backup {number}")
            disk.cli("export", "remove", "n0")
            disk.cli("job", "complete", "backup0")
        disk.cli("job", "dismiss")
    disk.mount.stop()


def test_no_space_for_the_fleecing_file(suite):
    """The job fails with an event. Reads of the frozen disk fail from then on, no write does, and the bitmap is restored."""
    mount, writers = busy(suite, "pull-full", "raw")
    folder = small(suite)
    room = os.statvfs(folder).f_bfree
    mount.cli("bitmap", "add", "d0", "b0")
    writers.wait_each(20)
    events = b.Qmp(mount.daemon)
    with contextlib.ExitStack() as stack:
        with writers.held():
            pull(mount, "--fleece", folder / "fleece", "--incremental", "b0")
            dirty = json.loads(mount.cli("bitmap", "list", "p0", "--json").stdout)[0]["count"]
            at = serve(suite, mount, "pull-full")
            client = stack.enter_context(c.Client(at, "n0", "structured", (c.ALLOCATION, DIRTY + "b0")))
            client.read(0, MIB)
        ended(mount, "backup0", "No space left", "--fleece")
        for offset in (0, 4 * MIB, b.BUSY_SIZE - 4096):
            error, _ = client.call(c.READ, offset, 4096)
            r.require(error == c.EIO, f"a read of the frozen disk ends with {error}")
        r.require(client.call(c.STATUS, 0, MIB)[0] == c.EIO, "the state of a range is known")
        event = events.until("BLOCK_JOB_COMPLETED", "backup0")
        r.require("No space left" in event["data"]["error"], f"the event is {event}")
        lost = events.until("DISK_LOST", "p0")
        r.require("backup0" in lost["data"]["reason"] and "No space left" in lost["data"]["reason"], f"the event is {lost}")
        gone_on(mount, writers)
        r.require(b.bitmap(mount)["count"] >= dirty > 0, "the bitmap lost blocks")
        r.wait_for("the room is given back", lambda: os.statvfs(folder).f_bfree >= room)
        r.require(disks(mount.daemon) == ["d0", "p0"], "the frozen disk is gone, and has an export")
        client.ask(c.DISC)
    r.wait_for("the client is gone", lambda: mount.cli("export", "remove", "n0", check=False).returncode == 0)
    mount.cli("disk", "remove", "p0")
    # It works again with room.
    pull(mount, "--fleece", suite.memory / "pull-full.fleece", "--job", "j1")
    at = serve(suite, mount, "pull-full")
    once, again = copied(suite, at), copied(suite, at)
    b.equal(once, again, "the second copy")
    mount.cli("export", "remove", "n0")
    mount.cli("job", "complete", "j1")
    gone_on(mount, writers)
    writers.stop()
    mount.stop()


@contextlib.contextmanager
def file_system(suite, name, image):
    """A file system in `image`, mounted at a folder."""
    folder = suite.path(name)
    folder.mkdir()
    r.run([r.tool("mkfs.ext4", "e2fsprogs"), "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", image])
    done = r.run(["mount", "-o", "loop", image, folder], check=False)
    if done.returncode != 0:
        raise r.Skipped(f"no loop device can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        r.wait_for("the file system is unmounted", lambda: r.run(["umount", folder], check=False).returncode == 0)


def test_a_fleecing_file_that_cannot_be_written_back(suite):
    """The page cache takes it, and the storage below is full. What was read is no backup, and `job complete` says so."""
    mount, writers = busy(suite, "pull-lost", "raw")
    mount.cli("bitmap", "add", "d0", "b0")
    writers.wait_each(20)
    store = suite.path("store")
    store.mkdir()
    done = r.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", store], check=False)
    if done.returncode != 0:
        raise r.Skipped(f"no tmpfs can be mounted: {done.stderr.strip()}")
    image = store / "image"
    image.touch()
    os.truncate(image, 256 * MIB)
    try:
        with file_system(suite, "lost", image) as folder:
            os.sync()
            with open(store / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(4096)):
                    pass
            pull(mount, "--fleece", folder / "fleece", "--incremental", "b0")
            dirty = json.loads(mount.cli("bitmap", "list", "p0", "--json").stdout)[0]["count"]
            at = serve(suite, mount, "pull-lost")
            writers.wait_each(200)
            r.require(fleeced(mount.daemon) > 0, "nothing is in the fleecing file")
            with c.Client(at, "n0") as client:
                client.read(0, 8 * MIB)
                client.ask(c.DISC)
            r.wait_for("the client is gone", lambda: mount.cli("export", "remove", "n0", check=False).returncode == 0)
            r.message_of(mount.cli("job", "complete", "backup0", check=False), "fleecing file", "--fleece", code=(1,))
            shown = b.job(mount.daemon)
            r.require(shown["status"] == "concluded" and shown["error"], f"the job is shown as {shown}")
            r.require(b.bitmap(mount)["count"] >= dirty > 0, "the bitmap lost blocks")
            r.require(disks(mount.daemon) == ["d0"], f"the disks are {disks(mount.daemon)}")
            gone_on(mount, writers)
    finally:
        r.run(["umount", store], check=False)
    writers.stop()
    mount.stop()


def test_an_end_without_exports_leaves_nothing(suite):
    """A job whose fleecing file is full takes its disk along."""
    mount, writers = busy(suite, "pull-alone", "raw")
    pull(mount, "--fleece", small(suite) / "fleece", "--bitmap", "b0")
    ended(mount, "backup0", "No space left")
    r.require(disks(mount.daemon) == ["d0"], f"the disks are {disks(mount.daemon)}")
    r.require(b.bitmap(mount) is None, "a bitmap that was made for the backup is left")
    gone_on(mount, writers)
    writers.stop()
    mount.stop()


def test_cancel_with_a_reader(suite):
    """A job with a reader does not end. The message names the export, and everything continues."""
    mount, writers = busy(suite, "pull-cancel", "qcow2")
    fleece = suite.memory / "pull-cancel.fleece"
    pull(mount, "--fleece", fleece)
    r.require(not fleece.exists(), "the fleecing file has a name")
    at = serve(suite, mount, "pull-cancel")
    client = c.Client(at, "n0")
    was = client.read(0, 8 * MIB)
    for end in ("cancel", "complete"):
        r.message_of(mount.cli("job", end, "backup0", check=False), "n0", "p0", "export remove", "--force", code=(1,))
        gone_on(mount, writers)
        r.require(client.read(0, 8 * MIB) == was, "the frozen disk has changed")
    mount.cli("export", "remove", "n0", "--force")
    r.require(client.ends(), "the client is still connected")
    mount.cli("job", "cancel", "backup0")
    r.require(b.job(mount.daemon)["cancelled"] and disks(mount.daemon) == ["d0"], "it is not cancelled")
    done = mount.cli("export", "add", f"type=nbd,name=n1,disk=p0,listen=unix:{suite.path('no.nbd')}", check=False)
    r.message_of(done, "p0", code=(1,))
    gone(mount.daemon, fleece)
    gone_on(mount, writers)
    # By force, the job ends before its reader, whose reads fail from then on.
    pull(mount, "--fleece", fleece, "--job", "j0")
    with c.Client(serve(suite, mount, "pull-cancel"), "n0") as client:
        client.read(0, MIB)
        mount.cli("job", "cancel", "j0", "--force")
        r.require(client.call(c.READ, 0, 4096)[0] == c.EIO, "the frozen disk can be read after its job")
        gone(mount.daemon, fleece)
        gone_on(mount, writers)
    mount.cli("export", "remove", "n0", "--force")
    mount.cli("disk", "remove", "p0")
    # The end of the daemon does not wait for a reader that takes no reply.
    pull(mount, "--fleece", fleece, "--job", "j1")
    client = c.Client(serve(suite, mount, "pull-cancel"), "n0")
    client.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            client.send(client.header(c.READ, 0, MIB) * 16)
    writers.stop()
    mount.cli("quit", "--force")
    code = mount.child.wait(r.WAIT_S)
    r.require(code == 0, f"the daemon ended with {code}: {mount.child.tail()}")
    client.close()
    b.checked(mount.image)


def test_a_reader_that_does_not_read(suite):
    """Clients that ask for much and take no reply do not hold up a guest."""
    mount, writers = busy(suite, "pull-slow", "raw")
    pull(mount, "--fleece", suite.memory / "pull-slow.fleece")
    at = serve(suite, mount, "pull-slow")
    clients = [c.Client(at, "n0") for _ in range(4)]
    for client in clients:
        for number in range(16):
            client.ask(c.READ, number * MIB, 2 * MIB)
    for _ in range(4):
        writers.wait_each(200)
    broken = [q for q in mount.queues() if q["errors"]]
    r.require(not broken, f"requests failed: {broken}")
    mount.cli("export", "remove", "n0", "--force")
    mount.cli("job", "complete", "backup0")
    for client in clients:
        client.close()
    gone_on(mount, writers)
    writers.stop()
    mount.stop()


def test_kill_9(suite, rand):
    """After kill -9 neither the job nor its file is left, and the disk has all synced writes."""
    mount = b.source(suite, "pull-kill", "raw", b.SIZE)
    b.put(mount.path, 0, rand.randbytes(b.SIZE))
    fleece = suite.path("pull-kill.fleece")
    for _ in range(2):
        pull(mount, "--fleece", fleece)
        at = serve(suite, mount, "pull-kill")
        client = c.Client(at, "n0")
        was = client.read(0, MIB)
        written = rand.randbytes(MIB)
        with m.Opened(mount.path) as fd:
            os.pwrite(fd, written, 0)
            os.fsync(fd)
        r.require(client.read(0, MIB) == was, "the frozen disk has changed")
        mount.child.kill()
        r.require(not fleece.exists() and client.ends(), "something is left")
        mount.start()
        r.require(mount.daemon.status()["jobs"] == [] and disks(mount.daemon) == ["d0"], "the job is there again")
        with m.Opened(mount.path) as fd:
            r.require(os.pread(fd, MIB, 0) == written, "a synced write is lost")
    mount.stop()


def test_what_is_refused(suite):
    """Each message names the thing that is wrong, and nothing is left behind."""
    daemon = r.Daemon(suite.rig, "--disk", f"name=d0,format=ram,size={MIB}", name="pull-refused")
    fleece, folder = suite.path("pull-refused.fleece"), suite.path("pull-refused.d")
    folder.mkdir()
    use = ("--fleece", fleece)
    wrong = (
        ((), ("--fleece",)),
        ((*use, "--to", folder / "f"), ("--to",)),
        ((*use, "--compress"), ("--compress",)),
        ((*use, "--incremental", "b0"), ("b0",)),
    )
    for name in ("", "-x", "a,b", "..", "x" * 65):
        arguments = {"disk": "d0", "pull": name, "fleece": str(fleece)}
        r.message_of(daemon.cli("qmp", "backup-start", json.dumps(arguments), check=False), "disk name")
    for more, words in wrong:
        r.message_of(pull(daemon, *more, check=False), *words)
    r.message_of(pull(daemon, *use, name="d0", check=False), "d0", "already")
    r.require(not fleece.exists() and daemon.status()["jobs"] == [] and disks(daemon) == ["d0"], "something is left")
    for arguments, word in (
        ({"disk": "d0", "pull": "p0"}, "fleece"),
        ({"disk": "d0", "pull": "p0", "fleece": str(fleece), "target": "d1"}, "target"),
        ({"disk": "d0", "pull": "p0", "fleece": str(fleece), "speed": 1}, "speed"),
    ):
        r.message_of(daemon.cli("qmp", "backup-start", json.dumps(arguments), check=False), word)
    r.message_of(daemon.cli("disk", "add", "name=x,format=frozen", check=False), "frozen")
    pull(daemon, *use)
    second = ("--fleece", suite.path("pull-refused.2"), "--job", "j2")
    r.message_of(pull(daemon, *second, name="p1", check=False), "d0", "backup0", code=(1,))
    r.message_of(pull(daemon, *second, disk="p0", name="p1", check=False), "p0", "backup0", code=(1,))
    for disk in ("d0", "p0"):
        for command in ("mirror", "snapshot"):
            done = daemon.cli(command, disk, "--to", folder / "f", check=False)
            r.message_of(done, disk, "complete it, or cancel it", code=(1,))
    r.message_of(daemon.cli("disk", "add", f"name=p0,format=ram,size={MIB}", check=False), "p0", "already")
    r.message_of(daemon.cli("job", "complete", "backup0", "--no-switch", check=False), "--no-switch", code=(1,))
    r.message_of(daemon.cli("backup", "start", "d0", "--to", folder / "f", check=False), "d0", "backup0", code=(1,))
    for command in (("job", "pause", "backup0"), ("job", "speed", "backup0", "1M")):
        r.message_of(daemon.cli(*command, check=False), "backup0", "pull", code=(1,))
    for command in (("disk", "remove", "p0"), ("disk", "remove", "d0"), ("resize", "p0", "2M"), ("resize", "d0", "2M")):
        r.message_of(daemon.cli(*command, check=False), "backup0", code=(1,))
    r.message_of(daemon.cli("bitmap", "add", "p0", "b1", check=False), "p0", code=(1,))
    export = f"type=nbd,name=n0,disk=p0,listen=unix:{suite.path('pull-refused.nbd')}"
    r.message_of(daemon.cli("export", "add", f"{export},writable=on", check=False), "p0", "read-only", code=(1,))
    kernel = f"type=vhost-user-blk,name=k0,disk=p0,socket={suite.path('pull-refused.k')},engine=kernel,readonly=on"
    r.message_of(daemon.cli("export", "add", kernel, check=False), "k0", code=(1,))
    daemon.cli("export", "add", export)
    with c.Client(suite.path("pull-refused.nbd"), "n0") as client:
        r.require(client.call(c.WRITE, 0, 512, 0, bytes(512))[0] == c.EPERM, "a write is not refused")
        client.ask(c.DISC)
    shown = daemon.cli("config", "show").stdout
    served = [line for line in shown.splitlines() if not line.startswith("#")]
    r.require("p0" not in "".join(served) and "Disk p0" in shown, f"the configuration has the frozen disk: {shown}")
    r.wait_for("the client is gone", lambda: daemon.cli("export", "remove", "n0", check=False).returncode == 0)
    nodes = json.loads(daemon.cli("qmp", "query-named-block-nodes").stdout)
    r.require({n["node-name"]: n["drv"] for n in nodes}["p0"] == "snapshot-access", f"the nodes are {nodes}")
    daemon.cli("qmp", "block-job-complete", '{"device": "backup0"}')
    daemon.cli("job", "wait", "backup0")
    r.message_of(daemon.cli("job", "complete", "backup0", check=False), "backup0", "over", code=(1,))
    daemon.cli("backup", "start", "d0", "--to", folder / "f", "--job", "push", "--speed", "64K")
    r.message_of(daemon.cli("job", "complete", "push", check=False), "push", "pull", code=(1,))
    daemon.cli("job", "cancel", "push")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
