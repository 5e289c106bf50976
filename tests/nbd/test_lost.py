"""Servers that end, hang and lie: requests are sent again or fail, and other disks are served."""

import random
import time

import nbd_servers as n
import pytest
import rig as r

KILLS = 5


def several_connections(rig, image, name):
    return n.qemu_nbd(rig, image, name=name)


def one_connection(rig, image, name):
    return n.qemu_nbd(rig, image, clients=1, name=name)


@pytest.mark.parametrize("make", (several_connections, one_connection, n.NbdServer), ids=("several-connections", "one-connection", "tcp"))
def test_a_server_that_is_killed_loses_no_write(rig, make, pytestconfig):
    """`--kills N` and `make soak` kill it more often."""
    name = f"killed-{make.__name__}"
    server = make(rig, rig.image(f"{name}.img", n.SIZE), name)
    daemon = n.serve(rig, (server, "disk"), name=f"of-{name}", reconnect_delay=120)
    load = r.Child(rig, f"load-{name}", n.load(rig, "--runtime", r.FOREVER))
    chance = random.Random(7)
    for _ in range(pytestconfig.getoption("--kills") or KILLS):
        before = n.requests(daemon, load)
        r.wait_for("requests", lambda: n.requests(daemon, load) > before + 100)
        time.sleep(chance.uniform(0, 0.3))
        server.kill()
        time.sleep(chance.uniform(0, 0.5))
        server.start()
    before = n.requests(daemon, load)
    r.wait_for("requests after the last kill", lambda: n.requests(daemon, load) > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)


@pytest.mark.parametrize("make", (several_connections, one_connection), ids=("several-connections", "one-connection"))
def test_a_guest_survives_a_daemon_that_is_killed(rig, make, pytestconfig):
    """The in-flight region has the requests that the next daemon does again."""
    name = f"daemon-{make.__name__}"
    server = make(rig, rig.image(f"{name}.img", n.SIZE), name)
    daemon = n.serve(rig, (server, "disk"), name=f"of-{name}")
    load = r.Child(rig, f"load-{name}", n.load(rig, "--reconnect", "120s", "--runtime", r.FOREVER))
    chance = random.Random(8)
    for _ in range(pytestconfig.getoption("--kills") or KILLS):
        r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
        time.sleep(chance.uniform(0, 0.3))
        daemon.child.kill()
        # Those of the old daemon that the server has are over.
        r.wait_for("the server has no client", lambda: not n.connections(server.socket))
        daemon.start()
    r.wait_for("requests after the last kill", lambda: n.requests(daemon, load) > 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    server.kill()


def test_first_requests_wait_for_a_server_that_ended_before_them(rig):
    """Also without `reconnect-delay`: for 10 s."""
    server = n.nbdkit(rig, "memory", str(n.SIZE), name="before")
    daemon = n.serve(rig, (server, ""), name="of-before")
    server.kill()
    load = r.Child(rig, "load-before", n.load(rig, "--size", "1M"))
    r.wait_for("the loss is seen", lambda: "is lost" in daemon.child.output())
    server.start()
    code = load.wait(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    server.kill()


def test_a_server_that_is_away_for_long_is_found_again(rig):
    """The pauses between two tries have a bound."""
    server = n.nbdkit(rig, "file", rig.image("away.img", n.SIZE), name="away")
    daemon = n.serve(rig, (server, ""), name="of-away", reconnect_delay=120)
    load = r.Child(rig, "load-away", n.load(rig, "--runtime", r.FOREVER))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    server.kill()
    before = n.requests(daemon, load)
    time.sleep(8)
    r.require(n.requests(daemon, load) - before < 100, "requests without a server")
    server.start()
    r.wait_for("it is connected again", lambda: "connected again" in daemon.child.output())
    r.wait_for("requests", lambda: n.requests(daemon, load) > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    server.kill()


def test_without_reconnect_delay_requests_fail_until_the_server_is_back(rig):
    server = n.nbdkit(rig, "memory", str(n.SIZE), name="nodelay")
    daemon = n.serve(rig, (server, ""), name="of-nodelay")
    load = r.Child(rig, "load-nodelay", n.load(rig, "--runtime", r.FOREVER))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    server.kill()
    code = load.wait(60)
    r.require(code == 1, f"the load ends with an error: {code}: {load.tail()}")
    r.wait_for("the log line with the remedy", lambda: "reconnect-delay=60" in daemon.child.output())
    server.start()

    def works():
        return r.run(n.load(rig, "--size", "1M"), check=False).returncode == 0

    r.wait_for("the disk works again", works, every_s=0.3)
    n.ends(daemon)


def test_each_loss_of_an_idle_connection_begins_a_delay_of_its_own(rig):
    server = n.nbdkit(rig, "file", rig.image("idle.img", n.SIZE), name="idle")
    daemon = n.serve(rig, (server, ""), name="of-idle", reconnect_delay=1)
    load = r.Child(rig, "load-idle", n.load(rig, "--runtime", r.FOREVER, queues=1))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    load.suspend()
    r.wait_for("no request is in flight", lambda: not any(q["in-flight"] for q in daemon.status()["queues"]))

    def lines(words):
        lines = daemon.child.output().splitlines()
        return [line for line in lines if words in line and "a worker's connection" not in line]

    for _ in range(3):
        lost, back = len(lines("is lost")), len(lines("connected again"))
        server.kill()
        r.wait_for("the loss is seen", lambda lost=lost: len(lines("is lost")) > lost)
        server.start()
        r.wait_for("it is connected again", lambda back=back: len(lines("connected again")) > back)
        time.sleep(1.2)  # longer than the delay
    r.require(all("requests wait for it" in line for line in lines("is lost")), f"{lines('is lost')}")
    load.resume()
    before = n.requests(daemon, load)
    r.wait_for("requests after the losses", lambda: n.requests(daemon, load) > before + 100)
    load.kill()
    n.ends(daemon)
    server.kill()


WAYS = ("magic", "cookie", "long-chunk", "absurd-chunk", "beyond", "twice", "half", "close", "shutdown")


@pytest.mark.parametrize("headers", ("structured", "extended"))
@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_lies_once_is_left(rig, way, headers):
    server = n.liar(rig, way, name=f"{way}-{headers}", once=1, headers=headers)
    daemon = n.serve(rig, (server, ""), name=f"of-{way}-{headers}", reconnect_delay=120)
    load = r.Child(rig, f"load-{way}-{headers}", n.load(rig, "--size", "4M"))
    code = load.wait(180)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    r.require("is lost" in daemon.child.output(), f"the server did not lie: {daemon.child.output()}")
    n.ends(daemon)
    r.require(server.child.running(), f"the server ended: {server.child.tail()}")
    server.kill()


@pytest.mark.parametrize("way", ("shrink", "cookie", "turns-read-only", "loses-flush"))
def test_a_server_that_stays_bad_fails_requests_after_the_delay(rig, way):
    server = n.liar(rig, way, name=f"bad-{way}", after=0 if way == "cookie" else 20)
    daemon = n.serve(rig, (server, ""), name=f"of-bad-{way}", reconnect_delay=1)
    load = r.Child(rig, f"load-bad-{way}", n.load(rig, "--size", "4M"))
    code = load.wait(120)
    r.require(code == 1, f"the load ends with an error: {code}: {load.tail()}")
    said = {
        "shrink": "bytes now and had",
        "cookie": "broke the protocol",
        "turns-read-only": "refuses writes now",
        "loses-flush": "can do less than when the disk was opened",
    }[way]
    r.wait_for("the log says why", lambda: said in daemon.child.output())
    n.ends(daemon)
    server.kill()


def test_a_server_that_hangs_harms_its_own_disk_only(rig):
    server = n.nbdkit(rig, "memory", str(n.SIZE), name="hangs")
    # Both exports are on worker 0.
    daemon = r.Daemon(
        rig,
        *("--disk", n.disk(server), "--export", n.export(rig, workers="default")),
        *("--disk", "name=d1,format=ram,size=64M", "--export", n.export(rig, "vm1", "d1", workers="default")),
        name="of-hangs",
    )
    load = r.Child(rig, "load-hangs", n.load(rig, "--runtime", r.FOREVER))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    server.child.suspend()
    other = r.run(n.load(rig, "--size", "8M", name="vm1"), timeout_s=120)
    r.require(other.returncode == 0, "the other disk is served")
    worker = daemon.worker_new()

    def in_flight():
        return all(q["in-flight"] > 0 for q in daemon.status()["queues"] if q["export"] == "vm0")

    r.wait_for("requests in flight", in_flight)
    moved = daemon.cli("attach", "--timeout", "1s", "vm0:0", str(worker), check=False)
    r.require(moved.returncode != 0, f"the queue moved with requests in flight: {moved.stdout}")
    server.child.resume()
    daemon.attach("vm0:0", worker)
    before = n.requests(daemon, load)
    r.wait_for("requests after the server hung", lambda: n.requests(daemon, load) > before + 100)
    server.child.suspend()
    # kill -9 ends the daemon at once.
    daemon.child.kill()
    server.child.resume()
    load.kill()
    server.kill()
