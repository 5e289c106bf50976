"""A switch whose ports do not trust each other, with NICs and uplinks. For tests in tests/net."""

import struct

import net_frames as f
import net_peer as c
import rig as r

A, B, C, D = (bytes.fromhex(f"5254000000{k:02x}") for k in (0x0A, 0x0B, 0x0C, 0x0D))
EVIL = bytes.fromhex("5254000000ee")
ALL = b"\xff" * 6
# The first of the numbers that frames of `Net.mark` have.
MARK = 0x7FFF_0000
PACKET_AUXDATA, TP_STATUS_VLAN_VALID = 8, 1 << 4


def text(mac):
    return ":".join(f"{byte:02x}" for byte in mac)


def tag(frame, vlan, kind=0x8100):
    """The frame with one more VLAN tag."""
    return frame[:12] + struct.pack(">HH", kind, vlan) + frame[12:]


class Net(r.Daemon):
    """A switch with NICs c0, c1, … that have these options, and uplinks u0, u1, … on vs0, vs1, …"""

    def __init__(self, rig, name, *nics, uplinks=()):
        self.sockets = [rig.dir / f"{name}{k}.sock" for k in range(len(nics))]
        words = ["--net", "type=switch,name=s0"]
        for k, more in enumerate(nics):
            words += ["--export", f"type=vhost-user-net,name=c{k},net=s0,socket={self.sockets[k]},queues=1{',' * bool(more)}{more}"]
        for k, more in enumerate(uplinks):
            words += ["--net", f"type=tap,name=t{k},ifname=vs{k}"]
            words += ["--export", f"type=uplink,name=u{k},net=s0,tap=t{k},queues=1{',' * bool(more)}{more}"]
        self.nics, self.number = [], 0
        super().__init__(rig, *words, name=name)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for nic in self.nics:
            nic.__exit__(None, None, None)
        try:
            if kind is None:
                r.require(self.child.stop() == 0, self.child.tail())
        finally:
            self.child.kill()

    def nic(self, number, features=0, buffers=64):
        nic = c.Nic(self.sockets[number], c.MRG_RXBUF | features)
        nic.fill(buffers, 2048)
        self.nics.append(nic)
        return nic

    def all_nics(self, features=0):
        return [self.nic(k, features) for k in range(len(self.sockets))]

    def port(self, export):
        """Status of an export's port."""
        return next(e["port"] for e in self.status()["exports"] if e["name"] == export)

    def drops(self, export):
        """By reason, those that are not 0."""
        total = {}
        for q in self.status()["queues"]:
            if q["export"] == export and "net" in q:
                for why, count in q["net"]["drops"].items():
                    total[why] = total.get(why, 0) + count
        return {why: count for why, count in total.items() if count}

    def refused(self, why, count, export, act):
        """`act()` causes `count` drops of an export for this reason."""
        before = self.drops(export).get(why, 0)
        act()
        after = self.drops(export).get(why, 0)
        r.require(after == before + count, f"{after - before} dropped as {why}, not {count}: {self.drops(export)}")

    def mark(self):
        self.number += 1
        return MARK + self.number


def got(nic, what):
    """The next frame of a test that a NIC receives."""
    seen = f.received(nic)
    r.require(seen is not None, f"{what} does not come")
    nic.fill(1, 2048)
    return seen[1]


def nothing(net, sender, source, *nics):
    """No frame is on its way to these NICs: the next one is a broadcast that is sent now."""
    number = net.mark()
    sender.transmit(f.frame(number, 100, ALL, source))
    for k, nic in enumerate(nics):
        data = got(nic, f"a frame to all for NIC {k}")
        r.require(data == f.frame(number, 100, ALL, source), f"NIC {k} got a frame that is not for it: {data[:40].hex()}")


def passes(a, source, b, to, number=1, length=200):
    frame = f.frame(number, length, to, source)
    a.transmit(frame)
    data = got(b, f"the frame from {text(source)} to {text(to)}")
    r.require(data == frame, f"another frame came: {data[:40].hex()}")


def got_tagged(nic, what):
    seen = nic.take()
    r.require(seen is not None, f"{what} does not come to the trunk")
    nic.fill(1, 2048)
    return seen[1]


class Tagged(f.Host):
    """A packet socket that restores VLAN tags, which the kernel removes from frames."""

    def __init__(self, ifname):
        super().__init__(ifname)
        self.socket.setsockopt(263, PACKET_AUXDATA, 1)

    def next(self, address, at=6):
        """The next frame from this address, or with `at=0` to it, with its tag."""
        self.socket.settimeout(r.WAIT_S)
        while True:
            try:
                data, control, *_ = self.socket.recvmsg(1 << 17, 256)
            except TimeoutError as e:
                raise r.Failed(f"no frame with the address {text(address)} comes") from e
            if data[at : at + 6] != address:
                continue
            for level, kind, value in control:
                if (level, kind) == (263, PACKET_AUXDATA):
                    status, tci = struct.unpack_from("=I", value)[0], struct.unpack_from("=H", value, 16)[0]
                    if status & TP_STATUS_VLAN_VALID:
                        return tag(data, tci)
            return data


def mac_of(ifname):
    with open(f"/sys/class/net/{ifname}/address") as file:
        return bytes.fromhex(file.read().strip().replace(":", ""))
