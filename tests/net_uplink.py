"""A tap as a port of a switch: what guests send to the host and hear from it, and two networks of the host joined by nothing
but us, whose stacks see to it that each byte is right while queues move, uplinks go and come, and the daemon dies."""

import os
import random
import sys
import threading
import time

import net_frames as f
import net_offload as o
import net_peer as c
import net_rig as n
import peer as p
import rig as r

LEFT, RIGHT, PORT = "10.77.0.1", "10.77.0.2", 5077
STREAMS = 3
SEED = 7
STREAM = str(r.ROOT / "tests" / "net_stream.py")


class Up(r.Daemon):
    """A switch with a card of one pair and an uplink, vs0: for the cases of a card on a tap."""

    def __init__(self, rig, name="up", mtu=1500, more=()):
        self.socket = rig.dir / f"{name}.sock"
        super().__init__(
            rig,
            *("--net", "type=switch,name=s0", "--net", "type=tap,name=t0,ifname=vs0"),
            *("--export", f"type=uplink,name=u0,net=s0,tap=t0,queues=2,workers=per-queue,mtu={mtu}"),
            *("--export", f"type=vhost-user-net,name=c0,net=s0,socket={self.socket},queues=1,mac={n.MAC}"),
            *more,
            name=name,
        )

    def drops(self):
        """Of the card, by reason; those that are not 0."""
        return drops(self, "c0")


def drops(daemon, export):
    total = {}
    for q in daemon.status()["queues"]:
        if q["export"] == export and "net" in q:
            for why, count in q["net"]["drops"].items():
                total[why] = total.get(why, 0) + count
    return {why: count for why, count in total.items() if count}


def slow(rig):
    """A guest that takes nothing holds up no frame for another one."""
    other = rig.dir / "slow1.sock"
    up = Up(rig, "slow", more=("--export", f"type=vhost-user-net,name=c1,net=s0,socket={other},queues=1"))
    slow_mac, host = f.GUEST_MAC[:5] + b"\x99", None
    try:
        n.ip("link", "set", "vs0", "up")
        host = f.Host("vs0")
        with c.Card(up.socket, c.MRG_RXBUF) as card, c.Card(other, c.MRG_RXBUF) as lazy:
            for each, mac in ((card, f.GUEST_MAC), (lazy, slow_mac)):
                each.transmit(f.frame(1, 600, f.HOST_MAC, mac))
                r.require(host.receive(mac) is not None, "a guest's first frame does not come out")
            card.fill(200, 2048)
            for number in range(100):
                for k in range(20):
                    host.send(f.frame(k, 600, slow_mac, f.HOST_MAC))
                host.send(f.frame(number, 600, f.GUEST_MAC, f.HOST_MAC))
                got = card.take()
                r.require(got is not None, f"frame {number} does not come")
                f.check(got[1], number, 600, f.GUEST_MAC, f.HOST_MAC)
            r.wait_for("what waits to be dropped", lambda: drops(up, "u0").get("no-room", 0) > 0)
        r.require(up.child.stop() == 0, up.child.tail())
    finally:
        up.child.kill()


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
        """Traffic goes on."""
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
            "print('whole',flush=True)\n"
        )
        far = r.Child(self.rig, "segments", [*self.inside(), sys.executable, "-c", script])
        r.wait_for("the far end listens", lambda: "listening" in far.output())
        with f.socket.socket(f.socket.AF_INET, f.socket.SOCK_DGRAM) as sock:
            # SOL_UDP, UDP_SEGMENT
            sock.setsockopt(17, 103, 1000)
            for k in range(30):
                sock.sendto(b"".join(bytes([(k * 40 + i) % 251]) * 1000 for i in range(40)), (RIGHT, 5078))
                time.sleep(0.002)
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


def vanished(rig):
    """The interface goes while frames of it are with a guest: they return, and the worker rests."""
    for turn in range(3):
        up = Up(rig, f"vanished{turn}")
        try:
            n.ip("link", "set", "vs0", "up")
            host = f.Host("vs0")
            with c.Card(up.socket, c.MRG_RXBUF) as card:
                card.fill(200, 2048)
                card.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
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
                time.sleep(0.2)
                n.ip("link", "del", "vs0")
                while card.take(0, 0.2):
                    card.fill(1, 2048)
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


def let_go(rig):
    """A network that is removed is gone, whoever sent to it before and is silent since."""
    up = Up(rig, "let-go")
    try:
        n.ip("link", "set", "vs0", "up")
        host = f.Host("vs0")
        with c.Card(up.socket, c.MRG_RXBUF) as card:
            card.fill(16, 2048)
            card.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
            r.require(host.receive(f.GUEST_MAC) is not None, "the guest's frame does not come out")
            host.close()
            up.cli("export", "remove", "u0")
            up.cli("net", "remove", "t0")
            r.require(not os.path.exists("/sys/class/net/vs0"), "the tap is still there")
            up.cli("net", "add", "type=tap,name=t0,ifname=vs0")
        r.require(up.child.stop() == 0, up.child.tail())
    finally:
        up.child.kill()


def announced(up):
    """Where a guest came to is told to what the switch's uplinks lead to."""
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


def learnt(up):
    """Where a guest is, is known by its first frame: what is for it does not come back, and what is for others passes it by."""
    host = f.Host("vs0")
    with c.Card(up.socket, c.MRG_RXBUF) as card:
        card.fill(16, 2048)
        card.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC))
        seen = host.receive(f.GUEST_MAC)
        r.require(seen is not None, "the guest's frame does not come out")
        f.check(seen, 1, 600, f.HOST_MAC, f.GUEST_MAC)
        host.send(f.frame(2, 600, f.GUEST_MAC, f.HOST_MAC))
        # To one who is behind the uplink itself.
        host.send(f.frame(3, 600, f.HOST_MAC, f.GUEST_MAC[:5] + b"\x99"))
        host.send(f.frame(4, 600, f.GUEST_MAC, f.HOST_MAC))
        for number in (2, 4):
            got = card.take()
            r.require(got is not None, f"frame {number} does not come")
            f.check(got[1], number, 600, f.GUEST_MAC, f.HOST_MAC)
    host.close()


def down(up):
    """While the interface is down, frames are dropped and counted; then all is as before."""
    with c.Card(up.socket, c.MRG_RXBUF) as card:
        card.fill(16, 2048)
        n.ip("link", "set", "vs0", "down")
        before = drops(up, "u0").get("down", 0)
        card.transmit(f.frame(5, 600, f.HOST_MAC, f.GUEST_MAC))
        r.wait_for("a drop", lambda: drops(up, "u0").get("down", 0) == before + 1)
        n.ip("link", "set", "vs0", "up")
    learnt(up)


def gone(rig):
    """The interface is removed by somebody else: the uplink says so, the guests go on with each other and with another uplink."""
    up = Up(rig, "gone")
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


def tests(rig):
    with_up = Up(rig)
    try:
        made = rig.test("net: uplink: a bridge to a link without offloads", o.network)
        for kind in o.KINDS:
            if made:
                rig.test(f"net: uplink: {kind.name} from the guest, cut and summed behind us", lambda k=kind: o.from_guest(with_up, k))
            rig.test(f"net: uplink: {kind.name} to a guest that takes it", lambda k=kind: o.to_guest(with_up, k, True))
            rig.test(f"net: uplink: {kind.name} to a guest that does not", lambda k=kind: o.to_guest(with_up, k, False))
        if made:
            n.ip("link", "del", "br0")
            n.ip("link", "del", "ve0")
        n.ip("link", "set", "vs0", "up")
        rig.test("net: uplink: who is where is learnt", lambda: learnt(with_up))
        rig.test("net: uplink: a guest that comes is announced", lambda: announced(with_up))
        rig.test("net: uplink: an interface that is down", lambda: down(with_up))
        rig.test("net: uplink: it ends well", lambda: r.require(with_up.child.stop() == 0, with_up.child.tail()))
    finally:
        with_up.child.kill()
    rig.test("net: uplink: an interface that is removed", lambda: gone(rig))
    rig.test("net: uplink: an interface that is removed under traffic", lambda: vanished(rig))
    rig.test("net: uplink: a network that is removed is gone", lambda: let_go(rig))
    rig.test("net: uplink: a guest that takes nothing", lambda: slow(rig))
    joined = Joined(rig)
    try:
        rig.test("net: uplink: two networks, queues move", lambda: joined.load("moves", joined.moves))
        rig.test("net: uplink: two networks, uplinks go and come", lambda: joined.load("removals", joined.removals))
        rig.test("net: uplink: two networks, kill -9", lambda: joined.load("kills", joined.kills))
        rig.test("net: uplink: two networks, segments of datagrams", joined.segments)
        rig.test("net: uplink: two networks, it ends well", joined.end)
    finally:
        joined.clean()
