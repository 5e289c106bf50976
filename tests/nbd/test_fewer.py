"""Servers that offer several connections and give fewer: workers without a connection share one, and no request fails."""

import contextlib
import itertools
import os
import random
import struct
import time

import nbd_relay
import nbd_servers as n
import nbd_tls
import peer
import pytest
import qcow2_disks as q
import rig as r

QUEUES = 4
MIB = 1 << 20
# VIRTIO_BLK_F_CONFIG_WCE, and where the field is in the configuration space.
CONFIG_WCE, WRITEBACK_AT = 1 << 11, 32


def nbdkit_limit(rig, limit, name="limit"):
    """It closes the connection after the last one that it gives."""
    return n.nbdkit(rig, "--filter=limit", "file", rig.image(f"{name}.img", n.SIZE), f"limit={limit}", name=name), ""


def qemu_limit(rig, clients, name="qemu"):
    """It takes the connection after the last one that it gives, and never answers."""
    return n.qemu_nbd(rig, rig.image(f"{name}.img", n.SIZE), clients=clients, name=name), "disk"


def nbd_server_limit(rig, limit, name="nbd-server"):
    """It refuses the export after so many connections, for ever."""
    return n.NbdServer(rig, rig.image(f"{name}.img", n.SIZE), name, maxconnections=limit), "disk"


def silent(rig, gives, name="silent"):
    return nbd_relay.Relay(rig, n.nbdkit(rig, "memory", str(n.SIZE), name=f"behind-{name}"), name, gives, "hold"), ""


def export(rig):
    return n.export(rig, queues=QUEUES, workers=QUEUES)


def serve(rig, server_export, name, **keys):
    server, wanted = server_export
    return r.Daemon(rig, "--disk", n.disk(server, wanted, **keys), "--export", export(rig), name=name)


def connections(daemon):
    return daemon.status()["disks"][0]["connections"]


def load(rig, name, *arguments):
    return r.Child(rig, f"load-{name}", n.load(rig, *(arguments or ("--runtime", r.FOREVER)), queues=QUEUES))


def works(daemon, child, count=200):
    """Each queue is served."""
    before = n.requests(daemon, child)
    r.wait_for("requests", lambda: n.requests(daemon, child) > before + count)


def moved(daemon, *shifts):
    """Queues move by so many workers from where they were at the start."""
    workers = [w["id"] for w in daemon.status()["workers"]]
    for shift in shifts:
        for queue in range(QUEUES):
            daemon.attach(f"vm0:{queue}", workers[(shift + queue) % len(workers)])


def ends(child):
    code = child.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {child.tail()}")


def removed(daemon):
    """The disk is removed, also while a further connection is tried."""
    daemon.cli("export", "remove", "vm0")
    daemon.cli("disk", "remove", "d0")
    names = ("vshunt-nbd", "vshunt-nbd-one", "vshunt-nbd-tls")

    def left():
        return [name for _, name in r.threads(daemon.child.pid, "comm") if name.strip() in names]

    r.wait_for("the threads of the disk end", lambda: not left())


# What makes a server, how many workers get their own connection, and the reason why others do not.
SERVERS = {
    "nbdkit-1": (lambda rig: nbdkit_limit(rig, 1), 0, "closes the connection"),
    "nbdkit-2": (lambda rig: nbdkit_limit(rig, 2), 1, "closes the connection"),
    "qemu-1": (lambda rig: qemu_limit(rig, 1), 0, "NBD_FLAG_CAN_MULTI_CONN"),
    "qemu-2": (lambda rig: qemu_limit(rig, 2), 1, "does not answer in time"),
    "silent-1": (lambda rig: silent(rig, 1, "silent-1"), 0, "does not answer in time"),
    "silent-3": (lambda rig: silent(rig, 3, "silent-3"), 2, "does not answer in time"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_load_is_verified(rig, name):
    """Without `reconnect-delay`. Queues move meanwhile, and the disk is removed at the end."""
    make, own, why = SERVERS[name]
    server, wanted = make(rig)
    daemon = serve(rig, (server, wanted), f"of-{name}")
    child = load(rig, name)
    r.wait_for("the server gives no more", lambda: connections(daemon).get("refused"))
    works(daemon, child)
    found = connections(daemon)
    r.require(why in found["refused"], f"{found}")
    r.require(found["shared"] and (found["own"], found["sharing"]) == (own, QUEUES - own), f"{found}")
    told = lambda: daemon.child.output().count("gives a worker no connection of its own")  # noqa: E731
    if "MULTI_CONN" not in why:
        r.wait_for("the log says so", told)
    moved(daemon, 1, 2, 3, 0)
    works(daemon, child)
    ends(child)
    n.loaded(rig, f"{name}-long", "--size", "64M", queues=QUEUES, bs="256k")
    output = daemon.child.output()
    r.require("is lost" not in output and told() <= 1, output)
    text = daemon.cli("status").stdout
    r.require("NO MORE BECAUSE" in text or not connections(daemon)["sharing"], text)
    removed(daemon)
    n.ends(daemon)
    server.kill()


def test_a_server_that_counts_connections_for_ever(rig):
    """nbd-server's maxconnections. Queues move, and guests come and go, until it gives no more."""
    server, wanted = nbd_server_limit(rig, 8)
    daemon = serve(rig, (server, wanted), "of-counting")
    child = load(rig, "counting")
    shifts = itertools.count()

    def refused():
        moved(daemon, next(shifts))
        return "refuses" in connections(daemon).get("refused", "")

    r.wait_for("the server gives no more", refused)
    works(daemon, child)
    ends(child)
    for turn in range(3):
        n.loaded(rig, f"counting-{turn}", "--size", "4M", queues=QUEUES)
    r.require("is lost" not in daemon.child.output(), daemon.child.output())
    removed(daemon)
    n.ends(daemon)
    server.kill()


KILLED = {
    "nbdkit-1": lambda rig: nbdkit_limit(rig, 1, "killed-nbdkit-1"),
    "nbdkit-2": lambda rig: nbdkit_limit(rig, 2, "killed-nbdkit-2"),
    "qemu-2": lambda rig: qemu_limit(rig, 2, "killed-qemu-2"),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_server_that_is_killed_loses_no_write(rig, name, pytestconfig):
    server, wanted = KILLED[name](rig)
    daemon = serve(rig, (server, wanted), f"of-killed-{name}", reconnect_delay=120)
    child = load(rig, f"killed-{name}")
    chance = random.Random(9)
    for shift in range(pytestconfig.getoption("--kills") or 5):
        works(daemon, child, 100)
        time.sleep(chance.uniform(0, 0.3))
        server.kill()
        time.sleep(chance.uniform(0, 0.3))
        server.start()
        moved(daemon, shift)
    works(daemon, child, 100)
    ends(child)
    n.ends(daemon)
    server.kill()


def test_workers_get_their_own_when_the_server_gives_more(rig):
    """It is started again with another limit: first a higher one, then a lower one."""
    server, wanted = nbdkit_limit(rig, 1, "lifted")
    daemon = serve(rig, (server, wanted), "of-lifted", reconnect_delay=120)
    child = load(rig, "lifted")
    r.wait_for("the server gives no more", lambda: connections(daemon).get("refused"))
    for limit, own in ((10, QUEUES), (2, 1), (1, 0), (10, QUEUES)):
        server.kill()
        server.argv[-1] = f"limit={limit}"
        server.start()

        def settled(own=own):
            found = connections(daemon)
            return found["shared"] and found["own"] == own and bool(found.get("refused")) == (own < QUEUES)

        r.wait_for(f"{own} workers have their own connection", settled)
        works(daemon, child)
    ends(child)
    n.ends(daemon)
    server.kill()


def plain(rig, _):
    """A server, its export, and the parameters of TLS in its URI. nbdkit 1.32 ends by an assertion if connections end under load."""
    return n.qemu_nbd(rig, rig.image("behind-plain.img", n.SIZE), clients=100, name="behind-plain"), "disk", {}


def secure(rig, authority):
    tls = ["--tls=require", f"--tls-certificates={authority.sign('server')}"]
    server = n.nbdkit(rig, *tls, "memory", str(n.SIZE), name="behind-secure")
    return Secure(server), "", {"certificates": authority.sign("client")}


class Secure:
    """A server with TLS."""

    def __init__(self, server):
        self.socket, self.child, self.kill = server.socket, server.child, server.kill

    def uri(self, export="", **parameters):
        more = "".join(f"&tls-{key}={value}" for key, value in parameters.items())
        return f"nbds+unix:///{export}?socket={self.socket}{more}"


@pytest.fixture(scope="module")
def authority(rig):
    return nbd_tls.Authority(rig)


KINDS = pytest.mark.parametrize("kind", (plain, secure), ids=("plain", "tls"))


def behind_relay(rig, authority, kind, name, *limits):
    """A server, a relay to it and a daemon that uses the relay, which is slow: tests wait for time limits meanwhile, and load takes all
    CPU time that it gets."""
    server, wanted, parameters = kind(rig, authority)
    relay = nbd_relay.Relay(rig, server, name, *limits)
    relay.pause_s = 0.002
    disk = f"name=d0,uri={relay.uri(wanted, **parameters)},reconnect-delay=120"
    daemon = r.Daemon(rig, "--disk", disk, "--export", export(rig), name=f"of-{name}")
    return server, relay, daemon


def all_end(server, relay, daemon, child):
    """The load ends without an error; the daemon and the server have outlived it."""
    ends(child)
    removed(daemon)
    n.ends(daemon)
    relay.kill()
    r.require(server.child.running(), f"the server has ended: {server.child.tail()}")
    server.kill()


@pytest.mark.parametrize("bs", ("4k", "256k"))
@pytest.mark.parametrize("manner", ("close", "hold"))
@KINDS
def test_a_worker_hands_over_the_only_connection(rig, authority, kind, manner, bs):
    """The shared connection ends, and the server gives no other one. The server itself lives."""
    name = f"{kind.__name__}-{manner}-{bs}"
    server, relay, daemon = behind_relay(rig, authority, kind, name, 3, manner)
    child = r.Child(rig, f"load-{name}", n.load(rig, "--runtime", r.FOREVER, queues=QUEUES, bs=bs))
    for shift, gives in enumerate((2, 1, 1)):
        r.wait_for("the server gives no more", lambda: connections(daemon).get("refused"))
        r.wait_for("all that it gives is used", lambda: connections(daemon)["own"] == relay.gives - 1)
        before = relay.numbers()
        relay.gives = gives
        relay.end(before[0])
        works(daemon, child)
        r.wait_for("there is a shared connection", lambda: connections(daemon)["shared"])
        if len(before) > 1:
            left = relay.numbers()
            r.require(left == before[1:], f"{before} were given, {left} are left: a healthy connection was ended")
        # A worker that has lost its only queue hands its connection over.
        moved(daemon, shift + 1)
        works(daemon, child)
    relay.gives = 10

    def all_own():
        # Queues that come let a worker try again sooner. One whose only queue has just come has
        # not asked yet.
        moved(daemon, 1, 0)
        with contextlib.suppress(r.Late):
            return r.wait_for("each has its own", lambda: connections(daemon)["own"] == QUEUES, timeout_s=3)

    r.wait_for("each worker has its own connection", all_own)
    all_end(server, relay, daemon, child)


def test_workers_do_not_notice_the_loss_of_an_idle_shared_connection(rig):
    """Even without `reconnect-delay`: one hands its own over, and has no failed request by that. Replies take a while, so that
    requests come while others are in flight."""
    server, wanted, _ = plain(rig, None)
    relay = nbd_relay.Relay(rig, server, "idle", QUEUES + 1, "close")
    daemon = serve(rig, (relay, wanted), "of-idle")
    child = load(rig, "idle")
    r.wait_for("each worker has its own", lambda: connections(daemon)["own"] == QUEUES)
    relay.pause_s = 0.05
    works(daemon, child, 50)
    relay.gives = QUEUES
    relay.end(relay.numbers()[0])
    r.wait_for("a worker has handed its own over", lambda: connections(daemon)["own"] == QUEUES - 1 and connections(daemon)["shared"])
    works(daemon, child, 50)
    relay.pause_s = 0.0
    all_end(server, relay, daemon, child)


@KINDS
def test_connections_that_end_one_by_one(rig, authority, kind):
    """Random ones, while the server gives more or fewer."""
    name = f"one-by-one-{kind.__name__}"
    server, relay, daemon = behind_relay(rig, authority, kind, name)
    child = load(rig, name)
    chance = random.Random(10)
    for _ in range(30):
        relay.gives = chance.randrange(1, 6)
        for number in relay.numbers():
            if chance.random() < 0.5:
                relay.end(number)
        works(daemon, child, 50)
    relay.pause_s = 0.0
    all_end(server, relay, daemon, child)


def test_a_disk_is_removed_while_no_greeting_comes(rig):
    relay, wanted = silent(rig, 1, "hangs")
    daemon = serve(rig, (relay, wanted), "of-hangs")
    child = load(rig, "hangs")
    r.wait_for("a connection that gets no greeting", lambda: relay.held)
    ends(child)
    removed(daemon)
    r.wait_for("it is closed", lambda: not relay.held[-1].recv(1))
    r.wait_for("the other one is closed", lambda: not relay.numbers())
    # The same export can be added again at once.
    daemon.cli("disk", "add", n.disk(relay, wanted))
    daemon.cli("export", "add", export(rig))
    n.loaded(rig, "again", "--size", "4M", queues=QUEUES)
    n.ends(daemon)
    relay.kill()


@pytest.mark.parametrize("limit", (1, 2))
def test_a_qcow2_image(rig, limit):
    image = rig.dir / f"q-{limit}.img"
    q.qemu_img("create", "-q", "-f", "qcow2", image, str(64 * MIB))
    # Room for the whole disk and its tables.
    os.truncate(image, 96 * MIB)
    server = n.nbdkit(rig, "--filter=limit", "file", image, f"limit={limit}", name=f"q-{limit}")
    disk = f"name=d0,format=qcow2,uri={server.uri()},reconnect-delay=120"
    daemon = r.Daemon(rig, "--disk", disk, "--export", export(rig), name=f"of-q-{limit}")
    child = load(rig, f"q-{limit}")
    r.wait_for("the server gives no more", lambda: connections(daemon).get("refused"))
    moved(daemon, 1, 2, 3, 0)
    works(daemon, child)
    server.kill()
    server.start()
    works(daemon, child)
    ends(child)
    removed(daemon)
    n.ends(daemon)
    server.kill()
    q.checked(image)


def test_a_guest_switches_its_cache_off_while_the_server_is_slow(rig):
    """The thread of the front end flushes. It makes no socket to see whether the server lives: that would end the daemon."""
    server = n.nbdkit(rig, "--filter=delay", "memory", str(n.SIZE), "rdelay=4", name="slow")
    daemon = r.Daemon(rig, "--disk", n.disk(server, ""), "--export", export(rig), name="of-slow")
    with peer.Peer(rig.dir / "vm0.sock") as front:
        r.require(front.handshake(CONFIG_WCE) == peer.ACCEPTED, "the features are refused")
        r.require(front.offered & CONFIG_WCE, "the cache cannot be switched off")
        accepted = front.order(peer.SET_CONFIG, struct.pack("<IIIB", WRITEBACK_AT, 1, 0, 0))
        r.require(accepted == peer.ACCEPTED, "the cache was not switched off")
    n.ends(daemon)
    server.kill()
