"""Ports of a switch that do not trust each other: whose addresses leave them, VLANs, lengths, and what is changed while it waits.

Cards are in Python (net_peer), so that every byte is the test's own. That a frame does not come is seen by the next one that does:
frames of one sender keep their order.
"""

import json
import struct
import time

import net_frames as f
import net_hostile as h
import net_offload as o
import net_peer as c
import net_rig as n
import rig as r

A, B, C, D = (bytes.fromhex(f"5254000000{k:02x}") for k in (0x0A, 0x0B, 0x0C, 0x0D))
EVIL = bytes.fromhex("5254000000ee")
ALL = b"\xff" * 6
# What a frame has to be to be passed over by `Net.next`.
MARK = 0x7FFF_0000
# Where the switch's loop probes go.
PROBES = bytes.fromhex("037673686c70")
PACKET_AUXDATA, TP_STATUS_VLAN_VALID = 8, 1 << 4


def text(mac):
    return ":".join(f"{byte:02x}" for byte in mac)


def tag(frame, vlan, kind=0x8100):
    """With a VLAN tag more."""
    return frame[:12] + struct.pack(">HH", kind, vlan) + frame[12:]


class Net(r.Daemon):
    """A switch with cards c0, c1, … of such options each, and uplinks u0, u1, … on vs0, vs1, …"""

    def __init__(self, rig, name, *cards, uplinks=()):
        self.sockets = [rig.dir / f"{name}{k}.sock" for k in range(len(cards))]
        words = ["--net", "type=switch,name=s0"]
        for k, more in enumerate(cards):
            words += ["--export", f"type=vhost-user-net,name=c{k},net=s0,socket={self.sockets[k]},queues=1{',' * bool(more)}{more}"]
        for k, more in enumerate(uplinks):
            words += ["--net", f"type=tap,name=t{k},ifname=vs{k}"]
            words += ["--export", f"type=uplink,name=u{k},net=s0,tap=t{k},queues=1{',' * bool(more)}{more}"]
        self.cards, self.number = [], 0
        super().__init__(rig, *words, name=name)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for card in self.cards:
            card.__exit__(None, None, None)
        try:
            if kind is None:
                r.require(self.child.stop() == 0, self.child.tail())
        finally:
            self.child.kill()

    def card(self, number, features=0, buffers=64):
        card = c.Card(self.sockets[number], c.MRG_RXBUF | features)
        card.fill(buffers, 2048)
        self.cards.append(card)
        return card

    def all_cards(self, features=0):
        return [self.card(k, features) for k in range(len(self.sockets))]

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
        """`act()` has so many frames of an export dropped for this reason."""
        before = self.drops(export).get(why, 0)
        act()
        after = self.drops(export).get(why, 0)
        r.require(after == before + count, f"{after - before} dropped as {why}, not {count}: {self.drops(export)}")

    def mark(self):
        self.number += 1
        return MARK + self.number


def got(card, what):
    """The next frame of ours that a card gets."""
    seen = f.received(card)
    r.require(seen is not None, f"{what} does not come")
    card.fill(1, 2048)
    return seen[1]


def nothing(net, sender, source, *cards):
    """The next frame that these cards get is one that is sent to all now."""
    number = net.mark()
    sender.transmit(f.frame(number, 100, ALL, source))
    for k, card in enumerate(cards):
        data = got(card, f"a frame to all for card {k}")
        r.require(data == f.frame(number, 100, ALL, source), f"card {k} got a frame that is not for it: {data[:40].hex()}")


def passes(a, source, b, to, number=1, length=200):
    frame = f.frame(number, length, to, source)
    a.transmit(frame)
    data = got(b, f"the frame from {text(source)} to {text(to)}")
    r.require(data == frame, f"another frame came: {data[:40].hex()}")


def sources(rig):
    """Nobody takes over the address of another port, and only the export's own address leaves one with a filter."""
    with Net(rig, "sources", f"mac={text(A)}", "", f"mac={text(C)},mac-filter=off") as net:
        a, b, cc = net.all_cards()
        # It is known before its guest has said a word, and only there.
        passes(b, B, a, A)
        nothing(net, b, B, a, cc)
        net.refused("foreign-source", 1, "c1", lambda: b.transmit(f.frame(2, 200, ALL, A)))
        net.refused("foreign-source", 1, "c2", lambda: cc.transmit(f.frame(2, 200, ALL, A)))
        net.refused("foreign-source", 1, "c0", lambda: a.transmit(f.frame(2, 200, ALL, EVIL)))
        passes(cc, EVIL, b, B)
        passes(b, B, a, A)
        nothing(net, b, B, a, cc)
        # Filters are shown as they are.
        shown = [net.port(f"c{k}")["mac-filter"] for k in range(3)]
        r.require(shown == [True, False, False], f"{shown}")
        refused = net.cli("export", "add", f"type=vhost-user-net,name=c9,net=s0,socket={rig.dir}/c9.sock,mac={text(A)}", check=False)
        r.message_of(refused, "its mac is that of export c0", "a mac of its own")
        listed = net.cli("status").stdout
        r.require("mac-filter" in listed and "LEARNT" in listed and "foreign-source" in listed, listed)


def stations(rig):
    """A guest that makes up addresses pushes out its own, and nobody's else."""
    with Net(rig, "stations", "", "mac-limit=4", "") as net:
        a, b, cc = net.all_cards()
        cc.transmit(f.frame(1, 100, C, C))
        a.transmit(f.frame(1, 100, A, A))
        for k in range(300):
            b.transmit(f.frame(k, 100, A, bytes.fromhex("5254000100") + bytes([k % 256])))
            got(a, "a frame to a known address")
        port = net.port("c1")
        r.require((port["addresses"], port["mac-limit"]) == (4, 4), f"{port}")
        # The last one is known, and so are the others' stations.
        passes(a, A, b, bytes.fromhex("5254000100") + bytes([299 % 256]))
        passes(b, B, cc, C)
        nothing(net, a, A, b, cc)


def reserved(rig):
    """Frames for bridges themselves do not pass, nor those whose sender cannot be one; an option lets the former."""
    with Net(rig, "reserved", "", "", "reserved=on", "reserved=on") as net:
        a, b, cc, d = net.all_cards()
        bridges = bytes.fromhex("0180c20000")
        net.refused("reserved", 16, "c0", lambda: [a.transmit(f.frame(1, 100, bridges + bytes([k]), A)) for k in range(16)])
        for bad in (bytes(6), ALL, bytes.fromhex("010000000001")):
            net.refused("bad-source", 1, "c0", lambda source=bad: a.transmit(f.frame(1, 100, ALL, source)))
        nothing(net, a, A, b, cc, d)
        for k in (0, 2, 15):
            passes(cc, C, d, bridges + bytes([k]))
        # One beyond is a group like any other.
        frame = f.frame(2, 100, bridges + b"\x10", C)
        cc.transmit(frame)
        for card in (a, b, d):
            r.require(got(card, "a group's frame") == frame, "another frame came")


def vlans(rig):
    """Access ports and trunks: tags added and removed, learning by VLAN, and nobody chooses another's."""
    with Net(rig, "vlans", "vlan=5", "vlan=5", "vlan=6", "trunk=5,,6", "") as net:
        a, b, cc, trunk, plain = net.all_cards()
        frame = f.frame(1, 200, ALL, A)
        a.transmit(frame)
        r.require(got(b, "VLAN 5's frame") == frame, "it is changed")
        r.require(got_tagged(trunk, "VLAN 5's frame") == tag(frame, 5), "the trunk's has not its tag")
        # The same station in another VLAN is another one.
        trunk.transmit(tag(f.frame(2, 200, ALL, A), 6))
        r.require(got(cc, "VLAN 6's frame") == f.frame(2, 200, ALL, A), "the tag stays")
        passes(b, B, a, A)
        cc.transmit(f.frame(3, 200, A, C))
        r.require(got_tagged(trunk, "VLAN 6's frame") == tag(f.frame(3, 200, A, C), 6), "another frame came")
        listed = json.loads(net.cli("net", "addresses", "s0", "--json").stdout)
        known = [(text(B), 5, "c1"), (text(A), 5, "c0"), (text(C), 6, "c2"), (text(A), 6, "c3")]
        r.require(sorted((x["address"], x["vlan"], x["export"]) for x in listed) == sorted(known), f"{listed}")
        r.require(all(x["origin"] == "learnt" and x["age-s"] < 300 for x in listed), f"{listed}")
        shown = net.cli("net", "addresses", "s0").stdout.splitlines()
        r.require(len(shown) == 5 and shown[0].split() == ["ADDRESS", "VLAN", "PORT", "ORIGIN", "AGE"], f"{shown}")
        # Priority alone is no VLAN; an access port's guest may not choose one.
        b.transmit(tag(f.frame(4, 200, A, B), 0xE000))
        r.require(got(a, "a frame with a priority") == f.frame(4, 200, A, B), "the tag stays")
        for vlan, kind in ((5, 0x8100), (6, 0x8100), (5, 0x88A8), (0, 0x9100)):
            net.refused("vlan", 1, "c0", lambda v=vlan, k=kind: a.transmit(tag(f.frame(5, 200, ALL, A), v, k)))
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(f.frame(5, 200, ALL, D)))
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(tag(f.frame(5, 200, ALL, D), 7)))
        # A second tag does not come to be the first.
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(tag(tag(f.frame(5, 200, B, D), 6), 5)))
        net.refused("no-receiver", 1, "c4", lambda: plain.transmit(f.frame(5, 200, ALL, D)))
        nothing(net, a, A, b)


def got_tagged(card, what):
    seen = card.take()
    r.require(seen is not None, f"{what} does not come to the trunk")
    card.fill(1, 2048)
    return seen[1]


def offloads(rig, kind):
    """Super frames whose tag is added or removed: whole with places that fit, else cut with right sums."""
    with Net(rig, "tagged", "vlan=5", "trunk=5", "trunk=5", "vlan=5") as net:
        takes = c.GUEST_CSUM | kind.guest
        access, trunk = net.card(0, c.CSUM | kind.host | takes), net.card(1, c.CSUM | kind.host | takes)
        cutting, cutting_access = net.card(2), net.card(3)
        for size in (1, 700, 5 * o.MSS, 40_000):
            data, head = o.payload(size), kind.header(o.MSS if size > o.MSS else 0)
            flags, gso, hdr_len, gso_size, start, offset = struct.unpack("<BBHHHH", head[:10])
            moved = struct.pack("<BBHHHH", flags, gso, hdr_len and hdr_len + 4, gso_size, start + 4, offset)
            # Untagged to all: to a trunk that takes it, to one that does not, to an access port that does not.
            frame = kind.frame(ALL, A, data)
            access.transmit(frame, head, cuts=(5, 40))
            seen = trunk.take()
            r.require(seen is not None and seen[1] == tag(frame, 5), f"{size} bytes: another frame")
            r.require(seen[0][:10] == moved, f"{size} bytes: a header {seen[0].hex()}, not {moved.hex()}")
            trunk.fill(seen[2], 2048)
            kind.check([untag(piece) for piece in pieces(cutting, kind, size, 4)], data)
            kind.check(pieces(cutting_access, kind, size, 0), data)
            # Tagged to all.
            trunk.transmit(tag(kind.frame(ALL, B, data), 5), moved + bytes(2), cuts=(5, 14, 16, 40))
            seen = access.take()
            r.require(seen is not None and seen[1] == kind.frame(ALL, B, data), f"{size} bytes: another frame")
            r.require(seen[0][:10] == head[:10], f"{size} bytes: a header {seen[0].hex()}, not {head.hex()}")
            access.fill(seen[2], 2048)
            kind.check([untag(piece) for piece in pieces(cutting, kind, size, 4)], data)
            kind.check(pieces(cutting_access, kind, size, 0), data)


def untag(frame):
    r.require(frame[12:16] == struct.pack(">HH", 0x8100, 5), f"no tag: {frame[:20].hex()}")
    return frame[:12] + frame[16:]


def pieces(card, kind, size, more):
    """Frames with so many bytes of payload, `more` bytes longer each than without tags."""
    frames, have = [], 0
    while have < size:
        seen = card.take()
        r.require(seen is not None, f"{kind.name}: {have} of {size} bytes come")
        r.require(seen[0][:10] == bytes(10), f"a header {seen[0].hex()} for a guest that takes none")
        card.fill(seen[2], 2048)
        frames.append(seen[1])
        have += len(seen[1]) - kind.headers - more
    return frames


def isolated(rig):
    """Isolated ports talk to others, not to each other."""
    with Net(rig, "isolated", "isolated=on", "isolated=on", "") as net:
        a, b, up = net.all_cards()
        for card, mac in ((a, A), (b, B)):
            card.transmit(f.frame(1, 100, ALL, mac))
            r.require(got(up, "a frame to the port that is not isolated") == f.frame(1, 100, ALL, mac), "another frame came")
        net.refused("isolated", 1, "c0", lambda: a.transmit(f.frame(2, 100, B, A)))
        passes(a, A, up, C)
        passes(up, C, a, A)
        nothing(net, up, C, a, b)


def lengths(rig):
    """Nothing longer than a port's MTU passes, segments of super frames neither."""
    tso = o.KINDS[0]
    with Net(rig, "lengths", "mtu=1500", "mtu=1500", "mtu=9000", "") as net:
        a = net.card(0, c.CSUM | tso.host)
        b, large, unset = net.card(1, c.GUEST_CSUM | tso.guest), net.card(2), net.card(3)
        for length in (14, 60, 1514):
            passes(a, A, b, B, length=max(22, length))
            b.transmit(f.frame(1, 100, A, B))
        net.refused("over-mtu", 1, "c0", lambda: a.transmit(f.frame(2, 1515, B, A)))
        net.refused("over-mtu", 1, "c2", lambda: large.transmit(f.frame(2, 1515, B, C)))
        tagged = tag(f.frame(3, 1514, B, A), 5)
        a.transmit(tagged)
        r.require(got_tagged(b, "a frame with a tag") == tagged, "another frame came")
        net.refused("over-mtu", 1, "c0", lambda: a.transmit(tag(f.frame(3, 1515, B, A), 5)))
        for segment, fits in ((1460, True), (1461, False)):
            frame, head = tso.frame(B, A, o.payload(20_000)), tso.header(segment)
            if fits:
                a.transmit(frame, head)
                r.require(got_tagged(b, "a super frame") == frame, "another frame came")
                b.fill(10, 2048)
            else:
                net.refused("over-mtu", 1, "c0", lambda: a.transmit(frame, head))
        # What no MTU was given for has the one that its guest is told.
        r.require([net.port(f"c{k}")["mtu"] for k in range(4)] == [1500, 1500, 9000, 1500], f"{net.status()['exports']}")
        net.refused("over-mtu", 1, "c3", lambda: unset.transmit(f.frame(2, 1515, B, D)))


def sums(rig):
    """A checksum is put behind addresses and tags, or the frame is dropped."""
    with Net(rig, "sums", f"mac={text(A)}", "", "trunk=5", "trunk=5") as net:
        a, b = net.card(0, c.CSUM), net.card(1)
        trunk, other = net.card(2, c.CSUM), net.card(3)
        for start, offset in ((0, 0), (6, 0), (8, 4), (13, 0)):
            head = h.header(o.NEEDS_CSUM, csum_start=start, csum_offset=offset)
            net.refused("bad-header", 1, "c0", lambda x=head: a.transmit(f.frame(1, 200, ALL, A), x))
        for start in (12, 14, 17):
            head = h.header(o.NEEDS_CSUM, csum_start=start, csum_offset=0)
            net.refused("bad-header", 1, "c2", lambda x=head: trunk.transmit(tag(f.frame(1, 200, ALL, C), 5), x))
        nothing(net, a, A, b)
        r.require(other.take(wait_s=0) is None, "a frame came")


def later(card, data):
    """A frame is shown to the daemon; nobody waits for it. -> where it lies"""
    ring = card.rings[1]
    while ring.has_used():
        ring.pop()
    at = ring.room(len(data))
    card.ram[at : at + len(data)] = data
    ring.add([(at, len(data), 0)])
    ring.publish()
    return at


def changed(rig):
    """A frame that is changed while it waits: what was checked is what comes."""
    with Net(rig, "changed", f"mac={text(A)},vlan=5", "trunk=5,,6", f"mac={text(B)}", "") as net:
        a, trunk, b, plain = net.card(0), net.card(1, buffers=0), net.card(2), net.card(3, buffers=0)
        cases = [
            # What the guest sends, what it writes over that, and where; what may come.
            (a, trunk, f.frame(1, 300, ALL, A), 6, EVIL, tag(f.frame(1, 300, ALL, A), 5)),
            (a, trunk, tag(f.frame(2, 300, ALL, A), 0), 14, b"\x00\x06", tag(f.frame(2, 300, ALL, A), 5)),
            (a, trunk, f.frame(3, 300, ALL, A), 12, b"\x81\x00\x00\x06", tag(f.frame(3, 300, ALL, A), 5)),
            (b, plain, f.frame(4, 300, ALL, B), 6, EVIL, f.frame(4, 300, ALL, B)),
        ]
        for sender, receiver, frame, where, over, want in cases:
            came, end, turn = 0, time.monotonic() + r.WAIT_S, 0
            while came < 5:
                r.require(time.monotonic() < end, f"only {came} frames come in {turn} turns: {net.drops('c0')}")
                # One that finds a buffer does not wait, and does not count.
                waits = not receiver.rings[0].chains
                at = later(sender, bytes(c.HEADER) + frame)
                # So long that the daemon has seen it, mostly, and that it has not given up.
                time.sleep(0.001 * (1 + turn % 4))
                place = at + c.HEADER + where
                sender.ram[place : place + len(over)] = over
                if waits:
                    receiver.fill(1, 2048)
                turn += 1
                r.wait_for("the frame's end", lambda: sender.rings[1].has_used())
                while seen := receiver.take(wait_s=0.002):
                    r.require(seen[1][:22] == want[:22], f"a frame came that was changed: {seen[1][:26].hex()}")
                    came += waits


class Tagged(f.Host):
    """A packet socket that tells of VLAN tags, which the kernel takes out of frames."""

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


def uplink(rig):
    """An uplink is a port like others: VLANs, isolation, lengths, and the host's address is the host's."""
    with Net(rig, "uplink", "vlan=5,isolated=on", "vlan=6,isolated=on", "vlan=5,mtu=9000", uplinks=["trunk=5,vlan=6,mtu=1500"]) as net:
        a, b, large = net.all_cards()
        host = Tagged("vs0")
        for card, mac, form in ((a, A, lambda x: tag(x, 5)), (b, B, lambda x: x)):
            for length in (60, 1514):
                frame = f.frame(1, length, ALL, mac)
                card.transmit(frame)
                seen = host.next(mac)
                r.require(seen == form(frame), f"{length} bytes from {text(mac)}: {seen[:30].hex()}")
            back = f.frame(2, 200, mac, C)
            host.send(form(back))
            r.require(got(card, "the host's frame") == back, "another frame came")
        got(large, "VLAN 5's first frame")
        net.refused("vlan", 1, "u0", lambda: (host.send(tag(f.frame(3, 200, ALL, C), 7)), settled(net, host, a)))
        net.refused("reserved", 1, "u0", lambda: (host.send(f.frame(3, 200, bytes.fromhex("0180c2000000"), C)), settled(net, host, a)))
        large.transmit(f.frame(1, 60, A, D))
        got(a, "a frame within VLAN 5")
        net.refused("over-mtu", 1, "c2", lambda: large.transmit(f.frame(3, 1515, C, D)))
        net.refused("foreign-source", 1, "c1", lambda: b.transmit(f.frame(3, 200, ALL, mac_of("vs0"))))
        # An MTU that changes elsewhere is seen after a while.
        n.ip("link", "set", "vs0", "mtu", "9000")
        r.wait_for("the uplink's new MTU", lambda: net.port("u0")["mtu"] == 9000)
        host.close()


def settled(net, host, card):
    """What the host sent before is through."""
    frame = f.frame(net.mark(), 200, A, C)
    host.send(tag(frame, 5))
    r.require(got(card, "the host's frame") == frame, "another frame came")


def loop(rig):
    """Two uplinks into one bridge: one is blocked, said once and counted, and is free again when the loop is gone."""
    with Net(rig, "loop", "", uplinks=["", ""]) as net:
        n.ip("link", "add", "br0", "type", "bridge")
        try:
            for k in range(2):
                n.ip("link", "set", f"vs{k}", "master", "br0")
            n.ip("link", "set", "br0", "up")
            r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
            r.wait_for("a word of it", lambda: "makes a loop" in net.child.output())
            card, host = net.card(0), f.Host("br0")
            card.transmit(f.frame(1, 200, ALL, A))
            r.require(host.receive(A) is not None, "the guest's frame does not come by the other uplink")
            # Nothing goes round: a frame to all comes out once.
            r.require(host.receive(A, wait_s=0.5) is None, "the frame comes again")
            host.send(f.frame(2, 200, A, C))
            r.require(got(card, "the host's frame") == f.frame(2, 200, A, C), "another frame came")
            ports = net.port("u0"), net.port("u1")
            r.require((ports[0]["state"], ports[0]["loops"], ports[1]["loops"]) == ("forwarding", 0, 1), f"{ports}")
            r.require("blocked" in net.cli("status").stdout, net.cli("status").stdout)
            n.ip("link", "set", "vs1", "nomaster")
            r.wait_for("an uplink that is free", lambda: net.port("u1")["state"] == "forwarding")
            words = net.child.output().count("makes a loop")
            r.require(words == 1, f"it is said {words} times: {net.child.tail()}")
            host.close()
        finally:
            n.ip("link", "del", "br0")


def loop_in_one_vlan(rig):
    """A loop in one VLAN of many: each has its turn of probes, and the one that makes the loop has each."""
    last, turn = 200, 64
    with Net(rig, "one-vlan", uplinks=[f"trunk=1-{last}"] * 2) as net:
        one, two = Tagged("vs0"), Tagged("vs1")
        # The network between both passes on VLAN 200 alone, one way.
        seen, counts = [], []
        while len(counts) < 5:
            probe = one.next(PROBES, at=0)
            r.require(probe[12:14] == b"\x81\x00", f"a probe without a tag: {probe[:20].hex()}")
            vlan = int.from_bytes(probe[14:16], "big")
            seen.append(vlan)
            r.require(len(seen) < 5 * last, f"no probe in VLAN {last}, or too few: {counts} of {len(seen)}")
            if vlan == last:
                two.send(probe)
                counts.append(len(seen))
        r.require(set(seen) == set(range(1, last + 1)), f"no probe in VLANs {set(range(1, last + 1)) - set(seen)}")
        # The first one may be part of its turn.
        between = [after - before for before, after in zip(counts, counts[1:])]
        r.require(all(count <= turn + 1 for count in between), f"probes until VLAN {last} has the next one: {between}")
        r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
        ports = net.port("u0"), net.port("u1")
        r.require((ports[0]["loops"], ports[1]["loops"]) == (0, 1), f"{ports}")
        one.close()
        two.close()


def host(rig):
    """While two uplinks make a loop the guest reaches each address of the host, and the host reaches the guest."""
    with Net(rig, "host", "", uplinks=["", ""]) as net:
        try:
            for k in range(2):
                n.ip("link", "add", f"br{k}", "address", f"02:00:00:00:00:f{k}", "type", "bridge")
                n.ip("link", "set", f"vs{k}", "master", f"br{k}")
                n.ip("link", "set", f"br{k}", "up")
            # Those of both bridges and both taps; nobody has sent a frame yet.
            r.wait_for("the host's addresses", lambda: net.status()["nets"][0]["addresses"] == 4)
            n.ip("link", "add", "vx0", "type", "veth", "peer", "name", "vx1")
            for k in range(2):
                n.ip("link", "set", f"vx{k}", "master", f"br{k}", "up")
            r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
            card, hosts = net.card(0), [f.Host(f"br{k}") for k in range(2)]
            # A tap's own address is its bridge's, too. Those of br1 are behind the uplink that is blocked.
            addresses = [(k, mac_of(f"{name}{k}")) for k in range(2) for name in ("br", "vs")]
            for number, (k, address) in enumerate(addresses):
                # The host begins: frames that went round before the loop was found have told its bridges wrong places.
                frame = f.frame(10 + number, 200, ALL if number == 0 else A, address)
                hosts[k].send(frame)
                r.require(got(card, f"the host's frame from {text(address)}") == frame, "another frame came")
                frame = f.frame(number, 200, address, A)
                card.transmit(frame)
                r.require(hosts[k].receive(A) == frame, f"the guest's frame to {text(address)} does not come")
                net.refused("foreign-source", 1, "c0", lambda source=address: card.transmit(f.frame(9, 200, ALL, source)))
            # To all: once to the guest, and what comes to the blocked uplink is counted.
            for k in range(2):
                before = net.drops("u1").get("loop", 0)
                frame = f.frame(net.mark(), 200, ALL, addresses[2 * k][1])
                hosts[k].send(frame)
                r.require(got(card, "the host's frame to all") == frame, "it comes twice, or another one comes")
                r.wait_for("a count of it", lambda b=before: net.drops("u1").get("loop", 0) > b)
            frame = f.frame(net.mark(), 200, A, addresses[0][1])
            hosts[0].send(frame)
            r.require(got(card, "the host's next frame") == frame, "a frame to all came twice")
            r.require(net.port("u1")["state"] == "blocked", "the loop is not there any more")
            for each in hosts:
                each.close()
        finally:
            for link in ("vx0", "br0", "br1"):
                r.run([r.tool("ip", "iproute2"), "link", "del", link], check=False)


def mac_of(ifname):
    with open(f"/sys/class/net/{ifname}/address") as file:
        return bytes.fromhex(file.read().strip().replace(":", ""))


def tests(rig):
    rig.test("net: ports: only an export's own address leaves it", lambda: sources(rig))
    rig.test("net: ports: a guest with many addresses", lambda: stations(rig))
    rig.test("net: ports: frames for bridges, and from nobody", lambda: reserved(rig))
    rig.test("net: ports: VLANs", lambda: vlans(rig))
    for kind in o.KINDS:
        rig.test(f"net: ports: {kind.name} with tags added and removed", lambda k=kind: offloads(rig, k))
    rig.test("net: ports: isolated ones", lambda: isolated(rig))
    rig.test("net: ports: frames longer than an MTU", lambda: lengths(rig))
    rig.test("net: ports: a checksum within the addresses", lambda: sums(rig))
    rig.test("net: ports: a frame that is changed while it waits", lambda: changed(rig))
    rig.test("net: ports: an uplink with VLANs", lambda: uplink(rig))
    rig.test("net: ports: two uplinks that make a loop", lambda: loop(rig))
    rig.test("net: ports: a loop in one VLAN of many", lambda: loop_in_one_vlan(rig))
    rig.test("net: ports: the host while two uplinks make a loop", lambda: host(rig))
