"""qcow2 images on NBD servers: load, kills of the daemon and of the server, full exports, images and servers that lie."""

import json
import os
import random
import time

import nbd_servers as n
import pytest
import qcow2_disks as q
import rig as r

MIB = 1 << 20
# The export has room for the whole disk and its tables.
EXPORT = 96 * MIB
DISK = 64 * MIB


def created(server, export="", options="", size=DISK):
    """An image, made by QEMU on the server. Returns its URI."""
    uri = server.uri(export)
    opts = ["-o", options] if options else []
    q.qemu_img("create", "-q", "-f", "qcow2", *opts, uri, str(size))
    return uri


def key(uri):
    """A URI as a value in a list of keys."""
    return uri.replace(",", ",,")


def serve(rig, uri, *more, name, keys=""):
    disk = f"name=d0,format=qcow2,uri={key(uri)}{keys}"
    return r.Daemon(rig, "--disk", disk, "--export", n.export(rig), *more, name=name)


def of_nbdkit_memory(rig):
    return n.nbdkit(rig, "memory", str(EXPORT), name="q-memory"), ""


def of_nbdkit_limited(rig):
    """Requests have to be multiples of 512 bytes, and of 64 KiB at most."""
    sizes = ("blocksize-minimum=512", "blocksize-preferred=4096", "blocksize-maximum=64K", "blocksize-error-policy=error")
    return n.nbdkit(rig, "--filter=blocksize-policy", "memory", str(EXPORT), *sizes, name="q-limited"), ""


def of_qemu(rig):
    return n.qemu_nbd(rig, rig.image("q-qemu.img", EXPORT), name="q-qemu"), "disk"


def of_qemu_one(rig):
    return n.qemu_nbd(rig, rig.image("q-one.img", EXPORT), clients=1, name="q-one"), "disk"


def of_nbd_server(rig):
    return n.NbdServer(rig, rig.image("q-nbd-server.img", EXPORT), "q-nbd-server"), "disk"


SERVERS = (of_nbdkit_memory, of_nbdkit_limited, of_qemu, of_qemu_one, of_nbd_server)


@pytest.mark.parametrize("options", ("", "cluster_size=4k,extended_l2=off", "extended_l2=on"), ids=("plain", "4k", "subclusters"))
@pytest.mark.parametrize("make", SERVERS, ids=lambda make: make.__name__[3:])
def test_load_is_verified(rig, make, options):
    server, export = make(rig)
    uri = created(server, export, options)
    daemon = serve(rig, uri, name=f"{make.__name__}-load")
    disk = daemon.status()["disks"][0]
    r.require(disk["format"] == "qcow2" and disk["size-bytes"] == DISK, f"{disk}")
    load = r.Child(rig, "load-4k", n.load(rig, "--size", "24M"))
    workers = [w["id"] for w in daemon.status()["workers"]]
    for turn in range(4):
        for queue in range(2):
            daemon.attach(f"vm0:{queue}", workers[(turn + queue) % len(workers)])
    code = load.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    # Long requests are done in parts, with clusters that are there and clusters that are not.
    n.loaded(rig, "3m", "--size", "64M", bs="3M")
    # What guests see and what QEMU sees are the same.
    n.ends(daemon)
    q.checked(uri)
    copy = rig.dir / "copy.img"
    q.qemu_img("convert", "-f", "qcow2", "-O", "raw", uri, copy)
    q.same(uri, "qcow2", copy, "raw")
    daemon = serve(rig, uri, name=f"{make.__name__}-readonly", keys=",readonly=on")
    n.loaded(rig, "again", "--size", "24M", rw="randread")
    n.ends(daemon)
    server.kill()


@pytest.mark.root
def test_a_program_and_the_system_have_the_same(rig):
    """A random program of writes, zeroes, holes and reads, through a mount, with QEMU's image in between."""
    q.mounts()
    server = n.qemu_nbd(rig, rig.image("program.img", EXPORT), name="program")
    uri = created(server, "disk")
    plain = rig.dir / "plain.raw"
    rng = random.Random(11)
    with open(plain, "wb") as file:
        file.truncate(DISK)
    for _ in range(3):
        path = rig.dir / "program.mnt"
        export = f"type=fuse,name=e0,disk=d0,mountpoint={path},queues=2,writable=on,workers=per-queue"
        daemon = r.Daemon(rig, "--disk", f"name=d0,format=qcow2,uri={uri}", "--export", export, name="program-vshunt")
        with open(path, "r+b", buffering=0) as ours, open(plain, "r+b", buffering=0) as theirs:
            for _ in range(60):
                q.one_step(rng, DISK, ours, theirs)
        daemon.cli("quit", "--force")
        r.require(daemon.child.wait() == 0, daemon.child.tail())
        q.checked(uri)
        q.same(uri, "qcow2", plain, "raw")
    server.kill()


def test_a_daemon_that_is_killed_leaves_an_image_without_errors(rig):
    """Leaks are allowed: a killed daemon has reserved clusters. What was flushed is there."""
    server = n.qemu_nbd(rig, rig.image("killed.img", EXPORT), name="killed")
    uri = created(server, "disk")
    chance = random.Random(3)
    plain = rig.dir / "flushed.raw"
    daemon = serve(rig, uri, name="killed-vshunt")
    n.loaded(rig, "flushed", "--size", "16M", "--seed", "1")
    # vshunt-bench does not flush its last writes, and the daemon does at its end: from here on,
    # these 16 MiB are on the server whatever happens.
    n.ends(daemon)
    q.qemu_img("convert", "-f", "qcow2", "-O", "raw", uri, plain)
    daemon = serve(rig, uri, name="killed-vshunt")
    q_size = 16 * MIB
    for turn in range(10):
        load = r.Child(rig, f"load-{turn}", n.load(rig, "--offset", str(q_size), "--runtime", r.FOREVER))
        r.wait_for("requests", lambda: n.requests(daemon, load) > 200)
        time.sleep(chance.uniform(0, 0.3))
        daemon.child.kill()
        load.kill()
        q.checked(uri, leaks=True)
        now = rig.dir / "now.raw"
        q.qemu_img("convert", "-f", "qcow2", "-O", "raw", uri, now)
        with open(plain, "rb") as a, open(now, "rb") as b:
            pairs = ((at, a.read(4096), b.read(4096)) for at in range(0, q_size, 4096))
            lost = [(at, "zeroes" if not any(found) else "other data") for at, flushed, found in pairs if flushed != found]
        r.require(not lost, f"kill {turn}: what was flushed differs in {len(lost)} blocks: {lost[:8]}")
        daemon = serve(rig, uri, name="killed-vshunt")
        r.require("was not closed" in daemon.child.output(), daemon.child.output())
    n.ends(daemon)
    q.checked(uri)
    server.kill()


def test_with_writethrough_a_guest_survives_the_daemon(rig):
    """Each completed write is on the server, so the front end continues with the next daemon."""
    server = n.qemu_nbd(rig, rig.image("through.img", EXPORT), name="through")
    uri = created(server, "disk")
    daemon = serve(rig, uri, name="of-through", keys=",cache=writethrough")
    argv = n.load(rig, "--reconnect", "120s", "--runtime", r.FOREVER, rw="randwrite")
    # The guest sees no write cache.
    at = argv.index("--flush-every")
    load = r.Child(rig, "load-through", argv[:at] + argv[at + 2 :])
    chance = random.Random(5)
    for _ in range(5):
        r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
        time.sleep(chance.uniform(0, 0.3))
        daemon.child.kill()
        q.checked(uri, leaks=True)
        daemon.start()
    r.wait_for("requests after the last kill", lambda: n.requests(daemon, load) > 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    q.checked(uri)
    server.kill()


@pytest.mark.root
def test_a_mount_grows_and_shrinks_the_disk(rig):
    q.mounts()
    server = n.qemu_nbd(rig, rig.image("grows.img", EXPORT), clients=1, name="grows")
    uri = created(server, "disk", size=8 * MIB)
    path = rig.dir / "grows.mnt"
    export = f"type=fuse,name=e0,disk=d0,mountpoint={path},writable=on,growable=on"
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=qcow2,uri={uri}", "--export", export, name="of-grows")
    want = bytearray(24 * MIB)
    data = random.Random(4).randbytes(3 * MIB)
    with open(path, "r+b", buffering=0) as file:
        file.truncate(len(want))
        for at in (7 * MIB, 20 * MIB + 512):
            file.seek(at)
            file.write(data)
            want[at : at + len(data)] = data
        file.truncate(21 * MIB)
        file.truncate(len(want))
        want[21 * MIB :] = bytes(len(want) - 21 * MIB)
        file.seek(0)
        r.require(file.read() == want, "it reads as something else")
    daemon.cli("quit", "--force")
    r.require(daemon.child.wait() == 0, daemon.child.tail())
    q.checked(uri)
    plain = rig.dir / "grows.raw"
    plain.write_bytes(want)
    q.same(uri, "qcow2", plain, "raw")
    server.kill()


@pytest.mark.root
@pytest.mark.parametrize("keys", ("", ",readonly=on"), ids=("written", "readonly"))
def test_an_image_of_any_length(rig, keys):
    """Compressed clusters up to the last byte of an export that is no whole sectors long, read by QEMU through vshunt."""
    q.mounts()
    plain = rig.dir / "any.raw"
    chance = random.Random(6)
    # Halves of clusters can be compressed.
    plain.write_bytes(b"".join(chance.randbytes(32 << 10) + bytes(32 << 10) for _ in range(64)))
    image = rig.dir / "any.qcow2"
    q.qemu_img("convert", "-c", "-f", "raw", "-O", "qcow2", plain, image)
    with open(image, "ab") as file:
        file.write(b"\xff" * 100)
    server = n.nbdkit(rig, "file", image, name="any")
    path = rig.dir / "any.mnt"
    export = f"type=fuse,name=e0,disk=d0,mountpoint={path}"
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=qcow2,uri={server.uri()}{keys}", "--export", export, name="of-any")
    q.same(path, "raw", plain, "raw")
    daemon.cli("quit", "--force")
    r.require(daemon.child.wait() == 0, daemon.child.tail())
    server.kill()
    os.truncate(image, image.stat().st_size - 100)
    q.checked(image)


KILLS = 20


@pytest.mark.parametrize("clients", (4, 1), ids=("several", "one"))
def test_a_server_that_is_killed_loses_no_write(rig, clients, pytestconfig):
    name = f"server-{clients}"
    server = n.qemu_nbd(rig, rig.image(f"{name}.img", EXPORT), clients=clients, name=name)
    uri = created(server, "disk")
    daemon = serve(rig, uri, name=f"of-{name}", keys=",reconnect-delay=120")
    load = r.Child(rig, f"load-{name}", n.load(rig, "--runtime", r.FOREVER))
    chance = random.Random(7)
    for _ in range(pytestconfig.getoption("--kills") or KILLS):
        before = n.requests(daemon, load)
        r.wait_for("requests", lambda: n.requests(daemon, load) > before + 100)
        time.sleep(chance.uniform(0, 0.2))
        server.kill()
        time.sleep(chance.uniform(0, 0.3))
        server.start()
    before = n.requests(daemon, load)
    r.wait_for("requests after the last kill", lambda: n.requests(daemon, load) > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    q.checked(uri)
    server.kill()


def test_a_full_export_fails_writes_and_harms_nothing_else(rig):
    """The export ends inside a cluster. Its last bytes are of another one who shares the server's file."""
    size, rest = 8 * MIB + 4096, 1 * MIB
    image = rig.image("full.img", size + rest)
    with open(image, "r+b") as file:
        file.seek(size)
        file.write(b"\xa5" * rest)
    server = n.nbdkit(rig, "--filter=offset", "file", image, "offset=0", f"range={size}", name="full")
    uri = created(server)
    other = ("--disk", "name=d1,format=ram,size=64M", "--export", n.export(rig, "vm1", "d1"))
    daemon = serve(rig, uri, *other, name="of-full")
    load = r.Child(rig, "load-full", n.load(rig, "--runtime", "60s", rw="randwrite"))
    code = load.wait(120)
    r.require(code == 1 and "IOERR" in load.output(), f"{code}: {load.tail()}")
    r.require("No space left" in daemon.child.output(), daemon.child.output())
    # What is there can be read and written again, and the other disk works.
    argv = [a for a in n.load(rig, "--size", "4M", rw="randread") if a != "--verify"]
    r.require(r.run(argv, check=False).returncode == 0, "reads")
    r.require(r.run(n.load(rig, "--size", "16M", name="vm1")).returncode == 0, "the other disk")
    # The repair after a kill needs no space.
    daemon.child.kill()
    q.checked(uri, leaks=True)
    daemon = serve(rig, uri, *other, name="of-full")
    done = daemon.cli("snapshot", "--internal", "s0", "d0", check=False)
    r.require(done.returncode != 0 and "No space left" in done.stderr, f"{done.returncode}: {done.stderr}")
    r.require(r.run(argv, check=False).returncode == 0, "reads after the snapshot that failed")
    n.ends(daemon)
    q.checked(uri)
    r.require(image.read_bytes()[size:] == b"\xa5" * rest, "bytes behind the export were written")
    server.kill()


def test_two_more_connections_than_workers_are_enough(rig):
    """One that all share, and one for the worker of a job."""
    server = n.nbdkit(rig, "--filter=limit", "file", rig.image("limit.img", 3 * EXPORT), "limit=4", name="limit")
    daemon = serve(rig, created(server), name="of-limit")
    load = r.Child(rig, "load-limit", n.load(rig, "--runtime", r.FOREVER))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    for command in (
        ("snapshot", "--internal", "s1", "d0"),
        ("bitmap", "add", "d0", "b0"),
        ("resize", "d0", "+1M"),
        ("backup", "start", "d0", "--to", rig.dir / "limit.backup", "--bitmap", "b0", "--wait"),
    ):
        daemon.cli(*command, timeout_s=120)
        before = n.requests(daemon, load)
        r.wait_for("more requests", lambda before=before: n.requests(daemon, load) > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    r.require("warning" not in daemon.child.output(), daemon.child.output())
    q.checked(server.uri())
    server.kill()


def test_the_image_may_not_name_files_of_this_host(rig):
    secret = rig.image("secret.img", MIB)
    for name, options in (("backing", f"backing_file={secret},backing_fmt=raw"), ("data", f"data_file={secret},data_file_raw=on")):
        # QEMU makes it as a file, because it would resolve the names itself.
        image = rig.dir / f"{name}.qcow2"
        q.qemu_img("create", "-q", "-f", "qcow2", "-o", options, image, str(MIB))
        server = n.nbdkit(rig, "file", image, name=name)
        for more in ("", ",readonly=on"):
            n.refused(rig, f"name=d0,format=qcow2,uri={server.uri()}{more}", str(secret), "server may not choose")
        server.kill()


def test_one_daemon_writes_an_image_once(rig):
    """However its URI is written."""
    server, _ = of_qemu(rig)
    uri = created(server, "disk")
    daemon = serve(rig, uri, name="of-once")
    other = uri.replace("disk?", "%64isk?")
    for same in (uri, other):
        refused = daemon.cli("disk", "add", f"name=d1,format=qcow2,uri={key(same)}", check=False)
        r.message_of(refused, "image of disk d0 of this daemon already")
    daemon.cli("export", "remove", "vm0")
    daemon.cli("disk", "remove", "d0")
    daemon.cli("disk", "add", f"name=d1,format=qcow2,uri={key(other)}")
    n.ends(daemon)
    server.kill()


def test_keys_that_make_no_sense(rig):
    server = n.nbdkit(rig, "memory", str(MIB), name="keys")
    uri = server.uri()
    n.refused(rig, f"name=d0,format=qcow2,uri={uri},file=/x", "two images", "leave out")
    n.refused(rig, f"name=d0,format=qcow2,uri={uri}", "not a qcow2 image", "format=nbd")
    n.refused(rig, f"name=d0,format=qcow2,uri={uri},direct=on", "direct=on")
    n.refused(rig, f"name=d0,format=raw,uri={uri}", "uri", "format=qcow2")
    server.kill()


# HAS_FLAGS, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN.
NEITHER, FUA = 1 | 32 | 64 | 256, 8


def test_a_server_that_cannot_make_writes_stable_is_refused(rig):
    server = n.liar(rig, "honest", name="unstable", flags=NEITHER, size=EXPORT)
    uri = created(server)
    n.refused(rig, f"name=d0,format=qcow2,uri={uri}", "neither flush", "FUA", "cache=unsafe")
    for keys in (",cache=unsafe", ",readonly=on"):
        daemon = serve(rig, uri, name=f"unstable{keys[1:4]}", keys=keys)
        n.loaded(rig, keys[1:4], "--size", "512k", rw="randwrite" if "unsafe" in keys else "randread")
        n.ends(daemon)
    server.kill()


def test_a_server_that_cannot_flush_gets_writes_with_fua(rig):
    server = n.liar(rig, "honest", name="fua", flags=NEITHER | FUA, size=EXPORT)
    uri = created(server)
    daemon = serve(rig, uri, name="of-fua")
    n.loaded(rig, "fua", "--size", "8M")
    n.ends(daemon)
    q.checked(uri)
    server.kill()


WAYS = ("magic", "cookie", "long-chunk", "beyond", "half", "close")


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_lies_once_is_left(rig, way):
    server = n.liar(rig, way, name=f"q-{way}", once=1, after=400, size=EXPORT)
    uri = created(server)
    daemon = serve(rig, uri, name=f"of-q-{way}", keys=",reconnect-delay=120")
    n.loaded(rig, f"q-{way}", "--size", "8M")
    r.require("is lost" in daemon.child.output(), f"the server did not lie: {daemon.child.output()}")
    n.ends(daemon)
    q.checked(uri)
    server.kill()


def test_a_server_that_shrinks_is_not_used_again(rig):
    server = n.liar(rig, "shrink", name="q-shrink", after=600, size=EXPORT)
    uri = created(server)
    daemon = serve(rig, uri, name="of-q-shrink", keys=",reconnect-delay=1")
    load = r.Child(rig, "load-q-shrink", n.load(rig, "--runtime", "60s"))
    code = load.wait(120)
    r.require(code == 1, f"the load ends with an error: {code}: {load.tail()}")
    n.ends(daemon)
    r.require("are lost" in daemon.child.output(), "the image was not closed, and nothing says so")
    server.kill()


def test_garbage_instead_of_metadata(rig):
    """Bytes of the image change on the server while it is served, and each piece of it is garbage once when it is opened."""
    image = q.create(rig.dir / "garbage.qcow2", "cluster_size=4k", 16)
    q.fill(image, 5, 16)
    with open(image, "r+b") as file:
        file.truncate(EXPORT)
    good = image.read_bytes()
    chance = random.Random(9)
    for turn in range(12):
        server = n.nbdkit(rig, "file", image, name="garbage")
        uri = server.uri()
        if turn % 2:
            spoil(image, chance)
        argv = [r.binary("vshunt"), "serve", "--disk", f"name=d0,format=qcow2,uri={uri}", "--export", n.export(rig)]
        daemon = r.Child(rig, "garbage-vshunt", [*argv, "--control", rig.dir / "garbage.ctl"])
        socket = rig.dir / "vm0.sock"
        r.wait_for("it serves or refuses", lambda d=daemon: socket.exists() or not d.running())
        r.require(daemon.running() or turn % 2, f"an image without garbage is refused: {daemon.tail()}")
        if daemon.running():
            load = r.Child(rig, "garbage-load", [a for a in n.load(rig, "--runtime", "2s") if a != "--verify"])
            spoil(image, chance)
            load.wait(60)
            daemon.process.terminate()
        code = daemon.wait(60)
        r.require(code in (0, 1, 2), f"vshunt ended with {code}: {daemon.tail()}")
        r.require("panicked" not in daemon.output(), daemon.tail())
        server.kill()
        socket.unlink(missing_ok=True)
        image.write_bytes(good)


def spoil(image, chance):
    with open(image, "r+b") as file:
        for _ in range(40):
            file.seek(chance.randrange(1 << 20) // 8 * 8)
            file.write(chance.randbytes(8))


def test_a_server_that_hangs_at_the_open_is_given_up(rig):
    """Not for ever: the disk is refused after a while, and the daemon serves others."""
    server = n.liar(rig, "hang", name="q-hang", after=0)
    daemon = r.Daemon(rig, name="of-q-hang")
    done = daemon.cli("disk", "add", f"name=d0,format=qcow2,uri={server.uri()}", check=False, timeout_s=120)
    r.require(done.returncode != 0 and "does not answer" in done.stderr, f"{done.returncode}: {done.stderr}")
    daemon.cli("disk", "add", "name=d1,format=ram,size=1M")
    n.ends(daemon)
    server.kill()


def test_commands_end_while_the_server_hangs(rig):
    """It hangs while the image is open: commands that flush the image, and its close, fail after a while. Then it answers again."""
    server = n.nbdkit(rig, "file", rig.image("q-hung.img", EXPORT), name="q-hung")
    uri = created(server, size=32 * MIB)
    daemon = serve(rig, uri, name="of-q-hung")
    n.loaded(rig, "q-hung", "--size", "8M")
    daemon.cli("export", "remove", "vm0")
    server.child.suspend()
    resized = daemon.cli("resize", "d0", "48M", check=False, timeout_s=120)
    r.require(resized.returncode != 0, "an image grew on a server that hangs")
    r.require(daemon.status()["disks"][0]["size-bytes"] == 32 * MIB, f"{daemon.status()['disks']}")
    server.child.resume()
    # No request of the failed command is left, and the image is as it was.
    daemon.cli("resize", "d0", "48M", timeout_s=120)
    server.child.suspend()
    daemon.cli("disk", "remove", "d0", check=False, timeout_s=120)
    r.require(not daemon.status()["disks"], "the disk is not removed")
    n.ends(daemon)
    server.child.resume()
    server.kill()


def test_the_nodes_of_qemu_are_one_disk(rig):
    """`blockdev-add` of qcow2 over nbd. The same image is not written twice by one daemon."""
    server = n.qemu_nbd(rig, rig.image("nodes.img", EXPORT), export="a b", name="nodes")
    uri = created(server, "a%20b")
    daemon = r.Daemon(rig, name="of-nodes")

    def add(name, driver="qcow2", **more):
        nbd = {"driver": "nbd", "server": {"type": "unix", "path": str(server.socket)}, "export": "a b", "reconnect-delay": 5}
        node = {"driver": "qcow2", "file": nbd} if driver == "qcow2" else nbd
        return daemon.cli("qmp", "blockdev-add", json.dumps({**node, "node-name": name, **more}), check=False)

    done = add("d0")
    r.require(done.returncode == 0, done.stderr)
    node = json.loads(daemon.cli("qmp", "query-named-block-nodes").stdout)[0]
    r.require((node["drv"], node["file"], node["image"]["virtual-size"]) == ("qcow2", uri, DISK), f"{node}")
    for done in (add("d1"), add("d1", **{"read-only": True})):
        r.require(done.returncode != 0 and "image of disk d0" in done.stderr, f"{done}")
    daemon.cli("export", "add", n.export(rig))
    n.loaded(rig, "nodes", "--size", "8M")
    daemon.cli("qmp", "block-export-del", '{"id": "vm0"}')
    daemon.cli("qmp", "blockdev-del", '{"node-name": "d0"}')
    q.checked(uri)
    done = add("raw", driver="nbd")
    r.require(done.returncode == 0, done.stderr)
    r.require("image of disk raw" in add("d0").stderr, "the bytes of an open image are a disk, too")
    n.ends(daemon)
    server.kill()


def test_commands_that_close_the_image(rig):
    """Internal snapshots, a new size, dirty bitmaps and a backup, over the connection that is there."""
    server = n.qemu_nbd(rig, rig.image("commands.img", EXPORT), clients=1, name="commands")
    uri = created(server, "disk", size=32 * MIB)
    daemon = serve(rig, uri, name="of-commands")
    n.loaded(rig, "before", "--size", "8M")
    daemon.cli("snapshot", "--internal", "s0", "d0")
    n.loaded(rig, "after", "--size", "8M")
    daemon.cli("resize", "d0", "48M")
    r.require(daemon.status()["disks"][0]["size-bytes"] == 48 * MIB, f"{daemon.status()['disks']}")
    daemon.cli("qmp", "block-dirty-bitmap-add", '{"node": "d0", "name": "b0", "persistent": true}')
    n.loaded(rig, "larger", "--size", "48M", bs="64k")
    target = rig.dir / "backup.qcow2"
    daemon.cli("backup", "start", "d0", "--to", target, "--wait", timeout_s=120)
    done = daemon.cli("snapshot", "d0", "--to", rig.dir / "overlay.qcow2", check=False)
    r.require(done.returncode != 0 and "on a server" in done.stderr, f"{done.returncode}: {done.stderr}")
    done = daemon.cli("commit", "d0", check=False)
    r.require(done.returncode != 0, "a commit of an image without a backing image")
    n.ends(daemon)
    q.checked(uri)
    q.same(uri, "qcow2", target, "qcow2")
    listed = q.qemu_img("info", "-f", "qcow2", uri).stdout
    r.require("s0" in listed and "b0" in listed, listed)
    server.kill()
