"""Exports while clients are connected: limits of connections, resizes, removal, ends of clients and of the daemon."""

import os
import random
import signal
import stat
import time
from pathlib import Path

import nbd_client as c
import nbd_exports as e
import nbd_servers as n
import nbd_tls
import pytest
import rig as r

MIB = 1 << 20


def gets(daemon, name="n0", **more):
    return c.Client(daemon.at, name, **more)


def test_one_client_more_than_queues_is_refused(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), queues=2, name="full")
    first, second = gets(daemon), gets(daemon)
    with c.Client(daemon.at) as third:
        third.greet()
        found = third.answers(c.GO, c.text("n0") + bytes(2))
        r.require(found[-1][0] == (1 << 31) + 2 and b"2 clients" in found[-1][1], f"{found}")
        found = third.answers(c.INFO, c.text("n0") + bytes(2))
        r.require(found[-1][0] == c.ACK, f"{found}")
    with c.Client(daemon.at) as old:
        old.greet()
        old.option(c.EXPORT_NAME, b"n0")
        r.require(old.ends(), "a third client is served")
    r.wait_for("the log line", lambda: "is refused" in daemon.child.output())
    first.close()
    r.wait_for("its queue is free", lambda: len(e.running(daemon)) == 1)
    with gets(daemon) as again:
        again.write(0, b"a" * 512)
        r.require(second.read(0, 512) == b"a" * 512, "it reads as something else")
    second.close()
    e.ends_well(daemon)


@pytest.mark.parametrize("way", ("says-so", "goes"))
def test_a_client_that_connects_again_at_once_has_the_queue_of_before(rig, way):
    """Its last writes are made stable first."""
    daemon = e.serve(rig, e.disk_of(rig, "buffered", "again"), queues=1, name=f"again-{way}")
    for turn in range(100):
        client = gets(daemon)
        client.write(turn * 4096, b"w" * MIB)
        if way == "says-so":
            client.ask(c.DISC)
        client.close()
    e.ends_well(daemon)


def test_clients_that_wait_for_the_queue_of_one_that_stays_are_given_up(rig):
    """It has closed its end, and does not take its answers. The daemon has nothing to do meanwhile."""
    daemon = e.serve(rig, e.disk_of(rig, "ram"), queues=1, name="stays")
    first = gets(daemon)
    for _ in range(8):
        first.ask(c.READ, 0, 4 * MIB)
    first.finish()
    waiting, process = [c.Client(daemon.at) for _ in range(3)], Path(f"/proc/{daemon.child.pid}")
    before = nbd_tls.cpu_s([process])
    for client in waiting:
        r.require(client.ends(), "the client is still connected")
    r.require(nbd_tls.cpu_s([process]) - before < 2, "the daemon has used the CPU all the time")
    r.wait_for("the log line", lambda: "no queue became free within" in daemon.child.output())
    first.close()
    r.wait_for("its queue is free", lambda: not e.running(daemon))
    with gets(daemon) as again:
        again.write(0, b"a" * 512)
    e.ends_well(daemon)


def test_a_resize_is_seen_by_new_connections(rig):
    daemon = e.serve(rig, e.disk_of(rig, "raw", "resize"), name="resize")
    with gets(daemon) as old:
        r.require(old.size == e.SIZE, f"{old.size}")
        daemon.cli("resize", "d0", str(e.SIZE + 16 * MIB))
        old.write(0, b"o" * MIB)
        with gets(daemon) as new:
            r.require(new.size == e.SIZE + 16 * MIB, f"{new.size}")
            new.write(e.SIZE, b"n" * MIB)
            r.require(new.read(0, MIB) == b"o" * MIB, "it reads as something else")
        r.require(old.call(c.READ, e.SIZE + 16 * MIB, 512)[0] == c.EINVAL, "a read beyond the end")
        r.require(old.call(c.WRITE, e.SIZE + 16 * MIB, 512, data=bytes(512))[0] == c.ENOSPC, "a write beyond the end")
    e.ends_well(daemon)


def test_a_read_only_export_refuses_writes(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="ro", writable="off")
    with gets(daemon) as client:
        r.require(client.flags & 2 and not client.flags & (1 << 5 | 1 << 6), f"{client.flags:#x}")
        for kind, data in ((c.WRITE, bytes(512)), (c.ZERO, b""), (c.TRIM, b"")):
            r.require(client.call(kind, 0, 512, data=data)[0] == c.EPERM, f"command {kind} is not refused")
        r.require(client.call(c.FLUSH)[0] == 0 and client.read(0, 512) == bytes(512), "reads and flushes")
    e.ends_well(daemon)


def test_removal_with_a_client(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="remove")
    client = gets(daemon)
    refused = daemon.cli("export", "remove", "n0", check=False)
    r.require(refused.returncode == 1 and "has a client connected" in refused.stderr and "--force" in refused.stderr, f"{refused}")
    client.write(0, b"x" * 512)
    daemon.cli("export", "remove", "n0", "--force")
    r.require(client.ends(), "the client is still connected")
    r.require("its clients lose their connections" in daemon.child.output(), daemon.child.output())
    r.require(not daemon.at.exists(), "the socket is left")
    daemon.cli("export", "add", e.export(rig))
    with gets(daemon) as again:
        r.require(again.read(0, 512) == b"x" * 512, "the disk is another one")
    daemon.cli("export", "remove", "n0", "--force")
    daemon.cli("disk", "remove", "d0")
    e.ends_well(daemon)


def test_a_daemon_that_is_killed_leaves_a_socket_that_is_replaced(rig):
    daemon = e.serve(rig, e.disk_of(rig, "raw", "killed"), name="killed")
    client = gets(daemon)
    client.write(0, b"k" * MIB, c.FUA)
    daemon.child.kill()
    r.require(client.ends(), "the connection outlives the daemon")
    daemon.start()
    with gets(daemon) as again:
        r.require(again.read(0, MIB) == b"k" * MIB, "a write is lost")
    e.ends_well(daemon)


@pytest.mark.parametrize("way", ("says-so", "goes", "is-removed"))
def test_the_end_of_a_client_that_has_written_is_a_flush(rig, way):
    """The disk is on another server, whose log has each command."""
    log = rig.dir / f"end-{way}.log"
    server = n.nbdkit(rig, "--filter=log", "memory", str(e.SIZE), f"logfile={log}", name=f"end-{way}")
    daemon = e.serve(rig, f"uri={server.uri()}", name=f"of-end-{way}")
    flushes = lambda: log.read_text().count(" Flush id=")  # noqa: E731
    with gets(daemon) as client:
        client.write(0, b"f" * MIB)
        r.require(client.call(c.FLUSH)[0] == 0, "flush failed")
        before = flushes()
        r.require(before > 0, f"no flush has arrived: {log.read_text()}")
    r.wait_for("the queue is free", lambda: not e.running(daemon))
    r.require(flushes() == before, "a client that has flushed is flushed again")
    client = gets(daemon)
    client.write(MIB, b"g" * MIB)
    r.require(flushes() == before, "each write is flushed")
    if way == "says-so":
        client.ask(c.DISC)
        r.require(client.ends(), "the connection stays after its end")
    elif way == "goes":
        client.close()
    else:
        daemon.cli("export", "remove", "n0", "--force")
    r.wait_for("the queue is free", lambda: not e.running(daemon))
    r.require(flushes() == before + 1, f"{flushes() - before} flushes")
    client.close()
    e.ends_well(daemon)
    server.kill()


PLUGIN = {
    "get_size": f"echo {MIB}",
    "pread": "dd if=/dev/zero count=$3 iflag=count_bytes status=none",
    "pwrite": "cat >/dev/null",
    "can_write": "exit 0",
    "can_flush": "exit 0",
}


@pytest.mark.parametrize("heals", (True, False))
def test_a_last_flush_that_fails_is_told_and_repeated_when_the_export_ends(rig, heals):
    """Whatever other clients have put into the log. The server can neither trim nor clear."""
    ill, log = rig.dir / f"ill-{heals}", rig.dir / f"flushes-{heals}"
    flush = f'echo flush >>{log}; if [ -e {ill} ]; then echo "EIO it is ill" >&2; exit 1; fi'
    server = n.nbdkit(rig, "eval", *(f"{key}={value}" for key, value in {**PLUGIN, "flush": flush}.items()), name=f"ill-{heals}")
    daemon = e.serve(rig, f"uri={server.uri()}", name=f"of-ill-{heals}")
    with gets(daemon) as client:
        r.require(not client.flags & 1 << 5 and client.call(c.TRIM, 0, 512)[0] == c.EINVAL, f"a trim is offered: {client.flags:#x}")
    client = gets(daemon)
    client.write(0, b"f" * 4096)
    ill.touch()
    for _ in range(64):
        with c.Client(daemon.at) as noisy:
            noisy.greet()
            noisy.send(bytes(64))
            r.require(noisy.ends(), "a client that breaks the protocol is connected")
    client.close()
    r.wait_for("the queue is free", lambda: not e.running(daemon))
    r.require("its last writes may be lost" in daemon.child.output(), daemon.child.output())
    if heals:
        ill.unlink()
    before = log.read_text().count("flush")
    daemon.cli("export", "remove", "n0")
    r.require(log.read_text().count("flush") > before, "it is not flushed again")
    again = "the last writes of its clients may be lost" in daemon.child.output()
    r.require(again != heals, daemon.child.output())
    ill.unlink(missing_ok=True)
    e.ends_well(daemon)
    server.kill()


@pytest.mark.parametrize("kind", ("buffered", "memory", "raw"))
def test_the_block_sizes_of_a_client_hold_after_a_snapshot(rig, kind):
    """The new image is qcow2, which may need larger blocks than the file before it."""
    daemon = e.serve(rig, e.disk_of(rig, kind, f"sizes-{kind}"), name=f"sizes-{kind}")
    with gets(daemon) as client:
        least, data = client.blocks[0], random.Random(6).randbytes(3 * client.blocks[0])
        client.write(5 * least, data)
        daemon.cli("snapshot", "d0", "--to", str(rig.dir / f"sizes-{kind}.qcow2"))
        r.require(client.read(5 * least, 3 * least) == data, "it reads as something else")
        client.write(7 * least, data)
        r.require(client.read(5 * least, 5 * least) == data[: 2 * least] + data, "it reads as something else")
        with gets(daemon) as new:
            r.require(new.blocks == client.blocks, f"{new.blocks}, not {client.blocks}")
    e.ends_well(daemon)


def test_half_a_write_that_is_completed_after_the_disk_has_shrunk(rig):
    """It is beyond the end of the disk then."""
    image = rig.dir / "half.img"
    daemon = e.serve(rig, e.disk_of(rig, "raw", "half"), name="half")
    with gets(daemon) as client:
        client.send(client.header(c.WRITE, e.SIZE - MIB, MIB) + bytes(MIB - 1))
        daemon.cli("resize", "d0", str(e.SIZE // 2), "--shrink")
        client.send(b"\0")
        cookie, error, _ = client.reply()
        r.require(error == c.ENOSPC, f"request {cookie}: {error}")
        r.require(image.stat().st_size == e.SIZE // 2, f"the file has {image.stat().st_size} bytes")
        client.write(0, b"h" * 512)
    e.ends_well(daemon)


def test_a_client_that_has_gone_is_no_user(rig):
    """While its requests are held back by a limit, its connection is there, and `leaving`."""
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="leaving", **{"limits.bps": "1M"})
    client = gets(daemon)
    for at in range(0, 48 * MIB, MIB):
        client.ask(c.READ, at, MIB)
    r.wait_for("it is held", lambda: any(q["limited-us"] > 0 for q in e.running(daemon)))
    refused = daemon.cli("export", "remove", "n0", check=False)
    r.require(refused.returncode == 1 and "--force" in refused.stderr, f"{refused}")
    client.finish()
    r.wait_for("it is leaving", lambda: "leaving" in daemon.cli("status", "n0").stdout or not e.running(daemon))
    daemon.cli("export", "remove", "n0")
    client.close()
    e.ends_well(daemon)


def test_with_one_queue_nobody_is_told_to_make_several_connections(rig):
    for queues in (1, 2):
        daemon = e.serve(rig, e.disk_of(rig, "ram"), queues=queues, name=f"queues-{queues}")
        with gets(daemon) as client:
            r.require(bool(client.flags & 1 << 8) == (queues > 1), f"{client.flags:#x}")
        e.ends_well(daemon)


def test_clients_that_are_killed_free_their_queue(rig, pytestconfig):
    """Processes with requests of all kinds in flight, killed at any moment. A client beside them is verified."""
    daemon = e.serve(rig, e.disk_of(rig, "raw", "kills"), queues=4, workers=2, name="kills")
    steady = gets(daemon)
    data = random.Random(1).randbytes(MIB)
    steady.write(0, data)
    chance = random.Random(2)
    for _ in range(pytestconfig.getoption("--kills") or 20):
        pid = os.fork()
        if pid == 0:
            try:
                flood(daemon)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.01, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        r.require(steady.read(0, MIB) == data, "another client reads something else")
        r.wait_for("its queue is free", lambda: len(e.running(daemon)) == 1)
    steady.close()
    e.ends_well(daemon)


def flood(daemon):
    """Sends requests for ever, and reads replies now and then."""
    client = gets(daemon)
    client.socket.settimeout(0.01)
    turn = 0
    while True:
        turn += 1
        try:
            at = MIB + turn % 40 * MIB
            client.send(client.header(c.WRITE, at, 65536) + bytes(65536) + client.header(c.READ, at, MIB))
            client.send(client.header(c.ZERO, at, MIB) + client.header(c.FLUSH))
            client.socket.recv(1 << 20)
        except TimeoutError:
            pass


def test_the_socket_has_the_mode_that_was_asked_for(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="mode", mode="0600")
    r.require(stat.S_IMODE(daemon.at.stat().st_mode) == 0o600, oct(daemon.at.stat().st_mode))
    e.ends_well(daemon)


KEYS = (
    ("type=nbd,name=n0,disk=d0", ("listen=unix:PATH",)),
    ("type=nbd,name=n0,listen=unix:/tmp/x", ("disk=NAME",)),
    ("type=nbd,name=n0,disk=d0,listen=/tmp/x", ("unix:",)),
    ("type=nbd,name=n0,disk=d0,listen=127.0.0.1:0", ("port 0",)),
    ("type=nbd,name=n0,disk=d0,listen=10809,mode=0600", ("mode", "TCP")),
    ("type=nbd,name=n0,disk=d0,listen=10809,readonly=on", ("writable=on",)),
    ("type=nbd,name=n0,disk=d0,listen=10809,queues=257", ("1 to 256",)),
    ("type=nbd,name=n0,disk=d0,listen=10809,engine=kernel", ("engine",)),
    ("type=fuse,name=n0,disk=d0,listen=10809,mountpoint=/tmp/x", ("listen", "nbd")),
)


@pytest.mark.parametrize("export, words", KEYS, ids=lambda v: v if isinstance(v, str) else "")
def test_keys(rig, export, words):
    argv = [r.binary("vshunt"), "serve", "--disk", "name=d0,format=ram,size=1M", "--export", export, "--no-control"]
    r.message_of(r.run(argv, check=False), *words)


def test_a_configuration_file_has_it(rig):
    config = rig.dir / "c.toml"
    config.write_text(
        f'[[disk]]\nname = "d0"\nformat = "ram"\nsize = 1048576\n'
        f'[[export]]\ntype = "nbd"\nname = "n0"\ndisk = "d0"\nlisten = "unix:{rig.dir}/n0.nbd"\nwritable = true\n'
    )
    r.run([r.binary("vshunt"), "config", "check", config])
    daemon = r.Daemon(rig, "--config", config, name="config")
    daemon.at = rig.dir / "n0.nbd"
    with gets(daemon) as client:
        client.write(0, b"c" * 512)
    shown = daemon.cli("config", "show").stdout
    r.require(f'listen = "unix:{rig.dir}/n0.nbd"' in shown, shown)
    e.ends_well(daemon)


def test_limits_and_service_times(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), "--metrics", f"unix:{rig.dir}/m.sock", name="limits", latency="on", **{"limits.iops": 50})
    with gets(daemon) as client:
        start = time.monotonic()
        # More at once than the limit allows, in one message: however slow this is, some wait.
        client.send(b"".join(client.header(c.READ, at * 4096, 4096) for at in range(150)))
        for _ in range(150):
            r.require(client.reply()[1] == 0, "a read failed")
        taken = time.monotonic() - start
        queue = e.running(daemon)[0]
        r.require(queue["limited-us"] > 0 and queue["reads"] == 150, f"{queue}")
        r.require(queue["service-times"]["read"]["count"] == 150, f"{queue['service-times']}")
        rig.say(f"150 reads at 50 a second took {taken:.2f} s")
        shown = daemon.cli("status").stdout
        r.require("nbd" in shown and "connected" in shown, shown)
    e.ends_well(daemon)
