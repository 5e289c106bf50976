"""Verified load on disks of real NBD servers, over UNIX sockets and TCP."""

import re
from pathlib import Path

import nbd_servers as n
import pytest
import rig as r


def of_nbdkit_memory(rig):
    return n.nbdkit(rig, "memory", str(n.SIZE)), ""


def of_nbdkit_file(rig):
    return n.nbdkit(rig, "file", rig.image("kit.img", n.SIZE)), "any"


def of_nbdkit_slow(rig):
    """Replies come in any order."""
    return n.nbdkit(rig, "--filter=delay", "memory", str(n.SIZE), "rdelay=2ms", "wdelay=1ms"), ""


def of_nbdkit_limited(rig):
    """Requests have to be multiples of 512 bytes, and of 64 KiB at most."""
    sizes = ("blocksize-minimum=512", "blocksize-preferred=4096", "blocksize-maximum=64K", "blocksize-error-policy=error")
    return n.nbdkit(rig, "--filter=blocksize-policy", "memory", str(n.SIZE), *sizes), ""


def of_qemu(rig):
    return n.qemu_nbd(rig, rig.image("qemu.img", n.SIZE)), "disk"


def of_qemu_one(rig):
    return n.qemu_nbd(rig, rig.image("qemu.img", n.SIZE), clients=1), "disk"


def of_nbd_server(rig):
    """The reference implementation: simple replies, a process for each connection, over TCP."""
    return n.NbdServer(rig, rig.image("nbd-server.img", n.SIZE), "nbd-server"), "disk"


def of_nbdkit_cached(rig):
    """It keeps writes to itself until a flush."""
    return n.nbdkit(rig, "--filter=cache", "memory", str(n.SIZE)), ""


def of_storage_daemon(rig):
    return n.storage_daemon(rig, rig.image("qsd.img", n.SIZE)), "disk"


def of_chunks(rig):
    return n.liar(rig, "honest"), ""


def of_extended(rig):
    return n.liar(rig, "honest", headers="extended"), ""


SERVERS = (
    of_nbdkit_memory,
    of_nbdkit_file,
    of_nbdkit_slow,
    of_nbdkit_limited,
    of_qemu,
    of_qemu_one,
    of_nbd_server,
    of_nbdkit_cached,
    of_storage_daemon,
    of_chunks,
    of_extended,
)


@pytest.mark.parametrize("bs", ("4k", "256k"))
@pytest.mark.parametrize("make", SERVERS, ids=lambda make: make.__name__[3:])
def test_load_is_verified(rig, make, bs):
    name = f"{make.__name__}-{bs}"
    server, wanted = make(rig)
    daemon = n.serve(rig, (server, wanted), name=name)
    load = r.Child(rig, f"load-{name}", n.load(rig, "--size", "24M" if bs == "4k" else "64M", bs=bs))
    workers = [w["id"] for w in daemon.status()["workers"]]
    for turn in range(4):
        for queue in range(2):
            daemon.attach(f"vm0:{queue}", workers[(turn + queue) % len(workers)])
    code = load.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    disks = daemon.status()["disks"]
    r.require(disks[0]["format"] == "nbd" and disks[0]["size-bytes"] == n.SIZE, f"{disks}")
    n.ends(daemon)
    server.kill()


def test_a_server_that_makes_nothing_stable_is_warned_of_once(rig):
    """It knows neither flush nor FUA, and is used all the same."""
    server = n.liar(rig, "honest", name="bare", flags=1 | 32 | 64 | 256)
    daemon = n.serve(rig, (server, ""), name="of-bare")
    n.loaded(rig, "bare", "--size", "4M")
    n.ends(daemon)
    r.require(daemon.child.output().count("can neither flush") == 1, daemon.child.output())
    server.kill()


@pytest.mark.parametrize("address, host", (("127.0.0.1", "localhost"), ("::1", "[::1]")))
def test_over_tcp(rig, address, host):
    port = n.free_port()
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        raise r.Skipped("this machine has no IPv6")
    server = r.Child(rig, "tcp", [r.tool("nbdkit", "nbdkit"), "-f", "-i", address, "-p", port, "memory", n.SIZE])
    disk = f"name=d0,uri=nbd://{host}:{port}/,open-timeout=60"
    daemon = r.Daemon(rig, "--disk", disk, "--export", n.export(rig), name="of-tcp")
    load = r.Child(rig, "load-tcp", n.load(rig, "--size", "24M"))
    code = load.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    r.require(server.running(), f"nbdkit ended: {server.tail()}")
    server.kill()


KINDS = (("pread", "randread", "randwrite"), ("pwrite", "randwrite", "randread"))


@pytest.mark.parametrize("error", ("EIO", "ENOSPC", "EPERM", "EINVAL"))
@pytest.mark.parametrize("kind,fails,works", KINDS, ids=[kind for kind, *_ in KINDS])
def test_errors_reach_the_guest_and_the_disk_continues(rig, kind, fails, works, error):
    """The server fails each request of one kind while a file is there."""
    name = f"{kind}-{error}"
    switch = rig.dir / f"{name}.switch"
    keys = (f"error={error}", f"error-{kind}-rate=100%", f"error-{kind}-file={switch}")
    server = n.nbdkit(rig, "--filter=error", "memory", str(n.SIZE), *keys, name=name)
    daemon = n.serve(rig, (server, ""), name=f"of-{name}", reconnect_delay=60)

    def load(rw):
        # Data that were written are read back only if reads work.
        argv = [a for a in n.load(rig, "--size", "1M", rw=rw) if rw == "randrw" or a != "--verify"]
        return r.run(argv, check=False)

    def errors():
        """How many requests failed. The last ones complete after their user has left."""
        r.wait_for("no request in flight", lambda: not any(q["in-flight"] for q in daemon.status()["queues"]))
        return sum(q["errors"] for q in daemon.status()["queues"])

    r.require(load("randrw").returncode == 0 and errors() == 0, "requests fail before they should")
    switch.touch()
    for _ in range(3):
        before = errors()
        done = load(fails)
        r.require(done.returncode == 1 and "IOERR" in done.stderr, f"{done.returncode}: {done.stderr}")
        failed = errors()
        r.require(failed > before, f"{failed} errors are counted after {before}")
        # Requests of the other kind are served on the same connection.
        done = load(works)
        r.require(done.returncode == 0 and errors() == failed, f"{done.returncode}, {errors()} errors after {failed}: {done.stderr}")
    switch.unlink()
    done = load("randrw")
    r.require(done.returncode == 0 and errors() == failed, f"{done.returncode}, {errors()} errors after {failed}: {done.stderr}")
    r.require("is lost" not in daemon.child.output(), f"an error ended the connection: {daemon.child.tail()}")
    line = rf"a {'read' if kind == 'pread' else 'write'} at byte \d+ failed: .*its server"
    r.require(re.search(line, daemon.child.output()), f"no line about it: {daemon.child.tail()}")
    n.ends(daemon)
    server.kill()


def test_some_requests_fail(rig):
    """The server fails some of the requests that are in flight together. The others complete."""
    switch = rig.dir / "some.switch"
    server = n.nbdkit(rig, "--filter=error", "memory", str(n.SIZE), "error-rate=5%", f"error-file={switch}", name="some")
    daemon = n.serve(rig, (server, ""), name="of-some", reconnect_delay=60)
    for _ in range(10):
        switch.touch()
        done = r.run(n.load(rig, "--size", "4M"), check=False)
        r.require(done.returncode == 1 and "IOERR" in done.stderr, f"{done.returncode}: {done.stderr}")
        switch.unlink()
        done = r.run(n.load(rig, "--size", "4M"), check=False)
        r.require(done.returncode == 0, f"{done.returncode}: {done.stderr}")
    r.require("is lost" not in daemon.child.output(), f"an error ended the connection: {daemon.child.tail()}")
    n.ends(daemon)
    server.kill()
