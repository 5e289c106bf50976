"""Tests a tap as a port of a switch.

Frames pass between guests and the host, and between two networks of the host that only the switch
joins. The network stacks of the host check each byte while queues move, uplinks are removed and
added, and the daemon is killed.
"""

import os
import random
import sys
import threading
import time

import net_frames as f
import net_peer as c
import net_rig as n
import peer as p
import pytest
import rig as r

LEFT, RIGHT, PORT = "10.77.0.1", "10.77.0.2", 5077
STREAMS = 3
SEED = 7
STREAM = str(r.ROOT / "tests" / "lib" / "net_stream.py")


class Joined:
    """Two networks of the host, joined by a switch with an uplink to each. The taps are the rig's, and outlive the daemon."""

    def __init__(self, rig):
        self.rig = rig
        self.far = r.Child(rig, "far", [r.tool("unshare", "util-linux"), "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        r.wait_for("another namespace", lambda: os.readlink(f"/proc/{self.far.pid}/ns/net") != own)
        for ifname, address, inside in (("vsl", LEFT, []), ("vsr", RIGHT, self.inside())):
            ip = [*inside, r.tool("ip", "iproute2")]
            r.run([*ip, "tuntap", "add", "dev", ifname, "mode", "tap", "multi_queue", "vnet_hdr"])
            r.run([*ip, "addr", "add", f"{address}/24", "dev", ifname])
            r.run([*ip, "link", "set", ifname, "up"])
        self.uplinks = {
            f"u{net}": f"type=uplink,name=u{net},net=s0,tap={net},queues=2,workers=per-queue" for net in ("l", "r")
        }
        self.daemon = r.Daemon(
            rig,
            *("--net", "type=switch,name=s0"),
            *("--net", "type=tap,name=l,ifname=vsl", "--net", f"type=tap,name=r,ifname=vsr,netns=/proc/{self.far.pid}/ns/net"),
            *(word for spec in self.uplinks.values() for word in ("--export", spec)),
            name="joined",
        )
        self.server = r.Child(rig, "stream-far", [*self.inside(), sys.executable, STREAM, "listen", str(PORT)])
        r.wait_for("the far end listens", lambda: "listening" in self.server.output())

    def inside(self):
        return [r.tool("nsenter", "util-linux"), f"--net=/proc/{self.far.pid}/ns/net"]

    def arrived(self):
        """Bytes that came to the near end so far."""
        with open("/sys/class/net/vsl/statistics/rx_bytes") as file:
            return int(file.read())

    def go_on(self, what):
        """Traffic continues."""
        before = self.arrived()
        r.wait_for(f"traffic {what}", lambda: self.arrived() > before + 10_000_000)

    def load(self, name, body):
        """That, while streams run; each byte is right in the end."""
        stop = self.rig.dir / f"{name}.stop"
        load = r.Child(self.rig, f"stream-{name}", [sys.executable, STREAM, "talk", RIGHT, str(PORT), str(STREAMS), str(stop)])
        try:
            self.go_on("at first")
            body()
            self.go_on("in the end")
            r.require(load.running(), load.tail())
        finally:
            stop.touch()
        r.require(load.wait() == 0 and "heard" in load.output(), load.tail())
        r.require(self.server.running(), self.server.tail())

    def moves(self):
        workers = [0, self.daemon.worker_new(), self.daemon.worker_new()]
        chance = random.Random(SEED)
        for _ in range(40):
            self.daemon.cli("attach", f"{chance.choice('ul ur'.split())}:{chance.randrange(2)}", chance.choice(workers))
            time.sleep(chance.uniform(0.0, 0.05))

    def removals(self):
        for name, spec in self.uplinks.items():
            self.daemon.cli("export", "remove", name)
            time.sleep(0.2)
            self.daemon.cli("export", "add", spec)
            self.go_on(f"with {name} again")

    def kills(self):
        for kill in range(2):
            self.daemon.child.kill()
            self.daemon.start()
            self.go_on(f"after kill {kill + 1}")

    def segments(self):
        """Datagrams that are segments of a larger one until somebody who does not take that comes: whole and in order."""
        script = (
            "import socket,sys\n"
            "s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);s.setsockopt(socket.SOL_SOCKET,33,8<<20)\n"
            "s.bind(('',5078));print('listening',flush=True);s.settimeout(60)\n"
            "for n in range(40*30):\n"
            "  d=s.recv(65536);assert d==bytes([n%251])*1000,(n,len(d),d[:4])\n"
            "  if n%40==39:print('got',flush=True)\n"
            "print('whole',flush=True)\n"
        )
        far = r.Child(self.rig, "segments", [*self.inside(), sys.executable, "-c", script])
        r.wait_for("the far end listens", lambda: "listening" in far.output())
        with f.socket.socket(f.socket.AF_INET, f.socket.SOCK_DGRAM) as sock:
            # SOL_UDP, UDP_SEGMENT
            sock.setsockopt(17, 103, 1000)
            for k in range(30):
                sock.sendto(b"".join(bytes([(k * 40 + i) % 251]) * 1000 for i in range(40)), (RIGHT, 5078))
                # A queue that overflows would lose some.
                r.wait_for("the datagrams arrive", lambda: far.output().count("got") > k or not far.running(), every_s=0.002)
        r.require(far.wait() == 0, far.tail())

    def end(self):
        code = self.daemon.child.stop()
        r.require(code == 0, f"vshunt ended with {code}: {self.daemon.child.tail()}")
        r.require("panicked" not in self.daemon.child.output(), self.daemon.child.tail())

    def clean(self):
        self.daemon.child.kill()
        self.server.kill()
        self.far.kill()
        n.ip("link", "del", "vsl")


@pytest.fixture(scope="module")
def up(rig):
    with n.Up(rig) as made:
        n.ip("link", "set", "vs0", "up")
        yield made


def learnt(up):
    """The switch learns the port of a guest from its first frame.

    The guest then gets only its own frames.
    """
    host = f.Host("vs0")
    with c.Nic(up.socket, c.MRG_RXBUF) as nic:
        nic.fill(16, 2048)
        nic.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
        seen = host.receive(f.GUEST_MAC)
        r.require(seen is not None, "the guest's frame does not come out")
        f.check(seen, 1, 600, f.HOST_MAC, f.GUEST_MAC)
        host.send(f.frame(2, 600, f.GUEST_MAC, f.HOST_MAC))
        # To one who is behind the uplink itself.
        host.send(f.frame(3, 600, f.HOST_MAC, f.GUEST_MAC[:5] + b"\x99"))
        host.send(f.frame(4, 600, f.GUEST_MAC, f.HOST_MAC))
        for number in (2, 4):
            got = nic.take()
            r.require(got is not None, f"frame {number} does not come")
            f.check(got[1], number, 600, f.GUEST_MAC, f.HOST_MAC)
    host.close()


def test_where_a_guest_is_is_learnt(up):
    learnt(up)


def test_a_guest_that_arrives_is_announced(up):
    """Its place is announced to the network behind the uplinks."""
    host = f.Host("vs0")
    mac, other = f.GUEST_MAC, bytes.fromhex("525400000077")
    with p.Peer(up.socket) as peer:
        peer.handshake()
        # Not where it is not the export's address: the front end could take over another guest's.
        peer.order(p.SEND_RARP, other + bytes(2))
        r.require(host.receive(other, wait_s=0.2) is None, "an address that is not the export's is announced")
        peer.order(p.SEND_RARP, mac + bytes(2))
        frame = host.receive(mac)
        r.require(frame is not None and frame[12:14] == b"\x80\x35", f"{frame and frame.hex()}")
    host.close()


def test_an_interface_that_is_down(up):
    """Frames are dropped and counted until it is up again."""
    with c.Nic(up.socket, c.MRG_RXBUF) as nic:
        nic.fill(16, 2048)
        n.ip("link", "set", "vs0", "down")
        before = n.drops(up, "u0").get("down", 0)
        nic.transmit(f.frame(5, 600, f.HOST_MAC, f.GUEST_MAC))
        r.wait_for("a drop", lambda: n.drops(up, "u0").get("down", 0) == before + 1)
        n.ip("link", "set", "vs0", "up")
    learnt(up)


def test_end(up):
    r.require(up.child.stop() == 0, up.child.tail())


def test_an_interface_that_is_removed(rig):
    """The uplink is reported as broken. Guests continue with each other, and with another uplink."""
    up = n.Up(rig, "gone")
    try:
        n.ip("link", "del", "vs0")

        def states():
            return {q["state"] for q in up.status()["queues"] if q["export"] == "u0"}

        r.wait_for("queues that are broken", lambda: states() == {"broken"})
        up.cli("export", "remove", "u0")
        up.cli("net", "remove", "t0")
        up.cli("net", "add", "type=tap,name=t0,ifname=vs0")
        up.cli("export", "add", "type=uplink,name=u0,net=s0,tap=t0,queues=2")
        n.ip("link", "set", "vs0", "up")
        learnt(up)
        r.require(up.child.stop() == 0, up.child.tail())
    finally:
        up.child.kill()


def test_an_interface_that_is_removed_under_traffic(rig):
    """Its frames that wait at a guest return, and the worker becomes idle."""
    for turn in range(3):
        up = n.Up(rig, f"vanished{turn}")
        try:
            n.ip("link", "set", "vs0", "up")
            host = f.Host("vs0")
            with c.Nic(up.socket, c.MRG_RXBUF) as nic:
                nic.fill(200, 2048)
                nic.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
                r.require(host.receive(f.GUEST_MAC) is not None, "the guest's frame does not come out")
                stop = threading.Event()

                def blast():
                    while not stop.is_set():
                        try:
                            host.send(f.frame(2, 600, f.GUEST_MAC, f.HOST_MAC))
                        except OSError:
                            return

                sender = threading.Thread(target=blast)
                sender.start()
                r.wait_for("frames for the guest", nic.rings[0].has_used)
                n.ip("link", "del", "vs0")
                while nic.take(0, 0.2):
                    nic.fill(1, 2048)
                stop.set()
                sender.join()

                def ours():
                    return [q for q in up.status()["queues"] if q["export"] == "u0"]

                r.wait_for("queues that are broken and empty", lambda: all((q["state"], q["in-flight"]) == ("broken", 0) for q in ours()))
                n.rests(up)
                up.cli("export", "remove", "u0")
                added = up.cli("export", "add", "type=uplink,name=u1,net=s0,tap=t0", check=False)
                r.message_of(added, "vs0 is gone", "add it again")
            host.close()
            r.require(up.child.stop() == 0, up.child.tail())
            r.require("can no longer be read" in up.child.output(), "nothing is said of the tap: " + up.child.tail())
        finally:
            up.child.kill()


def test_a_network_that_is_removed_is_gone(rig):
    """Also when a guest sent to it before, and is silent since."""
    up = n.Up(rig, "let-go")
    try:
        n.ip("link", "set", "vs0", "up")
        host = f.Host("vs0")
        with c.Nic(up.socket, c.MRG_RXBUF) as nic:
            nic.fill(16, 2048)
            nic.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
            r.require(host.receive(f.GUEST_MAC) is not None, "the guest's frame does not come out")
            host.close()
            up.cli("export", "remove", "u0")
            up.cli("net", "remove", "t0")
            r.require(not os.path.exists("/sys/class/net/vs0"), "the tap is still there")
            up.cli("net", "add", "type=tap,name=t0,ifname=vs0")
        r.require(up.child.stop() == 0, up.child.tail())
    finally:
        up.child.kill()


def test_a_guest_that_takes_nothing(rig):
    """It holds up no frame for another guest."""
    other = rig.dir / "slow1.sock"
    up = n.Up(rig, "slow", more=("--export", f"type=vhost-user-net,name=c1,net=s0,socket={other},queues=1"))
    slow_mac, host = f.GUEST_MAC[:5] + b"\x99", None
    try:
        n.ip("link", "set", "vs0", "up")
        host = f.Host("vs0")
        with c.Nic(up.socket, c.MRG_RXBUF) as nic, c.Nic(other, c.MRG_RXBUF) as lazy:
            for each, mac in ((nic, f.GUEST_MAC), (lazy, slow_mac)):
                each.transmit(f.frame(1, 600, f.HOST_MAC, mac))
                r.require(host.receive(mac) is not None, "a guest's first frame does not come out")
            nic.fill(200, 2048)
            for number in range(100):
                for k in range(20):
                    host.send(f.frame(k, 600, slow_mac, f.HOST_MAC))
                host.send(f.frame(number, 600, f.GUEST_MAC, f.HOST_MAC))
                got = nic.take()
                r.require(got is not None, f"frame {number} does not come")
                f.check(got[1], number, 600, f.GUEST_MAC, f.HOST_MAC)
            r.wait_for("what waits to be dropped", lambda: n.drops(up, "u0").get("no-room", 0) > 0)
        r.require(up.child.stop() == 0, up.child.tail())
    finally:
        up.child.kill()


@pytest.fixture(scope="module")
def joined(rig):
    made = Joined(rig)
    yield made
    made.clean()


def test_two_networks_while_queues_move(joined):
    joined.load("moves", joined.moves)


def test_two_networks_while_uplinks_are_removed_and_added(joined):
    joined.load("removals", joined.removals)


def test_two_networks_while_the_daemon_is_killed(joined):
    joined.load("kills", joined.kills)


def test_two_networks_and_segments_of_datagrams(joined):
    joined.segments()


def test_two_networks_end(joined):
    joined.end()
